"""Input and outcome of a serving simulation: a deployment, servers with their runs of equal steps, and requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.cache import CachedSequence, KvCache
from rooftop.scheduling.serving.groups import AnyScheduler, make_scheduler
from rooftop.scheduling.serving.scheduler import EngineStep, Policy, Routing, StaticScheduler
from rooftop.scheduling.serving.times import FrontEnd, StepTimes
from rooftop.simulate.serving.traces import RequestTrace

#: Phases that a server runs.
ServerRole = Literal["both", "prefill", "generate"]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Servers and how they serve: ``replicas`` that do both phases, or that generate, and ``prefill_servers``.

    With ``prefix_cache`` pages of prompts are kept, up to ``host_kv_tokens`` tokens more in the host's memory of each
    server; sequences that are swapped out go there too. Groups of devices have equal parts of all that, but with static
    batching, which knows of none. In ``lockstep`` all servers are driven by one process: each begins its next step when
    all have ended theirs. Requests go through one ``front_end`` to the servers.
    """

    policy: Policy
    times: StepTimes
    replicas: int = 1
    prefill_servers: int = 0
    routing: Routing = field(default_factory=Routing)
    prefix_cache: bool = False
    host_kv_tokens: int = 0
    lockstep: bool = False
    front_end: FrontEnd = field(default_factory=FrontEnd)

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

    def _scheduler(self, role: ServerRole) -> AnyScheduler:
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


class StepRun(NamedTuple):
    """Equal steps of a server in a row, the first taking ``first_s`` and each ``growth_s`` more than the last.

    ``continued`` sequences had generated in the server's step before as well and waited ``gap_s`` for the token of the
    first step. ``kv_pages`` are in use at its end, ``waiting`` sequences were queued at its beginning.
    """

    start_s: float
    end_s: float
    steps: int
    first_s: float
    growth_s: float
    generating: int
    prefill_tokens: int
    continued: int
    gap_s: float
    kv_pages: int
    waiting: int


class Stay(NamedTuple):
    """``request`` generated on ``server`` from its run ``first`` to its run ``last``."""

    request: int
    server: int
    first: int
    last: int


@dataclass(eq=False, slots=True)
class SimulatedServer:
    """Record of one server: its past runs and, during a simulation, its current one."""

    number: int
    role: ServerRole
    scheduler: AnyScheduler | StaticScheduler
    runs: list[StepRun] = field(default_factory=list)
    #: All that begin their steps at once, this one among them; the first has the run that they have in common.
    together: list[SimulatedServer] = field(default_factory=list)
    busy: bool = False
    #: Tokens of KV pages held, over time: page-seconds, and the pages held at ``metered_s``.
    page_seconds: float = 0.0
    metered_s: float = 0.0
    metered_pages: int = 0
    #: The run under way: when it began, its step, how often, the time of the first and the growth; which end is valid.
    started_s: float = 0.0
    step: EngineStep | None = None
    planned: int = 0
    first_s: float = 0.0
    growth_s: float = 0.0
    waiting: int = 0
    version: int = 0
    #: Steps that generated; (step after which it ends, request, stay) of each generating request, as a heap.
    steps: int = 0
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    last_token_s: float = 0.0
    #: Requests that generate from the next step on and did not in the last.
    newcomers: list[int] = field(default_factory=list)
    landed: list[CachedSequence] = field(default_factory=list)
    link_free_s: float = 0.0

    @property
    def pages(self) -> int:
        """Of the KV cache, all groups of devices together."""
        return sum(cache.device.size for cache in self.scheduler.caches)

    @property
    def pages_used(self) -> int:
        """Of those, the ones that sequences hold."""
        return sum(cache.device.used for cache in self.scheduler.caches)

    def meter(self, now: float) -> None:
        """Integrate the pages in use up to ``now``."""
        used = self.pages_used
        self.page_seconds += (now - self.metered_s) * (used + self.metered_pages) / 2
        self.metered_s, self.metered_pages = now, used


@dataclass(kw_only=True, slots=True)
class Requests:
    """Outcome of the requests: lists [request]. A refused one has no times (NaN) and its reason in ``refused``."""

    first_s: list[float]
    last_s: list[float]
    tokens: list[int]
    prefilled: list[int]
    cached: list[int]
    preemptions: list[int]
    #: The longest time between two tokens at either side of which the request joined a batch.
    joining_gap_s: list[float]
    server: list[int]
    refused: dict[int, str]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A finished simulation: its input, servers with their runs, requests with their times."""

    trace: RequestTrace
    deployment: Deployment
    servers: list[SimulatedServer]
    requests: Requests
    stays: list[Stay]
    #: Times between tokens of a request that the runs do not say: at joining a batch.
    joining_gaps_s: list[float]
