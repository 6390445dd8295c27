"""Two runs, plans, compilations or reports, row by row: what takes longer, what is new, and what is gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError, misread
from rooftop.core.files import read_json_object
from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.explain.measured.columns import Key, Moves, planned_rows
from rooftop.explain.measured.report import SCHEMA, explain
from rooftop.plan.training.plan import TrainingPlan

#: A row whose figures differ by a smaller share is the same.
_SAME = 1e-3
_ACCEPTED = "a run, a trace, a plan.json, or what rooftop compile -o or rooftop explain --json wrote"


@dataclass(frozen=True, kw_only=True)
class SideRow:
    """A scope in a phase on one side, per device and step; ``bytes`` by kind and axes of a collective."""

    time_s: float
    exposed_s: float
    flops: float | None
    hbm_bytes: float | None
    bytes: Mapping[Moves, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two: ``kind`` is measured, compiled or planned; ``step_s`` is the time of a step.

    ``job`` is train or serve where a plan says so, else ''.
    """

    name: str
    kind: str
    job: str = ""
    step_s: float
    rows: Mapping[Key, SideRow]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A row on both sides (None: not there)."""

    scope: str
    phase: str
    before: SideRow | None
    after: SideRow | None

    @property
    def time_s(self) -> float:
        """By how many seconds of a step the second takes longer."""
        return _time(self.after) - _time(self.before)

    @property
    def collectives(self) -> tuple[str, ...]:
        """Collectives whose bytes differ, in words."""
        old, new = (({} if row is None else row.bytes) for row in (self.before, self.after))
        result = []
        for key in dict.fromkeys([*old, *new]):
            one, two = old.get(key, 0.0), new.get(key, 0.0)
            if abs(two - one) > _SAME * max(one, two):
                name = f"{key[0]} over {','.join(key[1])}"
                result.append(
                    f"new {name} of {format_bytes(two)}" if not one
                    else f"no {name} of {format_bytes(one)}" if not two
                    else f"{name}: {format_bytes(one)}, then {format_bytes(two)}"
                )  # fmt: skip
        return tuple(result)

    @property
    def differs(self) -> bool:
        """True if any figure differs."""
        return abs(self.time_s) > _SAME * max(_time(self.before), _time(self.after)) or bool(self.collectives)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "scope": self.scope,
            "phase": self.phase,
            "before": _row_json(self.before),
            "after": _row_json(self.after),
            "change_s": self.time_s,
            "collectives": list(self.collectives),
        }


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two sides and their rows that differ, the largest change first."""

    before: Side
    after: Side
    changes: tuple[Change, ...]

    @property
    def verdict(self) -> str:
        """One line."""
        one, two = self.before.step_s, self.after.step_s
        if not one or not two:
            return "a side has no times"
        line = f"{format_seconds(one)} a step, then {format_seconds(two)} ({two / one - 1:+.1%})"
        if not self.changes:
            return f"{line}; no row differs"
        most = self.changes[0]
        collectives_text = f"; {'; '.join(most.collectives)}" if most.collectives else ""
        if self.before.kind != self.after.kind:
            line += f" ({self.before.kind}, then {self.after.kind})"
        sign = "+" if most.time_s > 0 else "-"
        return f"{line}; most in {most.scope} {most.phase}: {sign}{format_seconds(abs(most.time_s))}{collectives_text}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kind": "difference",
            "schema": SCHEMA,
            "before": {"name": self.before.name, "kind": self.before.kind, "step_s": self.before.step_s},
            "after": {"name": self.after.name, "kind": self.after.kind, "step_s": self.after.step_s},
            "verdict": self.verdict,
            "changes": [change.to_json() for change in self.changes],
        }


def difference(before: Side, after: Side) -> Difference:
    """Compare two sides. Raises RooftopError for a side of training and one of serving."""
    if before.job and after.job and before.job != after.job:
        jobs = f"{before.name} ({before.job}) and {after.name} ({after.job})"
        raise RooftopError("diff", jobs, "two of training, or two of serving")
    changes = [
        Change(scope=key[0], phase=key[1], before=before.rows.get(key), after=after.rows.get(key))
        for key in dict.fromkeys([*before.rows, *after.rows])
    ]
    result = sorted((change for change in changes if change.differs), key=lambda change: -abs(change.time_s))
    return Difference(before=before, after=after, changes=tuple(result))


def read_side(path: Path) -> Side:
    """A side from a path. Raises RooftopError unless it is a run, a trace, a plan or a report."""
    if path.suffix != ".json":
        return _of_report(str(path), explain(path).to_json())
    return side_of(str(path), read_json_object(path, field="diff", accepted=_ACCEPTED))


def side_of(name: str, data: Mapping[str, Any]) -> Side:
    """A side from the JSON of a plan, a compilation or an explained trace. Raises RooftopError for other JSON."""
    kind = data.get("kind")
    try:
        if kind == "explained":
            return _of_report(name, data)
        if kind == "compiled" and data.get("fits"):
            job = "train" if data.get("planned_step") else ""
            return _of_ledger(name, "compiled", Ledger.from_json(data["ledger"]), job)
        if kind == "train" and "model" in data:
            return _of_ledger(name, "planned", TrainingPlan.from_json(data).ledger, "train")
        if kind == "serve" and "generate" in data:
            rows = [row for phase in ("prefill", "generate") for row in data[phase]["ledger"]]
            return _of_ledger(name, "planned", Ledger.from_json(rows), "serve")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise misread(f"diff {name}", error, _ACCEPTED) from None
    raise RooftopError("diff", name, _ACCEPTED)


def _of_report(name: str, data: Mapping[str, Any]) -> Side:
    rows = {
        (row["scope"], row["phase"]): SideRow(
            time_s=row["measured"]["time_s"],
            exposed_s=row["measured"]["exposed_s"],
            flops=None if row["compiled"] is None else row["compiled"]["flops"],
            hbm_bytes=None if row["compiled"] is None else row["compiled"]["hbm_bytes"],
            bytes={
                (item["kind"], tuple(item["axes"])): item["compiled_bytes"]
                for item in row["collectives"]
                if item["compiled_bytes"]
            },
        )
        for row in data["rows"]
        if row["measured"] is not None
    }
    idle = SideRow(time_s=data["idle_s"], exposed_s=0.0, flops=None, hbm_bytes=None)
    return Side(name=name, kind="measured", step_s=data["step_s"], rows=rows | {("idle", ""): idle})


def _of_ledger(name: str, kind: str, ledger: Ledger, job: str) -> Side:
    rows = {
        key: SideRow(
            time_s=row.time_s, exposed_s=row.exposed_s, flops=row.flops, hbm_bytes=row.hbm_bytes, bytes=row.bytes
        )
        for key, row in planned_rows(ledger).items()
    }
    return Side(name=name, kind=kind, job=job, step_s=float(ledger.expected_s), rows=rows)


def _time(row: SideRow | None) -> float:
    return 0.0 if row is None else row.time_s


def _row_json(row: SideRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {"time_s": row.time_s, "exposed_s": row.exposed_s, "flops": row.flops, "hbm_bytes": row.hbm_bytes}
