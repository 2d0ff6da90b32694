"""A picture is a function of its record, the recipe and the checkpoint, and of nothing else."""

import pytest

from tests.end_to_end import command
from tests.end_to_end.conftest import RECORDS


def test_every_record_gives_a_picture_of_its_own(expected):
    assert len(set(expected.values())) == len(expected) == len(RECORDS)


def test_the_order_of_the_records_changes_no_picture(generate, jsonl, shuffled, expected, tmp_path):
    generate(jsonl(shuffled), tmp_path / "out")
    assert command.hashes(tmp_path / "out") == expected


@pytest.mark.parametrize("devices", [2, 8])
def test_the_number_of_devices_changes_no_picture(devices, arguments, jsonl, shuffled, expected, tmp_path):
    finished = command.run_process(*arguments(jsonl(shuffled), tmp_path / "out"), devices=devices)
    assert finished.status == 0, finished.stderr
    assert f"batch {4 * devices} on {devices} cpu device(s)" in finished.stderr
    assert [line for line in finished.stderr.splitlines() if not line.startswith("lightmill: ")] == []
    assert command.hashes(tmp_path / "out") == expected


def test_weights_that_are_divided_or_wait_on_the_host_change_no_picture(arguments, jsonl, expected, tmp_path):
    flags = ("--mesh=fsdp=2", "--offload_encoders")
    finished = command.run_process(*arguments(jsonl(RECORDS), tmp_path / "out", *flags), devices=4)
    assert finished.status == 0, finished.stderr
    assert "batch 16 on 4 cpu device(s)" in finished.stderr
    assert command.hashes(tmp_path / "out") == expected


def test_other_neighbours_change_no_picture(generate, jsonl, expected, tmp_path):
    strangers = [{"id": f"s{number}", "prompt": "a cat", "num_inference_steps": 7} for number in range(9)]
    generate(jsonl(strangers[:5] + RECORDS[1::2] + strangers[5:]), tmp_path / "out")
    found = command.hashes(tmp_path / "out")
    assert {who: sha256 for who, sha256 in found.items() if who in expected} == {
        (record["id"], 0): expected[record["id"], 0] for record in RECORDS[1::2]
    }


def test_a_record_alone_gives_the_same_picture_as_among_others(generate, jsonl, expected, tmp_path):
    generate(jsonl(RECORDS[13:14]), tmp_path / "out")
    assert command.hashes(tmp_path / "out") == {("r13", 0): expected["r13", 0]}
