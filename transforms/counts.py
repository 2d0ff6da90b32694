"""What became of every record and image of a run: exact numbers that travel through the graph as data.

Beam's own counters are for display: a bundle that ran twice counts twice there. Elements do not.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import apache_beam as beam

from model_handlers import metrics
from transforms import storage

FILE = "counts.json"


class AccountingError(RuntimeError):
    """A record or an image is missing or too many: a bug, never to be waved through."""


@dataclass(frozen=True)
class Counts:
    """The fates of one run.

    Attributes:
      records_read: rows of the input that are not blank.
      records_rejected: of these, those that gave no request.
      records_expanded: of these, those that gave requests.
      images_requested: all requests, one an image.
      duplicates: requests that stand in the input more than once, without the one that is kept.
      finished_before: found finished in the output.
      rejected_before: found rejected in the output and not tried again.
      written: made in this run.
      rejected: tried in this run without a usable picture.
      padded_slots: places in the program's batches that held no request.
      truncated: of those written, those whose prompt the text encoder did not see to its end.
      unknown_words: of those written, those whose prompt has words that the tokenizer has no pieces for.
    """

    records_read: int = 0
    records_rejected: int = 0
    records_expanded: int = 0
    images_requested: int = 0
    duplicates: int = 0
    finished_before: int = 0
    rejected_before: int = 0
    written: int = 0
    rejected: int = 0
    padded_slots: int = 0
    truncated: int = 0
    unknown_words: int = 0

    def check(self) -> None:
        """Makes sure that every record and every image has exactly one fate.

        Raises:
          AccountingError: with both sides of the sum that does not hold.
        """
        for whole, parts in _SUMS.items():
            values = {part: getattr(self, part) for part in parts}
            if getattr(self, whole) != sum(values.values()):
                shown = " + ".join(f"{value} {part}" for part, value in values.items())
                raise AccountingError(f"{getattr(self, whole)} {whole} are not {shown}")

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


_SUMS = {
    "records_read": ("records_rejected", "records_expanded"),
    "images_requested": ("duplicates", "finished_before", "rejected_before", "written", "rejected"),
}
# What is counted of a run and is no record's or image's fate.
BESIDES_FATES = ("padded_slots", "truncated", "unknown_words")
_NAMES = frozenset(field.name for field in fields(Counts))


class WriteCounts(beam.PTransform):
    """Adds up fates, (name of a field of `Counts`, number), and writes them to OUT/counts.json.

    Each is a counter of Beam's too, to be seen while the job runs.
    """

    def __init__(self, output: str):
        super().__init__()
        self._output = output

    def expand(self, fates):
        shown = fates | "Show" >> beam.Map(_show).with_output_types(tuple[str, int])
        totals = shown | "Add" >> beam.CombinePerKey(sum)
        return (
            fates.pipeline
            | "Once" >> beam.Create([self._output])
            # As a side input, because a run in which nothing happened writes its zeros too.
            | "Write" >> beam.Map(_write, beam.pvalue.AsDict(totals))
        )


def _show(fate: tuple[str, int]) -> tuple[str, int]:
    metrics.count(*fate)
    return fate


def _write(output: str, totals: dict[str, int]) -> None:
    unknown = sorted(set(totals) - _NAMES)
    if unknown:
        raise AccountingError(f"unknown fates {unknown}; known are {sorted(_NAMES)}")
    storage.write_file(output, FILE, Counts(**totals).to_json())


def read_counts(output: str) -> Counts:
    """The counts of the last run that went through to its end."""
    values: dict[str, Any] = json.loads(storage.read_file(storage.join(output, FILE)))
    return Counts(**values)
