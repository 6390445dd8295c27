"""Names of models on the Hugging Face hub: the words that say which architecture a model has, ids and addresses."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: Dates of a release, '2507' or '0528', which has the sizes of others.
_DATE = re.compile(r"2\d(0[1-9]|1[0-2])|(0[1-9]|1[0-2])([0-2]\d|3[01])")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ADDRESS = re.compile(
    rf"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)(?P<id>{_PART}/{_PART})"
    rf"(?:/(?:tree|blob|resolve|raw)/(?P<revision>{_PART})(?:/config\.json)?)?/?(?:[?#].*)?"
)
_ID = re.compile(rf"(?P<id>{_PART}/{_PART})")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A model's repository on the hub, 'meta-llama/Llama-3.1-8B', and its revision: a branch, tag or commit."""

    id: str
    revision: str = "main"

    @property
    def name(self) -> str:
        """The name without the organisation."""
        return self.id.rpartition("/")[2]

    @classmethod
    def parse(cls, text: str) -> Repository | None:
        """Read an id, 'Qwen/Qwen3-8B', or an address, 'https://huggingface.co/Qwen/Qwen3-8B'; None for other text."""
        match = _ADDRESS.fullmatch(text.strip()) or _ID.fullmatch(text.strip())
        if match is None or match["id"].endswith(".json"):
            return None
        return cls(id=match["id"], revision=match.groupdict().get("revision") or "main")


@cache
def name_words() -> Mapping[str, tuple[str, ...]]:
    """Words of names by kind: ``model``, ``dtype`` and ``stored`` of words.toml."""
    data = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
    return {kind: tuple(words) for kind, words in data.items()}


def split_words(name: str) -> list[str]:
    """Words of a name in lower case."""
    return [word for word in re.split(r"[\s_-]+", name.lower()) if word]


def architecture(name: str, *, stored: bool = False) -> list[str]:
    """Words of a model's name that say which architecture it has; without those of formats of weights if ``stored``."""
    known = name_words()
    silent = (*known["model"], *known["dtype"], *(known["stored"] if stored else ()))
    words, telling = split_words(name.strip().rsplit("/", 1)[-1]), []
    for before, word in zip(["", *words], words, strict=False):
        # Checkpoints of one dtype are numbered.
        of_checkpoint = before in known["dtype"] and re.fullmatch(r"v\d+", word)
        if word not in silent and not of_checkpoint and _DATE.fullmatch(word) is None:
            telling.append(word)
    return telling


def joined(words: list[str]) -> str:
    """One name for 'llama-3.1-8b' and 'llama3.1-8b'."""
    return re.sub(r"(?<=[a-z])-(?=\d)", "", "-".join(words))


def dtype_word(name: str) -> str | None:
    """The dtype of weights that a name says, 'fp8'; None if it says none."""
    return next((word for word in split_words(name) if word in name_words()["dtype"]), None)
