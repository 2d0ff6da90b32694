"""The tests that need many throws, at length: faults of the store, kills, damaged files.

    python -m benchmarks.stress faults --times 100     runs into a bucket of which 5 % of the requests fail
    python -m benchmarks.stress kills --times 50       runs killed at a random moment, in this process and with workers
    python -m benchmarks.stress fuzz --times 10000     damaged files through the whole graph

Each stops at the first thing that is not as it should be, and says with which seed.
"""

import argparse
import collections
import random
import tempfile
import time
from pathlib import Path

from tests import cloud
from tests.pipeline.test_cloud_storage import faulty_run
from tests.pipeline.test_fuzz import fuzz
from tests.pipeline.test_kill import MODES, killed_run
from transforms.formats import FORMATS, OutputFormat

FILES_AT_A_TIME = 500


def faults(times: int, seed: int) -> None:
    """In turns the formats; three of four runs before the emulator that keeps preconditions."""
    injected: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(seed, seed + times):
            emulator = cloud.EMULATORS[number % 4 == 3]
            kind = list(FORMATS)[number % len(FORMATS)]
            print(f"seed {number}: {kind}, {emulator}", flush=True)
            injected.update(faulty_run(Path(folder), emulator, OutputFormat(kind), share=0.05, seed=number))
    print(f"faults: {times} runs, {sum(injected.values())} faults {dict(injected)}: every output byte-identical")


def kills(times: int, seed: int) -> None:
    """In turns with the workers in this process and in others."""
    made = []
    for number in range(seed, seed + times):
        with tempfile.TemporaryDirectory() as folder:
            mode = MODES[number % len(MODES)]
            made.append(killed_run(Path(folder), mode, random.Random(number)))
            print(f"seed {number}: {mode}, killed with {made[-1]} of 16 shards committed", flush=True)
    print(f"kills: {times} runs, killed with {sorted(made)} of 16 shards committed: every output byte-identical")


def fuzz_files(times: int, seed: int) -> None:
    """Some hundred files at a time."""
    read = records = 0
    for number in range(seed, seed + -(-times // FILES_AT_A_TIME)):
        with tempfile.TemporaryDirectory() as folder:
            some = fuzz(Path(folder), FILES_AT_A_TIME, random.Random(number))
            read, records = read + some[0], records + some[1]
            print(f"seed {number}: {some[0]} files read, {some[1]} records", flush=True)
    print(f"fuzz: {times} damaged files, {times - read} refused, {records} records of the others: each accounted for")


def main() -> None:
    kinds = {"faults": (faults, 100), "kills": (kills, 50), "fuzz": (fuzz_files, 10_000)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--times", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    function, times = kinds[arguments.kind]
    started = time.monotonic()
    function(arguments.times or times, arguments.seed)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
