"""Reading and writing checkpoints in diffusers' layout: a folder for each network, safetensors and JSON, no pickles.

A checkpoint comes from strangers: nothing in it is executed, names in it never leave its folder, and every
tensor is accounted for. Weights are streamed, one tensor at a time, from the memory-mapped file to the device.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from model_handlers.attention import Stack
from model_handlers.sampling import Sampler
from model_handlers.tensors import CheckpointError, Tensor, read_tensors, renamed

# In the root of a checkpoint, instead of weights in its folders: all of them in the layout of the original releases.
SINGLE_FILE = "single_file.safetensors"
WEIGHTS = ("diffusion_pytorch_model", "model")  # diffusers' and transformers' names for a network's weights
FLAX_WEIGHTS = ("diffusion_flax_model.msgpack", "flax_model.msgpack")  # of the Flax pipelines, which are no more
TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# Parts that many checkpoints name although they change no pixel: they prepare or judge pictures that are given.
WITHOUT_EFFECT = ("feature_extractor", "image_processor", "safety_checker")


@dataclass(frozen=True)
class Description:
    """What a run needs to know of a checkpoint before any weight is read.

    Attributes:
      family: the pipeline class that model_index.json names.
      scheduler: the sampler to use, the checkpoint's own or the one asked for.
      size_multiple: width and height must be multiples of it, in pixels.
      coarsest: side in pixels of one position where the network's feature maps are smallest.
      side: width and height of the pictures that it was trained on, in pixels.
      max_clip_skip: as in the recipe.
      sampler: the scheduler with its options, and that of the refiner, if there is one.
    """

    family: str
    scheduler: str
    size_multiple: int
    coarsest: int
    side: int
    max_clip_skip: int
    sampler: Sampler


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object of the checkpoint; raises CheckpointError if it is missing or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint is a folder in diffusers' layout") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def components(root: Path) -> list[str]:
    """The folders that model_index.json names and that hold something: networks, tokenizers, scheduler."""
    index = read_json(root / "model_index.json")
    named = [name for name, value in index.items() if isinstance(value, list) and any(value)]
    if outside := [name for name in named if not re.fullmatch(r"\w+", name)]:
        raise CheckpointError(f"{root / 'model_index.json'}: {outside[0]!r} is not a folder name")
    return sorted(set(named) - set(WITHOUT_EFFECT))


def identity(root: Path, variant: str | None = None) -> str:
    """sha256 over the names and contents of all files that decide pixels; the same wherever the checkpoint lies.

    What was found for a file of weights is remembered in the cache: to read a real checkpoint takes a minute.
    """
    total = hashlib.sha256()
    for path in [root / "model_index.json", *_deciding_files(root, variant)]:
        try:
            content = digest_of(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file, but model_index.json names {path.parent.name}") from None
        total.update(f"{content}  {path.relative_to(root).as_posix()}\n".encode())
    return total.hexdigest()


def cache_folder() -> Path:
    """Where downloads and digests are kept: LIGHTMILL_CACHE or ~/.cache/lightmill."""
    return Path(os.environ.get("LIGHTMILL_CACHE", Path.home() / ".cache/lightmill"))


def fill(
    net: nnx.Module,
    folder: Path,
    *,
    sharding: Callable[[Sequence[int]], jax.sharding.Sharding] | None = None,
    variant: str | None = None,
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, value: value,
) -> None:
    """Reads the weights of an abstract network, without ever holding them twice.

    Args:
      net: made under `nnx.eval_shape`, so no random weights ever existed; its parameters' dtypes are kept.
      folder: the network's folder in the checkpoint.
      sharding: where a weight of a shape goes; None is the default device.
      variant: such as "fp16", for the files of that infix; None prefers the files without one.
      change: what becomes of a tensor, given its name, in torch's layout; of any float type.

    Raises:
      CheckpointError: naming together the missing, unused and misshapen tensors, or what is wrong with a file.
    """
    slots, tensors, stored = _match(net, folder, variant)
    for slot in slots:
        # One parameter and one tensor are all that the host ever holds.
        values = np.empty((len(slot.names), *slot.torch_shape), slot.parameter.dtype)
        for value, name in zip(values, slot.names, strict=True):
            value[...] = change(name, tensors[stored[name]].read())
        values = slot.to_flax(values)
        values = values if slot.stacked else values[0]
        placed = jax.device_put(values, sharding(values.shape) if sharding else None)
        # Waits, or parameters that are read faster than they reach the device would pile up.
        slot.parameter.set_value(jax.block_until_ready(placed))


def check(net: nnx.Module, folder: Path, variant: str | None = None) -> None:
    """Makes sure that `fill` will find every tensor with its shape; reads no weights; errors as `fill`."""
    _match(net, folder, variant)


def tensor_shapes(net: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes, in torch's layout, of the tensors that `fill` looks for; the network may be abstract."""
    return {name: slot.torch_shape for slot in _slots(net) for name in slot.names}


