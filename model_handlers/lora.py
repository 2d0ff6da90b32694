"""LoRA: low-rank changes of a checkpoint's weights, added to them while they are read.

Hu et al. 2021: a weight W becomes W + weight * alpha / rank * up @ down, so that the program neither knows of it nor
takes longer. Files of diffusers, PEFT, kohya-ss and LyCORIS differ in how they spell the names of weights. All of them
are brought to one spelling: the name of diffusers, with "_" for ".".
"""

import collections
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from model_handlers import checkpoint, fetch
from model_handlers.tensors import CheckpointError, Rules, Tensor, read_tensors, renamed

log = logging.getLogger("lightmill")

# How a key ends: what it holds of a weight's change.
PARTS = {
    ".lora_A.weight": "down",  # PEFT
    ".lora_B.weight": "up",
    ".lora_down.weight": "down",  # kohya-ss
    ".lora_up.weight": "up",
    ".lora_mid.weight": "mid",  # LyCORIS, LoCon in three convolutions
    "_lora.down.weight": "down",  # diffusers' attention processors, before PEFT
    "_lora.up.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    ".alpha": "alpha",
}
SPELLINGS: Rules = (
    (r"\.", "_"),
    (r"^lora_(?=unet_)", ""),
    (r"^lora_te1?_", "text_encoder_"),
    (r"^lora_te2_", "text_encoder_2_"),
    (r"^(?=(down_blocks|mid_block|up_blocks)_)", "unet_"),  # the first files were of the UNet alone
    (r"_processor_", "_"),
    (r"(?<=attn[12])_to_out$", "_to_out_0"),
    (r"(?<=self_attn)_to_(q|k|v|out)$", r"_\1_proj"),
    (r"^(text_encoder(?:_2)?)_(?=encoder_)", r"\1_text_model_"),  # transformers 5
)
# Other methods, whose files look alike; left out of a file, the rest would be of no use.
UNSUPPORTED = {r"\.(dora_scale|lora_magnitude_vector)": "DoRA", r"\.hada_": "LoHa", r"\.lokr_": "LoKr"}
TYPES = ("F16", "BF16", "F32", "F64")  # as safetensors calls them
LISTED = 5  # keys in an error


@dataclass(frozen=True)
class Adapter:
    """A LoRA file and how strongly it acts; small and picklable, so it travels to the workers.

    Attributes:
      source: local file, gs:// object or OWNER/NAME/FILE on the hub.
      weight: factor of all its changes.
      sha256: what must be found there: another would be another recipe.
      allow_partial: whether keys that belong to no weight of the checkpoint are left out.
    """

    source: str
    weight: float
    sha256: str
    allow_partial: bool = False

    @classmethod
    def find(cls, source: str, weight: float, allow_partial: bool) -> "Adapter":
        """The file as it is now; raises CheckpointError if there is none."""
        return cls(source, weight, _digest(fetch.lora_file(source)), allow_partial)


@dataclass(frozen=True)
class Targets:
    """The weights that can be changed.

    Attributes:
      shapes: in torch's layout, by network and tensor, such as `unet.conv_in.weight`.
      unet_rules: from the names of a UNet's modules in the original layout to those of diffusers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    unet_rules: Rules


@dataclass(frozen=True)
class LowRank:
    """One file's change of one weight: `scale * up @ down`, with `mid` a convolution between the two."""

    scale: float
    down: Tensor
    up: Tensor
    mid: Tensor | None

    def delta(self, shape: tuple[int, ...]) -> np.ndarray:
        """The change of a weight of this shape, in torch's layout and float32."""
        up, down = (_floats(part).reshape(_four(part.shape)[0], -1) for part in (self.up, self.down))
        if self.mid is None:
            product = up @ down
        else:
            product = np.einsum("op,pqhw,qi->oihw", up, _floats(self.mid), down, optimize=True)
        return product.reshape(shape) * np.float32(self.scale)


Changes = Mapping[str, Sequence[LowRank]]


