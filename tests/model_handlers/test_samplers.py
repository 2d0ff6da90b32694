"""The tables are diffusers', and options that would change them are refused."""

from pathlib import Path

import numpy as np
import pytest

from model_handlers import samplers
from model_handlers.config import ConfigError
from model_handlers.samplers import SchedulerConfig, euler_schedule
from tests.parity import cases, ours

GOLDEN = np.load(Path(cases.__file__).with_name("golden.npz"))


@pytest.mark.parametrize("what", ours.SAMPLER_LIMITS)
@pytest.mark.parametrize("spacing", cases.SPACINGS)
def test_tables_are_diffusers(spacing, what):
    difference = np.abs(ours.sampler_tables(spacing)[what] - GOLDEN[f"{spacing} {what}"])
    assert difference.max() <= ours.SAMPLER_LIMITS[what]


@pytest.mark.parametrize("spacing", cases.SPACINGS)
def test_every_number_of_steps_has_a_table_that_falls_to_zero(spacing):
    config = SchedulerConfig(**cases.scheduler(timestep_spacing=spacing))
    for count in range(1, 1001):
        schedule = euler_schedule(config, count)
        assert schedule.timesteps.shape == (count,)
        assert schedule.sigmas.shape == (count + 1,)
        # "trailing" rounds, so near 1000 steps two of them may fall on one timestep.
        assert (np.diff(schedule.timesteps) <= 0).all()
        assert (np.diff(schedule.sigmas) <= 0).all()
        assert 0 <= schedule.timesteps[-1] <= schedule.timesteps[0] <= 999 + config.steps_offset
        assert schedule.sigmas[-2] > schedule.sigmas[-1] == 0


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_a_number_of_steps_without_a_table_is_an_error(count):
    with pytest.raises(ConfigError, match=rf"num_inference_steps={count} is not between 1 and 1000"):
        euler_schedule(SchedulerConfig(), count)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prediction_type", "v_prediction"),
        ("use_karras_sigmas", True),
        ("use_exponential_sigmas", True),
        ("use_beta_sigmas", True),
        ("rescale_betas_zero_snr", True),
        ("final_sigmas_type", "sigma_min"),
        ("interpolation_type", "log_linear"),
        ("timestep_type", "continuous"),
        ("trained_betas", [0.1, 0.2]),
        ("beta_schedule", "squaredcos_cap_v2"),
        ("timestep_spacing", "sideways"),
    ],
)
def test_an_unsupported_option_is_an_error_that_names_it(name, value):
    with pytest.raises(ConfigError, match=rf"^scheduler_config\.json: {name}=.* is not supported, only"):
        SchedulerConfig.read({**cases.scheduler(), name: value}, "scheduler_config.json")


def test_options_that_change_nothing_at_inference_are_ignored():
    published = {"skip_prk_steps": True, "set_alpha_to_one": False, "clip_sample": False, "sample_max_value": 1.0}
    settings = cases.scheduler()
    assert SchedulerConfig.read({**settings, **published}, "") == SchedulerConfig(**settings)


def test_euler_steps_of_a_perfect_network_end_on_the_picture():
    schedule = euler_schedule(SchedulerConfig(), 7)
    picture, noise = np.float32(0.3), np.float32(-1.7)
    latents = picture + schedule.sigmas[0] * noise
    for sigma, next_sigma in zip(schedule.sigmas, schedule.sigmas[1:], strict=False):
        predicted = (latents - picture) / sigma
        latents = samplers.euler_step(latents, predicted, sigma, next_sigma)
    assert latents == pytest.approx(picture, abs=1e-6)
