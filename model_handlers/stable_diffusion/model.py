"""Stable Diffusion from token ids to pictures: the method as free functions, and the model that holds its parts.

Sources: Rombach et al. 2022 (versions 1 and 2), Podell et al. 2023 (XL); results follow diffusers'
StableDiffusionPipeline and StableDiffusionXLPipeline.
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
from model_handlers.samplers import MAX_EVALUATIONS, SchedulerConfig
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


class Inputs(NamedTuple):
    """Everything about a batch, as data: no value in it is part of the compiled program.

    Attributes:
      ids, negative_ids: int32 (1 or 2, B, W, T), for each text encoder.
      num_windows: int32 (B,), of the W, how many there are for a row.
      clip_skip: int32 (B,), layers of theirs that the prompt leaves out beyond the usual one.
      no_negative: bool (B,), whether the row has no negative prompt and the checkpoint wants zeros for it.
      seeds: uint32 (B, 2), the high and the low half of a seed.
      time_ids, negative_time_ids: float32 (B, 6), original size, crop and target size in pixels, each (height, width).
      guidance_scale, guidance_rescale: float32 (B,).
      guided: int32 (B, 2), the evaluations between which there is guidance; see `sampling`.
      num_evaluations: int32 (B,). Each row has its own tables, and what lies behind its last evaluation has no effect.
      timesteps, input_scale: float32 (B, E); updates: float32 (B, E, K, K + 2); init_noise_sigma: float32 (B,); see
        `samplers.Tables`.
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
    num_evaluations: Any
    timesteps: Any
    input_scale: Any
    updates: Any
    init_noise_sigma: Any


class Loop(NamedTuple):
    """What any row of a batch needs; the same on every device, so that all go on and leave out together.

    Attributes:
      num_evaluations: int32 ().
      noisy: bool (E,), whether some row gets fresh noise at an evaluation.
      guided: bool (E,), whether some row is guided at an evaluation.
    """

    num_evaluations: Any
    noisy: Any
    guided: Any

    @classmethod
    def of(cls, inputs: Inputs) -> "Loop":
        return cls(
            inputs.num_evaluations.max(),
            inputs.updates[..., samplers.NOISE > 0].any((0, 2, 3)),
            is_guided(inputs, np.arange(MAX_EVALUATIONS)[:, None]).any(1),
        )


def is_guided(inputs: Inputs, evaluation: Any) -> Any:
    """Whether each row is guided at an evaluation; (B,), or (E, B) for evaluations (E, 1)."""
    return (inputs.guided[:, 0] <= evaluation) & (evaluation < inputs.guided[:, 1])


class Networks(nnx.Module):
    """The networks of a checkpoint; the attributes are the names of their folders."""

    def __init__(self, configs: "Configs", rngs: nnx.Rngs, **dtypes):
        self.text_encoder = CLIPTextModel(configs.text_encoder, projection=False, rngs=rngs, **dtypes)
        self.text_encoder_2 = (
            CLIPTextModel(configs.text_encoder_2, projection=True, rngs=rngs, **dtypes)
            if configs.text_encoder_2
            else None
        )
        self.unet = UNet2DConditionModel(configs.unet, rngs=rngs, **dtypes)
        self.vae = AutoencoderKL(configs.vae, rngs=rngs, **dtypes)


class Configs(NamedTuple):
    """The parsed config.json files of a checkpoint, and the flag of its model_index.json that decides pixels.

    Without `text_encoder_2` it is Stable Diffusion 1 or 2, otherwise XL.
    """

    text_encoder: TextConfig
    text_encoder_2: TextConfig | None
    unet: UNetConfig
    vae: VAEConfig
    scheduler: SchedulerConfig
    force_zeros_for_empty_prompt: bool

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
        xl = "XL" in str(index.get("_class_name"))
        own = str(options.get("_class_name")).removeprefix("Flax")
        if not xl and scheduler in (None, own):
            # Early configs lack both or have them wrong, for which diffusers' pipeline makes up.
            options = {**options, "steps_offset": 1, "clip_sample": False, "_use_default_values": None}
        return cls(
            config(TextConfig, "text_encoder/config.json"),
            config(TextConfig, "text_encoder_2/config.json") if xl else None,
            config(UNetConfig, "unet/config.json"),
            config(VAEConfig, "vae/config.json"),
            samplers.read(scheduler or own, options, str(path), json.loads(scheduler_options)),
            xl and bool(force_zeros),
        )

    @property
    def networks(self) -> list[str]:
        """The names of the networks that the checkpoint has."""
        return [name for name in NETWORKS if getattr(self, name) is not None]


