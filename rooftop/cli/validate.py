"""``rooftop validate``: predicted step times beside published ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rooftop.cli.options import (
    COUNT_OR_ZERO,
    PATH,
    WORKLOAD,
    VerbCommand,
    assume_option,
    json_option,
    option,
    top_option,
)
from rooftop.cli.output import console, emit_json
from rooftop.core.quantities import format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from rooftop.library.explaining import ValidationResult
    from rooftop.validation import AccuracyReport, Errors
    from rooftop.validation.serving import ServingReport


@click.command("validate", cls=VerbCommand, examples=("rooftop validate --top 5",))
@option("--runs", group=WORKLOAD, type=PATH, metavar="FILE", help="Another table of runs, with the same columns (CSV).")
@assume_option(help="Shares of transfers that hide: weight_gather=1,tensor=0.5 (docs/plan.md).")
@top_option(type=COUNT_OR_ZERO, default="10", show_default=True, help="Runs to list, the worst first; 0: none.")
@json_option
def command(*, runs: Path | None, assume: str | None, top: int, as_json: bool) -> None:
    """Predicted times beside published measurements of training and serving, misses included.

    Three levels: the bound, the uncalibrated prediction, and the prediction calibrated with one factor per chip from
    other models' runs; beside them a null model, the median FLOP/s per chip of other models. --json lists every run.
    """
    from rooftop.library.explaining import validate

    result = validate(runs=runs, assume=assume)
    if as_json:
        emit_json(result.to_json())
        return
    if result.report.comparisons:
        _print(result, top)
    if result.serving.comparisons:
        print_serving(result.serving, top)


def _print(result: ValidationResult, worst: int) -> None:
    report, published, unpredicted = result.report, result.published, result.unpredicted
    out = console()
    out.print(_summary_table(report))
    out.print("Errors of the step time in % (predicted / measured - 1), mean absolute where no other is named.")
    for group in report.groups:
        if group.note is not None and group.by == "chip":
            out.print(f"{group.name}: {group.note}.")
    if worst and report.comparisons:
        out.print(_worst_table(report, result.reasons, worst))
        if any(one.calibrated_s is None for one in report.worst(worst)):
            out.print("* not calibrated")
    for run in report.beats_bound:
        out.print(f"[red]measured below the bound[/red], so an input is wrong: {run}")
    for run, why in unpredicted.items():
        out.print(f"not predicted: {run}: {why}", markup=False)
    out.print(
        f"{len(report.comparisons)} runs compared, {len(unpredicted)} not predicted, {len(published.unusable)} say too "
        f"little; {published.serving_rows} rows of serving are in tables of their own. --json has every run, "
        "reading and reason."
    )


def _summary_table(report: AccuracyReport) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="Predicted against published step times", box=SIMPLE_HEAD)
    table.add_column("runs of", overflow="fold")
    for heading in (
        "runs",
        "bound",
        "uncali-\nbrated",
        "cali-\nbrated",
        "\nmedian",
        "\nsigned",
        "null\nmodel",
        "\nmedian",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    by = None
    for group in report.groups:
        if by is not None and group.by != by:
            table.add_section()
        by = group.by
        bound, uncalibrated, calibrated, null = (
            group.errors[level] for level in ("bound", "uncalibrated", "calibrated", "null")
        )
        table.add_row(
            group.name,
            str(group.runs),
            _mean(bound),
            _mean(uncalibrated),
            _mean(calibrated),
            "-" if calibrated is None else f"{100 * calibrated.median_absolute:.1f}",
            "-" if calibrated is None else f"{100 * calibrated.mean:+.1f}",
            _mean(null),
            "-" if null is None else f"{100 * null.median_absolute:.1f}",
        )
    return table


def _mean(errors: Errors | None) -> str:
    return "-" if errors is None else f"{100 * errors.mean_absolute:.1f}"


def _worst_table(report: AccuracyReport, reasons: Mapping[str, str], worst: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Predicted worst", box=SIMPLE_HEAD)
    table.add_column("run, and the reason", overflow="fold")
    for heading in ("measured", "predicted", "error %", "null %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in report.worst(worst):
        alone = one.calibrated_s is None
        predicted = one.uncalibrated_s if one.calibrated_s is None else one.calibrated_s
        reason = reasons.get(one.run.id)
        table.add_row(
            Text(one.run.id if reason is None else f"{one.run.id}\n{reason}"),
            format_seconds(one.run.step_s),
            format_seconds(predicted),
            _percent(one.error(one.best_level)) + ("*" if alone else " "),
            _percent(one.error("null")),
        )
    return table


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f}"


_HEADINGS = {
    "max_hbm_flops": "max(HBM,\nFLOPs)",
    "bound": "\nbound",
    "uncalibrated": "uncali-\nbrated",
    "expected": "expec-\nted",
    "left_out": "left\nout",
    "null": "null\nmodel",
}


def print_serving(report: ServingReport, worst: int) -> None:
    """Errors by phase, every decode row, what beats its bound, and reasons for the ``worst`` rows."""
    out = console()
    out.print(_summary(report))
    out.print("Errors of the time of a step or prefill in %, mean absolute; in parentheses the largest.")
    _print_shares(report)
    out.print(_decode(report))
    if any(one.beats_bound for one in report.comparisons):
        out.print("! [red]measured below the bound[/red], so an input is wrong.")
    # A reason once, however many runs it explains.
    reasons: dict[str, list[float]] = {}
    for one in sorted(report.comparisons, key=lambda one: -abs(one.error("expected") or 0.0))[:worst]:
        why = f"{one.run.source}, {one.run.phase}: {one.reason or 'no reason is known'}"
        reasons.setdefault(why, []).append(one.error("expected") or 0.0)
    for why, errors in reasons.items():
        out.print(f"{', '.join(map(_percent, errors))} %: {why}", markup=False)
    for missing in report.unusable:
        out.print(f"not predicted: {missing.source} {missing.model}: {missing.why}", markup=False)


def _print_shares(report: ServingReport) -> None:
    """Which figures were chosen with measurements in sight, and what the levels beside them take instead."""
    for chip, shares in report.shares.items():
        for name, share in shares.items():
            if share["calibrated"]:
                console().print(
                    f"{chip} {name} {share['expected']:g}: {share['source']}. Uncalibrated {share['uncalibrated']:g}; "
                    "left out: as the decode rows of other shardings have it.",
                    markup=False,
                )


def _summary(report: ServingReport) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="Predicted against published times of serving", box=SIMPLE_HEAD)
    table.add_column("\nphase")
    table.add_column("\nruns", justify="right")
    for heading in _HEADINGS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, levels in report.groups.items():
        counts = [found.runs for found in levels.values() if found is not None]
        cells = [
            "-" if found is None else f"{100 * found.mean_absolute:.1f} ({100 * found.largest_absolute:.1f})"
            for found in (levels[level] for level in _HEADINGS)
        ]
        table.add_row(name, str(max(counts)), *cells)
    return table


def _decode(report: ServingReport) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Decode steps: errors in %", box=SIMPLE_HEAD)
    table.add_column("\nrun", overflow="fold")
    for heading in ("\nmeasured", *_HEADINGS.values(), "tokens\nmeant"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for one in report.comparisons:
        if one.run.phase != "decode":
            continue
        run = one.run
        if before != (before := f"{run.model.name} on {run.slice.name}"):
            table.add_row(Text(before))
        mesh = " ".join(f"{axis} {size}" for axis, size in (run.mesh or {}).items()) or "mesh searched"
        table.add_row(
            Text(f"{mesh}, {run.batch} x {run.context}"),
            format_seconds(run.measured_s),
            *(
                _percent(one.error(level)) + ("!" if level == "bound" and one.beats_bound else "")
                for level in _HEADINGS
            ),
            "-" if one.implied_context is None else f"{one.implied_context:,.0f}",
        )
    return table
