"""Between texts and token ids: what the API knows of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rooftop.checkpoints.tokenizer import Tokenizer
from rooftop.core.errors import RooftopError
from rooftop.serve.api.choices import Vocabulary
from rooftop.serve.api.constraint import Grammars, Matcher
from rooftop.serve.api.schemas import JsonObjectFormat, JsonSchemaFormat, TextFormat


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts of one model: its ``tokenizer``, chat ``template`` (None if it has none) and ``vocab``, V.

    ``ends`` are the tokens that end its texts.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab: int
    ends: tuple[int, ...]

    @classmethod
    def load(cls, folder: Path, *, vocab: int, ends: tuple[int, ...], template: Path | None = None) -> Texts:
        """From a checkpoint's folder; ``template``: a file with another chat template. Raises RooftopError.

        The token that ends a text by the tokenizer's settings (of a chat, often a turn) is one of the ``ends`` too.
        """
        tokenizer = Tokenizer.load(folder)
        if tokenizer.vocab > vocab:
            raise RooftopError("tokenizer", f"{tokenizer.vocab} tokens", f"at most the model's {vocab}")
        every = {*ends} | ({tokenizer.eos} if tokenizer.eos is not None else set())
        return cls(
            tokenizer=tokenizer, template=ChatTemplate.load(folder, template), vocab=vocab, ends=tuple(sorted(every))
        )

    def prompt(self, text: str) -> tuple[int, ...]:
        """The ids of a text to go on with: what the tokenizer begins a text with, special tokens as spelled out."""
        return tuple(self._backend.encode(text, add_special_tokens=True).ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        more: Mapping[str, Any] | None,
    ) -> tuple[int, ...]:
        """The ids of a conversation that the assistant goes on with. Raises RooftopError."""
        if self.template is None:
            raise RooftopError("messages", "a chat", "a model with a chat template; without one, /v1/completions")
        text = self.template.render(
            [for_template(message) for message in messages],
            tools=[{**tool, "function": _without_nulls(tool["function"])} for tool in tools or ()],
            more=more,
        )
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def template_text(self, *, with_tools: bool) -> str | None:
        """The chat template that is used, None if there is none."""
        return None if self.template is None else self.template.text(with_tools=with_tools)

    def matcher(
        self,
        response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
        regex: str | None,
        calls: Mapping[str, Any] | None = None,
    ) -> Matcher | None:
        """Return the matcher of a constrained answer, or None; ``calls``: the schema of a call. Raises RooftopError."""
        if calls is not None:
            return self._grammars.json(calls, "tools")
        if isinstance(response_format, TextFormat | None):
            return None if regex is None else self._grammars.regex(regex)
        if regex is not None:
            raise RooftopError("guided_regex", regex[:60], "this without a response_format, or with that of type text")
        if isinstance(response_format, JsonObjectFormat):
            return self._grammars.json({"type": "object"})
        return self._grammars.json(response_format.json_schema.schema)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes of each id."""
        return Vocabulary(self.tokenizer.definition)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(definition=self.tokenizer.definition, vocab=self.vocab, ends=self.ends)

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """Unlike ``Tokenizer``, which reads documents, it reads special tokens that a prompt spells out as such."""
        backend = tokenizers.Tokenizer.from_str(self.tokenizer.definition)
        backend.no_padding()
        backend.no_truncation()
        return backend


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content as one text, arguments of tool calls as objects."""
    for_template = dict(message)
    if isinstance(for_template.get("content"), list):
        for_template["content"] = "\n".join(part["text"] for part in for_template["content"])
    if for_template.get("tool_calls"):
        for_template["tool_calls"] = [
            {
                **_without_nulls(call),
                "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])},
            }
            for call in for_template["tool_calls"]
        ]
    return for_template


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class _Arguments(dict[str, Any]):
    """Arguments of a call: an object, and their JSON where a template adds them to a string, as DeepSeek's do."""

    def __init__(self, text: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text


def _arguments(text: str) -> Any:
    try:
        values = json.loads(text)
    except ValueError:
        return text
    return _Arguments(text, values) if isinstance(values, dict) else values


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
            templates |= {str(item["name"]): str(item["template"]) for item in configured}
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
        cleaned = [_without_nulls(message) for message in messages]
        variables = {**self.tokens, **(more or {})}
        variables |= {"messages": cleaned, "tools": tools or None, "documents": None}
        try:
            return (
                _environment()
                .from_string(self.templates[name])
                .render(**variables, add_generation_prompt=add_generation_prompt)
            )
        except Exception as error:  # a template computes what it likes, and may fail in every way
            reason = " ".join(str(error).split())[:200]
            raise RooftopError(
                "messages", f"{len(cleaned)} of them", f"what the chat template takes ({reason})"
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
