"""The measured ledger: what a trace says that each scope takes on a device and step, and what the device waits for.

Every moment of a device is counted once. It computes if any op computes; else it waits for a collective if one is under
way, and that is what the collective *exposes*; else a loop or a call that holds other ops keeps it; else it idles. A
moment that several ops of one sort share belongs to each in equal parts. Rows so add up to the time that the device is
busy, and with the idle time to the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rooftop.errors import RooftopError
from rooftop.profile.device import Spent, leaders, spend
from rooftop.profile.facts import COLLECTIVE, COLLECTIVES, Facts
from rooftop.profile.idle import Idle, activity, explain_idle
from rooftop.profile.memory import MemoryOverTime, memory_over_time, why_no_memory
from rooftop.profile.sparsecores import SparseWork, sparse_work
from rooftop.profile.steps import stepped
from rooftop.profile.trace import SECONDS, Trace
from rooftop.scopes import UNSCOPED


@dataclass(frozen=True, kw_only=True)
class MeasuredOp:
    """An op per device and step: how often it runs, and the seconds that are its alone (of a collective: exposed)."""

    program: str
    name: str
    facts: Facts
    count: float
    time_s: float

    def per_second(self, amount: float | None) -> float | None:
        """The rate of something of which one execution has ``amount``."""
        return None if amount is None or not self.time_s else amount * self.count / self.time_s


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """A collective per device and step: under way for ``in_flight_s``, in ``exposed_s`` of which nothing computes."""

    program: str
    name: str
    facts: Facts
    count: float
    in_flight_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """The part that passes beside compute."""
        return self.in_flight_s - self.exposed_s

    @property
    def wire_bytes_per_s(self) -> float | None:
        """What a device sends per second under way."""
        sent = self.facts.wire_bytes
        return None if sent is None or not self.in_flight_s else sent * self.count / self.in_flight_s


@dataclass(kw_only=True)
class MeasuredRow:
    """One scope in one phase, per device and step: seconds that are its alone, ``exposed_s`` of them in collectives.

    ``flops`` and ``hbm_bytes`` are those of its ops that are known; ``slowest`` is the op that takes longest.
    """

    scope: str
    phase: str
    time_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    slowest: MeasuredOp | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One step, means over devices; ``slowest_s`` is the longest of any.

    ``counted`` says whether other figures count it: of one that they do not count, the rest is not known. On the first
    device it is from ``begins`` to ``ends``, picoseconds.
    """

    number: int
    begins: int
    ends: int
    seconds: float
    slowest_s: float
    busy_s: float | None
    exposed_s: float | None
    counted: bool


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A trace measured: figures are means over its devices and the counted steps; ``marked`` says what a step is.

    ``step_s`` = ``compute_s`` + ``exposed_s`` + ``held_s`` (in loops and calls, by none of their ops) + idle seconds.
    ``empty`` says of each table without entries why it has none.
    """

    trace: Trace
    devices: int
    step_s: float
    steps: tuple[StepTime, ...]
    marked: str
    compute_s: float
    exposed_s: float
    held_s: float
    idle: Idle
    rows: tuple[MeasuredRow, ...]
    ops: tuple[MeasuredOp, ...]
    collectives: tuple[MeasuredCollective, ...]
    memory: tuple[MemoryOverTime, ...]
    sparse: SparseWork
    empty: Mapping[str, str]

    @property
    def busy_s(self) -> float:
        """Seconds of a step in which the device runs anything, or a collective is under way."""
        return self.compute_s + self.exposed_s + self.held_s

    @property
    def attributed(self) -> float:
        """The share of the busy time that stands in a scope."""
        lost = sum(row.time_s for row in self.rows if row.scope == UNSCOPED)
        return max(0.0, 1.0 - lost / self.busy_s) if self.busy_s else 0.0


def measure(trace: Trace, facts: Sequence[Facts], program_files: frozenset[str] = frozenset()) -> Measured:
    """Measure a trace; ``facts`` are those of ``trace.ops``, ``program_files`` names of files that are the program's.

    Raises RooftopError for a trace in which no device ran anything.
    """
    devices = [each for each in trace.devices if len(each.track)]
    if not devices:
        raise RooftopError("trace", f"planes {', '.join(trace.planes) or 'none'}", _why_empty(trace))
    marks = {host.name: host.steps for host in trace.hosts}
    acts = {host.name: activity(host) for host in trace.hosts}
    leading = leaders(trace.ops, facts)
    spent = [spend(each, stepped(each, marks.get(each.host)), facts, leading) for each in devices]
    scale = SECONDS / sum(each.stepped.counted for each in spent)
    idle = explain_idle(
        [(each.idle, device.runs, acts.get(device.host)) for each, device in zip(spent, devices, strict=True)],
        scale,
        program_files,
    )
    ops = _ops(trace, facts, spent, scale)
    collectives = _collectives(trace, facts, spent, scale)
    memory = memory_over_time(trace)
    sparse = sparse_work(trace, {(each.host, each.ordinal): one for each, one in zip(devices, spent, strict=True)})
    return Measured(
        trace=trace,
        devices=len(devices),
        step_s=sum(each.stepped.window for each in spent) * scale,
        steps=_steps(spent),
        marked=spent[0].stepped.marked,
        compute_s=sum(each.compute.measure for each in spent) * scale,
        exposed_s=sum(each.waiting.measure for each in spent) * scale,
        held_s=sum(each.held.measure for each in spent) * scale,
        idle=idle,
        rows=_rows(ops),
        ops=ops,
        collectives=collectives,
        memory=memory,
        sparse=sparse,
        empty=_empty(trace, collectives, memory, idle),
    )


def _why_empty(trace: Trace) -> str:
    """What a trace would need to have in which no device ran anything."""
    if any(plane.startswith("/device:") for plane in trace.planes):
        return "a trace with ops: its device planes have none; was anything run while it was taken?"
    if any(plane.startswith("/host:CPU") for plane in trace.planes):
        return (
            "a trace with ops: it has threads of a host only; trace, in the process that has the devices, calls that "
            "are waited for (block_until_ready)"
        )
    return "a trace with planes of devices, or of the threads of a host"


def _ops(trace: Trace, facts: Sequence[Facts], spent: Sequence[Spent], scale: float) -> tuple[MeasuredOp, ...]:
    own = np.sum([each.own for each in spent], axis=0) * scale
    counts = np.sum([each.counts for each in spent], axis=0) * scale / SECONDS
    found = (
        MeasuredOp(
            program=trace.programs.get(op.program, ""),
            name=op.name,
            facts=each,
            count=float(count),
            time_s=float(time_s),
        )
        for op, each, count, time_s in zip(trace.ops, facts, counts, own, strict=True)
        if count or time_s
    )
    return tuple(sorted(found, key=lambda each: -each.time_s))


def _collectives(
    trace: Trace, facts: Sequence[Facts], spent: Sequence[Spent], scale: float
) -> tuple[MeasuredCollective, ...]:
    found = []
    for at in dict.fromkeys(key for each in spent for key in each.in_flight):
        if facts[at].category == COLLECTIVE:
            count = sum(int(each.counts[at]) for each in spent) * scale / SECONDS
            op = trace.ops[at]
            found.append(
                MeasuredCollective(
                    program=trace.programs.get(op.program, ""),
                    name=op.name,
                    facts=facts[at],
                    count=count,
                    in_flight_s=sum(each.in_flight.get(at, 0) for each in spent) * scale,
                    exposed_s=sum(each.exposed.get(at, 0) for each in spent) * scale,
                )
            )
    return tuple(sorted(found, key=lambda each: -each.exposed_s))


def _rows(ops: Sequence[MeasuredOp]) -> tuple[MeasuredRow, ...]:
    rows: dict[tuple[str, str], MeasuredRow] = {}
    for op in ops:
        for place in op.facts.places:
            row = rows.setdefault((place.scope, place.phase), MeasuredRow(scope=place.scope, phase=place.phase))
            row.time_s += place.share * op.time_s
            row.exposed_s += place.share * op.time_s if op.facts.category == COLLECTIVE else 0.0
            row.flops += place.share * op.count * (op.facts.flops or 0.0)
            row.hbm_bytes += place.share * op.count * (op.facts.hbm_bytes or 0.0)
            # The ops come with the one that takes longest first.
            row.slowest = row.slowest or op
    return tuple(sorted(rows.values(), key=lambda row: -row.time_s))


def _steps(spent: Sequence[Spent]) -> tuple[StepTime, ...]:
    """The steps that every device has."""
    first = spent[0].stepped
    count = min(len(each.stepped.numbers) for each in spent)
    seconds, busy, waiting = (
        np.array(column) * SECONDS
        for column in (
            [(each.stepped.ends - each.stepped.starts)[:count] for each in spent],
            [each.within(each.busy)[:count] for each in spent],
            [each.within(each.waiting)[:count] for each in spent],
        )
    )
    return tuple(
        StepTime(
            number=int(first.numbers[at]),
            begins=int(first.starts[at]),
            ends=int(first.ends[at]),
            seconds=float(seconds[:, at].mean()),
            slowest_s=float(seconds[:, at].max()),
            busy_s=float(busy[:, at].mean()) if at < first.counted else None,
            exposed_s=float(waiting[:, at].mean()) if at < first.counted else None,
            counted=at < first.counted,
        )
        for at in range(count)
    )


def _empty(
    trace: Trace, collectives: Sequence[MeasuredCollective], memory: Sequence[MemoryOverTime], idle: Idle
) -> dict[str, str]:
    found: dict[str, str] = {}
    if not collectives:
        found["collectives"] = f"no op of the trace is a collective ({', '.join(dict.fromkeys(COLLECTIVES.values()))})"
    if not memory:
        found["memory"] = why_no_memory(trace)
    if not idle.waits:
        found["idle"] = "the devices are never idle within the counted steps"
    return found
