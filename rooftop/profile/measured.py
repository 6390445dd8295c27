"""The measured ledger: the time of each scope on a device and step in a trace, and the waits of the device.

Every moment of a device is counted once. It computes if any op computes; else it waits for a collective if one is in
flight, and the collective *exposes* this time; else it is in a loop or a call, between inner ops; else it idles. A
moment shared by several ops of one sort is divided equally. So the rows add up to the busy time of the device, and with
the idle time to the step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rooftop.core.amounts import Amount, Count
from rooftop.core.errors import RooftopError
from rooftop.core.records import Record, derived
from rooftop.core.scopes import UNSCOPED
from rooftop.profile.device import Spent, leaders, spend, stepped
from rooftop.profile.facts import COLLECTIVE, COLLECTIVES, Facts
from rooftop.profile.idle import Idle, activity, explain_idle
from rooftop.profile.intervals import Intervals, shares
from rooftop.profile.trace import SECONDS, Device, Op, SparseCore, Trace


@dataclass(frozen=True, kw_only=True)
class MeasuredOp:
    """An op per device and step: executions, and the seconds attributed to it (exposed ones for a collective)."""

    program: str
    name: str
    facts: Facts
    count: float
    time_s: float

    def per_second(self, amount: float | None) -> float | None:
        """The rate of a quantity of which one execution has ``amount``."""
        return None if amount is None or not self.time_s else amount * self.count / self.time_s


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """A collective per device and step: in flight for ``in_flight_s``, in ``exposed_s`` of which nothing computes."""

    program: str
    name: str
    facts: Facts
    count: float
    in_flight_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """The part that overlaps compute."""
        return self.in_flight_s - self.exposed_s

    @property
    def wire_bytes_per_s(self) -> float | None:
        """Bytes that a device sends per second in flight."""
        sent = self.facts.wire_bytes
        return None if sent is None or not self.in_flight_s else sent * self.count / self.in_flight_s


@dataclass(kw_only=True)
class MeasuredRow:
    """One scope in one phase, per device and step: seconds attributed to it, ``exposed_s`` of them in collectives.

    ``flops`` and ``hbm_bytes`` are the known ones of its ops; ``slowest`` is the op that takes longest.
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

    ``counted`` is false for a step that other figures leave out, because its end is unknown. On the first device it
    lasts from ``begins`` to ``ends``, picoseconds.
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
class DeviceTime(Record):
    """Seconds of a step of one device, means over the counted steps.

    ``compute_s`` in ops (and between those of loops), ``exposed_s`` in collectives of which nothing computes meanwhile.
    """

    host: str
    ordinal: Count
    step_s: Amount
    compute_s: Amount
    exposed_s: Amount
    idle_s: Amount


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured trace: figures are means over its devices and the counted steps; ``marked`` identifies steps.

    ``step_s`` = ``compute_s`` + ``exposed_s`` + ``held_s`` (in loops and calls, between their ops) + idle seconds.
    ``by_device`` are its devices, the one that computes longest first. ``empty`` has for each table without entries the
    reason.
    """

    trace: Trace
    devices: int
    step_s: float
    steps: tuple[StepTime, ...]
    by_device: tuple[DeviceTime, ...]
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
        """Seconds of a step in which the device runs anything, or a collective is in flight."""
        return self.compute_s + self.exposed_s + self.held_s

    @property
    def attributed(self) -> float:
        """The share of the busy time with a scope."""
        lost = sum(row.time_s for row in self.rows if row.scope == UNSCOPED)
        return max(0.0, 1.0 - lost / self.busy_s) if self.busy_s else 0.0


def measure(trace: Trace, facts: Sequence[Facts], program_files: frozenset[str] = frozenset()) -> Measured:
    """Measure a trace; ``facts`` are those of ``trace.ops``, ``program_files`` names of the program's own files.

    Raises RooftopError for a trace in which no device ran anything.
    """
    devices = [device for device in trace.devices if len(device.track)]
    if not devices:
        raise RooftopError("trace", f"planes {', '.join(trace.planes) or 'none'}", _why_empty(trace))
    marks = {host.name: host.steps for host in trace.hosts}
    acts = {host.name: activity(host) for host in trace.hosts}
    leading = leaders(trace.ops, facts)
    spent = [spend(device, stepped(device, marks.get(device.host)), facts, leading) for device in devices]
    scale = SECONDS / sum(times.stepped.counted for times in spent)
    idle = explain_idle(
        [(times.idle, device.runs, acts.get(device.host)) for times, device in zip(spent, devices, strict=True)],
        scale,
        program_files,
    )
    ops = _ops(trace, facts, spent, scale)
    collectives = _collectives(trace, facts, spent, scale)
    memory = memory_over_time(trace)
    by_device = {(device.host, device.ordinal): times for device, times in zip(devices, spent, strict=True)}
    sparse = sparse_work(trace, by_device)
    return Measured(
        trace=trace,
        devices=len(devices),
        step_s=sum(times.stepped.window for times in spent) * scale,
        steps=_steps(spent),
        by_device=_by_device(devices, spent),
        marked=spent[0].stepped.marked,
        compute_s=sum(times.compute.measure for times in spent) * scale,
        exposed_s=sum(times.waiting.measure for times in spent) * scale,
        held_s=sum(times.control.measure for times in spent) * scale,
        idle=idle,
        rows=_rows(ops),
        ops=ops,
        collectives=collectives,
        memory=memory,
        sparse=sparse,
        empty=_empty(trace, collectives, memory, idle),
    )


def _why_empty(trace: Trace) -> str:
    """The missing part of a trace in which no device ran anything."""
    if any(plane.startswith("/device:") for plane in trace.planes):
        return "a trace with ops: its device planes have none; was anything run while it was taken?"
    if any(plane.startswith("/host:CPU") for plane in trace.planes):
        return (
            "a trace with ops: it has threads of a host only; trace, in the process that has the devices, calls that "
            "are waited for (block_until_ready)"
        )
    return "a trace with planes of devices, or of the threads of a host"


def _ops(trace: Trace, facts: Sequence[Facts], spent: Sequence[Spent], scale: float) -> tuple[MeasuredOp, ...]:
    times_s = np.sum([times.own for times in spent], axis=0) * scale
    counts = np.sum([times.counts for times in spent], axis=0) * scale / SECONDS
    ops = (
        MeasuredOp(
            program=trace.programs.get(op.program, ""),
            name=op.name,
            facts=fact,
            count=float(count),
            time_s=float(time_s),
        )
        for op, fact, count, time_s in zip(trace.ops, facts, counts, times_s, strict=True)
        if count or time_s
    )
    return tuple(sorted(ops, key=lambda op: -op.time_s))


def _collectives(
    trace: Trace, facts: Sequence[Facts], spent: Sequence[Spent], scale: float
) -> tuple[MeasuredCollective, ...]:
    collectives = []
    for begin in dict.fromkeys(key for times in spent for key in times.in_flight):
        if facts[begin].category == COLLECTIVE:
            count = sum(int(times.counts[begin]) for times in spent) * scale / SECONDS
            op = trace.ops[begin]
            collectives.append(
                MeasuredCollective(
                    program=trace.programs.get(op.program, ""),
                    name=op.name,
                    facts=facts[begin],
                    count=count,
                    in_flight_s=sum(times.in_flight.get(begin, 0) for times in spent) * scale,
                    exposed_s=sum(times.exposed.get(begin, 0) for times in spent) * scale,
                )
            )
    return tuple(sorted(collectives, key=lambda collective: -collective.exposed_s))


def _rows(ops: Sequence[MeasuredOp]) -> tuple[MeasuredRow, ...]:
    rows: dict[tuple[str, str], MeasuredRow] = {}
    for op in ops:
        for place in op.facts.places:
            row = rows.setdefault((place.scope, place.phase), MeasuredRow(scope=place.scope, phase=place.phase))
            row.time_s += place.share * op.time_s
            row.exposed_s += place.share * op.time_s if op.facts.category == COLLECTIVE else 0.0
            row.flops += place.share * op.count * (op.facts.flops or 0.0)
            row.hbm_bytes += place.share * op.count * (op.facts.hbm_bytes or 0.0)
            # The ops are sorted, longest first.
            row.slowest = row.slowest or op
    return tuple(sorted(rows.values(), key=lambda row: -row.time_s))


def _by_device(devices: Sequence[Device], spent: Sequence[Spent]) -> tuple[DeviceTime, ...]:
    result = list[DeviceTime]()
    for device, times in zip(devices, spent, strict=True):
        scale = SECONDS / times.stepped.counted
        result.append(
            DeviceTime(
                host=device.host,
                ordinal=device.ordinal,
                step_s=times.stepped.window * scale,
                compute_s=(times.compute.measure + times.control.measure) * scale,
                exposed_s=times.waiting.measure * scale,
                idle_s=times.idle.measure * scale,
            )
        )
    return tuple(sorted(result, key=lambda time: -time.compute_s))


def _steps(spent: Sequence[Spent]) -> tuple[StepTime, ...]:
    """The steps that every device has."""
    first = spent[0].stepped
    count = min(len(times.stepped.numbers) for times in spent)
    seconds, busy, waiting = (
        np.array(column) * SECONDS
        for column in (
            [(times.stepped.ends - times.stepped.starts)[:count] for times in spent],
            [times.within(times.busy)[:count] for times in spent],
            [times.within(times.waiting)[:count] for times in spent],
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
    reasons: dict[str, str] = {}
    if not collectives:
        reasons["collectives"] = (
            f"no op of the trace is a collective ({', '.join(dict.fromkeys(COLLECTIVES.values()))})"
        )
    if not memory:
        reasons["memory"] = why_no_memory(trace)
    if not idle.waits:
        reasons["idle"] = "the devices are never idle within the counted steps"
    return reasons


_EVENTS = re.compile(r"Memory(?:Alloc|Dealloc)")
_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class MemoryOverTime(Record):
    """One allocator: ``points`` are (seconds, bytes allocated), at most 200, the highest of each span."""

    host: str
    allocator: str
    peak_bytes: float
    capacity_bytes: float | None
    points: tuple[tuple[float, float], ...]


def memory_over_time(trace: Trace) -> tuple[MemoryOverTime, ...]:
    """The allocators of a trace; empty without events of allocators (CPU devices write none)."""
    parts: dict[tuple[str, str], list[tuple[Any, Any, Any]]] = {}
    for host in trace.hosts:
        known = {} if host.plane is None else host.plane.kinds
        kinds = [key for key, kind in known.items() if _EVENTS.match(kind.name)]
        for line in host.threads if kinds else ():
            events = line.read(("allocator_name", "bytes_allocated", "bytes_available"))
            name, taken, free = (
                events.stats[stat] for stat in ("allocator_name", "bytes_allocated", "bytes_available")
            )
            is_event = np.isin(events.kinds, kinds) & taken.present
            for code in np.unique(name.values[is_event & name.present]):
                chosen = is_event & name.present & (name.values == code)
                key = host.name, name.texts[int(code)]
                parts.setdefault(key, []).append((events.starts[chosen], taken.values[chosen], free.values[chosen]))
    return tuple(_series(*key, columns) for key, columns in parts.items())


def why_no_memory(trace: Trace) -> str:
    """The reason why ``memory_over_time`` is empty."""
    if trace.kind == "cpu":
        return "devices of a CPU allocate from the host and the profiler records none of it"
    return "the trace has no events of allocators (MemoryAllocation, MemoryDeallocation)"


def _series(host: str, allocator: str, columns: list[tuple[Any, Any, Any]]) -> MemoryOverTime:
    starts, taken, free = (np.concatenate(column).astype(np.float64) for column in zip(*columns, strict=True))
    order = np.argsort(starts, kind="stable")
    starts, taken, free = starts[order], taken[order], free[order]
    spans = np.array_split(np.arange(len(starts)), min(_POINTS, len(starts)))
    highest = [span[np.argmax(taken[span])] for span in spans]
    capacity = float((taken + free).max())
    return MemoryOverTime(
        host=host,
        allocator=allocator,
        peak_bytes=float(taken.max()),
        capacity_bytes=capacity if free.any() else None,
        points=tuple((float(starts[at]) * SECONDS, float(taken[at])) for at in highest),
    )


#: Target or scope of ops that read or update a table.
_TABLES = re.compile(r"SparseDenseMatmul|\btables/[^/]+/(?:lookup|update)")
#: Ops of a SparseCore that are listed.
_SPARSE_OPS = 20
#: Stats of host events about the preprocessing of a batch.
DROPPED, MINIBATCHES = "dropped_ids", "minibatches"


@dataclass(frozen=True, kw_only=True)
class SparseOp(Record):
    """An op of a core: mean and largest number of executions in a step, and its seconds of a step.

    ``lookup``: the op reads or updates embedding tables.
    """

    name: str
    op_name: str
    lookup: bool
    count: float
    most: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class CoreActivity(Record):
    """One SparseCore in a step: ``busy_s`` = ``beside_s`` (its TensorCore computes too) + ``alone_s``.

    With ``idle_s`` that is the step. ``ops`` are the longest, at most 20, longest first.
    """

    host: str
    device: int
    core: int
    busy_s: Amount
    beside_s: Amount
    idle_s: Amount
    ops: tuple[SparseOp, ...]

    @derived
    def alone_s(self) -> Amount:
        """Busy seconds in which the TensorCore computes nothing."""
        return self.busy_s - self.beside_s


@dataclass(frozen=True, kw_only=True)
class SparseWork(Record):
    """All SparseCores.

    ``minibatches`` is the largest number of passes of a step: from the host, else from the executions of ops that read
    tables (of any op, if none is known to); 0: unknown. ``dropped_ids`` are those of all counted steps (None: not in
    the trace).
    """

    cores: tuple[CoreActivity, ...]
    minibatches: Count
    dropped_ids: Count | None

    @derived
    def overlap(self) -> Amount | None:
        """The share of their busy time in which the TensorCores compute too (None: they are never busy)."""
        busy = sum(core.busy_s for core in self.cores)
        return sum(core.beside_s for core in self.cores) / busy if busy else None


def sparse_work(trace: Trace, spent: Mapping[tuple[str, int], Spent]) -> SparseWork:
    """Activity of SparseCores; ``spent`` are the TensorCores by host and ordinal, whose steps count."""
    cores = tuple(
        _activity(core, spent[core.host, core.ordinal], trace.ops)
        for core in trace.sparse_cores
        if (core.host, core.ordinal) in spent
    )
    passes, dropped = _host_stats(trace, spent)
    ops = [op for core in cores for op in core.ops]
    counts = [op.most for op in ops if op.lookup] or [op.most for op in ops]
    return SparseWork(
        cores=tuple(replace(core, ops=core.ops[:_SPARSE_OPS]) for core in cores),
        minibatches=passes or max(counts, default=0),
        dropped_ids=dropped,
    )


def _activity(core: SparseCore, tensor_core: Spent, ops: tuple[Op, ...]) -> CoreActivity:
    steps, track = tensor_core.stepped, core.track
    starts, ends = (np.clip(moments, steps.low, steps.high) for moments in (track.starts, track.ends))
    within = ends > starts
    places, starts, ends = track.ops[within], starts[within], ends[within]
    busy = Intervals.union(starts, ends)
    spent = np.bincount(places, shares(starts, ends, Intervals.none()), minlength=len(ops))
    scale = SECONDS / steps.counted
    # Index of the counted step in which each execution begins.
    step = np.clip(np.searchsorted(steps.starts, starts, side="right") - 1, 0, steps.counted - 1)
    sparse_ops = []
    for place in np.unique(places):
        times = np.bincount(step[places == place], minlength=steps.counted)
        op = ops[int(place)]
        sparse_ops.append(
            SparseOp(
                name=op.name, op_name=op.op_name, lookup=_TABLES.search(f"{op.text} {op.op_name}") is not None,
                count=float(times.mean()), most=int(times.max()),
                time_s=float(spent[place]) * scale,
            )
        )  # fmt: skip
    return CoreActivity(
        host=core.host,
        device=core.ordinal,
        core=core.core,
        busy_s=busy.measure * scale,
        beside_s=(busy & tensor_core.compute).measure * scale,
        idle_s=(steps.high - steps.low - busy.measure) * scale,
        ops=tuple(sorted(sparse_ops, key=lambda op: -op.time_s)),
    )


def _host_stats(trace: Trace, spent: Mapping[tuple[str, int], Spent]) -> tuple[int, int | None]:
    """The most minibatches of any batch, and all dropped ids, in the counted steps, from stats of host events."""
    passes, dropped = 0, None
    for host in trace.hosts:
        windows = [times.stepped for (name, _), times in spent.items() if name == host.name]
        names = () if host.plane is None else {name for line in host.threads for name in line.stats}
        if not windows or not {DROPPED, MINIBATCHES} & set(names):
            continue
        low, high = min(window.low for window in windows), max(window.high for window in windows)
        for line in host.threads:
            events = line.read((DROPPED, MINIBATCHES))
            counted = (events.starts >= low) & (events.starts < high)
            ids, times = events.stats[DROPPED], events.stats[MINIBATCHES]
            if (counted & times.present).any():
                passes = max(passes, int(times.values[counted & times.present].max()))
            if (counted & ids.present).any():
                dropped = (dropped or 0) + int(ids.values[counted & ids.present].sum())
    return passes, dropped
