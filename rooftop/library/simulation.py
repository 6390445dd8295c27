"""Simulations of requests that a serving plan's servers serve."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import read_json_object, write_text
from rooftop.core.quantities import format_seconds, parse_bytes, parse_count, parse_quantity
from rooftop.core.records import read_record
from rooftop.hardware import MOST_CHIPS
from rooftop.library.inputs import rate_of, recalibrated, seconds_of
from rooftop.library.results import Result
from rooftop.library.serving import Progress, ServingPlanResult
from rooftop.plan.serving.fleet import Fleet, FleetDocument, RecommendationDocument
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.search import MOST_SEQUENCES
from rooftop.present.documents import document
from rooftop.requests.function import of_request
from rooftop.requests.simulating import Simulate
from rooftop.scheduling.serving.scheduler import Policy, Routing
from rooftop.simulate.serving import engine as simulator
from rooftop.simulate.serving.metrics import ServingMetrics, SimulationReport, Targets
from rooftop.simulate.serving.records import Deployment
from rooftop.simulate.serving.timeline import timeline
from rooftop.simulate.serving.traces import Lengths, RequestTrace, closed_trace, draw_trace, read_trace

if TYPE_CHECKING:
    from rooftop.present.document import Document
    from rooftop.requests.likes import CountLike, LengthsLike, ServingPlanLike, TimeLike, TraceLike

#: Servers of a role that are simulated at most.
MOST_SERVERS = 10_000
#: Requests of each client of a closed loop.
_REQUESTS_PER_CLIENT = 10
#: Seconds of traffic that a timeline shows.
_TIMELINE_S = 60.0


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulationResult(Result):
    """Requests served by a plan: the latencies that users see, and the load of the servers."""

    request: Simulate
    plan: ServingPlan
    deployment: Deployment
    metrics: ServingMetrics

    @cached_property
    def report(self) -> SimulationReport:
        """Plan, deployment, trace, latencies, servers, and the request."""
        return replace(SimulationReport.of(self.plan, self.deployment, self.metrics), request=self.request.to_json())

    def to_json(self) -> dict[str, object]:
        """``report`` as plain JSON values."""
        return self.report.to_json()

    @property
    def document(self) -> Document:
        """Latencies, and what the servers do."""
        return document(self.report)

    @property
    def rows(self) -> list[dict[str, object]]:
        """A request a row: its lengths and times; times of refused requests are None."""
        simulation, metrics = self.metrics.simulation, self.metrics
        trace, requests = simulation.trace, simulation.requests
        lengths = zip(
            trace.arrival_s.tolist(),
            trace.prompt_tokens.tolist(),
            trace.output_tokens.tolist(),
            requests.cached,
            requests.server,
            requests.preemptions,
            strict=True,
        )
        names = ("arrival_s", "prompt_tokens", "output_tokens", "cached_tokens", "server", "preemptions")
        times = ("ttft_s", "tpot_s", "worst_itl_s", "e2e_s")
        seconds = zip(*(getattr(metrics, name).tolist() for name in times), strict=True)
        return [
            {"request": number}
            | dict(zip(names, counts, strict=True))
            | {name: None if math.isnan(value) else value for name, value in zip(times, spent, strict=True)}
            for number, (counts, spent) in enumerate(zip(lengths, seconds, strict=True))
        ]

    @property
    def summary(self) -> str:
        """Requests served, the report's notes, and middle and tail of the latencies."""
        metrics, deployment = self.metrics, self.deployment
        latencies = [
            f"{name} {format_seconds(values.p50)} median, {format_seconds(values.p99)} at p99"
            for name, values in (("TTFT", metrics.figures.ttft_s), ("TPOT", metrics.figures.tpot_s))
            if values is not None
        ]
        served = (
            f"{self.plan.problem.model.name} on {deployment.replicas} x {self.plan.problem.slice.name}, "
            f"{deployment.policy.batching}: {metrics.finished:,} of {len(metrics.simulation.trace):,} requests"
        )
        return "\n".join((served, *self.report.notes, "; ".join(latencies)))

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible if no request was served."""
        if not self.metrics.finished:
            refused = next(iter(self.metrics.simulation.requests.refused.values()))
            raise Infeasible("no request can be served", refused)

    def write_requests(self, path: Path | str) -> None:
        """Write ``rows`` as CSV."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for number, row in enumerate(self.rows):
            if not number:
                writer.writerow(row)
            writer.writerow(f"{cell:.9g}" if isinstance(cell, float) else cell for cell in row.values())
        write_text(Path(path), text.getvalue())

    def write_perfetto(self, path: Path | str) -> None:
        """Write the timeline of the first minute for ui.perfetto.dev."""
        write_text(Path(path), json.dumps(timeline(self.metrics.simulation, _TIMELINE_S), allow_nan=False))


