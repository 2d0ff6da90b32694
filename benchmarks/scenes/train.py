"""Trains the embedded demonstration checkpoint: SDXL's architecture, four million parameters, drawn scenes.

    python -m benchmarks.scenes.train --work_dir training --output model_handlers/embedded

Stage 1 trains the VAE on pictures, stage 2 the UNet and both text encoders on its latents: noise prediction on
SDXL's schedule, captions dropped one time in ten (guidance), loss weighted by bounded SNR, weights averaged
(EMA). Every few minutes the state is saved in --work_dir, and the same command goes on from there.

On two cores (AVX-512) a step takes 0.4 s in either stage: 20 minutes, then an hour. What 4,750 of the 9,000 steps of
stage 2 came to, and what is still aimed at, is in model_handlers/embedded/README.md.
"""

import argparse
import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.scenes import scenes, tokenizer
from model_handlers import checkpoint, samplers
from model_handlers.program import COMPILER_OPTIONS
from model_handlers.samplers import SchedulerConfig
from model_handlers.stable_diffusion.text import CLIPTextModel, TextConfig
from model_handlers.stable_diffusion.unet import UNet2DConditionModel, UNetConfig
from model_handlers.stable_diffusion.vae import AutoencoderKL, VAEConfig

POOL = 40_000  # examples drawn once; each is seen about ten times, every time with other noise
CAPTION_DROPOUT = 0.1
# Bounds of a picture's weight, which is its signal-to-noise ratio: the upper is min-SNR (Hang et al. 2023), the lower
# is ours. Where the objects stand is decided at noise so strong that the plain loss hardly counts it.
SNR_BOUNDS = (0.1, 5.0)
EMA = 0.999

VAE = {
    "_class_name": "AutoencoderKL",
    "act_fn": "silu",
    "block_out_channels": [16, 32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "in_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "out_channels": 3,
    "sample_size": scenes.SIDE,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
}
TEXT = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "quick_gelu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": tokenizer.MAX_LENGTH,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "projection_dim": 64,
    "vocab_size": 0,
}
UNET = {
    "_class_name": "UNet2DConditionModel",
    "act_fn": "silu",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 32,
    "attention_head_dim": [2, 3],
    "block_out_channels": [64, 96],
    "center_input_sample": False,
    "cross_attention_dim": 128,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": 4,
    "layers_per_block": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "norm_eps": 1e-05,
    "norm_num_groups": 16,
    "out_channels": 4,
    "projection_class_embeddings_input_dim": 6 * 32 + 64,
    "sample_size": scenes.SIDE // 4,
    "transformer_layers_per_block": [1, 1],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
SCHEDULER = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "interpolation_type": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "trained_betas": None,
    "use_karras_sigmas": False,
}
MODEL_INDEX = {
    "_class_name": "StableDiffusionXLPipeline",
    "_diffusers_version": "0.42.1",
    "force_zeros_for_empty_prompt": True,
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}


class TrainState(NamedTuple):
    """All that changes from step to step, and so all that is saved."""

    params: nnx.State
    average: nnx.State
    optimizer: optax.OptState
    step: jax.Array


class Examples(NamedTuple):
    """The training set as arrays; N examples."""

    images: np.ndarray  # uint8 (N, SIDE, SIDE, 3)
    time_ids: np.ndarray  # float32 (N, 6)
    ids: np.ndarray  # int32 (2, N, 77), for the two tokenizers
    nothing: np.ndarray  # int32 (2, 77), the ids of ""


class Denoiser(nnx.Module):
    """The networks that stage 2 trains together."""

    def __init__(self, text: TextConfig, unet: UNetConfig, rngs: nnx.Rngs, **dtypes):
        self.text_encoder = CLIPTextModel(text, projection=False, rngs=rngs, **dtypes)
        self.text_encoder_2 = CLIPTextModel(text_2(text), projection=True, rngs=rngs, **dtypes)
        self.unet = UNet2DConditionModel(unet, rngs=rngs, **dtypes)


def text_2(config: TextConfig) -> TextConfig:
    return TextConfig(**{**vars(config), "hidden_act": "gelu"})


