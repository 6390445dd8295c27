"""Two runs, plans, compilations or reports, row by row: what takes longer, what is new, and what is gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rooftop.core.amounts import Amount
from rooftop.core.errors import RooftopError
from rooftop.core.files import read_json_object
from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.core.records import Record, derived, read_record
from rooftop.explain.compiled.report import CompiledRecord, SavedAnswer, saved_compilation
from rooftop.explain.measured.columns import Key, Moves, RowFigures, planned_rows
from rooftop.explain.measured.report import SCHEMA, ExplainedRecord, explain
from rooftop.plan.serving.plan import ServingPlanDocument
from rooftop.plan.training.plan import TrainingPlan, TrainingPlanDocument

#: A row whose figures differ by a smaller share is the same.
_SAME = 1e-3
_ACCEPTED = "a run, a trace, a plan.json, or what rooftop compile -o, check --save or explain --json wrote"


@dataclass(frozen=True, kw_only=True)
class DifferenceSide(Record):
    """One of the two: ``step_s`` is the time of a step, ``peak_bytes`` the most bytes of a device (None: not known).

    ``program`` is the framework of a plan, ``usd_per_token`` its list price per token.
    """

    name: str
    kind: Literal["measured", "compiled", "planned"]
    step_s: Amount
    peak_bytes: Amount | None = None
    program: str | None = None
    usd_per_token: float | None = None


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two with its rows: figures per device and step, and bytes by kind and axes of a collective.

    ``job`` is train or serve where a plan says so, else ''. ``memory`` are the bytes at the peak, by class.
    """

    figures: DifferenceSide
    job: str = ""
    memory: Mapping[str, float] = field(default_factory=dict)
    rows: Mapping[Key, tuple[RowFigures, Mapping[Moves, float]]]


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """A scope in a phase on both sides (None: not there), and in words the ``collectives`` whose bytes differ."""

    scope: str
    phase: str
    before: RowFigures | None
    after: RowFigures | None
    collectives: tuple[str, ...]

    @derived
    def change_s(self) -> float:
        """By how many seconds of a step the second takes longer."""
        return _time(self.after) - _time(self.before)

    @property
    def differs(self) -> bool:
        """True if any figure differs."""
        return abs(self.change_s) > _SAME * max(_time(self.before), _time(self.after)) or bool(self.collectives)


@dataclass(frozen=True, kw_only=True)
class MemoryChange(Record):
    """Bytes of a device at the peak, of one class of arrays, on both sides."""

    name: str
    before: Amount
    after: Amount

    @derived
    def change(self) -> float:
        """By how many bytes the second holds more."""
        return float(self.after - self.before)


@dataclass(frozen=True, kw_only=True)
class Difference(Record):
    """Two sides and what differs, the largest change first; figures are per device and step.

    ``memory`` has the classes of arrays at the peak, where both sides tell them.
    """

    kind: Literal["difference"]
    schema: Literal[1]
    before: DifferenceSide
    after: DifferenceSide
    changes: tuple[Change, ...]
    memory: tuple[MemoryChange, ...] = ()

    @derived
    def verdict(self) -> str:
        """One line."""
        one, two = self.before.step_s, self.after.step_s
        if not one or not two:
            return "a side has no times"
        line = f"{format_seconds(one)} a step, then {format_seconds(two)} ({two / one - 1:+.1%}){self._peak}"
        if not self.changes:
            return f"{line}; no row differs"
        most = self.changes[0]
        collectives_text = f"; {'; '.join(most.collectives)}" if most.collectives else ""
        if self.before.kind != self.after.kind:
            line += f" ({self.before.kind}, then {self.after.kind})"
        sign = "+" if most.change_s > 0 else "-"
        return (
            f"{line}; most in {most.scope} {most.phase}: {sign}{format_seconds(abs(most.change_s))}{collectives_text}"
        )

    @property
    def _peak(self) -> str:
        """The peaks in words; nothing where they are the same, or not known."""
        one, two = self.before.peak_bytes, self.after.peak_bytes
        if not one or not two or abs(two - one) <= _SAME * max(one, two):
            return ""
        return f", peak {format_bytes(one)}, then {format_bytes(two)} ({two / one - 1:+.1%})"

    @property
    def dollars(self) -> str | None:
        """The list prices of a billion tokens in words; None where a side has none, or both the same."""
        one, two = self.before.usd_per_token, self.after.usd_per_token
        if not one or not two or abs(two - one) <= _SAME * max(one, two):
            return None
        return f"${1e9 * one:,.2f} a billion tokens, then ${1e9 * two:,.2f} ({two / one - 1:+.1%})"


def difference(before: Side, after: Side) -> Difference:
    """Compare two sides. Raises RooftopError for a side of training and one of serving."""
    if before.job and after.job and before.job != after.job:
        jobs = f"{before.figures.name} ({before.job}) and {after.figures.name} ({after.job})"
        raise RooftopError("diff", jobs, "two of training, or two of serving")
    changes = []
    for key in dict.fromkeys([*before.rows, *after.rows]):
        (old, old_bytes), (new, new_bytes) = before.rows.get(key, (None, {})), after.rows.get(key, (None, {}))
        moved = tuple(_changed_collectives(old_bytes, new_bytes))
        changes.append(Change(scope=key[0], phase=key[1], before=old, after=new, collectives=moved))
    return Difference(
        kind="difference",
        schema=SCHEMA,
        before=before.figures,
        after=after.figures,
        changes=tuple(sorted((one for one in changes if one.differs), key=lambda one: -abs(one.change_s))),
        memory=tuple(sorted(_changed_memory(before.memory, after.memory), key=lambda one: -abs(one.change))),
    )


