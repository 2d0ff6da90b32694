"""`lightmill pack`: the images of an output, written again as tars or tables of any length.

The packed output is an output like any other: it has the recipe and commit records of its own, `verify` holds it to the
same contracts, and pack, started again, goes on from the last finished shard. Images are copied byte by byte.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from pipeline.lock import hold
from pipeline.options import UsageError
from pipeline.output import open_output, read_recipe
from transforms import commits, storage
from transforms.commits import Commit, CommittedImage, list_commits, read_commit, read_commits
from transforms.formats import FORMATS, OutputFormat
from transforms.leftovers import clear_leftovers
from transforms.metadata import dataset_card

# A committed image and the shard that it is in.
_Member = tuple[str, CommittedImage]


class PackError(RuntimeError):
    """The source is not what its commit records say; `verify` lists what is wrong with it."""


def pack(source: str, output: str, kind: str, samples_per_shard: int) -> int:
    """Packs the images of an output into another one, in one of `FORMATS`; returns their number.

    Shards are numbered in the order of the source's, so the same source gives the same bytes; one shard is in memory at
    a time. Rejects stay behind: a run of `generate` that goes on in the packed output tries them again.

    Raises:
      UsageError: if the source is no output, or the output holds something else.
      PackError: if an image or its row is missing or has changed.
    """
    recipe, stored = read_recipe(source)
    target = replace(stored, format=kind)
    open_output(output, recipe, target)
    with hold(output):
        return _pack(source, stored, output, target, samples_per_shard)


def _pack(source: str, stored: OutputFormat, output: str, target: OutputFormat, samples_per_shard: int) -> int:
    clear_leftovers(output)
    there = {path.rpartition("/")[2].removesuffix(".json"): path for path in list_commits(output)}
    images = 0
    for number, members in enumerate(_groups(source, samples_per_shard)):
        shard = f"{number:06d}"
        commit = Commit(shard, tuple(image for _, image in members), ())
        images += len(members)
        if shard not in there:
            _write(source, stored, output, target, commit, members)
        elif read_commit(there.pop(shard)) != commit:
            raise UsageError(f"{output} was packed from other images or in other lengths: take another --output")
    if there:
        raise UsageError(f"{output} holds shards that are not of {source}, such as {min(there)}")
    storage.write_file(output, "README.md", dataset_card(FORMATS[target.format].data_files).encode())
    return images


def _groups(source: str, length: int) -> Iterator[list[_Member]]:
    group: list[_Member] = []
    for commit in read_commits(source):
        for image in commit.images:
            group.append((commit.shard, image))
            if len(group) == length:
                yield group
                group = []
    if group:
        yield group


def _write(
    source: str, stored: OutputFormat, output: str, target: OutputFormat, commit: Commit, members: list[_Member]
) -> None:
    writer = FORMATS[target.format].writer(output, commit.shard)
    rows = []
    for shard, group in groupby(members, key=lambda member: member[0]):
        try:
            shard_rows, files = FORMATS[stored.format].read(source, shard)
            rows_of = {row["key"]: row for row in shard_rows}
            contents = dict(files)
        except (OSError, ValueError) as error:
            raise PackError(f"{source}: shard {shard} cannot be read: {error}") from error
        for _, image in group:
            name = image.key + stored.suffix
            row = rows_of.get(image.key)
            sha256 = hashlib.sha256(contents.get(name, b"")).hexdigest()
            if row is None or not sha256 == image.sha256 == row["sha256"]:
                raise PackError(f"{source}: {name} of shard {shard} or its row is missing or changed; see verify")
            writer.add(name, contents[name])
            rows.append(row)
    writer.close(rows)
    storage.write_file(output, commits.path_of(commit.shard), commit.to_json())
    storage.make_durable(output, commits.FOLDER)
