"""Metrics of a simulation: latencies of requests and use of servers.

Definitions are those of the serving benchmark tools. Per request, of ``n`` tokens generated:

- ``ttft_s``, time to first token: from its arrival to its first token, queueing included.
- ``tpot_s``, time per output token: (last token - first token) / (n - 1); none where n is 1.
- ``itl_s``, inter-token latency: each time between two tokens of a request, all requests together; their mean is TPOT
  weighted by tokens, their tail is what TPOT hides. ``worst_itl_s`` is the longest of a request.
- ``e2e_s``, end to end: from its arrival to its last token.
- goodput: requests that met every target, per second.

The duration is from the first arrival to the last token. Nothing is left out as warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rooftop import __version__
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_count, format_seconds
from rooftop.core.records import Record, field_values
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import Mode
from rooftop.plan.serving.search import prefills_in_steps
from rooftop.simulate.serving.records import Deployment, ServerRole, SimulatedServer, Simulation, Stay, StepRun
from rooftop.simulate.serving.traces import RequestTrace

Floats = npt.NDArray[np.float64]

_PERCENTILES = (50, 90, 95, 99)
#: Share by which a figure may differ from a plan's, or a queue grow, without a note; and requests that make a queue.
_BEYOND, _QUEUE = 0.05, 10


@dataclass(frozen=True, kw_only=True)
class Spread(Record):
    """Mean, percentiles and maximum of some values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True)
class RequestFigures(Record):
    """Requests by outcome; ``refused_why`` is the reason of one that was refused."""

    offered: int
    finished: int
    refused: int
    refused_why: str | None
    per_second: float


@dataclass(frozen=True, kw_only=True)
class TokenFigures(Record):
    """Tokens of the requests that were served. ``recomputed`` were prefilled again after a preemption."""

    prompt: int
    prefilled: int
    cached: int
    recomputed: int
    generated: int
    generated_per_second: float


@dataclass(frozen=True, kw_only=True)
class Goodput(Record):
    """Requests that met every target, and their share of all that were offered."""

    ttft_target_s: float | None
    tpot_target_s: float | None
    requests: int
    requests_per_second: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Utilisation(Record):
    """Shares of the duration that a server spent on steps of each kind; ``busy`` is their sum."""

    prefill: float
    generate: float
    mixed: float
    busy: float


@dataclass(frozen=True, kw_only=True)
class StepCounts(Record):
    """Steps of a server that only prefilled, and steps that generated."""

    prefill: int
    generate: int


@dataclass(frozen=True, kw_only=True)
class KvFigures(Record):
    """KV pages of a server in all ``groups`` of its devices, and the share of them in use."""

    pages: int
    groups: int
    page_tokens: int
    mean_occupancy: float
    max_occupancy: float


@dataclass(frozen=True, kw_only=True)
class ServerFigures(Record):
    """Use of one server's time and pages."""

    server: int
    role: ServerRole
    utilisation: Utilisation
    steps: StepCounts
    mean_batch: float
    max_waiting: int
    kv: KvFigures


@dataclass(frozen=True, kw_only=True)
class ServingFigures(Record):
    """All figures of a simulation; a spread is None where there are no values."""

    requests: RequestFigures
    tokens: TokenFigures
    duration_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    worst_itl_s: Spread | None
    e2e_s: Spread | None
    goodput: Goodput
    preemptions: int
    servers: tuple[ServerFigures, ...]


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan(Record):
    """The serving plan that was simulated, with the latencies and the rate of a full server that it expects.

    ``requests_per_second`` is the rate that it was made for (None: none), ``calibrated_by`` its calibration.
    """

    model: str
    max_seq_len: int
    slice: str
    prefill_slice: str
    mode: Mode
    batch: int
    ttft_s: float
    tpot_s: float
    tpot_together_s: float | None = None
    tokens_per_s: float
    requests_per_second: float | None
    calibrated_by: str | None = None

    @classmethod
    def of(cls, plan: ServingPlan) -> SimulatedPlan:
        """The figures of a plan."""
        problem = plan.problem
        return cls(
            model=problem.model.name,
            max_seq_len=problem.model.max_seq_len,
            slice=problem.slice.name,
            prefill_slice=problem.prefill_server.name,
            mode=problem.mode,
            batch=plan.batch,
            ttft_s=plan.ttft_s,
            tpot_s=plan.tpot_s,
            tpot_together_s=plan.tpot_together_s,
            tokens_per_s=plan.tokens_per_s,
            requests_per_second=problem.workload.requests_per_second,
            calibrated_by=None if problem.slice.chip.calibrated is None else problem.slice.chip.calibrated.by,
        )


