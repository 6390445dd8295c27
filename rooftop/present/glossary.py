"""The words that answers use, with what they mean: glossary.md, which is also a page of the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rooftop.core.errors import unknown

FILE = Path(__file__).with_name("glossary.md")
#: A link to another page, which only the documentation has.
_LINK = re.compile(r" \(\[[^\]]*\]\([^)]*\)\)")


@dataclass(frozen=True, kw_only=True)
class GlossaryEntry:
    """Words of one meaning, as the glossary lists them: 'ITL, TPOT, TTFT'."""

    words: str
    meaning: str

    @property
    def names(self) -> tuple[str, ...]:
        """Each word."""
        return tuple(word.strip() for word in self.words.split(","))

    @property
    def anchor(self) -> str:
        """The fragment of an address that leads to the entry."""
        return anchor_of(self.names[0])


def anchor_of(word: str) -> str:
    """The fragment of a word: 'F_eff' is 'f-eff'."""
    return re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-")


@cache
def entries() -> tuple[GlossaryEntry, ...]:
    """All entries, in the order of the alphabet, without links to other pages."""
    rows = [line.strip("|").split("|") for line in FILE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return tuple(
        GlossaryEntry(words=words.strip(), meaning=_LINK.sub("", meaning).strip()) for words, meaning in rows[2:]
    )


def entry(word: str) -> GlossaryEntry:
    """The entry of a word, in any case. Raises RooftopError on a word that has none, with close ones."""
    by_name = {name.lower(): item for item in entries() for name in item.names}
    if word.lower() not in by_name:
        raise unknown("word", word, by_name, listed_by="rooftop help glossary")
    return by_name[word.lower()]
