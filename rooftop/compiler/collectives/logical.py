"""The logical collectives of a compiled program: the instructions that XLA splits each into are folded again.

Such instructions are pairs of start and done, asynchronous fusions, fused scatters, rings of permutes, and AllReduces
that gather. Collectives that XLA has combined into one instruction are separated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np

from rooftop.arrays import Mesh
from rooftop.arrays.rules import ways
from rooftop.compiler.collectives.rings import Ring, find_rings
from rooftop.compiler.hlo.dataflow import Flow, Value, rendezvous
from rooftop.compiler.hlo.groups import replica_groups, varying_axes
from rooftop.compiler.hlo.places import (
    Located,
    before,
    first_place,
    flow_place,
    gather_phase,
    holders,
    outermost,
    place_of,
    producer,
)
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.core.errors import RooftopError, one_of
from rooftop.core.ledger import COLLECTIVES, Collective, CollectiveKind

_DCN_KINDS: Mapping[str, CollectiveKind] = {
    "ALL_GATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_REDUCE": "all_reduce",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "permute",
}
_NUMBERED = 100_000


@dataclass(frozen=True, kw_only=True)
class CompiledTransfer:
    """One collective between slices: ``members`` devices along ``axes`` of the mesh; ``bytes`` as in a ledger.

    It begins at ``send`` and must be complete at the end of ``recv``, both in ``computation``.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    members: int
    bytes: float
    computation: HloComputation
    send: Instruction
    recv: Instruction


def within_slice(mesh: Mesh) -> dict[str, int]:
    """Sizes of the axes within one slice, in mesh order; collectives within a slice number their partitions by them."""
    if mesh.slice.num_slices == 1:
        # Nodes of GPUs too: XLA:GPU numbers all devices.
        return dict(mesh.shape)
    between = {axis.name for axis in mesh.slice.physical_axes if axis.kind == "dcn"}
    return {
        name: prod(piece.size for piece in pieces if piece.axis not in between) for name, pieces in mesh.axes.items()
    }


def transfers(module: Module, mesh: Mesh) -> Iterator[CompiledTransfer]:
    """Every collective between slices, in the order of the text. Raises RooftopError for an unknown kind."""
    for computation in module.computations.values():
        if not module.executions[computation.name]:
            continue
        sent = {rendezvous(send): send for send in computation if send.opcode == "send" and rendezvous(send)}
        for recv in computation:
            send = sent.get(rendezvous(recv)) if recv.opcode == "recv" else None
            if send is not None:
                yield _transfer(mesh, computation, send, recv)


def place_of_transfer(module: Module, transfer: CompiledTransfer) -> tuple[str, str, str]:
    """Scope, phase and 'file:line' of a transfer, from the data flow: XLA drops its name."""
    computation = transfer.computation
    source = computation.operands(transfer.send)[0]
    place = flow_place(module, transfer.kind, (computation, source), (computation, transfer.recv))
    return place or (*place_of(module, computation, transfer.recv), "")


def _transfer(mesh: Mesh, computation: HloComputation, send: Instruction, recv: Instruction) -> CompiledTransfer:
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', recv.attributes)
    if kind is None or kind.group(1) not in _DCN_KINDS:
        raise RooftopError("transfer between slices", kind and kind.group(1), ", ".join(_DCN_KINDS))
    groups = _groups(recv.attributes)
    gathered = kind.group(1) == "ALL_GATHER"
    return CompiledTransfer(
        kind=_DCN_KINDS[kind.group(1)],
        axes=_axes(mesh, groups),
        members=len(groups[0]),
        bytes=recv.shape[0].nbytes if gathered else _sent_bytes(computation, send),
        computation=computation,
        send=send,
        recv=recv,
    )


def _sent_bytes(computation: HloComputation, send: Instruction) -> float:
    """Bytes of what a device sends, without the padding of its registers, which XLA may send too."""
    source = computation.operands(send)[0]
    while source.opcode in ("bitcast", "copy"):
        source = computation.operands(source)[0]
    array = computation.operands(source)[0] if _crops(source) else send
    return array.shape[0].nbytes


def _crops(instruction: Instruction) -> bool:
    """True for an array seen together with the padding of its registers, and back."""
    return 'custom_call_target="ZeroCrop"' in instruction.attributes


