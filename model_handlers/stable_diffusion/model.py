"""Stable Diffusion XL from token ids to pictures: the method as free functions, and the model that holds its parts.

Source: Podell et al. 2023; results follow diffusers' StableDiffusionXLPipeline.
Axes: B batch, T text tokens, X text channels, P pooled channels, h and w latents, H and W pixels, S steps.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_handlers import checkpoint, samplers
from model_handlers.checkpoint import CheckpointError, Description
from model_handlers.recipe import MAX_STEPS, ImageRequest
from model_handlers.samplers import SchedulerConfig
from model_handlers.stable_diffusion.text import CLIPTextModel, TextConfig
from model_handlers.stable_diffusion.tokens import Tokenizer, Tokens
from model_handlers.stable_diffusion.unet import UNet2DConditionModel, UNetConfig
from model_handlers.stable_diffusion.vae import AutoencoderKL, VAEConfig

NETWORKS = ("text_encoder", "text_encoder_2", "unet", "vae")
SCHEDULERS = {"EulerDiscreteScheduler": samplers.euler_schedule}


class Inputs(NamedTuple):
    """Everything about a batch, as data: no value in it is part of the compiled program.

    Attributes:
      ids, negative_ids: int32 (2, B, T), for the two text encoders.
      no_negative: bool (B,), whether the row has no negative prompt and the checkpoint wants zeros for it.
      seeds: uint32 (B, 2), the high and the low half of a seed.
      guidance_scale: float32 (B,); up to 1 means no guidance.
      time_ids: float32 (B, 6), original size, crop and target size in pixels, each (height, width).
      num_inference_steps: int32 (B,).
      timesteps: float32 (B, MAX_STEPS); sigmas: float32 (B, MAX_STEPS + 1). Each row has its own schedule, and
        what lies behind its last step is not read.
      init_noise_sigma: float32 (B,).
    """

    ids: Any
    negative_ids: Any
    no_negative: Any
    seeds: Any
    guidance_scale: Any
    time_ids: Any
    num_inference_steps: Any
    timesteps: Any
    sigmas: Any
    init_noise_sigma: Any


class Conditioning(NamedTuple):
    """What the UNet is told beside latents and time: text (B, T, X), pooled (B, P), time_ids (B, 6)."""

    text: jax.Array
    pooled: jax.Array
    time_ids: jax.Array


class Networks(nnx.Module):
    """The four networks of a checkpoint; the attributes are the names of their folders."""

    def __init__(self, configs: "Configs", rngs: nnx.Rngs, **dtypes):
        self.text_encoder = CLIPTextModel(configs.text_encoder, projection=False, rngs=rngs, **dtypes)
        self.text_encoder_2 = CLIPTextModel(configs.text_encoder_2, projection=True, rngs=rngs, **dtypes)
        self.unet = UNet2DConditionModel(configs.unet, rngs=rngs, **dtypes)
        self.vae = AutoencoderKL(configs.vae, rngs=rngs, **dtypes)


class Configs(NamedTuple):
    """The parsed config.json files of a checkpoint, and the flag of its model_index.json that decides pixels."""

    text_encoder: TextConfig
    text_encoder_2: TextConfig
    unet: UNetConfig
    vae: VAEConfig
    scheduler: SchedulerConfig
    force_zeros_for_empty_prompt: bool

    @classmethod
    def read(cls, root: Path) -> "Configs":
        def config(kind, name):
            path = root / name
            return kind.read(checkpoint.read_json(path), str(path))

        index = checkpoint.read_json(root / "model_index.json")
        return cls(
            config(TextConfig, "text_encoder/config.json"),
            config(TextConfig, "text_encoder_2/config.json"),
            config(UNetConfig, "unet/config.json"),
            config(VAEConfig, "vae/config.json"),
            config(SchedulerConfig, "scheduler/scheduler_config.json"),
            index.get("force_zeros_for_empty_prompt", True),
        )


def embed_prompts(networks: Networks, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Token ids (2, B, T) to the text (B, T, X) of both encoders side by side and the pooled (B, P) of the second.

    SDXL reads the last but one layer of either encoder.
    """
    states_1, _ = networks.text_encoder(ids[0])
    states_2, pooled = networks.text_encoder_2(ids[1])
    return jnp.concatenate([states_1[-2], states_2[-2]], axis=-1), pooled


