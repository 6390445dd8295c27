"""``rooftop plan serve``: prefill and generation on one slice, or a recommendation over chips."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.output import emit_json, json_option, show
from rooftop.core.errors import RooftopError

if TYPE_CHECKING:
    from rooftop.hardware import Slice
    from rooftop.plan.serving.problem import ServingProblem
    from rooftop.plan.serving.workload import ServingNumerics

#: Number formats that a search over chips tries where none is given.
_SEARCHED = "int8,bf16"


@click.command(name="serve")
@click.argument("model", default="llama3-70b")
@click.option(
    "--on", required=True, metavar="SLICE", help="CHIP:SHAPE, such as v5e:4x4; or chips to search: v5e,v6e,h100."
)
@click.option("--prompt", default="8192", show_default=True, metavar="N", help="Tokens of a prompt.")
@click.option("--generate", default="512", show_default=True, metavar="N", help="Tokens of an answer.")
@click.option("--batch-seqs", metavar="N", help="Sequences generated together. Searched if not given.")
@click.option("--context", metavar="N", help="Tokens cached at the step priced. Default: prompt and half the answer.")
@click.option("--weights", metavar="DTYPE", help="Dtype of the layers' weights; a list when chips are searched.")
@click.option("--kv", metavar="DTYPE", help="Dtype of the KV cache; a list when chips are searched.")
@click.option("--flops", default="bf16", show_default=True, metavar="DTYPE", help="Dtype of the matmuls.")
@click.option("--embeddings", metavar="DTYPE", help="Dtype of embedding and unembedding. Default: as the weights.")
@click.option("--weight-group", metavar="N", help="Weights of a column that share a scale. Default: all of them.")
@click.option("--kv-sharing", default="1", metavar="N", help="Layers that share one KV cache.")
@click.option("--mode", metavar="MODE", help="disaggregated (default) or interleaved; both when chips are searched.")
@click.option("--mesh", metavar="AXES", help="Fix generation's axes: context=2,tensor=8. Searched if not given.")
@click.option("--prefill-mesh", metavar="AXES", help="Fix a prefill's axes: context=2,tensor=8.")
@click.option("--prefill-on", metavar="SLICE", help="A prefill server, if it is another slice of the same chip.")
@click.option(
    "--kv-split", metavar="WHAT", help="What context splits of the cache: batch or seq. Searched if not given."
)
@click.option("--link", default="dcn", show_default=True, help="What joins prefill and generate servers: ici or dcn.")
@click.option("--ttft", metavar="TIME", help="Target of the time to first token: 500ms.")
@click.option("--tpot", metavar="TIME", help="Target of the time per output token: 30ms.")
@click.option("--requests-per-second", metavar="N", help="Rate to plan servers for.")
@click.option(
    "--for", "objective", default="cost", show_default=True, help="What a search seeks: cost, chips or pareto."
)
@click.option("--hit-rate", default="0", metavar="SHARE", help="Share of the prompt that the prefix cache has: 0.5.")
@click.option("--host-dram", metavar="BYTES", help="Memory of a host for the prefix cache: 400G.")
@click.option("--draft", metavar="MODEL", help="Draft model of speculative decoding.")
@click.option("--draft-length", default="4", show_default=True, metavar="N", help="Tokens that it guesses a round.")
@click.option("--acceptance", default="0.7", show_default=True, metavar="P", help="Probability that a guess is right.")
@click.option(
    "--mfu", metavar="SHARE", help="Fix the prefill's efficiency: 2 x parameters x tokens at this share of peak."
)
@click.option("--assume", metavar="SHARES", help="hbm_read=0.9,latency=0.5 (docs/plan-serve.md).")
@click.option("--bounds", default="usable", show_default=True, help="usable HBM, or the book's arithmetic: book.")
@click.option("--price", metavar="USD", help="Dollars per chip-hour, instead of the list price.")
@click.option("--contexts", metavar="LIST", help="Contexts of the Pareto front: 2k,8k,32k.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the Pareto front here (SVG).")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with plots here (HTML).")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write plan.json here.")
@json_option
def serve(
    as_json: bool,
    output: Path | None,
    plot: Path | None,
    report: Path | None,
    contexts: str | None,
    objective: str,
    on: str,
    **options: Any,
) -> int:
    """Plan serving MODEL (a preset or a path to a Hugging Face config.json): chapter 8's LLaMA-3 70B if not given.

    \b
    Examples: rooftop plan serve llama3-70b --on v5e:4x4 --weights int8 --kv int8 --batch-seqs 32 -o plan.json
              rooftop plan serve llama3-70b --requests-per-second 40 --ttft 500ms --tpot 30ms --on v5e,v6e
    """
    from rooftop.core.files import write_text
    from rooftop.core.quantities import parse_count
    from rooftop.plan.serving.answer import plan_serving
    from rooftop.plan.serving.fleet import Recommendation, front, recommend

    where = _where(on, options.pop("price"))
    searching = ":" not in on
    for name in ("mesh", "prefill_mesh", "prefill_on"):
        if searching and options[name] is not None:
            raise RooftopError(name.replace("_", "-"), options[name], "this with one slice, such as --on v5e:4x4")
    numerics, modes = _numerics(options, searching), _modes(options.pop("mode"), searching)
    problem = _problem(next(iter(where.values()))[0], numerics[0], modes[0], **options)
    sizes = None if contexts is None else [parse_count(text, "contexts") for text in contexts.split(",")]
    found: Recommendation | None = None
    if objective == "pareto":
        data: dict[str, Any] = {
            "kind": "pareto",
            "model": problem.model.name,
            "pareto": front(problem, where, numerics),
        }
        answer = None
    else:
        if searching or problem.workload.requests_per_second is not None:
            found = recommend(problem, where, numerics, modes, objective)
            problem = found.best.plan.problem
        answer = plan_serving(problem, contexts=sizes) if found is None else _answer(found, sizes)
        data = answer.to_json() | {"recommendation": None if found is None else found.to_json()}
    if plot is not None:
        from rooftop.present.documents.parts import front_chart
        from rooftop.present.svg import lines_file

        kinds = {(kind.weights, kind.kv) for kind in numerics}
        dtypes = "; ".join(f"{weights} weights, {kv} KV" for weights, kv in kinds) if len(kinds) == 1 else ""
        title = ", ".join(part for part in (f"{problem.model.name}: generation on {on}", dtypes) if part)
        write_text(plot, lines_file(front_chart(data["pareto"]), title, "numbers next to points: batch"))
    if report is not None:
        from rooftop.present import html
        from rooftop.present.documents import document

        write_text(report, html.page(document(data)))
    if output is not None:
        write_text(output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit_json(data)
    else:
        show(data, {"plan": output, "picture": plot})
    if answer is not None:
        answer.plan.require_fit()
        if found is None:
            answer.plan.require_targets()
    return 0


def _answer(found: Any, sizes: list[int] | None) -> Any:
    """The best fleet's plan, with the smallest slice and the front that every answer has."""
    from rooftop.plan.serving.answer import ServingAnswer
    from rooftop.plan.serving.search import pareto, smallest_slice

    plan = found.best.plan
    places = plan.problem.generate_placements()
    return ServingAnswer(
        plan=plan,
        smallest=smallest_slice(plan.problem, plan.batch),
        front=pareto(plan.problem, places, sizes),
        searched=found.searched,
    )


