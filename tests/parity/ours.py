"""Our side of the comparison: the arrays of `reference`, made with JAX from a checkpoint folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_handlers import samplers
from model_handlers import sampling as sampled
from model_handlers.lora import Adapter
from model_handlers.program import COMPILER_OPTIONS
from model_handlers.recipe import ImageRequest, Settings
from model_handlers.samplers import Steps, Tables
from model_handlers.stable_diffusion import model as sdxl
from model_handlers.stable_diffusion.model import StableDiffusion
from tests.parity import sampling
from tests.parity.cases import Case
from tests.parity.sampling import Sampling, Trajectory

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
# The latents after one step of a sampler and throughout a loop, of order one; timesteps that are not whole are float32.
SAMPLER_LIMITS = {"timesteps": 4e-5, "one step": 2e-5, "loop": 1e-4}


def compared(case: Case) -> list[str]:
    """Those of LIMITS that the case has; only XL pools its text."""
    return [what for what in LIMITS if case.text_encoder_2 or "pooled" not in what]


def outputs(
    root: Path, case: Case, adapters: Sequence[Adapter] = (), refiner: Path | None = None
) -> dict[str, np.ndarray]:
    """Everything in `compared`, channels last; `refiner` is the checkpoint of the case's."""
    model = StableDiffusion.load(
        root,
        scheduler=case.sampler,
        prompt_windows=case.prompt_windows,
        dtype="float32",
        adapters=adapters,
        refiner=refiner,
    )
    given = {name: value.transpose(0, 2, 3, 1) if value.ndim == 4 else value for name, value in case.inputs.items()}
    return _networks(model, given) | _pictures(model, case, given["noise"])


def tables(how: Sampling, count: int) -> list[Tables]:
    """Of each stage."""
    config = samplers.read(how.scheduler, how.options, how.scheduler)
    eta = how.eta if "eta" in samplers.SAMPLERS[how.scheduler].takes else 0.0
    steps = Steps(count, how.timesteps, how.sigmas, eta)
    if how.denoising_end is None:
        return [samplers.tables(config, steps)]
    return [make(config, steps, how.denoising_end) for make in (samplers.tables_until, samplers.tables_from)]


def sample(how: Sampling, count: int) -> Trajectory:
    """What `denoise` does, one evaluation after the other."""
    stages, trajectory = tables(how, count), Trajectory()
    latents = sampling.initial_noise() * np.float32(stages[0].init_noise_sigma)
    for table in stages:
        slots = np.zeros((1, samplers.SLOTS, *sampling.SHAPE), np.float32)
        slots[:, 0] = latents
        for i in range(len(table)):
            noise = sampling.fresh_noise(len(trajectory.inputs))
            output = trajectory.see(table.timesteps[i], slots[0, 0] * np.float32(table.input_scale[i]), how.kind)
            update = table.updates[i].astype(np.float32)
            slots = np.asarray(_advance(slots, update[None], output[None], noise[None]))
        latents = slots[0, 0]
    trajectory.final = latents
    return trajectory


def sampler_limits(how: Sampling, count: int) -> dict[str, float]:
    """SAMPLER_LIMITS, or the reference's own rounding of latents that start from more noise than SDXL's, up to 4096."""
    rounding = 4 * 2.0**-24 * tables(how, count)[0].init_noise_sigma
    return {name: max(limit, rounding) for name, limit in SAMPLER_LIMITS.items()}


def sampler_differences(mine: Trajectory, reference: Trajectory) -> dict[str, float]:
    """Largest differences, as parts of the reference's largest number where that is above one."""

    def largest(one, other):
        return float(np.abs(np.subtract(one, other)).max() / max(1.0, np.abs(other).max()))

    seen = [largest(one, other) for one, other in zip(mine.inputs, reference.inputs, strict=False)]
    passed = [*seen, largest(mine.final, reference.final)]
    return {
        "timesteps": float(np.abs(np.subtract(mine.timesteps, reference.timesteps)).max()),
        "one step": passed[1] if seen else 0.0,
        "loop": max(passed),
    }


_advance = jax.jit(samplers.advance)


def _networks(model: StableDiffusion, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = ["text"]
    if model.networks.text_encoder_2 is not None:
        names += ["pooled", "time_ids"]

    def run(networks, given):
        conditioning = networks.unet.condition(*(given[f"step_{name}"] for name in names))
        step = networks.unet(given["step_latents"], given["step_timesteps"], conditioning)
        mean, log_variance = networks.vae.encode(given["images"])
        decoded = networks.vae.decode(given["latents"])
        return {"step": step, "mean": mean, "log_variance": log_variance, "decoded": decoded}

    return _compile(run, model.networks, given)(given)


def _pictures(model: StableDiffusion, case: Case, noise: np.ndarray) -> dict[str, np.ndarray]:
    """Runs the real program, `generate`, on the given noise and keeps what passes through it.

    As in a job, the pictures of a batch are guided at the same evaluations, and free slots repeat the first of them.
    """
    requests = [_request(case, i) for i in range(len(case.pictures))]
    batches: dict[tuple[int, int], list[int]] = {}
    for i, request in enumerate(requests):
        batches.setdefault(sampled.guided(request, model.sampler), []).append(i)

    def run(networks, inputs, noise, loop):
        kept = {}

        def embed_guidance(networks, inputs):
            text, pooled = original_embed_guidance(networks, inputs)
            if not kept:  # the second stage's are seen in the image
                kept.update(text=text[0], negative_text=text[1])
                if pooled is not None:
                    kept.update(pooled=pooled[0], negative_pooled=pooled[1])
            return text, pooled

        def decode(networks, latents):
            image = original_decode(networks, latents)
            kept["image"] = jnp.clip(image, 0, 1)  # the reference clips before it hands out an image
            return image

        def initial_latents(seeds, init_noise_sigma, shape):
            return noise * init_noise_sigma[:, None, None, None]

        original_embed_guidance, original_decode = sdxl.embed_guidance, sdxl.decode
        with mock.patch.multiple(sdxl, embed_guidance=embed_guidance, decode=decode, initial_latents=initial_latents):
            rounded, finite = sdxl.generate(networks, inputs, loop, height=case.height, width=case.width)
        return kept | {"rounded": rounded, "finite": finite}

    compiled, made = None, {}
    for places in batches.values():
        slots = places + places[:1] * (len(requests) - len(places))
        inputs, _ = model.prepare([requests[i] for i in slots])
        args = inputs, noise[slots], sdxl.Loop.of(inputs)
        compiled = compiled or _compile(run, model.networks, *args)
        for name, values in compiled(*args).items():
            made.setdefault(name, np.zeros_like(values))[places] = values[: len(places)]
    if not made.pop("finite").all():
        raise ValueError(f"{case.name}: an image is not finite")
    return made


def _compile(function: Callable[..., dict], networks: nnx.Module, *args: Any) -> Callable[..., dict[str, np.ndarray]]:
    """A function compiled for `args` as `Programs` compiles, with its options: they choose other convolutions."""
    definition, weights = nnx.split(networks)
    jitted = jax.jit(lambda weights, *args: function(nnx.merge(definition, weights), *args))
    options = COMPILER_OPTIONS.get(jax.default_backend(), {})
    compiled = jitted.lower(weights, *args).compile(compiler_options=options)
    return lambda *args: jax.tree.map(np.asarray, compiled(weights, *args))


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
        settings=Settings.of(picture.settings),
    )
