"""The base of requests: their fields as settings, their JSON, and the docstrings that stand below the fields."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.files import read_json_object, write_json
from rooftop.requests.kinds import Assigned, Kind
from rooftop.requests.words import WORDS, Word


class NotInJson(RooftopError):
    """A field of a request that is an object of this process: the request answers, and cannot be written."""


class NotInWords(RooftopError):
    """A field of a request that is an object: the request has JSON, and no command line."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a request: its name here and as an option, its default, its meaning, and the words for it.

    ``is_argument`` fields come first on a command line, without a name. ``default`` is MISSING where there is none.
    """

    name: str
    word: Word
    default: Any
    about: str
    is_argument: bool

    @property
    def kind(self) -> Kind:
        """The kind of its values."""
        return self.word.kind

    def is_required(self, values: Mapping[str, object]) -> bool:
        """True for a field that must be given next to ``values`` of others."""
        return self.default is MISSING or (bool(self.word.stated_by) and values.get(self.word.stated_by) is None)

    @property
    def option(self) -> str:
        """The name without dashes in front, as in errors: batch-seqs."""
        return (self.word.option or self.name.replace("_", "-")).partition("/")[0]

    @property
    def option_off(self) -> str:
        """The name of a flag's other side, likewise: no-overlap."""
        return self.word.option.partition("/")[2] or f"no-{self.option}"

    @property
    def label(self) -> str:
        """The name in a form: Batch, sequences."""
        label = self.word.label or self.option.replace("-", " ").capitalize()
        return f"{label}, {self.word.unit}" if self.word.unit else label

    def words(self, value: Any) -> list[str]:
        """The words of a command line for a value in JSON. Raises RooftopError for an object, which has no text."""
        if isinstance(value, Mapping) and isinstance(self.kind, Assigned):
            value = [f"{name}={_listed(entry)}" for name, entry in value.items()]
        values = value if isinstance(value, list) else [value]
        if any(isinstance(entry, (Mapping, list)) for entry in values):
            raise NotInWords(self.option, "an object", "a text on a command line")
        if self.is_argument:
            # A script's command comes last, after --.
            return ["--", *values] if isinstance(value, list) else [str(value)]
        if isinstance(value, bool):
            return [f"--{self.option if value else self.option_off}"]
        texts = [str(entry) for entry in values] if self.word.several else [_listed(self.kind.text(value))]
        return [word for text in texts for word in (f"--{self.option}", text)]

    def of_json(self, value: Any) -> Any:
        """Read a value in JSON. Raises RooftopError naming the option."""
        if not self.word.several or isinstance(self.kind, Assigned):
            return self.kind.of_json(value, self.option)
        if not isinstance(value, list):
            raise RooftopError(self.option, value, "a list in JSON")
        return self.kind.gather([self.kind.of_json(entry, self.option) for entry in value])

    def plain(self, value: Any) -> Any:
        """A value in JSON. Raises RooftopError naming the option."""
        if self.word.several and not isinstance(value, Mapping):
            entries = [value] if isinstance(value, (str, Path)) else value
            return [self.kind.plain(entry, self.option) for entry in entries]
        return self.kind.plain(value, self.option)


