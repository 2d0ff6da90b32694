"""Samplers, by the names that diffusers gives them: each a config and a function from it to tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from model_handlers.config import ConfigError
from model_handlers.samplers.ddim import DDIMConfig, LCMConfig, PNDMConfig, TCDConfig, ddim, lcm, pndm, tcd
from model_handlers.samplers.karras import (
    EulerAncestralDiscreteConfig,
    EulerDiscreteConfig,
    HeunDiscreteConfig,
    euler,
    euler_ancestral,
    heun,
)
from model_handlers.samplers.multistep import DPMSolverMultistepConfig, UniPCMultistepConfig, dpm_solver, unipc
from model_handlers.samplers.schedules import SchedulerConfig, Steps, alphas_cumprod
from model_handlers.samplers.tables import MAX_EVALUATIONS, NOISE, SLOTS, Tables, advance

__all__ = [
    "MAX_EVALUATIONS",
    "NOISE",
    "SAMPLERS",
    "SLOTS",
    "SchedulerConfig",
    "Steps",
    "Tables",
    "advance",
    "alphas_cumprod",
    "name_of",
    "read",
    "tables",
    "tables_from",
    "tables_until",
]


@dataclass(frozen=True)
class Sampler:
    """A row of the table: `takes` are the fields of Steps that the sampler honours beside the number of steps."""

    config: type[SchedulerConfig]
    make_tables: Callable[[Any, Steps], Tables]
    takes: tuple[str, ...] = ()


SAMPLERS = {
    "DDIMScheduler": Sampler(DDIMConfig, ddim, ("eta",)),
    "DPMSolverMultistepScheduler": Sampler(DPMSolverMultistepConfig, dpm_solver, ("timesteps",)),
    "EulerAncestralDiscreteScheduler": Sampler(EulerAncestralDiscreteConfig, euler_ancestral),
    "EulerDiscreteScheduler": Sampler(EulerDiscreteConfig, euler, ("timesteps", "sigmas")),
    "HeunDiscreteScheduler": Sampler(HeunDiscreteConfig, heun, ("timesteps",)),
    "LCMScheduler": Sampler(LCMConfig, lcm, ("timesteps",)),
    "PNDMScheduler": Sampler(PNDMConfig, pndm),
    "TCDScheduler": Sampler(TCDConfig, tcd, ("timesteps", "eta")),
    "UniPCMultistepScheduler": Sampler(UniPCMultistepConfig, unipc),
}
NAMES = {sampler.config: name for name, sampler in SAMPLERS.items()}


def read(
    name: str | None, values: Mapping[str, Any], where: str, options: Mapping[str, Any] | None = None
) -> SchedulerConfig:
    """The config of the sampler of that name, from the `values` of a scheduler_config.json; `where` names it in errors.

    Args:
      options: take the place of values, as `from_config(values, **options)` does in diffusers.

    Raises:
      ConfigError: the sampler is not known, or an option of it is set that it has not or that is not supported.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"scheduler {name} is not supported; --scheduler takes {', '.join(SAMPLERS)}")
    config, options = SAMPLERS[name].config, options or {}
    known = {field.name for field in fields(config)} - {*config.FOREIGN} | {*config.FIXED}
    if unknown := options.keys() - known:
        raise ConfigError(f"{name} has no option {', '.join(sorted(unknown))}, only {', '.join(sorted(known))}")
    defaults = set(values.get("_use_default_values") or ()) - options.keys()
    return config.read({**values, **options, "_use_default_values": defaults}, where)


def name_of(config: SchedulerConfig) -> str:
    return NAMES[type(config)]


@lru_cache(maxsize=256)
def tables(config: SchedulerConfig, steps: Steps) -> Tables:
    """The tables of the sampler that the config is of; raises ConfigError for steps that it has none for."""
    name = name_of(config)
    takes = SAMPLERS[name].takes
    for field in ("timesteps", "sigmas", "eta"):
        if getattr(steps, field) and field not in takes:
            takers = [other for other in SAMPLERS if field in SAMPLERS[other].takes]
            raise ConfigError(f"{name} does not take {field}, only {', '.join(takers)}")
    with np.errstate(all="ignore"):  # what is not finite is refused by name
        made = SAMPLERS[name].make_tables(config, steps)
    if len(made) > MAX_EVALUATIONS:
        raise ConfigError(
            f"num_inference_steps={steps.num_inference_steps} takes {len(made)} evaluations of the network with "
            f"{name}, more than {MAX_EVALUATIONS}"
        )
    return made[steps.start :]


def tables_until(config: SchedulerConfig, steps: Steps, denoising_end: float) -> Tables:
    """The tables of the evaluations before a share of the training timesteps is done, counted as by the reference."""
    made = tables(config, steps)
    return made[: len(made) - _left(config, made, denoising_end)]


def tables_from(config: SchedulerConfig, steps: Steps, denoising_start: float) -> Tables:
    """The tables of the evaluations after that share; the sampler begins there and remembers nothing."""
    made = tables(config, steps)
    left = _left(config, made, denoising_start)
    if isinstance(config, HeunDiscreteConfig) and left % 2 == 0:  # its steps are of two evaluations, but for the last
        left += 1
    return tables(config, replace(steps, start=len(made) - left))


def _left(config: SchedulerConfig, made: Tables, done: float) -> int:
    known = config.num_train_timesteps
    return int((made.timesteps.astype(np.float32) < round(known - done * known)).sum())