def _changed_memory(old: Mapping[str, float], new: Mapping[str, float]) -> Iterator[MemoryChange]:
    """Yield the classes of arrays whose bytes differ; none if a side tells no classes."""
    if not old or not new:
        return
    for name in dict.fromkeys([*old, *new]):
        change = MemoryChange(name=name, before=old.get(name, 0.0), after=new.get(name, 0.0))
        if abs(change.change) > _SAME * max(change.before, change.after):
            yield change


def _changed_collectives(old: Mapping[Moves, float], new: Mapping[Moves, float]) -> Iterator[str]:
    """Yield, in words, the collectives whose bytes differ."""
    for key in dict.fromkeys([*old, *new]):
        one, two = old.get(key, 0.0), new.get(key, 0.0)
        if abs(two - one) <= _SAME * max(one, two):
            continue
        name = f"{key[0]} over {','.join(key[1])}"
        if not one:
            yield f"new {name} of {format_bytes(two)}"
        elif not two:
            yield f"no {name} of {format_bytes(one)}"
        else:
            yield f"{name}: {format_bytes(one)}, then {format_bytes(two)}"


def read_side(path: Path) -> Side:
    """A side from a path. Raises RooftopError unless it is a run, a trace, a plan or a report."""
    if path.suffix != ".json":
        return trace_side(str(path), explain(path).record())
    return side_of(str(path), read_json_object(path, field="diff", accepted=_ACCEPTED))


def side_of(name: str, data: Mapping[str, Any]) -> Side:
    """A side from the JSON of a plan, a compilation, a check or an explained trace.

    Raises RooftopError for other JSON, naming the field of an answer that is wrong.
    """
    kind, called = SavedAnswer.of(data).kind, f"diff {name}"
    if kind == "explained":
        return trace_side(name, read_record(ExplainedRecord, data, called))
    if kind == "train":
        return _training_side(name, read_record(TrainingPlanDocument, data, called, amounts=True).plan)
    if kind == "serve":
        return _serving_side(name, read_record(ServingPlanDocument, data, called, amounts=True))
    compiled = saved_compilation(data, called)
    if compiled is None:
        raise RooftopError("diff", name, _ACCEPTED)
    return compiled_side(name, compiled)


def compiled_side(name: str, compiled: CompiledRecord) -> Side:
    """A compiled side; one next to a plan is of training."""
    job = "" if compiled.planned_step is None else "train"
    ledger, memory = Ledger(compiled.ledger), compiled.memory or {}
    return ledger_side(name, "compiled", ledger, compiled.peak_bytes, job=job, memory=memory)


def _training_side(name: str, plan: TrainingPlan) -> Side:
    side = ledger_side(name, "planned", plan.ledger, plan.memory_bytes, job="train", memory=plan.memory)
    price = plan.problem.slice.price_usd_per_hour
    dollars = None if price is None else price / 3600 / plan.tokens_per_s
    return replace(side, figures=replace(side.figures, program=str(plan.problem.program), usd_per_token=dollars))


def _serving_side(name: str, plan: ServingPlanDocument) -> Side:
    memory = plan.memory.per_device
    classes = {
        "weights": memory.weights, "scales": memory.scales, "kv": memory.kv, "activations": memory.activations,
    }  # fmt: skip
    ledger = Ledger((*plan.prefill.ledger, *plan.generate.ledger))
    return ledger_side(name, "planned", ledger, memory.total, job="serve", memory=classes)


def trace_side(name: str, explained: ExplainedRecord) -> Side:
    """A measured side. FLOPs and bytes are those that were compiled, as a trace alone has none."""
    rows: dict[Key, tuple[RowFigures, Mapping[Moves, float]]] = {}
    for row in explained.rows:
        measured, compiled = row.measured, row.compiled
        if measured is not None:
            figures = RowFigures(
                time_s=measured.time_s,
                exposed_s=measured.exposed_s,
                flops=None if compiled is None else compiled.flops,
                hbm_bytes=None if compiled is None else compiled.hbm_bytes,
            )
            moved = {(item.kind, item.axes): item.compiled_bytes for item in row.collectives if item.compiled_bytes}
            rows[row.scope, row.phase] = figures, moved
    rows["idle", ""] = RowFigures(time_s=explained.idle_s, exposed_s=0.0, flops=None, hbm_bytes=None), {}
    peak = max((allocator.peak_bytes for allocator in explained.memory), default=None)
    side = DifferenceSide(name=name, kind="measured", step_s=explained.step_s, peak_bytes=peak)
    return Side(figures=side, rows=rows)


def ledger_side(
    name: str,
    kind: Literal["compiled", "planned"],
    ledger: Ledger,
    peak_bytes: float | None,
    *,
    job: str = "",
    memory: Mapping[str, float] | None = None,
) -> Side:
    """A compiled or planned side; ``memory`` are its bytes at the peak by class, where they are known."""
    rows = {key: (RowFigures.of(sums), sums.bytes) for key, sums in planned_rows(ledger).items()}
    side = DifferenceSide(name=name, kind=kind, step_s=float(ledger.expected_s), peak_bytes=peak_bytes)
    return Side(figures=side, job=job, memory=memory or {}, rows=rows)


def _time(row: RowFigures | None) -> float:
    return 0.0 if row is None else row.time_s
