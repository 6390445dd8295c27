"""Chat templates: messages to a prompt, with the semantics that Hugging Face gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rooftop.errors import RooftopError

_FILE, _MORE, _CONFIG = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
#: Special tokens that a template may name.
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; in a prompt it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The templates of a checkpoint by name, and the special tokens that they can name.

    Templates are Jinja in a sandbox: they read what they are given, and reach nothing else.
    """

    templates: Mapping[str, str]
    tokens: Mapping[str, str]

    def __post_init__(self) -> None:
        for name, text in self.templates.items():
            try:
                _environment().from_string(text)
            except jinja2.TemplateError as error:
                raise RooftopError(f"chat template {name}", text[:40], f"a template of Jinja ({error})") from None

    @classmethod
    def load(cls, folder: Path, file: Path | None = None) -> ChatTemplate | None:
        """The templates in ``folder``, or the one in ``file``; None if there is none. Raises RooftopError."""
        settings = _settings(folder / _CONFIG)
        tokens = {name: _token(settings[name]) for name in _TOKENS if settings.get(name) is not None}
        templates = dict[str, str]()
        configured = settings.get("chat_template")
        if isinstance(configured, str):
            templates["default"] = configured
        elif isinstance(configured, list):
            templates |= {str(each["name"]): str(each["template"]) for each in configured}
        for path in (folder / _FILE, *sorted((folder / _MORE).glob("*.jinja"))):
            if path.exists():
                templates["default" if path.name == _FILE else path.stem] = _read(path)
        if file is not None:
            templates = {"default": _read(file)}
        return cls(templates=templates, tokens=tokens) if templates else None

    def text(self, *, with_tools: bool) -> str | None:
        """The template of a chat with tools, or of one without."""
        return self.templates.get(self._name(with_tools=with_tools))

    def _name(self, *, with_tools: bool) -> str:
        return "tool_use" if with_tools and "tool_use" in self.templates else "default"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, special tokens spelled out. ``more`` are variables for the template.

        Raises RooftopError with what the template says is wrong (``raise_exception``), or for its own mistakes.
        """
        name = self._name(with_tools=bool(tools))
        if name not in self.templates:
            raise RooftopError("messages", "a chat", f"a default chat template; there are {', '.join(self.templates)}")
        # Keys without a value are left out: templates print them, or ask whether they are there.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {**self.tokens, **(more or {})}
        variables |= {"messages": given, "tools": tools or None, "documents": None}
        try:
            return (
                _environment()
                .from_string(self.templates[name])
                .render(**variables, add_generation_prompt=add_generation_prompt)
            )
        except Exception as error:  # a template computes what it likes, and may fail in every way
            reason = " ".join(str(error).split())[:200]
            raise RooftopError(
                "messages", f"{len(given)} of them", f"what the chat template takes ({reason})"
            ) from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    more: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(more)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        settings = json.loads(_read(path))
    except ValueError as error:
        raise RooftopError("chat template", str(path), f"JSON ({error})") from None
    if not isinstance(settings, dict):
        raise RooftopError("chat template", str(path), "a JSON object")
    return settings


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RooftopError("chat template", str(path), f"a file in UTF-8 that can be read ({error})") from None


def _token(named: Any) -> str:
    return str(named["content"] if isinstance(named, dict) else named)
