"""GroupIntoShards: requests of one size and guidance become full batches, and the same ones in every run.

Two rounds. Requests are spread over buckets by their keys; each bucket is sorted and cut into whole shards. What is
left of the buckets, less than a shard each, is brought together once more for every kind, so only one shard a kind is
short, and one batch a kind is padded. A kind is what a batch has in common: its size, and when it is guided (see
`model_handlers.sampling`), which is always or never unless records set guidance_interval.

A shard is a run of a sorted list that begins at a multiple of its length. So when the shards that were committed are
taken away, the others stay as they were: a resumed run makes the very shards that an uninterrupted one would have made.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial

import apache_beam as beam

from model_handlers.recipe import ImageRequest, Shard
from model_handlers.sampling import Sampler, guided
from transforms.coders import PackByBucket, unpack

_BUCKETS = 1024
# Width, height, and the evaluations between which a request is guided.
Kind = tuple[int, int, int, int]


class GroupIntoShards(beam.PTransform):
    """Groups requests into `.shards` (Shard) of `images_per_shard`; `.fates` counts padded slots.

    At most one shard of each kind is shorter. `images_per_shard` must be a multiple of `batch_size`, the rows of the
    compiled program over all chips.
    """

    def __init__(self, batch_size: int, images_per_shard: int, sampler: Sampler):
        super().__init__()
        if batch_size < 1 or images_per_shard < 1 or images_per_shard % batch_size:
            raise ValueError(f"images_per_shard ({images_per_shard}) must be a multiple of the batch of {batch_size}")
        self._batch_size = batch_size
        self._images_per_shard = images_per_shard
        self._sampler = sampler

    def expand(self, requests):
        pack = PackByBucket(partial(_bucket, sampler=self._sampler))
        buckets = (
            requests
            | "Pack" >> beam.ParDo(pack).with_output_types(tuple[tuple[Kind, int], bytes])
            | "Buckets" >> beam.GroupByKey()
            | "CutBuckets"
            >> beam.ParDo(_CutBucket(self._images_per_shard))
            .with_output_types(Shard)
            .with_outputs("rest", main="shards")
        )
        rest = (
            buckets.rest
            | "ByKind" >> beam.Map(_by_kind, self._sampler)
            | "Kinds" >> beam.GroupByKey()
            | "CutKinds" >> beam.FlatMap(_cut_kinds, self._images_per_shard)
        )
        return (
            (buckets.shards, rest)
            | "AllShards" >> beam.Flatten()
            # Breaks fusion: else one worker would make all shards of a bucket, one after the other.
            | "SpreadShards" >> beam.Reshuffle()
            | "Padding"
            >> beam.ParDo(_CountPadding(self._batch_size)).with_output_types(Shard).with_outputs("fates", main="shards")
        )


def _kind(request: ImageRequest, sampler: Sampler) -> Kind:
    return request.width, request.height, *guided(request, sampler)


def _by_kind(request: ImageRequest, sampler: Sampler) -> tuple[Kind, ImageRequest]:
    return _kind(request, sampler), request


def _cut_kinds(group: tuple[Kind, Iterable[ImageRequest]], length: int) -> Iterable[Shard]:
    return _cut(group[1], length)


def _bucket(request: ImageRequest, sampler: Sampler) -> tuple[Kind, int]:
    # A key is a hash already, so its first digits are spread evenly.
    return _kind(request, sampler), int(request.key[:8], 16) % _BUCKETS


def _cut(group: Iterable[ImageRequest], length: int) -> Iterator[Shard]:
    # By steps first: a batch takes as many steps as its longest row.
    ordered = sorted(group, key=lambda request: (request.num_inference_steps, request.key))
    for start in range(0, len(ordered), length):
        members = tuple(ordered[start : start + length])
        yield Shard(_name(members), members[0].width, members[0].height, members)


def _name(members: tuple[ImageRequest, ...]) -> str:
    # A hash of what is inside: the same in every run, and spread over an object store's key ranges.
    return hashlib.sha256("".join(request.key for request in members).encode()).hexdigest()[:20]


class _CutBucket(beam.DoFn):
    def __init__(self, length: int):
        self._length = length

    def process(self, element):
        _, packs = element
        for shard in _cut((request for pack in packs for request in unpack(pack)), self._length):
            if len(shard.requests) == self._length:
                yield shard
            else:
                yield from (beam.pvalue.TaggedOutput("rest", request) for request in shard.requests)


class _CountPadding(beam.DoFn):
    def __init__(self, batch_size: int):
        self._batch_size = batch_size

    def process(self, shard: Shard):
        yield beam.pvalue.TaggedOutput("fates", ("padded_slots", -len(shard.requests) % self._batch_size))
        yield shard
