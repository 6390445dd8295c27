"""Schedulers of a serving engine: admission, batching, chunked prefill, preemption. No clock, no arrays, no JAX.

A scheduler serves one server (a replica on a slice). An engine, real or simulated, repeats: ``next_step``, execute it,
``complete``, and ``finish`` for every sequence that has ended. Sequences come in by ``submit`` at any time.

- interleaved (continuous batching): prompts are prefilled one at a time and before anything else, as soon as there is
  a slot and room; all others wait for it. With ``chunk_tokens`` every step generates a token for each running
  sequence, and fills up with pieces of prompts to that many tokens: none waits for a whole prompt.
- disaggregated: a server of role ``prefill`` does the one, a server of role ``generate`` the other, and the KV is
  sent between them.
- static: see ``StaticScheduler``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rooftop.core.errors import RooftopError, unknown
from rooftop.scheduling.serving.cache import CachedSequence, KvCache
from rooftop.scheduling.serving.prefixes import Copy

BATCHING = ("static", "interleaved", "disaggregated")
PREEMPTION = ("recompute", "swap")
ROLES = ("both", "prefill", "generate")


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
        """Reason why no server like this can ever serve such a request, or None."""
        # The KV of the last token is never needed. What was generated before a preemption is prefilled again.
        return refusal(self.cache, prompt_tokens + max_tokens - 1)

    def submit(self, sequence: CachedSequence, *, first: bool = False) -> None:
        """Queue a sequence to be prefilled (at a generate server: to be received); ``first``, before all others."""
        if first:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)


def refusal(cache: KvCache, tokens: int) -> str | None:
    """Reason why a sequence of ``tokens`` tokens can never have pages here, or None."""
    need = cache.pages_for(tokens)
    return f"{tokens} tokens of KV take {need} pages of {cache.device.size}" if need > cache.device.size else None


@dataclass(slots=True)
class _Preempted:
    """Sequences that one decision preempted or swapped."""

    lost: list[CachedSequence] = field(default_factory=list)
    resumed: list[CachedSequence] = field(default_factory=list)


class Scheduler(Queue):
    """Continuous batching on one server: the whole of it, or the half that prefills or generates.

    First come, first served; a sequence that was preempted goes before those that have not begun. A prompt is admitted
    with pages for all of it, and if every generating sequence, and it too, can have its next page. When pages run out,
    the sequence admitted last gives its own up.
    """

    def __init__(self, policy: Policy, cache: KvCache, role: str = "both") -> None:
        if role not in ROLES:
            raise unknown("role", role, ROLES)
        super().__init__(policy, cache)
        self.role = role
        self.swapped: deque[CachedSequence] = deque()
        #: In order of admission. Dicts are used as ordered sets: any member leaves in constant time.
        self.prefilling: dict[CachedSequence, None] = {}
        self.generating: dict[CachedSequence, None] = {}
        #: Sequences that are left out of steps for now, and keep their pages.
        self.paused: dict[CachedSequence, None] = {}
        #: Disaggregated. At the prefill server, the pages of sequences whose KV has yet to be sent; at the generate
        #: server, sequences that have pages and whose KV is on its way, and those whose KV has arrived since.
        self.to_send: dict[CachedSequence, list[int]] = {}
        self.incoming: dict[CachedSequence, None] = {}
        self._arrived: list[CachedSequence] = []
        self._steps = 0
        self._context = 0
        #: Who needs a new page at which step: sequence in [step % page_tokens], since all grow by a token a step.
        self._due: list[dict[CachedSequence, None]] = [{} for _ in range(cache.page_tokens)]
        self._preempted = _Preempted()

    @property
    def groups(self) -> tuple[Scheduler, ...]:
        """One scheduler for each group of devices that has a cache: this one."""
        return (self,)

    @property
    def outstanding(self) -> int:
        """Number of sequences that are not finished; routers balance it."""
        return len(self.waiting) + len(self.swapped) + self._held

    @property
    def _held(self) -> int:
        running = len(self.prefilling) + len(self.generating) + len(self.paused)
        return running + len(self.incoming) + len(self._arrived)

    @property
    def _spare(self) -> int:
        """Pages that a newcomer leaves: the next one of each generating sequence, and its own; none if it is alone."""
        return len(self.generating) + 1 if self._held else 0

    def kv_tokens(self, sequence: CachedSequence) -> int:
        """Tokens of KV that a sequence holds now."""
        return sequence.length + (self._steps - sequence.since if sequence in self.generating else 0)

    def may_admit(self) -> bool:
        """Return True if the last submitted sequence may change the next step: it is first and a slot is free.

        If not, the step that is being repeated may go on.
        """
        return len(self.waiting) == 1 and not self.swapped and self._held < self.policy.max_batch

    def takes(self, sequence: CachedSequence) -> bool:
        """Return True if ``sequence``, waiting elsewhere, could be admitted after those that wait here."""
        ahead = len(self.waiting)
        if self.swapped or self._held + ahead >= self.policy.max_batch:
            return False
        need = sum(self.cache.pages_for(waiting.target) for waiting in (*self.waiting, sequence))
        spare = self._spare + ahead if self._held or ahead else 0
        return self.cache.device.available - spare >= need

    def next_step(self, others: int = 0, *, generate: bool = True) -> EngineStep | None:
        """The next step, or None while there is nothing to do; ``others`` tokens of it are those of other groups.

        Unless it may ``generate``, a step without chunks is none.
        """
        for sequence in self._arrived:
            self._begin(sequence)
        self._arrived.clear()
        self._preempted = _Preempted()
        chunks: list[Chunk] = []
        if self.policy.chunk_tokens is None and self.role != "generate":
            chunks = self._whole_prompt()
        generates = generate and not chunks and self.role != "prefill"
        if generates:
            self._make_room()
            if not self._preempted.lost:
                self._resume()
            self._grow()
        batch, context = (len(self.generating), self._context) if generates else (0, 0)
        if self.policy.chunk_tokens is not None:
            chunks = self._chunks(self.policy.chunk_tokens - batch - others)
        if not chunks and not batch and not self._preempted.lost:
            return None
        return EngineStep(
            copies=self.cache.copies(),
            chunks=tuple(chunks),
            prefill=tuple((chunk.tokens, chunk.start) for chunk in chunks),
            batch=batch,
            generating=batch,
            context_tokens=context,
            growth=batch,
            repeats=1 if chunks or self._preempted.lost else self._steady(),
            preempted=tuple(self._preempted.lost),
            resumed=tuple(self._preempted.resumed),
        )

    def complete(self, step: EngineStep, repeats: int = 1) -> None:
        """``step`` has been executed ``repeats`` times (at most as often as it allows)."""
        if step.batch:
            for _ in range(repeats - 1):
                self._steps += 1
                self._grow()
            self._steps += 1
            self._context += repeats * step.batch
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.length += chunk.tokens
            if chunk.last:
                del self.prefilling[sequence]
                self.cache.keep(sequence)
                sequence.generated += 1
                if self.role == "prefill":
                    self.to_send[sequence], sequence.pages = sequence.pages, []
                else:
                    self._begin(sequence)

    def advance(self, sequence: CachedSequence, tokens: int) -> None:
        """``sequence`` got ``tokens`` more than one from the step that was completed last: guesses that were right.

        It generates, and has pages for them.
        """
        del self._due[self._due_at(sequence)][sequence]
        sequence.length += tokens
        sequence.generated += tokens
        self._context += tokens
        self._due[self._due_at(sequence)][sequence] = None

    def pause(self, sequence: CachedSequence) -> None:
        """Leave ``sequence``, which generates, out of steps until ``resume``. It keeps its pages."""
        self._end(sequence)
        self.paused[sequence] = None

    def resume(self, sequence: CachedSequence) -> None:
        """Let ``sequence``, which was paused, generate from the next step on."""
        del self.paused[sequence]
        self._arrived.append(sequence)

    def finish(self, sequence: CachedSequence) -> None:
        """``sequence`` has ended (its last token is out, or no one wants it any more): its pages are free."""
        if sequence in self.generating:
            self._end(sequence)
            self.cache.keep(sequence)
        elif sequence in self.paused:
            del self.paused[sequence]
            self.cache.keep(sequence)
        elif sequence in self.to_send:
            sequence.pages = self.to_send.pop(sequence)
        elif sequence in self.prefilling:
            del self.prefilling[sequence]
        else:
            self._withdraw(sequence)
        self.cache.release(sequence)

    def forget(self, sequence: CachedSequence) -> None:
        """``sequence`` no longer waits here, if it did."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def receive(self) -> list[CachedSequence]:
        """Sequences, of those submitted to this generate server, that have got pages: their KV may be sent now."""
        received = list[CachedSequence]()
        while self.waiting and not self.swapped and self._held < self.policy.max_batch:
            length = self.waiting[0].length
            if not self.cache.admit(self.waiting[0], length, self._spare):
                break
            sequence = self.waiting.popleft()
            sequence.length = length
            self.incoming[sequence] = None
            received.append(sequence)
        return received

    def sent(self, sequence: CachedSequence) -> None:
        """The KV of ``sequence`` has left this prefill server: its pages are free."""
        self.cache.release_pages(self.to_send.pop(sequence), sequence.keys)

    def arrived(self, sequence: CachedSequence) -> None:
        """The KV of ``sequence`` is at this generate server: it generates from the next step on."""
        del self.incoming[sequence]
        self._arrived.append(sequence)

    def _whole_prompt(self) -> list[Chunk]:
        """The prompt at the head of the queue, if it is admitted."""
        if not self._admit_next():
            return []
        sequence = next(reversed(self.prefilling))
        start = sequence.length
        return [Chunk(sequence=sequence, start=start, tokens=sequence.target - start, last=True)]

    def _chunks(self, budget: int) -> list[Chunk]:
        """Pieces of prompts, begun ones first, of ``budget`` tokens in all."""
        chunks: list[Chunk] = []
        for sequence in self.prefilling:
            if budget <= 0:
                return chunks
            chunks.append(_chunk(sequence, budget))
            budget -= chunks[-1].tokens
        while budget > 0 and not self._preempted.lost and self._admit_next():
            chunks.append(_chunk(next(reversed(self.prefilling)), budget))
            budget -= chunks[-1].tokens
        return chunks

    def _admit_next(self) -> bool:
        """Admit the head of the queue, if it has a slot and pages."""
        if not self.waiting or self.swapped or self._held >= self.policy.max_batch:
            return False
        if not self.cache.admit(self.waiting[0], self.waiting[0].target, self._spare):
            return False
        self.prefilling[self.waiting.popleft()] = None
        return True

    def _make_room(self) -> None:
        """Preempt, last admitted first, until every generating sequence can have the page that it needs next."""
        while self.cache.device.available < len(self._due[self._steps % len(self._due)]):
            begun = not self.prefilling
            if begun:
                sequence = next(reversed(self.generating))
                self._end(sequence)
            else:
                sequence, _ = self.prefilling.popitem()
            self._preempted.lost.append(sequence)
            self.cache.keep(sequence)
            if begun and self.policy.preemption == "swap" and self.cache.swap_out(sequence):
                self.swapped.appendleft(sequence)
            else:
                self.cache.release(sequence)
                sequence.length = 0
                if self.role == "both":
                    self.waiting.appendleft(sequence)

    def _resume(self) -> None:
        """Swap sequences back in, in the order in which they were swapped out, while there are slots and pages."""
        while self.swapped and self._held < self.policy.max_batch:
            if not self.cache.swap_in(self.swapped[0], self._spare):
                break
            sequence = self.swapped.popleft()
            self._begin(sequence)
            self._preempted.resumed.append(sequence)

    def _begin(self, sequence: CachedSequence) -> None:
        """Start generating for ``sequence``, whose KV has arrived, with the next step."""
        sequence.since = self._steps
        self.generating[sequence] = None
        self._context += sequence.length
        self._due[self._due_at(sequence)][sequence] = None

    def _end(self, sequence: CachedSequence) -> None:
        """``sequence`` generates no more, for now or for good."""
        del self._due[self._due_at(sequence)][sequence]
        del self.generating[sequence]
        steps = self._steps - sequence.since
        sequence.length += steps
        sequence.generated += steps
        sequence.since = self._steps
        self._context -= sequence.length

    def _due_at(self, sequence: CachedSequence) -> int:
        return (sequence.since - sequence.length) % len(self._due)

    def _grow(self) -> None:
        """Give a page to each sequence whose pages are full."""
        for sequence in self._due[self._steps % len(self._due)]:
            self.cache.grow(sequence)

    def _steady(self) -> int:
        """For how many steps, the next included, pages last; all of it if that is known to be long."""
        free, page_tokens = self.cache.device.available, len(self._due)
        rounds = free // len(self.generating)
        if rounds:
            return 1 + rounds * page_tokens
        steps = 1
        while True:
            free -= len(self._due[(self._steps + steps) % page_tokens])
            if free < 0:
                return steps
            steps += 1

    def _withdraw(self, sequence: CachedSequence) -> None:
        """Take a sequence that does not run out of whatever it waits in."""
        if sequence in self.incoming:
            del self.incoming[sequence]
        elif sequence in self._arrived:
            self._arrived.remove(sequence)
        elif sequence in self.swapped:
            self.swapped.remove(sequence)
            self.cache.host.release(sequence.host_pages)
            sequence.host_pages = []
        else:
            self.waiting.remove(sequence)


