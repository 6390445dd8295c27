"""Advice, from rules with evidence in the trace and in the compiled module. No evidence, no advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rooftop.arrays.tiles import mxu_padding
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.core.records import Record
from rooftop.core.rounding import next_multiple
from rooftop.explain.measured.columns import ExplainedRow
from rooftop.explain.measured.modules import OpOrigin, TracedProgram
from rooftop.explain.measured.roofs import Roofs
from rooftop.hardware import Chip
from rooftop.profile.facts import COMPUTE
from rooftop.profile.measured import Measured, MeasuredCollective, MeasuredOp

#: Smallest shares of a step for which the rules give advice.
_HOST, _EXPOSED, _PADDED, _SLOW, _RECOMPUTE, _SPREAD = 0.10, 0.05, 0.05, 0.10, 0.10, 0.10
_ALONE = 0.10
#: A matmul with a smaller useful share is padded; an op that reaches a smaller share of its roof is slow.
_USEFUL, _OF_ROOF = 0.80, 0.50
#: The side of the systolic arrays of TPUs up to v5p, for an unknown chip.
_TILE = 128
_HOST_ADVICE = {
    "compiles": "a program is compiled again within the steps: keep shapes, dtypes and static arguments as they are",
    "copies to devices": "put the next batch on the devices while a step runs (jax.device_put ahead of time)",
    "fetches results": "read results a step later, and fewer of them: dispatch the next step first",
    "waits for another thread": "what the main thread waits for is too slow: more threads, fetched further ahead",
    "sleeps": "nothing runs while the program sleeps: dispatch the next step before it",
    "dispatches": "a step is too short for its dispatch: more work in one program (jax.lax.scan, larger batches)",
    "runs Python": "do this in another thread, ahead of time, or less often: dispatch the next step before it",
}


@dataclass(frozen=True, kw_only=True)
class Advice(Record):
    """``what`` to try, and why: the ``rule``, its ``evidence``, the source line, and the seconds of a step at stake."""

    rule: str
    what: str
    evidence: str
    source: str
    seconds: float


def advise(
    measured: Measured,
    programs: Mapping[int, TracedProgram],
    rows: tuple[ExplainedRow, ...],
    roof: Roofs | None,
    *,
    chip: Chip | None,
    planned: bool,
) -> tuple[Advice, ...]:
    """The advice of all rules, what is worth most first.

    ``chip`` is that of the devices, if it is known; ``planned`` says that the rows have a plan to compare with.
    """
    if not measured.step_s:
        return ()
    rules = (
        *_gathered(measured, programs, rows, planned),
        *_host_bound(measured),
        *_padded(measured, chip),
        *_exposed(measured, programs),
        *_uneven(measured),
        *_slow(measured, roof),
        *_recomputed(measured),
        *_sparse(measured),
    )
    return tuple(sorted(rules, key=lambda rule: -rule.seconds))


def origin_of(collective: MeasuredCollective, programs: Mapping[int, TracedProgram]) -> OpOrigin | None:
    """Origin of a collective's operand, if the trace has its module."""
    return next(
        (program.origins[collective.name] for program in programs.values() if collective.name in program.origins), None
    )


def _gathered(
    measured: Measured, programs: Mapping[int, TracedProgram], rows: tuple[ExplainedRow, ...], planned: bool
) -> Iterator[Advice]:
    """Activations that the partitioner gathers because no sharding of the operation that uses them is known."""
    plan = {
        (row.scope, row.phase, collective.kind)
        for row in rows
        for collective in row.collectives
        if collective.planned_bytes
    }
    for item in measured.collectives:
        source = origin_of(item, programs)
        place = item.facts.place
        if source is None or item.facts.kind not in ("all_gather", "all_to_all") or source.argument or source.asked:
            continue
        if planned and (place.scope, place.phase, item.facts.kind) in plan:
            continue
        whole = "" if item.facts.bytes is None else f" of {format_bytes(item.facts.bytes)}"
        yield Advice(
            rule="gathered_activation",
            what=(
                f"say how the result of {_file(source.source) or source.made_by} is split: a sharding constraint there "
                "(jax.lax.with_sharding_constraint, or out_sharding) saves the gather if the operation can run on parts"
            ),
            evidence=(
                f"{item.name}, an {item.facts.kind}{whole} over {','.join(item.facts.axes)}, is called for by no "
                "sharding of the "
                "program: the partitioner inserts it for the operation at "
                f"{_file(item.facts.source) or 'an unknown line'}. It "
                f"gathers what {source.made_by} computes ({_file(source.source) or source.op_name or 'no source'}), "
                "no weight"
            ),
            source=item.facts.source,
            seconds=item.exposed_s,
        )


