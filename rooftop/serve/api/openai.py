"""OpenAI's requests as values, and answers in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.serve.api.choices import AnswerPiece, Logprob
from rooftop.serve.api.published import read_body
from rooftop.serve.api.texts import Texts
from rooftop.serve.api.tools import Calling, CallPart, calling
from rooftop.serve.engine.requests import Sampling

#: Sequences of one request at most: prompts times n.
MOST_SEQUENCES = 128
#: What ``Sampling`` takes as it is named in requests.
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip


class TooLong(RooftopError):
    """A prompt, or it and its answer, for which the model has no room: clients shorten it and ask again."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A request that has been read: its fields, those of both kinds in the same place.

    ``max_tokens`` None: as many as there is room for. ``logprobs`` None: none, N: and N alternatives to each token.
    """

    chat: bool
    model: str
    fields: Mapping[str, Any]
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """Token ids and sampling of each sequence, the choices of a prompt in a row; ``echo``: texts that come first.

    ``calling``: how answers call tools, if they may.
    """

    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    echo: tuple[str, ...]
    calling: Calling | None = None


def read_request(body: bytes, *, chat: bool) -> Wanted:
    """The request in ``body``. Raises RooftopError naming the field that is wrong."""
    fields = read_body(body, "ChatRequest" if chat else "CompletionRequest")
    stop, stream = fields.get("stop", ()), fields.get("stream", False)
    options = fields.get("stream_options")
    if options is not None and not stream:
        raise RooftopError("stream_options", options, "with stream only")
    logprobs: int | None = fields.get("logprobs")
    if chat:
        alternatives = fields.get("top_logprobs")
        if alternatives is not None and not logprobs:
            raise RooftopError("top_logprobs", alternatives, "with logprobs only")
        logprobs = (alternatives or 0) if logprobs else None
    elif logprobs is not None and fields.get("echo"):
        raise RooftopError("echo", True, "without logprobs: those of prompts are not computed")
    return Wanted(
        chat=chat,
        model=fields["model"],
        fields=fields,
        # OpenAI's default for texts; answers in a chat are as long as there is room.
        max_tokens=fields.get("max_completion_tokens", fields.get("max_tokens", None if chat else 16)),
        n=fields.get("n", 1),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=stream,
        include_usage=(options or {}).get("include_usage", False),
        logprobs=logprobs,
    )


def prepare(requested: Wanted, texts: Texts, longest: int) -> PreparedRequest:
    """Tokens, sampling and constraint of each sequence. Takes milliseconds for long texts.

    Raises RooftopError for what the model has no room for, or cannot be held to.
    """
    fields, how = requested.fields, None
    if requested.chat:
        tools = (fields.get("tools") or None) if fields.get("tool_choice") != "none" else None
        how = calling(fields, texts.template_text(with_tools=bool(tools)))
        prompts = [texts.chat(fields["messages"], tools, fields.get("chat_template_kwargs"))]
    else:
        prompts = _prompts(fields["prompt"], texts)
    where = "messages" if requested.chat else "prompt"
    if len(prompts) * requested.n > MOST_SEQUENCES:
        raise RooftopError(
            "n", requested.n, f"at most {MOST_SEQUENCES} sequences in all; here are {len(prompts)} prompts"
        )
    for ids in prompts:
        if not ids:
            raise RooftopError(where, "no tokens", f"1 to {longest - 1} tokens")
        if len(ids) >= longest:
            raise TooLong(where, f"{len(ids)} tokens", f"1 to {longest - 1} tokens")
        if max(ids) >= texts.vocab:
            raise RooftopError(where, max(ids), f"token ids below {texts.vocab}")
    schema = None if how is None else how.schema
    matcher = texts.matcher(fields.get("response_format"), fields.get("guided_regex"), schema)
    base = Sampling(
        **{name: fields[name] for name in _SAMPLING if name in fields},
        stop_tokens=frozenset(fields.get("stop_token_ids", ())).union(() if fields.get("ignore_eos") else texts.ends),
        logprobs=requested.logprobs,
        logit_bias={int(token): bias for token, bias in fields.get("logit_bias", {}).items()},
    )
    samplings = []
    for ids in prompts:
        room = longest - len(ids)
        if requested.max_tokens is not None and requested.max_tokens > room:
            name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
            accepted = f"at most {room}: {where} of {len(ids)} tokens leave so many of {longest}"
            raise TooLong(name, requested.max_tokens, accepted)
        for choice in range(requested.n):
            samplings.append(
                replace(
                    base,
                    max_tokens=requested.max_tokens or room,
                    # Choices differ, and each can be drawn again.
                    seed=None if base.seed is None else base.seed + choice,
                    constraint=None if matcher is None else matcher.copy(),
                )
            )
    echo = [texts.vocabulary.decode(ids) if fields.get("echo") else "" for ids in prompts]
    return PreparedRequest(
        prompts=tuple(ids for ids in prompts for _ in range(requested.n)),
        samplings=tuple(samplings),
        echo=tuple(text for text in echo for _ in range(requested.n)),
        calling=how,
    )


def _prompts(prompts: Any, texts: Texts) -> list[tuple[int, ...]]:
    if isinstance(prompts, str):
        return [texts.prompt(prompts)]
    if isinstance(prompts[0], int):
        return [tuple(prompts)]
    return [texts.prompt(item) if isinstance(item, str) else tuple(item) for item in prompts]


@dataclass(frozen=True, kw_only=True)
class Form:
    """Format of one answer: the fields that begin every part, and the way parts are written."""

    id: str
    created: int
    model: str
    chat: bool

    def whole(self, choices: Sequence[AnswerPiece], usage: Mapping[str, int]) -> dict[str, Any]:
        """The answer in one piece."""
        result = [self._choice(index, piece, streamed=False) for index, piece in enumerate(choices)]
        return self._head(streamed=False) | {"choices": result, "usage": dict(usage)}

    def part(self, index: int, piece: AnswerPiece, *, usage: bool) -> dict[str, Any]:
        """A piece of choice ``index`` in a stream; ``usage``: a stream that ends with one says null before."""
        head = self._head(streamed=True) | {"choices": [self._choice(index, piece, streamed=True)]}
        return head | ({"usage": None} if usage else {})

    def usage(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """The end of a stream that was asked for its usage."""
        return self._head(streamed=True) | {"choices": [], "usage": dict(usage)}

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, piece: AnswerPiece, *, streamed: bool) -> dict[str, Any]:
        if not self.chat:
            content: dict[str, Any] = {"text": piece.text}
        elif streamed:
            delta = {"role": "assistant"} if piece.first else {}
            delta |= {"content": piece.text} if piece.text or (piece.first and not piece.calls) else {}
            content = {"delta": delta | ({"tool_calls": [_part(call) for call in piece.calls]} if piece.calls else {})}
        else:
            calls = {"tool_calls": _whole_calls(piece.calls)} if piece.calls else {}
            said = piece.text or (None if calls else "")
            content = {"message": {"role": "assistant", "content": said, "refusal": None, **calls}}
        entries = None if piece.logprobs is None else (_chat_logprobs if self.chat else _logprobs)(piece.logprobs)
        return {"index": index} | content | {"logprobs": entries, "finish_reason": piece.finish}


def _part(part: CallPart) -> dict[str, Any]:
    """A piece of a call, in a stream."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _whole_calls(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    whole_calls = list[dict[str, Any]]()
    for part in parts:
        if part.name is not None:
            whole_calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        whole_calls[-1]["function"]["arguments"] += part.arguments
    return whole_calls


def _chat_logprobs(entries: Sequence[Logprob]) -> dict[str, Any]:
    def one(entry: Logprob) -> dict[str, Any]:
        return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.bytes)}

    return {"content": [one(entry) | {"top_logprobs": [one(item) for item in entry.top]} for entry in entries]}


def _logprobs(entries: Sequence[Logprob]) -> dict[str, Any]:
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{item.text: item.logprob for item in entry.top} for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
