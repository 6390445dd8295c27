"""A request that an engine has taken: its tokens so far, the keys of its pages, and the state of its sampling.

Speculative decoding guesses the tokens that come next, and the model checks them in one step. A guess changes no
output: the tokens delivered are those that the model chooses, the same for the same seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from rooftop.core.rounding import ceil_div
from rooftop.programs.serving.decode import (
    ADJUSTED,
    COUNT,
    DRAWN,
    HEAD,
    LOGPROBS,
    MIN_P,
    SEED,
    START,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from rooftop.programs.serving.sampling import IN_PROMPT
from rooftop.scheduling.serving.cache import CachedSequence, KvCache
from rooftop.serve.engine.replica import Adjusted
from rooftop.serve.engine.requests import Deliver, GenerationRequest

Ints = npt.NDArray[np.int32]


def page_keys(tokens: list[int], page_tokens: int, known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    """A key for each full page of ``tokens``: a digest of them and all before; ``known`` are the first ones."""
    result = list(known)
    last = result[-1] if result else b""
    for end in range((len(result) + 1) * page_tokens, len(tokens) + 1, page_tokens):
        page = np.array(tokens[end - page_tokens : end], np.int32).tobytes()
        last = blake2b(page, digest_size=16, key=last).digest()
        result.append(last)
    return tuple(result)


def check_pages(cache: KvCache, sequences: Iterable[CachedSequence], away: Iterable[list[int]] = ()) -> None:
    """Raises AssertionError if a page of ``cache`` is lost: each is free, cached, of ``sequences``, or ``away``."""
    users, host = Counter[int](), 0
    for sequence in sequences:
        users.update(sequence.pages)
        host += len(sequence.host_pages)
    for pages in away:
        users.update(pages)
    pool = cache.device
    assert pool.used == len(users), f"{pool.used} pages in use, and requests hold {len(users)}"
    for page, count in users.items():
        assert pool.users(page) == count, f"page {page} is held {pool.users(page)} times, by {count} requests"
    assert cache.host.used == host, f"{cache.host.used} pages of the host, {host} held"


class Lookup:
    """Guesses the tokens that followed the last occurrence of the text's last tokens (prompt lookup, Saxena 2023).

    One object for each text. Runs of ``LONGEST`` down to ``SHORTEST`` tokens are looked up, the longest first.
    """

    LONGEST, SHORTEST = 3, 2

    def __init__(self) -> None:
        #: Index of the token after the last occurrence of a run of tokens.
        self._after = dict[tuple[int, ...], int]()
        self._read = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens after ``tokens``, which have only grown since the last call."""
        if not most:
            return []
        # The last run of the text has no next token yet.
        for end in range(max(self._read, self.SHORTEST), len(tokens)):
            for size in range(self.SHORTEST, min(self.LONGEST, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._read = len(tokens)
        for size in range(min(self.LONGEST, len(tokens)), self.SHORTEST - 1, -1):
            after = self._after.get(tuple(tokens[len(tokens) - size :]))
            if after is not None:
                return list(tokens[after : after + most])
        return []


@dataclass(eq=False, slots=True, kw_only=True)
class Running:
    """A request from submission to its last token.

    ``tokens`` are prompt and output; ``slot`` is its place in the server that has it, -1 while it has none; ``copy``
    is the one of several replicas, or of flights, that has it. A request that was handed over to another process has a
    ``ticket``; ``losses`` is how often that process was lost with it.
    """

    request: GenerationRequest
    deliver: Deliver
    sequence: CachedSequence
    stops: frozenset[int]
    seed: int
    page_tokens: int
    cached: bool
    tokens: list[int] = field(init=False)
    slot: int = -1
    copy: int = 0
    ticket: int | None = None
    losses: int = 0
    lookup: Lookup = field(default_factory=Lookup)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        if self.cached:
            self.sequence.keys = page_keys(self.tokens, self.page_tokens)

    @property
    def generated(self) -> int:
        """Tokens of the output so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def adjusted(self) -> bool:
        """True if its logits are adjusted before sampling."""
        sampling = self.request.sampling
        return sampling.penalised or bool(sampling.logit_bias) or sampling.constraint is not None

    def extend_keys(self, pages: int) -> None:
        """Add keys of pages that its first tokens fill."""
        if self.cached:
            self.sequence.keys = page_keys(self.tokens[:pages], self.page_tokens, self.sequence.keys)  # type: ignore[arg-type]

    def guessable(self, most: int) -> int:
        """Number of tokens to guess: at most ``most``, and one fewer than it may still generate."""
        # Adjustments would have to include the guess before the choice that follows it.
        return 0 if self.adjusted else max(0, min(most, self.request.sampling.max_tokens - self.generated - 1))

    def head(self, start: int) -> Ints:
        """The columns of a step [HEAD] before its tokens; the slot is the server's to fill in."""
        sampling = self.request.sampling
        row = np.zeros(HEAD, np.int32)
        real = row.view(np.float32)
        row[START], row[COUNT], row[DRAWN] = start, 1, self.generated
        real[TEMPERATURE], real[TOP_P], real[MIN_P] = sampling.temperature, sampling.top_p, sampling.min_p
        row[TOP_K] = min(sampling.top_k or 0, 2**31 - 1)
        row[SEED : SEED + 2] = np.array([self.seed % 2**64], np.uint64).view(np.int32)
        row[ADJUSTED], row[LOGPROBS] = self.adjusted, sampling.logprobs is not None
        return row

    def adjustments(self, vocab: int) -> Adjusted:
        """Adjustments to its logits, from all its tokens so far."""
        sampling, prompt = self.request.sampling, len(self.request.prompt)
        bias = np.zeros(vocab, np.float32)
        for token, by in sampling.logit_bias.items():
            bias[token] = by
        seen = np.bincount(self.tokens[prompt:], minlength=vocab).astype(np.int32)
        seen[list(set(self.tokens[:prompt]))] += IN_PROMPT
        mask = np.full(ceil_div(vocab, 32), 2**32 - 1, np.uint32)
        penalties = np.array(
            [sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty], np.float32
        )
        return Adjusted(bias=bias, seen=seen, mask=mask, penalties=penalties)
