"""Guesses at the tokens that come next, to be checked by the model in one step (speculative decoding).

A guess changes no output: what is delivered is what the model chooses, with the same seed the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class Lookup:
    """Guesses what followed the last time the text had its last tokens (prompt lookup, Saxena 2023).

    Of one text. Runs of ``LONGEST`` down to ``SHORTEST`` tokens are looked up, the longest first.
    """

    LONGEST, SHORTEST = 3, 2

    def __init__(self) -> None:
        #: Where a run of tokens was followed last: the index of what came after it.
        self._after = dict[tuple[int, ...], int]()
        self._read = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens behind ``tokens``, which have only grown since the last call."""
        if not most:
            return []
        # The last run of the text has nothing behind it yet.
        for end in range(max(self._read, self.SHORTEST), len(tokens)):
            for size in range(self.SHORTEST, min(self.LONGEST, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._read = len(tokens)
        for size in range(min(self.LONGEST, len(tokens)), self.SHORTEST - 1, -1):
            after = self._after.get(tuple(tokens[len(tokens) - size :]))
            if after is not None:
                return list(tokens[after : after + most])
        return []
