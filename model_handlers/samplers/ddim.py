"""DDIM, PNDM and the few-step LCM and TCD, which step on the timesteps of the training.

The latents are sqrt(a) * picture + sqrt(1 - a) * noise, with a the timestep's alphas_cumprod.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from model_handlers.config import ConfigError
from model_handlers.samplers import schedules
from model_handlers.samplers.schedules import SchedulerConfig, Steps, predicted
from model_handlers.samplers.tables import MEMORY, NOISE, OUTPUT, Tables, Vector, X, make_tables


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
class PNDMConfig(SchedulerConfig):
    timestep_spacing: str = "leading"
    set_alpha_to_one: bool = False
    skip_prk_steps: bool = False

    FOREIGN = ("rescale_betas_zero_snr",)

    def check(self) -> None:
        super().check()
        # The class's own default begins with twelve evaluations of Runge-Kutta, which no latent diffusion model uses.
        self.require("skip_prk_steps", self.skip_prk_steps, "True")
        self.require("prediction_type", self.prediction_type != "sample", "epsilon or v_prediction")


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
    alphas = schedules.alphas_cumprod(config)
    timesteps, stride = trained_timesteps(config, steps)
    updates = []
    for t in timesteps:
        a, a_prev = alphas[t], alpha_at(config, alphas, t - stride)
        picture, noise = predicted(config.prediction_type, np.sqrt(a), np.sqrt(1 - a), X, OUTPUT)
        fresh = steps.eta * np.sqrt((1 - a_prev) / (1 - a) * (1 - a / a_prev))
        kept = np.sqrt(max(1 - a_prev - fresh**2, 0.0))  # the difference of equals may come out just below zero
        updates.append([np.sqrt(a_prev) * picture + kept * noise + fresh * NOISE])
    return tables(alphas, timesteps, updates)


def pndm(config: PNDMConfig, steps: Steps) -> Tables:
    """Liu et al. 2022 from their linear multistep formula on: DDIM's step, by a mean of the last four outputs.

    The first step is gone back on once: from where it leads, the network is asked again, and the two outputs are
    averaged for the same step.
    """
    if steps.start:  # where the reference would skip a timestep
        raise ConfigError("PNDMScheduler cannot go on where another model stopped; --scheduler names another one")
    alphas = schedules.alphas_cumprod(config)
    timesteps, stride = trained_timesteps(config, steps)

    def step(x: Vector, outputs: Sequence[Vector], start: int) -> Vector:
        a, a_prev = alphas[start], alpha_at(config, alphas, start - stride)
        output = np.array(ADAMS_BASHFORTH[len(outputs)]) @ np.array(outputs)
        picture, noise = predicted(config.prediction_type, np.sqrt(a), np.sqrt(1 - a), x, output)
        return np.sqrt(a_prev) * picture + np.sqrt(1 - a_prev) * noise

    updates = [[step(X, [OUTPUT], timesteps[0]), OUTPUT, X]]
    if len(timesteps) > 1:
        first, start = MEMORY[:2]
        # By the reference one stride above the next timestep, which is not always the first one.
        updates.append([step(start, [(first + OUTPUT) / 2], timesteps[1] + stride), first])
    for i, t in enumerate(timesteps[1:]):
        outputs = [OUTPUT, *MEMORY[: min(i + 1, 3)]]
        updates.append([step(X, outputs, t), *outputs[:3]])
    return tables(alphas, np.concatenate([timesteps[:2], timesteps[1:]]), updates)


# Weights of the newest output and those before, by how many there are.
ADAMS_BASHFORTH = {
    1: (1.0,),
    2: (3 / 2, -1 / 2),
    3: (23 / 12, -16 / 12, 5 / 12),
    4: (55 / 24, -59 / 24, 37 / 24, -9 / 24),
}


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


def trained_timesteps(config: SchedulerConfig, steps: Steps) -> tuple[np.ndarray, int]:
    """As the config spaces them, whole ones; and how many timesteps a step goes down."""
    count, known = schedules.check_count(config, steps), config.num_train_timesteps
    space = schedules.SPACINGS[config.timestep_spacing]
    timesteps = np.round(space(known, count, config.steps_offset)).astype(int)
    if timesteps[0] >= known:
        raise ConfigError(f"steps_offset={config.steps_offset} leads beyond the last of {known} timesteps")
    return timesteps, known // count


def alpha_at(config: DDIMConfig | PNDMConfig, alphas: np.ndarray, timestep: int) -> float:
    """The share of signal at a timestep; what it is after the last step, below 0, the config says."""
    if timestep >= 0:
        return alphas[timestep]
    return 1.0 if config.set_alpha_to_one else alphas[0]


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
