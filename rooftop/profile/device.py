"""One device of a trace, moment by moment: what it computes, which collectives it waits for, when it idles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.profile.facts import COLLECTIVE, CONTROL, HOST, Facts
from rooftop.profile.intervals import Floats, Intervals, Ints, shares
from rooftop.profile.steps import Stepped
from rooftop.profile.trace import Device, Op

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
