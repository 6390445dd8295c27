"""Where an instruction belongs: the scope and the phase of the program that it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rooftop.compiler.hlo.dataflow import rendezvous
from rooftop.compiler.hlo.matmuls import MATMULS
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.core.scopes import UNSCOPED, scope_and_phase


def first_place(op_names: Iterable[str]) -> tuple[str, str]:
    """Scope and phase from the first name that stands in a scope."""
    places = [scope_and_phase(name) for name in op_names if name]
    return next((place for place in places if place[0] != UNSCOPED), places[0] if places else (UNSCOPED, "forward"))


def place_of(module: Module, computation: HloComputation, instruction: Instruction) -> tuple[str, str]:
    """Scope and phase of an instruction: those of the matmuls in it, else by its name, else by what it stands in.

    What has no scope gets the phase of the loop around it.
    """
    names = [*_fused_names(module, instruction), instruction.op_name, *_caller_names(module, computation.name)]
    scope, phase = first_place(names)
    if scope == UNSCOPED and not any(names):
        around = [(each, loop) for each, loop in module.callers.get(computation.name, ()) if loop.opcode == "while"]
        return place_of(module, *around[0]) if around else (scope, phase)
    return scope, phase


def _fused_names(module: Module, instruction: Instruction) -> Iterator[str]:
    """op_names of the matmuls in a fusion."""
    for each in module.computations[instruction.called[0]] if instruction.opcode == "fusion" else ():
        if each.opcode in MATMULS:
            yield each.op_name
        yield from _fused_names(module, each)


def _caller_names(module: Module, name: str) -> Iterator[str]:
    """op_names of the instructions that hold a computation, innermost first."""
    for computation, instruction in holders(module, name):
        yield instruction.op_name
        yield from _caller_names(module, computation.name)


def holders(module: Module, name: str) -> list[tuple[HloComputation, Instruction]]:
    """The fusions that hold a computation, and the asynchronous calls: TPU7x gives collectives to its SparseCores."""
    callers = module.callers.get(name, ())
    return [each for each in callers if each[1].opcode == "fusion" or each[1].opcode.endswith("-start")]


#: Instructions that a search among what uses a result looks at.
_FAR = 60


def users(computation: HloComputation) -> dict[str, list[Instruction]]:
    """The instructions that use each result of a computation, by its name."""
    found: dict[str, list[Instruction]] = {}
    for instruction in computation:
        for name in instruction.operands:
            found.setdefault(name, []).append(instruction)
    return found


def followers(instruction: Instruction, used_by: Mapping[str, list[Instruction]]) -> Iterator[Instruction]:
    """What uses the result of an instruction, and what uses that, nearest first, as far as is worth while."""
    left, seen = [instruction], {instruction.name}
    while left and len(seen) < _FAR:
        for user in used_by.get(left.pop(0).name, ()):
            if user.name not in seen:
                seen.add(user.name)
                left.append(user)
                yield user


Found = tuple[HloComputation, Instruction]


def flow_place(module: Module, kind: str, source: Found, end: Found) -> tuple[str, str, str] | None:
    """Scope, phase and 'file:line' of a collective without a name: XLA drops them in programs over several slices.

    A reduction belongs to what made its operand ``source``; what the optimizer uses is a sum of gradients, or the last
    step of one. Anything else belongs to what uses its result, which is that of ``end``; what the program was given and
    the backward pass gathers is gathered again. None where neither has a scope.
    """
    after, before = consumer(module, *end), producer(module, *source)
    first, second = (before, after) if kind in ("all_reduce", "reduce_scatter") else (after, before)
    found = first or second
    if found is None:
        return None
    line = module.source(found[1])
    if kind in ("all_reduce", "all_gather") and after and place_of(module, *after)[0] == "optimizer":
        return "gradients", "update", line
    scope, phase = place_of(module, *found)
    return scope, again(module, kind, phase, source), line


def again(module: Module, kind: str, phase: str, source: Found) -> str:
    """The phase of a collective of ``source``; what the backward pass gathers of what it was given is gathered again.

    That is one layer's part of an array of all layers: a weight, or what the forward pass has kept.
    """
    given = kind == "all_gather" and phase == "backward" and producer(module, *source) is None
    return "recompute" if given and _is_stacked(module, *source) else phase


#: What has the name of what stands around it as often as that of what it moves.
_MOVES = ("bitcast", "while")


def producer(module: Module, computation: HloComputation, source: Instruction) -> Found | None:
    """The work that made ``source``; what only moves it if nothing else stands in a scope."""
    at: Found | None = (computation, source)
    moved: Found | None = None
    while at is not None:
        # A parameter of a fusion has the fusion's own name, which is that of one of its results.
        given = at[1].opcode == "parameter" and holders(module, at[0].name)
        if not given and place_of(module, *at)[0] != UNSCOPED:
            if at[1].opcode not in _MOVES:
                return at
            moved = moved or at
        at = _before(module, *at)
    return moved


def _before(module: Module, computation: HloComputation, source: Instruction) -> Found | None:
    """What ``source`` is made of, by its first operand; of a loop's result what the body makes of it."""
    outer = holders(module, computation.name)
    if source.opcode == "parameter" and outer:
        around, holder = outer[0]
        return around, around.operands(holder)[int(source.literal)]
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
    """Scope and phase of an instruction; without a scope, those of the first that uses its result, or of what made it.

    ``used_by`` are the ``users`` of the computation.
    """
    own = place_of(module, computation, instruction)
    if own[0] != UNSCOPED:
        return own
    around = (place_of(module, computation, each) for each in followers(instruction, used_by))
    after = next((place for place in around if place[0] != UNSCOPED), None)
    before = None if after else producer(module, computation, instruction)
    return after or (place_of(module, *before) if before else own)


