"""What a person, or a log, sees of a run that goes on."""

import logging
import sys

import pytest

from pipeline import watch
from tests.fakes import FakeHandler, run, write_jsonl
from transforms import progress
from transforms.progress import Progress


@pytest.mark.parametrize(
    ("now", "images", "seconds", "line"),
    [
        (Progress(), 0, 0, "reading, 1:01:05"),
        (Progress(planned=1200), 0, 0, "1,200 images to make, 1:01:05"),
        (Progress(1200, 4), 0, 0, "4 of 1,200 images"),
        (Progress(1200, 7, 1), 4, 2, "8 of 1,200 images, 2.00 images/s, 0:09:56 left, 1 rejected"),
    ],
)
def test_a_line_says_how_far_a_run_is_how_fast_and_how_long_it_still_takes(now, images, seconds, line):
    assert watch.describe(now, images, seconds, elapsed=3665) == line


def test_the_progress_of_a_job_elsewhere_is_that_of_its_counters(tmp_path):
    records = [{"prompt": f"p{number}", "id": number} for number in range(6)]
    run(write_jsonl(tmp_path / "a.jsonl", records), tmp_path / "out")
    records += [{"prompt": "p0", "id": 0}, {"prompt": "new"}, {"prompt": "bad"}, {"prompt": 42}]
    job = run(write_jsonl(tmp_path / "a.jsonl", records), tmp_path / "out", FakeHandler(rejected=["bad"]))
    assert watch.of_job(job) == Progress(planned=2, done=1, rejected=1)


class _Stream:
    """A stderr, of a terminal or not, that keeps what is written."""

    def __init__(self, terminal):
        self.text = ""
        self._terminal = terminal

    def isatty(self):
        return self._terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def _watched(monkeypatch, stream, until):
    monkeypatch.setattr(watch, "SECONDS_AT_A_TERMINAL", 0.01)
    monkeypatch.setattr(watch, "SECONDS_IN_A_LOG", 0.01)
    monkeypatch.setattr(sys, "stderr", stream)
    with watch.watch() as follow:
        progress.add(planned=3, done=1)
        follow(None)
        for _ in range(500):
            if until():
                return
            watch.time.sleep(0.01)
    pytest.fail("nothing was shown")


def test_a_terminal_has_one_line_that_is_cleared_in_the_end(monkeypatch):
    stream = _Stream(terminal=True)
    _watched(monkeypatch, stream, lambda: "1 of 3 images" in stream.text)
    assert "\n" not in stream.text and stream.text.endswith(watch.CLEAR)
    assert max(len(line) for line in stream.text.split(watch.CLEAR)) < 80


def test_a_log_has_lines_and_no_terminal_codes(monkeypatch, caplog):
    stream = _Stream(terminal=False)
    caplog.set_level(logging.INFO, "lightmill")
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    _watched(monkeypatch, stream, lambda: any("1 of 3 images" in line for line in caplog.messages))
    assert stream.text == "" and "\r" not in caplog.text
