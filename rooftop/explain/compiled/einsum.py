"""A strategy of the algebra next to the program that XLA:TPU compiles for the same einsum or resharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rooftop.algebra.einsums import Einsum, Strategy, priced, strategies
from rooftop.algebra.expression import Reshard
from rooftop.algebra.pricing import Prices
from rooftop.algebra.resharding import reshard
from rooftop.algebra.steps import Step
from rooftop.arrays import ShardedArray
from rooftop.compiler.compiling import Compiled, CompileRequest, compile_ahead_of_time
from rooftop.compiler.ledger import read_ledger
from rooftop.compiler.machine.schedule import ScheduleTimeline, timeline
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Collective
from rooftop.core.quantities import dtype_bytes, format_seconds

#: Prices that differ by less are called the same.
SAME = 0.01

#: A collective by what must agree: kind, mesh axes and payload.
Key = tuple[str, frozenset[str], int]


@dataclass(frozen=True, kw_only=True)
class EinsumProgram:
    """A program by what it communicates and computes on one device, priced alike for plan and compiler.

    ``communication_s`` and ``compute_s`` are one after the other; nothing is assumed to overlap.
    """

    collectives: tuple[Collective, ...]
    counts: tuple[float, ...]
    flops: float
    communication_s: float
    compute_s: float

    @property
    def time_s(self) -> float:
        """Seconds without any overlap."""
        return self.communication_s + self.compute_s

    @property
    def keys(self) -> Counter[Key]:
        """The collectives as a bag."""
        bag: Counter[Key] = Counter()
        for collective, count in zip(self.collectives, self.counts, strict=True):
            bag[collective.kind, frozenset(collective.axes), round(float(collective.bytes))] += round(count)
        return bag

    def __str__(self) -> str:
        named = [
            f"{collective.kind} over {','.join(collective.axes)}" + (f" x {count}" if count > 1 else "")
            for collective, count in zip(self.collectives, self.counts, strict=True)
        ]
        return ", ".join(named) or "no collectives"


@dataclass(frozen=True, kw_only=True)
class EinsumComparison:
    """``agrees``: the compiler's collectives are those of the best strategy, or of one that costs the same."""

    planned: EinsumProgram
    compiled: EinsumProgram
    schedule: ScheduleTimeline
    agrees: bool
    verdict: str


def planned_program(strategy: Strategy, prices: Prices) -> EinsumProgram:
    """A strategy as a program. Collectives of one device alone are left out."""
    result = [
        Collective(kind=step.collective, axes=step.axes, bytes=cost.bytes, wire_bytes=0.0, critical=True)
        for step, cost in zip(strategy.steps, strategy.costs, strict=True)
        if step.collective is not None and prices.mesh.size(*step.axes) > 1
    ]
    moving = sum(cost.time_s for step, cost in zip(strategy.steps, strategy.costs, strict=True) if step.collective)
    dtype = next((step.inputs[0].dtype for step in strategy.steps if step.multiplies), "bf16")
    return EinsumProgram(
        collectives=tuple(result),
        counts=(1,) * len(result),
        flops=strategy.flops,
        communication_s=moving,
        compute_s=_compute_s(strategy.flops, dtype, prices),
    )


def compiled_program(compiled: Compiled, schedule: ScheduleTimeline, prices: Prices, dtype: str) -> EinsumProgram:
    """The compiled program, its collectives priced as ours are."""
    seconds = [
        prices.collective_s(collective.collective.kind, collective.collective.axes, collective.collective.bytes)
        for collective in schedule.collectives
    ]
    entries = tuple(
        replace(collective.ledger_entry, time_s=collective.by_resource(price_s))
        for collective, price_s in zip(schedule.collectives, seconds, strict=True)
    )
    counts = tuple(collective.collective.executions for collective in schedule.collectives)
    flops = float(read_ledger(compiled.module, compiled.mesh.shape, compiled.mesh).flops())
    return EinsumProgram(
        collectives=entries,
        counts=counts,
        flops=flops,
        communication_s=sum(count * price_s for count, price_s in zip(counts, seconds, strict=True)),
        compute_s=_compute_s(flops, dtype, prices),
    )


def compare(
    candidates: Sequence[Strategy], compiled: Compiled, prices: Prices, dtype: str = "bf16"
) -> EinsumComparison:
    """Set a compiled program next to strategies without overlap, best first."""
    schedule = timeline(compiled.module, compiled.mesh)
    theirs = compiled_program(compiled, schedule, prices, dtype)
    ours = [planned_program(candidate, prices) for candidate in candidates]
    best = ours[0]
    like = next((place for place, candidate in enumerate(ours) if candidate.keys == theirs.keys), None)
    same = like == 0 or (like is not None and _near(ours[like].time_s, best.time_s))
    return EinsumComparison(
        planned=best,
        compiled=theirs,
        schedule=schedule,
        agrees=same,
        verdict=_verdict(best, theirs, like, same),
    )


