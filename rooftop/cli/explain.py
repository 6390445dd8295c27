"""``rooftop explain`` (a trace, a module, an HLO instruction), ``diff`` and ``validate``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from rooftop.cli.options import (
    COUNT_OR_ZERO,
    PATH,
    VerbCommand,
    frames_option,
    json_option,
    option,
    report_option,
    request_options,
    top_option,
)
from rooftop.cli.output import progress_bar, show
from rooftop.core.errors import RooftopError, refuse
from rooftop.core.files import write_text
from rooftop.requests.measuring import Validate
from rooftop.requests.programs import Explain
from rooftop.requests.words import RUN


@click.command(
    cls=VerbCommand,
    examples=(
        "rooftop explain run1",
        "rooftop explain trace --hlo step.hlo.txt --mesh data=2,tensor=4 --on v5e",
        "rooftop explain module.hlo --on v5p:2x2x4 --mesh X=16",
        "rooftop explain --op '%f = bf16[64]{0} fusion(bf16[64,128]{1,0} %w, bf16[128]{0} %x), kind=kLoop' --on v5p",
        "rooftop explain --diff run1 run2",
    ),
)
@request_options(Explain)
@option("--diff", group=RUN, type=(PATH, PATH), metavar="A B", help="Compare two runs, traces, plans or reports.")
@option("--demo", group=RUN, is_flag=True, help="Use the recorded run that comes with rooftop.")
@top_option(default="12")
@frames_option()
@report_option(help="Write a page with tables and plots of a run or trace here (HTML).")
@json_option
def command(
    *,
    request: Explain,
    diff: tuple[Path, Path] | None,
    demo: bool,
    top: int | str,
    frames: str,
    report: Path | None,
    as_json: bool,
) -> None:
    """Explain where the time of a program goes: of a run with a trace, any trace of JAX's profiler, or a module of HLO.

    Shows measured, compiled and planned time by scope and phase, then a verdict, the largest losses with their causes,
    and what to try. --op explains an HLO instruction, and --diff compares two runs, traces, plans or reports.
    """
    choices = {"RUN": request.path, "op": request.op, "diff": diff, "demo": demo}
    asked = [name for name, value in choices.items() if value]
    if len(asked) != 1:
        raise RooftopError(
            "explain", " and ".join(asked) or None, "one of: a run or a trace, --op HLO, --diff A B, --demo"
        )
    count = sys.maxsize if isinstance(top, str) else top
    if request.op or diff:
        refuse({"report": report}, f"nothing next to --{asked[0]}")
    if diff is not None:
        refuse(
            {
                "plan": request.plan, "hlo": request.hlo, "mesh": request.mesh, "on": request.on,
                "figure": request.figures,
            },
            "nothing next to --diff",
        )  # fmt: skip
        _difference(diff, count, as_json)
        return
    if demo:
        from rooftop.explain.demo import demo_run

        request = replace(request, path=demo_run())
    from rooftop.library.explaining import ExplainResult, OperationsResult, explain

    result = explain(request)
    if report is not None:
        write_text(report, result.page())
    if isinstance(result, OperationsResult):
        show(result.record, request=result.request, as_json=as_json)
    elif isinstance(result, ExplainResult):
        show(result.explained.record(top=count), request=result.request, as_json=as_json, top=count)
    else:
        show(result.report.record(top=count), request=result.request, as_json=as_json, frames=frames == "all")


def _difference(paths: tuple[Path, Path], count: int, as_json: bool) -> None:
    from rooftop.library.explaining import diff

    result = diff(*paths)
    show(result.difference, as_json=as_json, top=count)


@click.command("diff", cls=VerbCommand, examples=("rooftop diff ledger.json new.json", "rooftop diff run1 run2"))
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@top_option(default="12")
@json_option
def diff(*, before: Path, after: Path, top: int | str, as_json: bool) -> None:
    """Compare two runs, traces, plans, compilations or checks: what takes longer, what is new and what is gone."""
    from rooftop.library import explaining

    result = explaining.diff(before, after)
    show(result.difference, as_json=as_json, top=sys.maxsize if isinstance(top, str) else top)


@click.command(
    "validate",
    cls=VerbCommand,
    examples=("rooftop validate --top 5", "rooftop validate --compiled --only llama3.1-8b/v6e:2x4"),
)
@request_options(Validate)
@top_option(type=COUNT_OR_ZERO, default="10", help="Runs to list, the worst first; 0: none.")
@json_option
def validate(*, request: Validate, top: int, as_json: bool) -> None:
    """Compare predicted times with published measurements of training and serving, misses included.

    There are three levels: the bound, the uncalibrated prediction, and the prediction calibrated with one factor per
    chip from other models' runs. A null model is the median FLOP/s per chip of other models. --json lists every run.
    --compiled compiles our programs of runs on TPUs too, and sets the three times side by side.
    """
    from rooftop.library import explaining

    with progress_bar(shown=not as_json) as on_progress:
        result = explaining.validate(request, on_progress=on_progress)
    show(result.record, as_json=as_json, kind="validation", worst=top)
