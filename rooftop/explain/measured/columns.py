"""Measured, compiled and planned, row by row: joined on (scope, phase), collectives within on their kind and axes.

Figures are per device and step on all three sides. What a side does not have is None, and is a finding and no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rooftop.core.ledger import Ledger
from rooftop.core.scopes import PHASES, SCOPES
from rooftop.explain.join import SPELLED_AS
from rooftop.explain.measured.modules import TracedProgram
from rooftop.explain.measured.roofs import Roofs
from rooftop.profile.measured import Measured, MeasuredRow

Key = tuple[str, str]
#: Kind and axes, in alphabetical order.
Moves = tuple[str, tuple[str, ...]]


@dataclass(kw_only=True)
class CompiledRow:
    """Work of the compiled programs for a scope in a step: FLOPs, HBM bytes, payloads, and seconds at peak rates."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    bytes: dict[Moves, float] = field(default_factory=dict)
    bound_s: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class PlannedRow:
    """Planned work for a scope in a step: seconds with and in exposed collectives, FLOPs, bytes, payloads."""

    time_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    bytes: dict[Moves, float] = field(default_factory=dict)
    shown_s: dict[Moves, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CollectiveColumns:
    """One kind of collective over the same axes on all sides."""

    kind: str
    axes: tuple[str, ...]
    in_flight_s: float | None
    exposed_s: float | None
    compiled_bytes: float | None
    planned_bytes: float | None
    planned_exposed_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        hidden = None if self.in_flight_s is None or self.exposed_s is None else self.in_flight_s - self.exposed_s
        return vars(self) | {"axes": list(self.axes), "hidden_s": hidden}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """One (scope, phase) on all sides."""

    scope: str
    phase: str
    measured: MeasuredRow | None
    compiled: CompiledRow | None
    planned: PlannedRow | None
    collectives: tuple[CollectiveColumns, ...]

    @property
    def time_s(self) -> float:
        """Measured seconds."""
        return 0.0 if self.measured is None else self.measured.time_s

    def to_json(self, step_s: float) -> dict[str, Any]:
        """Plain JSON values."""
        mine, compiled, plan = self.measured, self.compiled, self.planned
        return {
            "scope": self.scope,
            "phase": self.phase,
            "measured": None
            if mine is None
            else {
                "time_s": mine.time_s,
                "share": mine.time_s / step_s if step_s else 0.0,
                "exposed_s": mine.exposed_s,
                "flops_per_s": mine.flops / mine.time_s if mine.time_s else None,
                "hbm_bytes_per_s": mine.hbm_bytes / mine.time_s if mine.time_s else None,
                "slowest": None if mine.slowest is None else mine.slowest.name,
                "source": "" if mine.slowest is None else mine.slowest.facts.source,
            },
            "compiled": None
            if compiled is None
            else {"flops": compiled.flops, "hbm_bytes": compiled.hbm_bytes, "bound_s": compiled.bound_s},
            "planned": None
            if plan is None
            else {"time_s": plan.time_s, "exposed_s": plan.exposed_s, "flops": plan.flops, "hbm_bytes": plan.hbm_bytes},
            "collectives": [collective.to_json() for collective in self.collectives],
        }


def columns(
    result: Measured, programs: Mapping[int, TracedProgram], planned: Ledger | None, roof: Roofs | None
) -> tuple[Columns, ...]:
    """All rows, those that take longest first, then what only the compiler or the plan has, in the order of scopes."""
    measured = {(row.scope, row.phase): row for row in result.rows}
    compiled = compiled_rows(result, programs, roof)
    plan = {} if planned is None else planned_rows(planned)
    order = {name: at for at, name in enumerate(SCOPES)}
    rest = sorted(
        (set(compiled) | set(plan)) - set(measured),
        key=lambda key: (order.get(key[0], len(order)), key[0], PHASES.index(key[1])),
    )
    moves = _measured_moves(result)
    return tuple(
        Columns(
            scope=key[0],
            phase=key[1],
            measured=measured.get(key),
            compiled=compiled.get(key),
            planned=plan.get(key),
            collectives=_collectives(moves.get(key, {}), compiled.get(key), plan.get(key)),
        )
        for key in [*measured, *rest]
    )


def compiled_rows(
    measured: Measured, programs: Mapping[int, TracedProgram], roof: Roofs | None
) -> dict[Key, CompiledRow]:
    """Work of a trace's programs in a step, times the number of runs in the trace."""
    rows: dict[Key, CompiledRow] = {}
    for number, program in programs.items():
        runs = _runs_a_step(measured, number)
        places = {instruction.name: inside for inside in program.module.computations.values() for instruction in inside}
        for name, facts in program.facts.items():
            if facts.role == "done" or not runs:
                continue
            times = runs * program.module.executions[places[name].name]
            bound = {} if roof is None else roof.bound_s(facts)
            for place in facts.places:
                row = rows.setdefault((place.scope, place.phase), CompiledRow())
                part = times * place.share
                row.flops += part * (facts.flops or 0.0)
                row.hbm_bytes += part * (facts.hbm_bytes or 0.0)
                for resource, seconds in bound.items():
                    row.bound_s[resource] = row.bound_s.get(resource, 0.0) + part * seconds
                if facts.bytes:
                    moved = facts.kind, tuple(sorted(facts.axes))
                    row.bytes[moved] = row.bytes.get(moved, 0.0) + part * facts.bytes
    return {key: row for key, row in rows.items() if row.flops or row.hbm_bytes or row.bytes}


def planned_rows(ledger: Ledger) -> dict[Key, PlannedRow]:
    """A planned ledger by scope and phase, counts applied."""
    rows: dict[Key, PlannedRow] = {}
    for item in ledger:
        row, count = rows.setdefault(item.key, PlannedRow()), float(item.count)
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
    measured: dict[Moves, list[float]], compiled: CompiledRow | None, planned: PlannedRow | None
) -> tuple[CollectiveColumns, ...]:
    compiled_bytes = {} if compiled is None else dict(compiled.bytes)
    plan = {} if planned is None else planned.bytes
    shown = {} if planned is None else planned.shown_s
    seen = dict(measured)
    # What the compiler spells in another way stands next to what was planned.
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
