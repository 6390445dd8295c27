"""The compiled ledger: rows by scope and phase, read from XLA's optimised HLO, and their times from its schedule.

Matmul FLOPs are those of ``dot``, ``convolution`` (XLA:TPU writes every matmul so) and calls of cuBLAS; collectives are
the logical ones. Hand-written kernels count as in ``rooftop.compiler.hlo.kernels``. ``compiled_ledger`` adds
elementwise work, HBM traffic, and times that add up to the timeline: the sum of counts times expected seconds is its
``total_s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rooftop.arrays import Mesh
from rooftop.compiler.collectives.logical import logical_collectives
from rooftop.compiler.compiling import Compiled
from rooftop.compiler.hlo.costs import (
    InstructionWork,
    is_host_copy,
    is_matmul,
    matmul_dtype,
    matmul_flops,
    work,
)
from rooftop.compiler.hlo.kernels import kernel
from rooftop.compiler.hlo.places import place_of, purpose, users
from rooftop.compiler.hlo.text import Module
from rooftop.compiler.machine.run import scheduled
from rooftop.compiler.machine.schedule import ScheduleTimeline, timeline
from rooftop.core.amounts import Amount
from rooftop.core.errors import one_of
from rooftop.core.ledger import Collective, Ledger, Row
from rooftop.core.records import Record
from rooftop.core.scopes import PHASES, SCOPES
from rooftop.roofline.rates import Rates


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
Key = tuple[str, str, float]


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
    """Rows with the FLOPs of every matmul, and those of kernels."""
    rows: dict[Key, RowDraft] = {}
    for computation in module.computations.values():
        count = module.executions[computation.name]
        for instruction in computation if count else ():
            called = kernel(module, computation, instruction)
            inside = None if called is None else called.flops
            if inside is None and not is_matmul(instruction):
                continue
            draft = rows.setdefault((*place_of(module, computation, instruction), count), RowDraft())
            draft.kernel_flops += inside or 0.0
            if is_matmul(instruction):
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


@dataclass(frozen=True, kw_only=True)
class CompiledTimes(Record):
    """Seconds of one execution: busy at peak rates by resource; waiting for each network; expected; without overlap."""

    mxu_s: Amount
    vpu_s: Amount
    hbm_s: Amount
    exposed_ici_s: Amount
    exposed_dcn_s: Amount
    expected_s: Amount
    serial_s: Amount


@dataclass(frozen=True, kw_only=True)
class TimedLedger:
    """A compiled program as rows with times, and the schedule of these times."""

    ledger: Ledger
    timeline: ScheduleTimeline
    step: CompiledTimes


def compiled_ledger(compiled: Compiled, rates: Rates | None = None) -> TimedLedger:
    """The rows of a compiled program with times, at ``rates`` (by default those of the chip).

    ``time_s`` is the bound by resource at peak rates, ``expected_s`` the row's share of the timeline, with exposed
    collectives, and ``serial_s`` the same without overlap. A fusion's time, elementwise work and HBM traffic belong to
    the scope of its matmuls, or of its name; a copy between memories belongs to the work that uses it.
    """
    rates = rates or Rates.of(compiled.mesh.slice.chip)
    module, line = compiled.module, timeline(compiled.module, compiled.mesh, rates)
    rows = matmul_rows(module)
    for draft in rows.values():
        draft.time_s["mxu"] = _mxu_s(draft, rates)
    for computation in scheduled(module):
        used_by = users(computation)
        for instruction in computation:
            done = work(module, computation, instruction)
            spent_s = line.spent_s.get((computation.name, instruction.name), 0.0)
            if spent_s or done != InstructionWork():
                place = purpose(module, computation, instruction, used_by)
                key = (*place, module.executions[computation.name])
                _add(rows.setdefault(key, RowDraft()), done, spent_s / key[2], rates, is_host_copy(instruction))
    for entry in line.collectives:
        collective = entry.collective
        draft = rows.setdefault((collective.scope, collective.phase, collective.executions), RowDraft())
        draft.collectives.append(entry.ledger_entry)
        draft.expected_s += entry.exposed_s
        draft.serial_s += entry.price_s
        for resource, seconds in entry.time_s.items():
            draft.time_s[resource] = draft.time_s.get(resource, 0.0) + seconds
    ledger = in_order({key: draft for key, draft in rows.items() if _matters(draft)})
    return TimedLedger(ledger=ledger, timeline=line, step=_step(ledger, line))


def _add(draft: RowDraft, done: InstructionWork, spent_s: float, rates: Rates, to_host: bool) -> None:
    """Add one instruction's work and seconds to its row."""
    draft.vector_flops += done.vector_ops
    draft.hbm_bytes += done.hbm_bytes
    draft.expected_s += spent_s
    draft.serial_s += spent_s
    bound = done.bound_s(rates)
    # The row already has the time of the matrix unit: FLOPs count in the scope of their matmul.
    busy = {name: bound[name] for name in ("vpu", "hbm")}
    if to_host:
        busy["pcie"] = done.hbm_bytes / rates.pcie_bytes_per_s
    for resource, seconds in busy.items():
        draft.time_s[resource] = draft.time_s.get(resource, 0.0) + seconds


def _mxu_s(draft: RowDraft, rates: Rates) -> float:
    peaks: Mapping[str, float] = rates.flops_per_s
    matmuls = sum(flops / peaks.get(dtype, peaks["bf16"]) for dtype, flops in draft.flops.items())
    return matmuls + draft.kernel_flops / peaks["bf16"]


def _matters(draft: RowDraft) -> bool:
    return bool(draft.expected_s or draft.collectives or any(draft.time_s.values()))


def _step(ledger: Ledger, line: ScheduleTimeline) -> CompiledTimes:
    exposed = {"ici": 0.0, "dcn": 0.0}
    for entry in line.collectives:
        for resource, seconds in entry.by_resource(entry.exposed_s).items():
            exposed[resource] += entry.collective.executions * seconds
    return CompiledTimes(
        **{f"{name}_s": float(ledger.total(name)) for name in ("mxu", "vpu", "hbm")},
        **{f"exposed_{name}_s": seconds for name, seconds in exposed.items()},
        expected_s=line.total_s,
        serial_s=float(ledger.serial_s),
    )
