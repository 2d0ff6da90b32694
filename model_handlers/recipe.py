"""What decides a picture: the run's recipe, one image's request, a shard of requests, and what comes back.

Everything here is small, frozen and picklable: it is all that crosses a shuffle.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter

import numpy as np

# Seeds fit a signed 64-bit column, which is what Arrow, Parquet and torch.Generator hold.
MAX_SEED = 2**63 - 1
# The schedule tables have one row for each training timestep at most.
MAX_STEPS = 1000
# Larger pictures than this are a typing error more often than a wish, and each new size costs a compilation.
MAX_SIDE = 4096


@dataclass(frozen=True)
class Recipe:
    """The settings of a run that decide pixels; the first half also says which model draws them.

    Attributes:
      checkpoint: sha256 over the checkpoint's files, see `checkpoint.identity`.
      family: pipeline class named by the checkpoint's model_index.json.
      scheduler: scheduler class, as diffusers names it.
      scheduler_options: what takes the place of the checkpoint's own options of it, as JSON with sorted names.
      dtype: of weights and activations, "float32" or "bfloat16".
      per_device_batch_size: rows of the compiled program on one chip. A row's last bits depend on this shape
        (never on its neighbours), so it belongs to the recipe; the number of chips does not.
      size_multiple: width and height are multiples of it, in pixels (the VAE's down-sampling factor).
      lora: the LoRA files merged into the checkpoint, in their order, as JSON: [[sha256, weight], ...].
      seed: seed of the run, from which the seeds of records that have none are derived.
      width, height: default size in pixels.
      num_inference_steps, guidance_scale, negative_prompt, num_images_per_prompt: defaults for records.
    """

    checkpoint: str
    family: str
    scheduler: str
    dtype: str
    per_device_batch_size: int
    size_multiple: int
    seed: int
    width: int
    height: int
    num_inference_steps: int = 20
    guidance_scale: float = 5.0
    negative_prompt: str | None = None
    num_images_per_prompt: int = 1
    scheduler_options: str = "{}"
    lora: str = "[]"

    def of_model(self) -> dict[str, str | int]:
        """The part that decides pixels for every record alike; a record's own fields decide the rest."""
        names = ("checkpoint", "family", "scheduler", "scheduler_options", "dtype", "per_device_batch_size")
        # Without LoRA as before there was any, so that the digests of such pictures stay what they are.
        return {name: getattr(self, name) for name in (*names, *(["lora"] if self.lora != Recipe.lora else []))}


@dataclass(frozen=True)
class ImageRequest:
    """One picture to make, fully resolved: nothing in it depends on a default any more.

    Sizes and crops are (height, width) and (top, left) in pixels, in the order of SDXL's micro-conditioning.
    """

    id: str
    image_index: int
    prompt: str
    negative_prompt: str | None
    seed: int
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    original_size: tuple[int, int]
    crops_coords_top_left: tuple[int, int]
    target_size: tuple[int, int]
    digest: str = ""
    source: str = ""  # the input file, relative to the fixed part of --input
    position: int = 0  # the record's place in that file, counted from 1
    extra: str = "{}"  # the input's other columns, as JSON text

    @cached_property
    def key(self) -> str:
        """Name of the picture: 128 bits over who asked (id, image index) and what was asked (digest)."""
        return _sha256(f'[{_encode(self.id)}, {self.image_index}, "{self.digest}"]')[:32]


def digest(request: ImageRequest, recipe: Recipe) -> str:
    """sha256 over all that decides the request's pixels, and nothing else (not its id, file or neighbours).

    What is hashed is the JSON object of the deciding fields and of `Recipe.of_model`, its names sorted.
    """
    return _sha256(_template(recipe, *_shared(request)) % tuple(map(_encode, _own(request))))


# The fields that decide pixels: those in which one request is unlike the next, and those that many have in common.
_OWN = ("negative_prompt", "prompt", "seed")
_SHARED = [
    field.name
    for field in dataclasses.fields(ImageRequest)
    if field.name not in (*_OWN, "id", "image_index", "digest", "source", "position", "extra")
]
_own, _shared = attrgetter(*_OWN), attrgetter(*_SHARED)


@lru_cache(maxsize=1024, typed=True)
def _template(recipe: Recipe, *shared: object) -> str:
    """The text that is hashed, with a %s for each of `_OWN`: made once for all requests that share the rest."""
    values = {**dict(zip(_SHARED, shared, strict=True)), **recipe.of_model()}
    texts = {name: _encode(value).replace("%", "%%") for name, value in values.items()} | dict.fromkeys(_OWN, "%s")
    return "{" + ", ".join(f'"{name}": {texts[name]}' for name in sorted(texts)) + "}"


def derived_seed(run_seed: int, record_id: str, image_index: int) -> int:
    """Seed of an image whose record has none: a function of the run's seed and the record, not of its place.

    53 bits, so that JSON readers which hold numbers as doubles keep it exactly.
    """
    return int(_sha256(f"[{run_seed}, {_encode(record_id)}, {image_index}]")[:16], 16) >> 11


@dataclass(frozen=True)
class Shard:
    """Requests of one size that are generated, written and committed together, in the order of `requests`."""

    name: str
    width: int
    height: int
    requests: tuple[ImageRequest, ...]


@dataclass(frozen=True)
class ImageResult:
    """What the model made of one request: an image, or the reason why there is none.

    Attributes:
      key: of the request that it answers.
      image: uint8 (height, width, 3), or None.
      reject_reason: why there is no image; None if there is one.
      num_tokens: tokens of the prompt before cutting, begin and end marks included.
      truncated: whether the text encoder saw less than the whole prompt.
      unknown_words: words of the prompt that the tokenizer's vocabulary has no pieces for.
      failed: whether the call that should have made the image raised, which a later run may not.
    """

    key: str
    image: np.ndarray | None
    reject_reason: str | None = None
    num_tokens: int = 0
    truncated: bool = False
    unknown_words: int = 0
    failed: bool = False


_encoder = json.JSONEncoder(sort_keys=True)


def _encode(value: object) -> str:
    """JSON of a value, by a short cut where the encoder would take longer to begin than to encode."""
    if value is None:
        return "null"
    return str(value) if type(value) is int else _encoder.encode(value)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