def embed_guidance(networks: Networks, inputs: Inputs) -> Conditioning:
    """Conditioning (2B, ...) in which row 2i is the negative and row 2i + 1 the prompt of request i.

    Side by side, the two stay on one chip when the batch is divided.
    """
    text, pooled = embed_prompts(networks, inputs.ids)
    negative_text, negative_pooled = embed_prompts(networks, inputs.negative_ids)
    keep = ~inputs.no_negative
    return Conditioning(
        _interleave(negative_text * keep[:, None, None], text),
        _interleave(negative_pooled * keep[:, None], pooled),
        jnp.repeat(inputs.time_ids, 2, axis=0),
    )


def initial_latents(seeds: jax.Array, init_noise_sigma: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Noise (B, h, w, 4) in float32, each row from its own seed: its neighbours and its place do not enter."""

    def noise(seed):
        return jax.random.normal(jax.random.wrap_key_data(seed, impl="threefry2x32"), shape, jnp.float32)

    return jax.vmap(noise)(seeds) * init_noise_sigma[:, None, None, None]


def denoise(
    networks: Networks, latents: jax.Array, conditioning: Conditioning, inputs: Inputs, num_loops: jax.Array
) -> jax.Array:
    """Runs every row's own schedule over the latents (B, h, w, 4).

    `num_loops` is the largest of the rows' step counts; a row that is done keeps its latents.
    """
    guidance_scale = inputs.guidance_scale[:, None, None, None]

    def step(i, latents):
        sigma, next_sigma = (inputs.sigmas[:, j][:, None, None, None] for j in (i, i + 1))
        scaled = samplers.euler_scale_input(latents, sigma)
        noise = networks.unet(
            jnp.repeat(scaled, 2, axis=0), jnp.repeat(inputs.timesteps[:, i], 2), *conditioning
        ).astype(jnp.float32)
        without, with_prompt = noise[0::2], noise[1::2]
        guided = without + guidance_scale * (with_prompt - without)
        noise = jnp.where(guidance_scale > 1, guided, with_prompt)
        active = (i < inputs.num_inference_steps)[:, None, None, None]
        return jnp.where(active, samplers.euler_step(latents, noise, sigma, next_sigma), latents)

    return jax.lax.fori_loop(0, num_loops, step, latents)


def decode(networks: Networks, latents: jax.Array) -> jax.Array:
    """Latents (B, h, w, 4) to float32 images (B, H, W, 3), [0, 1] where they are in range."""
    images = networks.vae.decode(latents / networks.vae.config.scaling_factor)
    return images.astype(jnp.float32) / 2 + 0.5


def generate(
    networks: Networks, inputs: Inputs, num_loops: jax.Array, *, height: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """The whole program: a batch to uint8 images (B, H, W, 3) and bool (B,), whether a row stayed finite."""
    scale = networks.vae.config.scale
    shape = (height // scale, width // scale, networks.vae.config.latent_channels)
    latents = initial_latents(inputs.seeds, inputs.init_noise_sigma, shape)
    latents = denoise(networks, latents, embed_guidance(networks, inputs), inputs, num_loops)
    images = decode(networks, latents)
    finite = jnp.isfinite(images).all((1, 2, 3)) & jnp.isfinite(latents).all((1, 2, 3))
    return jnp.round(jnp.clip(images, 0, 1) * 255).astype(jnp.uint8), finite


class StableDiffusionXL:
    """A loaded checkpoint: its networks on the devices, its tokenizers and its sampler on the host."""

    def __init__(self, configs: Configs, networks: Networks, tokenizers: Sequence[Tokenizer], scheduler: str):
        self.configs = configs
        self.networks = networks
        self._tokenizers = tokenizers
        self._make_schedule = SCHEDULERS[scheduler]

    @classmethod
    def describe(cls, root: Path, scheduler: str | None = None) -> Description:
        """Reads the configs only; `scheduler` overrides the checkpoint's own.

        Raises:
          CheckpointError, ConfigError: something in it is not supported; the message names file and option.
        """
        configs = Configs.read(root)
        scheduler = scheduler or checkpoint.read_json(root / "scheduler/scheduler_config.json").get("_class_name")
        if scheduler not in SCHEDULERS:
            raise CheckpointError(
                f"scheduler {scheduler} is not supported; --scheduler takes {', '.join(sorted(SCHEDULERS))}"
            )
        scale = configs.vae.scale
        return Description("StableDiffusionXLPipeline", scheduler, scale, configs.unet.sample_size * scale)

    @classmethod
    def check(cls, root: Path, variant: str | None = None) -> None:
        """Makes sure that tokenizers and the names and shapes of all weights fit, without reading the weights.

        Raises:
          CheckpointError, ConfigError: as `load`.
        """
        _, _, networks = _outline(root, jnp.float32)
        for name in NETWORKS:
            checkpoint.check(getattr(networks, name), root / name, variant)

    @classmethod
    def load(
        cls,
        root: Path,
        *,
        scheduler: str,
        dtype: jax.typing.DTypeLike,
        sharding: jax.sharding.Sharding | None = None,
        variant: str | None = None,
    ) -> "StableDiffusionXL":
        """Reads a checkpoint folder onto the devices.

        Raises:
          CheckpointError, ConfigError: it does not fit; the message names the file and what is wrong.
        """
        configs, tokenizers, networks = _outline(root, dtype)
        for name in NETWORKS:
            checkpoint.fill(getattr(networks, name), root / name, sharding=sharding, variant=variant)
        return cls(configs, networks, tokenizers, scheduler)

    def prepare(self, requests: Sequence[ImageRequest]) -> tuple[Inputs, list[Tokens]]:
        """The host's part of a batch: inputs of `generate`, and the tokens of encoder 1 for each prompt."""
        prompts = [request.prompt for request in requests]
        negatives = [request.negative_prompt or "" for request in requests]
        tokens = [tokenizer(prompts) for tokenizer in self._tokenizers]
        zeros = self.configs.force_zeros_for_empty_prompt
        steps = [request.num_inference_steps for request in requests]
        schedules = {count: self._make_schedule(self.configs.scheduler, count) for count in set(steps)}

        def table(values: Sequence[np.ndarray], length: int) -> np.ndarray:
            return np.stack([np.pad(value, (0, length - len(value))) for value in values]).astype(np.float32)

        inputs = Inputs(
            ids=_stack_ids(tokens),
            negative_ids=_stack_ids([tokenizer(negatives) for tokenizer in self._tokenizers]),
            no_negative=np.array([zeros and request.negative_prompt is None for request in requests]),
            seeds=np.array([divmod(request.seed, 2**32) for request in requests], np.uint32),
            guidance_scale=np.array([request.guidance_scale for request in requests], np.float32),
            time_ids=np.array(
                [(*r.original_size, *r.crops_coords_top_left, *r.target_size) for r in requests], np.float32
            ),
            num_inference_steps=np.array(steps, np.int32),
            timesteps=table([schedules[count].timesteps for count in steps], MAX_STEPS),
            sigmas=table([schedules[count].sigmas for count in steps], MAX_STEPS + 1),
            init_noise_sigma=np.array([schedules[count].init_noise_sigma for count in steps], np.float32),
        )
        return inputs, tokens[0]


def _outline(root: Path, dtype: jax.typing.DTypeLike) -> tuple[Configs, list[Tokenizer], Networks]:
    """The parts of a checkpoint with abstract weights: shapes and dtypes only."""
    configs = Configs.read(root)
    tokenizers = [
        Tokenizer(root / folder, config.vocab_size, config.max_position_embeddings)
        for folder, config in (("tokenizer", configs.text_encoder), ("tokenizer_2", configs.text_encoder_2))
    ]
    networks = nnx.eval_shape(lambda: Networks(configs, nnx.Rngs(0), dtype=dtype, param_dtype=dtype))
    return configs, tokenizers, networks


def _interleave(first: jax.Array, second: jax.Array) -> jax.Array:
    """(B, ...) and (B, ...) to (2B, ...): first[0], second[0], first[1], ..."""
    return jnp.stack([first, second], axis=1).reshape(-1, *first.shape[1:])


def _stack_ids(tokens: Sequence[Sequence[Tokens]]) -> np.ndarray:
    return np.array([[prompt.ids for prompt in encoder] for encoder in tokens])
