"""Figures of a replay of requests, as its clients measured them."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.core.records import Record
from rooftop.simulate.serving.metrics import Goodput, Spread


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
