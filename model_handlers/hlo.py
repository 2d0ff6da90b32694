"""The text of a compiled program, read: computations, their instructions, and how often a loop runs.

XLA writes a line for each instruction: `%name = type opcode(operands), attributes`. What a loop, a branch or a fusion
does is a computation of its own, named in its attributes.
"""

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"  (ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([\d,]*)(?::T\(([\d,]+)\))?)?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

# Names in a chain that leads to where a number comes from.
_PASSES_ON = {"copy", "bitcast", "convert", "reshape"}


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    text: str  # between the parentheses

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in _arrays(self.type))

    @property
    def shape(self) -> tuple[int, ...]:
        return _arrays(self.type)[0][1]

    @property
    def called(self) -> dict[str, str]:
        """The computations that it names, by what they are to it."""
        return dict(_CALLED.findall(self.attributes))

    @property
    def branches(self) -> list[str]:
        """The computations of which a conditional runs one."""
        listed = [name for branches in _BRANCHES.findall(self.attributes) for name in _NAME.findall(branches)]
        return listed or [self.called["true_computation"], self.called["false_computation"]]


@lru_cache(maxsize=4096)
def _arrays(type_text: str) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes in memory and shape of each array in a type, such as bf16[4,64]{1,0:T(8,128)}.

    On a TPU the dimensions that are next to each other in memory are padded to whole tiles.
    """
    found = []
    for name, dims, order, tile in _ARRAY.findall(type_text):
        shape = tuple(map(int, filter(None, dims.split(","))))
        stored = list(shape)
        for axis, side in zip(order.split(","), reversed(tile.split(",")), strict=False):
            if axis and side:
                stored[int(axis)] = -(-shape[int(axis)] // int(side)) * int(side)
        bits = re.search(r"\d+", name)
        size = -(-int(bits[0]) // 8) if bits else int(name == "pred")  # a token is nothing
        found.append((size * math.prod(stored), shape))
    return found


@dataclass
class Computation:
    """A function of the program; its last instruction gives its result."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""


class Module:
    """A program's computations by name, from what `jax.stages.Compiled.as_text` gives.

    Attributes:
      entry: the name of the computation that is the program.
    """

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current = Computation()
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                instruction = _parse(match[2], line[match.end() :])
                current.instructions[instruction.name] = instruction
                current.root = instruction.name if match[1] else current.root
            elif header := _HEADER.match(line):
                current = self.computations[header[2]] = Computation()
                self.entry = header[2] if header[1] else self.entry

    def trip_count(self, loop: Instruction, inside: Computation) -> int | None:
        """How often a loop runs, if the program says so: its condition compares a counter, from 0 by 1, to a number."""
        if known := _KNOWN_TRIPS.search(loop.attributes):
            return int(known[1])
        condition = self.computations[loop.called["condition"]]
        compare = condition.instructions[condition.root]
        if compare.opcode != "compare":
            return None
        for bound in (condition.instructions[name] for name in compare.operands):
            source = source_of(bound, condition)
            if source.opcode == "constant":
                return int(source.text)
            if source.opcode == "get-tuple-element":  # of what the loop was started with
                index = int(source.attributes.partition("index=")[2].partition(",")[0])
                start = source_of(inside.instructions[loop.operands[0]], inside)
                if start.opcode == "tuple":
                    start = source_of(inside.instructions[start.operands[index]], inside)
                    if start.opcode == "constant" and int(start.text) > 0:  # else it is the counter
                        return int(start.text)
        return None


def source_of(part: Instruction, inside: Computation) -> Instruction:
    """The instruction that a value comes from, behind those that only pass it on."""
    while part.opcode in _PASSES_ON:
        part = inside.instructions[part.operands[0]]
    return part


def _parse(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    type_text, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    operands = rest[opening + 1 : closing - 1]
    return Instruction(
        name, type_text, rest[:opening], tuple(_NAME.findall(operands)), rest[closing:], operands.strip()
    )


def _closing(text: str, start: int) -> int:
    """The place behind the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    raise ValueError(f"no closing parenthesis: {text[:100]}")
