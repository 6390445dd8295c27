"""``rooftop plan``: plans of training, of serving and of embedding tables, a subcommand each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack, cast

import click
from click.core import ParameterSource

from rooftop.cli.options import (
    ASSUMPTIONS,
    COUNT,
    DTYPES,
    FILE,
    HARDWARE,
    MODEL,
    NUMERICS,
    OUTPUT,
    PARALLELISM,
    PATH,
    QUANTITY,
    SHARE,
    WORKLOAD,
    Name,
    VerbCommand,
    assume_option,
    batch_samples_option,
    batch_seqs_option,
    batch_tokens_option,
    batching_option,
    bounds_option,
    calibration_option,
    chunks_option,
    draft_length_option,
    draft_option,
    embeddings_dtype_option,
    host_dram_option,
    host_threads_option,
    json_option,
    kv_dtype_option,
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
    tpot_option,
    ttft_option,
    weight_group_option,
    weights_dtype_option,
    xprof_option,
)
from rooftop.cli.output import VerbGroup, emit_json, no_answer, progress_bar, show
from rooftop.core.errors import RooftopError
from rooftop.core.files import write_json, write_text

if TYPE_CHECKING:
    from rooftop.library.serving import ServingFrontResult, ServingPlanResult


@click.group(name="plan", cls=VerbGroup)
def command() -> None:
    """Predict time, memory, cost and what binds, and choose the sharding."""


class _TrainingOptions(TypedDict):
    """Arguments and options that ``plan_training`` takes."""

    model: str
    on: str
    chips: int | None
    smallest: bool
    batch_tokens: int | None
    batch_seqs: int | None
    tokens: int | None
    days: float | None
    budget: str | None
    mesh: str | None
    layout: str | None
    remat: str | None
    microbatches: int | None
    collective_matmuls: bool | None
    experts_over_tensor: bool | None
    schedule: str
    chunks: int
    matmul_dtype: str
    weights_dtype: str
    moments_dtype: str
    optimizer: str
    assume: str | None
    calibration: Path | None
    bounds: str
    price: str | None
    alternatives: int


@command.command(
    name="train",
    cls=VerbCommand,
    examples=(
        "rooftop plan train llama3-70b --on v5p:16x16x16 --batch-tokens 4Mi --tokens 15T -o plan.json",
        "rooftop plan train qwen3-8b --on v5e:4x4 --batch-seqs 32 --mesh fsdp=16",
        "rooftop plan train llama3-70b --on v5p,v6e,tpu7x --tokens 15T --days 60",
    ),
)
@click.argument("model", type=MODEL)
@on_option(required=True, help="CHIP:SHAPE[@SLICES], such as v5p:16x16x16; or slices and chips to compare: v5p,v6e.")
@option("--chips", group=HARDWARE, type=COUNT, help="Compare slices of at most so many chips.")
@option("--smallest", group=HARDWARE, is_flag=True, help="Recommend the smallest slice that fits and meets the limits.")
@batch_tokens_option()
@batch_seqs_option(help="Sequences of a step, instead of tokens.")
@seq_option(help="Tokens of a sequence. Default: 4096, or what the model allows.")
@option("--tokens", group=WORKLOAD, type=COUNT, help="Tokens in all, for days and cost: 15T.")
@option("--days", group=WORKLOAD, type=QUANTITY, help="Days for all tokens: recommend the cheapest slice in time.")
@option("--budget", group=WORKLOAD, metavar="USD", help="Dollars for all tokens: recommend the fastest slice: 20M.")
@mesh_option(help="Sizes of axes: fsdp=1024,tensor=4. Searched by default.")
@layout_option(help="Pin axes to the torus: fsdp=x+y,tensor=z[1:4],context=z[4:4].")
@remat_option()
@microbatches_option(help="Microbatches of a step. Searched by default.")
@option(
    "--collective-matmuls/--no-collective-matmuls", group=PARALLELISM, default=None,
    help="Overlap dense matmuls with their collectives over tensor. Searched by default.",
)  # fmt: skip
@option(
    "--experts-over-tensor/--no-experts-over-tensor", group=PARALLELISM, default=None,
    help="Deal out whole experts over tensor, in place of their columns. Searched by default.",
)  # fmt: skip
@schedule_option(default="eager_1f1b")
@chunks_option(default="1")
@matmul_dtype_option(default="bf16", help="Dtype of the layers' matmuls: bf16, int8, f8_e4m3.")
@weights_dtype_option(default="f32")
@moments_dtype_option(default="f32")
@optimizer_option(default="adamw")
@assume_option(help="Shares of transfers that hide: weight_gather=1,tensor=0.5 (docs/plan.md).")
@calibration_option()
@bounds_option(default="usable")
@price_option()
@option("--alternatives", group=OUTPUT, type=COUNT, default="5", help="Other meshes to show.")
@perfetto_option(help="Write the planned timeline here, for ui.perfetto.dev.")
@xprof_option()
@report_option()
@output_option(help="Write plan.json here.")
@json_option
def train(
    *,
    seq_len: int | None,
    perfetto: Path | None,
    xprof: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Unpack[_TrainingOptions],
) -> int:
    """Plan a training run of MODEL, a preset or the path of a Hugging Face config.json."""
    from rooftop.library.planning import plan_training

    with no_answer(as_json=as_json), progress_bar(shown=not as_json, after_s=1.0) as on_progress:
        result = plan_training(seq=seq_len, **options, on_progress=on_progress)
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
        show(result.to_json(), {"plan": output})
    result.raise_if_infeasible()
    return 0


_SERVING = (
    "rooftop plan serve llama3-70b --on v5e:4x4 --weights-dtype int8 --kv-dtype int8 --batch-seqs 32 -o plan.json",
    "rooftop plan serve llama3-70b --requests-per-second 40 --ttft 500ms --tpot 30ms --on v5e,v6e",
)


class _FrontOptions(TypedDict):
    """Arguments and options that ``serving_front`` takes."""

    model: str
    on: str
    prompt: int | None
    generate: int
    context: int | None
    weights_dtype: tuple[str, ...] | None
    kv_dtype: tuple[str, ...] | None
    matmul_dtype: str
    embeddings_dtype: str | None
    weight_group: int | None
    kv_sharing: int
    batching: str | None
    mesh: str | None
    kv_split: str | None
    draft: str | None
    draft_length: int
    acceptance: float
    assume: str | None
    calibration: Path | None
    bounds: str
    price: str | None


class _ServingOptions(_FrontOptions):
    """The same and what ``plan_serving`` takes too."""

    batch_seqs: int | None
    prefill_mesh: str | None
    prefill_on: str | None
    link: str
    ttft: float | None
    tpot: float | None
    requests_per_second: float | None
    hit_rate: float
    host_dram: int | None
    mfu: float | None
    engine: str | None
    contexts: str | None


@command.command(name="serve", cls=VerbCommand, examples=_SERVING)
@click.argument("model", default="llama3-70b", type=MODEL)
@on_option(required=True, help="CHIP:SHAPE, such as v5e:4x4; or chips to search: v5e,v6e,h100.")
@option("--prompt", group=WORKLOAD, type=COUNT, help="Tokens of a prompt. Default: 8192, or what the model allows.")
@option("--generate", group=WORKLOAD, default="512", type=COUNT, help="Tokens of an answer.")
@batch_seqs_option(help="Sequences generated together. Default: the knee, or the most within --tpot.")
@option(
    "--context", group=WORKLOAD, type=COUNT,
    help="Tokens in the cache at the priced step. Default: prompt and half the answer.",
)  # fmt: skip
@weights_dtype_option(
    type=DTYPES, help="Dtype of the layers' weights; a list when chips are searched. [default: as published, or bf16]"
)
@kv_dtype_option(type=DTYPES, help="Dtype of the KV cache; a list when chips are searched.")
@matmul_dtype_option(default="bf16")
@embeddings_dtype_option(help="Dtype of embedding and unembedding. [default: bf16]")
@weight_group_option(help="Weights of a column that share a scale. [default: all; 32 of f4_e2m1]")
@option("--kv-sharing", group=NUMERICS, default="1", type=COUNT, help="Layers that share one KV cache.")
@batching_option(
    type=Name("disaggregated", "interleaved"),
    help="How servers batch. Default: disaggregated; both when chips are searched.",
)
@mesh_option(help="Fix generation's axes: context=2,tensor=8. Searched by default.")
@option("--prefill-mesh", group=PARALLELISM, metavar="AXES", help="Fix a prefill's axes: context=2,tensor=8.")
@option(
    "--prefill-on", group=HARDWARE, metavar="SLICE", help="A prefill server, if it is another slice of the same chip."
)
@option(
    "--kv-split", group=PARALLELISM, type=Name("batch", "seq"),
    help="What context splits of the cache: sequences or their tokens. Searched by default.",
)  # fmt: skip
@option(
    "--link", group=HARDWARE, default="dcn", type=Name("ici", "dcn"),
    help="Network between prefill and generate servers.",
)  # fmt: skip
@ttft_option()
@tpot_option()
@option("--requests-per-second", group=WORKLOAD, type=QUANTITY, help="Rate to plan servers for.")
@option(
    "--for", "objective", group=OUTPUT, default="cost", type=Name("cost", "chips", "pareto"),
    help="Objective of a search.",
)  # fmt: skip
@option("--hit-rate", group=WORKLOAD, default="0", type=SHARE, help="Share of the prompt that the prefix cache has.")
@host_dram_option(group=WORKLOAD, help="Memory of a host for the prefix cache: 400G.")
@draft_option()
@draft_length_option(type=COUNT, default="4")
@option("--acceptance", group=WORKLOAD, default="0.7", type=SHARE, help="Probability that a guess is right.")
@option(
    "--mfu", group=ASSUMPTIONS, type=SHARE,
    help="Fix the prefill's efficiency: 2 x parameters x tokens at this share of peak.",
)  # fmt: skip
@assume_option(help="hbm_read=0.9,latency=0.5 (docs/plan-serve.md).")
@option(
    "--engine", group=ASSUMPTIONS, type=Name("vllm", "trtllm"),
    help="Price the kernels of this engine, on H100 and B200. Default: our own programs.",
)  # fmt: skip
@calibration_option()
@bounds_option(default="usable")
@price_option()
@option("--contexts", group=OUTPUT, metavar="LIST", help="Contexts of the Pareto front: 2k,8k,32k.")
@option("--plot", group=OUTPUT, type=FILE, help="Draw the Pareto front here (SVG).")
@report_option(help="Write a page with plots here (HTML).")
@output_option(help="Write plan.json here.")
@json_option
def serve(
    *,
    objective: str,
    plot: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Unpack[_ServingOptions],
) -> int:
    """Plan serving MODEL (a preset or a path to a Hugging Face config.json): chapter 8's LLaMA-3 70B by default."""
    from rooftop.library.serving import ServingFrontResult, plan_serving, serving_front

    context = click.get_current_context()
    for name in ("draft_length", "acceptance"):
        if options["draft"] is None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise RooftopError(name.replace("_", "-"), context.params[name], "this with --draft MODEL, which guesses")
    result: ServingPlanResult | ServingFrontResult
    with no_answer(as_json=as_json), progress_bar(shown=not as_json, after_s=1.0) as on_progress:
        if objective == "pareto":
            result = serving_front(**_of_front(options), on_progress=on_progress)
        else:
            result = plan_serving(**options, objective=objective, on_progress=on_progress)
    data = result.to_json()
    if plot is not None:
        from rooftop.present.documents.parts import front_chart
        from rooftop.present.svg import lines_file

        title = _title(result, options["on"])
        points = result.points if isinstance(result, ServingFrontResult) else result.answer.front
        picture = lines_file(front_chart([point.to_json() for point in points]), title, "numbers next to points: batch")
        write_text(plot, picture)
    if report is not None:
        write_text(report, result.page())
    if output is not None:
        write_json(output, data)
    if as_json:
        emit_json(data)
    else:
        show(data, {"plan": output, "picture": plot})
    result.raise_if_infeasible()
    return 0


