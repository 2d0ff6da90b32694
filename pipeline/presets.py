"""How a run samples: what its flags and its preset say together."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.options import ModelOptions, UsageError

DEFAULT_STEPS, DEFAULT_GUIDANCE = 20, 5.0


@dataclass(frozen=True)
class Sampling:
    """Flags of `generate` by their names; `scheduler_options` as JSON with sorted names."""

    scheduler: str | None
    scheduler_options: str
    num_inference_steps: int
    guidance_scale: float


@dataclass(frozen=True)
class Preset:
    """What a family of few-step checkpoints was distilled for.

    Attributes:
      steps: how many if nothing is said, and how many at most.
    """

    scheduler: str
    steps: tuple[int, int]
    guidance_scale: float
    options: dict[str, Any] = field(default_factory=dict)


# As the model cards of the checkpoints say. Up to 1, the guidance scale means that there is none.
PRESETS = {
    "turbo": Preset("EulerAncestralDiscreteScheduler", (1, 4), 0.0, {"timestep_spacing": "trailing"}),
    "lightning": Preset("EulerDiscreteScheduler", (4, 8), 0.0, {"timestep_spacing": "trailing"}),
    "lcm": Preset("LCMScheduler", (4, 8), 1.0),
}


def settle_sampling(options: ModelOptions) -> Sampling:
    """The settings of the preset and of the flags together, or the defaults.

    Raises:
      UsageError: a flag contradicts the preset, or --scheduler_options cannot be read.
    """
    given, steps, scale = _parse(options.scheduler_options), options.num_inference_steps, options.guidance_scale
    if options.preset is None:
        return Sampling(
            options.scheduler,
            json.dumps(given, sort_keys=True),
            DEFAULT_STEPS if steps is None else steps,
            DEFAULT_GUIDANCE if scale is None else scale,
        )
    preset = PRESETS[options.preset]
    flags = {"--scheduler": options.scheduler, "--guidance_scale": scale, **given}
    wanted = {"--scheduler": preset.scheduler, "--guidance_scale": preset.guidance_scale, **preset.options}
    for name, value in wanted.items():
        if flags.get(name) not in (None, value):
            raise UsageError(f"{name}={flags[name]} contradicts --preset={options.preset}, which has {value}")
    usual, most = preset.steps
    if steps is not None and steps > most:
        raise UsageError(f"--num_inference_steps={steps} contradicts --preset={options.preset}, made for 1 to {most}")
    merged = json.dumps({**given, **preset.options}, sort_keys=True)
    return Sampling(preset.scheduler, merged, steps or usual, preset.guidance_scale)


def _parse(pairs: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE to a dictionary; what is not JSON, such as a word, is text."""
    parsed: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not name or not separator or name in parsed:
            raise UsageError(f"--scheduler_options takes NAME=VALUE, each name once, not {pair!r}")
        try:
            parsed[name] = json.loads(text)
        except ValueError:
            parsed[name] = text
    return parsed
