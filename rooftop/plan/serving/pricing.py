"""Pricing of serving steps: exposed time of transfers, and the ledger.

A row takes the longer of its matmuls and its HBM streams, at named fractions. A collective between two matmuls is paid
for its bytes. The share of its start and hops that the plan assumes passes while the next weights are read into VMEM,
as long as there is so much to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


def price_serving(work: Sequence[Work], placement: Placed, rates: Rates, assumptions: ServingAssumptions) -> Ledger:
    """The ledger of ``work``; figures are scalars, or arrays over batch sizes."""
    names: tuple[ServingShare, ...] = ("hbm_read", "latency", "bytes", "ring")
    share = {name: assumptions.share(name, rates.chip) for name in names}
    rate = rates.hbm_bytes_per_s * share["hbm_read"]
    durations = [[_duration(transfer, placement, rates) for transfer in item.collectives] for item in work]
    streams = sum((item.count * item.hbm_bytes / rate for item in work), 0.0)
    waits = sum(
        (item.count * part.latency_s for item, parts in zip(work, durations, strict=True) for part in parts), 0.0
    )
    # Starts and hops hide behind streams, of which there are only so many.
    room = np.minimum(1.0, streams / np.where(np.asarray(waits) > 0, waits, 1.0))
    latency = share["latency"] * room
    rows = []
    for item, parts in zip(work, durations, strict=True):
        stream_s = item.hbm_bytes / rate
        collectives = []
        for transfer, duration in zip(item.collectives, parts, strict=True):
            if transfer.hides == "ring":
                # A transfer overlaps attention to the previous block: the shorter of the two is hidden.
                hidden = np.minimum(share["ring"] * duration.total_s, np.maximum(item.matmul_s, stream_s))
                exposed = duration.total_s - hidden
            else:
                exposed = (1 - latency) * duration.latency_s + (1 - share["bytes"]) * duration.bytes_s
            price = placement.price(transfer.priced_as, transfer.axes)
            collectives.append(transfer.collective([price], duration.total_s, exposed))
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


def _duration(transfer: Transfer, placement: Placed, rates: Rates) -> _Duration:
    price = placement.price(transfer.priced_as, transfer.axes)
    efficiency = rates.network_efficiency(transfer.priced_as)
    latency = price.expected_s(0.0, efficiency, rates.collective_start_s)
    total = price.expected_s(transfer.payload, efficiency, rates.collective_start_s)
    return _Duration(latency_s=latency, bytes_s=total - latency)
