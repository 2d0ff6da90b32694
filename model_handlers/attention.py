"""Multi-head attention and the scanned stack of blocks: what the text encoders, the UNet and the VAE share.

Axes: B batch, T query positions, S key positions, N heads, D channels of one head, C = N * D channels.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


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

    `mask` (B, S) says which keys there are.
    """

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], num_heads, -1)

    keys = None if mask is None else mask[:, None, None]
    mixed = jax.nn.dot_product_attention(split(query), split(key), split(value), mask=keys, is_causal=causal)
    return mixed.reshape(query.shape)


class Stack(nnx.Module):
    """Identical blocks applied one after the other under one scan, so that the program holds the block once.

    Their parameters are stacked along a new first axis. In a checkpoint block i is `<name of the stack>.<i>`.
    """

    def __init__(self, length: int, make_block: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs):
        self.length = length
        self.block = nnx.vmap(make_block, in_axes=0, out_axes=0)(rngs.split(length))

    def __call__(self, x: jax.Array, *context: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the last block's output, and every block's output stacked along a first axis."""
        definition, parameters = nnx.split(self.block)

        def step(x, parameters):
            x = nnx.merge(definition, parameters)(x, *context)
            return x, x

        # Of one block there is nothing to save, and a loop around it would copy its weights.
        return jax.lax.scan(step, x, parameters, unroll=self.length == 1)
