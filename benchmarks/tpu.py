"""Prints what SDXL base 1.0 takes on TPUs, compiled for them on this machine: `make bench-tpu`.

    python -m benchmarks.tpu [--topology v5e:2x2 ...] [--per_device_batch_size 1 2 4 ...]

At 1024 x 1024 pixels, 20 Euler steps, with guidance. Only the published configs are needed, no weights. A program takes
about ten minutes of two cores to compile, and there is one for each topology and batch.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from pipeline.__main__ import main as lightmill
from tests.checkpoints import write_configs
from tests.parity import cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="+", default=["v5e:2x2"])
    parser.add_argument("--per_device_batch_size", nargs="+", default=["1", "2", "4"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = write_configs(Path(folder, "sdxl-base-1.0"), cases.RELEASES["sdxl"], cases.scheduler())
        flags = ["--checkpoint", str(root), "--per_device_batch_size", *arguments.per_device_batch_size]
        return max(lightmill(["plan", "--topology", topology, *flags]) for topology in arguments.topology)


if __name__ == "__main__":
    sys.exit(main())
