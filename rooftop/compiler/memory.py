"""HBM buffers at the memory peak of a compiled program, and the error for a program that does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rooftop.compiler.hlo.places import place_of
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.core.amounts import Count
from rooftop.core.errors import Infeasible
from rooftop.core.quantities import format_bytes
from rooftop.core.records import Record, derived
from rooftop.core.scopes import UNSCOPED

#: Classes of HBM buffers, the planner's first. ``weights`` includes copies in the compute dtype, ``gradients`` have the
#: shape of the program's weights, ``activations`` are saved by the forward pass for the backward pass; ``workspace`` is
#: the rest of the temporaries.
CLASSES: tuple[str, ...] = (
    "weights", "optimizer", "gradients", "activations", "workspace", "batch", "other",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HbmBuffer(Record):
    """One array in the HBM of one device. ``bytes`` include padding.

    ``name`` is the argument's (``state.weights.embed``) or the instruction's, ``shape`` as in HLO without its layout.
    ``source`` is the 'file:line' of its program ('' if unknown). An argument has no scope, phase and source.
    """

    bytes: Count
    shape: str
    memory_class: str
    name: str
    scope: str = ""
    phase: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = " ".join(part for part in (self.scope, self.phase, self.source) if part and part != UNSCOPED)
        return f"{format_bytes(self.bytes)} {self.shape} {self.name}" + (f" ({where})" if where else "")


@dataclass(frozen=True, kw_only=True)
class PeakMemory(Record):
    """HBM of one device at the peak of its use; ``buffers`` are the arrays, largest first.

    ``peak_bytes`` is their sum. ``allocated_bytes`` also has the holes of the heap: XLA:TPU compares it with the usable
    HBM. XLA's own ``peak_memory_in_bytes`` is ``peak_bytes``, except in small programs: if they use more of VMEM than
    of the heap, it counts VMEM instead. Neither includes the program's code.
    """

    allocated_bytes: int
    buffers: tuple[HbmBuffer, ...]

    @derived
    def peak_bytes(self) -> int:
        """Bytes that are alive at the peak."""
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def by_class(self) -> dict[str, int]:
        """Bytes of each class, in the order of ``CLASSES``, without empty classes."""
        totals = dict.fromkeys(CLASSES, 0)
        for buffer in self.buffers:
            totals[buffer.memory_class] += buffer.bytes
        return {name: total for name, total in totals.items() if total}


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXCEEDED = re.compile(
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"
    r"|Ran out of memory in memory space hbm\. Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"
)


def read_exceeded(message: str) -> tuple[float, float] | None:
    """HBM needed and available, in bytes, from XLA:TPU's message that a program needs too much; else None."""
    match = _EXCEEDED.search(message)
    if match is None:
        return None
    needed, needed_unit, available, available_unit = (group for group in match.groups() if group is not None)
    return float(needed) * _UNITS[needed_unit], float(available) * _UNITS[available_unit]


class OutOfMemory(Infeasible):
    """A program that does not fit in HBM.

    ``needed_bytes`` and ``available_bytes`` are those of one device, as the compiler prints them (two decimals of a
    GiB). ``at_peak`` has the buffers at the peak, None if the compiler left no report.
    """

    def __init__(
        self, what: str, *, needed_bytes: float, available_bytes: float, at_peak: PeakMemory | None = None
    ) -> None:
        self.needed_bytes, self.available_bytes, self.at_peak = needed_bytes, available_bytes, at_peak
        figures = (needed_bytes, available_bytes, needed_bytes - available_bytes)
        needed, available, over = (f"{figure / 2**30:.2f}GiB" for figure in figures)
        super().__init__(what, f"needs {needed} of the {available} of HBM of a device: {over} too many")

    @property
    def record(self) -> MemoryShortage:
        """The answer as it is written."""
        return MemoryShortage(
            what=self.what, needed_bytes=self.needed_bytes, available_bytes=self.available_bytes, at_peak=self.at_peak
        )


@dataclass(frozen=True, kw_only=True)
class MemoryShortage(Record):
    """The fields of an OutOfMemory."""

    what: str
    needed_bytes: float
    available_bytes: float
    at_peak: PeakMemory | None

    @property
    def error(self) -> OutOfMemory:
        """The record as an exception."""
        return OutOfMemory(
            self.what, needed_bytes=self.needed_bytes, available_bytes=self.available_bytes, at_peak=self.at_peak
        )


