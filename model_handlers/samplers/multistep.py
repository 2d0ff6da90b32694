"""DPM-Solver(++) and UniPC: multistep solvers that draw a polynomial through earlier predictions.

Lu et al. 2022, 2022b, Zhao et al. 2023. The latents are alpha * picture + sigma * noise with squares that add up to 1;
lambda is log(alpha / sigma) and h a step in it. In names, s is where a step starts and t where it ends; m[0] is the
newest prediction, of the picture or of the noise, m[1] the one before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import factorial
from typing import Any, ClassVar

import numpy as np

from model_handlers.samplers import schedules
from model_handlers.samplers.schedules import SigmaConfig, Steps, predicted, signal_and_noise
from model_handlers.samplers.tables import MEMORY, NOISE, OUTPUT, Tables, Vector, X, make_tables


@dataclass(frozen=True)
class MultistepConfig(SigmaConfig):
    solver_order: int = 2
    solver_type: str = ""
    lower_order_final: bool = True
    final_sigmas_type: str = "zero"

    FIXED: ClassVar[Mapping[str, Any]] = {
        "thresholding": False,
        "use_flow_sigmas": False,
        "use_dynamic_shifting": False,
    }
    # A file that another class has written may name a type of that class; what it then stands for here.
    SOLVER_TYPES: ClassVar[dict[str, str]] = {}

    def check(self) -> None:
        super().check()
        self.require("final_sigmas_type", self.final_sigmas_type in ("zero", "sigma_min"), "zero or sigma_min")
        # Of order 3, a step needs three earlier predictions besides the latents, which is what there are slots for.
        self.require("solver_order", self.solver_order in (1, 2, 3), "1 to 3")
        self.require("solver_type", self.solver_type in self.SOLVER_TYPES, f"one of {', '.join(self.SOLVER_TYPES)}")


@dataclass(frozen=True)
class DPMSolverMultistepConfig(MultistepConfig):
    solver_type: str = "midpoint"
    algorithm_type: str = "dpmsolver++"
    euler_at_final: bool = False
    use_lu_lambdas: bool = False
    lambda_min_clipped: float = -np.inf

    FIXED: ClassVar = {**MultistepConfig.FIXED, "variance_type": None}
    SOLVER_TYPES: ClassVar = {**dict.fromkeys(("midpoint", "logrho", "bh1", "bh2"), "midpoint"), "heun": "heun"}
    ALGORITHMS = ("dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++")

    def check(self) -> None:
        super().check()
        known = (*self.ALGORITHMS, "deis")
        self.require("algorithm_type", self.algorithm_type in known, f"one of {', '.join(known)}")
        if self.algorithm_type in ("dpmsolver", "sde-dpmsolver"):  # which divide by the noise that is left
            self.require("final_sigmas_type", self.final_sigmas_type == "sigma_min", "sigma_min with this algorithm")
        if self.algorithm_type.startswith("sde"):  # the reference's formula of order 3 does not tend to that of order 2
            self.require("solver_order", self.solver_order < 3, "1 or 2 with this algorithm")


@dataclass(frozen=True)
class UniPCMultistepConfig(MultistepConfig):
    solver_type: str = "bh2"
    predict_x0: bool = True
    disable_corrector: tuple[int, ...] = ()

    FIXED: ClassVar = {**MultistepConfig.FIXED, "solver_p": None}
    SOLVER_TYPES: ClassVar = {**dict.fromkeys(("bh2", "midpoint", "heun", "logrho"), "bh2"), "bh1": "bh1"}


def dpm_solver(config: DPMSolverMultistepConfig, steps: Steps) -> Tables:
    timesteps, sigmas = noise_levels(config, steps)
    few = config.lower_order_final and len(timesteps) < 15
    updates = []
    for i in range(len(timesteps)):
        left = len(timesteps) - i
        order = min(config.solver_order, max(i + 1 - steps.start, 1))
        if left == 1 and (few or config.euler_at_final or config.final_sigmas_type == "zero"):
            order = 1
        elif left == 2 and few:
            order = min(order, 2)
        picture, noise = predicted_at(config, sigmas[i])
        m = [noise if config.algorithm_type in ("dpmsolver", "sde-dpmsolver") else picture, *MEMORY[:2]]
        updates.append([dpm_step(config, sigmas[: i + 2][-order - 1 :], m[:order]), *m])
    return make_tables(timesteps, sigmas[:-1], updates)


def dpm_step(config: DPMSolverMultistepConfig, sigmas: np.ndarray, m: Sequence[Vector]) -> Vector:
    """The latents at sigmas[-1] from those at sigmas[-2], where m[0] was predicted, and the predictions before."""
    (alpha_s, sigma_s), (alpha_t, sigma_t) = (signal_and_noise(sigma) for sigma in sigmas[-2:])
    *before, h = -np.diff(np.log(sigmas))
    match config.algorithm_type:
        case "dpmsolver":
            x, g, scale, fresh = alpha_t / alpha_s * X, h, -sigma_t, 0.0
        case "sde-dpmsolver":
            x, g, scale, fresh = alpha_t / alpha_s * X, h, -2 * sigma_t, sigma_t * np.sqrt(np.expm1(2 * h))
        case "sde-dpmsolver++":
            x, g, scale = sigma_t / sigma_s * np.exp(-h) * X, -2 * h, -alpha_t
            fresh = sigma_t * np.sqrt(-np.expm1(-2 * h))
        case _:
            x, g, scale, fresh = sigma_t / sigma_s * X, -h, -alpha_t, 0.0
    growth = np.expm1(g)
    x = x + scale * growth * m[0] + fresh * NOISE
    if len(m) == 1:
        return x
    r = [step / h for step in before[::-1]]
    slope, *older = [(new - old) / ratio for new, old, ratio in zip(m, m[1:], r, strict=False)]
    if not older and config.SOLVER_TYPES[config.solver_type] == "midpoint":
        return x + scale * growth / 2 * slope
    if older:
        bend = (slope - older[0]) / (r[0] + r[1])
        slope = slope + r[0] * bend
        x = x + scale * ((growth - g) / g**2 - 0.5) * bend
    return x + scale * (growth / g - 1) * slope


def unipc(config: UniPCMultistepConfig, steps: Steps) -> Tables:
    """UniP predicts as usual; UniC then mends the latents by the network's output for them, before the next step."""
    timesteps, sigmas = noise_levels(config, steps)
    updates = []
    order = 0
    for i in range(len(timesteps)):
        picture, noise = predicted_at(config, sigmas[i])
        newest = picture if config.predict_x0 else noise
        x = X
        if i > steps.start and i - 1 not in config.disable_corrector:
            x = X + correction(config, sigmas[: i + 1][-order - 1 :], newest, MEMORY[:order])
        left = len(timesteps) - i if config.lower_order_final else config.solver_order
        order = min(config.solver_order, max(i + 1 - steps.start, 1), left)
        m = [newest, *MEMORY[:2]]
        updates.append([prediction(config, sigmas[: i + 2][-order - 1 :], x, m[:order]), *m])
    return make_tables(timesteps, sigmas[:-1], updates)


