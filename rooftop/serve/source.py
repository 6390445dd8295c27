"""The model that a request serves: a checkpoint, a plan and its checkpoint, or a small random model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftop.checkpoints.tokenizer import train_bpe
from rooftop.core.errors import RooftopError
from rooftop.core.files import cache_folder, read_json_object, read_text
from rooftop.models import ModelConfig, from_huggingface
from rooftop.models.sizing import SMALL_SEQ_LEN, is_small, small_model
from rooftop.plan.serving.plan import ServingPlan

if TYPE_CHECKING:
    import numpy as np

    from rooftop.programs.parameters import Parameter

_CHECKPOINT = "the folder of a checkpoint (config.json, safetensors, tokenizer.json), a plan.json, or llama:2M to try"
_VOCAB, _SEED = 512, 0
#: Text that the tokenizer of a random model is trained on: words of this tool.
_TEXT = (
    "a slice of chips, a mesh of axes: data, fsdp, tensor, context, expert; the weights, the cache and the tokens of a "
    "model; bytes and FLOPs; prefill and generate; {\"name\": \"plan\", \"arguments\": {\"on\": \"v5e:4x4\"}}\n"
) * 8  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServeSource:
    """The ``folder`` with a checkpoint of ``model``, and the content of a plan if there is one."""

    folder: Path
    model: ModelConfig
    plan: Mapping[str, Any] | None


def is_example(checkpoint: Path) -> bool:
    """True if ``checkpoint`` is llama:N, the size of a random model."""
    return is_small(str(checkpoint))


def read_source(checkpoint: Path, weights_of: Path | None) -> ServeSource:
    """The checkpoint, or the plan and the checkpoint of its model. Raises RooftopError for anything else."""
    if checkpoint.is_dir():
        if weights_of is not None:
            raise RooftopError("weights-of", str(weights_of), "this with a plan only")
        return ServeSource(folder=checkpoint, model=from_huggingface(checkpoint / "config.json"), plan=None)
    if not checkpoint.exists():
        raise RooftopError(
            "checkpoint", str(checkpoint), f"{_CHECKPOINT}; there is no such path{_download(checkpoint)}"
        )
    data = read_json_object(checkpoint, field="checkpoint", accepted=_CHECKPOINT)
    plan = ServingPlan.from_json(data)
    if weights_of is None:
        accepted = f"--weights-of DIR: the folder of a checkpoint of {plan.problem.model.name}"
        raise RooftopError("weights-of", None, accepted)
    model = from_huggingface(weights_of / "config.json")
    if replace(model, name=plan.problem.model.name) != plan.problem.model:
        accepted = f"a checkpoint of the plan's model, {plan.problem.model.name}"
        raise RooftopError("weights-of", str(weights_of), accepted)
    return ServeSource(folder=weights_of, model=model, plan=data)


def _download(checkpoint: Path) -> str:
    """Command that downloads ``checkpoint``, if it looks like a repository of Hugging Face: OWNER/NAME."""
    if len(checkpoint.parts) != 2 or not all(re.fullmatch(r"[A-Za-z0-9][\w.-]*", part) for part in checkpoint.parts):
        return ""
    return f": hf download {checkpoint} --local-dir {checkpoint.name}"


def example_model(checkpoint: Path, vocab: int = _VOCAB) -> ModelConfig:
    """The model that llama:N names. Raises RooftopError for a size that no such model has."""
    return small_model(str(checkpoint), vocab, SMALL_SEQ_LEN)


def make_example_apart(checkpoint: Path) -> Path:
    """``make_example`` for a process that must not start JAX: another one makes what is not there yet."""
    folder = cache_folder("models") / f"{example_model(checkpoint, train_bpe([_TEXT], _VOCAB).vocab).name}-random"
    if not folder.exists():
        code = "import pathlib, sys; from rooftop.serve import source; source.make_example(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True, stdout=subprocess.DEVNULL)
    return folder


def make_example(checkpoint: Path) -> Path:
    """The folder, in the user's cache, of the random model that llama:N names, with a tokenizer and a chat template.

    The weights are the same every time. Starts JAX if they are not there yet. Raises RooftopError for a size that no
    such model has.
    """
    trained = train_bpe([_TEXT], _VOCAB)
    model = example_model(checkpoint, trained.vocab)
    home = cache_folder("models")
    folder = home / f"{model.name}-random"
    if folder.exists():
        return folder
    import jax

    from rooftop.checkpoints.huggingface import save_weights
    from rooftop.programs.parameters import describe

    random = np.random.default_rng(_SEED)

    def draw(parameter: Parameter) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        if parameter.fan_in is None:
            return np.full(parameter.shape, parameter.value, np.float32)
        return random.standard_normal(parameter.shape, np.float32) * np.float32(parameter.fan_in**-0.5)

    with tempfile.TemporaryDirectory(dir=home) as scratch:
        new = Path(scratch) / folder.name
        save_weights(new, model, jax.tree.map(draw, describe(model)))
        trained.save(new)
        try:
            new.rename(folder)
        except OSError:
            # Another process was first.
            if not folder.exists():
                raise
    return folder


def stop_tokens(checkpoint: Path) -> frozenset[int]:
    """The tokens that end a text, from generation_config.json or config.json; empty if neither has any."""
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        try:
            keys = json.loads(read_text(path)) if path.exists() else {}
        except ValueError as error:
            raise RooftopError(str(path), f"{error}", "JSON") from None
        result = keys.get("eos_token_id", keys.get("text_config", {}).get("eos_token_id"))
        if result is not None:
            return frozenset([result] if isinstance(result, int) else result)
    return frozenset()
