"""The answer about an expression of sharded arrays, and the check of an einsum: what XLA:TPU compiles of a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rooftop.algebra.einsums import Case
from rooftop.arrays.mesh import MeshLayout
from rooftop.core.amounts import Amount, Count
from rooftop.core.ledger import Collective
from rooftop.core.records import Record, derived
from rooftop.simulate.expressions import ArrayFacts, ExpressionKind, MeasuredStrategies, PricedStrategy

#: A collective by what must agree: kind, mesh axes and payload.
Key = tuple[str, frozenset[str], int]


@dataclass(frozen=True, kw_only=True)
class CheckedCollective(Collective):
    """A collective of a program, executed ``count`` times.

    XLA does a ``ring`` as permutes between neighbours, and a ``synchronous`` one while nothing else runs. ``hidden_s``
    is the part of ``expected_s`` that overlaps other work, ``source`` 'file:line'.
    """

    count: Amount = 1.0
    ring: bool = False
    synchronous: bool = False
    hidden_s: Amount = 0.0
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckedProgram(Record):
    """A program by what it communicates and computes on one device, priced alike for plan and compiler.

    ``communication_s`` and ``compute_s`` are one after the other; nothing is assumed to overlap.
    """

    collectives: tuple[CheckedCollective, ...]
    flops: Amount
    communication_s: Amount
    compute_s: Amount

    @derived
    def time_s(self) -> Amount:
        """Seconds without any overlap."""
        return self.communication_s + self.compute_s

    @property
    def keys(self) -> Counter[Key]:
        """The collectives as a bag."""
        bag: Counter[Key] = Counter()
        for collective in self.collectives:
            key = collective.kind, frozenset(collective.axes), round(float(collective.bytes))
            bag[key] += round(collective.count)
        return bag

    def __str__(self) -> str:
        named = [
            f"{collective.kind} over {','.join(collective.axes)}"
            + (f" x {collective.count}" if collective.count > 1 else "")
            for collective in self.collectives
        ]
        return ", ".join(named) or "no collectives"


@dataclass(frozen=True, kw_only=True)
class EinsumCheck(Record):
    """The compiled ``program`` next to the ``planned`` one, which is the best strategy without overlap.

    ``agrees``: the compiler's collectives are those of the best strategy, or of one that costs the same. XLA's
    schedule takes ``scheduled_s``; in ``exposed_s`` of them the device waits for collectives.
    """

    program: CheckedProgram
    planned: CheckedProgram
    agrees: bool
    verdict: str
    scheduled_s: Amount
    exposed_s: Amount
    peak_bytes: Count
    compile_s: Amount
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, repr=False)
class ExpressionRecord(Record):
    """Arrays of an expression and the strategies that do it, the fastest first, as many as were asked for.

    ``level`` is the kind of the prices; without a ``slice`` there are neither prices nor a layout of the ``mesh``, and
    of a product without a mesh only its ``cases``.
    ``strategies_found`` counts all strategies. ``backward`` has the programs of the derivatives: of an einsum that of
    the output, then of the left and the right operand, of a collective that of its input.
    """

    request: Mapping[str, Any]
    expression: str
    kind: ExpressionKind
    dims: Mapping[str, int]
    mesh: MeshLayout
    slice: str | None = None
    level: str | None = None
    arrays: tuple[ArrayFacts, ...]
    cases: tuple[Case, ...] = ()
    strategies_found: Count = 0
    strategies: tuple[PricedStrategy, ...] = ()
    backward: Mapping[str, PricedStrategy] = field(default_factory=dict)
    compiled: EinsumCheck | None = None
    measured: MeasuredStrategies | None = None
