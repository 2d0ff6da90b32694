"""ExpandRequests: what a record asks for, made explicit: one request for each image."""

import dataclasses
import json
from functools import lru_cache
from typing import Any, cast

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from model_handlers.config import ConfigError
from model_handlers.recipe import MAX_SEED, MAX_SIDE, MAX_STEPS, ImageRequest, Recipe, Settings, derived_seed, digest
from model_handlers.sampling import Sampler, tables_of
from transforms.records import PromptRecord, RecordError, Reject, Value

MAX_IMAGES_PER_PROMPT = 10_000
MAX_GUIDANCE = 1000.0
# More noise over signal than any schedule begins with, zero terminal SNR among them.
MAX_SIGMA = 10_000.0
# What other families would pass over without a word.
SIZES = ("original_size", "crops_coords_top_left", "target_size")
OF_REFINER = ("denoising_end", "aesthetic_score", "negative_aesthetic_score")
XL_ONLY = {*SIZES, *(f"negative_{name}" for name in SIZES), "prompt_2", "negative_prompt_2"}


class ExpandRequests(beam.PTransform):
    """Turns records into `.requests` (ImageRequest) and `.rejects` (Reject); `.fates` counts both.

    A record gives all of its images or none: half a record could not be mended and fed in again.
    """

    def __init__(self, recipe: Recipe, sampler: Sampler):
        super().__init__()
        self._recipe = recipe
        self._sampler = sampler

    def expand(self, records):
        expand = _Expand(self._recipe, self._sampler)
        return records | beam.ParDo(expand).with_outputs("rejects", "fates", main="requests")


class _Expand(beam.DoFn):
    def __init__(self, recipe: Recipe, sampler: Sampler):
        self._recipe = recipe
        self._sampler = sampler

    def start_bundle(self):
        # Added up here, since two elements more for each record would cost a runner as much as the record.
        self._records = self._images = 0

    def process(self, record: PromptRecord):
        try:
            requests = expand(record, self._recipe, self._sampler)
        except RecordError as error:
            place = (record.source, record.position, record.id)
            yield beam.pvalue.TaggedOutput("rejects", Reject(*place, "request", str(error), record.as_input()))
        else:
            self._records += 1
            self._images += len(requests)
            yield from requests

    def finish_bundle(self):
        for fate in (("records_expanded", self._records), ("images_requested", self._images)):
            value = WindowedValue(fate, GlobalWindow().max_timestamp(), (GlobalWindow(),))
            yield beam.pvalue.TaggedOutput("fates", value)


def expand(record: PromptRecord, recipe: Recipe, sampler: Sampler) -> list[ImageRequest]:
    """The requests of one record, image 0 first; settings that the record leaves open are the recipe's.

    Image i of a record with a seed has seed + i, so that each can be made again alone by its own seed; without one, the
    seed is derived from the run's seed, the record's id and i.

    Raises:
      RecordError: if a setting is out of range or not one of the model, or the sampler has no schedule for it.
    """
    if recipe.family != "StableDiffusionXLPipeline" and (foreign := sorted(XL_ONLY & record.fields.keys())):
        raise RecordError(f"{foreign[0]} is a setting of SDXL, which {recipe.family} does not have")
    if not recipe.refiner and (foreign := [name for name in OF_REFINER if name in record.fields]):
        raise RecordError(f"{foreign[0]} is a setting of the refiner, and the run has none (--refiner)")
    count, shared = _shared(recipe, sampler, *[field for field in record.fields.items() if field[0] not in _OWN])
    first = cast(int | None, record.fields.get("seed"))
    if first is not None:
        _within("seed of the last image", first + count - 1, 0, MAX_SEED)
    common = {
        **shared,
        "id": record.id,
        "prompt": record.prompt,
        "negative_prompt": record.fields.get("negative_prompt", recipe.negative_prompt),
        "source": record.source,
        "position": record.position,
        "extra": record.extra,
    }
    if own := {name: record.fields[name] for name in ("prompt_2", "negative_prompt_2") if record.fields.get(name)}:
        if "negative_prompt_2" in own and common["negative_prompt"] is None:
            raise RecordError("negative_prompt_2 has no effect without negative_prompt")
        common["settings"] = dataclasses.replace(common["settings"], **own)
    requests: list[ImageRequest] = []
    for index in range(count):
        seed = derived_seed(recipe.seed, record.id, index) if first is None else first + index
        request = ImageRequest(image_index=index, seed=seed, **common)
        # In place, since nobody has seen it yet: a second copy would take longer than the digest.
        object.__setattr__(request, "digest", digest(request, recipe))
        requests.append(request)
    return requests


# Fields of a record that hardly another record has.
_OWN = ("negative_prompt", "prompt_2", "negative_prompt_2", "seed")


