"""``rooftop plan``: each kind of plan is a subcommand."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.options import (
    COUNT,
    MODEL,
    OUTPUT,
    WORKLOAD,
    VerbCommand,
    assume_option,
    batch_seqs_option,
    batch_tokens_option,
    bounds_option,
    chunks_option,
    json_option,
    layout_option,
    matmul_dtype_option,
    mesh_option,
    microbatches_option,
    moments_dtype_option,
    on_option,
    optimizer_option,
    option,
    output_option,
    perfetto_option,
    price_option,
    remat_option,
    report_option,
    schedule_option,
    seq_option,
    weights_dtype_option,
    xprof_option,
)
from rooftop.cli.output import emit_json
from rooftop.cli.plan.embed import embed
from rooftop.cli.plan.serve import serve
from rooftop.cli.usage import VerbGroup


@click.group(name="plan", cls=VerbGroup)
def command() -> None:
    """Predict time, memory, cost and what binds, and choose the sharding."""


command.add_command(serve)
command.add_command(embed)


@command.command(
    name="train",
    cls=VerbCommand,
    examples=(
        "rooftop plan train llama3-70b --on v5p:16x16x16 --batch-tokens 4Mi --tokens 15T -o plan.json",
        "rooftop plan train qwen3-8b --on v5e:4x4 --batch-seqs 32 --mesh fsdp=16",
    ),
)
@click.argument("model", type=MODEL)
@on_option(required=True, help="CHIP:SHAPE[@SLICES], such as v5p:16x16x16.")
@batch_tokens_option()
@batch_seqs_option(help="Sequences of a step, instead of tokens.")
@seq_option(default="4096", show_default=True)
@option("--tokens", group=WORKLOAD, type=COUNT, help="Tokens in all, for days and cost: 15T.")
@mesh_option(help="Sizes of axes: fsdp=1024,tensor=4. Searched by default.")
@layout_option(help="Pin axes to the torus: fsdp=x+y,tensor=z[1:4],context=z[4:4].")
@remat_option()
@microbatches_option(help="Microbatches of a step. Searched by default.")
@schedule_option(default="1f1b", show_default=True)
@chunks_option(default="1", show_default=True)
@matmul_dtype_option(default="bf16", show_default=True, help="Dtype of the layers' matmuls: bf16, int8, f8_e4m3.")
@weights_dtype_option(default="f32", show_default=True)
@moments_dtype_option(default="f32", show_default=True)
@optimizer_option(default="adamw", show_default=True)
@assume_option(help="Shares of transfers that hide: weight_gather=1,tensor=0.5 (docs/plan.md).")
@bounds_option(default="usable", show_default=True)
@price_option()
@option("--alternatives", group=OUTPUT, type=COUNT, default="5", show_default=True, help="Other meshes to show.")
@perfetto_option(help="Write the planned timeline here, for ui.perfetto.dev.")
@xprof_option()
@report_option()
@output_option(help="Write plan.json here.")
@json_option
def train(
    *,
    model: str,
    on: str,
    batch_tokens: int | None,
    batch_seqs: int | None,
    seq_len: int,
    tokens: int | None,
    mesh: str | None,
    layout: str | None,
    remat: str | None,
    microbatches: int | None,
    schedule: str,
    chunks: int,
    matmul_dtype: str,
    weights_dtype: str,
    moments_dtype: str,
    optimizer: str,
    assume: str | None,
    bounds: str,
    price: float | None,
    alternatives: int,
    perfetto: Path | None,
    xprof: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Plan a training run of MODEL, a preset or the path of a Hugging Face config.json."""
    from rooftop.core.files import write_text
    from rooftop.library.planning import plan_training

    result = plan_training(
        model,
        on=on,
        batch_tokens=batch_tokens,
        batch_seqs=batch_seqs,
        seq=seq_len,
        tokens=tokens,
        mesh=mesh,
        layout=layout,
        remat=remat,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        optimizer=optimizer,
        matmul_dtype=matmul_dtype,
        weights_dtype=weights_dtype,
        moments_dtype=moments_dtype,
        assume=assume,
        bounds=bounds,
        price=price,
        alternatives=alternatives,
    )
    if output is not None:
        result.write_plan(output)
    if perfetto is not None:
        result.write_perfetto(perfetto)
    if xprof is not None:
        result.write_xprof(xprof)
    if report is not None:
        write_text(report, result.page())
    if as_json:
        emit_json(result.to_json())
    else:
        from rooftop.cli.plan.tables import show_training

        show_training(result.answer, result.to_json(), output)
    result.raise_if_infeasible()
    return 0
