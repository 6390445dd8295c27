"""A parser of the HLO text of ``compiled.as_text()``: computations, instructions, and their numbers of executions.

It parses the parts that ledgers need (shapes, opcodes, operands, called computations, op_name, replica groups) and
leaves the rest of each line as raw attributes. The text is public and complete; this module does not need JAX.

A text may come from anybody. ``parse`` refuses a text whose graph is none: operands stand before their users, as XLA
prints them, no computation calls itself, and calls are not nested or unfolded without bound. Readers rely on that.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

from rooftop.compiler.hlo.scopes import ProgramScopes, Stack, StackFrame, source_of
from rooftop.core.errors import RooftopError

#: Bits of one element by HLO type; types that are not here (token, opaque) hold no data.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16} | {
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip

T = TypeVar("T")

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_END = re.compile(r'^\}(?:, execution_thread="\w+")?$')
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_TENSOR = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
# A memory space stands at the end of a layout: {1,0:T(8,128)(2,1)S(1)}.
_SPACE = re.compile(r"S\((\d{1,9})\)")
_ROLES = "calls|to_apply|condition|body|branch_computations|true_computation|false_computation|called_computations"
_CALLED = re.compile(rf"\b(?:{_ROLES})=(\{{[^{{}}]*\}}|%?[\w.\-]+)")


#: The scope with which a program declares how often it takes a branch of a conditional.
_TAKEN = re.compile(r"taken\[(\d{1,12}):(0*[1-9]\d{0,11})(?::(\d{1,12}(?:\.\d{1,12})?))?\]")
_TRIPS = re.compile(r"trips\[(\d{1,12}(?:\.\d{1,12})?)\]")

#: Levels of calls, fusions and loops in each other. XLA inlines calls: its own modules have fewer than ten.
MOST_NESTED = 100
#: Instructions of a module with each computation written out wherever it is called.
MOST_UNFOLDED = 1_000_000
#: Elements of an array, and executions of an instruction: XLA counts both in 64 bits.
_LARGEST = 2**63 - 1
#: Digits of a number in the text.
_DIGITS = 19
#: Frames of a stack that are kept, the innermost ones.
_MOST_FRAMES = 256
#: Opcodes that run other computations, with the least number of them.
_CALLERS = {"while": 2, "fusion": 1, "fusion-start": 1, "call": 1, "conditional": 1}


@dataclass(frozen=True)
class HloTensor:
    """Type and dims of one array, on one device. On a TPU ``space`` is 0 in HBM, 1 in VMEM, more in scalar memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> float:
        """Bytes of the elements, without padding."""
        bits = 8 if self.dtype.startswith("f8") else _BITS.get(self.dtype, 0)
        return self.elements * bits / 8


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction. ``shape`` lists the arrays of its result (several for a tuple); ``operands`` are names."""

    name: str
    opcode: str
    shape: tuple[HloTensor, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @cached_property
    def op_name(self) -> str:
        """The program's name stack for this instruction ('' when the compiler dropped it)."""
        return _first(r'op_name="([^"]*)"', self.attributes)

    @property
    def channel(self) -> int | None:
        """The channel id of a collective."""
        channel_id = _first(r"\bchannel_id=(\d+)", self.attributes)
        return int(channel_id) if channel_id else None

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls, fuses, loops over or reduces with."""
        return tuple(
            name.strip().lstrip("%")
            for group in _CALLED.findall(self.attributes)
            for name in group.strip("{}").split(",")
            if name.strip()
        )

    def attribute(self, name: str) -> str:
        """The raw value of a simple attribute: a word, or the text between braces ('' if absent)."""
        return _first(rf"(?:^|[\s,]){name}=(\{{[^}}]*\}}|[^\s,]+)", self.attributes).strip("{}")

    def called_as(self, role: str) -> str:
        """The computation called in one role: 'calls', 'body', 'condition', 'to_apply' ('' when absent)."""
        return self.attribute(role).lstrip("%")


@dataclass(frozen=True, kw_only=True)
class HloComputation:
    """A named list of instructions in the order of the text: the order of execution in a scheduled module."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {name: position for position, name in enumerate(self.instructions)}

    def position(self, instruction: Instruction) -> int:
        """The index of an instruction in the order of the text."""
        return self._positions[instruction.name]

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions whose results ``instruction`` reads."""
        return tuple(self.instructions[name] for name in instruction.operands)

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """The instructions that use each result, by its name."""
        by_name: dict[str, list[Instruction]] = {}
        for instruction in self:
            for name in instruction.operands:
                by_name.setdefault(name, []).append(instruction)
        return by_name

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, in the order of the text."""
        return tuple(instruction for instruction in self if instruction.opcode == "parameter")

    @cached_property
    def elements(self) -> Mapping[tuple[str, str], list[Instruction]]:
        """The ``get-tuple-element`` of each result, by its name and the index as it is written."""
        by_index: dict[tuple[str, str], list[Instruction]] = {}
        for instruction in self:
            if instruction.opcode == "get-tuple-element":
                by_index.setdefault((instruction.operands[0], instruction.attribute("index")), []).append(instruction)
        return by_index

    @cached_property
    def _origins(self) -> dict[object, dict[str, Instruction]]:
        return {}

    def origin(self, source: Instruction, moves: Callable[[Instruction], bool]) -> Instruction:
        """The result that ``source`` is made from by ``moves``, through the first operand of each.

        Results are kept by the function ``moves``: use one that lives as long as the program.
        """
        known, path = self._origins.setdefault(moves, {}), list[str]()
        while source.name not in known and source.operands and moves(source):
            path.append(source.name)
            source = self.instructions[source.operands[0]]
        source = known.get(source.name, source)
        known |= dict.fromkeys(path, source)
        return source


