"""AutoencoderKL: pictures to latents and back.

Source: Rombach et al. 2022; module names and config fields follow diffusers' AutoencoderKL.
Axes: B batch, H and W pixels, h and w latents (H / scale, W / scale), C channels, Z latent channels.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from model_handlers.attention import attention
from model_handlers.config import Config
from model_handlers.stable_diffusion import original
from model_handlers.stable_diffusion.blocks import Downsample, GroupNorm, NarrowConv, ResnetBlock, Upsample
from model_handlers.tensors import Tensor

EPSILON = 1e-6  # of every norm in the VAE; the UNet's resnets have 1e-5


@dataclass(frozen=True)
class VAEConfig(Config):
    """The fields of an AutoencoderKL's config.json that its output depends on."""

    block_out_channels: tuple[int, ...]
    layers_per_block: int = 1
    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 4
    norm_num_groups: int = 32
    scaling_factor: float = 0.18215
    # By channel, of the latents that the VAE makes; some SDXL checkpoints centre theirs.
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True
    down_block_types: tuple[str, ...] = ()
    up_block_types: tuple[str, ...] = ()

    FIXED = {"act_fn": "silu", "shift_factor": None}  # noqa: RUF012

    def check(self) -> None:
        self.require("down_block_types", set(self.down_block_types) <= {"DownEncoderBlock2D"}, "DownEncoderBlock2D")
        self.require("up_block_types", set(self.up_block_types) <= {"UpDecoderBlock2D"}, "UpDecoderBlock2D")
        both = self.latents_mean is not None and self.latents_std is not None
        for name in ("latents_mean", "latents_std"):
            value = getattr(self, name)
            expected = "a number for each channel, together with the other of the two"
            self.require(name, value is None or (both and len(value) == self.latent_channels), expected)

    @property
    def scale(self) -> int:
        """Pixels a side of one latent."""
        return 2 ** (len(self.block_out_channels) - 1)


