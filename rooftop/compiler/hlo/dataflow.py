"""Data flow in a scheduled module: copies and sums of arrays, through fusions and short loops.

Loops are followed trip by trip if they may be one ring of permutes: if they permute, and have no more trips than the
permuted data has destinations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from rooftop.compiler.hlo.groups import replica_groups
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module

PERMUTES: tuple[str, ...] = ("collective-permute", "collective-permute-start")
#: Opcodes that do not change the elements of an array.
MOVES: tuple[str, ...] = (
    "bitcast", "copy", "copy-start", "copy-done", "convert", "reshape", "transpose", "optimization-barrier",
    "collective-permute-done",
)  # fmt: skip

#: The callers of a computation: (computation, caller, trip) of each enclosing fusion and loop.
Path = tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class Value:
    """The result of one instruction (an ``element`` of it, if a tuple) at one point of execution."""

    path: Path
    computation: str
    name: str
    element: int | None = None


@dataclass(frozen=True)
class Flow:
    """The values of one execution of a computation, ``frame``, and of its short loops."""

    module: Module
    frame: str

    def instructions(self) -> Iterator[tuple[Value, Instruction]]:
        """Yield every instruction in order of execution, trip by trip, without fused ones and those of longer loops."""
        yield from self._instructions(self.frame, ())

    def _instructions(self, name: str, path: Path) -> Iterator[tuple[Value, Instruction]]:
        computation = self.module.computations[name]
        for instruction in computation:
            yield Value(path, name, instruction.name), instruction
            if instruction.opcode == "while" and is_unrolled(self.module, instruction.called_as("body")):
                for trip in range(self._trips(computation, instruction)):
                    yield from self._instructions(
                        instruction.called_as("body"), (*path, (name, instruction.name, trip))
                    )

    def instruction(self, value: Value) -> Instruction:
        """The instruction that computes ``value``."""
        return self.module.computations[value.computation].instructions[value.name]

    def elements(self, value: Value) -> int:
        """Number of elements of the array."""
        shape = self.instruction(value).shape
        return shape[value.element if value.element is not None and len(shape) > 1 else 0].elements

    def operands(self, value: Value) -> list[Value]:
        """Operands of the instruction that computes ``value``."""
        return [Value(value.path, value.computation, name) for name in self.instruction(value).operands]

    def source(self, value: Value, *also: str) -> Value:
        """The array that ``value`` is a copy of; ``also`` names opcodes that count as copies."""
        while (before := self._before(value, *also)) is not None and len(before) == 1:
            value = before[0]
        return value

    def parts(self, value: Value) -> tuple[Value, ...]:
        """The arrays that are copied, added or concatenated into ``value``, without zeros."""
        parts: dict[Value, None] = {}
        seen, left = set[Value](), [value]
        while left:
            value = left.pop()
            if value not in seen:
                seen.add(value)
                before = self._before(value, "pad")
                if before is None:
                    parts[value] = None
                else:
                    left += before
        return tuple(parts)

    def depends(self, values: Iterable[Value], origins: set[Value]) -> bool:
        """True if one of ``values`` is computed from one of ``origins``, permutes, and not through other permutes."""
        seen, left = set[Value](), list(values)
        while left:
            value = left.pop()
            if value in origins:
                return True
            if value not in seen and self.instruction(value).opcode not in PERMUTES:
                seen.add(value)
                before = self._before(value)
                left += self.operands(value) if before is None else before
        return False

    def is_zero(self, value: Value) -> bool:
        """True for zeros, and for memory that has not been written."""
        instruction = self.instruction(value)
        if instruction.opcode == "broadcast":
            return not self.parts(self.operands(value)[0])
        if instruction.opcode == "constant":
            return instruction.literal.strip("-") in ("0", "0.0")
        return instruction.opcode == "custom-call" and '"AllocateBuffer"' in instruction.attributes

    def _before(self, value: Value, *also: str) -> list[Value] | None:
        """The values that ``value`` is copied or composed from; None if it is computed in another way."""
        instruction, element, path = self.instruction(value), value.element, value.path
        opcode, operands = instruction.opcode, self.operands(value)
        if opcode in MOVES or opcode in also:
            return [Value(path, value.computation, operands[0].name, element)]
        if opcode == "custom-call" and '"ConcatBitcast"' in instruction.attributes:
            # A copy from HBM to VMEM in several slices.
            return self.operands(self.operands(operands[0])[0])[:1]
        if opcode == "get-tuple-element":
            return [Value(path, value.computation, operands[0].name, int(instruction.attribute("index")))]
        if opcode == "tuple" and element is not None:
            return [operands[element]]
        if opcode in ("add", "concatenate") or (opcode == "maximum" and all(map(self._is_padded, operands))):
            return operands
        if opcode == "dynamic-update-slice":
            return operands[:2]
        if opcode == "select":
            return operands[1:]
        if opcode == "fusion":
            inner = self.module.computations[instruction.called[0]]
            return [Value((*path, (value.computation, value.name, 0)), inner.name, inner.root, element)]
        if opcode == "parameter" and path:
            return self._argument(value)
        if opcode == "while" and element is not None and is_unrolled(self.module, instruction.called_as("body")):
            trips = self._trips(self.module.computations[value.computation], instruction)
            return [self._carried(path, value.computation, instruction, trips, element)]
        return [] if self.is_zero(value) else None

    def _argument(self, value: Value) -> list[Value] | None:
        """The value of a parameter: an operand of the fusion, or a carried element of the loop."""
        computation, name, trip = value.path[-1]
        caller = self.module.computations[computation].instructions[name]
        if caller.opcode != "while":
            operand = caller.operands[int(self.instruction(value).literal)]
            return [Value(value.path[:-1], computation, operand, value.element)]
        if value.element is None:
            return None
        return [self._carried(value.path[:-1], computation, caller, trip, value.element)]

    def _carried(self, path: Path, computation: str, loop: Instruction, trip: int, element: int) -> Value:
        """An element of a loop's tuple before trip number ``trip``."""
        if trip == 0:
            return Value(path, computation, loop.operands[0], element)
        body = self.module.computations[loop.called_as("body")]
        return Value((*path, (computation, loop.name, trip - 1)), body.name, body.root, element)

    def _trips(self, computation: HloComputation, loop: Instruction) -> int:
        return self.module.trip_count(computation, loop) or 0

    def _is_padded(self, value: Value) -> bool:
        """True if a value is padded to its index in a larger array: the maximum of two is XLA's concatenation."""
        instruction = self.instruction(value)
        while instruction.opcode in ("convert", "bitcast"):
            instruction = self.module.computations[value.computation].instructions[instruction.operands[0]]
        return instruction.opcode == "pad"


def rendezvous(instruction: Instruction) -> str:
    """The name that both ends of a transfer share ('' if the instruction is no end of one)."""
    match = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.attributes)
    return match.group(1) if match and "_xla_megascale_transfer_type" in instruction.attributes else ""


def is_unrolled(module: Module, name: str) -> bool:
    """True if a computation is the body of a loop that may be (part of) one ring: it permutes, and has few trips."""
    permutes = (instruction for instruction in module.computations[name] if instruction.opcode in PERMUTES)
    longest = max((_orbit(permute.attributes) for permute in permutes), default=0)
    loops = [caller for caller in module.callers.get(name, ()) if caller[1].opcode == "while"]
    if not longest or len(loops) != 1 or loops[0][1].called_as("body") != name:
        return False
    trips = module.trip_count(*loops[0])
    return trips is not None and trips <= longest + 1


@lru_cache(maxsize=1024)
def _orbit(attributes: str) -> int:
    """Number of devices on the path of data that a permute with some ``attributes`` moves again and again."""
    target = dict(pair for pair in replica_groups(attributes, 1) if len(pair) == 2)
    start = device = next(iter(target), 0)
    steps = 0
    while steps == 0 or (device in target and device != start):
        device = target.get(device, start)
        steps += 1
    return steps
