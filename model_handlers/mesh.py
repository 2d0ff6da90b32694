"""How arrays lie on the chips: a mesh of devices and, for each logical axis, the mesh axis that divides it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Data parallel: every chip holds all weights and works on its own rows of the batch.
RULES = {"batch": "data"}


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("data",))


def sharding(mesh: Mesh, *logical_axes: str | None) -> NamedSharding:
    """Where an array goes whose leading axes have these names; no names: a copy on every chip."""
    return NamedSharding(mesh, PartitionSpec(*(RULES.get(axis) if axis else None for axis in logical_axes)))


def on_tpu() -> bool:
    """Whether what is being traced is for the TPUs of the mesh in force (`jax.set_mesh`)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.device_kind.startswith("TPU")


def by_row(function: Callable) -> Callable:
    """The function on each chip's own rows of its arguments: a kernel, which the compiler cannot divide by itself."""
    rows = PartitionSpec(RULES["batch"])
    return jax.shard_map(function, in_specs=rows, out_specs=rows, check_vma=False)


def row_by_row(function: Callable[..., jax.Array], *rows: Any) -> jax.Array:
    """A function of arrays (B, ...) that treats each row by itself, on one row of every chip at a time."""
    chips = jax.sharding.get_abstract_mesh().shape.get(RULES["batch"], 1)

    def by_turns(x: jax.Array) -> jax.Array:
        return x.reshape(chips, -1, *x.shape[1:]).swapaxes(0, 1)

    made = jax.lax.map(lambda turn: function(*turn), jax.tree.map(by_turns, rows))
    return made.swapaxes(0, 1).reshape(-1, *made.shape[2:])
