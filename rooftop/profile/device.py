"""One device of a trace, moment by moment: what it computes, which collectives it waits for, when it idles."""

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

#: What comes first at a moment at which ops of several sorts run.
_COMPUTES, _MOVES, _HOLDS = 0, 1, 2
_SORTS = {COLLECTIVE: _MOVES, HOST: _MOVES, CONTROL: _HOLDS}


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Picoseconds of a device within its counted steps.

    ``own`` and ``counts`` are by op ([O]); ``in_flight`` and ``exposed`` by the op that begins a collective, and
    ``waited`` the same with moments that several are exposed in divided among them.
    """

    stepped: Stepped
    own: Floats
    counts: Ints
    in_flight: dict[int, int]
    exposed: dict[int, int]
    waited: dict[int, float]
    compute: Intervals
    waiting: Intervals
    held: Intervals

    @cached_property
    def busy(self) -> Intervals:
        """When anything runs, or a collective is under way."""
        return self.compute | self.waiting | self.held

    def within(self, when: Intervals) -> Ints:
        """How much of ``when`` lies in each step. [steps]."""
        return when.until(self.stepped.ends) - when.until(self.stepped.starts)

    @cached_property
    def idle(self) -> Intervals:
        """The rest of the counted steps."""
        return Intervals.of(self.stepped.low, self.stepped.high) - self.busy


def leaders(ops: Sequence[Op], facts: Sequence[Facts]) -> Ints:
    """For every op the one that stands for the same collective: the one that begins it. [O]."""
    places = {(op.program, op.name): at for at, op in enumerate(ops)}
    return np.array(
        [
            places.get((op.program, each.started_by), at) if each.role == "done" else at
            for at, (op, each) in enumerate(zip(ops, facts, strict=True))
        ],
        np.int64,
    )


def spend(device: Device, stepped: Stepped, facts: Sequence[Facts], leading: Ints) -> Spent:
    """Give each moment of the counted steps to what it is spent on."""
    track, count = device.track, len(facts)
    starts, ends = (np.clip(each, stepped.low, stepped.high) for each in (track.starts, track.ends))
    within = ends > starts
    ops, starts, ends = track.ops[within], starts[within], ends[within]
    sort = np.array([_SORTS.get(each.category, _COMPUTES) for each in facts], np.int8)[ops]
    computes, moves, holds = sort == _COMPUTES, sort == _MOVES, sort == _HOLDS
    compute = Intervals.union(starts[computes], ends[computes])
    flights = _flights(device, stepped, facts, leading, (ops[moves], starts[moves], ends[moves]))
    whose = np.repeat(np.array(list(flights), np.int64), [len(each) for each in flights.values()])
    begun, ended = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(each, side) for each in flights.values())])
        for side in ("starts", "ends")
    )
    moving = Intervals.union(begun, ended)
    waited = np.bincount(whose, shares(begun, ended, compute), minlength=count)
    held = Intervals.union(starts[holds], ends[holds]) - compute - moving
    own = np.zeros(count)
    own += np.bincount(ops[computes], shares(starts[computes], ends[computes], Intervals.none()), minlength=count)
    own += np.bincount(ops[holds], shares(starts[holds], ends[holds], compute | moving), minlength=count)
    own += waited
    return Spent(
        stepped=stepped,
        own=own,
        counts=np.bincount(ops, minlength=count),
        in_flight={key: each.measure for key, each in flights.items()},
        exposed={key: (each - compute).measure for key, each in flights.items()},
        waited={key: float(waited[key]) for key in flights},
        compute=compute,
        waiting=moving - compute,
        held=held,
    )


def _flights(
    device: Device, stepped: Stepped, facts: Sequence[Facts], leading: Ints, moved: tuple[Ints, Ints, Ints]
) -> dict[int, Intervals]:
    """When each collective is under way, by the op that begins it.

    One with a beginning and an end of its own is under way in between, unless the trace has its transfer apart.
    """
    ops, starts, ends = moved
    beside = device.beside
    is_transfer = np.array([each.category == COLLECTIVE for each in facts], bool)
    apart = set(np.unique(beside.ops[is_transfer[beside.ops]]).tolist()) if len(beside) else set()
    found: dict[int, Intervals] = {}
    for leader in sorted({*np.unique(leading[ops]).tolist(), *apart}):
        mine = leading[ops] == leader
        begun, ended = starts[mine], ends[mine]
        done = mine & (ops != leader)
        if leader in apart:
            whole = beside.ops == leader
            begun, ended = (
                np.append(one, two) for one, two in ((begun, beside.starts[whole]), (ended, beside.ends[whole]))
            )
        elif done.any():
            begun, ended = (
                np.append(one, two)
                for one, two in zip((begun, ended), _pairs(starts[mine & ~done], ends[done]), strict=True)
            )
        found[leader] = Intervals.union(
            np.clip(begun, stepped.low, stepped.high), np.clip(ended, stepped.low, stepped.high)
        )
    return found


def _pairs(begun: Ints, ended: Ints) -> tuple[Ints, Ints]:
    """Each beginning with the first end behind it; one whose other side lies outside the trace is left out."""
    at: npt.NDArray[Any] = np.searchsorted(ended, begun, side="right")
    paired = at < len(ended)
    # Of two beginnings before the same end the second is its own.
    paired[:-1] &= at[:-1] != at[1:]
    return begun[paired], ended[at[paired]]


ON_DEVICE = "marked on the device"
ON_HOST = "StepTraceAnnotation on the host, as executions of the program on the device"
EXECUTIONS = "executions of the program that takes most of the time (nothing marks steps)"
WHOLE = "the whole trace (nothing tells steps apart)"


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """Steps on one device in picoseconds, [N] each; ``marked`` says what tells them apart.

    A step lasts until the next one begins. What follows the last one is not known, so that it is not ``counted`` where
    there are others, unless the device has marked its end.
    """

    numbers: Ints
    starts: Ints
    ends: Ints
    marked: str

    @property
    def counted(self) -> int:
        """How many steps figures are the means of."""
        return len(self.numbers) if self.marked == ON_DEVICE else max(1, len(self.numbers) - 1)

    @property
    def low(self) -> int:
        """When the first step begins."""
        return int(self.starts[0])

    @property
    def high(self) -> int:
        """When the last counted step ends."""
        return int(self.ends[self.counted - 1])

    @property
    def window(self) -> int:
        """How long the counted steps are together."""
        return self.high - self.low

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(number, start, end) of every step."""
        return zip(self.numbers.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True)


