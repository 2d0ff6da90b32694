"""OUT/index.html: what a person looks at first. One file that needs no other, for one image or a million.

Prompts, ids and reasons come from strangers. All text is escaped, no address is made of it, and should an escape ever
be forgotten, the page's policy still has the browser run one script and apply one style, those whose hashes it names.
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from model_handlers.recipe import Recipe
from pipeline import again
from pipeline.gallery import Picture
from transforms.formats import OutputFormat

# Longer texts are cut: the files of the output have them whole.
_MAX_TEXT = 1000

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif;
  --line: color-mix(in srgb, currentColor 18%, transparent); --tint: color-mix(in srgb, currentColor 5%, transparent) }
body { margin: 0 auto; max-width: 80rem; padding: 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.1rem; margin: 1.5rem 0 .5rem } p { margin: 0 }
summary { cursor: pointer } small, summary, caption, output { color: color-mix(in srgb, currentColor 70%, transparent) }
.figures { display: flex; flex-wrap: wrap; gap: 0 1.5rem; margin: .25rem 0 .75rem }
.tables { columns: 3 18rem; column-gap: 2rem }
table { border-collapse: collapse; break-inside: avoid; font-variant-numeric: tabular-nums; width: 100% }
caption { padding: .75rem 0 .25rem; text-align: left }
th, td { border-top: 1px solid var(--line); padding: .2rem 0; vertical-align: top }
th { font-weight: normal; padding-right: 1rem; text-align: left; white-space: nowrap; width: 1% }
td { text-align: right }
.filter { background: Canvas; padding: .75rem 0; position: sticky; top: 0; z-index: 1 }
input { box-sizing: border-box; font: inherit; margin-right: 1rem; max-width: 24rem; padding: .4rem .6rem; width: 70% }
ul { list-style: none; margin: 0; padding: 0 }
li { background: var(--tint); border-left: 3px solid #d33; margin-bottom: .5rem; padding: .5rem .75rem }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(11rem, 42vw), 1fr)) }
figure { background: var(--tint); border-radius: 6px; margin: 0; overflow: hidden }
figure img { display: block; height: auto; width: 100% }
figure:has([open]) { display: grid; grid-column: 1 / -1; grid-template-columns: minmax(7rem, 1fr) minmax(0, 3fr) }
figcaption { font-size: .87rem; padding: .5rem .6rem } figcaption p { max-height: 7.3em; overflow: auto }
pre { background: var(--tint); font-size: .75rem; margin: .4rem 0 0; padding: .5rem;
  user-select: all; white-space: pre-wrap }
[hidden] { display: none }
"""

_SCRIPT = """
const field = document.querySelector("input"), shown = document.querySelector("output");
const items = [...document.querySelectorAll("figure, li")].map(
  item => [item, [...item.querySelectorAll("b, p, small")].map(part => part.textContent).join(" ").toLowerCase()]);
field.parentElement.hidden = !items.length;
field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\\s+/);
  for (const [item, text] of items) item.hidden = !words.every(word => text.includes(word));
  shown.value = field.value.trim() && `${items.filter(([item]) => !item.hidden).length} of ${items.length}`;
});
"""


@dataclass(frozen=True)
class Page:
    """What is shown.

    Attributes:
      summary: as in summary.json; of a run that has not ended yet it has only `output`.
      recipe: of the output; without it no picture can be made again.
      pictures, rejects: a sample of each, the rejects as lines of their files.
    """

    summary: Mapping[str, Any]
    recipe: Recipe | None
    output_format: OutputFormat
    pictures: list[Picture]
    rejects: list[dict[str, Any]]