@of_request(Simulate)
def simulate(request: Simulate, on_progress: Progress | None = None) -> SimulationResult:
    """Serve requests by a serving plan, step by step, before anyone pays for it.

    ``on_progress`` is called with requests done, requests in all, and a label.

    Raises RooftopError naming the field that is wrong, and Infeasible if the servers have no room for a cache.
    """
    plan, fleet = _planned(request.plan)
    plan = recalibrated(plan, request.calibration)
    deployment = _deployment(request, plan, fleet)
    work = plan.problem.workload
    requests_per_second = request.requests_per_second
    if request.trace is None and request.concurrency is None and request.requests is None and not requests_per_second:
        requests_per_second = work.requests_per_second
    served = trace_of(
        request.trace,
        concurrency=request.concurrency,
        requests=request.requests,
        requests_per_second=requests_per_second,
        duration=request.duration,
        prompt=work.prompt if request.prompt is None else request.prompt,
        generate=work.generate if request.generate is None else request.generate,
        burstiness=request.burstiness,
        seed=request.seed,
        hash_tokens=request.hash_tokens,
    )
    if request.prefix_cache and served.hashes is None:
        raise RooftopError("prefix-cache", "requests without hashes", "a --trace whose hashes say what prompts share")
    targets = targets_of(
        work.ttft_s if request.ttft is None else request.ttft, work.tpot_s if request.tpot is None else request.tpot
    )
    simulation = simulator.simulate(served, deployment, on_progress)
    metrics = ServingMetrics(simulation=simulation, targets=targets)
    return SimulationResult(request=request, plan=plan, deployment=deployment, metrics=metrics)


