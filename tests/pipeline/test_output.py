"""A changed recipe is never mixed in: it is refused, or goes to a place of its own."""

import dataclasses
import json

import pytest

from pipeline.options import UsageError
from pipeline.output import open_output, read_recipe
from tests.fakes import RECIPE
from transforms.formats import FOLDER_OF_PNG, OutputFormat

OTHER = dataclasses.replace(RECIPE, num_inference_steps=30)


def test_the_same_recipe_goes_on_and_another_is_refused_with_what_changed(tmp_path):
    output = str(tmp_path / "out")
    first = open_output(output, RECIPE, FOLDER_OF_PNG)
    assert first.path == output and first.fresh
    assert open_output(output, RECIPE, FOLDER_OF_PNG).path == output
    assert read_recipe(output) == (RECIPE, FOLDER_OF_PNG)
    before = (tmp_path / "out/recipe.json").read_bytes()
    with pytest.raises(UsageError, match=r"num_inference_steps was 20 and is 30.*--on_recipe_change"):
        open_output(output, OTHER, FOLDER_OF_PNG)
    assert (tmp_path / "out/recipe.json").read_bytes() == before


def test_an_output_that_is_older_than_a_field_was_made_as_its_default_says(tmp_path):
    output = str(tmp_path / "out")
    open_output(output, RECIPE, FOLDER_OF_PNG)
    content = json.loads((tmp_path / "out/recipe.json").read_text())
    del content["recipe"]["lora"]
    (tmp_path / "out/recipe.json").write_text(json.dumps(content))
    assert open_output(output, RECIPE, FOLDER_OF_PNG).path == output
    with pytest.raises(UsageError, match=r"lora was '\[\]' and is"):
        open_output(output, dataclasses.replace(RECIPE, lora='[["ab", 1.0]]'), FOLDER_OF_PNG)


@pytest.mark.parametrize(
    "output_format", [OutputFormat("parquet"), OutputFormat(image_format="jpeg"), OutputFormat("folder", "webp", 50)]
)
def test_how_pictures_are_stored_belongs_to_the_recipe_of_an_output(tmp_path, output_format):
    open_output(str(tmp_path), RECIPE, OutputFormat(image_format="webp"))
    with pytest.raises(UsageError, match="was "):
        open_output(str(tmp_path), RECIPE, output_format)


def test_a_new_recipe_has_a_place_of_its_own_to_which_it_comes_back(tmp_path):
    output = str(tmp_path / "out")
    open_output(output, RECIPE, FOLDER_OF_PNG, "new")
    places = [open_output(output, recipe, FOLDER_OF_PNG, "new").path for recipe in (OTHER, RECIPE, OTHER)]
    assert places[0] == places[2] != places[1] == output
    assert places[0].startswith(f"{output}/recipes/") and read_recipe(places[0]) == (OTHER, FOLDER_OF_PNG)
    third = dataclasses.replace(RECIPE, guidance_scale=1.0)
    assert open_output(output, third, FOLDER_OF_PNG, "new").path not in places


@pytest.mark.parametrize("changed", ["[]", '[["b", 1.0]]', '[["a", 0.5]]'])
def test_lora_files_belong_to_the_recipe_of_an_output(changed, tmp_path):
    recipes = [dataclasses.replace(RECIPE, lora=lora) for lora in ('[["a", 1.0]]', changed)]
    for number, (first, second) in enumerate((recipes, recipes[::-1])):
        output = str(tmp_path / str(number))
        open_output(output, first, FOLDER_OF_PNG)
        assert not open_output(output, first, FOLDER_OF_PNG).new
        with pytest.raises(UsageError, match="lora was "):
            open_output(output, second, FOLDER_OF_PNG)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"recipe": {}}', '{"recipe": [], "output": {}}', "\0"])
def test_a_recipe_file_that_is_none_is_named(tmp_path, content):
    (tmp_path / "recipe.json").write_text(content)
    for use in (lambda: open_output(str(tmp_path), RECIPE, FOLDER_OF_PNG), lambda: read_recipe(str(tmp_path))):
        with pytest.raises(UsageError, match=r"recipe.json is not a recipe of this program"):
            use()


def test_a_recipe_with_unknown_parts_is_refused(tmp_path):
    open_output(str(tmp_path), RECIPE, FOLDER_OF_PNG)
    content = json.loads((tmp_path / "recipe.json").read_text())
    for part, name, value in (("recipe", "new", 1), ("output", "format", "zip"), ("output", "image_format", "gif")):
        changed = {**content, part: {**content[part], name: value}}
        (tmp_path / "recipe.json").write_text(json.dumps(changed))
        with pytest.raises(UsageError, match="is not a recipe"):
            read_recipe(str(tmp_path))
