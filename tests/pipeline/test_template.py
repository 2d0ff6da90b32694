"""The template's description is the flags, and what its launcher starts is the job."""

import argparse
import json
import re
from pathlib import Path

import pytest

from pipeline import template
from pipeline.options import add_generate_flags

METADATA = Path(template.__file__).with_name("metadata.json")
PARAMETERS = {parameter["name"]: parameter for parameter in json.loads(METADATA.read_text())["parameters"]}


def test_the_committed_description_is_that_of_the_flags():
    assert METADATA.read_text() == template.metadata() + "\n"


def test_every_parameter_is_described():
    for name, parameter in PARAMETERS.items():
        assert parameter.keys() == {"name", "label", "helpText", "isOptional", "regexes"}, name
        assert len(parameter["helpText"]) > 5 and "None" not in parameter["helpText"], name
    required = {name for name, parameter in PARAMETERS.items() if not parameter["isOptional"]}
    assert required == {"input", "output", "sdk_container_image"}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("input", "gs://bucket/prompts/*.jsonl", "prompts.jsonl"),
        ("output", "gs://bucket/out", "/tmp/out"),
        ("tpu", "v5e-4", "v5e-5"),
        ("gpu", "l4", "k80"),
        ("num_inference_steps", "20", "twenty"),
        ("guidance_scale", "7.5", "-1"),
        ("image_format", "webp", "gif"),
    ],
)
def test_a_parameter_lets_through_what_the_flag_takes(name, right, wrong):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_generate_flags(parser)
    (pattern,) = PARAMETERS[name]["regexes"]
    assert re.search(pattern, right) and not re.search(pattern, wrong)
    files = [] if name in ("input", "output") else ["--input=gs://b/a.csv", "--output=gs://b/out"]
    missing = {"input": ["--output=o"], "output": ["--input=i"]}.get(name, [])
    assert parser.parse_args([*files, *missing, f"--{name}={right}"])
