"""Ours against diffusers, live: the same saved checkpoints, the same inputs, every number."""

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from model_handlers import fetch
from model_handlers.lora import Adapter
from tests.parity import adapters, cases, ours, sampling

REFERENCE = Path(os.environ["LIGHTMILL_REFERENCE"])
GOLDEN = Path(__file__).with_name("golden.npz")
CASES = {case.name: case for case in (*cases.CASES, cases.embedded())}


@functools.cache
def both(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    root = cases.EMBEDDED if name == "embedded" else REFERENCE / name
    refiner = REFERENCE / f"{name}_refiner" if CASES[name].refiner else None
    return ours.outputs(root, CASES[name], refiner=refiner), dict(np.load(REFERENCE / f"{name}.npz"))


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in CASES for what in ours.compared(CASES[name])])
def test_ours_is_the_references(name, what, record):
    mine, reference = (side[what] for side in both(name))
    assert mine.shape == reference.shape
    difference = np.abs(mine.astype(np.float64) - reference).max()
    record(name, what, difference, ours.LIMITS[what])
    assert difference <= ours.LIMITS[what]


@pytest.mark.parametrize("name", CASES)
def test_pictures_are_rounded_to_the_nearest(name):
    mine, reference = (side["rounded"] for side in both(name))
    assert np.mean(mine != reference) <= ours.SHARE_ROUNDED_APART


@pytest.mark.parametrize("name", CASES)
def test_pictures_of_a_case_differ_by_far_more_than_the_limit(name):
    # Otherwise a prompt, a guidance scale or a size that is ignored on both sides would pass unnoticed.
    images = both(name)[1]["image"]
    gaps = [np.abs(one - other).max() for i, one in enumerate(images) for other in images[:i]]
    assert min(gaps) > 1000 * ours.LIMITS["image"]


@pytest.mark.parametrize("name", cases.SINGLE_FILES)
def test_a_single_file_is_read_as_the_reference_reads_it(name, record):
    # The reference found in the file what it had saved in the folder.
    root = fetch.checkpoint_folder(str(REFERENCE / f"{name}.safetensors"), config=str(REFERENCE / name))
    mine = ours.outputs(root, CASES[name])["image"]
    difference = np.abs(mine - both(name)[0]["image"]).max()
    record(name, "single file", difference, 0.0)
    assert difference == 0


@functools.cache
def adapted(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    case = adapters.case()
    files = [
        Adapter.find(f"{REFERENCE}/lora/{file}.safetensors", weight, allow_partial=False)
        for file, weight in adapters.LOADS[name]
    ]
    number = list(adapters.LOADS).index(name)
    return ours.outputs(REFERENCE / case.name, case, files), dict(np.load(REFERENCE / f"lora_{number}.npz"))


@pytest.mark.parametrize("what", ["text", "pooled", "step", "image"])
@pytest.mark.parametrize("name", adapters.LOADS)
def test_lora_files_change_a_checkpoint_as_the_references(name, what, record):
    # The limits are those without LoRA: a merged weight is rounded once more, by less than a part in 2 ** 24.
    mine, reference = (side[what] for side in adapted(name))
    difference = np.abs(mine.astype(np.float64) - reference).max()
    record(name, what, difference, ours.LIMITS[what])
    assert difference <= ours.LIMITS[what]


@pytest.mark.parametrize("name", adapters.LOADS)
def test_lora_files_change_a_checkpoint_by_far_more_than_the_limit(name):
    without = np.load(REFERENCE / f"{adapters.case().name}.npz")["step"]
    assert np.abs(adapted(name)[1]["step"] - without).max() > 1000 * ours.LIMITS["step"]


@functools.cache
def loops() -> dict[tuple[str, int], sampling.Trajectory]:
    return sampling.split(np.load(REFERENCE / "samplers.npz"))


@pytest.mark.parametrize("name", sampling.SAMPLINGS)
def test_samplers_are_the_references(name, record):
    how = sampling.SAMPLINGS[name]
    differences = [ours.sampler_differences(ours.sample(how, count), loops()[name, count]) for count in how.counts]
    limits = [ours.sampler_limits(how, count) for count in how.counts]
    for what in ours.SAMPLER_LIMITS:
        pairs = [(found[what], limit[what]) for found, limit in zip(differences, limits, strict=True)]
        if what != "timesteps" or max(pairs)[0] > 0:  # most timesteps are whole numbers
            record(name, what, *max(pairs))
        assert all(difference <= limit for difference, limit in pairs)


def test_the_committed_arrays_are_still_what_the_reference_gives():
    golden = np.load(GOLDEN)
    for name in cases.GOLDEN:
        for what in ours.compared(CASES[name]):
            now = cases.subsample(np.load(REFERENCE / f"{name}.npz")[what]).astype(np.float64)
            # Another processor may add in another order, which is what the limits are for.
            assert np.abs(now - golden[f"{name} {what}"]).max() <= ours.LIMITS[what], f"{name} {what}"
    for loop, reference in sampling.split(np.load(GOLDEN.with_name("samplers.npz"))).items():
        np.testing.assert_allclose(reference.timesteps, loops()[loop].timesteps, rtol=1e-6)
        np.testing.assert_allclose(reference.final, loops()[loop].final, rtol=1e-5, atol=1e-5)


def test_the_committed_names_of_the_releases_are_still_the_references():
    real_width = json.loads(GOLDEN.with_name("real_width.json").read_text())
    assert real_width == json.loads((REFERENCE / "real_width.json").read_text())
