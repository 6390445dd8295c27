"""The rules of thumb of chapters 7 and 8, each once; they take plain figures, so that any constants will do."""

from __future__ import annotations

import math

import numpy as np

from rooftop.errors import RooftopError
from rooftop.ledger import Number


def generate_step_s(
    kv_bytes: Number, weight_bytes: Number, flops: Number, hbm_bytes_per_s: float, flops_per_s: float
) -> Number:
    """Least seconds of a generate step: attention from HBM, and the matmuls the longer of FLOPs and weights (ch. 7).

    ``kv_bytes`` and ``weight_bytes`` are read once; rates are those of all chips together.
    """
    return kv_bytes / hbm_bytes_per_s + np.maximum(flops / flops_per_s, weight_bytes / hbm_bytes_per_s)


def prefill_s(params: float, tokens: Number, flops_per_s: float, mfu: float) -> Number:
    """Seconds of a prefill at a given utilisation: 2 FLOPs per (active) parameter and token, attention not counted."""
    return 2.0 * params * tokens / (flops_per_s * mfu)


def generate_tensor_limit(d_ff: float, batch: float, beta: float) -> float:
    """Ways of tensor parallelism above which ICI outlasts the weights' reading from HBM: F / (B beta) (chapter 7).

    ``beta`` is HBM bytes/s over the bidirectional bytes/s of one ICI axis: 9 on v5e.
    """
    return d_ff / (batch * beta)


def weight_stationary_2d_chips(f_over_d: float, axes: int = 3) -> float:
    """Chips above which 2-D weight-stationary sharding moves less than 1-D over ``axes`` ICI axes (chapter 7).

    1-D moves 4 B D / (axes W) a layer; 2-D, with X = sqrt(N D / (2 F)), 2 B sqrt(8 D F / N) / W. They are equal at
    N = 2 (F/D) axes^2: 72 for F = 4 D and three axes. (The book prints 81.)
    """
    return 2.0 * f_over_d * axes**2


def latency_bound_bytes(link_bytes_per_s: float, hop_s: float) -> float:
    """Bytes of a shard below which a hop's latency outlasts its transfer: 45 kB on v5e (chapter 7, appendix C)."""
    return link_bytes_per_s * hop_s


def chips_for(total_bytes: float, hbm_bytes: float) -> int:
    """Chips whose HBM holds so many bytes, spread evenly."""
    return math.ceil(total_bytes / hbm_bytes)


def evicted_tokens_per_step(batch: float, prompt: float, generate: float) -> float:
    """Tokens that leave the KV cache in a mean step: B (P + G) / G (chapter 8)."""
    return batch * (prompt + generate) / generate


def prefill_per_generate(prefill_seconds: float, step_s: float, batch: float, generate: float) -> float:
    """Prefill servers that keep one generate server busy: its sequences per second times a prefill's length (ch. 8)."""
    return prefill_seconds * batch / (step_s * generate)


def interleaved_token_s(token_s: float, prefill_seconds: float, batch: float, generate: float) -> float:
    """Mean seconds between two tokens of a sequence where the prefills of others come between.

    While a sequence generates G tokens each of the B - 1 others is replaced once.
    """
    return token_s + (batch - 1) / generate * prefill_seconds


def distinct_experts(experts: int, active: int, tokens: Number) -> Number:
    """Experts that at least one of ``tokens`` tokens is expected to use: E (1 - (1 - k/E)^B)."""
    return experts * (1.0 - (1.0 - active / experts) ** tokens)


def speculated_tokens(draft_length: int, acceptance: float) -> float:
    """Tokens that one round of speculative decoding yields: (1 - a^(K+1)) / (1 - a) (Leviathan et al. 2023, eq. 1).

    Each of ``draft_length`` guesses is accepted with probability ``acceptance`` if all before it were; the large model
    always adds one. Raises RooftopError unless 0 <= acceptance <= 1.
    """
    if not 0 <= acceptance <= 1:
        raise RooftopError("acceptance", acceptance, "a probability")
    return sum(acceptance**power for power in range(draft_length + 1))


def queue_wait_s(service_s: float, load: float) -> float:
    """Mean wait before one server with Poisson arrivals and a constant service time (M/D/1), at ``load`` < 1."""
    return service_s * load / (2 * (1 - load))
