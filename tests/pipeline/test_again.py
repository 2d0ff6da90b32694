"""The command that makes a picture again asks for that very picture, whatever its prompt is."""

import json
import shlex
import subprocess
from dataclasses import replace

import pytest

from model_handlers.recipe import ImageResult
from pipeline import again
from tests.fakes import RECIPE, SAMPLER
from transforms.formats import FOLDER_OF_PNG, OutputFormat
from transforms.metadata import row
from transforms.records import PromptRecord, parse
from transforms.requests import expand

PROMPTS = [
    "a fox",
    'it\'s "so" $HOME `touch owned` $(touch owned)',
    "'; touch owned; '",
    "--output=/x",
    "ü\n\\n\t%s\\",
    "!!",
]
FIELDS = [
    {},
    {"negative_prompt": ""},
    {"negative_prompt": "it's", "guidance_scale": 0.1, "num_inference_steps": 3, "width": 16},
    {"guidance_interval": (0.5, 5.0), "prompt_2": "it's", "clip_skip": 1},
    {"seed": 2**63 - 3, "num_images_per_prompt": 2, "crops_coords_top_left": (1, 2), "original_size": (9, 9)},
]


def rows(prompt, fields, recipe=RECIPE):
    for request in expand(PromptRecord("in.jsonl", 1, "it's id", prompt, fields), recipe, SAMPLER):
        yield row(request, ImageResult(request.key, None), recipe, f"{request.key}.png", "0" * 64)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_shell_writes_the_record_of_this_picture_and_does_nothing_else(tmp_path, prompt, fields):
    for made in rows(prompt, fields, replace(RECIPE, negative_prompt=None if fields else "ugly", seed=9)):
        record_line, flags_line = again.command(made, RECIPE, FOLDER_OF_PNG, []).split("\n")
        subprocess.run(["sh", "-c", record_line], cwd=tmp_path, check=True)
        assert [path.name for path in tmp_path.iterdir()] == ["again.jsonl"]
        (line,) = (tmp_path / "again.jsonl").read_text().splitlines()
        (request,) = expand(parse("again.jsonl", 1, json.loads(line)), RECIPE, SAMPLER)
        assert request.digest == made["digest"] and request.prompt == prompt
        assert shlex.split(flags_line)[:6] == ["lightmill", "generate", "--input", "again.jsonl", "--output", "again"]


def test_the_flags_are_those_that_decide_pixels_and_bytes():
    recipe = replace(
        RECIPE, prompt_windows=3, context=2, scheduler_options='{"algorithm_type": "sde", "use_karras_sigmas": true}'
    )
    (made,) = rows("a fox", {}, recipe)
    words = shlex.split(
        again.command(made, recipe, OutputFormat("parquet", "webp", 80), ["--lora", "a b:0.5"]).split("\n")[1]
    )
    given = ["lora", "a b:0.5", "scheduler", "EulerDiscreteScheduler", "dtype", "float32"]
    given += ["per_device_batch_size", "4", "mesh", "context=2", "long_prompts", "chunk", "prompt_windows", "3"]
    given += ["image_format", "webp", "image_quality", "80"]
    assert words[6:-3] == [f"--{word}" if place % 2 == 0 else word for place, word in enumerate(given)]
    assert words[-3:] == ["--scheduler_options", 'algorithm_type="sde"', "use_karras_sigmas=true"]
    assert "--checkpoint CHECKPOINT " in again.command(made, recipe, FOLDER_OF_PNG)


def test_a_prompt_that_would_make_it_very_long_has_no_command():
    (made,) = rows("l" * 10_000, {})
    assert again.command(made, RECIPE, FOLDER_OF_PNG) is None
