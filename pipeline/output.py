"""An output and its recipe: recipe.json, written before the first shard and compared by every later run."""

import dataclasses
import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from typing import Any

from model_handlers.recipe import Recipe
from pipeline.options import UsageError
from transforms import storage
from transforms.commits import list_commits
from transforms.formats import FORMATS, OutputFormat

FILE = "recipe.json"
PACKAGES = (
    *("lightmill", "apache-beam", "flax", "jax", "jaxlib", "numpy", "pillow"),
    *("pyarrow", "safetensors", "transformers"),
)


@dataclass(frozen=True)
class Output:
    """An output that is ready for a run.

    Attributes:
      path: where this recipe's shards go.
      new: whether it has no recipe.json yet.
      fresh: whether no shard is there yet.
    """

    path: str
    new: bool
    fresh: bool


def open_output(output: str, recipe: Recipe, output_format: OutputFormat, on_recipe_change: str = "refuse") -> Output:
    """Writes recipe.json, or compares with the one that is there; see `find_output`."""
    found = find_output(output, recipe, output_format, on_recipe_change)
    if found.new:
        write_recipe(found.path, recipe, output_format)
    return found


def find_output(output: str, recipe: Recipe, output_format: OutputFormat, on_recipe_change: str = "refuse") -> Output:
    """Where the shards of this recipe go; nothing is written yet, for the rest of the command may be wrong.

    Args:
      on_recipe_change: what to do if the output holds another recipe: "refuse", or "new" for a place of its own,
        OUT/recipes/<hash of the recipe>, which is an output like any other.

    Raises:
      UsageError: the output cannot be read, or holds another recipe.
    """
    ours = _content(recipe, output_format)
    try:
        changes = _changes(output, ours)
        if changes and on_recipe_change == "new":
            # From all that is compared, so that the next run with this recipe finds the same place.
            name = hashlib.sha256(json.dumps(ours, sort_keys=True).encode()).hexdigest()[:8]
            output = storage.join(output, "recipes", name)
            changes = _changes(output, ours)
        if changes:
            raise UsageError(
                f"{output} holds pictures of another recipe ({'; '.join(changes)}); take another --output, or "
                "--on_recipe_change=new"
            )
        return Output(output, new=changes is None, fresh=next(iter(list_commits(output)), None) is None)
    except OSError as error:
        raise UsageError(f"--output {output} cannot be read: {error}") from error


def write_recipe(output: str, recipe: Recipe, output_format: OutputFormat) -> None:
    """Writes recipe.json, with the versions of everything that decides bytes.

    Raises:
      UsageError: the output cannot be written.
    """
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    content = {**_content(recipe, output_format), "versions": versions}
    try:
        storage.write_file(output, FILE, json.dumps(content, indent=1).encode() + b"\n")
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error}") from error


def read_recipe(output: str) -> tuple[Recipe, OutputFormat]:
    """The recipe of an output, and how it stores its pictures.

    Raises:
      UsageError: if it is not an output of this program.
    """
    try:
        content = _load(output)
        recipe, output_format = Recipe(**content["recipe"]), OutputFormat(**content["output"])
    except OSError as error:
        raise UsageError(f"{output} is not an output of this program: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(_broken(output, error)) from error
    if output_format.format not in FORMATS:
        raise UsageError(_broken(output, f"unknown format {output_format.format}"))
    return recipe, output_format


def _content(recipe: Recipe, output_format: OutputFormat) -> dict[str, Any]:
    return {"recipe": dataclasses.asdict(recipe), "output": dataclasses.asdict(output_format)}


def _changes(output: str, ours: dict[str, Any]) -> list[str] | None:
    """What is not the same in the output's recipe.json, or None if it has none."""
    if FILE not in storage.list_files(output, ""):
        return None
    theirs = _load(output)
    # An output that is older than a field was made as its default says.
    fields = dataclasses.fields(Recipe)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return [
        f"{name} was {before!r} and is {values.get(name)!r}"
        for part, values in ours.items()
        for name in {**values, **theirs[part]}
        if (before := theirs[part].get(name, defaults.get(name))) != values.get(name)
    ]


def _load(output: str) -> dict[str, Any]:
    try:
        content = json.loads(storage.read_file(storage.join(output, FILE)))
        if all(isinstance(content[part], dict) for part in ("recipe", "output")):
            return content
        raise TypeError("it has no recipe")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(_broken(output, error)) from error


def _broken(output: str, error: object) -> str:
    return f"{storage.join(output, FILE)} is not a recipe of this program ({error})"
