"""The compiled ledger: what XLA's optimised HLO really does, as rows by scope and phase.

Matmul FLOPs are those of ``dot`` and ``convolution`` (XLA:TPU writes every matmul as a convolution); collectives are
the logical ones, folded from the several instructions that the compiler makes of each. Elementwise work, HBM traffic
and hand-written kernels are not counted here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from rooftop.ledger import Collective, Ledger, Row
from rooftop.scopes import PHASES, SCOPES, UNSCOPED, scope_and_phase
from rooftop.xla.groups import replica_groups, varying_axes
from rooftop.xla.hlo import Computation, Instruction, Module

_KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
}
_DTYPES = {"bf16": "bf16", "f16": "f16", "f32": "f32", "s8": "int8", "u8": "int8", "s4": "int4", "u4": "int4"}


def read_ledger(module: Module, mesh: Mapping[str, int]) -> Ledger:
    """The rows of a compiled program, per device, in the order of the scope list.

    ``mesh`` gives the axes and sizes of the mesh it was compiled for, in order. One (scope, phase) has one row for
    each number of executions (``count``): what a scan repeats and what was moved out of it stand apart. A
    collective's ``critical`` says that the schedule waits for it: it is synchronous.
    """
    rows: dict[tuple[str, str, int], _Draft] = {}
    for scope, phase, count, dtype, amount in _matmuls(module):
        flops = rows.setdefault((scope, phase, count), _Draft()).flops
        flops[dtype] = flops.get(dtype, 0.0) + amount
    for scope, phase, count, collective in _collectives(module, mesh):
        rows.setdefault((scope, phase, count), _Draft()).collectives.append(collective)
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


def matmul_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of one ``dot`` or ``convolution``: two per multiply-add that reads no padding.

    XLA:TPU turns batch and contracted dims of a matmul into windows with padding and dilation, so positions where
    the window stands off its input are left out: what remains is exactly 2 * B * M * N * K of the matmul.
    """
    left, right = (operand.shape[0] for operand in computation.operands(instruction)[:2])
    out = instruction.shape[0]
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(dim) for dim in contracted.group(1).split(",") if dim] if contracted else []
        return 2.0 * out.elements * math.prod(left.dims[dim] for dim in dims)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    left_labels, right_labels, out_labels = labels.groups()
    window = _window(instruction.attributes, sum(label.isdigit() for label in out_labels))
    terms = 1
    for axis, (stride, low, left_dilate, right_dilate) in enumerate(window):
        label = str(axis)
        terms *= _valid_positions(
            size=left.dims[left_labels.index(label)],
            kernel=right.dims[right_labels.index(label)],
            out=out.dims[out_labels.index(label)],
            stride=stride,
            low=low,
            left_dilate=left_dilate,
            right_dilate=right_dilate,
        )
    batch_groups = int(instruction.attribute("batch_group_count") or 1)
    batch = left.dims[left_labels.index("b")] // batch_groups
    inputs, outputs = right.dims[right_labels.index("i")], right.dims[right_labels.index("o")]
    return 2.0 * terms * batch * inputs * outputs


def _window(attributes: str, axes: int) -> list[tuple[int, int, int, int]]:
    """Stride, low padding and both dilations of each spatial axis."""
    text = re.search(r"window=\{([^}]*)\}", attributes)
    given = dict(part.split("=") for part in text.group(1).split()) if text else {}

    def numbers(name: str, default: int) -> list[int]:
        return [int(part.split("_")[0]) for part in given[name].split("x")] if name in given else [default] * axes

    return list(
        zip(numbers("stride", 1), numbers("pad", 0), numbers("lhs_dilate", 1), numbers("rhs_dilate", 1), strict=True)
    )


def _valid_positions(
    *, size: int, kernel: int, out: int, stride: int, low: int, left_dilate: int, right_dilate: int
) -> int:
    """Pairs of an output position and a kernel position at which the window reads a real element of the input."""
    starts = np.arange(out, dtype=np.int64) * stride - low
    dilated = (size - 1) * left_dilate + 1
    total = 0
    for position in range(kernel):
        read = starts + position * right_dilate
        total += int(np.count_nonzero((read >= 0) & (read < dilated) & (read % left_dilate == 0)))
    return total


