"""WriteRejects: records that never became a request, with the reasons, in files that can be mended and fed in again."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

import apache_beam as beam

from transforms import storage
from transforms.records import Reject

FOLDER = "rejects"
INPUT = "input-"  # begins the names of lists that are of no shard
# Rejects in one file: few enough to be sorted in memory when every record of an input is bad.
_RECORDS_PER_FILE = 10_000


class WriteRejects(beam.PTransform):
    """Writes rejects of the input to OUT/rejects/input-<file>-<part>.jsonl, in the order of the input.

    A file's name derives from the source's hash, never from its text.
    """

    def __init__(self, output: str):
        super().__init__()
        self._output = output

    def expand(self, rejects):
        return (
            rejects
            | "ByPart" >> beam.Map(lambda reject: ((reject.source, reject.position // _RECORDS_PER_FILE), reject))
            | "Parts" >> beam.GroupByKey()
            | "Write" >> beam.MapTuple(partial(_write, self._output))
        )


def _write(output: str, part: tuple[str, int], rejects: Iterable[Reject]) -> None:
    source, number = part
    name = f"{FOLDER}/{INPUT}{hashlib.sha256(source.encode()).hexdigest()[:12]}-{number:06d}.jsonl"
    ordered = sorted(rejects, key=lambda reject: reject.position)
    storage.write_file(output, name, "".join(f"{json.dumps(asdict(reject))}\n" for reject in ordered).encode())


def path_of(shard: str) -> str:
    """Where the requests of a shard that gave no image are listed, relative to the output."""
    return f"{FOLDER}/{shard}.jsonl"


def clear_input_rejects(output: str) -> None:
    """Deletes the input's rejects of the run before; the next run reads all of the input again and finds its own."""
    stale = [f"{FOLDER}/{name}" for name in storage.list_files(output, FOLDER) if name.startswith(INPUT)]
    storage.delete_files(output, stale)