def save(net: nnx.Module, folder: Path, dtype: np.typing.DTypeLike) -> None:
    """Writes a network's weights under the names and layouts of the reference, the inverse of `fill`."""
    tensors = {}
    for slot in _slots(net):
        value = np.asarray(slot.parameter.get_value())
        for name, part in zip(slot.names, value if slot.stacked else [value], strict=True):
            tensors[name] = np.ascontiguousarray(slot.to_torch(part)).astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    stem = WEIGHTS[1] if folder.name.startswith("text_encoder") else WEIGHTS[0]
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The files of a network's weights: safetensors, one or the shards that an index lists, else one of Flax.

    Raises:
      CheckpointError: there are none; if there are pickles instead, says how to convert them.
    """
    infixes = [variant] if variant else [None, "fp16"]
    for infix in infixes:
        for stem in WEIGHTS:
            single = folder / (f"{stem}.{infix}.safetensors" if infix else f"{stem}.safetensors")
            if single.is_file():
                return [single]
            for index in (f"{single.name}.index.json", f"{stem}.safetensors.index.{infix}.json"):
                if (folder / index).is_file():
                    return _shards(folder / index)
    if not variant and (flax := [folder / name for name in FLAX_WEIGHTS if (folder / name).is_file()]):
        return flax
    if pickles := sorted(p.name for pattern in ("*.bin", "*.ckpt", "*.pt", "*.pth") for p in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder / pickles[0]}: a pickle can run code, so it is not read; convert it in a place you trust: "
            "diffusers' pipeline.save_pretrained(DIR, safe_serialization=True)"
        )
    wanted = f"{'|'.join(WEIGHTS)}{f'.{variant}' if variant else ''}.safetensors"
    raise CheckpointError(f"{folder}: no weights ({wanted}, or an index of shards)")


@dataclass(frozen=True)
class _Slot:
    """One parameter of a network and the checkpoint tensors that fill it: one, or one for each block of a stack."""

    names: tuple[str, ...]
    stacked: bool
    axes: tuple[int, ...]  # a torch tensor transposed by these axes has flax's layout
    parameter: nnx.Param

    @property
    def torch_shape(self) -> tuple[int, ...]:
        shape = self.parameter.shape[1:] if self.stacked else self.parameter.shape
        return tuple(shape[axis] for axis in np.argsort(self.axes))

    def to_flax(self, values: np.ndarray) -> np.ndarray:
        """The slot's tensors, along the first axis, from torch's layout to flax's; a view, which the device copies."""
        return values.transpose(0, *(axis + 1 for axis in self.axes))

    def to_torch(self, value: np.ndarray) -> np.ndarray:
        return value.transpose(np.argsort(self.axes))


def _slots(net: nnx.Module) -> Iterator[_Slot]:
    """Walks a network's parameters; attribute names are the checkpoint's, so the path is the name."""
    for path, _ in nnx.to_flat_state(nnx.state(net, nnx.Param)):
        names: list[str] = [""]
        node: Any = net
        stacked = False
        for part in path[:-1]:
            if isinstance(node, Stack):
                names, node, stacked = [f"{name}{i}." for name in names for i in range(node.length)], node.block, True
            else:
                names = [f"{name}{part}." for name in names]
                node = getattr(node, part) if isinstance(part, str) else node[part]
        parameter = getattr(node, str(path[-1]))
        rank = len(parameter.shape) - stacked
        axes = tuple(range(rank))
        if path[-1] == "kernel":  # linear: (out, in) in torch; convolution: OIHW in torch, HWIO in flax
            axes = (1, 0) if rank == 2 else (2, 3, 1, 0)
        leaf = "bias" if path[-1] == "bias" else "weight"  # flax says kernel, scale or embedding for weight
        yield _Slot(tuple(name + leaf for name in names), stacked, axes, parameter)