def _chunk(sequence: CachedSequence, budget: int) -> Chunk:
    left = sequence.target - sequence.length
    return Chunk(sequence=sequence, start=sequence.length, tokens=min(left, budget), last=left <= budget)


class StaticScheduler(Queue):
    """Static batching: gather what waits, prefill it together, generate until the last is done.

    Continuous batching is compared with it (book, chapter 7): prompts are padded to the longest, slots of sequences
    that have ended compute on, and no sequence joins a batch under way. A batch has pages for its longest prompt and
    the most tokens it may generate.
    """

    def __init__(self, policy: Policy, cache: KvCache) -> None:
        super().__init__(policy, cache)
        #: The batch, in order of arrival, and those of it that have not ended.
        self.batch: list[CachedSequence] = []
        self.generating: dict[CachedSequence, None] = {}
        self._longest = 0
        self._steps = 0

    @property
    def outstanding(self) -> int:
        """Number of sequences that are not finished."""
        return len(self.waiting) + len(self.generating)

    def kv_tokens(self, sequence: CachedSequence) -> int:
        """Tokens of KV that a sequence holds now."""
        return sequence.length + (self._steps if sequence in self.generating else 0)

    def may_admit(self) -> bool:
        """Return True if a submitted sequence may change the next step: never while a batch is running."""
        return not self.generating

    def next_step(self) -> EngineStep | None:
        """The prefill of a new batch, or a step of the one under way; None while there is nothing to do."""
        if self.generating:
            context = len(self.batch) * (self._longest + self._steps)
            batch = len(self.batch)
            return EngineStep(
                batch=batch,
                generating=len(self.generating),
                context_tokens=context,
                growth=batch,
                repeats=max(sequence.max_tokens for sequence in self.generating) - 1 - self._steps,
            )
        self._gather()
        if not self.batch:
            return None
        chunks = (Chunk(sequence=one, start=0, tokens=one.prompt_tokens, last=True) for one in self.batch)
        return EngineStep(chunks=tuple(chunks), prefill=((self._longest, 0),) * len(self.batch))

    def complete(self, step: EngineStep, repeats: int = 1) -> None:
        """Update the state after ``step`` was executed ``repeats`` times."""
        if step.batch:
            self._steps += repeats
        for chunk in step.chunks:
            chunk.sequence.length = chunk.tokens
            chunk.sequence.generated = 1
            self.generating[chunk.sequence] = None

    def finish(self, sequence: CachedSequence) -> None:
        """End ``sequence``. Its pages are free when its whole batch has ended."""
        if sequence not in self.generating:
            self.waiting.remove(sequence)
            return
        del self.generating[sequence]
        sequence.length += self._steps
        sequence.generated += self._steps
        if not self.generating:
            for one in self.batch:
                self.cache.release(one)
            self.batch.clear()

    def _gather(self) -> None:
        """Form a batch of waiting sequences, as large as slots and pages allow."""
        longest, most = 0, 0
        while self.waiting and len(self.batch) < self.policy.max_batch:
            one = self.waiting[0]
            padded, allowed = max(longest, one.prompt_tokens), max(most, one.max_tokens)
            pages = self.cache.pages_for(padded + allowed - 1)
            if self.batch and (len(self.batch) + 1) * pages > self.cache.device.size:
                break
            longest, most = padded, allowed
            self.batch.append(self.waiting.popleft())
        for one in self.batch:
            self.cache.admit(one, longest + most - 1, 0)
        self._longest, self._steps = longest, 0