@dataclass(frozen=True)
class Request:
    """Base of the frozen dataclasses that verbs take. Each field has its docstring below it, and a word for its name.

    ``verb`` is the command that takes the request. ``checked_by``, 'module:Class', is the subclass that checks and
    resolves the fields, where that imports what a light command should not.
    """

    verb: ClassVar[str] = ""
    checked_by: ClassVar[str] = ""

    @classmethod
    def checked(cls) -> type[Request]:
        """The class of requests to build."""
        module, _, name = cls.checked_by.partition(":")
        kind: type[Request] = getattr(importlib.import_module(module), name) if module else cls
        return kind

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """The fields, in order."""
        return _settings(cls)  # type: ignore[arg-type]  # a class is hashable

    def to_json(self) -> dict[str, object]:
        """The verb, and each field that differs from its default, as plain JSON: equal requests have equal JSON.

        Secrets are left out. Raises RooftopError naming a field that is wrong.
        """
        data: dict[str, object] = {"verb": self.verb}
        for setting in self.settings():
            value, default = getattr(self, setting.name), setting.default
            if value in (None, {}) or setting.word.secret or (default is not MISSING and value == default):
                continue
            written = setting.plain(value)
            if default in (MISSING, None) or written != setting.plain(default):
                data[setting.name] = written
        return data

    def command(self) -> tuple[str, ...]:
        """The words of the command line that asks the same. Raises NotInWords for an object, which has no text."""
        data = self.to_json()
        typed = [setting for setting in self.settings() if setting.name in data and setting.word.typed]
        arguments = [setting.words(data[setting.name]) for setting in typed if setting.is_argument]
        options = [setting.words(data[setting.name]) for setting in typed if not setting.is_argument]
        script = [words for words in arguments if words[:1] == ["--"]]
        named = [words for words in arguments if words[:1] != ["--"]]
        return ("rooftop", *self.verb.split(), *(word for words in (*named, *options, *script) for word in words))

    def in_answer(self) -> dict[str, object]:
        """The request as answers carry it, under its name; nothing if it has an object of this process."""
        try:
            return {"request": self.to_json()}
        except NotInJson:
            return {}

    @classmethod
    def from_json(cls, data: Mapping[str, object], **changes: object) -> Self:
        """The request in ``data``, or in the answer ``data``, with ``changes``.

        Raises RooftopError for a request of another verb, a field that is unknown, and one that is missing.
        """
        written = data.get("request", data)
        if not isinstance(written, Mapping):
            raise RooftopError("request", written, "an object")
        verb = written.get("verb", cls.verb)
        if verb != cls.verb:
            raise RooftopError("request", f"a request for {verb}", f"one for {cls.verb}")
        settings = {setting.name: setting for setting in cls.settings()}
        values = dict[str, object]()
        for name, value in written.items():
            if name != "verb" and name not in settings:
                raise unknown("request", name, settings)
            if name != "verb" and name not in changes and value is not None:
                values[name] = settings[name].of_json(value)
        values |= changes
        for name, setting in settings.items():
            if setting.is_required(values) and name not in values:
                raise RooftopError(setting.option, None, setting.about)
        return cls(**values)

    @classmethod
    def read(cls, path: Path | str, **changes: object) -> Self:
        """The request in a file, or in an answer's, with ``changes``. Raises RooftopError."""
        accepted = f"a request for {cls.verb}, or an answer that has one (JSON)"
        return cls.from_json(read_json_object(Path(path), field="request", accepted=accepted), **changes)

    def write(self, path: Path | str) -> None:
        """Write the request. Raises RooftopError if the path cannot be written."""
        write_json(Path(path), self.to_json())

    def changed(self) -> dict[str, object]:
        """The fields that differ from their defaults."""
        return {
            setting.name: getattr(self, setting.name)
            for setting in self.settings()
            if setting.default is MISSING or getattr(self, setting.name) != setting.default
        }


def _listed(value: Any) -> str:
    """The text of a value; entries of a list are separated by commas."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_listed, value)) if isinstance(value, list) else str(value)


def setting(default: Any = MISSING, **words: Any) -> Any:
    """A field whose word differs from the vocabulary's, by attributes of ``Word``."""
    return field(default=default, metadata=words, repr=not words.get("secret", False))


@cache
def _settings(kind: type[Request]) -> tuple[Setting, ...]:
    docs = _docs(kind)
    words = {member.name: WORDS.get(member.name, Word()).with_changes(member.metadata) for member in fields(kind)}
    return tuple(
        Setting(
            name=member.name,
            word=words[member.name],
            default=member.default,
            about=docs.get(member.name, ""),
            is_argument=not member.kw_only if (is_argument := words[member.name].argument) is None else is_argument,
        )
        for member in fields(kind)
    )


def _docs(kind: type) -> dict[str, str]:
    """Docstrings below the fields of a class and of its bases, by name."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        source = getattr(sys.modules.get(base.__module__), "__file__", None)
        if not issubclass(base, Request) or source is None:
            continue
        for node in _classes(source).get(base.__name__, ()):
            docs[node[0]] = node[1]
    return docs


@cache
def _classes(source: str) -> dict[str, list[tuple[str, str]]]:
    """Fields and their docstrings by class of a source file."""
    classes = {}
    try:
        text = Path(source).read_text(encoding="utf-8")
    except OSError:
        # A package without its sources has no texts of help.
        return {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = [
                (first.target.id, re.sub(r"\s+", " ", second.value.value).strip())
                for first, second in zip(node.body, node.body[1:], strict=False)
                if isinstance(first, ast.AnnAssign)
                and isinstance(first.target, ast.Name)
                and isinstance(second, ast.Expr)
                and isinstance(second.value, ast.Constant)
                and isinstance(second.value.value, str)
            ]
    return classes
