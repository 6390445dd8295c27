"""Costs of any set of messages: bytes over the busiest link by shortest paths, for permutes that are no shifts.

Paths go along one axis after the other; half of the bytes take the axes from first to last and half from last to
first, so that a permutation costs what its inverse costs. On a ring of even length a chip right opposite is reached
both ways round, half the bytes each. Through a switch, between cores and over DCN every device has one port out and
one in. Counting link by link is linear: a message adds its bytes where it enters a row of links and takes them away
where it leaves, and a running sum along the row does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Floats, Ints
from rooftop.core.errors import RooftopError
from rooftop.hardware import PhysicalAxis


@dataclass(frozen=True, kw_only=True)
class Route:
    """Lower bounds on the cost of the messages.

    ``seconds`` is how long the busiest link or port of each network resource ('ici', 'dcn') sends; ``latency_s`` the
    hops of the farthest message, each with its latency, and ``hops`` how many they are.
    """

    seconds: dict[str, float]
    latency_s: float
    hops: int


def route(
    physical: tuple[PhysicalAxis, ...],
    source: npt.ArrayLike,
    target: npt.ArrayLike,
    nbytes: npt.ArrayLike,
) -> Route:
    """The cost of sending ``nbytes`` (one figure or [n]) from ``source`` to ``target``, coordinates [n, P].

    Raises RooftopError if the coordinates do not lie on the physical axes or the shapes do not match.
    """
    sizes = tuple(axis.size for axis in physical)
    start, end = _coordinates("source", source, sizes), _coordinates("target", target, sizes)
    amount = np.asarray(nbytes, float)
    if start.shape != end.shape or amount.shape not in ((), start.shape[:1]) or (amount < 0).any():
        shapes = f"{start.shape}, {end.shape} and {amount.shape}"
        raise RooftopError(
            "messages", shapes, "sources and targets of one shape [n, P], bytes of 0 or more, one or [n]"
        )
    halves = np.broadcast_to(amount / 2, start.shape[:1])
    seconds = {axis.resource: 0.0 for axis in physical}
    for column, axis in enumerate(physical):
        busiest = _busiest(column, axis, sizes, start, end, halves)
        seconds[axis.resource] = max(seconds[axis.resource], busiest / axis.bytes_per_s)
    hops = np.stack([_hops(axis, start[:, at], end[:, at]) for at, axis in enumerate(physical)], axis=-1)
    latency = hops @ np.array([axis.hop_s for axis in physical])
    return Route(
        seconds=seconds,
        latency_s=float(latency.max(initial=0.0)),
        hops=int(hops.sum(axis=-1).max(initial=0)),
    )


def _coordinates(name: str, values: npt.ArrayLike, sizes: tuple[int, ...]) -> Ints:
    places = np.asarray(values, np.int64)
    if places.ndim != 2 or places.shape[1] != len(sizes) or (places < 0).any() or (places >= sizes).any():
        shown = places.tolist() if places.size <= 8 else f"{places.shape}"
        raise RooftopError(name, shown, f"coordinates [n, {len(sizes)}] inside {'x'.join(map(str, sizes))}")
    return places


def _hops(axis: PhysicalAxis, start: Ints, end: Ints) -> Ints:
    """Hops along one axis."""
    if axis.kind != "torus":
        return np.where(start != end, 1, 0)
    ahead: Ints = np.abs(end - start)
    return np.minimum(ahead, axis.size - ahead) if axis.wrapped else ahead


def _busiest(column: int, axis: PhysicalAxis, sizes: tuple[int, ...], start: Ints, end: Ints, halves: Floats) -> float:
    """Bytes over the busiest link (torus) or port (other kinds) of one axis."""
    moving = np.flatnonzero(start[:, column] != end[:, column])
    if not moving.size:
        return 0.0
    start, end, halves = start[moving], end[moving], halves[moving]
    loads: list[Floats] = []
    for turned in (False, True):
        # When a message comes to this axis, those before it in its order are done.
        done = np.arange(len(sizes)) > column if turned else np.arange(len(sizes)) < column
        at = np.where(done, end, start)
        if axis.kind == "torus":
            loads.append(_rows(column, axis, sizes, at, end[:, column], halves))
        else:
            reached = np.where(np.arange(len(sizes)) == column, end, at)
            ports = [np.ravel_multi_index(tuple(place.T), sizes) for place in (at, reached)]
            loads.append(np.stack([np.bincount(port, halves, prod(sizes)) for port in ports]))
    return float(np.sum(loads, axis=0).max())


def _rows(column: int, axis: PhysicalAxis, sizes: tuple[int, ...], at: Ints, end: Ints, halves: Floats) -> Floats:
    """Bytes on every link of one axis, [direction, row, place that it leaves], going down seen in a mirror."""
    size, others = axis.size, tuple(1 if i == column else n for i, n in enumerate(sizes))
    row = np.ravel_multi_index(tuple(np.where(np.arange(len(sizes)) == column, 0, at).T), others)
    begin = at[:, column]
    ahead = (end - begin) % size if axis.wrapped else end - begin
    opposite = axis.wrapped & (2 * ahead == size)
    up = (ahead > 0) & (2 * ahead <= size) if axis.wrapped else ahead > 0
    steps = np.empty((2, prod(others), size + 1))
    for direction, chosen in enumerate((up, ~up | opposite)):
        share = np.where(opposite, halves / 2, halves)[chosen]
        first = begin[chosen] if direction == 0 else size - 1 - begin[chosen]
        hops = ahead[chosen] if direction == 0 else (size - ahead[chosen] if axis.wrapped else -ahead[chosen])
        last, over = first + hops, first + hops - size
        where = row[chosen] * (size + 1)
        # Round the ring: the rest of the way starts again at its beginning.
        round_it = over > 0
        at_link = np.concatenate(
            [where + first, where + np.minimum(last, size), where[round_it], where[round_it] + over[round_it]]
        )
        change = np.concatenate([share, -share, share[round_it], -share[round_it]])
        steps[direction] = np.bincount(at_link, change, prod(others) * (size + 1)).reshape(prod(others), size + 1)
    loads: Floats = np.cumsum(steps, axis=-1)[..., :size]
    return loads
