"""Messages on the links of a torus, one link at a time: what the closed forms of ``roofline`` are checked against.

The model. Every directed link carries one message at a time at its one-way bandwidth. A message waits for the messages
that it depends on and for its link; among those that wait for the same link, the one of highest rank leaves first (as
a rule: with most hops to go), then the one that has waited longest. Either bytes flow on as they arrive
(``cut_through``: a message may leave ``hop_s`` after the last of those it depends on *began* to leave; all links are
equally fast, so it never runs dry), as packets of a long transfer do, or each message is stored whole before it goes
on (it leaves ``hop_s`` after the last byte of those it depends on has left). Buffers are unlimited and adding costs
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.hardware import PhysicalAxis

Floats = npt.NDArray[np.float64]

#: The two directions of an axis, as they index links: towards higher coordinates and towards lower ones.
UP, DOWN = 0, 1


class LinkTransfer(NamedTuple):
    """One message over one link.

    ``after`` are positions of earlier transfers whose bytes it sends on (or adds up). Of the transfers that wait
    for one link, that of highest ``rank`` leaves first: as a rule, the hops from here to the last chip that waits for
    these bytes.
    """

    link: int
    nbytes: float
    after: tuple[int, ...]
    rank: float


@dataclass(frozen=True, kw_only=True)
class Torus:
    """Chips on a grid of ``sizes``, neighbours joined by a link each way; ``wrapped`` axes are rings, others lines.

    ``bytes_per_s`` is one-way, per link; ``hop_s`` the time from the last byte's leaving to its arrival. A chip is a
    number, row-major in its coordinates. A wrapped axis of two has two links each way.
    """

    sizes: tuple[int, ...]
    wrapped: tuple[bool, ...]
    bytes_per_s: float
    hop_s: float

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.wrapped) or min(self.sizes) < 1:
            raise RooftopError("torus", (self.sizes, self.wrapped), "positive sizes, each with its wraparound")
        if self.bytes_per_s <= 0 or self.hop_s < 0:
            raise RooftopError("torus", (self.bytes_per_s, self.hop_s), "bytes_per_s above 0, hop_s of 0 or more")

    @classmethod
    def of(cls, physical: tuple[PhysicalAxis, ...]) -> Torus:
        """The torus among the physical axes of a slice: its first ones, without cores and DCN.

        Raises RooftopError if there is none (GPUs) or if its axes differ in bandwidth or hop latency.
        """
        axes = [axis for axis in physical if axis.kind == "torus"]
        if len({(axis.bytes_per_s, axis.hop_s) for axis in axes}) != 1:
            names = ", ".join(axis.name for axis in physical)
            raise RooftopError("torus", names, "axes of one TPU slice, whose links are equally fast")
        return cls(
            sizes=tuple(axis.size for axis in axes),
            wrapped=tuple(axis.wrapped for axis in axes),
            bytes_per_s=axes[0].bytes_per_s,
            hop_s=axes[0].hop_s,
        )

    @property
    def chips(self) -> int:
        """Chips of the torus."""
        return prod(self.sizes)

    def coordinates(self, chip: int) -> tuple[int, ...]:
        """The coordinates of a chip. Raises RooftopError if there is no such chip."""
        if not 0 <= chip < self.chips:
            raise RooftopError("chip", chip, f"0 to {self.chips - 1}")
        return tuple(int(place) for place in np.unravel_index(chip, self.sizes))

    def chip(self, coordinates: Sequence[int]) -> int:
        """The chip at some coordinates. Raises RooftopError if there is none."""
        inside = all(0 <= place < size for place, size in zip(coordinates, self.sizes, strict=False))
        if len(coordinates) != len(self.sizes) or not inside:
            raise RooftopError("chip", tuple(coordinates), f"coordinates inside {'x'.join(map(str, self.sizes))}")
        return int(np.ravel_multi_index(tuple(coordinates), self.sizes))

    @cached_property
    def neighbours(self) -> tuple[tuple[list[int], list[int]], ...]:
        """The next chip of every chip, by axis and direction; -1 where a line ends."""
        grid = np.arange(self.chips).reshape(self.sizes)

        def moved(axis: int, shift: int) -> list[int]:
            to = np.roll(grid, shift, axis)
            if not self.wrapped[axis] or self.sizes[axis] == 1:
                to[(slice(None),) * axis + (-1 if shift < 0 else 0,)] = -1
            chips: list[int] = to.ravel().tolist()
            return chips

        return tuple((moved(axis, -1), moved(axis, 1)) for axis in range(len(self.sizes)))

    def link(self, axis: int, direction: int, chip: int) -> int:
        """The number of the link that leaves ``chip`` along ``axis``: its place in an array [P, 2, chips]."""
        return (2 * axis + direction) * self.chips + chip

    def opposite(self, link: int) -> int:
        """The link that leads back."""
        way, chip = divmod(link, self.chips)
        axis, direction = divmod(way, 2)
        return self.link(axis, 1 - direction, self.neighbours[axis][direction][chip])


@dataclass(frozen=True, kw_only=True)
class NetworkRun:
    """Result of a simulation.

    ``seconds`` is when the last byte arrived and ``hops`` the links on the path that took so long; ``link_bytes`` and
    ``busy_s`` are [P, 2, chips] by axis, direction (up, down) and the chip that a link leaves. ``left_s`` is when each
    transfer began to leave, [transfers].
    """

    seconds: float
    hops: int
    link_bytes: Floats
    busy_s: Floats
    left_s: Floats


def run(torus: Torus, transfers: Sequence[LinkTransfer], *, cut_through: bool = True) -> NetworkRun:
    """Simulate transfers, each listed after those it depends on. Event-driven and deterministic."""
    rate, hop_s = torus.bytes_per_s, torus.hop_s
    sent = np.zeros(2 * len(torus.sizes) * torus.chips)
    missing = [len(transfer.after) for transfer in transfers]
    followers: list[list[int]] = [[] for _ in transfers]
    # Events at one instant: transfers become ready (0) before links choose among them (1).
    events: list[tuple[float, int, int]] = []
    for index, transfer in enumerate(transfers):
        sent[transfer.link] += transfer.nbytes
        for earlier in transfer.after:
            followers[earlier].append(index)
        if not transfer.after:
            events.append((0.0, 0, index))
    # ``events`` is sorted, so it is a heap already.
    links, ranks = [transfer.link for transfer in transfers], [transfer.rank for transfer in transfers]
    lasting_s = [transfer.nbytes / rate for transfer in transfers]
    waiting: list[list[tuple[float, float, int]]] = [[] for _ in sent]
    idle = [True] * len(sent)
    last_on = [-1] * len(sent)
    # When the inputs of each transfer are all there, and the hops on the path of the last of them; then its own hops.
    ready_s = [0.0] * len(transfers)
    input_hops = [0] * len(transfers)
    hops = [0] * len(transfers)
    left_s = [0.0] * len(transfers)
    seconds, longest = 0.0, 0
    while events:
        now, choosing, number = heappop(events)
        if not choosing:
            link = links[number]
            heappush(waiting[link], (-ranks[number], now, number))
            if idle[link]:
                idle[link] = False
                heappush(events, (now, 1, link))
            continue
        link = number
        if not waiting[link]:
            idle[link] = True
            continue
        _, ready, number = heappop(waiting[link])
        hops[number] = hops[last_on[link]] if ready < now else input_hops[number] + 1
        last_on[link], left_s[number] = number, now
        end = now + lasting_s[number]
        heappush(events, (end, 1, link))
        if end + hop_s > seconds:
            seconds, longest = end + hop_s, hops[number]
        onward = (now if cut_through else end) + hop_s
        for follower in followers[number]:
            missing[follower] -= 1
            if onward >= ready_s[follower]:
                ready_s[follower], input_hops[follower] = onward, hops[number]
            if not missing[follower]:
                heappush(events, (ready_s[follower], 0, follower))
    shape = (len(torus.sizes), 2, torus.chips)
    link_bytes = sent.reshape(shape)
    return NetworkRun(
        seconds=seconds, hops=longest, link_bytes=link_bytes, busy_s=link_bytes / rate, left_s=np.array(left_s)
    )
