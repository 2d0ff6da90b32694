"""What decides a picture: the run's recipe, one image's request, a shard of requests, and what comes back.

Everything here is small, frozen and picklable: it is all that crosses a shuffle.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

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
      context: chips that share the height of each picture. It moves the last bits, as sums over a picture are made of
        the chips' parts; chips that share only the batch or the weights do not.
      height_multiple: height is a multiple of it too, so that every feature map can be shared.
      lora: the LoRA files merged into the checkpoint, in their order, as JSON: [[sha256, weight], ...].
      refiner: of the checkpoint that ends what this one begins, as `checkpoint`; "" for none.
      prompt_windows: how many times the text encoders' length a prompt may have; with 1 it is cut as by the reference.
      max_clip_skip: how many layers of its text encoders can be left out beyond the usual one.
      seed: seed of the run, from which the seeds of records that have none are derived.
      width, height: default size in pixels.
      num_inference_steps, guidance_scale, negative_prompt, num_images_per_prompt: defaults for records.
      settings: further defaults for records, those of `Settings.chosen` as JSON with sorted names.
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
    prompt_windows: int = 1
    max_clip_skip: int = 0
    context: int = 1
    height_multiple: int = 1
    settings: str = "{}"
    refiner: str = ""

    def of_model(self) -> dict[str, str | int]:
        """The part that decides pixels for every record alike; a record's own fields decide the rest."""
        names = ("checkpoint", "family", "scheduler", "scheduler_options", "dtype", "per_device_batch_size")
        # Only where they are set, so that what is new here changes no digest of a picture without it.
        new = ("lora", "prompt_windows", "context", "refiner")
        later = [name for name in new if getattr(self, name) != getattr(Recipe, name)]
        return {name: getattr(self, name) for name in (*names, *later)}


@dataclass(frozen=True)
class Settings:
    """What few pictures set of their own; named, and meant, as the arguments of diffusers' pipeline.

    They travel together, as the few that are set: a picture that sets none is described as if there were none.

    Attributes:
      prompt_2, negative_prompt_2: for the second text encoder; "" for those of the first.
      clip_skip: layers of the text encoders left out at the end, for the prompt alone; 0 is the model's usual layer.
      guidance_rescale: share of Lin et al. 2024, section 3.4, in the guided output.
      guidance_interval: noise levels (low, high) between which guidance is applied, where low < sigma <= high, as in
        Kynkäänniemi et al. 2024; sigma is the noise in the latents over the signal in them. None for all of them.
      negative_original_size, negative_crops_coords_top_left, negative_target_size: micro-conditioning of the negative
        prompt, in the order of ImageRequest's; without sizes it is the prompt's.
      eta: share of fresh noise, of the samplers that have it as a free choice.
      timesteps, sigmas: a schedule of the picture's own, see `samplers.Steps`.
      denoising_end: share of the training timesteps after which the refiner, if there is one, takes over.
      aesthetic_score, negative_aesthetic_score: what the refiner is told of pictures, for either prompt.
    """

    prompt_2: str = ""
    negative_prompt_2: str = ""
    clip_skip: int = 0
    guidance_rescale: float = 0.0
    guidance_interval: tuple[float, float] | None = None
    negative_original_size: tuple[int, int] | None = None
    negative_crops_coords_top_left: tuple[int, int] = (0, 0)
    negative_target_size: tuple[int, int] | None = None
    eta: float = 0.0
    timesteps: tuple[float, ...] = ()
    sigmas: tuple[float, ...] = ()
    denoising_end: float = 0.8
    aesthetic_score: float = 6.0
    negative_aesthetic_score: float = 2.5

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """By their names, only those that are not at their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Settings":
        """From `chosen`, also when it has been through JSON."""
        if not values:
            return NO_SETTINGS
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**fields)


NO_SETTINGS = Settings()


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
    settings: Settings = NO_SETTINGS

    @cached_property
    def key(self) -> str:
        """Name of the picture: 128 bits over who asked (id, image index) and what was asked (digest)."""
        return _sha256(f'[{_encode(self.id)}, {self.image_index}, "{self.digest}"]')[:32]


def digest(request: ImageRequest, recipe: Recipe) -> str:
    """sha256 over all that decides the request's pixels, and nothing else (not its id, file or neighbours).

    What is hashed is the JSON object, its names sorted, of the deciding fields, `Recipe.of_model` and those settings
    that are chosen: one that is new here changes no digest of a picture without it.
    """
    if request.settings.chosen:
        values = {name: getattr(request, name) for name in (*_OWN, *_SHARED)}
        return _sha256(_encode({**values, **request.settings.chosen, **recipe.of_model()}))
    return _sha256(_template(recipe, *_shared(request)) % tuple(map(_encode, _own(request))))


# The fields that decide pixels: those in which one request is unlike the next, and those that many have in common.
_OWN = ("negative_prompt", "prompt", "seed")
_SHARED = [
    field.name
    for field in dataclasses.fields(ImageRequest)
    if field.name not in (*_OWN, "id", "image_index", "digest", "source", "position", "extra", "settings")
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
    """Requests of one size and guided at the same evaluations, that are generated, written and committed together.

    Results and rows are in the order of `requests`.
    """

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