@dataclass(frozen=True, kw_only=True)
class SimulatedDeployment(Record):
    """Servers, and how they serve."""

    batching: str
    chunk_tokens: int | None
    max_batch: int
    preemption: str
    replicas: int
    prefill_servers: int
    routing: str
    prefix_cache: bool
    host_kv_tokens: int

    @classmethod
    def of(cls, deployment: Deployment) -> SimulatedDeployment:
        """The figures of a deployment."""
        policy = deployment.policy
        return cls(
            batching=policy.batching,
            chunk_tokens=policy.chunk_tokens,
            max_batch=policy.max_batch,
            preemption=policy.preemption,
            replicas=deployment.replicas,
            prefill_servers=deployment.prefill_servers,
            routing=deployment.routing.kind,
            prefix_cache=deployment.prefix_cache,
            host_kv_tokens=deployment.host_kv_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class SimulatedTrace(Record):
    """Number, time span, mean lengths and longest sequence of the requests; ``clients`` of a closed loop."""

    requests: int
    clients: int | None
    seconds: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    longest_tokens: int
    hashes: bool

    @classmethod
    def of(cls, trace: RequestTrace) -> SimulatedTrace:
        """The figures of a trace."""
        return cls(
            requests=len(trace),
            clients=trace.clients,
            seconds=float(trace.arrival_s[-1]),
            mean_prompt_tokens=float(trace.prompt_tokens.mean()),
            mean_output_tokens=float(trace.output_tokens.mean()),
            longest_tokens=int((trace.prompt_tokens + trace.output_tokens).max()),
            hashes=trace.hashes is not None,
        )


@dataclass(frozen=True, kw_only=True)
class _SimulationInput(Record):
    """The keys of a report before its figures."""

    kind: Literal["simulation"]
    schema: Literal[1]
    rooftop_version: str
    plan: SimulatedPlan
    deployment: SimulatedDeployment
    trace: SimulatedTrace


@dataclass(frozen=True, kw_only=True)
class SimulationReport(ServingFigures, _SimulationInput):
    """The object that ``rooftop simulate --json`` writes: the input, then all figures.

    ``notes`` say where requests come faster than planned or served, and why figures are not the plan's.
    """

    sparse = frozenset({"request"})

    notes: tuple[str, ...] = ()
    request: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, plan: ServingPlan, deployment: Deployment, metrics: ServingMetrics) -> SimulationReport:
        """The report of a simulation of ``plan``."""
        return cls(
            notes=(*overload_notes(plan, metrics), *difference_notes(plan, deployment, metrics)),
            kind="simulation",
            schema=1,
            rooftop_version=__version__,
            plan=SimulatedPlan.of(plan),
            deployment=SimulatedDeployment.of(deployment),
            trace=SimulatedTrace.of(metrics.simulation.trace),
            **field_values(metrics.figures, ServingFigures),
        )


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Seconds that a request may take to its first token, and on average to each one after it; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RooftopError(name, value, "a positive number of seconds")


