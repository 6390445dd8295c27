"""Words of a framework: their keys, defaults and forms, from ``data/words``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from rooftop.core.records import Record
from rooftop.frameworks.tables import data_table

#: The value of a word: None, or False of a flag, is not written.
WordValue: TypeAlias = "int | float | str | bool | tuple[str, ...] | None"


@dataclass(frozen=True, kw_only=True)
class FrameworkWord:
    """A setting of a framework: its ``key``, and that of a second form of configuration (``other``).

    One that is written ``always`` stands there at its default too.
    """

    name: str
    key: str
    other: str | None = None
    default: Any = None
    is_flag: bool = False
    is_list: bool = False
    always: bool = False


@dataclass(frozen=True, kw_only=True)
class WordTable:
    """The words of a framework at one commit of its ``repository``, by name; ``data`` is all of its file."""

    repository: str
    commit: str
    version: str
    words: Mapping[str, FrameworkWord]
    data: Mapping[str, Any]

    def __getitem__(self, name: str) -> FrameworkWord:
        return self.words[name]

    @property
    def by_key(self) -> Mapping[str, FrameworkWord]:
        """The words by their keys."""
        return {word.key: word for word in self.words.values()}

    @property
    def program(self) -> str:
        """The program in words: version, repository and commit."""
        return f"{self.version} ({self.repository} at {self.commit})"

    def read(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Values of words from ``options`` by key, those that are not said at their defaults; and keys of no word."""
        by_key = self.by_key
        values = {name: word.default if not word.is_flag else False for name, word in self.words.items()}
        values |= {by_key[key].name: value for key, value in options.items() if key in by_key}
        return values, tuple(key for key in options if key not in by_key)

    def without_words(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Those of ``keys`` that have no word and may cost time or memory."""
        beginnings = tuple(self.data["without_price"].split())
        return tuple(key for key in keys if not key.startswith(beginnings))

    def written(self, values: Mapping[str, WordValue]) -> Iterator[tuple[FrameworkWord, Any]]:
        """Words with another value than their default, and those that are always written, in the table's order."""
        unknown = values.keys() - self.words.keys()
        assert not unknown, unknown
        for name, word in self.words.items():
            value = values.get(name)
            if value is not None and (word.always or value != (False if word.is_flag else word.default)):
                yield word, value


@dataclass(frozen=True, kw_only=True)
class FrameworkConfiguration(Record):
    """A plan in the words of its framework.

    ``files`` are texts by name, ``command`` starts the run, ``program`` is the version that reads them. ``notes`` say
    what the configuration leaves to the reader.
    """

    program: str
    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...] = field(default=())


@cache
def option_values(name: str) -> Mapping[str, int | None]:
    """All options of a framework's command line, by the number of their values; None: any number."""
    counts = {"flags": 0, "values": 1, "lists": None}
    return {
        f"--{option}": counts[kind]
        for kind, options in data_table(f"words/{name}-options").items()
        for option in options.split()
    }


@cache
def word_table(name: str) -> WordTable:
    """The words of the file ``data/words/NAME.toml``."""
    data = data_table(f"words/{name}")
    words = {
        word: FrameworkWord(
            name=word,
            key=facts["key"],
            other=facts.get("bridge"),
            default=tuple(default) if isinstance(default := facts.get("default"), list) else default,
            is_flag=facts.get("flag", False),
            is_list=facts.get("list", False),
            always=facts.get("always", False),
        )
        for word, facts in data["word"].items()
    }
    return WordTable(
        repository=data["repository"], commit=data["commit"], version=data["version"], words=words, data=data
    )
