"""A training job: the part of a plan that the user decides."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.core.errors import RooftopError
from rooftop.core.records import Record

#: The most tokens of a step: their products with anything that is counted here stay exact in 64 bits.
MOST_TOKENS = 10**12


@dataclass(frozen=True, kw_only=True)
class Workload(Record):
    """A training job: ``batch_tokens`` a step in sequences of ``seq_len``, ``tokens`` in all.

    ``asked_tokens`` is the batch that was asked for, where ``batch_tokens`` are the nearest whole sequences.
    """

    closed = True

    batch_tokens: int
    seq_len: int
    tokens: float | None = None
    asked_tokens: int | None = None

    @classmethod
    def nearest(cls, *, batch_tokens: int, seq_len: int, tokens: float | None = None) -> Workload:
        """The job with the number of whole sequences, at least one, that is nearest to ``batch_tokens``."""
        if batch_tokens < 1 or seq_len < 1 or batch_tokens % seq_len == 0:
            return cls(batch_tokens=batch_tokens, seq_len=seq_len, tokens=tokens)
        sequences = max(1, (2 * batch_tokens + seq_len) // (2 * seq_len))
        return cls(batch_tokens=sequences * seq_len, seq_len=seq_len, tokens=tokens, asked_tokens=batch_tokens)

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "seq_len"):
            if not 1 <= getattr(self, name) <= MOST_TOKENS:
                raise RooftopError(name, getattr(self, name), f"a whole number from 1 to {MOST_TOKENS:,}")
        if self.batch_tokens % self.seq_len:
            below = self.batch_tokens // self.seq_len * self.seq_len
            nearest = f"{below} or " if below else ""
            raise RooftopError(
                "batch_tokens",
                self.batch_tokens,
                f"a multiple of seq_len {self.seq_len}: {nearest}{below + self.seq_len}",
            )

    @property
    def batch_seqs(self) -> int:
        """Sequences per step."""
        return self.batch_tokens // self.seq_len

    @property
    def steps(self) -> float | None:
        """Steps for all tokens, if a token budget is given."""
        return None if self.tokens is None else self.tokens / self.batch_tokens
