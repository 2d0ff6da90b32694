"""What crosses a shuffle comes out as it went in."""

import dataclasses

import pytest

from model_handlers.recipe import Shard
from tests.fakes import RECIPE, SAMPLER
from transforms import coders
from transforms.coders import PackByBucket, ShardCoder, keys_of, unpack
from transforms.records import PromptRecord
from transforms.requests import expand

REQUESTS = [
    request
    for number, fields in enumerate(
        [
            {},
            {"negative_prompt": "", "guidance_scale": 0.1 + 0.2},
            {"seed": 2**63 - 1, "original_size": (1, 2)},
            {"clip_skip": 1, "sigmas": (9.5, 0.0)},
        ]
    )
    for request in expand(
        PromptRecord("a/\u2028.csv", number, "\0\n", "ü \U0001f408 \"'", fields, '{"n": [1]}'), RECIPE, SAMPLER
    )
]


def pack(requests, bucket_of):
    packer = PackByBucket(bucket_of)
    packer.start_bundle()
    packs = [made for request in requests for made in packer.process(request)]
    return packs + [made.value for made in packer.finish_bundle()]


def test_requests_are_unpacked_as_they_were():
    ((bucket, packed),) = pack(REQUESTS, lambda _: 7)
    assert bucket == 7
    assert unpack(packed) == REQUESTS and [type(request.original_size) for request in unpack(packed)] == [tuple] * 4
    assert keys_of(packed) == [bytes.fromhex(request.key) for request in REQUESTS]


@pytest.mark.parametrize("pending", [1, 4, 100])
def test_every_request_is_in_one_pack_of_its_bucket(monkeypatch, pending):
    monkeypatch.setattr(coders, "_MAX_PENDING", pending)
    requests = [dataclasses.replace(REQUESTS[0], id=str(number)) for number in range(10)]
    packs = pack(requests, lambda request: int(request.id) % 3)
    unpacked = [(bucket, request) for bucket, packed in packs for request in unpack(packed)]
    assert sorted(unpacked, key=lambda item: item[1].id) == [(int(request.id) % 3, request) for request in requests]


def test_a_shard_is_decoded_as_it_was():
    shard = Shard("a" * 20, 8, 16, tuple(REQUESTS))
    assert ShardCoder().decode(ShardCoder().encode(shard)) == shard