def render(page: Page) -> str:
    """The page as HTML."""
    images = page.summary["output"]["images"]
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(_STYLE)}'; script-src '{_hash(_SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{images:,} images</title>\n<style>{_STYLE}</style>\n"
        f"<h1>{images:,} images</h1>\n{_key_figures(page.summary)}{_tables(page)}"
        # Hidden until the script, without which it would do nothing, shows it.
        '<div class="filter" hidden><input type="search" placeholder="Filter by text" aria-label="Filter by text">'
        f"<output></output></div>\n{_rejects(page)}{_pictures(page)}<script>{_SCRIPT}</script>\n</html>\n"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _key_figures(summary: Mapping[str, Any]) -> str:
    """A line of what most people come for."""
    run, rejected = summary.get("run", {}), _rejected(summary)
    figures = [f"{summary['output']['bytes'] / 1e6:,.1f} MB"]
    if rejected:
        figures.append(f"{rejected:,} without a picture")
    if "images_per_hour" in run:
        figures.append(f"{run['images_per_hour']:,.0f} images an hour")
    if "device_busy_fraction" in run:
        figures.append(f"device busy {run['device_busy_fraction']:.0%}")
    if "cost_per_1000_images" in run:
        figures.append(f"1,000 images cost {run['cost_per_1000_images']:,}")
    return f'<div class="figures">{"".join(f"<span>{escape(figure)}</span>" for figure in figures)}</div>\n'


def _rejected(summary: Mapping[str, Any]) -> int:
    return summary["output"]["rejected"] + summary.get("counts", {}).get("records_rejected", 0)


def _tables(page: Page) -> str:
    run = {name: value for name, value in page.summary.get("run", {}).items() if name not in ("inputs", "shards")}
    recipe = {**asdict(page.recipe), "checkpoint": page.recipe.checkpoint[:12]} if page.recipe else {}
    tables = {
        "Output": page.summary["output"],
        "Last run: records and images": page.summary.get("counts", {}),
        "Last run: time and cost": run,
        "Recipe": {**recipe, **asdict(page.output_format)},
    }
    shown = "".join(_table(title, values) for title, values in tables.items() if values)
    return f'<details><summary>Counts, timings and recipe</summary><div class="tables">\n{shown}</div></details>\n'


def _table(title: str, values: Mapping[str, Any]) -> str:
    shown = {
        name.replace("_", " "): f"{value:,}" if isinstance(value, int | float) else value
        for name, value in values.items()
    }
    rows = (
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>\n"
        for name, value in shown.items()
        if value is not None
    )
    return f"<table><caption>{escape(title)}</caption>\n{''.join(rows)}</table>\n"


def _rejects(page: Page) -> str:
    if not page.rejects:
        return ""
    total = max(_rejected(page.summary), len(page.rejects))
    rest = f" (the first {len(page.rejects)} of them; rejects/ has all)" if total > len(page.rejects) else ""
    items = "".join(
        f"<li><b>{_text(reject.get('reason'))}</b><p dir=auto>{_text(reject.get('record'))}</p>"
        f"<small>{_text(reject.get('source'))}, row {_text(reject.get('position'))}</small></li>\n"
        for reject in page.rejects
    )
    return f"<h2>{total:,} without a picture{rest}</h2>\n<ul>\n{items}</ul>\n"


def _pictures(page: Page) -> str:
    images, run = page.summary["output"]["images"], page.summary.get("run", {})
    drawn = f"{len(page.pictures):,} pictures, drawn evenly" if len(page.pictures) < images else "All pictures"
    figures = []
    for picture in page.pictures:
        command = None
        if page.recipe:
            command = again.command(picture.row, page.recipe, page.output_format, run.get("model_flags"))
        figures.append(_figure(picture, command))
    return f"<h2>{drawn}</h2>\n<main>\n{''.join(figures)}</main>\n" if figures else ""


def _figure(picture: Picture, command: str | None) -> str:
    row = picture.row
    if picture.thumbnail:
        image = f'<img src="{picture.thumbnail}" alt="" width="{row["width"]:d}" height="{row["height"]:d}">'
    else:
        image = "<p>The file of this picture cannot be read.</p>"
    if picture.link:
        image = f'<a href="{escape(picture.link)}">{image}</a>'
    details = f"<details><summary>Make it again</summary><pre>{escape(command)}</pre></details>" if command else ""
    return (
        f"<figure>{image}<figcaption><p dir=auto>{_text(row['prompt'])}</p>"
        f"<small>seed {row['seed']:d}, id {_text(row['id'])}</small>{details}</figcaption></figure>\n"
    )


def _text(value: object) -> str:
    text = str(value)
    return escape(text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "\N{HORIZONTAL ELLIPSIS}")
