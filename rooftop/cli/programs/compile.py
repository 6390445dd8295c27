"""``rooftop compile``: plans, your own scripts and JAX functions, compiled by XLA without a device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from rooftop.cli.options import (
    FILE,
    calibration_option,
    check_option,
    frames_option,
    json_option,
    on_option,
    option,
    output_option,
    perfetto_option,
    report_option,
    timeout_option,
    top_option,
    xla_option,
    xprof_option,
)
from rooftop.cli.output import emit_json, show
from rooftop.cli.programs.words import (
    NO_CACHE,
    OUT,
    WITH,
    FunctionOptions,
    ScriptCommand,
    ScriptOptions,
    compiler_options_of,
    function_options,
    program_of,
    progress_line,
    refuse_script_options,
    required_slice,
    run_settings,
    script_options,
)
from rooftop.core.errors import RooftopError, refuse
from rooftop.core.files import write_json, write_text
from rooftop.requests.words import OUTPUT

if TYPE_CHECKING:
    from rooftop.library.programs.compiling import CompileResult, EmbedCompileResult


@click.command(
    cls=ScriptCommand,
    examples=(
        "rooftop compile plan.json",
        "rooftop compile --on v5e:4x4 -- python train.py --layers 2",
        "rooftop compile mypkg.mymodule:step --args 'bf16[8192_X, 4096]' 'bf16[4096, F_Y]' \\\n"
        "    --dims F=16384 --mesh X=4,Y=4 --on v5e:4x4",
    ),
)
@click.argument("program", metavar="PLAN.json|MODULE:FUNCTION|-- python SCRIPT", required=False)
@on_option(help="The slice to compile a script or a function for, such as v5e:4x4.")
@function_options
@xla_option()
@script_options
@calibration_option(help="Price a plan by the fractions that rooftop calibrate measured (JSON).")
@check_option(help="Build checks into a plan of embeddings: nan, bounds, buffers.")
@timeout_option(help="Give up after this time: 90s, 10m.")
@NO_CACHE
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
    program: str | None,
    on: str | None,
    arrays: tuple[str, ...],
    compiler_options: tuple[str, ...],
    steps: int | None,
    min_flops: float | None,
    calibration: Path | None,
    check: str | None,
    timeout: float | None,
    no_cache: bool,
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
    **of_function: Unpack[FunctionOptions],
) -> int:
    """Compile ahead of time with XLA:TPU or XLA:GPU, without a TPU or a GPU, and read the compiler's result.

    For -- python SCRIPT, run your own script with a slice in the place of JAX's devices: nothing is executed, and every
    large jit is compiled and reported.

    For a PLAN.json of 'rooftop plan train', compare plan and program: FLOPs, memory, collectives and time by scope and
    phase, and what only one of them has. For a plan of 'rooftop plan embed', report the memory that SparseCores need
    for each stack of tables, and the overlap of whole steps. For MODULE:FUNCTION, any function of JAX arrays, report
    the compiled ledger and a roofline for every op.
    """
    subject = program_of(program, "a plan.json, module:function, or -- python SCRIPT")
    of_script: ScriptOptions = {"steps": steps, "min_flops": min_flops}
    function: dict[str, object] = {"args": arrays, **of_function, "compiler-option": compiler_options}
    files = {"save": save, "perfetto": perfetto, "xprof": xprof, "report": report}
    if isinstance(subject, list):
        refuse(function | {"check": check}, "nothing with a script, which has its own")
        refuse({"save": save, "perfetto": perfetto, "xprof": xprof}, "nothing with a script: it has many programs")
        return _compile_script(
            subject, on=required_slice(on), options=of_script, timeout=timeout, cache=not no_cache, top=top,
            out=out, report=report, output=output, as_json=as_json,
        )  # fmt: skip
    refuse({"out": out}, "nothing but with a script: its programs are many")
    refuse_script_options(of_script)
    from rooftop.library.programs.compiling import CompileResult, compile, inspect

    result: CompileResult | EmbedCompileResult
    if Path(subject).suffix == ".json":
        refuse(function | {"on": on}, "nothing with a plan, which says all that is needed")
        from rooftop.library.inputs import plan_of
        from rooftop.plan.embedding.plan import EmbedPlan

        plan = plan_of(subject)
        if isinstance(plan, EmbedPlan):
            refuse(files, "nothing with a plan of embeddings: it has many programs")
        with progress_line(shown=not as_json) as on_progress:
            result = compile(
                plan,
                calibration=calibration,
                check=check,
                timeout=timeout,
                cache=not no_cache,
                save=save is not None,
                on_progress=on_progress,
            )
    elif ":" in subject:
        refuse({"calibration": calibration}, "nothing with a function, which has no plan")
        refuse({"check": check}, "nothing but with a plan of embeddings: its programs run on SparseCores")
        with progress_line(shown=not as_json) as on_progress:
            result = inspect(
                subject,
                *arrays,
                on=required_slice(on),
                compiler_options=compiler_options_of(compiler_options),
                timeout=timeout,
                cache=not no_cache,
                save=save is not None,
                on_progress=on_progress,
                **of_function,
            )
    else:
        raise RooftopError("program", subject, "a plan.json written by rooftop plan, or module:function")
    answer = result.report.record(top=sys.maxsize if isinstance(top, str) else top)
    if output is not None:
        write_json(output, answer.to_json())
    if isinstance(result, CompileResult):
        _write_files(result, **files)
    if as_json:
        emit_json(answer.to_json())
    elif isinstance(result, CompileResult):
        names = {"report": output, "page": report, "executable": save, "timeline": perfetto, "profile": xprof}
        if result.refusal is not None:
            show(answer, {name: names[name] for name in ("report", "page")})
        else:
            show(answer, names, cached=result.cached, frames=frames == "all")
    else:
        show(answer, {"report": output})
    result.raise_if_infeasible()
    return 0


def _compile_script(
    words: list[str],
    *,
    on: str,
    options: ScriptOptions,
    timeout: float | None,
    cache: bool,
    top: int | str,
    out: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Run a script on a slice, and show its programs."""
    from rooftop.target.running import Command

    Command.parse(words)
    from rooftop.library.programs.scripts import compile_script

    with progress_line(shown=not as_json) as on_progress:
        result = compile_script(
            words,
            on=on,
            timeout=timeout,
            cache=cache,
            on_progress=on_progress,
            **run_settings(options),
        )
    answer = result.report.record(top=sys.maxsize if isinstance(top, str) else top)
    if result.report.programs or result.report.run.error is None:
        # A script that failed before its first program has only its error.
        if output is not None:
            write_json(output, answer.to_json())
        if report is not None:
            write_text(report, result.page())
        if out is not None:
            result.write_files(out)
        show(answer, {"report": output, "page": report, "programs": out}, as_json=as_json)
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
