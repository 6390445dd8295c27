"""HLO instructions made readable: arrays, layouts, tiling, memory, work, and rooflines.

Several instructions together show the true shapes and the parallelism: a matmul whose result is summed over a group
contracts a dim of which each device of the group holds a part, so the true size is the local one times the devices.
Whatever made that dim splits it in the same way.

Source: chapter 9 of the book, with its examples; layouts by ``rooftop.arrays.tiles``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import combinations
from math import prod
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from rooftop.arrays.mesh import span
from rooftop.arrays.tiles import HLO_DTYPES, TileLayout
from rooftop.compiler.hlo.groups import Groups, replica_groups
from rooftop.core.amounts import Amount, Count, Positive
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import CollectiveKind
from rooftop.core.records import Record, derived, read_record
from rooftop.explain.axes import stride
from rooftop.hardware import Chip
from rooftop.hardware.slices import PhysicalAxis
from rooftop.profile.facts import COLLECTIVES
from rooftop.roofline.collectives import price
from rooftop.roofline.rates import Rates

_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([A-Za-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,\s]*\](?:\{[^{}]*\})?")
_OPERAND = re.compile(rf"(?P<array>{_ARRAY.pattern})?\s*%(?P<name>[\w.\-]+)")
#: The name after an array, in the older form without '%'.
_BARE = re.compile(r"\s+([A-Za-z_][\w.\-]*)")
#: Dims of a matmul whose roles are guessed from their sizes.
_MOST_DIMS = 10
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_FORM = "an HLO instruction, such as %fusion.3 = bf16[32,4096]{1,0} fusion(bf16[32,8192]{1,0} %x), kind=kLoop, calls=%f"


@dataclass(frozen=True, kw_only=True)
class HloMatmul(Record):
    """A matmul as [m, k] x [k, n], ``batch`` times; ``contracted`` are the sizes that are summed over."""

    batch: int
    m: int
    k: int
    n: int
    contracted: tuple[int, ...]

    @derived
    def flops(self) -> Amount:
        """Two per multiply-add."""
        return 2.0 * self.batch * self.m * self.k * self.n


@dataclass(frozen=True, kw_only=True)
class Moved(Record):
    """A collective: its ``kind``, logical ``bytes`` on a device, ``members`` of a group (None: not in the line)."""

    kind: CollectiveKind
    bytes: Amount
    members: int | None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An instruction, read from its line. ``operands`` come with their layouts where the line has them."""

    name: str
    opcode: str
    results: tuple[TileLayout, ...]
    operands: tuple[tuple[str, TileLayout | None], ...]
    attributes: str

    @property
    def called(self) -> str:
        """Computation that a fusion calls, without its number: all-reduce-scatter of %all-reduce-scatter.3."""
        match = re.search(r"\bcalls=%?([\w.\-]+)", self.attributes)
        return re.sub(r"\.\d+$", "", match[1]) if match else ""

    @property
    def does(self) -> str:
        """Meaning of the opcode."""
        known = _meanings()
        text = known.opcodes.get(self.called) or known.opcodes.get(self.opcode, "an operation of HLO")
        kind = re.search(r"\bkind=(\w+)", self.attributes)
        return f"{text}; {known.fusions[kind[1]]}" if kind and kind[1] in known.fusions else text

    @property
    def groups(self) -> Groups | None:
        """Replica groups of a collective; None if the line has none."""
        return _groups(self.attributes) if "replica_groups=" in self.attributes else None

    @property
    def moved(self) -> Moved | None:
        """Communication of the instruction; None if it is no collective."""
        kind = COLLECTIVES.get(self.called) or COLLECTIVES.get(self.opcode.removesuffix("-start").removesuffix("-done"))
        if not kind or not self.results:
            return None
        operands = [layout for _, layout in self.operands if layout is not None]
        out = max(_nbytes(result) for result in self.results)
        put = max((_nbytes(item) for item in operands), default=out)
        groups = self.groups
        members = len(groups[0]) if groups and groups[0] else None
        if members is None and out != put:
            members = round(max(out, put) / min(out, put))
        if kind == "reduce_scatter" and put == out and members:
            put = out * members
        payload = {"all_gather": out, "reduce_scatter": put}.get(kind, put)
        return Moved(kind=kind, bytes=payload, members=members)

    @property
    def matmul(self) -> HloMatmul | None:
        """The matmul of a dot, or of a fusion of two arrays whose sizes fit one; None for other instructions."""
        if self.moved or self.opcode not in ("fusion", "dot", "convolution", "custom-call") or len(self.results) != 1:
            return None
        shapes = [layout.shape for _, layout in self.operands if layout is not None]
        pairs = combinations(shapes, 2)
        result = (_matmul(left, right, self.results[0].shape) for left, right in pairs)
        return max((item for item in result if item is not None), key=lambda item: item.flops, default=None)

    @property
    def hbm_bytes(self) -> float:
        """Bytes of its operands and results in HBM, padding included, each once."""
        return self.bytes_in(0) if self.does_work else 0.0

    def bytes_in(self, memory_space: int) -> float:
        """Bytes of its operands and results in a memory space, padding included."""
        arrays = [*self.results, *(layout for _, layout in self.operands if layout is not None)]
        return float(sum(array.nbytes for array in arrays if array.memory_space == memory_space))

    @property
    def does_work(self) -> bool:
        """True if the instruction takes time."""
        return self.opcode not in ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")