@dataclass(frozen=True, kw_only=True)
class ServingMetrics:
    """The figures of a simulation. Arrays [request] have NaN for requests that were refused."""

    simulation: Simulation
    targets: Targets

    @cached_property
    def ttft_s(self) -> Floats:
        """Time to first token [request]."""
        return np.array(self.simulation.requests.first_s) - self.simulation.trace.arrival_s

    @cached_property
    def e2e_s(self) -> Floats:
        """Time to last token [request]."""
        return np.array(self.simulation.requests.last_s) - self.simulation.trace.arrival_s

    @cached_property
    def tpot_s(self) -> Floats:
        """Time per token after the first [request]; NaN where there is but one."""
        after_first = self.simulation.trace.output_tokens - 1.0
        after_first[after_first == 0] = np.nan
        return np.asarray((self.e2e_s - self.ttft_s) / after_first, np.float64)

    @cached_property
    def itl_s(self) -> tuple[Floats, Floats]:
        """Times between tokens, and how many there are of each: sorted, for all requests together."""
        seconds, counts = [np.array(self.simulation.joining_gaps_s)], [np.ones(len(self.simulation.joining_gaps_s))]
        for runs in self._runs:
            seconds.append(runs["gap_s"])
            counts.append(runs["continued"])
            # Steps after the first of each run.
            more = np.maximum(runs["steps"].astype(np.int64) - 1, 0)
            number = np.arange(more.sum()) - np.repeat(np.cumsum(more) - more, more) + 1
            seconds.append(np.repeat(runs["first_s"], more) + number * np.repeat(runs["growth_s"], more))
            counts.append(np.repeat(runs["generating"], more))
        every, count = np.concatenate(seconds), np.concatenate(counts)
        some = np.flatnonzero(count)
        order = some[np.argsort(every[some])]
        return every[order], count[order]

    @cached_property
    def worst_itl_s(self) -> Floats:
        """The longest time between two tokens [request]; 0 where there is but one token."""
        worst = np.array(self.simulation.requests.joining_gap_s)
        stays = np.array(self.simulation.stays, np.int64).reshape(-1, len(Stay._fields))
        for number, runs in enumerate(self._runs):
            request, _, first, last = stays[stays[:, 1] == number].T
            if not len(request):
                continue
            last_step = np.where(runs["steps"] > 1, runs["first_s"] + (runs["steps"] - 1) * runs["growth_s"], 0.0)
            within = np.where(runs["generating"] > 0, last_step, 0.0)
            # In its first run that generates a request has joined: its own gap is not that of the others.
            generates = np.flatnonzero(runs["generating"] > 0)
            joined = generates[np.searchsorted(generates, first)]
            np.maximum.at(worst, request, within[joined])
            longest = np.append(np.maximum(within, runs["gap_s"]), 0.0)
            bounds = np.stack([joined + 1, last + 1], axis=1)
            several = bounds[:, 0] < bounds[:, 1]
            if several.any():
                maxima = np.maximum.reduceat(longest, bounds[several].ravel())[::2]
                np.maximum.at(worst, request[several], maxima)
        return worst

    @cached_property
    def _runs(self) -> list[dict[str, Floats]]:
        """The runs of each server, as arrays [run]."""
        return [_columns(server) for server in self.simulation.servers]

    @property
    def finished(self) -> int:
        """Requests that were served."""
        return len(self.simulation.trace) - len(self.simulation.requests.refused)

    @cached_property
    def duration_s(self) -> float:
        """From the first arrival to the last token."""
        last = np.array(self.simulation.requests.last_s)
        return float(np.nanmax(last) - self.simulation.trace.arrival_s[0]) if self.finished else 0.0

    @cached_property
    def good(self) -> int:
        """Requests that met every target."""
        met = ~np.isnan(self.ttft_s)
        if self.targets.ttft_s is not None:
            met &= self.ttft_s <= self.targets.ttft_s
        if self.targets.tpot_s is not None:
            # One token has no time per further token to miss.
            met &= ~(self.tpot_s > self.targets.tpot_s)
        return int(met.sum())

    @cached_property
    def figures(self) -> ServingFigures:
        """All figures; times in seconds, shares from 0 to 1."""
        requests, trace = self.simulation.requests, self.simulation.trace
        duration = self.duration_s
        served = ~np.isnan(self.ttft_s)
        generated, prefilled, cached = sum(requests.tokens), sum(requests.prefilled), sum(requests.cached)
        prompts = int(trace.prompt_tokens[served].sum())
        return ServingFigures(
            requests=RequestFigures(
                offered=len(trace),
                finished=self.finished,
                refused=len(requests.refused),
                refused_why=next(iter(requests.refused.values()), None),
                per_second=_rate(self.finished, duration),
            ),
            tokens=TokenFigures(
                prompt=prompts,
                prefilled=prefilled,
                cached=cached,
                recomputed=prefilled + cached - prompts,
                generated=generated,
                generated_per_second=_rate(generated, duration),
            ),
            duration_s=duration,
            ttft_s=spread(self.ttft_s),
            tpot_s=spread(self.tpot_s),
            itl_s=_weighted_spread(*self.itl_s),
            worst_itl_s=spread(self.worst_itl_s[served]),
            e2e_s=spread(self.e2e_s),
            goodput=Goodput(
                ttft_target_s=self.targets.ttft_s,
                tpot_target_s=self.targets.tpot_s,
                requests=self.good,
                requests_per_second=_rate(self.good, duration),
                share=self.good / len(trace),
            ),
            preemptions=sum(requests.preemptions),
            servers=tuple(map(self._server, self.simulation.servers)),
        )

    def _server(self, server: SimulatedServer) -> ServerFigures:
        runs, duration = self._runs[server.number], self.duration_s
        seconds = runs["end_s"] - runs["start_s"]
        prefills, generates = runs["prefill_tokens"] > 0, runs["generating"] > 0
        steps = runs["steps"][generates]
        pages, caches = server.pages, server.scheduler.caches
        return ServerFigures(
            server=server.number,
            role=server.role,
            utilisation=Utilisation(
                prefill=_rate(seconds[prefills & ~generates].sum(), duration),
                generate=_rate(seconds[generates & ~prefills].sum(), duration),
                mixed=_rate(seconds[prefills & generates].sum(), duration),
                busy=_rate(seconds.sum(), duration),
            ),
            steps=StepCounts(prefill=int((prefills & ~generates).sum()), generate=int(steps.sum())),
            mean_batch=_rate((runs["generating"][generates] * steps).sum(), steps.sum()),
            max_waiting=int(runs["waiting"].max(initial=0)),
            kv=KvFigures(
                pages=pages,
                groups=len(caches),
                page_tokens=caches[0].page_tokens,
                mean_occupancy=_rate(server.page_seconds, duration * pages),
                max_occupancy=float(runs["kv_pages"].max(initial=0) / pages),
            ),
        )


