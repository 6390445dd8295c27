"""Small models for small machines, named by their number of parameters: llama:4M, mixtral:5M."""

from __future__ import annotations

from rooftop.core.errors import RooftopError
from rooftop.core.quantities import parse_count
from rooftop.core.rounding import ceil_div
from rooftop.models.config import ModelConfig, MoE
from rooftop.models.counting import count_params

#: Families that small models come in. ``mixtral`` has eight experts, of which two are active.
SMALL_FAMILIES = ("llama", "mixtral")
#: Vocabulary and longest sequence of a small model for which neither is named.
SMALL_VOCAB = 4096
SMALL_SEQ_LEN = 2048
_HEAD = 32
_LARGEST = 10**9
_LARGEST_VOCAB = 2**20


def is_small(name: str) -> bool:
    """True if ``name`` asks for a small model: FAMILY:N."""
    family, colon, _ = name.partition(":")
    return bool(colon) and family in SMALL_FAMILIES


def small_model(name: str, vocab: int = SMALL_VOCAB, max_seq_len: int = SMALL_SEQ_LEN) -> ModelConfig:
    """The model with about N parameters that FAMILY:N names: of the shapes of its family, the nearest.

    Shapes: D a multiple of 128, from one layer to four for each 128 of D (at least 2), heads of 32 of which two share
    a key and value, F = 8/3 D rounded up to a multiple of 128, and tied embeddings. Each expert of a mixtral has such
    an F. Raises RooftopError for an unknown family, for more than 1e9 parameters, where a real model's config.json
    serves better, and for fewer than the smallest has.
    """
    family, _, size = name.partition(":")
    if family not in SMALL_FAMILIES:
        raise RooftopError("model", name, " or ".join(f"{known}:N" for known in SMALL_FAMILIES))
    try:
        parameters = parse_count(size, "model")
    except RooftopError as error:
        raise RooftopError("model", name, f"{family}:N, and N {error.accepted}") from None
    if not 1 <= vocab <= _LARGEST_VOCAB:
        raise RooftopError("vocab", vocab, f"from 1 to {_LARGEST_VOCAB:,} tokens of a small model")

    def of(columns: int, layers: int) -> ModelConfig:
        d_model = 128 * columns
        d_ff = ceil_div(8 * d_model, 3 * 128) * 128
        return ModelConfig(
            name=f"{family}-{layers}x{d_model}",
            family=family,
            layers=layers,
            d_model=d_model,
            d_ff=d_ff,
            heads=d_model // _HEAD,
            kv_heads=d_model // _HEAD // 2,
            d_head=_HEAD,
            vocab=vocab,
            max_seq_len=max_seq_len,
            tied_embeddings=True,
            moe=MoE(experts=8, active=2, d_ff=d_ff) if family == "mixtral" else None,
        )

    smallest = count_params(of(1, 2)).total
    if not smallest // 2 <= parameters <= _LARGEST:
        accepted = f"{family}:N with N from {smallest:,} to 1e9 parameters; larger models by a name or a config.json"
        raise RooftopError("model", name, accepted)
    shapes = (of(columns, layers) for columns in range(1, 17) for layers in range(max(columns, 2), 4 * columns + 1))
    return min(shapes, key=lambda model: abs(count_params(model).total - parameters))
