"""Files appear whole or not at all."""

import errno
import os

import pytest
from apache_beam.io.filesystems import FileSystems

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


class _Cloud:
    """Answers uploads by the errors that it is given, then takes them."""

    def __init__(self, *errors):
        self.errors, self.objects = list(errors), {}

    def create(self, path, **_):
        cloud = self

        class Upload:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                return None

            def write(self, data):
                if cloud.errors:
                    raise cloud.errors.pop(0)
                cloud.objects[path] = data

        return Upload()


class _StatusError(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.code = code


@pytest.fixture
def waits(monkeypatch):
    seconds = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def test_an_upload_is_repeated_while_the_store_asks_for_patience(monkeypatch, waits):
    cloud = _Cloud(_StatusError(429), _StatusError(429), _StatusError(503), ConnectionResetError())
    monkeypatch.setattr(FileSystems, "create", cloud.create)
    storage.write_file("gs://bucket/out/", "commits/a.json", b"data")
    assert cloud.objects == {"gs://bucket/out/commits/a.json": b"data"}
    assert waits == [1, 2, 4, 8]


@pytest.mark.parametrize(("errors", "tries"), [([_StatusError(403)], 1), ([_StatusError(503)] * 9, 5)])
def test_an_upload_that_cannot_succeed_fails(monkeypatch, waits, errors, tries):
    cloud = _Cloud(*errors)
    monkeypatch.setattr(FileSystems, "create", cloud.create)
    with pytest.raises(_StatusError):
        storage.write_file("gs://bucket/out", "a", b"data")
    assert len(waits) == tries - 1 and not cloud.objects
