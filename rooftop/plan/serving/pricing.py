"""Pricing of serving steps: exposed time of transfers, and the ledger.

A row takes the longer of its matmuls and its HBM streams, at named fractions. A collective between two matmuls is paid
for its bytes. The share of its start and hops that the plan assumes passes while the next weights are read into VMEM,
as long as there is so much to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rooftop.arrays.rules import GATHER_AXES
from rooftop.core.ledger import Ledger, Number
from rooftop.plan.pricing import Transfer, Work, paid_s
from rooftop.plan.serving.assumptions import ServingAssumptions, ServingShare
from rooftop.plan.serving.placement import Placed
from rooftop.roofline.rates import Rates


@dataclass(frozen=True, kw_only=True)
class _Duration:
    """Expected seconds of a transfer: of its start and hops, and of its bytes."""

    latency_s: Number
    bytes_s: Number

    @property
    def total_s(self) -> Number:
        return self.latency_s + self.bytes_s


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Expected seconds of pieces of work: streams through HBM, transfers, and shares of transfers that hide.

    ``latency`` is the share of starts and hops that passes while weights are read.
    """

    streams: Sequence[Number]
    durations: Sequence[Sequence[_Duration]]
    latency: Number
    bytes: float
    ring: float

    @classmethod
    def of(cls, work: Sequence[Work], placement: Placed, rates: Rates, assumptions: ServingAssumptions) -> _Steps:
        names: tuple[ServingShare, ...] = ("hbm_read", "bytes", "ring")
        share = {name: assumptions.share(name, rates.chip) for name in names}
        rate = rates.hbm_bytes_per_s * share["hbm_read"]
        streams = [item.hbm_bytes / rate for item in work]
        lines: dict[tuple[str, tuple[str, ...]], tuple[Number, Number]] = {}
        durations = [[_duration(part, placement, rates, lines) for part in item.collectives] for item in work]
        streaming = sum((item.count * stream_s for item, stream_s in zip(work, streams, strict=True)), 0.0)
        waits = sum(
            (item.count * part.latency_s for item, parts in zip(work, durations, strict=True) for part in parts), 0.0
        )
        # Starts and hops hide behind streams, of which there are only so many.
        room = np.minimum(1.0, streaming / np.where(np.asarray(waits) > 0, waits, 1.0))
        return cls(
            streams=streams,
            durations=durations,
            latency=assumptions.latency(rates.chip, two_d=bool(placement.used(GATHER_AXES))) * room,
            bytes=share["bytes"],
            ring=share["ring"],
        )

    def exposed_s(self, item: Work, transfer: Transfer, duration: _Duration, stream_s: Number) -> Number:
        """Seconds of a transfer that nothing hides."""
        if transfer.hides == "ring":
            # A transfer overlaps attention to the previous block: the shorter of the two is hidden.
            hidden: Number = np.minimum(self.ring * duration.total_s, np.maximum(item.matmul_s, stream_s))
            return duration.total_s - hidden
        return (1 - self.latency) * duration.latency_s + (1 - self.bytes) * duration.bytes_s


def price_serving(work: Sequence[Work], placement: Placed, rates: Rates, assumptions: ServingAssumptions) -> Ledger:
    """The ledger of ``work``; figures are scalars, or arrays over batch sizes."""
    steps = _Steps.of(work, placement, rates, assumptions)
    rows = []
    for item, stream_s, parts in zip(work, steps.streams, steps.durations, strict=True):
        collectives = []
        for transfer, duration in zip(item.collectives, parts, strict=True):
            exposed = steps.exposed_s(item, transfer, duration, stream_s)
            price = placement.price(transfer.priced_as, transfer.axes)
            collectives.append(transfer.collective(price, duration.total_s, exposed))
        exposed_s, paid = paid_s(collectives)
        rows.append(
            item.row(
                rates,
                tuple(collectives),
                ("mxu", "hbm"),
                expected_s=np.maximum(item.matmul_s, stream_s) + exposed_s,
                serial_s=item.matmul_s + stream_s + paid,
            )
        )
    return Ledger(tuple(rows))


def serving_s(work: Sequence[Work], placement: Placed, rates: Rates, assumptions: ServingAssumptions) -> Number:
    """Expected seconds of ``price_serving``'s ledger, without its rows."""
    steps = _Steps.of(work, placement, rates, assumptions)
    total: Number = 0.0
    for item, stream_s, parts in zip(work, steps.streams, steps.durations, strict=True):
        seconds = np.maximum(item.matmul_s, stream_s)
        for transfer, duration in zip(item.collectives, parts, strict=True):
            seconds = seconds + steps.exposed_s(item, transfer, duration, stream_s)
        total = total + item.count * seconds
    return total


def _duration(
    transfer: Transfer,
    placement: Placed,
    rates: Rates,
    lines: dict[tuple[str, tuple[str, ...]], tuple[Number, Number]],
) -> _Duration:
    """``lines`` are the latency and the seconds per byte of collectives that are known."""
    key = transfer.priced_as, transfer.axes
    if key not in lines:
        efficiency = rates.network_efficiency(transfer.priced_as)
        lines[key] = placement.price(*key).expected_line(efficiency, rates.collective_start_s)
    latency_s, seconds_per_byte = lines[key]
    return _Duration(latency_s=transfer.when * latency_s, bytes_s=transfer.when * transfer.payload * seconds_per_byte)
