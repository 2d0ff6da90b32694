"""Files appear whole or not at all."""

import errno
import os
import threading

import pytest

from transforms import storage


def test_a_file_replaces_the_one_before_and_leaves_nothing_else(tmp_path):
    for data in (b"one", b"two"):
        storage.write_file(str(tmp_path), "a/b.json", data)
    assert (tmp_path / "a/b.json").read_bytes() == b"two"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "a/b.json"]


def test_whoever_reads_the_old_file_meanwhile_keeps_it_whole(tmp_path):
    storage.write_file(str(tmp_path), "a.json", b"old")
    with (tmp_path / "a.json").open("rb") as reader:
        storage.write_file(str(tmp_path), "a.json", b"new")
        assert reader.read() == b"old"


def test_a_full_disk_leaves_the_old_file_and_no_half_of_the_new_one(tmp_path, monkeypatch):
    storage.write_file(str(tmp_path), "a.json", b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.write_file(str(tmp_path), "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"old"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "a.json"]


def test_only_folders_and_buckets_are_written(tmp_path):
    with pytest.raises(OSError, match="an output is a local folder or gs://bucket/folder"):
        storage.write_file("s3://bucket/out", "a", b"")


@pytest.mark.parametrize(("held", "wanted"), [(False, True), (True, False), (True, True)])
def test_leftovers_are_cleared_only_while_no_shard_is_being_written(tmp_path, monkeypatch, held, wanted):
    monkeypatch.setattr(storage, "_SECONDS_TO_WAIT", 0.2)
    with storage.writing(str(tmp_path), alone=held):
        refused = pytest.raises(OSError, match="another process keeps writing there")
        with refused, storage.writing(str(tmp_path), alone=wanted):
            pass
    monkeypatch.setattr(storage, "_SECONDS_TO_WAIT", 60)
    held = storage.writing(str(tmp_path))
    held.__enter__()
    threading.Timer(0.2, held.__exit__, (None, None, None)).start()
    with storage.writing(str(tmp_path), alone=True):
        pass


def test_many_shards_are_written_at_once(tmp_path):
    with storage.writing(str(tmp_path)), storage.writing(str(tmp_path)):
        pass
