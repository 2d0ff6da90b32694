"""Every sampler is diffusers', and options that are not supported are refused."""

from pathlib import Path

import numpy as np
import pytest

from model_handlers import samplers
from model_handlers.config import ConfigError
from model_handlers.samplers import SAMPLERS, SchedulerConfig, Steps
from tests.parity import cases, ours, sampling

LOOPS = sampling.split(dict(np.load(Path(sampling.__file__).with_name("samplers.npz"))))
EULER, DPM, UNIPC = "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"


def read(name, **options):
    usual = {"clip_sample": False, "skip_prk_steps": True}
    return samplers.read(name, cases.scheduler(**{**usual, **options}), "scheduler_config.json")


def evaluations(name, count):
    """Of Heun two a step but for the last, of PNDM two for the first."""
    return {"HeunDiscreteScheduler": 2 * count - 1, "PNDMScheduler": count + (count > 1)}.get(name, count)


@pytest.mark.parametrize("name", sampling.SAMPLINGS)
def test_loops_end_where_diffusers_does(name):
    how = sampling.SAMPLINGS[name]
    for count in how.counts:
        differences = ours.sampler_differences(ours.sample(how, count), LOOPS[name, count])
        for what, limit in ours.sampler_limits(how, count).items():
            assert differences[what] <= limit, (count, what)


LINEAR = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
OLDER = {**LINEAR, "num_train_timesteps": 1100}
FROM_001 = {**LINEAR, "beta_start": 0.01, "clip_sample": False}
TO_SIGMA_MIN = {**LINEAR, "solver_order": 2, "lower_order_final": False, "final_sigmas_type": "sigma_min"}
V, KARRAS = {"prediction_type": "v_prediction"}, {"use_karras_sigmas": True}


@pytest.mark.parametrize(
    ("name", "steps", "options", "total", "mean"),
    [
        (EULER, 10, OLDER, 10.0807, 0.0131),
        (EULER, 10, {**OLDER, **KARRAS}, 124.52299499511719, 0.16213932633399963),
        ("HeunDiscreteScheduler", 10, OLDER, 0.1233, 0.0002),
        ("DDIMScheduler", 10, {**LINEAR, "clip_sample": False}, 172.0067, 0.223967),
        ("DDIMScheduler", 10, {**LINEAR, **V, "clip_sample": False}, 52.5302, 0.0684),
        ("DDIMScheduler", 10, {**FROM_001, "set_alpha_to_one": True}, 149.8295, 0.1951),
        ("DDIMScheduler", 10, {**FROM_001, "set_alpha_to_one": False}, 149.0784, 0.1941),
        (DPM, 10, TO_SIGMA_MIN, None, 0.3301),
        (DPM, 10, {**TO_SIGMA_MIN, **V}, None, 0.2251),
        (DPM, 10, {**TO_SIGMA_MIN, **V, **KARRAS}, None, 0.2096),
        (DPM, 10, {**TO_SIGMA_MIN, **V, "use_lu_lambdas": True}, None, 0.1554),
        (UNIPC, 10, {**LINEAR, "final_sigmas_type": "sigma_min"}, None, 0.2464),
        (UNIPC, 10, {**LINEAR, **KARRAS, "final_sigmas_type": "sigma_min"}, None, 0.2925),
        (UNIPC, 10, {**LINEAR, **V, "final_sigmas_type": "sigma_min"}, None, 0.1014),
        (UNIPC, 10, {**LINEAR, **V, **KARRAS, "final_sigmas_type": "sigma_min"}, None, 0.1966),
        ("LCMScheduler", 1, SCALED, 18.7097, 0.0244),
        ("TCDScheduler", 1, SCALED, 29.8715, 0.0389),
        ("TCDScheduler", 10, SCALED, 181.2040, 0.2359),
    ],
)
def test_the_loop_sums_of_diffusers_own_scheduler_tests(name, steps, options, total, mean):
    """Those of its deterministic loops (tests/schedulers), with its tolerances; some publish the mean alone.

    For Euler and Heun they step on from scaled latents. The others need torch's generator (Euler ancestral, the SDE
    forms, LCM of several steps, loops that begin with added noise) or options that latents do not have: clip_sample,
    and PNDM's Runge-Kutta steps.
    """
    table = samplers.tables(samplers.read(name, options, name), Steps(steps))
    slots = np.zeros((samplers.SLOTS, 4 * 3 * 8 * 8))
    slots[0] = np.arange(slots.shape[1]) / slots.shape[1] * table.init_noise_sigma
    for timestep, scale, update in zip(table.timesteps, table.input_scale, table.updates, strict=True):
        slots[0] *= scale
        slots = update @ [*slots, slots[0] * timestep / (timestep + 1), np.zeros(slots.shape[1])]
    assert np.abs(slots[0]).mean() == pytest.approx(mean, abs=1e-3)
    assert total is None or np.abs(slots[0]).sum() == pytest.approx(total, abs=1e-2)


