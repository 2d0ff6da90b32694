"""Convolutional blocks that the UNet and the VAE share; names follow diffusers.

Axes: B batch, H and W positions, C channels, E channels of the time embedding.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx


class GroupNorm(nnx.GroupNorm):
    """nnx.GroupNorm with the variance taken around the mean, as torch does: E[x^2] - E[x]^2 cancels in float32."""

    def __init__(self, channels: int, groups: int, epsilon: float, *, rngs: nnx.Rngs, **dtypes):
        super().__init__(channels, num_groups=groups, epsilon=epsilon, use_fast_variance=False, rngs=rngs, **dtypes)


def narrow_convolution(x: jax.Array, kernel: jax.Array, *args, **kwargs) -> jax.Array:
    """`jax.lax.conv_general_dilated` to a handful of channels, computed as one to eight; for `nnx.Conv`.

    To fewer than eight XLA on CPU, which calls Eigen's contraction, divides the sum over a position's inputs among its
    threads, and the last bits of a picture would depend on their number: on the machine's cores, and on how many
    virtual devices there are. A TPU pads channels to 128 in any case.
    """
    channels = kernel.shape[-1]
    kernel = jnp.pad(kernel, [(0, 0)] * (kernel.ndim - 1) + [(0, max(0, 8 - channels))])
    return jax.lax.conv_general_dilated(x, kernel, *args, **kwargs)[..., :channels]


NarrowConv = partial(nnx.Conv, conv_general_dilated=narrow_convolution)


class ResnetBlock(nnx.Module):
    """Two normed convolutions around a skip; the time embedding, if any, is added between them."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        groups: int,
        epsilon: float,
        time_channels: int | None = None,
        *,
        rngs: nnx.Rngs,
        **dtypes,
    ):
        self.norm1 = GroupNorm(in_channels, groups, epsilon, rngs=rngs, **dtypes)
        self.conv1 = nnx.Conv(in_channels, channels, (3, 3), rngs=rngs, **dtypes)
        self.time_emb_proj = nnx.Linear(time_channels, channels, rngs=rngs, **dtypes) if time_channels else None
        self.norm2 = GroupNorm(channels, groups, epsilon, rngs=rngs, **dtypes)
        self.conv2 = nnx.Conv(channels, channels, (3, 3), rngs=rngs, **dtypes)
        self.conv_shortcut = (
            nnx.Conv(in_channels, channels, (1, 1), rngs=rngs, **dtypes) if in_channels != channels else None
        )

    def __call__(self, x: jax.Array, time: jax.Array | None = None) -> jax.Array:
        """Feature map (B, H, W, in_channels) and time embedding (B, E) to (B, H, W, channels)."""
        y = self.conv1(jax.nn.silu(self.norm1(x)))
        if self.time_emb_proj is not None and time is not None:
            y = y + self.time_emb_proj(jax.nn.silu(time))[:, None, None, :]
        y = self.conv2(jax.nn.silu(self.norm2(y)))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Downsample(nnx.Module):
    def __init__(self, channels: int, padding: Sequence[tuple[int, int]], *, rngs: nnx.Rngs, **dtypes):
        self.conv = nnx.Conv(channels, channels, (3, 3), strides=2, padding=padding, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x)


class Upsample(nnx.Module):
    def __init__(self, channels: int, *, rngs: nnx.Rngs, **dtypes):
        self.conv = nnx.Conv(channels, channels, (3, 3), rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array, size: tuple[int, int]) -> jax.Array:
        return self.conv(upsample_nearest(x, size))


def upsample_nearest(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """(B, H, W, C) to (B, *size, C), each output from position floor(i * old / new), as torch's "nearest".

    Sizes other than double occur when a level of the UNet has an odd side, which it rounded up going down.
    """
    for axis, new in zip((1, 2), size, strict=True):
        old = x.shape[axis]
        x = jnp.repeat(x, 2, axis) if new == 2 * old else jnp.take(x, jnp.arange(new) * old // new, axis)
    return x
