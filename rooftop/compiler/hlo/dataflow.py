"""Data flow in a scheduled module: copies and sums of arrays, through fusions and short loops.

Loops are followed trip by trip if they may be one ring of permutes: if a trip permutes data that an earlier one has
permuted, and there are no more trips than the data has destinations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from rooftop.compiler.hlo.groups import Groups, replica_groups
from rooftop.compiler.hlo.text import MOST_UNFOLDED, HloComputation, Instruction, Module
from rooftop.core.errors import RooftopError

PERMUTES: tuple[str, ...] = ("collective-permute", "collective-permute-start")
#: Opcodes that do not change the elements of an array.
MOVES: tuple[str, ...] = (
    "bitcast", "copy", "copy-start", "copy-done", "convert", "reshape", "transpose", "optimization-barrier",
    "collective-permute-done",
)  # fmt: skip

#: Instructions of all frames, each of which is gone through a few times.
_MOST_INSTRUCTIONS = 4 * MOST_UNFOLDED
#: Broadcasts of broadcasts that are followed to see whether they are zero.
_MOST_BROADCASTS = 20

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
    _broadcasts: list[Value] = field(default_factory=list, init=False, repr=False, compare=False)
    _inputs: dict[Value, tuple[Value, ...] | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sources: dict[tuple[str, ...], dict[Value, Value]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _trips: dict[tuple[str, str], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def instructions(self) -> Iterator[tuple[Value, Instruction]]:
        """Yield every instruction in order of execution, trip by trip, without fused ones and those of longer loops.

        Raises RooftopError for more than ``_MOST_INSTRUCTIONS`` in all frames of a module.
        """
        count = self.module.memo.setdefault("flow", {"instructions": 0})
        for entry in self._instructions(self.frame, ()):
            count["instructions"] += 1
            if count["instructions"] > _MOST_INSTRUCTIONS:
                fault = f"{self.frame}, whose loops unroll to more than {_MOST_INSTRUCTIONS:,} instructions"
                raise RooftopError("hlo", fault, "shorter rings of permutes")
            yield entry

    def _instructions(self, name: str, path: Path) -> Iterator[tuple[Value, Instruction]]:
        for instruction in self.module.computations[name]:
            yield Value(path, name, instruction.name), instruction
            if instruction.opcode == "while":
                for trip in range(self._unrolled_trips(name, instruction)):
                    yield from self._instructions(
                        instruction.called_as("body"), (*path, (name, instruction.name, trip))
                    )

    @cached_property
    def _order(self) -> dict[Value, int]:
        return {value: index for index, (value, _) in enumerate(self.instructions())}

    def position(self, value: Value) -> int:
        """Index of a value in order of execution; that of its fusion if it is fused."""
        value = Value(value.path, value.computation, value.name)
        while value not in self._order:
            computation, caller, _ = value.path[-1]
            value = Value(value.path[:-1], computation, caller)
        return self._order[value]

    def instruction(self, value: Value) -> Instruction:
        """The instruction that computes ``value``."""
        return self.module.computations[value.computation].instructions[value.name]

    def is_permute(self, value: Value) -> bool:
        """True for the result of a permute."""
        return self.instruction(value).opcode in PERMUTES

    def elements(self, value: Value) -> int:
        """Number of elements of the array."""
        shape = self.instruction(value).shape
        return shape[value.element if value.element is not None and len(shape) > 1 else 0].elements

    def operands(self, value: Value) -> tuple[Value, ...]:
        """Operands of the instruction that computes ``value``."""
        return tuple(Value(value.path, value.computation, name) for name in self.instruction(value).operands)

    def source(self, value: Value, *also: str) -> Value:
        """The array that ``value`` is a copy of; ``also`` names opcodes that count as copies."""
        known, path = self._sources.setdefault(also, {}), list[Value]()
        while value not in known and (before := self.inputs(value, *also)) is not None and len(before) == 1:
            # What leads back to itself is its own source.
            known[value] = value
            path.append(value)
            value = before[0]
        value = known.get(value, value)
        known |= dict.fromkeys(path, value)
        return value

    def parts(self, value: Value) -> tuple[Value, ...]:
        """The arrays that are copied, added or concatenated into ``value``, without zeros."""
        parts: dict[Value, None] = {}
        seen, left = set[Value](), [value]
        while left:
            value = left.pop()
            if value not in seen:
                seen.add(value)
                before = self.addends(value)
                if before is None:
                    parts[value] = None
                else:
                    left += before
        return tuple(parts)

    def depends(self, values: Iterable[Value], origins: set[Value]) -> bool:
        """True if one of ``values`` is computed from one of ``origins``, permutes, and not through other permutes."""
        first = min(map(self.position, origins))
        seen, left = set[Value](), list(values)
        while left:
            value = left.pop()
            if value in origins:
                return True
            # All that a value is computed from precedes it.
            if value not in seen and self.position(value) > first and not self.is_permute(value):
                seen.add(value)
                before = self.inputs(value)
                left += self.operands(value) if before is None else before
        return False

    def is_zero(self, value: Value) -> bool:
        """True for zeros, and for memory that has not been written."""
        instruction = self.instruction(value)
        if instruction.opcode == "broadcast":
            return len(self._broadcasts) < _MOST_BROADCASTS and self._broadcasts_zero(value)
        if instruction.opcode == "constant":
            return instruction.literal.strip("-") in ("0", "0.0")
        return instruction.opcode == "custom-call" and '"AllocateBuffer"' in instruction.attributes

    def _broadcasts_zero(self, value: Value) -> bool:
        """True for a broadcast of a zero. Broadcasts of broadcasts are followed to a depth, and are no zeros below."""
        self._broadcasts.append(value)
        try:
            return not self.parts(self.operands(value)[0])
        finally:
            self._broadcasts.pop()

    def addends(self, value: Value) -> tuple[Value, ...] | None:
        """The ``inputs`` of a value that is a part of a sum: padding adds nothing."""
        return self.inputs(value, "pad")

    def inputs(self, value: Value, *also: str) -> tuple[Value, ...] | None:
        """The values that ``value`` is copied or composed from, none for zeros; None if it is computed in another way.

        ``also`` names opcodes that count as copies.
        """
        if also and self.instruction(value).opcode in also:
            return (self._copied(value),)
        if value not in self._inputs:
            self._inputs[value] = self._read(value)
        return self._inputs[value]

    def _copied(self, value: Value) -> Value:
        return Value(value.path, value.computation, self.instruction(value).operands[0], value.element)

    def _read(self, value: Value) -> tuple[Value, ...] | None:
        """Read the inputs of a value from its instruction."""
        instruction, element, path = self.instruction(value), value.element, value.path
        opcode, operands = instruction.opcode, self.operands(value)
        if opcode in MOVES:
            return (self._copied(value),)
        if opcode == "custom-call" and '"ConcatBitcast"' in instruction.attributes:
            # A copy from HBM to VMEM in several slices.
            return self.operands(self.operands(operands[0])[0])[:1]
        if opcode == "get-tuple-element":
            return (Value(path, value.computation, operands[0].name, int(instruction.attribute("index"))),)
        if opcode == "tuple" and element is not None:
            return (operands[element],)
        if opcode in ("add", "concatenate") or (opcode == "maximum" and all(map(self._is_padded, operands))):
            return operands
        if opcode == "dynamic-update-slice":
            return operands[:2]
        if opcode == "select":
            return operands[1:]
        if opcode == "fusion":
            inner = self.module.computations[instruction.called[0]]
            return (Value((*path, (value.computation, value.name, 0)), inner.name, inner.root, element),)
        if opcode == "parameter" and path:
            return self._argument(value)
        trips = self._unrolled_trips(value.computation, instruction) if opcode == "while" else 0
        if trips and element is not None:
            return (self._carried(path, value.computation, instruction, trips, element),)
        return () if self.is_zero(value) else None

    def _argument(self, value: Value) -> tuple[Value, ...] | None:
        """The value of a parameter: an operand of the fusion, or a carried element of the loop."""
        computation, name, trip = value.path[-1]
        caller = self.module.computations[computation].instructions[name]
        if caller.opcode != "while":
            operand = caller.operands[int(self.instruction(value).literal)]
            return (Value(value.path[:-1], computation, operand, value.element),)
        if value.element is None:
            return None
        return (self._carried(value.path[:-1], computation, caller, trip, value.element),)

    def _carried(self, path: Path, computation: str, loop: Instruction, trip: int, element: int) -> Value:
        """An element of a loop's tuple before trip number ``trip``."""
        if trip == 0:
            return Value(path, computation, loop.operands[0], element)
        body = self.module.computations[loop.called_as("body")]
        return Value((*path, (computation, loop.name, trip - 1)), body.name, body.root, element)

    def _unrolled_trips(self, computation: str, loop: Instruction) -> int:
        """Trips of a loop that is followed trip by trip; 0 for any other."""
        place = computation, loop.name
        if place not in self._trips:
            unrolled = is_unrolled(self.module, loop.called_as("body"))
            trips = self.module.trip_count(self.module.computations[computation], loop) if unrolled else 0
            self._trips[place] = trips or 0
        return self._trips[place]

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


