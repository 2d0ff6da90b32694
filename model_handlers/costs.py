"""What a compiled program costs, with each loop counted as often as it runs.

XLA's own analysis counts the body of a loop once, and most of our program's work is in loops: over steps, over the
passes of guidance, over the blocks of a stack. So the program's text is added up by a simple model of what an
instruction costs, once with every body counted once and once with every body as often as it runs, and XLA's figures are
scaled by the ratio. What the model gets wrong by a constant factor cancels.

The model is XLA's: an instruction reads its operands and writes its result, and takes as long as its arithmetic at the
chip's peak or its bytes at the chip's bandwidth, whichever is longer.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from model_handlers import hlo
from model_handlers.hlo import Computation, Instruction, source_of
from model_handlers.topologies import Chip


class CostError(ValueError):
    """The program has a loop of which nobody said how often it runs."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations, bytes read and written, and seconds by the roofline, of one chip."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.seconds + other.seconds)

    def __sub__(self, other: "Work") -> "Work":
        return self + -1 * other

    def __rmul__(self, times: float) -> "Work":
        return Work(self.flops * times, self.bytes * times, self.seconds * times)


class Costs:
    """The costs of one compiled program on one chip, as a function of how often its loops run.

    A kernel counts as what its cost_estimate says.

    Attributes:
      unknown_calls: custom calls that XLA's time estimate counts as minus one second each; they are counted as nothing.
    """

    def __init__(self, compiled: jax.stages.Compiled, chip: Chip | None):
        """`chip` is what the program was compiled for; without one there are no seconds."""
        self._model = Model(compiled.as_text() or "", chip)
        self._once = self._model.work(None)
        analysis: dict[str, float] = compiled.cost_analysis()  # type: ignore[assignment]  # of one program, not a list
        seconds = analysis.get("optimal_seconds", 0.0) if chip else 0.0
        # A program whose loops run once takes no second, so that whole ones which are missing are such calls.
        self.unknown_calls = max(0, round(self._once.seconds - seconds))
        flops, moved = (analysis.get(name, 0.0) for name in ("flops", "bytes accessed"))  # what is none is left out
        self._xla = Work(flops, moved, seconds + self.unknown_calls)

    def __call__(self, trips: Sequence[float]) -> Work:
        """What the program costs; `trips` as in `Model.work`."""
        ours = self._model.work(tuple(trips))
        scale = {
            name: getattr(ours, name) / getattr(self._once, name) if getattr(self._once, name) else 0.0
            for name in ("flops", "bytes", "seconds")
        }
        return Work(*(getattr(self._xla, name) * scale[name] for name in scale))


def matmul_flops(jaxpr: Any, trips: Sequence[float]) -> float:
    """Floating-point operations of the matrix products and convolutions of a program, traced for one plain device.

    They are what no compiler can leave out: at a chip's peak they take the least time that the program can. `trips` as
    in `Model.work`; of branches the longest counts.
    """
    return sum(_equation_flops(equation, tuple(trips)) for equation in jaxpr.eqns)


def _equation_flops(equation: Any, trips: tuple[float, ...]) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        return 2.0 * equation.outvars[0].aval.size * math.prod(equation.invars[0].aval.shape[i] for i in contracting)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        return 2.0 * equation.outvars[0].aval.size * kernel.size / kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    inside = list(_jaxprs(params.values()))
    if name == "cond":
        return max(matmul_flops(branch, trips) for branch in inside)
    if name == "while":
        flops = matmul_flops(params["body_jaxpr"].jaxpr, trips[1:])
        if flops and not trips:
            raise CostError("a loop around matrix products: how often it runs is not given")
        return flops and trips[0] * flops
    times = params["length"] if name == "scan" else 1
    return times * sum(matmul_flops(jaxpr, trips) for jaxpr in inside)


