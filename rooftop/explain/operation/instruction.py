"""One HLO instruction made readable: arrays, layouts, tiling, memory, what it computes or moves, and its roofline.

Source: chapter 9 of the book, with its examples; layouts by ``rooftop.arrays.tiles``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import combinations
from math import prod
from typing import Any

import numpy as np

from rooftop.arrays.mesh import span
from rooftop.arrays.tiles import HLO_DTYPES, TileLayout
from rooftop.compiler.hlo.groups import Groups, replica_groups
from rooftop.core.errors import RooftopError
from rooftop.hardware import Chip
from rooftop.hardware.slices import PhysicalAxis
from rooftop.profile.facts import COLLECTIVES
from rooftop.roofline.collectives import price
from rooftop.roofline.rates import Rates

_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([A-Za-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,\s]*\](?:\{[^}]*\})?")
_OPERAND = re.compile(rf"(?P<array>{_ARRAY.pattern})?\s*%(?P<name>[\w.\-]+)")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_FORM = "an HLO instruction, such as %fusion.3 = bf16[32,4096]{1,0} fusion(bf16[32,8192]{1,0} %x), kind=kLoop, calls=%f"


@dataclass(frozen=True, kw_only=True)
class HloMatmul:
    """A matmul as [m, k] x [k, n], ``batch`` times; ``contracted`` are the sizes that are summed over."""

    batch: int
    m: int
    k: int
    n: int
    contracted: tuple[int, ...]

    @property
    def flops(self) -> float:
        """Two per multiply-add."""
        return 2.0 * self.batch * self.m * self.k * self.n


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A collective: its ``kind``, logical ``bytes`` on a device, ``members`` of a group (None: not in the line)."""

    kind: str
    bytes: float
    members: int | None
    groups: Groups | None


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
        known = _opcodes()
        text = known["opcodes"].get(self.called) or known["opcodes"].get(self.opcode, "an operation of HLO")
        kind = re.search(r"\bkind=(\w+)", self.attributes)
        return f"{text}; {known['fusions'][kind[1]]}" if kind and kind[1] in known["fusions"] else str(text)

    @property
    def moved(self) -> Moved | None:
        """Communication of the instruction; None if it is no collective."""
        kind = COLLECTIVES.get(self.called) or COLLECTIVES.get(self.opcode.removesuffix("-start").removesuffix("-done"))
        if not kind or not self.results:
            return None
        operands = [layout for _, layout in self.operands if layout is not None]
        out = max(_nbytes(result) for result in self.results)
        put = max((_nbytes(item) for item in operands), default=out)
        groups = None
        if "replica_groups=" in self.attributes:
            groups = _groups(self.attributes)
        members = len(groups[0]) if groups and groups[0] else None
        if members is None and out != put:
            members = round(max(out, put) / min(out, put))
        if kind == "reduce_scatter" and put == out and members:
            put = out * members
        payload = {"all_gather": out, "reduce_scatter": put}.get(kind, put)
        return Moved(kind=kind, bytes=payload, members=members, groups=groups)

    @property
    def matmul(self) -> HloMatmul | None:
        """The matmul that its shapes tell of: a dot, or a fusion of two arrays whose sizes fit one; None without."""
        if self.moved or self.opcode not in ("fusion", "dot", "convolution", "custom-call") or len(self.results) != 1:
            return None
        shapes = [layout.shape for _, layout in self.operands if layout is not None]
        pairs = combinations(shapes, 2)
        result = (_matmul(left, right, self.results[0].shape) for left, right in pairs)
        return max((item for item in result if item is not None), key=lambda item: item.flops, default=None)

    @property
    def hbm_bytes(self) -> float:
        """Bytes of its operands and results in HBM, padding included, each once."""
        arrays = [*self.results, *(layout for _, layout in self.operands if layout is not None)]
        return float(sum(array.nbytes for array in arrays if array.memory_space == 0)) if self.does_work else 0.0

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
        operands=tuple(
            (item["name"], TileLayout.parse(item["array"]) if item["array"] else None)
            for item in _OPERAND.finditer(inside)
        ),
        attributes=rest[closing + 1 :],
    )


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """Seconds of an operation on a chip: the bound by resource at peak rates, and which binds.

    ``ici`` is over one axis of the network, as an open line; ``wrapped_s`` if that axis closes into a ring.
    """

    chip: str
    bound_s: dict[str, float]
    wrapped_s: float | None
    intensity: float | None
    critical_intensity: float

    @property
    def bound(self) -> str:
        """The busiest resource ('' for what takes no time)."""
        busiest = max(self.bound_s, key=lambda name: self.bound_s[name], default="")
        return busiest if busiest and self.bound_s[busiest] else ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(vars(self)) | {"bound": self.bound}


def times(operation: Operation, chip: Chip) -> OperationTimes:
    """The roofline of an operation on one device of a chip."""
    rates = Rates.of(chip)
    matmul, moved = operation.matmul, operation.moved
    peak = rates.flops_per_s.get(_dtype(operation), rates.flops_per_s["bf16"])
    bound = {"mxu": matmul.flops / peak if matmul else 0.0, "hbm": operation.hbm_bytes / rates.hbm_bytes_per_s}
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
    return float(price(moved.kind, group).bound_s(moved.bytes)["ici"])


def layout_json(layout: TileLayout) -> dict[str, Any]:
    """A layout as plain JSON values."""
    return {
        "text": str(layout),
        "dtype": layout.dtype,
        "shape": list(layout.shape),
        "order": list(reversed(layout.minor_to_major)),
        "tiles": [list(tile) for tile in layout.tiles],
        "padded_shape": list(layout.padded_shape),
        "memory": layout.memory,
        "element_bytes": _nbytes(layout),
        "bytes": layout.nbytes,
        "expansion": layout.expansion,
    }


def operation_json(operation: Operation, chip: Chip | None) -> dict[str, Any]:
    """An operation as plain JSON values; its times if a chip is given."""
    matmul, moved = operation.matmul, operation.moved
    return {
        "op": operation.name,
        "opcode": operation.opcode,
        "calls": operation.called,
        "does": operation.does,
        "results": [layout_json(result) for result in operation.results],
        "operands": [
            {"name": name, "layout": None if layout is None else layout_json(layout)}
            for name, layout in operation.operands
        ],
        "matmul": None
        if matmul is None
        else vars(matmul) | {"contracted": list(matmul.contracted), "flops": matmul.flops},
        "collective": None if moved is None else {"kind": moved.kind, "bytes": moved.bytes, "members": moved.members},
        "hbm_bytes": operation.hbm_bytes,
        "times": None if chip is None else times(operation, chip).to_json(),
    }


def _matmul(left: Sequence[int], right: Sequence[int], out: Sequence[int]) -> HloMatmul | None:
    """Matmul of arrays of these sizes: sizes that both have and the result lacks are contracted."""
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
    """The replica groups of a line. One that a page has cut short, '{{0,16,32}, ...}', is told by its first group."""
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


@cache
def _opcodes() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("opcodes.toml").read_text(encoding="utf-8"))
