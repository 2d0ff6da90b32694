"""The attention kernel for TPU, interpreted on the CPU, against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_handlers import tpu_attention
from model_handlers.attention import attention

# Rows, queries, keys, channels, heads: two heads in 128 lanes, one, four; the text's 77 keys; blocks of queries.
SHAPES = [(2, 32, 32, 128, 2), (1, 16, 77, 256, 4), (1, 24, 40, 256, 2), (1, 8, 16, 128, 4), (1, 1056, 1024, 128, 2)]


def drawn(rows, queries, keys, channels):
    rng = np.random.default_rng(0)
    lengths = (queries, keys, keys)
    return [rng.standard_normal((rows, length, channels), np.float32) for length in lengths]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_agrees_with_plain_attention(shape):
    *sizes, num_heads = shape
    query, key, value = drawn(*sizes)
    assert tpu_attention.fits(query, key, num_heads)
    ours = tpu_attention.attention(query, key, value, num_heads=num_heads, interpret=True)
    # Sums of at most 1,024 terms of size 1, in another order.
    np.testing.assert_allclose(ours, attention(query, key, value, num_heads), atol=2e-6)


def test_the_kernel_sees_only_the_keys_that_there_are():
    query, key, value = drawn(2, 16, 40, 128)
    mask = np.arange(40) < np.array([[40], [13]])
    ours = tpu_attention.attention(query, key, value, jnp.asarray(mask), num_heads=2, interpret=True)
    np.testing.assert_allclose(ours, attention(query, key, value, 2, mask=mask), atol=2e-6)
    key[1, 13:] = value[1, 13:] = 1e3
    changed = tpu_attention.attention(query, key, value, jnp.asarray(mask), num_heads=2, interpret=True)
    np.testing.assert_array_equal(ours, changed)


@pytest.mark.parametrize(
    ("queries", "keys", "channels", "num_heads"),
    [(32, 32, 320, 8), (32, 32, 64, 1), (1050, 1024, 128, 2), (32, 9216, 128, 2)],
    ids=["heads of 40", "half of the lanes", "queries that make no blocks", "too many keys"],
)
def test_the_kernel_leaves_other_shapes_to_the_plain_form(queries, keys, channels, num_heads):
    query, key = (jax.ShapeDtypeStruct((1, length, channels), jnp.bfloat16) for length in (queries, keys))
    assert not tpu_attention.fits(query, key, num_heads)
