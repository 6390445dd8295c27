"""From published rates to step times: the FLOPs that each source counts.

Published TFLOP/s and MFU differ by what they count: attention in full or causal (half), recomputation in or out.
Every count leaves the embedding lookup out, takes the output projection in, and counts a backward pass as two
forward ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rooftop.models import ModelConfig, flops_per_token


def full_attention(model: ModelConfig, seq_len: int) -> float:
    """6 x (parameters without embedding, with output projection) + 12 L N H S per token.

    What MaxText logged before it halved causal attention (its PR 1988), and the model FLOPs of Korthikanti et al.
    (arXiv:2205.05198).
    """
    return float(flops_per_token(model, seq_len, attention="full").total)


def causal_attention(model: ModelConfig, seq_len: int) -> float:
    """The same with 6 L N H S: attention below the diagonal only, as MaxText logs since its PR 1988."""
    return float(flops_per_token(model, seq_len, attention="causal").total)


def full_attention_and_remat(model: ModelConfig, seq_len: int) -> float:
    """Full attention and one more forward pass through the layers, as full remat executes it.

    Narayanan et al., arXiv:2104.04473, eq. 3: 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) for B sequences.
    """
    layers = flops_per_token(model, seq_len, attention="full", embeddings=False)
    return full_attention(model, seq_len) + float(layers.forward)


#: FLOPs per token by the name that readings.toml gives a source.
CONVENTIONS: Mapping[str, Callable[[ModelConfig, int], float]] = {
    "full_attention": full_attention,
    "causal_attention": causal_attention,
    "full_attention_and_remat": full_attention_and_remat,
}


def step_seconds(
    measured: Mapping[str, float],
    *,
    tokens: float,
    chips: int,
    flops: float | None,
    peak_flops_per_s: float | None,
) -> tuple[float, str] | None:
    """Seconds of one step and the metric they come from, or None where no metric gives them.

    ``measured`` in SI by metric, ``tokens`` and ``flops`` of the whole batch in one step (None: the count is
    unknown), ``peak_flops_per_s`` of one chip (None: unknown). The most direct metric wins: step_time, then
    tokens_per_s_per_chip, then tflops_per_chip, then mfu.
    """
    if "step_time" in measured:
        return measured["step_time"], "step_time"
    if "tokens_per_s_per_chip" in measured:
        return tokens / (chips * measured["tokens_per_s_per_chip"]), "tokens_per_s_per_chip"
    if flops is None:
        return None
    if "tflops_per_chip" in measured:
        return flops / (chips * measured["tflops_per_chip"]), "tflops_per_chip"
    if "mfu" in measured and peak_flops_per_s is not None:
        return flops / (chips * peak_flops_per_s * measured["mfu"]), "mfu"
    return None
