"""Predictions of the simulator for a server, with step times of a plan or times that the engine measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rooftop.core.rounding import ceil_div
from rooftop.scheduling.serving.scheduler import Policy, Routing
from rooftop.scheduling.serving.times import StepTimes
from rooftop.simulate.serving.engine import simulate
from rooftop.simulate.serving.measured import MeasuredProgram, MeasuredTimes
from rooftop.simulate.serving.metrics import ServingFigures, ServingMetrics, Targets
from rooftop.simulate.serving.records import Deployment
from rooftop.simulate.serving.traces import RequestTrace

_Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class PredictionInput:
    """Values of /metrics of a rooftop server at one time: (name, labels) -> value."""

    values: Mapping[tuple[str, _Labels], float] = field(default_factory=dict)

    @classmethod
    def read(cls, url: str) -> PredictionInput | None:
        """Read /metrics of the server at ``url``; None if it is not a rooftop server."""
        try:
            answer = httpx.get(f"{url}/metrics", timeout=30.0)
            samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
        except (httpx.HTTPError, ValueError):
            return None
        values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
        return cls(values=values) if any(name == "rooftop_policy" for name, _ in values) else None

    def one(self, name: str) -> float:
        """A metric without labels; 0 where there is none."""
        return self.values.get((f"rooftop_{name}", ()), 0.0)

    def labelled(self, name: str) -> dict[_Labels, float]:
        """A metric by its labels."""
        return {labels: value for (known, labels), value in self.values.items() if known == f"rooftop_{name}"}

    @property
    def servers(self) -> int:
        """Copies, or parts, of the engine that take their steps at once."""
        return int(self.one("servers")) or 1

    @property
    def policy(self) -> tuple[Policy, bool]:
        """Batching policy of the engine, all its copies together, and True if it has a prefix cache."""
        labels = dict(next(iter(self.labelled("policy"))))
        chunk = labels["chunk_tokens"]
        policy = Policy(
            max_batch=int(labels["max_batch"]),
            batching=labels["batching"],
            chunk_tokens=int(chunk) if chunk else None,
            preemption=labels["preemption"],
        )
        return policy, labels["prefix_cache"] == "true"


def measured_times(before: PredictionInput, after: PredictionInput) -> MeasuredTimes:
    """Step times and cache of one server of the engine, from the programs that ran between two times.

    Raises RooftopError if too few programs ran.
    """
    runs, seconds = after.labelled("program_runs_total"), after.labelled("program_seconds_total")
    old_runs, old_seconds = before.labelled("program_runs_total"), before.labelled("program_seconds_total")
    programs, spent = list[MeasuredProgram](), 0.0
    for labels, count in runs.items():
        new = count - old_runs.get(labels, 0.0)
        took = seconds[labels] - old_seconds.get(labels, 0.0)
        spent += took
        if new:
            shape = {name: int(value) for name, value in labels}
            programs.append(MeasuredProgram(**shape, seconds=took / new))

    def since(name: str) -> float:
        return after.one(name) - before.one(name)

    # Programs of several servers run at once: a step lasts as long as the longest. One server need not say.
    steps, busy = since("steps_total"), since("busy_seconds_total") or spent
    beside = since("step_seconds_total") - busy
    page_tokens, pages, prefill_pages = (
        int(after.one(name)) for name in ("kv_page_tokens", "kv_pages", "prefill_kv_pages")
    )
    copies = 1 if prefill_pages else after.servers
    handovers = since("handovers_total")
    # Within one process the KV goes over between two steps, and takes its part of what these take next to programs.
    handover_s = since("handover_seconds_total") / handovers if handovers else 0.0 if after.servers > 1 else None
    return MeasuredTimes(
        page_tokens=page_tokens,
        kv_tokens=(pages - prefill_pages) // copies * page_tokens,
        programs=tuple(programs),
        overhead_s=max(0.0, beside / steps) if steps else 0.0,
        kv_groups=int(after.one("kv_groups")) or 1,
        prefill_kv_tokens=prefill_pages * page_tokens,
        prefill_kv_groups=int(after.one("prefill_kv_groups")) or 1,
        handover_s=handover_s,
    )


def outside_s(before: PredictionInput, after: PredictionInput, ttft_s: float) -> float | None:
    """Part of a client's mean TTFT, ``ttft_s``, outside the engine: HTTP, parsing, and the client itself.

    None where no request was answered between the two times.
    """
    name = "time_to_first_token_seconds"
    answered = after.one(f"{name}_count") - before.one(f"{name}_count")
    return ttft_s - (after.one(f"{name}_sum") - before.one(f"{name}_sum")) / answered if answered else None


def deployment_of(
    reported: PredictionInput | None, times: StepTimes, *, policy: Policy, prefix_cache: bool
) -> Deployment:
    """The servers of an engine, as many as ``reported``, each with these ``times``.

    Copies in one process take their steps at once, as do the two parts of an engine there; those of two processes go
    at their own pace. Raises RooftopError for what cannot be simulated.
    """
    apart, servers = policy.batching == "disaggregated", 1 if reported is None else reported.servers
    copies = 1 if apart else servers
    return Deployment(
        policy=replace(policy, max_batch=ceil_div(policy.max_batch, copies)),
        times=times,
        replicas=copies,
        prefill_servers=1 if apart else 0,
        routing=Routing(kind="affinity" if prefix_cache else "least_loaded"),
        prefix_cache=prefix_cache,
        lockstep=servers > 1,
    )


def predict(trace: RequestTrace, deployment: Deployment, targets: Targets) -> ServingFigures:
    """The figures of a simulation of ``trace``. Raises RooftopError for what cannot be simulated."""
    return ServingMetrics(simulation=simulate(trace, deployment), targets=targets).figures
