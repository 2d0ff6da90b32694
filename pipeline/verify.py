"""`lightmill verify`: an output held against its contracts, by what is there and not by what a run said of it.

Every commit record is held against its rows and its pictures, every row against the recipe, every file against the
commit records, and the counts of the last run against all of them. Nothing is changed.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any

from PIL import Image

from model_handlers.recipe import ImageRequest, Recipe, Settings, digest
from pipeline.output import read_recipe
from pipeline.report import Inventory, reconcile
from transforms import counts, rejects, storage
from transforms.commits import Commit, CommitError, list_commits, path_of, read_commit
from transforms.counts import AccountingError, read_counts
from transforms.formats import FORMATS, Format, OutputFormat
from transforms.metadata import SCHEMA

_THREADS = 8


def verify(output: str) -> Iterator[str]:
    """Gives a line for each problem; none if the output is whole.

    The keys of all images are in memory, about 100 MB a million.

    Raises:
      UsageError: if there is no readable recipe.json; without it nothing can be recomputed.
    """
    recipe, output_format = read_recipe(output)
    kind = FORMATS[output_format.format]
    committed: set[str] = set()
    images: set[bytes] = set()
    rejected: dict[str, list[str]] = {}
    shards = total = size = 0

    def check(path: str) -> tuple[Commit | None, list[str]]:
        try:
            commit = read_commit(path)
        except (CommitError, OSError) as error:
            return None, [str(error)]
        return commit, list(_check_shard(output, commit, recipe, output_format))

    with ThreadPoolExecutor(_THREADS) as pool:
        for path, (commit, problems) in _in_order(pool, check, list_commits(output)):
            yield from problems
            committed.add(PurePosixPath(path).stem)
            if not commit:
                continue
            shards, total = shards + 1, total + len(commit.images)
            for image in commit.images:
                size += image.bytes
                key = bytes.fromhex(image.key)
                if key in images:
                    yield f"{path_of(commit.shard)}: {image.key} is an image in another shard too"
                images.add(key)
            for reject in commit.rejected:
                rejected.setdefault(reject.key, []).append(commit.shard)
    # What a later run made after all is no reject any more.
    open_rejects = {key: where for key, where in rejected.items() if bytes.fromhex(key) not in images}
    yield from _check_rejects(output, open_rejects, set(rejected) - set(open_rejects), committed)
    yield from _check_strays(output, kind, committed)
    yield from _check_counts(output, Inventory(shards, total, size, len(open_rejects)))


def _in_order(pool: ThreadPoolExecutor, function, items: Iterator[str]):
    waiting: list = []
    for item in items:
        waiting.append((item, pool.submit(function, item)))
        if len(waiting) > 2 * _THREADS:
            first, future = waiting.pop(0)
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def _check_shard(output: str, commit: Commit, recipe: Recipe, output_format: OutputFormat) -> Iterator[str]:
    """Rows and pictures of one shard against its commit record."""
    if not commit.images:
        return
    where = f"shard {commit.shard}"
    try:
        rows, files = FORMATS[output_format.format].read(output, commit.shard)
    except (OSError, ValueError) as error:
        yield f"{where}: cannot be read: {error}"
        return
    rows_of: dict[str, dict] = {}
    for row in rows:
        row = row if isinstance(row, dict) else {}  # of a file that somebody edited
        problem = _check_row(row, recipe)
        if problem or row.get("key") in rows_of:
            yield f"{where}: row {row.get('key')}: {problem or 'stands twice'}"
        if isinstance(row.get("key"), str):
            rows_of[row["key"]] = row
    committed = {image.key: image for image in commit.images}
    yield from (f"{where}: {key} is committed and has no row" for key in sorted(committed.keys() - rows_of.keys()))
    yield from (f"{where}: row {key} is not committed" for key in sorted(rows_of.keys() - committed.keys()))
    missing = {key + output_format.suffix for key in committed}
    try:
        for name, data in files:
            key = name.removesuffix(output_format.suffix)
            if name not in missing:
                yield f"{where}: {name} is a file that is not committed"
                continue
            missing.discard(name)
            found = hashlib.sha256(data).hexdigest()
            if (found, len(data)) != (committed[key].sha256, committed[key].bytes):
                yield f"{where}: {name} has other bytes than were committed"
            elif key in rows_of:
                yield from (f"{where}: {name} {what}" for what in _check_picture(data, found, rows_of[key], name))
    except (OSError, ValueError) as error:
        yield f"{where}: cannot be read: {error}"
        return
    yield from (f"{where}: {name} is committed and missing" for name in sorted(missing))


_OF_REQUEST = {field.name for field in fields(ImageRequest)}


def _check_row(row: dict, recipe: Recipe) -> str:
    """Recomputes a row's digest and key from its other columns; "" if they agree."""
    if set(row) != set(SCHEMA):
        return f"has not the columns of the schema but {sorted(set(row) ^ set(SCHEMA))}"
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    if not row["negative_prompt_set"]:
        values["negative_prompt"] = None
    try:
        values["settings"] = Settings.of(json.loads(row["settings"]))
        request = ImageRequest(**{name: values[name] for name in _OF_REQUEST})
        of_columns = digest(request, recipe)
    except (ValueError, TypeError, AttributeError):
        return "has settings that are none"
    if row["scheduler"] != recipe.scheduler or of_columns != row["digest"]:
        return "does not have the digest of its columns"
    return "" if request.key == row["key"] else "does not have the key of its id, image index and digest"


