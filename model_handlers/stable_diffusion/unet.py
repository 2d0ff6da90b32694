"""UNet2DConditionModel of Stable Diffusion: latents, timestep and text to the predicted noise.

Source: Rombach et al. 2022, Podell et al. 2023 (SDXL); module names and config fields follow diffusers.
Axes: B batch, h and w latents, C channels, T text tokens, X channels of the text, E of the time embedding.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from model_handlers.attention import Stack, attention
from model_handlers.config import Config
from model_handlers.stable_diffusion import original
from model_handlers.stable_diffusion.blocks import (
    Downsample,
    GroupNorm,
    NarrowConv,
    ResnetBlock,
    Upsample,
    fast_variance,
)
from model_handlers.tensors import Tensor

TRANSFORMER_NORM_EPSILON = 1e-6  # diffusers' Transformer2DModel ignores norm_eps
HAS_ATTENTION = {
    "DownBlock2D": False,
    "CrossAttnDownBlock2D": True,
    "UpBlock2D": False,
    "CrossAttnUpBlock2D": True,
}


@dataclass(frozen=True)
class UNetConfig(Config):
    """The fields of a UNet2DConditionModel's config.json that its output depends on."""

    block_out_channels: tuple[int, ...]
    down_block_types: tuple[str, ...]
    up_block_types: tuple[str, ...]
    cross_attention_dim: int
    # Number of heads, by level: diffusers kept the misnomer so as not to break old configs.
    attention_head_dim: int | tuple[int, ...] = 8
    num_attention_heads: int | tuple[int, ...] | None = None
    transformer_layers_per_block: int | tuple[int, ...] = 1
    layers_per_block: int | tuple[int, ...] = 2
    in_channels: int = 4
    out_channels: int = 4
    sample_size: int = 128  # latents a side in training; the default size of a picture
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    use_linear_projection: bool = False
    addition_embed_type: str | None = None
    addition_time_embed_dim: int = 0
    projection_class_embeddings_input_dim: int = 0

    FIXED = {  # noqa: RUF012
        "act_fn": "silu",
        "attention_type": "default",
        "center_input_sample": False,
        "class_embed_type": None,
        "class_embeddings_concat": False,
        "conv_in_kernel": 3,
        "conv_out_kernel": 3,
        "cross_attention_norm": None,
        "downsample_padding": 1,
        "dual_cross_attention": False,
        "encoder_hid_dim": None,
        "encoder_hid_dim_type": None,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "mid_block_only_cross_attention": None,
        "mid_block_scale_factor": 1,
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "num_class_embeds": None,
        "only_cross_attention": False,
        "resnet_out_scale_factor": 1.0,
        "resnet_skip_time_act": False,
        "resnet_time_scale_shift": "default",
        "reverse_transformer_layers_per_block": None,
        "time_cond_proj_dim": None,
        "time_embedding_act_fn": None,
        "time_embedding_dim": None,
        "time_embedding_type": "positional",
        "timestep_post_act": None,
    }

    def check(self) -> None:
        for name in ("down_block_types", "up_block_types"):
            self.require(name, set(getattr(self, name)) <= set(HAS_ATTENTION), f"of {', '.join(HAS_ATTENTION)}")
            self.require(name, len(getattr(self, name)) == len(self.block_out_channels), "one for each level")
        for name in ("addition_time_embed_dim", "projection_class_embeddings_input_dim"):
            self.require(name, self.addition_embed_type is None or getattr(self, name) > 0, "a positive number")
        self.require("addition_embed_type", self.addition_embed_type in (None, "text_time"), "text_time or none")

    def per_level(self, name: str) -> tuple[int, ...]:
        """The value of a field for each level, from the outermost in; one number stands for all levels."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * len(self.block_out_channels)

    @property
    def heads(self) -> tuple[int, ...]:
        return self.per_level("attention_head_dim" if self.num_attention_heads is None else "num_attention_heads")


class Conditioning(NamedTuple):
    """All that the network takes from text and sizes; the same at every timestep, so computed once.

    Attributes:
      embedding: (B, E), of pooled text and sizes, to be added to the timestep's; None without addition_embed_type.
      keys_values: for each stack of transformer blocks, in the order in which they run, the keys and values of the text
        in all its L blocks, each (B, L, T, C).
      mask: bool (B, T), which of the text's states there are; None for all.
    """

    embedding: jax.Array | None
    keys_values: list[tuple[jax.Array, jax.Array]]
    mask: jax.Array | None = None


class Context(NamedTuple):
    """What a forward pass hands down: the time embedding (B, E), and of the conditioning what is not used up yet."""

    time: jax.Array
    keys_values: Iterator[tuple[jax.Array, jax.Array]]
    mask: jax.Array | None


def sinusoids(positions: jax.Array, channels: int) -> jax.Array:
    """Embeds numbers (...) as cosines, then sines, of geometric frequencies: (..., channels), float32."""
    half = channels // 2
    frequencies = jnp.exp(-jnp.log(10000.0) / half * jnp.arange(half, dtype=jnp.float32))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class TimestepEmbedding(nnx.Module):
    def __init__(self, in_channels: int, channels: int, *, rngs: nnx.Rngs, **dtypes):
        self.linear_1 = nnx.Linear(in_channels, channels, rngs=rngs, **dtypes)
        self.linear_2 = nnx.Linear(channels, channels, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_2(jax.nn.silu(self.linear_1(x)))


class CrossAttention(nnx.Module):
    def __init__(self, channels: int, context_channels: int, num_heads: int, *, rngs: nnx.Rngs, **dtypes):
        self.num_heads = num_heads
        self.to_q = nnx.Linear(channels, channels, use_bias=False, rngs=rngs, **dtypes)
        self.to_k = nnx.Linear(context_channels, channels, use_bias=False, rngs=rngs, **dtypes)
        self.to_v = nnx.Linear(context_channels, channels, use_bias=False, rngs=rngs, **dtypes)
        self.to_out = nnx.List([nnx.Linear(channels, channels, rngs=rngs, **dtypes)])

    def keys_values(self, context: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(B, S, context_channels) to the keys and the values, each (B, S, C)."""
        return self.to_k(context), self.to_v(context)

    def __call__(
        self, x: jax.Array, keys_values: tuple[jax.Array, jax.Array], mask: jax.Array | None = None
    ) -> jax.Array:
        return self.to_out[0](attention(self.to_q(x), *keys_values, self.num_heads, mask=mask))


