"""``rooftop plan``: plans of training, of serving and of embedding tables, a subcommand each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rooftop.cli.options import (
    FILE,
    FOLDER,
    VerbCommand,
    json_option,
    option,
    output_option,
    perfetto_option,
    report_option,
    request_options,
    xprof_option,
)
from rooftop.cli.output import VerbGroup, no_answer, progress_bar, say, show
from rooftop.core.files import write_json, write_text
from rooftop.requests.planning import PlanEmbedding, PlanServing, PlanTraining
from rooftop.requests.words import OUTPUT

if TYPE_CHECKING:
    from rooftop.library.serving import ServingFrontResult, ServingPlanResult
    from rooftop.plan.training.compiled import CompiledCandidate


@click.group(name="plan", cls=VerbGroup)
def command() -> None:
    """Predict time, memory, cost and what binds, and choose the sharding."""


@command.command(
    name="train",
    cls=VerbCommand,
    examples=(
        "rooftop plan train llama3-70b --on v5p:16x16x16 --batch-tokens 4Mi --tokens 15T -o plan.json",
        "rooftop plan train qwen3-8b --on v5e:4x4 --batch-seqs 32 --mesh fsdp=16",
        "rooftop plan train llama3-70b --on v5p,v6e,tpu7x --tokens 15T --days 60",
        "rooftop plan train llama3-8b --on v5p:4x4x4 --batch-tokens 1Mi --compile 5 -o plan.json",
        "rooftop plan train llama3-70b --on h100:8x32 --batch-seqs 1024 --framework megatron --config job",
        "rooftop plan train --from job/train.sh --framework megatron --on h100:8x32",
        "rooftop plan train llama3-70b --on a100:1 --batch-seqs 1 --seq 512 --lora 16 --base-format nf4",
    ),
)
@request_options(PlanTraining)
@option("--config", group=OUTPUT, type=FOLDER, help="Write the framework's configuration into this folder.")
@perfetto_option(help="Write the planned timeline here, for ui.perfetto.dev.")
@xprof_option()
@report_option()
@output_option(help="Write plan.json here.")
@json_option
def train(
    *,
    request: PlanTraining,
    config: Path | None,
    perfetto: Path | None,
    xprof: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Plan a training run of MODEL, a preset or the path of a Hugging Face config.json, or of a configuration."""
    from rooftop.library.planning import planned_training, with_best_known

    def on_candidate(done: int, total: int, candidate: CompiledCandidate) -> None:
        say(f"rooftop: plan {done} of {total}: {candidate.name}: {candidate.outcome}", err=True)

    with no_answer(as_json=as_json), progress_bar(shown=not as_json, after_s=1.0) as on_progress:
        result = planned_training(request, on_progress, None if as_json else on_candidate)
        result = with_best_known(result, on_progress)
    if output is not None:
        result.write_plan(output)
    if config is not None:
        result.write_configuration(config)
    if perfetto is not None:
        result.write_perfetto(perfetto)
    if xprof is not None:
        result.write_xprof(xprof)
    if report is not None:
        write_text(report, result.page())
    show(result.record, {"plan": output, "configuration": config}, as_json=as_json)
    result.raise_if_infeasible()
    return 0


_SERVING = (
    "rooftop plan serve llama3-70b --on v5e:4x4 --weights-dtype int8 --kv-dtype int8 --batch-seqs 32 -o plan.json",
    "rooftop plan serve llama3-70b --requests-per-second 40 --ttft 500ms --tpot 30ms --on v5e,v6e",
)


@command.command(name="serve", cls=VerbCommand, examples=_SERVING)
@request_options(PlanServing)
@option("--plot", group=OUTPUT, type=FILE, help="Draw the Pareto front here (SVG).")
@report_option(help="Write a page with plots here (HTML).")
@output_option(help="Write plan.json here.")
@json_option
def serve(
    *,
    request: PlanServing,
    plot: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Plan serving MODEL (a preset or a path to a Hugging Face config.json): chapter 8's LLaMA-3 70B by default."""
    from rooftop.library.serving import ServingFrontResult, plan_serving, serving_front

    result: ServingPlanResult | ServingFrontResult
    with no_answer(as_json=as_json), progress_bar(shown=not as_json, after_s=1.0) as on_progress:
        if request.objective == "pareto":
            result = serving_front(request, on_progress=on_progress)
        else:
            result = plan_serving(request, on_progress=on_progress)
    if plot is not None:
        from rooftop.present.documents.serving import front_chart
        from rooftop.present.svg import lines_file

        title = _title(result, str(request.to_json()["on"]))
        points = result.points if isinstance(result, ServingFrontResult) else result.answer.front
        picture = lines_file(front_chart(points), title, "numbers next to points: batch")
        write_text(plot, picture)
    if report is not None:
        write_text(report, result.page())
    if output is not None:
        write_json(output, result.to_json())
    show(result.record, {"plan": output, "picture": plot}, as_json=as_json)
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


@command.command(
    name="embed", cls=VerbCommand, examples=("rooftop plan embed tables.toml --on v5p:2x2x1 --batch-samples 16384",)
)
@request_options(PlanEmbedding)
@report_option()
@output_option(help="Write plan.json here.")
@json_option
def embed(*, request: PlanEmbedding, report: Path | None, output: Path | None, as_json: bool) -> int:
    """Plan the embedding TABLES (a TOML file) on a slice: memory, step time, and what binds."""
    from rooftop.library.embedding import plan_embedding

    with no_answer(as_json=as_json):
        result = plan_embedding(request)
    if report is not None:
        write_text(report, result.page())
    if output is not None:
        result.write_plan(output)
    show(result.record, {"plan": output}, as_json=as_json)
    result.raise_if_infeasible()
    return 0
