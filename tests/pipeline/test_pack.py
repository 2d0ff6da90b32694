"""Packing changes how images are stored, and nothing else about them."""

import json

import pytest

from pipeline.__main__ import main
from pipeline.output import write_recipe
from pipeline.verify import verify
from tests.fakes import RECIPE, FakeHandler, rows, run, tree, write_jsonl
from transforms.commits import read_commits
from transforms.formats import FORMATS, OutputFormat


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack")
    write_recipe(str(folder / "out"), RECIPE, OutputFormat())
    records = [{"prompt": f"p{number}", "note": number} for number in range(11)]
    run(write_jsonl(folder / "a.jsonl", records), folder / "out", FakeHandler(rejected=["p7"]))
    return folder / "out"


def pack(source, output, kind="webdataset", length=4):
    return main(["pack", str(source), "--format", kind, "--output", str(output), "--samples_per_shard", str(length)])


@pytest.mark.parametrize("kind", FORMATS)
def test_every_image_and_row_is_in_the_packed_output_which_is_whole(source, tmp_path, kind, capsys):
    assert pack(source, tmp_path / "packed", kind) == 0
    assert capsys.readouterr().out == f"{tmp_path}/packed: 10 images\n"
    assert list(verify(str(tmp_path / "packed"))) == []
    commits = list(read_commits(str(tmp_path / "packed")))
    assert [(commit.shard, len(commit.images)) for commit in commits] == [("000000", 4), ("000001", 4), ("000002", 2)]
    packed = {}
    for commit in commits:
        packed_rows, files = FORMATS[kind].read(str(tmp_path / "packed"), commit.shard)
        contents = dict(files)
        packed |= {row["key"]: (row, contents[row["file_name"]]) for row in packed_rows}
    expected = {row["key"]: (row, row.pop("path").read_bytes()) for row in rows(source)}
    assert packed == expected and len(packed) == 10
    before = tree(tmp_path / "packed")
    assert pack(source, tmp_path / "packed", kind) == 0
    assert tree(tmp_path / "packed") == before


def test_packing_that_was_killed_goes_on_and_ends_with_the_same_bytes(source, tmp_path):
    pack(source, tmp_path / "whole")
    pack(source, tmp_path / "killed")
    (tmp_path / "killed/commits/000001.json").unlink()
    (tmp_path / "killed/README.md").unlink()
    (tmp_path / "killed/shards/000001.tar").write_bytes(b"half")
    assert pack(source, tmp_path / "killed") == 0
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")
    (tmp_path / "killed/commits/000001.json").unlink()
    (tmp_path / "killed/shards/000007.tar").write_bytes(b"half")
    assert pack(source, tmp_path / "killed") == 0
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


def test_what_does_not_fit_together_is_refused(source, tmp_path, capsys):
    pack(source, tmp_path / "packed")
    for arguments, message in (
        ({"length": 5}, "in other lengths"),
        ({"kind": "parquet"}, "format was 'webdataset' and is 'parquet'"),
    ):
        assert pack(source, tmp_path / "packed", **arguments) == 2
        assert message in capsys.readouterr().err
    assert pack(tmp_path, tmp_path / "other") == 2


def test_an_image_that_has_changed_is_not_packed(source, tmp_path, capsys):
    output = tmp_path / "out"
    for name, data in tree(source).items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes(data)
    row = rows(output)[-1]
    row["path"].write_bytes(b"other")
    assert pack(output, tmp_path / "packed") == 1
    assert f"{row['key']}.png of shard" in capsys.readouterr().err
    row["path"].unlink()
    assert pack(output, tmp_path / "packed") == 1
    metadata = row["path"].with_name("metadata.jsonl")
    metadata.write_text(json.dumps({"key": "x"}) + "\n")
    assert pack(output, tmp_path / "packed") == 1
