"""Every picture says the seed, and the recipe, by which it is made again."""

import pytest

from tests import fakes
from tests.end_to_end import command


@pytest.fixture(scope="module")
def four(tmp_path_factory, generate):
    """Rows, in order, of a record that asks for four pictures with a seed, and of one without a seed."""
    folder = tmp_path_factory.mktemp("four")
    records = [
        {"id": "given", "prompt": "a red circle", "seed": 41, "num_images_per_prompt": 4, "negative_prompt": "a star"},
        {"id": "derived", "prompt": "a red circle", "num_images_per_prompt": 4, "crops_coords_top_left": [0, 16]},
    ]
    generate(fakes.write_jsonl(folder / "input.jsonl", records), folder / "out", "--guidance_scale=3.5")
    rows = sorted(fakes.rows(folder / "out"), key=lambda row: row["image_index"])
    return {who: [row for row in rows if row["id"] == who] for who in ("given", "derived")}


def test_each_of_four_pictures_has_a_seed_of_its_own(four):
    assert [row["seed"] for row in four["given"]] == [41, 42, 43, 44]
    assert len({row["seed"] for row in four["given"] + four["derived"]}) == 8
    assert len({command.pixels(row["path"]).tobytes() for row in four["given"] + four["derived"]}) == 8


def test_each_file_carries_the_seed_of_its_own_row(four):
    for row in four["given"] + four["derived"]:
        assert command.recipe_inside(row["path"])["seed"] == row["seed"]


@pytest.mark.parametrize("who", ["given", "derived"])
def test_the_third_of_four_is_made_again_alone_by_its_seed(who, four, generate, jsonl, tmp_path):
    third = four[who][2]
    record = {"prompt": third["prompt"], "seed": third["seed"], "crops_coords_top_left": third["crops_coords_top_left"]}
    if third["negative_prompt_set"]:
        record["negative_prompt"] = third["negative_prompt"]
    generate(jsonl([record]), tmp_path / "out", "--guidance_scale=3.5")
    (alone,) = fakes.rows(tmp_path / "out")
    assert command.pixels(alone["path"]).tobytes() == command.pixels(third["path"]).tobytes()
    assert alone["path"].read_bytes() == third["path"].read_bytes()


def test_a_picture_is_made_again_from_what_its_file_carries(four, generate, jsonl, tmp_path):
    rows = four["given"] + four["derived"]
    generate(jsonl([{"id": row["key"], **command.recipe_inside(row["path"])} for row in rows]), tmp_path / "out")
    again = {row["id"]: row for row in fakes.rows(tmp_path / "out")}
    for row in rows:
        assert again[row["key"]]["digest"] == row["digest"]
        assert command.pixels(again[row["key"]]["path"]).tobytes() == command.pixels(row["path"]).tobytes()
