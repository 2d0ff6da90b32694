"""The command that makes one picture of an output again, to the byte on the same kind of device."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from model_handlers.fetch import EMBEDDED
from model_handlers.recipe import Recipe
from pipeline.options import GenerateOptions
from transforms.formats import OutputFormat
from transforms.records import FIELDS

# A command line of Linux may have 128 KiB an argument; a page of hundreds of them need not.
MAX_LENGTH = 8_000


def command(
    row: Mapping[str, Any],
    recipe: Recipe,
    output_format: OutputFormat,
    model_flags: Sequence[str] | None = None,
) -> str | None:
    """Two lines for a shell, which make `row`'s picture below ./again, or None if they would be longer than MAX_LENGTH.

    A prompt is a stranger's: it goes into a file of JSON, is quoted for the shell, and never stands among the flags.

    Args:
      row: of the metadata.
      model_flags: those that name the run's weights, see `model_flags_of`; where they are not known the command says
        CHECKPOINT.
    """
    record = {"prompt": row["prompt"], **{name: row[name] for name in FIELDS if name in row}}
    record |= json.loads(row["settings"])
    if not row["negative_prompt_set"]:
        del record["negative_prompt"]
    flags = {name: str(getattr(recipe, name)) for name in ("scheduler", "dtype", "per_device_batch_size")}
    options = json.loads(recipe.scheduler_options)
    if recipe.context > 1:
        flags["mesh"] = f"context={recipe.context}"
    if recipe.prompt_windows > 1:
        flags |= {"long_prompts": "chunk", "prompt_windows": str(recipe.prompt_windows)}
    if output_format.image_format != OutputFormat.image_format:
        flags |= {"image_format": output_format.image_format, "image_quality": str(output_format.image_quality)}
    words = ["lightmill", "generate", "--input", "again.jsonl", "--output", "again"]
    words += ["--checkpoint", "CHECKPOINT"] if model_flags is None else model_flags
    words += [word for name, value in flags.items() for word in (f"--{name}", value)]
    if options:
        words += ["--scheduler_options", *(f"{name}={json.dumps(value)}" for name, value in options.items())]
    text = f"printf '%s\\n' {shlex.quote(json.dumps(record))} > again.jsonl\n{shlex.join(words)}"
    return text if len(text) <= MAX_LENGTH else None


def model_flags_of(options: GenerateOptions) -> list[str]:
    """The flags by which a run was told its weights, as they were given."""
    names = ("checkpoint", "variant", "config", "refiner")
    given = {name: getattr(options, name) for name in names}
    words = [word for name, value in given.items() if value and value != EMBEDDED for word in (f"--{name}", value)]
    if options.lora:
        words += ["--lora", *(f"{source}:{weight}" for source, weight in options.lora)]
    return words + (["--allow_partial_lora"] if options.allow_partial_lora else [])
