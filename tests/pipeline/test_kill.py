"""Killed at any moment and started again, a run ends as one that was never killed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from pipeline.report import write_report
from tests.fakes import FakeHandler, run, tree, write_jsonl
from tests.victim import SETTINGS

MODES = ("in_memory", "multi_processing")


@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_was_killed_is_continued_by_the_next(tmp_path, mode):
    killed_run(tmp_path, mode, random.Random(mode))


def killed_run(folder, mode, random_moment):
    """Kills a run at a random moment and goes on with it; gives how many of its 16 shards it had made."""
    handler = FakeHandler(rejected=["p7"])
    source, whole, output = folder / "a.jsonl", folder / "whole", folder / "killed"
    if not whole.exists():
        write_jsonl(source, [{"prompt": f"p{number}"} for number in range(61)])
        run(source, whole, handler, **SETTINGS)
        write_report(str(whole), fresh=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.victim", str(source), str(output), mode], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    if random_moment.random() < 0.8:  # else also before anything is made
        while not (output / "images").exists() and process.poll() is None:
            time.sleep(0.001)
    time.sleep(random_moment.uniform(0, 2))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    made = len(list(output.glob("commits/*.json")))
    # At once, while workers in other processes may still be about to finish their shard.
    run(source, output, handler, **SETTINGS)
    write_report(str(output))
    assert tree(output) == tree(whole)
    return made
