"""Reject files: in the order of the input, and of this run only."""

import json

import apache_beam as beam
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from tests.fakes import rejects as read_rejects
from transforms import rejects
from transforms.records import MAX_RAW, Reject


def write(output, found):
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        pipeline | beam.Create(found) | rejects.WriteRejects(str(output))


def reject(position, source="a.jsonl", record="{}"):
    return Reject(source, position, f"{source}:{position}", "read", "a reason", record)


def test_rejects_stand_in_the_order_of_the_input_in_files_of_bounded_length(tmp_path, monkeypatch):
    monkeypatch.setattr(rejects, "_RECORDS_PER_FILE", 4)
    write(tmp_path, [reject(position) for position in (9, 2, 3, 1, 4)])
    assert [row["position"] for row in read_rejects(tmp_path)] == [1, 2, 3, 4, 9]
    assert len(list(tmp_path.glob("rejects/*.jsonl"))) == 3


def test_a_hostile_file_name_gives_no_path_and_a_long_record_is_cut(tmp_path):
    write(tmp_path / "out", [reject(1, "../../x.jsonl", "x" * 20_000)])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (row,) = read_rejects(tmp_path / "out")
    assert row["record"] == "x" * MAX_RAW and row["source"] == "../../x.jsonl"


def test_the_rejects_of_the_run_before_are_cleared_and_those_of_shards_stay(tmp_path):
    write(tmp_path, [reject(1)])
    (tmp_path / rejects.path_of("a" * 20)).write_text(json.dumps({"id": "kept"}) + "\n")
    rejects.clear_input_rejects(str(tmp_path))
    assert [row["id"] for row in read_rejects(tmp_path)] == ["kept"]
