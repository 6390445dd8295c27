"""Refusals of requests that an engine can never serve; no JAX, so that the API's process refuses them by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.serve.engine.requests import GenerationRequest


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Limits of an engine: ``vocab`` V, tokens of a prompt and its output, and ``pages`` of a cache of ``page_tokens``.

    ``pages`` are those that one sequence can have.
    """

    vocab: int
    max_model_len: int
    page_tokens: int
    pages: int

    def check(self, request: GenerationRequest) -> None:
        """Raises RooftopError for what can never be served."""
        sampling, vocab = request.sampling, self.vocab
        if not request.prompt:
            raise RooftopError("prompt", "no tokens", "one token at least")
        tokens = np.asarray(request.prompt)
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise RooftopError("prompt", int(tokens.min() if tokens.min() < 0 else tokens.max()), f"0 to {vocab - 1}")
        for token in sampling.logit_bias:
            if token >= vocab:
                raise RooftopError("logit_bias", token, f"tokens from 0 to {vocab - 1}")
        total = len(request.prompt) + sampling.max_tokens
        if total > self.max_model_len:
            sizes = f"{len(request.prompt)} tokens and {sampling.max_tokens} to generate"
            raise RooftopError("prompt", sizes, f"at most {self.max_model_len} together")
        # The KV of the last token is never needed. What was generated before a preemption is prefilled again.
        need = ceil_div(total - 1, self.page_tokens)
        if need > self.pages:
            refused = f"{total - 1} tokens of KV take {need} pages of {self.pages}"
            raise RooftopError("prompt", f"{len(request.prompt)} tokens", f"fewer: {refused}")
