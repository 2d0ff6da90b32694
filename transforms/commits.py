"""The commit record: a shard counts when this file exists, and not before.

It is written after everything else of its shard, holds all that resuming and accounting need, and no time or machine,
so that a shard made again gives the same bytes.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice

from transforms import storage

FOLDER = "commits"
_READERS = 16


class CommitError(ValueError):
    """A commit record that is not one: the output was damaged or edited."""


@dataclass(frozen=True)
class CommittedImage:
    """An image that is in the output, with the sha256 and the size in bytes of its file."""

    key: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class CommittedReject:
    """A request that was tried and gave no image."""

    key: str
    reason: str


@dataclass(frozen=True)
class Commit:
    """What became of every request of one shard, in the shard's order."""

    shard: str
    images: tuple[CommittedImage, ...]
    rejected: tuple[CommittedReject, ...]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def path_of(shard: str) -> str:
    """Where a shard's commit record stands, relative to the output."""
    return f"{FOLDER}/{shard}.json"


def parse_commit(path: str, data: bytes) -> Commit:
    """Reads a commit record back.

    Raises:
      CommitError: if anything in it is not as `Commit.to_json` writes it; guessing here would lose or repeat images.
    """
    try:
        fields = json.loads(data)
        commit = Commit(
            shard=fields.pop("shard"),
            images=tuple(CommittedImage(**image) for image in fields.pop("images")),
            rejected=tuple(CommittedReject(**reject) for reject in fields.pop("rejected")),
        )
        keys = [image.key for image in commit.images] + [reject.key for reject in commit.rejected]
        complete = (
            not fields
            and path.endswith(path_of(commit.shard))
            and all(isinstance(key, str) and len(key) == 32 for key in keys)
            and len(set(keys)) == len(keys)
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CommitError(_broken(path)) from error
    if not complete:
        raise CommitError(_broken(path))
    return commit


def list_commits(output: str) -> Iterator[str]:
    """Paths of the commit records in an output, in the order of shard names."""
    for name in storage.list_files(output, FOLDER):
        if name.endswith(".json"):
            yield storage.join(output, FOLDER, name)


def read_commit(path: str) -> Commit:
    """The commit record at a path."""
    return parse_commit(path, storage.read_file(path))


def read_commits(output: str) -> Iterator[Commit]:
    """The commit records of an output in the order of `list_commits`; only a few are in memory at a time."""
    paths = list_commits(output)
    # Several at a time, because on Cloud Storage one takes tens of milliseconds of waiting.
    with ThreadPoolExecutor(_READERS) as pool:
        while some := list(islice(paths, _READERS * 4)):
            yield from pool.map(read_commit, some)


def _broken(path: str) -> str:
    return f"{path} is not a commit record of this program: delete it, and its shard is made again"