def write_configs(root: Path) -> int:
    """Writes everything of the checkpoint but its weights; returns the vocabulary's size."""
    vocab_size = tokenizer.write_tokenizers(root, scenes.VOCABULARY)
    # As in CLIP, the last two ids begin and end a text.
    text = TEXT | {"vocab_size": vocab_size, "bos_token_id": vocab_size - 2, "eos_token_id": vocab_size - 1}
    configs = {
        "model_index.json": MODEL_INDEX,
        "scheduler/scheduler_config.json": SCHEDULER,
        "text_encoder/config.json": text | {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"},
        "text_encoder_2/config.json": text
        | {"architectures": ["CLIPTextModelWithProjection"], "hidden_act": "gelu", "model_type": "clip_text_model"},
        "unet/config.json": UNET,
        "vae/config.json": VAE,
    }
    for name, config in configs.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return vocab_size


def draw_examples(root: Path, count: int, seed: int) -> Examples:
    from transformers import CLIPTokenizer

    rng = random.Random(seed)
    drawn = [scenes.training_example(rng) for _ in range(count)]
    tokenizers = [CLIPTokenizer.from_pretrained(root / name) for name in ("tokenizer", "tokenizer_2")]

    def ids_of(texts: list[str]) -> np.ndarray:
        encoded = [t(texts, padding="max_length", truncation=True, max_length=77).input_ids for t in tokenizers]
        return np.array(encoded, np.int32)

    sizes = [(*e.original_size, *e.crops_coords_top_left, *e.target_size) for e in drawn]
    return Examples(
        np.stack([e.image for e in drawn]),
        np.array(sizes, np.float32),
        ids_of([e.caption for e in drawn]),
        ids_of([""])[:, 0],
    )


def vae_loss(vae: AutoencoderKL, images: jax.Array, key: jax.Array) -> jax.Array:
    """Absolute and squared error of the reconstruction, with a slight pull of the latents to N(0, 1)."""
    pictures = images.astype(jnp.float32) / 127.5 - 1
    mean, log_variance = vae.encode(pictures)
    latents = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
    error = vae.decode(latents) - pictures
    kl = 0.5 * jnp.mean(mean**2 + jnp.exp(log_variance) - 1 - log_variance)
    return jnp.mean(jnp.abs(error)) + jnp.mean(error**2) + 1e-4 * kl


def noise_loss(model: Denoiser, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """Mean squared error of the predicted noise, each example weighted by bounded SNR / SNR."""
    latents, ids, time_ids = batch["latents"], batch["ids"], batch["time_ids"]
    noise_key, time_key = jax.random.split(key)
    alphas = jnp.asarray(samplers.alphas_cumprod(SchedulerConfig.read(SCHEDULER, "SCHEDULER")), jnp.float32)
    timesteps = jax.random.randint(time_key, (len(latents),), 0, len(alphas))
    alpha = alphas[timesteps][:, None, None, None]
    noise = jax.random.normal(noise_key, latents.shape)
    noisy = jnp.sqrt(alpha) * latents + jnp.sqrt(1 - alpha) * noise
    states_1, _ = model.text_encoder(ids[0])
    states_2, pooled = model.text_encoder_2(ids[1])
    text = jnp.concatenate([states_1[-2], states_2[-2]], axis=-1)
    # A dropped caption is the zeros that the pipeline uses for an absent negative prompt.
    kept = batch["kept"]
    predicted = model.unet(noisy, timesteps, text * kept[:, None, None], pooled * kept[:, None], time_ids)
    snr = alpha / (1 - alpha)
    return jnp.mean(jnp.clip(snr, *SNR_BOUNDS) / snr * (predicted - noise) ** 2)


def make_step(definition, loss, optimizer: optax.GradientTransformation):
    """The jitted training step; `loss` takes (network, batch, key)."""

    @partial(jax.jit, donate_argnums=0, compiler_options=COMPILER_OPTIONS.get(jax.default_backend()))
    def step(state: TrainState, batch, key) -> tuple[TrainState, jax.Array]:
        value, gradients = jax.value_and_grad(lambda p: loss(nnx.merge(definition, p), batch, key))(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        # The average starts short, so that it does not drag the random initial weights along.
        decay = jnp.minimum(EMA, (1 + state.step) / (10 + state.step))
        average = optax.incremental_update(params, state.average, 1 - decay)
        return TrainState(params, average, optimizer_state, state.step + 1), value

    return step


def train(name: str, net: nnx.Module, loss, batches, *, steps: int, learning_rate: float, work_dir: Path) -> Any:
    """Runs or resumes one stage and returns the network with its averaged weights.

    Args:
      name: of the stage and of its file in `work_dir`.
      batches: from a step number to that step's batch, so that resuming sees what an unbroken run would have seen.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, 200, steps, learning_rate / 50)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=1e-3))
    definition, params = nnx.split(net)
    state = TrainState(params, jax.tree.map(jnp.copy, params), optimizer.init(params), jnp.int32(0))
    saved = work_dir / f"{name}.npz"
    if saved.exists():
        with np.load(saved) as file:
            leaves = [file[str(i)] for i in range(len(file.files))]
        state = jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(leaf) for leaf in leaves])
    step, started, losses = make_step(definition, loss, optimizer), time.monotonic(), []
    first = int(state.step)
    for i in range(first, steps):
        state, value = step(state, batches(i), jax.random.key(i))
        losses.append(value)
        if (i + 1) % 250 == 0 or i + 1 == steps:
            mean, per_step = float(np.mean(losses)), (time.monotonic() - started) / (i + 1 - first)
            print(f"{name} step {i + 1} of {steps}: loss {mean:.4f}, {per_step:.3f} s a step", flush=True)
            losses = []
            temporary = saved.with_suffix(".tmp.npz")
            np.savez(temporary, **{str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))})
            temporary.replace(saved)
    return nnx.merge(definition, state.average)


def encode_examples(vae: AutoencoderKL, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of every picture's latents, float16 (N, h, w, 4) each."""
    encode = nnx.jit(lambda vae, images: vae.encode(images.astype(jnp.float32) / 127.5 - 1))
    chunks = [encode(vae, images[i : i + 100]) for i in range(0, len(images), 100)]
    means, log_variances = (
        np.concatenate([np.asarray(part, np.float16) for part in parts]) for parts in zip(*chunks, strict=True)
    )
    return means, np.exp(0.5 * log_variances)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", type=Path, required=True, help="state of the training; resumed if present")
    parser.add_argument("--output", type=Path, required=True, help="where the checkpoint is written")
    parser.add_argument("--vae_steps", type=int, default=3000)
    parser.add_argument("--unet_steps", type=int, default=9000)
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)

    vocab_size = write_configs(args.output)
    data = draw_examples(args.output, POOL, seed=0)
    print(f"{POOL} examples, vocabulary of {vocab_size}", flush=True)

    def rows(step: int, size: int) -> np.ndarray:
        return np.random.default_rng(step).integers(0, POOL, size)

    vae_config = VAEConfig.read(VAE, "VAE")
    vae = train(
        "vae",
        AutoencoderKL(vae_config, rngs=nnx.Rngs(0), **FLOAT32),
        vae_loss,
        lambda step: data.images[rows(step, 12)],
        steps=args.vae_steps,
        learning_rate=1e-3,
        work_dir=args.work_dir,
    )
    means, deviations = encode_examples(vae, data.images)
    # The UNet wants latents of unit variance; the factor that gives it is part of the VAE's config.
    scale = round(float(1 / np.std(means.astype(np.float32))), 5)
    (args.output / "vae/config.json").write_text(json.dumps(VAE | {"scaling_factor": scale}, indent=2) + "\n")
    checkpoint.save(vae, args.output / "vae", np.float16)
    print(f"latents scaled by {scale}", flush=True)

    def batch_of(step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        i = rows(step, args.batch_size)
        latents = means[i] + deviations[i] * rng.standard_normal(means[i].shape, np.float32)
        kept = rng.random(len(i)) >= CAPTION_DROPOUT
        return {
            "latents": (latents * scale).astype(np.float32),
            "ids": data.ids[:, i],
            "time_ids": data.time_ids[i],
            "kept": kept.astype(np.float32),
        }

    text = checkpoint.read_json(args.output / "text_encoder/config.json")
    model = train(
        "unet",
        Denoiser(TextConfig.read(text, "text"), UNetConfig.read(UNET, "UNet"), nnx.Rngs(1), **FLOAT32),
        noise_loss,
        batch_of,
        steps=args.unet_steps,
        learning_rate=1e-3,
        work_dir=args.work_dir,
    )
    for name in ("text_encoder", "text_encoder_2", "unet"):
        checkpoint.save(getattr(model, name), args.output / name, np.float16)


if __name__ == "__main__":
    main()
