"""The whole graph on a fake model that paints the digest of what it was asked for."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from pipeline.report import write_report
from tests.fakes import FakeHandler, painted, rejects, rows, run, tree, write_jsonl
from transforms import storage
from transforms.commits import read_commits
from transforms.counts import Counts, read_counts
from transforms.formats import OutputFormat
from transforms.read import InputError


def assert_pairs(output):
    """Every picture is the one of its own row."""
    for row in rows(output):
        with Image.open(row["path"]) as picture:
            assert np.array_equal(np.asarray(picture), painted(row["digest"], row["height"], row["width"]))
            assert json.loads(picture.text["lightmill"])["prompt"] == row["prompt"]


def test_every_record_of_a_messy_input_has_exactly_one_fate(tmp_path):
    lines = [
        {"prompt": "a cat", "id": "1"},
        {"prompt": "a cat", "id": "1"},  # a duplicate
        {"prompt": "a dog", "id": "1"},  # the same id, another picture
        {"prompt": "four", "id": "../../x", "num_images_per_prompt": 4, "seed": 7},
        {"prompt": "bad", "id": "a/b.c" + "x" * 400},  # the model fails
        {"prompt": "wide", "width": 16},
        {"prompt": "odd", "width": 9},
        {"prompt": 42},
        {"promt": "typo"},
        {"prompt": "l" * 400},  # longer than the text encoder
    ]
    (tmp_path / "in").mkdir()
    with write_jsonl(tmp_path / "in" / "a.jsonl", lines).open("ab") as file:
        file.write(b'\n\n{"prompt": "\xff"}\nnot json\n{"prompt": "last"}')
    (tmp_path / "in" / "b.txt").write_text("one\n\ntwo\n")
    output = tmp_path / "out"
    run(tmp_path / "in" / "*", output, FakeHandler(rejected=["bad"]))
    assert read_counts(str(output)) == Counts(
        records_read=15,
        records_rejected=5,
        records_expanded=10,
        images_requested=13,
        duplicates=1,
        written=11,
        rejected=1,
        padded_slots=-11 % 4 + -1 % 4,  # of the two sizes
        truncated=1,
    )
    summary = write_report(str(output), fresh=True)
    assert summary["output"] == {"shards": 4, "images": 11, "bytes": summary["output"]["bytes"], "rejected": 1}
    found = [(row["source"], row["position"]) for row in [*rows(output), *rejects(output)]]
    assert sorted(set(found)) == sorted(
        [("a.jsonl", position) for position in (*range(1, 11), 13, 14, 15) if position != 2]
        + [("b.txt", 1), ("b.txt", 3)]
    )
    assert_pairs(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_each_image_of_a_record_says_the_seed_that_makes_it_alone(tmp_path):
    run(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "seed": 7, "num_images_per_prompt": 4}]), tmp_path / "out")
    third = next(row for row in rows(tmp_path / "out") if row["image_index"] == 2)
    run(write_jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "seed": third["seed"]}]), tmp_path / "alone")
    (alone,) = rows(tmp_path / "alone")
    assert third["seed"] == 9 and alone["path"].read_bytes() == third["path"].read_bytes()


@pytest.mark.parametrize("count", [1, 5])
def test_padding_is_dropped_and_no_real_prompt_with_it(tmp_path, count):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{number}"} for number in range(count)])
    run(path, tmp_path / "out", batch_size=8, images_per_shard=8)
    assert sorted(row["prompt"] for row in rows(tmp_path / "out")) == [f"p{number}" for number in range(count)]
    assert read_counts(str(tmp_path / "out")).padded_slots == 8 - count


def test_the_order_of_records_with_ids_and_the_place_of_the_input_change_no_picture(tmp_path):
    records = [{"prompt": f"p{number}", "id": number} for number in range(20)]
    for folder, given in (("one", records), ("two", records[::-1])):
        (tmp_path / folder).mkdir()
        run(write_jsonl(tmp_path / folder / "a.jsonl", given), tmp_path / folder / "out")
    pictures = [
        {name: data for name, data in tree(tmp_path / folder / "out").items() if name.endswith(".png")}
        for folder in ("one", "two")
    ]
    assert len(pictures[0]) == 20 and pictures[0] == pictures[1]


def test_prompts_without_seeds_do_not_share_their_noise(tmp_path):
    run(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}, {"prompt": "p"}]), tmp_path / "out")
    one, two = rows(tmp_path / "out")
    assert one["seed"] != two["seed"]


def test_a_second_run_makes_nothing_and_changes_nothing(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{number}"} for number in range(9)] + [{"prompt": ""}])
    run(path, tmp_path / "out", FakeHandler(rejected=["p3"]))
    first = tree(tmp_path / "out")
    run(path, tmp_path / "out", FakeHandler(answer=_never))
    assert tree(tmp_path / "out") == first
    counts = read_counts(str(tmp_path / "out"))
    assert (counts.finished_before, counts.rejected_before, counts.written) == (9, 1, 0)
    write_report(str(tmp_path / "out"))


def _never(results):
    raise AssertionError("nothing was to be made")


def test_rejected_images_are_made_when_asked_for_and_then_no_reject_is_left(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{number}"} for number in range(6)])
    output = tmp_path / "out"
    run(path, output, FakeHandler(rejected=["p1", "p4"]))
    assert {json.loads(row["record"])["prompt"] for row in rejects(output)} == {"p1", "p4"}
    run(path, output, FakeHandler(rejected=["p4"]), retry_rejected=True)
    summary = write_report(str(output))
    assert summary["counts"]["written"] == summary["counts"]["rejected"] == 1
    assert summary["output"]["images"] == 5 and summary["output"]["rejected"] == 1
    assert {json.loads(row["record"])["prompt"] for row in rejects(output)} == {"p4"}
    run(path, output, retry_rejected=True)
    assert write_report(str(output))["output"]["images"] == 6
    assert rejects(output) == []
    assert_pairs(output)


class KilledError(RuntimeError):
    """Stands for the end of the process."""


@pytest.mark.parametrize("files", [0, 3, 7, 12, 16])
def test_a_killed_run_started_again_ends_like_one_that_was_never_killed(tmp_path, monkeypatch, files):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{number}"} for number in range(11)])
    handler = FakeHandler(rejected=["p5"])
    run(path, tmp_path / "whole", handler)
    write_report(str(tmp_path / "whole"), fresh=True)
    real, written = storage.write_file, []

    def killed(output, name, data):
        if len(written) >= files:
            storage.write_file = lambda *_: (_ for _ in ()).throw(KilledError())
            raise KilledError
        written.append(name)
        real(output, name, data)

    monkeypatch.setattr(storage, "write_file", killed)
    with pytest.raises(Exception, match="KilledError"):
        run(path, tmp_path / "killed", handler)
    monkeypatch.setattr(storage, "write_file", real)
    assert set(written) == set(tree(tmp_path / "killed")) < set(tree(tmp_path / "whole"))
    run(path, tmp_path / "killed", handler)
    write_report(str(tmp_path / "killed"))
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")
    counts = read_counts(str(tmp_path / "killed"))
    assert counts.written + counts.finished_before == 10


def test_an_input_that_grew_makes_only_what_is_new(tmp_path):
    records = [{"prompt": f"p{number}"} for number in range(10)]
    run(write_jsonl(tmp_path / "a.jsonl", records), tmp_path / "out")
    run(write_jsonl(tmp_path / "a.jsonl", [*records, {"prompt": "new"}]), tmp_path / "out")
    assert read_counts(str(tmp_path / "out")).written == 1
    assert len(rows(tmp_path / "out")) == 11


def test_rejects_of_the_input_are_mended_and_fed_in_again(tmp_path):
    run(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "width": 9, "note": "n"}]), tmp_path / "out")
    (reject,) = rejects(tmp_path / "out")
    record = {**json.loads(reject["record"]), "width": 16}
    run(write_jsonl(tmp_path / "a.jsonl", [record]), tmp_path / "out")
    assert rejects(tmp_path / "out") == []
    (row,) = rows(tmp_path / "out")
    assert (row["width"], row["extra"]) == (16, '{"note": "n"}')


@pytest.mark.parametrize(
    "answer",
    [lambda results: results[:-1], lambda results: [*results, results[0]], lambda results: []],
)
def test_a_model_that_answers_too_little_or_too_much_fails_the_run(tmp_path, answer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}])
    with pytest.raises(Exception, match="do not answer its 1 requests"):
        run(path, tmp_path / "out", FakeHandler(answer=answer))
    assert list(read_commits(str(tmp_path / "out"))) == []


def test_a_table_without_prompts_stops_before_anything_is_made(tmp_path):
    (tmp_path / "a.csv").write_text("promt\na\n")
    with pytest.raises(InputError, match="no prompt column"):
        run(tmp_path / "a.csv", tmp_path / "out")


def test_a_table_of_hostile_ids_and_named_columns_goes_through(tmp_path):
    ids = ["../../x", "..", "a/b", "a.b.c", "x" * 300, "<script>", " ", "ü\0", "CON"]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["key", "better", "prompt"], *([name, f"p{name[:3]}", "old"] for name in ids)])
    run(tmp_path / "a.csv", tmp_path / "out", prompt_column="better", id_column="key")
    (reject,) = rejects(tmp_path / "out")  # the NUL, which is in the prompt too
    assert "U+0000" in reject["reason"]
    assert {row["id"] for row in rows(tmp_path / "out")} == {name for name in ids if "\0" not in name}
    assert_pairs(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "out"]


# The first shards hold no negative prompt and no extra column, the later ones do, of several types.
MIXED = [{"prompt": f"p{number}"} for number in range(6)] + [
    {"prompt": f"q{number}", "width": 16, "negative_prompt": "bad", "note": note, "id": f"a\0{number}"}
    for number, note in enumerate([1, "text", None, [1], {"a": None}, 2.5])
]


def assert_is_the_mixed_dataset(samples):
    for picture, row in samples:
        assert np.array_equal(np.asarray(picture), painted(row["digest"], row["height"], row["width"]))
        assert row["negative_prompt"] == ("bad" if row["prompt"].startswith("q") else "")
    assert {row["prompt"] for _, row in samples} == {record["prompt"] for record in MIXED} - {"p2", "p3"}
    assert len(samples) == 10


@pytest.mark.parametrize("how", ["folder", "imagefolder", "webdataset", "parquet"])
def test_the_output_loads_as_a_dataset_with_every_picture_beside_its_prompt(tmp_path, how):
    datasets = pytest.importorskip("datasets")
    output, output_format = tmp_path / "out", OutputFormat("folder" if how == "imagefolder" else how)
    handler = FakeHandler(rejected=["p2", "p3"])
    run(write_jsonl(tmp_path / "a.jsonl", MIXED), output, handler, output_format=output_format)
    write_report(str(output), fresh=True, output_format=output_format)
    arguments = {"data_dir": str(output / "images")} if how == "imagefolder" else {}
    loaded = datasets.load_dataset(
        how if how == "imagefolder" else str(output), split="train", cache_dir=str(tmp_path / "cache"), **arguments
    )
    if how == "webdataset":
        assert_is_the_mixed_dataset([(sample["png"], sample["json"]) for sample in loaded])
    else:
        assert_is_the_mixed_dataset([(row["image"], row) for row in loaded])


def test_shards_are_read_by_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    output_format = OutputFormat("webdataset", "webp")
    run(write_jsonl(tmp_path / "a.jsonl", MIXED), tmp_path / "out", output_format=output_format)
    urls = [str(path) for path in sorted((tmp_path / "out").glob("shards/*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode("pil"))
    assert sorted(sample["txt"] for sample in samples) == sorted(record["prompt"] for record in MIXED)
    for sample in samples:
        assert sample["__key__"] == sample["json"]["key"] and sample["txt"] == sample["json"]["prompt"]
        assert sample["webp"].size == (sample["json"]["width"], sample["json"]["height"])


@pytest.mark.parametrize("output_format", [OutputFormat("webdataset"), OutputFormat("parquet", "jpeg")])
def test_other_formats_resume_as_a_folder_does(tmp_path, output_format, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{number}"} for number in range(11)])
    handler = FakeHandler(rejected=["p5"])
    run(path, tmp_path / "whole", handler, output_format=output_format)
    run(path, tmp_path / "resumed", handler, output_format=output_format)
    first, *_ = sorted((tmp_path / "resumed/commits").iterdir())
    first.unlink()
    run(path, tmp_path / "resumed", handler, output_format=output_format)
    assert tree(tmp_path / "resumed") == tree(tmp_path / "whole")
    assert 3 <= read_counts(str(tmp_path / "resumed")).written <= 4


def test_results_reach_their_files_as_they_are_made_and_are_never_pickled(tmp_path):
    def one_by_one(results):
        yield from results  # which cannot be pickled, nor read twice

    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{number}"} for number in range(9)])
    run(path, tmp_path / "out", FakeHandler(answer=one_by_one))
    assert len(rows(tmp_path / "out")) == 9
