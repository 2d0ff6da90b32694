"""The report of a run: its counts, checked against the commit records on disk, and what a person looks at first."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from model_handlers.recipe import Recipe
from pipeline import gallery
from pipeline.options import UsageError
from pipeline.output import read_recipe
from pipeline.page import Page, render
from transforms import rejects, storage
from transforms.commits import read_commits
from transforms.counts import FILE as COUNTS
from transforms.counts import AccountingError, Counts, read_counts
from transforms.formats import FOLDER_OF_PNG, FORMATS, OutputFormat
from transforms.metadata import dataset_card

SUMMARY, PAGE = "summary.json", "index.html"


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
    recipe: Recipe | None = None,
) -> dict[str, Any]:
    """Reconciles the last run and writes summary.json, index.html and README.md; returns the summary.

    Args:
      run: what the caller knows of the run, such as its seconds and its checkpoint, for the summary and the page.
      fresh: whether the output was empty before the run; then every image in it must have been counted.
      recipe: of the output, without which the page cannot say how to make a picture again.

    Raises:
      AccountingError: if a record or an image is missing or too many.
      CommitError: if a commit record is damaged.
    """
    counts = read_counts(output)
    inventory = take_inventory(output)
    reconcile(counts, inventory, fresh)
    summary: dict[str, Any] = {"counts": asdict(counts), "output": asdict(inventory), "run": dict(run or {})}
    storage.write_file(output, SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")
    _write_page(output, summary, output_format, recipe)
    storage.write_file(output, "README.md", dataset_card(FORMATS[output_format.format].data_files).encode())
    return summary


def page_of(output: str) -> str:
    """Makes index.html again from what is there, also before the first run has come to its end; gives its path.

    Nothing is reconciled and nothing else is written, so a run may write to the output meanwhile.

    Raises:
      UsageError: if it is not an output of this program, or a damaged one.
    """
    recipe, output_format = read_recipe(output)
    try:
        files = storage.list_files(output, "")
        summary: dict[str, Any] = {}
        if SUMMARY in files:
            summary = json.loads(storage.read_file(storage.join(output, SUMMARY)))
        if COUNTS in files:  # also after a job that nobody waited for, which has no summary
            summary["counts"] = asdict(read_counts(output))
        inventory, _ = _inventory(output)
        _write_page(output, {**summary, "output": asdict(inventory)}, output_format, recipe)
    except (OSError, ValueError) as error:  # CommitError is a ValueError
        raise UsageError(f"{output}: {error}; `lightmill verify` says more") from error
    return storage.join(output, PAGE)


def _write_page(output: str, summary: dict[str, Any], output_format: OutputFormat, recipe: Recipe | None) -> None:
    rejected = gallery.first_rejects(output)
    page = Page(summary, recipe, output_format, gallery.sample(output, output_format), rejected)
    storage.write_file(output, PAGE, render(page).encode())


def take_inventory(output: str) -> Inventory:
    """Adds up the commit records, and drops from the reject files what a later run has made."""
    inventory, made = _inventory(output)
    for shard, keys in made.items():
        _drop_rejects(output, rejects.path_of(shard), keys)
    return inventory


def _inventory(output: str) -> tuple[Inventory, dict[str, set[str]]]:
    """What the commit records hold, and by shard the rejected keys that a later run has made.

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
    return Inventory(shards, images, size, len(rejected_in)), made


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
