"""A run that has nothing to do knows it at once, and one that has something to do is never taken for it."""

import pytest

from pipeline.report import write_report
from pipeline.unchanged import inputs_hash, shards_hash, still_finished
from tests.fakes import FakeHandler, run, write_jsonl
from transforms.counts import Counts, read_counts

RECORDS = [{"prompt": f"p{number}"} for number in range(5)] + [{"prompt": 42}]


@pytest.fixture
def output(tmp_path):
    run(write_jsonl(tmp_path / "a.jsonl", RECORDS), tmp_path / "out", FakeHandler(rejected=["p3"]))
    output = str(tmp_path / "out")
    inputs = inputs_hash([str(tmp_path / "a.jsonl")], None, None)
    write_report(output, {"seconds": 1.0, "inputs": inputs, "shards": shards_hash(output)}, fresh=True)
    return output


def test_a_run_with_nothing_to_do_has_the_counts_of_one_that_looked_at_every_record(output, tmp_path):
    inputs = inputs_hash([f"{tmp_path}/*.jsonl"], None, None)
    summary = still_finished(output, inputs, retry_rejected=False)
    shortened = read_counts(output)
    assert summary["counts"]["finished_before"] == 4 and Counts(**summary["counts"]) == shortened
    assert still_finished(output, inputs, retry_rejected=False)["counts"] == summary["counts"]
    run(tmp_path / "a.jsonl", output)
    assert read_counts(output) == shortened
    write_report(output)


def test_whatever_has_changed_makes_it_a_run(output, tmp_path):
    patterns = [str(tmp_path / "a.jsonl")]
    inputs = inputs_hash(patterns, None, None)
    assert inputs_hash(patterns, "caption", None) != inputs
    assert not still_finished(output, inputs, retry_rejected=True)
    assert not still_finished(output, None, retry_rejected=False)
    assert not still_finished(str(tmp_path), inputs, retry_rejected=False)
    write_jsonl(tmp_path / "a.jsonl", [*RECORDS[:-1], {"prompt": 43}])
    assert not still_finished(output, inputs_hash(patterns, None, None), retry_rejected=False)
    next((tmp_path / "out/commits").iterdir()).unlink()
    assert not still_finished(output, inputs, retry_rejected=False)
