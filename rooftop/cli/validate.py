"""``rooftop validate``: predicted step times beside published ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.options import json_option
from rooftop.cli.output import console, emit_json
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from rooftop.validation import AccuracyReport, Errors, PublishedRuns
    from rooftop.validation.serving import ServingReport


@click.command("validate")
@click.option("--runs", "runs_path", type=click.Path(path_type=Path), help="Another table, with the same columns.")
@click.option("--worst", type=click.IntRange(min=0), default=10, show_default=True, help="How many runs to list.")
@click.option("--hidden", metavar="SHARES", help="Assume what hides: weight_gather=1,tensor=0.5 (docs/plan.md).")
@json_option
def command(runs_path: Path | None, worst: int, hidden: str | None, as_json: bool) -> None:
    """Predicted times beside published measurements of training and serving, misses included.

    Three levels: the bound, the uncalibrated prediction, and the prediction calibrated with one factor per chip from
    other models' runs; beside them a null model, the median FLOP/s per chip of other models. --json lists every run.

    \b
    Example: rooftop validate --worst 5
    """
    from rooftop.plan.training.assumptions import Assumptions
    from rooftop.validation import load_published, load_reasons, summarise
    from rooftop.validation.predict import predict
    from rooftop.validation.serving import serving_report

    assumptions = Assumptions() if hidden is None else Assumptions().with_hidden(hidden)
    serving = serving_report(runs_path)
    published = load_published(runs_path, training=not serving.comparisons)
    predicted, notes, unpredicted = [], {}, {}
    for run in published.runs:
        try:
            prediction = predict(run, assumptions)
        except (RooftopError, Infeasible) as error:
            unpredicted[run.id] = str(error)
            continue
        predicted.append((run, prediction.bound_s, prediction.uncalibrated_s))
        notes[run.id] = list(prediction.notes)
    report = summarise(
        [run for run, _, _ in predicted], [bound for _, bound, _ in predicted], [seconds for _, _, seconds in predicted]
    )
    reasons = load_reasons()
    if as_json:
        emit_json(_json(published, report, notes, unpredicted, reasons) | {"serving": serving.to_json()})
    else:
        if report.comparisons:
            _print(published, report, unpredicted, reasons, worst)
        if serving.comparisons:
            print_serving(serving, worst)


def _json(
    published: PublishedRuns,
    report: AccuracyReport,
    notes: dict[str, list[str]],
    unpredicted: dict[str, str],
    reasons: dict[str, str],
) -> dict[str, Any]:
    data = report.to_json()
    rows = [row | {"notes": notes[row["id"]], "reason": reasons.get(row["id"])} for row in data["rows"]]
    unusable = [
        {
            "source": one.source,
            "model": one.model,
            "chip": one.chip,
            "num_chips": one.num_chips,
            "why": one.why,
            "measured_memory_bytes": dict(one.measured_memory_bytes),
            "lines": list(one.lines),
        }
        for one in published.unusable
    ]
    counts = {
        "runs": len(rows),
        "unpredicted": [{"id": run, "why": why} for run, why in unpredicted.items()],
        "unusable": unusable,
        "serving_rows": published.serving_rows,
    }
    return {"rows": rows, "summary": data["summary"] | counts}


def _print(
    published: PublishedRuns, report: AccuracyReport, unpredicted: dict[str, str], reasons: dict[str, str], worst: int
) -> None:
    out = console()
    out.print(_summary_table(report))
    out.print("Errors of the step time in % (predicted / measured - 1), mean absolute where no other is named.")
    for group in report.groups:
        if group.note is not None and group.by == "chip":
            out.print(f"{group.name}: {group.note}.")
    if worst and report.comparisons:
        out.print(_worst_table(report, reasons, worst))
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


def _worst_table(report: AccuracyReport, reasons: dict[str, str], worst: int) -> Table:
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
