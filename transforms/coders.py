"""How requests and shards cross a shuffle: many together, as compressed JSON lists without field names.

Beam would pickle each dataclass by itself. A local runner holds all that it shuffles in memory, several times over, so
bytes and elements are what its size is made of: together, a request is a third of what it is alone.
"""

import dataclasses
import json
import pickle
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import cast

import apache_beam as beam
from apache_beam import coders
from apache_beam.ml.inference.base import PredictionResult
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from model_handlers.recipe import ImageRequest, Settings, Shard

KEY_BYTES = 16
# Requests that wait to be packed, of all buckets together; some ten megabytes.
_MAX_PENDING = 32_768
_LEVEL = 1
_FIELDS = [field.name for field in dataclasses.fields(ImageRequest)]
_PAIRS = [_FIELDS.index(name) for name in ("original_size", "crops_coords_top_left", "target_size")]
_SETTINGS = _FIELDS.index("settings")


class PackByBucket(beam.DoFn):
    """Turns requests into (bucket, pack), with as many requests of one bucket in a pack as come along in a bundle."""

    def __init__(self, bucket_of: Callable[[ImageRequest], Hashable]):
        self._bucket_of = bucket_of

    def start_bundle(self):
        self._clear()

    def process(self, request: ImageRequest):
        self._waiting[self._bucket_of(request)].append((bytes.fromhex(request.key), json.dumps(_values(request))))
        self._count += 1
        if self._count >= _MAX_PENDING:
            yield from self._packs()
            self._clear()

    def finish_bundle(self):
        for pack in self._packs():
            yield WindowedValue(pack, GlobalWindow().max_timestamp(), (GlobalWindow(),))
        self._clear()

    def _packs(self) -> Iterable[tuple[Hashable, bytes]]:
        for bucket, members in self._waiting.items():
            text = f"[{','.join(text for _, text in members)}]"
            keys = b"".join(key for key, _ in members)
            yield bucket, len(members).to_bytes(4) + keys + zlib.compress(text.encode(), _LEVEL)

    def _clear(self) -> None:
        self._waiting: defaultdict[Hashable, list[tuple[bytes, str]]] = defaultdict(list)
        self._count = 0


def keys_of(pack: bytes) -> list[bytes]:
    """The keys of the requests in a pack, which need not be unpacked for it."""
    end = 4 + int.from_bytes(pack[:4]) * KEY_BYTES
    return [pack[place : place + KEY_BYTES] for place in range(4, end, KEY_BYTES)]


def unpack(pack: bytes) -> list[ImageRequest]:
    """The requests of a pack, in the order of `keys_of`."""
    start = 4 + int.from_bytes(pack[:4]) * KEY_BYTES
    return [_request(values) for values in json.loads(zlib.decompress(pack[start:]))]


def _values(request: ImageRequest) -> list:
    values = [getattr(request, name) for name in _FIELDS]
    values[_SETTINGS] = request.settings.chosen
    return values


def _request(values: list) -> ImageRequest:
    for place in _PAIRS:
        values[place] = tuple(values[place])
    values[_SETTINGS] = Settings.of(values[_SETTINGS])
    return ImageRequest(*values)


class ShardCoder(coders.Coder):
    """Registered for `Shard` when this module is imported."""

    def encode(self, value: Shard) -> bytes:
        text = json.dumps([value.name, value.width, value.height, [_values(request) for request in value.requests]])
        return zlib.compress(text.encode(), _LEVEL)

    def decode(self, encoded: bytes) -> Shard:
        name, width, height, requests = json.loads(zlib.decompress(encoded))
        return Shard(name, width, height, tuple(map(_request, requests)))

    def is_deterministic(self) -> bool:
        return True

    def to_type_hint(self):
        return Shard


class PredictionCoder(coders.Coder):
    """Registered for `PredictionResult` when this module is imported.

    Predictions cross no shuffle, but to count bytes Beam encodes some elements of every step: 200 MB of pixels at a
    time, for which the device would wait, and results that were meant to be read while they are made.
    """

    def encode(self, value: PredictionResult) -> bytes:
        return pickle.dumps(value)

    def decode(self, encoded: bytes) -> PredictionResult:
        return pickle.loads(encoded)

    def estimate_size(self, value: PredictionResult) -> int:
        shard = cast(Shard, value.example)
        return len(shard.requests) * shard.height * shard.width * 3


coders.registry.register_coder(Shard, ShardCoder)
coders.registry.register_coder(PredictionResult, PredictionCoder)
