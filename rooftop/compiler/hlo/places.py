"""Scope and phase of HLO instructions: the part of the program that they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rooftop.compiler.hlo.costs import is_matmul
from rooftop.compiler.hlo.dataflow import rendezvous
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.core.scopes import UNSCOPED


def first_place(module: Module, instructions: Iterable[Instruction]) -> tuple[str, str]:
    """Scope and phase of the first instruction that has a scope."""
    places = [module.place(instruction) for instruction in instructions if instruction.op_name]
    return next((place for place in places if place[0] != UNSCOPED), places[0] if places else (UNSCOPED, "forward"))


def place_of(module: Module, computation: HloComputation, instruction: Instruction) -> tuple[str, str]:
    """Scope and phase of an instruction: of its matmuls, else of its name, else of the fusions around it.

    An instruction without a scope gets the phase of the loop around it.
    """
    named = [*_fused_matmuls(module, instruction), instruction, *_callers(module, computation.name)]
    scope, phase = first_place(module, named)
    if scope == UNSCOPED and not any(item.op_name for item in named):
        around = [(outer, loop) for outer, loop in module.callers.get(computation.name, ()) if loop.opcode == "while"]
        return place_of(module, *around[0]) if around else (scope, phase)
    return scope, phase


def _fused_matmuls(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The matmuls in a fusion."""
    for fused in module.computations[instruction.called[0]] if instruction.opcode == "fusion" else ():
        if is_matmul(fused):
            yield fused
        yield from _fused_matmuls(module, fused)


def _callers(module: Module, name: str) -> Iterator[Instruction]:
    """Yield the instructions around a computation, innermost first."""
    for computation, instruction in holders(module, name):
        yield instruction
        yield from _callers(module, computation.name)


def holders(module: Module, name: str) -> list[tuple[HloComputation, Instruction]]:
    """The fusions and asynchronous calls that contain a computation: TPU7x offloads collectives to its SparseCores."""
    callers = module.callers.get(name, ())
    return [caller for caller in callers if caller[1].opcode == "fusion" or caller[1].opcode.endswith("-start")]


