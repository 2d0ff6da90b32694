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
    """Every other one of the sample prompts, of one object or two, with their pictures."""
    folder = tmp_path_factory.mktemp("embedded")
    prompts = (checkpoint_folder(EMBEDDED) / "prompts.txt").read_text().splitlines()
    chosen = prompts[::2][:COUNT]
    source = folder / "prompts.txt"
    source.write_text("\n".join(chosen))
    assert main(["generate", "--input", str(source), "--output", str(folder / "out")]) == 0
    made = {}
    for metadata in Path(folder, "out/images").glob("*/metadata.jsonl"):
        for row in map(json.loads, metadata.read_text().splitlines()):
            made[row["prompt"]] = np.asarray(Image.open(metadata.parent / row["file_name"]))
    assert made.keys() == set(chosen)
    return made


@pytest.mark.parametrize("aspect", ["background", "colours", "shapes", "relation", "all"])
def test_pictures_show_what_their_prompts_say(pictures, aspect):
    answers = [getattr(judge(image, parse_caption(prompt)), aspect) for prompt, image in pictures.items()]
    asked = [answer for answer in answers if answer is not None]
    # The model is not perfect, and pictures differ a little between processors.
    assert sum(asked) >= 0.8 * len(asked)


def test_pictures_of_other_prompts_do_not_fit(pictures):
    # Else the evaluator would accept anything, and a model that ignores prompts would pass.
    prompts = list(pictures)
    moved = zip(prompts, (pictures[prompt] for prompt in prompts[1:] + prompts[:1]), strict=True)
    assert sum(judge(image, parse_caption(prompt)).all for prompt, image in moved) <= 0.25 * len(prompts)


def test_what_is_outside_of_its_vocabulary_is_drawn_somehow_and_said_so(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a photograph of an astronaut\na red circle\n")
    assert main(["generate", "--input", str(tmp_path / "prompts.txt"), "--output", str(tmp_path / "out")]) == 0
    unknown = {
        row["prompt"]: row["unknown_words"]
        for metadata in Path(tmp_path, "out/images").glob("*/metadata.jsonl")
        for row in map(json.loads, metadata.read_text().splitlines())
    }
    assert unknown == {"a photograph of an astronaut": 2, "a red circle": 0}
    said = capsys.readouterr().out
    assert "1 prompts have words the model does not know" in said
    assert "built-in demonstration model" in said and "--checkpoint names a real one" in said
