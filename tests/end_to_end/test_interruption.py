"""A run that is killed anywhere and started again ends like one that was never killed."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end import command
from tests.fakes import tree, write_jsonl

# One batch a shard, and steps enough that a person, or a poll, can tell one shard from the next.
FLAGS = ("--images_per_shard=4", "--num_inference_steps=20")
RECORDS = [{"prompt": f"a red circle {number}", "num_images_per_prompt": 1 + number % 2} for number in range(30)]
MOMENTS = (0, 3, 8)  # commit records that stand when the run is killed


def commits(output: Path) -> set[str]:
    return {path.stem for path in output.glob("commits/*.json")}


def kill_underway(process, output: Path, committed: int) -> None:
    """Kills a run as soon as so many commit records stand and a picture lies there whose shard is not committed."""
    end = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        if len(commits(output)) >= committed:
            begun = {path.parent.name for path in output.glob("images/*/*.png")}
            if begun - commits(output):
                break
        time.sleep(0.001)
    assert process.poll() is None, "the run ended before it could be killed"
    process.kill()
    process.wait()


def test_a_run_killed_three_times_ends_like_one_that_was_never_killed(arguments, generate, tmp_path):
    records = write_jsonl(tmp_path / "input.jsonl", [*RECORDS, {"prompt": "p", "seed": "x"}])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    generate(records, whole, *FLAGS)
    for moment in MOMENTS:
        process = command.start(*arguments(records, killed, *FLAGS), log=tmp_path / "log")
        try:
            kill_underway(process, killed, moment)
        finally:
            process.kill()
        assert moment <= len(commits(killed)) < len(commits(whole)), (tmp_path / "log").read_text()
        assert not (killed / "summary.json").exists()
    assert tree(killed) != tree(whole)
    before = len(commits(killed))
    generate(records, killed, *FLAGS)
    assert tree(killed) == tree(whole)
    counts = command.counts(killed)
    assert counts["finished_before"] == 4 * before and counts["written"] == 45 - 4 * before


def test_a_stop_by_the_keyboard_is_one_line_and_a_status_of_its_own(generate, jsonl, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("apache_beam.Pipeline.run", interrupted)
    stopped = generate(jsonl([{"prompt": "a green star"}]), tmp_path / "out", check=False)
    assert stopped.status == 130
    assert stopped.stderr == "lightmill: interrupted; the same command goes on from the last finished shard\n"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, too small for the run; gives its folder and a function that makes it large."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=16m", folder], check=True)
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_one_clear_line_and_the_run_goes_on_when_there_is_room(generate, small_disk, tmp_path):
    disk, enlarge = small_disk
    records = write_jsonl(tmp_path / "input.jsonl", RECORDS)
    generate(records, tmp_path / "whole", "--images_per_shard=4")
    full = generate(records, disk / "out", "--images_per_shard=4", check=False)
    assert full.status == 1
    (line,) = (line for line in full.stderr.splitlines() if "compiled program" not in line)
    assert line.startswith("lightmill: error: ") and "No space left on device" in line
    assert line.endswith("the same command goes on from the last finished shard")
    assert not (disk / "out" / "summary.json").exists()
    before = len(commits(disk / "out"))
    assert 0 < before < len(commits(tmp_path / "whole"))
    enlarge()
    generate(records, disk / "out", "--images_per_shard=4")
    assert tree(disk / "out") == tree(tmp_path / "whole")
    assert command.counts(disk / "out")["finished_before"] == 4 * before