def _of_front(options: _ServingOptions) -> _FrontOptions:
    """Options that the front of several chips has. Raises RooftopError for another that was given."""
    context = click.get_current_context()
    known = _FrontOptions.__annotations__.keys()
    for name, value in options.items():
        if name not in known and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise RooftopError(name.replace("_", "-"), value, "this without --for pareto")
    return cast(_FrontOptions, {name: value for name, value in options.items() if name in known})


def _title(result: ServingPlanResult | ServingFrontResult, on: str) -> str:
    """Title of the plotted front: the model, the hardware, and the dtypes if all points have the same."""
    from rooftop.library.serving import ServingFrontResult

    if isinstance(result, ServingFrontResult):
        model, kinds = result.model, {(point.weights, point.kv) for point in result.points}
    else:
        problem = result.plan.problem
        model, kinds = problem.model.name, {(problem.numerics.weights, problem.numerics.kv)}
    dtypes = "; ".join(f"{weights} weights, {kv} KV" for weights, kv in kinds) if len(kinds) == 1 else ""
    return ", ".join(part for part in (f"{model}: generation on {on}", dtypes) if part)


class _EmbeddingOptions(TypedDict):
    """Arguments and options that ``plan_embedding`` takes."""

    tables: Path
    on: str
    batch_samples: int
    limits: Path | None
    sample_passes: int
    dense_flops: float | None
    host_threads: int | None
    calibration: Path | None


