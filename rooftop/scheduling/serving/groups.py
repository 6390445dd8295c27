"""One server whose KV cache is spread over groups of devices: each sequence has all its pages on one of them.

Each group has a ``Scheduler`` and a cache of its own; all take their steps together. A sequence gets its group when one
has room for it, and stays there: where the beginning of its prompt is cached, unless that group has much more to read
than others, else where the fewest pages are in use, since a step lasts as long as its busiest group. No clock, no JAX.
"""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

from rooftop.core.rounding import ceil_div
from rooftop.scheduling.serving.cache import CachedSequence, KvCache
from rooftop.scheduling.serving.scheduler import EngineStep, Policy, Routing, Scheduler

_ROUTING = Routing(kind="affinity")


@dataclass(frozen=True, kw_only=True)
class GroupedStep(EngineStep):
    """The steps of all groups together; ``parts`` has that of each, None where there is nothing to do.

    All wait for the busiest group: ``batch`` and ``context_tokens`` are as if each had as much as that one.
    """

    parts: tuple[EngineStep | None, ...]

    @classmethod
    def of(cls, parts: tuple[EngineStep | None, ...]) -> GroupedStep | None:
        """The steps of all groups; None if none of them has anything to do."""
        steps = [part for part in parts if part is not None]
        if not steps:
            return None
        busiest = max(steps, key=lambda step: (step.context_tokens, step.batch))
        repeats = 1
        if not any(step.chunks or step.preempted for step in steps):
            # The decision stands as long as that of each group, and until another one is the busiest.
            repeats = min(step.repeats for step in steps)
            for step in steps:
                if step.growth > busiest.growth:
                    behind = busiest.context_tokens - step.context_tokens
                    repeats = min(repeats, 1 + behind // (step.growth - busiest.growth))
        return cls(
            copies=tuple(chain(*(step.copies for step in steps))),
            chunks=tuple(chain(*(step.chunks for step in steps))),
            prefill=tuple(chain(*(step.prefill for step in steps))),
            batch=len(parts) * max(step.batch for step in steps),
            generating=sum(step.generating for step in steps),
            context_tokens=len(parts) * busiest.context_tokens,
            growth=len(parts) * busiest.growth,
            repeats=repeats,
            preempted=tuple(chain(*(step.preempted for step in steps))),
            resumed=tuple(chain(*(step.resumed for step in steps))),
            parts=parts,
        )


class GroupedScheduler:
    """As ``Scheduler``, over ``caches``, one for each group of devices (see ``KvCache``).

    A group holds its share of ``policy.max_batch`` sequences at most. All groups together fill a step of
    ``policy.chunk_tokens``; without them, each prefills a prompt at a time, for which those who generate wait in all.
    """

    def __init__(self, policy: Policy, caches: Several[KvCache], role: str = "both") -> None:
        self.policy, self.role = policy, role
        own = replace(policy, max_batch=ceil_div(policy.max_batch, len(caches)))
        self._groups = tuple(Scheduler(own, cache, role) for cache in caches)
        self._unplaced: deque[CachedSequence] = deque()
        self._placed = 0

    @property
    def groups(self) -> tuple[Scheduler, ...]:
        """The scheduler of each group."""
        return self._groups

    @property
    def caches(self) -> tuple[KvCache, ...]:
        """The cache of each group."""
        return tuple(group.cache for group in self._groups)

    @property
    def outstanding(self) -> int:
        """Sequences that are here and not finished."""
        return len(self._unplaced) + sum(group.outstanding for group in self._groups)

    @property
    def queued(self) -> int:
        """Sequences that have no pages."""
        return len(self._unplaced) + sum(group.queued for group in self._groups)

    @property
    def waiting(self) -> tuple[CachedSequence, ...]:
        """Sequences that have no pages: those of groups, then those that have no group."""
        return tuple(chain(*(group.waiting for group in self._groups), self._unplaced))

    @property
    def swapped(self) -> tuple[CachedSequence, ...]:
        """Sequences in the host's memory."""
        return tuple(chain(*(group.swapped for group in self._groups)))

    @property
    def prefilling(self) -> Mapping[CachedSequence, None]:
        """See ``Scheduler``."""
        return ChainMap(*(group.prefilling for group in self._groups))

    @property
    def generating(self) -> Mapping[CachedSequence, None]:
        """See ``Scheduler``."""
        return ChainMap(*(group.generating for group in self._groups))

    @property
    def paused(self) -> Mapping[CachedSequence, None]:
        """See ``Scheduler``."""
        return ChainMap(*(group.paused for group in self._groups))

    @property
    def to_send(self) -> Mapping[CachedSequence, list[int]]:
        """See ``Scheduler``."""
        return ChainMap(*(group.to_send for group in self._groups))

    def refusal(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Reason why no server like this can ever serve such a request, or None."""
        return self._groups[0].refusal(prompt_tokens, max_tokens)

    def submit(self, sequence: CachedSequence, *, first: bool = False) -> None:
        """Queue a sequence; ``first``, before all others that have no group."""
        if first:
            self._unplaced.appendleft(sequence)
        else:
            self._unplaced.append(sequence)

    def may_admit(self) -> bool:
        """See ``Scheduler``."""
        return len(self._unplaced) == 1 and bool(self._takers(self._unplaced[0]))

    def next_step(self) -> GroupedStep | None:
        """The next step, or None while there is nothing to do."""
        self._place()
        steps = self._prompts() if self.policy.chunk_tokens is None else {}
        if not any(steps.values()):
            steps = self._shared()
        return GroupedStep.of(tuple(steps[group] for group in self._groups))

    def _prompts(self) -> dict[Scheduler, EngineStep | None]:
        """A whole prompt in each group that has one: all who generate wait for them."""
        return {group: group.next_step(generate=False) for group in self._groups}

    def _shared(self) -> dict[Scheduler, EngineStep | None]:
        """A token for every generating sequence, and chunks of prompts in the rest of the step."""
        expected = {
            scheduler: scheduler.outstanding - len(scheduler.waiting) - len(scheduler.prefilling)
            for scheduler in self._groups
        }
        steps = dict[Scheduler, EngineStep | None]()
        # Tokens for prompts are those of who came first: ids grow.
        for scheduler in sorted(self._groups, key=lambda group: next((s.id for s in group.prefilling), inf)):
            del expected[scheduler]
            steps[scheduler] = step = scheduler.next_step(sum(expected.values()))
            if step is not None:
                expected[scheduler] = step.batch + sum(chunk.tokens for chunk in step.chunks)
        return steps

    def complete(self, step: EngineStep, repeats: int = 1) -> None:
        """See ``Scheduler``."""
        assert isinstance(step, GroupedStep)
        for group, part in zip(self._groups, step.parts, strict=True):
            if part is not None:
                group.complete(part, repeats)

    def advance(self, sequence: CachedSequence, tokens: int) -> None:
        """See ``Scheduler``."""
        self._groups[sequence.group].advance(sequence, tokens)

    def pause(self, sequence: CachedSequence) -> None:
        """See ``Scheduler``."""
        self._groups[sequence.group].pause(sequence)

    def resume(self, sequence: CachedSequence) -> None:
        """See ``Scheduler``."""
        self._groups[sequence.group].resume(sequence)

    def finish(self, sequence: CachedSequence) -> None:
        """See ``Scheduler``."""
        if sequence in self._unplaced:
            self._unplaced.remove(sequence)
        else:
            self._home(sequence).finish(sequence)

    def forget(self, sequence: CachedSequence) -> None:
        """See ``Scheduler``."""
        if sequence in self._unplaced:
            self._unplaced.remove(sequence)
        for group in self._groups:
            group.forget(sequence)

    def receive(self) -> list[CachedSequence]:
        """See ``Scheduler``."""
        self._place()
        return list(chain(*(group.receive() for group in self._groups)))

    def sent(self, sequence: CachedSequence) -> None:
        """See ``Scheduler``."""
        self._home(sequence).sent(sequence)

    def arrived(self, sequence: CachedSequence) -> None:
        """See ``Scheduler``."""
        self._groups[sequence.group].arrived(sequence)

    def _home(self, sequence: CachedSequence) -> Scheduler:
        """The group that has it. What is to be sent may have its group at the server where it goes by now."""
        sends = next((group for group in self._groups if sequence in group.to_send), None)
        return self._groups[sequence.group] if sends is None else sends

    def _place(self) -> None:
        """Give those who wait a group, first come, first served, as long as one has room."""
        while self._unplaced:
            sequence = self._unplaced[0]
            takers = self._takers(sequence)
            if not takers:
                return
            caches = [self._groups[number].cache for number in takers]
            loads = [
                cache.device.used + sum(cache.pages_for(waiting.target) for waiting in self._groups[number].waiting)
                for number, cache in zip(takers, caches, strict=True)
            ]
            matches = [cache.match(sequence) for cache in caches]
            sequence.group = takers[_ROUTING.choose(self._placed, loads, matches)]
            self._placed += 1
            self._groups[sequence.group].submit(self._unplaced.popleft())

    def _takers(self, sequence: CachedSequence) -> list[int]:
        """The groups that have room for ``sequence``."""
        if self.outstanding - len(self._unplaced) >= self.policy.max_batch:
            return []
        return [number for number, group in enumerate(self._groups) if group.takes(sequence)]


#: What batches continuously: over one cache, or over one for each group of devices.
AnyScheduler = Scheduler | GroupedScheduler


def make_scheduler(
    policy: Policy,
    role: str,
    *,
    groups: int,
    page_tokens: int,
    pages: int,
    host_pages: int,
    prefixes: bool,
    padding: int = 0,
) -> AnyScheduler:
    """A scheduler that knows of no request, over an empty cache for each of ``groups`` groups of devices.

    A group has ``pages`` pages, and ``padding`` behind them that no sequence gets, and ``host_pages`` in the host's
    memory. A server that only generates keeps no ``prefixes``.
    """
    caches = [
        KvCache(
            page_tokens=page_tokens,
            pages=pages,
            host_pages=host_pages,
            prefixes=prefixes and role != "generate",
            first=group * (pages + padding),
            host_first=group * host_pages,
        )
        for group in range(groups)
    ]
    return Scheduler(policy, caches[0], role) if groups == 1 else GroupedScheduler(policy, caches, role)
