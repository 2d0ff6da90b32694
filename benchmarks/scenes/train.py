"""Trains the embedded demonstration checkpoint: SDXL's architecture, four million parameters, drawn scenes.

    python -m benchmarks.scenes.train --work_dir training --output model_handlers/embedded

Three stages, each on what the one before it made and leaves as it is, as SDXL was made:

1. the VAE, on pictures;
2. both text encoders, to say what a caption means: linear readers of their output have to tell which shape, colour
   and size stands at each place. CLIP's came from captions and photographs; without a stage of their own, encoders
   this small learn what "left of" means long after everything else;
3. the UNet, on latents and the encoders' output: noise prediction on SDXL's schedule, captions dropped one time in
   ten (guidance), loss weighted by bounded SNR.

Weights are averaged (EMA). Every few minutes the state is saved in --work_dir, and the same command goes on from there.

On two cores (AVX-512) with 24 GiB it takes about two hours: a step of stages 1 and 3 takes 0.4 s, of stage 2 0.25 s.
The score to expect is in model_handlers/embedded/README.md: background 100 %, colours and relation 99 %, shapes and
everything at once 95 %.
"""

import argparse
import dataclasses
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

POOL = 40_000  # examples drawn once; each is seen about eight times, every time with other noise
CAPTIONS = 200_000  # for the text encoders, which need no pictures
CAPTION_LENGTH = 32  # tokens that the text encoders are trained on: what follows the longest caption is padding
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
    captions: list[str]


