"""The report of a run: its counts, checked against the commit records on disk, and a page of pictures."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape

from transforms import rejects, storage
from transforms.commits import read_commits
from transforms.counts import AccountingError, Counts, read_counts
from transforms.metadata import dataset_card

MAX_PICTURES = 200


@dataclass(frozen=True)
class Inventory:
    """What an output holds, of this run and of earlier ones, by its commit records."""

    shards: int
    images: int
    bytes: int
    rejected: int


def write_report(output: str, run: Mapping[str, object] | None = None, fresh: bool = False) -> Counts:
    """Reconciles the last run and writes summary.json, index.html and README.md; returns the counts.

    Args:
      run: what the caller knows of the run, such as seconds or the kind of device, for the summary.
      fresh: whether the output was empty before the run; then every image in it must have been counted.

    Raises:
      AccountingError: if a record or an image is missing or too many.
      CommitError: if a commit record is damaged.
    """
    counts = read_counts(output)
    inventory = take_inventory(output)
    reconcile(counts, inventory, fresh)
    summary: dict[str, object] = {"counts": asdict(counts), "output": asdict(inventory), "run": dict(run or {})}
    storage.write_file(output, "summary.json", json.dumps(summary, indent=1).encode() + b"\n")
    storage.write_file(output, "index.html", _page(counts, inventory, sample_rows(output, inventory.images)).encode())
    storage.write_file(output, "README.md", dataset_card().encode())
    return counts


def take_inventory(output: str) -> Inventory:
    """Adds up the commit records, and drops from the reject files what a later run has made.

    A key may stand as rejected in one commit record and as an image in that of a later run, which tried again. Only the
    keys of rejected requests are held in memory.
    """
    rejected_in: dict[str, list[str]] = {}
    shards = images = size = 0
    for commit in read_commits(output):
        shards += 1
        images += len(commit.images)
        size += sum(image.bytes for image in commit.images)
        for reject in commit.rejected:
            rejected_in.setdefault(reject.key, []).append(commit.shard)
    made: dict[str, set[str]] = {}
    if rejected_in:
        for commit in read_commits(output):
            for image in commit.images:
                for shard in rejected_in.pop(image.key, ()):
                    made.setdefault(shard, set()).add(image.key)
    for shard, keys in made.items():
        _drop_rejects(output, rejects.path_of(shard), keys)
    return Inventory(shards, images, size, len(rejected_in))


def _drop_rejects(output: str, name: str, keys: set[str]) -> None:
    folder, _, file = name.partition("/")
    if file not in storage.list_files(output, folder):
        return  # dropped by an earlier report
    lines = storage.read_file(storage.join(output, name)).decode().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["key"] not in keys]
    if kept:
        storage.write_file(output, name, "".join(kept).encode())
    else:
        storage.delete_files(output, [name])


def reconcile(counts: Counts, inventory: Inventory, fresh: bool = False) -> None:
    """Makes sure that the counts add up and that the output holds what they claim.

    Raises:
      AccountingError: with the numbers that do not agree.
    """
    counts.check()
    claimed = counts.written + counts.finished_before
    if inventory.images < claimed or (fresh and inventory.images != claimed):
        raise AccountingError(f"the commit records hold {inventory.images} images where the run counted {claimed}")
    failed = counts.rejected + counts.rejected_before
    if inventory.rejected < failed or (fresh and inventory.rejected != failed):
        raise AccountingError(f"the commit records hold {inventory.rejected} rejects where the run counted {failed}")


def sample_rows(output: str, images: int, limit: int = MAX_PICTURES) -> Iterator[tuple[str, dict]]:
    """(folder, metadata row) of at most `limit` images, evenly spread over the shards in the order of their names."""
    wanted = {place * images // limit for place in range(limit)} if images > limit else set(range(images))
    first = 0
    for commit in read_commits(output):
        keys = {image.key for place, image in enumerate(commit.images, first) if place in wanted}
        first += len(commit.images)
        if keys:
            folder = f"images/{commit.shard}"
            lines = storage.read_file(storage.join(output, f"{folder}/metadata.jsonl")).decode().split("\n")
            rows = (json.loads(line) for line in lines if line)
            yield from ((folder, row) for row in rows if row["key"] in keys)


_STYLE = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif }
body { margin: 1rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse } td { padding: 0 1rem 0 0 } td + td { text-align: right }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); margin-top: 1rem }
figure { margin: 0; overflow-wrap: anywhere } img { width: 100%; height: auto }
figcaption { font-size: 85%; max-height: 7em; overflow: auto } small { opacity: .7 }
"""


def _page(counts: Counts, inventory: Inventory, rows: Iterator[tuple[str, dict]]) -> str:
    """One page without scripts. Prompts come from strangers: all text is escaped, and no address is made of it."""
    # Should an escape ever be forgotten, the browser still runs nothing and fetches nothing from elsewhere.
    policy = "default-src 'none'; img-src 'self' file: data:; style-src 'unsafe-inline'"
    table = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{value:,}</td></tr>\n"
        for name, value in (*asdict(counts).items(), *((f"{k}_in_output", v) for k, v in asdict(inventory).items()))
    )
    figures = "".join(
        f'<figure><a href="{path}"><img src="{path}" loading="lazy" alt="" width="{width:d}" height="{height:d}"></a>'
        f"<figcaption>{prompt}<br><small>seed {seed:d}</small></figcaption></figure>\n"
        for path, prompt, width, height, seed in (
            (
                escape(f"{folder}/{row['file_name']}"),
                escape(row["prompt"][:1000]),
                row["width"],
                row["height"],
                row["seed"],
            )
            for folder, row in rows
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{inventory.images:,} images</title>\n<style>{_STYLE}</style>\n"
        f"<h1>{inventory.images:,} images</h1>\n<table>\n{table}</table>\n<main>\n{figures}</main>\n</html>\n"
    )
