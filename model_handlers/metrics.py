"""What a job measures: names and units, all in Beam's namespace "lightmill".

Beam shows these while a job runs, on Dataflow's page for instance, and summary.json holds them afterwards. They are for
display: a bundle that ran twice counts twice. What was made is told by the counts and by the commit records.
"""

import time

from apache_beam.metrics import Metrics

NAMESPACE = "lightmill"
UNIT = "_milliseconds"  # of distributions, in which Beam holds whole numbers


def count(name: str, number: int = 1) -> None:
    """Adds to a counter; of no effect outside of a bundle and in threads that Beam does not know."""
    Metrics.counter(NAMESPACE, name).inc(number)


def took(name: str, seconds: float) -> None:
    """Adds a duration to the distribution `<name>_milliseconds`; else as `count`."""
    Metrics.distribution(NAMESPACE, name + UNIT).update(round(seconds * 1000))


class DeviceClock:
    """Tells the time in which the device had work from the time in which it waited for the host.

    It begins when the model is loaded. Compiling is waiting. A batch that the device ends while the host still prepares
    the next one counts as work until it is fetched, so the busy time is an upper bound.
    """

    def __init__(self) -> None:
        self._until = time.monotonic()

    def fetched(self, started: float) -> None:
        """Counts a batch that was started then, by time.monotonic(), and has just been fetched.

        Batches are fetched in the order in which they were started; while two are on the device, time counts once.
        """
        begun = max(started, self._until)
        took("device_idle", begun - self._until)
        self._until = time.monotonic()
        took("device_busy", self._until - begun)
