"""A page of pictures, for a person who wants to see what a run made."""

import base64
import json
from collections.abc import Iterator, Mapping
from html import escape

from transforms import storage
from transforms.commits import Commit, list_commits, read_commit, read_commits
from transforms.formats import FORMATS, Folder, OutputFormat
from transforms.pictures import thumbnail

MAX_PICTURES = 200
# Of shards that are one file each, which has to be read whole for one picture of it.
_MAX_FILES = 20
_THUMBNAIL_SIDE = 256

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif }
body { margin: 1rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse } td { padding: 0 1rem 0 0 } td + td { text-align: right }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); margin-top: 1rem }
figure { margin: 0; overflow-wrap: anywhere } img { width: 100%; height: auto }
figcaption { font-size: 85%; max-height: 7em; overflow: auto } small { opacity: .7 }
"""


def page(figures: Mapping[str, int], images: int, rows: Iterator[tuple[str, dict]]) -> str:
    """One page without scripts: a table of figures, then pictures, each given by its address and its metadata.

    Prompts come from strangers: all text is escaped, and no address is made of it.
    """
    # Should an escape ever be forgotten, the browser still runs nothing and fetches nothing from elsewhere.
    policy = "default-src 'none'; img-src 'self' file: data:; style-src 'unsafe-inline'"
    table = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{value:,}</td></tr>\n" for name, value in figures.items()
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{images:,} images</title>\n<style>{_STYLE}</style>\n"
        f"<h1>{images:,} images</h1>\n<table>\n{table}</table>\n"
        f"<main>\n{''.join(_figure(address, row) for address, row in rows)}</main>\n</html>\n"
    )


def _figure(address: str, row: dict) -> str:
    picture = f'<img src="{escape(address)}" loading="lazy" alt="" width="{row["width"]:d}" height="{row["height"]:d}">'
    # A browser opens no data: address by a click.
    link = picture if address.startswith("data:") else f'<a href="{escape(address)}">{picture}</a>'
    caption = f"{escape(row['prompt'][:1000])}<br><small>seed {row['seed']:d}</small>"
    return f"<figure>{link}<figcaption>{caption}</figcaption></figure>\n"


def sample(
    output: str, output_format: OutputFormat, images: int, limit: int = MAX_PICTURES
) -> Iterator[tuple[str, dict]]:
    """(address, metadata row) of at most `limit` of the images, evenly spread over the shards in the order of names.

    Where an image is a file, its address is relative to the output; else it is a data: address of a thumbnail.
    """
    kind = FORMATS[output_format.format]
    if isinstance(kind, Folder):
        for commit, keys in _evenly(read_commits(output), images, limit):
            folder = f"{kind.folder}/{commit.shard}"
            text = storage.read_file(storage.join(output, folder, kind.rows_file)).decode()
            rows = (json.loads(line) for line in text.split("\n") if line)
            yield from ((f"{folder}/{row['file_name']}", row) for row in rows if row["key"] in keys)
        return
    paths = list(list_commits(output))
    chosen = [read_commit(path) for path in paths[:: -(-len(paths) // _MAX_FILES) or 1]]
    for commit, keys in _evenly(iter(chosen), sum(len(commit.images) for commit in chosen), limit):
        shard_rows, files = kind.read(output, commit.shard)
        rows_of = {row["file_name"]: row for row in shard_rows if row["key"] in keys}
        for name, data in files:
            if name in rows_of:
                small = base64.b64encode(thumbnail(data, _THUMBNAIL_SIDE)).decode()
                yield f"data:image/jpeg;base64,{small}", rows_of[name]


def _evenly(commits: Iterator[Commit], images: int, limit: int) -> Iterator[tuple[Commit, set[str]]]:
    wanted = {place * images // limit for place in range(limit)} if images > limit else set(range(images))
    first = 0
    for commit in commits:
        keys = {image.key for place, image in enumerate(commit.images, first) if place in wanted}
        first += len(commit.images)
        if keys:
            yield commit, keys
