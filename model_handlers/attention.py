"""Multi-head attention and the scanned stack of blocks: what the text encoders, the UNet and the VAE share.

Axes: B batch, T query positions, S key positions, N heads, D channels of one head, C = N * D channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model_handlers import mesh, tpu_attention

MAX_SCORES = 2**26  # of one row, in float32: 256 MB


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    num_heads: int,
    *,
    causal: bool = False,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Scaled dot-product attention, (B, T, C) x (B, S, C) -> (B, T, C); scores and softmax are float32.

    `mask` (B, S) says which keys there are. On TPU, heads that fill its lanes go through a kernel that keeps the scores
    on the chip: plain, they are most of what the UNet moves to memory and back.
    """
    if causal:
        return _plain(query, key, value, num_heads, mask, causal)
    query = mesh.laid(query, "batch", "queries")
    key, value = mesh.laid(key, "batch"), mesh.laid(value, "batch")
    chips = mesh.ways("queries")
    if mesh.on_tpu() and tpu_attention.fits(query, key, num_heads, chips):
        kernel = partial(tpu_attention.attention, num_heads=num_heads)
        axes = ("batch", "queries"), ("batch",), ("batch",), ("batch",)
        return mesh.on_each_chip(kernel, *axes)(query, key, value, mask)
    if (blocks := _blocks(query.shape[1] // chips, key.shape[1], num_heads)) == 1:
        return _plain(query, key, value, num_heads, mask)
    # As much memory as one block's scores; a VAE's at 1024 x 1024 pixels would take a gigabyte an image. A block has
    # some queries of every chip.
    rows, _, channels = query.shape
    parts = jnp.moveaxis(query.reshape(rows, chips, blocks, -1, channels), 2, 0).reshape(blocks, rows, -1, channels)
    mixed = jax.lax.map(lambda part: _plain(part, key, value, num_heads, mask), parts)
    return jnp.moveaxis(mixed.reshape(blocks, rows, chips, -1, channels), 0, 2).reshape(query.shape)


def _plain(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    num_heads: int,
    mask: jax.Array | None,
    causal: bool = False,
) -> jax.Array:
    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], num_heads, -1)

    keys = None if mask is None else mask[:, None, None]
    mixed = jax.nn.dot_product_attention(split(query), split(key), split(value), mask=keys, is_causal=causal)
    return mixed.reshape(query.shape)


def _blocks(length: int, keys: int, num_heads: int) -> int:
    """Into how many blocks to part the queries, so that the scores of a row's block stay below `MAX_SCORES`."""
    blocks = 1
    while num_heads * length * keys > blocks * MAX_SCORES and length % (2 * blocks) == 0:
        blocks *= 2
    return blocks


class Stack(nnx.Module):
    """Identical blocks applied one after the other under one scan, so that the program holds the block once.

    Their parameters are stacked along a new first axis. In a checkpoint block i is `<name of the stack>.<i>`.
    """

    def __init__(self, length: int, make_block: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs):
        self.length = length
        self.block = nnx.vmap(make_block, in_axes=0, out_axes=0)(rngs.split(length))

    def scan(self, step: Callable[[Any, Any, Any], tuple[Any, Any]], carry: Any = None, inputs: Any = None) -> Any:
        """`jax.lax.scan` over the blocks: step(block, carry, input) gives the next carry and an output.

        `inputs` have an entry for each block along their first axis. Returns the last carry, and the outputs stacked.
        """
        definition, parameters = nnx.split(self.block)

        def step_of(carry, slices):
            parameters, inputs = slices
            return step(nnx.merge(definition, mesh.gathered(parameters)), carry, inputs)

        # Of one block there is nothing to save, and a loop around it would copy its weights.
        return jax.lax.scan(step_of, carry, (parameters, inputs), unroll=self.length == 1)
