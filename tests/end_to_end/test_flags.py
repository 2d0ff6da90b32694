"""Each flag reaches what its help says."""

import dataclasses
import json

import numpy as np
import pytest

from pipeline.options import GenerateOptions
from tests import fakes
from tests.end_to_end import command
from tests.end_to_end.conftest import RECORDS

BASE = {"prompt": "a red circle", "seed": 1}
# Records that differ from BASE in one setting each.
CHANGED = {
    "prompt": {"prompt": "a blue circle"},
    "seed": {"seed": 2},
    "steps": {"num_inference_steps": 5},
    "guidance": {"guidance_scale": 9},
    "negative prompt": {"negative_prompt": "a green star"},
    "empty negative prompt": {"negative_prompt": ""},
    "original size": {"original_size": [512, 1024]},
    "crop": {"crops_coords_top_left": [0, 64]},
    "target size": {"target_size": "64x32"},
    "prompt 2": {"prompt_2": "a blue circle"},
    "negative prompt 2": {"negative_prompt": "", "negative_prompt_2": "a green star"},
    "clip skip": {"clip_skip": 1},
    "guidance rescale": {"guidance_rescale": 0.7},
    "guidance interval": {"guidance_interval": [1, 20]},
    "negative sizes": {"negative_original_size": [64, 64], "negative_target_size": [64, 32]},
    "negative crop": {
        "negative_original_size": [64, 64],
        "negative_target_size": [64, 32],
        "negative_crops_coords_top_left": [0, 64],
    },
    "timesteps": {"timesteps": [900, 300]},
    "sigmas": {"sigmas": [14.0, 2.0, 0.0]},
}


def test_the_help_names_every_flag_with_what_it_does():
    finished = command.run("generate", "--help")
    assert finished.status == 0
    for field in dataclasses.fields(GenerateOptions):
        assert f"--{field.name}" in finished.stdout
    for status in range(4):
        assert f"\n  {status}  " in finished.stdout


def test_flags_are_the_settings_of_records_that_have_none(generate, tmp_path):
    (tmp_path / "a.csv").write_text(
        "words,name,prompt,num_inference_steps\nthe words,n1,not this,\nother words,n2,nor this,4\n"
    )
    generate(
        tmp_path / "a.csv",
        tmp_path / "out",
        "--prompt_column=words",
        "--id_column=name",
        "--width=24",
        "--height=16",
        "--num_inference_steps=3",
        "--guidance_scale=2.5",
        "--negative_prompt=a zebra",
        "--num_images_per_prompt=2",
        "--clip_skip=1",
        "--guidance_rescale=0.7",
        "--guidance_interval=0.5,20",
        "--negative_original_size=64,64",
        "--negative_target_size=64,32",
        "--negative_crops_coords_top_left=0,8",
        "--seed=5",
        "--scheduler=EulerDiscreteScheduler",
        "--images_per_shard=4",
        "--per_device_batch_size=2",
        "--device=cpu",
        "--dtype=bfloat16",
    )
    rows = fakes.rows(tmp_path / "out")
    assert {(row["id"], row["image_index"], row["prompt"], row["num_inference_steps"]) for row in rows} == {
        ("n1", 0, "the words", 3),
        ("n1", 1, "the words", 3),
        ("n2", 0, "other words", 4),
        ("n2", 1, "other words", 4),
    }
    settings = {
        "width": 24,
        "height": 16,
        "guidance_scale": 2.5,
        "negative_prompt": "a zebra",
        "negative_prompt_set": True,
        "scheduler": "EulerDiscreteScheduler",
    }
    for row in rows:
        assert {name: row[name] for name in settings} == settings
        assert command.pixels(row["path"]).shape == (16, 24, 3)
        assert json.loads(row["extra"])["prompt"] in ("not this", "nor this")
        assert json.loads(row["settings"]) == {
            "clip_skip": 1,
            "guidance_rescale": 0.7,
            "guidance_interval": [0.5, 20.0],
            "negative_original_size": [64, 64],
            "negative_target_size": [64, 32],
            "negative_crops_coords_top_left": [0, 8],
        }
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    settings = {"seed": 5, "per_device_batch_size": 2, "dtype": "bfloat16", "num_inference_steps": 3}
    assert {name: recipe["recipe"][name] for name in settings} == settings
    assert recipe["versions"].keys() >= {"jax", "lightmill"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, generate):
    """Pixels of BASE and of each of CHANGED, made in one run."""
    folder = tmp_path_factory.mktemp("settings")
    records = [{"id": "base", **BASE}, *({"id": what, **BASE, **change} for what, change in CHANGED.items())]
    records += [{"id": f"guidance {scale}", **BASE, "guidance_scale": scale} for scale in (0, 1)]
    generate(fakes.write_jsonl(folder / "a.jsonl", records), folder / "out")
    return {row["id"]: command.pixels(row["path"]) for row in fakes.rows(folder / "out")}


@pytest.mark.parametrize("what", CHANGED)
def test_every_setting_of_a_record_changes_its_picture(what, pictures):
    assert not np.array_equal(pictures[what], pictures["base"])


def test_no_two_settings_give_the_same_picture(pictures):
    different = {what: pictures[what].tobytes() for what in CHANGED}
    assert len(set(different.values())) == len(CHANGED)


def test_guidance_up_to_one_is_none(pictures):
    assert np.array_equal(pictures["guidance 0"], pictures["guidance 1"])


def test_a_long_prompt_is_read_to_its_end_in_windows(generate, jsonl, tmp_path):
    start = "a red circle left of a blue square, " * 10
    records = jsonl([{"id": end, "prompt": start + end, "seed": 1} for end in ("a green star", "a black ring")])
    generate(records, tmp_path / "cut")
    generate(records, tmp_path / "chunk", "--long_prompts=chunk", "--prompt_windows=2")
    for folder, truncated, pictures in (("cut", True, 1), ("chunk", False, 2)):
        rows = fakes.rows(tmp_path / folder)
        assert [row["truncated"] for row in rows] == [truncated] * 2
        assert len({command.pixels(row["path"]).tobytes() for row in rows}) == pictures


def test_the_run_seed_gives_other_pictures_to_records_without_seeds_only(generate, jsonl, expected, tmp_path):
    generate(jsonl(RECORDS), tmp_path / "out", "--seed=1")
    found = command.hashes(tmp_path / "out")
    assert {who for who in expected if found[who] == expected[who]} == {
        (record["id"], 0) for record in RECORDS if "seed" in record
    }


def test_compiled_programs_are_kept_where_the_flag_says(finished_output, jax_cache_dir):
    assert [path for path in jax_cache_dir.iterdir() if path.name.startswith("jit_program")]