def _groups(attributes: str) -> list[list[int]]:
    """Some groups of device numbers (pairs of a permute): enough to identify the axes of all."""
    target = attributes.partition("_xla_megascale_target=")[2]
    product = re.match(r'"?\{([\d,]+)\}x\{(\d+)', target)
    if product:
        return [[int(slice_) * _NUMBERED + int(product.group(2)) for slice_ in product.group(1).split(",")]]
    listed = re.match(r'"?\{((?:\{[\d,>\-]+\},?)+)\}', target)
    groups = re.findall(r"\{([^{}]+)\}", listed.group(1)) if listed else []
    if not groups:
        raise RooftopError("transfer between slices", target[:80], "slices times devices, or groups of devices")
    return [[int(number) for number in re.findall(r"\d+", group)] for group in groups]


def _axes(mesh: Mesh, groups: list[list[int]]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ, in mesh order."""
    names = [axis.name for axis in mesh.slice.physical_axes]
    sizes = {axis.name: axis.size for axis in mesh.slice.physical_axes}
    coordinates = mesh.device_coordinates().reshape(-1, len(names))
    index = {tuple(place): number for number, place in enumerate(coordinates.tolist())}
    varies = set[int]()
    for group in groups:
        members = [index[_coordinates(device, names, sizes)] for device in group]
        along = np.array(np.unravel_index(np.array(members), tuple(mesh.shape.values())))
        varies |= {int(axis) for axis in np.flatnonzero(np.ptp(along, axis=1))}
    return tuple(name for number, name in enumerate(mesh.shape) if number in varies)


def _coordinates(device: int, names: list[str], sizes: dict[str, int]) -> tuple[int, ...]:
    """Coordinates along the physical axes ``names``."""
    slice_, rest = divmod(device, _NUMBERED)
    along = {"dcn": slice_ - 1}
    for name in ("core", "x", "y", "z"):
        if name in sizes:
            rest, along[name] = divmod(rest, sizes[name])
    return tuple(along[name] for name in names)


_KINDS: Mapping[str, CollectiveKind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
}


#: The scope of ring attention.
_PASSING = "layers/attn/core"


@dataclass(frozen=True, kw_only=True)
class LogicalCollective:
    """One collective of the program, independent of the instructions that the compiler splits it into.

    One over several slices consists of ``steps`` within each slice, kinds by scheduled instruction, and of one of kind
    ``between`` slices; any other of neither.

    ``bytes`` is the payload of one execution as in ``core.ledger.Collective``, and ``wire_bytes`` are sent by one
    device. ``hops`` is the number of permutes of a ring (0: not a ring). ``synchronous``: the schedule waits for all of
    it. ``source`` is the 'file:line' of its program ('' if unknown), and ``instructions`` are (computation,
    instruction). Its array is number ``operand`` of those that the first instruction has combined.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: float
    wire_bytes: float
    executions: float
    synchronous: bool
    hops: int
    scope: str
    phase: str
    source: str
    instructions: tuple[tuple[str, str], ...]
    operand: int = 0
    between: CollectiveKind | None = None
    steps: tuple[tuple[tuple[str, str], CollectiveKind], ...] = ()

    @property
    def ledger_entry(self) -> Collective:
        """One execution as an entry of a ledger row."""
        return Collective(
            kind=one_of("collective.kind", self.kind, COLLECTIVES),
            axes=self.axes,
            bytes=self.bytes,
            wire_bytes=self.wire_bytes,
            critical=self.synchronous,
        )


def logical_collectives(
    module: Module, mesh: Mapping[str, int], layout: Mesh | None = None
) -> tuple[LogicalCollective, ...]:
    """Every logical collective of a compiled program. ``mesh`` has its axes and sizes, in order.

    Permutes that implement an AllGather or a ReduceScatter are folded into it (see ``rings`` for the rule); other
    permutes stay permutes. So do those of ring attention, whose keys and values pass by and are never concatenated.
    Collectives that XLA has combined into one instruction are separated. ``layout`` is the mesh on its slice: with
    several slices it identifies the collectives between them.
    """
    between = [] if layout is None or layout.slice.num_slices == 1 else list(transfers(module, layout))
    if layout is not None:
        mesh = within_slice(layout)
    rings = [ring for ring in find_rings(module, mesh) if _ring_place(module, ring)[0] != _PASSING]
    folded = {place: ring for ring in rings for place in ring.permutes}
    collectives: list[LogicalCollective] = []
    for occurrences in _occurrences(module):
        ring = folded.get(occurrences[0].place)
        if ring is None:
            collectives += _unfolded(module, mesh, occurrences)
        elif occurrences[0].place == ring.permutes[0]:
            collectives.append(_from_ring(module, ring))
    return tuple(_over_slices(module, collectives, between, mesh))


def _over_slices(
    module: Module, within: list[LogicalCollective], between: list[CompiledTransfer], sizes: Mapping[str, int]
) -> Iterator[LogicalCollective]:
    """Collectives within slices and between them, joined into one where XLA has taken it apart.

    It gathers between slices first and scatters between them last. It sums within each slice, then between slices, each
    device its part, and gathers the parts.
    """
    if not between:
        yield from within
        return
    by_place: dict[tuple[str, str], dict[int, int]] = {}
    for index, collective in enumerate(within):
        for computation, name in collective.instructions:
            for place in ((computation, name), *outermost(module, computation, name)):
                by_place.setdefault(place, {})[collective.operand] = index
    by_meeting: dict[str, list[int]] = {}
    for index, collective in enumerate(within):
        body = module.computations[collective.instructions[0][0]]
        first = body.instructions[collective.instructions[0][1]]
        for _, origin in _origins(module, body, first, collective.operand):
            if origin.opcode == "recv":
                by_meeting.setdefault(rendezvous(origin), []).append(index)
    joined = set[int]()

    def parts_of(step: Iterable[int], outside: LogicalCollective) -> list[int]:
        """The collectives of a step: several if XLA sends their parts between slices together."""
        parts, left = list[int](), outside.bytes
        for part in dict.fromkeys(step):
            ours = within[part]
            share = ours.bytes / ways(sizes, *ours.axes)
            # In a loop XLA may do a step in the next trip: all steps of a collective are done equally often.
            if part not in joined and ours.executions == outside.executions and share <= left:
                parts.append(part)
                left -= share
        return [] if left else parts

    for transfer in between:
        outside = _from_transfer(module, transfer)
        earlier = list[int]()
        seen = list[Located]()
        for body, origin in _origins(module, transfer.computation, transfer.send):
            combined = by_place.get((body.name, origin.name), {})
            elements = _elements(seen, body, origin) if len(combined) > 1 else set(combined)
            earlier += [index for operand, index in combined.items() if operand in elements]
            seen.append((body, origin))
        later = by_meeting.get(rendezvous(transfer.recv), [])
        steps = {"all_gather": (later,), "reduce_scatter": (earlier,), "all_reduce": (earlier, later)}
        parts = [parts_of(step, outside) for step in steps.get(transfer.kind, ())]
        if not parts or not parts[0] or len(set(map(len, parts))) > 1:
            yield outside
            continue
        joined.update(part for step in parts for part in step)
        whole = sum(within[part].bytes for part in parts[0])
        for together in zip(*parts, strict=True):
            inside = [within[part] for part in together]
            share = inside[0].bytes / whole
            yield replace(
                inside[0],
                kind=transfer.kind,
                axes=tuple(axis for axis in sizes if axis in {*inside[0].axes, *outside.axes}),
                wire_bytes=share * outside.wire_bytes + sum(step.wire_bytes for step in inside),
                synchronous=False,
                instructions=(*(place for step in inside for place in step.instructions), *outside.instructions),
                between=transfer.kind,
                steps=tuple(
                    (place, step.kind)
                    for step in inside
                    for computation, name in step.instructions
                    for place in outermost(module, computation, name)
                ),
            )
    yield from (collective for index, collective in enumerate(within) if index not in joined)


#: Opcodes of copies and slices between the parts of one collective. A fusion slices its first operand.
_PASSED = frozenset(
    (
        "bitcast", "copy", "copy-start", "copy-done", "reshape", "transpose", "convert", "get-tuple-element",
        "optimization-barrier", "recv-done", "dynamic-slice", "slice", "fusion", "all-gather-done", "all-reduce-done",
    )
)  # fmt: skip
_MOVED = _PASSED | {"parameter", "constant", "broadcast", "pad", "maximum", "concatenate"}


def _elements(results: Iterable[Located], computation: HloComputation, combined: Instruction) -> set[int]:
    """The numbers of the arrays of a combined collective that are among ``results``."""

    def instruction_of(element: Instruction) -> Instruction:
        of = computation.operands(element)[0]
        return computation.operands(of)[0] if of.opcode.endswith("-done") else of

    return {
        int(element.attribute("index"))
        for inside, element in results
        if inside is computation and element.opcode == "get-tuple-element" and instruction_of(element) is combined
    }


#: Copies and slices that are followed from one collective to others.
_MOST_ORIGINS = 10_000


def _origins(module: Module, computation: HloComputation, user: Instruction, number: int = 0) -> Iterator[Located]:
    """Yield the arrays that operand ``number`` of an instruction is a copy or a slice of, nearest first.

    What a loop carries comes from before it and from its last trip.
    """
    left = [(computation, operand) for operand in computation.operands(user)[number : number + 1]]
    seen = set[tuple[str, str]]()
    while left and len(seen) < _MOST_ORIGINS:
        inside, at = left.pop(0)
        if (inside.name, at.name) in seen:
            continue
        seen.add((inside.name, at.name))
        yield inside, at
        if at.opcode == "dynamic-update-slice" and inside.operands(at)[0].opcode == "broadcast":
            # A part among zeros, whose sum over all devices gathers the parts.
            left.append((inside, inside.operands(at)[1]))
            continue
        is_input = at.opcode == "parameter" and holders(module, inside.name)
        fused = module.computations[at.called[0]] if at.opcode == "fusion" else None
        moves = fused is None or _only_moves(module, fused)
        if (at.opcode in _PASSED or is_input or _crops(at)) and moves:
            source = before(module, inside, at)
            if fused is not None and _joins(module, fused):
                left += [(inside, operand) for operand in inside.operands(at)]
            else:
                left += _carried(module, inside, at) or ([] if source is None else [source])


def _only_moves(module: Module, fused: HloComputation) -> bool:
    """True if a fusion only moves elements. A sum of as many numbers as it has terms leaves out dims of size 1."""

    def keeps(reduction: Instruction) -> bool:
        return reduction.shape[0].elements == fused.operands(reduction)[0].shape[0].elements

    def moves() -> bool:
        return all(inner.opcode in _MOVED or (inner.opcode == "reduce" and keeps(inner)) for inner in fused)

    return module.remember("only moves", fused.name, moves)


def _joins(module: Module, fused: HloComputation) -> bool:
    """True if a fusion concatenates: XLA may do so as the maximum of padded arrays."""
    joining = ("maximum", "concatenate")
    return module.remember("joins", fused.name, lambda: any(inner.opcode in joining for inner in fused))


def _carried(module: Module, computation: HloComputation, element: Instruction) -> list[Located]:
    """The sources of an element of a loop's tuple, in the loop or after it."""
    if element.opcode != "get-tuple-element":
        return []
    of, index = computation.operands(element)[0], int(element.attribute("index"))
    outer, loop = computation, of
    if of.opcode == "parameter":
        loops = [caller for caller in module.callers.get(computation.name, ()) if caller[1].opcode == "while"]
        outer, loop = loops[0] if loops else (computation, of)
    if loop.opcode != "while":
        return []
    body, begin = module.computations[loop.called_as("body")], outer.operands(loop)[0]
    results, inputs = body.operands(body.instructions[body.root]), outer.operands(begin)
    return [(body, results[index]), *([(outer, inputs[index])] if begin.opcode == "tuple" else [])]


@dataclass(frozen=True, kw_only=True)
class _Occurrence:
    """One instruction of a collective; an asynchronous collective occurs several times."""

    kind: CollectiveKind
    computation: HloComputation
    instruction: Instruction
    sources: tuple[Instruction, ...]
    """Its operands, one for each array that it transfers."""
    synchronous: bool

    @property
    def place(self) -> tuple[str, str]:
        """Computation and instruction."""
        return self.computation.name, self.instruction.name


def _occurrences(module: Module) -> list[list[_Occurrence]]:
    """Every collective instruction; those of one asynchronous collective are grouped.

    An asynchronous collective occurs in every fusion that advances it, with one chain id. Channel ids do not identify
    it: all those of a shard_map are 1.
    """
    by_chain: dict[object, list[_Occurrence]] = {}
    for computation in module.computations.values():
        for instruction in computation if module.executions[computation.name] else ():
            if (occurrence := _occurrence(module, computation, instruction)) is not None:
                chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
                key = (chain.group(1), instruction.channel) if chain else occurrence.place
                by_chain.setdefault(key, []).append(occurrence)
    return list(by_chain.values())


def _unfolded(module: Module, mesh: Mapping[str, int], occurrences: list[_Occurrence]) -> Iterator[LogicalCollective]:
    """The collectives of one instruction: those that XLA has combined are separated."""
    first = occurrences[0]
    groups = replica_groups(first.instruction.attributes, math.prod(mesh.values()))
    axes, members = varying_axes(groups, mesh), max(map(len, groups))
    if not axes or (first.kind == "permute" and _is_halo(module, first)):
        return
    holding = _holding(module, occurrences)
    own = _own_place(module, occurrences, holding)
    combined = len(first.sources) > 1 and own[1] != "update"
    for index, source in enumerate(first.sources):
        scope, phase, line = own
        origin = producer(module, first.computation, source) if combined else None
        if origin:
            scope, phase = place_of(module, *origin)
            line = line if module.scopes.own else module.source(origin[1]) or line
        part = _gathered(module, first.computation, source) if first.kind == "all_reduce" else None
        if part is not None:
            end = first.computation, _element(first.computation, first.instruction, index)
            scope, phase, line = flow_place(module, "all_gather", part, end) or own
        nbytes = sum(tensor.nbytes for tensor in source.shape) * (members if first.kind == "all_gather" else 1)
        yield LogicalCollective(
            kind=first.kind,
            axes=axes,
            bytes=nbytes,
            wire_bytes=nbytes * _wire_share(first.kind, members),
            executions=max(module.executions[occurrence.computation.name] for occurrence in occurrences),
            synchronous=all(occurrence.synchronous for occurrence in occurrences),
            hops=0,
            scope=scope,
            phase=phase,
            source=line,
            instructions=tuple(occurrence.place for occurrence in occurrences),
            operand=index,
        )


def _own_place(module: Module, occurrences: list[_Occurrence], holding: list[Instruction]) -> tuple[str, str, str]:
    """Scope, phase and 'file:line' of a collective: its own, or from the data flow if the compiler dropped them."""
    first, own = occurrences[0], [occurrence.instruction for occurrence in occurrences]
    outer = [place for occurrence in occurrences for place in holders(module, occurrence.computation.name)]
    end = max(outer, key=lambda place: place[0].position(place[1]), default=(first.computation, first.instruction))
    flow = flow_place(module, first.kind, (first.computation, first.sources[0]), end)
    # A fusion with a step of an asynchronous collective has the name of the work that overlaps it.
    named = [*own, *(holding if all(occurrence.synchronous for occurrence in occurrences) else [])]
    if flow and all(_UNNAMED.search(instruction.op_name) for instruction in named):
        return flow
    scope, phase = first_place(module, [*own, *holding])
    # Its name is that of the work that uses its result.
    phase = gather_phase(module, first.kind, phase, (first.computation, first.sources[0]))
    return scope, phase, _source(module, [*own, *holding]) or (flow[2] if flow else "")


#: Names that do not describe an instruction: none, that of an argument, or that of the enclosing operation.
_AROUND = "while|body|cond|jit|remat2|eval_jaxpr|closed_call|checkpoint|optimization_barrier"
_UNNAMED = re.compile(rf"^[^/]*$|/(?:{_AROUND})$")


def _from_ring(module: Module, ring: Ring) -> LogicalCollective:
    permutes = _permutes(module, ring)
    scope, phase = _ring_place(module, ring)
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


def _permutes(module: Module, ring: Ring) -> list[Instruction]:
    return [module.computations[computation].instructions[name] for computation, name in ring.permutes]


def _ring_place(module: Module, ring: Ring) -> tuple[str, str]:
    return first_place(module, _permutes(module, ring))


def _from_transfer(module: Module, transfer: CompiledTransfer) -> LogicalCollective:
    scope, phase, source = place_of_transfer(module, transfer)
    return LogicalCollective(
        kind=transfer.kind,
        axes=transfer.axes,
        bytes=transfer.bytes,
        wire_bytes=transfer.bytes * _wire_share(transfer.kind, transfer.members),
        executions=module.executions[transfer.computation.name],
        synchronous=False,
        hops=0,
        scope=scope,
        phase=phase,
        source=source,
        instructions=((transfer.computation.name, transfer.send.name),),
    )


def _source(module: Module, instructions: list[Instruction]) -> str:
    """The 'file:line' of the first instruction that has one."""
    return next((line for instruction in instructions if (line := module.source(instruction))), "")


def _holding(module: Module, occurrences: list[_Occurrence]) -> list[Instruction]:
    """The fusions around the occurrences, that of the end first: others have the name of overlapped work."""
    outer = [holder for occurrence in occurrences for _, holder in holders(module, occurrence.computation.name)]
    return sorted(outer, key=lambda holder: "-done" not in holder.name)


def _wire_share(kind: str, members: int) -> float:
    """Bytes that one device sends per byte of payload, in a ring or to every other member."""
    if kind == "permute":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (members - 1) / members


def _occurrence(module: Module, computation: HloComputation, instruction: Instruction) -> _Occurrence | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in _KINDS:
        return None
    kind, sources = _KINDS[opcode], computation.operands(instruction)
    fused = bool(holders(module, computation.name))
    scattered = fused and kind == "all_reduce" and _is_scatter(module, computation, instruction)
    if scattered:
        kind, sources = "reduce_scatter", tuple(_through(computation, source, ("pad", *_MOVES)) for source in sources)
    return _Occurrence(
        kind=kind,
        computation=computation,
        instruction=instruction,
        sources=sources,
        # Any other fused collective is a step of an asynchronous one.
        synchronous=opcode == instruction.opcode and (scattered or not fused),
    )


#: Opcodes that move an array without changing its elements.
_MOVES = ("bitcast", "copy", "copy-start", "copy-done", "reshape", "get-tuple-element")


def _through(computation: HloComputation, source: Instruction, opcodes: tuple[str, ...]) -> Instruction:
    """The origin of ``source``, through instructions of those opcodes and through copies in parts."""
    return computation.origin(source, _moves(opcodes))


@cache
def _moves(opcodes: tuple[str, ...]) -> Callable[[Instruction], bool]:
    """True of instructions of those opcodes, and of copies in parts."""
    return lambda one: one.opcode in opcodes or 'custom_call_target="ConcatBitcast"' in one.attributes


def _is_scatter(module: Module, computation: HloComputation, instruction: Instruction) -> bool:
    """True if a fused all-reduce keeps only this device's slice: XLA:TPU's form of a ReduceScatter."""

    def sliced() -> set[str]:
        slices = (slice_ for slice_ in computation if slice_.opcode == "dynamic-slice" and slice_.operands)
        return {_through(computation, computation.operands(slice_)[0], _MOVES).name for slice_ in slices}

    return instruction.name in module.remember("sliced", computation.name, sliced)


def _gathered(module: Module, computation: HloComputation, source: Instruction) -> Located | None:
    """The part of a device in an array of zeros, if an AllReduce of ``source`` is an AllGather; else None."""
    flow = module.remember("data flow", computation.name, lambda: Flow(module, computation.name))
    value = flow.source(Value((), computation.name, source.name))
    if flow.instruction(value).opcode != "dynamic-update-slice":
        return None
    whole, part = (flow.source(operand) for operand in flow.operands(value)[:2])
    return (module.computations[part.computation], flow.instruction(part)) if flow.is_zero(whole) else None


def _element(computation: HloComputation, instruction: Instruction, index: int) -> Instruction:
    """Result number ``index`` of a collective: the collective itself if it has a single result."""
    return next(iter(computation.elements.get((instruction.name, str(index)), ())), instruction)


def _is_halo(module: Module, permute: _Occurrence) -> bool:
    """True if a permute only moves the edges of a padded ReduceScatter to their devices."""
    source = _through(permute.computation, permute.sources[0], ("slice", "slice-start", "slice-done", *_MOVES))
    if source.opcode != "fusion":
        return False
    inner = module.computations[source.called[0]]
    return any(reduce.opcode == "all-reduce" and _is_scatter(module, inner, reduce) for reduce in inner)
