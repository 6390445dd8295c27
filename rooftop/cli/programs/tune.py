"""``rooftop tune``: what makes a step faster, found by compiling it."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.options import FILE, json_option, option, output_option, report_option, request_options, top_option
from rooftop.cli.output import progress_bar, show
from rooftop.cli.programs.words import ScriptCommand
from rooftop.core.errors import refuse
from rooftop.core.files import write_json, write_text
from rooftop.requests.programs import Tune
from rooftop.requests.words import OUTPUT


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
@request_options(Tune)
@top_option(default="12", help="Trials and rows to list, or all.")
@option("--save", group=OUTPUT, type=FILE, help="Write the best plan here (plan.json).")
@report_option()
@output_option(help="Write the JSON answer here.")
@json_option
def command(
    *,
    request: Tune,
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
    request.refuse_unused()
    if not request.is_plan:
        refuse({"save": save}, "nothing but with a plan: other programs have none")
    from rooftop.library.programs.tuning import tune

    with progress_bar(shown=not as_json) as on_progress:
        result = tune(request, on_progress=on_progress)
    answer = result.report.record()
    if output is not None:
        write_json(output, result.to_json())
    if save is not None:
        result.write_plan(save)
    if report is not None:
        write_text(report, result.page())
    files = {"answer": output, "page": report, "plan": save}
    show(answer, files, request=result.request, as_json=as_json, top=0 if isinstance(top, str) else top)
    return 0
