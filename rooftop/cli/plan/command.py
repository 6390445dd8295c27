"""``rooftop plan``: each kind of plan is a subcommand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.output import emit_json, json_option, show
from rooftop.cli.plan.embed import embed
from rooftop.cli.plan.serve import serve
from rooftop.cli.usage import VerbGroup

if TYPE_CHECKING:
    from rooftop.plan.training.plan import TrainingPlan

_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.group(name="plan", cls=VerbGroup)
def command() -> None:
    """Predict time, memory, cost and what binds, and choose the sharding."""


command.add_command(serve)
command.add_command(embed)


@command.command(name="train")
@click.argument("model")
@click.option("--on", "slice_", required=True, metavar="SLICE", help="CHIP:SHAPE[@SLICES], such as v5p:16x16x16.")
@click.option("--batch-tokens", metavar="N", help="Tokens per step: 4M, 4Mi.")
@click.option("--batch-seqs", metavar="N", help="Sequences per step, instead of tokens.")
@click.option("--seq", "seq_len", default="4096", show_default=True, metavar="N", help="Tokens per sequence.")
@click.option("--tokens", metavar="N", help="Tokens in all, for days and cost: 15T.")
@click.option("--mesh", metavar="AXES", help="Fix the axis sizes: fsdp=1024,tensor=4. Searched if not given.")
@click.option("--layout", metavar="LAYOUT", help="Pin axes to the torus: fsdp=x+y,tensor=z[1:4],context=z[4:4].")
@click.option("--remat", metavar="POLICY", help="none, matmuls, minimal, block, or changes: block,qkv=offload.")
@click.option("--microbatches", metavar="N", help="Microbatches per step. Searched if not given.")
@click.option(
    "--schedule", default="1f1b", show_default=True, help="Pipeline schedule: gpipe, 1f1b, interleaved, zero_bubble."
)
@click.option("--chunks", default="1", show_default=True, metavar="N", help="Model chunks per stage (interleaved).")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam, lion or sgd.")
@click.option(
    "--matmul-dtype", default="bf16", show_default=True, help="Dtype of the layers' matmuls: bf16, int8, f8_e4m3."
)
@click.option("--weights-dtype", default="f32", show_default=True, help="Dtype of the stored weights.")
@click.option("--moments-dtype", default="f32", show_default=True, help="Dtype of the optimizer's moments.")
@click.option("--hidden", metavar="SHARES", help="Assume what hides: weight_gather=1,tensor=0.5 (docs/plan.md).")
@click.option(
    "--bounds", default="usable", show_default=True, help="usable HBM and XLA's memory, or the book's arithmetic: book."
)
@click.option("--price", metavar="USD", help="Dollars per chip-hour, instead of the list price.")
@click.option("--alternatives", default="5", show_default=True, metavar="N", help="Other meshes to show.")
@click.option("--perfetto", type=_FILE, help="Write the planned timeline here, for ui.perfetto.dev.")
@click.option("--xprof", type=_FOLDER, help="Write it as a profile into this folder, for XProf and TensorBoard.")
@click.option("--report", type=_FILE, help="Write a page with tables and plots here (HTML).")
@click.option("-o", "--output", type=_FILE, help="Write plan.json here.")
@json_option
def train(
    as_json: bool,
    output: Path | None,
    alternatives: str,
    perfetto: Path | None,
    xprof: Path | None,
    report: Path | None,
    **options: Any,
) -> int:
    """Plan a training run of MODEL (a preset or a path to a Hugging Face config.json).

    \b
    Example: rooftop plan train llama3-70b --on v5p:16x16x16 --batch-tokens 4Mi --seq 4096 --tokens 15T -o plan.json
    """
    from rooftop.core.files import write_text
    from rooftop.core.quantities import parse_count
    from rooftop.plan.training.answer import plan_training

    answer = plan_training(_problem(**options), alternatives=parse_count(alternatives, "alternatives"))
    data = answer.to_json()
    if answer.plan.mesh.size("stage") > 1:
        from rooftop.simulate.pipeline import of_plan

        data["pipeline"] = of_plan(answer.plan)
    if output is not None:
        write_text(output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    _write_timeline(answer.plan, data, perfetto, xprof, report)
    if as_json:
        emit_json(data)
    else:
        show(data, {"plan": output})
    answer.require_fit()
    return 0


def _write_timeline(
    plan: TrainingPlan, data: Mapping[str, Any], perfetto: Path | None, xprof: Path | None, report: Path | None
) -> None:
    """Write the planned timeline, and the page, where they are asked for."""
    from rooftop.core.files import write_text
    from rooftop.simulate.planned import planned_lanes

    if perfetto is not None:
        from rooftop.core.timelines.perfetto import trace

        write_text(perfetto, json.dumps(trace(planned_lanes(plan)), allow_nan=False))
    if xprof is not None:
        from rooftop.core.timelines.xprof import write, xspace
        from rooftop.roofline.rates import device_stats

        drawn = planned_lanes(plan, every_trip=True)
        write(xspace(drawn, program="planned", device=device_stats(plan.problem.slice.chip)), xprof, run="planned")
    if report is not None:
        from rooftop.present import html
        from rooftop.present.documents import document

        write_text(report, html.page(document(data, lanes=[planned_lanes(plan)])))


def _problem(
    *,
    model: str,
    slice_: str,
    batch_tokens: str | None,
    batch_seqs: str | None,
    seq_len: str,
    tokens: str | None,
    mesh: str | None,
    layout: str | None,
    remat: str | None,
    microbatches: str | None,
    schedule: str,
    chunks: str,
    optimizer: str,
    matmul_dtype: str,
    weights_dtype: str,
    moments_dtype: str,
    hidden: str | None,
    bounds: str,
    price: str | None,
) -> Any:
    """The search problem that the options describe. Raises RooftopError naming the option that is wrong."""
    from rooftop.arrays import Mesh, parse_axes
    from rooftop.core.errors import RooftopError, unknown
    from rooftop.core.quantities import parse_count, parse_quantity
    from rooftop.hardware import Slice
    from rooftop.models import load_model
    from rooftop.plan.training.assumptions import Assumptions
    from rooftop.plan.training.problem import Problem
    from rooftop.plan.training.workload import Numerics, Workload

    # What is asked about comes first: whose model is misspelt need not first say how large a batch of it is.
    what, where = load_model(model), Slice.parse(slice_)
    if price is not None:
        chip = where.chip.replace(price_usd_per_hour=parse_quantity(price, "price"))
        where = Slice(chip, where.shape, where.num_slices)
    length = parse_count(seq_len, "seq")
    if (batch_tokens is None) == (batch_seqs is None):
        raise RooftopError(
            "batch", batch_tokens and f"{batch_tokens} and {batch_seqs}", "one of --batch-tokens and --batch-seqs"
        )
    batch = (
        parse_count(batch_tokens, "batch-tokens")
        if batch_tokens is not None
        else parse_count(batch_seqs or "", "batch-seqs") * length
    )
    if mesh is not None and layout is not None:
        raise RooftopError("layout", layout, "--mesh or --layout, not both: a layout says the sizes too")
    if bounds not in ("usable", "book"):
        raise unknown("bounds", bounds, ("usable", "book"))
    assumptions = Assumptions() if hidden is None else Assumptions().with_hidden(hidden)
    return Problem(
        model=what,
        slice=where,
        workload=Workload(
            batch_tokens=batch,
            seq_len=length,
            tokens=None if tokens is None else parse_quantity(tokens, "tokens"),
        ),
        numerics=Numerics(
            matmul=matmul_dtype, weights=weights_dtype, moments=moments_dtype, optimizer=optimizer
        ),
        assumptions=assumptions,
        axes=None if mesh is None else parse_axes(mesh),
        mesh=None if layout is None else Mesh.from_layout(where, layout),
        remat=remat,
        microbatches=None if microbatches is None else parse_count(microbatches, "microbatches"),
        schedule=schedule,
        chunks=parse_count(chunks, "chunks"),
        bounds=bounds,
    )  # fmt: skip
