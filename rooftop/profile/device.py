"""One device of a trace at each moment: computation, waits for collectives, and idle time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.profile.facts import COLLECTIVE, CONTROL, HOST, Facts
from rooftop.profile.intervals import Floats, Intervals, Ints, shares
from rooftop.profile.trace import Device, Op, Steps

#: Sorts of ops in order of precedence, for moments at which several run.
_COMPUTES, _MOVES, _HOLDS = 0, 1, 2
_SORTS = {COLLECTIVE: _MOVES, HOST: _MOVES, CONTROL: _HOLDS}


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Picoseconds of a device within its counted steps.

    ``own`` and ``counts`` are by op ([O]). ``in_flight`` and ``exposed`` are by the op that begins a collective;
    ``waited`` is ``exposed`` with moments shared by several collectives divided among them. ``control`` is time in
    loops and calls outside of their ops.
    """

    stepped: Stepped
    own: Floats
    counts: Ints
    in_flight: dict[int, int]
    exposed: dict[int, int]
    waited: dict[int, float]
    compute: Intervals
    waiting: Intervals
    control: Intervals

    @cached_property
    def busy(self) -> Intervals:
        """Time at which anything runs, or a collective is in flight."""
        return self.compute | self.waiting | self.control

    def within(self, when: Intervals) -> Ints:
        """Part of ``when`` in each step, [steps]."""
        return when.until(self.stepped.ends) - when.until(self.stepped.starts)

    @cached_property
    def idle(self) -> Intervals:
        """The rest of the counted steps."""
        return Intervals.of(self.stepped.low, self.stepped.high) - self.busy


def leaders(ops: Sequence[Op], facts: Sequence[Facts]) -> Ints:
    """For every op, the op that begins the same collective, or itself. [O]."""
    places = {(op.program, op.name): index for index, op in enumerate(ops)}
    return np.array(
        [
            places.get((op.program, fact.started_by), index) if fact.role == "done" else index
            for index, (op, fact) in enumerate(zip(ops, facts, strict=True))
        ],
        np.int64,
    )


def spend(device: Device, stepped: Stepped, facts: Sequence[Facts], leading: Ints) -> Spent:
    """Attribute each moment of the counted steps to an op, or to idle time."""
    track, count = device.track, len(facts)
    starts, ends = (np.clip(moments, stepped.low, stepped.high) for moments in (track.starts, track.ends))
    within = ends > starts
    ops, starts, ends = track.ops[within], starts[within], ends[within]
    sort = np.array([_SORTS.get(fact.category, _COMPUTES) for fact in facts], np.int8)[ops]
    computes, moves, holds = sort == _COMPUTES, sort == _MOVES, sort == _HOLDS
    compute = Intervals.union(starts[computes], ends[computes])
    flights = _flights(device, stepped, facts, leading, (ops[moves], starts[moves], ends[moves]))
    whose = np.repeat(np.array(list(flights), np.int64), [len(flight) for flight in flights.values()])
    begun, ended = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(flight, side) for flight in flights.values())])
        for side in ("starts", "ends")
    )
    moving = Intervals.union(begun, ended)
    waited = np.bincount(whose, shares(begun, ended, compute), minlength=count)
    control = Intervals.union(starts[holds], ends[holds]) - compute - moving
    own_ticks = np.zeros(count)
    own_ticks += np.bincount(ops[computes], shares(starts[computes], ends[computes], Intervals.none()), minlength=count)
    own_ticks += np.bincount(ops[holds], shares(starts[holds], ends[holds], compute | moving), minlength=count)
    own_ticks += waited
    return Spent(
        stepped=stepped,
        own=own_ticks,
        counts=np.bincount(ops, minlength=count),
        in_flight={key: flight.measure for key, flight in flights.items()},
        exposed={key: (flight - compute).measure for key, flight in flights.items()},
        waited={key: float(waited[key]) for key in flights},
        compute=compute,
        waiting=moving - compute,
        control=control,
    )


