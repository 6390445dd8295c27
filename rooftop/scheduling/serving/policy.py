"""Policies, routing, steps and queues: the types that schedulers, engines and simulations share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rooftop.core.errors import RooftopError, unknown
from rooftop.scheduling.serving.cache import CachedSequence, KvCache
from rooftop.scheduling.serving.prefixes import Copy

BATCHING = ("static", "interleaved", "disaggregated")
PREEMPTION = ("recompute", "swap")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Batching policy of a server.

    ``max_batch`` is the most sequences it holds at once, ``chunk_tokens`` the most tokens of a step when prompts are
    prefilled in chunks (None: whole prompts, by themselves), ``preemption`` the fate of a sequence when the pages
    run out: its KV is computed anew later, or swapped to the host's memory (where that is full, computed anew).
    """

    max_batch: int
    batching: str = "interleaved"
    chunk_tokens: int | None = None
    preemption: str = "recompute"

    def __post_init__(self) -> None:
        if self.batching not in BATCHING:
            raise unknown("batching", self.batching, BATCHING)
        if self.preemption not in PREEMPTION:
            raise unknown("preemption", self.preemption, PREEMPTION)
        if self.max_batch < 1:
            raise RooftopError("max_batch", self.max_batch, "a positive whole number")
        if self.chunk_tokens is not None:
            if self.batching != "interleaved":
                raise RooftopError("chunk_tokens", self.chunk_tokens, f"nothing with {self.batching} batching")
            if self.chunk_tokens <= self.max_batch:
                accepted = f"more than the largest batch ({self.max_batch}), each of which takes one token of a step"
                raise RooftopError("chunk_tokens", self.chunk_tokens, accepted)


#: Ways to choose the replica that gets a request: in turn, the least loaded, or the one that has its prefix cached.
ROUTING = ("round_robin", "least_loaded", "affinity")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Choice of a replica for each request.

    ``affinity`` sends a request where the longest prefix of its prompt is cached, unless that replica has more than
    ``imbalance`` times the average load, and one more: then, and where no one has a prefix of it, to the least loaded.
    """

    kind: str = "least_loaded"
    imbalance: float = 1.5

    def __post_init__(self) -> None:
        if self.kind not in ROUTING:
            raise unknown("routing", self.kind, ROUTING)
        if self.imbalance < 1:
            raise RooftopError("imbalance", self.imbalance, "1 or more: a multiple of the average load")

    def choose(self, number: int, loads: Sequence[int], matches: Sequence[int] = ()) -> int:
        """The replica for request ``number``, counted from 0.

        ``loads`` are the requests outstanding at each replica, ``matches`` the tokens of the prompt that each has
        cached (read with ``affinity`` only). Of equals the first after the last turn wins, so that ties rotate.
        """
        count = len(loads)
        turns = [(number + turn) % count for turn in range(count)]
        if self.kind == "round_robin":
            return turns[0]
        if self.kind == "affinity" and any(matches):
            best = max(turns, key=lambda replica: matches[replica])
            if matches[best] and loads[best] <= self.imbalance * sum(loads) / count + 1:
                return best
        return min(turns, key=lambda replica: loads[replica])


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """``tokens`` tokens of a sequence to prefill, after ``start`` whose KV is there; the last one gives a token."""

    sequence: CachedSequence
    start: int
    tokens: int
    last: bool


@dataclass(frozen=True, kw_only=True)
class EngineStep:
    """Work of one step: first ``copies``, in order; then the prefill of ``chunks`` and one token for each generating.

    ``prefill`` is what the device computes for the chunks, padding included: (new tokens, tokens before them) of each;
    ``batch`` and ``context_tokens`` what it computes to generate: sequences, and tokens of KV that they read.
    ``generating`` of them are sequences that go on (the others are slots that have ended, with static batching, or that
    are empty in one group of devices and not in another). When it is repeated, the context grows by ``growth`` tokens.
    ``repeats`` is for how many steps the decision stands if nothing is submitted, arrives or finishes; it is 1 for a
    step that prefills or preempts. ``preempted`` are sequences that lost their place to others and wait again,
    ``resumed`` those that were swapped back in.
    """

    copies: tuple[Copy, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()
    batch: int = 0
    generating: int = 0
    context_tokens: int = 0
    growth: int = 0
    repeats: int = 1
    preempted: tuple[CachedSequence, ...] = ()
    resumed: tuple[CachedSequence, ...] = ()


class Queue:
    """Base of every scheduler: a policy, a cache, and the waiting sequences in order of arrival."""

    def __init__(self, policy: Policy, cache: KvCache) -> None:
        self.policy, self.cache = policy, cache
        self.waiting: deque[CachedSequence] = deque()

    @property
    def caches(self) -> tuple[KvCache, ...]:
        """The cache of each group of devices: here all have one."""
        return (self.cache,)

    @property
    def queued(self) -> int:
        """Sequences that have no pages."""
        return len(self.waiting)

    def refusal(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why such a request could never be served here, or None."""
        # The KV of the last token is never needed. What was generated before a preemption is prefilled again.
        return refusal(self.cache, prompt_tokens + max_tokens - 1)

    def submit(self, sequence: CachedSequence, *, first: bool = False) -> None:
        """Queue a sequence to be prefilled (at a generate server: to be received); ``first``, before all others."""
        if first:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)


def refusal(cache: KvCache, tokens: int) -> str | None:
    """Why a sequence of ``tokens`` tokens can never have pages here, or None."""
    need = cache.pages_for(tokens)
    return f"{tokens} tokens of KV take {need} pages of {cache.device.size}" if need > cache.device.size else None
