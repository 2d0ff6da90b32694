"""Ids and prompts of strangers end as pictures or as rejects, and nowhere else."""

import json
import re

import pytest

from tests import fakes
from tests.end_to_end import command

SCRIPT = "<script>alert(1)</script>"
HOSTILE = [
    "../../x",
    "/etc/passwd",
    "..",
    "a/b.c.d",
    "C:\\CON",
    SCRIPT,
    '"><img src=x onerror=alert(1)>',
    "a\0b",
    "\x1b[31mred",
    "x" * 300,
    "x" * 2000,
    "%s %n {0} ${HOME} `id`",
    "\u202egnp.exe",
    " ",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, generate):
    """The folder around an output whose records carry hostile ids, prompts and columns."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "in").mkdir()
    records = [{"id": text, "prompt": "a star"} for text in HOSTILE]
    records += [{"id": number, "prompt": text, text: text} for number, text in enumerate(HOSTILE)]
    generate(fakes.write_jsonl(folder / "in" / "a.jsonl", records), folder / "deep" / "out")
    return folder


def test_every_hostile_record_is_a_picture_or_a_reject(hostile):
    output = hostile / "deep" / "out"
    rows, rejects = fakes.rows(output), fakes.rejects(output)
    found = sorted({row["position"] for row in rows} | {reject["position"] for reject in rejects})
    assert len(rows) + len(rejects) == 2 * len(HOSTILE) and found == list(range(1, 2 * len(HOSTILE) + 1))
    reasons = {reject["position"]: reject["reason"] for reject in rejects}
    assert {position: text for position, text in reasons.items() if position <= len(HOSTILE)} == {
        HOSTILE.index("x" * 2000) + 1: "id has 2000 characters, more than 1000"
    }
    assert {HOSTILE[position - 1 - len(HOSTILE)] for position in reasons if position > len(HOSTILE)} == {
        "a\0b",
        "\x1b[31mred",
    }
    assert {row["prompt"] for row in rows} - {"a star"} == set(HOSTILE) - {"a\0b", "\x1b[31mred"}


def test_nothing_is_written_outside_of_the_output(hostile):
    assert sorted(str(path.relative_to(hostile)) for path in hostile.glob("*/*")) == ["deep/out", "in/a.jsonl"]


def test_no_file_is_named_by_a_record(hostile):
    kinds = (
        r"\.lock|recipe\.json|counts\.json|summary\.json|index\.html|README\.md|commits/[0-9a-f]{20}\.json|"
        r"images/[0-9a-f]{20}/(metadata\.jsonl|[0-9a-f]{32}\.png)|rejects/(input-[0-9a-f]{12}-\d{6}|[0-9a-f]{20})\.jsonl"
    )
    names = command.everything(hostile / "deep" / "out")
    assert [name for name in names if not re.fullmatch(kinds, name)] == []


def test_the_page_holds_no_code_of_a_record(hostile):
    page = (hostile / "deep" / "out" / "index.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("<script") == 1 and "<img src=x" not in page  # the filter's, which the page's policy names
    ours = (
        "html meta title style script header main section div span h1 h2 p b small a img ul li pre label input output "
    )
    ours += "table caption tr th td figure figcaption details summary"
    assert set(re.findall(r"<(\w+)", page)) <= set(ours.split())


def test_the_text_of_a_record_comes_back_as_it_was(hostile):
    rows = {row["position"]: row for row in fakes.rows(hostile / "deep" / "out")}
    for position, row in rows.items():
        if position > len(HOSTILE):
            text = HOSTILE[position - 1 - len(HOSTILE)]
            assert json.loads(row["extra"]) == {text: text}
