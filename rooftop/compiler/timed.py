"""The compiled ledger with times: computation, traffic and waits of every scope, from the scheduled order.

Rows add up to the timeline: the sum of counts times expected seconds is its ``total_s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooftop.compiler.compiling import Compiled
from rooftop.compiler.hlo.costs import InstructionWork, is_host_copy, work
from rooftop.compiler.hlo.places import purpose, users
from rooftop.compiler.ledger import RowDraft, in_order, matmul_rows
from rooftop.compiler.machine.run import scheduled
from rooftop.compiler.machine.schedule import ScheduleTimeline, timeline
from rooftop.core.amounts import Amount
from rooftop.core.ledger import Ledger
from rooftop.core.records import Record
from rooftop.roofline.rates import Rates


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
