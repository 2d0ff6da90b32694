"""The data plane at size: prompts through the whole graph, with a model that paints the request's digest at 8 x 8.

    python -m benchmarks.scale [10000 100000 1000000]

For each number, in a process of its own: milliseconds a record of making it and of its report; a second run that finds
it finished, once by looking at every record and once by seeing that nothing has changed, over the first; peak memory of
all that; padded slots. Times are the processor's, since the machine's others and its disk are in every wall clock,
which is the last column.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.report import write_report
from pipeline.unchanged import inputs_hash, shards_hash, still_finished
from tests.fakes import FakeHandler, run
from transforms.counts import read_counts
from transforms.formats import OutputFormat

BATCH, IMAGES_PER_SHARD = 8, 64


def measure(records: int, kind: str, folder: Path) -> dict[str, float]:
    """Makes so many pictures in this process and gives the figures."""
    source, output = folder / "prompts.jsonl", folder / "out"
    with source.open("w") as file:
        for number in range(records):
            file.write(json.dumps({"prompt": f"a photograph of object number {number}", "id": number}) + "\n")
    figures: dict[str, float] = {"records": records}
    settings: dict[str, Any] = {
        "images_per_shard": IMAGES_PER_SHARD,
        "batch_size": BATCH,
        "output_format": OutputFormat(kind),
    }
    for name in ("make", "resume"):
        with _timed(figures, name):
            run(source, output, FakeHandler(), **settings)
        counts = read_counts(str(output))
        if counts.written != (records if name == "make" else 0):
            raise SystemExit(f"{counts.written} images written to {name} {records}")
        if name == "make":
            figures["padded"] = counts.padded_slots
            inputs = inputs_hash([str(source)], None, None)
            with _timed(figures, "report"):
                hashes = {"inputs": inputs, "shards": shards_hash(str(output))}
                write_report(str(output), hashes, fresh=True, output_format=settings["output_format"])
    with _timed(figures, "unchanged"):
        if not still_finished(str(output), inputs_hash([str(source)], None, None), retry_rejected=False):
            raise SystemExit("the output is taken for unfinished")
    figures["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return figures


@contextlib.contextmanager
def _timed(figures: dict[str, float], name: str) -> Iterator[None]:
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    figures[name] = time.process_time() - cpu
    figures[f"{name}_wall"] = time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--format", default="folder")
    parser.add_argument("--folder", type=Path, help="measure here, in this process")
    arguments = parser.parse_args()
    if arguments.folder:
        print(json.dumps(measure(arguments.records[0], arguments.format, arguments.folder)))
        return
    print("records    ms/record  report  resume/make  unchanged/make  peak GB  padded  wall ms/record")
    for records in arguments.records:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.scale", f"{records}", "--format", arguments.format]
            done = subprocess.run([*command, "--folder", folder], check=True, stdout=subprocess.PIPE, text=True)
        got = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{records:<10} {1000 * got['make'] / records:9.3f} {1000 * got['report'] / records:7.3f} "
            f"{got['resume'] / got['make']:12.3f} {got['unchanged'] / got['make']:15.4f} {got['peak_gb']:8.2f} "
            f"{got['padded']:7.0f} {1000 * got['make_wall'] / records:15.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
