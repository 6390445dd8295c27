"""The logical collectives of a compiled program, folded from the several instructions that XLA makes of each.

Those are pairs of start and done, asynchronous fusions, fused scatters, rings of permutes, AllReduces that gather; and
what XLA has combined into one instruction is taken apart again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from rooftop.arrays import Mesh
from rooftop.compiler.collectives.rings import Ring, find_rings
from rooftop.compiler.hlo.dataflow import Flow, Value, rendezvous
from rooftop.compiler.hlo.groups import replica_groups, varying_axes
from rooftop.compiler.hlo.places import Found, again, first_place, flow_place, holders, place_of, producer
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Collective

_DCN_KINDS = {
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

    It begins at ``send`` and is waited for at the end of ``recv``, both in ``computation``.
    """

    kind: str
    axes: tuple[str, ...]
    members: int
    bytes: float
    computation: HloComputation
    send: Instruction
    recv: Instruction


def within_slice(mesh: Mesh) -> dict[str, int]:
    """Sizes of the axes within one slice, in mesh order: what collectives there number their partitions by."""
    between = {axis.name for axis in mesh.slice.physical_axes if axis.kind == "dcn"}
    return {
        name: prod(piece.size for piece in pieces if piece.axis not in between) for name, pieces in mesh.axes.items()
    }


def transfers(module: Module, mesh: Mesh) -> Iterator[CompiledTransfer]:
    """Every collective between slices, in the order of the text. Raises RooftopError for a kind that is not known."""
    for computation in module.computations.values():
        if not module.executions[computation.name]:
            continue
        sent = {rendezvous(each): each for each in computation if each.opcode == "send" and rendezvous(each)}
        for recv in computation:
            send = sent.get(rendezvous(recv)) if recv.opcode == "recv" else None
            if send is not None:
                yield _transfer(mesh, computation, send, recv)


def place_of_transfer(module: Module, transfer: CompiledTransfer) -> tuple[str, str, str]:
    """Scope, phase and 'file:line' of a transfer: XLA drops its name, so the data flow tells."""
    computation = transfer.computation
    source = computation.operands(transfer.send)[0]
    found = flow_place(module, transfer.kind, (computation, source), (computation, transfer.recv))
    return found or (*place_of(module, computation, transfer.recv), "")


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
        bytes=recv.shape[0].nbytes if gathered else send.shape[0].nbytes,
        computation=computation,
        send=send,
        recv=recv,
    )


def _groups(attributes: str) -> list[list[int]]:
    """Groups of device numbers (pairs of a permute): some of them, which tell the axes of all."""
    target = attributes.partition("_xla_megascale_target=")[2]
    product = re.match(r'"?\{([\d,]+)\}x\{(\d+)', target)
    if product:
        return [[int(each) * _NUMBERED + int(product.group(2)) for each in product.group(1).split(",")]]
    listed = re.match(r'"?\{((?:\{[\d,>\-]+\},?)+)\}', target)
    groups = re.findall(r"\{([^{}]+)\}", listed.group(1)) if listed else []
    if not groups:
        raise RooftopError("transfer between slices", target[:80], "slices times devices, or groups of devices")
    return [[int(each) for each in re.findall(r"\d+", group)] for group in groups]


def _axes(mesh: Mesh, groups: list[list[int]]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ, in mesh order."""
    names = [axis.name for axis in mesh.slice.physical_axes]
    sizes = {axis.name: axis.size for axis in mesh.slice.physical_axes}
    laid = mesh.device_coordinates().reshape(-1, len(names))
    index = {tuple(place): number for number, place in enumerate(laid.tolist())}
    varies = set[int]()
    for group in groups:
        members = [index[_coordinates(each, names, sizes)] for each in group]
        along = np.array(np.unravel_index(np.array(members), tuple(mesh.shape.values())))
        varies |= {int(axis) for axis in np.flatnonzero(np.ptp(along, axis=1))}
    return tuple(name for number, name in enumerate(mesh.shape) if number in varies)


def _coordinates(device: int, names: list[str], sizes: dict[str, int]) -> tuple[int, ...]:
    """Coordinates along the physical axes of those names."""
    slice_, rest = divmod(device, _NUMBERED)
    found = {"dcn": slice_ - 1}
    for name in ("core", "x", "y", "z"):
        if name in sizes:
            rest, found[name] = divmod(rest, sizes[name])
    return tuple(found[name] for name in names)


_KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
}


#: Where rings are those of ring attention.
_PASSING = "layers/attn/core"


@dataclass(frozen=True, kw_only=True)
class LogicalCollective:
    """One collective as a program means it, whatever instructions the compiler made of it.

    ``bytes`` is the payload of one execution as in ``core.ledger.Collective`` and ``wire_bytes`` what one device
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


def logical_collectives(
    module: Module, mesh: Mapping[str, int], layout: Mesh | None = None
) -> tuple[LogicalCollective, ...]:
    """Every logical collective of a compiled program. ``mesh`` has the axes and sizes it was compiled for, in order.

    Permutes that make up an AllGather or a ReduceScatter are folded into it (the rule is in ``rings``); what
    is in no ring stays a permute. What XLA has combined into one instruction is taken apart again. ``layout`` is the
    mesh on its slice: where there are several slices it tells which collectives go between them. The keys and values
    of ring attention pass by and are never put together: those stay permutes too.
    """
    between = [] if layout is None or layout.slice.num_slices == 1 else list(transfers(module, layout))
    if layout is not None:
        mesh = within_slice(layout)
    rings = [ring for ring in find_rings(module, mesh) if _ring_place(module, ring)[0] != _PASSING]
    folded = {place: ring for ring in rings for place in ring.permutes}
    found: list[LogicalCollective] = []
    for occurrences in _occurrences(module):
        ring = folded.get(occurrences[0].place)
        if ring is None:
            found += _unfolded(module, mesh, occurrences)
        elif occurrences[0].place == ring.permutes[0]:
            found.append(_from_ring(module, ring))
    return (*found, *(_from_transfer(module, each) for each in between))


@dataclass(frozen=True, kw_only=True)
class _Occurrence:
    """One instruction of a collective; an asynchronous collective occurs several times."""

    kind: str
    computation: HloComputation
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
    own = _own_place(module, occurrences, holding)
    combined = len(first.sources) > 1 and own[1] != "update"
    for index, source in enumerate(first.sources):
        scope, phase, line = own
        made_by = producer(module, first.computation, source) if combined else None
        if made_by:
            scope, phase = place_of(module, *made_by)
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
            executions=max(module.executions[each.computation.name] for each in occurrences),
            synchronous=all(each.synchronous for each in occurrences),
            hops=0,
            scope=scope,
            phase=phase,
            source=line,
            instructions=tuple(each.place for each in occurrences),
        )