def outermost(module: Module, computation: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the scheduled instructions that contain one, as (computation, instruction): it, or the fusions around."""
    outer_callers = holders(module, computation)
    if not outer_callers:
        yield computation, name
    for outer, holder in outer_callers:
        yield from outermost(module, outer.name, holder.name)


#: Limit on the instructions that a search among users of a result visits.
_FAR = 60


def users(computation: HloComputation) -> dict[str, list[Instruction]]:
    """The instructions that use each result of a computation, by its name."""
    by_name: dict[str, list[Instruction]] = {}
    for instruction in computation:
        for name in instruction.operands:
            by_name.setdefault(name, []).append(instruction)
    return by_name


def followers(instruction: Instruction, used_by: Mapping[str, list[Instruction]]) -> Iterator[Instruction]:
    """Yield direct and indirect users of an instruction's result, nearest first, up to a limit."""
    left, seen = [instruction], {instruction.name}
    while left and len(seen) < _FAR:
        for user in used_by.get(left.pop(0).name, ()):
            if user.name not in seen:
                seen.add(user.name)
                left.append(user)
                yield user


Located = tuple[HloComputation, Instruction]


def flow_place(module: Module, kind: str, source: Located, end: Located) -> tuple[str, str, str] | None:
    """Scope, phase and 'file:line' of a collective without a name: XLA drops names in programs over several slices.

    A reduction belongs to the producer of its operand ``source``; one whose result the optimizer uses is a sum of
    gradients, or its last step. Other collectives belong to the consumer of their result, which is that of ``end``. If
    the backward pass gathers an input of the program, it does so again, in phase recompute. None if neither has a
    scope.
    """
    after, before = consumer(module, *end), producer(module, *source)
    first, second = (before, after) if kind in ("all_reduce", "reduce_scatter") else (after, before)
    work = first or second
    if work is None:
        return None
    line = module.source(work[1])
    if kind in ("all_reduce", "all_gather") and after and place_of(module, *after)[0] == "optimizer":
        return "gradients", "update", line
    scope, phase = place_of(module, *work)
    return scope, gather_phase(module, kind, phase, source), line


def gather_phase(module: Module, kind: str, phase: str, source: Located) -> str:
    """The phase of a collective of ``source``: recompute if the backward pass gathers one of its inputs.

    Such an input is one layer's part of an array of all layers: a weight, or a saved activation. Else it is ``phase``.
    """
    is_input = kind == "all_gather" and phase == "backward" and producer(module, *source) is None
    return "recompute" if is_input and _is_stacked(module, *source) else phase


#: Opcodes whose op_name may come from the enclosing scope as well as from their operand.
_MOVES = ("bitcast", "while")


def producer(module: Module, computation: HloComputation, source: Instruction) -> Located | None:
    """The work that computed ``source``, or an instruction that only moves it if no other has a scope."""
    at: Located | None = (computation, source)
    moved: Located | None = None
    while at is not None:
        # A parameter of a fusion has the fusion's own name, which is that of one of its results.
        is_fused_input = at[1].opcode == "parameter" and holders(module, at[0].name)
        if not is_fused_input and place_of(module, *at)[0] != UNSCOPED:
            if at[1].opcode not in _MOVES:
                return at
            moved = moved or at
        elif not is_fused_input and _is_outside(module, at[1]):
            return moved
        at = before(module, *at)
    return moved


def before(module: Module, computation: HloComputation, source: Instruction) -> Located | None:
    """The source of an array, by its first operand; for a loop's result, the result of its body."""
    outer = holders(module, computation.name)
    if source.opcode == "parameter" and outer:
        # The call of a computation on a SparseCore has no operands (libtpu 0.0.50.1).
        around, holder = outer[0]
        operands, at = around.operands(holder), int(source.literal)
        return (around, operands[at]) if at < len(operands) else None
    if not source.operands:
        return None
    first = computation.operands(source)[0]
    if source.opcode == "get-tuple-element" and first.opcode == "while":
        body = module.computations[first.called_as("body")]
        results = body.operands(body.instructions[body.root])
        return (body, results[int(source.attribute("index"))]) if results else None
    return computation, first


def purpose(
    module: Module, computation: HloComputation, instruction: Instruction, used_by: Mapping[str, list[Instruction]]
) -> tuple[str, str]:
    """Scope and phase of an instruction; without a scope, those of its first user with one, or of its producer.

    ``used_by`` are the ``users`` of the computation.
    """
    own = place_of(module, computation, instruction)
    # The operations of another program have names even where they have no scope.
    if own[0] != UNSCOPED or _is_outside(module, instruction):
        return own
    around = (place_of(module, computation, user) for user in followers(instruction, used_by))
    after = next((place for place in around if place[0] != UNSCOPED), None)
    before = None if after else producer(module, computation, instruction)
    return after or (place_of(module, *before) if before else own)


def _is_outside(module: Module, instruction: Instruction) -> bool:
    """True for an operation of another program that stands outside all of its scopes: it belongs to no neighbour."""
    return not module.scopes.own and "/" in instruction.op_name and module.place(instruction)[0] == UNSCOPED


def _is_stacked(module: Module, computation: HloComputation, source: Instruction) -> bool:
    """True if ``source`` is one layer's part of an array of all layers."""
    at: Located | None = (computation, source)
    while at is not None:
        opcode, called = at[1].opcode, at[1].called
        inside = module.computations[called[0]] if opcode == "fusion" else ()
        if opcode == "dynamic-slice" or any(fused.opcode == "dynamic-slice" for fused in inside):
            return True
        at = before(module, *at)
    return False


def consumer(module: Module, computation: HloComputation, result: Instruction) -> Located | None:
    """The nearest work in a scope that uses ``result``: directly, through copies and other slices, or in a loop."""
    left, seen = [(computation, result)], set[tuple[str, str]]()
    used_by: dict[str, dict[str, list[Instruction]]] = {}
    while left and len(seen) < _FAR:
        inside, source = left.pop(0)
        uses = used_by.setdefault(inside.name, users(inside))
        for user in uses.get(source.name, ()):
            if (inside.name, user.name) in seen:
                continue
            seen.add((inside.name, user.name))
            loops = [loop for loop in uses.get(user.name, ()) if user.opcode == "tuple" and loop.opcode == "while"]
            if user.opcode == "send" and (meeting := rendezvous(user)):
                left += [(inside, recv) for recv in inside if recv.opcode == "recv" and rendezvous(recv) == meeting]
            elif loops:
                element = user.operands.index(source.name)
                left += [reader for loop in loops for reader in _carried(module, element, loop)]
            elif place_of(module, inside, user)[0] != UNSCOPED:
                return inside, user
            else:
                left.append((inside, user))
    return None


def _carried(module: Module, element: int, loop: Instruction) -> list[Located]:
    """Instructions of a loop's body that read an element of its carry."""
    body = module.computations[loop.called_as("body")]
    reads = (read for read in body if read.opcode == "get-tuple-element" and read.attribute("index") == str(element))
    return [(body, read) for read in reads if body.operands(read)[0].opcode == "parameter"]
