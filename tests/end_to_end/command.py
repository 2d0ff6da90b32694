"""The command line as a user meets it: arguments in, files, an exit status and two streams of text out."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.__main__ import main
from tests import fakes

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Finished:
    """What a command left behind for whoever called it."""

    status: int
    stdout: str
    stderr: str


# Takes the input, the output and further flags; a fixture in conftest makes one.
Generate = Callable[..., Finished]


def run(*arguments: object) -> Finished:
    """Runs a command in this process, which saves the seconds of starting another."""
    stdout, stderr = io.StringIO(), io.StringIO()
    root, beam = logging.getLogger(), logging.getLogger("apache_beam")
    handlers, levels = root.handlers[:], (root.level, beam.level)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            status = main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        root.handlers[:] = handlers
        for logger, level in zip((root, beam), levels, strict=True):
            logger.setLevel(level)
    return Finished(status, stdout.getvalue(), stderr.getvalue())


def start(*arguments: object, devices: int = 1, log: Path | None = None) -> subprocess.Popen[str]:
    """Starts a command in a process of its own, with so many CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "pipeline", *map(str, arguments)]
    environment = os.environ | {"XLA_FLAGS": flags.strip()}
    if log:
        with log.open("w") as file:
            return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, stdout=file, stderr=file)
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run_process(*arguments: object, devices: int = 1) -> Finished:
    """Runs a command in a process of its own, with so many CPU devices."""
    process = start(*arguments, devices=devices)
    stdout, stderr = process.communicate(timeout=300)
    return Finished(process.returncode, stdout, stderr)


def hashes(output: Path) -> dict[tuple[str, int], str]:
    """sha256 of every picture's file by its record's id and its number among that record's images."""
    found = {(row["id"], row["image_index"]): row["sha256"] for row in fakes.rows(output)}
    assert len(found) == len(list(output.glob("images/*/*.png")))
    return found


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


def recipe_inside(path: Path) -> dict:
    """The recipe that a picture's file carries in its text chunk."""
    with Image.open(path) as picture:
        return json.loads(picture.text["lightmill"])


def counts(output: Path) -> dict[str, int]:
    """The counts of the last run that are not zero."""
    return {name: count for name, count in json.loads((output / "counts.json").read_text()).items() if count}


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder, with the time at which it was last written and its bytes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