def _columns(server: SimulatedServer) -> dict[str, Floats]:
    """The runs of a server as arrays [run]."""
    columns = zip(*server.runs, strict=True) if server.runs else ((),) * len(StepRun._fields)
    return {name: np.array(column, np.float64) for name, column in zip(StepRun._fields, columns, strict=True)}


def _rate(amount: float, of: float) -> float:
    return float(amount / of) if of else 0.0


def spread(values: Floats) -> Spread | None:
    """Mean, percentiles (linear between values) and maximum; None where there are no values."""
    known = values[~np.isnan(values)]
    return _spread(known.mean(), np.percentile(known, _PERCENTILES), known.max()) if len(known) else None


def _weighted_spread(values: Floats, counts: Floats) -> Spread | None:
    """The same of sorted values that occur ``counts`` times each; percentiles are values that occur."""
    if not len(values):
        return None
    total = np.cumsum(counts)
    at = np.searchsorted(total, np.array(_PERCENTILES) / 100 * total[-1])
    return _spread((values * counts).sum() / total[-1], values[at], values[-1])


def _spread(mean: float, percentiles: Floats, most: float) -> Spread:
    p50, p90, p95, p99 = percentiles.tolist()
    return Spread(mean=float(mean), p50=p50, p90=p90, p95=p95, p99=p99, max=float(most))


