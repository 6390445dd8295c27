"""Facts about an op of a trace: the kind of work, its scope and phase, and its line of the program.

A trace alone has some of them; with the compiled module (``rooftop.explain.measured.modules``) all are known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rooftop.core.ledger import CollectiveKind
from rooftop.core.scopes import UNSCOPED, open_place, scope_and_phase
from rooftop.profile.trace import Op

#: Categories of ops: the device computes, moves arrays, communicates, waits for its host, or runs a control op such as
#: a loop. Only time that no inner op covers is attributed to a control op.
Category = Literal["compute", "copy", "collective", "host", "control"]
COMPUTE: Literal["compute"] = "compute"
COPY: Literal["copy"] = "copy"
COLLECTIVE: Literal["collective"] = "collective"
HOST: Literal["host"] = "host"
CONTROL: Literal["control"] = "control"

COLLECTIVES: Mapping[str, CollectiveKind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "all_gather",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
    "AllToAll": "all_to_all",
    "SendRecv": "permute",
}
_OPCODE = re.compile(r"= .*?[\]\})] ([a-z][\w\-]*)\(")
_CATEGORIES: Mapping[Category, tuple[str, ...]] = {
    CONTROL: ("while", "conditional", "call"),
    HOST: ("infeed", "outfeed", "send", "recv", "send-done", "recv-done", "host-transfer"),
    COPY: (
        "copy", "copy-start", "copy-done", "slice-start", "slice-done", "dynamic-slice-start", "dynamic-slice-done",
    ),
}  # fmt: skip
_NUMBERED = re.compile(r"(?:[.:_]\d+|\.clone)+$")
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_(\w+?)_")


@dataclass(frozen=True, kw_only=True)
class OpPlace:
    """A scope and a phase, and their share of the op's time: fused ops belong to several."""

    scope: str
    phase: str
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about an op. Figures are of one execution on one device; None: unknown.

    ``matmul`` is M, K and N of its largest matmul, and ``dtype`` that matmul's. A collective has a ``kind``, mesh
    ``axes``, ``bytes`` (payload as in ``core.ledger.Collective``), ``wire_bytes``, and a ``role``: 'whole' if the
    device waits for all of it, 'start' or 'done' of an asynchronous one. ``started_by`` is the op that starts the
    collective that this op ends.
    """

    category: Category
    places: tuple[OpPlace, ...]
    source: str = ""
    opcode: str = ""
    flops: float | None = None
    hbm_bytes: float | None = None
    dtype: str = "bf16"
    matmul: tuple[float, float, float] | None = None
    kind: str = ""
    axes: tuple[str, ...] = ()
    bytes: float | None = None
    wire_bytes: float | None = None
    role: str = "whole"
    started_by: str = ""

    @property
    def place(self) -> OpPlace:
        """The place with the largest share."""
        return max(self.places, key=lambda place: place.share)


def facts_of(op: Op) -> Facts:
    """The facts of an op from the trace alone: its text or its name, its category, its name stack."""
    opcode = _opcode(op)
    kind, role = collective_kind(opcode)
    scope, phase = _place(op.op_name)
    return Facts(
        category=COLLECTIVE if kind else category_of(opcode, op.category),
        places=(OpPlace(scope=scope, phase=phase),),
        source=op.source,
        opcode=opcode,
        flops=op.flops,
        hbm_bytes=op.hbm_bytes,
        kind=kind,
        role=role,
        started_by=_started_by(op) if role == "done" else "",
    )


def category_of(*names: str) -> Category:
    """Category of an op other than a collective, from its opcode and the category in the trace."""
    for category, members in _CATEGORIES.items():
        if any(name in members for name in names):
            return category
    return COPY if names[0].startswith("Memcpy") else COMPUTE


def collective_kind(opcode: str) -> tuple[str, str]:
    """The kind of a collective by its opcode, and its role; ('', 'whole') for other opcodes."""
    if match := _NCCL.match(opcode):
        opcode = match[1]
    for suffix, role in (("-start", "start"), ("-done", "done")):
        if opcode.endswith(suffix) and opcode.removesuffix(suffix) in COLLECTIVES:
            return COLLECTIVES[opcode.removesuffix(suffix)], role
    return COLLECTIVES.get(opcode, ""), "whole"


def _place(op_name: str) -> tuple[str, str]:
    """Scope and phase by a name stack alone: rooftop's scope if there is one, else the program's own."""
    place = scope_and_phase(op_name)
    return place if place[0] != UNSCOPED else open_place(op_name)


def _opcode(op: Op) -> str:
    """The opcode of an op, from its text or the start of its name. A fused collective has its own name."""
    match = _OPCODE.search(op.text)
    opcode = match[1] if match else ""
    if opcode == "fusion" and (called := re.search(r"calls=%?([\w\-]+)", op.text)):
        opcode = called[1] if collective_kind(_NUMBERED.sub("", called[1]))[0] else opcode
    if opcode:
        return _NUMBERED.sub("", opcode) if opcode != "fusion" else opcode
    return op.name if op.name.startswith("nccl") else _NUMBERED.sub("", op.name)


def _started_by(op: Op) -> str:
    """The operand of the op that ends a collective."""
    match = re.search(r"-done\(.*?%([\w.\-]+)\)", op.text)
    return match[1] if match else op.name.replace("-done", "-start")
