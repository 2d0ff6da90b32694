"""SkipFinished: what the output holds already is not made again, and nothing is made twice."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import apache_beam as beam
import numpy as np
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from model_handlers.recipe import ImageRequest
from transforms import progress
from transforms.coders import KEY_BYTES, PackByBucket, keys_of, unpack
from transforms.commits import list_commits, read_commit

# What an element of the join begins with: a pack of requests follows, or the keys of requests that are known to be
# finished, or keys of what is in the output.
_REQUESTED, _KNOWN, _WRITTEN, _REJECTED = b"?", b"=", b"+", b"-"
# So many keys of the output each worker is told, four million in 64 MB. Beyond them requests are shuffled whole, which
# comes to the same at a higher cost.
_MAX_KNOWN_BYTES = 64 << 20
# Requests that are looked up together, so that the time goes into the search and not into its calls.
_LOT = 1024
_KEYS = np.dtype((np.bytes_, KEY_BYTES))


class SkipFinished(beam.PTransform):
    """Gives the `.requests` that are still to be made; `.fates` counts the others.

    An anti-join with the commit records of the output. Requests with the same key ask for the same picture under the
    same id: the first in the input is kept. A key that was rejected is left alone, unless `retry_rejected`.

    Joined by buckets of keys and not by keys: a list for each of a million keys costs a runner more than what is in it.
    What is known to be finished goes into the join by its key alone, which is all that counting it takes.
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
        split = requests | "SetAside" >> beam.ParDo(_SetAside(), beam.pvalue.AsIter(finished)).with_outputs(
            "known", main="unknown"
        )
        requested = (
            split.unknown
            | "Pack" >> beam.ParDo(PackByBucket(_bucket_of)).with_output_types(tuple[int, bytes])
            | "Requested"
            >> beam.MapTuple(lambda bucket, pack: (bucket, _REQUESTED + pack)).with_output_types(tuple[int, bytes])
        )
        return (
            (requested, split.known, finished)
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


class _SetAside(beam.DoFn):
    """Gives requests of which the output is not known to hold the picture; of the others `.known` has the keys."""

    def start_bundle(self):
        self._finished: np.ndarray | None = None
        self._waiting: list[ImageRequest] = []
        self._known: defaultdict[int, bytearray] = defaultdict(bytearray)

    def process(self, request: ImageRequest, finished: Iterable[tuple[int, bytes]]):
        if self._finished is None:
            self._finished = _sorted_keys(finished)
        self._waiting.append(request)
        if len(self._waiting) == _LOT:
            yield from self._unknown()

    def finish_bundle(self):
        for request in self._unknown():
            yield WindowedValue(request, GlobalWindow().max_timestamp(), (GlobalWindow(),))
        for bucket, keys in self._known.items():
            value = WindowedValue((bucket, _KNOWN + bytes(keys)), GlobalWindow().max_timestamp(), (GlobalWindow(),))
            yield beam.pvalue.TaggedOutput("known", value)

    def _unknown(self) -> Iterator[ImageRequest]:
        waiting, self._waiting = self._waiting, []
        if self._finished is None or not len(self._finished):
            yield from waiting
            return
        keys = [bytes.fromhex(request.key) for request in waiting]
        asked = np.frombuffer(b"".join(keys), _KEYS)
        nearest = self._finished[np.minimum(self._finished.searchsorted(asked), len(self._finished) - 1)]
        for request, key, known in zip(waiting, keys, (nearest == asked).tolist(), strict=True):
            if known:
                self._known[_bucket_of(request)] += key
            else:
                yield request


def _sorted_keys(finished: Iterable[tuple[int, bytes]]) -> np.ndarray:
    """The keys of what is written, in order, as far as `_MAX_KNOWN_BYTES` reach."""
    keys = bytearray()
    for _, entry in finished:
        if entry[:1] == _WRITTEN:
            keys += entry[1 : 1 + _MAX_KNOWN_BYTES - len(keys)]
    return np.sort(np.frombuffer(keys, _KEYS))


class _Skip(beam.DoFn):
    def __init__(self, retry_rejected: bool):
        self._retry_rejected = retry_rejected

    def process(self, element):
        _, group = element
        packs: list[bytes] = []
        found: dict[bytes, set[bytes]] = {_KNOWN: set(), _WRITTEN: set(), _REJECTED: set()}
        count = 0
        for entry in group:
            if entry[:1] == _REQUESTED:
                packs.append(entry[1:])
            else:
                keys = entry[1:]
                found[entry[:1]].update(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
                if entry[:1] == _KNOWN:
                    count += len(keys) // KEY_BYTES
        # An image wins over a rejection: the key was rejected first and made by a later run.
        written = found[_WRITTEN] | found[_KNOWN]
        rejected = found[_REJECTED] - written
        left_alone = written if self._retry_rejected else written | rejected
        # Keys in the output that nobody asks for are images of another input, or of one that has changed since.
        asked = found[_KNOWN]
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
