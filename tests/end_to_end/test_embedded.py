"""The checkpoint in the package, by the command that a newcomer runs, judged by the pixels of its pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.scenes.evaluate import judge
from benchmarks.scenes.scenes import parse_caption
from model_handlers.fetch import EMBEDDED, checkpoint_folder
from pipeline.__main__ import main

COUNT = 16


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> dict[str, np.ndarray]:
    """The first sample prompts that ask for one object, with their pictures."""
    folder = tmp_path_factory.mktemp("embedded")
    prompts = (checkpoint_folder(EMBEDDED) / "prompts.txt").read_text().splitlines()
    chosen = [prompt for prompt in prompts if len(parse_caption(prompt).objects) == 1][:COUNT]
    source = folder / "prompts.txt"
    source.write_text("\n".join(chosen))
    assert main(["generate", "--input", str(source), "--output", str(folder / "out")]) == 0
    made = {}
    for metadata in Path(folder, "out/images").glob("*/metadata.jsonl"):
        for row in map(json.loads, metadata.read_text().splitlines()):
            made[row["prompt"]] = np.asarray(Image.open(metadata.parent / row["file_name"]))
    assert made.keys() == set(chosen)
    return made


@pytest.mark.parametrize("aspect", ["background", "colours", "shapes"])
def test_one_object_is_drawn_as_the_prompt_says(pictures, aspect):
    answers = [getattr(judge(image, parse_caption(prompt)), aspect) for prompt, image in pictures.items()]
    asked = [answer for answer in answers if answer is not None]
    # The model is not perfect, and pictures differ a little between processors; by chance one in six would be right.
    assert sum(asked) >= 0.75 * len(asked)


def test_pictures_of_other_prompts_do_not_fit(pictures):
    # Else the evaluator would accept anything, and a model that ignores prompts would pass.
    prompts = list(pictures)
    moved = zip(prompts, (pictures[prompt] for prompt in prompts[1:] + prompts[:1]), strict=True)
    assert sum(judge(image, parse_caption(prompt)).all for prompt, image in moved) <= 0.25 * len(prompts)
