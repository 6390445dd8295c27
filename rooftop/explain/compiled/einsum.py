"""A strategy of the algebra next to the program that XLA:TPU compiles for the same einsum or resharding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

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
from rooftop.core.ledger import Row
from rooftop.core.quantities import dtype_bytes, format_seconds
from rooftop.explain.compiled.checks import CheckedCollective, CheckedProgram, EinsumCheck
from rooftop.roofline.collectives import price
from rooftop.simulate.expressions import ShardedExpression

#: Prices that differ by less are called the same.
SAME = 0.01


def planned_program(strategy: Strategy, prices: Prices) -> CheckedProgram:
    """A strategy as a program. Collectives of one device alone are left out."""
    moving = [
        (step.collective, step.axes, cost)
        for step, cost in zip(strategy.steps, strategy.costs, strict=True)
        if step.collective is not None
    ]
    return CheckedProgram(
        collectives=tuple(
            CheckedCollective(
                kind=kind,
                axes=axes,
                bytes=cost.bytes,
                critical=True,
                expected_s=cost.time_s,
                exposed_s=cost.time_s,
                wire_bytes=float(cost.bytes * price(kind, prices.mesh.span(*axes)).wire_per_byte),
            )
            for kind, axes, cost in moving
            if prices.mesh.size(*axes) > 1
        ),
        flops=strategy.flops,
        communication_s=sum(cost.time_s for _, _, cost in moving),
        compute_s=sum(
            cost.time_s for step, cost in zip(strategy.steps, strategy.costs, strict=True) if step.collective is None
        ),
    )


def compiled_program(compiled: Compiled, schedule: ScheduleTimeline, prices: Prices, dtype: str) -> CheckedProgram:
    """The compiled program, its collectives priced as ours are."""
    collectives = []
    communication_s = 0.0
    for entry in schedule.collectives:
        moved = entry.collective
        price_s = prices.collective_s(moved.kind, moved.axes, moved.bytes)
        communication_s += moved.executions * price_s
        collectives.append(
            CheckedCollective(
                **vars(replace(entry.ledger_entry, time_s=entry.by_resource(price_s))),
                count=moved.executions,
                ring=moved.hops > 0,
                synchronous=moved.synchronous,
                hidden_s=entry.hidden_s,
                source=moved.source,
            )
        )
    ledger = read_ledger(compiled.module, compiled.mesh.shape, compiled.mesh)
    return CheckedProgram(
        collectives=tuple(collectives),
        flops=float(ledger.flops()),
        communication_s=communication_s,
        compute_s=sum(_matmul_s(row, dtype, prices) for row in ledger),
    )


def compare(candidates: Sequence[Strategy], compiled: Compiled, prices: Prices, dtype: str = "bf16") -> EinsumCheck:
    """Set a compiled program next to strategies without overlap, best first."""
    schedule = timeline(compiled.module, compiled.mesh)
    theirs = compiled_program(compiled, schedule, prices, dtype)
    ours = [planned_program(candidate, prices) for candidate in candidates]
    best = ours[0]
    like = next((place for place, candidate in enumerate(ours) if candidate.keys == theirs.keys), None)
    if like is not None:
        # The same program: the compiler's bytes of HBM may differ in what it fuses.
        theirs = replace(theirs, compute_s=ours[like].compute_s)
    same = like == 0 or (like is not None and _near(ours[like].time_s, best.time_s))
    return EinsumCheck(
        program=theirs,
        planned=best,
        agrees=same,
        verdict=_verdict(best, theirs, like, same),
        scheduled_s=schedule.total_s,
        exposed_s=schedule.exposed_s,
        peak_bytes=compiled.peak_bytes,
        compile_s=compiled.compile_s,
        versions=compiled.versions,
    )


def check(expression: ShardedExpression, prices: Prices) -> EinsumCheck:
    """Compile an expression for the slice, and compare it with the strategies that do it.

    Raises RooftopError for what cannot be compiled: a single array, arrays on hosts or single chips, GPUs.
    """
    if prices.mesh.slice.chip.kind != "tpu":
        raise RooftopError("compile", prices.mesh.slice.name, "a TPU slice: XLA:TPU is the compiler that is here")
    request, candidates, dtype = _request(expression, prices)
    return compare(candidates, compile_ahead_of_time(request), prices, dtype)


def _request(expression: ShardedExpression, prices: Prices) -> tuple[CompileRequest, Sequence[Strategy], str]:
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


def _matmul_s(row: Row, dtype: str, prices: Prices) -> float:
    """Seconds of the matmuls of a row as strategies price theirs: the longer of FLOPs and HBM; 0 of other rows."""
    flops = float(sum(row.flops.values()))
    if not flops:
        return 0.0
    peak_s = flops / prices.mesh.slice.device_flops_per_s(dtype)
    return float(row.count) * max(peak_s, float(row.hbm_bytes) / prices.rates.hbm_bytes_per_s)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(one, other)


def _verdict(best: CheckedProgram, theirs: CheckedProgram, like: int | None, same: bool) -> str:
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
