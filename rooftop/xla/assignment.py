"""What fills HBM at the peak of a compiled program: array by array, from the compiler's own assignment of buffers.

XLA:TPU writes two reports when it is asked to dump: where every value lies (``buffer-assignment.txt``: allocations,
each with its values, their offsets and sizes) and when it is alive (``live-range.txt``: the order of execution, and a
range in it for every value). The arguments, the constants and what the program returns are there all the time; of the
temporaries, which share one heap, those count that are alive at the moment when they cover most of it. Values that
lie in the same place are one buffer: the compiler updates in place, and hands arrays round loops.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rooftop.scopes import UNSCOPED
from rooftop.xla.hlo import Computation, Instruction, Module
from rooftop.xla.memory import Buffer, PeakMemory
from rooftop.xla.places import place_of

#: Words of an argument's name that tell its class; the first class that has one decides.
_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "optimizer": frozenset({"first_moment", "second_moment", "moments", "mu", "nu", "opt_state", "optimizer"}),
    "weights": frozenset({"weights", "params", "parameters"}),
    "batch": frozenset({"batch", "tokens", "targets", "labels"}),
}

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(?:, color (\d+))?(?:, page \d+)?, (.*)")
_VALUE = re.compile(r" value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @(\d+)> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"^    ([^\s{]+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_ORDER = re.compile(r"^    (\d+):(\S+)$", re.MULTILINE)


def read_memory(assignment: str, live_ranges: str, module: Module) -> PeakMemory:
    """What is alive in HBM at the peak, from the texts of both reports and the module that they are about."""
    held, heap = _allocations(assignment)
    ranges = {(name, index): (int(start), int(end)) for name, index, start, end in _RANGE.findall(live_ranges)}
    order = {int(time): name for time, name in _ORDER.findall(live_ranges.partition("BufferLiveRange:")[0])}
    temporaries = [(value, *ranges[value.key]) for each in heap for value in each.values if value.key in ranges]
    time = _peak_time(temporaries)
    alive = sorted((each for each in temporaries if each[1] <= time <= each[2]), key=lambda each: each[1])
    reader = _Reader(module, order.get(time, ""))
    buffers = [reader.argument(each) if each.parameter else reader.array(each.size, each.values[:1]) for each in held]
    buffers += [reader.array(size, values) for size, values in _places([value for value, _, _ in alive])]
    return PeakMemory(
        allocated_bytes=sum(each.size for each in (*held, *heap)),
        buffers=tuple(sorted(buffers, key=lambda each: -each.bytes)),
    )


@dataclass(frozen=True, kw_only=True)
class _Value:
    """A value and where it lies: ``key`` is its instruction and its index in a tuple ('' for the whole)."""

    key: tuple[str, str]
    begin: int
    end: int
    shape: str


@dataclass(frozen=True, kw_only=True)
class _Allocation:
    size: int
    parameter: bool
    values: tuple[_Value, ...]


def _allocations(assignment: str) -> tuple[list[_Allocation], list[_Allocation]]:
    """The allocations in HBM: those that are there all the time, and the heap of temporaries."""
    held: list[_Allocation] = []
    heap: list[_Allocation] = []
    base = 0
    for block in re.split(r"^(?=allocation )", assignment, flags=re.MULTILINE):
        match = _ALLOCATION.match(block)
        if match is None or int(match[2] or 0) or "thread-local" in match[3]:
            continue
        size, temporary = int(match[1]), "preallocated-temp" in match[3]
        values = tuple(_values(block, base if temporary else 0))
        found = _Allocation(size=size, parameter=match[3].startswith("parameter"), values=values)
        (heap if temporary else held).append(found)
        base += size if temporary else 0
    return held, heap


def _values(block: str, base: int) -> Iterator[_Value]:
    for name, index, _, size, offset, shape in _VALUE.findall(block):
        begin = base + int(offset)
        plain = re.sub(r"\{[^{}]*\}", "", shape)
        yield _Value(key=(name, index), begin=begin, end=begin + int(size), shape=plain)


def _peak_time(temporaries: list[tuple[_Value, int, int]]) -> int:
    """When the values that are alive cover most bytes."""
    steps: dict[int, int] = {}
    for value, start, end in temporaries:
        steps[start] = steps.get(start, 0) + value.end - value.begin
        steps[end + 1] = steps.get(end + 1, 0) - value.end + value.begin
    # The sum of sizes counts what lies in one place twice: it only says where to look.
    sums, total = [], 0
    for time in sorted(steps):
        total += steps[time]
        sums.append((total, time))
    best = (0, 0)
    for most, time in sorted(sums, reverse=True):
        if most <= best[0]:
            break
        alive = [value for value, start, end in temporaries if start <= time <= end]
        best = max(best, (sum(size for size, _ in _places(alive)), time))
    return best[1]


def _places(values: list[_Value]) -> Iterator[tuple[int, list[_Value]]]:
    """Bytes of each buffer that the values lie in, with the values in it in their given order."""
    end, found = 0, list[tuple[int, list[_Value]]]()
    for value in sorted(values, key=lambda each: (each.begin, -each.end)):
        if value.begin >= end or value.end > end:
            found.append((value.end - max(end, value.begin), [value]))
            end = value.end
        else:
            found[-1][1].append(value)
    position = {value.key: place for place, value in enumerate(values)}
    for size, members in found:
        yield size, sorted(members, key=lambda each: position[each.key])


class _Reader:
    """Names, scopes and classes of the buffers of one module at one moment: while ``running`` is executed."""

    def __init__(self, module: Module, running: str) -> None:
        self.module = module
        self.places = {each.name: (inside, each) for inside in module.computations.values() for each in inside}
        self.phase = place_of(module, *self.places[running])[1] if running in self.places else ""

    def argument(self, allocation: _Allocation) -> Buffer:
        """The buffer of an argument of the program."""
        value = allocation.values[0]
        # HLO text escapes quotes: params[\'up\'].
        name = self.places[value.key[0]][1].op_name.replace("\\", "") or value.key[0]
        return Buffer(bytes=allocation.size, shape=value.shape, memory_class=argument_class(name), name=name)

    def array(self, size: int, values: Sequence[_Value]) -> Buffer:
        """A buffer that the program fills; the first of its values that has a name in the program tells what it is."""
        filled = [self._filled_by(value) for value in values if value.key[0] in self.places]
        if not filled:
            return Buffer(bytes=size, shape="", memory_class="other", name="constant")
        at, (inside, origin) = next((each for each in enumerate(filled) if each[1][1].op_name), (0, filled[0]))
        named = self._named(inside, origin)
        scope, phase = place_of(self.module, *named)
        return Buffer(
            bytes=size,
            shape=values[at].shape,
            memory_class=self._class(values, named[1], values[at].shape, (scope, phase)),
            name=origin.name,
            scope=scope,
            phase=phase,
            source=self.module.source(named[1]) or self.module.source(origin),
        )

    def _class(self, values: Sequence[_Value], origin: Instruction, shape: str, place: tuple[str, str]) -> str:
        if origin.opcode == "constant":
            return "other"
        scope, phase = place
        # Before the update only the weights' copies in the compute dtype are of the optimizer's scope.
        if scope == "optimizer" and self.phase != "update" and _dims(shape) in self._weight_dims:
            return "weights"
        # The gradients of the last matmul and of the loss are made beside their forward pass, which leaves nothing.
        if scope in ("unembed", "loss") and _dims(shape) not in self._weight_dims:
            return "workspace"
        carried = self._is_carried(values)
        copied = "jvp(" in origin.op_name or argument_class(origin.op_name) == "weights"
        if _dims(shape) in self._weight_dims and (phase == "backward" or not copied):
            return "gradients"
        # What a loop fills in the forward pass is saved for the backward pass, even in the shape of a weight.
        if _dims(shape) in self._weight_dims and not carried:
            return "weights"
        if phase == "forward" and (self.phase != "forward" or carried):
            return "activations"
        return "workspace"

    def _is_carried(self, values: Sequence[_Value]) -> bool:
        """Whether a loop makes the values, or hands them from trip to trip."""
        return any(_loop(self.module, *self.places[value.key[0]]) for value in values if value.key[0] in self.places)

    @cached_property
    def _weight_dims(self) -> set[tuple[int, ...]]:
        """Dims of the stacks of weights that the program is given, whatever their order."""
        entry = self.module.computations[self.module.entry]
        arguments = [each for each in entry if each.opcode == "parameter" and argument_class(each.op_name) == "weights"]
        return {_sorted(each.shape[0].dims) for each in arguments if each.shape} - {(), (1,)}

    def _filled_by(self, value: _Value) -> tuple[Computation, Instruction]:
        """The instruction that fills a buffer: seen through copies, and through what a loop carries."""
        name, index = value.key
        return self._through(*self.places[name], int(index.split(",")[0]) if index else None, *_COPIES)

    def _named(self, inside: Computation, instruction: Instruction) -> tuple[Computation, Instruction]:
        """The nearest instruction before it that stands in a scope, else the nearest that has a name, else itself."""
        at, named = (inside, instruction), None
        for _ in range(_FAR):
            if at[1].op_name and (named is None or place_of(self.module, *at)[0] != UNSCOPED):
                named = at
            if (named and place_of(self.module, *named)[0] != UNSCOPED) or not at[1].operands:
                break
            before = _before(*at)
            element = int(at[1].attribute("index")) if at[1].opcode == "get-tuple-element" else None
            at = self._through(at[0], before, element, *_COPIES)
        return named or (inside, instruction)

    def _through(
        self, inside: Computation, instruction: Instruction, element: int | None, *opcodes: str
    ) -> tuple[Computation, Instruction]:
        """What an array is, seen through unnamed instructions of those opcodes and through loops."""
        for _ in range(_FAR):
            loop = _loop(self.module, inside, instruction)
            if loop and element is not None:
                inside, instruction, element = self._carried(*loop, element)
            elif instruction.opcode in opcodes and instruction.operands and not instruction.op_name:
                if instruction.opcode == "get-tuple-element":
                    element = int(instruction.attribute("index"))
                instruction = inside.operands(instruction)[0]
            else:
                break
        return inside, instruction

    def _carried(
        self, inside: Computation, loop: Instruction, element: int
    ) -> tuple[Computation, Instruction, int | None]:
        """What makes an element of a loop's tuple: its body, or what stood there before if the body leaves it."""
        body = self.module.computations[loop.called_as("body")]
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            return body, root, element
        made = body.operands(root)[element]
        while made.opcode in _COPIES and made.opcode != "get-tuple-element" and made.operands:
            made = body.operands(made)[0]
        if made.opcode != "get-tuple-element":
            return body, made, None
        source, index = body.operands(made)[0], int(made.attribute("index"))
        if source.opcode != "parameter":
            return body, source, index
        before = inside.operands(loop)[0]
        return (inside, inside.operands(before)[index], None) if before.opcode == "tuple" else (inside, before, index)


