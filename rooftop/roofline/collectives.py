"""Costs of collectives: bounds from links and hops, for one group or for many layouts at once.

Everything follows from the span of the group (``rooftop.arrays.Span``): through each physical axis a device can take
in so many bytes/s. Prices are split into seconds per byte and seconds of latency, so that a sweep computes them once
per layout and every row costs one multiplication.

With V the bytes gathered in the group and S a set of its physical axes with n_S devices and rate w_S together, at
least V (n_S - 1)/N must enter each device through S; and the orders in which the axes can be gathered reach the
largest of these bounds (the loads form a base polytope). So AllGather = max over S of V (n_S - 1) / (N w_S), which is
(N-1)/N V/(w ports) on a single ring. ``rooftop.simulate`` reaches these bounds link by link.

On GPUs the node (an NVLink domain) and the network between nodes are levels of a tree. A collective is pipelined
through them and takes at least as long as the slower one: with M nodes of n GPUs, V max((n-1)/n / W_GPU, (M-1)/M /
W_node), W_node = n times the network's rate of a GPU. NCCL gathers and scatters in rings through all GPUs, which send
(M n - 1)/(M n) V over the network: that is expected. Between TPU slices XLA's programs do one level after the other.

The book (chapter 3) counts whole shards on even rings, V/W for W the bytes/s both ways: ``form="book"``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import AxisSpan, Floats
from rooftop.arrays.rings import closes
from rooftop.core.errors import unknown
from rooftop.core.ledger import COLLECTIVES, Number
from rooftop.hardware import CollectiveFit, PhysicalAxis

RESOURCES = ("ici", "dcn")
FORMS = ("exact", "book")


@dataclass(frozen=True, kw_only=True)
class NetworkRates:
    """The networks as one kind of collective can use them: ``within`` slices, and the share of DCN's rate."""

    within: CollectiveFit
    dcn: float

    def at(self, ranks: Number | None) -> tuple[Number, dict[str, Number]]:
        """The start of a collective, and its share of each network's rate, for groups of ``ranks`` in a slice."""
        start_s, share = self.within.at(ranks)
        return start_s, {"ici": share, "dcn": self.dcn}

    @property
    def started(self) -> NetworkRates:
        """The network of collectives that have started."""
        return replace(self, within=replace(self.within, start_s=(0.0,) * len(self.within.ranks), small=None))

    @property
    def protocols(self) -> tuple[NetworkRates, ...]:
        """The network as each protocol uses it: that for many bytes, and that for few if there is one."""
        small = self.within.small
        return (self,) if small is None else (self, replace(self, within=small))


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of one kind of collective over one group, by network resource; all [...] over layouts.

    ``seconds_per_byte`` multiplies the collective's logical payload (see ``rooftop.core.ledger.Collective``);
    ``latency_s`` is the fewest hops by which every device can have heard of every other (for a permute, its
    neighbour) times the hop latency; ``wire_per_byte`` is what one device sends per byte of payload. ``in_switch`` is
    the least that a byte can take where switches sum: bounds allow for it, expectations do not. ``in_rings``: what a
    byte takes in rings through all GPUs of several nodes: expectations have it, bounds do not. ``pipelined``: the
    networks work at once, on parts of the payload. ``ranks`` are the devices of a group within a slice; None where
    groups are mixed.
    """

    kind: str
    seconds_per_byte: dict[str, Floats]
    latency_s: dict[str, Floats]
    wire_per_byte: Floats
    in_switch: dict[str, Floats] = field(default_factory=dict)
    in_rings: dict[str, Floats] = field(default_factory=dict)
    pipelined: bool = False
    ranks: Floats | None = None

    def map(self, change: Callable[[Floats], Floats]) -> Price:
        """The price with every array changed in the same way (indexed, reshaped, reduced)."""
        return Price(
            kind=self.kind,
            seconds_per_byte={name: change(value) for name, value in self.seconds_per_byte.items()},
            latency_s={name: change(value) for name, value in self.latency_s.items()},
            wire_per_byte=change(self.wire_per_byte),
            in_switch={name: change(value) for name, value in self.in_switch.items()},
            in_rings={name: change(value) for name, value in self.in_rings.items()},
            pipelined=self.pipelined,
            ranks=None if self.ranks is None else change(self.ranks),
        )

    def over(self, resources: Collection[str]) -> Price:
        """The price of the part that some network resources do."""
        return replace(
            self,
            seconds_per_byte={name: rate for name, rate in self.seconds_per_byte.items() if name in resources},
            latency_s={name: seconds for name, seconds in self.latency_s.items() if name in resources},
            in_switch={name: rate for name, rate in self.in_switch.items() if name in resources},
            in_rings={name: rate for name, rate in self.in_rings.items() if name in resources},
        )

    def scaled(self, shares: Mapping[str, Number]) -> Price:
        """The price where each network carries such a share of the bytes that it is priced for; 1 where none is named.

        Fixed latencies stay.
        """
        if not shares:
            return self
        return replace(
            self, seconds_per_byte={name: rate * shares.get(name, 1.0) for name, rate in self.seconds_per_byte.items()}
        )

    def bound_s(self, payload_bytes: Number) -> dict[str, Number]:
        """Lower bound on the duration by resource: the larger of latency and bandwidth."""
        return {
            resource: np.maximum(payload_bytes * rate, self.latency_s[resource])
            for resource, rate in (self.seconds_per_byte | self.in_switch).items()
        }

    def least_s(self, payload_bytes: Number) -> Number:
        """Lower bound on the duration over all networks: the longest of them, or their sum if each waits for others."""
        return self.together(list(self.bound_s(payload_bytes).values()))

    def together(self, parts: Sequence[Number]) -> Number:
        """Seconds of parts on different networks together."""
        total: Number = 0.0
        for part in parts:
            total = np.maximum(total, part) if self.pipelined else total + part
        return total

    def expected_s(self, payload_bytes: Number, network: NetworkRates) -> Number:
        """Expected duration: start, hops and bytes, one after another, by the faster protocol."""
        fastest: Number | None = None
        for protocol in network.protocols:
            fixed_s, seconds_per_byte = self.expected_line(protocol)
            seconds = fixed_s + payload_bytes * seconds_per_byte
            fastest = seconds if fastest is None else np.minimum(fastest, seconds)
        assert fastest is not None
        return fastest

    def expected_line(self, network: NetworkRates) -> tuple[Number, Number]:
        """Expected seconds of start and hops, and seconds per byte of payload, by the protocol for many bytes."""
        # The AllReduce of fewest hops gathers whole operands. The one of fewest bytes, expected here, reduces and then
        # gathers.
        passes = 2 if self.kind == "all_reduce" else 1
        start_s, share = network.at(self.ranks)
        fixed_s: Number = 0.0
        rates = self.seconds_per_byte | self.in_rings
        for resource, rate in rates.items():
            hops_s = passes * network.within.hops * self.latency_s[resource]
            fixed_s = fixed_s + np.where(rate > 0, start_s + hops_s, 0.0)
        return fixed_s, self.together([rate / share[name] for name, rate in rates.items()])


def joined_price(prices: Sequence[Price]) -> Price:
    """Prices of one kind over groups of slices of one chip, one after another; a network that one lacks costs it 0."""

    def joined(tables: Sequence[dict[str, Floats]]) -> dict[str, Floats]:
        names = dict.fromkeys(name for table in tables for name in table)
        return {
            name: np.concatenate(
                [
                    table.get(name, np.zeros_like(price.wire_per_byte))
                    for table, price in zip(tables, prices, strict=True)
                ]
            )
            for name in names
        }

    return Price(
        kind=prices[0].kind,
        seconds_per_byte=joined([price.seconds_per_byte for price in prices]),
        latency_s=joined([price.latency_s for price in prices]),
        wire_per_byte=np.concatenate([price.wire_per_byte for price in prices]),
        in_switch=joined([price.in_switch for price in prices]),
        in_rings=joined([price.in_rings for price in prices]),
        pipelined=any(price.pipelined for price in prices),
        ranks=np.concatenate([price.ranks for price in prices if price.ranks is not None]),
    )


def levels_overlap(physical: Sequence[PhysicalAxis]) -> bool:
    """True if the levels of a network work at once: those of GPUs, within nodes and between them."""
    return any(axis.kind == "switch" for axis in physical)


def price(kind: str, group: AxisSpan, form: str = "exact") -> Price:
    """The price of ``kind`` over ``group``. Groups over ICI and DCN are gathered over DCN first (least bytes there).

    Source: chapter 3 of the book for rings, the GPU chapter for switches; AllToAll by counting the bytes that cross
    the middle link of a line or a ring of A chips (A V/(4 N w) open, A V/(8 N w) wrapped for even A). A permute is
    the shift to the next device by shortest paths; any other is the business of ``rooftop.roofline.routing``. Between
    TPU slices an AllToAll and a permute use DCN alone.

    ``form="book"`` gives the book's own figures on links of a torus, which are no bounds: V over what all axes used
    take in, (N-1)/N V where one of them is a line; an AllReduce twice that, an AllToAll of N operands a quarter of V.
    Raises RooftopError for an unknown collective or form.
    """
    if kind not in COLLECTIVES:
        raise unknown("collective", kind, COLLECTIVES)
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    on = {resource: np.array([axis.resource == resource for axis in group.physical]) for resource in RESOURCES}
    devices = {resource: np.prod(group.size, axis=-1, where=mask) for resource, mask in on.items()}
    latency_s = {resource: _latency_s(kind, group, mask) for resource, mask in on.items() if mask.any()}
    seconds = {
        resource: _seconds_per_byte(kind, group, mask, 1.0 if resource == "ici" else 1.0 / devices["ici"])
        for resource, mask in on.items()
        if mask.any()
    }
    in_switch = {}
    if kind == "all_reduce" and form == "exact" and any(axis.reduces for axis in group.physical):
        in_switch["ici"] = np.minimum(seconds["ici"], _in_switch(group))
    in_rings = {}
    ringed = kind in ("all_gather", "reduce_scatter") and form == "exact" and levels_overlap(group.physical)
    if ringed and "dcn" in seconds:
        nodes = np.maximum(devices["dcn"], 2)
        longer = (1 - 1 / group.devices) / (1 - 1 / nodes)
        in_rings["dcn"] = seconds["dcn"] * np.where(devices["dcn"] > 1, longer, 1.0)
    if kind in ("all_to_all", "permute"):
        # XLA:TPU hands all of one that crosses slices to the hosts, what stays in a slice too.
        crosses = np.prod(group.size, axis=-1, where=np.array([axis.name == "dcn" for axis in group.physical])) > 1
        for of_resource in (seconds, latency_s):
            if "ici" in of_resource:
                of_resource["ici"] = np.where(crosses, 0.0, of_resource["ici"])
    if form == "book" and kind != "permute":
        seconds["ici"] = _book(kind, group, on["ici"], seconds["ici"])
        latency_s["ici"] = latency_s["ici"] * (2 if kind == "all_reduce" else 1)
    return Price(
        kind=kind,
        seconds_per_byte=seconds,
        latency_s=latency_s,
        wire_per_byte=_wire_per_byte(kind, group.devices),
        in_switch=in_switch,
        in_rings=in_rings,
        pipelined=levels_overlap(group.physical),
        ranks=devices["ici"].astype(np.float64),
    )


def ring_hop(group: AxisSpan) -> Price:
    """The price of a hop of a ring through all devices of ``group``: each sends so many bytes to its neighbours.

    Half of them go each way round where the ring closes (``rooftop.arrays.rings``), elsewhere all go one way.
    """
    hop, ways = price("permute", group), np.where(closes(group), 2.0, 1.0)
    return replace(hop, seconds_per_byte={name: rate / ways for name, rate in hop.seconds_per_byte.items()})


def _book(kind: str, group: AxisSpan, mask: npt.NDArray[np.bool_], exact: Floats) -> Floats:
    """Seconds per payload byte in the book's form where only links of a torus are used, elsewhere as they were."""
    torus = np.array([axis.kind == "torus" for axis in group.physical])
    used = mask & (group.size > 1)
    devices = np.prod(group.size, axis=-1, where=mask)
    through = np.sum(np.where(used, group.bytes_per_s, 0.0), axis=-1)
    rings = np.all(group.ring | ~used, axis=-1)
    payload = {
        "all_gather": np.where(rings, 1.0, (devices - 1) / devices),
        "reduce_scatter": np.where(rings, 1.0, (devices - 1) / devices),
        "all_reduce": np.where(rings, 2.0, 2 * (devices - 1) / devices),
        "all_to_all": devices / 4,
    }[kind]
    linked = np.any(used, axis=-1) & np.all(torus | ~used, axis=-1)
    seconds: Floats = np.where(linked, payload / np.where(through > 0, through, np.inf), exact)
    return seconds


