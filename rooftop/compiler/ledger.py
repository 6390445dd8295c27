"""The compiled ledger: rows by scope and phase, read from XLA's optimised HLO.

Matmul FLOPs are those of ``dot`` and ``convolution`` (XLA:TPU writes every matmul as a convolution); collectives are
the logical ones. Hand-written kernels count with the FLOPs that they declare. ``rooftop.compiler.timed`` adds
elementwise work, HBM traffic and times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rooftop.arrays import Mesh
from rooftop.compiler.collectives.logical import logical_collectives
from rooftop.compiler.hlo.kernels import declared_flops
from rooftop.compiler.hlo.matmuls import MATMULS, matmul_dtype, matmul_flops
from rooftop.compiler.hlo.places import place_of
from rooftop.compiler.hlo.text import Module
from rooftop.core.errors import one_of
from rooftop.core.ledger import Collective, Ledger, Row
from rooftop.core.scopes import PHASES, SCOPES


def read_ledger(module: Module, mesh: Mapping[str, int], layout: Mesh | None = None) -> Ledger:
    """The rows of a compiled program, per device, in the order of the scope list.

    ``mesh`` and ``layout`` are as in ``logical_collectives``. A (scope, phase) has one row for each number of
    executions (``count``): work inside a scan and work that was hoisted out of it are separate rows. A ``critical``
    collective is synchronous: the schedule waits for all of it.
    """
    rows = matmul_rows(module)
    for collective in logical_collectives(module, mesh, layout):
        key = (collective.scope, collective.phase, collective.executions)
        rows.setdefault(key, RowDraft()).collectives.append(collective.ledger_entry)
    return in_order(rows)


#: Scope, phase and executions.
Key = tuple[str, str, int]


@dataclass
class RowDraft:
    """A row during summation; fields as in ``rooftop.core.ledger.Row``."""

    flops: dict[str, float] = field(default_factory=dict)
    kernel_flops: float = 0.0
    vector_flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: list[Collective] = field(default_factory=list)
    time_s: dict[str, float] = field(default_factory=dict)
    expected_s: float = 0.0
    serial_s: float = 0.0


def matmul_rows(module: Module) -> dict[Key, RowDraft]:
    """Rows with the FLOPs of every matmul, and those that kernels declare."""
    rows: dict[Key, RowDraft] = {}
    for computation in module.computations.values():
        count = module.executions[computation.name]
        for instruction in computation if count else ():
            declared = declared_flops(instruction)
            if declared is None and instruction.opcode not in MATMULS:
                continue
            draft = rows.setdefault((*place_of(module, computation, instruction), count), RowDraft())
            draft.kernel_flops += declared or 0.0
            if instruction.opcode in MATMULS:
                dtype = matmul_dtype(computation, instruction)
                draft.flops[dtype] = draft.flops.get(dtype, 0.0) + matmul_flops(computation, instruction)
    return rows


def in_order(rows: Mapping[Key, RowDraft]) -> Ledger:
    """The rows in the order of the scope list."""
    order = {name: index for index, name in enumerate(SCOPES)}
    keys = sorted(rows, key=lambda key: (order.get(key[0], len(order)), key[0], PHASES.index(key[1]), key[2]))
    return Ledger(tuple(_row(key, rows[key]) for key in keys))


def _row(key: Key, draft: RowDraft) -> Row:
    fields = {**vars(draft), "collectives": tuple(draft.collectives)}
    return Row(
        scope=key[0],
        phase=one_of("row.phase", key[1], PHASES),
        count=key[2],
        formula="read from compiled HLO",
        **fields,
    )
