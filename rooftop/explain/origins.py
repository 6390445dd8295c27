"""What a collective's operand is made of: an argument of the program (a weight), or something that it has computed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rooftop.xla.hlo import Computation, Instruction, Module
from rooftop.xla.places import holders

#: What changes where, how or in which type an array lies, and computes nothing.
_MOVES = (
    "bitcast", "copy", "copy-start", "copy-done", "reshape", "transpose", "convert", "slice", "dynamic-slice",
    "get-tuple-element", "optimization-barrier", "slice-start", "slice-done", "broadcast", "pad",
)  # fmt: skip
_STEPS = 200
#: What a program calls that names a sharding, or a collective.
_ASKED = re.compile(r"reshard|sharding_constraint|all_gather|psum|all_to_all|ppermute|reduce_scatter|\bpmean\b")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """``argument`` is the name of a program's argument ('' if the operand was computed); then what made it, and where.

    ``asked`` says that the program itself calls for the collective: without, the partitioner needs it for an operation.
    """

    asked: bool
    argument: str
    made_by: str
    op_name: str
    source: str


def origin(module: Module, computation: Computation, instruction: Instruction) -> Origin:
    """Where the first operand of an instruction comes from, seen through what only moves it, and out of loops."""
    at = computation
    found = computation.operands(instruction)[0] if instruction.operands else instruction
    for _ in range(_STEPS):
        step = _behind(module, at, found)
        if step is None:
            break
        at, found = step
    is_argument = found.opcode == "parameter" and at.name == module.entry
    return Origin(
        asked=_ASKED.search(instruction.op_name) is not None,
        argument=(found.op_name or found.name).replace("\\", "") if is_argument else "",
        made_by=found.name,
        op_name=found.op_name,
        source=module.source(found),
    )


def _behind(module: Module, at: Computation, found: Instruction) -> tuple[Computation, Instruction] | None:
    """One step back: through a move, out of a fusion, or out of a loop that does not change it; None at the end."""
    if found.opcode == "parameter":
        around = holders(module, at.name)
        if around:
            outer, holder = around[0]
            return outer, outer.operands(holder)[int(found.literal)]
        return None
    if found.opcode == "get-tuple-element":
        source = at.operands(found)[0]
        index = int(found.attribute("index") or 0)
        if source.opcode == "parameter":
            return _carried(module, at, index)
        if source.opcode == "tuple":
            return at, at.operands(source)[index]
        if source.opcode == "while":
            # What a loop hands on unchanged it was given.
            body = module.computations[source.called_as("body")]
            made = body.operands(body.instructions[body.root])[index]
            if _is_carried(body, made, index):
                start = at.operands(source)[0]
                return (at, at.operands(start)[index]) if start.opcode == "tuple" else None
            return body, made
        return at, source
    if found.opcode in _MOVES and found.operands:
        return at, at.operands(found)[0]
    if found.opcode == "fusion":
        inner = module.computations[found.called[0]]
        if all(
            each.opcode in (*_MOVES, "parameter", "constant", "tuple", "compare", "select", "add") for each in inner
        ) and any(
            each.opcode in ("dynamic-slice", "convert", "copy", "slice", "transpose", "bitcast") for each in inner
        ):
            root = inner.instructions[inner.root]
            return inner, root
    return None


def _carried(module: Module, body: Computation, index: int) -> tuple[Computation, Instruction] | None:
    """Where a loop takes an element that its body does not change; what it changes was computed."""
    for outer, loop in module.callers.get(body.name, ()):
        if loop.opcode != "while":
            continue
        made = (
            body.operands(body.instructions[body.root])[index]
            if body.instructions[body.root].opcode == "tuple"
            else None
        )
        if made is None:
            return None
        if not _is_carried(body, made, index):
            return body, made
        start = outer.operands(loop)[0]
        return (outer, outer.operands(start)[index]) if start.opcode == "tuple" else None
    return None


def _is_carried(body: Computation, made: Instruction, index: int) -> bool:
    """Whether what a body hands on in a place is what it was given there."""
    while made.opcode in ("copy", "bitcast") and made.operands:
        made = body.operands(made)[0]
    return (
        made.opcode == "get-tuple-element"
        and int(made.attribute("index") or 0) == index
        and body.operands(made)[0].opcode == "parameter"
    )
