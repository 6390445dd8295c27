"""What collectives cost: bounds from links and hops, for one group or for many layouts at once.

Everything follows from the span of the group (``rooftop.arrays.Span``): through each physical axis a device can take
in so many bytes/s. Prices are split into seconds per byte and seconds of latency, so that a sweep computes them once
per layout and every row costs one multiplication.

With V the bytes gathered in the group and S a set of its physical axes with n_S devices and rate w_S together, at
least V (n_S - 1)/N must enter each device through S; and the orders in which the axes can be gathered reach the
largest of these bounds (the loads form a base polytope). So AllGather = max over S of V (n_S - 1) / (N w_S), which is
(N-1)/N V/(w ports) on a single ring, as in design and in chapter 3 of the book.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Floats, Span
from rooftop.errors import unknown
from rooftop.ledger import COLLECTIVES, Number

RESOURCES = ("ici", "dcn")


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of one kind of collective over one group, by network resource; all [...] over layouts.

    ``seconds_per_byte`` multiplies the collective's logical payload (see ``rooftop.ledger.Collective``);
    ``latency_s`` is hops times the hop latency; ``wire_per_byte`` is what one device sends per byte of payload.
    """

    kind: str
    seconds_per_byte: dict[str, Floats]
    latency_s: dict[str, Floats]
    wire_per_byte: Floats

    def map(self, change: Callable[[Floats], Floats]) -> Price:
        """The price with every array changed in the same way (indexed, reshaped, reduced)."""
        return Price(
            kind=self.kind,
            seconds_per_byte={name: change(value) for name, value in self.seconds_per_byte.items()},
            latency_s={name: change(value) for name, value in self.latency_s.items()},
            wire_per_byte=change(self.wire_per_byte),
        )

    def bound_s(self, payload_bytes: Number) -> dict[str, Number]:
        """Lower bound on the duration by resource: the larger of latency and bandwidth."""
        return {
            resource: np.maximum(payload_bytes * rate, self.latency_s[resource])
            for resource, rate in self.seconds_per_byte.items()
        }

    def expected_s(self, payload_bytes: Number, efficiency: dict[str, float], start_s: float) -> Number:
        """Expected duration: start, hops and bytes at the named efficiency, one after another."""
        total: Number = 0.0
        for resource, rate in self.seconds_per_byte.items():
            seconds = start_s + self.latency_s[resource] + payload_bytes * rate / efficiency[resource]
            total = total + np.where(rate > 0, seconds, 0.0)
        return total


def price(kind: str, group: Span) -> Price:
    """The price of ``kind`` over ``group``. Groups over ICI and DCN are gathered over DCN first (least bytes there).

    Source: chapter 3 of the book for rings, the GPU chapter for switches; AllToAll by counting the bytes that cross
    the middle link of a line or a ring of A chips (A V/(4 N w) open, A V/(8 N w) wrapped for even A).
    """
    if kind not in COLLECTIVES:
        raise unknown("collective", kind, COLLECTIVES)
    on = {resource: np.array([axis.resource == resource for axis in group.physical]) for resource in RESOURCES}
    devices = {resource: np.prod(group.size, axis=-1, where=mask) for resource, mask in on.items()}
    return Price(
        kind=kind,
        seconds_per_byte={
            resource: _seconds_per_byte(kind, group, mask, 1.0 if resource == "ici" else 1.0 / devices["ici"])
            for resource, mask in on.items()
            if mask.any()
        },
        latency_s={resource: _latency_s(kind, group, mask) for resource, mask in on.items() if mask.any()},
        wire_per_byte=_wire_per_byte(kind, group.devices),
    )


def _seconds_per_byte(kind: str, group: Span, mask: npt.NDArray[np.bool_], share: float | Floats) -> Floats:
    """Seconds per payload byte on one resource; ``share`` is the part of a gather's payload that this resource sees."""
    if kind == "all_to_all":
        return _all_to_all(group, mask)
    if kind == "permute":
        link = np.array([axis.bytes_per_s for axis in group.physical])
        slowest: Floats = np.max(np.where(mask & (group.size > 1), group.stride / link, 0.0), axis=-1)
        return slowest
    rate = group.bytes_per_s
    if kind == "all_reduce":
        # On an open line of A chips a pipelined AllReduce takes V/w, not the 2 (A-1)/A V/w of a ReduceScatter and an
        # AllGather one after the other: the reduction flows one way while the result flows back.
        open_gain = 2 * (group.size - 1) / np.maximum(group.size, 1)
        line = ~group.ring & np.array([axis.kind == "torus" for axis in group.physical])
        rate = np.where(line & (group.size > 1), rate * open_gain, rate)
    gather = share * _all_gather(group.size, rate, mask)
    return 2 * gather if kind == "all_reduce" else gather


def _all_gather(size: npt.NDArray[np.int64], rate: Floats, mask: npt.NDArray[np.bool_]) -> Floats:
    columns = np.flatnonzero(mask)
    total = np.prod(size[..., columns], axis=-1)
    worst: Floats = np.zeros(size.shape[:-1])
    for count in range(1, len(columns) + 1):
        for chosen in combinations(columns, count):
            picked = list(chosen)
            used = size[..., picked] > 1
            entering = (np.prod(size[..., picked], axis=-1) - 1) / total
            through = np.sum(np.where(used, rate[..., picked], 0.0), axis=-1)
            worst = np.maximum(worst, entering / np.where(through > 0, through, np.inf))
    return worst


def _all_to_all(group: Span, mask: npt.NDArray[np.bool_]) -> Floats:
    """Seconds per byte of one device's operand: the busiest axis, each carrying every byte its mean distance."""
    link = np.array([axis.bytes_per_s for axis in group.physical])
    torus = np.array([axis.kind == "torus" for axis in group.physical])
    size = group.size
    crossing = np.where(
        torus,
        (size // 2) * ((size + 1) // 2) / size / np.where(group.ring, 2, 1),
        (size - 1) / size,
    )
    slowest: Floats = np.max(np.where(mask & (size > 1), crossing * group.stride / link, 0.0), axis=-1)
    return slowest


def _latency_s(kind: str, group: Span, mask: npt.NDArray[np.bool_]) -> Floats:
    hop_s = np.array([axis.hop_s for axis in group.physical])
    torus = np.array([axis.kind == "torus" for axis in group.physical])
    steps = np.where(torus, np.where(group.ring, group.size // 2, group.size - 1), 1)
    if kind == "permute":
        steps = np.ones_like(steps)
    seconds: Floats = np.sum(np.where(mask & (group.size > 1), steps * group.stride * hop_s, 0.0), axis=-1)
    return 2 * seconds if kind == "all_reduce" else seconds


def _wire_per_byte(kind: str, devices: npt.NDArray[np.int64]) -> Floats:
    others = (devices - 1) / devices
    return {
        "all_gather": others,
        "reduce_scatter": others,
        "all_reduce": 2 * others,
        "all_to_all": others,
        "permute": np.where(devices > 1, 1.0, 0.0),
    }[kind]
