"""What fills HBM at the peak of a compiled program, and the answer when it is too much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rooftop.errors import Infeasible
from rooftop.quantities import format_bytes
from rooftop.scopes import UNSCOPED

#: Classes of what lies in HBM, those of the planner first. ``weights`` includes copies in the compute dtype,
#: ``gradients`` have the shape of the weights that the program is given, ``activations`` are what the forward pass has
#: left for the backward pass; ``workspace`` is the rest of the temporaries.
CLASSES: tuple[str, ...] = (
    "weights", "optimizer", "gradients", "activations", "workspace", "batch", "other",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One array in the HBM of one device. ``bytes`` are those that it fills, padding included.

    ``name`` is the argument's (``state.weights.embed``) or the instruction's, ``shape`` as in HLO without its layout.
    ``source`` is the 'file:line' that it comes from ('' if unknown); an argument has no scope, phase and source.
    """

    bytes: int
    shape: str
    memory_class: str
    name: str
    scope: str = ""
    phase: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = " ".join(part for part in (self.scope, self.phase, self.source) if part and part != UNSCOPED)
        return f"{format_bytes(self.bytes)} {self.shape} {self.name}" + (f" ({where})" if where else "")


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """What one device holds in HBM when most of it is in use; ``buffers`` are the arrays, largest first.

    ``peak_bytes`` is their sum. ``allocated_bytes`` has beside them the holes of the heap: that is what XLA:TPU holds
    against the HBM that it may use. XLA's own ``peak_memory_in_bytes`` is ``peak_bytes``, except in small programs:
    where more of VMEM is in use than of the heap it counts that instead. The program's code is in neither.
    """

    allocated_bytes: int
    buffers: tuple[Buffer, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes that are alive at the peak."""
        return sum(each.bytes for each in self.buffers)

    @property
    def by_class(self) -> dict[str, int]:
        """Bytes of each class, in the order of ``CLASSES``, without those that hold nothing."""
        totals = dict.fromkeys(CLASSES, 0)
        for each in self.buffers:
            totals[each.memory_class] += each.bytes
        return {name: total for name, total in totals.items() if total}

    def to_json(self) -> dict[str, Any]:
        """The reading as plain JSON values."""
        buffers = [asdict(each) for each in self.buffers]
        return {"peak_bytes": self.peak_bytes, "allocated_bytes": self.allocated_bytes} | {"buffers": buffers}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PeakMemory:
        """The inverse of ``to_json``."""
        return cls(allocated_bytes=data["allocated_bytes"], buffers=tuple(Buffer(**each) for each in data["buffers"]))


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXCEEDED = re.compile(
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"
    r"|Ran out of memory in memory space hbm\. Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"
)


def read_exceeded(said: str) -> tuple[float, float] | None:
    """HBM needed and available, in bytes, where XLA:TPU says that a program needs more than there is; else None."""
    found = _EXCEEDED.search(said)
    if found is None:
        return None
    needed, needed_unit, available, available_unit = (each for each in found.groups() if each is not None)
    return float(needed) * _UNITS[needed_unit], float(available) * _UNITS[available_unit]


class OutOfMemory(Infeasible):
    """A program that does not fit in HBM.

    ``needed_bytes`` and ``available_bytes`` are those of one device, as the compiler prints them (two decimals of a
    GiB); ``at_peak`` is what would have filled them, None if the compiler left no report.
    """

    def __init__(
        self, what: str, *, needed_bytes: float, available_bytes: float, at_peak: PeakMemory | None = None
    ) -> None:
        self.needed_bytes, self.available_bytes, self.at_peak = needed_bytes, available_bytes, at_peak
        figures = (needed_bytes, available_bytes, needed_bytes - available_bytes)
        needed, available, over = (f"{each / 2**30:.2f}GiB" for each in figures)
        super().__init__(what, f"needs {needed} of the {available} of HBM of a device: {over} too many")

    def to_json(self) -> dict[str, Any]:
        """The answer as plain JSON values."""
        at_peak = self.at_peak and self.at_peak.to_json()
        figures = {"needed_bytes": self.needed_bytes, "available_bytes": self.available_bytes}
        return {"what": self.what, **figures, "at_peak": at_peak}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutOfMemory:
        """The inverse of ``to_json``."""
        at_peak = data["at_peak"] and PeakMemory.from_json(data["at_peak"])
        return cls(**{**data, "at_peak": at_peak})
