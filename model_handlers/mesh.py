"""How arrays lie on the chips: a mesh of devices and, for each logical axis, the mesh axes that divide it."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "context")
RULES = {
    # Each chip, or group of chips along context, works on its own rows of the batch.
    "batch": ("data", "fsdp"),
    # Of latents and feature maps, which a group shares; at the edges of its part a chip asks for its neighbours'.
    "height": ("context",),
    # Positions that attend, which are a feature map's, row by row; those that are attended to are whole on every chip.
    "queries": ("context",),
    # Of a weight, the longest dimension that can be divided; it is gathered where it is used, see `gathered`.
    "weight": ("fsdp",),
}
# Elements of a weight that is not worth a gather: norms and biases.
SMALL = 2**16
# Elements of the largest feature map at a time: in bfloat16 an eighth of a TPU's vector memory, so that what a layer
# reads and writes stays there.
ROOM = 2**23
SUBLANES = 8  # of a TPU's registers, along which its compiler lays a batch


class MeshError(ValueError):
    """The devices cannot be divided so."""


@dataclass(frozen=True)
class MeshShape:
    """Into how many parts each axis of a mesh divides the devices.

    Attributes:
      data: of the batch; None for as many as there are devices for.
      fsdp: of the weights, and of the batch as well.
      context: of the height of each picture.
    """

    data: int | None = None
    fsdp: int = 1
    context: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Reads "data=2,context=2"; raises MeshError."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.partition("=")
            if name not in AXES or name in sizes or not (size.isascii() and size.isdigit() and int(size)):
                raise MeshError(f"{part!r} in {text!r} is not one of {', '.join(AXES)}, once, with a whole number")
            sizes[name] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name in AXES if (size := getattr(self, name)) not in (None, 1)) or "data=1"

    def sizes(self, devices: int) -> dict[str, int]:
        """The parts of each axis for so many devices; raises MeshError if they do not come out even."""
        others = self.fsdp * self.context
        data = self.data or devices // others
        if data * others != devices:
            raise MeshError(f"--mesh={self}: the product must be the number of devices of a worker, {devices}")
        return {"data": data, "fsdp": self.fsdp, "context": self.context}

    def rows(self, devices: int) -> int:
        """How many parts of the batch there are; raises MeshError as `sizes`."""
        sizes = self.sizes(devices)
        return math.prod(sizes[axis] for axis in RULES["batch"])


ALL_ON_DATA = MeshShape()


def make_mesh(devices: Sequence[jax.Device], shape: MeshShape = ALL_ON_DATA) -> Mesh:
    """The devices in the order of the axes, context running fastest; raises MeshError if the shape does not fit."""
    sizes = shape.sizes(len(devices))
    return Mesh(np.array(devices).reshape([sizes[axis] for axis in AXES]), AXES)


def sharding(mesh: Mesh, *logical_axes: str | None) -> NamedSharding:
    """Where an array goes whose leading axes have these names; no names: a copy on every chip."""
    return NamedSharding(mesh, _spec(*logical_axes))


def of_weights(mesh: Mesh, on_host: Collection[str] = ()) -> Callable[[str, Sequence[int]], NamedSharding]:
    """Where a weight goes, by its network and its shape; those of the networks `on_host` stay in the host's memory."""
    size = ways("weight", mesh)

    def place(network: str, shape: Sequence[int]) -> NamedSharding:
        axes: list[str | None] = [None] * len(shape)
        divisible = [axis for axis, length in enumerate(shape) if length % size == 0]
        if size > 1 and divisible and math.prod(shape) >= SMALL:
            axes[max(divisible, key=lambda axis: shape[axis])] = "weight"
        return NamedSharding(mesh, _spec(*axes), memory_kind="pinned_host" if network in on_host else None)

    return place


def gathered(weights: Any) -> Any:
    """A tree of weights, each of them whole on every chip.

    Called where they are used, and not before, so that no chip holds more of them at a time than it must.
    """
    if ways("weight") == 1:
        return weights
    return jax.tree.map(lambda weight: jax.lax.with_sharding_constraint(weight, PartitionSpec()), weights)


def fetched(weights: Any) -> Any:
    """A tree of weights in the memory of the chips: those that were in the host's are there while they are used."""

    def fetch(weight: jax.Array) -> jax.Array:
        on_host = jax.typeof(weight).memory_space == jax.memory.Space.Host
        return jax.device_put(weight, jax.memory.Space.Device) if on_host else weight

    return jax.tree.map(fetch, weights)


def laid(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """The array, divided by the names of its leading axes; where nothing divides pictures it is left as it is.

    The compiler takes it from there: what is computed from the array is divided likewise.
    """
    return jax.lax.with_sharding_constraint(x, _spec(*logical_axes)) if ways("height") > 1 else x


def ways(logical_axis: str, mesh: Mesh | None = None) -> int:
    """Into how many parts an axis is divided, by the mesh in force (`jax.set_mesh`) if none is given."""
    sizes = (mesh or jax.sharding.get_abstract_mesh()).shape
    return math.prod(sizes.get(axis, 1) for axis in RULES[logical_axis])


def on_tpu() -> bool:
    """Whether what is being traced is for the TPUs of the mesh in force (`jax.set_mesh`)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.device_kind.startswith("TPU")


def on_each_chip(function: Callable, *logical_axes: Sequence[str]) -> Callable:
    """The function on each chip's own part of its arguments: a kernel, which the compiler cannot divide by itself.

    For each argument the names of its leading axes; what the function returns lies as the first one.
    """
    specs = tuple(_spec(*axes) for axes in logical_axes)
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)


def in_turns(function: Callable[..., jax.Array], at_once: int, *rows: Any) -> jax.Array:
    """A function of arrays (B, ...) that treats each row by itself, on so many rows of every chip at a time."""
    batch, chips = len(jax.tree.leaves(rows)[0]), ways("batch")
    if at_once * chips == batch:
        return function(*rows)

    def by_turns(x: jax.Array) -> jax.Array:
        parted = x.reshape(chips, -1, at_once, *x.shape[1:]).swapaxes(0, 1)
        return parted.reshape(-1, chips * at_once, *x.shape[1:])

    made = jax.lax.map(lambda turn: function(*turn), jax.tree.map(by_turns, rows))
    return made.reshape(-1, chips, at_once, *made.shape[2:]).swapaxes(0, 1).reshape(batch, *made.shape[2:])


def rows_with_room(batch: int, size: int) -> int:
    """How many rows of every chip are best taken at a time, if the largest array made of one has `size` elements.

    The most that have room and come out even, at least one.
    """
    share = batch // ways("batch")
    return max(n for n in range(1, share + 1) if n == 1 or (share % n == 0 and n * size <= ROOM))


def _spec(*logical_axes: str | None) -> PartitionSpec:
    return PartitionSpec(*(RULES[axis] if axis else None for axis in logical_axes))