def _host_bound(measured: Measured) -> Iterator[Advice]:
    between = [wait for wait in measured.idle.waits if wait.reason in _HOST_ADVICE]
    if measured.idle.between_s < _HOST * measured.step_s or not between:
        return
    first = between[0]
    where = f" at {first.where}" if first.where else ""
    inner = f" ({first.what})" if first.what else ""
    yield Advice(
        rule="host_bound",
        what=_HOST_ADVICE[first.reason],
        evidence=(
            f"between executions the devices idle {format_seconds(measured.idle.between_s)} of "
            f"{format_seconds(measured.step_s)} a "
            f"step; in {format_seconds(first.seconds)} of that the host {first.reason}{where}{inner}"
        ),
        source=first.where,
        seconds=measured.idle.between_s,
    )


def _padded(measured: Measured, chip: Chip | None) -> Iterator[Advice]:
    """Matmuls with a dim that does not fill the systolic array, grouped by the size of the dim."""
    if chip is not None and chip.kind != "tpu":
        return
    tile = _TILE if chip is None else chip.mxu_tile
    whole = sum(op.count * (op.facts.flops or 0.0) for op in measured.ops)
    groups: dict[float, list[tuple[MeasuredOp, str]]] = {}
    for op in measured.ops:
        if op.facts.matmul is None:
            continue
        for name, size in zip(("contracts", "puts out"), op.facts.matmul[1:], strict=True):
            if mxu_padding(8, size, tile, tile).useful < _USEFUL:
                groups.setdefault(size, []).append((op, name))
    for size, ops in groups.items():
        own = {op.name: op for op, _ in ops}.values()
        flops = sum(op.count * (op.facts.flops or 0.0) for op in own)
        if flops < _PADDED * whole:
            continue
        full = next_multiple(size, tile)
        first, verb = ops[0]
        yield Advice(
            rule="padded_dim",
            what=(
                f"a multiple of {tile} for the dim of {size:.0f}, or several of them packed into {full:.0f}, where the "
                "model allows"
            ),
            evidence=(
                f"{first.name} {verb} a dim of {size:.0f}, {size / full:.0%} of the {full:.0f} that the {tile} x "
                f"{tile} systolic "
                f"arrays of a TPU take; {flops / whole:.0%} of the FLOPs are in matmuls with such a dim"
            ),
            source=first.facts.source,
            seconds=sum(op.time_s for op in own) * (1 - size / full),
        )


def _exposed(measured: Measured, programs: Mapping[int, TracedProgram]) -> Iterator[Advice]:
    """Collectives that the device waits for, grouped by kind and axes."""
    groups: dict[tuple[str, tuple[str, ...], bool], list[MeasuredCollective]] = {}
    for collective in measured.collectives:
        groups.setdefault((collective.facts.kind, collective.facts.axes, collective.facts.role == "whole"), []).append(
            collective
        )
    for (kind, axes, whole), group in groups.items():
        exposed = sum(member.exposed_s for member in group)
        if exposed < _EXPOSED * measured.step_s:
            continue
        first = group[0]
        operand = origin_of(first, programs)
        line = f" ({_file(operand.source)})" if operand and operand.source else ""
        waits = f"; its operand is made by {operand.made_by}{line}" if operand and not operand.argument else ""
        if whole:
            how = "the device waits for all of it"
            what = "work that does not depend on it, to run beside it: a later use, an earlier start, more microbatches"
        else:
            how = f"{format_seconds(sum(member.hidden_s for member in group))} pass beside compute"
            what = (
                "more work between its beginning and its end, or less to move: a larger batch a device, a smaller axis"
            )
        yield Advice(
            rule="exposed_collective",
            what=what,
            evidence=(
                f"{kind} over {','.join(axes) or 'unknown axes'} is exposed for {format_seconds(exposed)} a step, "
                f"in {len(group)} "
                f"op{'s' if len(group) > 1 else ''}: {how}. Most is {first.name}: {format_seconds(first.exposed_s)} of "
                f"{format_seconds(first.in_flight_s)} under way{waits}"
            ),
            source=first.facts.source,
            seconds=exposed,
        )


