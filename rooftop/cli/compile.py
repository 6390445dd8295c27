"""``rooftop compile`` and ``tune``: plans, your own scripts and JAX functions, compiled by XLA without a device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.options import (
    COUNT,
    FILE,
    FOLDER,
    OUTPUT,
    PARALLELISM,
    QUANTITY,
    RUN,
    WORKLOAD,
    Name,
    VerbCommand,
    calibration_option,
    check_option,
    frames_option,
    json_option,
    layout_option,
    mesh_option,
    min_flops_option,
    on_option,
    option,
    output_option,
    perfetto_option,
    report_option,
    steps_option,
    timeout_option,
    top_option,
    xla_option,
    xprof_option,
)
from rooftop.cli.output import emit_json, progress_bar, show
from rooftop.core.errors import RooftopError
from rooftop.core.files import write_json, write_text

#: Where a command line after ``--`` stands in click's context.
SCRIPT = "rooftop.script"
#: Where the words of the command line stand there.
WORDS = "rooftop.words"

if TYPE_CHECKING:
    from rooftop.library.compiling import CompileResult, EmbedCompileResult


class SeveralArrays(VerbCommand):
    """A command whose ``--args`` takes all the words that follow it, up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat ``--args`` before every word that belongs to it."""
        spread, taking = list[str](), False
        for word in args:
            if word.startswith("-"):
                taking = word == "--args"
                if not taking:
                    spread.append(word)
            else:
                spread += ["--args", word] if taking else [word]
        return super().parse_args(ctx, spread)


class ScriptCommand(SeveralArrays):
    """The same, where words after ``--`` are the command line of a script.

    With ``--with``, the command runs in an environment with other releases.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the script's words aside: its options are its own."""
        ctx.meta[WORDS] = list(args)
        if "--" in args:
            at = args.index("--")
            ctx.meta[SCRIPT], args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command here, or with other releases."""
        releases = ctx.params.get("releases")
        if releases is None:
            return super().invoke(ctx)
        from rooftop.target.environments import Releases, python_with, run_rooftop

        words, script = list(ctx.meta[WORDS]), list[str]()
        if "--" in words:
            at = words.index("--")
            words, script = words[:at], words[at:]
            if len(script) > 1 and os.sep in script[1] and not script[1].endswith(".py"):
                raise RooftopError("with", releases, f"a bare python: {script[1]} has its own jax")
        at = next(at for at, word in enumerate(words) if word == "--with" or word.startswith("--with="))
        del words[at : at + (2 if words[at] == "--with" else 1)]
        with progress_line(shown=not ctx.params.get("as_json")) as on_progress:
            python = python_with(Releases.parse(releases), on_progress)
        return run_rooftop(python, [str(ctx.info_name), *words, *script])


#: Options of verbs that compile a function.
ARGS = option(
    "--args",
    "arrays",
    group=WORKLOAD,
    multiple=True,
    metavar="ARRAY...",
    help="Arrays of a function: bf16[8192_X, D_Y].",
)
DIMS = option("--dims", group=WORKLOAD, metavar="SIZES", help="Sizes of the dims that arrays name: D=4096,F=16Ki.")
AUTO = option("--auto", is_flag=True, group=PARALLELISM, help="Leave axes to the partitioner: not JAX's explicit mode.")
WITH = option(
    "--with",
    "releases",
    group=RUN,
    metavar="jax==X,libtpu==Y",
    help="Run the same with other releases, in an environment of their own.",
)
NO_CACHE = option("--no-cache", is_flag=True, group=RUN, help="Compile again, even if the answer is known.")


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
@ARGS
@DIMS
@mesh_option(help="Mesh axes and their sizes for a function: X=4,Y=4.")
@layout_option()
@AUTO
@xla_option()
@steps_option(default="3", help="The last step of a script, in calls of one program; 0 runs it to its end.")
@min_flops_option()
@calibration_option(help="Price a plan by the fractions that rooftop calibrate measured (JSON).")
@check_option(help="Build checks into a plan of embeddings: nan, bounds, buffers.")
@timeout_option(help="Give up after this time: 90s, 10m.")
@NO_CACHE
@WITH
@top_option(default="10", help="Operations and buffers to list, or all.")
@option("--out", group=OUTPUT, type=FOLDER, help="Write report and optimised HLO of all programs of a script here.")
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
    dims: str | None,
    mesh: str | None,
    layout: str | None,
    auto: bool,
    compiler_options: tuple[str, ...],
    steps: int,
    min_flops: float,
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
) -> int:
    """Compile ahead of time with XLA:TPU or XLA:GPU, without a TPU or a GPU, and read the compiler's result.

    For -- python SCRIPT, run your own script with a slice in the place of JAX's devices: nothing is executed, and every
    large jit is compiled and reported.

    For a PLAN.json of 'rooftop plan train', compare plan and program: FLOPs, memory, collectives and time by scope and
    phase, and what only one of them has. For a plan of 'rooftop plan embed', report the memory that SparseCores need
    for each stack of tables, and the overlap of whole steps. For MODULE:FUNCTION, any function of JAX arrays, report
    the compiled ledger and a roofline for every op.
    """
    script: list[str] | None = click.get_current_context().meta.get(SCRIPT)
    options = {"compiler-option": compiler_options}
    of_function = {"args": arrays, "dims": dims, "mesh": mesh, "layout": layout, "auto": auto, **options}
    files = {"save": save, "perfetto": perfetto, "xprof": xprof, "report": report}
    if script is not None:
        if program is not None:
            raise RooftopError("program", program, "nothing with a script: rooftop compile --on SLICE -- python SCRIPT")
        _refuse(of_function | {"check": check}, "nothing with a script, which has its own")
        _refuse({"save": save, "perfetto": perfetto, "xprof": xprof}, "nothing with a script: it has many programs")
        if on is None:
            raise RooftopError("on", None, "a slice, such as v5e:4x4")
        return _compile_script(
            script, on=on, steps=steps, min_flops=min_flops, timeout=timeout, cache=not no_cache, top=top,
            out=out, report=report, output=output, as_json=as_json,
        )  # fmt: skip
    _refuse({"out": out}, "nothing but with a script: its programs are many")
    if program is None:
        raise RooftopError("program", None, "a plan.json, module:function, or -- python SCRIPT")
    from rooftop.library.compiling import CompileResult, compile, inspect

    result: CompileResult | EmbedCompileResult
    if Path(program).suffix == ".json":
        _refuse(of_function | {"on": on}, "nothing with a plan, which says all that is needed")
        from rooftop.library.inputs import plan_of
        from rooftop.plan.embedding.plan import EmbedPlan

        plan = plan_of(program)
        if isinstance(plan, EmbedPlan):
            _refuse(files, "nothing with a plan of embeddings: it has many programs")
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
    elif ":" in program:
        _refuse({"calibration": calibration}, "nothing with a function, which has no plan")
        _refuse({"check": check}, "nothing but with a plan of embeddings: its programs run on SparseCores")
        if on is None:
            raise RooftopError("on", None, "a slice, such as v5e:4x4")
        with progress_line(shown=not as_json) as on_progress:
            result = inspect(
                program,
                *arrays,
                on=on,
                mesh=mesh,
                layout=layout,
                dims=dims,
                auto=auto,
                compiler_options=_options(compiler_options),
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
        if result.refusal is not None:
            show(data, {name: names[name] for name in ("report", "page")})
        else:
            show(data, names, cached=result.cached, frames=frames == "all")
    else:
        show(data, {"report": output})
    result.raise_if_infeasible()
    return 0


def _compile_script(
    words: list[str],
    *,
    on: str,
    steps: int,
    min_flops: float,
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
    from rooftop.library.scripts import compile_script

    with progress_line(shown=not as_json) as on_progress:
        result = compile_script(
            words,
            on=on,
            steps=steps or None,
            min_flops=min_flops,
            timeout=timeout,
            cache=cache,
            on_progress=on_progress,
        )
    data = result.to_json(top=sys.maxsize if isinstance(top, str) else top)
    if result.report.programs or result.report.run.error is None:
        # A script that failed before its first program has only its error.
        if output is not None:
            write_json(output, data)
        if report is not None:
            write_text(report, result.page())
        if out is not None:
            result.write_files(out)
        show(data, {"report": output, "page": report, "programs": out}, as_json=as_json)
    result.raise_if_infeasible()
    return 0


def _options(texts: Sequence[str]) -> dict[str, bool | int | str]:
    """Options of the compiler from NAME=VALUE. Raises RooftopError."""
    options: dict[str, bool | int | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise RooftopError(
                "compiler-option", text, "NAME=VALUE, such as xla_tpu_enable_async_collective_fusion=true"
            )
        words: dict[str, bool] = {"true": True, "false": False}
        number = int(value) if value.lstrip("-").isdecimal() else value
        options[name] = words.get(value.lower(), number)
    return options


def _refuse(options: Mapping[str, object], accepted: str) -> None:
    """Raise RooftopError if one of the options is given."""
    for name, value in options.items():
        if value:
            shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
            raise RooftopError(name, shown, accepted)


@contextmanager
def progress_line(*, shown: bool) -> Iterator[Callable[[str, float], None] | None]:
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


@click.command(
    "tune",
    cls=ScriptCommand,
    examples=(
        "rooftop tune plan.json --minutes 30 --jobs 4 --save best.json",
        "rooftop tune mypkg.mymodule:step --args 'bf16[8192_X, 4096]' 'bf16[4096, F_Y]' \\\n"
        "    --dims F=16384 --mesh X=4,Y=4 --on v5e:4x4 --vary block=512,1024",
        "rooftop tune --on v5e:4x4 --vary remat=full,none -- python train.py --remat '{remat}'",
    ),
)
@click.argument("program", metavar="PLAN.json|MODULE:FUNCTION|-- python SCRIPT", required=False)
@on_option(help="The slice to compile a script or a function for, such as v5e:4x4.")
@ARGS
@DIMS
@mesh_option(help="Mesh axes and their sizes for a function: X=4,Y=4.")
@layout_option()
@AUTO
@option(
    "--vary",
    group=WORKLOAD,
    multiple=True,
    metavar="NAME=A,B,...",
    help="Values of a function's keyword, or of {NAME} in a script's command; the first is the baseline.",
)
@option(
    "--search",
    group=RUN,
    metavar="NAMES",
    help="What to vary of a plan: options, remat, microbatches, layout, mesh, switches, attention (not by default).",
)
@option("--minutes", group=RUN, type=QUANTITY, default="10", help="Time of the search.")
@option("--jobs", group=RUN, type=COUNT, help="Compilations at a time. [default: one for two processors]")
@option(
    "--layers",
    group=RUN,
    metavar="N|all",
    help="Layers of proxies of a plan. [default: all, or the fewest if few compilations fit into the time]",
)
@option(
    "--estimates",
    group=RUN,
    type=Name("rooftop", "xla"),
    default="rooftop",
    help="Price computation by rooftop's curves, or by XLA's own cycles.",
)
@xla_option(help="Set an option of XLA for a function's baseline.")
@steps_option(default="3", help="The last step of a script, in calls of one program; 0 runs it to its end.")
@min_flops_option()
@option("--results", group=RUN, type=FILE, help="File of the trials. [default: one in the user's cache]")
@option("--fresh", group=RUN, is_flag=True, help="Try all again; by default the same search goes on.")
@option("--no-cache", is_flag=True, group=RUN, help="Compile the baseline again, even if it is known.")
@top_option(default="12", help="Trials and rows to list, or all.")
@option("--save", group=OUTPUT, type=FILE, help="Write the best plan here (plan.json).")
@report_option()
@output_option(help="Write the JSON answer here.")
@json_option
def tune(
    *,
    program: str | None,
    on: str | None,
    arrays: tuple[str, ...],
    dims: str | None,
    mesh: str | None,
    layout: str | None,
    auto: bool,
    vary: tuple[str, ...],
    search: str | None,
    minutes: float,
    jobs: int | None,
    layers: str | None,
    estimates: str,
    compiler_options: tuple[str, ...],
    steps: int,
    min_flops: float,
    results: Path | None,
    fresh: bool,
    no_cache: bool,
    top: int | str,
    save: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Search what makes a step faster by compiling it, again and again, with no TPU or GPU.

    Of a plan of 'rooftop plan train' it varies options of XLA, remat, microbatches, layout, mesh and switches; of a
    function or a script options of XLA, and what --vary names. Every compilation is priced from its schedule, and equal
    schedules are one. The same command goes on where it was ended.
    """
    script: list[str] | None = click.get_current_context().meta.get(SCRIPT)
    if program is not None and script is not None:
        raise RooftopError("program", program, "nothing with a script: rooftop tune --on SLICE -- python SCRIPT")
    tuned: str | list[str] | None = program if script is None else script
    if tuned is None:
        raise RooftopError("program", None, "a plan.json, module:function, or -- python SCRIPT")
    if program is not None and not (program.endswith(".json") or ":" in program):
        raise RooftopError("program", program, "a plan.json written by rooftop plan train, or module:function")
    if save is not None and (program is None or not program.endswith(".json")):
        raise RooftopError("save", str(save), "nothing but with a plan: other programs have none")
    from rooftop.library import checking

    with progress_bar(shown=not as_json) as on_progress:
        result = checking.tune(
            tuned,
            *arrays,
            on=on,
            mesh=mesh,
            layout=layout,
            dims=dims,
            auto=auto,
            compiler_options=_options(compiler_options),
            vary=_varied(vary),
            search=search,
            minutes=minutes,
            jobs=jobs,
            layers=layers,
            estimates=estimates,
            steps=steps or None,
            min_flops=min_flops,
            results=results,
            fresh=fresh,
            cache=not no_cache,
            on_progress=on_progress,
        )
    data = result.to_json()
    if output is not None:
        write_json(output, data)
    if save is not None:
        result.write_plan(save)
    if report is not None:
        write_text(report, result.page())
    files = {"answer": output, "page": report, "plan": save}
    show(data, files, as_json=as_json, top=0 if isinstance(top, str) else top)
    return 0


def _varied(texts: tuple[str, ...]) -> dict[str, str]:
    """Values by name, of NAME=A,B. Raises RooftopError."""
    varied = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or name in varied:
            raise RooftopError("vary", text, "NAME=A,B,... once for each name, such as block=512,1024")
        varied[name] = values
    return varied