@lru_cache(maxsize=1024)
def _shared(recipe: Recipe, sampler: Sampler, *fields: tuple[str, Value]) -> tuple[int, dict[str, Any]]:
    """The number of images of a record, and what is the same in all requests of all records that set these fields."""
    own = dict(fields)

    def setting(name):
        return own.get(name, getattr(recipe, name))

    settings = _settings({**json.loads(recipe.settings), **own}, recipe)
    steps = _steps(own, recipe, settings)
    width = _side("width", setting("width"), recipe.size_multiple)
    height = _side("height", setting("height"), max(recipe.size_multiple, recipe.height_multiple))
    try:
        tables_of(steps, settings, sampler)
    except ConfigError as error:
        raise RecordError(str(error)) from None
    return _within("num_images_per_prompt", setting("num_images_per_prompt"), 1, MAX_IMAGES_PER_PROMPT), {
        "width": width,
        "height": height,
        "num_inference_steps": steps,
        # Plus zero turns -0.0 into 0.0: the same picture has one digest.
        "guidance_scale": _within("guidance_scale", float(setting("guidance_scale")), 0.0, MAX_GUIDANCE) + 0.0,
        # SDXL's micro-conditioning: 0 is a size that no training picture had, and no crop begins left of the edge.
        "original_size": _pair_within("original_size", own.get("original_size", (height, width)), 1),
        "crops_coords_top_left": _pair_within("crops_coords_top_left", own.get("crops_coords_top_left", (0, 0)), 0),
        "target_size": _pair_within("target_size", own.get("target_size", (height, width)), 1),
        "settings": settings,
    }


def _settings(values: dict[str, Any], recipe: Recipe) -> Settings:
    settings = Settings.of({name: values[name] for name in _SETTINGS & values.keys()})
    _within("clip_skip", settings.clip_skip, 0, recipe.max_clip_skip)
    for name in ("guidance_rescale", "eta"):
        _within(name, getattr(settings, name), 0.0, 1.0)
    if not 0 < settings.denoising_end < 1:
        raise RecordError(f"denoising_end must be above 0 and below 1, not {settings.denoising_end:g}")
    for name in ("aesthetic_score", "negative_aesthetic_score"):
        _within(name, getattr(settings, name), 0.0, 10.0)
    low, high = settings.guidance_interval or (0.0, MAX_SIGMA)
    if not 0 <= low < high <= MAX_SIGMA:
        raise RecordError(f"guidance_interval must rise, between 0 and {MAX_SIGMA:g}, and not be {low:g} to {high:g}")
    sizes = settings.negative_original_size, settings.negative_target_size
    for name, pair in zip(("negative_original_size", "negative_target_size"), sizes, strict=True):
        if pair is not None:
            _pair_within(name, pair, 1)
    crops = _pair_within("negative_crops_coords_top_left", settings.negative_crops_coords_top_left, 0)
    # The reference passes over all three of them, without a word, unless it has both sizes.
    if None in sizes and (sizes != (None, None) or crops != (0, 0)):
        raise RecordError("negative micro-conditioning needs both negative_original_size and negative_target_size")
    return settings


_SETTINGS = {field.name for field in dataclasses.fields(Settings)}


def _steps(own: dict[str, Any], recipe: Recipe, settings: Settings) -> int:
    """The number of steps, which a schedule of the picture's own decides."""
    if settings.timesteps and settings.sigmas:
        raise RecordError("timesteps and sigmas are both set, and each of them is a whole schedule")
    given = len(settings.timesteps) or len(settings.sigmas[:-1])
    steps = own.get("num_inference_steps", given or recipe.num_inference_steps)
    if given and steps != given:
        raise RecordError(f"num_inference_steps is {steps}, but timesteps or sigmas are for {given}")
    return cast(int, _within("num_inference_steps", steps, 1, MAX_STEPS))


def _within(name, value, low, high):
    # Written so that NaN, which compares false, is out of range too.
    if not low <= value <= high:
        raise RecordError(f"{name} must be from {low} to {high}, not {value}")
    return value


def _side(name: str, value: int, multiple: int) -> int:
    _within(name, value, multiple, MAX_SIDE)
    if value % multiple:
        lower = value - value % multiple
        nearest = f"{lower} or {lower + multiple}" if lower + multiple <= MAX_SIDE else f"{lower}"
        raise RecordError(f"{name} must be a multiple of {multiple}, such as {nearest}, not {value}")
    return value


def _pair_within(name: str, pair, low: int) -> tuple[int, int]:
    # A few times the largest original picture there is; float32 holds it exactly.
    return _within(name, pair[0], low, 2**20), _within(name, pair[1], low, 2**20)
