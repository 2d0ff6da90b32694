"""Checkpoints of other families and layouts, through the command line."""

import json

import pytest

from tests import checkpoints, fakes, layouts
from tests.end_to_end import command
from tests.parity import cases

(SD_1,) = (case for case in cases.CASES if case.name == "as_sd_1")
RECORDS = [{"id": "a", "prompt": "a red circle", "seed": 1}, {"id": "b", "prompt": "a", "original_size": [64, 64]}]


@pytest.fixture(scope="module")
def sd_1(tmp_path_factory):
    return checkpoints.write(SD_1, tmp_path_factory.mktemp("sd_1"))


@pytest.fixture(scope="module")
def output(sd_1, generate, tmp_path_factory):
    """A run over RECORDS with the checkpoint folder."""
    folder = tmp_path_factory.mktemp("output")
    generate(fakes.write_jsonl(folder / "input.jsonl", RECORDS), folder / "out", f"--checkpoint={sd_1}")
    return folder / "out"


def test_stable_diffusion_1_is_recognised_and_draws(output):
    assert json.loads((output / "recipe.json").read_text())["recipe"]["family"] == "StableDiffusionPipeline"
    (row,) = fakes.rows(output)
    assert (row["id"], row["width"]) == ("a", 32)


def test_a_record_that_asks_it_for_sdxls_sizes_is_rejected(output):
    (reject,) = fakes.rejects(output)
    assert reject["id"] == "b"
    assert "original_size is a setting of SDXL" in reject["reason"]


def test_a_single_file_draws_the_same_pictures(output, sd_1, generate, jsonl, tmp_path):
    layouts.write_single_file(sd_1, tmp_path / "sd.safetensors", "sd_1", SD_1.unet["layers_per_block"])
    flags = f"--checkpoint={tmp_path / 'sd.safetensors'}", f"--config={sd_1}"
    generate(jsonl(RECORDS[:1]), tmp_path / "out", *flags)
    assert pictures(tmp_path / "out") == pictures(output)


def pictures(output):
    return [command.pixels(path).tobytes() for path in sorted(output.glob("images/*/*.png"))]
