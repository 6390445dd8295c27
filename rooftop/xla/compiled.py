"""The compiled ledger: what XLA's optimised HLO really does, as rows by scope and phase.

Matmul FLOPs are those of ``dot`` and ``convolution`` (XLA:TPU writes every matmul as a convolution); collectives are
the logical ones, folded from the several instructions that the compiler makes of each: pairs of start and done,
asynchronous fusions, fused scatters, rings of permutes. Elementwise work, HBM traffic and hand-written kernels are not
counted here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rooftop.ledger import Collective, Ledger, Row
from rooftop.scopes import PHASES, SCOPES, UNSCOPED, scope_and_phase
from rooftop.xla.groups import replica_groups, varying_axes
from rooftop.xla.hlo import Computation, Instruction, Module
from rooftop.xla.matmuls import matmul_dtype, matmul_flops
from rooftop.xla.rings import Ring, find_rings

_KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
}


@dataclass(frozen=True, kw_only=True)
class LogicalCollective:
    """One collective as a program means it, whatever instructions the compiler made of it.

    ``bytes`` is the payload of one execution as in ``rooftop.ledger.Collective`` and ``wire_bytes`` what one device
    sends for it. ``hops`` counts the permutes that a ring is made of (0: it is none). ``synchronous`` says that the
    schedule waits for the whole of it. ``source`` is the 'file:line' that it comes from ('' if unknown), and
    ``instructions`` where it stands, as (computation, instruction).
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    wire_bytes: float
    executions: int
    synchronous: bool
    hops: int
    scope: str
    phase: str
    source: str
    instructions: tuple[tuple[str, str], ...]

    @property
    def ledger_entry(self) -> Collective:
        """One execution as a row of a ledger holds it."""
        return Collective(
            kind=self.kind, axes=self.axes, bytes=self.bytes, wire_bytes=self.wire_bytes, critical=self.synchronous
        )


def logical_collectives(module: Module, mesh: Mapping[str, int]) -> tuple[LogicalCollective, ...]:
    """Every logical collective of a compiled program. ``mesh`` has the axes and sizes it was compiled for, in order.

    Permutes that make up an AllGather or a ReduceScatter are folded into it (``rooftop.xla.rings`` has the rule); what
    is in no ring stays a permute. What XLA has combined into one instruction is taken apart again.
    """
    rings = find_rings(module, mesh)
    folded = {place: ring for ring in rings for place in ring.permutes}
    found: list[LogicalCollective] = []
    for occurrences in _occurrences(module):
        ring = folded.get(occurrences[0].place)
        if ring is None:
            found += _unfolded(module, mesh, occurrences)
        elif occurrences[0].place == ring.permutes[0]:
            found.append(_from_ring(module, ring))
    return tuple(found)


def read_ledger(module: Module, mesh: Mapping[str, int]) -> Ledger:
    """The rows of a compiled program, per device, in the order of the scope list.

    ``mesh`` gives the axes and sizes of the mesh it was compiled for, in order. One (scope, phase) has one row for
    each number of executions (``count``): what a scan repeats and what was moved out of it stand apart. A
    collective's ``critical`` says that the schedule waits for the whole of it: it is synchronous.
    """
    rows: dict[tuple[str, str, int], _Draft] = {}
    for scope, phase, count, dtype, amount in _matmuls(module):
        flops = rows.setdefault((scope, phase, count), _Draft()).flops
        flops[dtype] = flops.get(dtype, 0.0) + amount
    for each in logical_collectives(module, mesh):
        draft = rows.setdefault((each.scope, each.phase, each.executions), _Draft())
        draft.collectives.append(each.ledger_entry)
    order = {name: index for index, name in enumerate(SCOPES)}
    keys = sorted(rows, key=lambda key: (order.get(key[0], len(order)), key[0], PHASES.index(key[1]), key[2]))
    return Ledger(
        tuple(
            Row(
                scope=scope,
                phase=phase,
                count=count,
                flops=rows[scope, phase, count].flops,
                collectives=tuple(rows[scope, phase, count].collectives),
                formula="read from compiled HLO",
            )
            for scope, phase, count in keys
        )
    )


