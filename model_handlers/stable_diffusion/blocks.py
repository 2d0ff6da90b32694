"""Convolutional blocks that the UNet and the VAE share; names follow diffusers.

Axes: B batch, H and W positions, C channels, E channels of the time embedding.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model_handlers import mesh


def fast_variance(dtype: jax.typing.DTypeLike | None) -> bool:
    """Whether norms may take the variance as E[x^2] - E[x]^2, which reads their input once instead of twice.

    In float32 that cancels, and torch does not do it. Of bfloat16 the inputs are rounded by 2^-9 already: the sums, in
    float32, lose less than that until a mean is a hundred times the spread.
    """
    return dtype == jnp.bfloat16


class GroupNorm(nnx.Module):
    """Normalises each group of channels over all positions; statistics are float32.

    Unlike `nnx.GroupNorm` it sums over positions first and over the channels of a group last: an array with those on an
    axis of their own, ten of them in SDXL, would be laid out anew and padded to a TPU's 128 lanes.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        epsilon: float,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        self.groups, self.epsilon, self.dtype = groups, epsilon, dtype
        self.scale = nnx.Param(jnp.ones(channels, param_dtype))
        self.bias = nnx.Param(jnp.zeros(channels, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Feature map (B, H, W, C) to one of the same shape."""
        y = x.astype(jnp.float32)
        mean = self._over_groups(y.mean((1, 2)))
        if fast_variance(self.dtype):
            variance = jnp.maximum(self._over_groups((y * y).mean((1, 2))) - mean**2, 0)
        else:
            variance = self._over_groups(((y - mean[:, None, None]) ** 2).mean((1, 2)))
        scale = jax.lax.rsqrt(variance + self.epsilon) * self.scale
        return ((y - mean[:, None, None]) * scale[:, None, None] + self.bias).astype(self.dtype or x.dtype)

    def _over_groups(self, means: jax.Array) -> jax.Array:
        """(B, C) to (B, C), each channel's mean replaced by that of its group."""
        grouped = means.reshape(len(means), self.groups, -1).mean(-1, keepdims=True)
        return jnp.broadcast_to(grouped, (*grouped.shape[:2], means.shape[1] // self.groups)).reshape(means.shape)


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


def convolution(x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Any, *args, **kwargs) -> jax.Array:
    """`jax.lax.conv_general_dilated`, on TPU by `convolution_by_lines` where that is faster; for `nnx.Conv`."""
    plain = kernel.shape[:2] == (3, 3) and padding == "SAME" and set(strides) == {1} and mesh.ways("height") == 1
    few = len(x) < mesh.SUBLANES * mesh.ways("batch")
    if mesh.on_tpu() and plain and few and x.size // x.shape[-1] * kernel.shape[-1] <= MAX_SUMS * mesh.ways("batch"):
        return convolution_by_lines(x, kernel)
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, *args, **kwargs)


Conv = partial(nnx.Conv, conv_general_dilated=convolution)
MAX_SUMS = 2**23  # on a chip, in float32: 32 MB, a quarter of a TPU's vector memory


def convolution_by_lines(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves (B, H, W, C) with (3, 3, C, D), zeros around it: a sum over three lines of convolutions along a line.

    XLA for TPU lays the batch along the sublanes of a two-dimensional convolution. Of one picture it makes a batch, by
    cutting it into strips with borders and putting them together again. With the lines of the picture as the batch
    there is nothing to cut: SDXL's resnets take two thirds of the time, by the compiler's own estimate.
    """
    batch, height, width, channels = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)))
    sums = jnp.float32(0)
    for i in range(3):
        lines = padded[:, i : i + height].reshape(batch * height, width, channels)
        sums += jax.lax.conv_general_dilated(
            lines,
            kernel[i],
            (1,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            preferred_element_type=jnp.float32,
        )
    return sums.reshape(batch, height, width, -1).astype(x.dtype)


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
        self.conv1 = Conv(in_channels, channels, (3, 3), rngs=rngs, **dtypes)
        self.time_emb_proj = nnx.Linear(time_channels, channels, rngs=rngs, **dtypes) if time_channels else None
        self.norm2 = GroupNorm(channels, groups, epsilon, rngs=rngs, **dtypes)
        self.conv2 = Conv(channels, channels, (3, 3), rngs=rngs, **dtypes)
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
        self.conv = Conv(channels, channels, (3, 3), rngs=rngs, **dtypes)

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