def _seconds_per_byte(kind: str, group: AxisSpan, mask: npt.NDArray[np.bool_], share: float | Floats) -> Floats:
    """Seconds per payload byte on one resource; ``share`` is the part of a gather's payload that this resource sees."""
    if kind == "all_to_all":
        return _all_to_all(group, mask)
    if kind == "permute":
        link = np.array([axis.bytes_per_s for axis in group.physical])
        # On a ring of two the next device lies both ways round.
        ways = np.where(group.ring & (group.size == 2), 2, 1)
        slowest: Floats = np.max(np.where(mask & (group.size > 1), group.stride / ways / link, 0.0), axis=-1)
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
    # An axis that no group extends along adds nothing to a set.
    columns = np.flatnonzero(mask & (size.reshape(-1, size.shape[-1]) > 1).any(axis=0))
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


def _all_to_all(group: AxisSpan, mask: npt.NDArray[np.bool_]) -> Floats:
    """Seconds per byte of one device's operand: the busiest axis, each carrying every byte its mean distance.

    For M nodes of n GPUs: (n-1)/(n M) over a GPU's rate into its node, (M-1)/M over its rate into the network.
    """
    link = np.array([axis.bytes_per_s for axis in group.physical])
    torus = np.array([axis.kind == "torus" for axis in group.physical])
    size = group.size
    # A GPU sends what is for other nodes straight to them: a switch sees a node's share of the messages.
    switch, outer = (np.array([axis.kind == kind for axis in group.physical]) for kind in ("switch", "dcn"))
    nodes = np.where(switch, np.prod(size, axis=-1, where=outer)[..., None], 1)
    crossing = np.where(
        torus,
        (size // 2) * ((size + 1) // 2) / size / np.where(group.ring, 2, 1),
        (size - 1) / size / nodes,
    )
    slowest: Floats = np.max(np.where(mask & (size > 1), crossing * group.stride / link, 0.0), axis=-1)
    return slowest


def _in_switch(group: AxisSpan) -> Floats:
    """Seconds per byte of an operand that switches sum: every device sends each byte once, and gets each back once."""
    switch = np.array([axis.kind == "switch" for axis in group.physical])
    sends = np.where(switch & (group.size > 1), 1.0 / group.bytes_per_s, 0.0)
    seconds: Floats = np.max(sends, axis=-1)
    return seconds


def _latency_s(kind: str, group: AxisSpan, mask: npt.NDArray[np.bool_]) -> Floats:
    hop_s = np.array([axis.hop_s for axis in group.physical])
    torus = np.array([axis.kind == "torus" for axis in group.physical])
    steps = np.where(torus, np.where(group.ring, group.size // 2, group.size - 1), 1)
    if kind == "permute":
        steps = np.ones_like(steps)
    seconds: Floats = np.sum(np.where(mask & (group.size > 1), steps * group.stride * hop_s, 0.0), axis=-1)
    return seconds


def _wire_per_byte(kind: str, devices: npt.NDArray[np.int64]) -> Floats:
    others = (devices - 1) / devices
    return {
        "all_gather": others,
        "reduce_scatter": others,
        "all_reduce": 2 * others,
        "all_to_all": others,
        "permute": np.where(devices > 1, 1.0, 0.0),
    }[kind]
