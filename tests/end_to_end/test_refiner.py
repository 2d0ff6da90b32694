"""A refiner from the command line to the pictures."""

import json

import pytest

from tests import checkpoints, fakes
from tests.end_to_end import command
from tests.parity import cases

CASE = next(case for case in cases.CASES if case.name == "refined")
PROMPTS = [{"prompt": "a red circle", "seed": 1}, {"prompt": "a red circle", "seed": 1, "denoising_end": 0.5}]
FLAGS = "--width=24", "--height=16", "--num_inference_steps=4"


@pytest.fixture
def flags(tmp_path):
    root, refiner = (checkpoints.write(case, tmp_path / case.name) for case in (CASE, CASE.refiner))
    return f"--checkpoint={root}", f"--refiner={refiner}", *FLAGS


def test_a_refiner_ends_pictures_and_is_in_their_recipe(generate, jsonl, flags, tmp_path):
    records, output = jsonl(PROMPTS), tmp_path / "out"
    generate(records, output, *flags)
    first, second = sorted(fakes.rows(output), key=lambda row: row["position"])
    assert json.loads(second["settings"]) == {"denoising_end": 0.5}
    assert (command.pixels(first["path"]) != command.pixels(second["path"])).any()
    assert len(command.recipe_inside(first["path"])["refiner"]) == 64
    assert "2 there before" in generate(records, output, *flags).stdout
    refused = generate(records, output, flags[0], *FLAGS, check=False)
    assert refused.status == 2
    assert "holds pictures of another recipe (refiner was " in refused.stderr


def test_what_is_no_refiner_is_refused_before_anything_is_made(generate, jsonl, flags, tmp_path):
    root = flags[0].partition("=")[2]
    for wrong, complaint in (
        ((flags[0], f"--refiner={root}"), "model_index.json: not a refiner, a StableDiffusionXLImg2ImgPipeline with "),
        (("--denoising_end=0.5",), "--denoising_end needs --refiner"),
    ):
        refused = generate(jsonl(PROMPTS[:1]), tmp_path / "out", *wrong, check=False)
        assert refused.status == 2
        assert complaint in refused.stderr
    assert not (tmp_path / "out").exists()
