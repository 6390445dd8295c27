"""The request for a simulation of serving."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from rooftop.requests.kinds import Pairs
from rooftop.requests.request import Request, setting
from rooftop.requests.words import HARDWARE, WORKLOAD

if TYPE_CHECKING:
    from rooftop.requests.likes import (
        CalibrationLike,
        CountLike,
        LengthsLike,
        ServingPlanLike,
        TimeLike,
        TraceLike,
    )


@dataclass(frozen=True)
class Simulate(Request):
    """A simulation of requests to the servers of a serving plan, step by step."""

    verb: ClassVar[str] = "simulate"

    plan: ServingPlanLike
    """A plan.json of rooftop plan serve."""
    _: KW_ONLY
    trace: TraceLike | None = None
    """Requests: JSONL or CSV. Drawn by default."""
    requests_per_second: float | str | None = None
    """Rate of drawn requests. The plan's by default."""
    duration: TimeLike = "10m"
    """Time span of drawn requests: 10m."""
    concurrency: CountLike | None = None
    """Clients that each wait for an answer, instead of a rate."""
    requests: CountLike | None = None
    """Requests of all clients; 10 for each by default."""
    prompt: LengthsLike | None = setting(None, kind=Pairs("N", numbers=True))
    """Tokens of a prompt: 512, or 128:1024. The plan's by default."""
    generate: LengthsLike | None = setting(None, kind=Pairs("N", numbers=True))
    """Tokens of an answer, likewise."""
    burstiness: float | str = 1.0
    """1: Poisson; below it requests come in bursts."""
    seed: int = setting(0, group=WORKLOAD)
    """Seed of everything that is drawn."""
    hash_tokens: CountLike = 512
    """Tokens that a hash of a trace stands for."""
    batching: str | None = None
    """Batching of servers. The plan's by default."""
    chunk_tokens: CountLike | None = None
    """Prefill in chunks: most tokens of a step."""
    batch_seqs: CountLike | None = None
    """Sequences that a server has in progress at most. The plan's batch by default."""
    replicas: CountLike | None = None
    """Servers (disaggregated: that generate). The plan's, or 1."""
    prefill_servers: CountLike | None = None
    """Disaggregated: servers that prefill. The plan's."""
    routing: str = "least_loaded"
    """Routing of requests to servers."""
    preemption: str = "recompute"
    """Preemption of sequences when pages run out."""
    prefix_cache: bool = False
    """Share the KV of prompts that begin alike."""
    host_dram: CountLike | None = setting(None, group=HARDWARE)
    """Memory of a host for prefixes and swapped sequences: 400G."""
    ttft: TimeLike | None = None
    """Target for goodput: 500ms. The plan's by default."""
    tpot: TimeLike | None = None
    """Target for goodput: 30ms. The plan's by default."""
    calibration: CalibrationLike | None = None
    """Take the fractions that rooftop calibrate measured (JSON)."""
