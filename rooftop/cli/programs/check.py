"""``rooftop check``: what a compiled program wastes, and limits for CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from rooftop.cli.options import (
    COUNT,
    FILE,
    GROWTH,
    TIME,
    frames_option,
    json_option,
    on_option,
    option,
    report_option,
    timeout_option,
    top_option,
)
from rooftop.cli.output import emit_json, show
from rooftop.cli.programs.words import (
    NO_CACHE,
    OUT,
    WITH,
    FunctionOptions,
    ScriptCommand,
    ScriptOptions,
    function_options,
    program_of,
    progress_line,
    refuse_script_options,
    required_slice,
    run_settings,
    script_options,
)
from rooftop.core.errors import RooftopError, refuse
from rooftop.core.files import write_text
from rooftop.requests.words import OUTPUT, RUN, WORKLOAD

if TYPE_CHECKING:
    from rooftop.library.programs.compiling import CompileResult
    from rooftop.library.programs.scripts import ScriptResult

#: Programs that ``rooftop check`` takes.
_PROGRAM = "module:function, a module of HLO, a folder of --xla_dump_to, a saved report, or -- python SCRIPT"


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
@click.argument("program", metavar="MODULE:FUNCTION|MODULE.hlo|FOLDER|REPORT.json|-- python SCRIPT", required=False)
@on_option(help="The slice, or for a module the kind of chip, that the program is compiled for.")
@function_options
@script_options
@option("--tokens", group=WORKLOAD, type=COUNT, help="Tokens of a step on all devices, for tokens a second.")
@timeout_option(help="Give up after this time: 90s, 10m.")
@NO_CACHE
@WITH
@option("--against", group=RUN, type=FILE, help="An earlier ledger to compare with, of --save or compile -o.")
@option("--max-time", group=RUN, type=GROWTH, help="Share by which a step may take longer than before: +2%.")
@option("--max-memory", group=RUN, type=GROWTH, help="Share by which the peak of memory may grow: +1%.")
@option("--fail-on", group=RUN, type=TIME, help="Fail if one finding is worth more than this time: 5ms.")
@top_option(default="10", help="Operations and buffers to list, or all.")
@frames_option()
@option("--save", group=OUTPUT, type=FILE, help="Write the ledger here, for --against.")
@OUT
@option("--junit", group=OUTPUT, type=FILE, help="Write limits and findings here, as JUnit's XML.")
@report_option()
@json_option
def command(
    *,
    program: str | None,
    on: str | None,
    arrays: tuple[str, ...],
    steps: int | None,
    min_flops: float | None,
    tokens: int | None,
    timeout: float | None,
    no_cache: bool,
    releases: str | None,
    against: Path | None,
    max_time: float | None,
    max_memory: float | None,
    fail_on: float | None,
    top: int | str,
    frames: str,
    save: Path | None,
    out: Path | None,
    junit: Path | None,
    report: Path | None,
    as_json: bool,
    **of_function: Unpack[FunctionOptions],
) -> int:
    """Check a compiled program without a plan: what it wastes, at which line, and what that is worth.

    Reads a function or your own script (compiled as in 'rooftop compile'; of a script the program that fits and whose
    calls take longest), a module of HLO or a folder of --xla_dump_to, or a saved report. Finds replicated arguments,
    missing donation, repeated and oversized collectives, arrays that the partitioner makes whole, copies into another
    layout, float32 traffic, padding and host transfers. With --against, compares with an earlier ledger; the status is
    1 if a limit does not hold.
    """
    checked = program_of(program, _PROGRAM)
    if isinstance(checked, str) and ":" not in checked and not Path(checked).exists():
        raise RooftopError("program", checked, f"{_PROGRAM}; there is no such path")
    saved = isinstance(checked, str) and checked.endswith(".json")
    where = "" if saved else required_slice(on)
    function: dict[str, object] = {"args": arrays, **of_function}
    compiled = isinstance(checked, str) and (saved or ":" not in checked or Path(checked).exists())
    of_script: ScriptOptions = {"steps": steps, "min_flops": min_flops}
    if isinstance(checked, list):
        refuse(function, "nothing with a script, which has its own")
    else:
        refuse({"out": out}, "nothing but with a script: its programs are many")
        refuse_script_options(of_script)
    if compiled:
        refuse(function | {"mesh": None}, "nothing but with module:function")
    for field, value in (("max-time", max_time), ("max-memory", max_memory)):
        if value is not None and against is None:
            raise RooftopError(field, value, "a ledger to compare with: --against FILE")
    if against is not None and not against.is_file():
        raise RooftopError("against", str(against), "the file of a ledger; there is none")
    from rooftop.library.programs.checking import check

    subject: CompileResult | ScriptResult | str
    if isinstance(checked, list):
        from rooftop.library.programs.scripts import compile_script

        with progress_line(shown=not as_json) as on_progress:
            subject = compile_script(
                checked,
                on=where,
                timeout=timeout,
                cache=not no_cache,
                on_progress=on_progress,
                **run_settings(of_script),
            )
        if out is not None and subject.report.programs:
            subject.write_files(out)
    elif compiled:
        subject = checked
    else:
        from rooftop.library.programs.compiling import inspect

        with progress_line(shown=not as_json) as on_progress:
            subject = inspect(
                checked,
                *arrays,
                on=where,
                timeout=timeout,
                cache=not no_cache,
                on_progress=on_progress,
                **of_function,
            )
    result = check(
        subject,
        on=on,
        mesh=of_function["mesh"],
        tokens=tokens,
        against=against,
        max_time=max_time,
        max_memory=max_memory,
        fail_on=fail_on,
        name=program,
    )
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