#: What only hands an array on, under another name or in another place.
_COPIES = ("copy", "copy-start", "copy-done", "bitcast", "get-tuple-element", "optimization-barrier", "convert")


#: Steps that a search for a name goes back.
_FAR = 30


def argument_class(name: str) -> str:
    """The class of an argument of the program, by the words of its name; 'other' if none tells."""
    words = set(re.findall(r"\w+", name))
    return next((found for found, known in _ARGUMENTS.items() if words & known), "other")


def _before(inside: Computation, instruction: Instruction) -> Instruction:
    """What an array is made of: of a stack that a loop adds a part to, the part."""
    operands = inside.operands(instruction)
    if instruction.op_name.endswith("dynamic_update_slice"):
        whole = sum(tensor.elements for tensor in instruction.shape)
        parts = [each for each in operands if len(each.shape) == 1 and 1 < each.shape[0].elements < whole]
        return max(parts, key=lambda each: each.shape[0].elements, default=operands[0])
    return operands[0]


def _loop(module: Module, inside: Computation, instruction: Instruction) -> tuple[Computation, Instruction] | None:
    """The loop whose tuple ``instruction`` is: the loop itself, or the parameter of its body or condition."""
    if instruction.opcode == "while":
        return inside, instruction
    if instruction.opcode == "parameter":
        return next((each for each in module.callers.get(inside.name, ()) if each[1].opcode == "while"), None)
    return None


def _dims(shape: str) -> tuple[int, ...]:
    found = re.fullmatch(r"\w+\[([\d,]*)\]", shape)
    return _sorted(tuple(int(dim) for dim in found[1].split(",") if dim)) if found else ()


def _sorted(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim != 1))
