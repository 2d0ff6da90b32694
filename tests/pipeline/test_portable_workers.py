"""In processes of their own, workers keep the contracts, have one model each, and may be killed."""

import json

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from pipeline.report import write_report
from tests import portable
from tests.fakes import rejects, run, tree, write_jsonl

RECORDS = [
    *({"id": f"r{number}", "prompt": f"p{number}"} for number in range(30)),
    {"id": "r0", "prompt": "p0"},  # a duplicate
    {"seed": 1},  # without a prompt
]


# Beam's own threads raise as the worker goes, each in its turn.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", portable.KINDS)
def test_a_killed_worker_fails_the_run_and_the_next_one_ends_as_if_nothing_had_happened(kind, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    whole, output = tmp_path / "whole", tmp_path / "out"
    run(source, whole, portable.NotingHandler(tmp_path, rejected=["p7"]))
    write_report(str(whole), fresh=True)
    portable.loads(tmp_path)

    def attempt(kill: bool) -> None:
        handler = portable.NotingHandler(tmp_path, kill, rejected=["p7"])
        run(source, output, handler, runner=flags[0].partition("=")[2], options=PipelineOptions(flags[1:]))

    with portable.workers(kind) as flags:
        with pytest.raises(RuntimeError):
            attempt(kill=True)
        committed = set(output.glob("commits/*.json"))
        assert 2 <= len(committed) < len(list(whole.glob("commits/*.json")))
        assert_one_model_a_worker(tmp_path)
        attempt(kill=False)
    assert_one_model_a_worker(tmp_path)
    write_report(str(output))
    assert tree(output) == tree(whole)
    counts = json.loads((output / "summary.json").read_text())["counts"]
    assert counts["records_read"] == len(RECORDS) and counts["duplicates"] == 1
    assert counts["finished_before"] >= len(committed) and counts["written"] > 0
    assert {reject["id"] for reject in rejects(output)} == {"r7", "a.jsonl:32"}


def assert_one_model_a_worker(folder) -> None:
    processes = portable.loads(folder)
    assert processes and len(processes) == len(set(processes))
