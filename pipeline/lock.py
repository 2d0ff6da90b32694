"""One run at a time in an output: a lock that a killed run does not leave behind."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pipeline.options import UsageError
from transforms import gcs, storage

FILE = ".lock"
# Of a lock on Cloud Storage, which has to be renewed, since nobody lets go of it for a run that was killed.
_RENEW_SECONDS = 30.0
_STALE_AFTER = timedelta(seconds=300)

log = logging.getLogger("lightmill")


@contextlib.contextmanager
def hold(output: str) -> Iterator[None]:
    """Makes sure that no other run writes into the output meanwhile.

    A local lock is the operating system's and goes with the process, however it ends. On Cloud Storage it is an object
    that is renewed twice a minute. Left by a run that was killed, it is taken over at once by a run on the same
    machine, and by others when it has not been renewed for five minutes.

    Raises:
      UsageError: if another run holds it.
    """
    with _local(output) if storage.is_local(output) else _remote(storage.join(output, FILE)):
        yield


@contextlib.contextmanager
def _local(output: str) -> Iterator[None]:
    with Path(output, FILE).open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UsageError(f"another run is writing into {output} ({_describe(file.read())})") from None
        except OSError as error:
            log.warning("%s: cannot be locked (%s): do not start a second run there", output, error)
        file.truncate(0)
        file.write(_owner())
        file.flush()
        yield
        file.truncate(0)


@contextlib.contextmanager
def _remote(path: str) -> Iterator[None]:
    lock = _ObjectLock(path)
    lock.acquire()
    done = threading.Event()
    thread = threading.Thread(target=lock.renew_until, args=(done,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        gcs.delete(path, lock.generation)


class _ObjectLock:
    """An object that is ours as long as its generation is the one that we wrote last."""

    def __init__(self, path: str):
        self._path = path
        self._content = _owner()
        self.generation = 0

    def acquire(self) -> None:
        if self._replace(0):
            return
        try:
            held = gcs.read(self._path)
        except FileNotFoundError:
            held = None  # its run ended just now
        if held and not _is_stale(held):
            raise UsageError(
                f"another run is writing, by its lock {self._path} ({_describe(held.data)}); if it was killed, this "
                f"ends at {(held.updated + _STALE_AFTER).astimezone():%H:%M:%S}"
            )
        if not self._replace(held.generation if held else 0):
            raise UsageError(f"another run has just begun to write, by its lock {self._path}")

    def renew_until(self, done: threading.Event) -> None:
        while not done.wait(_RENEW_SECONDS):
            try:
                if not self._replace(self.generation):
                    log.error("%s was taken by another run; both write the same files, stop one of them", self._path)
                    return
            except OSError as error:
                log.warning("%s cannot be renewed: %s", self._path, error)

    def _replace(self, generation: int) -> bool:
        written = gcs.replace(self._path, self._content, generation)
        if written is None:
            # Refused, or stored by a request of which the answer was lost.
            with contextlib.suppress(FileNotFoundError):
                stored = gcs.read(self._path)
                written = stored.generation if stored.data == self._content else None
        self.generation = written or self.generation
        return written is not None


def _owner() -> bytes:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": now}).encode() + b"\n"


def _describe(content: bytes) -> str:
    try:
        owner = json.loads(content)
        return f"process {owner['process']} on {owner['host']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "it does not say which"


def _is_stale(held: gcs.Stored) -> bool:
    if datetime.now(UTC) - held.updated > _STALE_AFTER:
        return True
    try:
        owner = json.loads(held.data)
        return owner["host"] == socket.gethostname() and not _runs(int(owner["process"]))
    except (ValueError, KeyError, TypeError):
        return False


def _runs(process: int) -> bool:
    # In a container every first process has the same number: one that is ours is not another's.
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
