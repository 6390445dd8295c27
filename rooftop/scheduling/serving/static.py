"""Static batching: gather what waits, prefill it together, generate until the last is done. The simplest engine.

It is what continuous batching is compared with (book, chapter 7): prompts are padded to the longest, slots of
sequences that have ended compute on, and nobody joins a batch under way.
"""

from __future__ import annotations

from rooftop.scheduling.serving.cache import CachedSequence, KvCache
from rooftop.scheduling.serving.policy import Chunk, EngineStep, Policy, Queue


class StaticScheduler(Queue):
    """As ``Scheduler``, one batch at a time, with pages for the longest prompt and the most tokens it may generate."""

    def __init__(self, policy: Policy, cache: KvCache) -> None:
        super().__init__(policy, cache)
        #: The batch, in order of arrival, and those of it that have not ended.
        self.batch: list[CachedSequence] = []
        self.generating: dict[CachedSequence, None] = {}
        self._longest = 0
        self._steps = 0

    @property
    def outstanding(self) -> int:
        """Sequences that are here and not finished."""
        return len(self.waiting) + len(self.generating)

    def kv_tokens(self, sequence: CachedSequence) -> int:
        """Tokens whose KV a sequence holds now."""
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
        """``step`` has been executed ``repeats`` times."""
        if step.batch:
            self._steps += repeats
        for chunk in step.chunks:
            chunk.sequence.length = chunk.tokens
            chunk.sequence.generated = 1
            self.generating[chunk.sequence] = None

    def finish(self, sequence: CachedSequence) -> None:
        """``sequence`` has ended; its pages are free when its batch has."""
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
        """A batch of what waits, as large as slots and pages allow."""
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
