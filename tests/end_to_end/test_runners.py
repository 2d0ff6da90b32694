"""Beam's local runners all make the same pictures, with one model each."""

import pytest

from model_handlers import handler
from tests import portable
from tests.end_to_end import command


@pytest.mark.parametrize(
    "flags",
    [
        ("--runner=DirectRunner",),
        ("--direct_num_workers=2", "--direct_running_mode=multi_threading"),
    ],
    ids=["direct", "two threads"],
)
def test_every_local_runner_makes_the_same_pictures_with_one_model(
    flags, generate, jsonl, shuffled, expected, tmp_path, monkeypatch
):
    loads = []
    real = handler.load_programs
    monkeypatch.setattr(handler, "load_programs", lambda spec: loads.append(spec) or real(spec))
    generate(jsonl(shuffled), tmp_path / "out", "--images_per_shard=4", *flags)
    assert command.hashes(tmp_path / "out") == expected
    assert len(loads) == 1


def test_workers_that_are_processes_make_the_same_pictures(arguments, jsonl, shuffled, expected, tmp_path):
    flags = ("--direct_num_workers=2", "--direct_running_mode=multi_processing", "--images_per_shard=4")
    finished = command.run_process(*arguments(jsonl(shuffled), tmp_path / "out", *flags))
    assert finished.status == 0, finished.stderr
    assert command.hashes(tmp_path / "out") == expected


def test_a_job_server_with_a_worker_of_an_external_pool_makes_the_same_pictures(
    generate, jsonl, shuffled, expected, tmp_path
):
    with portable.workers("external") as flags:
        place = ("--device=cpu", "--devices_per_worker=1")
        generate(jsonl(shuffled), tmp_path / "out", "--images_per_shard=4", *place, *flags)
    assert command.hashes(tmp_path / "out") == expected
