"""Stable Diffusion from token ids to pictures: the method as free functions, and the model that holds its parts.

Sources: Rombach et al. 2022 (versions 1 and 2), Podell et al. 2023 (XL); results follow diffusers'
StableDiffusionPipeline and StableDiffusionXLPipeline. A refiner is a second stage: it ends and decodes what the first
has begun, as in diffusers' ensemble of experts (denoising_end of the base, denoising_start of the refiner).
Axes: B batch, W windows of T text tokens, X text channels, P pooled channels, h and w latents, H and W pixels, E
evaluations of the UNet, K slots of a sampler.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_handlers import checkpoint, lora, mesh, samplers, sampling
from model_handlers.checkpoint import Description
from model_handlers.config import ConfigError
from model_handlers.lora import Adapter, Targets
from model_handlers.recipe import ImageRequest
from model_handlers.samplers import MAX_EVALUATIONS, SchedulerConfig, Tables
from model_handlers.stable_diffusion import original
from model_handlers.stable_diffusion.text import CLIPTextModel, TextConfig
from model_handlers.stable_diffusion.tokens import Tokenizer, Tokens
from model_handlers.stable_diffusion.unet import Conditioning, UNet2DConditionModel, UNetConfig
from model_handlers.stable_diffusion.vae import AutoencoderKL, VAEConfig

# A prompt each to its tokens: a `Tokenizer`, or what stands in for one.
Tokenize = Callable[[Sequence[str]], list[Tokens]]
# Where a weight goes, by its network and its shape.
Place = Callable[[str, Sequence[int]], jax.sharding.Sharding]
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
NETWORKS = (*TEXT_ENCODERS, "unet", "vae")
REFINER = "StableDiffusionXLImg2ImgPipeline"


class Inputs(NamedTuple):
    """Everything about a batch, as data: no value in it is part of the compiled program.

    Attributes:
      ids, negative_ids: int32 (B, 1 or 2, W, T), for each text encoder.
      num_windows: int32 (B,), of the W, how many there are for a row.
      clip_skip: int32 (B,), layers of theirs that the prompt leaves out beyond the usual one.
      no_negative: bool (B,), whether the row has no negative prompt and the checkpoint wants zeros for it.
      seeds: uint32 (B, 2), the high and the low half of a seed.
      time_ids, negative_time_ids: float32 (B, 6), original size, crop and target size in pixels, each (height, width);
        of a refiner (B, 5), with the aesthetic score in place of the target size.
      guidance_scale, guidance_rescale: float32 (B,).
      guided: int32 (B, 2), the evaluations of all stages between which there is guidance; see `sampling`.
      first_evaluation: int32 (B,), of this stage, counted through all stages.
      num_evaluations: int32 (B,). Each row has its own tables, and what lies behind its last evaluation has no effect.
      timesteps, input_scale: float32 (B, E); updates: float32 (B, E, K, K + 2); init_noise_sigma: float32 (B,); see
        `samplers.Tables`.
      refiner: Inputs of the second stage, if there is one.
    """

    ids: Any
    negative_ids: Any
    num_windows: Any
    clip_skip: Any
    no_negative: Any
    seeds: Any
    time_ids: Any
    negative_time_ids: Any
    guidance_scale: Any
    guidance_rescale: Any
    guided: Any
    first_evaluation: Any
    num_evaluations: Any
    timesteps: Any
    input_scale: Any
    updates: Any
    init_noise_sigma: Any
    refiner: Any = None


class Loop(NamedTuple):
    """What any row of a batch needs; the same on every device, so that all go on and leave out together.

    Attributes:
      num_evaluations: int32 ().
      noisy: bool (E,), whether some row gets fresh noise at an evaluation.
      guided: bool (E,), whether some row is guided at an evaluation.
      refiner: Loop of the second stage, if there is one.
    """

    num_evaluations: Any
    noisy: Any
    guided: Any
    refiner: Any = None

    @classmethod
    def of(cls, inputs: Inputs) -> "Loop":
        return cls(
            inputs.num_evaluations.max(),
            inputs.updates[..., samplers.NOISE > 0].any((0, 2, 3)),
            is_guided(inputs, np.arange(MAX_EVALUATIONS)[:, None]).any(1),
            None if inputs.refiner is None else cls.of(inputs.refiner),
        )


def is_guided(inputs: Inputs, i: Any) -> Any:
    """Whether each row is guided at the evaluation i of its stage; (B,), or (E, B) for evaluations (E, 1)."""
    evaluation = inputs.first_evaluation + i
    return (inputs.guided[:, 0] <= evaluation) & (evaluation < inputs.guided[:, 1])


class Networks(nnx.Module):
    """The networks of a checkpoint; the attributes are the names of their folders. `refiner` has those of another."""

    def __init__(self, configs: "Configs", rngs: nnx.Rngs, **dtypes):
        self.text_encoder: Any = (  # refiners have none
            CLIPTextModel(configs.text_encoder, projection=False, rngs=rngs, **dtypes) if configs.text_encoder else None
        )
        self.text_encoder_2 = (
            CLIPTextModel(configs.text_encoder_2, projection=True, rngs=rngs, **dtypes)
            if configs.text_encoder_2
            else None
        )
        self.unet = UNet2DConditionModel(configs.unet, rngs=rngs, **dtypes)
        self.vae = AutoencoderKL(configs.vae, rngs=rngs, **dtypes)
        self.refiner: Networks | None = nnx.data(None)


class Configs(NamedTuple):
    """The parsed config.json files of a checkpoint, and the flags of its model_index.json that decide pixels.

    Without `text_encoder_2` it is Stable Diffusion 1 or 2, otherwise XL, of which refiners lack `text_encoder`.
    """

    text_encoder: TextConfig | None
    text_encoder_2: TextConfig | None
    unet: UNetConfig
    vae: VAEConfig
    scheduler: SchedulerConfig
    force_zeros_for_empty_prompt: bool
    requires_aesthetics_score: bool = False

    @classmethod
    def read(cls, root: Path, scheduler: str | None = None, scheduler_options: str = "{}") -> "Configs":
        """Reads them all; `scheduler` is the class of the sampler, if not the checkpoint's own.

        `scheduler_options`, as JSON, take the place of what its config says.
        """

        def config(kind, name):
            path = root / name
            return kind.read(checkpoint.read_json(path), str(path))

        index = checkpoint.read_json(root / "model_index.json")
        force_zeros = index.get("force_zeros_for_empty_prompt", True)
        if force_zeros not in (True, False, None):
            where = root / "model_index.json"
            raise ConfigError(f"{where}: force_zeros_for_empty_prompt={force_zeros!r} is neither true nor false")
        path = root / "scheduler/scheduler_config.json"
        options = checkpoint.read_json(path)
        xl, has_first = "XL" in str(index.get("_class_name")), "text_encoder" in checkpoint.components(root)
        own = str(options.get("_class_name")).removeprefix("Flax")
        if not xl and scheduler in (None, own):
            # Early configs lack both or have them wrong, for which diffusers' pipeline makes up.
            options = {**options, "steps_offset": 1, "clip_sample": False, "_use_default_values": None}
        return cls(
            config(TextConfig, "text_encoder/config.json") if has_first or not xl else None,
            config(TextConfig, "text_encoder_2/config.json") if xl else None,
            config(UNetConfig, "unet/config.json"),
            config(VAEConfig, "vae/config.json"),
            samplers.read(scheduler or own, options, str(path), json.loads(scheduler_options)),
            xl and bool(force_zeros),
            bool(index.get("requires_aesthetics_score")),
        )

    def read_refiner(self, root: Path, scheduler_options: str = "{}") -> "Configs":
        """Reads those of a refiner for what this checkpoint begins; it goes on with the same class of sampler."""
        index = checkpoint.read_json(root / "model_index.json")
        if index.get("_class_name") != REFINER or not index.get("requires_aesthetics_score"):
            raise ConfigError(f"{root / 'model_index.json'}: not a refiner, a {REFINER} with requires_aesthetics_score")
        if self.text_encoder_2 is None:
            raise ConfigError(f"{root}: a refiner is for SDXL, and the checkpoint is none")
        configs = Configs.read(root, samplers.name_of(self.scheduler), scheduler_options)
        for name in ("scale", "latent_channels", "scaling_factor", "latents_mean", "latents_std"):
            values = getattr(self.vae, name), getattr(configs.vae, name)
            if values[0] != values[1]:
                raise ConfigError(f"{root}: its latents are not the checkpoint's, {name}={values[1]} and {values[0]}")
        return configs

    @property
    def networks(self) -> list[str]:
        """The names of the networks that the checkpoint has."""
        return [name for name in NETWORKS if getattr(self, name) is not None]

    @property
    def encoders(self) -> dict[str, TextConfig]:
        """The configs of the text encoders that the checkpoint has, by the folders of their tokenizers."""
        both = {"tokenizer": self.text_encoder, "tokenizer_2": self.text_encoder_2}
        return {folder: config for folder, config in both.items() if config is not None}


def gathered(networks: Networks) -> Networks:
    """The networks with their weights whole on every chip, but for stacks, whose blocks are gathered one by one."""
    definition, *parts = nnx.split(networks, nnx.PathContains("block", exact=True), ...)
    stacks, others = map(mesh.fetched, parts)
    return nnx.merge(definition, stacks, mesh.gathered(others))


def embed_prompts(networks: Networks, ids: jax.Array, clip_skip: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Token ids (B, 1 or 2, W, T) to the text (B, W * T, X) and, in XL, the pooled (B, P) of the second encoder.

    XL reads the last but one layer of its encoders, side by side, versions 1 and 2 the last of their one, normed; with
    clip_skip (B,) an earlier one. Each window is read by itself, their states are laid end to end, and the pooled one
    is that of the first window.
    """
    batch, encoders, windows, length = ids.shape
    rows, skip = ids.swapaxes(0, 1).reshape(encoders, batch * windows, length), jnp.repeat(clip_skip, windows)
    if networks.text_encoder_2 is None:
        states, _ = networks.text_encoder(rows[0])
        text = networks.text_encoder.text_model.final_layer_norm(_layer(states, skip))
        return text.reshape(batch, windows * length, -1), None
    states_2, pooled = networks.text_encoder_2(rows[-1])
    states = [states_2] if networks.text_encoder is None else [networks.text_encoder(rows[0])[0], states_2]
    text = jnp.concatenate([_layer(hidden, skip + 1) for hidden in states], axis=-1)
    return text.reshape(batch, windows * length, -1), pooled.reshape(batch, windows, -1)[:, 0]


