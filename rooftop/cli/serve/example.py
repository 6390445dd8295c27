"""``rooftop serve llama:2M``: a checkpoint made on the spot, to try the server without having one."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from rooftop.core.quantities import parse_count
from rooftop.models.sizing import PREFIX, small_llama

_VOCAB, _LONGEST, _SEED = 512, 2048, 0
#: What the tokenizer is made of: words of this tool.
_TEXT = (
    "a slice of chips, a mesh of axes: data, fsdp, tensor, context, expert; the weights, the cache and the tokens of a "
    "model; bytes and FLOPs; prefill and generate; {\"name\": \"plan\", \"arguments\": {\"on\": \"v5e:4x4\"}}\n"
) * 8  # fmt: skip
#: Turns as lines, and calls of tools as Hermes and Qwen write them.
_CHAT = (
    "{% if tools %}Call a tool as <tool_call>{JSON of its name and arguments}</tool_call>: {{ tools | tojson }}\n"
    "{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def is_example(given: Path) -> bool:
    """Whether it asks for a checkpoint to be made."""
    return str(given).startswith(PREFIX)


def made(given: Path) -> Path:
    """The folder, in the user's cache, of a LLaMA with random weights, a tokenizer and a chat template.

    It is the same each time. Raises RooftopError for a size that is none. Starts JAX.
    """
    import jax
    import numpy as np

    from rooftop.checkpoints.huggingface import save_weights
    from rooftop.checkpoints.tokenizer import Tokenizer, train_bpe
    from rooftop.core.files import cache_folder
    from rooftop.programs.model.describe import describe
    from rooftop.programs.parameters import Parameter

    size = str(given).removeprefix(PREFIX)
    trained = train_bpe([_TEXT], _VOCAB)
    model = small_llama(parse_count(size, "checkpoint"), trained.vocab, _LONGEST)
    home = cache_folder("models")
    folder = home / f"{model.name}-random"
    if folder.exists():
        return folder
    random = np.random.default_rng(_SEED)

    def drawn(parameter: Parameter) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        if parameter.fan_in is None:
            return np.full(parameter.shape, parameter.value, np.float32)
        return random.standard_normal(parameter.shape, np.float32) * np.float32(parameter.fan_in**-0.5)

    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        new = Path(scratch) / folder.name
        save_weights(new, model, jax.tree.map(drawn, describe(model)))
        tokenizer: Tokenizer = replace(trained, settings={**trained.settings, "chat_template": _CHAT})
        tokenizer.save(new)
        try:
            new.rename(folder)
        except OSError:
            # Another process was first.
            if not folder.exists():
                raise
    return folder
