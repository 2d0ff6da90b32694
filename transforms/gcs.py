"""Objects of Google Cloud Storage, written under preconditions, so that a request that is sent twice does no harm.

Every upload says which generation of the object it replaces, 0 for none. So the client may repeat it after any error:
if the first one was stored after all and only its answer was lost, the second is refused with 412, and a look at the
object tells that what stands there is ours.
"""

import base64
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache

from google.api_core.exceptions import GoogleAPIError, NotFound, PreconditionFailed
from google.auth.exceptions import GoogleAuthError
from google.cloud.storage import Client
from google.cloud.storage.retry import DEFAULT_RETRY

# Repeats 408, 429, 5xx and broken connections. Each wait is drawn at random, up to a limit that doubles.
_RETRY = DEFAULT_RETRY.with_delay(initial=0.5, maximum=30.0, multiplier=2.0).with_timeout(300.0)
_TIMEOUT = 60.0  # of one request, in seconds without a byte
# Another writer may come between a look at an object and the next upload; it writes the same, so this ends soon.
_ATTEMPTS = 10


@dataclass(frozen=True)
class Stored:
    """An object: what stands in it, which generation of it that is, and since when by the server's clock."""

    data: bytes
    generation: int
    updated: datetime


def _client() -> Client:
    return _client_of(os.environ.get("STORAGE_EMULATOR_HOST"))


@cache  # one for each process and, in tests, emulator
def _client_of(emulator: str | None) -> Client:
    return Client(project=None)


def is_object(path: str) -> bool:
    """Whether the path is one of this module's: gs://bucket/name."""
    return path.startswith("gs://")


def write(path: str, data: bytes) -> None:
    """Stores an object, whatever stood there.

    Raises:
      OSError: if the store cannot be reached or refuses, also after repeating.
    """
    generation = 0
    md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
    with _os_errors(path):
        for _ in range(_ATTEMPTS):
            if replace(path, data, generation) is not None:
                return
            current = _blob(path).bucket.get_blob(_name(path), retry=_RETRY, timeout=_TIMEOUT)
            if current is not None and current.md5_hash == md5:
                return
            generation = current.generation if current is not None else 0
    raise OSError(f"{path}: other programs keep writing it")


def replace(path: str, data: bytes, generation: int) -> int | None:
    """Stores an object if the generation that stands there is still this one; returns the new one, or None if not.

    None may also mean that this very request was stored and its answer lost; a look at the object tells.
    """
    blob = _blob(path)
    with _os_errors(path):
        try:
            blob.upload_from_string(
                data, "application/octet-stream", if_generation_match=generation, retry=_RETRY, timeout=_TIMEOUT
            )
        except PreconditionFailed:
            return None
    return int(blob.generation)


def read(path: str) -> Stored:
    """An object as it stands, with its checksum verified.

    Raises:
      FileNotFoundError: if there is none.
      OSError: if it cannot be read, also after repeating.
    """
    blob = _blob(path)
    with _os_errors(path):
        # With the generation of the metadata, or another writer could come in between.
        blob.reload(retry=_RETRY, timeout=_TIMEOUT)
        data = blob.download_as_bytes(raw_download=True, retry=_RETRY, timeout=_TIMEOUT)
    return Stored(data, int(blob.generation), blob.updated)


def read_bytes(path: str) -> bytes:
    """The bytes of an object, by one request; errors as of `read`."""
    with _os_errors(path):
        return _blob(path).download_as_bytes(raw_download=True, retry=_RETRY, timeout=_TIMEOUT)


def children(folder: str) -> tuple[list[str], list[str]]:
    """Names, sorted, of the objects directly in a "folder", and of the folders in it; what is below is not listed."""
    prefix = _name(folder).rstrip("/") + "/" if _name(folder).rstrip("/") else ""
    with _os_errors(folder):
        listing = _client().list_blobs(_bucket(folder), prefix=prefix, delimiter="/", retry=_RETRY, timeout=_TIMEOUT)
        files = sorted(blob.name.removeprefix(prefix) for blob in listing)
    folders = sorted(name.removeprefix(prefix).rstrip("/") for name in listing.prefixes)
    return [name for name in files if name], folders  # an object with the folder's own name is no file in it


def delete(path: str, generation: int | None = None) -> None:
    """Deletes an object; that it is gone already, or has another generation, is no error."""
    with _os_errors(path), suppress(NotFound, PreconditionFailed):
        _blob(path).delete(if_generation_match=generation, retry=_RETRY, timeout=_TIMEOUT)


def _bucket(path: str) -> str:
    return path.removeprefix("gs://").partition("/")[0]


def _name(path: str) -> str:
    return path.removeprefix("gs://").partition("/")[2]


def _blob(path: str):
    return _client().bucket(_bucket(path)).blob(_name(path))


@contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Errors of the client as what callers expect of files."""
    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(f"{path}: no such object") from error
    except (GoogleAPIError, GoogleAuthError) as error:
        raise OSError(f"{path}: {error}") from error