@dataclass
class _Draft:
    flops: dict[str, float] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)


def _matmuls(module: Module) -> Iterator[tuple[str, str, int, str, float]]:
    """Scope, phase, executions, dtype and FLOPs of every matmul."""
    for computation in module.computations.values():
        count = module.executions[computation.name]
        for instruction in computation:
            if count and instruction.opcode in ("dot", "convolution"):
                flops = matmul_flops(computation, instruction)
                names = [instruction.op_name, *_caller_names(module, computation.name)]
                yield *_place(names), count, matmul_dtype(computation, instruction), flops


def _place(op_names: list[str]) -> tuple[str, str]:
    """Scope and phase from the first name that stands in a scope."""
    places = [scope_and_phase(name) for name in op_names if name]
    return next((place for place in places if place[0] != UNSCOPED), places[0] if places else (UNSCOPED, "forward"))


def _caller_names(module: Module, name: str) -> Iterator[str]:
    """op_names of the instructions that hold a computation, innermost first."""
    for computation, instruction in holders(module, name):
        yield instruction.op_name
        yield from _caller_names(module, computation.name)


def holders(module: Module, name: str) -> list[tuple[Computation, Instruction]]:
    """The fusions that hold a computation, and the asynchronous calls: TPU7x gives collectives to its SparseCores."""
    callers = module.callers.get(name, ())
    return [each for each in callers if each[1].opcode == "fusion" or each[1].opcode.endswith("-start")]


@dataclass(frozen=True, kw_only=True)
class _Occurrence:
    """One instruction of a collective; an asynchronous collective occurs several times."""

    kind: str
    computation: Computation
    instruction: Instruction
    sources: tuple[Instruction, ...]
    """What it reads, one for each array that it carries."""
    synchronous: bool

    @property
    def place(self) -> tuple[str, str]:
        """Computation and instruction."""
        return self.computation.name, self.instruction.name


def _occurrences(module: Module) -> list[list[_Occurrence]]:
    """Every collective instruction, those of one asynchronous collective together.

    An asynchronous collective occurs in every fusion that advances it, with one chain id (channel ids do not tell: all
    of a shard_map's are 1).
    """
    found: dict[object, list[_Occurrence]] = {}
    for computation in module.computations.values():
        for instruction in computation if module.executions[computation.name] else ():
            if (occurrence := _occurrence(module, computation, instruction)) is not None:
                chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
                key = (chain.group(1), instruction.channel) if chain else occurrence.place
                found.setdefault(key, []).append(occurrence)
    return list(found.values())


def _unfolded(module: Module, mesh: Mapping[str, int], occurrences: list[_Occurrence]) -> Iterator[LogicalCollective]:
    """The collectives that one instruction stands for: what XLA has combined is taken apart again."""
    first = occurrences[0]
    groups = replica_groups(first.instruction.attributes, math.prod(mesh.values()))
    axes, members = varying_axes(groups, mesh), max(map(len, groups))
    if not axes or (first.kind == "permute" and _is_halo(module, first)):
        return
    holding = _holding(module, occurrences)
    own = _place([each.op_name for each in [*(each.instruction for each in occurrences), *holding]])
    for source in first.sources:
        combined = len(first.sources) > 1 and own[1] != "update"
        place = _producer(module, first.computation, source) if combined else None
        nbytes = sum(tensor.nbytes for tensor in source.shape) * (members if first.kind == "all_gather" else 1)
        yield LogicalCollective(
            kind=first.kind,
            axes=axes,
            bytes=nbytes,
            wire_bytes=nbytes * _wire_share(first.kind, members),
            executions=max(module.executions[each.computation.name] for each in occurrences),
            synchronous=all(each.synchronous for each in occurrences),
            hops=0,
            scope=(place or own)[0],
            phase=(place or own)[1],
            source=_source(module, [*(each.instruction for each in occurrences), *holding]),
            instructions=tuple(each.place for each in occurrences),
        )


