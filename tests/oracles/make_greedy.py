"""Greedy continuations by transformers' own ``generate`` of the tiny models: writes greedy.json.

    pip install torch transformers safetensors; python tests/oracles/make_greedy.py

Float32, eager attention and experts, its own KV cache, one prompt at a time, the weights of tiny_weights.py. Prompts
are drawn anew until the likeliest token leads by GAP logits wherever one is chosen, so that no choice hangs on a
rounding. Nothing of rooftop is imported.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import make_logits
import numpy as np

HERE = Path(__file__).parent
#: Lengths of the prompts of a family and tokens behind each. The last two prompts begin as the first one does.
LENGTHS, TOKENS = (13, 3, 8, 1, 18, 17), 12
SHARED = 9
GAP = 2e-3
#: GPT-2's tiny model has 24 positions.
MOST = {"gpt2": 24}


def main() -> None:
    """Continue the prompts of every tiny model."""
    families = json.loads((HERE / "tiny_models.json").read_text())
    results = {}
    for name, keys in families.items():
        norm_mean = json.loads((HERE / "logits" / f"{name}.json").read_text())["norm_mean"]
        with tempfile.TemporaryDirectory() as directory:
            make_logits._write_checkpoint(keys, norm_mean, Path(directory))
            model = make_logits._load(Path(directory))
            results[name] = _continued(model, name)
        print(name, len(results[name]))
    lines = ",\n".join(
        f"  {json.dumps(name)}: [\n    " + ",\n    ".join(map(json.dumps, cases)) + "\n  ]"
        for name, cases in results.items()
    )
    made_with = json.dumps({**make_logits._made_with(), "script": Path(__file__).name})
    (HERE / "greedy.json").write_text('{\n  "made_with": ' + made_with + ",\n" + lines + "\n}\n")


def _continued(model: Any, name: str) -> list[dict[str, list[int]]]:
    random = np.random.RandomState(zlib.crc32(name.encode()))
    continuations: list[dict[str, list[int]]] = []
    for number, length in enumerate(LENGTHS):
        tokens = min(TOKENS, MOST.get(name, 256) - length)
        for _ in range(200):
            prompt = random.randint(1, 90, length).tolist()
            if number >= len(LENGTHS) - 2:
                prompt[:SHARED] = continuations[0]["prompt"][:SHARED]
            output = _greedy(model, prompt, tokens)
            if output is not None:
                break
        else:
            raise SystemExit(f"{name}: two tokens are as likely, whatever the prompt")
        continuations.append({"prompt": prompt, "output": output})
    return continuations


def _greedy(model: Any, prompt: list[int], tokens: int) -> list[int] | None:
    """The continuation, or None if a choice is close."""
    import torch

    answer = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for scores in answer.logits:
        first, second = scores[0].topk(2).values.tolist()
        if first - second < GAP:
            return None
    return [int(token) for token in answer.sequences[0, len(prompt) :]]


if __name__ == "__main__":
    main()
