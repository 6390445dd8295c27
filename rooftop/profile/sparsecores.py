"""What the SparseCores of a trace do: activity of each, what runs beside it, minibatches, and ids that were dropped.

Figures are per step, within the steps that the TensorCore beside a core counts. Minibatches show as ops that run more
than once a step. Dropped ids show on no device: a program that counts them marks them on its host
(``jax.profiler.TraceAnnotation("preprocess", dropped_ids=3, minibatches=2)``). Source: the SparseCore deep dive, on
profiles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooftop.profile.device import Spent
from rooftop.profile.intervals import Intervals, shares
from rooftop.profile.trace import SECONDS, Op, SparseCore, Trace

#: What reads or updates a table, by its target or its scope.
_TABLES = re.compile(r"SparseDenseMatmul|\btables/[^/]+/(?:lookup|update)")
#: Stats of host events that tell what preprocessing did to a batch.
DROPPED, MINIBATCHES = "dropped_ids", "minibatches"


@dataclass(frozen=True, kw_only=True)
class SparseOp:
    """An op of a core: how often it runs in a step, on average and at most, and its seconds of a step.

    ``lookup`` says whether it reads or updates embedding tables.
    """

    name: str
    op_name: str
    lookup: bool
    count: float
    most: int
    time_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class CoreActivity:
    """One SparseCore in a step: ``busy_s`` = ``beside_s`` (its TensorCore computes too) + ``alone_s``.

    With ``idle_s`` that is the step. ``ops`` come with the one that takes longest first.
    """

    host: str
    device: int
    core: int
    busy_s: float
    beside_s: float
    idle_s: float
    ops: tuple[SparseOp, ...]

    @property
    def alone_s(self) -> float:
        """Seconds in which the TensorCore computes nothing meanwhile."""
        return self.busy_s - self.beside_s

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return vars(self) | {"alone_s": self.alone_s, "ops": [each.to_json() for each in self.ops[:20]]}


@dataclass(frozen=True, kw_only=True)
class SparseWork:
    """All SparseCores.

    ``minibatches`` is how many passes a step takes at most: by the host, else by how often the ops run that read tables
    (any op, if none is known to); 0: unknown. ``dropped_ids`` are those of all counted steps (None: nothing in the
    trace tells).
    """

    cores: tuple[CoreActivity, ...]
    minibatches: int
    dropped_ids: int | None

    @property
    def overlap(self) -> float | None:
        """The share of their working time in which the TensorCores compute too (None: they do nothing)."""
        busy = sum(each.busy_s for each in self.cores)
        return sum(each.beside_s for each in self.cores) / busy if busy else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "cores": [each.to_json() for each in self.cores],
            "overlap": self.overlap,
            "minibatches": self.minibatches,
            "dropped_ids": self.dropped_ids,
        }


def sparse_work(trace: Trace, spent: Mapping[tuple[str, int], Spent]) -> SparseWork:
    """What SparseCores do; ``spent`` are the TensorCores by host and ordinal, whose steps count."""
    cores = tuple(
        _activity(core, spent[core.host, core.ordinal], trace.ops)
        for core in trace.sparse_cores
        if (core.host, core.ordinal) in spent
    )
    passes, dropped = _told(trace, spent)
    ops = [op for core in cores for op in core.ops]
    counts = [op.most for op in ops if op.lookup] or [op.most for op in ops]
    return SparseWork(cores=cores, minibatches=passes or max(counts, default=0), dropped_ids=dropped)


def _activity(core: SparseCore, beside: Spent, ops: tuple[Op, ...]) -> CoreActivity:
    steps, track = beside.stepped, core.track
    starts, ends = (np.clip(each, steps.low, steps.high) for each in (track.starts, track.ends))
    within = ends > starts
    places, starts, ends = track.ops[within], starts[within], ends[within]
    busy = Intervals.union(starts, ends)
    own = np.bincount(places, shares(starts, ends, Intervals.none()), minlength=len(ops))
    scale = SECONDS / steps.counted
    # In which of the counted steps each execution begins.
    step = np.clip(np.searchsorted(steps.starts, starts, side="right") - 1, 0, steps.counted - 1)
    found = []
    for place in np.unique(places):
        times = np.bincount(step[places == place], minlength=steps.counted)
        op = ops[int(place)]
        found.append(
            SparseOp(
                name=op.name, op_name=op.op_name, lookup=_TABLES.search(f"{op.text} {op.op_name}") is not None,
                count=float(times.mean()), most=int(times.max()),
                time_s=float(own[place]) * scale,
            )
        )  # fmt: skip
    return CoreActivity(
        host=core.host,
        device=core.ordinal,
        core=core.core,
        busy_s=busy.measure * scale,
        beside_s=(busy & beside.compute).measure * scale,
        idle_s=(steps.high - steps.low - busy.measure) * scale,
        ops=tuple(sorted(found, key=lambda each: -each.time_s)),
    )


def _told(trace: Trace, spent: Mapping[tuple[str, int], Spent]) -> tuple[int, int | None]:
    """What the hosts say of minibatches (the most of any batch) and of dropped ids (all) within the counted steps."""
    passes, dropped = 0, None
    for host in trace.hosts:
        windows = [each.stepped for (name, _), each in spent.items() if name == host.name]
        names = () if host.plane is None else {name for line in host.threads for name in line.stats}
        if not windows or not {DROPPED, MINIBATCHES} & set(names):
            continue
        low, high = min(each.low for each in windows), max(each.high for each in windows)
        for line in host.threads:
            events = line.read((DROPPED, MINIBATCHES))
            counted = (events.starts >= low) & (events.starts < high)
            ids, times = events.stats[DROPPED], events.stats[MINIBATCHES]
            if (counted & times.present).any():
                passes = max(passes, int(times.values[counted & times.present].max()))
            if (counted & ids.present).any():
                dropped = (dropped or 0) + int(ids.values[counted & ids.present].sum())
    return passes, dropped
