"""From OpenAI's requests to prompts and sampling, and from pieces of answers to OpenAI's answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import msgspec
from msgspec import UNSET, UnsetType

from rooftop.core.errors import RooftopError
from rooftop.serve.api.choices import AnswerPiece, Logprob
from rooftop.serve.api.compiling import Grammar
from rooftop.serve.api.grammars import Matcher
from rooftop.serve.api.openapi import read_body
from rooftop.serve.api.schemas import (
    MOST_SEQUENCES,
    ONLY,
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Conversation,
    Delta,
    ErrorAnswer,
    ErrorDetail,
    FinishReason,
    FunctionCall,
    FunctionPart,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
    TopLogprob,
    Usage,
)
from rooftop.serve.api.texts import Texts, TooLong
from rooftop.serve.api.tools import Calling, CallPart, calling
from rooftop.serve.engine.requests import Sampling

#: Bytes of the longest answer, and of one for a token and for each of its log-probabilities.
MOST_ANSWER_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 128 * 2**20, 64, 96
AnyRequest: TypeAlias = CompletionRequest | ChatRequest
#: Fields of requests that have the same name in ``Sampling``.
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """Token ids and sampling of each sequence, the choices of a prompt in a row. ``echo``: texts that begin answers.

    ``calling``: how answers call tools, if they may. ``grammar``: what answers have to match, until ``constrained``.
    ``answer_bytes``: an estimate of the longest answer.
    """

    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    echo: tuple[str, ...]
    calling: Calling | None = None
    grammar: Grammar | None = None
    answer_bytes: int = 0

    def constrained(self, matcher: Matcher) -> PreparedRequest:
        """The same with a copy of ``matcher``, which is at the beginning of the grammar, for each sequence."""
        samplings = tuple(replace(sampling, constraint=matcher.copy()) for sampling in self.samplings)
        return replace(self, samplings=samplings, grammar=None)


def read_request(body: bytes, *, chat: bool) -> AnyRequest:
    """The request in ``body``. Raises RooftopError naming the field that is wrong."""
    request = read_body(body, ChatRequest) if chat else read_body(body, CompletionRequest)
    if request.stream_options is not None and not request.stream:
        raise RooftopError("stream_options", "stream_options without stream", "this with stream only")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise RooftopError("top_logprobs", request.top_logprobs, "this with logprobs only")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise RooftopError("echo", True, "this without logprobs: those of prompts are not computed")
    only = {**ONLY, "best_of": request.choices} | ({"echo": False} if isinstance(request, ChatRequest) else {})
    for name, value in only.items():
        sent = getattr(request, name, None)
        if sent is not None and sent != value:
            raise RooftopError(name, sent, msgspec.json.encode(value).decode())
    return request


def _form(request: AnyRequest) -> tuple[ResponseFormat | None, str | None, str]:
    """The format of the answer and its regular expression, and the field that one of them is from.

    Raises RooftopError if several fields ask for a form.
    """
    outputs = request.structured_outputs or StructuredOutputs()
    schemas = {"guided_json": request.guided_json, "structured_outputs.json": outputs.json}
    regexes = {"guided_regex": request.guided_regex, "structured_outputs.regex": outputs.regex}
    plain = isinstance(request.response_format, TextFormat | None)
    asked = {"response_format": None if plain else "", **schemas, **regexes}
    fields = [name for name, value in asked.items() if value is not None]
    if len(fields) > 1:
        value = asked[fields[1]]
        raise RooftopError(fields[1], value[:60] if isinstance(value, str) else value, f"this without {fields[0]}")
    field = fields[0] if fields else "response_format"
    schema = schemas.get(field)
    if schema is not None:
        return JsonSchemaFormat(json_schema=NamedSchema(schema=schema)), None, field
    if not plain:
        field = "response_format.json_schema.schema"
    return request.response_format, regexes.get(field), field


def prepare(request: AnyRequest, body: bytes, texts: Texts, max_model_len: int) -> PreparedRequest:
    """Tokens and sampling of each sequence of the request in ``body``. Takes milliseconds for long texts.

    Raises RooftopError if the model has no room for the request, or if its grammar is too long or too deep.
    """
    if isinstance(request, ChatRequest):
        prompt_field, echoes = "messages", False
        with_tools = bool(request.tools) and request.tool_choice != "none"
        tool_calls = calling(request, texts.template_text(with_tools=with_tools))
        # The template gets all fields of the messages, whatever their names.
        sent = msgspec.json.Decoder(Conversation, float_hook=float).decode(body)
        tools = sent.tools if with_tools else None
        variables = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
        variables |= sent.chat_template_kwargs or {}
        prompts = [texts.chat(sent.messages, tools, variables, longest=max_model_len - 1)]
    else:
        prompt_field, echoes, tool_calls = "prompt", bool(request.echo), None
        prompts = _prompts(request, texts, max_model_len - 1)
    for ids in prompts:
        if not ids:
            raise RooftopError(prompt_field, "no tokens", f"1 to {max_model_len - 1} tokens")
        if len(ids) >= max_model_len:
            raise TooLong(prompt_field, f"{len(ids)} tokens", f"1 to {max_model_len - 1} tokens")
        if max(ids) >= texts.vocab:
            raise RooftopError(prompt_field, max(ids), f"token ids below {texts.vocab}")
    grammar = texts.grammar(*_form(request), calls=None if tool_calls is None else tool_calls.schema)
    base = Sampling(
        **{name: value for name in _SAMPLING if (value := getattr(request, name)) is not None},
        stop_tokens=frozenset(request.stop_token_ids or ()).union(() if request.ignore_eos else texts.ends),
        logprobs=request.alternatives,
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
    )
    field, limit = request.token_limit
    most = max(limit or max_model_len - len(ids) for ids in prompts)
    size = len(prompts) * request.choices * most * _token_bytes(request)
    if size > MOST_ANSWER_BYTES:
        more = "" if request.alternatives is None else f", each with {1 + request.alternatives} log-probabilities"
        fits = MOST_ANSWER_BYTES // _token_bytes(request)
        accepted = f"at most {fits:,} tokens in all choices (n): an answer has at most {MOST_ANSWER_BYTES // 2**20} MiB"
        raise RooftopError(field, f"{len(prompts) * request.choices} x {most:,} tokens{more}", accepted)
    samplings = []
    for ids in prompts:
        room = max_model_len - len(ids)
        if limit is not None and limit > room:
            raise TooLong(
                field, limit, f"at most {room}: {prompt_field} of {len(ids)} tokens leave so many of {max_model_len}"
            )
        for choice in range(request.choices):
            samplings.append(
                replace(
                    base,
                    max_tokens=limit or room,
                    # Choices differ, and each is reproducible.
                    seed=None if base.seed is None else base.seed + choice,
                )
            )
    echo = [texts.vocabulary.decode(ids) if echoes else "" for ids in prompts]
    return PreparedRequest(
        prompts=tuple(ids for ids in prompts for _ in range(request.choices)),
        samplings=tuple(samplings),
        echo=tuple(text for text in echo for _ in range(request.choices)),
        calling=tool_calls,
        grammar=grammar,
        answer_bytes=size,
    )


def _token_bytes(request: AnyRequest) -> int:
    """Bytes of the answer for a token: most tokens and log-probabilities take fewer."""
    return _TOKEN_BYTES + (0 if request.alternatives is None else _LOGPROB_BYTES * (1 + request.alternatives))


def _prompts(request: CompletionRequest, texts: Texts, longest: int) -> list[tuple[int, ...]]:
    if isinstance(request.prompt, str):
        return [texts.prompt(request.prompt, longest=longest)]
    # All items are of one kind.
    if isinstance(request.prompt[0], int):
        return [tuple(cast("list[int]", request.prompt))]
    prompts = cast("list[str | list[int]]", request.prompt)
    if len(prompts) * request.choices > MOST_SEQUENCES:
        accepted = f"at most {MOST_SEQUENCES} sequences in all; here are {len(prompts)} prompts"
        raise RooftopError("n", request.n, accepted)
    return [texts.prompt(item, longest=longest) if isinstance(item, str) else tuple(item) for item in prompts]


@dataclass(frozen=True, kw_only=True)
class Form:
    """Format of one answer: the fields that begin it, and each event if it is a stream."""

    id: str
    created: int
    model: str
    chat: bool

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> list[bytes | bytearray]:
        """The answer as JSON, in parts."""
        empty = (
            ChatCompletion(id=self.id, created=self.created, model=self.model, choices=[], usage=usage)
            if self.chat
            else self._completion([], usage)
        )
        head, key, tail = msgspec.json.encode(empty).partition(b'"choices":[')
        parts: list[bytes | bytearray] = [head + key]
        for index, choice in enumerate(choices):
            parts += [b"," if index else b"", *choice.parts(index)]
        return [*parts, tail]

    def part(self, index: int, piece: AnswerPiece, *, usage: bool) -> Completion | ChatCompletionChunk:
        """An event with a piece of choice ``index``; with ``usage``, the stream ends with it and says null before."""
        later = None if usage else UNSET
        if not self.chat:
            return self._completion([_completion_choice(index, piece)], later)
        choice = ChunkChoice(
            index=index, delta=_delta(piece), logprobs=_chat_logprobs(piece.logprobs), finish_reason=piece.finish
        )
        return self._chunk([choice], later)

    def usage(self, usage: Usage) -> Completion | ChatCompletionChunk:
        """The last event of a stream that ends with its usage."""
        return self._chunk([], usage) if self.chat else self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)


class WholeChoice:
    """One choice of a whole answer, as its pieces come. What may be long is JSON already."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._text = bytearray()
        self._calls = list[CallPart]()
        #: Log-probabilities by the name of their list; None: not requested.
        self._columns: dict[str, bytearray] | None = None
        self._finish: FinishReason | None = None

    def add(self, piece: AnswerPiece) -> int:
        """Add the next piece; return the bytes that it takes."""
        text = piece.text.encode()
        self._text += text
        self._calls += piece.calls
        self._finish = piece.finish or self._finish
        logprobs = _chat_logprobs(piece.logprobs) if self._chat else _logprobs(piece.logprobs)
        if logprobs is None:
            return len(text)
        if self._columns is None:
            self._columns = {name: bytearray() for name in logprobs.__struct_fields__}
        size = len(text)
        for name, column in self._columns.items():
            items = msgspec.json.encode(getattr(logprobs, name))[1:-1]
            column += b"," + items if column and items else items
            size += len(items)
        return size

    def parts(self, index: int) -> Iterator[bytes | bytearray]:
        """The choice as JSON, in parts."""
        piece = AnswerPiece(
            text=self._text.decode(),
            calls=tuple(self._calls),
            logprobs=None if self._columns is None else (),
            finish=self._finish,
        )
        rest = msgspec.json.encode(_chat_choice(index, piece) if self._chat else _completion_choice(index, piece))
        for name, column in (self._columns or {}).items():
            # No string has these bytes: its quotes are escaped.
            before, key, rest = rest.partition(f'"{name}":['.encode())
            yield before + key
            yield column
        yield rest


