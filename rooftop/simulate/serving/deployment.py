"""Servers and how they serve: what a simulation is of."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.cache import KvCache
from rooftop.scheduling.serving.groups import AnyScheduler, make_scheduler
from rooftop.scheduling.serving.scheduler import Policy, Routing, StaticScheduler
from rooftop.scheduling.serving.times import StepTimes


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Servers and how they serve: ``replicas`` that do both phases, or that generate, and ``prefill_servers``.

    With ``prefix_cache`` pages of prompts are kept, up to ``host_kv_tokens`` tokens more in the host's memory of each
    server; sequences that are swapped out go there too. Groups of devices have equal parts of all that, but with static
    batching, which knows of none. In ``lockstep`` all servers are driven by one process: each begins its next step when
    all have ended theirs.
    """

    policy: Policy
    times: StepTimes
    replicas: int = 1
    prefill_servers: int = 0
    routing: Routing = field(default_factory=Routing)
    prefix_cache: bool = False
    host_kv_tokens: int = 0
    lockstep: bool = False

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise RooftopError("replicas", self.replicas, "a positive whole number")
        if (self.prefill_servers > 0) != (self.policy.batching == "disaggregated"):
            accepted = "1 or more with disaggregated batching, 0 with any other"
            raise RooftopError("prefill_servers", self.prefill_servers, accepted)
        if self.prefix_cache and self.policy.batching == "static":
            raise RooftopError("prefix_cache", True, "batching other than static: padded prompts share no pages")
        if self.routing.kind == "affinity" and not self.prefix_cache:
            raise RooftopError("routing", "affinity", "affinity with a prefix cache; without one least_loaded")
        if self.host_kv_tokens < 0:
            raise RooftopError("host_kv_tokens", self.host_kv_tokens, "0 or more")

    def schedulers(self) -> tuple[list[AnyScheduler] | list[StaticScheduler], list[AnyScheduler]]:
        """Those that requests come to, and those that only generate (disaggregated)."""
        if self.policy.batching == "static":
            return [self._static() for _ in range(self.replicas)], []
        if self.policy.batching == "interleaved":
            return [self._scheduler("both") for _ in range(self.replicas)], []
        return (
            [self._scheduler("prefill") for _ in range(self.prefill_servers)],
            [self._scheduler("generate") for _ in range(self.replicas)],
        )

    def _static(self) -> StaticScheduler:
        page_tokens = self.times.page_tokens
        return StaticScheduler(self.policy, KvCache(page_tokens=page_tokens, pages=self.times.kv_tokens // page_tokens))

    def _scheduler(self, role: str) -> AnyScheduler:
        times, page_tokens = self.times, self.times.page_tokens
        prefills = role == "prefill"
        groups = times.prefill_kv_groups if prefills else times.kv_groups
        return make_scheduler(
            self.policy,
            role,
            groups=groups,
            page_tokens=page_tokens,
            pages=(times.prefill_kv_tokens if prefills else times.kv_tokens) // page_tokens // groups,
            host_pages=self.host_kv_tokens // page_tokens // groups,
            prefixes=self.prefix_cache,
        )
