"""Planned next to compiled, row by row: what XLA does that was not planned, and what it leaves out.

Rows join on (scope, phase); within a key, collectives join on their mesh axes and kind. A row that one side has and
the other lacks is a finding, not an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rooftop.core.amounts import Amount
from rooftop.core.ledger import Ledger, Row
from rooftop.core.quantities import format_bytes, format_count
from rooftop.core.records import Record, derived

#: Two figures are equal when they differ by less than this share of the larger.
TOLERANCE = 1e-6

#: A collective that another kind may stand for. XLA:TPU writes a ReduceScatter over a whole slice as an AllReduce of
#: which every device keeps its part, and sometimes an AllGather as an AllReduce of zeros with one part filled.
SPELLED_AS: Mapping[str, str] = {"reduce_scatter": "all_reduce", "all_gather": "all_reduce"}


def stands_for(compiled: str, planned: str) -> bool:
    """Return True if a compiled kind of collective is another spelling of the planned one."""
    return SPELLED_AS.get(planned) == compiled


@dataclass(frozen=True, kw_only=True)
class JoinedCollective(Record):
    """One kind of collective over the same axes on both sides: bytes per device and step (None: absent).

    ``compiled_kinds`` differs from ``kind`` where the compiler spells the planned collective in another way.
    """

    kind: str
    axes: tuple[str, ...]
    planned_bytes: Amount | None
    compiled_bytes: Amount | None
    compiled_kinds: tuple[str, ...] = ()

    @property
    def spelled(self) -> str:
        """The compiler's spelling, if it differs from the plan."""
        return "" if self.compiled_kinds in ((), (self.kind,)) else " and ".join(self.compiled_kinds)

    @property
    def agrees(self) -> bool:
        """True if both sides have it, with the same bytes."""
        return _same(self.planned_bytes or 0.0, self.compiled_bytes or 0.0)

    def __str__(self) -> str:
        return f"{self.kind} over {','.join(self.axes)}" + (f" (as {self.spelled})" if self.spelled else "")


@dataclass(frozen=True, kw_only=True)
class JoinedRow(Record):
    """One (scope, phase) on both sides, figures per device and step."""

    scope: str
    phase: str
    planned_flops: Amount
    compiled_flops: Amount
    collectives: tuple[JoinedCollective, ...]

    @property
    def unexpected(self) -> tuple[JoinedCollective, ...]:
        """Collectives that were compiled and not planned."""
        return tuple(collective for collective in self.collectives if not collective.planned_bytes)

    @property
    def missing(self) -> tuple[JoinedCollective, ...]:
        """Collectives that were planned and not compiled."""
        return tuple(collective for collective in self.collectives if not collective.compiled_bytes)

    @derived
    def agrees(self) -> bool:
        """True if FLOPs and every collective are the same on both sides."""
        return _same(self.planned_flops, self.compiled_flops) and all(
            collective.agrees for collective in self.collectives
        )

    @derived
    def verdict(self) -> str:
        """One line: 'as planned', or every difference by name."""
        parts = []
        if not _same(self.planned_flops, self.compiled_flops):
            compiled, planned = format_count(self.compiled_flops, "FLOPs"), format_count(self.planned_flops, "FLOPs")
            parts.append(f"{compiled} for {planned}")
        for item in self.collectives:
            compiled, planned = format_bytes(item.compiled_bytes or 0.0), format_bytes(item.planned_bytes or 0.0)
            if item in self.unexpected:
                parts.append(f"unexpected {item} of {compiled}")
            elif item in self.missing:
                parts.append(f"missing {item} of {planned}")
            elif not item.agrees:
                parts.append(f"{item}: {compiled} for {planned}")
        return "; ".join(parts) or ", ".join(
            ["as planned", *(str(collective) for collective in self.collectives if collective.spelled)]
        )


def join(planned: Ledger, compiled: Ledger) -> list[JoinedRow]:
    """Both ledgers side by side, in the order of the planned one, then what only the compiler has.

    FLOPs are matmul FLOPs, those of hand-written kernels included, of every dtype; counts are applied on both sides.
    Rows without matmuls and collectives on either side are left out: compilers do not show elementwise work by scope.
    """
    plan, real = planned.by_key(), compiled.by_key()
    joined = []
    for scope, phase in dict.fromkeys([*plan, *real]):
        mine, theirs = plan.get((scope, phase), []), real.get((scope, phase), [])
        row = JoinedRow(
            scope=scope,
            phase=phase,
            planned_flops=_flops(mine),
            compiled_flops=_flops(theirs),
            collectives=_join_collectives(_collectives(mine), _collectives(theirs)),
        )
        if row.planned_flops or row.compiled_flops or row.collectives:
            joined.append(row)
    return joined


def _join_collectives(
    planned: dict[tuple[str, tuple[str, ...]], float], compiled: dict[tuple[str, tuple[str, ...]], float]
) -> tuple[JoinedCollective, ...]:
    joined = []
    left = dict(compiled)
    for (kind, axes), planned_bytes in planned.items():
        other = SPELLED_AS.get(kind, kind)
        kinds = (kind,) if other == kind or (other, axes) in planned else (kind, other)
        result = {kind: left.pop((kind, axes)) for kind in kinds if (kind, axes) in left}
        joined.append(
            JoinedCollective(
                kind=kind,
                axes=axes,
                planned_bytes=planned_bytes,
                compiled_bytes=sum(result.values()) if result else None,
                compiled_kinds=tuple(result),
            )
        )
    joined += [
        JoinedCollective(kind=kind, axes=axes, planned_bytes=None, compiled_bytes=nbytes, compiled_kinds=(kind,))
        for (kind, axes), nbytes in left.items()
    ]
    return tuple(joined)


def _flops(rows: Iterable[Row]) -> float:
    return sum(float(row.count) * (sum(map(float, row.flops.values())) + float(row.kernel_flops)) for row in rows)


def _collectives(rows: Iterable[Row]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes by kind and axes (in alphabetical order, since their order changes nothing), counts applied."""
    totals: dict[tuple[str, tuple[str, ...]], float] = {}
    for row in rows:
        for collective in row.collectives:
            key = collective.kind, tuple(sorted(collective.axes))
            nbytes = float(row.count) * float(collective.bytes)
            if nbytes:
                totals[key] = totals.get(key, 0.0) + nbytes
    return totals


def _same(first: float, second: float) -> bool:
    return abs(first - second) <= TOLERANCE * max(abs(first), abs(second))
