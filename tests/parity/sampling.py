"""The samplers, options and numbers of steps on which both implementations are compared, as data.

Read in two environments as `cases`, so it imports neither torch nor JAX. The network is the same lines of numpy on both
sides: what differs is the samplers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.parity import cases
from tests.parity.cases import Settings, draw

SHAPE = (4, 2, 3)  # of the latents: with this the committed numbers stay small
STEP_COUNTS = (1, 2, 3, 4, 11, 13, 20, 48, 50)
TIMESTEPS = (999, 845, 730, 587, 443, 310, 193, 116, 53, 13)
SIGMAS = (14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.0)


@dataclass(frozen=True)
class Sampling:
    """A scheduler of the reference, its options, and the arguments of its `set_timesteps` and `step`."""

    scheduler: str
    options: Settings
    counts: tuple[int, ...] = STEP_COUNTS
    timesteps: tuple[int, ...] = ()
    sigmas: tuple[float, ...] = ()
    eta: float = 0.0
    denoising_end: float | None = None  # where a second scheduler of the same kind takes over

    @property
    def kind(self) -> str:
        return self.options.get("prediction_type", "epsilon")


@dataclass
class Trajectory:
    """What happened in a loop: the timesteps (E,), what the network saw (E, ...), and the latents at the end."""

    timesteps: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    final: np.ndarray | None = None

    def see(self, timestep: float, latents: np.ndarray, kind: str) -> np.ndarray:
        """Notes an evaluation of the network, and gives its output; `kind` is a prediction_type."""
        self.timesteps.append(float(timestep))
        self.inputs.append(latents)
        return network(latents, float(timestep), kind)


def join(trajectories: Iterable[Trajectory]) -> dict[str, np.ndarray]:
    """The loops of `LOOPS` end to end, as arrays for a file."""
    loops = list(trajectories)
    return {
        "evaluations": np.array([len(loop.timesteps) for loop in loops]),
        "timesteps": np.array([t for loop in loops for t in loop.timesteps], np.float32),
        "inputs": np.array([latents for loop in loops for latents in loop.inputs], np.float32),
        "finals": np.array([loop.final for loop in loops], np.float32),
    }


def split(arrays: Mapping[str, np.ndarray]) -> dict[tuple[str, int], Trajectory]:
    """What `join` has joined; a file may have left out what the network saw."""
    ends = np.cumsum(arrays["evaluations"])[:-1]
    timesteps = np.split(arrays["timesteps"], ends)
    inputs = np.split(arrays["inputs"], ends) if "inputs" in arrays else [()] * len(LOOPS)
    return dict(zip(LOOPS, map(Trajectory, timesteps, inputs, arrays["finals"]), strict=True))


def network(latents: np.ndarray, timestep: float, kind: str) -> np.ndarray:
    """Of order one, and neither linear nor the same at every place and time.

    A guess of the noise is nearly what it sees where there is little else, so that the picture stays of order one too;
    one of the velocity or the picture is bounded.
    """
    places = draw("sampler network", SHAPE)
    bent = np.tanh(latents + np.float32(0.5) * places + np.float32(timestep / 1000 - 0.5)).astype(np.float32)
    if kind == "epsilon":
        share = np.float32(min(timestep / 400, 0.98))
        return share * latents + np.float32(0.05) * bent
    return bent


def initial_noise() -> np.ndarray:
    return draw("sampler start", SHAPE)


def fresh_noise(evaluation: int) -> np.ndarray:
    return draw(f"sampler noise {evaluation}", SHAPE)


def _cases() -> dict[str, Sampling]:
    found: dict[str, Sampling] = {}

    def add(scheduler: str, label: str, how: dict | None = None, **options) -> None:
        name = f"{scheduler.removesuffix('Scheduler')}, {label}"
        found[name] = Sampling(scheduler, cases.scheduler(**{"clip_sample": False, **options}), **(how or {}))

    custom = {"counts": (len(TIMESTEPS),), "timesteps": TIMESTEPS}
    zero_snr = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}
    betas = np.linspace(0.001, 0.013, 1000).tolist()
    dpm = "DPMSolverMultistepScheduler"
    for scheduler in ("EulerDiscreteScheduler", "HeunDiscreteScheduler", dpm, "UniPCMultistepScheduler"):
        for spacing in cases.SPACINGS:
            add(scheduler, spacing, timestep_spacing=spacing)
        for option in ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"):
            add(scheduler, option, **{option: True})
        for kind in ("v_prediction", "sample"):
            add(scheduler, kind, prediction_type=kind)
        add(scheduler, "squaredcos_cap_v2", beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
        add(scheduler, "trained_betas", trained_betas=betas)
        if scheduler != "UniPCMultistepScheduler":
            add(scheduler, "custom timesteps", custom)
        if scheduler != "HeunDiscreteScheduler":
            add(scheduler, "rescale_betas_zero_snr", **zero_snr)
            add(scheduler, "final_sigmas_type sigma_min", final_sigmas_type="sigma_min")
            karras = {"use_karras_sigmas": True, "timestep_spacing": "linspace", "steps_offset": 0}
            add(scheduler, "karras to sigma_min", final_sigmas_type="sigma_min", euler_at_final=True, **karras)

    add("EulerDiscreteScheduler", "custom sigmas", {"counts": (len(SIGMAS) - 1,), "sigmas": SIGMAS})
    add("EulerDiscreteScheduler", "log_linear", interpolation_type="log_linear")
    add("EulerDiscreteScheduler", "continuous", timestep_type="continuous", prediction_type="v_prediction")
    add("EulerDiscreteScheduler", "sigma_min and sigma_max", use_karras_sigmas=True, sigma_min=0.1, sigma_max=10.0)
    add("HeunDiscreteScheduler", "exp", beta_schedule="exp")
    for spacing in cases.SPACINGS:
        add("EulerAncestralDiscreteScheduler", spacing, timestep_spacing=spacing)
    add("EulerAncestralDiscreteScheduler", "v_prediction", prediction_type="v_prediction")
    add("EulerAncestralDiscreteScheduler", "rescale_betas_zero_snr", **zero_snr)

    for spacing in cases.SPACINGS:
        add("DDIMScheduler", spacing, timestep_spacing=spacing)
    for eta in (0.0, 0.5, 1.0):
        add("DDIMScheduler", f"set_alpha_to_one false, eta {eta}", {"eta": eta}, set_alpha_to_one=False)
    add("DDIMScheduler", "set_alpha_to_one, eta 1", {"eta": 1.0}, set_alpha_to_one=True)
    add("DDIMScheduler", "v_prediction", prediction_type="v_prediction")
    add("DDIMScheduler", "sample", prediction_type="sample")
    add("DDIMScheduler", "rescale_betas_zero_snr", **zero_snr)
    add("DDIMScheduler", "rescale_betas_zero_snr, eta 0.5", {"eta": 0.5}, **zero_snr)

    for kind in ("dpmsolver++", "sde-dpmsolver++", "dpmsolver", "sde-dpmsolver"):
        last = {} if kind.endswith("++") else {"final_sigmas_type": "sigma_min"}
        for order in (1, 2) if kind.startswith("sde") else (1, 2, 3):
            add(dpm, f"{kind} {order}", algorithm_type=kind, solver_order=order, **last)
        add(dpm, f"{kind} heun", algorithm_type=kind, solver_type="heun", **last)
        for prediction in ("v_prediction", "sample"):
            add(
                dpm,
                f"{kind} {prediction}",
                algorithm_type=kind,
                prediction_type=prediction,
                **last,
            )
    sde = {"algorithm_type": "sde-dpmsolver++"}
    add(dpm, "sde-dpmsolver++ karras", use_karras_sigmas=True, **sde)
    add(dpm, "euler_at_final", euler_at_final=True, final_sigmas_type="sigma_min")
    add(dpm, "lower_order_final false", lower_order_final=False)
    add(dpm, "use_lu_lambdas", use_lu_lambdas=True)
    for spacing in cases.SPACINGS:
        cosine = {"beta_schedule": "squaredcos_cap_v2", "timestep_spacing": spacing}
        add(dpm, f"lambda_min_clipped, {spacing}", lambda_min_clipped=-5.1, **cosine)

    last = {"final_sigmas_type": "sigma_min"}
    for kind in ("bh1", "bh2"):
        for order in (1, 2, 3):
            add("UniPCMultistepScheduler", f"{kind} {order}", solver_type=kind, solver_order=order, **last)
        add("UniPCMultistepScheduler", f"{kind} 2 of noise", solver_type=kind, predict_x0=False, **last)
    for prediction in ("v_prediction", "sample"):
        add("UniPCMultistepScheduler", f"{prediction} of noise", predict_x0=False, prediction_type=prediction, **last)
    add("UniPCMultistepScheduler", "bh2 3 to zero", solver_order=3)
    add("UniPCMultistepScheduler", "disable_corrector", disable_corrector=[0, 1, 5])
    add("UniPCMultistepScheduler", "lower_order_final false", lower_order_final=False, **last)

    for scheduler, etas in (("LCMScheduler", (0.0,)), ("TCDScheduler", (0.0, 0.3, 1.0))):
        for eta in etas:
            add(scheduler, f"eta {eta}", {"eta": eta})
            add(scheduler, f"custom timesteps, eta {eta}", {"eta": eta, **custom})
        add(scheduler, "original_inference_steps 100", {"eta": etas[-1]}, original_inference_steps=100)
        for kind in ("v_prediction", "sample"):
            add(scheduler, kind, {"eta": etas[-1]}, prediction_type=kind)
        add(scheduler, "rescale_betas_zero_snr", {"eta": etas[-1]}, **zero_snr)
    add("LCMScheduler", "timestep_scaling 0.1", timestep_scaling=0.1)

    skip = {"skip_prk_steps": True}
    for spacing in cases.SPACINGS:
        add("PNDMScheduler", spacing, timestep_spacing=spacing, **skip)
    add("PNDMScheduler", "set_alpha_to_one", set_alpha_to_one=True, **skip)
    add("PNDMScheduler", "v_prediction", prediction_type="v_prediction", **skip)
    add("PNDMScheduler", "trained_betas", trained_betas=betas, **skip)

    handover = {"denoising_end": 0.55}
    for scheduler in ("EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler"):
        add(scheduler, "handover", handover)
    for scheduler in (dpm, "UniPCMultistepScheduler"):
        add(scheduler, "handover", handover, solver_order=3)
    add("DDIMScheduler", "handover", {**handover, "eta": 0.5})
    return found


SAMPLINGS = _cases()
# Every loop, in the order of the arrays that both sides make of them.
LOOPS = [(name, count) for name, how in SAMPLINGS.items() for count in how.counts]
