"""A preset sets all that a few-step checkpoint needs, and does not let a flag undo a part of it."""

import argparse
import json

import pytest

from model_handlers import samplers
from pipeline import options, presets
from pipeline.options import GenerateOptions, UsageError
from pipeline.presets import PRESETS, settle_sampling
from tests.parity import cases


def settle(*flags):
    parser = argparse.ArgumentParser()
    options.add_generate_flags(parser)
    return settle_sampling(GenerateOptions(**vars(parser.parse_args(["--input=a", "--output=b", *flags]))))


def test_without_a_preset_the_flags_and_the_defaults_hold():
    assert settle() == presets.Sampling(None, "{}", 20, 5.0)
    assert settle("--scheduler=LCMScheduler", "--num_inference_steps=3", "--guidance_scale=0") == presets.Sampling(
        "LCMScheduler", "{}", 3, 0.0
    )


def test_a_preset_sets_scheduler_spacing_steps_and_guidance_together():
    trailing = '{"timestep_spacing": "trailing"}'
    assert settle("--preset=turbo") == presets.Sampling("EulerAncestralDiscreteScheduler", trailing, 1, 0.0)
    assert settle("--preset=lightning") == presets.Sampling("EulerDiscreteScheduler", trailing, 4, 0.0)
    assert settle("--preset=lcm") == presets.Sampling("LCMScheduler", "{}", 4, 1.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_of_a_sampler_that_takes_its_options(name):
    sampling = settle(f"--preset={name}")
    config = samplers.read(sampling.scheduler, cases.scheduler(), "", json.loads(sampling.scheduler_options))
    assert len(samplers.tables(config, samplers.Steps(sampling.num_inference_steps))) == sampling.num_inference_steps
    assert tuple(PRESETS) == options.PRESETS


def test_what_a_preset_leaves_open_or_says_itself_may_be_said():
    assert settle("--preset=lightning", "--num_inference_steps=8").num_inference_steps == 8
    assert settle("--preset=lcm", "--scheduler=LCMScheduler", "--guidance_scale=1").scheduler == "LCMScheduler"
    assert json.loads(settle("--preset=turbo", "--scheduler_options", "steps_offset=0").scheduler_options) == {
        "steps_offset": 0,
        "timestep_spacing": "trailing",
    }


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--scheduler=DDIMScheduler", "--scheduler=DDIMScheduler contradicts --preset=turbo, which has EulerAncestral"),
        ("--guidance_scale=5", "--guidance_scale=5.0 contradicts --preset=turbo, which has 0.0"),
        ("--num_inference_steps=20", "--num_inference_steps=20 contradicts --preset=turbo, made for 1 to 4"),
        ("--scheduler_options=timestep_spacing=leading", "timestep_spacing=leading contradicts --preset=turbo"),
    ],
)
def test_a_flag_that_contradicts_the_preset_is_named(flag, complaint):
    with pytest.raises(UsageError, match=complaint):
        settle("--preset=turbo", flag)


def test_scheduler_options_are_json_or_words():
    given = settle("--scheduler_options", "use_karras_sigmas=true", "solver_order=3", "algorithm_type=dpmsolver++")
    assert json.loads(given.scheduler_options) == {
        "algorithm_type": "dpmsolver++",
        "solver_order": 3,
        "use_karras_sigmas": True,
    }
    for wrong in ("karras", "=1"):
        with pytest.raises(UsageError, match="takes NAME=VALUE"):
            settle(f"--scheduler_options={wrong}")
