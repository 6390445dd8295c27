"""The documents of ``rooftop matmul`` (arrays, strategies, their check) and of ``rooftop bench collectives``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.explain.compiled.checks import EinsumCheck, ExpressionRecord
from rooftop.present.document import Chart, Document, ShownVerdict, Table, TableColumn, columns
from rooftop.present.documents.parts import prose
from rooftop.profile.microbench.records import CollectivesRecord
from rooftop.simulate.expressions import ArrayFacts, HiddenCopy, MeasuredStrategies, PricedStep, PricedStrategy

_PRICES = {
    "bound": "times are lower bounds at peak rates, each step after the one before",
    "expected": "times are expected, at the named fractions of docs/evidence/achievable.md",
    "book": "times follow the book: whole shards on even rings",
}


def matmul(answer: ExpressionRecord) -> Document:
    """A sharded array, product or collective."""
    place = f" on {answer.slice}" if answer.slice else ""
    axes = ", ".join(f"{name}={size}" for name, size in answer.mesh.axes.items())
    sized = f"mesh {axes}{place}" if axes else "no sizes; --dims, --mesh and --on rank the ways to do it, with times"
    return Document(
        title=answer.expression,
        verdict=ShownVerdict(subject=answer.expression, no=_no(answer), details=(sized,)),
        charts=tuple(_charts(answer)),
    )


def _no(answer: ExpressionRecord) -> str:
    """A sentence if no strategy fits the memory of a device."""
    if not answer.strategies or any(strategy.fits for strategy in answer.strategies):
        return ""
    return "does not fit: every strategy needs more memory than a device has"


def _charts(answer: ExpressionRecord) -> Iterator[Chart]:
    if answer.arrays:
        yield _arrays(answer.arrays, layouts=answer.kind == "array")
    for case in answer.cases:
        over = f" over {','.join(case.axes)}" if case.axes else ""
        yield prose(f"Case {case.number}{over}: {case.rule}.")
    if answer.strategies:
        yield from _strategies(answer)
    for name, program in answer.backward.items():
        yield _steps(program.steps, "Backward" if name == "input" else f"Backward: derivative of the {name}")
    if answer.compiled is not None:
        yield from _compiled(answer.compiled)
    if answer.measured is not None:
        yield from _measured(answer.measured)


def _arrays(arrays: Sequence[ArrayFacts], *, layouts: bool) -> Table:
    rows = [
        (
            array.array,
            "x".join(map(str, array.local_shape)),
            format_bytes(array.device_bytes),
            format_bytes(array.total_bytes),
            format_bytes(array.copy_bytes),
            str(array.replication),
            *((f"{array.tpu_layout} {format_bytes(array.tpu_padded_bytes)}",) if layouts else ()),
        )
        for array in arrays
    ]
    layout = (TableColumn("TPU layout, padded", "text", wrap=True),) if layouts else ()
    names = columns("array", "local shape", "per device", "on all devices", "one copy", "copies", text=2)
    return Table(title="", columns=(*names, *layout), rows=tuple(rows))


def _strategies(answer: ExpressionRecord) -> Iterator[Chart]:
    count, listed = answer.strategies_found, answer.strategies
    if count > 1:
        rows = [
            (
                str(rank),
                format_seconds(strategy.time_s),
                strategy.bound,
                format_bytes(strategy.memory_bytes) + ("" if strategy.fits else " too much"),
                strategy.rule,
            )
            for rank, strategy in enumerate(listed, start=1)
        ]
        headings = (
            *columns("", "time", text=0),
            TableColumn("binds", "text"),
            TableColumn("memory"),
            TableColumn(f"strategy ({len(listed)} of {count}, best first)", "text", wrap=True),
        )
        yield Table(title="", columns=headings, rows=tuple(rows))
    best = listed[0]
    if not best.steps:
        yield prose("Nothing to do: it already is sharded so.")
        return
    yield _steps(best.steps, "")
    yield prose(f"{format_seconds(best.time_s)} in all, {best.bound} binds; {_price(best, answer.level)}.")
    if best.hidden:
        yield _hidden(best.hidden)


def _hidden(copies: Sequence[HiddenCopy]) -> Table:
    """The sizes from which the FLOPs outlast copies to and from the hosts."""
    rows = [
        (
            copy.array,
            format_seconds(copy.copy_s),
            f"{' '.join(copy.dims)} > {copy.hidden_above:,.0f}",
            f"{copy.size:,}",
        )
        for copy in copies
    ]
    names = columns("copy over PCIe", "time", "FLOPs outlast it from", "here", text=1)
    return Table(title="", columns=names, rows=tuple(rows))


def _price(strategy: PricedStrategy, level: str | None) -> str:
    """The sense of a strategy's time."""
    if any(step.op in ("gather_to_chip", "scatter_from_chip") for step in strategy.steps):
        return "times are simulated link by link, by shortest paths"
    if strategy.streamed:
        serial = format_seconds(sum(step.time_s for step in strategy.steps))
        return f"a lower bound at peak rates, with copies to and from the hosts next to the rest; {serial} one by one"
    return _PRICES[level or "bound"]


