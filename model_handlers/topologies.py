"""Kinds of TPU as a table, and their devices for a compiler on a machine that has none."""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.experimental import topologies


class TopologyError(ValueError):
    """There is no such topology, or nothing here that compiles for it."""


@dataclass(frozen=True)
class Chip:
    """One chip of a kind, as its maker describes it.

    Attributes:
      flops: floating-point operations a second in bfloat16, at peak.
      bandwidth: bytes a second between the chip and its memory, at peak.
      memory: bytes of it that a program may have; the compiler keeps a quarter of a GiB for itself.
      source: the page from which the figures are; that of the memory is what libtpu 0.0.42.1 says when it is too small.
    """

    flops: float
    bandwidth: float
    memory: float
    source: str


_GIB = 2**30
CHIPS = {
    "v5e": Chip(197e12, 819e9, 15.75 * _GIB, "https://docs.cloud.google.com/tpu/docs/v5e"),
    "v5p": Chip(459e12, 2765e9, 95.74 * _GIB, "https://docs.cloud.google.com/tpu/docs/v5p"),
    "v6e": Chip(918e12, 1640e9, 31.25 * _GIB, "https://docs.cloud.google.com/tpu/docs/v6e"),
}
_NAME = re.compile(rf"({'|'.join(CHIPS)}):(\d+(?:x\d+){{1,2}})")
# What libtpu asks the machine for, and complains of at length where there is no TPU.
_NO_TPU = {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}
# What JAX tells libtpu where there is a TPU; programs that are compiled elsewhere must be the same.
_LAUNCH_BARRIER = "--xla_tpu_use_enhanced_launch_barrier"


def quiet_libtpu() -> None:
    """Spares a machine that has libtpu and no TPU several lines of complaints whenever JAX looks for one."""
    if os.environ.get("TPU_SKIP_MDS_QUERY"):  # which JAX has set if it found no chip
        for name, value in _NO_TPU.items():
            os.environ.setdefault(name, value)


def chip_of(topology: str) -> Chip | None:
    """The chip of a topology such as "v5e:2x2"; None for "cpu", of which nothing is known.

    Raises:
      TopologyError: it is not one.
    """
    if topology == "cpu":
        return None
    if not (match := _NAME.fullmatch(topology)):
        raise TopologyError(f"{topology}: a topology is cpu, or one of {', '.join(CHIPS)} with its sides, as v5e:2x2")
    return CHIPS[match[1]]


def devices_of(topology: str) -> Sequence[jax.Device]:
    """Devices that programs can be compiled for; those of a TPU are no more than names.

    Raises:
      TopologyError: it is not one, or libtpu, which has the compiler, is not installed.
    """
    if chip_of(topology) is None:
        return jax.devices("cpu")
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError(f"{topology}: the compiler for TPUs is not installed: pip install 'lightmill[tpu]'")
    quiet_libtpu()
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if _LAUNCH_BARRIER not in flags:
        os.environ["LIBTPU_INIT_ARGS"] = f"{flags} {_LAUNCH_BARRIER}=true".strip()
    sides = [int(side) for side in topology.partition(":")[2].split("x")]
    # A host has four chips unless it is said that it has one.
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if math.prod(sides) == 1 else {}
    try:
        return topologies.get_topology_desc(topology, "tpu", **bounds).devices
    except jax.errors.JaxRuntimeError as error:
        raise TopologyError(f"{topology}: libtpu knows no such topology ({str(error).splitlines()[0]})") from error
