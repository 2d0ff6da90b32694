"""One record of the input: a prompt, the settings that it asks for, and what becomes of it if it cannot be used.

Input values are parsed here and nowhere else. CSV cells are text and JSON values are typed; both go through the same
parsers, which accept what means exactly one thing and refuse the rest with a reason that names the field and the value.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from model_handlers.recipe import MAX_SEED, MAX_STEPS

# About a thousand times what the text encoders read; more than that is a damaged file, not a prompt.
MAX_TEXT = 100_000
MAX_ID = 1000
# How much of a rejected record is kept.
MAX_RAW = 10_000
# Doubles, in which some JSON writers hold every number, are exact up to here.
_MAX_EXACT_FLOAT = 2**53
# Names of the prompt column in public prompt sets, tried in this order, in any case.
_PROMPT_COLUMNS = ("prompt", "caption", "text", "prompt_en")
# Tab and line ends are part of a prompt; the other control characters only ever come from damaged files.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")

_EXTRA = json.JSONEncoder(sort_keys=True, allow_nan=False)

Value = str | int | float | tuple[int, int] | tuple[float, ...]


class RecordError(ValueError):
    """Why a record cannot be used: one line for whoever has to mend the input."""


@dataclass(frozen=True)
class PromptRecord:
    """A prompt and what its record sets; what it leaves open is decided by the recipe.

    Attributes:
      source: the input file, relative to the fixed part of its pattern, so that a moved folder changes nothing.
      position: the record's place in that file, counted from 1.
      id: the record's own, or "<source>:<position>".
      fields: by the names of `FIELDS`, only those that are set.
      extra: the other columns, as JSON text.
    """

    source: str
    position: int
    id: str
    prompt: str
    fields: dict[str, Value] = dataclasses.field(default_factory=dict)
    extra: str = "{}"

    def as_input(self) -> str:
        """The record as a line of JSON that reads back as this record."""
        return json.dumps({**json.loads(self.extra), "id": self.id, "prompt": self.prompt, **self.fields})


@dataclass(frozen=True)
class Reject:
    """A record that gives no image, and why.

    Attributes:
      stage: "read" (not a record), "request" (a record that asks for the impossible) or "generate" (the model failed).
      record: as it stood in the input, cut to `MAX_RAW` characters: a line that can be mended and fed in again. Text
        and not a dictionary, because a stranger's nesting may be deeper than what a coder or a JSON writer follows.
    """

    source: str
    position: int
    id: str
    stage: str
    reason: str
    record: str

    def __post_init__(self):
        object.__setattr__(self, "record", self.record[:MAX_RAW])


def prompt_column(columns: Iterable[str]) -> str | None:
    """The column that holds the prompt, by convention, or None."""
    names = list(columns)
    if "prompt" in names:
        return "prompt"
    for wanted in _PROMPT_COLUMNS:
        for name in names:
            if name.lower() == wanted:
                return name
    return None


def parse(
    source: str,
    position: int,
    columns: Mapping[str, object],
    prompt_name: str | None = None,
    id_name: str | None = None,
) -> PromptRecord:
    """Makes a record from the columns of one row; None (JSON's null) means not set.

    Columns are matched by their exact names, the prompt's alone in any case: "WIDTH" in a scraped caption set is the
    size of the original picture, not a wish.

    Raises:
      RecordError: if a value cannot be used.
    """
    prompt_name = prompt_name or prompt_column(columns)
    id_name = id_name or "id"
    if prompt_name is None or prompt_name not in columns:
        found = ", ".join(repr(name)[:50] for name in list(columns)[:20])
        raise RecordError(f"no column {prompt_name or 'prompt'!r}; found: {found or 'none'}")
    if columns[prompt_name] is None:
        raise RecordError(f"{prompt_name} is not set")
    prompt = _text(prompt_name, columns[prompt_name])
    known = (prompt_name, id_name)
    record_id = columns.get(id_name)
    fields = {
        name: parser(name, columns[name])
        for name, parser in FIELDS.items()
        if columns.get(name) is not None and name not in known
    }
    rest = {name: value for name, value in columns.items() if name not in known and name not in FIELDS}
    try:
        extra = _EXTRA.encode(rest) if rest else "{}"
    except (ValueError, RecursionError, TypeError) as error:
        raise RecordError(f"the other columns cannot be kept as JSON: {error}") from None
    identity = f"{source}:{position}" if record_id is None else _id(id_name, record_id)
    return PromptRecord(source, position, identity, prompt, fields, extra)


def _id(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise RecordError(f"{name} must be text or a whole number, not {_shown(value)}")
    if len(value) > MAX_ID:
        raise RecordError(f"{name} has {len(value)} characters, more than {MAX_ID}")
    if _SURROGATE.search(value):
        raise RecordError(f"{name} holds half of a surrogate pair, which is no character")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{name} must be text, not {_shown(value)}")
    if len(value) > MAX_TEXT:
        raise RecordError(f"{name} has {len(value)} characters, more than {MAX_TEXT}")
    if _SURROGATE.search(value):
        raise RecordError(f"{name} holds half of a surrogate pair, which is no character")
    if control := _CONTROL.search(value):
        raise RecordError(f"{name} holds the control character U+{ord(control[0]):04X} at place {control.start() + 1}")
    return value


def _integer(name: str, value: object) -> int:
    """A whole number, also written 7.0, as tables do whose other rows are empty; never a rounded or a folded one."""
    number: int | None = None
    if isinstance(value, str) and (match := re.fullmatch(r"(-?[0-9]{1,30})(\.0+)?", value.strip())):
        number = int(match[1])
    elif isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT_FLOAT:
        number = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None:
        raise RecordError(f"{name} must be a whole number, not {_shown(value)}")
    return number


def _seed(name: str, value: object) -> int:
    seed = _integer(name, value)
    if not 0 <= seed <= MAX_SEED:
        raise RecordError(f"{name} must be from 0 to {MAX_SEED}, not {_shown(value)}")
    return seed


def _number(name: str, value: object) -> float:
    if isinstance(value, str) and re.fullmatch(r"-?([0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})", value.strip()):
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
        return float(value)
    raise RecordError(f"{name} must be a number, not {_shown(value)}")


def _pair(name: str, value: object) -> tuple[int, int]:
    parts = _parts(value, r"\s*[,xX]\s*")
    if len(parts) == 2:
        return _integer(name, parts[0]), _integer(name, parts[1])
    raise RecordError(f"{name} must be two whole numbers, such as 512,512, not {_shown(value)}")


def _interval(name: str, value: object) -> tuple[float, float]:
    parts = _parts(value, r"\s*,\s*")
    if len(parts) == 2:
        return _number(name, parts[0]), _number(name, parts[1])
    raise RecordError(f"{name} must be two numbers, such as 0.28,5.42, not {_shown(value)}")


def _numbers(name: str, value: object) -> tuple[float, ...]:
    parts = _parts(value, r"\s*,\s*")
    if 1 <= len(parts) <= MAX_STEPS + 1:
        return tuple(_number(name, part) for part in parts)
    raise RecordError(f"{name} must be numbers, such as 999,749,499,249, not {_shown(value)}")


def _parts(value: object, separator: str) -> Sequence[object]:
    """What a list holds, also one that is written as text, as in a cell; () if it is none."""
    if isinstance(value, str):
        return re.split(separator, value.strip().strip("[]()"))
    return value if isinstance(value, list | tuple) else ()


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError, TypeError):  # also an integer of more digits than Python converts
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


# The settings that a record may bring along, each with the parser of its values.
FIELDS: dict[str, Callable[[str, object], Value]] = {
    "negative_prompt": _text,
    "seed": _seed,
    "width": _integer,
    "height": _integer,
    "num_inference_steps": _integer,
    "guidance_scale": _number,
    "num_images_per_prompt": _integer,
    "original_size": _pair,
    "crops_coords_top_left": _pair,
    "target_size": _pair,
    "prompt_2": _text,
    "negative_prompt_2": _text,
    "clip_skip": _integer,
    "guidance_rescale": _number,
    "guidance_interval": _interval,
    "negative_original_size": _pair,
    "negative_crops_coords_top_left": _pair,
    "negative_target_size": _pair,
    "eta": _number,
    "timesteps": _numbers,
    "sigmas": _numbers,
    "denoising_end": _number,
    "aesthetic_score": _number,
    "negative_aesthetic_score": _number,
}
