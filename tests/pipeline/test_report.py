"""The report: what does not add up is an error, and a stranger's prompt is only ever text."""

import base64
import dataclasses
import io
from html.parser import HTMLParser

import pytest
from PIL import Image

from pipeline.gallery import sample
from pipeline.report import Inventory, reconcile, take_inventory, write_report
from tests.fakes import run, write_jsonl
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


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text, self.handlers = set(), set(), "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links |= {value for name, value in attrs if name in ("src", "href")}
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.text += data


def test_a_hostile_prompt_is_text_on_the_page(tmp_path):
    prompts = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</figure></html>&amp;", "قطة"]
    run(write_jsonl(tmp_path / "a.jsonl", [{"prompt": p, "id": p, "seed": 123} for p in prompts]), tmp_path / "out")
    summary = write_report(str(tmp_path / "out"), run={"seconds": 1.5}, fresh=True)
    assert summary["run"] == {"seconds": 1.5}
    page = _Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags and not page.handlers
    assert all(prompt in page.text for prompt in prompts) and page.text.count("seed 123") == 4
    assert len(page.links) == 4 and all((tmp_path / "out" / link).is_file() for link in page.links)


def test_a_sample_is_spread_over_all_shards(tmp_path):
    run(write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{number}"} for number in range(40)]), tmp_path / "out")
    images = take_inventory(str(tmp_path / "out")).images
    assert images == 40
    sampled = list(sample(str(tmp_path / "out"), OutputFormat(), images, limit=10))
    assert len(sampled) == 10 and len({address.split("/")[1] for address, _ in sampled}) == 10
    assert len(list(sample(str(tmp_path / "out"), OutputFormat(), images, limit=100))) == 40


@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_pictures_within_larger_files_are_on_the_page_as_thumbnails(tmp_path, kind):
    prompts = [f"<b>p{number}" for number in range(9)]
    output_format = OutputFormat(kind, "webp")
    run(
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": p} for p in prompts]),
        tmp_path / "out",
        output_format=output_format,
    )
    write_report(str(tmp_path / "out"), fresh=True, output_format=output_format)
    page = _Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert len(page.links) == 9 and all(prompt in page.text for prompt in prompts)
    for link in page.links:
        with Image.open(io.BytesIO(base64.b64decode(link.removeprefix("data:image/jpeg;base64,")))) as picture:
            assert picture.size == (8, 8)


def test_an_empty_run_has_a_report(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n")
    run(tmp_path / "a.txt", tmp_path / "out")
    assert write_report(str(tmp_path / "out"), fresh=True)["output"] == {
        "shards": 0,
        "images": 0,
        "bytes": 0,
        "rejected": 0,
    }
