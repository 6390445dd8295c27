"""The compiled timeline as a trace that ui.perfetto.dev and chrome://tracing open (the Trace Event Format, JSON).

One track for what the device computes and waits for, one for each resource that works beside it: links of the network
by physical axis and direction, copies from and to HBM, the host. Arrows lead from where a transfer is begun, by way of
its link, to where the device waits for it. Of a loop the first trips are drawn, the rest as one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rooftop.xla.hlo import Instruction, Module
from rooftop.xla.machine import COMPUTE, Event
from rooftop.xla.places import place_of
from rooftop.xla.schedule import Timeline

_COPIES = ("hbm", "pcie")
_PROCESS = 1
_MICROSECONDS = 1e6


def trace(module: Module, line: Timeline, *, title: str = "compiled") -> dict[str, Any]:
    """The trace of ``line``, the timeline of ``module``, as a JSON object; its times are in microseconds."""
    tracks = {name: number for number, name in enumerate(_tracks(line), start=1)}
    events = [
        {"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": title}},
        *({"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": tid, "args": {"name": _title(name)}}
          for name, tid in tracks.items()),
        *({"ph": "M", "name": "thread_sort_index", "pid": _PROCESS, "tid": tid, "args": {"sort_index": tid}}
          for tid in tracks.values()),
    ]  # fmt: skip
    flows = set[int]()
    for each in line.events:
        if each.end_s > each.start_s:
            events.append(_slice(module, line, each, tracks))
        events += _flow(each, tracks, flows)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"total_s": line.total_s}}


def _tracks(line: Timeline) -> list[str]:
    """The tracks that are used: compute first, then links by name, then copies."""
    used = {each.track for each in line.events} - {COMPUTE}
    copies = [name for name in _COPIES if name in used]
    return [COMPUTE, *sorted(used - set(copies)), *copies]


def _title(track: str) -> str:
    return track if track in (COMPUTE, *_COPIES) else f"link {track}"


def _slice(module: Module, line: Timeline, event: Event, tracks: Mapping[str, int]) -> dict[str, Any]:
    computation = module.computations[event.place[0]]
    instruction = computation.instructions[event.place[1]]
    scope, phase = place_of(module, computation, instruction)
    details: dict[str, Any] = {"instruction": instruction.name, "scope": scope, "phase": phase}
    if source := module.source(instruction):
        details["source"] = source
    if event.collective is not None:
        found = line.collectives[event.collective].collective
        details |= {"collective": found.kind, "axes": ",".join(found.axes), "bytes": found.bytes, "scope": found.scope}
        details |= {"phase": found.phase, "source": found.source}
    return {
        "ph": "X",
        "name": _name(line, event, instruction, scope),
        "cat": "wait" if event.waits else event.track if event.track == COMPUTE else "transfer",
        "pid": _PROCESS,
        "tid": tracks[event.track],
        "ts": event.start_s * _MICROSECONDS,
        "dur": (event.end_s - event.start_s) * _MICROSECONDS,
        "args": details,
    }


def _name(line: Timeline, event: Event, instruction: Instruction, scope: str) -> str:
    if event.trips:
        return f"{event.trips} more trips of {instruction.name}"
    if event.collective is None:
        moved = scope if event.track == COMPUTE and not event.waits else "copy"
    else:
        found = line.collectives[event.collective].collective
        moved = f"{found.kind} over {','.join(found.axes)}"
    return f"wait for {moved}" if event.waits else moved


def _flow(event: Event, tracks: Mapping[str, int], seen: set[int]) -> Iterator[dict[str, Any]]:
    """The arrow of a transfer: from its beginning on the compute track by its first link to where it is waited for."""
    if event.flight is None:
        return
    common = {"name": "transfer", "cat": "flow", "id": event.flight, "pid": _PROCESS}
    if event.waits and event.flight in seen:
        yield {**common, "ph": "f", "bp": "e", "tid": tracks[COMPUTE], "ts": event.end_s * _MICROSECONDS}
    elif not event.waits and event.flight not in seen:
        seen.add(event.flight)
        yield {**common, "ph": "s", "tid": tracks[COMPUTE], "ts": event.issued_s * _MICROSECONDS}
        yield {**common, "ph": "t", "tid": tracks[event.track], "ts": event.start_s * _MICROSECONDS}
