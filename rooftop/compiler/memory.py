"""What fills HBM at the peak of a compiled program, and the answer when it is too much."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rooftop.compiler.hlo.places import place_of
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.core.errors import Infeasible
from rooftop.core.quantities import format_bytes
from rooftop.core.scopes import UNSCOPED

#: Classes of what lies in HBM, those of the planner first. ``weights`` includes copies in the compute dtype,
#: ``gradients`` have the shape of the weights that the program is given, ``activations`` are what the forward pass has
#: left for the backward pass; ``workspace`` is the rest of the temporaries.
CLASSES: tuple[str, ...] = (
    "weights", "optimizer", "gradients", "activations", "workspace", "batch", "other",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HbmBuffer:
    """One array in the HBM of one device. ``bytes`` are those that it fills, padding included.

    ``name`` is the argument's (``state.weights.embed``) or the instruction's, ``shape`` as in HLO without its layout.
    ``source`` is the 'file:line' that it comes from ('' if unknown); an argument has no scope, phase and source.
    """

    bytes: int
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
class PeakMemory:
    """What one device holds in HBM when most of it is in use; ``buffers`` are the arrays, largest first.

    ``peak_bytes`` is their sum. ``allocated_bytes`` has beside them the holes of the heap: that is what XLA:TPU holds
    against the HBM that it may use. XLA's own ``peak_memory_in_bytes`` is ``peak_bytes``, except in small programs:
    where more of VMEM is in use than of the heap it counts that instead. The program's code is in neither.
    """

    allocated_bytes: int
    buffers: tuple[HbmBuffer, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes that are alive at the peak."""
        return sum(each.bytes for each in self.buffers)

    @property
    def by_class(self) -> dict[str, int]:
        """Bytes of each class, in the order of ``CLASSES``, without those that hold nothing."""
        totals = dict.fromkeys(CLASSES, 0)
        for each in self.buffers:
            totals[each.memory_class] += each.bytes
        return {name: total for name, total in totals.items() if total}

    def to_json(self) -> dict[str, Any]:
        """The reading as plain JSON values."""
        buffers = [asdict(each) for each in self.buffers]
        return {"peak_bytes": self.peak_bytes, "allocated_bytes": self.allocated_bytes} | {"buffers": buffers}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PeakMemory:
        """The inverse of ``to_json``."""
        return cls(
            allocated_bytes=data["allocated_bytes"], buffers=tuple(HbmBuffer(**each) for each in data["buffers"])
        )


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXCEEDED = re.compile(
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"
    r"|Ran out of memory in memory space hbm\. Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"
)


def read_exceeded(said: str) -> tuple[float, float] | None:
    """HBM needed and available, in bytes, where XLA:TPU says that a program needs more than there is; else None."""
    found = _EXCEEDED.search(said)
    if found is None:
        return None
    needed, needed_unit, available, available_unit = (each for each in found.groups() if each is not None)
    return float(needed) * _UNITS[needed_unit], float(available) * _UNITS[available_unit]


class OutOfMemory(Infeasible):
    """A program that does not fit in HBM.

    ``needed_bytes`` and ``available_bytes`` are those of one device, as the compiler prints them (two decimals of a
    GiB); ``at_peak`` is what would have filled them, None if the compiler left no report.
    """

    def __init__(
        self, what: str, *, needed_bytes: float, available_bytes: float, at_peak: PeakMemory | None = None
    ) -> None:
        self.needed_bytes, self.available_bytes, self.at_peak = needed_bytes, available_bytes, at_peak
        figures = (needed_bytes, available_bytes, needed_bytes - available_bytes)
        needed, available, over = (f"{each / 2**30:.2f}GiB" for each in figures)
        super().__init__(what, f"needs {needed} of the {available} of HBM of a device: {over} too many")

    def to_json(self) -> dict[str, Any]:
        """The answer as plain JSON values."""
        at_peak = self.at_peak and self.at_peak.to_json()
        figures = {"needed_bytes": self.needed_bytes, "available_bytes": self.available_bytes}
        return {"what": self.what, **figures, "at_peak": at_peak}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutOfMemory:
        """The inverse of ``to_json``."""
        at_peak = data["at_peak"] and PeakMemory.from_json(data["at_peak"])
        return cls(**{**data, "at_peak": at_peak})


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

    def argument(self, allocation: _Allocation) -> HbmBuffer:
        """The buffer of an argument of the program."""
        value = allocation.values[0]
        # HLO text escapes quotes: params[\'up\'].
        name = self.places[value.key[0]][1].op_name.replace("\\", "") or value.key[0]
        return HbmBuffer(bytes=allocation.size, shape=value.shape, memory_class=argument_class(name), name=name)

    def array(self, size: int, values: Sequence[_Value]) -> HbmBuffer:
        """A buffer that the program fills; the first of its values that has a name in the program tells what it is."""
        filled = [self._filled_by(value) for value in values if value.key[0] in self.places]
        if not filled:
            return HbmBuffer(bytes=size, shape="", memory_class="other", name="constant")
        at, (inside, origin) = next((each for each in enumerate(filled) if each[1][1].op_name), (0, filled[0]))
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

    def _filled_by(self, value: _Value) -> tuple[HloComputation, Instruction]:
        """The instruction that fills a buffer: seen through copies, and through what a loop carries."""
        name, index = value.key
        return self._through(*self.places[name], int(index.split(",")[0]) if index else None, *_COPIES)

    def _named(self, inside: HloComputation, instruction: Instruction) -> tuple[HloComputation, Instruction]:
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
        self, inside: HloComputation, instruction: Instruction, element: int | None, *opcodes: str
    ) -> tuple[HloComputation, Instruction]:
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
        self, inside: HloComputation, loop: Instruction, element: int
    ) -> tuple[HloComputation, Instruction, int | None]:
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


def _before(inside: HloComputation, instruction: Instruction) -> Instruction:
    """What an array is made of: of a stack that a loop adds a part to, the part."""
    operands = inside.operands(instruction)
    if instruction.op_name.endswith("dynamic_update_slice"):
        whole = sum(tensor.elements for tensor in instruction.shape)
        parts = [each for each in operands if len(each.shape) == 1 and 1 < each.shape[0].elements < whole]
        return max(parts, key=lambda each: each.shape[0].elements, default=operands[0])
    return operands[0]


def _loop(
    module: Module, inside: HloComputation, instruction: Instruction
) -> tuple[HloComputation, Instruction] | None:
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
