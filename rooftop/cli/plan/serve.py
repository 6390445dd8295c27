"""``rooftop plan serve``: prefill and generation on one slice, or a recommendation over chips."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

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
    QUANTITY,
    SHARE,
    WORKLOAD,
    Name,
    VerbCommand,
    assume_option,
    batch_seqs_option,
    batching_option,
    bounds_option,
    draft_length_option,
    draft_option,
    embeddings_dtype_option,
    host_dram_option,
    json_option,
    kv_dtype_option,
    matmul_dtype_option,
    mesh_option,
    on_option,
    option,
    output_option,
    price_option,
    report_option,
    tpot_option,
    ttft_option,
    weight_group_option,
    weights_dtype_option,
)
from rooftop.cli.output import emit_json, show

if TYPE_CHECKING:
    from rooftop.library.serving import ServingFrontResult, ServingPlanResult

_EXAMPLES = (
    "rooftop plan serve llama3-70b --on v5e:4x4 --weights-dtype int8 --kv-dtype int8 --batch-seqs 32 -o plan.json",
    "rooftop plan serve llama3-70b --requests-per-second 40 --ttft 500ms --tpot 30ms --on v5e,v6e",
)


@click.command(name="serve", cls=VerbCommand, examples=_EXAMPLES)
@click.argument("model", default="llama3-70b", type=MODEL)
@on_option(required=True, help="CHIP:SHAPE, such as v5e:4x4; or chips to search: v5e,v6e,h100.")
@option("--prompt", group=WORKLOAD, default="8192", show_default=True, type=COUNT, help="Tokens of a prompt.")
@option("--generate", group=WORKLOAD, default="512", show_default=True, type=COUNT, help="Tokens of an answer.")
@batch_seqs_option(help="Sequences generated together. Searched by default.")
@option(
    "--context", group=WORKLOAD, type=COUNT,
    help="Tokens cached at the step priced. Default: prompt and half the answer.",
)  # fmt: skip
@weights_dtype_option(type=DTYPES, help="Dtype of the layers' weights; a list when chips are searched.")
@kv_dtype_option(type=DTYPES, help="Dtype of the KV cache; a list when chips are searched.")
@matmul_dtype_option(default="bf16", show_default=True)
@embeddings_dtype_option(help="Dtype of embedding and unembedding. Default: as the weights.")
@weight_group_option(help="Weights of a column that share a scale. Default: all of them.")
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
    "--link", group=HARDWARE, default="dcn", show_default=True, type=Name("ici", "dcn"),
    help="What joins prefill and generate servers.",
)  # fmt: skip
@ttft_option()
@tpot_option()
@option("--requests-per-second", group=WORKLOAD, type=QUANTITY, help="Rate to plan servers for.")
@option(
    "--for", "objective", group=OUTPUT, default="cost", show_default=True, type=Name("cost", "chips", "pareto"),
    help="What a search seeks.",
)  # fmt: skip
@option("--hit-rate", group=WORKLOAD, default="0", type=SHARE, help="Share of the prompt that the prefix cache has.")
@host_dram_option(group=WORKLOAD, help="Memory of a host for the prefix cache: 400G.")
@draft_option()
@draft_length_option(type=COUNT, default="4", show_default=True)
@option(
    "--acceptance", group=WORKLOAD, default="0.7", show_default=True, type=SHARE,
    help="Probability that a guess is right.",
)  # fmt: skip
@option(
    "--mfu", group=ASSUMPTIONS, type=SHARE,
    help="Fix the prefill's efficiency: 2 x parameters x tokens at this share of peak.",
)  # fmt: skip
@assume_option(help="hbm_read=0.9,latency=0.5 (docs/plan-serve.md).")
@bounds_option(default="usable", show_default=True)
@price_option()
@option("--contexts", group=OUTPUT, metavar="LIST", help="Contexts of the Pareto front: 2k,8k,32k.")
@option("--plot", group=OUTPUT, type=FILE, help="Draw the Pareto front here (SVG).")
@report_option(help="Write a page with plots here (HTML).")
@output_option(help="Write plan.json here.")
@json_option
def serve(
    *,
    model: str,
    on: str,
    prompt: int,
    generate: int,
    batch_seqs: int | None,
    context: int | None,
    weights_dtype: tuple[str, ...] | None,
    kv_dtype: tuple[str, ...] | None,
    matmul_dtype: str,
    embeddings_dtype: str | None,
    weight_group: int | None,
    kv_sharing: int,
    batching: str | None,
    mesh: str | None,
    prefill_mesh: str | None,
    prefill_on: str | None,
    kv_split: str | None,
    link: str,
    ttft: float | None,
    tpot: float | None,
    requests_per_second: float | None,
    objective: str,
    hit_rate: float,
    host_dram: int | None,
    draft: str | None,
    draft_length: int,
    acceptance: float,
    mfu: float | None,
    assume: str | None,
    bounds: str,
    price: float | None,
    contexts: str | None,
    plot: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Plan serving MODEL (a preset or a path to a Hugging Face config.json): chapter 8's LLaMA-3 70B by default."""
    from rooftop.core.files import write_json, write_text
    from rooftop.library.serving import plan_serving, serving_front

    result: ServingPlanResult | ServingFrontResult
    if objective == "pareto":
        result = serving_front(
            model, on=on, prompt=prompt, generate=generate, context=context, draft=draft, draft_length=draft_length,
            acceptance=acceptance, batching=batching, mesh=mesh, kv_split=kv_split, weights_dtype=weights_dtype,
            kv_dtype=kv_dtype, matmul_dtype=matmul_dtype, embeddings_dtype=embeddings_dtype,
            weight_group=weight_group, kv_sharing=kv_sharing, assume=assume, bounds=bounds, price=price,
        )  # fmt: skip
    else:
        result = plan_serving(
            model, on=on, prompt=prompt, generate=generate, batch_seqs=batch_seqs, context=context,
            requests_per_second=requests_per_second, ttft=ttft, tpot=tpot, hit_rate=hit_rate, host_dram=host_dram,
            draft=draft, draft_length=draft_length, acceptance=acceptance, batching=batching, mesh=mesh,
            prefill_mesh=prefill_mesh, prefill_on=prefill_on, kv_split=kv_split, link=link,
            weights_dtype=weights_dtype, kv_dtype=kv_dtype, matmul_dtype=matmul_dtype,
            embeddings_dtype=embeddings_dtype, weight_group=weight_group, kv_sharing=kv_sharing, mfu=mfu,
            assume=assume, bounds=bounds, price=price, objective=objective, contexts=contexts,
        )  # fmt: skip
    data = result.to_json()
    if plot is not None:
        from rooftop.present.documents.parts import front_chart
        from rooftop.present.svg import lines_file

        picture = lines_file(front_chart(data["pareto"]), _title(result, on), "numbers next to points: batch")
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
