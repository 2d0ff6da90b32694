"""SkipFinished: what the output holds already is not made again, and nothing is made twice."""

from collections import defaultdict

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from model_handlers.recipe import ImageRequest
from transforms import progress
from transforms.coders import KEY_BYTES, PackByBucket, keys_of, unpack
from transforms.commits import list_commits, read_commit

# What an element of the join begins with: a pack of requests follows, or keys of what is in the output.
_REQUESTED, _WRITTEN, _REJECTED = b"?", b"+", b"-"


class SkipFinished(beam.PTransform):
    """Gives the `.requests` that are still to be made; `.fates` counts the others.

    An anti-join with the commit records of the output. Requests with the same key ask for the same picture under the
    same id: the first in the input is kept. A key that was rejected is left alone, unless `retry_rejected`.

    Joined by buckets of keys and not by keys: a list for each of a million keys costs a runner more than what is in it.
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
            | "Keys" >> beam.ParDo(_ReadKeys()).with_output_types(tuple[int, bytes])
        )
        requested = (
            requests
            | "Pack" >> beam.ParDo(PackByBucket(_bucket_of)).with_output_types(tuple[int, bytes])
            | "Requested"
            >> beam.MapTuple(lambda bucket, pack: (bucket, _REQUESTED + pack)).with_output_types(tuple[int, bytes])
        )
        return (
            (requested, finished)
            | beam.Flatten()
            | "Join" >> beam.GroupByKey()
            | "Skip" >> beam.ParDo(_Skip(self._retry_rejected)).with_outputs("fates", main="requests")
        )


def _bucket_of(request: ImageRequest) -> int:
    return _bucket(request.key)


def _bucket(key: str) -> int:
    # A key is a hash already, so its first bits are spread evenly; 1024 buckets, each of a thousand of a million.
    return int(key[:3], 16) >> 2


class _ReadKeys(beam.DoFn):
    """Keys in the commit records, those of one bucket and fate in one element."""

    def start_bundle(self):
        self._keys: defaultdict[tuple[int, bytes], bytearray] = defaultdict(bytearray)

    def process(self, path: str):
        commit = read_commit(path)
        for state, entries in ((_WRITTEN, commit.images), (_REJECTED, commit.rejected)):
            for entry in entries:
                self._keys[_bucket(entry.key), state] += bytes.fromhex(entry.key)

    def finish_bundle(self):
        for (bucket, state), keys in self._keys.items():
            element = bucket, state + bytes(keys)
            yield WindowedValue(element, GlobalWindow().max_timestamp(), (GlobalWindow(),))
        self._keys.clear()


class _Skip(beam.DoFn):
    def __init__(self, retry_rejected: bool):
        self._retry_rejected = retry_rejected

    def process(self, element):
        _, group = element
        packs: list[bytes] = []
        found: dict[bytes, set[bytes]] = {_WRITTEN: set(), _REJECTED: set()}
        for entry in group:
            if entry[:1] == _REQUESTED:
                packs.append(entry[1:])
            else:
                keys = entry[1:]
                found[entry[:1]].update(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
        # An image wins over a rejection: the key was rejected first and made by a later run.
        written = found[_WRITTEN]
        rejected = found[_REJECTED] - written
        left_alone = written if self._retry_rejected else written | rejected
        # Keys in the output that nobody asks for are images of another input, or of one that has changed since.
        asked: set[bytes] = set()
        count = 0
        todo: dict[bytes, ImageRequest] = {}
        for pack in packs:
            keys = keys_of(pack)
            count += len(keys)
            asked.update(keys)
            if left_alone.issuperset(keys):
                continue
            for key, request in zip(keys, unpack(pack), strict=True):
                if key not in left_alone and _place(request) <= _place(todo.get(key, request)):
                    todo[key] = request
        fates = {
            "duplicates": count - len(asked),
            "finished_before": len(asked & written),
            "rejected_before": 0 if self._retry_rejected else len(asked & rejected),
        }
        yield from (beam.pvalue.TaggedOutput("fates", fate) for fate in fates.items() if fate[1])
        progress.add(planned=len(todo))
        yield from todo.values()


def _place(request: ImageRequest) -> tuple[str, int]:
    return request.source, request.position
