"""The forms of convolution, norm and attention that are chosen for a device or a size, against the plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_handlers import attention as attention_module
from model_handlers import mesh
from model_handlers.attention import attention
from model_handlers.stable_diffusion.blocks import GroupNorm, convolution_by_lines


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("height", "width"), [(8, 12), (7, 5), (1, 1)])
def test_a_convolution_by_lines_is_the_convolution(height, width):
    x, kernel = drawn(2, height, width, 16), drawn(3, 3, 16, 24)
    plain = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    # Sums of 144 products of size 1, in another order.
    np.testing.assert_allclose(convolution_by_lines(x, kernel), plain, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_group_norm_is_that_of_the_library(dtype):
    x = (3 * drawn(2, 6, 10, 24) + 1).astype(dtype)
    arguments = {"rngs": nnx.Rngs(0), "dtype": dtype, "param_dtype": dtype}
    ours = GroupNorm(24, 8, 1e-5, **arguments)
    library = nnx.GroupNorm(24, num_groups=8, epsilon=1e-5, use_fast_variance=False, **arguments)
    for norm in (ours, library):
        norm.scale[...], norm.bias[...] = jnp.arange(24.0, dtype=dtype) / 24, jnp.ones(24, dtype)
    # Of bfloat16, one step of its last place; of float32, sums of 180 numbers in another order.
    atol = 2e-2 if dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(ours(x).astype(jnp.float32), library(x).astype(jnp.float32), atol=atol)


def test_attention_in_blocks_of_queries_is_attention(monkeypatch):
    query, key, value = drawn(2, 24, 32), drawn(2, 40, 32), drawn(2, 40, 32)
    whole = attention(query, key, value, 2)
    monkeypatch.setattr(attention_module, "MAX_SCORES", 24 * 40)
    assert attention_module._blocks(24, 40, 2) == 2
    np.testing.assert_allclose(attention(query, key, value, 2), whole, atol=1e-6)


@pytest.mark.parametrize(("size", "turns"), [(1, [6]), (2, [3, 3]), (3, [2, 2, 2]), (100, [1] * 6)])
def test_rows_by_turns_are_the_rows(size, turns, monkeypatch):
    seen = []

    def function(x, y):
        jax.debug.callback(lambda: seen.append(len(x)), ordered=True)
        return x * y["a"][:, None]

    monkeypatch.setattr(mesh, "ROOM", 6)
    rows, others = jnp.arange(12.0).reshape(6, 2), {"a": jnp.arange(6)}
    made = mesh.in_turns(function, mesh.rows_with_room(6, size), rows, others)
    jax.effects_barrier()
    np.testing.assert_array_equal(made, rows * others["a"][:, None])
    assert seen == turns