class Taken(NamedTuple):
    """Shares of the executions of a conditional: those that take a branch, and those that last as long as it.

    A program declares them by a scope in the branch: ``taken[8:22:11]`` is taken in 8 of 22 executions on a device in
    the mean, and in 11 the device waits for others that take it. ``taken[8:22]`` says that all of them last as long.
    Both are 1 without a declaration.
    """

    executed: Fraction
    waited: Fraction


@dataclass(frozen=True, kw_only=True)
class Module:
    """A parsed HLO module, of one device's program. ``stacks`` has the frames of every stack frame id, innermost first.

    ``memo`` keeps what readers have found out about it, by a name of theirs and their key: see ``remember``.
    """

    name: str
    computations: Mapping[str, HloComputation]
    entry: str
    stacks: Mapping[int, Stack] = field(default_factory=dict)
    memo: dict[str, dict[Any, Any]] = field(default_factory=dict, repr=False, compare=False)

    def remember(self, what: str, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what was computed of the module under this name and key before, or compute it now."""
        known: dict[Hashable, T] = self.memo.setdefault(what, {})
        if key not in known:
            known[key] = compute()
        return known[key]

    def stack(self, instruction: Instruction) -> Stack:
        """The stack frames of an instruction, innermost first (none if the compiler dropped them)."""
        frame = _first(r"stack_frame_id=(\d+)", instruction.attributes)
        return self.stacks.get(int(frame), ()) if frame else ()

    def source(self, instruction: Instruction) -> str:
        """The 'file:line' of the program that an instruction comes from ('' if the compiler dropped it)."""
        return source_of(self.stack(instruction))

    def frames(self, instruction: Instruction) -> tuple[str, ...]:
        """'file:line function' of every stack frame of an instruction, innermost first."""
        return tuple(f"{frame.place} {frame.function}".rstrip() for frame in self.stack(instruction))

    @cached_property
    def scopes(self) -> ProgramScopes:
        """The scopes of the program."""
        instructions = (instruction for computation in self.computations.values() for instruction in computation)
        return ProgramScopes.read((instruction.op_name for instruction in instructions), self.stacks)

    def place(self, instruction: Instruction) -> tuple[str, str]:
        """Scope and phase of an instruction by its name and its stack frames."""
        return self.scopes.place(instruction.op_name, self.stack(instruction))

    @cached_property
    def callers(self) -> Mapping[str, tuple[tuple[HloComputation, Instruction], ...]]:
        """For each computation, the instructions that call it, with their computations."""
        callers: dict[str, list[tuple[HloComputation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation:
                for name in instruction.called:
                    callers.setdefault(name, []).append((computation, instruction))
        return {name: tuple(sites) for name, sites in callers.items()}

    @cached_property
    def executions(self) -> Mapping[str, float]:
        """Executions of each computation in one execution of the module, loops multiplied out.

        The body of a loop in ``uncounted_loops`` counts once. So does a branch of a conditional, unless its program
        declares in a scope that it takes it more rarely (``Taken``): the count is a mean, and may have a fraction. So
        may the trips that a program declares (``declared_trips``). Unreachable computations count zero.
        """
        counts = dict.fromkeys(self.computations, Fraction(0))
        counts[self.entry] = Fraction(1)
        for name in self.callers_first:
            for caller, instruction in self.callers.get(name, ()):
                times = Fraction(1)
                if instruction.opcode == "while":
                    counted = self.trip_count(caller, instruction)
                    times = self.declared_trips(instruction) or Fraction(1) if counted is None else Fraction(counted)
                elif instruction.opcode == "conditional":
                    times = self.taken(instruction, self.computations[name]).executed
                counts[name] += counts[caller.name] * times
            if counts[name] > _LARGEST:
                raise RooftopError("hlo", f"more than 2**63 executions of {name}", "loops with fewer trips")
        return {name: int(count) if count.denominator == 1 else float(count) for name, count in counts.items()}

    def taken(self, conditional: Instruction, branch: HloComputation) -> Taken:
        """Return how often a conditional takes a branch.

        Scopes around the conditional declare the branches that it is in, not its own.
        """
        key = conditional.op_name, branch.name
        return self.remember("taken", key, lambda: self._taken(conditional, branch))

    def _taken(self, conditional: Instruction, branch: HloComputation) -> Taken:
        outside = len(_TAKEN.findall(conditional.op_name))
        for instruction in branch:
            if declared := _TAKEN.findall(instruction.op_name)[outside:]:
                times, of, waited = declared[0]
                return Taken(Fraction(int(times), int(of)), Fraction(waited) / int(of) if waited else Fraction(1))
        return Taken(Fraction(1), Fraction(1))

    @cached_property
    def uncounted_loops(self) -> tuple[str, ...]:
        """Loops whose trip count does not follow from the text (it depends on data), nor from a declaration."""
        return tuple(
            instruction.name
            for computation in self.computations.values()
            for instruction in computation
            if instruction.opcode == "while"
            and self.trip_count(computation, instruction) is None
            and self.declared_trips(instruction) is None
        )

    def declared_trips(self, loop: Instruction) -> Fraction | None:
        """The mean trips of a loop that its program declares by a scope in the body: ``trips[2.5]``."""
        key = loop.op_name, loop.called_as("body")
        return self.remember("declared trips", key, lambda: self._declared_trips(loop))

    def _declared_trips(self, loop: Instruction) -> Fraction | None:
        outside = len(_TRIPS.findall(loop.op_name))
        for instruction in self.computations[loop.called_as("body")]:
            if declared := _TRIPS.findall(instruction.op_name)[outside:]:
                return Fraction(declared[0])
        return None

    def trip_count(self, computation: HloComputation, loop: Instruction) -> int | None:
        """Trips of a ``while`` that counts from a constant to a constant, else None. TPU text prints none."""
        key = computation.name, loop.name
        return self.remember("trips", key, lambda: trip_count(self.computations, computation, loop))

    @cached_property
    def callers_first(self) -> tuple[str, ...]:
        """Computations in an order in which every caller precedes the computations that it calls.

        One that calls itself, at any distance, is not among them.
        """
        calls = {name: len(self.callers.get(name, ())) for name in self.computations}
        order = [name for name, count in calls.items() if not count]
        for name in order:
            for instruction in self.computations[name]:
                for called in instruction.called:
                    if called in calls:
                        calls[called] -= 1
                        if not calls[called]:
                            order.append(called)
        return tuple(order)


def parse(text: str) -> Module:
    """Parse a module's text. Raises RooftopError if it is not HLO."""
    module = _parsed(text)
    _check_graph(module)
    return module


def _parsed(text: str) -> Module:
    computations: dict[str, HloComputation] = {}
    entry, name = "", ""
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in _whole_lines(text):
        if not name:
            if match := _HEADER.match(line):
                name, instructions, root = match.group(2), {}, ""
                if name in computations:
                    raise RooftopError("hlo", f"two computations {name}", "computations with names of their own")
                entry = name if match.group(1) else entry
        elif line.startswith("}"):
            last = next(reversed(instructions), "")
            if not last:
                raise RooftopError("hlo", f"{name} without instructions", "computations with a result")
            computations[name] = HloComputation(name=name, instructions=instructions, root=root or last)
            name = ""
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(match.group(2), match.group(3))
            if instruction.name in instructions:
                two = f"two instructions {instruction.name} in {name}"
                raise RooftopError("hlo", two, "instructions with names of their own in each computation")
            for operand in instruction.operands:
                if operand not in instructions:
                    fault = f"{instruction.name} in {name}, which reads {operand}"
                    raise RooftopError("hlo", fault, "operands that stand before what reads them, in one computation")
            instructions[instruction.name] = instruction
            root = instruction.name if match.group(1) else root
    if not entry or entry not in computations:
        raise RooftopError("hlo", text[:60], "the text of a compiled HLO module, with an ENTRY computation")
    name = _first(r"^HloModule ([\w.\-]+)", text)
    return Module(name=name, computations=computations, entry=entry, stacks=_stacks(text))


def _check_graph(module: Module) -> None:
    """Raise RooftopError for calls of what is not there, of the caller itself, and for too many in each other."""
    for computation in module.computations.values():
        for instruction in computation:
            _check_calls(module, instruction)
    looped = next(iter(module.computations.keys() - set(module.callers_first)), None)
    if looped is not None:
        raise RooftopError("hlo", f"{looped}, which calls itself", "computations that call only others")
    depth = dict.fromkeys(module.computations, 0)
    unfolded = dict.fromkeys(module.computations, 0)
    for name in reversed(module.callers_first):
        unfolded[name] = len(module.computations[name].instructions)
        for instruction in module.computations[name]:
            for called in instruction.called:
                if called in depth:
                    depth[name] = max(depth[name], 1 + depth[called])
                    unfolded[name] += unfolded[called]
        if depth[name] > MOST_NESTED:
            raise RooftopError("hlo", f"{depth[name]:,} levels of calls in {name}", f"up to {MOST_NESTED} levels")
        if unfolded[name] > MOST_UNFOLDED:
            fault = f"{name}, whose calls unfold to more than {MOST_UNFOLDED:,} instructions"
            raise RooftopError("hlo", fault, f"up to {MOST_UNFOLDED:,} instructions")


def _check_calls(module: Module, instruction: Instruction) -> None:
    least = _CALLERS.get(instruction.opcode, 0)
    roles = ("body", "condition") if instruction.opcode == "while" else ()
    named = tuple(map(instruction.called_as, roles)) or instruction.called
    missing = next((name for name in named if name not in module.computations), None)
    if least and (missing is not None or len(named) < least):
        fault = f"{instruction.opcode} {instruction.name}, which calls {missing or 'nothing'}"
        raise RooftopError("hlo", fault, "calls of computations that the module has")


def _whole_lines(text: str) -> Iterator[str]:
    """The lines of a text, each instruction on one: the metadata of a Pallas kernel may span several."""
    pending: list[str] = []
    for line in text.splitlines():
        # Inside a computation every line except the last begins with two spaces.
        if pending and not (line.startswith("  ") or _END.match(line)):
            pending.append(line)
            continue
        if pending:
            yield "".join(pending)
        pending = [line] if line.startswith("  ") else []
        if not pending:
            yield line
    if pending:
        yield "".join(pending)


def aliases(text: str) -> dict[int, int]:
    """The argument that each result takes the place of, as the first line of a module's text says."""
    header = text.partition("\n")[0]
    pairs = header.partition("input_output_alias={")[2].partition(" }")[0]
    return {int(output or 0): int(number) for output, number in re.findall(r"\{(\d*)\}: \((\d+), \{", pairs)}


def _stacks(text: str) -> dict[int, Stack]:
    """The stack of every frame id, from the tables at the head of the text."""
    tables = text[: text.find("{\n")]

    def named(heading: str) -> dict[str, str]:
        rows = tables.partition(f"\n{heading}\n")[2].partition("\n\n")[0]
        return dict(re.findall(r'^(\d+) "(.*)"$', rows, re.MULTILINE))

    files, functions = named("FileNames"), named("FunctionNames")
    places = {
        place: StackFrame(files.get(name, ""), int(line), functions.get(function, ""))
        for place, name, function, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+)(?: function_name_id=(\d+))? .*?\bline=(\d+)", tables, re.MULTILINE
        )
    }
    stacks: dict[int, Stack] = {}
    frame_rows = re.findall(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", tables, re.MULTILINE)
    for frame, place, parent in frame_rows:
        # Parents precede their children, and their printed id is one too high.
        callers = stacks.get(int(parent) - 1, ())
        stacks[int(frame)] = (places[place], *callers[: _MOST_FRAMES - 1]) if place in places else callers
    return stacks


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    match = _OPCODE.match(text, end) if end > 0 else None
    if match is None:
        raise RooftopError("hlo instruction", f"{name} = {text[:80]}", "a result shape, an opcode and operands")
    opening = match.end() - 1
    closing = _closing(text, opening)
    inside = text[opening + 1 : closing]
    opcode = match.group(1)
    if opcode == "parameter" and not re.fullmatch(r"\d{1,9}", inside):
        raise RooftopError("hlo instruction", f"{name} = {text[:80]}", "the number of a parameter")
    operands = _operands(inside) if opcode not in ("constant", "parameter", "iota") else ()
    attributes = text[closing + 1 :]
    if opcode == "get-tuple-element" and not (operands and re.search(r"\bindex=\d{1,9}\b", attributes)):
        raise RooftopError("hlo instruction", f"{name} = {text[:80]}", "an operand and index=NUMBER")
    shape = tuple(_tensors(text[:end]))
    if sum(tensor.elements for tensor in shape) > _LARGEST:
        raise RooftopError("hlo instruction", f"{name} = {text[:80]}", "arrays with fewer than 2**63 elements")
    return Instruction(name=name, opcode=opcode, shape=shape, operands=operands, literal=inside, attributes=attributes)


def _operands(inside: str) -> tuple[str, ...]:
    """Names of the operands; types may precede them, and '%' only precedes names."""
    if "%" in inside:
        return tuple(re.findall(r"%([\w.\-]+)", inside))
    bare = re.sub(r"/\*[^/*]*\*/|\[[^\[\]]*\]|\{[^{}]*\}", "", inside)
    return tuple(part.split()[-1] for part in bare.split(",") if part.strip())


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at ``opening``."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    raise RooftopError("hlo instruction", text[:80], "balanced parentheses")


def _tensors(text: str) -> Iterator[HloTensor]:
    # A layout such as {1,0:T(8,128)} has no word before a bracket, so every match is an array.
    for dtype, dims, layout in _TENSOR.findall(text):
        sizes = [dim.lstrip("<=") for dim in dims.split(",") if dim]
        if any(len(size) > _DIGITS or not size.isdecimal() for size in sizes):
            raise RooftopError("hlo instruction", text[:80], f"dims of up to {_DIGITS} digits")
        space = _SPACE.search(layout)
        yield HloTensor(dtype, tuple(map(int, sizes)), int(space.group(1)) if space else 0)


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""


_COUNTERS = ("s32", "u32", "s64", "u64")
_INTEGER = re.compile(r"-?\d{1,19}")
#: Instructions that are evaluated to count the trips of one loop; of a longer calculation the trips are unknown.
_MOST_STEPS = 200_000

# Not EQ and NE: bisection counts the trips of a loop, and needs a condition that changes once.
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}


