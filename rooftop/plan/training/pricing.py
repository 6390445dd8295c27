"""The expected time of each row of a training step, with the share of its transfers that computation hides.

Within a phase group (forward; backward with what it recomputes) transfers off the critical path hide behind the
group's computation, up to the share that the assumptions allow and to the time that there is to hide in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rooftop.arrays.rules import STAGE_AXES
from rooftop.core.ledger import Collective, Ledger, Number, Row
from rooftop.plan.pricing import Transfer, Work, paid_s
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.strategies import Strategies
from rooftop.roofline.rates import Rates

#: The pass whose computation can hide a phase's transfers; gradients are summed while the backward pass still runs.
_WINDOW = {"forward": "forward", "recompute": "backward", "backward": "backward", "update": "backward"}


def price_work(work: Sequence[Work], strategies: Strategies, rates: Rates, assumptions: Assumptions) -> Ledger:
    """The ledger of ``work``, with pipeline idle time as its last row; figures broadcast to [C, K]."""
    compute = [
        np.maximum(np.maximum(item.matmul_s, item.vector_flops / rates.vector_flops_per_s), rates.hbm_s(item.hbm_bytes))
        + rates.hbm_s(item.elementwise_bytes)
        for item in work
    ]
    durations = [[_duration_s(transfer, strategies, rates) for transfer in item.collectives] for item in work]
    host = [item.host_bytes / rates.pcie_bytes_per_s for item in work]
    shown = _exposed_shares(work, compute, durations, host, assumptions.shares(rates.overlap))
    rows = list(_rows(work, compute, durations, host, shown, strategies, rates, assumptions))
    rows.append(_idle(rows, strategies))
    return Ledger(tuple(rows))


def _duration_s(transfer: Transfer, strategies: Strategies, rates: Rates) -> Number:
    kind = transfer.priced_as
    if kind == "reduce_scatter" and rates.overlap.whole_slice_scatter == "all_reduce":
        # A compiler that cannot scatter over a whole slice sums everything everywhere, and keeps a part.
        whole = (
            strategies.devices(*transfer.axes) * strategies.layouts.slice.num_slices == strategies.layouts.slice.devices
        )
        other = replace(transfer, kind="all_reduce")
        return np.where(whole, _duration_s(other, strategies, rates), _time_s(transfer, strategies, rates))
    return _time_s(transfer, strategies, rates)


def _time_s(transfer: Transfer, strategies: Strategies, rates: Rates) -> Number:
    kind = transfer.priced_as
    efficiency, start_s = rates.network_efficiency(kind), rates.collective_start_s
    prices = (strategies.price(kind, axis) for axis in transfer.axes)
    return transfer.when * sum((price.expected_s(transfer.payload, efficiency, start_s) for price in prices), 0.0)


def priced_collectives(work: Sequence[Work], rates: Rates) -> set[tuple[str, str]]:
    """(kind, axis) of every price that ``work`` asks for."""
    kinds = {(transfer.priced_as, axis) for item in work for transfer in item.collectives for axis in transfer.axes}
    if rates.overlap.whole_slice_scatter == "all_reduce":
        kinds |= {("all_reduce", axis) for kind, axis in kinds if kind == "reduce_scatter"}
    return {("all_gather" if kind == "reduce_scatter" else kind, axis) for kind, axis in kinds}


def _exposed_shares(
    work: Sequence[Work],
    compute: Sequence[Number],
    durations: Sequence[Sequence[Number]],
    host: Sequence[Number],
    hideable: Mapping[str, float],
) -> dict[tuple[str, str], Number]:
    """For each window and kind of transfer the share of its time that nothing hides."""
    window: dict[str, Number] = {}
    to_hide: dict[tuple[str, str], Number] = {}
    for item, seconds, transfers, offload in zip(work, compute, durations, host, strict=True):
        group = _WINDOW[item.phase]
        if item.phase != "update":
            window[group] = window.get(group, 0.0) + item.count * seconds
        for transfer, duration in zip(item.collectives, transfers, strict=True):
            key = group, transfer.hides
            to_hide[key] = to_hide.get(key, 0.0) + item.count * duration
        to_hide[group, "offload"] = to_hide.get((group, "offload"), 0.0) + item.count * offload
    exposed: dict[tuple[str, str], Number] = {}
    network = dict(window)
    for (group, hides), total in to_hide.items():
        # The network hides in one window together; copies to the host have a path of their own.
        room = window[group] if hides == "offload" else network[group]
        hidden = np.minimum(hideable[hides] * total, room)
        if hides != "offload":
            network[group] = room - hidden
        exposed[group, hides] = 1.0 - hidden / np.where(total > 0, total, 1.0)
    return exposed


def _rows(
    work: Sequence[Work],
    compute: Sequence[Number],
    durations: Sequence[Sequence[Number]],
    host: Sequence[Number],
    shown: Mapping[tuple[str, str], Number],
    strategies: Strategies,
    rates: Rates,
    assumptions: Assumptions,
) -> Iterator[Row]:
    factor = assumptions.calibration
    for item, seconds, transfers, offload in zip(work, compute, durations, host, strict=True):
        group = _WINDOW[item.phase]
        collectives = tuple(
            _collective(transfer, factor * duration, shown[group, transfer.hides], strategies)
            for transfer, duration in zip(item.collectives, transfers, strict=True)
        )
        exposed, paid = paid_s(collectives)
        waiting = shown.get((group, "offload"), 0.0) * offload
        apart = item.matmul_s + item.vector_flops / rates.vector_flops_per_s + rates.hbm_s(item.moved_bytes)
        yield item.row(
            rates,
            collectives,
            ("mxu", "vpu", "hbm", "pcie"),
            expected_s=factor * (seconds + waiting) + exposed,
            serial_s=factor * (apart + offload) + paid,
        )


def _collective(transfer: Transfer, expected_s: Number, shown: Number, strategies: Strategies) -> Collective:
    prices = (strategies.price(transfer.priced_as, axis) for axis in transfer.axes)
    return transfer.collective(prices, expected_s, expected_s * shown)


def _idle(rows: Sequence[Row], strategies: Strategies) -> Row:
    """Time in which a pipeline stage waits: (stages - 1) microbatches, less what the schedule fills (chapter 5)."""
    busy = sum((row.count * row.expected_s for row in rows if row.phase != "update"), 0.0)
    serial = sum((row.count * row.serial_s for row in rows if row.phase != "update"), 0.0)
    share = idle_fraction(strategies)
    return Row(
        scope="pipeline",
        phase="backward",
        count=1,
        expected_s=share * busy,
        serial_s=share * serial,
        formula="idle: (stages - 1) / (microbatches x chunks) of the passes, times what the schedule leaves",
    )


def idle_fraction(strategies: Strategies) -> Number:
    """Idle time of a pipeline over its busy time, [C, K]."""
    waiting = strategies.devices(*STAGE_AXES) - 1
    return strategies.idle_share * waiting / (strategies.microbatches * strategies.chunks)
