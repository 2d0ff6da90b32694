"""The report of a run: its counts, checked against the commit records on disk, and what a person looks at first."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline import gallery
from transforms import rejects, storage
from transforms.commits import read_commits
from transforms.counts import AccountingError, Counts, read_counts
from transforms.formats import FOLDER_OF_PNG, FORMATS, OutputFormat
from transforms.metadata import dataset_card


@dataclass(frozen=True)
class Inventory:
    """What an output holds, of this run and of earlier ones, by its commit records."""

    shards: int
    images: int
    bytes: int
    rejected: int


def write_report(
    output: str,
    run: Mapping[str, object] | None = None,
    fresh: bool = False,
    output_format: OutputFormat = FOLDER_OF_PNG,
) -> dict[str, Any]:
    """Reconciles the last run and writes summary.json, index.html and README.md; returns the summary.

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
    summary: dict[str, Any] = {"counts": asdict(counts), "output": asdict(inventory), "run": dict(run or {})}
    storage.write_file(output, "summary.json", json.dumps(summary, indent=1).encode() + b"\n")
    figures = {**asdict(counts), **{f"{name}_in_output": value for name, value in asdict(inventory).items()}}
    pictures = gallery.sample(output, output_format, inventory.images)
    storage.write_file(output, "index.html", gallery.page(figures, inventory.images, pictures).encode())
    storage.write_file(output, "README.md", dataset_card(FORMATS[output_format.format].data_files).encode())
    return summary


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
