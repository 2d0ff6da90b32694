"""The progress line of a run."""

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

from apache_beam.runners.runner import PipelineResult

from pipeline.throughput import totals
from transforms import progress
from transforms.progress import Progress

SECONDS_AT_A_TERMINAL = 1.0
SECONDS_IN_A_LOG = 60.0
# Of a job whose workers are elsewhere: each question is a call to its service.
_SECONDS_BETWEEN_QUESTIONS = 30.0
# Returns to the beginning of the line and clears it. Log lines begin with it too, or they would stand behind ours.
CLEAR = "\r\033[K"

log = logging.getLogger("lightmill")


@contextlib.contextmanager
def watch() -> Iterator[Callable[[PipelineResult], None]]:
    """Shows images done, rate and time left: a line that moves at a terminal, one a minute in a log.

    Gives a function that takes the job once it has been started. A local runner returns when all is done, and meanwhile
    the images are counted in this process; of other runners the job is asked.
    """
    progress.reset()
    watcher = _Watcher()
    thread = threading.Thread(target=watcher.show, daemon=True)
    thread.start()
    try:
        yield watcher.follow
    finally:
        watcher.done.set()
        thread.join()


class _Watcher:
    def __init__(self) -> None:
        self.done = threading.Event()
        self._job: PipelineResult | None = None
        self._asked = -_SECONDS_BETWEEN_QUESTIONS
        self._answer = Progress()

    def follow(self, job: PipelineResult) -> None:
        self._job = job

    def show(self) -> None:
        terminal = sys.stderr.isatty()
        started = time.monotonic()
        # The rate is measured from the first image on: what comes before is reading, loading and compiling.
        first: tuple[float, int] | None = None
        while not self.done.wait(SECONDS_AT_A_TERMINAL if terminal else SECONDS_IN_A_LOG):
            now = self._current()
            finished = now.done + now.rejected
            if finished and first is None:
                first = (time.monotonic(), finished)
            since = (finished - first[1], time.monotonic() - first[0]) if first else (0, 0.0)
            line = describe(now, *since, elapsed=time.monotonic() - started)
            if terminal:
                # A line that is wrapped would not be cleared.
                line = line[: shutil.get_terminal_size().columns - 1]
                print(CLEAR + line, end="", file=sys.stderr, flush=True)
            else:
                log.info(line)
        if terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)

    def _current(self) -> Progress:
        here = progress.current()
        if here.planned or self._job is None:
            return here
        if time.monotonic() - self._asked >= _SECONDS_BETWEEN_QUESTIONS:
            self._asked = time.monotonic()
            try:
                self._answer = of_job(self._job)
            except Exception as error:  # a service that does not answer ends the progress line as little as the job
                log.debug("no progress from the job: %s", error)
        return self._answer


def of_job(job: PipelineResult) -> Progress:
    """The progress of a job by its counters, wherever its workers are."""
    sums = totals(job)
    elsewhere = sums["duplicates"] + sums["finished_before"] + sums["rejected_before"]
    return Progress(sums["images_requested"] - elsewhere, sums["written"], sums["rejected"])


def describe(now: Progress, images: int, seconds: float, elapsed: float) -> str:
    """One line on the state of a run that has lasted `elapsed` and made `images` in the `seconds` since its first."""
    finished = now.done + now.rejected
    if not finished:
        what = f"{now.planned:,} images to make" if now.planned else "reading"
        return f"{what}, {_clock(elapsed)}"
    line = f"{finished:,} of {now.planned:,} images"
    if images and seconds:
        rate = images / seconds
        line += f", {rate:.2f} images/s, {_clock((now.planned - finished) / rate)} left"
    return line + (f", {now.rejected:,} rejected" if now.rejected else "")


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
