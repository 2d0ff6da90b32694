"""Noise schedules on the host: what training added at each timestep, and where sampling stops by.

Options are named and mean what they do in diffusers' scheduler_config.json. The training schedule is rounded to float32
where the reference rounds it, to the bit; all that follows from it is float64. Axes: T training timesteps, S steps.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import betaincinv

from model_handlers.config import Config, ConfigError

# With zero terminal SNR nothing is left of the signal at the end; samplers that divide by it see this share instead.
LEAST_SIGNAL = 2.0**-24


@dataclass(frozen=True)
class Steps:
    """How one picture is sampled, beside what the scheduler's config says.

    Attributes:
      timesteps: custom ones, falling; () for those of the config's spacing.
      sigmas: custom ones, falling to the last, which is where sampling ends; () for those of the timesteps.
      eta: share of fresh noise, of the samplers that have it as a free choice.
      start: the evaluation to begin with, remembering nothing, after another model has made those before.
    """

    num_inference_steps: int
    timesteps: tuple[float, ...] = ()
    sigmas: tuple[float, ...] = ()
    eta: float = 0.0
    start: int = 0


@dataclass(frozen=True)
class SchedulerConfig(Config):
    """The options that all samplers have in common."""

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None
    prediction_type: str = "epsilon"
    timestep_spacing: str = "linspace"
    steps_offset: int = 0
    rescale_betas_zero_snr: bool = False

    # Options that the class does not have, though its neighbours do.
    FOREIGN: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Self:
        """Reads a scheduler_config.json, which another class may have written.

        As with diffusers' `from_config`, options of other classes do not count, nor do those which the file itself says
        are only the defaults of the class that wrote it; this class has its own defaults for them.

        Raises:
          ConfigError: an option is set that is not supported; the message names it.
        """
        ignored = {*cls.FOREIGN, *(values.get("_use_default_values") or ())}
        return super().read({name: value for name, value in values.items() if name not in ignored}, where)

    def check(self) -> None:
        for name in ("num_train_timesteps", "beta_start", "beta_end", "steps_offset"):
            value = getattr(self, name)
            self.require(name, isinstance(value, int | float) and not isinstance(value, bool), "a number")
        self.require("beta_schedule", self.beta_schedule in BETAS, f"one of {', '.join(BETAS)}")
        self.require("timestep_spacing", self.timestep_spacing in SPACINGS, f"one of {', '.join(SPACINGS)}")
        self.require("prediction_type", self.prediction_type in PREDICTIONS, f"one of {', '.join(PREDICTIONS)}")
        if self.trained_betas is not None and len(self.trained_betas) != self.num_train_timesteps:
            raise ConfigError(f"trained_betas has {len(self.trained_betas)} values, not {self.num_train_timesteps}")


@dataclass(frozen=True)
class SigmaConfig(SchedulerConfig):
    """The options of samplers that may choose their noise levels freely."""

    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False
    sigma_min: float | None = None
    sigma_max: float | None = None

    def check(self) -> None:
        super().check()
        if len(chosen := [name for name in RESPACINGS if getattr(self, name, False)]) > 1:
            raise ConfigError(f"{' and '.join(chosen)} exclude each other")

    def respacing(self) -> str | None:
        """Name of the option that replaces the noise levels of the timesteps, if one is set."""
        return next((name for name in RESPACINGS if getattr(self, name, False)), None)


def alphas_cumprod(config: SchedulerConfig) -> np.ndarray:
    """Share of signal left at each training timestep, as variance, (T,)."""
    if config.trained_betas is not None:
        betas = np.array(config.trained_betas, np.float32)
    else:
        betas = BETAS[config.beta_schedule](config.beta_start, config.beta_end, config.num_train_timesteps)
    alphas = _cumprod(1 - betas)
    if config.rescale_betas_zero_snr:  # Lin et al. 2024, algorithm 1
        roots = np.sqrt(alphas)
        bars = ((roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))) ** 2
        betas = 1 - np.append(bars[:1], bars[1:] / bars[:-1])
        alphas = _cumprod(1 - betas)
    return alphas.astype(np.float64)


def train_sigmas(config: SchedulerConfig) -> np.ndarray:
    """Noise over signal at each training timestep, rising, (T,)."""
    alphas = alphas_cumprod(config).astype(np.float32)
    if config.rescale_betas_zero_snr:
        alphas[-1] = LEAST_SIGNAL
    return np.sqrt((1 - alphas) / alphas).astype(np.float64)


def check_count(config: SchedulerConfig, steps: Steps, most: int | None = None) -> int:
    """The number of steps; raises ConfigError if there is no table for it."""
    count, most = steps.num_inference_steps, most or config.num_train_timesteps
    if not 1 <= count <= most:
        raise ConfigError(f"num_inference_steps={count} is not between 1 and {most}")
    return count


def custom_timesteps(config: SchedulerConfig, steps: Steps) -> np.ndarray:
    """The picture's own timesteps, (S,); raises ConfigError unless they fall and training knew them."""
    timesteps, last = np.array(steps.timesteps, np.float64), config.num_train_timesteps - 1
    if len(timesteps) != steps.num_inference_steps or timesteps.min() < 0 or timesteps[0] > last:
        raise ConfigError(f"timesteps={steps.timesteps} are not {steps.num_inference_steps} between 0 and {last}")
    if (np.diff(timesteps) >= 0).any():
        raise ConfigError(f"timesteps={steps.timesteps} do not fall")
    if isinstance(config, SigmaConfig) and (name := config.respacing()):
        raise ConfigError(f"timesteps={steps.timesteps} cannot be chosen together with {name}")
    return timesteps


