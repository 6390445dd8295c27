"""Step times of a serving engine: the interface that a serving plan provides and a simulation calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class FrontEnd:
    """The front end of servers: one request after another takes ``request_s``, and ``token_s`` a token of its prompt.

    Both are seconds: HTTP and tokenising, before a server's scheduler sees the request.
    """

    request_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, prompt_tokens: float) -> float:
        """Seconds of a request with such a prompt."""
        return self.request_s + self.token_s * prompt_tokens


class StepTimes(Protocol):
    """Seconds of each kind of step on one server, and the room that its KV cache has.

    A server is one replica of the model on one slice; where prefill and generation are disaggregated, the slice that
    the phase runs on. All are plain Python numbers: a simulation of an hour asks a million times, so that an answer
    should take about a microsecond. At a given batch ``generate_s`` is convex or concave in ``context_tokens``
    (as a rule affine: the weights once and so much per token of KV), which lets a run of steps be added up in closed
    form.
    """

    @property
    def page_tokens(self) -> int:
        """Tokens of a page (block) of the KV cache."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV, of all sequences together, that fit a server that generates."""
        ...

    @property
    def prefill_kv_tokens(self) -> int:
        """``kv_tokens`` of a server that only prefills (disaggregated); the same where one slice does both."""
        ...

    @property
    def kv_groups(self) -> int:
        """Groups of devices that this room is spread over in equal parts, each with pages for whole sequences."""
        ...

    @property
    def prefill_kv_groups(self) -> int:
        """``kv_groups`` of a server that only prefills."""
        ...

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Prefill of ``chunks`` as one step: (new tokens, tokens before them whose KV is there) of each sequence."""
        ...

    def generate_s(self, batch: int, context_tokens: int) -> float:
        """One token for each of ``batch`` sequences, which hold ``context_tokens`` tokens of KV in all before it."""
        ...

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """A step that prefills ``chunks`` and generates next to them (chunked prefill), as the two methods above do."""
        ...

    def transfer_s(self, tokens: int) -> float:
        """The KV of ``tokens`` tokens from a prefill server to a generate server (disaggregated)."""
        ...

    def host_copy_s(self, tokens: int) -> float:
        """The KV of ``tokens`` tokens between HBM and the memory of the hosts, one way (swapping, host-tier cache)."""
        ...
