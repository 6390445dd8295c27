"""The expected time of each row of a training step, with the share of its transfers that computation hides.

Within a phase group (forward; backward with what it recomputes) transfers off the critical path hide behind the
group's computation, up to the share that the assumptions allow and to the time that there is to hide in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rooftop.arrays.rules import STAGE_AXES
from rooftop.core.ledger import Ledger, Number, Row
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.strategies import Strategies
from rooftop.roofline.rates import Rates

#: The pass whose computation can hide a phase's transfers; gradients are summed while the backward pass still runs.
_WINDOW = {"forward": "forward", "recompute": "backward", "backward": "backward", "update": "backward"}


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Expected seconds of each piece of work: computation, each of its transfers, and copies to the host.

    ``exposed`` is the share of a transfer's time that nothing hides, by window and assumption.
    """

    work: Sequence[Work]
    compute: Sequence[Number]
    transfers: Sequence[Sequence[Number]]
    host: Sequence[Number]
    exposed: Mapping[tuple[str, str], Number]
    factor: float

    @classmethod
    def of(cls, work: Sequence[Work], strategies: Strategies, rates: Rates, assumptions: Assumptions) -> _Times:
        compute = [
            np.maximum(
                np.maximum(item.matmul_s, item.vector_flops / rates.vector_flops_per_s), rates.hbm_s(item.hbm_bytes)
            )
            + rates.hbm_s(item.elementwise_bytes)
            for item in work
        ]
        transfers = [[_duration_s(transfer, strategies, rates) for transfer in item.collectives] for item in work]
        host = [item.host_bytes / rates.pcie_bytes_per_s for item in work]
        shares = assumptions.shares(rates.overlap)
        return cls(
            work=work,
            compute=compute,
            transfers=transfers,
            host=host,
            exposed=_exposed_shares(work, compute, transfers, host, shares),
            factor=assumptions.calibration,
        )

    def __iter__(self) -> Iterator[tuple[Work, Number, list[Number], list[Number]]]:
        """Each piece of work, its expected seconds without collectives, and those of collectives: all, and exposed."""
        for item, compute, transfers, offload in zip(self.work, self.compute, self.transfers, self.host, strict=True):
            group = _WINDOW[item.phase]
            paid = [self.factor * duration for duration in transfers]
            exposed = [
                seconds * self.exposed[group, transfer.hides]
                for transfer, seconds in zip(item.collectives, paid, strict=True)
            ]
            waiting = self.exposed.get((group, "offload"), 0.0) * offload
            yield item, self.factor * (compute + waiting), paid, exposed


def price_work(work: Sequence[Work], strategies: Strategies, rates: Rates, assumptions: Assumptions) -> Ledger:
    """The ledger of ``work``, with pipeline idle time as its last rows; figures broadcast to [C, K]."""
    times = _Times.of(work, strategies, rates, assumptions)
    rows = list(_rows(times, strategies, rates))
    rows += _padding(work, rows)
    rows.append(_idle(rows, strategies))
    return Ledger(tuple(rows))


def expected_s(work: Sequence[Work], strategies: Strategies, rates: Rates, assumptions: Assumptions) -> Number:
    """Expected seconds of ``price_work``'s ledger, without its rows; broadcasts to [C, K]."""
    total: Number = 0.0
    busy: Number = 0.0
    for item, seconds, _, exposed in _Times.of(work, strategies, rates, assumptions):
        spent = item.count * (seconds + sum(exposed, 0.0))
        total = total + spent
        if item.phase != "update":
            busy = busy + spent
    return total + idle_fraction(strategies) * busy


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


def _rows(times: _Times, strategies: Strategies, rates: Rates) -> Iterator[Row]:
    for (item, seconds, paid, exposed), offload in zip(times, times.host, strict=True):
        collectives = tuple(
            transfer.collective((strategies.price(transfer.priced_as, axis) for axis in transfer.axes), expected, shown)
            for transfer, expected, shown in zip(item.collectives, paid, exposed, strict=True)
        )
        apart = item.matmul_s + item.vector_flops / rates.vector_flops_per_s + rates.hbm_s(item.moved_bytes)
        yield item.row(
            rates,
            collectives,
            ("mxu", "vpu", "hbm", "pcie"),
            expected_s=seconds + sum(exposed, 0.0),
            serial_s=times.factor * (apart + offload) + sum(paid, 0.0),
        )


def _padding(work: Sequence[Work], rows: Sequence[Row]) -> list[Row]:
    """Time in which stages with fewer layers than the longest one wait for it, one row for each phase."""
    skipped = [(item.count * item.skipped, row) for item, row in zip(work, rows, strict=True) if np.any(item.skipped)]
    return [
        Row(
            scope="padding",
            phase=phase,
            count=1,
            expected_s=sum((count * row.expected_s for count, row in skipped if row.phase == phase), 0.0),
            serial_s=sum((count * row.serial_s for count, row in skipped if row.phase == phase), 0.0),
            formula="layers that a stage lacks and the longest one has, times microbatches and the time of a layer",
        )
        for phase in dict.fromkeys(row.phase for _, row in skipped)
    ]


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
