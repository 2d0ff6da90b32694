"""Fixed shapes: full batches, and the same shards whatever happened in between."""

import dataclasses
import random
from functools import partial

import apache_beam as beam
import pytest

from model_handlers.sampling import guided
from tests.fakes import RECIPE, SAMPLER, collect
from transforms import shards
from transforms.coders import PackByBucket
from transforms.records import PromptRecord
from transforms.requests import expand
from transforms.shards import GroupIntoShards


def make_requests(count, **fields):
    return [
        request
        for number in range(count)
        for request in expand(PromptRecord("a", number, str(number), "a cat", fields), RECIPE, SAMPLER)
    ]


def group(requests, batch_size=4, images_per_shard=8, seed=0):
    """The shards of the requests, by name, and their padded slots."""
    requests = list(requests)
    random.Random(seed).shuffle(requests)
    outputs = collect(
        lambda pipeline: pipeline | beam.Create(requests) | GroupIntoShards(batch_size, images_per_shard, SAMPLER)
    )
    found = {shard.name: shard for shard in outputs["shards"]}
    assert len(found) == len(outputs["shards"]) > 0
    return found, sum(count for _, count in outputs["fates"])


@pytest.fixture
def few_buckets(monkeypatch):
    """So that a small input fills buckets, as a large one does."""
    monkeypatch.setattr(shards, "_BUCKETS", 3)


@pytest.mark.parametrize(("count", "padding"), [(5, 3), (1, 3), (8, 0), (100, 0), (101, 3)])
def test_every_request_is_in_one_shard_and_only_the_last_batch_is_padded(few_buckets, count, padding):
    found, padded = group(make_requests(count))
    members = [request.id for shard in found.values() for request in shard.requests]
    assert sorted(members, key=int) == [str(number) for number in range(count)]
    assert padded == padding
    assert sum(len(shard.requests) < 8 for shard in found.values()) == (count % 8 > 0)


def test_a_large_input_has_less_than_one_batch_of_padding():
    # By the two functions that cut, without a runner: a thousand buckets, most with remainders.
    requests = [dataclasses.replace(request, digest=str(n)) for n, request in enumerate(make_requests(1) * 50_003)]
    packer = PackByBucket(partial(shards._bucket, sampler=SAMPLER))
    packer.start_bundle()
    packs = [pack for request in requests for pack in packer.process(request)]
    packs += [pack.value for pack in packer.finish_bundle()]
    buckets = {}
    for bucket, pack in packs:
        buckets.setdefault(bucket, []).append(pack)
    outputs = [out for item in buckets.items() for out in shards._CutBucket(8).process(item)]
    rest = [out.value for out in outputs if isinstance(out, beam.pvalue.TaggedOutput)]
    assert len(buckets) == 1024 and len(rest) > 1000
    whole = [out for out in outputs if not isinstance(out, beam.pvalue.TaggedOutput)]
    assert all(len(shard.requests) == 8 for shard in whole)
    last = list(shards._cut(rest, 8))
    assert sum(-len(shard.requests) % 8 for shard in last) == -50_003 % 8 == 5


def test_shards_do_not_depend_on_the_order_of_the_input(few_buckets):
    requests = make_requests(60)
    assert group(requests, seed=1) == group(requests, seed=2)


@pytest.mark.parametrize("seed", range(4))
def test_the_rest_of_a_killed_run_is_grouped_as_if_it_had_not_been_killed(few_buckets, seed):
    requests = make_requests(83) + make_requests(21, width=16)
    uninterrupted, _ = group(requests)
    committed = set(random.Random(seed).sample(sorted(uninterrupted), 7))
    gone = {request.key for name in committed for request in uninterrupted[name].requests}
    resumed, _ = group((request for request in requests if request.key not in gone), seed=seed)
    assert resumed == {name: shard for name, shard in uninterrupted.items() if name not in committed}


def test_sizes_never_share_a_shard_and_steps_are_kept_together():
    requests = make_requests(20) + make_requests(20, height=16) + make_requests(20, num_inference_steps=4)
    found, _ = group(requests, images_per_shard=4)
    for shard in found.values():
        assert {(request.width, request.height) for request in shard.requests} == {(shard.width, shard.height)}
        assert len({request.num_inference_steps for request in shard.requests}) == 1


def test_requests_that_are_guided_at_other_evaluations_never_share_a_shard(few_buckets):
    kinds = {"guidance_scale": 5.0}, {"guidance_scale": 1.0}, {"guidance_interval": (0.5, 5.0)}
    found, padded = group(request for kind in kinds for request in make_requests(9, **kind))
    for shard in found.values():
        assert len({guided(request, SAMPLER) for request in shard.requests}) == 1
    assert sorted(len(shard.requests) for shard in found.values()) == [1, 1, 1, 8, 8, 8]
    assert padded == 3 * 3


def test_a_shard_is_named_by_its_members():
    requests = make_requests(8)
    ((first, _),) = group(requests)[0].items()
    assert len(first) == 20 and int(first, 16)
    ((other, _),) = group([*requests[:7], *make_requests(1, seed=5)])[0].items()
    assert other != first


def test_a_shard_must_be_whole_batches():
    with pytest.raises(ValueError, match="multiple of the batch of 4"):
        GroupIntoShards(4, 6, SAMPLER)
