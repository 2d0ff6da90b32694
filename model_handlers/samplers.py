"""Samplers: tables made once on the host in float64, and steps that are pure functions of them.

Source: Karras et al. 2022 for the sigmas and Euler's method in this form; options are named and mean what they
do in diffusers' EulerDiscreteScheduler. Axes: S inference steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from model_handlers.config import Config, ConfigError


@dataclass(frozen=True)
class SchedulerConfig(Config):
    """The fields of a scheduler_config.json that the tables depend on."""

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    timestep_spacing: str = "linspace"
    steps_offset: int = 0

    FIXED = {  # noqa: RUF012
        "final_sigmas_type": "zero",
        "interpolation_type": "linear",
        "prediction_type": "epsilon",
        "rescale_betas_zero_snr": False,
        "timestep_type": "discrete",
        "trained_betas": None,
        "use_beta_sigmas": False,
        "use_exponential_sigmas": False,
        "use_karras_sigmas": False,
    }

    def check(self) -> None:
        self.require("beta_schedule", self.beta_schedule in BETAS, f"one of {', '.join(BETAS)}")
        self.require("timestep_spacing", self.timestep_spacing in SPACINGS, f"one of {', '.join(SPACINGS)}")


@dataclass(frozen=True)
class Schedule:
    """What a sampler needs to know of its steps.

    Attributes:
      timesteps: (S,), what the network is told, falling.
      sigmas: (S + 1,), standard deviation of the noise before each step and, last, after all; falling to 0.
      init_noise_sigma: standard deviation of the latents that sampling starts from.
    """

    timesteps: np.ndarray
    sigmas: np.ndarray
    init_noise_sigma: float


def alphas_cumprod(config: SchedulerConfig) -> np.ndarray:
    """Share of signal left at each training timestep, (num_train_timesteps,)."""
    return np.cumprod(1 - BETAS[config.beta_schedule](config.beta_start, config.beta_end, config.num_train_timesteps))


def euler_schedule(config: SchedulerConfig, num_inference_steps: int) -> Schedule:
    """Tables of Euler's method; raises ConfigError for more steps than training had timesteps."""
    count = config.num_train_timesteps
    if not 1 <= num_inference_steps <= count:
        raise ConfigError(f"num_inference_steps={num_inference_steps} is not between 1 and {count}")
    timesteps = SPACINGS[config.timestep_spacing](count, num_inference_steps, config.steps_offset)
    alphas = alphas_cumprod(config)
    sigmas = np.interp(timesteps, np.arange(count), np.sqrt((1 - alphas) / alphas))
    # "leading" never visits the last training timestep, so its start is signal and noise together.
    start = np.hypot(sigmas[0], 1.0) if config.timestep_spacing == "leading" else sigmas[0]
    return Schedule(timesteps, np.append(sigmas, 0.0), float(start))


def euler_scale_input(latents: jax.Array, sigma: jax.Array) -> jax.Array:
    """The latents at the unit variance that the network was trained on."""
    return latents / (sigma**2 + 1) ** 0.5


def euler_step(latents: jax.Array, noise: jax.Array, sigma: jax.Array, next_sigma: jax.Array) -> jax.Array:
    """From the latents at `sigma` and the noise predicted in them to the latents at `next_sigma`."""
    return latents + (next_sigma - sigma) * noise


BETAS: dict[str, Callable[[float, float, int], np.ndarray]] = {
    "linear": np.linspace,
    "scaled_linear": lambda start, end, count: np.linspace(start**0.5, end**0.5, count) ** 2,
}
SPACINGS: dict[str, Callable[[int, int, int], np.ndarray]] = {
    "linspace": lambda count, steps, offset: np.linspace(0, count - 1, steps)[::-1],
    "leading": lambda count, steps, offset: np.arange(steps)[::-1] * (count // steps) + float(offset),
    # The reference's arange, so that halves round to the same side; for 61 steps and others it is one too long.
    "trailing": lambda count, steps, offset: np.round(np.arange(count, 0, -count / steps)[:steps]) - 1,
}
