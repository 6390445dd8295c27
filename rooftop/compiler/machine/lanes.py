"""The compiled timeline as lanes: what the device computes and waits for, and each resource that works beside it.

Those are links of the network by physical axis and direction, copies from and to HBM, the host. Of a loop the first
trips are drawn, the rest as one block, or every trip.
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
#: Events that are drawn at most where every trip of a loop is asked for.
MOST_EVENTS = 400_000
_NOTE = "the compiler's schedule, run on a simple machine at the named fractions of the chip: no measurement"


def compiled_lanes(
    module: Module, line: ScheduleTimeline, *, title: str = "compiled", every_trip: bool = False
) -> Lanes:
    """The lanes of ``line``, the timeline of ``module``; arrows lead from where a transfer begins to the wait for it.

    ``every_trip`` draws all trips of loops, each as the last of the first ones (up to ``MOST_EVENTS``); ops then have
    their work with them.
    """
    events = unrolled(line.events) if every_trip else line.events
    order = _tracks(events)
    spans: dict[str, list[TimeSpan]] = {name: [] for name in order}
    told: dict[object, TimeSpan] = {}
    for each in events:
        if each.end_s > each.start_s:
            key = each.track == machine.COMPUTE, each.place, each.waits, each.collective, each.trips
            if key not in told:
                told[key] = _span(module, line, each, with_work=every_trip)
            spans[each.track].append(replace(told[key], start_s=each.start_s, end_s=each.end_s, flight=each.flight))
    return Lanes(
        title=title,
        source="compiled",
        total_s=line.total_s,
        lanes=tuple(Lane(name=_title(name), spans=tuple(spans[name])) for name in order),
        arrows=() if every_trip else tuple(_arrows(events, {name: at for at, name in enumerate(order)})),
        note=_NOTE,
    )


def unrolled(events: Sequence[Event]) -> tuple[Event, ...]:
    """Events with every trip of the loops whose last trips stand as one event: each as the last that is drawn.

    Loops of which that would make more than ``MOST_EVENTS`` stay as they are.
    """
    found = list(events)
    flights = max((each.flight or 0 for each in events), default=0)
    # The loop within comes before the loop around it.
    for rest in sorted((each for each in events if each.trips), key=lambda each: each.end_s - each.start_s):
        trip_s = (rest.end_s - rest.start_s) / rest.trips
        low = rest.start_s - trip_s * (1 + 1e-9)
        last = [each for each in found if low <= each.start_s < rest.start_s - trip_s * 1e-9 and each is not rest]
        if not last or len(found) + rest.trips * len(last) > MOST_EVENTS:
            continue
        found.remove(rest)
        for trip in range(1, rest.trips + 1):
            later = trip * trip_s
            found += (
                replace(
                    each, start_s=each.start_s + later, end_s=each.end_s + later, issued_s=each.issued_s + later,
                    flight=None if each.flight is None else each.flight + trip * (flights + 1),
                )
                for each in last
            )  # fmt: skip
        flights = max((each.flight or 0 for each in found), default=0)
    return tuple(sorted(found, key=lambda each: each.start_s))


def _tracks(events: Sequence[Event]) -> list[str]:
    """The tracks that are used: compute first, then links by name, then copies."""
    used = {each.track for each in events} - {machine.COMPUTE}
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
        found = line.collectives[event.collective].collective
        details |= {"collective": found.kind, "axes": ",".join(found.axes), "bytes": found.bytes}
        scope, phase, source = found.scope, found.phase, found.source
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
    """An instruction as a trace writes it: its line of HLO, without layouts and metadata."""
    arrays = [f"{each.dtype}[{','.join(map(str, each.dims))}]" for each in instruction.shape]
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
        found = line.collectives[event.collective].collective
        moved = f"{found.kind} over {','.join(found.axes)}"
        if event.track == machine.COMPUTE and not event.waits:
            moved = scope
    return f"wait for {moved}" if event.waits else moved


def _arrows(events: Sequence[Event], lanes: Mapping[str, int]) -> Iterator[Arrow]:
    """The arrow of each transfer: from its beginning on the compute lane by its first link to the wait for it."""
    begun: dict[int, Arrow] = {}
    compute = lanes[machine.COMPUTE]
    for each in events:
        if each.flight is None:
            continue
        if each.waits and each.flight in begun:
            begun[each.flight] = replace(begun[each.flight], waited=(compute, each.end_s))
        elif not each.waits and each.flight not in begun:
            begun[each.flight] = Arrow(
                number=each.flight, begun=(compute, each.issued_s), under_way=(lanes[each.track], each.start_s)
            )
    yield from begun.values()
