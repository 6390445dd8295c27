"""Measured, compiled and planned, row by row: joined on (scope, phase), collectives within on their kind and axes.

Figures are per device and step on all three sides. A figure that a side does not have is None: a finding, no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rooftop.core.amounts import Amount
from rooftop.core.ledger import Ledger
from rooftop.core.records import Record, derived
from rooftop.core.scopes import PHASES, SCOPES
from rooftop.explain.join import SPELLED_AS
from rooftop.explain.measured.modules import TracedProgram
from rooftop.explain.measured.roofs import Roofs
from rooftop.profile.measured import Measured, MeasuredRow

Key = tuple[str, str]
#: Kind and axes, in alphabetical order.
Moves = tuple[str, tuple[str, ...]]


@dataclass(kw_only=True)
class RowSums:
    """Planned or compiled work of a scope in a step.

    FLOPs, HBM bytes, seconds with and in exposed collectives; payloads and exposed seconds of each collective; and
    seconds at peak rates by resource.
    """

    time_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    bytes: dict[Moves, float] = field(default_factory=dict)
    shown_s: dict[Moves, float] = field(default_factory=dict)
    bound_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CollectiveColumns(Record):
    """One kind of collective over the same axes on all sides, per device and step; None: a side does not have it."""

    kind: str
    axes: tuple[str, ...]
    in_flight_s: Amount | None
    exposed_s: Amount | None
    compiled_bytes: Amount | None
    planned_bytes: Amount | None
    planned_exposed_s: Amount | None

    @derived
    def hidden_s(self) -> float | None:
        """Seconds in which it overlaps compute."""
        return None if self.in_flight_s is None or self.exposed_s is None else self.in_flight_s - self.exposed_s


@dataclass(frozen=True, kw_only=True)
class MeasuredFigures(Record):
    """A measured row: seconds and their share of the step, ``exposed_s`` of them in collectives, and rates.

    ``slowest`` is the op that takes longest, and ``source`` its 'file:line'.
    """

    time_s: Amount
    share: Amount
    exposed_s: Amount
    flops_per_s: Amount | None
    hbm_bytes_per_s: Amount | None
    slowest: str | None
    source: str

    @classmethod
    def of(cls, row: MeasuredRow, step_s: float) -> MeasuredFigures:
        """The figures of a row in a step of ``step_s``."""
        return cls(
            time_s=row.time_s,
            share=row.time_s / step_s if step_s else 0.0,
            exposed_s=row.exposed_s,
            flops_per_s=row.flops / row.time_s if row.time_s else None,
            hbm_bytes_per_s=row.hbm_bytes / row.time_s if row.time_s else None,
            slowest=None if row.slowest is None else row.slowest.name,
            source="" if row.slowest is None else row.slowest.facts.source,
        )


@dataclass(frozen=True, kw_only=True)
class CompiledFigures(Record):
    """A compiled row: FLOPs, HBM bytes, and seconds at peak rates by resource."""

    flops: Amount
    hbm_bytes: Amount
    bound_s: Mapping[str, Amount]

    @classmethod
    def of(cls, sums: RowSums) -> CompiledFigures:
        """The figures of compiled work."""
        return cls(flops=sums.flops, hbm_bytes=sums.hbm_bytes, bound_s=sums.bound_s)


@dataclass(frozen=True, kw_only=True)
class RowFigures(Record):
    """A row: seconds, ``exposed_s`` of them in collectives, FLOPs and HBM bytes (None: not known)."""

    time_s: Amount
    exposed_s: Amount
    flops: Amount | None
    hbm_bytes: Amount | None

    @classmethod
    def of(cls, sums: RowSums) -> RowFigures:
        """The figures of planned or compiled work."""
        return cls(time_s=sums.time_s, exposed_s=sums.exposed_s, flops=sums.flops, hbm_bytes=sums.hbm_bytes)


@dataclass(frozen=True, kw_only=True)
class ExplainedRow(Record):
    """One (scope, phase) on all sides, per device and step."""

    scope: str
    phase: str
    measured: MeasuredFigures | None
    compiled: CompiledFigures | None
    planned: RowFigures | None
    collectives: tuple[CollectiveColumns, ...]


def columns(
    result: Measured, programs: Mapping[int, TracedProgram], planned: Ledger | None, roof: Roofs | None
) -> tuple[ExplainedRow, ...]:
    """All rows, those that take longest first, then what only the compiler or the plan has, in the order of scopes."""
    measured = {(row.scope, row.phase): row for row in result.rows}
    compiled = compiled_rows(result, programs, roof)
    plan = {} if planned is None else planned_rows(planned)
    order = {name: at for at, name in enumerate(SCOPES)}
    rest = sorted(
        (set(compiled) | set(plan)) - set(measured),
        key=lambda key: (order.get(key[0], len(order)), key[0], PHASES.index(key[1])),
    )
    moves, rows = _measured_moves(result), []
    for key in [*measured, *rest]:
        mine, work, goal = measured.get(key), compiled.get(key), plan.get(key)
        rows.append(
            ExplainedRow(
                scope=key[0],
                phase=key[1],
                measured=None if mine is None else MeasuredFigures.of(mine, result.step_s),
                compiled=None if work is None else CompiledFigures.of(work),
                planned=None if goal is None else RowFigures.of(goal),
                collectives=_collectives(moves.get(key, {}), work, goal),
            )
        )
    return tuple(rows)


def compiled_rows(measured: Measured, programs: Mapping[int, TracedProgram], roof: Roofs | None) -> dict[Key, RowSums]:
    """Work of a trace's programs in a step, times the number of runs in the trace."""
    rows: dict[Key, RowSums] = {}
    for number, program in programs.items():
        runs = _runs_a_step(measured, number)
        places = {instruction.name: inside for inside in program.module.computations.values() for instruction in inside}
        for name, facts in program.facts.items():
            if facts.role == "done" or not runs:
                continue
            times = runs * program.module.executions[places[name].name]
            bound = {} if roof is None else roof.bound_s(facts)
            for place in facts.places:
                row = rows.setdefault((place.scope, place.phase), RowSums())
                part = times * place.share
                row.flops += part * (facts.flops or 0.0)
                row.hbm_bytes += part * (facts.hbm_bytes or 0.0)
                for resource, seconds in bound.items():
                    row.bound_s[resource] = row.bound_s.get(resource, 0.0) + part * seconds
                if facts.bytes:
                    moved = facts.kind, tuple(sorted(facts.axes))
                    row.bytes[moved] = row.bytes.get(moved, 0.0) + part * facts.bytes
    return {key: row for key, row in rows.items() if row.flops or row.hbm_bytes or row.bytes}