def _where(on: str, price: str | None) -> dict[str, list[Slice]]:
    """The slices that servers may be, by chip: the one given, or all of the chips given."""
    from rooftop.core.quantities import parse_quantity
    from rooftop.hardware import Slice, chip
    from rooftop.plan.serving.fleet import candidate_slices

    names = [name.strip() for name in on.split(",")]
    if ":" in on and len(names) > 1:
        raise RooftopError("on", on, "one slice, such as v5e:4x4, or chips without shapes, such as v5e,v6e")
    found = {}
    for name in names:
        if ":" in on:
            like = Slice.parse(name)
        else:
            spec = chip(name)
            like = Slice(spec, spec.slice_shapes[0])
        if price is not None:
            changed = like.chip.replace(price_usd_per_hour=parse_quantity(price, "price"))
            like = Slice(changed, like.shape, like.num_slices)
        found[like.chip.name] = [like] if ":" in on else candidate_slices(like)
    return found


def _modes(mode: str | None, searching: bool) -> list[str]:
    from rooftop.plan.serving.problem import MODES

    return [mode] if mode is not None else list(MODES if searching else MODES[:1])


def _numerics(options: dict[str, Any], searching: bool) -> list[ServingNumerics]:
    """Every combination of the number formats given (or searched)."""
    from rooftop.core.quantities import parse_count
    from rooftop.plan.serving.workload import ServingNumerics

    group = options.pop("weight_group")
    fixed = {
        "flops": options.pop("flops"),
        "embeddings": options.pop("embeddings"),
        "weight_group": None if group is None else parse_count(group, "weight-group"),
        "kv_sharing": parse_count(options.pop("kv_sharing"), "kv-sharing"),
    }
    lists = [(options.pop(name) or (_SEARCHED if searching else "bf16")).split(",") for name in ("weights", "kv")]
    if not searching and any(len(names) > 1 for names in lists):
        raise RooftopError("weights and kv", lists, "one dtype each on one slice; lists where chips are searched")
    return [ServingNumerics(weights=weights, kv=kv, **fixed) for weights, kv in product(*lists)]


