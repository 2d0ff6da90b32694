"""Whole files, local or on Cloud Storage, such that nobody ever sees half of one.

Locally: a temporary file in `OUT/.tmp`, fsync, rename. On Cloud Storage an upload is atomic by itself, and there is no
rename at all, so the same design works on every object store.
"""

import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

TEMPORARY = ".tmp"
# What Cloud Storage answers when it wants the same request again a little later.
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_ATTEMPTS = 5


def is_local(path: str) -> bool:
    """Whether the path names a file of this machine and not an object, such as gs://bucket/name."""
    return FileSystems.get_scheme(path) is None


def join(folder: str, *names: str) -> str:
    """The path of a file below a folder or a bucket."""
    return "/".join((folder.rstrip("/"), *names))


def write_file(output: str, name: str, data: bytes) -> None:
    """Writes the file `name`, relative to the folder `output`; it appears whole or not at all, also when written twice.

    Raises:
      OSError: locally, for instance a full disk; nothing is left behind then.
    """
    path = join(output, name)
    if is_local(output):
        _write_local(output, Path(path), data)
    else:
        _upload(path, data)


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


def _upload(path: str, data: bytes) -> None:
    # Repeating is safe: an upload replaces the object by the same bytes.
    for attempt in range(_ATTEMPTS):
        try:
            with FileSystems.create(path, compression_type=CompressionTypes.UNCOMPRESSED) as file:
                file.write(data)
            return
        except Exception as error:
            transient = isinstance(error, ConnectionError | TimeoutError) or (
                getattr(error, "code", None) in _TRANSIENT_STATUS
            )
            if not transient or attempt == _ATTEMPTS - 1:
                raise
            time.sleep(2**attempt)


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
      OSError: if it does not exist or cannot be read (Beam's own errors are OSErrors too).
    """
    if is_local(path):
        return Path(path).read_bytes()
    with FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED) as file:
        return file.read()


def list_files(output: str, folder: str) -> Iterator[str]:
    """Names, sorted, of the files that lie directly in a folder of the output; none if there is no such folder."""
    path = join(output, folder)
    if is_local(output):
        # Not by Beam, which walks all that lies below a folder, here every picture, to list what is in it.
        if Path(path).is_dir():
            with os.scandir(path) as entries:
                yield from sorted(entry.name for entry in entries if entry.is_file())
        return
    (match,) = FileSystems.match([re.sub(r"[\[*?]", r"[\g<0>]", path) + "/*"])
    yield from sorted(metadata.path.rsplit("/", 1)[1] for metadata in match.metadata_list)


def list_folders(output: str, folder: str) -> Iterator[str]:
    """Names, sorted, of the folders that lie directly in a folder of the output."""
    path = join(output, folder)
    if is_local(output):
        if Path(path).is_dir():
            with os.scandir(path) as entries:
                yield from sorted(entry.name for entry in entries if entry.is_dir())
        return
    (match,) = FileSystems.match([re.sub(r"[\[*?]", r"[\g<0>]", path) + "/**"])
    below = (metadata.path.removeprefix(path).lstrip("/") for metadata in match.metadata_list)
    yield from sorted({name.split("/")[0] for name in below if "/" in name})


def delete_files(output: str, names: list[str]) -> None:
    """Deletes files, named relative to the output; one that is gone already is no error."""
    if is_local(output):
        for name in names:
            Path(join(output, name)).unlink(missing_ok=True)
    elif names:
        # An object that another worker deleted first is as gone as we want it.
        with suppress(FileNotFoundError):
            FileSystems.delete([join(output, name) for name in names])
