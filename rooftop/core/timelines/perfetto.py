"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open (the Trace Event Format, JSON).

A track for each lane; arrows lead from where a transfer is begun, by way of its lane, to where it is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rooftop.core.timelines import Arrow, Lanes, TimeSpan

_PROCESS = 1
_MICROSECONDS = 1e6


def trace(drawn: Lanes) -> dict[str, Any]:
    """The trace as a JSON object; its times are in microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": drawn.title}},
    ]
    for tid, lane in enumerate(drawn.lanes, start=1):
        place = {"pid": _PROCESS, "tid": tid}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": lane.name}})
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}})
        events += (_slice(span, tid) for span in lane.spans if span.seconds > 0)
    for arrow in drawn.arrows:
        events += _flow(arrow)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"total_s": drawn.total_s}}


def _slice(span: TimeSpan, tid: int) -> dict[str, Any]:
    labels = {"scope": span.scope, "phase": span.phase, "source": span.source}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.sort,
        "pid": _PROCESS,
        "tid": tid,
        "ts": span.start_s * _MICROSECONDS,
        "dur": span.seconds * _MICROSECONDS,
        "args": {name: value for name, value in labels.items() if value} | dict(span.details),
    }


def _flow(arrow: Arrow) -> Iterator[dict[str, Any]]:
    common = {"name": "transfer", "cat": "flow", "id": arrow.number, "pid": _PROCESS}
    for phase, place in (("s", arrow.begun), ("t", arrow.under_way), ("f", arrow.waited)):
        if place is not None:
            lane, at_s = place
            bound = {"bp": "e"} if phase == "f" else {}
            yield {**common, "ph": phase, **bound, "tid": lane + 1, "ts": at_s * _MICROSECONDS}
