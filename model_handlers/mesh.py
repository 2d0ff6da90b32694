"""How arrays lie on the chips: a mesh of devices and, for each logical axis, the mesh axis that divides it."""

from collections.abc import Callable, Sequence

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