def _check_picture(data: bytes, sha256: str, row: dict, name: str) -> Iterator[str]:
    if row["sha256"] != sha256:
        yield "has another sha256 than its row"
    if row["file_name"] != name:
        yield f"is called {row['file_name']!r} in its row"
    try:
        with Image.open(io.BytesIO(data)) as picture:
            if picture.size != (row["width"], row["height"]):
                yield f"has {picture.size[0]} x {picture.size[1]} pixels, its row {row['width']} x {row['height']}"
    except OSError:
        yield "is no image"


def _check_rejects(output: str, rejected: dict[str, list[str]], made: set[str], committed: set[str]) -> Iterator[str]:
    """Lists of rejects against commit records: each open reject stands in the list of its shards, and no other."""
    wanted = {(shard, key) for key, shards in rejected.items() for shard in shards}
    for name in storage.list_files(output, rejects.FOLDER):
        shard = PurePosixPath(name).stem
        if name.startswith(rejects.INPUT):
            continue  # made anew by every run, and counted there
        if shard not in committed:
            yield f"{rejects.FOLDER}/{name} belongs to no shard"
            continue
        try:
            lines = storage.read_file(storage.join(output, rejects.FOLDER, name)).decode().splitlines()
            keys = {json.loads(line)["key"] for line in lines}
        except (ValueError, KeyError, TypeError, OSError) as error:
            yield f"{rejects.FOLDER}/{name} cannot be read: {error}"
            continue
        for key in sorted(keys):
            if (shard, key) not in wanted:
                # The report of a run drops them; of a run that was killed before its report they may still stand.
                yield f"{rejects.FOLDER}/{name}: {key} " + ("has been made" if key in made else "is not rejected")
        wanted -= {(shard, key) for key in keys}
    yield from (f"{rejects.path_of(shard)}: {key} is rejected and not listed" for shard, key in sorted(wanted))


def _check_strays(output: str, kind: Format, committed: set[str]) -> Iterator[str]:
    for shard in kind.shards(output):
        if shard not in committed:
            yield f"{kind.folder}: files of {shard}, which was not committed"
    for other in {each.folder for each in FORMATS.values()} - {kind.folder}:
        if any(True for _ in (*storage.list_files(output, other), *storage.list_folders(output, other))):
            yield f"{other} does not belong to an output of this format"
    if any(True for _ in storage.list_files(output, storage.TEMPORARY)):
        yield f"{storage.TEMPORARY} holds files of a run that was killed, or that still runs"


def _check_counts(output: str, inventory: Inventory) -> Iterator[str]:
    if counts.FILE not in storage.list_files(output, ""):
        return  # no run has gone through to its end yet
    try:
        reconcile(read_counts(output), inventory)
    except (AccountingError, ValueError, TypeError, OSError) as error:
        yield f"{counts.FILE}: {error}"