def prediction(config: UniPCMultistepConfig, sigmas: np.ndarray, x: Vector, m: Sequence[Vector]) -> Vector:
    """UniP: the latents at sigmas[-1] from `x` at sigmas[-2], where m[0] was predicted, and the predictions before."""
    (alpha_s, sigma_s), (alpha_t, sigma_t) = (signal_and_noise(sigma) for sigma in sigmas[-2:])
    keep, scale = (sigma_t / sigma_s, alpha_t) if config.predict_x0 else (alpha_t / alpha_s, sigma_t)
    r, b, b_h, growth = bh_system(config, sigmas)
    x = keep * x - scale * growth * m[0]
    for rho, slope in zip(rho_p(r, b), slopes(m, r), strict=True):
        x = x - scale * b_h * rho * slope
    return x


def correction(config: UniPCMultistepConfig, sigmas: np.ndarray, newest: Vector, m: Sequence[Vector]) -> Vector:
    """UniC less UniP: what the prediction `newest` at sigmas[-1] adds to the latents that UniP gave there."""
    alpha_t, sigma_t = signal_and_noise(sigmas[-1])
    r, b, b_h, _ = bh_system(config, sigmas)
    *rho_c, rho_t = [0.5] if len(m) == 1 else np.linalg.solve(np.vander(r, increasing=True).T, b)
    added = rho_t * (newest - m[0])
    for c, p, slope in zip(rho_c, rho_p(r, b), slopes(m, r), strict=True):
        added = added + (c - p) * slope
    return -(alpha_t if config.predict_x0 else sigma_t) * b_h * added