def _steps(steps: Sequence[PricedStep], title: str) -> Table:
    simulated = any(step.simulated_s is not None or step.mxu_utilisation is not None for step in steps)
    rows = []
    for step in steps:
        shown = "" if step.simulated_s is None else format_seconds(step.simulated_s)
        if step.mxu_utilisation is not None:
            shown = f"MXU {step.mxu_utilisation:.1%}"
        rows.append(
            (
                step.op,
                ",".join(step.axes),
                " * ".join(step.inputs),
                step.output,
                format_bytes(step.bytes) if step.bytes else "",
                format_count(step.flops) if step.flops else "",
                format_seconds(step.time_s) if step.time_s else "free",
                *((shown,) if simulated else ()),
            )
        )
    headings = (
        *columns("step", "axes", text=2),
        *(TableColumn(name, "text", wrap=True) for name in ("in", "out")),
        *columns("bytes", "FLOPs", "time", *(("simulated",) if simulated else ()), text=0),
    )
    return Table(title=title, columns=headings, rows=tuple(rows))


def _compiled(check: EinsumCheck) -> Iterator[Chart]:
    versions = ", ".join(f"{name} {version}" for name, version in check.versions.items())
    rows = [
        (
            moved.kind + (" (ring)" if moved.ring else ""),
            ",".join(moved.axes),
            format_bytes(float(moved.bytes)),
            str(moved.count),
            format_seconds(float(moved.expected_s)),
            format_seconds(float(moved.exposed_s)),
        )
        for moved in check.program.collectives
    ]
    verdict = ("Agrees: " if check.agrees else "Differs: ") + check.verdict
    title = f"XLA:TPU ({versions})"
    if rows:
        names = columns("collective", "axes", "bytes", "times", "price", "exposed", text=2)
        yield Table(title=title, columns=names, rows=tuple(rows))
        yield prose(verdict)
    else:
        yield prose(f"{title}: no collectives\n{verdict}")


def _measured(measured: MeasuredStrategies) -> Iterator[Chart]:
    rows = [
        (format_seconds(strategy.median_s), format_seconds(strategy.fastest_s), strategy.rule)
        for strategy in measured.strategies
    ]
    headings = (*columns("median", "fastest", text=0), TableColumn("strategy", "text", wrap=True))
    yield Table(title=f"Measured on {measured.devices}", columns=headings, rows=tuple(rows))
    if measured.emulated:
        yield prose(EMULATED)


#: A caution about times of devices that a CPU emulates.
EMULATED = "The devices are emulated on CPU: these times say that it runs, nothing about an accelerator."


# ---- measured collectives --------------------------------------------------------------------------------------------


def collectives(answer: CollectivesRecord) -> Document:
    """The times of collectives, next to the planned ones of a slice."""
    measured, planned = answer.measured, answer.slice is not None
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    axes = ", ".join(f"{name}={size}" for name, size in answer.mesh.axes.items())
    rows: list[tuple[str, ...]] = []
    before = ""
    for timed in measured.collectives:
        if before and timed.kind != before:
            rows.append(())
        prices = (timed.planned.bound_s, timed.planned.expected_s) if planned else ()
        rows.append(
            (
                timed.kind if timed.kind != before else "",
                format_bytes(timed.bytes),
                format_seconds(timed.median_s),
                format_seconds(timed.fastest_s),
                str(timed.runs),
                f"{format_bytes(timed.wire_bytes_per_s)}/s",
                *("" if seconds is None else format_seconds(seconds) for seconds in prices),
            )
        )
        before = timed.kind
    names = (
        "collective",
        "bytes",
        "median",
        "fastest",
        "runs",
        "bandwidth",
        *(("bound", "expected") if planned else ()),
    )
    lines = [
        "bytes: the payload of one device. bandwidth: what one device sends, by the median time; of N devices it is "
        "(N-1)/N of the payload, twice that in an all_reduce, and all of it in a permute.",
        f"A call that does nothing takes {format_seconds(measured.empty_call_s)}; every time includes it.",
    ]
    if planned:
        lines.append(f"bound, expected: planned for {answer.slice}, not for the local devices.")
    if measured.emulated:
        lines.append(EMULATED)
    return Document(
        title="Collectives",
        verdict=ShownVerdict(
            subject=f"{measured.devices}, {versions}, {measured.date}",
            details=(f"mesh {axes}; over {','.join(answer.axes)}; {answer.dtype}",),
        ),
        charts=(Table(title="", columns=columns(*names), rows=tuple(rows)), prose("\n".join(lines))),
    )