def _uneven(measured: Measured) -> Iterator[Advice]:
    counted = [step for step in measured.steps if step.counted]
    seconds = sorted(step.seconds for step in counted)
    middle = seconds[len(seconds) // 2]
    worst = max(counted, key=lambda step: step.seconds)
    if len(seconds) > 2 and worst.seconds > (1 + _SPREAD) * middle:
        yield Advice(
            rule="uneven_steps",
            what="look at that step alone: what its host does only then (evaluation, a checkpoint, a compilation)",
            evidence=(
                f"step {worst.number} takes {format_seconds(worst.seconds)}, the median step {format_seconds(middle)}"
            ),
            source="",
            seconds=(worst.seconds - middle) / len(seconds),
        )


def _slow(measured: Measured, roof: Roofs | None) -> Iterator[Advice]:
    for op in measured.ops if roof is not None else ():
        if op.facts.category != COMPUTE or op.time_s < _SLOW * measured.step_s or roof is None:
            continue
        bound = roof.bound_s(op.facts)
        name = max(bound, key=lambda item: bound[item])
        share = op.count * bound[name] / op.time_s
        if 0 < share < _OF_ROOF:
            yield Advice(
                rule="below_roof",
                what="larger or better aligned shapes, fewer copies around it, or a kernel of your own",
                evidence=f"{op.name} takes {format_seconds(op.time_s)} a step, of which {name} needs {share:.0%}",
                source=op.facts.source,
                seconds=op.time_s * (1 - share),
            )


def _recomputed(measured: Measured) -> Iterator[Advice]:
    spent = sum(row.time_s for row in measured.rows if row.phase == "recompute")
    if spent >= _RECOMPUTE * measured.step_s:
        yield Advice(
            rule="recomputed",
            what="a remat policy that saves more (rooftop plan train lists those that fit)",
            evidence=f"{format_seconds(spent)} of {format_seconds(measured.step_s)} a step go into a second forward "
            "pass",
            source="",
            seconds=spent,
        )


def _file(source: str) -> str:
    return source.rpartition("/")[2]


def _sparse(measured: Measured) -> Iterator[Advice]:
    """SparseCores: work without overlap, batches that take several passes, and dropped ids."""
    work = measured.sparse
    alone = max((core.alone_s for core in work.cores), default=0.0)
    if alone > _ALONE * measured.step_s:
        busiest = max(work.cores, key=lambda core: core.alone_s)
        yield Advice(
            rule="sparse_core_alone",
            what="pipelining: look the next batch's ids up while this one's dense layers run, with XLA's option for it "
            "(xla_tpu_rerun_latency_hiding_scheduler_post_sc_assignment)",
            evidence=f"SparseCore {busiest.core} of TPU {busiest.device} works for {format_seconds(busiest.busy_s)} a "
            f"step, in {format_seconds(alone)} of which its TensorCore computes nothing",
            source="",
            seconds=alone,
        )
    if work.minibatches > 1:
        yield Advice(
            rule="minibatching",
            what="higher limits of ids per partition (rooftop embed stats observes them), or a smaller batch",
            evidence=f"a step takes up to {work.minibatches} passes over the tables: its batch exceeds the limits",
            source="",
            seconds=max((core.busy_s for core in work.cores), default=0.0) * (1 - 1 / work.minibatches),
        )
    if work.dropped_ids:
        yield Advice(
            rule="dropped_ids",
            what="higher limits of ids per partition (rooftop embed stats), or minibatching instead of dropping",
            evidence=f"the host says that {work.dropped_ids} ids were dropped in the counted steps: they train nothing",
            source="",
            seconds=0.0,
        )
