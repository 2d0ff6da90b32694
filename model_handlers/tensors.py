"""The tensors of weight files, by name, in torch's layout: safetensors, and msgpack of the old Flax pipelines.

A tensor here is a promise: its shape is known, its numbers are read when they are asked for.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # teaches NumPy, and so safetensors, the name bfloat16
import numpy as np
from flax.serialization import msgpack_restore
from safetensors import SafetensorError, safe_open

# Patterns and what takes their place; None for a tensor that is not needed.
Rules = Sequence[tuple[str, str | None]]


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says which file, what is wrong and what to do."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file; `read` gives its numbers."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def through(self, change: Callable[[np.ndarray], np.ndarray]) -> "Tensor":
        """The tensor after a change of its layout, such as a transposition or a cut."""
        blank = np.broadcast_to(np.float32(0), self.shape)  # of that shape, in the memory of one number
        return Tensor(change(blank).shape, lambda: change(self.read()))


def renamed(name: str, rules: Rules) -> str | None:
    """The name after all rules that apply, in their order; None if one of them says that it is not needed."""
    for pattern, replacement in rules:
        if re.search(pattern, name):
            if replacement is None:
                return None
            name = re.sub(pattern, replacement, name)
    return name


def read_tensors(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of the files of one network; raises CheckpointError if one is damaged."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= _flax_tensors(path) if path.suffix == ".msgpack" else _SafetensorsFile(path).tensors()
    return tensors


class _SafetensorsFile:
    """A file of which tensors are read one by one.

    What was read of a mapped file counts as memory of this process until it is closed: it is opened anew now and then.
    """

    _MAPPED = 2**28  # bytes that are read before

    def __init__(self, path: Path):
        self._path = path
        self._open()

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: Tensor(tuple(self._file.get_slice(name).get_shape()), partial(self._read, name))
            for name in self._file.keys()  # noqa: SIM118  # it is no dict
        }

    def _open(self) -> None:
        try:
            self._file = safe_open(self._path, framework="np")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path}: not a readable safetensors file ({error})") from None
        self._mapped = 0

    def _read(self, name: str) -> np.ndarray:
        if self._mapped > self._MAPPED:
            self._open()
        value = self._file.get_tensor(name)
        self._mapped += value.nbytes
        return value


# Flax numbers the modules of a list behind its name, `resnets_0`; linear_1 and linear_2 are called so in torch too.
NUMBERED = re.compile(r"(?<!linear)_(\d+)(?=\.)")
FLOATS = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


def _flax_tensors(path: Path) -> dict[str, Tensor]:
    """Renames `down_blocks_0/attentions_1/to_out_0/kernel` to `down_blocks.0.attentions.1.to_out.0.weight`.

    The format of `flax.serialization` holds numbers and names only. It has no table of contents: a file is read whole.
    """
    try:
        tree = msgpack_restore(path.read_bytes())
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise CheckpointError(f"{path}: not a readable file of Flax weights ({error})") from None
    tensors = {}
    for keys, value in _leaves(tree):
        *modules, leaf = keys
        if not isinstance(value, np.ndarray) or value.dtype not in FLOATS or leaf not in LEAVES:
            raise CheckpointError(f"{path}: {'.'.join(keys)!r} is no weight of a Flax network")
        tensor = Tensor(value.shape, partial(np.asarray, value))
        name = NUMBERED.sub(r".\1", ".".join([*modules, LEAVES[leaf]]))
        tensors[name] = tensor.through(_kernel_to_torch) if leaf == "kernel" else tensor
    return tensors


def _leaves(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*keys, str(key)))
    else:
        yield keys or ("",), tree


def _kernel_to_torch(kernel: np.ndarray) -> np.ndarray:
    """(in, out) to (out, in), HWIO to OIHW."""
    return kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