def bh_system(config: UniPCMultistepConfig, sigmas: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Where the predictions lie, r (p,), with the end of the step as 1; the paper's b (p,) and B(h); and exp(h) - 1."""
    *past, h = np.log(sigmas[-2]) - np.log(np.delete(sigmas, -2))
    r = np.array([*(lambda_ / h for lambda_ in past[::-1]), 1.0])
    h = -h if config.predict_x0 else h
    growth = np.expm1(h)
    b_h = h if config.SOLVER_TYPES[config.solver_type] == "bh1" else growth
    phi, b = growth / h - 1, []
    for k in range(1, len(r) + 1):
        b.append(phi * factorial(k) / b_h)
        phi = phi / h - 1 / factorial(k + 1)
    return r, np.array(b), b_h, growth


def rho_p(r: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Weights of the slopes in UniP; for order 2 the paper's simpler one."""
    return np.array([0.5]) if len(r) == 2 else np.linalg.solve(np.vander(r[:-1], increasing=True).T, b[:-1])


def slopes(m: Sequence[Vector], r: np.ndarray) -> list[Vector]:
    return [(older - m[0]) / at for older, at in zip(m[1:], r, strict=False)]


def noise_levels(config: MultistepConfig, steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Timesteps (S,), whole ones, and sigmas (S + 1,) before each step and, last, after all."""
    trained = schedules.train_sigmas(config)
    count = schedules.check_count(config, steps)
    if steps.timesteps:
        timesteps = schedules.custom_timesteps(config, steps).astype(int)
    else:
        known = len(trained)
        if isinstance(config, DPMSolverMultistepConfig):  # which may leave out where there is next to no signal
            known -= int(np.sum(-np.log(trained) < config.lambda_min_clipped))
        timesteps = SPACINGS[config.timestep_spacing](known, count, config.steps_offset, len(trained))
    last = trained[0] if config.final_sigmas_type == "sigma_min" else 0.0
    name = config.respacing()
    if name is None:
        return timesteps, np.append(np.interp(timesteps, np.arange(len(trained)), trained), last)
    sigmas = schedules.respaced(name, config.sigma_max or trained[-1], config.sigma_min or trained[0], count)
    timesteps = schedules.timesteps_of(sigmas, trained)
    if rounds(config, name):
        timesteps = np.round(timesteps)
    if isinstance(config, UniPCMultistepConfig) and last:
        last = sigmas[-1]
    return np.trunc(timesteps), np.append(sigmas, last)


def rounds(config: MultistepConfig, name: str) -> bool:
    """Whether the reference rounds the timesteps of respaced noise levels before it cuts them to whole ones."""
    if isinstance(config, UniPCMultistepConfig):
        return name == "use_karras_sigmas"
    return name in ("use_karras_sigmas", "use_lu_lambdas") and config.beta_schedule != "squaredcos_cap_v2"


def predicted_at(config: MultistepConfig, sigma: float) -> tuple[Vector, Vector]:
    """Picture and noise by the network's output for the latents at `sigma`."""
    return predicted(config.prediction_type, *signal_and_noise(sigma), X, OUTPUT)


# One more than the steps, of which the last, the end of the last step, is then left out. From the number of timesteps
# that are used, the number of steps, the offset and the number of training timesteps.
SPACINGS = {
    "linspace": lambda known, steps, offset, trained: np.round(np.linspace(0, known - 1, steps + 1))[:0:-1],
    "leading": lambda known, steps, offset, trained: np.arange(steps + 1)[:0:-1] * (known // (steps + 1)) + offset,
    "trailing": lambda known, steps, offset, trained: np.round(np.arange(known, 0, -trained / steps)[:steps]) - 1,
}