def ends(module: Module, computation: HloComputation, opcode: str) -> Mapping[str, Sequence[Instruction]]:
    """The instructions of a computation that are this end of a transfer ("send" or "recv"), by their rendezvous."""

    def read() -> dict[str, list[Instruction]]:
        by_meeting: dict[str, list[Instruction]] = {}
        for instruction in computation:
            if instruction.opcode == opcode:
                by_meeting.setdefault(rendezvous(instruction), []).append(instruction)
        return by_meeting

    return module.remember("ends", (computation.name, opcode), read)


def is_unrolled(module: Module, name: str) -> bool:
    """True if a computation is the body of a loop that may be (part of) one ring.

    It permutes what earlier trips have permuted, and has few trips.
    """
    permutes = [instruction for instruction in module.computations[name] if instruction.opcode in PERMUTES]
    loops = [caller for caller in module.callers.get(name, ()) if caller[1].opcode == "while"]
    if not permutes or len(loops) != 1 or loops[0][1].called_as("body") != name:
        return False
    trips = module.trip_count(*loops[0])
    longest = max(_orbit(replica_groups(permute.attributes, 1)) for permute in permutes)
    return trips is not None and trips <= longest + 1 and _permutes_again(Flow(module, name), permutes)


def _permutes_again(body: Flow, permutes: Iterable[Instruction]) -> bool:
    """True if one of the ``permutes`` of a loop's body moves what an earlier trip has permuted."""
    root = body.module.computations[body.frame].root
    results = range(len(body.instruction(Value((), body.frame, root)).shape))
    inputs = {index: _upstream(body, Value((), body.frame, root, index)) for index in results}
    # Elements of the loop's tuple that hold permuted data after a trip, then after further trips.
    permuted = {index for index, values in inputs.items() if any(map(body.is_permute, values))}
    carried = {index: _elements(body, values) for index, values in inputs.items()}
    while more := {index for index in carried if index not in permuted and not permuted.isdisjoint(carried[index])}:
        permuted |= more
    sent = (value for permute in permutes for value in _upstream(body, Value((), body.frame, permute.operands[0])))
    return not permuted.isdisjoint(_elements(body, sent))


def _upstream(flow: Flow, value: Value) -> set[Value]:
    """The values that an array is copied, sliced, permuted or added from, at any distance, and itself."""
    upstream, left = set[Value](), [value]
    while left:
        value = left.pop()
        if value not in upstream:
            upstream.add(value)
            left += flow.operands(value)[:1] if flow.is_permute(value) else flow.inputs(value, "pad", "slice") or ()
    return upstream


def _elements(body: Flow, values: Iterable[Value]) -> set[int | None]:
    """Elements of a loop's tuple among the values of its body."""
    return {value.element for value in values if not value.path and body.instruction(value).opcode == "parameter"}


@lru_cache(maxsize=64)
def _orbit(pairs: Groups) -> int:
    """Number of devices on the path of data that a permute between ``pairs`` moves again and again."""
    target = dict(pair for pair in pairs if len(pair) == 2)
    start = device = next(iter(target), 0)
    steps = 0
    while steps == 0 or (device in target and device != start):
        device = target.get(device, start)
        steps += 1
    return steps
