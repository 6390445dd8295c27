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
from itertools import permutations, product
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


# ---- messages along shortest paths -----------------------------------------------------------------------------------

#: Links one after the other, as (axis, direction, chip that the link leaves).
Path = tuple[tuple[int, int, int], ...]


def walk(torus: Torus, chip: int, legs: Sequence[tuple[int, int, int]]) -> Path:
    """The links from ``chip`` along some legs of (axis, direction, hops)."""
    path: list[tuple[int, int, int]] = []
    for axis, direction, hops in legs:
        for _ in range(hops):
            path.append((axis, direction, chip))
            chip = torus.neighbours[axis][direction][chip]
    return tuple(path)


def chain(transfers: list[LinkTransfer], torus: Torus, path: Path, nbytes: float) -> None:
    """Append one message that takes the links of ``path`` one after the other."""
    for hop, at in enumerate(path):
        before = (len(transfers) - 1,) if hop else ()
        transfers.append(LinkTransfer(torus.link(*at), nbytes, before, len(path) - hop))


def permute(torus: Torus, pairs: Sequence[tuple[int, int]], nbytes: float | Floats) -> list[LinkTransfer]:
    """Messages from chip to chip for any (source, target) pairs, [n]; bytes of each, or one figure for all.

    Along shortest paths, half of the bytes through the axes from first to last and half from last to first, an
    opposite chip of a ring both ways round: what ``rooftop.roofline.routing`` sums up in closed form.
    """
    transfers: list[LinkTransfer] = []
    for (source, target), size in zip(pairs, np.broadcast_to(nbytes, len(pairs)), strict=True):
        paths = _shortest(torus, source, target)
        for path in paths:
            chain(transfers, torus, path, float(size) / len(paths))
    return transfers


def send(torus: Torus, source: int, target: int, nbytes: float) -> list[LinkTransfer]:
    """One message in equal parts over shortest paths that share no link, as many as turn once per axis."""
    disjoint: list[Path] = []
    for path in _shortest(torus, source, target, every=True):
        if not any(set(path) & set(other) for other in disjoint):
            disjoint.append(path)
    transfers: list[LinkTransfer] = []
    for path in disjoint:
        chain(transfers, torus, path, float(sizes_of(nbytes, ())) / len(disjoint))
    return transfers


def gather(torus: Torus, target: int, nbytes: float | Floats) -> list[LinkTransfer]:
    """Everything on one chip: ``nbytes`` in all, in equal shards, or the bytes of each chip's shard, [chips].

    Shards take shortest paths, shared out so that the busiest port of ``target`` takes in as little as can be.
    """
    shards = shards_of(nbytes, torus.chips)
    ways: dict[int, dict[int, list[Path]]] = {}
    waiting: dict[tuple[int, ...], float] = {}
    for chip in range(torus.chips):
        if chip == target:
            continue
        by_port: dict[int, list[Path]] = {}
        for path in _shortest(torus, chip, target, every=True):
            by_port.setdefault(torus.link(*path[-1]), []).append(path)
        ways[chip] = dict(sorted(by_port.items()))
        waiting[tuple(ways[chip])] = waiting.get(tuple(ways[chip]), 0.0) + float(shards[chip])
    shares = _even_ports(waiting)
    transfers: list[LinkTransfer] = []
    for chip, by_port in ways.items():
        for paths, share in zip(by_port.values(), shares[tuple(by_port)], strict=True):
            for path in paths if share > 0 else ():
                chain(transfers, torus, path, float(shards[chip]) * float(share) / len(paths))
    return transfers


def _even_ports(waiting: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], Floats]:
    """Shares of the bytes that may enter through any of some ports, by those ports, that leave all ports most even.

    Each set of ports in turn fills up its emptiest ones, until none changes: the least sum of squares, and with it
    the least maximum.
    """
    entering = {ports: np.full(len(ports), nbytes / len(ports)) for ports, nbytes in waiting.items()}
    load = np.zeros(1 + max((max(ports) for ports in waiting), default=0))
    for ports, parts in entering.items():
        load[list(ports)] += parts
    total, moved = sum(waiting.values()), np.inf
    while moved > 1e-12 * total:
        moved = 0.0
        for ports, parts in entering.items():
            others = load[list(ports)] - parts
            # The level to which these bytes fill the emptiest ports: the lowest over the numbers of ports.
            lowest = np.sort(others)
            level = np.min((np.cumsum(lowest) + waiting[ports]) / np.arange(1, len(ports) + 1))
            filled = np.maximum(level - others, 0.0)
            moved = max(moved, float(np.abs(filled - parts).max()))
            load[list(ports)], entering[ports] = others + filled, filled
    return {ports: parts / max(waiting[ports], np.finfo(float).tiny) for ports, parts in entering.items()}


def _shortest(torus: Torus, source: int, target: int, every: bool = False) -> list[Path]:
    """Shortest paths that turn once per axis: in the two orders of the axes, or in ``every`` one; repeats are kept."""
    start, end = torus.coordinates(source), torus.coordinates(target)
    axes = tuple(axis for axis in range(len(start)) if start[axis] != end[axis])
    ways: list[list[tuple[int, int, int]]] = []
    for axis in axes:
        ahead = end[axis] - start[axis]
        hops = {UP: ahead, DOWN: -ahead}
        if torus.wrapped[axis]:
            hops = {way: count % torus.sizes[axis] for way, count in hops.items()}
        fewest = min(count for count in hops.values() if count > 0)
        ways.append([(axis, way, count) for way, count in hops.items() if count == fewest])
    orders = list(permutations(axes)) if every else [axes, axes[::-1]]
    return [
        walk(torus, source, [legs[axis] for axis in order])
        for order in orders
        for legs in ({leg[0]: leg for leg in choice} for choice in product(*ways))
    ]


def shards_of(nbytes: float | Floats, count: int) -> Floats:
    """Bytes of each of ``count`` shards, [count], from their sum or one by one."""
    return np.full(count, sizes_of(nbytes, ()) / count) if np.ndim(nbytes) == 0 else sizes_of(nbytes, (count,))


def sizes_of(nbytes: float | Floats, shape: tuple[int, ...]) -> Floats:
    """``nbytes`` as an array of ``shape``. Raises RooftopError if it is none, or negative."""
    sizes = np.asarray(nbytes, float)
    if sizes.shape != shape or (sizes < 0).any():
        raise RooftopError("nbytes", nbytes, f"one figure, or those of {' x '.join(map(str, shape))}, 0 or more")
    return sizes
