"""What is said about an image: its row of metadata, and the recipe inside its file.

The row's columns are declared once, here, and every row has all of them with the same types. Readers such as Hugging
Face `datasets` take the types from the first file that they meet: a column that is null there and text in the next
shard cannot be loaded, hence "" and `negative_prompt_set` for a negative prompt that is absent, and `settings`, what
few pictures have, as JSON text.
"""

import dataclasses
import json

from model_handlers.recipe import ImageRequest, ImageResult, Recipe

# Column: type, by the names of Hugging Face features.
SCHEMA: dict[str, str] = {
    "file_name": "string",
    "key": "string",
    "id": "string",
    "image_index": "int64",
    "prompt": "string",
    "negative_prompt": "string",
    "negative_prompt_set": "bool",
    "seed": "int64",
    "width": "int64",
    "height": "int64",
    "num_inference_steps": "int64",
    "guidance_scale": "float64",
    "scheduler": "string",
    "original_size": "list<int64>",
    "crops_coords_top_left": "list<int64>",
    "target_size": "list<int64>",
    "settings": "string",
    "digest": "string",
    "sha256": "string",
    "num_tokens": "int64",
    "truncated": "bool",
    "unknown_words": "int64",
    "source": "string",
    "position": "int64",
    "extra": "string",
}


# What a request says of the picture and not of the record that asked for it.
_IN_THE_FILE = [
    field.name
    for field in dataclasses.fields(ImageRequest)
    if field.name not in ("id", "image_index", "source", "position", "extra", "settings")
]


def row(request: ImageRequest, result: ImageResult, recipe: Recipe, file_name: str, sha256: str) -> dict[str, object]:
    """The columns of `SCHEMA` for one image, in that order; `file_name` is relative to the row's own file."""
    known = {
        **vars(request),
        "file_name": file_name,
        "key": request.key,
        "negative_prompt": request.negative_prompt or "",
        "negative_prompt_set": request.negative_prompt is not None,
        "scheduler": recipe.scheduler,
        "settings": json.dumps(request.settings.chosen, sort_keys=True),
        "sha256": sha256,
        "num_tokens": result.num_tokens,
        "truncated": result.truncated,
        "unknown_words": result.unknown_words,
    }
    return {name: known[name] for name in SCHEMA}


def recipe_text(request: ImageRequest, recipe: Recipe, limit: int | None = None) -> str:
    """All that decides the picture, as JSON: from this and the checkpoint it can be made again.

    Texts that would make it longer than `limit` characters, which not every image format can hold, are left out.
    """
    fields = {**{name: getattr(request, name) for name in _IN_THE_FILE}, **request.settings.chosen}
    text = json.dumps({**fields, **recipe.of_model()}, sort_keys=True)
    if limit and len(text) > limit:
        fields = {name: value for name, value in fields.items() if "prompt" not in name}
        text = json.dumps({**fields, **recipe.of_model()}, sort_keys=True)
    return text


def dataset_card(data_files: str) -> str:
    """A README.md for the output, by which `datasets.load_dataset(OUT)` finds the images among the other files.

    Args:
      data_files: a line of YAML that says where they are.
    """
    columns = "".join(f"| {name} | {kind} |\n" for name, kind in SCHEMA.items())
    return (
        f"---\nconfigs:\n- config_name: default\n  {data_files}\n---\n\n"
        f"One row an image:\n\n| column | type |\n|---|---|\n{columns}"
    )