def overload_notes(plan: ServingPlan, metrics: ServingMetrics) -> list[str]:
    """A sentence if requests come faster than the plan's, or faster than servers finish them; else none."""
    trace = metrics.simulation.trace
    last, count = float(trace.arrival_s[-1]), len(trace)
    span = last - float(trace.arrival_s[0])
    if trace.clients is not None or not span:
        return []
    rate, planned = (count - 1) / span, plan.problem.workload.requests_per_second
    first_s = np.array(metrics.simulation.requests.first_s)[~np.isnan(metrics.ttft_s)]
    arrival_s = trace.arrival_s[~np.isnan(metrics.ttft_s)]
    half, end = (int(np.sum((arrival_s <= at) & (first_s > at))) for at in (last - span / 2, last))
    grows = end >= max(_QUEUE, _BEYOND * count) and end > 1.5 * half
    # The rate of requests that are drawn differs from what was asked for.
    above = planned is not None and rate > planned * (1 + max(_BEYOND, 3 / math.sqrt(count)))
    if not (grows or above):
        return []
    comes = f"Requests come at {rate:.3g} a second"
    if planned is not None and above:
        comes += f", {rate / planned:.3g} times the plan's {planned:.4g}"
    if not grows:
        return [f"{comes}."]
    served = _rate(metrics.finished, metrics.duration_s)
    return [f"{comes}; servers finish {served:.3g}, and the queue grows to {end:,} requests when the last one comes."]


def difference_notes(plan: ServingPlan, deployment: Deployment, metrics: ServingMetrics) -> list[str]:
    """A sentence with the reasons if TPOT, or the rate of a closed loop, is not the plan's; else none."""
    figures, trace, policy = metrics.figures, metrics.simulation.trace, deployment.policy
    if figures.tpot_s is None:
        return []
    differs = []
    if abs(figures.tpot_s.mean / plan.tpot_s - 1) > _BEYOND:
        differs.append(f"TPOT is {format_seconds(figures.tpot_s.mean)}, planned {format_seconds(plan.tpot_s)}")
    rate, planned = figures.tokens.generated_per_second, plan.tokens_per_s * deployment.replicas
    if trace.clients is not None and abs(rate / planned - 1) > _BEYOND:
        differs.append(f"{format_count(rate, 'tok/s')} were generated, planned {format_count(planned, 'tok/s')}")
    if not differs:
        return []
    work, why = plan.problem.workload, []
    if policy.batching != plan.problem.mode:
        why.append(f"servers are {policy.batching}")
    if policy.chunk_tokens is not None and not prefills_in_steps(plan.problem):
        why.append("steps that generate also prefill")
    for name, lengths, length in (
        ("prompts", trace.prompt_tokens, work.prompt),
        ("answers", trace.output_tokens, work.generate),
    ):
        if abs(float(lengths.mean()) / length - 1) > _BEYOND:
            why.append(f"{name} have {float(lengths.mean()):,.4g} tokens in the mean, not {length:,}")
    servers = [server for server in figures.servers if server.steps.generate]
    batch = _rate(
        sum(server.mean_batch * server.steps.generate for server in servers),
        sum(server.steps.generate for server in servers),
    )
    if abs(batch / plan.batch - 1) > _BEYOND:
        why.append(f"{batch:.3g} sequences generate at a time, not {plan.batch}")
    busy = float(np.mean([server.utilisation.busy for server in servers])) if servers else 0.0
    if trace.clients is not None and deployment.prefill_servers and busy < 1 - _BEYOND:
        why.append(f"servers that generate are busy for {busy:.0%} of the time, as clients wait for their prefills")
    if figures.preemptions:
        why.append("sequences lost their pages and were prefilled again")
    whole = policy.batching == "interleaved" and policy.chunk_tokens is None
    full = batch >= plan.batch * (1 - _BEYOND)
    if whole and full and plan.tpot_together_s is not None and np.ptp(trace.output_tokens) == 0:
        why.append(
            "answers of one length start and end together, and half of the prefills of others come before their first "
            f"token ({format_seconds(plan.tpot_together_s)} planned for that)"
        )
    alone = sum(server.steps.prefill for server in servers)
    if whole and full and alone and max(server.kv.groups for server in figures.servers) > 1:
        why.append(
            f"groups of devices prefill a prompt each at the same time, {metrics.finished / alone:.3g} in a step, and "
            "the plan prices one"
        )
    if deployment.prefill_servers and figures.tpot_s.mean > plan.tpot_s * (1 + _BEYOND):
        why.append("after their first token sequences wait for their KV, for a place and for the step under way")
    return [f"{', and '.join(differs)}: {'; '.join(why)}." if why else f"{', and '.join(differs)}."]
