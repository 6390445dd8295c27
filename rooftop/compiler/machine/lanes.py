"""The compiled timeline as lanes: computation and waits of the device, and each resource that works at the same time.

Resources are links of the network by physical axis and direction, copies from and to HBM, and the host. Of a loop, the
first trips are drawn and the rest as one block, or every trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rooftop.compiler.hlo.costs import work
from rooftop.compiler.hlo.places import place_of
from rooftop.compiler.hlo.text import Instruction, Module
from rooftop.compiler.machine import run as machine
from rooftop.compiler.machine.run import Event
from rooftop.compiler.machine.schedule import ScheduleTimeline
from rooftop.core.timelines import COMPUTE, MORE, TRANSFER, WAIT, Arrow, Lane, Lanes, TimeSpan

_COPIES = ("hbm", "pcie")
#: Limit on the events that are drawn if every trip of a loop is requested.
MOST_EVENTS = 400_000
_NOTE = "the compiler's schedule, run on a simple machine at the named fractions of the chip: no measurement"


def compiled_lanes(
    module: Module, line: ScheduleTimeline, *, title: str = "compiled", every_trip: bool = False
) -> Lanes:
    """The lanes of ``line``, the timeline of ``module``; arrows lead from the start of a transfer to the wait for it.

    ``every_trip`` draws all trips of loops, as copies of the last detailed one (up to ``MOST_EVENTS``); ops then
    include their work.
    """
    events = unrolled(line.events) if every_trip else line.events
    order = _tracks(events)
    spans: dict[str, list[TimeSpan]] = {name: [] for name in order}
    templates: dict[object, TimeSpan] = {}
    for event in events:
        if event.end_s > event.start_s:
            key = event.track == machine.COMPUTE, event.place, event.waits, event.collective, event.trips
            if key not in templates:
                templates[key] = _span(module, line, event, with_work=every_trip)
            span = replace(templates[key], start_s=event.start_s, end_s=event.end_s, flight=event.flight)
            spans[event.track].append(span)
    return Lanes(
        title=title,
        source="compiled",
        total_s=line.total_s,
        lanes=tuple(Lane(name=_title(name), spans=tuple(spans[name])) for name in order),
        arrows=() if every_trip else tuple(_arrows(events, {name: at for at, name in enumerate(order)})),
        note=_NOTE,
    )


def unrolled(events: Sequence[Event]) -> tuple[Event, ...]:
    """Events with every trip of the loops whose last trips are a single event: copies of the last detailed trip.

    Loops for which that would make more than ``MOST_EVENTS`` stay unchanged.
    """
    result = list(events)
    flights = max((event.flight or 0 for event in events), default=0)
    # Inner loops come before outer ones.
    for rest in sorted((event for event in events if event.trips), key=lambda event: event.end_s - event.start_s):
        trip_s = (rest.end_s - rest.start_s) / rest.trips
        low = rest.start_s - trip_s * (1 + 1e-9)
        last = [event for event in result if low <= event.start_s < rest.start_s - trip_s * 1e-9 and event is not rest]
        if not last or len(result) + rest.trips * len(last) > MOST_EVENTS:
            continue
        result.remove(rest)
        for trip in range(1, rest.trips + 1):
            later = trip * trip_s
            result += (
                replace(
                    event, start_s=event.start_s + later, end_s=event.end_s + later, issued_s=event.issued_s + later,
                    flight=None if event.flight is None else event.flight + trip * (flights + 1),
                )
                for event in last
            )  # fmt: skip
        flights = max((event.flight or 0 for event in result), default=0)
    return tuple(sorted(result, key=lambda event: event.start_s))


def _tracks(events: Sequence[Event]) -> list[str]:
    """The used tracks: compute first, then links by name, then copies."""
    used = {event.track for event in events} - {machine.COMPUTE}
    copies = [name for name in _COPIES if name in used]
    return [machine.COMPUTE, *sorted(used - set(copies)), *copies]


def _title(track: str) -> str:
    return track if track in (machine.COMPUTE, *_COPIES) else f"link {track}"


def _span(module: Module, line: ScheduleTimeline, event: Event, *, with_work: bool) -> TimeSpan:
    computation = module.computations[event.place[0]]
    instruction = computation.instructions[event.place[1]]
    scope, phase = place_of(module, computation, instruction)
    source = module.source(instruction)
    details: dict[str, str | float] = {"instruction": instruction.name}
    if event.collective is not None:
        collective = line.collectives[event.collective].collective
        details |= {"collective": collective.kind, "axes": ",".join(collective.axes), "bytes": collective.bytes}
        scope, phase, source = collective.scope, collective.phase, collective.source
    computes = event.track == machine.COMPUTE and not event.waits and not event.trips
    done = work(module, computation, instruction) if with_work and computes else None
    return TimeSpan(
        name=_name(line, event, instruction, scope),
        sort=MORE if event.trips else WAIT if event.waits else COMPUTE if event.track == machine.COMPUTE else TRANSFER,
        start_s=event.start_s,
        end_s=event.end_s,
        scope=scope,
        phase=phase,
        source=source,
        op=_line(instruction) if with_work else instruction.name,
        op_name=instruction.op_name,
        flops=None if done is None else float(done.flops),
        hbm_bytes=None if done is None else float(done.hbm_bytes),
        details=details,
    )


def _line(instruction: Instruction) -> str:
    """An instruction in the form of a trace: its line of HLO, without layouts and metadata."""
    arrays = [f"{tensor.dtype}[{','.join(map(str, tensor.dims))}]" for tensor in instruction.shape]
    shape = arrays[0] if len(arrays) == 1 else f"({', '.join(arrays)})"
    operands = ", ".join(f"%{name}" for name in instruction.operands)
    attributes = instruction.attributes.partition(", metadata=")[0].partition(", backend_config=")[0]
    return f"%{instruction.name} = {shape} {instruction.opcode}({operands}){attributes}"


def _name(line: ScheduleTimeline, event: Event, instruction: Instruction, scope: str) -> str:
    if event.trips:
        return f"{event.trips} more trips of {instruction.name}"
    if event.collective is None:
        moved = scope if event.track == machine.COMPUTE and not event.waits else "copy"
    else:
        collective = line.collectives[event.collective].collective
        moved = f"{collective.kind} over {','.join(collective.axes)}"
        if event.track == machine.COMPUTE and not event.waits:
            moved = scope
    return f"wait for {moved}" if event.waits else moved


def _arrows(events: Sequence[Event], lanes: Mapping[str, int]) -> Iterator[Arrow]:
    """The arrow of each transfer: from its start on the compute lane, through its first link, to the wait for it."""
    begun: dict[int, Arrow] = {}
    compute = lanes[machine.COMPUTE]
    for event in events:
        if event.flight is None:
            continue
        if event.waits and event.flight in begun:
            begun[event.flight] = replace(begun[event.flight], waited=(compute, event.end_s))
        elif not event.waits and event.flight not in begun:
            begun[event.flight] = Arrow(
                number=event.flight, begun=(compute, event.issued_s), under_way=(lanes[event.track], event.start_s)
            )
    yield from begun.values()
