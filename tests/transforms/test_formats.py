"""Every format holds the same pictures and rows, whole, and again with the same bytes."""

import dataclasses
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from model_handlers.recipe import ImageResult
from tests.fakes import RECIPE, painted, tree
from tests.transforms.test_write import draw, make_shard, reject
from transforms.formats import FORMATS, OutputFormat
from transforms.metadata import SCHEMA
from transforms.pictures import IMAGE_FORMATS, text_of
from transforms.write import write_shard

EVERY = [OutputFormat(kind, image) for kind in FORMATS for image in IMAGE_FORMATS]


@pytest.mark.parametrize("output_format", EVERY, ids=lambda each: f"{each.format}-{each.image_format}")
def test_what_is_written_is_read_back_and_written_again_has_the_same_bytes(tmp_path, output_format):
    shard = make_shard(negative_prompt="bad")
    results = draw(shard)
    for folder, given in (("once", results), ("twice", results), ("twice", results[::-1])):
        write_shard(str(tmp_path / folder), RECIPE, shard, given, output_format)
    assert tree(tmp_path / "once") == tree(tmp_path / "twice")
    kind = FORMATS[output_format.format]
    assert list(kind.shards(str(tmp_path / "once"))) == [shard.name]
    rows, files = kind.read(str(tmp_path / "once"), shard.name)
    files = dict(files)
    assert sorted(row["key"] for row in rows) == sorted(request.key for request in shard.requests)
    assert {row["file_name"] for row in rows} == set(files)
    for row in rows:
        assert list(row) == list(SCHEMA)
        data = files[row["file_name"]]
        said = json.loads(text_of(data))
        assert (said["prompt"], said["digest"]) == (row["prompt"], row["digest"])
        with Image.open(io.BytesIO(data)) as picture:
            assert picture.size == (8, 8)
            if output_format.image_format == "png":
                assert np.array_equal(np.asarray(picture), painted(row["digest"], 8, 8))


@pytest.mark.parametrize("kind", FORMATS)
def test_nothing_is_left_of_an_attempt_that_ended_otherwise(tmp_path, kind):
    shard = make_shard()
    results = draw(shard)
    nothing = [reject(result) for result in results]
    for last in (results, nothing):
        output = tmp_path / f"{last is nothing}"
        for given in (nothing, results, [*results[:3], reject(results[3])], last):
            write_shard(str(output / "retried"), RECIPE, shard, given, OutputFormat(kind))
        write_shard(str(output / "fresh"), RECIPE, shard, last, OutputFormat(kind))
        assert tree(output / "retried") == tree(output / "fresh")
        assert list(FORMATS[kind].shards(str(output / "fresh"))) == ([shard.name] if last is results else [])


def test_a_tar_holds_nothing_of_the_machine(tmp_path):
    shard = make_shard(2)
    write_shard(str(tmp_path), RECIPE, shard, draw(shard), OutputFormat("webdataset"))
    with tarfile.open(tmp_path / f"shards/{shard.name}.tar") as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == sorted(
        f"{request.key}.{suffix}" for request in shard.requests for suffix in ("json", "png", "txt")
    )
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}


def test_quality_decides_lossy_files_and_belongs_to_them_alone(tmp_path):
    sizes = []
    smooth = np.add.outer(np.arange(64), np.arange(64))[..., None].repeat(3, 2).astype(np.uint8)
    for quality in (20, 95):
        sizes.append(len(IMAGE_FORMATS["jpeg"].encode(smooth, "x", quality)))
    assert sizes[0] < sizes[1]
    assert OutputFormat(image_format="webp") == OutputFormat(image_format="webp", image_quality=95)
    with pytest.raises(ValueError, match="png has no quality"):
        OutputFormat(image_quality=95)


@pytest.mark.parametrize("image_format", IMAGE_FORMATS)
def test_the_longest_prompt_fits_or_is_left_out(tmp_path, image_format):
    shard = make_shard(1)
    long = "ü" * 100_000
    shard = dataclasses.replace(shard, requests=(dataclasses.replace(shard.requests[0], prompt=long),))
    (request,) = shard.requests
    result = ImageResult(request.key, painted("x", 8, 8))
    write_shard(str(tmp_path), RECIPE, shard, [result], OutputFormat("folder", image_format))
    ((_, data),) = FORMATS["folder"].read(str(tmp_path), shard.name)[1]
    said = json.loads(text_of(data))
    assert said["seed"] == request.seed
    assert said.get("prompt") == (None if image_format == "jpeg" else long)


def test_a_damaged_file_is_an_error(tmp_path):
    shard = make_shard(1)
    for kind in ("webdataset", "parquet"):
        write_shard(str(tmp_path), RECIPE, shard, draw(shard), OutputFormat(kind))
        (path,) = tmp_path.glob(f"shards/*{FORMATS[kind].suffix}")
        path.write_bytes(path.read_bytes()[:700])
        with pytest.raises((ValueError, OSError)):
            list(FORMATS[kind].read(str(tmp_path), shard.name)[1])
