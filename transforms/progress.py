"""How far the run has come, counted in the process that does the work.

Beam shows its metrics only when a local run has ended, and this is for the line that a person watches meanwhile. It
knows nothing of other workers and counts a repeated bundle twice: the exact numbers are those of `counts`.
"""

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Progress:
    """Images planned so far, and of these made and rejected, since the process began or `reset` was called."""

    planned: int = 0
    done: int = 0
    rejected: int = 0


_lock = threading.Lock()
_progress = Progress()


def add(planned: int = 0, done: int = 0, rejected: int = 0) -> None:
    """Counts images; may be called from any thread."""
    global _progress
    with _lock:
        _progress = replace(
            _progress,
            planned=_progress.planned + planned,
            done=_progress.done + done,
            rejected=_progress.rejected + rejected,
        )


def current() -> Progress:
    """The counts of this moment."""
    return _progress


def reset() -> None:
    """Starts again from zero, for a second run in the same process."""
    global _progress
    with _lock:
        _progress = Progress()
