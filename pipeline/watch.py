"""The progress line of a local run."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from transforms import progress

SECONDS_AT_A_TERMINAL = 1.0
SECONDS_IN_A_LOG = 60.0


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """Shows images done, rate and time left on stderr: a line that moves at a terminal, one a minute in a log."""
    progress.reset()
    done = threading.Event()
    thread = threading.Thread(target=_show_until, args=(done,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show_until(done: threading.Event) -> None:
    terminal = sys.stderr.isatty()
    # The rate is measured from the first image on: what comes before is reading, loading and compiling.
    first: tuple[float, int] | None = None
    shown = False
    while not done.wait(SECONDS_AT_A_TERMINAL if terminal else SECONDS_IN_A_LOG):
        now = progress.current()
        finished = now.done + now.rejected
        if finished and first is None:
            first = (time.monotonic(), finished)
        line = describe(now, *((finished - first[1], time.monotonic() - first[0]) if first else (0, 0.0)))
        print(f"\r\033[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
        shown = terminal
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def describe(now: progress.Progress, images: int, seconds: float) -> str:
    """One line on the state of a run that made `images` in the `seconds` since its first."""
    finished = now.done + now.rejected
    if not now.planned:
        return "reading"
    line = f"{finished:,} of {now.planned:,} images"
    if images and seconds:
        rate = images / seconds
        left = int((now.planned - finished) / rate)
        line += f", {rate:.2f} images/s, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
    return line + (f", {now.rejected:,} rejected" if now.rejected else "")
