"""Whole files, local or on Cloud Storage, such that nobody ever sees half of one.

Locally: a temporary file in `OUT/.tmp`, fsync, rename. On Cloud Storage an upload is atomic by itself (see `gcs`), and
there is no rename at all.
"""

import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transforms import gcs

TEMPORARY = ".tmp"
_SECONDS_TO_WAIT = 60.0


def is_local(path: str) -> bool:
    """Whether the path names a file of this machine and not an object, such as gs://bucket/name."""
    return not re.match(r"[a-z][a-z0-9+.-]*://", path)


def join(folder: str, *names: str) -> str:
    """The path of a file below a folder or a bucket."""
    return "/".join((folder.rstrip("/"), *names))


def write_file(output: str, name: str, data: bytes) -> None:
    """Writes the file `name`, relative to the folder `output`; it appears whole or not at all, also when written twice.

    Raises:
      OSError: for instance a full disk; nothing is left behind then.
    """
    path = join(output, name)
    if is_local(output):
        _write_local(output, Path(path), data)
    else:
        gcs.write(_object(path), data)


def _write_local(output: str, path: Path, data: bytes) -> None:
    # On the same file system as the target, or the rename would be a copy.
    temporary = Path(output, TEMPORARY, uuid.uuid4().hex)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_durable(output: str, folder: str) -> None:
    """Waits until the names of the files in a folder are on the disk; after a power cut a rename alone may be lost."""
    path = join(output, folder)
    if is_local(output) and Path(path).is_dir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_file(path: str) -> bytes:
    """The bytes of a file as they are: nothing is decompressed.

    Raises:
      OSError: if it does not exist or cannot be read.
    """
    return Path(path).read_bytes() if is_local(path) else gcs.read_bytes(_object(path))


def list_files(output: str, folder: str) -> Iterator[str]:
    """Names, sorted, of the files that lie directly in a folder of the output; none if there is no such folder."""
    yield from _children(join(output, folder))[0]


def list_folders(output: str, folder: str) -> Iterator[str]:
    """Names, sorted, of the folders that lie directly in a folder of the output."""
    yield from _children(join(output, folder))[1]


def _children(path: str) -> tuple[list[str], list[str]]:
    if not is_local(path):
        return gcs.children(_object(path))
    if not Path(path).is_dir():
        return [], []
    with os.scandir(path) as entries:
        kinds = [(entry.name, entry.is_dir()) for entry in entries]
    return sorted(name for name, is_dir in kinds if not is_dir), sorted(name for name, is_dir in kinds if is_dir)


def delete_files(output: str, names: list[str]) -> None:
    """Deletes files, named relative to the output; one that is gone already is no error."""
    for name in names:
        path = join(output, name)
        if is_local(path):
            Path(path).unlink(missing_ok=True)
        else:
            gcs.delete(_object(path))


@contextmanager
def writing(output: str, alone: bool = False) -> Iterator[None]:
    """Held while the files of a shard are written, and with `alone` while leftovers are cleared away.

    A worker may live on for a moment when the run that it belonged to was killed. Were leftovers cleared while it
    writes a shard, it would commit one of which files are missing. Local only: on Cloud Storage nothing is cleared.

    Raises:
      OSError: if others hold it for longer than a shard can take.
    """
    if not is_local(output):
        yield
        return
    Path(output).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _SECONDS_TO_WAIT
        while not _locked(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise OSError(f"{output}: another process keeps writing there")
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system that locks no folders, as some on the network
    return True


def _object(path: str) -> str:
    if not gcs.is_object(path):
        raise OSError(f"{path}: an output is a local folder or gs://bucket/folder")
    return path
