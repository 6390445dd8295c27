"""How often loops run: the counter of a ``while`` followed from its start to where the condition ends it.

XLA:TPU prints no trip counts; they follow from the constants in the loop.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooftop.xla.hlo import Computation, Instruction

_COUNTERS = ("s32", "u32", "s64", "u64")

# Not EQ and NE: a loop is counted by bisection, and whether it goes on must change once.
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}


def trip_count(computations: Mapping[str, Computation], computation: Computation, loop: Instruction) -> int | None:
    """Trips of a ``while`` in ``computation`` that counts from a constant to a constant, else None."""
    values = _Values(computations)
    body, condition = computations[loop.called_as("body")], computations[loop.called_as("condition")]
    for element in range(len(loop.shape)):
        trips = values.trips(computation, loop, body, condition, element)
        if trips is not None:
            return trips
    return None


@dataclass(frozen=True)
class _Values:
    """Scalar integers that follow from a module's constants."""

    computations: Mapping[str, Computation]

    def trips(
        self, computation: Computation, loop: Instruction, body: Computation, condition: Computation, element: int
    ) -> int | None:
        """Trips if ``element`` of the loop's tuple is the counter."""
        carried = computation.operands(loop)[0]
        if carried.opcode != "tuple" or loop.shape[element].dims or loop.shape[element].dtype not in _COUNTERS:
            return None

        def initial(index: int) -> int | None:
            return self.value(computation, carried.operands[index], lambda *_: None)

        def at(counter: int) -> Callable[[int, int | None], int | None]:
            """Parameters of body and condition: the counter is given, other elements keep what they started with."""
            return lambda _, index: None if index is None else counter if index == element else initial(index)

        def holds(counter: int) -> int | None:
            return self.value(condition, condition.root, at(counter))

        def following(counter: int) -> int | None:
            root = body.instructions[body.root]
            if root.opcode != "tuple":
                return None
            return self.value(body, root.operands[element], at(counter))

        start = initial(element)
        if start is None or (second := following(start)) is None or second == start:
            return None
        step = second - start
        if following(second) != second + step or holds(start) is None:
            return None
        trips = 1
        while holds(start + trips * step):
            trips *= 2
            if trips > 2**40:
                return None
        low, high = -1, trips
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(start + middle * step) else (low, middle)
        return high

    def value(
        self, computation: Computation, name: str, parameter: Callable[[int, int | None], int | None]
    ) -> int | None:
        """The integer that a scalar instruction yields, or None; ``parameter(number, element)`` gives the inputs."""
        instruction = computation.instructions[name]
        opcode = instruction.opcode
        if opcode == "constant":
            return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
        if opcode == "parameter":
            return parameter(int(instruction.literal), None)
        if opcode == "get-tuple-element":
            source, index = computation.operands(instruction)[0], int(instruction.attribute("index"))
            if source.opcode == "parameter":
                return parameter(int(source.literal), index)
            return self.value(computation, source.operands[index], parameter) if source.opcode == "tuple" else None
        if opcode in ("fusion", "call"):
            inner = self.computations[instruction.called[0]]
            return self.value(
                inner, inner.root, lambda number, _: self.value(computation, instruction.operands[number], parameter)
            )
        values = [self.value(computation, operand, parameter) for operand in instruction.operands]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        if opcode in ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done"):
            return known[0]
        operation = _ARITHMETIC.get(instruction.attribute("direction") if opcode == "compare" else opcode)
        return None if operation is None else int(operation(known[0], known[-1]))
