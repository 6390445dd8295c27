"""Peak rates of the devices of a trace, from the catalogue or from the trace, and measurements that contradict them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rooftop.core.amounts import Amount
from rooftop.core.quantities import format_bytes, format_count
from rooftop.core.records import Record, derived
from rooftop.hardware import Chip, chip_of_kind
from rooftop.profile.facts import COMPUTE, Facts
from rooftop.profile.measured import Measured
from rooftop.profile.trace import Trace
from rooftop.roofline.rates import Rates

#: Resources with a roof.
Roof = Literal["mxu", "hbm", "ici"]
#: Peaks of trace and catalogue that differ by less are the same.
_SAME = 0.05
#: A rate may beat its roof by this much: clocks are rounded.
_BEATS = 1.02


@dataclass(frozen=True, kw_only=True)
class Roofs(Record):
    """Peak rates of one device of a ``chip`` (None: no chip of the catalogue); ``flops_per_s`` by dtype.

    ``ici_bytes_per_s`` is that of both ports of one axis of the network (None: unknown).
    """

    source: str
    chip: str | None
    flops_per_s: Mapping[str, Amount]
    hbm_bytes_per_s: Amount
    ici_bytes_per_s: Amount | None

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype; those in bf16 for a dtype without any."""
        return self.flops_per_s.get(dtype, self.flops_per_s["bf16"])

    def bound_s(self, facts: Facts) -> dict[Roof, float]:
        """Seconds of one execution of an op by resource, at peak rates."""
        bound: dict[Roof, float] = {
            "mxu": (facts.flops or 0.0) / self.peak(facts.dtype),
            "hbm": (facts.hbm_bytes or 0.0) / self.hbm_bytes_per_s,
        }
        if facts.wire_bytes and self.ici_bytes_per_s:
            bound["ici"] = facts.wire_bytes / self.ici_bytes_per_s
        return bound


def chip_of_trace(trace: Trace) -> Chip | None:
    """The chip that a trace names; None if it names none of the catalogue."""
    stats = trace.devices[0].stats if trace.devices else {}
    kind = str(stats.get("device_type_string", stats.get("device_type", "")))
    return chip_of_kind(kind) if kind else None


def roofs(trace: Trace, chip: Chip | None) -> Roofs | None:
    """The roofs of a trace's devices: those of ``chip``, or the trace's own.

    None for CPUs (no emulation has any), and where nothing is known.
    """
    if trace.kind == "cpu" or not trace.devices:
        return None
    if chip is not None:
        rates = Rates.of(chip)
        return Roofs(
            source=f"{chip.name}'s",
            chip=chip.name,
            flops_per_s=rates.flops_per_s,
            hbm_bytes_per_s=rates.hbm_bytes_per_s,
            ici_bytes_per_s=2 * chip.ici_bytes_per_s / chip.devices,
        )
    own = _own(trace)
    if own is None:
        return None
    return Roofs(
        source="the trace's own", chip=None, flops_per_s={"bf16": own[0]}, hbm_bytes_per_s=own[1], ici_bytes_per_s=None
    )


@dataclass(frozen=True, kw_only=True)
class Achieved(Record):
    """FLOPs or bytes of a device per second of a step; ``peak`` is its roof (None: not known)."""

    resource: Roof
    per_s: Amount
    peak: Amount | None

    @derived
    def of_roof(self) -> Amount | None:
        """The share of the roof."""
        return self.per_s / self.peak if self.peak else None


def achieved(measured: Measured, roof: Roofs | None) -> tuple[Achieved, ...]:
    """FLOP/s, HBM bytes/s and bytes/s sent over a whole step, idle time included; without those that no op has.

    The roof of FLOPs is the peak of the most frequent dtype, the roof of ICI both ports of one axis.
    """
    if not measured.step_s:
        return ()
    flops: dict[str, float] = {}
    moved = sent = 0.0
    for op in measured.ops:
        if op.facts.role != "done":
            flops[op.facts.dtype] = flops.get(op.facts.dtype, 0.0) + op.count * (op.facts.flops or 0.0)
            moved += op.count * (op.facts.hbm_bytes or 0.0)
            sent += op.count * (op.facts.wire_bytes or 0.0)
    dtype = max(flops, key=lambda name: flops[name], default="bf16")
    amounts: tuple[tuple[Roof, float, float | None], ...] = (
        ("mxu", sum(flops.values()), None if roof is None else roof.peak(dtype)),
        ("hbm", moved, None if roof is None else roof.hbm_bytes_per_s),
        ("ici", sent, None if roof is None else roof.ici_bytes_per_s),
    )
    return tuple(
        Achieved(resource=name, per_s=amount / measured.step_s, peak=peak) for name, amount, peak in amounts if amount
    )


def doubts(measured: Measured, roof: Roofs | None, chip: Chip | None) -> tuple[str, ...]:
    """Impossible figures: peaks of the trace that differ from the catalogue, and rates above a roof."""
    return () if roof is None else (*_peaks(measured.trace, roof), *_beaten(measured, roof, chip))


def _peaks(trace: Trace, roof: Roofs) -> Iterator[str]:
    own = _own(trace)
    if own is None or roof.chip is None:
        return
    sides = (("FLOP/s", own[0], roof.flops_per_s["bf16"]), ("B/s of HBM", own[1], roof.hbm_bytes_per_s))
    for unit, traced, known in sides:
        if abs(traced - known) > _SAME * known:
            yield (
                f"the trace says that a device's peak is {format_count(traced, unit)}, the catalogue "
                f"{format_count(known, unit)} "
                f"for {roof.chip}: the catalogue's is used"
            )


def _beaten(measured: Measured, roof: Roofs, chip: Chip | None) -> Iterator[str]:
    for op in measured.ops:
        if op.facts.category != COMPUTE:
            # A copy that runs next to the rest is begun in no time.
            continue
        flops, moved = op.per_second(op.facts.flops), op.per_second(op.facts.hbm_bytes)
        peak = roof.peak(op.facts.dtype)
        if flops and flops > _BEATS * peak:
            rates = f"{format_count(flops, 'FLOP/s')} of {format_count(peak, 'FLOP/s')}"
            yield f"{op.name} beats the roof, at {rates}: an input is wrong"
        if moved and moved > _BEATS * roof.hbm_bytes_per_s:
            yield (
                f"{op.name} beats the roof, at {format_bytes(moved)}/s of HBM of "
                f"{format_bytes(roof.hbm_bytes_per_s)}/s: "
                "an input is wrong, or its arrays were not in HBM"
            )
    if chip is None or chip.kind != "tpu":
        return
    # All links of a device, over whatever axes a collective runs.
    links = 2 * chip.ici_axes * chip.ici_bytes_per_s / chip.devices
    for collective in measured.collectives:
        sent = collective.wire_bytes_per_s
        # If the trace has only the end of a collective, its duration is unknown.
        if collective.facts.role != "done" and sent and sent > _BEATS * links:
            yield (
                f"{collective.name} beats the roof, at {format_bytes(sent)}/s sent of {format_bytes(links)}/s over all "
                "links: an input is wrong"
            )


def _own(trace: Trace) -> tuple[float, float] | None:
    """FLOP/s and HBM bytes/s of a device by the trace itself; None if it has none."""
    stats = trace.devices[0].stats
    flops, moved = stats.get("peak_teraflops_per_second"), stats.get("peak_hbm_bw_gigabytes_per_second")
    return None if not flops or not moved else (float(flops) * 1e12, float(moved) * 1e9)
