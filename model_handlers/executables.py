"""Compiled programs as files: made by `lightmill plan --save`, loaded by workers in seconds instead of compiled.

A file is what the compiler's runtime serialised, with a description in JSON beside it. No pickle is written or read, as
JAX's own way of keeping executables would. What is loaded is still code: whoever can write to the folder can run it on
the workers, so the folder is trusted as the workers' image is.

An executable fits only the very program, versions and devices that it was made for. All of that is its key; one whose
key differs in anything is not loaded.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import zstandard
from jax.experimental.compilation_cache import compilation_cache
from jaxlib._jax import DeviceList

from model_handlers import fetch
from model_handlers.tensors import CheckpointError

Key = Mapping[str, str]


class NoExecutableError(Exception):
    """There is none that fits; the message says in what the nearest one differs."""


def key_of(lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh, options: Mapping[str, str | bool] | None) -> Key:
    """Everything that decides whether an executable is right here, by name."""
    device = mesh.devices.flat[0]
    key = {
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "device_kind": device.device_kind,
        "topology": _topology(mesh.devices.flatten().tolist()),
        "compiler_options": json.dumps(options, sort_keys=True),
        "XLA_FLAGS": _flags("XLA_FLAGS"),
    }
    if device.platform == "tpu":
        key |= {"libtpu": importlib.metadata.version("libtpu"), "LIBTPU_INIT_ARGS": _flags("LIBTPU_INIT_ARGS")}
    if device.platform == "cpu":
        key["cpu"] = _instructions()
    return key


def compile_anew(lowered: jax.stages.Lowered, options: dict[str, str | bool] | None) -> jax.stages.Compiled:
    """Compiles what is to be saved, past JAX's compilation cache.

    What is read from there for a CPU lacks functions once it is serialised again (jaxlib 0.10.2).
    """
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]  # named when JAX starts
    try:
        _use_cache(False)
        return lowered.compile(options)
    finally:
        _use_cache(enabled)


def _use_cache(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # else the answer of the first compilation holds


def pack(compiled: jax.stages.Compiled, key: Key, about: str) -> dict[str, bytes]:
    """The files of an executable by their names, in the order in which they are to be written.

    `about` describes the program to people.
    """
    packed = zstandard.compress(compiled.runtime_executable().serialize())  # type: ignore[union-attr]  # it is compiled
    described = {"about": about, "key": key, "sha256": hashlib.sha256(packed).hexdigest()}
    name = _name(key)
    return {f"{name}.zst": packed, f"{name}.json": json.dumps(described, indent=2, sort_keys=True).encode()}


def load(folder: str, key: Key, devices: Sequence[jax.Device], out: Sequence[tuple[Any, jax.sharding.Sharding]]):
    """Loads the executable of a key onto the devices, as a function of the program's arguments.

    Args:
      folder: local or gs://.
      devices: of the mesh, in its order.
      out: shape and sharding of each output.

    Raises:
      NoExecutableError: none in the folder is for this key, or its files are damaged.
    """
    name = _name(key)
    try:
        names = fetch.list_files(folder)
        if f"{name}.json" not in names:
            raise NoExecutableError(_nearest(folder, [name for name in names if name.endswith(".json")], key))
        described, packed = _description(folder, f"{name}.json"), fetch.read_file(folder, f"{name}.zst")
    except CheckpointError as error:
        raise NoExecutableError(str(error)) from error
    if described.get("key") != key or described.get("sha256") != hashlib.sha256(packed).hexdigest():
        raise NoExecutableError(f"{folder}/{name}.zst: not what {name}.json says")
    try:
        payload = zstandard.decompress(packed)
        loaded = devices[0].client.deserialize_executable(payload, executable_devices=DeviceList(tuple(devices)))
    except (jax.errors.JaxRuntimeError, zstandard.ZstdError) as error:
        raise NoExecutableError(f"{folder}/{name}.zst: cannot be loaded ({str(error).splitlines()[0]})") from error
    return _callable(loaded, out)


def _callable(loaded: Any, out: Sequence[tuple[Any, jax.sharding.Sharding]]) -> Callable[..., tuple[jax.Array, ...]]:
    """A loaded executable as a function of arrays that lie where it wants them."""

    def call(*arguments: Any) -> tuple[jax.Array, ...]:
        parts = loaded.execute_sharded(jax.tree.leaves(arguments)).disassemble_into_single_device_arrays()
        return tuple(
            jax.make_array_from_single_device_arrays(shape, sharding, arrays)
            for (shape, sharding), arrays in zip(out, parts, strict=True)
        )

    return call


def _name(key: Key) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _description(folder: str, name: str) -> dict[str, Any]:
    try:
        described = json.loads(fetch.read_file(folder, name))
    except (ValueError, RecursionError) as error:
        raise NoExecutableError(f"{folder}/{name}: not valid JSON ({error})") from error
    if not isinstance(described, dict) or not isinstance(described.get("key"), dict):
        raise NoExecutableError(f"{folder}/{name}: not the description of an executable")
    return described


def _nearest(folder: str, names: Sequence[str], key: Key) -> str:
    """Why none fits, by the one that differs least."""
    described = [_description(folder, name) for name in names]
    if not described:
        return f"{folder}: no executables there"
    nearest = min(described, key=lambda one: len(_differences(one["key"], key)))
    parts = [
        "program (another size, batch, model or code)"
        if name == "program"
        else f"{name} ({nearest['key'].get(name)!r}, here {key.get(name)!r})"
        for name in _differences(nearest["key"], key)
    ]
    return f"{folder}: the nearest of {len(described)}, {nearest.get('about')}, differs in {', '.join(parts)}"


def _differences(one: Key, other: Key) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _topology(devices: Sequence[Any]) -> str:
    """How the chips lie, such as "2x2x1"; of devices that have no place how many there are."""
    places = [device.coords for device in devices if device.platform == "tpu"]
    sides = [max(axis) - min(axis) + 1 for axis in zip(*places, strict=True)] or [len(devices)]
    return "x".join(map(str, sides))


def _flags(variable: str) -> str:
    return " ".join(sorted(os.environ.get(variable, "").split()))


def _instructions() -> str:
    """The machine's instruction set, for which XLA compiles on a CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"
