"""What the simulator says of a server: with step times of a plan, or those that the engine measured of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rooftop.scheduling.serving import Policy
from rooftop.scheduling.serving_times import StepTimes
from rooftop.simulate.serving import simulate
from rooftop.simulate.serving_deployment import Deployment
from rooftop.simulate.serving_measured import MeasuredTimes, Program
from rooftop.simulate.serving_metrics import Metrics, Targets
from rooftop.simulate.serving_traces import Trace

_Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What /metrics of a rooftop server says at one time: (name, labels) -> value."""

    values: Mapping[tuple[str, _Labels], float] = field(default_factory=dict)

    @classmethod
    def read(cls, url: str) -> Told | None:
        """None where there is no such server."""
        try:
            answer = httpx.get(f"{url}/metrics", timeout=30.0)
            samples = [each for family in text_string_to_metric_families(answer.text) for each in family.samples]
        except (httpx.HTTPError, ValueError):
            return None
        values = {(each.name, tuple(sorted(each.labels.items()))): each.value for each in samples}
        return cls(values=values) if any(name == "rooftop_policy" for name, _ in values) else None

    def one(self, name: str) -> float:
        """A metric without labels; 0 where there is none."""
        return self.values.get((f"rooftop_{name}", ()), 0.0)

    def labelled(self, name: str) -> dict[_Labels, float]:
        """A metric by its labels."""
        return {labels: value for (known, labels), value in self.values.items() if known == f"rooftop_{name}"}

    @property
    def policy(self) -> tuple[Policy, bool]:
        """How the server batches, and whether it has a prefix cache."""
        labels = dict(next(iter(self.labelled("policy"))))
        chunk = labels["chunk_tokens"]
        policy = Policy(
            max_batch=int(labels["max_batch"]),
            batching=labels["batching"],
            chunk_tokens=int(chunk) if chunk else None,
            preemption=labels["preemption"],
        )
        return policy, labels["prefix_cache"] == "true"


def measured_times(before: Told, after: Told) -> MeasuredTimes:
    """The step times of what ran between two times. Raises RooftopError where too little did."""
    runs, seconds = after.labelled("program_runs_total"), after.labelled("program_seconds_total")
    old_runs, old_seconds = before.labelled("program_runs_total"), before.labelled("program_seconds_total")
    programs, spent = list[Program](), 0.0
    for labels, count in runs.items():
        new = count - old_runs.get(labels, 0.0)
        took = seconds[labels] - old_seconds.get(labels, 0.0)
        spent += took
        if new:
            shape = {name: int(value) for name, value in labels}
            programs.append(Program(**shape, seconds=took / new))
    steps = after.one("steps_total") - before.one("steps_total")
    beside = after.one("step_seconds_total") - before.one("step_seconds_total") - spent
    page_tokens = int(after.one("kv_page_tokens"))
    return MeasuredTimes(
        page_tokens=page_tokens,
        kv_tokens=int(after.one("kv_pages")) * page_tokens,
        programs=tuple(programs),
        overhead_s=max(0.0, beside / steps) if steps else 0.0,
        kv_groups=int(after.one("kv_groups")) or 1,
    )


def outside_s(before: Told, after: Told, ttft_s: float) -> float | None:
    """Of a client's mean TTFT, ``ttft_s``, what is not in the engine's own: HTTP, parsing, and the client itself.

    None where no request was answered between the two times.
    """
    name = "time_to_first_token_seconds"
    answered = after.one(f"{name}_count") - before.one(f"{name}_count")
    return ttft_s - (after.one(f"{name}_sum") - before.one(f"{name}_sum")) / answered if answered else None


def predict(trace: Trace, times: StepTimes, policy: Policy, prefix_cache: bool, targets: Targets) -> dict[str, Any]:
    """The figures of a simulation of ``trace`` on one server. Raises RooftopError for what cannot be simulated."""
    deployment = Deployment(policy=policy, times=times, prefix_cache=prefix_cache)
    return Metrics(simulation=simulate(trace, deployment), targets=targets).to_json()
