"""The report: what does not add up is an error, and what is shown is drawn from all of the output."""

import base64
import dataclasses
import io

import pytest
from PIL import Image

from pipeline.gallery import first_rejects, sample
from pipeline.options import UsageError
from pipeline.output import open_output
from pipeline.report import Inventory, page_of, reconcile, take_inventory, write_report
from tests.fakes import RECIPE, FakeHandler, run, tree, write_jsonl
from transforms.counts import AccountingError, Counts
from transforms.formats import OutputFormat

COUNTS = Counts(records_read=4, records_expanded=4, images_requested=4, finished_before=1, written=2, rejected=1)


def test_the_output_may_hold_more_than_the_run_made_unless_it_was_empty():
    reconcile(COUNTS, Inventory(shards=2, images=3, bytes=0, rejected=1), fresh=True)
    reconcile(COUNTS, Inventory(shards=9, images=50, bytes=0, rejected=7))
    for inventory in (Inventory(9, 50, 0, 1), Inventory(9, 3, 0, 7)):
        with pytest.raises(AccountingError):
            reconcile(COUNTS, inventory, fresh=True)


def test_a_missing_image_or_reject_is_an_error_with_both_numbers():
    with pytest.raises(AccountingError, match="hold 2 images where the run counted 3"):
        reconcile(COUNTS, Inventory(1, 2, 0, 1))
    with pytest.raises(AccountingError, match="hold 0 rejects where the run counted 1"):
        reconcile(COUNTS, Inventory(1, 3, 0, 0))
    with pytest.raises(AccountingError, match="4 images_requested are not"):
        reconcile(dataclasses.replace(COUNTS, written=1), Inventory(1, 3, 0, 1))


def test_a_lost_commit_record_is_noticed(tmp_path):
    run(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}]), tmp_path / "out")
    next((tmp_path / "out" / "commits").iterdir()).unlink()
    with pytest.raises(AccountingError, match="hold 0 images"):
        write_report(str(tmp_path / "out"))


def test_a_sample_is_spread_over_all_shards(tmp_path):
    run(write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{number}"} for number in range(40)]), tmp_path / "out")
    output = str(tmp_path / "out")
    assert take_inventory(output).images == 40
    sampled = sample(output, OutputFormat(), limit=10)
    assert len({picture.link.split("/")[1] for picture in sampled}) == len(sampled) == 10
    assert len(sample(output, OutputFormat(), limit=100)) == 40
    assert len({picture.row["key"] for picture in sample(output, OutputFormat(), limit=25)}) == 25


@pytest.mark.parametrize("kind", ["folder", "webdataset", "parquet"])
def test_every_format_gives_thumbnails_that_need_no_other_file(tmp_path, kind):
    records = [{"prompt": f"p{number}", "width": 512} for number in range(9)]
    output_format = OutputFormat(kind, "webp")
    run(write_jsonl(tmp_path / "a.jsonl", records), tmp_path / "out", output_format=output_format)
    pictures = sample(str(tmp_path / "out"), output_format)
    assert {picture.row["prompt"] for picture in pictures} == {record["prompt"] for record in records}
    for picture in pictures:
        data = base64.b64decode(picture.thumbnail.removeprefix("data:image/webp;base64,"))
        with Image.open(io.BytesIO(data)) as thumbnail:
            assert thumbnail.size == (256, 4)
        assert bool(picture.link) == (kind == "folder")
        assert not picture.link or (tmp_path / "out" / picture.link).is_file()


def test_a_picture_that_was_deleted_or_damaged_does_not_stop_the_report(tmp_path):
    run(write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{number}"} for number in range(12)]), tmp_path / "out")
    first, second, *_ = sorted((tmp_path / "out").glob("images/*/*.png"))
    first.unlink()
    second.write_bytes(b"no picture")
    sorted((tmp_path / "out").glob("images/*/metadata.jsonl"))[-1].unlink()
    write_report(str(tmp_path / "out"), fresh=True)
    pictures = sample(str(tmp_path / "out"), OutputFormat())
    assert len(pictures) == 8 and sum(not picture.thumbnail for picture in pictures) == 2


def test_the_first_rejects_are_those_of_the_input_and_lines_mended_by_hand_are_no_error(tmp_path):
    records = [{"prompt": "bad"}, {"prompt": "p"}, *({"prompt": number} for number in range(9))]
    output = tmp_path / "out"
    run(write_jsonl(tmp_path / "a.jsonl", records), output, FakeHandler(rejected=["bad"]))
    assert [reject["stage"] for reject in first_rejects(str(output))] == ["read"] * 9 + ["generate"]
    assert [reject["position"] for reject in first_rejects(str(output), limit=2)] == [3, 4]
    (mended,) = output.glob("rejects/input-*.jsonl")
    mended.write_text("not json\n\n3\n" + mended.read_text())
    assert len(first_rejects(str(output))) == 10
    write_report(str(output), fresh=True)


def test_the_page_can_be_made_again_and_also_before_a_run_has_ended(tmp_path):
    output = tmp_path / "out"
    with pytest.raises(UsageError, match="is not an output"):
        page_of(str(output))
    open_output(str(output), RECIPE, OutputFormat())
    assert page_of(str(output)) == f"{output}/index.html" and "0 images" in (output / "index.html").read_text()
    run(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a cat"}]), output)
    page_of(str(output))
    assert "a cat" in (output / "index.html").read_text()
    write_report(str(output), {"seconds": 1.5}, fresh=True, recipe=RECIPE)
    whole = tree(output), (output / "index.html").read_text()
    (output / "index.html").unlink()
    page_of(str(output))
    assert (tree(output), (output / "index.html").read_text()) == whole
    (output / "summary.json").write_text("{")
    with pytest.raises(UsageError, match="verify"):
        page_of(str(output))


def test_an_empty_run_has_a_report(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n")
    run(tmp_path / "a.txt", tmp_path / "out")
    assert write_report(str(tmp_path / "out"), fresh=True)["output"] == {
        "shards": 0,
        "images": 0,
        "bytes": 0,
        "rejected": 0,
    }
