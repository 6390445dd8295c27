"""Scope and phase of HLO instructions: the part of the program that they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rooftop.compiler.hlo.costs import is_matmul
from rooftop.compiler.hlo.dataflow import ends, rendezvous
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.core.scopes import UNSCOPED


def first_place(module: Module, instructions: Iterable[Instruction]) -> tuple[str, str]:
    """Scope and phase of the first instruction that has a scope."""
    return _first(_own_place(module, instruction) for instruction in instructions) or (UNSCOPED, "forward")


#: Scope and phase.
Place = tuple[str, str]


def _first(places: Iterable[Place | None]) -> Place | None:
    """The first place with a scope, else the first one; None if there is none."""
    first: Place | None = None
    for place in places:
        if place is not None and place[0] != UNSCOPED:
            return place
        first = first or place
    return first


def _own_place(module: Module, instruction: Instruction) -> Place | None:
    """The place that an instruction's own name says; None without a name."""
    return module.place(instruction) if instruction.op_name else None


def place_of(module: Module, computation: HloComputation, instruction: Instruction) -> tuple[str, str]:
    """Scope and phase of an instruction: of its matmuls, else of its name, else of the fusions around it.

    An instruction without a scope gets the phase of the loop around it.
    """
    key = computation.name, instruction.name
    return module.remember("place", key, lambda: _place_of(module, computation, instruction))


def _place_of(module: Module, computation: HloComputation, instruction: Instruction) -> Place:
    inside = _fused_place(module, instruction.called[0]) if instruction.opcode == "fusion" else None
    place = _first((inside, _own_place(module, instruction), _place_around(module, computation.name)))
    if place is None:
        around = [(outer, loop) for outer, loop in module.callers.get(computation.name, ()) if loop.opcode == "while"]
        return place_of(module, *around[0]) if around else (UNSCOPED, "forward")
    return place


def _fused_place(module: Module, name: str) -> Place | None:
    """The place of the matmuls in a fused computation, and in fusions within it."""

    def places() -> Iterator[Place | None]:
        for fused in module.computations[name]:
            if is_matmul(fused):
                yield _own_place(module, fused)
            if fused.opcode == "fusion":
                yield _fused_place(module, fused.called[0])

    return module.remember("fused place", name, lambda: _first(places()))


def _place_around(module: Module, name: str) -> Place | None:
    """The place of the instructions around a computation, innermost first."""

    def places() -> Iterator[Place | None]:
        for outer, holder in holders(module, name):
            yield _own_place(module, holder)
            yield _place_around(module, outer.name)

    return module.remember("place around", name, lambda: _first(places()))


def holders(module: Module, name: str) -> Sequence[tuple[HloComputation, Instruction]]:
    """The fusions and asynchronous calls that contain a computation: TPU7x offloads collectives to its SparseCores."""

    def around() -> list[tuple[HloComputation, Instruction]]:
        callers = module.callers.get(name, ())
        return [caller for caller in callers if caller[1].opcode == "fusion" or caller[1].opcode.endswith("-start")]

    return module.remember("holders", name, around)


def outermost(module: Module, computation: str, name: str) -> Sequence[tuple[str, str]]:
    """The scheduled instructions that contain one, as (computation, instruction): it, or the fusions around it."""
    return _around(module, computation) or ((computation, name),)


def _around(module: Module, computation: str) -> tuple[tuple[str, str], ...]:
    """The scheduled instructions that contain a computation; none if its own are scheduled."""

    def places() -> tuple[tuple[str, str], ...]:
        around = (outermost(module, outer.name, holder.name) for outer, holder in holders(module, computation))
        return tuple(place for places in around for place in places)

    return module.remember("around", computation, places)


#: Limit on the instructions that a search among users of a result visits.
_FAR = 60


def users(computation: HloComputation) -> Mapping[str, list[Instruction]]:
    """The instructions that use each result of a computation, by its name."""
    return computation.users


def followers(instruction: Instruction, used_by: Mapping[str, Sequence[Instruction]]) -> Iterator[Instruction]:
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
    # The work and the first move of each instruction on the way: a result is followed once, whoever asks for it.
    known: dict[tuple[str, str], tuple[Located | None, Located | None]] = module.memo.setdefault("producer", {})
    path = list[tuple[tuple[str, str], Located | None]]()
    at: Located | None = (computation, source)
    work: Located | None = None
    moved: Located | None = None
    while at is not None:
        key = at[0].name, at[1].name
        if key in known:
            work, moved = known[key]
            break
        # Without an answer yet: what leads back to itself ends there.
        known[key] = None, None
        # A parameter of a fusion has the fusion's own name, which is that of one of its results.
        is_fused_input = at[1].opcode == "parameter" and holders(module, at[0].name)
        is_move = False
        if not is_fused_input and place_of(module, *at)[0] != UNSCOPED:
            if at[1].opcode not in _MOVES:
                known[key] = work, moved = at, None
                break
            is_move = True
        elif not is_fused_input and _is_outside(module, at[1]):
            break
        path.append((key, at if is_move else None))
        at = before(module, *at)
    for key, move in reversed(path):
        moved = move or moved
        known[key] = work, moved
    return work or moved


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
    known: dict[tuple[str, str], bool] = module.memo.setdefault("stacked", {})
    path, result = list[tuple[str, str]](), False
    at: Located | None = (computation, source)
    while at is not None and not result:
        key = at[0].name, at[1].name
        if key in known:
            result = known[key]
            break
        known[key] = False
        path.append(key)
        result = at[1].opcode == "dynamic-slice" or (at[1].opcode == "fusion" and _slices(module, at[1].called[0]))
        at = before(module, *at)
    known |= dict.fromkeys(path, result)
    return result


def _slices(module: Module, fused: str) -> bool:
    """True if a fused computation has a slice at an index that depends on data, as that of a layer."""
    return module.remember(
        "slices", fused, lambda: any(x.opcode == "dynamic-slice" for x in module.computations[fused])
    )


def consumer(module: Module, computation: HloComputation, result: Instruction) -> Located | None:
    """The nearest work in a scope that uses ``result``: directly, through copies and other slices, or in a loop."""
    left, seen = [(computation, result)], set[tuple[str, str]]()
    while left and len(seen) < _FAR:
        inside, source = left.pop(0)
        uses = inside.users
        for user in uses.get(source.name, ()):
            if (inside.name, user.name) in seen:
                continue
            seen.add((inside.name, user.name))
            loops = [loop for loop in uses.get(user.name, ()) if user.opcode == "tuple" and loop.opcode == "while"]
            if user.opcode == "send" and (meeting := rendezvous(user)):
                left += [(inside, recv) for recv in ends(module, inside, "recv").get(meeting, ())]
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
    return [(body, read) for carry in body.parameters for read in body.elements.get((carry.name, str(element)), ())]
