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

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.simulate.serving.records import SimulatedServer, Simulation, Stay, StepRun

Floats = npt.NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)


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

    def to_json(self) -> dict[str, Any]:
        """All figures; times in seconds, shares from 0 to 1."""
        requests, trace = self.simulation.requests, self.simulation.trace
        duration = self.duration_s
        served = ~np.isnan(self.ttft_s)
        generated, prefilled, cached = sum(requests.tokens), sum(requests.prefilled), sum(requests.cached)
        prompts = int(trace.prompt_tokens[served].sum())
        return {
            "requests": {
                "offered": len(trace),
                "finished": self.finished,
                "refused": len(requests.refused),
                "refused_why": next(iter(requests.refused.values()), None),
                "per_second": _rate(self.finished, duration),
            },
            "tokens": {
                "prompt": prompts,
                "prefilled": prefilled,
                "cached": cached,
                "recomputed": prefilled + cached - prompts,
                "generated": generated,
                "generated_per_second": _rate(generated, duration),
            },
            "duration_s": duration,
            "ttft_s": spread(self.ttft_s),
            "tpot_s": spread(self.tpot_s),
            "itl_s": _weighted_spread(*self.itl_s),
            "worst_itl_s": spread(self.worst_itl_s[served]),
            "e2e_s": spread(self.e2e_s),
            "goodput": {
                "ttft_target_s": self.targets.ttft_s,
                "tpot_target_s": self.targets.tpot_s,
                "requests": self.good,
                "requests_per_second": _rate(self.good, duration),
                "share": self.good / len(trace),
            },
            "preemptions": sum(requests.preemptions),
            "servers": [self._server(server) for server in self.simulation.servers],
        }

    def _server(self, server: SimulatedServer) -> dict[str, Any]:
        """Use of one server's time and pages."""
        runs, duration = self._runs[server.number], self.duration_s
        seconds = runs["end_s"] - runs["start_s"]
        prefills, generates = runs["prefill_tokens"] > 0, runs["generating"] > 0
        steps = runs["steps"][generates]
        pages, caches = server.pages, server.scheduler.caches
        return {
            "server": server.number,
            "role": server.role,
            "utilisation": {
                "prefill": _rate(seconds[prefills & ~generates].sum(), duration),
                "generate": _rate(seconds[generates & ~prefills].sum(), duration),
                "mixed": _rate(seconds[prefills & generates].sum(), duration),
                "busy": _rate(seconds.sum(), duration),
            },
            "steps": {"prefill": int((prefills & ~generates).sum()), "generate": int(steps.sum())},
            "mean_batch": _rate((runs["generating"][generates] * steps).sum(), steps.sum()),
            "max_waiting": int(runs["waiting"].max(initial=0)),
            "kv": {
                "pages": pages,
                "groups": len(caches),
                "page_tokens": caches[0].page_tokens,
                "mean_occupancy": _rate(server.page_seconds, duration * pages),
                "max_occupancy": float(runs["kv_pages"].max(initial=0) / pages),
            },
        }


def _columns(server: SimulatedServer) -> dict[str, Floats]:
    """The runs of a server as arrays [run]."""
    columns = zip(*server.runs, strict=True) if server.runs else ((),) * len(StepRun._fields)
    return {name: np.array(column, np.float64) for name, column in zip(StepRun._fields, columns, strict=True)}


def _rate(amount: float, of: float) -> float:
    return float(amount / of) if of else 0.0


def spread(values: Floats) -> dict[str, float] | None:
    """Mean, percentiles (linear between values) and maximum; None where there are no values."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    percentiles = np.percentile(known, PERCENTILES)
    return (
        {"mean": float(known.mean())}
        | {f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)}
        | {"max": float(known.max())}
    )


def _weighted_spread(values: Floats, counts: Floats) -> dict[str, float] | None:
    """The same of sorted values that occur ``counts`` times each; percentiles are values that occur."""
    if not len(values):
        return None
    total = np.cumsum(counts)
    at = np.searchsorted(total, np.array(PERCENTILES) / 100 * total[-1])
    return (
        {"mean": float((values * counts).sum() / total[-1])}
        | {f"p{p}": float(values[index]) for p, index in zip(PERCENTILES, at, strict=True)}
        | {"max": float(values[-1])}
    )
