"""Small LLaMA models for small machines, by how many parameters they have."""

from __future__ import annotations

from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.models import ModelConfig, count_params

#: What ``--model`` begins with to ask for one: llama:4M.
PREFIX = "llama:"
_HEAD = 32


def small_llama(parameters: int, vocab: int, max_seq_len: int) -> ModelConfig:
    """The LLaMA with about ``parameters`` parameters: of the shapes of this family, the one that is nearest.

    The family: D a multiple of 128, from one layer to four for each 128 of D (at least 2), heads of 32 of which two
    share a key and value, F = 8/3 D rounded up to a multiple of 128, and tied embeddings. Raises RooftopError for more
    than 1e9 parameters, where a real model's config.json serves better, or for fewer than the smallest has.
    """

    def of(columns: int, layers: int) -> ModelConfig:
        d_model = 128 * columns
        return ModelConfig(
            name=f"llama-{layers}x{d_model}",
            family="llama",
            layers=layers,
            d_model=d_model,
            d_ff=ceil_div(8 * d_model, 3 * 128) * 128,
            heads=d_model // _HEAD,
            kv_heads=d_model // _HEAD // 2,
            d_head=_HEAD,
            vocab=vocab,
            max_seq_len=max_seq_len,
            tied_embeddings=True,
        )

    smallest = count_params(of(1, 2)).total
    if not smallest // 2 <= parameters <= 10**9:
        raise RooftopError("model", f"{PREFIX}{parameters}", f"llama:N with N from {smallest:,} to 1e9 parameters")
    family = (of(columns, layers) for columns in range(1, 17) for layers in range(max(columns, 2), 4 * columns + 1))
    return min(family, key=lambda model: abs(count_params(model).total - parameters))
