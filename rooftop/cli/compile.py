"""``rooftop compile``: the program of a plan, or any JAX function, compiled by XLA:TPU or XLA:GPU without a device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rooftop.cli.options import (
    FILE,
    OUTPUT,
    PARALLELISM,
    RUN,
    WORKLOAD,
    VerbCommand,
    calibration_option,
    check_option,
    json_option,
    layout_option,
    mesh_option,
    on_option,
    option,
    output_option,
    perfetto_option,
    report_option,
    timeout_option,
    top_option,
    xprof_option,
)
from rooftop.cli.output import emit_json, show
from rooftop.core.errors import RooftopError
from rooftop.core.files import write_json, write_text

if TYPE_CHECKING:
    from rooftop.library.compiling import CompileResult, EmbedCompileResult


class _SeveralArrays(VerbCommand):
    """A command whose ``--args`` takes all the words that follow it, up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread, taking = list[str](), False
        for word in args:
            if word.startswith("-"):
                taking = word == "--args"
                if not taking:
                    spread.append(word)
            else:
                spread += ["--args", word] if taking else [word]
        return super().parse_args(ctx, spread)


@click.command(
    cls=_SeveralArrays,
    examples=(
        "rooftop compile plan.json",
        "rooftop compile mypkg.mymodule:step --args 'bf16[8192_X, 4096]' 'bf16[4096, F_Y]' \\\n"
        "    --dims F=16384 --mesh X=4,Y=4 --on v5e:4x4",
    ),
)
@click.argument("program", metavar="PLAN.json|MODULE:FUNCTION")
@on_option(help="The slice to compile a function for, such as v5e:4x4.")
@option(
    "--args",
    "arrays",
    group=WORKLOAD,
    multiple=True,
    metavar="ARRAY...",
    help="Arrays of a function: bf16[8192_X, D_Y].",
)
@option("--dims", group=WORKLOAD, metavar="SIZES", help="Sizes of the dims that arrays name: D=4096,F=16Ki.")
@mesh_option(help="Mesh axes and their sizes for a function: X=4,Y=4.")
@layout_option()
@option("--auto", is_flag=True, group=PARALLELISM, help="Leave axes to the partitioner: not JAX's explicit mode.")
@calibration_option(help="Price a plan by the fractions that rooftop calibrate measured (JSON).")
@check_option(help="Build checks into a plan of embeddings: nan, bounds, buffers.")
@timeout_option(help="Give up after this time: 90s, 10m.")
@option("--no-cache", is_flag=True, group=RUN, help="Compile again, even if the answer is known.")
@top_option(default="10", help="Operations and buffers to list, or all.")
@option("--save", group=OUTPUT, type=FILE, help="Write the executable here, with the versions that compiled it.")
@perfetto_option(help="Write the compiled timeline here, for ui.perfetto.dev.")
@xprof_option()
@report_option()
@output_option(help="Write the JSON report here.")
@json_option
def command(
    *,
    program: str,
    on: str | None,
    arrays: tuple[str, ...],
    dims: str | None,
    mesh: str | None,
    layout: str | None,
    auto: bool,
    calibration: Path | None,
    check: str | None,
    timeout: float | None,
    no_cache: bool,
    top: int | str,
    save: Path | None,
    perfetto: Path | None,
    xprof: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Compile ahead of time with XLA:TPU or XLA:GPU, without a TPU or a GPU, and read the compiler's result.

    For a PLAN.json of 'rooftop plan train', compare plan and program: FLOPs, memory, collectives and time by scope and
    phase, and what only one of them has. For a plan of 'rooftop plan embed', report the memory that SparseCores need
    for each stack of tables, and the overlap of whole steps. For MODULE:FUNCTION, any function of JAX arrays, report
    the compiled ledger and a roofline for every op.
    """
    from rooftop.library.compiling import CompileResult, compile, inspect

    result: CompileResult | EmbedCompileResult
    of_function = {"args": arrays, "dims": dims, "mesh": mesh, "on": on, "layout": layout, "auto": auto}
    files = {"save": save, "perfetto": perfetto, "xprof": xprof, "report": report}
    if Path(program).suffix == ".json":
        _refuse(of_function, "nothing with a plan, which says all that is needed")
        from rooftop.library.inputs import plan_of
        from rooftop.plan.embedding.plan import EmbedPlan

        plan = plan_of(program)
        if isinstance(plan, EmbedPlan):
            _refuse(files, "nothing with a plan of embeddings: it has many programs")
        with _progress_line(shown=not as_json) as on_progress:
            result = compile(
                plan,
                calibration=calibration,
                check=check,
                timeout=timeout,
                cache=not no_cache,
                save=save is not None,
                on_progress=on_progress,
            )
    elif ":" in program:
        _refuse({"calibration": calibration}, "nothing with a function, which has no plan")
        _refuse({"check": check}, "nothing but with a plan of embeddings: its programs run on SparseCores")
        if on is None:
            raise RooftopError("on", None, "a slice, such as v5e:4x4")
        with _progress_line(shown=not as_json) as on_progress:
            result = inspect(
                program,
                *arrays,
                on=on,
                mesh=mesh,
                layout=layout,
                dims=dims,
                auto=auto,
                timeout=timeout,
                cache=not no_cache,
                save=save is not None,
                on_progress=on_progress,
            )
    else:
        raise RooftopError("program", program, "a plan.json written by rooftop plan, or module:function")
    data = result.to_json(top=sys.maxsize if isinstance(top, str) else top)
    if output is not None:
        write_json(output, data)
    if isinstance(result, CompileResult):
        _write_files(result, **files)
    if as_json:
        emit_json(data)
    elif isinstance(result, CompileResult):
        names = {"report": output, "page": report, "executable": save, "timeline": perfetto, "profile": xprof}
        planned = None if result.report.plan is None else result.report.plan.to_json()
        if result.refusal is not None:
            show(data, {name: names[name] for name in ("report", "page")}, plan=planned)
        else:
            show(data, names, plan=planned, cached=result.cached)
    else:
        show(data, {"report": output}, plan=result.report.plan.to_json())
    result.raise_if_infeasible()
    return 0


def _refuse(options: Mapping[str, object], accepted: str) -> None:
    """Raise RooftopError if one of the options is given."""
    for name, value in options.items():
        if value:
            raise RooftopError(name, str(value), accepted)


@contextmanager
def _progress_line(*, shown: bool) -> Iterator[Callable[[str, float], None] | None]:
    """A callback (phase, seconds) that keeps one line on stderr up to date, or None if stderr is not a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield None
        return

    def write(phase: str, elapsed_s: float) -> None:
        click.echo(f"\r{phase}: {elapsed_s:.0f} s\x1b[K", err=True, nl=False)

    try:
        yield write
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)


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
