"""Work and its priced rows, shared by training and serving plans.

A planner describes a step as ``Work``, the FLOPs, bytes and ``Transfer``s of one scope in one phase. How much of a
transfer hides differs between training and serving (``plan.training.pricing``, ``plan.serving.pricing``); bounds, bytes
and rows do not, and are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.ledger import Collective, CollectiveKind, Ledger, Number, Resource, Row
from rooftop.core.scopes import Phase
from rooftop.roofline.collectives import Price
from rooftop.roofline.rates import Rates

#: Progress of a search: (done, in all, a label).
OnProgress: TypeAlias = Callable[[int, int, str], None]
#: A collective, or a full rotation round a ring.
TransferKind = CollectiveKind | Literal["permute_ring"]
#: The assumption that says how much of a transfer hides. In training plans the share is settable by this name; in
#: serving plans a 'critical' transfer is paid but for its latency, and a 'ring' hides behind attention.
Hiding = Literal[
    "weight_gather",
    "gradient_scatter",
    "gradient_all_reduce",
    "tensor",
    "context",
    "all_to_all",
    "stage",
    "offload",
    "critical",
    "ring",
]
#: The part of a model whose work a row is, where pipeline stages share it: the stages' own layers, what the first or
#: the last stage does alone, and what stages send.
StagePart = Literal["layers", "first", "last", "sends"]
#: The memory that a plan counts on: that which runtimes leave usable, or by the book's arithmetic.
Bounds = Literal["usable", "book"]
BOUNDS: tuple[Bounds, ...] = get_args(Bounds)
#: Transfers between two computations that depend on each other.
CRITICAL: frozenset[Hiding] = frozenset({"tensor", "all_to_all", "critical"})
#: ``Transfer.when`` of a transfer that takes place in any case.
ALWAYS = 1.0


def unless(condition: Number) -> Number:
    """``Transfer.when`` of a transfer that takes place where ``condition`` is 0."""
    return 1.0 - condition if np.any(condition) else ALWAYS


@dataclass(frozen=True, kw_only=True)
class RingSteps:
    """A transfer as hops round a ring next to a matmul in as many pieces, where ``on`` is 1.

    Each of the ``members`` sends a shard in each hop, while a matmul of ``beside_s`` runs. ``sums`` travel, not shards:
    two of them alternate, each next to half of the matmul. ``pieces`` are those of a kernel whose transfers wait for
    nothing but their own piece; 0 for programs as XLA:TPU orders them. ``at_once``: it starts every hop when what the
    hop sends is there, as on TPU7x.
    """

    on: Number
    members: Number
    beside_s: Number
    sums: bool
    pieces: int = 0
    at_once: bool = False

    def exposed_s(self, hop_s: Number, closed: Number) -> Number:
        """Seconds in which the matmul waits; ``closed`` is 1 where a ring goes both ways round.

        XLA:TPU orders a program as if matmuls lasted twice as long as they do: it starts a shard's hop with half of
        the matmul left, and a sum's hop when the other sum has arrived. The device's own term hides the
        last hops. Of sums that start ``at_once`` two are under way, and half of the matmul hides the time between both.
        """
        hops: Number = np.maximum(self.members - 1, 0)
        seconds: Number
        if self.pieces:
            # A gather's own shard comes first, and hides the first hop. Of a scatter nothing hides the last piece.
            sent_s, multiplied_s = hops * hop_s, (self.members if self.sums else hops) * self.beside_s
            last = 1 / self.pieces if self.sums else 0.0
            seconds = last * sent_s + (1 - last) * np.maximum(sent_s - multiplied_s, 0.0)
            return seconds
        if not self.sums:
            seconds = hops * np.maximum(hop_s - self.beside_s / (1 if self.at_once else 2), 0.0)
            return seconds
        one_sum_s = hop_s * (1 + closed) / 2
        waits = (1 if self.at_once else 2) * np.maximum(one_sum_s - self.beside_s / 2, 0.0)
        seconds = np.maximum(hops - 1, 0) * waits + np.minimum(hops, 1) * np.maximum(hop_s - self.beside_s, 0.0)
        return seconds


@dataclass(frozen=True)
class Transfer:
    """A collective to be priced, over its axes; kind 'permute_ring' is a full rotation.

    ``hides`` names the assumption that it falls under; ``when`` is 1 where it takes place and 0 where it does not.
    ``pieces`` start one by one; less than 1 piece is a part of one that starts once. ``summed`` is 1 where everything
    is summed on every device instead of scattered. A ``ring`` is how a collective matmul does it. ``seconds``: what is
    expected of the kernel that does it, where that was measured. ``shares``: what each network carries of the bytes
    that the collective has it carry.
    """

    kind: TransferKind
    axes: tuple[str, ...]
    payload: Number
    hides: Hiding
    when: Number = ALWAYS
    pieces: Number = 1.0
    summed: Number = 0.0
    ring: RingSteps | None = None
    seconds: Number | None = None
    shares: Mapping[str, Number] = field(default_factory=dict)

    @property
    def priced_as(self) -> CollectiveKind:
        """The collective whose price it has: a rotation in both directions moves what an AllGather moves."""
        return "all_gather" if self.kind == "permute_ring" else self.kind

    def collective(self, price: Price, expected_s: Number, exposed_s: Number) -> Collective:
        """The collective of a row, by its price."""
        price = price.scaled(self.shares)
        wire = self.when * self.payload * price.wire_per_byte
        time_s = {resource: self.when * seconds for resource, seconds in price.bound_s(self.payload).items()}
        rotation = self.kind == "permute_ring"
        return Collective(
            kind="permute" if self.kind == "permute_ring" else self.kind,
            axes=self.axes,
            bytes=wire if rotation else self.when * self.payload,
            wire_bytes=wire,
            critical=self.hides in CRITICAL,
            time_s=time_s,
            expected_s=expected_s,
            exposed_s=exposed_s,
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """A row before overlaps are known. ``matmul_s`` is the expected time of its matmuls or kernel.

    ``hbm_bytes`` move while the matmuls run, ``elementwise_bytes`` in passes of their own. ``count`` is that of the
    busiest device; ``skipped``, the share of it that a device skips in the mean, waits for that one. ``part`` is the
    pipeline stage's part that it belongs to. One trip of the loop over layers does ``period`` of them.
    """

    scope: str
    phase: Phase
    count: Number
    formula: str
    flops: Mapping[str, Number] = field(default_factory=dict)
    kernel_flops: Number = 0.0
    vector_flops: Number = 0.0
    hbm_bytes: Number = 0.0
    elementwise_bytes: Number = 0.0
    matmul_s: Number = 0.0
    collectives: tuple[Transfer, ...] = ()
    host_bytes: Number = 0.0
    skipped: Number = 0.0
    part: StagePart = "layers"
    period: int = 1

    @property
    def moved_bytes(self) -> Number:
        """HBM bytes of one execution."""
        return self.hbm_bytes + self.elementwise_bytes

    def row(
        self,
        rates: Rates,
        collectives: tuple[Collective, ...],
        resources: Iterable[Resource],
        *,
        expected_s: Number,
        serial_s: Number,
    ) -> Row:
        """The row of the work as a device does it in the mean, with its bounds on ``resources`` and on the network."""
        time_s: dict[str, Number] = {resource: self._busy_s(resource, rates) for resource in resources}
        for collective in collectives:
            for resource, bound in collective.time_s.items():
                time_s[resource] = time_s.get(resource, 0.0) + bound
        return Row(
            scope=self.scope,
            phase=self.phase,
            count=self.count * (1.0 - self.skipped),
            flops=self.flops,
            kernel_flops=self.kernel_flops,
            vector_flops=self.vector_flops,
            hbm_bytes=self.moved_bytes,
            collectives=collectives,
            time_s=time_s,
            expected_s=expected_s,
            serial_s=serial_s,
            formula=self.formula,
        )

    def _busy_s(self, resource: Resource, rates: Rates) -> Number:
        """Seconds of one execution on a resource of the device, at its peak."""
        match resource:
            case "mxu":
                matmuls = sum((amount / rates.flops_per_s[dtype] for dtype, amount in self.flops.items()), 0.0)
                return matmuls + self.kernel_flops / rates.flops_per_s["bf16"]
            case "vpu":
                return self.vector_flops / rates.vector_flops_per_s
            case "hbm":
                return self.moved_bytes / rates.hbm_bytes_per_s
            case "pcie":
                return self.host_bytes / rates.pcie_bytes_per_s
        raise RooftopError("resource of a device", resource, "mxu, vpu, hbm or pcie")


def paid_s(collectives: Iterable[Collective]) -> tuple[Number, Number]:
    """Seconds of collectives that nothing hides, and all of their seconds."""
    exposed: Number = 0.0
    total: Number = 0.0
    for collective in collectives:
        exposed, total = exposed + collective.exposed_s, total + collective.expected_s
    return exposed, total


def scalar(value: Any) -> float:
    """The one entry of an array of any shape, as a plain number."""
    return float(np.asarray(value, np.float64).reshape(-1)[0])


def scalar_row(row: Row) -> Row:
    """The row of one candidate with plain numbers."""

    def plain(values: Mapping[Any, Number]) -> dict[Any, float]:
        return {name: scalar(value) for name, value in values.items()}

    collectives = tuple(
        replace(
            collective,
            bytes=scalar(collective.bytes),
            wire_bytes=scalar(collective.wire_bytes),
            time_s=plain(collective.time_s),
            expected_s=scalar(collective.expected_s),
            exposed_s=scalar(collective.exposed_s),
        )
        for collective in row.collectives
    )
    return replace(
        row,
        count=scalar(row.count),
        flops=plain(row.flops),
        kernel_flops=scalar(row.kernel_flops),
        vector_flops=scalar(row.vector_flops),
        hbm_bytes=scalar(row.hbm_bytes),
        collectives=collectives,
        time_s=plain(row.time_s),
        expected_s=scalar(row.expected_s),
        serial_s=scalar(row.serial_s),
    )


def scalar_ledger(ledger: Ledger) -> Ledger:
    """The ledger of one candidate with plain numbers."""
    return Ledger(tuple(scalar_row(row) for row in ledger))


def parse_shares(text: str, known: Collection[str], field: str) -> dict[str, float]:
    """Shares by name from 'weight_gather=1,tensor=0.5'. Raises RooftopError on an unknown name or a bad number."""
    shares = dict[str, float]()
    for entry in text.split(","):
        name, _, share = (part.strip() for part in entry.partition("="))
        if name not in known:
            raise unknown(field, name, known)
        try:
            shares[name] = float(share)
        except ValueError:
            raise RooftopError(f"{field} {name}", share, "a share between 0 and 1") from None
    return shares


def require_shares(
    shares: Mapping[str, float], known: Collection[str], field: str, positive: Collection[str] = ()
) -> None:
    """Raises RooftopError on an unknown name, and on a share outside 0 to 1; ``positive`` ones exceed 0."""
    for name, share in shares.items():
        if name not in known:
            raise unknown(field, name, known)
        if not 0 <= share <= 1 or (name in positive and share == 0):
            raise RooftopError(f"{field} {name}", share, "a share between 0 and 1")
