"""Messages from chip to chip of a torus, along shortest paths that turn once per axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.simulate.network.torus import DOWN, UP, LinkTransfer, Torus

Floats = npt.NDArray[np.float64]
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
            # The level to which so many bytes fill the emptiest ports: the lowest that some number of them gives.
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