def _matmuls(module: Module) -> Iterator[tuple[str, str, int, str, float]]:
    """Scope, phase, executions, dtype and FLOPs of every matmul."""
    for computation in module.computations.values():
        count = module.executions[computation.name]
        for instruction in computation:
            if count and instruction.opcode in ("dot", "convolution"):
                flops = matmul_flops(computation, instruction)
                names = [instruction.op_name, *_caller_names(module, computation.name)]
                types = [_ledger_dtype(operand.shape[0].dtype) for operand in computation.operands(instruction)[:2]]
                # A float32 operand beside a bf16 one is rounded on its way into the matrix unit.
                yield *_place(names), count, "bf16" if "bf16" in types else types[0], flops


def _ledger_dtype(dtype: str) -> str:
    if dtype.startswith("f8"):
        return "f8_e5m2" if dtype.startswith("f8e5m2") else "f8_e4m3"
    return _DTYPES.get(dtype, "f32")


def _place(op_names: list[str]) -> tuple[str, str]:
    """Scope and phase from the first name that stands in a scope."""
    places = [scope_and_phase(name) for name in op_names if name]
    return next((place for place in places if place[0] != UNSCOPED), places[0] if places else (UNSCOPED, "forward"))


def _caller_names(module: Module, name: str) -> Iterator[str]:
    """op_names of the instructions that hold a computation, innermost first."""
    for computation, instruction in _holders(module, name):
        yield instruction.op_name
        yield from _caller_names(module, computation.name)


def _holders(module: Module, name: str) -> list[tuple[Computation, Instruction]]:
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


def _collectives(module: Module, mesh: Mapping[str, int]) -> Iterator[tuple[str, str, int, Collective]]:
    """Scope, phase, executions and figures of every logical collective.

    An asynchronous collective occurs in every fusion that advances it, with one chain id (channel ids do not tell: all
    of a shard_map's are 1). What XLA has combined into one instruction is taken apart again.
    """
    collectives: dict[object, list[_Occurrence]] = {}
    for computation in module.computations.values():
        for instruction in computation:
            if (
                module.executions[computation.name]
                and (found := _occurrence(module, computation, instruction)) is not None
            ):
                chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
                key = (chain.group(1), instruction.channel) if chain else instruction
                collectives.setdefault(key, []).append(found)
    devices = math.prod(mesh.values())
    for occurrences in collectives.values():
        first = occurrences[0]
        groups = replica_groups(first.instruction.attributes, devices)
        axes, members = varying_axes(groups, mesh), max(map(len, groups))
        if not axes or (first.kind == "permute" and _is_halo(module, first)):
            continue
        own = _place([each.instruction.op_name for each in occurrences] + _holder_names(module, occurrences))
        for source in first.sources:
            combined = len(first.sources) > 1 and own[1] != "update"
            place = _producer(module, first.computation, source) if combined else None
            nbytes = sum(tensor.nbytes for tensor in source.shape) * (members if first.kind == "all_gather" else 1)
            yield (
                *(place or own),
                max(module.executions[each.computation.name] for each in occurrences),
                Collective(
                    kind=first.kind,
                    axes=axes,
                    bytes=nbytes,
                    wire_bytes=nbytes * _wire_share(first.kind, members),
                    critical=all(each.synchronous for each in occurrences),
                ),
            )


def _holder_names(module: Module, occurrences: list[_Occurrence]) -> list[str]:
    """op_names of what holds the occurrences; first the fusion that ends it: others belong to what it hides behind."""
    holders = [holder for each in occurrences for _, holder in _holders(module, each.computation.name)]
    return [holder.op_name for holder in sorted(holders, key=lambda holder: "-done" not in holder.name)]


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
    held = bool(_holders(module, computation.name))
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
        holders = _holders(module, computation.name)
        if source.opcode == "parameter" and holders:
            computation, holder = holders[0]
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
