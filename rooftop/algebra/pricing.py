"""Costs of steps on a mesh: bytes, FLOPs, and seconds by resource.

Three prices, never mixed. ``bound``: peak rates, a collective the larger of its hops and its bytes. ``expected``: the
named fractions of the chip, and a collective's start, hops and bytes one after another. ``book``: the book's forms
for whole shards on even rings (chapter 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from rooftop.algebra.steps import ALL_REDUCE_PARTS, OVERLAPPED_OPS, Step, permuted, shard_order
from rooftop.arrays import Mesh, ShardedArray
from rooftop.arrays.mesh import AxisPiece
from rooftop.core.errors import unknown
from rooftop.core.quantities import dtype_bytes
from rooftop.hardware import Slice
from rooftop.roofline.collectives import Price, levels_overlap, price
from rooftop.roofline.matmul import flops as matmul_flops
from rooftop.roofline.rates import Rates
from rooftop.roofline.routing import Route, route

PRICES: tuple[str, ...] = ("bound", "expected", "book")
#: The axes of a mesh with their pieces: what prices that are kept go by.
Laid = tuple[tuple[str, tuple[AxisPiece, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one step on one device.

    ``bytes`` is the payload as in ``core.ledger.Collective``; ``hbm_bytes`` are the bytes that a multiplication
    reads and writes. ``resources`` has the seconds that each resource is busy, ``latency_s`` those of the hops, and
    ``time_s`` how long the step takes.
    """

    bytes: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    latency_s: float = 0.0
    time_s: float = 0.0

    @property
    def bound(self) -> str:
        """The busiest resource ('' if the step is free)."""
        return max(self.resources, key=lambda name: self.resources[name], default="")


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of steps for arrays with ``dims`` on ``mesh``. ``kind`` is one of ``PRICES``."""

    mesh: Mesh
    dims: Mapping[str, int]
    kind: str = "bound"

    def __post_init__(self) -> None:
        if self.kind not in PRICES:
            raise unknown("level", self.kind, PRICES)

    @cached_property
    def rates(self) -> Rates:
        """Rates of one device."""
        return Rates.of(self.mesh.slice.chip)

    @cached_property
    def _groups(self) -> dict[tuple[str, tuple[str, ...]], Price]:
        return {}

    @cached_property
    def _bytes(self) -> dict[ShardedArray, float]:
        return {}

    @cached_property
    def _shape(self) -> Mapping[str, int]:
        return self.mesh.shape

    @cached_property
    def _laid(self) -> Laid:
        return tuple(self.mesh.axes.items())

    def cost(self, step: Step) -> Cost:
        """The cost of a step. Raises RooftopError where dims do not split evenly or the chip lacks the dtype."""
        if step.op == "einsum":
            return self._einsum(step)
        if step.op in OVERLAPPED_OPS:
            return self._overlapped(step)
        if step.op == "permute":
            return self._permute(step)
        if step.collective is None:
            return Cost()
        payload = step.output if step.op == "all_gather" else step.inputs[0]
        return self._collective(step.op, step.axes, self.bytes(payload))

    def bytes(self, array: ShardedArray) -> float:
        """Bytes of one device's shard. Raises RooftopError where its dims do not split evenly."""
        if array not in self._bytes:
            self._bytes[array] = array.device_bytes(self.dims, self._shape)
        return self._bytes[array]

    def collective_s(self, kind: str, axes: tuple[str, ...], payload: float) -> float:
        """Seconds of a collective, ``payload`` as in ``rooftop.core.ledger.Collective``.

        A permute is the shift to the next device: the least that any permute over these axes takes.
        """
        return self._collective(kind, axes, payload).time_s

    def _collective(self, kind: str, axes: tuple[str, ...], payload: float) -> Cost:
        key = kind, tuple(sorted(axes))
        if key not in self._groups:
            form = "book" if self.kind == "book" else "exact"
            self._groups[key] = _price(self.mesh.slice, self._laid, *key, form)
        group = self._groups[key]
        busy = {name: float(seconds) for name, seconds in group.bound_s(payload).items() if seconds > 0}
        if self.kind == "expected":
            seconds = float(group.expected_s(payload, self.rates.network(kind)))
        else:
            seconds = float(group.least_s(payload))
        latency_s = float(sum(group.latency_s.values()))
        return Cost(bytes=payload, resources=busy, latency_s=latency_s, time_s=seconds)

    def _permute(self, step: Step) -> Cost:
        source, target = step.inputs[0], step.output
        before, after = (shard_order(array.axes, array.unreduced, self._shape) for array in (source, target))
        return self.permute(before, after, self.bytes(source))

    def permute(self, before: tuple[str, ...], after: tuple[str, ...], payload: float) -> Cost:
        """The cost of a permute between shards of ``payload`` bytes whose numbers count these axes, slowest first."""
        # Which shard goes where depends on neither the array nor its dims, and back is as far as there.
        routed = _route(self.mesh.slice, self._laid, *sorted((before, after)))
        busy = {name: payload * seconds for name, seconds in routed.seconds.items() if seconds > 0}
        if self.kind == "expected":
            network = self.rates.network("permute")
            start_s, share = network.at(None)
            busy_s = self._together(busy[name] / float(share[name]) for name in busy)
            seconds = float(start_s) * bool(busy) + network.within.hops * routed.latency_s + busy_s
        else:
            seconds = max(self._together(busy.values()), routed.latency_s)
        return Cost(bytes=payload, resources=busy, latency_s=routed.latency_s, time_s=seconds)

    def _together(self, parts: Iterable[float]) -> float:
        """Seconds of parts of a permute on different networks."""
        return max(parts, default=0.0) if levels_overlap(self.mesh.slice.physical_axes) else sum(parts)

    def matmul_sizes(self, step: Step, cut: str = "", pieces: int = 1) -> tuple[int, int, int, int]:
        """The local multiplication of a plain einsum step as so many matmuls [m, k] x [k, n]: (count, m, k, n).

        With ``cut``, of one of the ``pieces`` that this dim is cut into.
        """
        left, right = step.inputs
        sizes = self._local(left) | self._local(right)
        if cut:
            sizes[cut] = max(1, sizes[cut] // pieces)
        shared, out = set(left.dims) & set(right.dims), set(step.output.dims)
        count, k = (prod(sizes[dim] for dim in dims) for dims in (shared & out, shared - out))
        m, n = (prod(sizes[dim] for dim in set(array.dims) - shared) for array in (left, right))
        return count, m, k, n

    def _einsum(self, step: Step) -> Cost:
        count, m, k, n = self.matmul_sizes(step)
        moved = sum(map(self.bytes, (*step.inputs, step.output)))
        flops, rates = float(count * matmul_flops(m, k, n)), self.rates
        dtype = self._matmul_dtype(step)
        peak_s = flops / self.mesh.slice.device_flops_per_s(dtype)
        busy = {"mxu": peak_s, "hbm": moved / rates.hbm_bytes_per_s}
        seconds = max(busy.values())
        if self.kind == "expected":
            # A batch of matmuls is priced as so many of them, each of its own shape.
            seconds = max(count * float(rates.matmul_s(m, k, n, dtype)), float(rates.hbm_s(moved)))
        return Cost(flops=flops, hbm_bytes=moved, resources=busy, time_s=seconds)

    def _overlapped(self, step: Step) -> Cost:
        """A collective matmul over N devices: N pieces are multiplied while N - 1 transfers run next to them.

        The first piece of a gather is there from the start, and the last of a scatter has nowhere to go, so one piece
        stands alone. An AllReduce scatters its parts one after the other; each is gathered while the next one is
        multiplied and shares the links with it, and the last one's gather hides behind nothing.
        """
        before, after = step.parts
        plain, communication = (before, after) if before.op == "einsum" else (after, before)
        whole, devices = self._einsum(plain), self.mesh.size(*step.axes)
        moved = self.cost(communication)
        payload, parts = moved.bytes, 1
        if communication.op == "all_reduce":
            parts = ALL_REDUCE_PARTS
        piece_s = self._piece_s(plain, whole, step.dims[0], devices * parts)
        hop_s = self._once_round_s(step, payload / parts) / (devices - 1)
        alone_s = piece_s + (devices - 1) * max(piece_s, hop_s)
        seconds = alone_s
        if parts > 1:
            both_s = piece_s + (devices - 1) * max(piece_s, 2 * hop_s)
            seconds += (parts - 1) * both_s + (devices - 1) * hop_s
        return Cost(
            bytes=payload,
            flops=whole.flops,
            hbm_bytes=whole.hbm_bytes,
            resources={**whole.resources, **moved.resources},
            latency_s=moved.latency_s,
            time_s=seconds,
        )

    def _piece_s(self, plain: Step, whole: Cost, cut: str, pieces: int) -> float:
        """Seconds of one of the pieces of a multiplication: expected ones are slower than their share of the whole."""
        if self.kind != "expected":
            return whole.time_s / pieces
        count, m, k, n = self.matmul_sizes(plain, cut, pieces)
        multiplied_s = count * float(self.rates.matmul_s(m, k, n, self._matmul_dtype(plain)))
        return max(multiplied_s, float(self.rates.hbm_s(whole.hbm_bytes)) / pieces)

    def _once_round_s(self, step: Step, payload: float) -> float:
        """Seconds in which shards of ``payload`` go once round the ring of a collective matmul."""
        group = self.mesh.span(*step.axes)
        if not step.bidirectional:
            # One way round a ring takes as long as there and back on a line.
            group = replace(group, ring=np.zeros_like(group.ring))
        priced = price("all_gather", group)
        if self.kind == "expected":
            return float(priced.expected_s(payload, self.rates.network("permute").started))
        return float(priced.least_s(payload))

    def _matmul_dtype(self, step: Step) -> str:
        left, right = step.inputs
        return max(left.dtype, right.dtype, key=dtype_bytes)

    def _local(self, array: ShardedArray) -> dict[str, int]:
        return dict(zip(array.dims, array.local_shape(self.dims, self._shape), strict=True))


@lru_cache(maxsize=1024)
def _price(slice_: Slice, laid: Laid, kind: str, axes: tuple[str, ...], form: str) -> Price:
    """The price of a collective over axes of the mesh ``laid`` on a slice."""
    return price(kind, Mesh(slice_, dict(laid)).span(*axes), form=form)


@lru_cache(maxsize=4096)
def _route(slice_: Slice, laid: Laid, before: tuple[str, ...], after: tuple[str, ...]) -> Route:
    """The way of a permute on the mesh ``laid`` on a slice, a byte from each device."""
    mesh = Mesh(slice_, dict(laid))
    places = mesh.device_coordinates().reshape(-1, len(slice_.physical_axes))
    pairs = permuted(before, after, mesh.shape)
    return route(slice_.physical_axes, places[pairs[:, 0]], places[pairs[:, 1]], 1.0)
