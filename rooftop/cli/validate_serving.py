"""Predictions of serving beside published measurements, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftop.cli.output import console
from rooftop.quantities import format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from rooftop.validation.serving import ServingReport

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


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f}"