@pytest.mark.parametrize("spacing", cases.SPACINGS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_number_of_steps_has_a_table(name, spacing):
    config = read(name, timestep_spacing=spacing)
    # LCM and TCD choose from 50 timesteps, Heun evaluates twice, and with 998 the offset leads beyond the last.
    most = {"LCMScheduler": 50, "TCDScheduler": 50, "HeunDiscreteScheduler": 500}.get(name, 997)
    for count in (*range(1, 61), 61, 100, 333, 500, 501, 997):
        if count <= most:
            table = samplers.tables(config, Steps(count))
            assert len(table) == evaluations(name, count)
            # "trailing" rounds, so near 1000 steps two of them may fall on one timestep.
            assert (np.diff(table.timesteps) <= 0).all()
            assert (np.diff(table.sigmas) <= 0).all()
            assert 0 <= table.timesteps[-1] <= table.timesteps[0] <= 1000
            assert np.isfinite(table.updates).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_perfect_network_leads_to_the_picture(name):
    picture = 0.3
    table = samplers.tables(read(name, timestep_spacing="trailing", prediction_type="epsilon"), Steps(7))
    slots = np.zeros(samplers.SLOTS)
    slots[0] = -1.7 * table.init_noise_sigma
    for i, update in enumerate(table.updates):
        alpha = 1 / np.hypot(1, table.sigmas[i])
        noise = (slots[0] * table.input_scale[i] - alpha * picture) / (alpha * table.sigmas[i])
        slots = update @ [*slots, noise, 0.7]
    # Those of whole timesteps may end at 0, which has a little noise; LCM mixes in a little of what it began with.
    nearly = name in ("DDIMScheduler", "PNDMScheduler", "TCDScheduler", "LCMScheduler")
    assert slots[0] == pytest.approx(picture, abs=0.1 if nearly else 1e-9)


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_a_number_of_steps_without_a_table_is_an_error(count):
    with pytest.raises(ConfigError, match=rf"num_inference_steps={count} is not between 1 and 1000"):
        samplers.tables(read(EULER), Steps(count))
    with pytest.raises(ConfigError, match=r"num_inference_steps=51 is not between 1 and 50"):
        samplers.tables(read("LCMScheduler"), Steps(51))


def test_only_stochastic_samplers_ask_for_noise():
    def asks(name, eta=0.0, **options):
        table = samplers.tables(read(name, **options), Steps(5, eta=eta))
        return (table.updates[..., samplers.NOISE > 0] != 0).any((1, 2)).tolist()

    until_the_last = [True] * 4 + [False]
    assert asks("EulerAncestralDiscreteScheduler") == until_the_last
    assert asks("LCMScheduler") == until_the_last
    assert asks(DPM, algorithm_type="sde-dpmsolver++") == until_the_last
    assert asks("TCDScheduler", 0.3) == until_the_last
    assert any(asks("DDIMScheduler", 1.0))
    for name in (EULER, "HeunDiscreteScheduler", DPM, UNIPC, "DDIMScheduler", "PNDMScheduler", "TCDScheduler"):
        assert not any(asks(name))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        (EULER, "prediction_type", "flow_prediction"),
        (EULER, "final_sigmas_type", "sideways"),
        (EULER, "interpolation_type", "cubic"),
        (EULER, "timestep_type", "odd"),
        (EULER, "beta_schedule", "sideways"),
        (EULER, "beta_start", "small"),
        (EULER, "steps_offset", True),
        (EULER, "timestep_spacing", "sideways"),
        ("EulerAncestralDiscreteScheduler", "prediction_type", "sample"),
        ("HeunDiscreteScheduler", "clip_sample", True),
        ("DDIMScheduler", "clip_sample", True),
        ("DDIMScheduler", "thresholding", True),
        ("LCMScheduler", "clip_sample", True),
        ("PNDMScheduler", "skip_prk_steps", False),
        ("PNDMScheduler", "prediction_type", "sample"),
        ("TCDScheduler", "thresholding", True),
        (DPM, "thresholding", True),
        (DPM, "variance_type", "learned_range"),
        (DPM, "solver_order", 4),
        (DPM, "algorithm_type", "sideways"),
        (DPM, "algorithm_type", "dpmsolver"),  # with final_sigmas_type "zero", where it divides by zero
        (DPM, "use_flow_sigmas", True),
        (UNIPC, "use_dynamic_shifting", True),
        (UNIPC, "solver_p", "DDIMScheduler"),
        (UNIPC, "solver_type", "sideways"),
    ],
)
def test_an_unsupported_option_is_an_error_that_names_it(name, option, value):
    with pytest.raises(ConfigError, match=r"^scheduler_config\.json: \w+=.* is not supported, only") as error:
        read(name, **{option: value})
    assert option in str(error.value) or (option, value) == ("algorithm_type", "dpmsolver")


def test_two_ways_to_choose_noise_levels_exclude_each_other():
    with pytest.raises(ConfigError, match="use_karras_sigmas and use_beta_sigmas exclude each other"):
        read(EULER, use_karras_sigmas=True, use_beta_sigmas=True)


