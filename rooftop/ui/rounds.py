"""Shards that every device of a ring, a line or a torus has after each round of a collective, for pictures.

In a round every device sends to each neighbour at most what it got in the round before (chapter 3). ``held[t][d][s]``
is how much of shard s device d holds after t rounds, 0 to 1: of an AllGather and AllToAll the share of its bytes, of a
sum the share of the N operands that are added up in it. ``sent[t]`` are the (from, to) pairs of the round after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError, unknown

Floats = npt.NDArray[np.float64]
KINDS: tuple[str, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """``held`` [rounds + 1, devices, shards]; ``sent`` has the pairs of each round."""

    held: Floats
    sent: tuple[tuple[tuple[int, int], ...], ...]


def rounds(kind: str, devices: int, *, ring: bool) -> Rounds:
    """The rounds of a collective over ``devices`` in a ``ring``, or else on an open line.

    An AllReduce is a ReduceScatter and then an AllGather. Raises RooftopError for an unknown kind and for fewer than
    two devices.
    """
    if kind not in KINDS:
        raise unknown("collective", kind, KINDS)
    if devices < 2:
        raise RooftopError("devices", devices, "2 or more")
    away = np.abs(np.subtract.outer(np.arange(devices), np.arange(devices)))
    if ring:
        away = np.minimum(away, devices - away)
    last = int(away.max())
    if kind == "all_to_all":
        return _all_to_all(away, last)
    gathered = np.array([away <= done for done in range(last + 1)], np.float64)
    spread = tuple(_steps(away, done, ring) for done in range(1, last + 1))
    if kind == "all_gather":
        return Rounds(held=gathered, sent=spread)
    # The same with time running backwards: what a shard was copied to sends its sum back the way it came.
    summed = np.array([_sums(away, last - done) for done in range(last + 1)])
    back = tuple(tuple((to, start) for start, to in pairs) for pairs in reversed(spread))
    if kind == "reduce_scatter":
        return Rounds(held=summed, sent=back)
    return Rounds(held=np.concatenate([summed, gathered[1:]]), sent=back + spread)


def torus_rounds(kind: str, sizes: Sequence[int], rings: Sequence[bool]) -> Rounds:
    """The rounds over several axes, one axis after the other; devices and shards are row-major in ``sizes``.

    A torus has other links idle meanwhile: the same with the axes in another order runs on them, for another part of
    the bytes. Raises RooftopError as ``rounds`` does.
    """
    axes = list(range(len(sizes)))
    stages = [(kind, axis) for axis in axes]
    if kind == "all_reduce":
        # What was scattered last is gathered first.
        stages = [("reduce_scatter", axis) for axis in axes] + [("all_gather", axis) for axis in reversed(axes)]
    holdings: list[Floats] = []
    sent: list[tuple[tuple[int, int], ...]] = []
    now: dict[int, Floats] = {}
    every = [(part, axis, rounds(part, sizes[axis], ring=rings[axis])) for part, axis in stages]
    for _, axis, stage_rounds in reversed(every):
        now[axis] = stage_rounds.held[0]
    for _, axis, stage_rounds in every:
        for at in range(len(stage_rounds.held)):
            now[axis] = stage_rounds.held[at]
            if at or not holdings:
                holdings.append(_product([now[position] for position in axes]))
        sent += [_along(pairs, axis, sizes) for pairs in stage_rounds.sent]
    return Rounds(held=np.array(holdings), sent=tuple(sent))


def _product(factors: Sequence[Floats]) -> Floats:
    """Holdings of shards split over several axes, from the holdings along each axis."""
    whole: Floats = np.ones((1, 1))
    for factor in factors:
        whole = np.asarray(np.kron(whole, factor), np.float64)
    return whole


def _along(pairs: tuple[tuple[int, int], ...], axis: int, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Pairs of places along one axis as pairs of devices, in every line of that axis."""
    grid = np.moveaxis(np.arange(prod(sizes)).reshape(sizes), axis, 0).reshape(sizes[axis], -1)
    return tuple(
        (int(start), int(end)) for a, b in pairs for start, end in zip(grid[a].tolist(), grid[b].tolist(), strict=True)
    )


def _steps(away: npt.NDArray[np.int64], done: int, ring: bool) -> tuple[tuple[int, int], ...]:
    """Pairs (from, to) in round ``done`` of an AllGather: each shard moves on from where it came the round before."""
    devices = len(away)
    pairs = set()
    for device in range(devices):
        for way in (1, -1):
            to = (device + way) % devices if ring else device + way
            if 0 <= to < devices and any(
                away[device, shard] == done - 1 and away[to, shard] == done for shard in range(devices)
            ):
                pairs.add((device, to))
    return tuple(sorted(pairs))


def _sums(away: npt.NDArray[np.int64], reach: int) -> Floats:
    """Operands added up in each device's sum of each shard when sums of devices within ``reach`` are still open."""
    devices = len(away)
    holdings = np.zeros((devices, devices))
    for shard in range(devices):
        for operand in range(devices):
            # An operand has come as near to its shard as the round allows; opposite ones come half each way.
            at = np.flatnonzero(_on_way(away, operand, shard, reach))
            holdings[at, shard] += 1 / len(at) / devices
    return holdings


def _on_way(away: npt.NDArray[np.int64], operand: int, shard: int, reach: int) -> npt.NDArray[np.bool_]:
    """Mask of operands that started at ``operand`` and are within ``reach`` of ``shard`` on a shortest path."""
    left = min(int(away[operand, shard]), reach)
    mask: npt.NDArray[np.bool_] = (away[:, shard] == left) & (away[:, operand] == away[operand, shard] - left)
    return mask


def _all_to_all(away: npt.NDArray[np.int64], last: int) -> Rounds:
    """Pieces travel one hop a round, all at once: device d's shard s is what started on s."""
    devices = len(away)
    holdings = np.zeros((last + 1, devices, devices))
    sent: list[set[tuple[int, int]]] = [set() for _ in range(last)]
    for done in range(last + 1):
        for source in range(devices):
            for target in range(devices):
                here, there = (
                    np.flatnonzero(
                        _on_way(away, source, target, max(0, int(away[source, target]) - round_number))
                    ).tolist()
                    for round_number in (done, done + 1)
                )
                holdings[done, here, source] += 1 / len(here) / devices
                if here != there:
                    sent[done] |= {(start, end) for start in here for end in there if away[start, end] == 1}
    return Rounds(held=holdings, sent=tuple(tuple(sorted(pairs)) for pairs in sent))
