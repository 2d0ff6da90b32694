"""SkipFinished: what the output holds already is not made again, and nothing is made twice."""

import apache_beam as beam

from model_handlers.recipe import ImageRequest
from transforms import progress
from transforms.commits import list_commits, read_commit

_WRITTEN, _REJECTED = "written", "rejected"


class SkipFinished(beam.PTransform):
    """Gives the `.requests` that are still to be made; `.fates` counts the others.

    An anti-join with the commit records of the output. Requests with the same key ask for the same picture under the
    same id: the first in the input is kept. A key that was rejected is left alone, unless `retry_rejected`.
    """

    def __init__(self, output: str, retry_rejected: bool = False):
        super().__init__()
        self._output = output
        self._retry_rejected = retry_rejected

    def expand(self, requests):
        finished = (
            requests.pipeline
            | "Output" >> beam.Create([self._output])
            | "Commits" >> beam.FlatMap(list_commits)
            | "SpreadCommits" >> beam.Reshuffle()
            | "Keys" >> beam.FlatMap(_keys)
        )
        keyed = requests | "ByKey" >> beam.Map(lambda request: (request.key, request))
        return (
            {"requests": keyed, "finished": finished}
            | "Join" >> beam.CoGroupByKey()
            | "Skip" >> beam.ParDo(_Skip(self._retry_rejected)).with_outputs("fates", main="requests")
        )


def _keys(path: str):
    commit = read_commit(path)
    yield from ((image.key, _WRITTEN) for image in commit.images)
    yield from ((reject.key, _REJECTED) for reject in commit.rejected)


class _Skip(beam.DoFn):
    def __init__(self, retry_rejected: bool):
        self._retry_rejected = retry_rejected

    def process(self, element):
        _, group = element
        first: ImageRequest | None = None
        count = 0
        # One by one: a million records may all say the same.
        for request in group["requests"]:
            count += 1
            if first is None or (request.source, request.position) < (first.source, first.position):
                first = request
        states = set(group["finished"])
        if count > 1:
            yield _fate("duplicates", count - 1)
        if first is None:
            pass  # an image of another input, or of one that has changed since
        # An image wins over a rejection: the key was rejected first and made by a later run.
        elif _WRITTEN in states:
            yield _fate("finished_before", 1)
        elif _REJECTED in states and not self._retry_rejected:
            yield _fate("rejected_before", 1)
        else:
            progress.add(planned=1)
            yield first


def _fate(name: str, count: int) -> beam.pvalue.TaggedOutput:
    return beam.pvalue.TaggedOutput("fates", (name, count))
