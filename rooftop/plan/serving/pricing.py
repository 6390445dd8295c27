"""From serving work to rows: what each row takes, and what its collectives leave exposed.

A row takes the longer of its matmuls and its HBM streams, at named fractions. A collective between two matmuls is paid
for its bytes; the share of its start and hops that the plan assumes passes while the next weights are read into VMEM,
as long as there is so much to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rooftop.core.ledger import Collective, Ledger, Number, Row
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.placement import Placed
from rooftop.plan.training.pricing import Transfer, Work
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
    share = {name: assumptions.share(name, rates.chip) for name in ("hbm_read", "latency", "bytes", "ring")}
    rate = rates.hbm_bytes_per_s * share["hbm_read"]
    durations = [[_duration(transfer, placement, rates) for transfer in item.collectives] for item in work]
    streams = sum((item.count * item.hbm_bytes / rate for item in work), 0.0)
    waits = sum(
        (item.count * each.latency_s for item, found in zip(work, durations, strict=True) for each in found), 0.0
    )
    # Starts and hops hide behind streams, of which there are only so many.
    room = np.minimum(1.0, streams / np.where(np.asarray(waits) > 0, waits, 1.0))
    latency = share["latency"] * room
    rows = []
    for item, found in zip(work, durations, strict=True):
        collectives = []
        for transfer, each in zip(item.collectives, found, strict=True):
            if transfer.hides == "ring":
                # What travels hides behind the attention to what has come, which may be the shorter of the two.
                hidden = np.minimum(share["ring"] * each.total_s, np.maximum(item.matmul_s, item.hbm_bytes / rate))
                exposed = each.total_s - hidden
            else:
                exposed = (1 - latency) * each.latency_s + (1 - share["bytes"]) * each.bytes_s
            collectives.append(_collective(transfer, placement, each.total_s, exposed))
        rows.append(_row(item, rates, item.hbm_bytes / rate, tuple(collectives)))
    return Ledger(tuple(rows))


def _row(item: Work, rates: Rates, stream_s: Number, collectives: tuple[Collective, ...]) -> Row:
    time_s: dict[str, Number] = {
        "mxu": sum((amount / rates.flops_per_s[dtype] for dtype, amount in item.flops.items()), 0.0)
        + item.kernel_flops / rates.flops_per_s["bf16"],
        "hbm": item.hbm_bytes / rates.hbm_bytes_per_s,
    }
    for collective in collectives:
        for resource, bound in collective.time_s.items():
            time_s[resource] = time_s.get(resource, 0.0) + bound
    exposed = sum((collective.exposed_s for collective in collectives), 0.0)
    paid = sum((collective.expected_s for collective in collectives), 0.0)
    return Row(
        scope=item.scope,
        phase=item.phase,
        count=item.count,
        flops=item.flops,
        kernel_flops=item.kernel_flops,
        hbm_bytes=item.hbm_bytes,
        collectives=collectives,
        time_s=time_s,
        expected_s=np.maximum(item.matmul_s, stream_s) + exposed,
        serial_s=item.matmul_s + stream_s + paid,
        formula=item.formula,
    )


def _duration(transfer: Transfer, placement: Placed, rates: Rates) -> _Duration:
    found = placement.price(transfer.priced_as, transfer.axes)
    efficiency = rates.network_efficiency(transfer.priced_as)
    latency = found.expected_s(0.0, efficiency, rates.collective_start_s)
    total = found.expected_s(transfer.payload, efficiency, rates.collective_start_s)
    return _Duration(latency_s=latency, bytes_s=total - latency)


def _collective(transfer: Transfer, placement: Placed, expected_s: Number, exposed_s: Number) -> Collective:
    found = placement.price(transfer.priced_as, transfer.axes)
    rotation = transfer.kind == "permute_ring"
    wire = transfer.payload * found.wire_per_byte
    return Collective(
        kind="permute" if rotation else transfer.kind,
        axes=transfer.axes,
        bytes=wire if rotation else transfer.payload,
        wire_bytes=wire,
        critical=transfer.hides == "critical",
        time_s=found.bound_s(transfer.payload),
        expected_s=expected_s,
        exposed_s=exposed_s,
    )


def scalar_ledger(ledger: Ledger) -> Ledger:
    """The ledger of one candidate with plain numbers."""
    rows = []
    for row in ledger:
        collectives = tuple(
            replace(
                one,
                bytes=_number(one.bytes),
                wire_bytes=_number(one.wire_bytes),
                time_s={name: _number(value) for name, value in one.time_s.items()},
                expected_s=_number(one.expected_s),
                exposed_s=_number(one.exposed_s),
            )
            for one in row.collectives
        )
        rows.append(
            replace(
                row,
                flops={name: _number(value) for name, value in row.flops.items()},
                kernel_flops=_number(row.kernel_flops),
                hbm_bytes=_number(row.hbm_bytes),
                collectives=collectives,
                time_s={name: _number(value) for name, value in row.time_s.items()},
                expected_s=_number(row.expected_s),
                serial_s=_number(row.serial_s),
            )
        )
    return Ledger(tuple(rows))


def _number(value: Number) -> float:
    return float(np.asarray(value, np.float64).reshape(-1)[0])
