"""From records to requests: defaults, seeds and ranges."""

import dataclasses
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.recipe import MAX_SEED, MAX_SIDE, MAX_STEPS, Settings
from model_handlers.samplers.ddim import LCMConfig
from model_handlers.samplers.karras import HeunDiscreteConfig
from tests.fakes import RECIPE, SAMPLER
from transforms.records import PromptRecord, RecordError
from transforms.requests import MAX_IMAGES_PER_PROMPT, OF_REFINER, expand


def record(prompt="a cat", id="1", **fields):
    return PromptRecord("a.jsonl", 1, id, prompt, fields)


def one(**fields):
    (request,) = expand(record(**fields), RECIPE, SAMPLER)
    return request


def reason(**fields):
    with pytest.raises(RecordError) as error:
        expand(record(**fields), RECIPE, SAMPLER)
    return str(error.value)


def test_what_a_record_leaves_open_is_the_recipes():
    recipe = dataclasses.replace(
        RECIPE, width=16, num_inference_steps=7, guidance_scale=2.5, negative_prompt="bad", num_images_per_prompt=2
    )
    first, second = expand(record(), recipe, SAMPLER)
    assert (first.width, first.height, first.num_inference_steps) == (16, 8, 7)
    assert (first.guidance_scale, first.negative_prompt) == (2.5, "bad")
    assert (first.original_size, first.target_size, first.crops_coords_top_left) == ((8, 16), (8, 16), (0, 0))
    assert (first.image_index, second.image_index) == (0, 1)
    assert expand(record(negative_prompt=""), recipe, SAMPLER)[0].negative_prompt == ""


@pytest.mark.parametrize("name", ["original_size", "crops_coords_top_left", "target_size"])
def test_sizes_are_not_passed_over_by_a_model_that_knows_none(name):
    recipe = dataclasses.replace(RECIPE, family="StableDiffusionPipeline")
    with pytest.raises(
        RecordError, match=f"^{name} is a setting of SDXL, which StableDiffusionPipeline does not have$"
    ):
        expand(record(**{name: (64, 64)}), recipe, SAMPLER)
    assert expand(record(), recipe, SAMPLER)


def test_image_i_of_a_seeded_record_has_seed_plus_i_and_is_the_picture_of_that_seed_alone():
    images = expand(record(seed=40, num_images_per_prompt=4), RECIPE, SAMPLER)
    assert [image.seed for image in images] == [40, 41, 42, 43]
    assert images[3].digest == one(seed=43, id="other").digest


def test_records_without_seeds_have_different_noise_and_the_same_in_every_run():
    records = [record(id=str(number), num_images_per_prompt=3) for number in range(9)]
    seeds = {image.seed for each in records for image in expand(each, RECIPE, SAMPLER)}
    assert len(seeds) == 27
    assert one().seed == one().seed == one(prompt="another").seed
    other_run = dataclasses.replace(RECIPE, seed=1)
    assert expand(record(), other_run, SAMPLER)[0].seed != one().seed


def test_seeds_stop_at_the_end_of_their_range():
    assert expand(record(seed=MAX_SEED - 1, num_images_per_prompt=2), RECIPE, SAMPLER)[1].seed == MAX_SEED
    assert f"seed of the last image must be from 0 to {MAX_SEED}" in reason(seed=MAX_SEED, num_images_per_prompt=2)


@pytest.mark.parametrize("name", ["width", "height"])
def test_sides_are_multiples_that_the_model_can_draw(name):
    assert getattr(one(**{name: MAX_SIDE}), name) == MAX_SIDE
    assert reason(**{name: 500}) == f"{name} must be a multiple of 8, such as 496 or 504, not 500"
    for value in (0, -8, MAX_SIDE + 8):
        assert f"{name} must be from 8 to {MAX_SIDE}" in reason(**{name: value})