def trip_count(
    computations: Mapping[str, HloComputation], computation: HloComputation, loop: Instruction
) -> int | None:
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
    """Scalar integers that follow from a module's constants; ``steps`` counts the instructions that were evaluated."""

    computations: Mapping[str, HloComputation]
    steps: list[int] = field(default_factory=lambda: [0])

    def trips(
        self,
        computation: HloComputation,
        loop: Instruction,
        body: HloComputation,
        condition: HloComputation,
        element: int,
    ) -> int | None:
        """Trips if ``element`` of the loop's tuple is the counter."""
        carried = computation.operands(loop)[0]
        if carried.opcode != "tuple" or loop.shape[element].dims or loop.shape[element].dtype not in _COUNTERS:
            return None
        if element >= len(carried.operands):
            return None

        def initial(index: int) -> int | None:
            return self.value(computation, carried.operands[index], lambda *_: None)

        def at(counter: int) -> Callable[[int, int | None], int | None]:
            """Parameters of body and condition: the given counter; other elements keep their initial value."""
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
        return high if self.steps[0] <= _MOST_STEPS else None

    def value(
        self, computation: HloComputation, name: str, parameter: Callable[[int, int | None], int | None]
    ) -> int | None:
        """The integer result of a scalar instruction, or None; ``parameter(number, element)`` gives the inputs."""
        known: dict[str, int | None] = {}
        left = [name]
        while left:
            instruction = computation.instructions[left[-1]]
            waits = [read for read in self._reads(computation, instruction) if read not in known]
            left += waits
            if not waits:
                self.steps[0] += 1
                if self.steps[0] > _MOST_STEPS:
                    return None
                known[left.pop()] = self._result(computation, instruction, known, parameter)
        return known[name]

    def _reads(self, computation: HloComputation, instruction: Instruction) -> tuple[str, ...]:
        """The operands whose values are needed for that of an instruction."""
        if instruction.opcode in ("constant", "parameter", "fusion", "call"):
            return ()
        if instruction.opcode == "get-tuple-element":
            source, index = computation.operands(instruction)[0], int(instruction.attribute("index"))
            return source.operands[index : index + 1] if source.opcode == "tuple" else ()
        return instruction.operands

    def _result(
        self,
        computation: HloComputation,
        instruction: Instruction,
        known: Mapping[str, int | None],
        parameter: Callable[[int, int | None], int | None],
    ) -> int | None:
        """The value of an instruction, from those ``known`` of its operands."""
        opcode = instruction.opcode
        if opcode == "constant":
            return int(instruction.literal) if _INTEGER.fullmatch(instruction.literal) else None
        if opcode == "parameter":
            return parameter(int(instruction.literal), None)
        if opcode == "get-tuple-element":
            source, index = computation.operands(instruction)[0], int(instruction.attribute("index"))
            if source.opcode == "parameter":
                return parameter(int(source.literal), index)
            return next((known[name] for name in self._reads(computation, instruction)), None)
        if opcode in ("fusion", "call"):
            inner = self.computations[instruction.called[0]]
            inputs = cache(lambda number: self.value(computation, instruction.operands[number], parameter))
            return self.value(inner, inner.root, lambda number, _: inputs(number))
        values = [known[operand] for operand in instruction.operands]
        numbers = [value for value in values if value is not None]
        if not numbers or len(numbers) < len(values):
            return None
        if opcode in ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done"):
            return numbers[0]
        operation = _ARITHMETIC.get(instruction.attribute("direction") if opcode == "compare" else opcode)
        result = None if operation is None else int(operation(numbers[0], numbers[-1]))
        return result if result is None or abs(result) <= _LARGEST else None