def _deployment(request: Simulate, plan: ServingPlan, fleet: Fleet | FleetDocument | None) -> Deployment:
    """The servers. Raises RooftopError, and Infeasible if they have no room for a cache."""
    batching, batch_seqs, chunk_tokens = request.batching or plan.problem.mode, request.batch_seqs, request.chunk_tokens
    host_dram = request.host_dram
    policy = Policy(
        max_batch=plan.batch if batch_seqs is None else parse_count(batch_seqs, "batch-seqs", largest=MOST_SEQUENCES),
        batching=batching,
        chunk_tokens=None if chunk_tokens is None else parse_count(chunk_tokens, "chunk-tokens"),
        preemption=request.preemption,
    )
    generators = 1 if fleet is None else math.ceil(fleet.generate_servers or 1)
    if request.replicas is not None:
        generators = parse_count(request.replicas, "replicas", largest=MOST_SERVERS)
    prefillers = 0
    if request.prefill_servers is not None:
        prefillers = parse_count(request.prefill_servers, "prefill-servers", largest=MOST_SERVERS)
    elif batching == "disaggregated":
        planned = 0.0 if fleet is None else fleet.prefill_servers
        prefillers = math.ceil(planned or plan.prefill_per_generate * generators)
    chips = generators * plan.problem.slice.chips + prefillers * plan.problem.prefill_server.chips
    if chips > MOST_CHIPS:
        raise RooftopError("replicas", f"{generators:,} ({chips:,} chips)", f"at most {MOST_CHIPS:,} chips")
    times = plan.step_times()
    if request.preemption == "swap" and host_dram is None:
        raise RooftopError("preemption", "swap", "swap with --host-dram, the memory that each host has for it")
    if min(times.kv_tokens // times.kv_groups, times.prefill_kv_tokens // times.prefill_kv_groups) < times.page_tokens:
        plan.require_fit()
        problem = plan.problem
        raise Infeasible(f"{problem.model.name} on {problem.slice.name}", "no HBM is left for a KV cache")
    return Deployment(
        policy=policy,
        times=times,
        replicas=generators,
        prefill_servers=prefillers,
        routing=Routing(kind=request.routing),
        prefix_cache=request.prefix_cache,
        front_end=plan.problem.front_end,
        host_kv_tokens=0 if host_dram is None else times.host_tokens(parse_bytes(host_dram, "host-dram")),
    )


def trace_of(
    trace: TraceLike | None,
    *,
    concurrency: CountLike | None,
    requests: CountLike | None,
    requests_per_second: float | str | None,
    duration: TimeLike,
    prompt: LengthsLike,
    generate: LengthsLike,
    burstiness: float | str,
    seed: int,
    hash_tokens: CountLike,
) -> RequestTrace:
    """The requests of a trace or of clients, or as they are drawn; see ``simulate``. Raises RooftopError."""
    if concurrency is not None:
        for field, value in (("trace", trace), ("requests-per-second", requests_per_second)):
            if value is not None:
                raise RooftopError("concurrency", concurrency, f"this or --{field}, not both")
        return _closed(concurrency, requests, prompt, generate, seed)
    if requests is not None:
        raise RooftopError("requests", requests, "requests of clients, with --concurrency")
    if trace is not None:
        if requests_per_second is not None:
            raise RooftopError("requests-per-second", requests_per_second, "this or --trace, not both")
        if isinstance(trace, RequestTrace):
            return trace
        return read_trace(Path(trace), hash_tokens=parse_count(hash_tokens, "hash-tokens"))
    per_second = rate_of(requests_per_second)
    if per_second is None:
        raise RooftopError("requests-per-second", None, "this, --trace or --concurrency")
    return draw_trace(
        requests_per_second=per_second,
        requests=max(1, round(per_second * seconds_of(duration, "duration"))),
        prompt=_lengths(prompt, "prompt"),
        output=_lengths(generate, "generate"),
        burstiness=parse_quantity(burstiness, "burstiness"),
        seed=seed,
    )


def _closed(
    concurrency: CountLike, requests: CountLike | None, prompt: LengthsLike, generate: LengthsLike, seed: int
) -> RequestTrace:
    """The requests of a closed loop; see ``simulate``. Raises RooftopError."""
    clients = parse_count(concurrency, "concurrency")
    return closed_trace(
        clients=clients,
        requests=_REQUESTS_PER_CLIENT * clients if requests is None else parse_count(requests, "requests"),
        prompt=_lengths(prompt, "prompt"),
        output=_lengths(generate, "generate"),
        seed=seed,
    )


def targets_of(ttft: TimeLike | None, tpot: TimeLike | None) -> Targets:
    """Targets of goodput. Raises RooftopError."""
    return Targets(
        ttft_s=None if ttft is None else seconds_of(ttft, "ttft"),
        tpot_s=None if tpot is None else seconds_of(tpot, "tpot"),
    )


def read_serving_plan(path: Path | str) -> ServingPlan:
    """The plan in a plan.json. Raises RooftopError for any other file."""
    return _planned(path)[0]


def _lengths(lengths: LengthsLike, field: str) -> Lengths:
    return lengths if isinstance(lengths, Lengths) else Lengths.parse(str(lengths), field)


def _planned(plan: ServingPlanLike) -> tuple[ServingPlan, Fleet | FleetDocument | None]:
    """A plan, and the fleet that it recommends. Raises RooftopError."""
    if isinstance(plan, ServingPlan):
        return plan, None
    if isinstance(plan, ServingPlanResult):
        return plan.plan, None if plan.recommendation is None else plan.recommendation.best
    data: Mapping[str, object]
    if isinstance(plan, (str, Path)):
        data = read_json_object(Path(plan), field="plan", accepted="a plan.json written by rooftop plan serve")
    elif isinstance(plan, Mapping):
        data = plan
    else:
        return plan.plan, None
    planned = ServingPlan.from_json(data)
    recommended = read_record(_Recommended, data, "plan", amounts=True).recommendation
    return planned, None if recommended is None else recommended.best


@dataclass(frozen=True, kw_only=True)
class _Recommended:
    """The part of plan.json that says which fleet is recommended."""

    recommendation: RecommendationDocument | None = None
