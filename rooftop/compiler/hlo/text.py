"""A parser of the HLO text of ``compiled.as_text()``: computations, instructions, and their numbers of executions.

It parses the parts that ledgers need (shapes, opcodes, operands, called computations, op_name, replica groups) and
leaves the rest of each line as raw attributes. The text is public and complete; this module does not need JAX.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from rooftop.compiler.hlo.scopes import ProgramScopes, Stack, StackFrame, source_of
from rooftop.core.errors import RooftopError

#: Bits of one element by HLO type; types that are not here (token, opaque) hold no data.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16} | {
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_END = re.compile(r'^\}(?:, execution_thread="\w+")?$')
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
# A memory space stands at the end of a layout: {1,0:T(8,128)(2,1)S(1)}.
_TENSOR = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{[^}]*?S\((\d+)\)[^}]*\})?")
_ROLES = "calls|to_apply|condition|body|branch_computations|true_computation|false_computation|called_computations"
_CALLED = re.compile(rf"\b(?:{_ROLES})=(\{{[^}}]*\}}|%?[\w.\-]+)")


#: The scope with which a program declares how often it takes a branch of a conditional.
_TAKEN = re.compile(r"taken\[(\d+):(\d+)(?::(\d+(?:\.\d+)?))?\]")
_TRIPS = re.compile(r"trips\[(\d+(?:\.\d+)?)\]")


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

    @property
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

    ``kernels`` keeps the kernels that were counted (``rooftop.compiler.hlo.kernels``), by computation and instruction.
    """

    name: str
    computations: Mapping[str, HloComputation]
    entry: str
    stacks: Mapping[int, Stack] = field(default_factory=dict)
    kernels: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False, compare=False)

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
        for name in self._callers_first():
            for caller, instruction in self.callers.get(name, ()):
                times = Fraction(1)
                if instruction.opcode == "while":
                    counted = self.trip_count(caller, instruction)
                    times = self.declared_trips(instruction) or Fraction(1) if counted is None else Fraction(counted)
                elif instruction.opcode == "conditional":
                    times = self.taken(instruction, self.computations[name]).executed
                counts[name] += counts[caller.name] * times
        return {name: int(count) if count.denominator == 1 else float(count) for name, count in counts.items()}

    def taken(self, conditional: Instruction, branch: HloComputation) -> Taken:
        """Return how often a conditional takes a branch.

        Scopes around the conditional declare the branches that it is in, not its own.
        """
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
        outside = len(_TRIPS.findall(loop.op_name))
        for instruction in self.computations[loop.called_as("body")]:
            if declared := _TRIPS.findall(instruction.op_name)[outside:]:
                return Fraction(declared[0])
        return None

    def trip_count(self, computation: HloComputation, loop: Instruction) -> int | None:
        """Trips of a ``while`` that counts from a constant to a constant, else None. TPU text prints none."""
        return trip_count(self.computations, computation, loop)

    def _callers_first(self) -> Iterable[str]:
        """Computations in an order in which every caller precedes the computations that it calls."""
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            if name not in seen:
                seen.add(name)
                for caller, _ in self.callers.get(name, ()):
                    visit(caller.name)
                order.append(name)

        for name in self.computations:
            visit(name)
        return order


def parse(text: str) -> Module:
    """Parse a module's text. Raises RooftopError if it is not HLO."""
    computations: dict[str, HloComputation] = {}
    entry, name = "", ""
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in _whole_lines(text):
        if not name:
            if match := _HEADER.match(line):
                name, instructions, root = match.group(2), {}, ""
                entry = name if match.group(1) else entry
        elif line.startswith("}"):
            last = next(reversed(instructions), "")
            computations[name] = HloComputation(name=name, instructions=instructions, root=root or last)
            name = ""
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(match.group(2), match.group(3))
            instructions[instruction.name] = instruction
            root = instruction.name if match.group(1) else root
    if not entry or entry not in computations:
        raise RooftopError("hlo", text[:60], "the text of a compiled HLO module, with an ENTRY computation")
    name = _first(r"^HloModule ([\w.\-]+)", text)
    return Module(name=name, computations=computations, entry=entry, stacks=_stacks(text))


def _whole_lines(text: str) -> Iterator[str]:
    """The lines of a text, each instruction on one: the metadata of a Pallas kernel may span several."""
    pending = ""
    for line in text.splitlines():
        # Inside a computation every line except the last begins with two spaces.
        if pending and not (line.startswith("  ") or _END.match(line)):
            pending += line
            continue
        if pending:
            yield pending
        pending = line if line.startswith("  ") else ""
        if not pending:
            yield line
    if pending:
        yield pending


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
        stacks[int(frame)] = (places[place], *callers) if place in places else callers
    return stacks


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    match = _OPCODE.match(text, end)
    if match is None:
        raise RooftopError("hlo instruction", f"{name} = {text[:80]}", "a result shape, an opcode and operands")
    opening = match.end() - 1
    closing = _closing(text, opening)
    inside = text[opening + 1 : closing]
    return Instruction(
        name=name,
        opcode=match.group(1),
        shape=tuple(_tensors(text[:end])),
        operands=_operands(inside) if match.group(1) not in ("constant", "parameter", "iota") else (),
        literal=inside,
        attributes=text[closing + 1 :],
    )


def _operands(inside: str) -> tuple[str, ...]:
    """Names of the operands; types may precede them, and '%' only precedes names."""
    if "%" in inside:
        return tuple(re.findall(r"%([\w.\-]+)", inside))
    bare = re.sub(r"/\*.*?\*/|\[[^\]]*\]|\{[^}]*\}", "", inside)
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
    for dtype, dims, space in _TENSOR.findall(text):
        yield HloTensor(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim), int(space or 0))


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""


_COUNTERS = ("s32", "u32", "s64", "u64")

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
    """Scalar integers that follow from a module's constants."""

    computations: Mapping[str, HloComputation]

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
        return high

    def value(
        self, computation: HloComputation, name: str, parameter: Callable[[int, int | None], int | None]
    ) -> int | None:
        """The integer result of a scalar instruction, or None; ``parameter(number, element)`` gives the inputs."""
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
