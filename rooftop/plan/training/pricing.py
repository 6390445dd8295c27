"""From work to rows: what each row takes, and how much of its transfers hides behind computation.

Within a phase group (forward; backward with what it recomputes) transfers off the critical path hide behind the
group's computation, up to the share that the assumptions allow and to the time that there is to hide in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rooftop.core.ledger import Collective, Ledger, Number, Row
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.strategies import Strategies
from rooftop.roofline.rates import Rates

#: Transfers between two computations that depend on each other.
CRITICAL: frozenset[str] = frozenset({"tensor", "all_to_all"})

#: Whose computation a phase's transfers can hide behind; gradients are summed while the backward pass still runs.
_WINDOW = {"forward": "forward", "recompute": "backward", "backward": "backward", "update": "backward"}


@dataclass(frozen=True)
class Transfer:
    """A collective to be priced, over its axes one after another; kind 'permute_ring' is a full rotation.

    ``hides`` names the assumption that it falls under; ``when`` is 1 where it takes place and 0 where it does not.
    """

    kind: str
    axes: tuple[str, ...]
    payload: Number
    hides: str
    when: Number = 1.0

    @property
    def priced_as(self) -> str:
        """The collective whose price it has: a rotation in both directions moves what an AllGather moves."""
        return "all_gather" if self.kind == "permute_ring" else self.kind


@dataclass(frozen=True, kw_only=True)
class Work:
    """A row before it is known what hides. ``matmul_s`` is the expected time of its matmuls or kernel.

    ``hbm_bytes`` move while the matmuls run, ``elementwise_bytes`` in passes of their own.
    """

    scope: str
    phase: str
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
    return transfer.when * sum((found.expected_s(transfer.payload, efficiency, start_s) for found in prices), 0.0)


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
    wanted: dict[tuple[str, str], Number] = {}
    for item, seconds, transfers, offload in zip(work, compute, durations, host, strict=True):
        group = _WINDOW[item.phase]
        if item.phase != "update":
            window[group] = window.get(group, 0.0) + item.count * seconds
        for transfer, duration in zip(item.collectives, transfers, strict=True):
            key = group, transfer.hides
            wanted[key] = wanted.get(key, 0.0) + item.count * duration
        wanted[group, "offload"] = wanted.get((group, "offload"), 0.0) + item.count * offload
    exposed: dict[tuple[str, str], Number] = {}
    network = dict(window)
    for (group, hides), total in wanted.items():
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
        moved = item.hbm_bytes + item.elementwise_bytes
        collectives = tuple(
            _collective(transfer, factor * duration, shown[group, transfer.hides], strategies)
            for transfer, duration in zip(item.collectives, transfers, strict=True)
        )
        time_s: dict[str, Number] = {
            "mxu": sum((amount / rates.flops_per_s[dtype] for dtype, amount in item.flops.items()), 0.0)
            + item.kernel_flops / rates.flops_per_s["bf16"],
            "vpu": item.vector_flops / rates.vector_flops_per_s,
            "hbm": moved / rates.hbm_bytes_per_s,
            "pcie": offload,
        }
        for collective in collectives:
            for resource, bound in collective.time_s.items():
                time_s[resource] = time_s.get(resource, 0.0) + bound
        exposed = sum((collective.exposed_s for collective in collectives), 0.0)
        paid = sum((collective.expected_s for collective in collectives), 0.0)
        waiting = shown.get((group, "offload"), 0.0) * offload
        apart = item.matmul_s + item.vector_flops / rates.vector_flops_per_s + rates.hbm_s(moved)
        yield Row(
            scope=item.scope,
            phase=item.phase,
            count=item.count,
            flops=item.flops,
            kernel_flops=item.kernel_flops,
            vector_flops=item.vector_flops,
            hbm_bytes=moved,
            collectives=collectives,
            time_s=time_s,
            expected_s=factor * (seconds + waiting) + exposed,
            serial_s=factor * (apart + offload) + paid,
            formula=item.formula,
        )


def _collective(transfer: Transfer, expected_s: Number, shown: Number, strategies: Strategies) -> Collective:
    rotation = transfer.kind == "permute_ring"
    wire: Number = 0.0
    time_s: dict[str, Number] = {}
    for axis in transfer.axes:
        found = strategies.price(transfer.priced_as, axis)
        wire = wire + transfer.when * transfer.payload * found.wire_per_byte
        for resource, seconds in found.bound_s(transfer.payload).items():
            time_s[resource] = time_s.get(resource, 0.0) + transfer.when * seconds
    return Collective(
        kind="permute" if rotation else transfer.kind,
        axes=transfer.axes,
        bytes=wire if rotation else transfer.when * transfer.payload,
        wire_bytes=wire,
        critical=transfer.hides in CRITICAL,
        time_s=time_s,
        expected_s=expected_s,
        exposed_s=expected_s * shown,
    )


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
    waiting = strategies.devices("stage") - 1
    return strategies.idle_share * waiting / (strategies.microbatches * strategies.chunks)
