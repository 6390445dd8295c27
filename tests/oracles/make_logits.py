"""Logits, losses and gradients of transformers' own models for tiny_models.json: writes logits/.

    pip install torch transformers safetensors; python tests/oracles/make_logits.py [NAME ...]

Float32, eager attention and eager experts, on the CPU, nothing downloaded. Weights follow tiny_weights.py by the names
that a published checkpoint has: they are written as a checkpoint and read by transformers, so that its conversion is
part of what is compared. Nothing of rooftop is imported. README.md says what is in a file.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tiny_weights

HERE = Path(__file__).parent
BATCH, SEQ = 2, 20
#: Without token 0, which pads in Gemma and whose embedding torch therefore gives no gradient, and without those that
#: stand for images in Gemma 3.
TOKENS = range(1, 90)
#: Tokens are drawn anew until no router's choice hangs on a rounding: when every weight changes by JITTER of itself, in
#: JITTERED ways, every token keeps its experts.
JITTER, JITTERED = 3e-4, 16


def main() -> None:
    """Write logits/NAME.npz and logits/NAME.json of the named tiny models, or of all."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    models = json.loads((HERE / "tiny_models.json").read_text(encoding="utf-8"))
    for name in sys.argv[1:] or models:
        facts, arrays = describe(name, models[name])
        np.savez_compressed(HERE / "logits" / f"{name}.npz", **arrays)
        text = ",\n".join(f"  {json.dumps(key)}: {_json(value)}" for key, value in facts.items())
        (HERE / "logits" / f"{name}.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
        print(name, {key: value for key, value in facts.items() if "noise" in key})


def describe(name: str, keys: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content of NAME.json for the model with the ``keys`` of a config.json, and the arrays of NAME.npz."""
    # Some store the scales of norms as their difference from 1.
    norm_mean = 0.0 if keys["model_type"].startswith(("gemma", "vaultgemma", "nemotron")) else 1.0
    with tempfile.TemporaryDirectory() as directory:
        shapes = _write_checkpoint(keys, norm_mean, Path(directory))
        model = _load(Path(directory))
    tokens, targets = _steady_tokens(name, model)
    logits, loss, gradients = run(copy.deepcopy(model), tokens, targets)
    exact_logits, _, exact_gradients = run(copy.deepcopy(model).double(), tokens, targets)
    # The vision tower of a multimodal model takes no part.
    shapes = {weight: shape for weight, shape in shapes.items() if weight in gradients}
    summary, exact = (
        np.stack([tiny_weights.summarise(weight, all_of[weight]) for weight in shapes])
        for all_of in (gradients, exact_gradients)
    )
    facts = {
        "made_with": _made_with(),
        "config": keys,
        "norm_mean": norm_mean,
        "weights_checksum": tiny_weights.checksum(tiny_weights.weights(shapes, norm_mean)),
        "logits_noise": _rounded(np.abs(logits - exact_logits).max()),
        "gradients_noise": _rounded(np.abs(summary - exact).max()),
        "weights": shapes,
    }
    arrays = {
        "tokens": tokens.astype(np.int32),
        "targets": targets.astype(np.int32),
        "logits": logits,
        "loss": np.float32(loss),
        "gradients": summary.astype(np.float32),
    }
    return facts, arrays


def run(model: Any, tokens: Any, targets: Any) -> tuple[Any, float, dict[str, Any]]:
    """Logits [B, T, V], mean cross-entropy of targets [B, T], and gradients by the names of a checkpoint.

    ``model`` is used up: its weights become the gradients, so that saving gives these the names of a checkpoint too.
    """
    import torch

    logits = model(input_ids=torch.tensor(tokens), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:  # a bias that only chooses experts has none; other weights without one take no part
                chooses = name.endswith("e_score_correction_bias")
                gradient = torch.full_like(parameter, 0.0 if chooses else torch.nan)
            parameter.copy_(gradient)
        for buffer in model.buffers():
            # A bias that only chooses experts is kept as a buffer and has no gradient.
            buffer.zero_()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        gradients = _read_checkpoint(Path(directory))
    taking_part = {name: gradient for name, gradient in gradients.items() if not np.isnan(gradient).any()}
    return logits.detach().numpy(), loss.item(), taking_part


def _steady_tokens(name: str, model: Any) -> tuple[Any, Any]:
    """Tokens and targets, [B, T] each, such that jittered weights choose the same experts."""
    import torch

    jittered = [copy.deepcopy(model) for _ in range(JITTERED)]
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for other in jittered:
            for parameter in other.parameters():
                parameter.mul_(1 + JITTER * torch.randn(parameter.shape, generator=draw))
    for attempt in range(1000):
        draw_tokens = np.random.RandomState(zlib.crc32(f"{name} {attempt}".encode()))
        tokens, targets = draw_tokens.randint(TOKENS.start, TOKENS.stop, (2, BATCH, SEQ))
        chosen = _chosen_experts(model, tokens)
        if all(np.array_equal(_chosen_experts(other, tokens), chosen) for other in jittered):
            return tokens, targets
    raise SystemExit(f"{name}: jittered weights choose other experts, whatever the tokens")


def _chosen_experts(model: Any, tokens: Any) -> Any:
    """The experts of every token, ascending, [MoE layers, B x T, k]; nothing in a dense model."""
    import torch

    chosen: list[Any] = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [
        # A router returns its logits, the weights of the chosen experts and which they are.
        router.register_forward_hook(lambda _router, _given, answer: chosen.append(answer[2].sort(dim=-1).values))
        for router in routers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor(tokens), use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.stack([experts.numpy() for experts in chosen]) if chosen else np.empty(0)


def _write_checkpoint(keys: dict[str, Any], norm_mean: float, directory: Path) -> dict[str, list[int]]:
    """A checkpoint of tiny_weights for a model of these keys; returns the names and shapes that transformers saves."""
    import safetensors.numpy
    from transformers import AutoConfig

    # A copy: the configuration writes into what it is given.
    config = AutoConfig.for_model(**copy.deepcopy(keys))
    _auto(config).from_config(config).save_pretrained(directory)
    shapes = {name: list(array.shape) for name, array in sorted(_read_checkpoint(directory).items())}
    weights = tiny_weights.weights(shapes, norm_mean)
    safetensors.numpy.save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return shapes


def _load(directory: Path) -> Any:
    import torch
    from transformers import AutoConfig

    auto = _auto(AutoConfig.from_pretrained(directory))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return auto.from_pretrained(directory, dtype=torch.float32, **eager).eval()


def _auto(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _read_checkpoint(directory: Path) -> dict[str, Any]:
    import safetensors.numpy

    return dict(safetensors.numpy.load_file(directory / "model.safetensors"))


def _made_with() -> dict[str, str]:
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    return {"script": Path(__file__).name, "date": datetime.date.today().isoformat(), **versions}


def _rounded(value: Any) -> float:
    return float(f"{value:.1e}")


def _json(value: Any) -> str:
    """JSON; a table of shapes has one line per weight."""
    if not isinstance(value, dict) or not all(isinstance(entry, list) for entry in value.values()):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()) + "\n  }"


if __name__ == "__main__":
    main()
