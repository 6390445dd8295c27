"""Counters of an engine's servers, and the time that their steps take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from rooftop.scheduling.serving.groups import AnyScheduler
from rooftop.serve.engine.requests import EngineStats, ProgramTimes

#: Sizes of a program: rows, new tokens of each, tokens of context, and rows that generate next to prefilled ones.
Shape = tuple[int, int, int, int]


@dataclass(kw_only=True)
class Counters:
    """Sums over the steps of servers; ``device_s`` is the part of ``step_s`` spent in XLA and waiting for it.

    Steps that several servers take at once count as one; ``busy_s`` is the time of the longest of each.
    """

    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    guessed: int = 0
    accepted: int = 0
    step_s: float = 0.0
    device_s: float = 0.0
    busy_s: float = 0.0
    #: Runs and seconds of each program.
    programs: dict[Shape, list[float]] = field(default_factory=dict)
    #: The same, of steps that ran one program only.
    alone: dict[Shape, list[float]] = field(default_factory=dict)
    _longest_s: float = 0.0

    def ran(self, programs: list[Shape], seconds: float, *, at_most: bool = False) -> None:
        """A step of these programs took so long: each as long as it takes alone, and what is left is the others'.

        ``at_most``: nobody saw it end, for another server was waited for; where it is known how long its programs take,
        it has taken no longer.
        """
        known = [self.alone.get(program) for program in programs]
        means = [None if entry is None else entry[1] / entry[0] for entry in known]
        spent, unknown = sum(mean for mean in means if mean is not None), means.count(None)
        if at_most and not unknown:
            seconds = min(seconds, spent)
        self._longest_s = max(self._longest_s, seconds)
        scale = seconds / spent if spent and (not unknown or spent > seconds) else 1.0
        rest = max(0.0, seconds - spent)
        for program, mean in zip(programs, means, strict=True):
            share = rest / unknown if mean is None else mean * scale
            for totals in (self.programs, self.alone) if len(programs) == 1 else (self.programs,):
                entry = totals.setdefault(program, [0, 0.0])
                entry[0] += 1
                entry[1] += share

    def stepped(self) -> None:
        """Note that all servers have ended their concurrent steps."""
        self.steps += 1
        self.busy_s += self._longest_s
        self._longest_s = 0.0

    def program_times(self) -> tuple[ProgramTimes, ...]:
        """Times of the programs that have run, in order of their sizes."""
        return tuple(
            ProgramTimes(
                sequences=rows, tokens=rows * width if width > 1 else 0, context_tokens=context,
                generating=beside, runs=int(runs), seconds=seconds,
            )
            for (rows, width, context, beside), (runs, seconds) in sorted(self.programs.copy().items())
        )  # fmt: skip

    def on_device(self) -> _OnDevice:
        """Count the time inside the context as device time."""
        return _OnDevice(self)


class Handovers:
    """Time that KV takes to another process: from the request there until all of it has arrived."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._since = dict[int, float]()

    def wanted(self, ticket: int) -> None:
        """Note a request for KV, first or repeated after a damaged piece."""
        self._since.setdefault(ticket, perf_counter())

    def arrived(self, ticket: int) -> None:
        """Note that all KV has arrived."""
        since = self._since.pop(ticket, None)
        if since is not None:
            self.count += 1
            self.seconds += perf_counter() - since

    def dropped(self, ticket: int) -> None:
        """Forget a handover that was cancelled."""
        self._since.pop(ticket, None)

    def lost(self) -> None:
        """Forget all handovers in progress."""
        self._since.clear()


def stats_of(
    schedulers: Sequence[AnyScheduler], counters: Counters, *, page_tokens: int, programs: int, compilations: int
) -> EngineStats:
    """Statistics of an engine's servers; of requests, only those that they hold.

    The first of them may be one that only prefills.
    """
    groups = [group for scheduler in schedulers for group in scheduler.groups]
    caches = [group.cache for group in groups]
    back = schedulers[-1]
    prefills = [group for scheduler in schedulers if scheduler.role == "prefill" for group in scheduler.groups]
    return EngineStats(
        waiting=0,
        running=sum(len(group.generating) + len(group.prefilling) for group in groups),
        pages_used=sum(cache.device.used for cache in caches),
        pages=sum(cache.device.size for cache in caches),
        host_pages_used=sum(cache.host.used + cache.host.idle for cache in caches),
        host_pages=sum(cache.host.size for cache in caches),
        page_tokens=page_tokens,
        requests=0,
        steps=counters.steps,
        tokens=counters.tokens,
        prompt_tokens=counters.prompt_tokens + counters.prefix_tokens,
        prefix_tokens=counters.prefix_tokens,
        preemptions=counters.preemptions,
        host_s=counters.step_s - counters.device_s,
        step_s=counters.step_s,
        busy_s=counters.busy_s,
        programs=programs,
        compilations=compilations,
        guessed=counters.guessed,
        accepted=counters.accepted,
        servers=len(schedulers),
        kv_groups=0 if back.role == "prefill" else len(back.groups),
        prefill_kv_groups=len(prefills),
        prefill_pages=sum(group.cache.device.size for group in prefills),
        program_times=counters.program_times(),
    )


class _OnDevice:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __enter__(self) -> None:
        self._begun = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._counters.device_s += perf_counter() - self._begun
