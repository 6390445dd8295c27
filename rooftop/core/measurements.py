"""Records of measurements on local devices: seconds of programs, and the origin of the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooftop.core.amounts import Amount, Positive
from rooftop.core.records import Record


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