def read_operation(text: str) -> Operation:
    """Read an instruction's line, as HLO text or a profile has it. Raises RooftopError for other text."""
    match = _LINE.match(text)
    if match is None:
        raise RooftopError("op", text[:80], _FORM)
    rest = text[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else _shape_end(rest)
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise RooftopError("op", text[:80], _FORM)
    closing = _closing(rest, opcode.end() - 1)
    inside = rest[opcode.end() : closing]
    # The book, and some profiles, spell AllReduce for all-reduce.
    return Operation(
        name=match[1],
        opcode=_CAMEL.sub("-", opcode[1]).lower(),
        results=tuple(TileLayout.parse(item) for item in _ARRAY.findall(rest[:end])),
        operands=tuple(_operands(inside)),
        attributes=rest[closing + 1 :],
    )


def _operands(inside: str) -> Iterator[tuple[str, TileLayout | None]]:
    """Yield names and layouts. Names may come without '%', and arrays without names."""
    if "%" in inside:
        for item in _OPERAND.finditer(inside):
            text, operand = item.group("array", "name")
            yield operand, TileLayout.parse(text) if text else None
        return
    at = 0
    for array in _ARRAY.finditer(inside):
        name = _BARE.match(inside, array.end())
        yield name[1] if name else "", TileLayout.parse(array.group())
        at = array.end()
    if not at:
        yield from ((name, None) for name in re.findall(r"(?:^|,)\s*([A-Za-z_][\w.\-]*)\s*(?=,|$)", inside))


@dataclass(frozen=True, kw_only=True)
class Overfull(Record):
    """A memory of a device of ``capacity`` bytes, which the arrays of one operation in it exceed."""

    memory: Literal["hbm", "vmem"]
    bytes: Amount
    capacity: Amount


def _overfull(operation: Operation, chip: Chip) -> Iterator[Overfull]:
    """The memories of a device that have no room for the operation's arrays."""
    rooms: tuple[tuple[Literal["hbm", "vmem"], int, float], ...] = (
        ("hbm", 0, chip.hbm_bytes / chip.devices),
        ("vmem", 1, chip.vmem_bytes / chip.devices),
    )
    for memory, space, capacity in rooms:
        nbytes = operation.bytes_in(space)
        if nbytes > capacity:
            yield Overfull(memory=memory, bytes=nbytes, capacity=capacity)


@dataclass(frozen=True, kw_only=True)
class OperationTimes(Record):
    """Seconds of an operation on a chip: the bound by resource at peak rates, and which binds.

    ``ici`` is over one axis of the network, as an open line; ``wrapped_s`` if that axis closes into a ring.
    ``overfull`` has the memories that are too small for its arrays: the chip cannot run it as it stands.
    """

    chip: str
    bound_s: Mapping[Literal["mxu", "hbm", "ici"], Amount]
    wrapped_s: Amount | None
    intensity: Amount | None
    critical_intensity: Amount
    overfull: tuple[Overfull, ...] = ()

    @derived
    def bound(self) -> Literal["", "mxu", "hbm", "ici"]:
        """The busiest resource ('' for what takes no time)."""
        busiest = max(self.bound_s, key=lambda name: self.bound_s[name])
        return busiest if self.bound_s[busiest] else ""


def times(operation: Operation, chip: Chip) -> OperationTimes:
    """The roofline of an operation on one device of a chip."""
    rates = Rates.of(chip)
    matmul, moved = operation.matmul, operation.moved
    peak = rates.flops_per_s.get(_dtype(operation), rates.flops_per_s["bf16"])
    bound: dict[Literal["mxu", "hbm", "ici"], float] = {
        "mxu": matmul.flops / peak if matmul else 0.0,
        "hbm": operation.hbm_bytes / rates.hbm_bytes_per_s,
    }
    wrapped = None
    if moved is not None and moved.members and moved.members > 1:
        bound["ici"] = _axis_s(moved, chip, wrapped=False)
        wrapped = _axis_s(moved, chip, wrapped=True) if moved.members > 2 else None
    return OperationTimes(
        chip=chip.name,
        bound_s=bound,
        wrapped_s=wrapped,
        intensity=matmul.flops / operation.hbm_bytes if matmul and operation.hbm_bytes else None,
        critical_intensity=peak / rates.hbm_bytes_per_s,
        overfull=tuple(_overfull(operation, chip)),
    )


def _axis_s(moved: Moved, chip: Chip, *, wrapped: bool) -> float:
    """A collective over one whole axis of a torus, or a switch on GPUs."""
    kind = "switch" if chip.kind == "gpu" else "torus"
    members = int(moved.members or 1)
    axis = PhysicalAxis(
        name="x",
        size=members,
        kind=kind,
        wrapped=wrapped,
        bytes_per_s=chip.ici_bytes_per_s,
        hop_s=chip.hop_s,
        resource="ici",
    )
    group = span((axis,), np.array([members]), np.array([1]))
    return float(price(moved.kind, group).bound_s(moved.bytes)[axis.resource])


@dataclass(frozen=True, kw_only=True)
class LayoutRecord(Record):
    """An array in memory. ``order`` has its dims major to minor, ``memory`` is hbm, vmem or a number.

    ``element_bytes`` are those of the elements, ``bytes`` with padding, and ``expansion`` is their ratio.
    """

    text: str
    dtype: str
    shape: tuple[Count, ...]
    order: tuple[Count, ...]
    tiles: tuple[tuple[Count, ...], ...]
    padded_shape: tuple[Count, ...]
    memory: str
    element_bytes: Amount
    bytes: Amount
    expansion: Annotated[float, Meta(ge=1)]

    @classmethod
    def of(cls, layout: TileLayout) -> LayoutRecord:
        """The record of a layout."""
        return cls(
            text=str(layout),
            dtype=layout.dtype,
            shape=layout.shape,
            order=layout.minor_to_major[::-1],
            tiles=layout.tiles,
            padded_shape=layout.padded_shape,
            memory=layout.memory,
            element_bytes=_nbytes(layout),
            bytes=layout.nbytes,
            expansion=layout.expansion,
        )


@dataclass(frozen=True, kw_only=True)
class OperandRecord(Record):
    """An operand of an instruction, with its layout if the line has it."""

    name: str
    layout: LayoutRecord | None


@dataclass(frozen=True, kw_only=True)
class OperationRecord(Record):
    """An instruction made readable; figures are of one execution on one device. ``times`` need a chip."""

    op: str
    opcode: str
    calls: str
    does: str
    results: tuple[LayoutRecord, ...]
    operands: tuple[OperandRecord, ...]
    matmul: HloMatmul | None
    collective: Moved | None
    hbm_bytes: Amount
    times: OperationTimes | None

    @classmethod
    def of(cls, operation: Operation, chip: Chip | None) -> OperationRecord:
        """The record of an instruction, with its times on a chip if one is given."""
        return cls(
            op=operation.name,
            opcode=operation.opcode,
            calls=operation.called,
            does=operation.does,
            results=tuple(map(LayoutRecord.of, operation.results)),
            operands=tuple(
                OperandRecord(name=name, layout=None if layout is None else LayoutRecord.of(layout))
                for name, layout in operation.operands
            ),
            matmul=operation.matmul,
            collective=operation.moved,
            hbm_bytes=operation.hbm_bytes,
            times=None if chip is None else times(operation, chip),
        )


@dataclass(frozen=True, kw_only=True)
class OperationsRecord(Record):
    """Instructions made readable, and the parallelism that they show together."""

    kind: Literal["operations"]
    schema: Literal[1]
    operations: Annotated[tuple[OperationRecord, ...], Meta(min_length=1)]
    inferred: tuple[Inferred, ...]


def _matmul(left: Sequence[int], right: Sequence[int], out: Sequence[int]) -> HloMatmul | None:
    """Matmul of arrays of these sizes: sizes that both have and the result lacks are contracted."""
    if max(len(left), len(right)) > _MOST_DIMS:
        return None
    elements = prod(left) * prod(right)
    for batch in _subsets(left):
        if not _has(right, batch) or not _has(out, batch):
            continue
        for contracted in _subsets(_without(left, batch)):
            if not contracted or not _has(_without(right, batch), contracted):
                continue
            m, n = (_without(_without(side, batch), contracted) for side in (left, right))
            k = prod(contracted)
            # A size of 1 may stand in any of them.
            if elements == prod(out) * k * k * prod(batch) and _equal([*m, *n, *batch], out):
                return HloMatmul(batch=prod(batch), m=prod(m), k=k, n=prod(n), contracted=tuple(contracted))
    return None


def _subsets(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(sizes) + 1):
        yield from combinations(sizes, count)


def _without(sizes: Sequence[int], taken: Sequence[int]) -> list[int]:
    left = list(sizes)
    for item in taken:
        if item in left:
            left.remove(item)
    return left


def _has(sizes: Sequence[int], required: Sequence[int]) -> bool:
    return len(_without(sizes, required)) == len(sizes) - len(required)


def _equal(one: Sequence[int], other: Sequence[int]) -> bool:
    return sorted(item for item in one if item != 1) == sorted(item for item in other if item != 1)


def _groups(attributes: str) -> Groups | None:
    """The replica groups of a line; only the first group of an abbreviated list, '{{0,16,32}, ...}'."""
    first = re.search(r"replica_groups=\{\{([\d,]+)\}\s*,\s*\.\.\.", attributes)
    if first:
        return (tuple(int(item) for item in first[1].split(",")),)
    try:
        return replica_groups(attributes.replace("}, {", "},{"), 1)
    except RooftopError:
        return None


def _nbytes(layout: TileLayout) -> float:
    return prod(layout.shape) * TileLayout(dtype=layout.dtype, shape=(1,), minor_to_major=(0,)).nbytes


def _dtype(operation: Operation) -> str:
    """Rooftop's name of the dtype that it multiplies in."""
    dtypes = [layout.dtype for _, layout in operation.operands if layout is not None] or [operation.results[0].dtype]
    names = {hlo: name for name, hlo in HLO_DTYPES.items()}
    return names.get(dtypes[0], "bf16")


def _shape_end(text: str) -> int:
    match = _ARRAY.match(text)
    if match is None:
        raise RooftopError("op", text[:80], _FORM)
    return match.end()


def _closing(text: str, opening: int) -> int:
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise RooftopError("op", text[:80], "balanced parentheses")


@dataclass(frozen=True, kw_only=True)
class _Meanings(Record):
    """Meanings of opcodes and of kinds of fusions, in words."""

    opcodes: Mapping[str, str]
    fusions: Mapping[str, str]


@cache
def _meanings() -> _Meanings:
    text = files(__package__).joinpath("opcodes.toml").read_text(encoding="utf-8")
    return read_record(_Meanings, tomllib.loads(text), "opcodes.toml")


#: Collectives whose result is a sum over the devices of a group.
_SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class TrueMatmul(Record):
    """A matmul as the program means it; sizes of the left, right and result array, with the dim that is split."""

    name: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    split: int
    contracts: bool


@dataclass(frozen=True, kw_only=True)
class Inferred(Record):
    """``ways`` of model parallelism, over devices ``step`` apart; ``devices`` is a lower bound from the groups."""

    ways: Positive
    step: int | None
    devices: Positive
    summed_by: str
    matmuls: tuple[TrueMatmul, ...]


def infer(operations: Sequence[Operation]) -> tuple[Inferred, ...]:
    """Infer parallelism from the sums among operations; empty if no sum has both its groups and its matmul."""
    by_name = {operation.name: operation for operation in operations}
    result = []
    for operation in operations:
        moved = operation.moved
        if moved is None or moved.kind not in _SUMS or not moved.members or not operation.operands:
            continue
        summed = _maker(operation.operands[0][0], by_name)
        if summed is None or summed.matmul is None:
            continue
        local = summed.matmul.contracted[-1]
        matmuls = [_true(summed, summed.matmul, local, moved.members, contracts=True)]
        for name, _ in summed.operands:
            maker = _maker(name, by_name)
            matmul = maker.matmul if maker is not None else None
            if maker is not None and matmul is not None and local in maker.results[0].shape:
                matmuls.insert(0, _true(maker, matmul, local, moved.members, contracts=False))
        groups = operation.groups or ((),)
        step = stride(groups[0])
        # Groups of one stride interleave: so many devices lie between two members of the first.
        devices = max(moved.members * (step or 1), 1 + max((max(group, default=0) for group in groups), default=0))
        result.append(
            Inferred(ways=moved.members, step=step, devices=devices, summed_by=operation.name, matmuls=tuple(matmuls))
        )
    return tuple(result)


def _true(operation: Operation, matmul: HloMatmul, local: int, ways: int, *, contracts: bool) -> TrueMatmul:
    left, right = sorted((layout.shape for _, layout in operation.operands if layout is not None), key=len)[:2]

    def grown(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(ways * size if size == local else size for size in sizes)

    return TrueMatmul(
        name=operation.name,
        left=grown(left) if contracts else left,
        right=grown(right),
        result=operation.results[0].shape if contracts else grown(operation.results[0].shape),
        split=ways * local,
        contracts=contracts,
    )


def _maker(name: str, by_name: dict[str, Operation]) -> Operation | None:
    """The operation that computes the result of ``name``, through operations that only move it."""
    maker = by_name.get(name)
    while (
        maker is not None
        and maker.opcode in ("copy", "bitcast", "copy-done", "copy-start", "reshape")
        and maker.operands
    ):
        maker = by_name.get(maker.operands[0][0])
    return maker
