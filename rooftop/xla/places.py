"""Where an instruction belongs: the scope and the phase of the program that it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rooftop.scopes import UNSCOPED, scope_and_phase
from rooftop.xla.hlo import Computation, Instruction, Module
from rooftop.xla.matmuls import MATMULS


def first_place(op_names: Iterable[str]) -> tuple[str, str]:
    """Scope and phase from the first name that stands in a scope."""
    places = [scope_and_phase(name) for name in op_names if name]
    return next((place for place in places if place[0] != UNSCOPED), places[0] if places else (UNSCOPED, "forward"))


def place_of(module: Module, computation: Computation, instruction: Instruction) -> tuple[str, str]:
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


def holders(module: Module, name: str) -> list[tuple[Computation, Instruction]]:
    """The fusions that hold a computation, and the asynchronous calls: TPU7x gives collectives to its SparseCores."""
    callers = module.callers.get(name, ())
    return [each for each in callers if each[1].opcode == "fusion" or each[1].opcode.endswith("-start")]


#: Instructions that a search among what uses a result looks at.
_FAR = 30


def users(computation: Computation) -> dict[str, list[Instruction]]:
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


Found = tuple[Computation, Instruction]


def flow_place(module: Module, kind: str, source: Found, end: Found) -> tuple[str, str, str] | None:
    """Scope, phase and 'file:line' of a collective without a name: XLA drops them in programs over several slices.

    A reduction belongs to what made its operand ``source``, but for sums that the optimizer uses: those are of
    gradients. Anything else belongs to what uses its result, which is that of ``end``. None where neither has a scope.
    """
    after, before = consumer(module, *end), producer(module, *source)
    first, second = (before, after) if kind in ("all_reduce", "reduce_scatter") else (after, before)
    found = first or second
    if found is None:
        return None
    line = module.source(found[1])
    if kind == "all_reduce" and after and place_of(module, *after)[0] == "optimizer":
        return "gradients", "update", line
    return *place_of(module, *found), line


def producer(module: Module, computation: Computation, source: Instruction) -> Found | None:
    """The work that made ``source``, if its name or that of what it copies stands in a scope."""
    while True:
        outer = holders(module, computation.name)
        if source.opcode == "parameter" and outer:
            # The fusion's own name is that of one of its results, and may not be of this one.
            computation, holder = outer[0]
            source = computation.operands(holder)[int(source.literal)]
        elif place_of(module, computation, source)[0] != UNSCOPED:
            return computation, source
        elif source.operands:
            source = computation.operands(source)[0]
        else:
            return None


def consumer(module: Module, computation: Computation, result: Instruction) -> Found | None:
    """The nearest work in a scope that uses ``result``, directly or by way of copies."""
    after = ((computation, each) for each in followers(result, users(computation)))
    return next((each for each in after if place_of(module, *each)[0] != UNSCOPED), None)
