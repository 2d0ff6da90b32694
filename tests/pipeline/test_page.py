"""The page in a real browser: what a person sees, and what a stranger's prompt cannot do."""

import json
import re

import pytest

from pipeline.report import write_report
from tests.browser import CHROMIUM, browser
from tests.fakes import RECIPE, FakeHandler, run, write_jsonl
from transforms.formats import OutputFormat

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed (Debian: apt-get install chromium)")

OWNED = "document.title = 'owned'"
HOSTILE = [
    f"<script>{OWNED}</script>",
    f'"><img src=x onerror="{OWNED}">',
    f"</pre></figure></main></html><svg onload={OWNED}>",
    f"' onmouseover='{OWNED}' '&amp;&#60;b&#62;",
    "</style></script></title><!-- ",
    "قطة تحت المطر \u202e backwards",
    "l" * 5000,
    "\n$(touch owned) `touch owned` '; touch owned #",
]
RUN = {"seconds": 12.5, "images_per_hour": 2304.0, "cost_per_1000_images": 3.5, "checkpoint": "org/model"}


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of an output of hostile and of common prompts, some of them rejected."""
    folder = tmp_path_factory.mktemp("page")
    prompts = [*HOSTILE, "a red fox", "a blue fox", "a red hen"]
    records = [{"prompt": prompt, "id": prompt[:900], "seed": 7, "width": 64, "height": 64} for prompt in prompts]
    records += [{"prompt": "bad <b>one</b>"}, {"prompt": "odd", "width": 9}, {"prompt": [HOSTILE[0]]}]
    run(write_jsonl(folder / "<i>a.jsonl", records), folder / "out", FakeHandler(rejected=["bad <b>one</b>"]))
    write_report(str(folder / "out"), RUN, fresh=True, recipe=RECIPE)
    return folder / "out" / "index.html"


def texts(tab, selector):
    return tab.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)")


def test_hostile_prompts_are_text_and_nothing_more(tab, page):
    tab.open(page)
    assert tab.evaluate("document.title") == "11 images"
    cut = [prompt if len(prompt) < 1000 else prompt[:1000] + "…" for prompt in HOSTILE]
    assert sorted(texts(tab, "figcaption > p")) == sorted([*cut, "a red fox", "a blue fox", "a red hen"])
    assert tab.evaluate("document.querySelectorAll('main *').length") == sum(
        tab.evaluate(f"document.querySelectorAll('main {tag}').length")
        for tag in ("figure", "a", "img", "figcaption", "p", "small", "details", "summary", "pre")
    )
    assert tab.evaluate("document.querySelectorAll('script').length") == 1
    assert tab.evaluate("document.querySelectorAll('svg, [onerror], [onload], [onmouseover]').length") == 0


@pytest.mark.parametrize("slip", [f"<script>{OWNED}</script>", f'<img src="x" onerror="{OWNED}">'])
def test_an_escape_that_was_forgotten_still_runs_nothing(tab, page, tmp_path, slip):
    careless = tmp_path / "index.html"
    careless.write_text(page.read_text().replace("<main>", f"<main>{slip}"))
    tab.open(careless)
    assert tab.evaluate("document.title") == "11 images"
    # And it is the policy that keeps it from running.
    careless.write_text(re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", careless.read_text()))
    tab.open(careless)
    assert tab.evaluate("document.title") == "owned"


def test_failures_come_first_each_with_its_reason_and_its_place(tab, page):
    tab.open(page)
    assert texts(tab, "h2") == ["3 without a picture", "All pictures"]
    reasons, places = texts(tab, "li b"), texts(tab, "li small")
    assert "width must be a multiple of 8, such as 8 or 16, not 9" in reasons and len(reasons) == 3
    assert "<i>a.jsonl, row 13" in places
    assert tab.evaluate("document.querySelector('ul').compareDocumentPosition(document.querySelector('main')) == 4")


def test_every_thumbnail_is_drawn_and_leads_to_its_picture(tab, page):
    tab.open(page)
    widths = tab.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert widths == [64] * 11
    links = tab.evaluate("[...document.querySelectorAll('figure a')].map(link => link.getAttribute('href'))")
    assert len({page.parent / link for link in links}) == 11 and all((page.parent / link).is_file() for link in links)


def test_figures_timings_and_recipe_are_there(tab, page):
    tab.open(page)
    assert texts(tab, ".figures span")[1:] == ["3 without a picture", "2,304 images an hour", "1,000 images cost 3.5"]
    cells = dict(zip(texts(tab, "th"), texts(tab, "td"), strict=True))
    wanted = {"written": "11", "seconds": "12.5", "scheduler": "EulerDiscreteScheduler", "image format": "png"}
    assert {name: cells[name] for name in wanted} == wanted


def test_the_filter_leaves_what_has_all_of_its_words(tab, page):
    tab.open(page)

    def filtered(words):
        tab.evaluate(f"field.value = {json.dumps(words)}; field.dispatchEvent(new Event('input')); undefined")
        return texts(tab, "figure:not([hidden]) figcaption > p"), texts(tab, "output")[0]

    assert tab.evaluate("field.parentElement.hidden") is False
    assert filtered("Fox RED") == (["a red fox"], "1 of 14")
    assert filtered("multiple of 8") == ([], "1 of 14")
    assert len(filtered("  ")[0]) == 11 and filtered("")[1] == ""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_a_phone_and_a_desk_by_day_and_by_night(tab, page, width, dark, tmp_path):
    tab.open(page, width=width, height=900, dark=dark)
    tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    colours = (
        "getComputedStyle(document.body).color",
        "getComputedStyle(document.querySelector('.filter')).backgroundColor",
    )
    text, ground = (sum(map(int, re.findall(r"\d+", tab.evaluate(colour))[:3])) for colour in colours)
    assert (text > ground) == dark and abs(text - ground) > 500
    columns = tab.evaluate("getComputedStyle(document.querySelector('main')).gridTemplateColumns").split()
    assert len(columns) == (2 if width == 360 else 6)


def test_a_page_of_many_pictures_says_that_they_are_a_sample_and_stays_small(tab, tmp_path):
    records = [{"prompt": f"p{number}", "width": 64, "height": 64} for number in range(120)]
    output = tmp_path / "out"
    settings = {"recipe": RECIPE, "output_format": OutputFormat("webdataset")}
    run(write_jsonl(tmp_path / "a.jsonl", records), output, images_per_shard=4, **settings)
    write_report(str(output), fresh=True, **settings)
    tab.open(output / "index.html")
    assert texts(tab, "h1, h2") == ["120 images", "80 pictures, drawn evenly"]  # of 20 of the 30 tars
    assert tab.evaluate("[...document.images].every(image => image.naturalWidth == 64)")
    assert (output / "index.html").stat().st_size < 1e6