def _chat_choice(index: int, piece: AnswerPiece) -> ChatChoice:
    return ChatChoice(
        index=index, message=_message(piece), logprobs=_chat_logprobs(piece.logprobs), finish_reason=piece.finish
    )


def _completion_choice(index: int, piece: AnswerPiece) -> CompletionChoice:
    assert piece.finish != "tool_calls"  # completions have no tools
    return CompletionChoice(
        index=index, text=piece.text, logprobs=_logprobs(piece.logprobs), finish_reason=piece.finish
    )


def _delta(piece: AnswerPiece) -> Delta:
    return Delta(
        role="assistant" if piece.first else UNSET,
        content=piece.text if piece.text or (piece.first and not piece.calls) else UNSET,
        tool_calls=[_part(call) for call in piece.calls] or UNSET,
    )


def _message(piece: AnswerPiece) -> AssistantMessage:
    calls = list[ToolCall]()
    for part in piece.calls:
        if part.name is not None:
            calls.append(ToolCall(id=part.id, function=FunctionCall(name=part.name, arguments="")))
        calls[-1].function.arguments += part.arguments
    return AssistantMessage(content=piece.text or (None if calls else ""), tool_calls=calls or UNSET)


def _part(part: CallPart) -> ToolCallPart:
    """A piece of a call, in a stream."""
    if part.name is None or part.id is None:
        return ToolCallPart(index=part.index, function=FunctionPart(arguments=part.arguments))
    function = FunctionPart(name=part.name, arguments=part.arguments)
    return ToolCallPart(index=part.index, id=part.id, type="function", function=function)


def _chat_logprobs(entries: Sequence[Logprob] | None) -> ChatLogprobs | None:
    if entries is None:
        return None
    content = [
        TokenLogprob(
            token=entry.text,
            logprob=entry.logprob,
            bytes=entry.bytes,
            top_logprobs=[TopLogprob(token=item.text, logprob=item.logprob, bytes=item.bytes) for item in entry.top],
        )
        for entry in entries
    ]
    return ChatLogprobs(content=content)


def _logprobs(entries: Sequence[Logprob] | None) -> CompletionLogprobs | None:
    if entries is None:
        return None
    return CompletionLogprobs(
        tokens=[entry.text for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[{item.text: item.logprob for item in entry.top} for entry in entries],
        text_offset=[entry.offset for entry in entries],
    )


def error(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> ErrorAnswer:
    """OpenAI's error."""
    return ErrorAnswer(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def event(value: msgspec.Struct) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
