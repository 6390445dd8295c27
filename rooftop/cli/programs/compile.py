"""``rooftop compile``: plans, your own scripts and JAX functions, compiled by XLA without a device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from rooftop.cli.options import (
    FILE,
    frames_option,
    json_option,
    option,
    output_option,
    perfetto_option,
    report_option,
    request_options,
    top_option,
    xprof_option,
)
from rooftop.cli.output import show
from rooftop.cli.programs.words import OUT, WITH, ScriptCommand, progress_line
from rooftop.core.errors import refuse
from rooftop.core.files import write_json, write_text
from rooftop.requests.programs import Compile
from rooftop.requests.words import OUTPUT

if TYPE_CHECKING:
    from rooftop.library.programs.compiling import CompileResult


@click.command(
    cls=ScriptCommand,
    examples=(
        "rooftop compile plan.json",
        "rooftop compile --on v5e:4x4 -- python train.py --layers 2",
        "rooftop compile mypkg.mymodule:step --args 'bf16[8192_X, 4096]' 'bf16[4096, F_Y]' \\\n"
        "    --dims F=16384 --mesh X=4,Y=4 --on v5e:4x4",
    ),
)
@request_options(Compile)
@WITH
@top_option(default="10", help="Operations and buffers to list, or all.")
@OUT
@frames_option()
@option("--save", group=OUTPUT, type=FILE, help="Write the executable here, with the versions that compiled it.")
@perfetto_option(help="Write the compiled timeline here, for ui.perfetto.dev.")
@xprof_option()
@report_option()
@output_option(help="Write the JSON report here.")
@json_option
def command(
    *,
    request: Compile,
    releases: str | None,
    top: int | str,
    out: Path | None,
    frames: str,
    save: Path | None,
    perfetto: Path | None,
    xprof: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Compile ahead of time with XLA:TPU or XLA:GPU, without a TPU or a GPU, and read the compiler's result.

    For -- python SCRIPT, run your own script with a slice in the place of JAX's devices: nothing is executed, and every
    large jit is compiled and reported.

    For a PLAN.json of 'rooftop plan train', compare plan and program: FLOPs, memory, collectives and time by scope and
    phase, and what only one of them has. For a plan of 'rooftop plan embed', report the memory that SparseCores need
    for each stack of tables, and the overlap of whole steps. For MODULE:FUNCTION, any function of JAX arrays, report
    the compiled ledger and a roofline for every op.
    """
    request.refuse_unused()
    timelines = {"perfetto": perfetto, "xprof": xprof}
    if request.form == "script":
        refuse({"save": save, **timelines}, "nothing with a script: it has many programs")
        from rooftop.target.running import Command

        Command.parse(cast("Sequence[str]", request.program))
    else:
        refuse({"out": out}, "nothing but with a script: its programs are many")
    if request.form == "file":
        from rooftop.plan.embedding.plan import EmbedPlan
        from rooftop.requests.inputs import plan_of

        if isinstance(plan_of(cast("Path | str", request.program)), EmbedPlan):
            files = {"save": save, **timelines, "report": report}
            refuse(files, "nothing with a plan of embeddings: it has many programs")
    from rooftop.library.programs.compiling import CompileResult
    from rooftop.library.programs.requested import compile
    from rooftop.library.programs.scripts import ScriptResult
    from rooftop.library.results import in_answer

    request = replace(request, save=request.save or save is not None)
    with progress_line(shown=not as_json) as on_progress:
        result = compile(request, on_progress=on_progress)
    answer = result.report.record(top=sys.maxsize if isinstance(top, str) else top)
    names, asked = {"report": output, "page": report}, result.request
    # A script that failed before its first program has only its error.
    is_shown = not isinstance(result, ScriptResult) or result.report.programs or result.report.run.error is None
    if output is not None and is_shown:
        write_json(output, answer.to_json() | in_answer(asked))
    if isinstance(result, ScriptResult):
        if is_shown:
            if report is not None:
                write_text(report, result.page())
            if out is not None:
                result.write_files(out)
            show(answer, names | {"programs": out}, request=asked, as_json=as_json)
    elif isinstance(result, CompileResult):
        _write_files(result, save, perfetto, xprof, report)
        if result.refusal is not None:
            show(answer, names, request=asked, as_json=as_json)
        else:
            names |= {"executable": save, "timeline": perfetto, "profile": xprof}
            show(answer, names, request=asked, as_json=as_json, cached=result.cached, frames=frames == "all")
    else:
        show(answer, {"report": output}, request=asked, as_json=as_json)
    result.raise_if_infeasible()
    return 0


def _write_files(
    result: CompileResult, save: Path | None, perfetto: Path | None, xprof: Path | None, report: Path | None
) -> None:
    """Write the files that are asked for; of a program that does not fit, the page alone."""
    if report is not None:
        write_text(report, result.page())
    if result.refusal is not None:
        return
    if save is not None:
        result.write_executable(save)
    if perfetto is not None:
        result.write_perfetto(perfetto)
    if xprof is not None:
        result.write_xprof(xprof)
