"""``rooftop explain`` (a trace, a module, an HLO instruction), ``diff`` and ``validate``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click

from rooftop.cli.options import (
    COUNT_OR_ZERO,
    PATH,
    VerbCommand,
    figure_option,
    frames_option,
    json_option,
    mesh_option,
    on_option,
    option,
    report_option,
    request_options,
    top_option,
)
from rooftop.cli.output import progress_bar, show
from rooftop.core.errors import RooftopError, refuse
from rooftop.core.files import write_text
from rooftop.requests.measuring import Validate
from rooftop.requests.words import HARDWARE, RUN


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
@click.argument("path", metavar="[RUN|TRACE|MODULE]", type=PATH, required=False)
@on_option(help="The chip, or a slice of it, whose roofs count. [default: the trace's own]")
@figure_option()
@option("--plan", group=HARDWARE, type=PATH, metavar="FILE", help="The plan to compare with. [default: the run's own]")
@mesh_option(help="Mesh axes in the order of device ids: X=2,Y=4. [default: the run's own]")
@option(
    "--hlo", group=RUN, multiple=True, type=PATH, metavar="FILE", help="A compiled module, for a trace without its own."
)
@option("--op", "lines", group=RUN, multiple=True, metavar="HLO", help="Explain an HLO instruction, or several.")
@option("--diff", group=RUN, type=(PATH, PATH), metavar="A B", help="Compare two runs, traces, plans or reports.")
@option("--demo", group=RUN, is_flag=True, help="Use the recorded run that comes with rooftop.")
@top_option(default="12")
@frames_option()
@report_option(help="Write a page with tables and plots of a run or trace here (HTML).")
@json_option
def command(
    *,
    path: Path | None,
    on: str | None,
    figures: dict[str, float],
    plan: Path | None,
    mesh: str | None,
    hlo: tuple[Path, ...],
    lines: tuple[str, ...],
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
    choices = {"RUN": path, "op": lines, "diff": diff, "demo": demo}
    asked = [name for name, value in choices.items() if value]
    if len(asked) != 1:
        raise RooftopError(
            "explain", " and ".join(asked) or None, "one of: a run or a trace, --op HLO, --diff A B, --demo"
        )
    if demo:
        from rooftop.explain.demo import demo_run

        path = demo_run()
    of_trace = {"plan": plan, "hlo": hlo, "mesh": mesh, "report": report}
    useless = [name for name, value in of_trace.items() if value and path is None]
    useless += [name for name, value in (("on", on), ("figure", figures)) if value and diff]
    if useless:
        raise RooftopError(useless[0], choices[asked[0]], f"nothing next to --{asked[0]}")
    count = sys.maxsize if isinstance(top, str) else top
    if path is not None and _is_module(path):
        _module(path, {"plan": plan, "hlo": hlo, "figure": figures}, mesh, on, report, count, frames == "all", as_json)
    elif path is not None:
        if not path.exists():
            accepted = "a run, a trace of JAX's profiler (*.xplane.pb) or a folder with one; there is no such path"
            raise RooftopError("trace", str(path), accepted)
        _trace(path, plan, hlo, mesh, on, figures, report, count, as_json)
    elif diff is not None:
        _difference(diff, count, as_json)
    else:
        _operations(lines, on, figures, as_json)


def _is_module(path: Path) -> bool:
    """True for a module of HLO: by its suffix, or a folder of dumped ones."""
    dumped = path.is_dir() and any(path.glob("*after_optimizations*"))
    return dumped or (path.suffix in (".hlo", ".txt", ".pb") and not path.name.endswith(".xplane.pb"))


def _module(
    path: Path,
    others: Mapping[str, object],
    mesh: str | None,
    on: str | None,
    report: Path | None,
    count: int,
    frames: bool,
    as_json: bool,
) -> None:
    refuse(others, "nothing with a module: it has no trace")
    if on is None:
        raise RooftopError("on", None, "the chip or slice that the module is compiled for, such as v5e:4x4")
    from rooftop.library.programs.compiling import explain_module

    result = explain_module(path, on=on, mesh=mesh)
    if report is not None:
        write_text(report, result.page())
    show(result.report.record(top=count), as_json=as_json, frames=frames)


def _operations(lines: tuple[str, ...], on: str | None, figures: dict[str, float], as_json: bool) -> None:
    from rooftop.library.explaining import explain_operations

    result = explain_operations(*lines, on=on, figures=figures)
    show(result.record, as_json=as_json)


def _difference(paths: tuple[Path, Path], count: int, as_json: bool) -> None:
    from rooftop.library.explaining import diff

    result = diff(*paths)
    show(result.difference, as_json=as_json, top=count)


def _trace(
    path: Path,
    plan: Path | None,
    hlo: tuple[Path, ...],
    mesh: str | None,
    on: str | None,
    figures: dict[str, float],
    report: Path | None,
    count: int,
    as_json: bool,
) -> None:
    from rooftop.library.explaining import explain

    result = explain(path, plan=plan, hlo=hlo, mesh=mesh, on=on, figures=figures)
    if report is not None:
        write_text(report, result.page())
    show(result.explained.record(top=count), as_json=as_json, top=count)


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
