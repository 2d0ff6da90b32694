"""A shard on disk: the right picture under the right name, complete, and again the same bytes."""

import dataclasses
import hashlib
import json
import threading
import time

import numpy as np
import pytest
from apache_beam.ml.inference.base import PredictionResult
from PIL import Image

from model_handlers.recipe import ImageResult, Shard
from tests.fakes import RECIPE, SAMPLER, painted, rejects, rows, tree
from transforms import storage, write
from transforms.commits import read_commits
from transforms.formats import OutputFormat
from transforms.metadata import SCHEMA
from transforms.pictures import IMAGE_FORMATS
from transforms.records import PromptRecord, parse
from transforms.requests import expand
from transforms.write import write_shard


def make_shard(count=4, name="a" * 20, **fields):
    requests = [
        request
        for number in range(count)
        for request in expand(
            PromptRecord("in.jsonl", number + 1, f"id{number}", f"p{number}", fields), RECIPE, SAMPLER
        )
    ]
    return Shard(name, 8, 8, tuple(requests))


def draw(shard):
    return [ImageResult(r.key, painted(r.digest, r.height, r.width), num_tokens=5) for r in shard.requests]


def reject(result):
    return ImageResult(result.key, None, "the latents are not finite")


def test_each_picture_carries_its_own_seed_and_all_that_made_it(tmp_path):
    shard = make_shard(negative_prompt="bad", seed=7, num_images_per_prompt=2)
    write_shard(str(tmp_path), RECIPE, shard, draw(shard))
    for request in shard.requests:
        with Image.open(tmp_path / f"images/{shard.name}/{request.key}.png") as picture:
            said = json.loads(picture.text["lightmill"])
            assert np.array_equal(np.asarray(picture), painted(request.digest, 8, 8))
        assert (said["prompt"], said["seed"]) == (request.prompt, request.seed)
        fields = {name: said[name] for name in ("prompt", "negative_prompt", "seed", "width", "num_inference_steps")}
        again = parse("elsewhere.jsonl", 9, {**fields, "id": "other"})
        assert expand(again, RECIPE, SAMPLER)[0].digest == request.digest == said["digest"]
        assert {name: said[name] for name in RECIPE.of_model()} == RECIPE.of_model()


def test_every_row_has_every_column_with_the_declared_type(tmp_path):
    shard = make_shard()
    other = make_shard(1, "b" * 20, negative_prompt="", original_size=(1, 2))
    for each in (shard, other):
        write_shard(str(tmp_path), RECIPE, each, draw(each))
    types = {"string": str, "int64": int, "float64": float, "bool": bool, "list<int64>": list}
    for row in rows(tmp_path):
        path = row.pop("path")
        assert list(row) == list(SCHEMA)
        assert {name: type(row[name]) for name in row} == {name: types[kind] for name, kind in SCHEMA.items()}
        assert row["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [row["negative_prompt_set"] for row in rows(tmp_path)] == [False] * 4 + [True]


def test_a_shard_written_again_has_the_same_bytes(tmp_path):
    shard = make_shard()
    results = draw(shard)
    for folder, given in (("once", results), ("twice", results), ("twice", results[::-1])):
        write_shard(str(tmp_path / folder), RECIPE, shard, given)
    assert tree(tmp_path / "once") == tree(tmp_path / "twice")
    assert len(tree(tmp_path / "once")) == 4 + 2


def test_a_reject_is_listed_with_its_reason_and_a_record_that_can_be_fed_in_again(tmp_path):
    shard = make_shard(2, seed=5, width=16, crops_coords_top_left=(1, 2))
    shard = dataclasses.replace(shard, width=16)
    results = draw(shard)
    written = write_shard(str(tmp_path), RECIPE, shard, [results[0], reject(results[1])])
    assert (written.written, written.rejected) == (1, 1)
    (row,) = rejects(tmp_path)
    assert (row["id"], row["position"], row["stage"]) == ("id1", 2, "generate")
    assert row["reason"] == "the latents are not finite"
    again = parse("x", 1, json.loads(row["record"]))
    assert expand(again, RECIPE, SAMPLER)[0].key == shard.requests[1].key == row["key"]
    (commit,) = read_commits(str(tmp_path))
    assert [image.key for image in commit.images] == [shard.requests[0].key]
    assert [entry.key for entry in commit.rejected] == [shard.requests[1].key]


def test_a_shard_without_a_picture_leaves_no_metadata(tmp_path):
    shard = make_shard(1)
    write_shard(str(tmp_path), RECIPE, shard, [reject(draw(shard)[0])])
    assert sorted(tree(tmp_path)) == [f"commits/{shard.name}.json", f"rejects/{shard.name}.jsonl"]


def test_nothing_is_left_of_an_attempt_that_ended_otherwise(tmp_path):
    shard = make_shard()
    results = draw(shard)
    write_shard(str(tmp_path / "retried"), RECIPE, shard, [*results[:3], reject(results[3])])
    write_shard(str(tmp_path / "retried"), RECIPE, shard, [reject(results[0]), *results[1:]])
    write_shard(str(tmp_path / "retried"), RECIPE, shard, results)
    write_shard(str(tmp_path / "fresh"), RECIPE, shard, results)
    assert tree(tmp_path / "retried") == tree(tmp_path / "fresh")


def _swap_keys(results):
    return [dataclasses.replace(results[0], key=results[1].key), *results[1:]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda results: results[:-1],
        lambda results: [*results, results[0]],
        lambda results: [*results, ImageResult("x" * 32, None, "padding")],
        _swap_keys,
        lambda results: [dataclasses.replace(results[0], image=None), *results[1:]],
        lambda results: [dataclasses.replace(results[0], reject_reason="?"), *results[1:]],
        lambda results: [dataclasses.replace(results[0], image=results[0].image[:4]), *results[1:]],
        lambda results: [dataclasses.replace(results[0], image=results[0].image / 255), *results[1:]],
    ],
)
def test_results_that_do_not_answer_the_requests_are_never_written(tmp_path, spoil):
    shard = make_shard()
    with pytest.raises(ValueError, match=f"shard {shard.name}"):
        write_shard(str(tmp_path), RECIPE, shard, spoil(draw(shard)))
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("place", range(6))
def test_a_shard_does_not_count_before_everything_else_of_it_is_there(tmp_path, monkeypatch, place):
    shard = make_shard()
    results = [*draw(shard)[:3], reject(draw(shard)[3])]
    write_shard(str(tmp_path / "whole"), RECIPE, shard, results)
    assert len(tree(tmp_path / "whole")) == 6
    real, written = storage.write_file, []

    def killed(output, name, data):
        if len(written) == place:
            raise KeyboardInterrupt
        written.append(name)
        real(output, name, data)

    monkeypatch.setattr(storage, "write_file", killed)
    with pytest.raises(KeyboardInterrupt):
        write_shard(str(tmp_path / "killed"), RECIPE, shard, results)
    assert len(tree(tmp_path / "killed")) == place
    assert list(read_commits(str(tmp_path / "killed"))) == []
    monkeypatch.setattr(storage, "write_file", real)
    write_shard(str(tmp_path / "killed"), RECIPE, shard, results)
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


