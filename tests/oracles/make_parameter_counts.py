"""Count parameters of every preset and of variants.json with transformers' modules: parameter_counts.json.

Parameters by component, the window of each layer ([] without any), what query x key is multiplied by, and YaRN's
factor of cosine and sine.

    pip install torch transformers; python tests/oracles/make_parameter_counts.py

Modules are built on the meta device: no weights, no download, seconds of time. Nothing of rooftop is imported, so that
the figures are independent of it; only its preset files are read.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import Any

PRESETS = Path(__file__).parents[2] / "rooftop" / "models" / "presets"
VARIANTS = Path(__file__).with_name("variants.json")
OUTPUT = Path(__file__).with_name("parameter_counts.json")

#: The first of these that is in a parameter's name says which component it counts with.
COMPONENT_OF = (
    ("e_score_correction_bias", "router"),
    ("indexer", "others"),
    ("altup", "others"),
    ("laurel", "others"),
    ("per_layer", "others"),
    ("linear_attn", "mixer"),
    ("norm", "norms"),
    ("ln_", "norms"),
    ("embed_tokens", "embed"),
    ("wte", "embed"),
    ("wpe", "embed"),
    ("lm_head", "unembed"),
    ("attn", "attn"),
    ("shared_experts", "shared_experts"),
    ("shared_expert", "shared_experts"),
    ("mlp.experts", "experts"),
    ("feed_forward.experts", "experts"),
    ("feed_forward.router", "router"),
    ("feed_forward", "mlp"),
    ("mlp.gate.", "router"),
    ("mlp.router", "router"),
    ("mlp", "mlp"),
)


def describe(model_keys: dict[str, Any]) -> dict[str, Any]:
    """The figures of the causal language model that transformers builds from the keys of a config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {name: value for name, value in model_keys.items() if name not in ("_name_or_path", "source", "aliases")}
    keys = keys.get("text_config", keys)
    if keys["model_type"] == "kimi_k2":  # the same module under another name
        keys = keys | {"model_type": "deepseek_v3"}
    config = AutoConfig.for_model(**keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counts: Counter[str] = Counter()
    # named_parameters leaves out tied ones. DeepSeek-V3's correction bias is a weight, but kept as a buffer.
    biases = [pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias")]
    for name, tensor in [*model.named_parameters(), *biases]:
        counts[next(component for part, component in COMPONENT_OF if part in name)] += tensor.numel()
    figures: dict[str, Any] = {"total": sum(counts.values()), "by_component": dict(sorted(counts.items()))}
    if config.model_type not in ("gpt2", "qwen3_next", "llama4_text"):
        layers = model.model.layers
        rotary = model.model.rotary_emb
        everywhere = getattr(config, "sliding_window", None)
        windows = [getattr(layer.self_attn, "sliding_window", everywhere) for layer in layers]
        figures["windows"] = windows if any(windows) else []
        figures["query_scale"] = layers[0].self_attn.scaling
        figures["rope_attention_factor"] = getattr(
            rotary, "attention_scaling", getattr(rotary, "full_attention_attention_scaling", None)
        )
    return figures


def _dump(figures: dict[str, Any]) -> str:
    """JSON with one line per model, so that a list of windows does not fill a page."""
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(model)}" for name, model in figures["models"].items())
    return f'{{\n  "made_with": {json.dumps(figures["made_with"])},\n  "models": {{\n{lines}\n  }}\n}}'


def main() -> None:
    """Write parameter_counts.json."""
    import torch
    import transformers

    models = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(PRESETS.glob("*.json"))}
    models |= json.loads(VARIANTS.read_text(encoding="utf-8"))
    figures = {name: describe(model) for name, model in models.items()}
    made_with = {
        "script": Path(__file__).name,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    OUTPUT.write_text(_dump({"made_with": made_with, "models": figures}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