def _from_ring(module: Module, ring: Ring) -> LogicalCollective:
    permutes = [module.computations[computation].instructions[name] for computation, name in ring.permutes]
    scope, phase = _place([permute.op_name for permute in permutes])
    return LogicalCollective(
        kind=ring.kind,
        axes=ring.axes,
        bytes=ring.bytes,
        wire_bytes=ring.sent_bytes,
        executions=ring.executions,
        synchronous=all(permute.opcode == "collective-permute" for permute in permutes),
        hops=ring.hops,
        scope=scope,
        phase=phase,
        source=_source(module, permutes),
        instructions=ring.permutes,
    )


def _source(module: Module, instructions: list[Instruction]) -> str:
    """The 'file:line' of the first instruction that has one."""
    return next((line for each in instructions if (line := module.source(each))), "")


def _holding(module: Module, occurrences: list[_Occurrence]) -> list[Instruction]:
    """What holds the occurrences; first the fusion that ends it: others belong to what it hides behind."""
    held = [holder for each in occurrences for _, holder in holders(module, each.computation.name)]
    return sorted(held, key=lambda holder: "-done" not in holder.name)


def _wire_share(kind: str, members: int) -> float:
    """Bytes that one device sends per byte of payload: in a ring, or to every other member."""
    if kind == "permute":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (members - 1) / members


def _occurrence(module: Module, computation: Computation, instruction: Instruction) -> _Occurrence | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in _KINDS:
        return None
    kind, sources = _KINDS[opcode], computation.operands(instruction)
    held = bool(holders(module, computation.name))
    scattered = held and kind == "all_reduce" and _is_scatter(computation, instruction)
    if scattered:
        kind, sources = "reduce_scatter", tuple(_through(computation, source, ("pad", *_MOVES)) for source in sources)
    return _Occurrence(
        kind=kind,
        computation=computation,
        instruction=instruction,
        sources=sources,
        # Anything else that holds a collective is a step of an asynchronous one.
        synchronous=opcode == instruction.opcode and (scattered or not held),
    )


def _producer(module: Module, computation: Computation, source: Instruction) -> tuple[str, str] | None:
    """Scope and phase of the work that made ``source``, if its name or that of what it copies stands in a scope."""
    while True:
        place = scope_and_phase(source.op_name)
        if place[0] != UNSCOPED:
            return place
        outer = holders(module, computation.name)
        if source.opcode == "parameter" and outer:
            computation, holder = outer[0]
            source = computation.operands(holder)[int(source.literal)]
        elif source.operands:
            source = computation.operands(source)[0]
        else:
            return None


#: What moves an array without changing its elements.
_MOVES = ("bitcast", "copy", "reshape", "get-tuple-element")


def _through(computation: Computation, source: Instruction, opcodes: tuple[str, ...]) -> Instruction:
    """What ``source`` is made of, seen through instructions of those opcodes."""
    while source.opcode in opcodes:
        source = computation.operands(source)[0]
    return source


def _is_scatter(computation: Computation, instruction: Instruction) -> bool:
    """Whether a fused all-reduce keeps only this device's slice: XLA:TPU's spelling of a ReduceScatter."""
    slices = (each for each in computation if each.opcode == "dynamic-slice")
    return any(_through(computation, computation.operands(each)[0], _MOVES) is instruction for each in slices)


def _is_halo(module: Module, permute: _Occurrence) -> bool:
    """Whether a permute only moves the edges of a padded ReduceScatter to where they belong."""
    source = _through(permute.computation, permute.sources[0], ("slice", *_MOVES))
    if source.opcode != "fusion":
        return False
    inner = module.computations[source.called[0]]
    return any(each.opcode == "all-reduce" and _is_scatter(inner, each) for each in inner)
