"""Models: their configuration, from Hugging Face files or presets, and exact counts of what they cost."""

from __future__ import annotations

from rooftop.models.config import MLA, GatedDelta, Mamba, ModelConfig, MoE, OtherWeight, RopeScaling
from rooftop.models.counting import (
    Flops,
    Parameters,
    Weight,
    count_params,
    flops_per_token,
    kv_bytes_per_token,
    kv_cache_bytes,
    kv_elements,
    weights,
)
from rooftop.models.huggingface import (
    find_model,
    from_huggingface,
    load_model,
    model_meaning,
    preset_names,
    preset_source,
    presets,
)

__all__ = [
    "MLA",
    "Flops",
    "GatedDelta",
    "Mamba",
    "MoE",
    "ModelConfig",
    "OtherWeight",
    "Parameters",
    "RopeScaling",
    "Weight",
    "count_params",
    "find_model",
    "flops_per_token",
    "from_huggingface",
    "kv_bytes_per_token",
    "kv_cache_bytes",
    "kv_elements",
    "load_model",
    "model_meaning",
    "preset_names",
    "preset_source",
    "presets",
    "weights",
]