def test_an_unknown_scheduler_is_an_error_that_lists_the_known():
    with pytest.raises(
        ConfigError, match=r"scheduler LMSDiscreteScheduler is not supported; --scheduler takes DDIMScheduler, "
    ):
        read("LMSDiscreteScheduler")


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_choice_that_the_sampler_does_not_have_is_an_error_that_names_it(name):
    given = {"timesteps": (900.0, 500.0), "sigmas": (9.0, 5.0, 0.0), "eta": 0.5}
    for field, value in given.items():
        steps = Steps(2, **{field: value})
        if field in SAMPLERS[name].takes:
            assert len(samplers.tables(read(name), steps)) == evaluations(name, 2)
        else:
            with pytest.raises(ConfigError, match=rf"^{name} does not take {field}, only \w+"):
                samplers.tables(read(name), steps)


@pytest.mark.parametrize("timesteps", [(500.0, 900.0), (1000.0, 500.0), (500.0, -1.0), (500.0, 500.0), (500.0,)])
def test_custom_timesteps_must_fall_within_the_training(timesteps):
    with pytest.raises(ConfigError, match=r"^timesteps="):
        samplers.tables(read(EULER), Steps(2, timesteps=timesteps))


@pytest.mark.parametrize("sigmas", [(1.0, 2.0, 0.0), (2.0, 1.0, -1.0), (2.0, 2.0, 0.0), (2.0, 0.0)])
def test_custom_sigmas_must_fall(sigmas):
    with pytest.raises(ConfigError, match=r"^sigmas=.* do not fall in 2 steps to 0 or above"):
        samplers.tables(read(EULER), Steps(2, sigmas=sigmas))


@pytest.mark.parametrize("name", [EULER, DPM, "HeunDiscreteScheduler"])
def test_custom_timesteps_and_chosen_noise_levels_exclude_each_other(name):
    with pytest.raises(ConfigError, match="cannot be chosen together with use_karras_sigmas"):
        samplers.tables(read(name, use_karras_sigmas=True), Steps(2, timesteps=(900.0, 500.0)))


def test_pndm_does_not_go_on_where_another_model_stopped():
    assert len(samplers.tables_until(read("PNDMScheduler"), Steps(10), 0.8)) == 9
    with pytest.raises(ConfigError, match="PNDMScheduler cannot go on where another model stopped"):
        samplers.tables_from(read("PNDMScheduler"), Steps(10), 0.8)


def test_options_divide_by_zero_loudly():
    config = read("DDIMScheduler", rescale_betas_zero_snr=True, timestep_spacing="trailing")  # of the noise, not of v
    with pytest.raises(ConfigError, match="5 evaluations of this schedule divide by zero"):
        samplers.tables(config, Steps(5))


def test_another_class_reads_a_file_as_from_config_does():
    written_by_unipc = cases.scheduler(
        _class_name=UNIPC,
        _use_default_values=["lower_order_final"],
        solver_type="bh1",
        lower_order_final=False,
        disable_corrector=[0],
        set_alpha_to_one=False,
        skip_prk_steps=True,
        sample_max_value=1.0,
    )
    config = samplers.read(DPM, written_by_unipc, "")
    assert config == samplers.read(DPM, cases.scheduler(solver_type="bh1"), "")
    same = samplers.read(DPM, cases.scheduler(solver_type="midpoint"), "")
    np.testing.assert_array_equal(samplers.tables(config, Steps(5)).updates, samplers.tables(same, Steps(5)).updates)


def test_every_class_has_the_defaults_of_diffusers():
    def defaults(name):
        config = samplers.read(name, {"clip_sample": False, "skip_prk_steps": True}, "")
        return config.beta_start, config.beta_end, config.beta_schedule, config.timestep_spacing

    pixels, latents = (0.0001, 0.02, "linear"), (0.00085, 0.012, "scaled_linear", "leading")
    assert defaults("DDIMScheduler") == defaults("PNDMScheduler") == (*pixels, "leading")
    assert defaults("HeunDiscreteScheduler") == (0.00085, 0.012, "linear", "linspace")
    assert defaults("LCMScheduler") == defaults("TCDScheduler") == latents
    for name in (EULER, "EulerAncestralDiscreteScheduler", DPM, UNIPC):
        assert defaults(name) == (*pixels, "linspace")


def test_what_training_adds_to_pictures_is_the_same_for_all_classes():
    alphas = samplers.alphas_cumprod(SchedulerConfig.read(cases.scheduler(), ""))
    assert alphas[0] == pytest.approx(1 - 0.00085)
    assert alphas[-1] == pytest.approx(0.004660, abs=1e-6)


def test_options_take_the_place_of_the_files_own():
    values = cases.scheduler(_use_default_values=["timestep_spacing", "use_karras_sigmas"])
    config = samplers.read(EULER, values, "", {"timestep_spacing": "trailing"})
    assert (config.timestep_spacing, config.use_karras_sigmas) == ("trailing", False)
    with pytest.raises(ConfigError, match=r"EulerDiscreteScheduler has no option solver_order, only beta_end, "):
        samplers.read(EULER, values, "", {"solver_order": 3})
    with pytest.raises(ConfigError, match="timestep_spacing='sideways' is not supported"):
        samplers.read(EULER, values, "", {"timestep_spacing": "sideways"})
