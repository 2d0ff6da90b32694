"""DDIM and its few-step relatives LCM and TCD, which step on the timesteps of the training.

The latents are sqrt(a) * picture + sqrt(1 - a) * noise, with a the timestep's alphas_cumprod.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from model_handlers.config import ConfigError
from model_handlers.samplers import schedules
from model_handlers.samplers.schedules import SchedulerConfig, Steps, predicted
from model_handlers.samplers.tables import NOISE, OUTPUT, Tables, X, make_tables


@dataclass(frozen=True)
class DDIMConfig(SchedulerConfig):
    timestep_spacing: str = "leading"
    set_alpha_to_one: bool = True
    clip_sample: bool = True

    FIXED: ClassVar = {"thresholding": False}

    def check(self) -> None:
        super().check()
        # Latents are not bounded, so the class's own default, which is for pixels, has to be switched off.
        self.require("clip_sample", not self.clip_sample, "False")


@dataclass(frozen=True)
class TCDConfig(SchedulerConfig):
    """The timesteps are always those of the distillation, whatever timestep_spacing says."""

    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    timestep_spacing: str = "leading"
    original_inference_steps: int = 50

    FIXED: ClassVar = {"clip_sample": False, "thresholding": False}


@dataclass(frozen=True)
class LCMConfig(TCDConfig):
    timestep_scaling: float = 10.0


def ddim(config: DDIMConfig, steps: Steps) -> Tables:
    """Song et al. 2021, equations 12 and 16."""
    count = schedules.check_count(config, steps)
    alphas = schedules.alphas_cumprod(config)
    space = schedules.SPACINGS[config.timestep_spacing]
    timesteps = np.round(space(len(alphas), count, config.steps_offset)).astype(int)
    if timesteps[0] >= len(alphas):
        raise ConfigError(f"steps_offset={config.steps_offset} leads beyond the last of {len(alphas)} timesteps")
    updates = []
    for t in timesteps:
        previous = t - len(alphas) // count
        a = alphas[t]
        a_prev = alphas[previous] if previous >= 0 else 1.0 if config.set_alpha_to_one else alphas[0]
        picture, noise = predicted(config.prediction_type, np.sqrt(a), np.sqrt(1 - a), X, OUTPUT)
        fresh = steps.eta * np.sqrt((1 - a_prev) / (1 - a) * (1 - a / a_prev))
        kept = np.sqrt(max(1 - a_prev - fresh**2, 0.0))  # the difference of equals may come out just below zero
        updates.append([np.sqrt(a_prev) * picture + kept * noise + fresh * NOISE])
    return tables(alphas, timesteps, updates)


def lcm(config: LCMConfig, steps: Steps) -> Tables:
    """Luo et al. 2023: a guess of the picture, put back to the noise of the next timestep with fresh noise."""
    alphas = schedules.alphas_cumprod(config)
    timesteps = distilled_timesteps(config, steps)
    updates = []
    for t, following in zip(timesteps, [*timesteps[1:], None], strict=True):
        a = alphas[t]
        picture, _ = predicted(config.prediction_type, np.sqrt(a), np.sqrt(1 - a), X, OUTPUT)
        scaled = t * config.timestep_scaling
        picture = scaled / np.hypot(scaled, 0.5) * picture + 0.25 / (scaled**2 + 0.25) * X
        if following is not None:
            picture = np.sqrt(alphas[following]) * picture + np.sqrt(1 - alphas[following]) * NOISE
        updates.append([picture])
    return tables(alphas, timesteps, updates)


def tcd(config: TCDConfig, steps: Steps) -> Tables:
    """Zheng et al. 2024: down to timestep s below the next one, and back up with fresh noise; eta is their gamma."""
    alphas = schedules.alphas_cumprod(config)
    timesteps = distilled_timesteps(config, steps)
    updates = []
    for t, following in zip(timesteps, [*timesteps[1:], None], strict=True):
        a = alphas[t]
        # In float32 as the reference, which decides where a product of the two is nearly whole.
        a_s = alphas[int(np.float32(1 - steps.eta) * np.float32(following or 0))]
        picture, noise = predicted(config.prediction_type, np.sqrt(a), np.sqrt(1 - a), X, OUTPUT)
        x = np.sqrt(a_s) * picture + np.sqrt(1 - a_s) * noise
        if steps.eta > 0 and following is not None:
            kept = alphas[following] / a_s
            x = np.sqrt(kept) * x + np.sqrt(1 - kept) * NOISE
        updates.append([x])
    return tables(alphas, timesteps, updates)


def distilled_timesteps(config: TCDConfig, steps: Steps) -> np.ndarray:
    """Evenly spaced ones among those that the distillation used."""
    original = config.original_inference_steps
    if not 1 <= original <= config.num_train_timesteps:
        raise ConfigError(f"original_inference_steps={original} is not between 1 and {config.num_train_timesteps}")
    if steps.timesteps:
        return schedules.custom_timesteps(config, steps).astype(int)
    count = schedules.check_count(config, steps, most=original)
    distilled = np.arange(1, original + 1)[::-1] * (config.num_train_timesteps // original) - 1
    return distilled[np.linspace(0, original, count, endpoint=False).astype(int)]


def tables(alphas: np.ndarray, timesteps: np.ndarray, updates: list) -> Tables:
    a = alphas[timesteps]
    return make_tables(timesteps.astype(np.float64), np.sqrt((1 - a) / np.maximum(a, schedules.LEAST_SIGNAL)), updates)
