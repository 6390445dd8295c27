"""Records of a serving simulation: servers, runs of equal steps, and requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rooftop.scheduling.serving.cache import CachedSequence
from rooftop.scheduling.serving.groups import AnyScheduler
from rooftop.scheduling.serving.scheduler import EngineStep, StaticScheduler
from rooftop.simulate.serving.deployment import Deployment
from rooftop.simulate.serving.traces import RequestTrace


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
    role: str
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