#: Words of an argument's name by its class; the first class with a matching word applies.
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
    """The buffers alive in HBM at the peak, from the texts of both compiler reports and their module."""
    permanent, heap = _allocations(assignment)
    ranges = {(name, index): (int(start), int(end)) for name, index, start, end in _RANGE.findall(live_ranges)}
    order = {int(time): name for time, name in _ORDER.findall(live_ranges.partition("BufferLiveRange:")[0])}
    temporaries = [(value, *ranges[value.key]) for block in heap for value in block.values if value.key in ranges]
    time = _peak_time(temporaries)
    alive = sorted((range_ for range_ in temporaries if range_[1] <= time <= range_[2]), key=lambda range_: range_[1])
    reader = _Reader(module, order.get(time, ""))
    buffers = [
        reader.argument(block) if block.parameter else reader.array(block.size, block.values[:1]) for block in permanent
    ]
    buffers += [reader.array(size, values) for size, values in _places([value for value, _, _ in alive])]
    return PeakMemory(
        allocated_bytes=sum(block.size for block in (*permanent, *heap)),
        buffers=tuple(sorted(buffers, key=lambda buffer: -buffer.bytes)),
    )


@dataclass(frozen=True, kw_only=True)
class _Value:
    """A value and its address range; ``key`` is its instruction and its index in a tuple ('' for the whole)."""

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
    """The allocations in HBM: permanent ones, and the heap of temporaries."""
    permanent: list[_Allocation] = []
    heap: list[_Allocation] = []
    base = 0
    for block in re.split(r"^(?=allocation )", assignment, flags=re.MULTILINE):
        match = _ALLOCATION.match(block)
        if match is None or int(match[2] or 0) or "thread-local" in match[3]:
            continue
        size, temporary = int(match[1]), "preallocated-temp" in match[3]
        values = tuple(_values(block, base if temporary else 0))
        allocation = _Allocation(size=size, parameter=match[3].startswith("parameter"), values=values)
        (heap if temporary else permanent).append(allocation)
        base += size if temporary else 0
    return permanent, heap


def _values(block: str, base: int) -> Iterator[_Value]:
    for name, index, _, size, offset, shape in _VALUE.findall(block):
        begin = base + int(offset)
        plain = re.sub(r"\{[^{}]*\}", "", shape)
        yield _Value(key=(name, index), begin=begin, end=begin + int(size), shape=plain)


def _peak_time(temporaries: list[tuple[_Value, int, int]]) -> int:
    """The time at which the live values cover most bytes."""
    steps: dict[int, int] = {}
    for value, start, end in temporaries:
        steps[start] = steps.get(start, 0) + value.end - value.begin
        steps[end + 1] = steps.get(end + 1, 0) - value.end + value.begin
    # The sum of sizes counts values that share memory twice, so it is only an upper bound that orders the search.
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
    """Bytes of each buffer that contains the values, with its values in the given order."""
    end, buffers = 0, list[tuple[int, list[_Value]]]()
    for value in sorted(values, key=lambda value: (value.begin, -value.end)):
        if value.begin >= end or value.end > end:
            buffers.append((value.end - max(end, value.begin), [value]))
            end = value.end
        else:
            buffers[-1][1].append(value)
    position = {value.key: index for index, value in enumerate(values)}
    for size, members in buffers:
        yield size, sorted(members, key=lambda value: position[value.key])