class _Bundle:
    """A bundle of the DoFn, by hand."""

    def __init__(self, output, monkeypatch, write_one):
        monkeypatch.setattr(write, "_write", write_one)
        self.dofn = write._WriteShard(str(output), RECIPE, OutputFormat())
        self.dofn.setup()
        self.dofn.start_bundle()

    def process(self, name, results=()):
        return list(self.dofn.process(PredictionResult(make_shard(name=name), results)))


def test_the_device_goes_on_while_two_shards_are_written_and_waits_with_the_third(tmp_path, monkeypatch):
    release = threading.Event()
    started = []

    def slow(output, recipe, shard, *_):
        started.append(shard.name)
        release.wait(5)
        return write.WrittenShard(shard.name, 0, 0, 0, 0)

    bundle = _Bundle(tmp_path, monkeypatch, slow)
    assert bundle.process("1") == bundle.process("2") == []
    threading.Timer(0.2, release.set).start()
    begin = time.monotonic()
    (first,) = bundle.process("3")[:1]
    assert time.monotonic() - begin > 0.1 and first.name == "1"
    rest = [value.value.name for value in bundle.dofn.finish_bundle()]
    assert sorted(started) == ["1", "2", "3"] and set(rest) <= {"2", "3"}
    bundle.dofn.teardown()


def test_an_image_is_encoded_before_the_model_has_made_the_next(tmp_path, monkeypatch):
    encoded = threading.Event()
    png = IMAGE_FORMATS["png"]

    def encode(*arguments):
        encoded.set()
        return png.encode(*arguments)

    def results():
        first, *others = draw(make_shard())
        yield first
        assert encoded.wait(5)
        yield from others

    monkeypatch.setitem(IMAGE_FORMATS, "png", dataclasses.replace(png, encode=encode))
    bundle = _Bundle(tmp_path, monkeypatch, write._write)
    written = [*bundle.process("a" * 20, results()), *(value.value for value in bundle.dofn.finish_bundle())]
    assert [shard.written for shard in written] == [4] == [len(rows(tmp_path))]
    bundle.dofn.teardown()


def test_an_error_of_a_thread_fails_the_bundle(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("No space left on device")

    bundle = _Bundle(tmp_path, monkeypatch, fail)
    assert bundle.process("1") == []
    with pytest.raises(OSError, match="No space left"):
        list(bundle.dofn.finish_bundle())
    bundle.dofn.teardown()
