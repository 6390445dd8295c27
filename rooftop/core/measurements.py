"""Records of measurements on local devices: seconds of programs, and the origin of the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rooftop.core.amounts import Amount, Count, Positive
from rooftop.core.records import Record, derived


@dataclass(frozen=True, kw_only=True)
class TimedRecord(Record):
    """Seconds of a program, from its call until its results are ready: the median and the fastest of ``runs``."""

    median_s: Amount
    fastest_s: Amount
    runs: Positive


@dataclass(frozen=True, kw_only=True)
class Provenance(Record):
    """Origin of measured numbers: devices, versions of rooftop, JAX and libtpu, the runtime, and the date."""

    devices: str
    count: Positive
    emulated: bool
    platform: str
    device_kind: str
    host_cpus: int | None
    versions: Mapping[str, str]
    runtime: str
    date: str


@dataclass(frozen=True, kw_only=True)
class PlannedSeconds(Record):
    """Priced seconds of a collective, the bound and the expectation; None without a slice to plan for."""

    sparse = frozenset({"bound_s", "expected_s"})

    bound_s: Amount | None = None
    expected_s: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming(TimedRecord):
    """One collective over ``axes``, ``devices`` in a group: payload, bytes sent by one device, and times."""

    kind: str
    axes: tuple[str, ...]
    devices: Positive
    bytes: Count
    wire_bytes: Amount
    planned: PlannedSeconds

    @derived
    def wire_bytes_per_s(self) -> Amount:
        """The achieved bandwidth of one device: ``wire_bytes`` divided by the median time."""
        return self.wire_bytes / self.median_s


@dataclass(frozen=True, kw_only=True)
class MeasuredCollectives(Provenance):
    """Collectives timed on local devices, the command that did it, and the seconds of an empty call."""

    command: str
    empty_call_s: Amount
    collectives: tuple[CollectiveTiming, ...]


#: Kinds of measured work of a calibration.
Measurement = Literal["call", "hbm", "matmul", "collective", "attention"]


@dataclass(frozen=True, kw_only=True)
class CalibrationPoint(TimedRecord):
    """One measured program of a calibration: its work on one device, and seconds of one execution.

    ``kind`` is 'wait' or 'launch' of a call, 'read' or 'copy' of HBM, 'forward' or 'backward' of attention, the kind of
    a collective, '' of a matmul. ``sizes`` has its dims ('m', 'k', 'n'; 'ranks', 'bytes'; ...). ``flops`` are executed,
    ``bytes`` moved through HBM or, of a collective, its payload. ``bound_s`` is the time at the peaks of the chip; None
    without a chip.
    """

    what: Measurement
    kind: str
    dtype: str
    sizes: Mapping[str, int]
    flops: Amount
    bytes: Amount
    bound_s: Amount | None

    @property
    def key(self) -> tuple[str, ...]:
        """The measured work, without its times."""
        return self.what, self.kind, self.dtype, *(f"{name}={size}" for name, size in sorted(self.sizes.items()))

    @derived
    def of_peak(self) -> Amount | None:
        """The time at peak over the measured time; None without a chip, or where there is no peak."""
        return self.bound_s / self.median_s if self.bound_s else None