def _is_stacked(module: Module, computation: HloComputation, source: Instruction) -> bool:
    """Whether ``source`` is one layer's part of an array of all layers."""
    at: Found | None = (computation, source)
    while at is not None:
        opcode, called = at[1].opcode, at[1].called
        inside = module.computations[called[0]] if opcode == "fusion" else ()
        if opcode == "dynamic-slice" or any(each.opcode == "dynamic-slice" for each in inside):
            return True
        at = _before(module, *at)
    return False


def consumer(module: Module, computation: HloComputation, result: Instruction) -> Found | None:
    """The nearest work in a scope that uses ``result``: directly, by way of copies and other slices, or in a loop."""
    left, seen = [(computation, result)], set[tuple[str, str]]()
    used_by: dict[str, dict[str, list[Instruction]]] = {}
    while left and len(seen) < _FAR:
        inside, source = left.pop(0)
        uses = used_by.setdefault(inside.name, users(inside))
        for user in uses.get(source.name, ()):
            if (inside.name, user.name) in seen:
                continue
            seen.add((inside.name, user.name))
            loops = [each for each in uses.get(user.name, ()) if user.opcode == "tuple" and each.opcode == "while"]
            if user.opcode == "send" and (meeting := rendezvous(user)):
                left += [(inside, each) for each in inside if each.opcode == "recv" and rendezvous(each) == meeting]
            elif loops:
                left += [each for loop in loops for each in _carried(module, user.operands.index(source.name), loop)]
            elif place_of(module, inside, user)[0] != UNSCOPED:
                return inside, user
            else:
                left.append((inside, user))
    return None


def _carried(module: Module, element: int, loop: Instruction) -> list[Found]:
    """Where the body of a loop takes an element of what it carries."""
    body = module.computations[loop.called_as("body")]
    taken = (each for each in body if each.opcode == "get-tuple-element" and each.attribute("index") == str(element))
    return [(body, each) for each in taken if body.operands(each)[0].opcode == "parameter"]