def _jaxprs(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _jaxprs(value)
        elif hasattr(value, "eqns"):
            yield value
        elif hasattr(value, "jaxpr"):
            yield value.jaxpr


# Of no cost: names for what is there already.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id"}
_FREE |= {"replica-id", "add-dependency", "copy-start", "slice-start"}
# How many times their result XLA counts those that go on beside others, over their start and their end.
_ASYNCHRONOUS = {"copy-done": 4.0, "slice-done": 3.0}
# Those that copy as much as they give, however large their operand.
_PART_OF_OPERAND = {"slice", "dynamic-slice", "gather"}
_ELEMENTWISE = {"add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs", "compare", "select"}
_ESTIMATE = re.compile(r'"cost_estimate":\{([^}]*)\}')
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")


class Model:
    """The model in this module's docstring, of the text of a compiled program."""

    def __init__(self, text: str, chip: Chip | None = None):
        self._module = hlo.Module(text)
        self._chip = chip
        self._known: dict[tuple[str, tuple[float, ...] | None], Work] = {}

    def work(self, trips: tuple[float, ...] | None) -> Work:
        """The work of the whole program.

        Args:
          trips: how often the loops run whose number of trips is not in the program, the first for the outermost such
            loops, the second for those in their bodies. None counts every body once, as XLA does.

        Raises:
          CostError: such loops are nested deeper than `trips` says.
        """
        return self._of_computation(self._module.entry, trips)

    def _of_computation(self, name: str, trips: tuple[float, ...] | None) -> Work:
        if (name, trips) not in self._known:
            computation = self._module.computations[name]
            parts = (self._of(part, computation, trips) for part in computation.instructions.values())
            self._known[name, trips] = sum(parts, Work())
        return self._known[name, trips]

    def _of(self, part: Instruction, inside: Computation, trips: tuple[float, ...] | None) -> Work:
        if part.opcode in _ASYNCHRONOUS:
            return self._at_peak(0.0, _ASYNCHRONOUS[part.opcode] * part.bytes)
        if part.opcode in _FREE or part.opcode.endswith("-done"):
            return Work()
        if part.opcode == "while":
            return self._of_loop(part, inside, trips)
        if part.opcode == "conditional":
            return max((self._of_computation(name, trips) for name in part.branches), key=dataclasses.astuple)
        if part.opcode in ("call", "async-start"):
            return self._of_computation(part.called.get("calls") or part.called["to_apply"], trips)
        if part.opcode == "custom-call":
            return self._at_peak(*_of_custom_call(part))
        return self._at_peak(self._flops(part, inside), self._bytes(part, inside))

    def _at_peak(self, flops: float, moved: float) -> Work:
        seconds = max(flops / self._chip.flops, moved / self._chip.bandwidth) if self._chip else 0.0
        return Work(flops, moved, seconds)

    def _of_loop(self, loop: Instruction, inside: Computation, trips: tuple[float, ...] | None) -> Work:
        body, condition = loop.called["body"], loop.called["condition"]
        if trips is None:
            return self._of_computation(body, None) + self._of_computation(condition, None)
        count: float | None = self._module.trip_count(loop, inside)
        if count is None:
            if not trips:
                raise CostError(f"loop {loop.name}: how often it runs is neither in the program nor given")
            count, *deeper = trips
            trips = tuple(deeper)
        return count * (self._of_computation(body, trips) + self._of_computation(condition, trips))

    def _flops(self, part: Instruction, inside: Computation) -> float:
        """Multiplications and additions, those inside of a fusion included."""
        if part.opcode == "fusion":
            computation = self._module.computations[part.called["calls"]]
            return sum(self._flops(inner, computation) for inner in computation.instructions.values())
        operands = [inside.instructions[name] for name in part.operands]
        if part.opcode == "convolution":
            return _convolution_flops(part, operands[0].shape, operands[1].shape)
        if part.opcode == "dot":
            axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", part.attributes)
            contracted = [operands[0].shape[int(axis)] for axis in axes[1].split(",") if axis] if axes else []
            return 2.0 * math.prod(part.shape) * math.prod(contracted)
        if part.opcode in ("reduce", "reduce-window"):
            return float(math.prod(operands[0].shape))
        return float(math.prod(part.shape)) if part.opcode in _ELEMENTWISE else 0.0

    def _bytes(self, part: Instruction, inside: Computation) -> float:
        operands = [inside.instructions[name] for name in part.operands]
        if part.opcode == "fusion":
            computation = self._module.computations[part.called["calls"]]
            parameters = [i for i in computation.instructions.values() if i.opcode == "parameter"]
            return sum(self._read(i.name, computation) for i in parameters) + self._written(computation)
        if part.opcode in _PART_OF_OPERAND:
            return 2.0 * part.bytes
        if part.opcode == "dynamic-update-slice":
            return 2.0 * operands[1].bytes
        return float(sum(operand.bytes for operand in operands) + part.bytes)

    def _read(self, name: str, computation: Computation) -> float:
        """Bytes that a fusion reads of a value: all of them once, unless it only looks at slices."""
        value, total = computation.instructions[name], 0.0
        if name == computation.root:
            return float(value.bytes)
        for user in computation.instructions.values():
            if name not in user.operands:
                continue
            if user.opcode in _PART_OF_OPERAND:
                total += user.bytes
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                total += 0.0  # what is not replaced stays where it is
            elif user.opcode == "fusion":
                inner = self._module.computations[user.called["calls"]]
                numbers = [i for i, operand in enumerate(user.operands) if operand == name]
                names = {i.name: int(i.text) for i in inner.instructions.values() if i.opcode == "parameter"}
                total += sum(self._read(parameter, inner) for parameter, i in names.items() if i in numbers)
            elif user.opcode == "bitcast":
                total += self._read(user.name, computation)
            else:
                return float(value.bytes)
        return min(total, float(value.bytes))

    def _written(self, computation: Computation) -> float:
        root = source_of(computation.instructions[computation.root], computation)
        if root.opcode == "dynamic-update-slice":
            return float(computation.instructions[root.operands[1]].bytes)
        return float(computation.instructions[computation.root].bytes)


def _of_custom_call(call: Instruction) -> tuple[float, float]:
    """Of a kernel what its cost_estimate says, of other calls nothing, as XLA does."""
    estimate = _ESTIMATE.search(call.attributes)
    values = dict(re.findall(r'"(\w+)":"?(\d+)', estimate[1])) if estimate else {}
    return float(values.get("flops", 0)), float(values.get("bytes_accessed", 0))


def _convolution_flops(part: Instruction, image: tuple[int, ...], kernel: tuple[int, ...]) -> float:
    """As XLA counts them: a place of the window that lies in the padding is no work."""
    match = _LABELS.search(part.attributes)
    if match is None:
        raise ValueError(f"convolution without dim_labels: {part.name}")
    of_image, of_kernel, of_result = match.groups()
    window = re.search(_WINDOW, part.attributes)
    settings = dict(pair.split("=") for pair in window[1].split()) if window else {}
    places = 1
    for number in range(sum(label.isdigit() for label in of_kernel)):

        def setting(name: str, default: str, number: int = number) -> str:
            return settings[name].split("x")[number] if name in settings else default

        places *= _valid_places(
            image[of_image.index(str(number))],
            kernel[of_kernel.index(str(number))],
            part.shape[of_result.index(str(number))],
            int(setting("stride", "1")),
            int(setting("pad", "0_0").split("_")[0]),
            int(setting("lhs_dilate", "1")),
            int(setting("rhs_dilate", "1")),
        )
    batch = part.shape[of_result.index("b")]
    return 2.0 * places * batch * part.shape[of_result.index("f")] * kernel[of_kernel.index("i")]


@lru_cache(maxsize=1024)
def _valid_places(
    image: int, kernel: int, result: int, stride: int, pad: int, image_dilation: int, kernel_dilation: int
) -> int:
    """Along one axis, how many pairs of a result and a place in its window meet a value of the image."""
    starts = np.arange(result)[:, None] * stride - pad
    places = starts + np.arange(kernel) * kernel_dilation
    inside = (places >= 0) & (places <= (image - 1) * image_dilation) & (places % image_dilation == 0)
    return int(inside.sum())
