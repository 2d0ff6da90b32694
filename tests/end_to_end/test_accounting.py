"""Every record of a messy input ends in exactly one place, and a reject says where it stood and what to mend."""

import html
import json

import pytest

from tests import fakes
from tests.end_to_end import command

LONG = "a red circle left of a blue square " * 25  # 200 words
GOOD = [
    {"id": "one", "prompt": "a green star"},
    {"id": "one", "prompt": "a green star"},  # a duplicate
    {"id": "one", "prompt": "a blue star"},  # the same id, another picture
    {"id": "text seed", "prompt": "a purple star", "seed": "9223372036854775807"},
    {"id": "whole float", "prompt": "a purple star", "seed": 7.0},
    {"id": "empty", "prompt": ""},
    {"id": "long", "prompt": LONG},
    {"id": "emoji", "prompt": "a family 👩‍👩‍👧 and a flag 🏳️‍🌈"},
    {"id": "chinese", "prompt": "红色的圆圈在蓝色方块的左边"},
    {"id": "right to left", "prompt": "دائرة حمراء"},
    {"id": "lines", "prompt": "a red\ncircle\u2028and\tmore"},
    {"id": 12, "prompt": "a square", "note": {"any": ["thing"]}},
]
# What stands in the file, and a piece of the reason.
BAD = [
    ('{"prompt": "a cat"', "not JSON"),
    ('["a cat"]', "must be a JSON object"),
    ('{"prompt": "a cat", "seed": -1}', "seed must be from 0 to 9223372036854775807, not -1"),
    ('{"prompt": "a cat", "seed": 9223372036854775808}', "seed must be from 0"),
    ('{"prompt": "a cat", "seed": 1.5}', "seed must be a whole number, not 1.5"),
    ('{"prompt": "a cat", "seed": true}', "seed must be a whole number, not true"),
    ('{"prompt": "a cat", "width": 33}', "width must be a multiple of 2, such as 32 or 34, not 33"),
    ('{"prompt": "a cat", "guidance_scale": 1e9}', "guidance_scale must be from 0.0 to 1000.0"),
    ('{"prompt": 42}', "prompt must be text, not 42"),
    ('{"prompt": "a \\u0000 cat"}', "control character U+0000 at place 3"),
    ('{"promt": "a cat"}', "no column 'prompt'; found: 'promt'"),
]
TABLE = "\ufeffid,prompt,seed,width\r\ntab,a red circle,5,\r\n\r\nbad,a red circle,x,\r\nodd,a red circle,,31\r\n"


@pytest.fixture(scope="module")
def messy(tmp_path_factory, generate):
    """The output of a run over a jsonl and a csv file, and what the command said."""
    folder = tmp_path_factory.mktemp("messy")
    lines = [json.dumps(record) for record in GOOD] + ["", "   "] + [line for line, _ in BAD]
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")  # and no newline at the end
    (folder / "b.csv").write_bytes(TABLE.encode())
    output = folder / "out"
    return output, generate([folder / "a.jsonl", folder / "b.csv"], output)


def test_the_counts_add_up(messy):
    output, finished = messy
    assert command.counts(output) == {
        "records_read": len(GOOD) + len(BAD) + 3,
        "records_rejected": len(BAD) + 2,
        "records_expanded": len(GOOD) + 1,
        "images_requested": len(GOOD) + 1,
        "duplicates": 1,
        "written": len(GOOD),
        "truncated": 1,
        "unknown_words": 8,  # four stars, a family, two other scripts, and one "more"
    }
    summary = json.loads((output / "summary.json").read_text())
    assert {name: count for name, count in summary["counts"].items() if count} == command.counts(output)
    assert summary["run"]["tokens_truncated"] == 200 - 75
    assert summary["output"]["images"] == len(GOOD) == len(list(output.glob("images/*/*.png")))
    assert finished.stdout.startswith("26 records: 12 images written in ")
    assert "0 there before, 1 duplicates, 13 rejected; see " in finished.stdout
    assert "8 prompts have words the model does not know; see unknown_words" in finished.stdout


def test_every_reject_names_its_file_its_row_and_the_reason(messy):
    output, _ = messy
    found = {(reject["source"], reject["position"]): reject for reject in fakes.rejects(output)}
    first = len(GOOD) + 3  # after the blank lines, which count as lines
    wanted = {("a.jsonl", first + number): bad for number, bad in enumerate(BAD)} | {
        ("b.csv", 2): (None, 'seed must be a whole number, not "x"'),
        ("b.csv", 3): (None, "width must be a multiple of 2, such as 30 or 32, not 31"),
    }
    assert found.keys() == wanted.keys()
    for place, (line, reason) in wanted.items():
        assert reason in found[place]["reason"]
        if line and found[place]["stage"] == "read":
            assert found[place]["record"] == line


def test_strange_prompts_become_pictures_with_their_own_words(messy):
    output, _ = messy
    prompts = {row["id"]: row["prompt"] for row in fakes.rows(output) if row["id"] != "one"}
    assert prompts == {str(record["id"]): record["prompt"] for record in GOOD if record["id"] != "one"} | {
        "tab": "a red circle"
    }
    assert {row["seed"] for row in fakes.rows(output) if row["id"] in ("text seed", "whole float", "tab")} == {
        9223372036854775807, 7, 5,
    }  # fmt: skip
    assert all(command.recipe_inside(row["path"])["prompt"] == row["prompt"] for row in fakes.rows(output))


def test_a_prompt_that_the_encoder_does_not_see_to_its_end_says_so(messy):
    output, _ = messy
    truncated = {row["id"]: row["truncated"] for row in fakes.rows(output)}
    assert [who for who, cut in truncated.items() if cut] == ["long"]
    (long,) = (row for row in fakes.rows(output) if row["id"] == "long")
    assert long["num_tokens"] == 202  # 200 words of the vocabulary, begin and end


def test_other_columns_are_kept(messy):
    output, _ = messy
    (row,) = (row for row in fakes.rows(output) if row["id"] == "12")
    assert json.loads(row["extra"]) == {"note": {"any": ["thing"]}}


def test_the_page_shows_every_picture_beside_its_prompt(messy):
    output, _ = messy
    page = (output / "index.html").read_text()
    for row in fakes.rows(output):
        assert html.escape(row["prompt"][:1000]) in page
        assert f'<a href="{row["path"].relative_to(output)}"><img src="data:image/webp;base64,' in page


def test_an_empty_input_is_a_run_of_nothing(generate, tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    finished = generate(tmp_path / "empty.jsonl", tmp_path / "out")
    assert finished.stdout.startswith("0 records: 0 images written")
    assert command.counts(tmp_path / "out") == {}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["output"]["images"] == 0


def test_more_rejects_than_allowed_are_an_exit_status_of_their_own(generate, jsonl, tmp_path):
    records = jsonl([{"prompt": "a star"}, {"prompt": "a star", "seed": "x"}, {"prompt": "a star", "width": 1}])
    over = generate(records, tmp_path / "out", "--max_reject_fraction=0.6", check=False)
    assert over.status == 3 and "66.7% rejected, more than --max_reject_fraction" in over.stdout
    assert command.counts(tmp_path / "out")["written"] == 1
    assert generate(records, tmp_path / "out", "--max_reject_fraction=0.67").status == 0
