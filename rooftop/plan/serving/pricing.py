"""Pricing of serving steps: exposed time of transfers, and the ledger.

A row takes the longer of its matmuls and its HBM streams, at named fractions. A collective between two matmuls is paid
for its bytes. The share of its start and hops that the plan assumes passes while the next weights are read into VMEM,
as long as there is so much to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from rooftop.arrays.rules import GATHER_AXES
from rooftop.core.ledger import Ledger, Number, Row
from rooftop.plan.pricing import StagePart, Transfer, Work, paid_s
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
        lines: dict[tuple[str, tuple[str, ...]], list[tuple[Number, Number]]] = {}
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
        if transfer.seconds is not None:
            return transfer.when * transfer.seconds
        if transfer.hides == "ring":
            # A transfer overlaps attention to the previous block: the shorter of the two is hidden.
            hidden: Number = np.minimum(self.ring * duration.total_s, np.maximum(item.matmul_s, stream_s))
            return duration.total_s - hidden
        if transfer.hides == "stage":
            # The next stage cannot begin before.
            return duration.total_s
        return (1 - self.latency) * duration.latency_s + (1 - self.bytes) * duration.bytes_s


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages that deal out ``layers``, and the flights whose steps are in progress in them, one in each stage.

    Layers are as long as they are in the mean.
    """

    layers: int
    stages: Number
    flights: Number

    def slowest_s(self, seconds: Mapping[StagePart, Number]) -> Number:
        """Seconds of the slowest stage, given those of the parts of a model in all stages together.

        The first stages have one layer more where these do not divide, and the last one has the unembedding.
        """
        layer_s = seconds["layers"] / self.layers
        share = self.layers / np.asarray(self.stages)
        slowest: Number = np.maximum(
            np.ceil(share) * layer_s + seconds["first"], np.floor(share) * layer_s + seconds["last"]
        )
        return slowest

    def idle_s(self, seconds: Mapping[StagePart, Number]) -> Number:
        """Seconds in which a flight waits for the slowest stage, which works for every other flight first."""
        idle: Number = np.maximum(0.0, self.flights * self.slowest_s(seconds) - sum(seconds.values()))
        return idle


def price_serving(
    work: Sequence[Work],
    placement: Placed,
    rates: Rates,
    assumptions: ServingAssumptions,
    pipeline: Pipeline | None = None,
) -> Ledger:
    """The ledger of ``work``; figures are scalars, or arrays over batch sizes. A pipeline's last row is idle time."""
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
    if pipeline is not None:
        expected = [row.count * row.expected_s for row in rows]
        serial = [row.count * row.serial_s for row in rows]
        rows.append(
            Row(
                scope="pipeline",
                phase=work[0].phase,
                count=1,
                expected_s=pipeline.idle_s(_by_part(work, expected)),
                serial_s=pipeline.idle_s(_by_part(work, serial)),
                formula="idle: flights x the slowest stage, less a flight's way through all stages",
            )
        )
    return Ledger(tuple(rows))


def serving_s(
    work: Sequence[Work],
    placement: Placed,
    rates: Rates,
    assumptions: ServingAssumptions,
    pipeline: Pipeline | None = None,
) -> Number:
    """Expected seconds of ``price_serving``'s ledger, without its rows."""
    seconds = _seconds(work, placement, rates, assumptions)
    return sum(seconds, 0.0) + (0.0 if pipeline is None else pipeline.idle_s(_by_part(work, seconds)))


def slowest_stage_s(
    work: Sequence[Work], placement: Placed, rates: Rates, assumptions: ServingAssumptions, pipeline: Pipeline
) -> Number:
    """Expected seconds of ``work`` in the slowest pipeline stage."""
    return pipeline.slowest_s(_by_part(work, _seconds(work, placement, rates, assumptions)))


def _seconds(work: Sequence[Work], placement: Placed, rates: Rates, assumptions: ServingAssumptions) -> list[Number]:
    """Expected seconds of each piece of work, as often as it is done."""
    steps = _Steps.of(work, placement, rates, assumptions)
    every = list[Number]()
    for item, stream_s, parts in zip(work, steps.streams, steps.durations, strict=True):
        seconds = np.maximum(item.matmul_s, stream_s)
        for transfer, duration in zip(item.collectives, parts, strict=True):
            seconds = seconds + steps.exposed_s(item, transfer, duration, stream_s)
        every.append(item.count * seconds)
    return every


def _by_part(work: Sequence[Work], seconds: Sequence[Number]) -> dict[StagePart, Number]:
    """Seconds of work by the pipeline stages' part that it belongs to."""
    parts: dict[StagePart, Number] = dict.fromkeys(get_args(StagePart), 0.0)
    for item, own in zip(work, seconds, strict=True):
        parts[item.part] = parts[item.part] + own
    return parts


def _duration(
    transfer: Transfer,
    placement: Placed,
    rates: Rates,
    lines: dict[tuple[str, tuple[str, ...]], list[tuple[Number, Number]]],
) -> _Duration:
    """``lines`` are the latency and the seconds per byte of collectives that are known, by protocol."""
    key = transfer.priced_as, transfer.axes
    if key not in lines:
        price = placement.price(*key)
        lines[key] = [price.expected_line(protocol) for protocol in rates.network(transfer.priced_as).protocols]
    latency_s, seconds_per_byte = lines[key][0]
    for other_s, other_per_byte in lines[key][1:]:
        faster = other_s + transfer.payload * other_per_byte < latency_s + transfer.payload * seconds_per_byte
        latency_s, seconds_per_byte = (
            np.where(faster, other, one) for other, one in ((other_s, latency_s), (other_per_byte, seconds_per_byte))
        )
    return _Duration(latency_s=transfer.when * latency_s, bytes_s=transfer.when * transfer.payload * seconds_per_byte)