def changes(adapters: Sequence[Adapter], targets: Targets) -> Changes:
    """What the files change together, by names as in `Targets.shapes`; numbers are read again when they are merged.

    Raises:
      CheckpointError: a file cannot be used or does not fit; the message names it and the key.
    """
    found = collections.defaultdict(list)
    for adapter in adapters:
        for name, change in _File(adapter).changes(targets).items():
            found[name].append(change)
    return found


def check(adapters: Sequence[Adapter], targets: Targets) -> None:
    """Makes sure that all files can be merged, and says how much of each will be; errors as `changes`."""
    for adapter in adapters:
        file = _File(adapter)
        weights = len(file.changes(targets))
        keys = f"{len(file.tensors) - len(file.unmatched)} of {len(file.tensors)} keys"
        log.info("%s: %s merged into %d weights, times %g", adapter.source, keys, weights, adapter.weight)


def merge(changes: Changes, network: str, name: str, value: np.ndarray) -> np.ndarray:
    """A network's tensor, in torch's layout, with all its changes: in float32 if it has some, else as it is."""
    if not (found := changes.get(f"{network}.{name}")):
        return value
    merged = value.astype(np.float32)
    for change in found:
        merged += change.delta(value.shape)
    return merged


class _File:
    """One LoRA file, which comes from a stranger.

    Attributes:
      tensors: by their keys in the file.
      unmatched: keys that belong to no weight, once `changes` has looked.
    """

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        path = fetch.lora_file(adapter.source)
        if (found := _digest(path)) != adapter.sha256:
            raise self._error(
                f"the file here has sha256 {found[:12]}, that of the recipe {adapter.sha256[:12]}; it changed under "
                "the run, or the worker sees another one"
            )
        self.tensors = read_tensors([path])
        self.unmatched: list[str] = []
        self._file = safe_open(path, framework="np")
        self._settings = self._read_settings()

    def changes(self, targets: Targets) -> dict[str, LowRank]:
        """The changed weights; see `lora.changes`."""
        for key in self.tensors:
            for pattern, method in UNSUPPORTED.items():
                if re.search(pattern, key):
                    raise self._error(f"{key!r} belongs to {method}, which is not supported, only LoRA is")
        weights = self._match(targets)
        total, named = len(self.tensors), _listed(self.unmatched)
        if not weights:
            raise self._error(f"none of its {total} keys belongs to a weight of this checkpoint: {named}")
        if self.unmatched and not self._adapter.allow_partial:
            raise self._error(
                f"{len(self.unmatched)} of its {total} keys belong to no weight of this checkpoint: {named}; "
                "--allow_partial_lora leaves them out"
            )
        return {name: self._low_rank(name, targets.shapes[name], keys) for name, keys in weights.items()}

    def _match(self, targets: Targets) -> dict[str, dict[str, str]]:
        """The keys of each weight, by what they hold of its change."""
        spelled = {name.removesuffix(".weight").replace(".", "_"): name for name in targets.shapes}
        rules = [(pattern.replace(r"\.", "_"), str(new).replace(".", "_")) for pattern, new in targets.unet_rules]
        weights: dict[str, dict[str, str]] = {}
        for key in sorted(self.tensors):
            ending = next((ending for ending in PARTS if key.endswith(ending)), "")
            name = spelled.get(_spelling(key.removesuffix(ending), rules))
            if not ending or not name:
                self.unmatched.append(key)
                continue
            keys = weights.setdefault(name, {})
            if (other := keys.setdefault(PARTS[ending], key)) != key:
                raise self._error(f"{other!r} and {key!r} are two names of one tensor")
        return weights

    def _low_rank(self, name: str, shape: tuple[int, ...], keys: Mapping[str, str]) -> LowRank:
        for part in ("down", "up"):
            if part not in keys:
                raise self._error(f"{min(keys.values())!r} has no counterpart, the {part} matrix for {name}")
        tensors = {part: self.tensors[key] for part, key in keys.items()}
        rank = _four(tensors["down"].shape)[0]
        outputs, inputs, *kernel = _four(shape)
        if "mid" in tensors:
            middle = _four(tensors["mid"].shape)[0]
            fitting = {"down": (rank, inputs, 1, 1), "mid": (middle, rank, *kernel), "up": (outputs, middle, 1, 1)}
        else:
            fitting = {"down": (rank, inputs, *kernel), "up": (outputs, rank, 1, 1)}
        for part, expected in fitting.items():
            if _four(tensors[part].shape) != expected or 0 in expected:
                raise self._error(f"{keys[part]!r} has shape {tensors[part].shape}, which does not fit {name} {shape}")
            self._check_numbers(keys[part])
        scale = self._adapter.weight * self._scale(name, keys, rank)
        return LowRank(scale, tensors["down"], tensors["up"], tensors.get("mid"))

    def _check_numbers(self, key: str) -> None:
        if (kind := self._file.get_slice(key).get_dtype()) not in TYPES:
            raise self._error(f"{key!r} is of type {kind}, not of {', '.join(TYPES)}")
        if not np.isfinite(self.tensors[key].read()).all():
            raise self._error(f"{key!r} has numbers that are not finite (NaN or infinity)")

    def _scale(self, name: str, keys: Mapping[str, str], rank: int) -> float:
        """alpha / rank; where the file says nothing, alpha is the rank."""
        network, _, module = name.removesuffix(".weight").partition(".")
        settings = self._settings.get(network, {})
        what, alpha = f"{network}.lora_alpha", settings.get("lora_alpha", rank)
        for pattern, value in settings.get("alpha_pattern", {}).items():
            if module == pattern.removeprefix("^") or module.endswith(f".{pattern}"):
                what, alpha = f"{network}.alpha_pattern {pattern}", value
                break
        what = keys.get("alpha", what)
        try:
            if "alpha" in keys:
                alpha = self.tensors[what].read()
            number = float(np.asarray(alpha, np.float64).item())
        except (AttributeError, TypeError, ValueError, OverflowError):  # the first: of a type that NumPy has not
            number = math.nan
        if not math.isfinite(number):
            raise self._error(f"{what!r} is not one finite number")
        return number / (math.sqrt(rank) if settings.get("use_rslora") else rank)

    def _read_settings(self) -> dict[str, dict[str, Any]]:
        """What diffusers notes of PEFT's LoraConfig in the file's header, for each network."""
        text = (self._file.metadata() or {}).get("lora_adapter_metadata", "{}")
        try:
            settings: dict[str, dict[str, Any]] = {}
            for name, value in json.loads(text).items():
                network, _, setting = name.partition(".")
                settings.setdefault(network, {})[setting] = value
            for values in settings.values():
                values["alpha_pattern"] = dict(values.get("alpha_pattern", {}))
        except (AttributeError, RecursionError, TypeError, ValueError):
            raise self._error("lora_adapter_metadata in its header is not what diffusers writes there") from None
        for pattern in (pattern for values in settings.values() for pattern in values["alpha_pattern"]):
            # To PEFT it is a regular expression, of which one from a stranger can take years.
            if not re.fullmatch(r"\^?[\w.]+", str(pattern)):
                raise self._error(f"alpha_pattern {pattern!r} in its header is not the name of a module")
        return settings

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._adapter.source}: {message}")


def _spelling(module: str, unet_rules: Rules) -> str:
    """A module's name with "_" for ".", as diffusers has it."""
    name = str(renamed(module, SPELLINGS))
    if not name.startswith("unet_"):
        return name
    # The rules are for names of tensors, in which something follows the module.
    return "unet_" + str(renamed(f"{name.removeprefix('unet_')}_", unet_rules)).removesuffix("_")


def _digest(path: Path) -> str:
    try:
        return checkpoint.digest_of(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _floats(tensor: Tensor) -> np.ndarray:
    return tensor.read().astype(np.float32)


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A linear layer's shape as that of a convolution of one pixel, for files say the one or the other."""
    return (*shape, *(1,) * (4 - len(shape)))


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:LISTED])) + (", ..." if len(keys) > LISTED else "")
