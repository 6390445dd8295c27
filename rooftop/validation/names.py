"""Models and recomputation by the names of publications: 'Llama-3.1-70B-Instruct-FP8', 'SAC'.

A published name is one that rooftop has, with words that do not change what it names: ``[names]`` of
``data/readings.toml`` lists them. Any other word makes another model of it, which is not found.
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

#: Sizes of a model at the end of its name: '70b', '1008.0b', '1t', 'xl'.
_SIZE = re.compile(r"\d+(\.\d+)?[bmt]|small|medium|large|xl")
#: Dates of a release, '2507' or '0528', which has the sizes of others.
_DATE = re.compile(r"2\d(0[1-9]|1[0-2])|(0[1-9]|1[0-2])([0-2]\d|3[01])")


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
    dtypes = readings()["names"]["dtype"]
    return PublishedModel(
        preset=_presets().get(_joined(_model_words(name))),
        dtype=next((word for word in _words(name) if word in dtypes), None),
    )


@cache
def _presets() -> Mapping[str, str]:
    """Names of presets and their aliases as ``published_model`` compares them -> preset."""
    return {_joined(_model_words(alias)): preset for alias, preset in preset_names().items()}


def family_facts(name: str) -> Mapping[str, Any]:
    """Facts of ``[model]`` in ``data/readings.toml`` about a model by its whole name, with or without its size."""
    families = {known: facts for facts in readings()["model"].values() for known in facts["names"]}
    words = _model_words(re.sub(r"\(.*?\)", "", name))
    for end in (len(words), len(words) - 1):
        if (facts := families.get(_joined(words[:end]))) is not None:
            return {key: value for key, value in facts.items() if key not in ("names", "source")}
        if not words or _SIZE.fullmatch(words[-1]) is None:
            break
    return {}


def remat_word(word: str) -> str:
    """A published recomputation as rooftop compares it: 'Full activation checkpointing' is 'full'."""
    if re.search(r"[(=,+]", word):
        return word
    said = [one for one in _words(word) if one not in readings()["names"]["remat"]]
    return "_".join(said) or word


def _model_words(name: str) -> list[str]:
    """Words of a model's name that say which architecture it has."""
    words, names = _words(name.strip().rsplit("/", 1)[-1]), readings()["names"]
    telling = []
    for before, word in zip(["", *words], words, strict=False):
        # Checkpoints of one dtype are numbered.
        of_checkpoint = before in names["dtype"] and re.fullmatch(r"v\d+", word)
        if word not in (*names["model"], *names["dtype"]) and not of_checkpoint and _DATE.fullmatch(word) is None:
            telling.append(word)
    return telling


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\s_-]+", name.lower()) if word]


def _joined(words: list[str]) -> str:
    """One name for 'llama-3.1-8b' and 'llama3.1-8b'."""
    return re.sub(r"(?<=[a-z])-(?=\d)", "", "-".join(words))