class GatedProjection(nnx.Module):
    def __init__(self, channels: int, hidden: int, *, rngs: nnx.Rngs, **dtypes):
        self.proj = nnx.Linear(channels, 2 * hidden, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        value, gate = jnp.split(self.proj(x), 2, axis=-1)
        return value * jax.nn.gelu(gate, approximate=False)


class FeedForward(nnx.Module):
    def __init__(self, channels: int, *, rngs: nnx.Rngs, **dtypes):
        hidden = 4 * channels
        # In the middle is the reference's dropout, which does nothing here but takes number 1.
        self.net: nnx.List[Any] = nnx.List(
            [
                GatedProjection(channels, hidden, rngs=rngs, **dtypes),
                nnx.identity,
                nnx.Linear(hidden, channels, rngs=rngs, **dtypes),
            ]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.net:
            x = layer(x)
        return x


class TransformerBlock(nnx.Module):
    """Self-attention, attention to the text, feed-forward, each normed and added to its input."""

    def __init__(self, channels: int, context_channels: int, num_heads: int, *, rngs: nnx.Rngs, **dtypes):
        norm = {"epsilon": 1e-5, "use_fast_variance": fast_variance(dtypes.get("dtype")), "rngs": rngs, **dtypes}
        self.norm1 = nnx.LayerNorm(channels, **norm)
        self.attn1 = CrossAttention(channels, channels, num_heads, rngs=rngs, **dtypes)
        self.norm2 = nnx.LayerNorm(channels, **norm)
        self.attn2 = CrossAttention(channels, context_channels, num_heads, rngs=rngs, **dtypes)
        self.norm3 = nnx.LayerNorm(channels, **norm)
        self.ff = FeedForward(channels, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array, text: tuple[jax.Array, jax.Array], mask: jax.Array | None) -> jax.Array:
        """Positions (B, T, C), and the keys and values of the text for `attn2`."""
        normed = self.norm1(x)
        x = x + self.attn1(normed, self.attn1.keys_values(normed))
        x = x + self.attn2(self.norm2(x), text, mask)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nnx.Module):
    """A stack of transformer blocks over the positions of a feature map, around a skip."""

    def __init__(self, channels: int, num_heads: int, num_layers: int, config: UNetConfig, *, rngs: nnx.Rngs, **dtypes):
        self.norm = GroupNorm(channels, config.norm_num_groups, TRANSFORMER_NORM_EPSILON, rngs=rngs, **dtypes)
        projection = nnx.Linear if config.use_linear_projection else partial(nnx.Conv, kernel_size=(1, 1))
        self.proj_in = projection(channels, channels, rngs=rngs, **dtypes)
        self.proj_out = projection(channels, channels, rngs=rngs, **dtypes)
        context = config.cross_attention_dim
        self.transformer_blocks = Stack(
            num_layers, lambda rngs: TransformerBlock(channels, context, num_heads, rngs=rngs, **dtypes), rngs
        )

    def keys_values(self, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the text (B, T, X) in every block, each (B, L, T, C)."""
        _, (keys, values) = self.transformer_blocks.scan(lambda block, none, _: (none, block.attn2.keys_values(text)))
        return keys.swapaxes(0, 1), values.swapaxes(0, 1)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        batch, height, width, channels = x.shape
        y = self.proj_in(self.norm(x)).reshape(batch, height * width, channels)
        keys, values = (of_text.swapaxes(0, 1) for of_text in next(context.keys_values))
        y, _ = self.transformer_blocks.scan(
            lambda block, y, of_text: (block(y, of_text, context.mask), None), y, (keys, values)
        )
        return x + self.proj_out(y.reshape(x.shape))


class Level(nnx.Module):
    """The resnets of one level on the way down or up, each followed by attention if the level has it."""

    def __init__(
        self,
        in_channels: Sequence[int],
        channels: int,
        attentions: bool,
        level: int,
        config: UNetConfig,
        *,
        rngs,
        **dtypes,
    ):
        self.resnets = nnx.List([_resnet(width, channels, config, rngs=rngs, **dtypes) for width in in_channels])
        self.attentions = nnx.List(
            [_transformer(level, config, rngs=rngs, **dtypes) for _ in in_channels] if attentions else []
        )

    def layer(self, i: int, x: jax.Array, context: Context) -> jax.Array:
        x = self.resnets[i](x, context.time)
        return self.attentions[i](x, context) if len(self.attentions) else x


class DownLevel(Level):
    def __init__(self, level: int, config: UNetConfig, *, rngs: nnx.Rngs, **dtypes):
        widths = config.block_out_channels
        channels, before = widths[level], widths[max(level - 1, 0)]
        num_layers = config.per_level("layers_per_block")[level]
        attentions = HAS_ATTENTION[config.down_block_types[level]]
        in_channels = [before] + [channels] * (num_layers - 1)
        super().__init__(in_channels, channels, attentions, level, config, rngs=rngs, **dtypes)
        last = level == len(widths) - 1
        self.downsamplers = nnx.List(
            [] if last else [Downsample(channels, padding=((1, 1), (1, 1)), rngs=rngs, **dtypes)]
        )

    def __call__(self, x: jax.Array, context: Context) -> Iterable[jax.Array]:
        """Yields the output of every layer: each is the skip of a layer on the way up."""
        for i in range(len(self.resnets)):
            x = self.layer(i, x, context)
            yield x
        for downsampler in self.downsamplers:
            x = downsampler(x)
            yield x


class UpLevel(Level):
    def __init__(self, block: int, config: UNetConfig, *, rngs: nnx.Rngs, **dtypes):
        widths = config.block_out_channels
        level = len(widths) - 1 - block  # up_blocks are numbered from the innermost out
        channels, outer = widths[level], widths[max(level - 1, 0)]
        inner = widths[min(level + 1, len(widths) - 1)]
        num_layers = config.per_level("layers_per_block")[level] + 1
        # A layer takes what came from below and a skip; the last skip is the one that entered the level going down.
        own = [inner] + [channels] * (num_layers - 1)
        skips = [channels] * (num_layers - 1) + [outer]
        in_channels = [a + b for a, b in zip(own, skips, strict=True)]
        attentions = HAS_ATTENTION[config.up_block_types[block]]
        super().__init__(in_channels, channels, attentions, level, config, rngs=rngs, **dtypes)
        self.upsamplers = nnx.List([Upsample(channels, rngs=rngs, **dtypes)] if level else [])

    def __call__(self, x: jax.Array, skips: list[jax.Array], context: Context) -> jax.Array:
        """Consumes its skips from the end of the list."""
        for i in range(len(self.resnets)):
            x = self.layer(i, jnp.concatenate([x, skips.pop()], axis=-1), context)
        for upsampler in self.upsamplers:
            _, height, width, _ = skips[-1].shape
            x = upsampler(x, (height, width))
        return x


class MidBlock(nnx.Module):
    def __init__(self, config: UNetConfig, *, rngs: nnx.Rngs, **dtypes):
        level = len(config.block_out_channels) - 1
        channels = config.block_out_channels[level]
        self.resnets = nnx.List([_resnet(channels, channels, config, rngs=rngs, **dtypes) for _ in range(2)])
        self.attentions = nnx.List([_transformer(level, config, rngs=rngs, **dtypes)])

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        x = self.attentions[0](self.resnets[0](x, context.time), context)
        return self.resnets[1](x, context.time)


class UNet2DConditionModel(nnx.Module):
    """Predicts what the sampler needs (noise or velocity) from noisy latents."""

    def __init__(self, config: UNetConfig, *, rngs: nnx.Rngs, **dtypes):
        self.config = config
        widths = config.block_out_channels
        self.conv_in = nnx.Conv(config.in_channels, widths[0], (3, 3), rngs=rngs, **dtypes)
        self.time_embedding = TimestepEmbedding(widths[0], _time_channels(config), rngs=rngs, **dtypes)
        self.add_embedding = (
            TimestepEmbedding(config.projection_class_embeddings_input_dim, _time_channels(config), rngs=rngs, **dtypes)
            if config.addition_embed_type
            else None
        )
        levels = range(len(widths))
        self.down_blocks = nnx.List([DownLevel(i, config, rngs=rngs, **dtypes) for i in levels])
        self.mid_block = MidBlock(config, rngs=rngs, **dtypes)
        self.up_blocks = nnx.List([UpLevel(i, config, rngs=rngs, **dtypes) for i in levels])
        self.conv_norm_out = GroupNorm(widths[0], config.norm_num_groups, config.norm_eps, rngs=rngs, **dtypes)
        self.conv_out = NarrowConv(widths[0], config.out_channels, (3, 3), rngs=rngs, **dtypes)

    @property
    def transformers(self) -> list[SpatialTransformer]:
        """The stacks of transformer blocks, in the order in which they run."""
        blocks: list[Level | MidBlock] = [*self.down_blocks, self.mid_block, *self.up_blocks]
        return [stack for block in blocks for stack in block.attentions]

    def map_size(self, latents: jax.Array) -> int:
        """Elements of the largest feature map of a row."""
        return math.prod(latents.shape[1:3]) * self.config.block_out_channels[0]

    def condition(
        self,
        text: jax.Array,
        pooled: jax.Array | None = None,
        time_ids: jax.Array | None = None,
        text_mask: jax.Array | None = None,
    ) -> Conditioning:
        """Computes once what every evaluation of the network needs of its text.

        Args:
          text: (B, T, X), the text encoders' hidden states.
          pooled: (B, P), the pooled text embedding; only with addition_embed_type "text_time".
          time_ids: (B, 6), original size, crop and target size in pixels, each (height, width); likewise.
          text_mask: bool (B, T), which of the hidden states are attended to; None for all.
        """
        embedding = None
        if self.add_embedding is not None:
            if pooled is None or time_ids is None:
                raise ValueError("this UNet needs the pooled text and the time ids")
            sizes = sinusoids(time_ids, self.config.addition_time_embed_dim)
            sizes = sizes.reshape(len(time_ids), -1).astype(pooled.dtype)
            embedding = self.add_embedding(jnp.concatenate([pooled, sizes], axis=-1))
        return Conditioning(embedding, [stack.keys_values(text) for stack in self.transformers], text_mask)

    def __call__(self, latents: jax.Array, timesteps: jax.Array, conditioning: Conditioning) -> jax.Array:
        """One evaluation of the network: (B, h, w, in_channels) to (B, h, w, out_channels).

        `timesteps` (B,) are in [0, 1000) and may be fractional.
        """
        time = self.time_embedding(sinusoids(timesteps, self.config.block_out_channels[0]))
        if conditioning.embedding is not None:
            time = time + conditioning.embedding
        context = Context(time, iter(conditioning.keys_values), conditioning.mask)
        x = self.conv_in(latents)
        skips = [x]
        for down in self.down_blocks:
            skips.extend(down(skips[-1], context))
        x = self.mid_block(skips[-1], context)
        for up in self.up_blocks:
            x = up(x, skips, context)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))

    def from_original(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of a single file that are this network's, by diffusers' names; see `original`."""
        return original.unet(tensors, self.config.per_level("layers_per_block"))


def _time_channels(config: UNetConfig) -> int:
    return 4 * config.block_out_channels[0]


def _resnet(in_channels: int, channels: int, config: UNetConfig, *, rngs: nnx.Rngs, **dtypes) -> ResnetBlock:
    time_channels = _time_channels(config)
    return ResnetBlock(
        in_channels, channels, config.norm_num_groups, config.norm_eps, time_channels, rngs=rngs, **dtypes
    )


def _transformer(level: int, config: UNetConfig, *, rngs: nnx.Rngs, **dtypes) -> SpatialTransformer:
    depth = config.per_level("transformer_layers_per_block")[level]
    return SpatialTransformer(config.block_out_channels[level], config.heads[level], depth, config, rngs=rngs, **dtypes)
