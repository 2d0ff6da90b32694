"""Euler, Euler ancestral and Heun, in the form of Karras et al. 2022: the latents are picture + sigma * noise.

The network sees them at the unit variance that it was trained on.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from model_handlers.config import ConfigError
from model_handlers.samplers import schedules
from model_handlers.samplers.schedules import SchedulerConfig, SigmaConfig, Steps, predicted, signal_and_noise
from model_handlers.samplers.tables import MEMORY, NOISE, OUTPUT, Tables, Vector, X, make_tables


@dataclass(frozen=True)
class EulerDiscreteConfig(SigmaConfig):
    final_sigmas_type: str = "zero"
    interpolation_type: str = "linear"
    timestep_type: str = "discrete"

    def check(self) -> None:
        super().check()
        self.require("final_sigmas_type", self.final_sigmas_type in ("zero", "sigma_min"), "zero or sigma_min")
        self.require("interpolation_type", self.interpolation_type in ("linear", "log_linear"), "linear or log_linear")
        self.require("timestep_type", self.timestep_type in ("discrete", "continuous"), "discrete or continuous")


@dataclass(frozen=True)
class EulerAncestralDiscreteConfig(SchedulerConfig):
    def check(self) -> None:
        super().check()
        self.require("prediction_type", self.prediction_type != "sample", "epsilon or v_prediction")


@dataclass(frozen=True)
class HeunDiscreteConfig(SigmaConfig):
    beta_start: float = 0.00085
    beta_end: float = 0.012

    FIXED: ClassVar = {"clip_sample": False}
    FOREIGN = ("rescale_betas_zero_snr",)


def euler(config: EulerDiscreteConfig, steps: Steps) -> Tables:
    timesteps, sigmas = noise_levels(config, steps)
    updates = []
    for sigma, next_sigma in pairwise(sigmas):
        _, noise = predicted_at(config, sigma)
        updates.append([X + (next_sigma - sigma) * noise])
    return tables(config, timesteps, sigmas[:-1], updates)


def euler_ancestral(config: EulerAncestralDiscreteConfig, steps: Steps) -> Tables:
    timesteps, sigmas = noise_levels(config, steps)
    updates = []
    for sigma, next_sigma in pairwise(sigmas):
        _, noise = predicted_at(config, sigma)
        up = next_sigma * np.sqrt(1 - (next_sigma / sigma) ** 2)
        down = next_sigma**2 / sigma
        updates.append([X + (down - sigma) * noise + up * NOISE])
    return tables(config, timesteps, sigmas[:-1], updates)


def heun(config: HeunDiscreteConfig, steps: Steps) -> Tables:
    """Two evaluations a step, but for the last step, whose end has no noise left to look at."""
    timesteps, sigmas = noise_levels(config, steps)
    start, slope = MEMORY[:2]
    updates = []
    for sigma, next_sigma in pairwise(sigmas):
        _, noise = predicted_at(config, sigma)
        updates.append([X + (next_sigma - sigma) * noise, X, noise])
        if next_sigma > 0:
            _, noise = predicted_at(config, next_sigma)
            updates.append([start + (next_sigma - sigma) * (slope + noise) / 2])
    evaluations = np.repeat(np.arange(len(timesteps)), 2)[1:]
    return tables(config, timesteps[evaluations], sigmas[evaluations], updates)


def noise_levels(config: SchedulerConfig, steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Timesteps (S,), and sigmas (S + 1,) before each step and, last, after all."""
    trained = schedules.train_sigmas(config)
    if steps.sigmas:
        sigmas = np.array(steps.sigmas, np.float64)
        if len(sigmas) != steps.num_inference_steps + 1 or sigmas[-1] < 0 or (np.diff(sigmas) >= 0).any():
            raise ConfigError(f"sigmas={steps.sigmas} do not fall in {steps.num_inference_steps} steps to 0 or above")
        return schedules.timesteps_of(sigmas[:-1], trained), sigmas
    count = schedules.check_count(config, steps)
    if steps.timesteps:
        timesteps = schedules.custom_timesteps(config, steps)
    else:
        space = schedules.SPACINGS[config.timestep_spacing]
        timesteps = space(config.num_train_timesteps, count, config.steps_offset)
    sigmas = np.interp(timesteps, np.arange(len(trained)), trained)
    last = 0.0
    if isinstance(config, EulerDiscreteConfig):
        if config.final_sigmas_type == "sigma_min":
            last = trained[0]
        if config.interpolation_type == "log_linear":
            # One level more than there are steps, so that sampling ends on the lowest and not on none.
            levels = np.geomspace(trained[-1], trained[0], count + 1)
            sigmas, last = levels[:-1], levels[-1]
    if isinstance(config, SigmaConfig) and (name := config.respacing()):
        high, low = config.sigma_max or sigmas[0], config.sigma_min or sigmas[-1]
        sigmas = schedules.respaced(name, high, low, count)
        timesteps = schedules.timesteps_of(sigmas, trained)
    return timesteps, np.append(sigmas, last)


def predicted_at(config: SchedulerConfig, sigma: float) -> tuple[Vector, Vector]:
    """Picture and noise by the network's output for the latents at `sigma`."""
    alpha, noise = signal_and_noise(sigma)
    return predicted(config.prediction_type, alpha, noise, alpha * X, OUTPUT)


def tables(config: SchedulerConfig, timesteps: np.ndarray, sigmas: np.ndarray, updates: list) -> Tables:
    # "leading" never visits the last training timestep, so its start is signal and noise together.
    start = np.hypot(sigmas[0], 1.0) if config.timestep_spacing == "leading" else sigmas[0]
    if getattr(config, "timestep_type", None) == "continuous" and config.prediction_type == "v_prediction":
        timesteps = 0.25 * np.log(sigmas)
    return make_tables(timesteps, sigmas, updates, input_scale=signal_and_noise(sigmas)[0], init_noise_sigma=start)