def planned_rows(ledger: Ledger) -> dict[Key, RowSums]:
    """A planned ledger by scope and phase, counts applied."""
    rows: dict[Key, RowSums] = {}
    for item in ledger:
        row, count = rows.setdefault(item.key, RowSums()), float(item.count)
        row.time_s += count * float(item.expected_s)
        row.flops += count * (sum(map(float, item.flops.values())) + float(item.kernel_flops))
        row.hbm_bytes += count * float(item.hbm_bytes)
        for collective in item.collectives:
            key = collective.kind, tuple(sorted(collective.axes))
            row.exposed_s += count * float(collective.exposed_s)
            row.bytes[key] = row.bytes.get(key, 0.0) + count * float(collective.bytes)
            row.shown_s[key] = row.shown_s.get(key, 0.0) + count * float(collective.exposed_s)
    return rows


def _runs_a_step(measured: Measured, program: int) -> float:
    """Number of runs of a program in a step: the executions that begin in the counted steps of the first device."""
    device = next(device for device in measured.trace.devices if len(device.track))
    counted = [step for step in measured.steps if step.counted]
    own = device.runs.starts[device.runs.programs == program]
    if not len(device.runs.starts):
        return 1.0
    within = [int(((own >= step.begins) & (own < step.ends)).sum()) for step in counted]
    return sum(within) / len(counted)


def _measured_moves(measured: Measured) -> dict[Key, dict[Moves, list[float]]]:
    """Seconds in flight and exposed by (scope, phase), kind and axes."""
    rows: dict[Key, dict[Moves, list[float]]] = {}
    for collective in measured.collectives:
        for place in collective.facts.places:
            sums = rows.setdefault((place.scope, place.phase), {})
            both = sums.setdefault((collective.facts.kind, tuple(sorted(collective.facts.axes))), [0.0, 0.0])
            both[0] += place.share * collective.in_flight_s
            both[1] += place.share * collective.exposed_s
    return rows


def _collectives(
    measured: dict[Moves, list[float]], compiled: RowSums | None, planned: RowSums | None
) -> tuple[CollectiveColumns, ...]:
    compiled_bytes = {} if compiled is None else dict(compiled.bytes)
    plan = {} if planned is None else planned.bytes
    shown = {} if planned is None else planned.shown_s
    seen = dict(measured)
    # A collective that the compiler spells in another way is joined with the planned one.
    for kind, axes in plan:
        other = SPELLED_AS.get(kind, kind), axes
        if other in plan:
            continue
        if (kind, axes) not in compiled_bytes and other in compiled_bytes:
            compiled_bytes[kind, axes] = compiled_bytes.pop(other)
        if (kind, axes) not in seen and other in seen:
            seen[kind, axes] = seen.pop(other)
    return tuple(
        CollectiveColumns(
            kind=key[0],
            axes=key[1],
            in_flight_s=seen[key][0] if key in seen else None,
            exposed_s=seen[key][1] if key in seen else None,
            compiled_bytes=compiled_bytes.get(key),
            planned_bytes=plan.get(key),
            planned_exposed_s=shown.get(key),
        )
        for key in dict.fromkeys([*seen, *compiled_bytes, *plan])
    )