def stepped(device: Device, marks: Steps | None) -> Stepped:
    """The steps of a device whose host has marked ``marks``."""
    if device.steps is not None:
        own = device.steps
        return Stepped(numbers=own.numbers, starts=own.starts, ends=own.ends, marked=ON_DEVICE)
    last = int(device.track.ends.max())
    runs = device.runs
    if not len(runs.starts):
        whole = np.array([int(device.track.starts.min())], np.int64)
        return Stepped(numbers=np.array([1]), starts=whole, ends=np.array([last], np.int64), marked=WHOLE)
    programs, inverse = np.unique(runs.programs, return_inverse=True)
    spent = np.bincount(inverse, runs.ends - runs.starts)
    if marks is not None and len(marks.numbers):
        # What runs in the steps runs as often as there are steps, or several times each; what runs beside them may take
        # longer (an evaluation at the end).
        often = np.bincount(inverse) % len(marks.numbers) == 0
        spent = np.where(often, spent, 0) if often.any() else spent
    main = np.flatnonzero(runs.programs == programs[int(np.argmax(spent))])
    begins, numbers, marked = runs.starts[main], np.arange(1, len(main) + 1), EXECUTIONS
    if marks is not None and len(main) % len(marks.numbers) == 0:
        # A step may execute the program several times: for each microbatch, or each token.
        begins, numbers, marked = begins[:: len(main) // len(marks.numbers)], marks.numbers, ON_HOST
    ends = np.append(begins[1:], max(int(runs.ends[main].max()), int(begins[-1])))
    return Stepped(numbers=numbers, starts=begins, ends=ends, marked=marked)
