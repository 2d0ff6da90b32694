"""What is said about an image: its row in metadata.jsonl, and the recipe inside its file.

The row's columns are declared once, here, and every row has all of them with the same types. Readers such as Hugging
Face `datasets` take the types from the first file that they meet: a column that is null there and text in the next
shard cannot be loaded, hence "" and `negative_prompt_set` for a negative prompt that is absent.
"""

import dataclasses
import json

from model_handlers.recipe import ImageRequest, ImageResult, Recipe

PNG_KEYWORD = "lightmill"

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
    "digest": "string",
    "sha256": "string",
    "num_tokens": "int64",
    "truncated": "bool",
    "source": "string",
    "position": "int64",
    "extra": "string",
}


def row(request: ImageRequest, result: ImageResult, recipe: Recipe, file_name: str, sha256: str) -> dict[str, object]:
    """The columns of `SCHEMA` for one image, in that order; `file_name` is relative to metadata.jsonl."""
    known = {
        **dataclasses.asdict(request),
        "file_name": file_name,
        "key": request.key,
        "negative_prompt": request.negative_prompt or "",
        "negative_prompt_set": request.negative_prompt is not None,
        "scheduler": recipe.scheduler,
        "sha256": sha256,
        "num_tokens": result.num_tokens,
        "truncated": result.truncated,
    }
    return {name: known[name] for name in SCHEMA}


def png_text(request: ImageRequest, recipe: Recipe) -> str:
    """All that decides the picture, as JSON: from this and the checkpoint it can be made again."""
    about_the_record = ("id", "image_index", "source", "position", "extra")
    fields = {name: value for name, value in dataclasses.asdict(request).items() if name not in about_the_record}
    return json.dumps({**fields, **recipe.of_model()}, sort_keys=True)


def dataset_card() -> str:
    """A README.md for the output, by which `datasets.load_dataset(OUT)` finds the images among the other files."""
    columns = "".join(f"| {name} | {kind} |\n" for name, kind in SCHEMA.items())
    return (
        "---\nconfigs:\n- config_name: default\n  data_dir: images\n---\n\n"
        "One row an image, in `images/<shard>/metadata.jsonl`:\n\n"
        f"| column | type |\n|---|---|\n{columns}"
    )
