"""Attention as one Pallas kernel for TPU, on queries, keys and values as the projections leave them.

Axes: B batch, T query positions, S key positions, N heads, D channels of one head, C = N * D channels.

A TPU works on 128 lanes. Heads of 64 channels, brought into the usual (B, N, T, D), are padded to 128: twice the
bytes, and a relayout before and after. Here the heads stay side by side in the lanes of (B, T, C). A grid step takes
128 lanes, two heads of 64; for each of them the queries of the other are zeros, and only its own lanes of the output
are kept. The matrix unit does the same work as with padding, and memory sees the true bytes once. All keys are at hand
in a step, so softmax is the plain one: its scores, a block of queries by S, never leave the chip.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
# Scores of one grid step, in float32: 4 MB of the 16 MB that a kernel has by default.
MAX_SCORES = 2**20
MAX_KEYS = 8192  # keys and values of a step, both held twice: one being read, one being fetched
ROWS = 16  # of a tile of bfloat16; a block that is not all of an axis is a multiple
MASKED = -1e30  # a score that softmax turns into 0; infinity would make NaN of a row in which all are


def fits(query: jax.Array, key: jax.Array, num_heads: int, parts: int = 1) -> bool:
    """Whether the kernel takes these shapes, with the queries in so many parts, each on a chip of its own.

    Heads must fill lanes exactly, and a block of scores must fit.
    """
    _, length, channels = query.shape
    head = channels // num_heads
    return LANES % head == 0 and channels % LANES == 0 and bool(_block(length // parts, key.shape[1]))


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    num_heads: int,
    interpret: bool = False,
) -> jax.Array:
    """Scaled dot-product attention, (B, T, C) x (B, S, C) -> (B, T, C); scores and softmax are float32.

    `mask` (B, S) says which keys there are. `interpret` runs the kernel on any device, slowly.
    """
    batch, length, channels = query.shape
    keys = key.shape[1]
    block = _block(length, keys)
    heads = LANES // (channels // num_heads)
    queries = pl.BlockSpec((1, block, LANES), lambda b, lanes, i: (b, i, lanes))
    whole = pl.BlockSpec((1, keys, LANES), lambda b, lanes, i: (b, 0, lanes))
    arguments, specs = [query, key, value], [queries, whole, whole]
    if mask is not None:
        arguments.append(jnp.where(mask, 0.0, MASKED)[:, None])
        specs.append(pl.BlockSpec((1, 1, keys), lambda b, lanes, i: (b, 0, 0)))
    return pl.pallas_call(
        partial(_kernel, heads=heads),
        grid=(batch, channels // LANES, length // block),
        in_specs=specs,
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        # Without it the compiler takes the kernel's time for nothing. The FLOPs are those of the matrix unit, which
        # multiplies all lanes for each head.
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * length * keys * channels * heads,
            transcendentals=batch * length * keys * num_heads,
            bytes_accessed=2 * (query.nbytes + key.nbytes),
        ),
        interpret=interpret,
        name="attention",
    )(*arguments)


def _kernel(query, key, value, *rest, heads: int):
    *bias, output = rest
    block, keys, values = query[0], key[0], value[0]
    head = LANES // heads
    lane = jax.lax.broadcasted_iota(jnp.int32, block.shape, 1)
    mixed = jnp.zeros(block.shape, jnp.float32)
    for i in range(heads):
        mine = lane // head == i
        scores = _dot(jnp.where(mine, block, 0), keys, contract=1) * head**-0.5
        if bias:
            scores += bias[0][0]
        weights = jnp.exp(scores - scores.max(1, keepdims=True))
        total = weights.sum(1, keepdims=True)
        mixed = jnp.where(mine, _dot(weights.astype(values.dtype), values, contract=0) / total, mixed)
    output[0] = mixed.astype(output.dtype)


def _dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """Rows of `a` times `b`, over its axis `contract`, summed in float32."""
    return jax.lax.dot_general(a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)


def _block(length: int, keys: int) -> int:
    """Queries of one grid step, the most whose scores have room; 0 if there is no such block."""
    if keys > MAX_KEYS:
        return 0
    blocks = [length, *range(ROWS, length, ROWS)]
    return max((block for block in blocks if length % block == 0 and block * keys <= MAX_SCORES), default=0)