def _own_place(module: Module, occurrences: list[_Occurrence], holding: list[Instruction]) -> tuple[str, str, str]:
    """Scope, phase and 'file:line' of a collective: its own, or by the data flow where the compiler dropped them."""
    first, own = occurrences[0], [each.instruction for each in occurrences]
    held = [place for each in occurrences for place in holders(module, each.computation.name)]
    end = max(held, key=lambda place: place[0].position(place[1]), default=(first.computation, first.instruction))
    flow = flow_place(module, first.kind, (first.computation, first.sources[0]), end)
    # What holds a step of an asynchronous collective is named after the work that it hides behind.
    named = [*own, *(holding if all(each.synchronous for each in occurrences) else [])]
    if flow and all(_UNNAMED.search(each.op_name) for each in named):
        return flow
    scope, phase = first_place(each.op_name for each in [*own, *holding])
    # Where it has the name of what it serves.
    phase = again(module, first.kind, phase, (first.computation, first.sources[0]))
    return scope, phase, _source(module, [*own, *holding]) or (flow[2] if flow else "")


#: Names that tell nothing of what an instruction is for: none, that of an argument, or of what stands around it.
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
    return first_place(permute.op_name for permute in _permutes(module, ring))


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


def _occurrence(module: Module, computation: HloComputation, instruction: Instruction) -> _Occurrence | None:
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


#: What moves an array without changing its elements.
_MOVES = ("bitcast", "copy", "copy-start", "copy-done", "reshape", "get-tuple-element")


def _through(computation: HloComputation, source: Instruction, opcodes: tuple[str, ...]) -> Instruction:
    """What ``source`` is made of, seen through instructions of those opcodes, and through copies made in parts."""
    while source.opcode in opcodes or 'custom_call_target="ConcatBitcast"' in source.attributes:
        source = computation.operands(source)[0]
    return source


def _is_scatter(computation: HloComputation, instruction: Instruction) -> bool:
    """Whether a fused all-reduce keeps only this device's slice: XLA:TPU's spelling of a ReduceScatter."""
    slices = (each for each in computation if each.opcode == "dynamic-slice")
    return any(_through(computation, computation.operands(each)[0], _MOVES) is instruction for each in slices)


def _gathered(module: Module, computation: HloComputation, source: Instruction) -> Found | None:
    """The part that a device puts where all others have zeros, if an AllReduce of ``source`` gathers; else None."""
    flow = Flow(module, computation.name)
    value = flow.source(Value((), computation.name, source.name))
    if flow.instruction(value).opcode != "dynamic-update-slice":
        return None
    whole, part = (flow.source(each) for each in flow.operands(value)[:2])
    return (module.computations[part.computation], flow.instruction(part)) if flow.is_zero(whole) else None


def _element(computation: HloComputation, instruction: Instruction, index: int) -> Instruction:
    """The result number ``index`` of a collective: itself if it has one."""
    elements = (
        each
        for each in computation
        if each.opcode == "get-tuple-element"
        and computation.operands(each)[0] is instruction
        and int(each.attribute("index")) == index
    )
    return next(elements, instruction)


def _is_halo(module: Module, permute: _Occurrence) -> bool:
    """Whether a permute only moves the edges of a padded ReduceScatter to where they belong."""
    source = _through(permute.computation, permute.sources[0], ("slice", "slice-start", "slice-done", *_MOVES))
    if source.opcode != "fusion":
        return False
    inner = module.computations[source.called[0]]
    return any(each.opcode == "all-reduce" and _is_scatter(inner, each) for each in inner)
