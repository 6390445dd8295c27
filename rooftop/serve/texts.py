"""Between texts and token ids: what the API knows of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from rooftop.checkpoints.tokenizer import Tokenizer
from rooftop.errors import RooftopError
from rooftop.serve.chat import ChatTemplate
from rooftop.serve.constraint import Grammars, Matcher
from rooftop.serve.detokenise import Vocabulary


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
        text = self.template.render([for_template(message) for message in messages], tools=tools, more=more)
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def template_text(self, *, with_tools: bool) -> str | None:
        """The chat template that is used, None if there is none."""
        return None if self.template is None else self.template.text(with_tools=with_tools)

    def matcher(
        self,
        response_format: Mapping[str, Any] | None,
        regex: str | None,
        calls: Mapping[str, Any] | None = None,
    ) -> Matcher | None:
        """What an answer is held to, if anything; ``calls``: the schema of a call. Raises RooftopError."""
        if calls is not None:
            return self._grammars.json(calls, "tools")
        kind = "text" if response_format is None else response_format["type"]
        if regex is not None:
            if kind != "text":
                raise RooftopError("guided_regex", regex[:60], f"nothing beside response_format {kind}")
            return self._grammars.regex(regex)
        if kind == "text" or response_format is None:
            return None
        return self._grammars.json(
            {"type": "object"} if kind == "json_object" else response_format["json_schema"]["schema"]
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the ids spell."""
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
    found = dict(message)
    if isinstance(found.get("content"), list):
        found["content"] = "\n".join(part["text"] for part in found["content"])
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
            for call in found["tool_calls"]
        ]
    return found


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
