"""Parts of documents, from typed records: the version that wrote an answer, calibrations, and lines of ledgers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rooftop.core.ledger import Row
from rooftop.core.quantities import format_bytes
from rooftop.plan.documents import PlannedSlice
from rooftop.present.documents.parts import LedgerLine, SideFigures


def version_note(version: str, more: str = "") -> tuple[str, ...]:
    """The version of rooftop that wrote an answer."""
    return (f"Written by rooftop {version}{more}.",)


def calibrated_by(where: PlannedSlice) -> str:
    """The calibration of a slice, after its subject; empty without one."""
    return "" if where.calibrated is None else f", calibrated by {where.calibrated.by}"


@dataclass(kw_only=True)
class _SideSums:
    time_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    at_peak_s: float = 0.0

    def add(self, row: Row) -> None:
        """Add a row, its count applied."""
        count = float(row.count)
        self.time_s += count * float(row.expected_s)
        self.exposed_s += count * sum(float(moved.exposed_s) for moved in row.collectives)
        self.flops += count * float(sum(row.flops.values()) + row.kernel_flops)
        self.hbm_bytes += count * float(row.hbm_bytes)
        self.at_peak_s += count * max(map(float, row.time_s.values()), default=0.0)


@dataclass(kw_only=True)
class _LineSums:
    sides: dict[str, _SideSums] = field(default_factory=dict)
    moves: list[str] = field(default_factory=list)


def ledger_lines(
    ledgers: Mapping[str, Iterable[Row]], notes: Mapping[tuple[str, str], str] | None = None
) -> list[LedgerLine]:
    """Rows of the ledgers of several sides, joined on scope and phase in the order of the first; ``notes`` by both."""
    lines: dict[tuple[str, str], _LineSums] = {}
    for side, ledger in ledgers.items():
        for row in ledger:
            line = lines.setdefault(row.key, _LineSums())
            line.sides.setdefault(side, _SideSums()).add(row)
            line.moves += (
                f"{moved.kind} over {','.join(moved.axes)}: {format_bytes(float(row.count * moved.bytes))} {side}"
                for moved in row.collectives
            )
    return [
        LedgerLine(
            scope=key[0],
            phase=key[1],
            sides={side: SideFigures(**vars(sums)) for side, sums in line.sides.items()},
            moves=tuple(line.moves),
            notes=(notes[key],) if notes and key in notes else (),
        )
        for key, line in lines.items()
    ]
