"""Keys of a Hugging Face ``config.json`` as blocks of a ModelConfig, for each ``model_type``.

Each family is a function of the keys that it reads, with the defaults of transformers, in the module of its kin. A key
that nothing here reads is refused, unless it is known to change nothing, or switched off: it may ask for another
computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.models.families import deepseek, experts, gemma, gpt, granite, llama, mamba, olmo, qwen
from rooftop.models.families.keys import Keys
from rooftop.models.families.parts import Reader

__all__ = ["FAMILIES", "Keys", "read_family"]

#: ``model_type`` -> the reader of its files.
FAMILIES: Mapping[str, Reader] = {
    **deepseek.FAMILIES,
    **experts.FAMILIES,
    **gemma.FAMILIES,
    **gpt.FAMILIES,
    **granite.FAMILIES,
    **llama.FAMILIES,
    **mamba.FAMILIES,
    **olmo.FAMILIES,
    **qwen.FAMILIES,
}


def read_family(keys: Keys) -> tuple[str, dict[str, Any]]:
    """The ``model_type`` of a file, and the fields of its ModelConfig, all but name and family.

    Of a multimodal file they are those of the language model in ``text_config``. Raises RooftopError on an unknown
    type, and on a key that may change the computation and that nothing reads.
    """
    family = keys.text("model_type")
    if family in FAMILIES:
        fields = FAMILIES[family](keys)
        keys.check()
        return family, fields
    if not keys.has("text_config"):
        accepted = f"one of {', '.join(sorted(FAMILIES))}; or a text_config of one of them"
        raise RooftopError(keys.field("model_type"), family, accepted)
    inner = keys.inner("text_config")
    if "tie_word_embeddings" in keys.data and "tie_word_embeddings" not in inner.data:
        inner.data = {**inner.data, "tie_word_embeddings": keys.data["tie_word_embeddings"]}
    return read_family(inner)