class Attention(nnx.Module):
    """Single-head self-attention over all positions of a feature map."""

    def __init__(self, channels: int, groups: int, *, rngs: nnx.Rngs, **dtypes):
        self.group_norm = GroupNorm(channels, groups, EPSILON, rngs=rngs, **dtypes)
        self.to_q = nnx.Linear(channels, channels, rngs=rngs, **dtypes)
        self.to_k = nnx.Linear(channels, channels, rngs=rngs, **dtypes)
        self.to_v = nnx.Linear(channels, channels, rngs=rngs, **dtypes)
        self.to_out = nnx.List([nnx.Linear(channels, channels, rngs=rngs, **dtypes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, height, width, channels = x.shape
        y = self.group_norm(x).reshape(batch, height * width, channels)
        y = self.to_out[0](attention(self.to_q(y), self.to_k(y), self.to_v(y), num_heads=1))
        return x + y.reshape(x.shape)


class MidBlock(nnx.Module):
    def __init__(self, channels: int, config: VAEConfig, *, rngs: nnx.Rngs, **dtypes):
        groups = config.norm_num_groups
        self.resnets = nnx.List(
            [ResnetBlock(channels, channels, groups, EPSILON, rngs=rngs, **dtypes) for _ in range(2)]
        )
        add_attention = config.mid_block_add_attention
        self.attentions = nnx.List([Attention(channels, groups, rngs=rngs, **dtypes)] if add_attention else [])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.resnets[0](x)
        for layer in self.attentions:
            x = layer(x)
        return self.resnets[1](x)


class DownBlock(nnx.Module):
    def __init__(self, in_channels: int, channels: int, config: VAEConfig, last: bool, *, rngs: nnx.Rngs, **dtypes):
        widths = [in_channels] + [channels] * (config.layers_per_block - 1)
        self.resnets = nnx.List(
            [ResnetBlock(c, channels, config.norm_num_groups, EPSILON, rngs=rngs, **dtypes) for c in widths]
        )
        # The encoder pads right and below only, unlike the UNet.
        self.downsamplers = nnx.List(
            [] if last else [Downsample(channels, padding=((0, 1), (0, 1)), rngs=rngs, **dtypes)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (*self.resnets, *self.downsamplers):
            x = layer(x)
        return x


class UpBlock(nnx.Module):
    def __init__(self, in_channels: int, channels: int, config: VAEConfig, last: bool, *, rngs: nnx.Rngs, **dtypes):
        widths = [in_channels] + [channels] * config.layers_per_block
        self.resnets = nnx.List(
            [ResnetBlock(c, channels, config.norm_num_groups, EPSILON, rngs=rngs, **dtypes) for c in widths]
        )
        self.upsamplers = nnx.List([] if last else [Upsample(channels, rngs=rngs, **dtypes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.resnets:
            x = layer(x)
        for upsampler in self.upsamplers:
            x = upsampler(x, (x.shape[1] * 2, x.shape[2] * 2))
        return x


class Encoder(nnx.Module):
    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs, **dtypes):
        widths = config.block_out_channels
        self.conv_in = nnx.Conv(config.in_channels, widths[0], (3, 3), rngs=rngs, **dtypes)
        self.down_blocks = nnx.List(
            [
                DownBlock(before, width, config, last=i == len(widths) - 1, rngs=rngs, **dtypes)
                for i, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False))
            ]
        )
        self.mid_block = MidBlock(widths[-1], config, rngs=rngs, **dtypes)
        self.conv_norm_out = GroupNorm(widths[-1], config.norm_num_groups, EPSILON, rngs=rngs, **dtypes)
        self.conv_out = NarrowConv(widths[-1], 2 * config.latent_channels, (3, 3), rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(nnx.Module):
    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs, **dtypes):
        widths = config.block_out_channels[::-1]
        self.conv_in = nnx.Conv(config.latent_channels, widths[0], (3, 3), rngs=rngs, **dtypes)
        self.mid_block = MidBlock(widths[0], config, rngs=rngs, **dtypes)
        self.up_blocks = nnx.List(
            [
                UpBlock(before, width, config, last=i == len(widths) - 1, rngs=rngs, **dtypes)
                for i, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False))
            ]
        )
        self.conv_norm_out = GroupNorm(widths[-1], config.norm_num_groups, EPSILON, rngs=rngs, **dtypes)
        self.conv_out = NarrowConv(widths[-1], config.out_channels, (3, 3), rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))


class AutoencoderKL(nnx.Module):
    """Latents here are unscaled; the caller multiplies by `config.scaling_factor` for the UNet."""

    # diffusers before 0.15 named the attention of the mid blocks after its first author's code.
    RENAMES = tuple(
        (rf"((?:en|de)coder\.mid_block\.attentions\.0)\.{old}\.", rf"\1.{new}.")
        for old, new in {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}.items()
    )

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs, **dtypes):
        self.config = config
        latents = config.latent_channels
        self.encoder = Encoder(config, rngs=rngs, **dtypes)
        self.decoder = Decoder(config, rngs=rngs, **dtypes)
        self.quant_conv = (
            nnx.Conv(2 * latents, 2 * latents, (1, 1), rngs=rngs, **dtypes) if config.use_quant_conv else None
        )
        self.post_quant_conv = (
            nnx.Conv(latents, latents, (1, 1), rngs=rngs, **dtypes) if config.use_post_quant_conv else None
        )

    def from_original(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of a single file that are this network's, by diffusers' names; see `original`."""
        return original.vae(tensors, len(self.config.block_out_channels))

    def encode(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Images (B, H, W, 3) in [-1, 1] to the mean and log variance of their latents, each (B, h, w, Z)."""
        moments = self.encoder(images)
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        mean, log_variance = jnp.split(moments, 2, axis=-1)
        return mean, jnp.clip(log_variance, -30.0, 20.0)

    def map_size(self, latents: jax.Array) -> int:
        """Elements of a feature map of a row's picture, as large as the largest."""
        return math.prod(latents.shape[1:3]) * self.config.scale**2 * self.config.block_out_channels[0]

    def decode(self, latents: jax.Array) -> jax.Array:
        """Latents (B, h, w, Z) to images (B, H, W, 3), about [-1, 1], not clipped."""
        if self.post_quant_conv is not None:
            latents = self.post_quant_conv(latents)
        return self.decoder(latents)