def check(expression: object, prices: Prices) -> dict[str, Any]:
    """Compile an expression for the slice and compare; JSON values ``compiled``, ``planned``, ``agrees``, ``verdict``.

    Raises RooftopError for what cannot be compiled: a single array, arrays on hosts or single chips, GPUs.
    """
    if prices.mesh.slice.chip.kind != "tpu":
        raise RooftopError("compile", prices.mesh.slice.name, "a TPU slice: XLA:TPU is the compiler that is here")
    request, candidates, dtype = _request(expression, prices)
    compiled = compile_ahead_of_time(request)
    result = compare(candidates, compiled, prices, dtype)
    collectives = [
        asdict(entry)
        | {"axes": list(entry.axes), "time_s": dict(entry.time_s), "count": count}
        | {"ring": collective.collective.hops > 0, "synchronous": collective.collective.synchronous}
        | {"hidden_s": collective.hidden_s, "source": collective.collective.source}
        for entry, count, collective in zip(
            result.compiled.collectives, result.compiled.counts, result.schedule.collectives, strict=True
        )
    ]
    return {
        "compiled": {
            "collectives": collectives,
            "flops": result.compiled.flops,
            "communication_s": result.compiled.communication_s,
            "compute_s": result.compiled.compute_s,
            "time_s": result.compiled.time_s,
            "schedule": {
                "total_s": result.schedule.total_s,
                "compute_s": result.schedule.compute_s,
                "exposed_s": result.schedule.exposed_s,
            },
            "peak_bytes": compiled.peak_bytes,
            "compile_s": compiled.compile_s,
            "versions": dict(compiled.versions),
        },
        "planned": {
            "collectives": [
                [collective.kind, list(collective.axes), collective.bytes] for collective in result.planned.collectives
            ],
            "flops": result.planned.flops,
            "communication_s": result.planned.communication_s,
            "compute_s": result.planned.compute_s,
            "time_s": result.planned.time_s,
        },
        "agrees": result.agrees,
        "verdict": result.verdict,
    }


def _request(expression: object, prices: Prices) -> tuple[CompileRequest, Sequence[Strategy], str]:
    """The compile request, the strategies to compare with it, and the dtype of the multiplication."""
    if isinstance(expression, Einsum):
        arrays: tuple[ShardedArray, ...] = (expression.left, expression.right, expression.output)
        candidates: Sequence[Strategy] = strategies(expression, prices, overlapped=False)
        dtype = max(expression.left.dtype, expression.right.dtype, key=dtype_bytes)
        return _plain(arrays, prices), candidates, dtype
    if isinstance(expression, Reshard):
        if expression.source.at or expression.target.at:
            raise RooftopError(
                "compile", str(expression.source), "arrays in the HBM of the mesh, which XLA can reshard"
            )
        path = reshard(expression.source, expression.target, prices)
        arrays = (expression.source, expression.target)
        return _plain(arrays, prices), [priced(path, arrays[:1], prices)], expression.source.dtype
    if isinstance(expression, Step):
        name = str(expression).split(" -> ")[0]
        arguments = {"expression": name, "dims": dict(prices.dims)}
        request = CompileRequest(
            mesh=prices.mesh, program="rooftop.programs.einsum.sharded:lower_steps", arguments=arguments
        )
        return request, [priced((expression,), expression.inputs, prices)], expression.output.dtype
    raise RooftopError("compile", str(expression), "an einsum, a resharding or a collective")


def _plain(arrays: Iterable[ShardedArray], prices: Prices) -> CompileRequest:
    arguments = {"arrays": [str(array) for array in arrays], "dims": dict(prices.dims)}
    return CompileRequest(mesh=prices.mesh, program="rooftop.programs.einsum.sharded:lower", arguments=arguments)


def _compute_s(flops: float, dtype: str, prices: Prices) -> float:
    return flops / prices.mesh.slice.device_flops_per_s(dtype) if flops else 0.0


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(one, other)


def _verdict(best: EinsumProgram, theirs: EinsumProgram, like: int | None, same: bool) -> str:
    """One line that compares both programs at the same prices."""
    times = f"{format_seconds(theirs.time_s)} against {format_seconds(best.time_s)} without overlap"
    if like == 0:
        return f"XLA's collectives are those of the best strategy ({theirs})."
    if same:
        return f"XLA chose another strategy of the same price ({theirs}; ours: {best})."
    if _near(theirs.time_s, best.time_s):
        return f"other collectives of the same price: XLA {theirs}; ours {best}."
    if theirs.time_s < best.time_s:
        return f"XLA found better: {theirs}, {times} for {best}."
    which = f", number {like + 1} of ours" if like is not None else ""
    return f"the plan is better: XLA chose {theirs}{which}, {times} for {best}."
