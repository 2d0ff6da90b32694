"""The commit record says exactly what it was told, or that it is broken."""

import json

import pytest

from transforms import storage
from transforms.commits import (
    Commit,
    CommitError,
    CommittedImage,
    CommittedReject,
    parse_commit,
    path_of,
    read_commits,
)

KEY, OTHER = "a" * 32, "b" * 32
COMMIT = Commit("f" * 20, (CommittedImage(KEY, "0" * 64, 9),), (CommittedReject(OTHER, "not finite"),))


def test_a_commit_reads_back_as_it_was_written(tmp_path):
    output = str(tmp_path)
    assert list(read_commits(output)) == []
    storage.write_file(output, path_of(COMMIT.shard), COMMIT.to_json())
    storage.write_file(output, "commits/.hidden.tmp", b"half")
    assert list(read_commits(output)) == [COMMIT]


def _changed(**changes):
    return json.dumps({**json.loads(COMMIT.to_json()), **changes}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        COMMIT.to_json()[:-20],
        _changed(more=1),
        _changed(shard="e" * 20),
        _changed(images=[{"key": KEY}]),
        _changed(images=[{"key": 5, "sha256": "", "bytes": 1}]),
        _changed(images=None),
        _changed(rejected=[{"key": KEY, "reason": ""}]),
    ],
)
def test_a_broken_commit_stops_the_run_and_names_itself(data):
    with pytest.raises(CommitError, match=r"commits/f+\.json is not a commit record"):
        parse_commit(f"out/{path_of(COMMIT.shard)}", data)


def test_an_output_whose_name_is_a_pattern_is_only_itself(tmp_path):
    output = str(tmp_path / "run[1]*")
    storage.write_file(output, path_of(COMMIT.shard), COMMIT.to_json())
    storage.write_file(f"{output}-other", path_of("e" * 20), b"")
    assert list(read_commits(output)) == [COMMIT]