@command.command(
    name="embed", cls=VerbCommand, examples=("rooftop plan embed tables.toml --on v5p:2x2x1 --batch-samples 16384",)
)
@click.argument("tables", type=PATH)
@on_option(required=True, help="A slice with SparseCores, such as v5p:2x2x1.")
@batch_samples_option(default="16384")
@option("--limits", group=WORKLOAD, type=FILE, help="A limits file. Default: from ids_per_sample.")
@option("--sample-passes", group=WORKLOAD, type=COUNT, default="1", help="Look up a batch in N parts of its samples.")
@option(
    "--dense-flops", group=WORKLOAD, type=QUANTITY, help="Matmul FLOPs of a sample in the dense part, forward: 30M."
)
@host_threads_option()
@calibration_option()
@report_option()
@output_option(help="Write plan.json here.")
@json_option
def embed(*, report: Path | None, output: Path | None, as_json: bool, **options: Unpack[_EmbeddingOptions]) -> int:
    """Plan the embedding TABLES (a TOML file) on a slice: memory, step time, and what binds."""
    from rooftop.library.embedding import plan_embedding

    with no_answer(as_json=as_json):
        result = plan_embedding(**options)
    if report is not None:
        write_text(report, result.page())
    if output is not None:
        result.write_plan(output)
    if as_json:
        emit_json(result.to_json())
    else:
        show(result.to_json(), {"plan": output})
    result.raise_if_infeasible()
    return 0