def gathered(networks: Networks) -> Networks:
    """The networks with their weights whole on every chip, but for stacks, whose blocks are gathered one by one."""
    definition, *parts = nnx.split(networks, nnx.PathContains("block", exact=True), ...)
    stacks, others = map(mesh.fetched, parts)
    return nnx.merge(definition, stacks, mesh.gathered(others))


def embed_prompts(networks: Networks, ids: jax.Array, clip_skip: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Token ids (1 or 2, B, W, T) to the text (B, W * T, X) and, in XL, the pooled (B, P) of the second encoder.

    XL reads the last but one layer of both encoders, side by side, versions 1 and 2 the last of their one, normed; with
    clip_skip (B,) an earlier one. Each window is read by itself, their states are laid end to end, and the pooled one
    is that of the first window.
    """
    encoders, batch, windows, length = ids.shape
    rows, skip = ids.reshape(encoders, batch * windows, length), jnp.repeat(clip_skip, windows)
    states_1, _ = networks.text_encoder(rows[0])
    if networks.text_encoder_2 is None:
        text = networks.text_encoder.text_model.final_layer_norm(_layer(states_1, skip))
        return text.reshape(batch, windows * length, -1), None
    states_2, pooled = networks.text_encoder_2(rows[1])
    text = jnp.concatenate([_layer(states_1, skip + 1), _layer(states_2, skip + 1)], axis=-1)
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


def fresh_noise(seeds: jax.Array, evaluation: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Noise (B, h, w, 4) that stochastic samplers add, from each row's own seed and the number of the evaluation."""
    return jax.vmap(lambda seed: jax.random.normal(jax.random.fold_in(_key(seed), evaluation), shape))(seeds)


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
            lambda: fresh_noise(inputs.seeds, i, output.shape[1:]),
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
        # One picture of SDXL's size fills a TPU, and the feature maps of several do not fit into its vector memory.
        output = mesh.in_turns(unet, unet.map_size(latents), *rows) if mesh.on_tpu() else unet(*rows)
        return outputs.at[i].set(output.astype(jnp.float32))

    with_prompt, without = jax.lax.fori_loop(0, num_passes, evaluate, jnp.zeros((2, *latents.shape)))
    mixed = without + _per_row(guidance.scale) * (with_prompt - without)
    mixed = rescaled(mixed, with_prompt, _per_row(guidance.rescale))
    return jnp.where(_per_row(guidance.guided), mixed, with_prompt)


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
    images = mesh.in_turns(networks.vae.decode, networks.vae.map_size(latents), latents)
    return images.astype(jnp.float32) / 2 + 0.5


def generate(networks: Networks, inputs: Inputs, loop: Loop, *, height: int, width: int) -> tuple[jax.Array, jax.Array]:
    """The whole program: a batch to uint8 images (B, H, W, 3) and bool (B,), whether a row stayed finite."""
    scale = networks.vae.config.scale
    shape = (height // scale, width // scale, networks.vae.config.latent_channels)
    latents = initial_latents(inputs.seeds, inputs.init_noise_sigma, shape)
    latents = mesh.laid(latents, "batch", "height")
    latents = denoise(networks, latents, condition(gathered(networks), inputs), inputs, loop)
    images = decode(gathered(networks), mesh.laid(latents, "batch", "height"))
    finite = jnp.isfinite(images).all((1, 2, 3)) & jnp.isfinite(latents).all((1, 2, 3))
    return jnp.round(jnp.clip(images, 0, 1) * 255).astype(jnp.uint8), finite


class StableDiffusion:
    """A loaded checkpoint: its networks on the devices, its tokenizers and its sampler on the host."""

    def __init__(self, configs: Configs, networks: Networks, tokenizers: Sequence[Tokenize]):
        self.configs = configs
        self.networks = networks
        self._tokenizers = tokenizers

    @classmethod
    def describe(cls, root: Path, scheduler: str | None = None, scheduler_options: str = "{}") -> Description:
        """Reads the configs only; `scheduler` overrides the checkpoint's own, see `Configs.read`.

        Raises:
          CheckpointError, ConfigError: something in it is not supported; the message names file and option.
        """
        configs = Configs.read(root, scheduler, scheduler_options)
        scale = configs.vae.scale
        xl = configs.text_encoder_2 is not None
        encoders = [encoder for encoder in (configs.text_encoder, configs.text_encoder_2) if encoder]
        layers = min(encoder.num_hidden_layers for encoder in encoders)
        return Description(
            "StableDiffusionXLPipeline" if xl else "StableDiffusionPipeline",
            samplers.name_of(configs.scheduler),
            scale,
            scale * 2 ** (len(configs.unet.block_out_channels) - 1),
            configs.unet.sample_size * scale,
            max_clip_skip=layers - 1 if xl else layers,
            sampler=configs.scheduler,
        )

    @classmethod
    def check(
        cls,
        root: Path,
        variant: str | None = None,
        scheduler: str | None = None,
        scheduler_options: str = "{}",
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """Makes sure that tokenizers, names and shapes of all weights, and LoRA files fit; does not read the weights.

        Raises:
          CheckpointError, ConfigError: as `load`.
        """
        configs, _, networks = _outline(root, jnp.float32, scheduler, scheduler_options)
        for name in configs.networks:
            checkpoint.check(getattr(networks, name), root / name, variant)
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
    ) -> "StableDiffusion":
        """Reads a checkpoint folder onto the devices, with the LoRA files of `adapters` merged into it.

        Raises:
          CheckpointError, ConfigError: it does not fit; the message names the file and what is wrong.
        """
        configs, tokenizers, networks = _outline(root, dtype, scheduler, scheduler_options, prompt_windows)
        changes = lora.changes(adapters, _lora_targets(configs, networks)) if adapters else {}
        for name in configs.networks:
            change = partial(lora.merge, changes, name)
            sharding = partial(place, name) if place else None
            checkpoint.fill(getattr(networks, name), root / name, sharding=sharding, variant=variant, change=change)
        return cls(configs, networks, tokenizers)

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
        encoders = [encoder for encoder in (configs.text_encoder, configs.text_encoder_2) if encoder]
        blanks = [np.zeros((prompt_windows, encoder.max_position_embeddings), np.int32) for encoder in encoders]
        tokenizers = [partial(lambda ids, texts: [Tokens(ids, 2, False, 0)] * len(texts), ids) for ids in blanks]
        return cls(configs, nnx.merge(definition, weights), tokenizers)

    def prepare(self, requests: Sequence[ImageRequest]) -> tuple[Inputs, list[Tokens]]:
        """The host's part of a batch: inputs of `generate`, and the tokens of encoder 1 for each prompt.

        Raises:
          ConfigError: the sampler has no schedule for a request.
        """
        guided = [sampling.guided(request, self.configs.scheduler) for request in requests]
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
        tables = [sampling.tables_of(r.num_inference_steps, r.settings, self.configs.scheduler) for r in requests]

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
            time_ids=np.array([_time_ids(request) for request in requests], np.float32),
            negative_time_ids=np.array([_negative_time_ids(request) for request in requests], np.float32),
            guidance_scale=np.array([request.guidance_scale for request in requests], np.float32),
            guidance_rescale=np.array([request.settings.guidance_rescale for request in requests], np.float32),
            guided=np.array(guided, np.int32),
            num_evaluations=np.array([len(table) for table in tables], np.int32),
            timesteps=padded([table.timesteps for table in tables]),
            input_scale=padded([table.input_scale for table in tables]),
            updates=padded([table.updates for table in tables]),
            init_noise_sigma=np.array([table.init_noise_sigma for table in tables], np.float32),
        )
        cut = [any(prompt.truncated for prompt in each) for each in zip(*tokens, strict=True)]
        return inputs, [replace(first, truncated=any_cut) for first, any_cut in zip(tokens[0], cut, strict=True)]

    def _tokenize(self, prompts: Sequence[tuple[str, str]]) -> list[list[Tokens]]:
        """For each encoder, the tokens of its prompt of each pair."""
        # A checkpoint of one encoder has no use for the second of a pair.
        return [
            tokenizer(texts) for tokenizer, texts in zip(self._tokenizers, zip(*prompts, strict=True), strict=False)
        ]


def _outline(
    root: Path, dtype: jax.typing.DTypeLike, scheduler: str | None, scheduler_options: str, prompt_windows: int = 1
) -> tuple[Configs, list[Tokenizer], Networks]:
    """The parts of a checkpoint with abstract weights: shapes and dtypes only."""
    configs = Configs.read(root, scheduler, scheduler_options)
    tokenizers = [
        Tokenizer(root / folder, config.vocab_size, config.max_position_embeddings, prompt_windows)
        for folder, config in (("tokenizer", configs.text_encoder), ("tokenizer_2", configs.text_encoder_2))
        if config
    ]
    networks = nnx.eval_shape(lambda: Networks(configs, _one_key(), dtype=dtype, param_dtype=dtype))
    return configs, tokenizers, networks


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


def _stack_ids(tokens: Sequence[Sequence[Tokens]]) -> np.ndarray:
    return np.array([[prompt.ids for prompt in encoder] for encoder in tokens])
