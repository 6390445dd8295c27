"""Figures of a replay of requests, as its clients measured them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rooftop.core.records import Record
from rooftop.simulate.serving.metrics import Goodput, ServingFigures, SimulatedTrace, Spread


@dataclass(frozen=True, kw_only=True)
class RequestCounts(Record):
    """Numbers of requests. ``why`` is the first error of those that were not answered whole."""

    offered: int
    finished: int
    refused: int
    failed: int
    why: str | None
    per_second: float


@dataclass(frozen=True, kw_only=True)
class TokenCounts(Record):
    """Tokens of the requests that were answered whole."""

    prompt: int
    generated: int
    generated_per_second: float


@dataclass(frozen=True, kw_only=True)
class ReplayMetrics(Record):
    """Figures of a replay, by the names of a simulation. ``worst_lag_s``: the latest that a request was sent."""

    requests: RequestCounts
    tokens: TokenCounts
    duration_s: float
    worst_lag_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    goodput: Goodput


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingBenchRecord(Record):
    """Latencies that clients of a server measured, next to a simulation of the same requests.

    ``predicted_by`` names the step times of the simulation, or says why there is none. ``outside_engine_ttft_s`` is the
    part of the mean TTFT that the engine did not measure; None if the server does not tell.
    """

    kind: Literal["bench serve"] = "bench serve"
    schema: Literal[1] = 1
    rooftop_version: str
    command: str
    date: str
    request: Mapping[str, Any]
    url: str
    model: str
    trace: SimulatedTrace
    measured: ReplayMetrics
    outside_engine_ttft_s: float | None
    predicted: ServingFigures | None
    predicted_by: str
