"""The messages of each collective on a torus, to be simulated link by link.

Every collective is made of trees: the shard of one chip spreads along the axes one after the other, in both
directions of each, and a ReduceScatter is the same tree run backwards. The bytes are shared among the orders of the
axes so that the busiest link is as idle as it can be, and on rings of even length among the two ways to the opposite
chip. All groups of a mesh axis are simulated at once, since strided ones share their links.

A line needs both directions of its links, so ``bidirectional=False`` concerns rings only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import AxisSpan
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.ledger import COLLECTIVES
from rooftop.simulate.network.torus import (
    DOWN,
    UP,
    LinkTransfer,
    NetworkRun,
    Torus,
    chain,
    gather,
    permute,
    run,
    send,
    shards_of,
    sizes_of,
    walk,
)

__all__ = ["gather", "permute", "send", "simulate"]

#: Chunks of an AllReduce that is pipelined over lines, and about how many transfers that may take.
PIPELINED, _TRANSFERS = 48, 2**18

Floats = npt.NDArray[np.float64]


def simulate(
    kind: str,
    group: AxisSpan,
    nbytes: float | Floats,
    *,
    bidirectional: bool = True,
    chunks: int | None = None,
    cut_through: bool = True,
) -> NetworkRun:
    """Simulate one collective in all groups of a mesh axis at once.

    ``nbytes`` is the logical payload of ``rooftop.core.ledger.Collective``, or the bytes of each member's shard, [N]
    (AllGather, ReduceScatter, AllReduce), or those from each member to each other one, [N, N] (AllToAll). Members are
    row-major in the physical axes. A permute sends from each member to the next; the last one sends to the first if
    every axis is a ring, and otherwise nothing. An AllReduce is the faster of two: partial sums to one place and back
    (least bytes), or every operand to every member (fewest hops). ``chunks`` cuts every message
    (of an AllReduce over lines, the operand into ``chunks`` x N pieces). Only an AllReduce over lines needs it, being
    a pipeline: left to itself it is cut finely enough to come within 2 % of the bound, but larger groups less finely,
    for speed (they end 4 % above it on 8x16 lines, 45 % where one of these axes is a ring). ``cut_through`` is
    explained in ``rooftop.simulate.network.torus``.

    Raises RooftopError for an unknown collective or a group beyond one torus.
    """
    if kind not in COLLECTIVES:
        raise unknown("collective", kind, COLLECTIVES)
    if chunks is not None and chunks < 1:
        raise RooftopError("chunks", chunks, "1 or more")
    torus = Torus.of(group.physical)
    members = _Members.of(torus, group, bidirectional)
    count = len(members.groups[0])
    if kind == "all_to_all":
        single = np.ndim(nbytes) == 0
        pairs = np.full((count, count), sizes_of(nbytes, ()) / count) if single else sizes_of(nbytes, (count, count))
        transfers = _messages(torus, members, pairs, chunks or 1)
    elif kind == "permute":
        shift = np.roll(np.eye(count), 1, axis=1) * float(sizes_of(nbytes, ()))
        if not all(ring for ring, size in zip(members.ring, members.size, strict=True) if size > 1):
            shift[-1] = 0.0
        np.fill_diagonal(shift, 0.0)
        transfers = _messages(torus, members, shift, chunks or 1)
    else:
        transfers = _collecting(kind, torus, members, shards_of(nbytes, count), chunks, cut_through)
    best = run(torus, transfers, cut_through=cut_through)
    if kind == "all_reduce":
        operands = np.full(count, shards_of(nbytes, count).sum())
        gathering, _ = _gathering("all_gather", torus, members, operands, 1)
        best = min(best, run(torus, gathering, cut_through=cut_through), key=lambda result: result.seconds)
    return best


@dataclass(frozen=True, kw_only=True)
class _Members:
    """The groups of a mesh axis: their chips, and how the members lie along each physical axis of the torus."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    ring: tuple[bool, ...]
    bidirectional: bool
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, torus: Torus, group: AxisSpan, bidirectional: bool) -> _Members:
        axes = len(torus.sizes)
        if group.size.ndim != 1 or group.size[axes:].prod() != 1:
            raise RooftopError("group", group.size.tolist(), "one group [P] within one torus, without cores and DCN")
        size, stride = tuple(map(int, group.size[:axes])), tuple(map(int, group.stride[:axes]))
        grid = np.arange(torus.chips).reshape(torus.sizes)
        starts = [
            [place for place in range(length) if place // s % n == 0]
            for length, n, s in zip(torus.sizes, size, stride, strict=True)
        ]
        groups = tuple(
            tuple(
                grid[tuple(slice(at, at + n * s, s) for at, n, s in zip(start, size, stride, strict=True))]
                .ravel()
                .tolist()
            )
            for start in product(*starts)
        )
        ring = tuple(map(bool, group.ring[:axes]))
        return cls(size=size, stride=stride, ring=ring, bidirectional=bidirectional, groups=groups)

    def reach(self, axis: int, place: int, flip: bool) -> tuple[int, int]:
        """Members that a shard passes upwards and downwards from the member at ``place`` until all have it."""
        size = self.size[axis]
        if not self.ring[axis]:
            return size - 1 - place, place
        if not self.bidirectional:
            return size - 1, 0
        short, long = (size - 1) // 2, size // 2
        return (short, long) if flip else (long, short)

    def towards(self, axis: int, source: int, target: int, flip: bool) -> tuple[int, int]:
        """Direction and members passed from ``source`` to ``target``; ``flip`` decides for an opposite one."""
        if not self.ring[axis]:
            return (UP, target - source) if target >= source else (DOWN, source - target)
        size = self.size[axis]
        ahead = (target - source) % size
        up = not self.bidirectional or 2 * ahead < size or (2 * ahead == size and not flip)
        return (UP, ahead) if up else (DOWN, size - ahead)

    def is_middle(self, axis: int, position: int) -> bool:
        """Return True if a member has a neighbour on both sides; on a ring every one does."""
        place = int(np.unravel_index(position, self.size)[axis])
        return self.ring[axis] or place == self.size[axis] // 2

    @property
    def flips(self) -> tuple[bool, ...]:
        """Both ways to the opposite member, where a ring has one."""
        even = any(ring and size % 2 == 0 for ring, size in zip(self.ring, self.size, strict=True))
        return (False, True) if even and self.bidirectional else (False,)


def _collecting(
    kind: str, torus: Torus, members: _Members, shards: Floats, chunks: int | None, cut_through: bool
) -> list[LinkTransfer]:
    """AllGather, ReduceScatter (its AllGather backwards) and AllReduce (one after the other)."""
    line = any(size > 1 and not ring for size, ring in zip(members.size, members.ring, strict=True))
    gathering, trees = _gathering(kind, torus, members, shards, chunks or 1)
    if kind == "all_gather" or not gathering:
        return gathering
    if kind == "all_reduce" and line:
        if chunks is None:
            chunks = max(1, min(PIPELINED, _TRANSFERS // (2 * len(gathering))))
            gathering, trees = _gathering(kind, torus, members, shards, chunks)
        # Sums must flow back along a line while others still flow in: shards go one after the other, all groups' at
        # once.
        back = forth = [-float(tree // len(members.groups)) for tree in trees]
    else:
        # What leaves last in the AllGather leaves first when it runs backwards, and before anything is gathered.
        back = run(torus, gathering, cut_through=cut_through).left_s.tolist()
        latest = max(transfer.rank for transfer in gathering)
        forth = [transfer.rank - latest - 1 for transfer in gathering]
    reducing = _backwards(torus, gathering, back)
    return reducing + (_after(reducing, gathering, trees, forth) if kind == "all_reduce" else [])


def _gathering(
    kind: str, torus: Torus, members: _Members, shards: Floats, chunks: int
) -> tuple[list[LinkTransfer], list[int]]:
    """The AllGather that ``kind`` is or is made of, and the tree that each transfer belongs to.

    There is a tree for every piece (a chunk of a shard in one order of the axes), way round the rings and group.
    """
    turns: list[tuple[float, int, tuple[int, ...], float]] = []
    for order, share in _orders(kind, members):
        positions, sizes, count = list(range(len(shards))), shards * share, chunks
        if kind == "all_reduce":
            # Sums may meet anywhere. On a line that is reduced last, the middle is best: it takes each link both ways.
            positions = [at for at in positions if not order or members.is_middle(order[0], at)]
            sizes = np.full(len(shards), shards.sum() * share / len(positions))
            # Messages of all orders get about the same length, so that long ones do not delay short ones.
            count = max(1, round(chunks * share * len(shards) / len(positions)))
        pieces = [(at, order, float(sizes[at]) / count) for _, at in product(range(count), positions)]
        turns += [((rank + 0.5) / len(pieces), *piece) for rank, piece in enumerate(pieces)]
    transfers: list[LinkTransfer] = []
    trees: list[int] = []
    combinations = product(sorted(turns), members.flips, members.groups)
    for number, ((_, position, order, size), flip, chips) in enumerate(combinations):
        nbytes = size / len(members.flips)
        transfers += _tree(torus, members, chips[position], position, order, flip, nbytes, len(transfers))
        trees += [number] * (len(transfers) - len(trees))
    return transfers, trees


def _tree(
    torus: Torus,
    members: _Members,
    chip: int,
    position: int,
    order: Sequence[int],
    flip: bool,
    nbytes: float,
    base: int,
) -> list[LinkTransfer]:
    """One shard from its chip to all others of its group, as transfers numbered from ``base``."""
    places = np.unravel_index(position, members.size)
    links: list[int] = []
    parent: list[int] = []
    reached = [(chip, -1)]
    for axis in order:
        beyond: list[tuple[int, int]] = []
        ways = members.reach(axis, int(places[axis]), flip)
        for (start, before), (direction, count) in product(reached, enumerate(ways)):
            at, last = start, before
            for hop in range(1, count * members.stride[axis] + 1):
                parent.append(last)
                last = len(links)
                links.append(torus.link(axis, direction, at))
                at = torus.neighbours[axis][direction][at]
                if hop % members.stride[axis] == 0:
                    beyond.append((at, last))
        reached += beyond
    to_go = [1] * len(links)
    for child in reversed(range(len(links))):
        if parent[child] >= 0:
            to_go[parent[child]] = max(to_go[parent[child]], to_go[child] + 1)
    return [
        LinkTransfer(link, nbytes, () if before < 0 else (base + before,), hops)
        for link, before, hops in zip(links, parent, to_go, strict=True)
    ]


def _backwards(torus: Torus, transfers: Sequence[LinkTransfer], ranks: Sequence[float]) -> list[LinkTransfer]:
    """The transfers with time running backwards: what was copied on the way is added up, last ones come first."""
    last = len(transfers) - 1
    followers: list[list[int]] = [[] for _ in transfers]
    for index, transfer in enumerate(transfers):
        for before in transfer.after:
            followers[before].append(last - index)
    return [
        LinkTransfer(
            torus.opposite(transfers[index].link), transfers[index].nbytes, tuple(followers[index]), ranks[index]
        )
        for index in reversed(range(len(transfers)))
    ]


def _after(
    reducing: list[LinkTransfer], gathering: list[LinkTransfer], trees: list[int], ranks: list[float]
) -> list[LinkTransfer]:
    """``gathering`` with new ranks, to follow ``reducing``, which is the same backwards: roots wait for their sums."""
    last, base = len(gathering) - 1, len(reducing)
    roots: dict[int, list[int]] = {}
    for index, (transfer, tree) in enumerate(zip(gathering, trees, strict=True)):
        if not transfer.after:
            roots.setdefault(tree, []).append(last - index)
    return [
        transfer._replace(after=tuple(base + before for before in transfer.after) or tuple(roots[tree]), rank=rank)
        for transfer, tree, rank in zip(gathering, trees, ranks, strict=True)
    ]


def _orders(kind: str, members: _Members) -> list[tuple[tuple[int, ...], float]]:
    """Orders of the axes to spread along, and the share of each shard that takes it: the busiest axis carries least."""
    axes = [axis for axis, size in enumerate(members.size) if size > 1]
    orders = list(permutations(axes))
    load = np.zeros((len(orders), len(members.size)))
    for row, order in enumerate(orders):
        gathered = 1.0
        for axis in order:
            size, ring = members.size[axis], members.ring[axis]
            # What the busiest link of this axis carries, in shards: an AllReduce of a line takes each link both ways.
            ways = 2 if ring and members.bidirectional else 1
            busiest = (size - 1) / ways
            if kind == "all_reduce":
                busiest = 2 * (size - 1) / ways if ring else size
            load[row, axis] = gathered * busiest * members.stride[axis]
            gathered *= size
    shares = _least_busy(load[:, axes])
    return [(order, float(share)) for order, share in zip(orders, shares, strict=True) if share > 1e-12]


def _least_busy(load: Floats) -> Floats:
    """Shares of some orders, adding up to 1, for which the largest sum of ``load`` [orders, axes] is least.

    A linear programme so small that every vertex is tried: k orders that load k axes equally.
    """
    best, least = np.ones(len(load)) / len(load), np.inf
    for count in range(1, load.shape[1] + 1):
        for used, level in product(combinations(range(len(load)), count), combinations(range(load.shape[1]), count)):
            # Unknown are the shares and the common load; known that each axis has it and that the shares add up to 1.
            system = np.ones((count + 1, count + 1))
            system[:count, :count], system[:count, count], system[count, count] = load[np.ix_(used, level)].T, -1.0, 0.0
            if abs(np.linalg.det(system)) < 1e-9:
                continue
            shares = np.zeros(len(load))
            shares[list(used)] = np.linalg.solve(system, np.eye(count + 1)[count])[:count]
            busiest = float((shares @ load).max())
            if shares.min() > -1e-12 and busiest < least * (1 - 1e-12):
                best, least = np.maximum(shares, 0.0), busiest
    return best


def _messages(torus: Torus, members: _Members, pairs: Floats, chunks: int) -> list[LinkTransfer]:
    """Bytes from each member to each other one, [N, N], along one axis after the other."""
    axes = len(members.size)
    rotations = [tuple((first + step) % axes for step in range(axes)) for first in range(axes)]
    places = np.stack(np.unravel_index(np.arange(len(pairs)), members.size), axis=-1).tolist()
    transfers: list[LinkTransfer] = []
    for _, (source, target) in product(range(chunks), np.argwhere(pairs > 0).tolist()):
        order = rotations[(sum(places[source]) + sum(places[target])) % axes]
        legs = {
            tuple((axis, *members.towards(axis, places[source][axis], places[target][axis], flip)) for axis in order)
            for flip in members.flips
        }
        for leg, chips in product(sorted(legs), members.groups):
            hops = [(axis, way, count * members.stride[axis]) for axis, way, count in leg]
            path = walk(torus, chips[source], hops)
            chain(transfers, torus, path, float(pairs[source, target]) / len(legs) / chunks)
    return transfers