def _flights(
    device: Device, stepped: Stepped, facts: Sequence[Facts], leading: Ints, moved: tuple[Ints, Ints, Ints]
) -> dict[int, Intervals]:
    """Time in flight of each collective, by the op that begins it.

    A collective with a start and an end is in flight between them, unless the trace records its transfer separately.
    """
    ops, starts, ends = moved
    beside = device.beside
    is_transfer = np.array([fact.category == COLLECTIVE for fact in facts], bool)
    apart = set(np.unique(beside.ops[is_transfer[beside.ops]]).tolist()) if len(beside) else set()
    flights: dict[int, Intervals] = {}
    for leader in sorted({*np.unique(leading[ops]).tolist(), *apart}):
        mine = leading[ops] == leader
        begun, ended = starts[mine], ends[mine]
        done = mine & (ops != leader)
        if leader in apart:
            whole = beside.ops == leader
            begun, ended = (
                np.append(first, second)
                for first, second in ((begun, beside.starts[whole]), (ended, beside.ends[whole]))
            )
        elif done.any():
            begun, ended = (
                np.append(first, second)
                for first, second in zip((begun, ended), _pairs(starts[mine & ~done], ends[done]), strict=True)
            )
        flights[leader] = Intervals.union(
            np.clip(begun, stepped.low, stepped.high), np.clip(ended, stepped.low, stepped.high)
        )
    return flights


def _pairs(begun: Ints, ended: Ints) -> tuple[Ints, Ints]:
    """Each start with the first end after it; starts and ends whose other side is outside of the trace are dropped."""
    at: npt.NDArray[Any] = np.searchsorted(ended, begun, side="right")
    paired = at < len(ended)
    # If two starts precede the same end, the second one belongs to it.
    paired[:-1] &= at[:-1] != at[1:]
    return begun[paired], ended[at[paired]]


ON_DEVICE = "marked on the device"
ON_HOST = "StepTraceAnnotation on the host, as executions of the program on the device"
EXECUTIONS = "executions of the program that takes most of the time (nothing marks steps)"
WHOLE = "the whole trace (nothing tells steps apart)"


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """Steps on one device in picoseconds, [N] each; ``marked`` says how they are identified.

    A step lasts until the next one begins. The end of the last step is unknown unless the device has marked it, so it
    is not ``counted`` if there are others.
    """

    numbers: Ints
    starts: Ints
    ends: Ints
    marked: str

    @property
    def counted(self) -> int:
        """Number of steps over which figures are means."""
        return len(self.numbers) if self.marked == ON_DEVICE else max(1, len(self.numbers) - 1)

    @property
    def low(self) -> int:
        """Start of the first step."""
        return int(self.starts[0])

    @property
    def high(self) -> int:
        """End of the last counted step."""
        return int(self.ends[self.counted - 1])

    @property
    def window(self) -> int:
        """Duration of all counted steps."""
        return self.high - self.low

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(number, start, end) of every step."""
        return zip(self.numbers.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True)


def stepped(device: Device, marks: Steps | None) -> Stepped:
    """The steps of a device; ``marks`` are those that its host has marked."""
    if device.steps is not None:
        steps = device.steps
        return Stepped(numbers=steps.numbers, starts=steps.starts, ends=steps.ends, marked=ON_DEVICE)
    last = int(device.track.ends.max())
    runs = device.runs
    if not len(runs.starts):
        whole = np.array([int(device.track.starts.min())], np.int64)
        return Stepped(numbers=np.array([1]), starts=whole, ends=np.array([last], np.int64), marked=WHOLE)
    programs, inverse = np.unique(runs.programs, return_inverse=True)
    spent = np.bincount(inverse, runs.ends - runs.starts)
    if marks is not None and len(marks.numbers):
        # The program of the steps runs once or several times a step. Other programs may take longer in all (an
        # evaluation at the end).
        often = np.bincount(inverse) % len(marks.numbers) == 0
        spent = np.where(often, spent, 0) if often.any() else spent
    main = np.flatnonzero(runs.programs == programs[int(np.argmax(spent))])
    begins, numbers, marked = runs.starts[main], np.arange(1, len(main) + 1), EXECUTIONS
    if marks is not None and len(main) % len(marks.numbers) == 0:
        # A step may execute the program several times: once for each microbatch, or each token.
        begins, numbers, marked = begins[:: len(main) // len(marks.numbers)], marks.numbers, ON_HOST
    ends = np.append(begins[1:], max(int(runs.ends[main].max()), int(begins[-1])))
    return Stepped(numbers=numbers, starts=begins, ends=ends, marked=marked)