class TextEncoders(nnx.Module):
    """Both text encoders, and the linear readers that only their training needs."""

    def __init__(self, text: TextConfig, rngs: nnx.Rngs):
        self.eos_token_id = text.eos_token_id
        text_2 = dataclasses.replace(text, hidden_act="gelu")
        self.text_encoder = CLIPTextModel(text, projection=False, rngs=rngs, **FLOAT32)
        self.text_encoder_2 = CLIPTextModel(text_2, projection=True, rngs=rngs, **FLOAT32)
        self.state_reader = nnx.Linear(2 * text.hidden_size, sum(scenes.ANSWERS), rngs=rngs)
        self.pooled_reader = nnx.Linear(text.projection_dim, sum(scenes.ANSWERS), rngs=rngs)

    def __call__(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the UNet is told: (N, length, 128) states and (N, 64) pooled, of ids (2, N, length)."""
        states_1, _ = self.text_encoder(ids[0])
        states_2, pooled = self.text_encoder_2(ids[1])
        return jnp.concatenate([states_1[-2], states_2[-2]], axis=-1), pooled


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


def draw_examples(count: int, seed: int) -> Examples:
    rng = random.Random(seed)
    drawn = [scenes.training_example(rng) for _ in range(count)]
    sizes = [(*e.original_size, *e.crops_coords_top_left, *e.target_size) for e in drawn]
    return Examples(
        np.stack([e.image for e in drawn]),
        np.array(sizes, np.float32),
        [e.caption for e in drawn],
    )


def tokenize(root: Path, texts: list[str]) -> np.ndarray:
    """Ids of the two tokenizers, int32 (2, N, 77)."""
    from transformers import CLIPTokenizer

    tokenizers = [CLIPTokenizer.from_pretrained(root / name) for name in ("tokenizer", "tokenizer_2")]
    encoded = [t(texts, padding="max_length", truncation=True, max_length=77).input_ids for t in tokenizers]
    return np.array(encoded, np.int32)


def vae_loss(vae: AutoencoderKL, images: jax.Array, key: jax.Array) -> jax.Array:
    """Absolute and squared error of the reconstruction, with a slight pull of the latents to N(0, 1)."""
    pictures = images.astype(jnp.float32) / 127.5 - 1
    mean, log_variance = vae.encode(pictures)
    latents = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
    error = vae.decode(latents) - pictures
    kl = 0.5 * jnp.mean(mean**2 + jnp.exp(log_variance) - 1 - log_variance)
    return jnp.mean(jnp.abs(error)) + jnp.mean(error**2) + 1e-4 * kl


def answers(reader: nnx.Linear, vectors: jax.Array) -> list[jax.Array]:
    """A reader's logits (N, choices), one array for each question of `scenes.ANSWERS`."""
    return jnp.split(reader(vectors), np.cumsum(scenes.ANSWERS)[:-1], axis=-1)


def reading_loss(model: TextEncoders, batch: dict[str, jax.Array], _key: jax.Array) -> jax.Array:
    """Mean cross-entropy of the scene's description, read off pooled and off the states from the end of the text on."""
    states, pooled = model(batch["ids"])
    after_end = jnp.cumsum(batch["ids"][0] == model.eos_token_id, axis=-1)[..., None] > 0
    total = jnp.float32(0)
    for vectors, reader in (
        (jnp.mean(states, axis=1, where=after_end), model.state_reader),
        (pooled, model.pooled_reader),
    ):
        for logits, answer in zip(answers(reader, vectors), batch["answers"].T, strict=True):
            total += optax.softmax_cross_entropy_with_integer_labels(logits, answer).mean()
    return total / (2 * len(scenes.ANSWERS))


def noise_loss(unet: UNet2DConditionModel, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """Mean squared error of the predicted noise, each example weighted by bounded SNR / SNR."""
    latents = batch["latents"]
    noise_key, time_key = jax.random.split(key)
    alphas = jnp.asarray(samplers.alphas_cumprod(SchedulerConfig.read(SCHEDULER, "SCHEDULER")), jnp.float32)
    timesteps = jax.random.randint(time_key, (len(latents),), 0, len(alphas))
    alpha = alphas[timesteps][:, None, None, None]
    noise = jax.random.normal(noise_key, latents.shape)
    noisy = jnp.sqrt(alpha) * latents + jnp.sqrt(1 - alpha) * noise
    # A dropped caption is the zeros that the pipeline uses for an absent negative prompt.
    states, pooled = (
        jnp.where(jnp.expand_dims(batch["kept"], range(1, x.ndim)), x, 0) for x in (batch["states"], batch["pooled"])
    )
    predicted = unet(noisy, timesteps, unet.condition(states, pooled, batch["time_ids"]))
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


def encode_captions(encoders: TextEncoders, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States float16 (N, 77, 128) and pooled (N, 64) of ids (2, N, 77)."""
    encode = nnx.jit(lambda encoders, ids: encoders(ids))
    chunks = [encode(encoders, ids[:, i : i + 100]) for i in range(0, ids.shape[1], 100)]
    states, pooled = (
        np.concatenate([np.asarray(part, np.float16) for part in parts]) for parts in zip(*chunks, strict=True)
    )
    return states, pooled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", type=Path, required=True, help="state of the training; resumed if present")
    parser.add_argument("--output", type=Path, required=True, help="where the checkpoint is written")
    parser.add_argument("--vae_steps", type=int, default=3000)
    parser.add_argument("--text_steps", type=int, default=1500)
    parser.add_argument("--unet_steps", type=int, default=10_000)
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)

    vocab_size = write_configs(args.output)
    data = draw_examples(POOL, seed=0)
    print(f"{POOL} examples, vocabulary of {vocab_size}", flush=True)

    def rows(step: int, size: int, count: int = POOL) -> np.ndarray:
        return np.random.default_rng(step).integers(0, count, size)

    vae = train(
        "vae",
        AutoencoderKL(VAEConfig.read(VAE, "VAE"), rngs=nnx.Rngs(0), **FLOAT32),
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

    captions = scenes.training_captions(CAPTIONS, seed=1)
    ids = tokenize(args.output, captions)[:, :, :CAPTION_LENGTH]
    described = np.array([scenes.description(text) for text in captions], np.int32)

    def captions_of(step: int) -> dict[str, np.ndarray]:
        i = rows(step, 128, CAPTIONS)
        return {"ids": ids[:, i], "answers": described[i]}

    text = checkpoint.read_json(args.output / "text_encoder/config.json")
    encoders = train(
        "text",
        TextEncoders(TextConfig.read(text, "text"), nnx.Rngs(2)),
        reading_loss,
        captions_of,
        steps=args.text_steps,
        learning_rate=2e-3,
        work_dir=args.work_dir,
    )
    for name in ("text_encoder", "text_encoder_2"):
        checkpoint.save(getattr(encoders, name), args.output / name, np.float16)
    report_reading(encoders, args.output)
    states, pooled = encode_captions(encoders, tokenize(args.output, data.captions))

    def batch_of(step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        i = rows(step, args.batch_size)
        latents = means[i] + deviations[i] * rng.standard_normal(means[i].shape, np.float32)
        return {
            "latents": (latents * scale).astype(np.float32),
            "states": states[i].astype(np.float32),
            "pooled": pooled[i].astype(np.float32),
            "time_ids": data.time_ids[i],
            "kept": rng.random(len(i)) >= CAPTION_DROPOUT,
        }

    unet = train(
        "unet",
        UNet2DConditionModel(UNetConfig.read(UNET, "UNet"), rngs=nnx.Rngs(1), **FLOAT32),
        noise_loss,
        batch_of,
        steps=args.unet_steps,
        learning_rate=1e-3,
        work_dir=args.work_dir,
    )
    checkpoint.save(unet, args.output / "unet", np.float16)


def report_reading(encoders: TextEncoders, root: Path) -> None:
    """Prints the share of held-out captions whose every answer can be read off."""
    captions = scenes.held_out_captions(1000, seed=2)
    described = np.array([scenes.description(text) for text in captions])
    _, pooled = encoders(jnp.asarray(tokenize(root, captions)[:, :, :CAPTION_LENGTH]))
    read = np.stack([np.asarray(logits.argmax(-1)) for logits in answers(encoders.pooled_reader, pooled)], axis=-1)
    print(f"captions wholly understood: {np.mean((read == described).all(-1)):.1%}", flush=True)


if __name__ == "__main__":
    main()
