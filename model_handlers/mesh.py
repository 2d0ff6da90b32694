"""How arrays lie on the chips: a mesh of devices and, for each logical axis, the mesh axis that divides it."""

from collections.abc import Sequence

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