def test_chips_that_share_pictures_take_heights_that_they_can_share_and_make_other_pictures():
    shared = dataclasses.replace(RECIPE, context=2, height_multiple=64)
    (request,) = expand(record(height=128), shared, SAMPLER)
    assert request.digest != one(height=128).digest
    with pytest.raises(RecordError, match="height must be a multiple of 64, such as 448 or 512, not 504"):
        expand(record(height=504), shared, SAMPLER)
    assert expand(record(height=128, width=504), shared, SAMPLER)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("num_inference_steps", 1, MAX_STEPS),
        ("num_images_per_prompt", 1, MAX_IMAGES_PER_PROMPT),
        ("guidance_scale", 0.0, 1000.0),
    ],
)
def test_numbers_have_ranges(name, low, high):
    assert expand(record(**{name: low}), RECIPE, SAMPLER)
    assert len(expand(record(**{name: high}), RECIPE, SAMPLER)) == (high if name == "num_images_per_prompt" else 1)
    for value in (low - 1, high + 1):
        assert f"{name} must be from {low} to {high}" in reason(**{name: value})


def test_conditioning_pairs_have_ranges():
    assert one(original_size=(1, 2), crops_coords_top_left=(0, 5)).original_size == (1, 2)
    assert "original_size" in reason(original_size=(0, 5))
    assert "crops_coords_top_left" in reason(crops_coords_top_left=(0, -1))
    assert "target_size" in reason(target_size=(5, 2**21))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a dog"},
        {"negative_prompt": ""},
        {"seed": 8},
        {"width": 16},
        {"num_inference_steps": 21},
        {"guidance_scale": 5.5},
        {"original_size": (9, 9)},
        {"crops_coords_top_left": (0, 1)},
        {"target_size": (9, 9)},
        {"prompt_2": "a dog"},
        {"negative_prompt": "", "negative_prompt_2": "a dog"},
        {"clip_skip": 1},
        {"guidance_rescale": 0.5},
        {"guidance_interval": (0.5, 5.0)},
        {"negative_original_size": (9, 9), "negative_target_size": (9, 9)},
        {"timesteps": (999.0, 499.0)},
        {"sigmas": (14.0, 1.0, 0.0)},
    ],
)
def test_a_digest_changes_with_everything_that_decides_the_picture(change):
    assert one(**{"seed": 7, **change}).digest != one(seed=7).digest