def respaced(name: str, sigma_max: float, sigma_min: float, count: int) -> np.ndarray:
    """Noise levels (S,) from the highest to the lowest, as the option of that name spaces them."""
    return RESPACINGS[name](sigma_max, sigma_min, np.linspace(0, 1, count))


def timesteps_of(sigmas: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """The timesteps, not whole ones, at which training had these noise levels."""
    # In float32 the last level may lie above itself: its timestep, 998.99, is then cut to 998, as by the reference.
    known = np.log(trained.astype(np.float32)).astype(np.float64)
    return np.interp(np.log(np.maximum(sigmas, 1e-10)), known, np.arange(len(trained)))


def signal_and_noise(sigma: Any) -> tuple[Any, Any]:
    """Factors of signal and noise whose squares add up to 1, and whose ratio is 1 to `sigma`."""
    alpha = 1 / np.sqrt(1 + sigma**2)
    return alpha, sigma * alpha


def _cumprod(alphas: np.ndarray) -> np.ndarray:
    return np.cumprod(alphas, dtype=np.float64).astype(np.float32)


def _linspace(start: float, end: float, count: int) -> np.ndarray:
    """The reference's in float32: counted from the nearer end, each number rounded once."""
    first, last = np.float32(start), np.float32(end)
    step = float((last - first) / np.float32(count - 1))
    i = np.arange(count)
    return np.where(i < count // 2, first + step * i, last - step * (count - 1 - i)).astype(np.float32)


def _betas(alpha_bar: Callable[[np.ndarray], np.ndarray], count: int) -> np.ndarray:
    """The betas whose alphas_cumprod is a function of time in [0, 1], cut where they approach 1."""
    t = np.arange(count + 1) / count
    return np.minimum(1 - alpha_bar(t[1:]) / alpha_bar(t[:-1]), 0.999).astype(np.float32)


BETAS: dict[str, Callable[[float, float, int], np.ndarray]] = {
    "linear": _linspace,
    "scaled_linear": lambda start, end, count: _linspace(start**0.5, end**0.5, count) ** 2,
    # Nichol and Dhariwal 2021
    "squaredcos_cap_v2": lambda start, end, count: _betas(
        lambda t: np.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2, count
    ),
    "exp": lambda start, end, count: _betas(lambda t: np.exp(-12 * t), count),
}
# Lin et al. 2024, table 2: from the number of training timesteps, the number of steps and the offset.
SPACINGS: dict[str, Callable[[int, int, int], np.ndarray]] = {
    "linspace": lambda count, steps, offset: np.linspace(0, count - 1, steps)[::-1],
    "leading": lambda count, steps, offset: np.arange(steps)[::-1] * (count // steps) + float(offset),
    # The reference's arange, so that halves round to the same side; for 61 steps and others it is one too long.
    "trailing": lambda count, steps, offset: np.round(np.arange(count, 0, -count / steps)[:steps]) - 1,
}
# From the highest and the lowest noise level and a ramp from 0 to 1.
RESPACINGS: dict[str, Callable[[float, float, np.ndarray], np.ndarray]] = {
    "use_karras_sigmas": lambda high, low, ramp: (high ** (1 / 7) + ramp * (low ** (1 / 7) - high ** (1 / 7))) ** 7,
    "use_exponential_sigmas": lambda high, low, ramp: high ** (1 - ramp) * low**ramp,
    # Lee et al. 2024: quantiles of a Beta(0.6, 0.6) distribution.
    "use_beta_sigmas": lambda high, low, ramp: low + betaincinv(0.6, 0.6, 1 - ramp) * (high - low),
    # Lu et al. 2022 space the logarithm of the signal-to-noise ratio evenly, which is exponential sigmas.
    "use_lu_lambdas": lambda high, low, ramp: high ** (1 - ramp) * low**ramp,
}


def predicted(
    kind: str, alpha: float, sigma: float, x: np.ndarray, output: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The picture and the noise that a network means by its output for x = alpha * picture + sigma * noise."""
    return PREDICTIONS[kind](alpha, sigma, x, output)


PREDICTIONS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "epsilon": lambda alpha, sigma, x, noise: ((x - sigma * noise) / alpha, noise),
    "v_prediction": lambda alpha, sigma, x, v: (alpha * x - sigma * v, alpha * v + sigma * x),
    "sample": lambda alpha, sigma, x, picture: (picture, (x - alpha * picture) / sigma),
}