def _match(net: nnx.Module, folder: Path, variant: str | None) -> tuple[list[_Slot], dict[str, Tensor], dict[str, str]]:
    """The network's slots, the stored tensors, and the stored name for each name that the network uses."""
    slots = list(_slots(net))
    where, tensors = _stored(net, folder, variant)
    renames = getattr(type(net), "RENAMES", ())
    named = [(new, old) for old in tensors if (new := renamed(old, renames))]
    _check_names(where, slots, named, tensors)
    return slots, tensors, dict(named)


def _stored(net: Any, folder: Path, variant: str | None) -> tuple[Path, dict[str, Tensor]]:
    """The tensors of a network, and the file or folder where they are."""
    if not (single := folder.parent / SINGLE_FILE).is_file():
        return folder, read_tensors(weight_files(folder, variant))
    file = single.readlink() if single.is_symlink() else single  # the name that the user knows
    if converted := net.from_original(read_tensors([file])):
        return file, converted
    raise CheckpointError(f"{file}: holds no {folder.name} in the original layout; is --config of the same family?")


def _check_names(where: Path, slots: list[_Slot], named: list[tuple[str, str]], tensors: Mapping[str, Tensor]) -> None:
    wanted = {name: slot for slot in slots for name in slot.names}
    stored = dict(named)
    missing = sorted(wanted.keys() - stored.keys())
    # Of two tensors for one name, an old spelling and today's, neither is known to be the right one.
    unused = sorted(old for new, old in named if new not in wanted or stored[new] != old)
    misshapen = sorted(
        f"{name} {tensors[stored[name]].shape}, not {slot.torch_shape}"
        for name, slot in wanted.items()
        if name in stored and tensors[stored[name]].shape != slot.torch_shape
    )
    problems = {"missing": missing, "unused": unused, "of another shape than config.json says": misshapen}
    if found := [f"{len(names)} {what}: {_listed(names)}" for what, names in problems.items() if names]:
        raise CheckpointError(f"{where}: the tensors do not fit the network; {'; '.join(found)}")


def _listed(names: list[str], limit: int = 20) -> str:
    """A checkpoint of another family has thousands, of which the first few say so."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    paths = []
    for name in sorted(set(map(str, weight_map.values()))):
        path = index.parent / name
        if Path(name).name != name or path.suffix != ".safetensors":
            raise CheckpointError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, but {index.name} lists it")
        paths.append(path)
    return paths


# A file that was written a moment ago may be written again within the resolution of its times.
SETTLED = 2.0  # seconds


def digest_of(path: Path) -> str:
    """sha256 of a file; of weights it is remembered for as long as the file stays as it is."""
    status = path.stat()
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    known = cache_folder() / "digests" / hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    if known.is_file():
        return known.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    settled = time.time() - max(status.st_mtime, status.st_ctime) > SETTLED
    if settled and path.suffix in (".safetensors", ".msgpack"):
        with contextlib.suppress(OSError):  # without the note, the next run reads the file once more
            known.parent.mkdir(parents=True, exist_ok=True)
            partial = known.with_name(f"{known.name}.{os.getpid()}.part")
            partial.write_text(digest)
            partial.replace(known)
    return digest


def _deciding_files(root: Path, variant: str | None) -> Iterator[Path]:
    single = [root / SINGLE_FILE] if (root / SINGLE_FILE).is_file() else []
    yield from single
    for component in components(root):
        folder = root / component
        if component.startswith("tokenizer"):
            yield from (folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
        elif component.startswith("scheduler"):
            yield folder / "scheduler_config.json"
        else:
            yield folder / "config.json"
            yield from () if single else weight_files(folder, variant)
