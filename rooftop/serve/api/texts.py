"""Texts of a model as token ids: prompts, and conversations by chat templates. Both are bounded before they cost."""

from __future__ import annotations

import ctypes
import json
import threading
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
from rooftop.core.files import read_text
from rooftop.serve.api.choices import Vocabulary
from rooftop.serve.api.compiling import Grammar
from rooftop.serve.api.grammars import Grammars, json_grammar, regex_grammar
from rooftop.serve.api.schemas import JsonObjectFormat, ResponseFormat, TextFormat

#: Characters of a piece of a long text, for each token that a prompt may have.
_PIECE = 4


class TooLong(RooftopError):
    """A prompt that is too long for the model, alone or with its answer: clients shorten it and try again."""


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

    def prompt(self, text: str, *, longest: int) -> tuple[int, ...]:
        """The ids of a text to continue: the tokenizer's first tokens, then the text with its special tokens.

        Raises TooLong, before it is tokenised, for a text that has more bytes than ``longest`` tokens can spell.
        """
        return self._encoded(text, "prompt", longest, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        more: Mapping[str, Any] | None,
        *,
        longest: int,
    ) -> tuple[int, ...]:
        """The ids of a conversation that the assistant continues. Raises TooLong as ``prompt``, and RooftopError."""
        if self.template is None:
            raise RooftopError("messages", "a chat", "a model with a chat template; without one, /v1/completions")
        text = self.template.render(
            [for_template(message) for message in messages],
            tools=[{**tool, "function": _without_nulls(tool["function"])} for tool in tools or ()],
            more=more,
        )
        return self._encoded(text, "messages", longest, add_special_tokens=False)

    def most_bytes(self, tokens: int) -> int:
        """The most bytes of a text of ``tokens`` tokens: so many of the longest token."""
        return tokens * self.vocabulary.longest_bytes

    def _encoded(self, text: str, field: str, longest: int, *, add_special_tokens: bool) -> tuple[int, ...]:
        size, most = len(text.encode(errors="surrogatepass")), self.most_bytes(longest)
        if size > most:
            raise TooLong(field, f"{size:,} bytes", f"1 to {longest:,} tokens, which have at most {most:,} bytes")
        piece = _PIECE * longest
        if len(text) > piece:
            # A token takes about 400 bytes while a text is tokenised: a long text of short tokens is counted in pieces
            # first. Cutting a text can add tokens, but not double them.
            count = 0
            for pieces, start in enumerate(range(0, len(text), piece), 1):
                count += len(self._ids(text[start : start + piece], add_special_tokens=False))
                if count > 2 * (longest + pieces):
                    raise TooLong(field, f"more than {longest:,} tokens", f"1 to {longest:,} tokens")
        return tuple(self._ids(text, add_special_tokens=add_special_tokens))

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # ``encode`` keeps the interpreter's lock, and with it every other thread; batches release it.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except Exception:
            raise
        except BaseException as panic:
            if type(panic).__name__ != "PanicException":
                raise
            # A panic of the package is no Exception, and would pass all handlers.
            raise RuntimeError(f"the tokenizer failed: {panic}") from None
        return list(encoding.ids)

    def template_text(self, *, with_tools: bool) -> str | None:
        """The chat template of a conversation with tools or without; None if there is none."""
        return None if self.template is None else self.template.text(with_tools=with_tools)

    def grammar(
        self,
        response_format: ResponseFormat | None,
        regex: str | None,
        field: str = "response_format.json_schema.schema",
        *,
        calls: Mapping[str, Any] | None = None,
    ) -> Grammar | None:
        """Return the grammar of a constrained answer, or None; ``calls``: the schema of a call.

        Raises RooftopError, which names the ``field`` that the schema or the expression is from.
        """
        if calls is not None:
            return json_grammar(calls, "tools")
        if isinstance(response_format, TextFormat | None):
            return None if regex is None else regex_grammar(regex, field)
        if isinstance(response_format, JsonObjectFormat):
            return json_grammar({"type": "object"}, "response_format")
        return json_grammar(response_format.json_schema.schema, field)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes of each id."""
        return Vocabulary(self.tokenizer.definition)

    @cached_property
    def grammars(self) -> Grammars:
        """Matchers of grammars. Raises RooftopError if the tokenizer has none."""
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
#: Most seconds for a template: those of published models take milliseconds for thousands of messages.
TEMPLATE_S = 2.0
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
        most_s: float = TEMPLATE_S,
    ) -> str:
        """The prompt, special tokens spelled out. ``more`` are variables of the template, and may be any of its own.

        Raises RooftopError with the message of the template (``raise_exception``), for errors in it, and if it takes
        longer than ``most_s``.
        """
        name = self._name(with_tools=bool(tools))
        if name not in self.templates:
            raise RooftopError("messages", "a chat", f"a default chat template; there are {', '.join(self.templates)}")
        # Nulls are removed: templates print them, or test if the key is present.
        cleaned = [_without_nulls(message) for message in messages]
        variables = {**self.tokens, "add_generation_prompt": add_generation_prompt, **(more or {})}
        variables |= {"messages": cleaned, "tools": tools or None, "documents": None}
        template = _environment().from_string(self.templates[name])
        try:
            return _within(most_s, lambda: template.render(variables))
        except _TooSlow:
            raise RooftopError(
                "messages", f"{len(cleaned)} of them", f"what the chat template renders within {most_s:g} s"
            ) from None
        except Exception as error:  # a template may fail in any way
            reason = " ".join(str(error).split())[:200]
            raise RooftopError(
                "messages", f"{len(cleaned)} of them", f"what the chat template takes ({reason})"
            ) from None


class _TooSlow(BaseException):
    """A call that takes too long. No handler of errors catches it on its way."""


def _within(seconds: float, call: Callable[[], str]) -> str:
    """Return what ``call`` returns, or raise _TooSlow in it after ``seconds``: at its next instruction of Python."""
    thread, lock, done = threading.get_ident(), threading.Lock(), False

    def expire() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooSlow))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        return call()
    finally:
        with lock:
            done = True
        timer.cancel()
        # An exception that was set just before is raised here, at a jump back, and not in the caller's code.
        for _ in range(100):
            pass


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
        return read_text(path)
    except (OSError, ValueError) as error:
        raise RooftopError("chat template", str(path), f"a file in UTF-8 that can be read ({error})") from None


def _token(named: Any) -> str:
    return str(named["content"] if isinstance(named, dict) else named)
