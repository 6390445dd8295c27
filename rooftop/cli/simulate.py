"""``rooftop simulate``: requests against a serving plan, before anyone pays for it."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.output import emit_json, json_option, progress_bar, read_plan_file, show
from rooftop.core.errors import Infeasible, RooftopError

if TYPE_CHECKING:
    from rooftop.plan.serving.plan import ServingPlan
    from rooftop.simulate.serving.deployment import Deployment
    from rooftop.simulate.serving.metrics import ServingMetrics
    from rooftop.simulate.serving.traces import RequestTrace


#: Seconds of traffic that a timeline shows.
_TIMELINE_S = 60.0
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(name="simulate")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--trace", "trace_file", type=click.Path(path_type=Path), help="Requests: JSONL or CSV.")
@click.option("--requests-per-second", metavar="N", help="Or drawn at this rate; the plan's, if it has one.")
@click.option("--seconds", default="600", show_default=True, metavar="N", help="For so long, when drawn.")
@click.option("--prompt", metavar="N", help="Tokens of a prompt: 512, or 128:1024. The plan's if not given.")
@click.option("--generate", metavar="N", help="Tokens of an answer, likewise.")
@click.option(
    "--burstiness",
    default="1",
    show_default=True,
    metavar="SHAPE",
    help="1: Poisson; below it requests come in bursts.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of what is drawn.")
@click.option("--hash-tokens", default="512", show_default=True, metavar="N", help="Tokens that a hash stands for.")
@click.option("--batching", metavar="KIND", help="static, interleaved or disaggregated. The plan's if not given.")
@click.option("--chunk-tokens", metavar="N", help="Prefill in chunks beside generation: most tokens of a step.")
@click.option("--max-batch", metavar="N", help="Most sequences a server holds at once. The plan's batch if not given.")
@click.option("--replicas", metavar="N", help="Servers (disaggregated: that generate). The plan's, or 1.")
@click.option("--prefill-servers", metavar="N", help="Disaggregated: servers that prefill. The plan's if not given.")
@click.option("--routing", default="least_loaded", show_default=True, help="round_robin, least_loaded or affinity.")
@click.option("--preemption", default="recompute", show_default=True, help="recompute or swap, when pages run out.")
@click.option("--prefix-cache", is_flag=True, help="Keep the KV of prompts for those that begin alike.")
@click.option("--host-kv-tokens", metavar="N", help="Tokens whose KV the hosts of a server hold: prefixes, swapped.")
@click.option("--ttft", metavar="TIME", help="Target for goodput: 500ms. The plan's if not given.")
@click.option("--tpot", metavar="TIME", help="Target for goodput: 30ms. The plan's if not given.")
@click.option("--per-request", type=_FILE, help="Write every request's times (CSV).")
@click.option("--perfetto", type=_FILE, help="Write the timeline of the first minute here, for ui.perfetto.dev.")
@click.option("-o", "--output", type=_FILE, help="Write the JSON object here.")
@json_option
def command(
    plan: Path,
    as_json: bool,
    output: Path | None,
    per_request: Path | None,
    perfetto: Path | None,
    ttft: str | None,
    tpot: str | None,
    **options: Any,
) -> int:
    """Serve requests by PLAN, a plan.json of `rooftop plan serve`: the latencies that users would feel.

    \b
    Examples: rooftop simulate plan.json --requests-per-second 2 --seconds 3600
              rooftop simulate plan.json --trace trace.jsonl --prefix-cache --replicas 4 --routing affinity
    """
    from rooftop.core.files import write_text
    from rooftop.simulate.serving.engine import simulate
    from rooftop.simulate.serving.metrics import ServingMetrics

    planned, fleet = _plan(plan)
    deployment = _deployment(planned, fleet, options)
    trace = _trace(planned, options)
    if deployment.prefix_cache and trace.hashes is None:
        raise RooftopError("prefix-cache", "requests without hashes", "a --trace whose hashes say what prompts share")
    targets = _targets(planned, ttft, tpot)
    with progress_bar(shown=not as_json) as on_progress:
        found = ServingMetrics(simulation=simulate(trace, deployment, on_progress), targets=targets)
    data = _json(planned, deployment, found)
    if not found.finished:
        raise Infeasible("no request can be served", data["requests"]["refused_why"])
    if per_request is not None:
        write_text(per_request, _csv(found))
    if perfetto is not None:
        from rooftop.simulate.serving.timeline import timeline

        write_text(perfetto, json.dumps(timeline(found.simulation, _TIMELINE_S), allow_nan=False))
    if output is not None:
        write_text(output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit_json(data)
    else:
        show(data, {"simulation": output, "requests": per_request, "timeline": perfetto})
    return 0


def _plan(file: Path) -> tuple[ServingPlan, Mapping[str, Any]]:
    """The plan in a file, and the fleet that it recommends (empty if none). Raises RooftopError."""
    from rooftop.plan.serving.plan import ServingPlan

    data = read_plan_file(file, accepted="a plan.json written by rooftop plan serve")
    return ServingPlan.from_json(data), (data.get("recommendation") or {}).get("best", {})


def _deployment(plan: ServingPlan, fleet: Mapping[str, Any], options: Mapping[str, Any]) -> Deployment:
    from rooftop.core.quantities import parse_count
    from rooftop.scheduling.serving.routing import Routing
    from rooftop.scheduling.serving.scheduler import Policy
    from rooftop.simulate.serving.deployment import Deployment

    def count(option: str) -> int | None:
        given = options[option]
        return None if given is None else parse_count(given, option.replace("_", "-"))

    batching = options["batching"] or plan.problem.mode
    policy = Policy(
        max_batch=count("max_batch") or plan.batch,
        batching=batching,
        chunk_tokens=count("chunk_tokens"),
        preemption=options["preemption"],
    )
    replicas = count("replicas") or math.ceil(fleet.get("generate_servers") or 1)
    prefill = count("prefill_servers")
    if prefill is None and batching == "disaggregated":
        prefill = math.ceil(fleet.get("prefill_servers") or plan.prefill_per_generate * replicas)
    times = plan.step_times()
    if options["preemption"] == "swap" and options["host_kv_tokens"] is None:
        raise RooftopError("preemption", "swap", "swap with --host-kv-tokens, the room that the hosts have for it")
    if min(times.kv_tokens // times.kv_groups, times.prefill_kv_tokens // times.prefill_kv_groups) < times.page_tokens:
        plan.require_fit()
        raise Infeasible(f"{plan.problem.model.name} on {plan.problem.slice.name}", "no HBM is left for a KV cache")
    return Deployment(
        policy=policy,
        times=times,
        replicas=replicas,
        prefill_servers=prefill or 0,
        routing=Routing(kind=options["routing"]),
        prefix_cache=options["prefix_cache"],
        host_kv_tokens=count("host_kv_tokens") or 0,
    )


def _trace(plan: ServingPlan, options: Mapping[str, Any]) -> RequestTrace:
    from rooftop.core.quantities import parse_count, parse_quantity
    from rooftop.simulate.serving.traces import Lengths, draw_trace, read_trace

    rate, file = options["requests_per_second"], options["trace_file"]
    if file is not None:
        if rate is not None:
            raise RooftopError("requests-per-second", rate, "this or --trace, not both")
        return read_trace(file, hash_tokens=parse_count(options["hash_tokens"], "hash-tokens"))
    work = plan.problem.workload
    if rate is None:
        rate = work.requests_per_second
    if rate is None:
        raise RooftopError("requests-per-second", rate, "this or --trace: the plan has no rate")
    per_second = parse_quantity(rate, "requests-per-second")
    return draw_trace(
        requests_per_second=per_second,
        requests=max(1, round(per_second * parse_quantity(options["seconds"], "seconds"))),
        prompt=Lengths.parse(options["prompt"] or str(work.prompt), "prompt"),
        output=Lengths.parse(options["generate"] or str(work.generate), "generate"),
        burstiness=parse_quantity(options["burstiness"], "burstiness"),
        seed=options["seed"],
    )


def _targets(plan: ServingPlan, ttft: str | None, tpot: str | None) -> Any:
    from rooftop.core.quantities import parse_seconds
    from rooftop.simulate.serving.metrics import Targets

    work = plan.problem.workload
    return Targets(
        ttft_s=work.ttft_s if ttft is None else parse_seconds(ttft, "ttft"),
        tpot_s=work.tpot_s if tpot is None else parse_seconds(tpot, "tpot"),
    )


def _json(plan: ServingPlan, deployment: Deployment, found: ServingMetrics) -> dict[str, Any]:
    from rooftop import __version__

    policy, trace = deployment.policy, found.simulation.trace
    return {
        "kind": "simulation",
        "schema": 1,
        "rooftop_version": __version__,
        "plan": {
            "model": plan.problem.model.name,
            "slice": plan.problem.slice.name,
            "prefill_slice": plan.problem.prefill_server.name,
            "mode": plan.problem.mode,
            "batch": plan.batch,
            "ttft_s": plan.ttft_s,
            "tpot_s": plan.tpot_s,
        },
        "deployment": {
            "batching": policy.batching,
            "chunk_tokens": policy.chunk_tokens,
            "max_batch": policy.max_batch,
            "preemption": policy.preemption,
            "replicas": deployment.replicas,
            "prefill_servers": deployment.prefill_servers,
            "routing": deployment.routing.kind,
            "prefix_cache": deployment.prefix_cache,
            "host_kv_tokens": deployment.host_kv_tokens,
        },
        "trace": {
            "requests": len(trace),
            "seconds": float(trace.arrival_s[-1]),
            "mean_prompt_tokens": float(trace.prompt_tokens.mean()),
            "mean_output_tokens": float(trace.output_tokens.mean()),
            "hashes": trace.hashes is not None,
        },
    } | found.to_json()


def _csv(found: ServingMetrics) -> str:
    """Each request's lengths and times; times of requests that were refused are empty."""
    simulation = found.simulation
    trace, requests = simulation.trace, simulation.requests
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("request", "arrival_s", "prompt_tokens", "output_tokens", "cached_tokens", "server", "preemptions")
    writer.writerow([*names, "ttft_s", "tpot_s", "worst_itl_s", "e2e_s"])
    lengths = zip(
        trace.arrival_s.tolist(),
        trace.prompt_tokens.tolist(),
        trace.output_tokens.tolist(),
        requests.cached,
        requests.server,
        requests.preemptions,
        strict=True,
    )
    times = zip(*(each.tolist() for each in (found.ttft_s, found.tpot_s, found.worst_itl_s, found.e2e_s)), strict=True)
    for number, (length, seconds) in enumerate(zip(lengths, times, strict=True)):
        known = [f"{value:.9g}" if not math.isnan(value) else "" for value in seconds]
        writer.writerow([number, f"{length[0]:.9g}", *length[1:], *known])
    return text.getvalue()
