"""``rooftop check``: what a compiled program wastes, and limits for CI."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rooftop.cli.options import FILE, frames_option, json_option, option, report_option, request_options, top_option
from rooftop.cli.output import emit_json, show
from rooftop.cli.programs.words import OUT, WITH, ScriptCommand, progress_line
from rooftop.core.errors import refuse
from rooftop.core.files import write_text
from rooftop.requests.programs import CheckProgram
from rooftop.requests.words import OUTPUT


@click.command(
    "check",
    cls=ScriptCommand,
    examples=(
        "rooftop check mypkg.mymodule:step --args 'bf16[8192_X, 4096]' 'bf16[4096, 16384]' --mesh X=16 --on v5e:4x4",
        "rooftop check --on v5e:4x4 --tokens 64Ki --save ledger.json -- python train.py",
        "rooftop check module.hlo --on v5p:2x2x4 --mesh X=16 --tokens 1Mi --save ledger.json",
        "rooftop check module.hlo --on v5p:2x2x4 --mesh X=16 --against ledger.json --max-time +2% --max-memory +1%",
    ),
)
@request_options(CheckProgram)
@WITH
@top_option(default="10", help="Operations and buffers to list, or all.")
@frames_option()
@option("--save", group=OUTPUT, type=FILE, help="Write the ledger here, for --against.")
@OUT
@option("--junit", group=OUTPUT, type=FILE, help="Write limits and findings here, as JUnit's XML.")
@report_option()
@json_option
def command(
    *,
    request: CheckProgram,
    releases: str | None,
    top: int | str,
    frames: str,
    save: Path | None,
    out: Path | None,
    junit: Path | None,
    report: Path | None,
    as_json: bool,
) -> int:
    """Check a compiled program without a plan: what it wastes, at which line, and what that is worth.

    Reads a function or your own script (compiled as in 'rooftop compile'; of a script the program that fits and whose
    calls take longest), a module of HLO or a folder of --xla_dump_to, or a saved report. Finds replicated arguments,
    missing donation, repeated and oversized collectives, arrays that the partitioner makes whole, copies into another
    layout, float32 traffic, padding and host transfers. With --against, compares with an earlier ledger; the status is
    1 if a limit does not hold.
    """
    request.refuse_unused()
    if request.form != "script":
        refuse({"out": out}, "nothing but with a script: its programs are many")
    from rooftop.library.programs.checking import checked, program_to_check
    from rooftop.library.programs.scripts import ScriptResult

    with progress_line(shown=not as_json) as on_progress:
        program = program_to_check(request, on_progress)
    if out is not None and isinstance(program, ScriptResult) and program.report.programs:
        program.write_files(out)
    result = checked(request, program)
    if save is not None:
        result.save(save)
    if junit is not None:
        result.write_junit(junit)
    if report is not None:
        write_text(report, result.page())
    answer = result.report.record(top=sys.maxsize if isinstance(top, str) else top)
    if as_json:
        emit_json(answer.to_json())
    else:
        files = {"ledger": save, "tests": junit, "page": report, "programs": out}
        show(answer, files, frames=frames == "all", top=0 if isinstance(top, str) else top)
    result.raise_if_infeasible()
    return 0 if result.holds else 1
