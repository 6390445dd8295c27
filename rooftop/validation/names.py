"""Models and recomputation by the names of publications: 'Llama-3.1-70B-Instruct-FP8', 'SAC'.

A published name is one that rooftop has, with words that do not change what it names: ``models/hub/words.toml`` lists
them. Any other word makes another model of it, which is not found.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rooftop.models import preset_names
from rooftop.models.hub import architecture, dtype_word, joined, split_words

#: Sizes of a model at the end of its name: '70b', '1008.0b', '1t', 'xl'.
_SIZE = re.compile(r"\d+(\.\d+)?[bmt]|small|medium|large|xl")


@cache
def readings() -> Mapping[str, Any]:
    """The parsed ``data/readings.toml``."""
    return tomllib.loads(Path(__file__).with_name("data").joinpath("readings.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PublishedModel:
    """A published model: the ``preset`` of its architecture, None if none has it, and the dtype that its name says."""

    preset: str | None
    dtype: str | None


@cache
def published_model(name: str) -> PublishedModel:
    """The model with a published name: 'nvidia/Llama-3.1-8B-Instruct-FP8' is llama3.1-8b in FP8."""
    return PublishedModel(
        preset=_presets().get(joined(architecture(name))),
        dtype=dtype_word(name),
    )


@cache
def _presets() -> Mapping[str, str]:
    """Names of presets and their aliases as ``published_model`` compares them -> preset."""
    return {joined(architecture(alias)): preset for alias, preset in preset_names().items()}


def family_facts(name: str) -> Mapping[str, Any]:
    """Facts of ``[model]`` in ``data/readings.toml`` about a model by its whole name, with or without its size."""
    families = {known: facts for facts in readings()["model"].values() for known in facts["names"]}
    words = architecture(re.sub(r"\(.*?\)", "", name))
    for end in (len(words), len(words) - 1):
        if (facts := families.get(joined(words[:end]))) is not None:
            return {key: value for key, value in facts.items() if key not in ("names", "source")}
        if not words or _SIZE.fullmatch(words[-1]) is None:
            break
    return {}


def remat_word(word: str) -> str:
    """A published recomputation as rooftop compares it: 'Full activation checkpointing' is 'full'."""
    if re.search(r"[(=,+]", word):
        return word
    said = [one for one in split_words(word) if one not in readings()["names"]["remat"]]
    return "_".join(said) or word