class _Reader:
    """Names, scopes and classes of the buffers of one module at one moment: while ``running`` executes."""

    def __init__(self, module: Module, running: str) -> None:
        self.module = module
        self.places = {
            instruction.name: (computation, instruction)
            for computation in module.computations.values()
            for instruction in computation
        }
        self.phase = place_of(module, *self.places[running])[1] if running in self.places else ""

    def argument(self, allocation: _Allocation) -> HbmBuffer:
        """The buffer of an argument of the program."""
        value = allocation.values[0]
        # HLO text escapes quotes: params[\'up\'].
        name = self.places[value.key[0]][1].op_name.replace("\\", "") or value.key[0]
        return HbmBuffer(bytes=allocation.size, shape=value.shape, memory_class=argument_class(name), name=name)

    def array(self, size: int, values: Sequence[_Value]) -> HbmBuffer:
        """A buffer that the program fills. The first of its values that has a name in the program describes it."""
        filled = [self._filled_by(value) for value in values if value.key[0] in self.places]
        if not filled:
            return HbmBuffer(bytes=size, shape="", memory_class="other", name="constant")
        at, (inside, origin) = next((entry for entry in enumerate(filled) if entry[1][1].op_name), (0, filled[0]))
        named = self._named(inside, origin)
        scope, phase = place_of(self.module, *named)
        return HbmBuffer(
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
        # Before the update, the optimizer's scope has only the weights' copies in the compute dtype.
        if scope == "optimizer" and self.phase != "update" and _dims(shape) in self._weight_dims:
            return "weights"
        # The gradients of the last matmul and of the loss are computed in their forward pass, which saves nothing.
        if scope in ("unembed", "loss") and _dims(shape) not in self._weight_dims:
            return "workspace"
        carried = self._is_carried(values)
        copied = "jvp(" in origin.op_name or argument_class(origin.op_name) == "weights"
        if _dims(shape) in self._weight_dims and (phase == "backward" or not copied):
            return "gradients"
        # A loop of the forward pass fills buffers for the backward pass, even if they have the shape of a weight.
        if _dims(shape) in self._weight_dims and not carried:
            return "weights"
        if phase == "forward" and (self.phase != "forward" or carried):
            return "activations"
        return "workspace"

    def _is_carried(self, values: Sequence[_Value]) -> bool:
        """True if a loop computes the values, or carries them from trip to trip."""
        return any(_loop(self.module, *self.places[value.key[0]]) for value in values if value.key[0] in self.places)

    @cached_property
    def _weight_dims(self) -> set[tuple[int, ...]]:
        """Dims of the program's stacks of weights, sorted."""
        entry = self.module.computations[self.module.entry]
        arguments = [
            instruction
            for instruction in entry
            if instruction.opcode == "parameter" and argument_class(instruction.op_name) == "weights"
        ]
        return {_sorted(argument.shape[0].dims) for argument in arguments if argument.shape} - {(), (1,)}

    def _filled_by(self, value: _Value) -> tuple[HloComputation, Instruction]:
        """The instruction that fills a buffer, through copies and the carries of loops."""
        name, index = value.key
        return self._through(*self.places[name], int(index.split(",")[0]) if index else None, *_COPIES)

    def _named(self, inside: HloComputation, instruction: Instruction) -> tuple[HloComputation, Instruction]:
        """The nearest preceding instruction in a scope, else the nearest with a name, else ``instruction``."""
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
        self, inside: HloComputation, instruction: Instruction, element: int | None, *opcodes: str
    ) -> tuple[HloComputation, Instruction]:
        """The origin of an array, through unnamed instructions of those opcodes and through loops."""
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
        self, inside: HloComputation, loop: Instruction, element: int
    ) -> tuple[HloComputation, Instruction, int | None]:
        """The origin of an element of a loop's tuple: in the body, or before the loop if the body keeps it."""
        body = self.module.computations[loop.called_as("body")]
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            return body, root, element
        result = body.operands(root)[element]
        while result.opcode in _COPIES and result.opcode != "get-tuple-element" and result.operands:
            result = body.operands(result)[0]
        if result.opcode != "get-tuple-element":
            return body, result, None
        source, index = body.operands(result)[0], int(result.attribute("index"))
        if source.opcode != "parameter":
            return body, source, index
        before = inside.operands(loop)[0]
        return (inside, inside.operands(before)[index], None) if before.opcode == "tuple" else (inside, before, index)


#: Opcodes that only copy or rename an array.
_COPIES = ("copy", "copy-start", "copy-done", "bitcast", "get-tuple-element", "optimization-barrier", "convert")


#: Limit on the steps of a search for a name.
_FAR = 30


def argument_class(name: str) -> str:
    """The class of an argument of the program, by the words of its name; 'other' if none matches."""
    words = set(re.findall(r"\w+", name))
    return next((class_ for class_, known in _ARGUMENTS.items() if words & known), "other")


def _before(inside: HloComputation, instruction: Instruction) -> Instruction:
    """The source of an array. If a loop adds a part to a stack, the source is the part."""
    operands = inside.operands(instruction)
    if instruction.op_name.endswith("dynamic_update_slice"):
        whole = sum(tensor.elements for tensor in instruction.shape)
        parts = [operand for operand in operands if len(operand.shape) == 1 and 1 < operand.shape[0].elements < whole]
        return max(parts, key=lambda part: part.shape[0].elements, default=operands[0])
    return operands[0]


def _loop(
    module: Module, inside: HloComputation, instruction: Instruction
) -> tuple[HloComputation, Instruction] | None:
    """The loop whose tuple ``instruction`` is: the loop itself, or the parameter of its body or condition."""
    if instruction.opcode == "while":
        return inside, instruction
    if instruction.opcode == "parameter":
        return next((caller for caller in module.callers.get(inside.name, ()) if caller[1].opcode == "while"), None)
    return None


def _dims(shape: str) -> tuple[int, ...]:
    match = re.fullmatch(r"\w+\[([\d,]*)\]", shape)
    return _sorted(tuple(int(dim) for dim in match[1].split(",") if dim)) if match else ()


def _sorted(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim != 1))
