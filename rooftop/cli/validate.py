"""``rooftop validate``: predicted step times beside published ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.output import emit_json, json_option, show
from rooftop.core.errors import Infeasible, RooftopError

if TYPE_CHECKING:
    from rooftop.validation import AccuracyReport, PublishedRuns


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
    data = _json(published, report, notes, unpredicted, reasons) | {"serving": serving.to_json()}
    emit_json(data) if as_json else show(data, kind="validation", worst=worst)


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