def test_a_setting_at_its_default_leaves_the_digest_as_it_was_before_there_was_such_a_setting():
    plain = one(seed=7)
    defaults = dataclasses.asdict(Settings())
    given = {name: value for name, value in defaults.items() if value and name not in OF_REFINER}
    assert one(seed=7, **given).digest == plain.digest
    assert plain.digest == "8e78e55710d1f0f36190cfdf94d01e7e89c38ef1e1280e8318451effa9527008"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"clip_skip": 3}, "clip_skip must be from 0 to 2, not 3"),
        ({"guidance_rescale": 1.5}, "guidance_rescale must be from 0.0 to 1.0, not 1.5"),
        ({"guidance_interval": (5.0, 0.5)}, "guidance_interval must rise, between 0 and 10000, and not be 5 to 0.5"),
        ({"guidance_interval": (-1.0, 0.5)}, "guidance_interval must rise"),
        ({"negative_original_size": (8, 8)}, "needs both negative_original_size and negative_target_size"),
        ({"negative_crops_coords_top_left": (8, 8)}, "needs both negative_original_size and negative_target_size"),
        ({"negative_original_size": (0, 8), "negative_target_size": (8, 8)}, "negative_original_size must be from 1"),
        ({"negative_prompt_2": "a dog"}, "negative_prompt_2 has no effect without negative_prompt"),
        ({"timesteps": (999.0,), "sigmas": (14.0, 0.0)}, "timesteps and sigmas are both set"),
        ({"timesteps": (999.0, 499.0), "num_inference_steps": 3}, "num_inference_steps is 3, but timesteps or sigmas"),
        ({"timesteps": (499.0, 999.0)}, "timesteps=(499.0, 999.0) do not fall"),
        ({"sigmas": (14.0,)}, "sigmas=(14.0,) do not fall in 20 steps to 0 or above"),
        ({"eta": 0.5}, "EulerDiscreteScheduler does not take eta, only DDIMScheduler, TCDScheduler"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(fields, complaint):
    assert complaint in reason(**fields)


def test_a_schedule_of_its_own_says_how_many_steps_there_are():
    assert one(timesteps=(999.0, 499.0)).num_inference_steps == 2
    assert one(sigmas=(14.0, 1.0, 0.5, 0.0)).num_inference_steps == 3


@pytest.mark.parametrize(
    ("sampler", "steps", "complaint"),
    [
        ((LCMConfig(),), 51, "num_inference_steps=51 is not between 1 and 50"),
        (
            (HeunDiscreteConfig(),),
            501,
            "num_inference_steps=501 takes 1001 evaluations of the network with HeunDiscrete",
        ),
    ],
)
def test_a_record_of_more_steps_than_its_sampler_has_is_refused_before_it_reaches_the_model(sampler, steps, complaint):
    assert expand(record(num_inference_steps=steps - 1), RECIPE, sampler)
    with pytest.raises(RecordError, match=complaint):
        expand(record(num_inference_steps=steps), RECIPE, sampler)


@pytest.mark.parametrize("name", OF_REFINER)
def test_a_setting_of_the_refiner_needs_one(name):
    assert reason(**{name: 0.5}) == f"{name} is a setting of the refiner, and the run has none (--refiner)"


def test_where_the_refiner_takes_over_is_the_records_own_and_in_its_digest():
    recipe, sampler = dataclasses.replace(RECIPE, refiner="abc"), SAMPLER * 2
    usual, early = (expand(record(**fields), recipe, sampler)[0] for fields in ({}, {"denoising_end": 0.5}))
    assert (usual.settings.denoising_end, early.settings.denoising_end) == (0.8, 0.5)
    assert len({usual.digest, early.digest, one().digest}) == 3
    for value in (0.0, 1.0, -1.0):
        with pytest.raises(RecordError, match=r"^denoising_end must be above 0 and below 1"):
            expand(record(denoising_end=value), recipe, sampler)
    with pytest.raises(RecordError, match=r"^negative_aesthetic_score must be from 0.0 to 10.0, not 11.0"):
        expand(record(negative_aesthetic_score=11.0), recipe, sampler)


def test_a_digest_does_not_change_with_who_asks():
    other = PromptRecord("b.csv", 9, "2", "a cat", {"seed": 7}, '{"note": 1}')
    (request,) = expand(other, RECIPE, SAMPLER)
    assert request.digest == one(seed=7).digest
    assert request.key != one(seed=7).key
    assert one(seed=7, guidance_scale=-0.0).digest == one(seed=7, guidance_scale=0.0).digest


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["%s", '100 % \\ "', "%(prompt)s"]
)


@settings(max_examples=100, deadline=None)
@given(id=_TEXT, prompt=_TEXT, negative_prompt=st.none() | _TEXT, seed=st.none() | st.integers(0, MAX_SEED))
def test_seed_digest_and_key_are_hashes_of_plain_json_and_stay_what_they_are_in_outputs(
    id, prompt, negative_prompt, seed
):
    recipe = dataclasses.replace(RECIPE, negative_prompt=negative_prompt, scheduler_options='{"a": "%d"}')
    fields = {} if seed is None else {"seed": seed}
    (request,) = expand(record(prompt, id, width=16, **fields), recipe, SAMPLER)

    def sha256(value):
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    assert request.seed == (int(sha256([0, id, 0])[:16], 16) >> 11 if seed is None else seed)
    decided = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "seed": request.seed,
        "width": 16,
        "height": 8,
        "num_inference_steps": 20,
        "guidance_scale": 5.0,
        "original_size": [8, 16],
        "crops_coords_top_left": [0, 0],
        "target_size": [8, 16],
    }
    assert request.digest == sha256({**decided, **recipe.of_model()})
    assert request.key == sha256([id, 0, request.digest])[:32]


def test_a_picture_without_lora_has_the_digest_that_it_had_before_there_was_any():
    assert one(seed=7).digest == "8e78e55710d1f0f36190cfdf94d01e7e89c38ef1e1280e8318451effa9527008"


def test_lora_files_and_their_weights_are_in_the_digest():
    loras = ["[]", '[["a", 1.0]]', '[["b", 1.0]]', '[["a", 0.5]]', '[["a", 1.0], ["b", 1.0]]']
    requests = [expand(record(seed=7), dataclasses.replace(RECIPE, lora=lora), SAMPLER)[0] for lora in loras]
    assert len({request.digest for request in requests}) == len(loras)