def _problem(
    slice_: Slice,
    numerics: ServingNumerics,
    mode: str,
    *,
    model: str,
    prompt: str,
    generate: str,
    batch_seqs: str | None,
    context: str | None,
    mesh: str | None,
    prefill_mesh: str | None,
    prefill_on: str | None,
    kv_split: str | None,
    link: str,
    ttft: str | None,
    tpot: str | None,
    requests_per_second: str | None,
    hit_rate: str,
    host_dram: str | None,
    draft: str | None,
    draft_length: str,
    acceptance: str,
    mfu: str | None,
    assume: str | None,
    bounds: str,
) -> ServingProblem:
    """The problem that the options describe. Raises RooftopError naming the option that is wrong."""
    from rooftop.arrays import parse_axes
    from rooftop.core.quantities import parse_count, parse_quantity, parse_seconds
    from rooftop.hardware import Slice
    from rooftop.models import load_model
    from rooftop.plan.serving.assumptions import ServingAssumptions
    from rooftop.plan.serving.problem import ServingProblem
    from rooftop.plan.serving.workload import DraftModel, ServingWorkload

    assumptions = ServingAssumptions(mfu=None if mfu is None else _share(mfu, "mfu"))
    other = None if prefill_on is None else Slice.parse(prefill_on)
    if other is not None and other.chip.name == slice_.chip.name:
        other = Slice(slice_.chip, other.shape, other.num_slices)  # The same figures, a given price included.
    return ServingProblem(
        model=load_model(model),
        slice=slice_,
        workload=ServingWorkload(
            prompt=parse_count(prompt, "prompt"),
            generate=parse_count(generate, "generate"),
            batch_seqs=None if batch_seqs is None else parse_count(batch_seqs, "batch-seqs"),
            context=None if context is None else parse_count(context, "context"),
            requests_per_second=None
            if requests_per_second is None
            else parse_quantity(requests_per_second, "requests-per-second"),
            ttft_s=None if ttft is None else parse_seconds(ttft, "ttft"),
            tpot_s=None if tpot is None else parse_seconds(tpot, "tpot"),
            hit_rate=_share(hit_rate, "hit-rate"),
        ),
        numerics=numerics,
        assumptions=assumptions if assume is None else assumptions.with_shares(assume),
        mode=mode,
        bounds=bounds,
        axes=None if mesh is None else parse_axes(mesh),
        prefill_axes=None if prefill_mesh is None else parse_axes(prefill_mesh),
        kv_split=kv_split,
        link=link,
        draft=None
        if draft is None
        else DraftModel(
            model=load_model(draft),
            length=parse_count(draft_length, "draft-length"),
            acceptance=_share(acceptance, "acceptance"),
        ),
        host_bytes=None if host_dram is None else parse_quantity(host_dram, "host-dram"),
        prefill_slice=other,
    )


def _share(text: str, field: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise RooftopError(field, text, "a share between 0 and 1, such as 0.4")
    return share
