"""Which pictures and rejects of an output a page shows: few of however many there are."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from transforms import rejects, storage
from transforms.commits import Commit, list_commits, read_commit
from transforms.formats import FORMATS, Folder, OutputFormat
from transforms.pictures import thumbnail

MAX_PICTURES = 200
MAX_REJECTS = 50
# Of shards that are one file each, which has to be read whole for one picture of it.
_MAX_FILES = 20
# About 10 KB each, so 3 MB for a page of them.
_THUMBNAIL_SIDE = 256
_THREADS = 4


@dataclass(frozen=True)
class Picture:
    """A picture on the page.

    Attributes:
      row: its metadata.
      thumbnail: as a data: address, so that the page can be taken away alone; "" if the file cannot be read.
      link: to the picture itself, relative to the output; "" if it is not a file of its own.
    """

    row: dict[str, Any]
    thumbnail: str
    link: str


def sample(output: str, output_format: OutputFormat, limit: int = MAX_PICTURES) -> list[Picture]:
    """At most `limit` of the images, evenly spread over the shards in the order of names.

    Only the shards that it takes pictures from are read. One that cannot be read has none on the page: `verify` says
    what is wrong with it.
    """
    kind = FORMATS[output_format.format]
    paths = _evenly(list(list_commits(output)), limit if isinstance(kind, Folder) else _MAX_FILES)
    with ThreadPoolExecutor(_THREADS) as pool:
        chosen = _choose(list(pool.map(read_commit, paths)), limit)
        load = partial(_from_folder if isinstance(kind, Folder) else _from_file, output, output_format)
        return [picture for pictures in pool.map(load, chosen) for picture in pictures]


def first_rejects(output: str, limit: int = MAX_REJECTS) -> list[dict[str, Any]]:
    """The first rejects of the output, those of the input before those of the model.

    Lines that are no JSON object are left out: these files are there to be mended by hand.
    """
    names = sorted(storage.list_files(output, rejects.FOLDER), key=lambda name: not name.startswith(rejects.INPUT))
    found: list[dict[str, Any]] = []
    for name in names:
        lines = storage.read_file(storage.join(output, rejects.FOLDER, name)).decode(errors="replace").split("\n")
        for line in lines:
            with suppress(ValueError, TypeError):
                found.append(dict(json.loads(line)))
            if len(found) == limit:
                return found
    return found


def _evenly(items: list, limit: int) -> list:
    return [items[place * len(items) // limit] for place in range(limit)] if len(items) > limit else items


def _choose(commits: list[Commit], limit: int) -> list[tuple[str, set[str]]]:
    """Names of shards, each with the keys of the pictures that are shown of it."""
    keys = _evenly([(commit.shard, image.key) for commit in commits for image in commit.images], limit)
    chosen: dict[str, set[str]] = {}
    for shard, key in keys:
        chosen.setdefault(shard, set()).add(key)
    return list(chosen.items())


def _from_folder(output: str, output_format: OutputFormat, chosen: tuple[str, set[str]]) -> list[Picture]:
    shard, keys = chosen
    folder = f"{Folder.folder}/{shard}"
    try:
        text = storage.read_file(storage.join(output, folder, Folder.rows_file)).decode()
        rows = [json.loads(line) for line in text.split("\n") if line]
    except (OSError, ValueError):
        return []
    pictures = []
    for row in rows:
        if row["key"] not in keys:
            continue
        link = f"{folder}/{row['key']}{output_format.suffix}"
        try:
            small = _address(storage.read_file(storage.join(output, link)))
        except OSError:
            small = ""
        pictures.append(Picture(row, small, link if small else ""))
    return pictures


def _from_file(output: str, output_format: OutputFormat, chosen: tuple[str, set[str]]) -> list[Picture]:
    shard, keys = chosen
    try:
        rows, files = FORMATS[output_format.format].read(output, shard)
        rows_of = {row["file_name"]: row for row in rows if row["key"] in keys}
        return [Picture(rows_of[name], _address(data), "") for name, data in files if name in rows_of]
    except (OSError, ValueError):
        return []


def _address(data: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(thumbnail(data, _THUMBNAIL_SIDE)).decode()
