"""Memory over time, where a trace has it: the allocators of devices and hosts say how much is taken as it changes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooftop.profile.trace import SECONDS, Trace

_EVENTS = re.compile(r"Memory(?:Alloc|Dealloc)")
_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class MemoryOverTime:
    """One allocator: ``points`` are (seconds, bytes taken), at most 200 with the highest of each span kept."""

    host: str
    allocator: str
    peak_bytes: float
    capacity_bytes: float | None
    points: tuple[tuple[float, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return vars(self) | {"points": [list(point) for point in self.points]}


def memory_over_time(trace: Trace) -> tuple[MemoryOverTime, ...]:
    """The allocators of a trace; none where it has no such events (CPU devices write none)."""
    parts: dict[tuple[str, str], list[tuple[Any, Any, Any]]] = {}
    for host in trace.hosts:
        known = {} if host.plane is None else host.plane.kinds
        kinds = [key for key, kind in known.items() if _EVENTS.match(kind.name)]
        for line in host.threads if kinds else ():
            events = line.read(("allocator_name", "bytes_allocated", "bytes_available"))
            name, taken, free = (
                events.stats[each] for each in ("allocator_name", "bytes_allocated", "bytes_available")
            )
            own = np.isin(events.kinds, kinds) & taken.present
            for code in np.unique(name.values[own & name.present]):
                at = own & name.present & (name.values == code)
                key = host.name, name.texts[int(code)]
                parts.setdefault(key, []).append((events.starts[at], taken.values[at], free.values[at]))
    return tuple(_series(*key, found) for key, found in parts.items())


def why_no_memory(trace: Trace) -> str:
    """Why ``memory_over_time`` has nothing to show."""
    if trace.kind == "cpu":
        return "devices of a CPU allocate from the host and the profiler records none of it"
    return "the trace has no events of allocators (MemoryAllocation, MemoryDeallocation)"


def _series(host: str, allocator: str, found: list[tuple[Any, Any, Any]]) -> MemoryOverTime:
    starts, taken, free = (np.concatenate(column).astype(np.float64) for column in zip(*found, strict=True))
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
