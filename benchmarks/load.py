"""Time and memory of loading SDXL base 1.0 at its real size, from files on the disk to the device, in a new process.

    python -m benchmarks.load [float16 bfloat16]        # how the files hold numbers; the model holds them as bfloat16

The weights, 7 GB for which the disk needs room, are random. The device is the CPU, so that what is loaded is memory of
this machine too. Pages of a mapped file (RssFile) are the disk's cache, which the system takes back when it needs room;
what the process itself holds is RssAnon.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from model_handlers import checkpoint
from model_handlers.handler import ModelSpec, load_programs
from tests import checkpoints
from tests.parity import cases

SDXL = cases.Case(
    "sdxl",
    **cases.SDXL_BASE,  # type: ignore[arg-type]
    scheduler=cases.scheduler(),
    force_zeros_for_empty_prompt=True,
    height=1024,
    width=1024,
    pictures=(),
)
STORED = {"float16": ("F16", np.dtype(np.float16)), "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16))}
SCHEDULER = "EulerDiscreteScheduler"


def write_checkpoint(root: Path, stored: str) -> int:
    """Writes a checkpoint of random numbers, two bytes each; returns the size of its weights in bytes."""
    code, dtype = STORED[stored]
    files = checkpoints.write_outline(SDXL, root)
    largest = max(math.prod(shape) for shapes in files.values() for shape in shapes.values())
    numbers = np.random.default_rng(0).standard_normal(largest, np.float32).astype(dtype).view(np.uint16)
    total = 0
    for path, shapes in files.items():
        # Piece by piece: the writer of safetensors takes all tensors of a file at once.
        ends = np.cumsum([2 * math.prod(shape) for shape in shapes.values()]).tolist()
        places = zip(shapes.items(), [0, *ends], ends, strict=False)
        header = {n: {"dtype": code, "shape": shape, "data_offsets": [a, b]} for (n, shape), a, b in places}
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for shape in shapes.values():
                numbers[: math.prod(shape)].tofile(file)
        total += ends[-1]
    return total


def memory() -> dict[str, int]:
    """What this process holds now, in bytes, by the names of /proc/PID/status."""
    found = re.findall(r"^(RssAnon|RssFile|VmHWM):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {name: 1024 * int(value) for name, value in found}


def measure(root: Path) -> dict[str, float]:
    """Loads the checkpoint in this process and gives seconds and bytes."""
    figures: dict[str, float] = {"before": memory()["RssAnon"]}
    loaded = threading.Event()

    def watch() -> None:
        while not loaded.wait(0.01):
            for name, value in memory().items():
                figures[name] = max(value, figures.get(name, 0))

    thread = threading.Thread(target=watch)
    thread.start()
    started = time.monotonic()
    identity = checkpoint.identity(root)
    figures["digest"] = time.monotonic() - started
    started, cpu = time.monotonic(), time.process_time()
    programs = load_programs(ModelSpec(str(root), identity, SCHEDULER, "bfloat16", 1, device="cpu"))
    figures["load"], figures["cpu"] = time.monotonic() - started, time.process_time() - cpu
    loaded.set()
    thread.join()
    figures["after"] = memory()["RssAnon"]
    del programs
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stored", nargs="*", default=list(STORED))
    parser.add_argument("--measure", type=Path, help="load this checkpoint here, in this process")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    print("files      weights GB  digest s  load s  before    peak   after    file   VmHWM  RssAnon/weights")
    for stored in arguments.stored:
        with tempfile.TemporaryDirectory() as folder:
            weights = write_checkpoint(Path(folder), stored)
            command = [sys.executable, "-m", "benchmarks.load", "--measure", folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        got = json.loads(done.stdout.splitlines()[-1])
        memory_gb = [f"{got[name] / 1e9:6.2f}" for name in ("before", "RssAnon", "after", "RssFile", "VmHWM")]
        print(
            f"{stored:<10} {weights / 1e9:10.2f} {got['digest']:9.1f} {got['load']:7.1f} {'  '.join(memory_gb)} "
            f"{got['RssAnon'] / weights:16.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
