"""``rooftop tune``: what makes a step faster, found by compiling it."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from rooftop.cli.options import (
    COUNT,
    FILE,
    QUANTITY,
    Name,
    json_option,
    on_option,
    option,
    output_option,
    report_option,
    top_option,
    xla_option,
)
from rooftop.cli.output import progress_bar, show
from rooftop.cli.programs.words import (
    FunctionOptions,
    ScriptCommand,
    ScriptOptions,
    compiler_options_of,
    function_options,
    program_of,
    refuse_script_options,
    run_settings,
    script_options,
)
from rooftop.core.errors import RooftopError
from rooftop.core.files import write_json, write_text
from rooftop.requests.words import OUTPUT, RUN, WORKLOAD


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
@function_options
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
@script_options
@option("--results", group=RUN, type=FILE, help="File of the trials. [default: one in the user's cache]")
@option("--fresh", group=RUN, is_flag=True, help="Try all again; by default the same search goes on.")
@option("--no-cache", is_flag=True, group=RUN, help="Compile the baseline again, even if it is known.")
@top_option(default="12", help="Trials and rows to list, or all.")
@option("--save", group=OUTPUT, type=FILE, help="Write the best plan here (plan.json).")
@report_option()
@output_option(help="Write the JSON answer here.")
@json_option
def command(
    *,
    program: str | None,
    on: str | None,
    arrays: tuple[str, ...],
    vary: tuple[str, ...],
    search: str | None,
    minutes: float,
    jobs: int | None,
    layers: str | None,
    estimates: str,
    compiler_options: tuple[str, ...],
    steps: int | None,
    min_flops: float | None,
    results: Path | None,
    fresh: bool,
    no_cache: bool,
    top: int | str,
    save: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
    **of_function: Unpack[FunctionOptions],
) -> int:
    """Search what makes a step faster by compiling it, again and again, with no TPU or GPU.

    Of a plan of 'rooftop plan train' it varies options of XLA, remat, microbatches, layout, mesh and switches; of a
    function or a script options of XLA, and what --vary names. Every compilation is priced from its schedule, and equal
    schedules are one. The same command goes on where it was ended.
    """
    tuned = program_of(program, "a plan.json, module:function, or -- python SCRIPT")
    if program is not None and not (program.endswith(".json") or ":" in program):
        raise RooftopError("program", program, "a plan.json written by rooftop plan train, or module:function")
    if save is not None and (program is None or not program.endswith(".json")):
        raise RooftopError("save", str(save), "nothing but with a plan: other programs have none")
    of_script: ScriptOptions = {"steps": steps, "min_flops": min_flops}
    if isinstance(tuned, str):
        refuse_script_options(of_script)
    from rooftop.library.programs.tuning import tune

    with progress_bar(shown=not as_json) as on_progress:
        result = tune(
            tuned,
            *arrays,
            on=on,
            compiler_options=compiler_options_of(compiler_options),
            vary=_varied(vary),
            search=search,
            minutes=minutes,
            jobs=jobs,
            layers=layers,
            estimates=estimates,
            results=results,
            fresh=fresh,
            cache=not no_cache,
            on_progress=on_progress,
            **run_settings(of_script),
            **of_function,
        )
    answer = result.report.record()
    if output is not None:
        write_json(output, answer.to_json())
    if save is not None:
        result.write_plan(save)
    if report is not None:
        write_text(report, result.page())
    files = {"answer": output, "page": report, "plan": save}
    show(answer, files, as_json=as_json, top=0 if isinstance(top, str) else top)
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