def _layer(states: jax.Array, skip: jax.Array) -> jax.Array:
    """Of all hidden states (L + 1, B, T, C), those (B, T, C) of the layer that each row's skip (B,) leaves last."""
    layer = len(states) - 1 - skip
    return jnp.take_along_axis(states, layer[None, :, None, None], axis=0)[0]


def embed_guidance(networks: Networks, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """Text (2, B, W * T, X) and pooled (2, B, P), as `embed_prompts`, of the prompts and of the negative prompts."""
    ids = jnp.stack([inputs.ids, inputs.negative_ids])
    # The reference leaves out layers for the prompt only.
    clip_skip = jnp.stack([inputs.clip_skip, jnp.zeros_like(inputs.clip_skip)])
    text, pooled = jax.vmap(partial(embed_prompts, networks))(ids, clip_skip)
    keep = jnp.stack([jnp.ones_like(inputs.no_negative), ~inputs.no_negative])
    return text * keep[..., None, None], None if pooled is None else pooled * keep[..., None]


def condition(networks: Networks, inputs: Inputs) -> Conditioning:
    """The UNet's conditioning on the prompts and on the negative prompts, along a new first axis of 2."""
    text, pooled = embed_guidance(networks, inputs)
    time_ids = None if pooled is None else jnp.stack([inputs.time_ids, inputs.negative_time_ids])
    _, _, windows, length = inputs.ids.shape
    text_mask = None
    if windows > 1:
        text_mask = jnp.stack([jnp.arange(windows * length) < inputs.num_windows[:, None] * length] * 2)
    return jax.vmap(networks.unet.condition)(text, pooled, time_ids, text_mask)


def initial_latents(seeds: jax.Array, init_noise_sigma: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Noise (B, h, w, 4) in float32, each row from its own seed: its neighbours and its place do not enter."""
    return jax.vmap(lambda seed: jax.random.normal(_key(seed), shape))(seeds) * _per_row(init_noise_sigma)


def fresh_noise(seeds: jax.Array, evaluations: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Noise (B, h, w, 4) that stochastic samplers add, from each row's own seed and number of the evaluation (B,)."""

    def of_row(seed, evaluation):
        return jax.random.normal(jax.random.fold_in(_key(seed), evaluation), shape)

    return jax.vmap(of_row)(seeds, evaluations)


def denoise(
    networks: Networks, latents: jax.Array, conditioning: Conditioning, inputs: Inputs, loop: Loop
) -> jax.Array:
    """Runs every row's own sampler over the latents (B, h, w, 4); a row that is done keeps its latents."""

    def step(i, slots):
        output = predict(
            networks,
            slots[:, 0] * _per_row(inputs.input_scale[:, i]),
            inputs.timesteps[:, i],
            conditioning,
            Guidance(inputs.guidance_scale, inputs.guidance_rescale, is_guided(inputs, i)),
            num_passes=jnp.where(loop.guided[i], 2, 1),
        )
        noise = jax.lax.cond(
            loop.noisy[i],
            lambda: fresh_noise(inputs.seeds, inputs.first_evaluation + i, output.shape[1:]),
            lambda: jnp.zeros_like(output),
        )
        active = _per_row(i < inputs.num_evaluations)[:, None]
        return jnp.where(active, samplers.advance(slots, inputs.updates[:, i], output, noise), slots)

    slots = jnp.stack([latents, *[jnp.zeros_like(latents)] * (samplers.SLOTS - 1)], axis=1)
    return jax.lax.fori_loop(0, loop.num_evaluations, step, slots)[:, 0]


class Guidance(NamedTuple):
    """Classifier-free guidance at one evaluation: scale and rescaled share, float32 (B,); and which rows have it."""

    scale: jax.Array
    rescale: jax.Array
    guided: jax.Array


def predict(
    networks: Networks,
    latents: jax.Array,
    timesteps: jax.Array,
    conditioning: Conditioning,
    guidance: Guidance,
    num_passes: jax.Array,
) -> jax.Array:
    """The UNet's output (B, h, w, 4) for latents (B, h, w, 4) and timesteps (B,), guided where a row is.

    Guidance is a second pass of the same rows, with the negative prompts, and not a batch of twice as many: the network
    is in the program once and takes half of the memory, and a row has the same bits whether its neighbours are guided
    or not. `num_passes` is 1 if no row is, else 2.
    """

    def evaluate(i, outputs):
        unet = gathered(networks).unet
        rows = latents, timesteps, jax.tree.map(lambda of_both: of_both[i], conditioning)
        output = mesh.in_turns(unet, _rows_at_once(unet, latents), *rows) if mesh.on_tpu() else unet(*rows)
        return outputs.at[i].set(output.astype(jnp.float32))

    with_prompt, without = jax.lax.fori_loop(0, num_passes, evaluate, jnp.zeros((2, *latents.shape)))
    mixed = without + _per_row(guidance.scale) * (with_prompt - without)
    mixed = rescaled(mixed, with_prompt, _per_row(guidance.rescale))
    return jnp.where(_per_row(guidance.guided), mixed, with_prompt)


def _rows_at_once(unet: UNet2DConditionModel, latents: jax.Array) -> int:
    """How many rows a TPU's chip evaluates together.

    One picture of SDXL's size fills it, and the feature maps of several do not fit into its vector memory. With eight
    they go to memory and back, but a convolution has its eight sublanes full, which is worth a little more.
    """
    with_room = mesh.rows_with_room(len(latents), unet.map_size(latents))
    eights = len(latents) // mesh.ways("batch") % mesh.SUBLANES == 0
    return max(with_room, mesh.SUBLANES) if eights else with_room


def rescaled(mixed: jax.Array, with_prompt: jax.Array, share: jax.Array) -> jax.Array:
    """Guided outputs (B, h, w, 4), by a `share` of (B, 1, 1, 1) with the spread of those that the prompt alone gives.

    Lin et al. 2024, section 3.4.
    """
    spread, wanted = (outputs.std((1, 2, 3), keepdims=True) for outputs in (mixed, with_prompt))
    # Where nothing is to be rescaled, nothing can be divided by zero either.
    return jnp.where(share > 0, share * (mixed * (wanted / spread)) + (1 - share) * mixed, mixed)


def decode(networks: Networks, latents: jax.Array) -> jax.Array:
    """Latents (B, h, w, 4) to float32 images (B, H, W, 3), [0, 1] where they are in range."""
    config = networks.vae.config
    latents = latents / config.scaling_factor
    if config.latents_mean is not None:
        latents = latents * jnp.array(config.latents_std) + jnp.array(config.latents_mean)
    # Large ones one at a time: there is no memory for the feature maps of a batch.
    at_once = mesh.rows_with_room(len(latents), networks.vae.map_size(latents))
    images = mesh.in_turns(networks.vae.decode, at_once, latents)
    return images.astype(jnp.float32) / 2 + 0.5


def generate(networks: Networks, inputs: Inputs, loop: Loop, *, height: int, width: int) -> tuple[jax.Array, jax.Array]:
    """The whole program: a batch to uint8 images (B, H, W, 3) and bool (B,), whether a row stayed finite."""
    scale = networks.vae.config.scale
    shape = (height // scale, width // scale, networks.vae.config.latent_channels)
    latents = initial_latents(inputs.seeds, inputs.init_noise_sigma, shape)
    latents = mesh.laid(latents, "batch", "height")
    latents = denoise(networks, latents, condition(gathered(networks), inputs), inputs, loop)
    if networks.refiner is not None:
        networks, inputs, loop = networks.refiner, inputs.refiner, loop.refiner
        latents = denoise(networks, latents, condition(gathered(networks), inputs), inputs, loop)
    images = decode(gathered(networks), mesh.laid(latents, "batch", "height"))
    finite = jnp.isfinite(images).all((1, 2, 3)) & jnp.isfinite(latents).all((1, 2, 3))
    return jnp.round(jnp.clip(images, 0, 1) * 255).astype(jnp.uint8), finite


class StableDiffusion:
    """A loaded checkpoint: its networks on the devices, its tokenizers and its sampler on the host.

    One with a `refiner` has the refiner's networks among its own.
    """

    def __init__(
        self,
        configs: Configs,
        networks: Networks,
        tokenizers: Sequence[Tokenize],
        refiner: "StableDiffusion | None" = None,
    ):
        self.configs = configs
        self.networks = networks
        self.refiner = refiner
        self._tokenizers = tokenizers
        if refiner is not None:
            networks.refiner = refiner.networks

    @classmethod
    def describe(
        cls, root: Path, scheduler: str | None = None, scheduler_options: str = "{}", refiner: Path | None = None
    ) -> Description:
        """Reads the configs only; `scheduler` overrides the checkpoint's own, see `Configs.read`.

        Raises:
          CheckpointError, ConfigError: something in it is not supported; the message names file and option.
        """
        configs = Configs.read(root, scheduler, scheduler_options)
        stages = [configs, *([configs.read_refiner(refiner, scheduler_options)] if refiner else [])]
        scale = configs.vae.scale
        xl = configs.text_encoder_2 is not None
        layers = min(encoder.num_hidden_layers for stage in stages for encoder in stage.encoders.values())
        return Description(
            "StableDiffusionXLPipeline" if xl else "StableDiffusionPipeline",
            samplers.name_of(configs.scheduler),
            scale,
            scale * 2 ** (max(len(stage.unet.block_out_channels) for stage in stages) - 1),
            configs.unet.sample_size * scale,
            max_clip_skip=layers - 1 if xl else layers,
            sampler=tuple(stage.scheduler for stage in stages),
        )

    @classmethod
    def check(
        cls,
        root: Path,
        variant: str | None = None,
        scheduler: str | None = None,
        scheduler_options: str = "{}",
        adapters: Sequence[Adapter] = (),
        refiner: Path | None = None,
    ) -> None:
        """Makes sure that tokenizers, names and shapes of all weights, and LoRA files fit; does not read the weights.

        Raises:
          CheckpointError, ConfigError: as `load`.
        """
        configs = Configs.read(root, scheduler, scheduler_options)
        _, networks = _outline(root, configs, jnp.float32)
        for name in configs.networks:
            checkpoint.check(getattr(networks, name), root / name, variant)
        if refiner:
            refiner_configs = configs.read_refiner(refiner, scheduler_options)
            _, refiner_networks = _outline(refiner, refiner_configs, jnp.float32)
            for name in refiner_configs.networks:
                checkpoint.check(getattr(refiner_networks, name), refiner / name, variant)
        if adapters:
            lora.check(adapters, _lora_targets(configs, networks))

    @classmethod
    def load(
        cls,
        root: Path,
        *,
        scheduler: str,
        scheduler_options: str = "{}",
        prompt_windows: int = 1,
        dtype: jax.typing.DTypeLike,
        place: Place | None = None,
        variant: str | None = None,
        adapters: Sequence[Adapter] = (),
        refiner: Path | None = None,
    ) -> "StableDiffusion":
        """Reads a checkpoint folder onto the devices, with the LoRA files of `adapters` merged into it.

        Args:
          refiner: folder of the checkpoint that ends what this one begins.

        Raises:
          CheckpointError, ConfigError: it does not fit; the message names the file and what is wrong.
        """

        def read(root: Path, configs: Configs, adapters: Sequence[Adapter], refiner: "StableDiffusion | None" = None):
            tokenizers, networks = _outline(root, configs, dtype, prompt_windows)
            changes = lora.changes(adapters, _lora_targets(configs, networks)) if adapters else {}
            for name in configs.networks:
                change = partial(lora.merge, changes, name)
                sharding = partial(place, name) if place else None
                checkpoint.fill(getattr(networks, name), root / name, sharding=sharding, variant=variant, change=change)
            return cls(configs, networks, tokenizers, refiner)

        configs = Configs.read(root, scheduler, scheduler_options)
        refining = read(refiner, configs.read_refiner(refiner, scheduler_options), ()) if refiner else None
        return read(root, configs, adapters, refining)

    @property
    def sampler(self) -> sampling.Sampler:
        """The sampler of each stage."""
        return tuple(stage.configs.scheduler for stage in (self, self.refiner) if stage is not None)

    @classmethod
    def outline(
        cls,
        root: Path,
        *,
        prompt_windows: int = 1,
        dtype: jax.typing.DTypeLike,
        place: Place,
    ) -> "StableDiffusion":
        """A model of a checkpoint's configs alone: its weights are shapes, and it reads every prompt as blank.

        Raises:
          CheckpointError, ConfigError: as `describe`.
        """
        configs = Configs.read(root)
        networks = nnx.eval_shape(lambda: Networks(configs, _one_key(), dtype=dtype, param_dtype=dtype))
        definition, weights = nnx.split(networks)

        def placed(path, weight):
            return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=place(path[0].key, weight.shape))

        weights = jax.tree_util.tree_map_with_path(placed, weights)
        encoders = configs.encoders.values()
        blanks = [np.zeros((prompt_windows, encoder.max_position_embeddings), np.int32) for encoder in encoders]
        tokenizers = [partial(lambda ids, texts: [Tokens(ids, 2, False, 0)] * len(texts), ids) for ids in blanks]
        return cls(configs, nnx.merge(definition, weights), tokenizers)

    def prepare(self, requests: Sequence[ImageRequest]) -> tuple[Inputs, list[Tokens]]:
        """The host's part of a batch: inputs of `generate`, and the tokens of encoder 1 for each prompt.

        Raises:
          ConfigError: the sampler has no schedule for a request.
        """
        guided = [sampling.guided(request, self.sampler) for request in requests]
        tables = [sampling.tables_of(r.num_inference_steps, r.settings, self.sampler) for r in requests]
        inputs, tokens = self._prepare(requests, guided, [stages[0] for stages in tables], [0] * len(requests))
        if self.refiner is not None:
            firsts = [len(begun) for begun, _ in tables]
            refined, _ = self.refiner._prepare(requests, guided, [stages[1] for stages in tables], firsts)
            inputs = inputs._replace(refiner=refined)
        cut = [any(prompt.truncated for prompt in each) for each in zip(*tokens, strict=True)]
        return inputs, [replace(first, truncated=any_cut) for first, any_cut in zip(tokens[0], cut, strict=True)]

    def _prepare(
        self,
        requests: Sequence[ImageRequest],
        guided: Sequence[tuple[int, int]],
        tables: Sequence[Tables],
        first_evaluations: Sequence[int],
    ) -> tuple[Inputs, list[list[Tokens]]]:
        """Inputs of this stage alone, and for each of its encoders the tokens of the prompts."""
        tokens = self._tokenize([(r.prompt, r.settings.prompt_2 or r.prompt) for r in requests])
        negatives = [(r.negative_prompt or "", r.settings.negative_prompt_2) for r in requests]
        negative_tokens = self._tokenize([(negative, negative_2 or negative) for negative, negative_2 in negatives])
        # Both prompts get the same number of windows, as elsewhere; without guidance nothing reads the negative one.
        num_windows = [
            max(text.windows for text in (prompts if evaluations == sampling.NEVER else (*prompts, *negatives)))
            for evaluations, prompts, negatives in zip(
                guided, zip(*tokens, strict=True), zip(*negative_tokens, strict=True), strict=True
            )
        ]
        zeros = self.configs.force_zeros_for_empty_prompt
        sizes, negative_sizes = SIZES[self.configs.requires_aesthetics_score]

        def padded(values: Sequence[np.ndarray]) -> np.ndarray:
            stacked = np.zeros((len(values), MAX_EVALUATIONS, *values[0].shape[1:]), np.float32)
            for row, value in zip(stacked, values, strict=True):
                row[: len(value)] = value
            return stacked

        inputs = Inputs(
            ids=_stack_ids(tokens),
            negative_ids=_stack_ids(negative_tokens),
            num_windows=np.array(num_windows, np.int32),
            clip_skip=np.array([request.settings.clip_skip for request in requests], np.int32),
            no_negative=np.array([zeros and request.negative_prompt is None for request in requests]),
            seeds=np.array([divmod(request.seed, 2**32) for request in requests], np.uint32),
            time_ids=np.array([sizes(request) for request in requests], np.float32),
            negative_time_ids=np.array([negative_sizes(request) for request in requests], np.float32),
            guidance_scale=np.array([request.guidance_scale for request in requests], np.float32),
            guidance_rescale=np.array([request.settings.guidance_rescale for request in requests], np.float32),
            guided=np.array(guided, np.int32),
            first_evaluation=np.array(first_evaluations, np.int32),
            num_evaluations=np.array([len(table) for table in tables], np.int32),
            timesteps=padded([table.timesteps for table in tables]),
            input_scale=padded([table.input_scale for table in tables]),
            updates=padded([table.updates for table in tables]),
            init_noise_sigma=np.array([table.init_noise_sigma for table in tables], np.float32),
        )
        return inputs, tokens

    def _tokenize(self, prompts: Sequence[tuple[str, str]]) -> list[list[Tokens]]:
        """For each encoder, the tokens of its prompt of each pair."""
        # A checkpoint of one encoder has no use for the second of a pair.
        return [
            tokenizer(texts) for tokenizer, texts in zip(self._tokenizers, zip(*prompts, strict=True), strict=False)
        ]


def _outline(
    root: Path, configs: Configs, dtype: jax.typing.DTypeLike, prompt_windows: int = 1
) -> tuple[list[Tokenizer], Networks]:
    """The parts of a checkpoint with abstract weights: shapes and dtypes only."""
    tokenizers = [
        Tokenizer(root / folder, config.vocab_size, config.max_position_embeddings, prompt_windows)
        for folder, config in configs.encoders.items()
    ]
    networks = nnx.eval_shape(lambda: Networks(configs, _one_key(), dtype=dtype, param_dtype=dtype))
    return tokenizers, networks


def _lora_targets(configs: Configs, networks: Networks) -> Targets:
    shapes = {
        f"{name}.{tensor}": shape
        for name in configs.networks
        if name != "vae"
        for tensor, shape in checkpoint.tensor_shapes(getattr(networks, name)).items()
        if tensor.endswith(".weight") and len(shape) > 1
    }
    return Targets(shapes, original.unet_rules(configs.unet.per_level("layers_per_block")))


class _OneKey(nnx.RngStream):
    """Gives the same key whenever one is asked for."""

    def __call__(self) -> jax.Array:
        return self.key[...]


def _one_key() -> nnx.Rngs:
    """Random keys for networks of which only the shapes are wanted.

    nnx counts the keys that it gives, which under `eval_shape` takes time with the square of their number: of the eight
    seconds in which SDXL base's outline was made, seven.
    """
    rngs = nnx.Rngs(0)
    rngs.default = _OneKey(jax.random.key(0), tag="default")  # type: ignore[attr-defined]  # nnx sets it by name
    return rngs


def _key(seed: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(seed, impl="threefry2x32")


def _per_row(values: jax.Array) -> jax.Array:
    """(B,) to (B, 1, 1, 1)."""
    return values[:, None, None, None]


def _time_ids(request: ImageRequest) -> tuple[int, ...]:
    return *request.original_size, *request.crops_coords_top_left, *request.target_size


def _negative_time_ids(request: ImageRequest) -> tuple[int, ...]:
    sizes = request.settings.negative_original_size, request.settings.negative_target_size
    if sizes[0] is None or sizes[1] is None:
        return _time_ids(request)
    return *sizes[0], *request.settings.negative_crops_coords_top_left, *sizes[1]


def _refiner_time_ids(request: ImageRequest) -> tuple[float, ...]:
    return *request.original_size, *request.crops_coords_top_left, request.settings.aesthetic_score


def _refiner_negative_time_ids(request: ImageRequest) -> tuple[float, ...]:
    settings = request.settings
    # The crop of the prompt is not the negative prompt's here, unlike in the first stage.
    size, crop = settings.negative_original_size or request.original_size, settings.negative_crops_coords_top_left
    return *size, *crop, settings.negative_aesthetic_score


# Of the prompt and of the negative prompt, by requires_aesthetics_score.
SIZES = {False: (_time_ids, _negative_time_ids), True: (_refiner_time_ids, _refiner_negative_time_ids)}


def _stack_ids(tokens: Sequence[Sequence[Tokens]]) -> np.ndarray:
    return np.array([[prompt.ids for prompt in encoders] for encoders in zip(*tokens, strict=True)])
