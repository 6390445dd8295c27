"""The document of ``rooftop validate``: predicted next to published times of training, serving and engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from rooftop.core.quantities import format_seconds
from rooftop.present.document import HYPHEN, Chart, Document, Item, Items, ShownVerdict, Table, TableColumn, columns
from rooftop.present.documents.parts import prose
from rooftop.validation.accuracy import LEVELS, ComparisonRecord, Errors, Group
from rooftop.validation.compiled import LEVELS as COMPILED_LEVELS
from rooftop.validation.compiled import CompiledRuns
from rooftop.validation.engines import EngineGroup, EngineLevel, EnginesRecord, Metric
from rooftop.validation.memory import MemoryRecord
from rooftop.validation.report import ValidationRecord
from rooftop.validation.serving import ServingLevel, ServingRecord

_SERVING: dict[ServingLevel, str] = {
    "max_hbm_flops": "max(HBM, FLOPs)",
    "bound": "bound",
    "uncalibrated": f"uncali{HYPHEN}brated",
    "expected": f"expec{HYPHEN}ted",
    "left_out": "left out",
    "null": "null model",
}
_LEFT_OUT: EngineLevel = "left_out"
_ENGINES: dict[EngineLevel, str] = {
    "bound": "bound", "kernels": f"ker{HYPHEN}nels", "expected": f"expec{HYPHEN}ted", "left_out": "left out",
    "null": "null",
}  # fmt: skip
_EXPECTED: Literal["expected"] = "expected"
_NULL: Literal["null"] = "null"


class _Unusable(Protocol):
    """A row that is not used, and the reason."""

    @property
    def why(self) -> str: ...


def validation(answer: ValidationRecord, *, worst: int = 10) -> Document:
    """Errors of predictions by group, the ``worst`` runs, and what is missing."""
    return Document(
        title="Predictions next to published measurements",
        verdict=ShownVerdict(subject=f"calibrated by {answer.calibrated_by}" if answer.calibrated_by else ""),
        charts=(
            *(_compiled(answer.compiled) if answer.compiled else ()),
            *(_training(answer, worst) if answer.rows or answer.summary.unusable else ()),
            *(_memory(answer.memory) if answer.memory.rows else ()),
            *(_serving(answer.serving, worst) if answer.serving.rows or answer.serving.unusable else ()),
            *(_engines(answer.engines) if answer.engines.rows or answer.engines.unusable else ()),
        ),
    )


# ---- training -------------------------------------------------------------------------------------------------------


def _training(answer: ValidationRecord, worst: int) -> Iterator[Chart]:
    summary = answer.summary
    if answer.rows:
        yield from _errors(answer, worst)
    lines = [f"measured below the bound, so an input is wrong: {run}" for run in summary.beats_bound]
    lines += _not_used(summary.unusable)
    lines.append(
        f"{summary.runs} runs compared, {len(summary.unusable)} not used; {summary.serving_rows} rows of "
        "serving are in tables of their own. --json has every run, reading and reason."
    )
    yield prose("\n".join(lines))


def _not_used(unusable: Iterable[_Unusable]) -> list[str]:
    """A line for each reason why rows are not used."""
    reasons = Counter(entry.why for entry in unusable)
    return [f"not used: {count} with {why}" if count > 1 else f"not used: {why}" for why, count in reasons.items()]


def _errors(answer: ValidationRecord, worst: int) -> Iterator[Chart]:
    """Errors by group, and the ``worst`` runs."""
    summary = answer.summary
    yield _groups(summary.groups)
    notes = [
        f"{group.name}: {group.note}." for group in summary.groups if group.note is not None and group.by == "chip"
    ]
    about = (
        "Errors of the step time in % (predicted / measured - 1), mean absolute where no other is named. In 90%: the "
        "share in % of so many runs that the interval of a plan holds, where it is learnt from other models."
    )
    yield prose("\n".join((about, *notes)))
    if worst:
        yield _worst(answer.rows, worst)


def _compiled(compiled: CompiledRuns) -> Iterator[Chart]:
    """Published, planned and compiled times of runs, and errors by chip and kind of model."""
    rows = []
    for row in compiled.rows:
        if row.compiled_s is not None:
            planned, real = (_percent(row.error[level]) for level in COMPILED_LEVELS)
            seconds = (row.measured_s, row.planned_s, row.compiled_s)
            published_s, planned_s, compiled_s = map(format_seconds, seconds)
            rows.append((row.id, published_s, planned_s, planned, compiled_s, real))
    names = ("published", "planned", "error %", "compiled", "error %")
    if rows:
        yield Table(
            title="Published, planned and compiled step times", section="Compiled",
            columns=(TableColumn("run", "text", wrap=True), *columns(*names, text=0)), rows=tuple(rows),
        )  # fmt: skip
    lines = []
    for group in compiled.groups:
        planned, real = (_mean(group.errors[level]) for level in COMPILED_LEVELS)
        lines.append(f"{group.name}: {group.runs} compiled; planned {planned} % off, compiled {real} %, mean absolute.")
    lines += [f"not compiled: {row.id}: {row.why}" for row in compiled.rows if row.why]
    yield prose("\n".join(lines))


def _memory(memory: MemoryRecord) -> Iterator[Chart]:
    """Errors of planned memory by chip and kind, next to the null model."""
    names = ("runs", "planned", "signed", "largest", "null model")
    for title, statistics in (
        ("Planned against published memory of a chip", False),
        ("Planned memory of a chip against XLA:TPU's statistics", True),
    ):
        rows = tuple(
            (
                f"{group.chip}, {group.kind}",
                str(group.errors.runs),
                _mean(group.errors),
                f"{100 * group.errors.mean:+.1f}",
                f"{100 * group.errors.largest_absolute:.1f}",
                _mean(group.null),
            )
            for group in memory.groups
            if group.statistics == statistics
        )
        if rows:
            yield Table(title=title, section="Memory", columns=columns("chip and kind", *names), rows=rows)
    lines = [
        "Errors of bytes in % (planned / published - 1), mean absolute where no other is named. Null model: the median "
        "of other models' runs on the chip."
    ]
    if any(group.statistics for group in memory.groups):
        least, most = memory.statistics_over_heap
        lines.append(
            f"XLA:TPU's statistics have {least:.2f} to {most:.2f} times the temporaries that a program takes, nine "
            "times in ten."
        )
    lines += [f"not compared: {name}" for name in memory.not_compared]
    yield prose("\n".join(lines))


def _groups(groups: Sequence[Group]) -> Table:
    rows: list[tuple[str, ...]] = []
    by = None
    for group in groups:
        if by is not None and group.by != by:
            rows.append(())
        by = group.by
        bound, uncalibrated, calibrated, null = (group.errors[level] for level in LEVELS)
        rows.append(
            (
                group.name,
                str(group.runs),
                *map(_mean, (bound, uncalibrated, calibrated)),
                "-" if calibrated is None else f"{100 * calibrated.median_absolute:.1f}",
                "-" if calibrated is None else f"{100 * calibrated.mean:+.1f}",
                _mean(null),
                "-" if null is None else f"{100 * null.median_absolute:.1f}",
                "-" if group.covered is None else f"{100 * group.covered:.0f}% of {group.with_interval}",
            )
        )
    names = (
        "runs",
        "bound",
        f"uncali{HYPHEN}brated",
        f"cali{HYPHEN}brated",
        "median",
        "signed",
        "null model",
        "median",
        "in 90%",
    )
    return Table(
        title="Predicted against published step times",
        section="Training",
        columns=(
            TableColumn("runs of", "text", wrap=True),
            *(TableColumn(name, drop=1 if name in ("median", "signed") else 0) for name in names),
        ),
        rows=tuple(rows),
    )


def _mean(errors: Errors | None) -> str:
    return "-" if errors is None else f"{100 * errors.mean_absolute:.1f}"


def _worst(runs: Sequence[ComparisonRecord], worst: int) -> Table:
    """The runs with the largest errors, each with its reason below it."""
    listed = sorted(runs, key=lambda run: -abs(run.error[run.best_level] or 0.0))[:worst]
    rows = [
        (
            run.id if run.reason is None else f"{run.id}\n{run.reason}",
            format_seconds(run.measured_s),
            format_seconds(run.best_s),
            _percent(run.error[run.best_level]) + ("*" if run.calibrated_s is None else " "),
            _percent(run.error[_NULL]),
        )
        for run in listed
    ]
    return Table(
        title="Predicted worst",
        about="* not calibrated" if any(run.calibrated_s is None for run in listed) else "",
        columns=(
            TableColumn("run, and the reason", "text", wrap=True),
            *columns("measured", "predicted", "error %", "null %", text=0),
        ),
        rows=tuple(rows),
    )


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f}"


# ---- serving --------------------------------------------------------------------------------------------------------


def _serving(serving: ServingRecord, worst: int) -> Iterator[Chart]:
    """Errors by phase, every decode row, what beats its bound, and reasons for the ``worst`` rows."""
    if not serving.rows:
        yield Items(title="Serving", items=tuple(Item(line) for line in _not_used(serving.unusable)))
        return
    yield _phases(serving.summary)
    # Some figures were chosen with measurements in sight: what the levels next to them take instead.
    lines = ["Errors of the time of a step or prefill in %, mean absolute; in parentheses the largest."]
    lines += [
        f"{chip} {name} {share.expected:g}: {share.source}. Uncalibrated {share.uncalibrated:g}; left out: as "
        "the decode rows of other shardings have it."
        for chip, shares in serving.shares.items()
        for name, share in shares.items()
        if share.calibrated
    ]
    yield prose("\n".join(lines))
    yield _decode(serving)
    # A reason once, however many runs it explains.
    reasons: dict[str, list[float]] = {}
    for run in sorted(serving.rows, key=lambda run: -abs(run.error[_EXPECTED] or 0.0))[:worst]:
        why = f"{run.source}, {run.phase}: {run.reason or 'no reason is known'}"
        reasons.setdefault(why, []).append(run.error[_EXPECTED] or 0.0)
    items = [Item(f"{', '.join(map(_percent, errors))} %: {why}") for why, errors in reasons.items()]
    items += [Item(line) for line in _not_used(serving.unusable)]
    if items:
        yield Items(title="Reasons", items=tuple(items))


def _phases(summary: Mapping[str, Mapping[ServingLevel, Errors | None]]) -> Table:
    rows = []
    for name, levels in summary.items():
        counts = [errors.runs for errors in levels.values() if errors is not None]
        cells = [
            "-" if errors is None else f"{100 * errors.mean_absolute:.1f} ({100 * errors.largest_absolute:.1f})"
            for errors in (levels[level] for level in _SERVING)
        ]
        rows.append((name, str(max(counts)), *cells))
    return Table(
        title="Predicted against published times of serving",
        section="Serving",
        columns=(TableColumn("phase", "text", wrap=True), *columns("runs", *_SERVING.values(), text=0)),
        rows=tuple(rows),
    )


def _decode(serving: ServingRecord) -> Table:
    rows: list[tuple[str, ...]] = []
    before = None
    for run in serving.rows:
        if run.phase != "decode":
            continue
        if before != (before := f"{run.model} on {run.slice}"):
            rows.append((before, *[""] * (len(_SERVING) + 2)))
        mesh = " ".join(f"{axis} {size}" for axis, size in (run.mesh or {}).items()) or "mesh searched"
        rows.append(
            (
                f"{mesh}, {run.batch} x {run.context}",
                format_seconds(run.measured_s),
                *(
                    _percent(run.error[level]) + ("!" if level == "bound" and run.beats_bound else "")
                    for level in _SERVING
                ),
                "-" if run.implied_context is None else f"{run.implied_context:,.0f}",
            )
        )
    about = "! measured below the bound, so an input is wrong." if serving.beats_bound else ""
    return Table(
        title="Decode steps: errors in %",
        about=about,
        columns=(
            TableColumn("run", "text", wrap=True),
            TableColumn("measured"),
            *columns(*_SERVING.values(), "tokens meant", text=0),
        ),
        rows=tuple(rows),
    )


# ---- engines under load ---------------------------------------------------------------------------------------------


def _engines(engines: EnginesRecord) -> Iterator[Chart]:
    """Errors of mean TPOT and TTFT by engine, chip and model, what beats its bound, and rows that are not used."""
    if not engines.rows:
        yield Items(title="Engines", items=tuple(Item(line) for line in _not_used(engines.unusable)))
        return
    yield _latency(engines.groups, "tpot", "Predicted against published TPOT of engines under load", "Engines")
    yield _latency(engines.groups, "ttft", "Predicted against published TTFT of engines under load", "")
    lines = [
        "Errors of mean TPOT and TTFT in %, mean absolute; clients wait for each answer. Expected: the plan of a run, "
        "whose command is in --json; kernels: without the engine's overheads; left out, with the median and the signed "
        "mean: with overheads that fit other models' runs."
    ]
    lines += [
        f"measured below the bound of its {', '.join(run.beats_bound).upper()}, so an input is wrong: {run.id}"
        for run in engines.rows
        if run.beats_bound
    ]
    read = Counter(run.source for run in engines.rows if run.from_source)
    lines += [
        f"{count} rows do not say attention DP and experts of their servers: taken as {source} has them"
        for source, count in read.items()
    ]
    lines += _not_used(engines.unusable)
    yield prose("\n".join(lines))


def _latency(groups: Sequence[EngineGroup], metric: Metric, title: str, section: str) -> Table:
    rows = [
        (
            group.name,
            str(group.runs),
            *(_mean(group.errors[metric][level]) for level in _ENGINES),
            *_of_errors(group.errors[metric][_LEFT_OUT]),
            _covered(group, metric),
        )
        for group in groups
    ]
    names = ("runs", *_ENGINES.values(), "median", "signed", "in 90%")
    return Table(
        title=title,
        section=section,
        columns=(TableColumn("runs of", "text", wrap=True), *columns(*names, text=0)),
        rows=tuple(rows),
    )


def _of_errors(errors: Errors | None) -> tuple[str, str]:
    """Median absolute and mean signed error."""
    if errors is None:
        return "-", "-"
    return f"{100 * errors.median_absolute:.1f}", f"{100 * errors.mean:+.1f}"


def _covered(group: EngineGroup, metric: Metric) -> str:
    covered = group.covered[metric]
    return "-" if covered is None else f"{100 * covered:.0f}% of {group.with_interval[metric]}"
