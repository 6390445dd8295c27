"""``rooftop validate``: predicted step times beside published ones."""

from __future__ import annotations

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
from rooftop.cli.output import emit_json, show

if TYPE_CHECKING:
    pass


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
    data = result.to_json()
    emit_json(data) if as_json else show(data, kind="validation", worst=top)
