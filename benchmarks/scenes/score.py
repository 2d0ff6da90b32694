"""Scores a checkpoint on captions held out of its training, by the pixels of its pictures alone.

python -m benchmarks.scenes.score [--checkpoint DIR] [--count 500] [--guidance_scale 5]
python -m benchmarks.scenes.score --contact_sheet docs/contact_sheet.png
"""

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.scenes import evaluate, scenes
from model_handlers import checkpoint, fetch
from model_handlers.handler import ModelSpec, load_programs
from model_handlers.recipe import ImageRequest, derived_seed

BATCH = 20
COLUMNS = 8


def pictures(
    source: str, captions: Sequence[str], steps: int, guidance_scale: float
) -> Iterator[tuple[str, np.ndarray]]:
    """(caption, uint8 (SIDE, SIDE, 3)) for each caption, with Euler steps from a seed derived from the caption."""
    root = fetch.checkpoint_folder(source)
    programs = load_programs(ModelSpec(source, checkpoint.identity(root), "EulerDiscreteScheduler", "float32", BATCH))
    square = (scenes.SIDE, scenes.SIDE)
    for start in range(0, len(captions), BATCH):
        batch = list(captions[start : start + BATCH])
        requests = [
            ImageRequest(
                text, 0, text, None, derived_seed(0, text, 0), *square, steps, guidance_scale, square, (0, 0), square
            )
            for text in batch + batch[:1] * (BATCH - len(batch))
        ]
        inputs, _ = programs.prepare(requests)
        programs.compile(*square, inputs)
        images, _ = programs(inputs, *square)
        yield from zip(batch, np.asarray(images), strict=False)


def score(made: Iterator[tuple[str, np.ndarray]]) -> dict[str, tuple[int, int]]:
    """For each thing that captions ask for: (pictures that have it, pictures that should)."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for caption, image in made:
        verdict = evaluate.judge(image, scenes.parse_caption(caption))
        for field in fields(verdict):
            answer = getattr(verdict, field.name)
            asked[field.name] += answer is not None
            right[field.name] += answer is True
        asked["everything"] += 1
        right["everything"] += verdict.all
    return {name: (right[name], asked[name]) for name in asked}


def contact_sheet(made: Iterator[tuple[str, np.ndarray]], scale: int = 2) -> Image.Image:
    """A sheet of pictures with their captions below."""
    tiles = list(made)
    side, text_height = scenes.SIDE * scale, 44
    rows = -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (side + 8) + 8, rows * (side + text_height + 8) + 8), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(10)
    for place, (caption, image) in enumerate(tiles):
        x, y = 8 + place % COLUMNS * (side + 8), 8 + place // COLUMNS * (side + text_height + 8)
        sheet.paste(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC), (x, y))
        pen.rectangle((x - 1, y - 1, x + side, y + side), outline="#cccccc")
        pen.multiline_text((x, y + side + 3), textwrap.fill(caption, 24), fill="#333333", font=font, spacing=1)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=fetch.EMBEDDED)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=5.0)
    parser.add_argument("--contact_sheet", type=Path, help="instead, draw the sample prompts into this file")
    args = parser.parse_args()
    settings = (args.num_inference_steps, args.guidance_scale)
    if args.contact_sheet:
        captions = (fetch.checkpoint_folder(fetch.EMBEDDED) / "prompts.txt").read_text().splitlines()
        contact_sheet(pictures(args.checkpoint, captions, *settings)).save(args.contact_sheet)
        return
    captions = scenes.held_out_captions(args.count, seed=1)
    for name, (right, asked) in score(pictures(args.checkpoint, captions, *settings)).items():
        print(f"{name:12} {right:4} of {asked:4}  {right / asked:.1%}")


if __name__ == "__main__":
    main()
