"""Our side of the comparison: the arrays of `reference`, made with JAX from a checkpoint folder."""

from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_handlers.recipe import ImageRequest
from model_handlers.samplers import SchedulerConfig, euler_schedule
from model_handlers.stable_diffusion import model as sdxl
from model_handlers.stable_diffusion.model import StableDiffusionXL
from tests.parity import cases
from tests.parity.cases import Case

# Largest differences that the issue allows, all float32. Values of the first group are of order one; an image is in
# [0, 1] and has gone through 20 steps and guidance; the rounded one may fall on the other side of a half.
LIMITS = {
    **dict.fromkeys(("text", "negative_text", "pooled", "negative_pooled"), 2e-5),
    **dict.fromkeys(("step", "mean", "log_variance", "decoded"), 2e-5),
    "image": 1e-4,
    "rounded": 1,
}
# A difference of 1e-5 in [0, 1] takes one number in 200 over a half when it is multiplied by 255.
SHARE_ROUNDED_APART = 0.005
# Ours are float64; the reference's are float32 throughout, seven digits of timesteps up to 999 and sigmas up to 14.6.
SAMPLER_LIMITS = {"timesteps": 4e-5, "sigmas": 1e-5, "init_noise_sigma": 1e-5}


def outputs(root: Path, case: Case) -> dict[str, np.ndarray]:
    """Everything in LIMITS, channels last."""
    model = StableDiffusionXL.load(root, scheduler="EulerDiscreteScheduler", dtype="float32")
    given = {name: value.transpose(0, 2, 3, 1) if value.ndim == 4 else value for name, value in case.inputs.items()}
    return _networks(model, given) | _pictures(model, case, given["noise"])


def sampler_tables(spacing: str) -> dict[str, np.ndarray]:
    """The tables of every number of steps end to end, in the order of `cases.STEP_COUNTS`."""
    config = SchedulerConfig(**cases.scheduler(timestep_spacing=spacing))
    schedules = [euler_schedule(config, count) for count in cases.STEP_COUNTS]
    return {
        "timesteps": np.concatenate([schedule.timesteps for schedule in schedules]),
        "sigmas": np.concatenate([schedule.sigmas for schedule in schedules]),
        "init_noise_sigma": np.array([schedule.init_noise_sigma for schedule in schedules]),
    }


def _networks(model: StableDiffusionXL, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    @nnx.jit
    def run(networks, given):
        step = networks.unet(
            *(given[f"step_{name}"] for name in ("latents", "timesteps", "text", "pooled", "time_ids"))
        )
        mean, log_variance = networks.vae.encode(given["images"])
        decoded = networks.vae.decode(given["latents"])
        return {"step": step, "mean": mean, "log_variance": log_variance, "decoded": decoded}

    return jax.tree.map(np.asarray, run(model.networks, given))


def _pictures(model: StableDiffusionXL, case: Case, noise: np.ndarray) -> dict[str, np.ndarray]:
    """Runs the real program, `generate`, on the given noise and keeps what passes through it."""
    inputs, _ = model.prepare([_request(case, i) for i in range(len(case.pictures))])

    @nnx.jit
    def run(networks, inputs, noise, num_loops):
        kept = {}

        def embed_guidance(networks, inputs):
            conditioning = original_embed_guidance(networks, inputs)
            kept.update(
                text=conditioning.text[1::2],
                negative_text=conditioning.text[0::2],
                pooled=conditioning.pooled[1::2],
                negative_pooled=conditioning.pooled[0::2],
            )
            return conditioning

        def decode(networks, latents):
            image = original_decode(networks, latents)
            kept["image"] = jnp.clip(image, 0, 1)  # the reference clips before it hands out an image
            return image

        def initial_latents(seeds, init_noise_sigma, shape):
            return noise * init_noise_sigma[:, None, None, None]

        original_embed_guidance, original_decode = sdxl.embed_guidance, sdxl.decode
        with mock.patch.multiple(sdxl, embed_guidance=embed_guidance, decode=decode, initial_latents=initial_latents):
            rounded, finite = sdxl.generate(networks, inputs, num_loops, height=case.height, width=case.width)
        return kept | {"rounded": rounded, "finite": finite}

    made = run(model.networks, inputs, noise, np.int32(inputs.num_inference_steps.max()))
    made = jax.tree.map(np.asarray, made)
    if not made.pop("finite").all():
        raise ValueError(f"{case.name}: an image is not finite")
    return made


def _request(case: Case, index: int) -> ImageRequest:
    picture = case.pictures[index]
    return ImageRequest(
        id=str(index),
        image_index=0,
        prompt=picture.prompt,
        negative_prompt=picture.negative_prompt,
        seed=index,
        width=case.width,
        height=case.height,
        num_inference_steps=picture.num_inference_steps,
        guidance_scale=picture.guidance_scale,
        original_size=picture.original_size or (case.height, case.width),
        crops_coords_top_left=picture.crops_coords_top_left,
        target_size=picture.target_size or (case.height, case.width),
    )
