"""Texts of a model as token ids: prompts, chat templates, and constraints on answers (by llguidance)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import llguidance
import numpy as np
import numpy.typing as npt
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rooftop.checkpoints.tokenizer import Tokenizer
from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.serve.api.choices import Vocabulary
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
        """The ids of a text to continue: the tokenizer's first tokens, then the text with its special tokens."""
        return tuple(self._backend.encode(text, add_special_tokens=True).ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        more: Mapping[str, Any] | None,
    ) -> tuple[int, ...]:
        """The ids of a conversation that the assistant continues. Raises RooftopError."""
        if self.template is None:
            raise RooftopError("messages", "a chat", "a model with a chat template; without one, /v1/completions")
        text = self.template.render(
            [for_template(message) for message in messages],
            tools=[{**tool, "function": _without_nulls(tool["function"])} for tool in tools or ()],
            more=more,
        )
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def template_text(self, *, with_tools: bool) -> str | None:
        """The chat template of a conversation with tools or without; None if there is none."""
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
        """A tokenizer that reads special tokens in prompts; ``Tokenizer``, which reads documents, does not."""
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
    """Arguments of a call: an object that is JSON text where a template adds it to a string, as DeepSeek's do."""

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
    """``{% generation %}`` marks assistant messages for training; a prompt has only its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The templates of a checkpoint by name, and the special tokens that they can name.

    Templates are Jinja in a sandbox: they can read their variables and nothing else.
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

        Raises RooftopError with the message of the template (``raise_exception``), or for errors in it.
        """
        name = self._name(with_tools=bool(tools))
        if name not in self.templates:
            raise RooftopError("messages", "a chat", f"a default chat template; there are {', '.join(self.templates)}")
        # Nulls are removed: templates print them, or test if the key is present.
        cleaned = [_without_nulls(message) for message in messages]
        variables = {**self.tokens, **(more or {})}
        variables |= {"messages": cleaned, "tools": tools or None, "documents": None}
        try:
            return (
                _environment()
                .from_string(self.templates[name])
                .render(**variables, add_generation_prompt=add_generation_prompt)
            )
        except Exception as error:  # a template may fail in any way
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
    """Plain JSON: Jinja's own filter escapes characters for HTML."""
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


#: JSON as Python's json.dumps writes it: with free white space, small models never stop writing blanks.
_COMPACT: Any = {"whitespace_flexible": False}


class Matcher:
    """Position of one request's answer in its grammar. One thread calls its methods.

    ``failed``, which other threads may read, is why the answer left the grammar, for example because that grew too
    complex.
    """

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        self.failed: str | None = None
        self._matcher = matcher
        self._mask = np.zeros(words, np.uint32)

    def mask(self) -> npt.NDArray[np.uint32]:
        """The tokens allowed next, [ceil(V/32)]: token t is bit t % 32 of word t // 32. Valid until the next call."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return self._mask

    def accept(self, token: int) -> None:
        """Advance by ``token``. If that fails (see ``failed``), only the end is allowed from then on."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self.failed = _line(self._matcher.get_error())

    def copy(self) -> Matcher:
        """A matcher at the same position."""
        return Matcher(self._matcher.deep_copy(), len(self._mask))


@dataclass(frozen=True, kw_only=True)
class Grammars:
    """Makes matchers for a tokenizer: ``definition`` is a tokenizer.json, ``vocab`` the V of the model's logits.

    ``ends`` are the tokens that end an answer; they are allowed where the grammar may end, and only there.
    """

    definition: str
    vocab: int
    ends: tuple[int, ...]
    _tokenizer: llguidance.LLTokenizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ends:
            raise RooftopError("response_format", "a constraint", "a model that has a token to end its text")
        try:
            tokenizer = llguidance.LLTokenizer(self.definition, n_vocab=self.vocab, eos_token=list(self.ends))
        except Exception as error:  # the package raises nothing narrower
            raise RooftopError(
                "response_format", "a constraint", f"a tokenizer that llguidance reads ({error})"
            ) from None
        object.__setattr__(self, "_tokenizer", tokenizer)

    def json(self, schema: Mapping[str, Any], field: str = "response_format.json_schema.schema") -> Matcher:
        """The matcher of a JSON Schema, the value of ``field``. Raises RooftopError if it cannot be enforced."""
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPACT)
        except ValueError as error:
            raise RooftopError(field, "a schema", _line(str(error))) from None
        return self._matcher(grammar, field)

    def regex(self, pattern: str) -> Matcher:
        """The matcher of a regular expression for the whole answer. Raises RooftopError if it is invalid."""
        return self._matcher(llguidance.LLMatcher.grammar_from_regex(pattern), "guided_regex")

    def _matcher(self, grammar: str, field: str) -> Matcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RooftopError(field, "a constraint that cannot be enforced", _line(matcher.get_error()))
        return Matcher(matcher, ceil_div(self.vocab, 32))


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
