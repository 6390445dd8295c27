"""Requests and answers of OpenAI's API as they are sent. The published document is generated from these types.

The document describes a field by its line in the docstring of its class. A field that is None in a request was left out
or null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

#: Most sequences of one request: prompts times n.
MOST_SEQUENCES = 128

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Natural: TypeAlias = Annotated[int, Meta(ge=0)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenKey: TypeAlias = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]
Probability: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Alternatives: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
Object: TypeAlias = dict[str, Any]
Yes: TypeAlias = Annotated[bool, Meta(extra_json_schema={"const": True})]
No: TypeAlias = Annotated[bool, Meta(extra_json_schema={"const": False})]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
#: Kinds of prompts. msgspec reads one type of list in a union: their items together, and a check follows.
PROMPTS = (
    Text,
    Annotated[list[Text], Meta(min_length=1, max_length=MOST_SEQUENCES)],
    TokenIds,
    Annotated[list[TokenIds], Meta(min_length=1, max_length=MOST_SEQUENCES)],
)
Prompt: TypeAlias = Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. ``include_usage``: send one more event at the end, with the usage."""

    include_usage: bool | None = None


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON Schema and its name. Nothing reads ``strict``: the answer always matches the schema."""

    schema: Object
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    json_schema: NamedSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the whole answer. ``json``: a JSON Schema; ``regex``: a regular expression. One of the two."""

    json: Object | None = None
    regex: Text | None = None


#: Fields that other servers have, and the only value that is served. Clients send them with it.
ONLY: Mapping[str, object] = {
    "min_tokens": 0, "length_penalty": 1, "use_beam_search": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "add_generation_prompt": True,
}  # fmt: skip


class RequestOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of requests.

    Fields:
        model: The name that /v1/models lists. Default: that one.
        max_tokens: Most tokens to generate. Default: 16; in a chat, as many as there is room for.
        temperature: Divides the logits; 0 takes the likeliest token each time. Default: 1.
        top_p: Sample from the fewest tokens whose probabilities add up to this. Default: 1.
        n: Number of choices for each prompt. Default: 1.
        stream: Send server-sent events as tokens are generated.
        stream_options: Only with stream.
        stop: Strings that end the answer; it does not include them.
        presence_penalty: Subtracted from the logit of each token that was generated before.
        frequency_penalty: The same, times how often the token was generated.
        logit_bias: Numbers added to logits, by token id.
        seed: The same seed gives the same tokens, whatever else is being served.
        response_format: Format of the answer: text, any JSON object, or JSON that matches a schema.
        user: Accepted; nothing reads it.
        service_tier: Accepted; nothing reads it.
        prompt_cache_key: Accepted; nothing reads it.
        safety_identifier: Accepted; nothing reads it.
        priority: Accepted; nothing reads it. An extension.
        best_of: Only n.
        top_k: Sample from this many likeliest tokens. An extension.
        min_p: Sample from tokens at least this many times as likely as the likeliest. An extension.
        repetition_penalty: Divides positive and multiplies negative logits of earlier tokens. An extension.
        ignore_eos: Go on when the model ends its text. An extension.
        stop_token_ids: Tokens that end the answer; it does not include them. An extension.
        guided_regex: A regular expression that the whole answer matches. An extension.
        guided_json: A JSON Schema that the whole answer matches. An extension.
        structured_outputs: Either of them. An extension.
        min_tokens: Only 0. An extension.
        length_penalty: Only 1. An extension.
        use_beam_search: Only false. An extension.
        skip_special_tokens: Only true. An extension.
        spaces_between_special_tokens: Only true. An extension.
        include_stop_str_in_output: Only false. An extension.
    """

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_SEQUENCES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    priority: int | None = None
    best_of: Positive | None = None
    top_k: Positive | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    guided_regex: Text | None = None
    guided_json: Object | None = None
    structured_outputs: StructuredOutputs | None = None
    min_tokens: Annotated[int, Meta(extra_json_schema={"const": 0})] | None = None
    length_penalty: Annotated[float, Meta(extra_json_schema={"const": 1})] | None = None
    use_beam_search: No | None = None
    skip_special_tokens: Yes | None = None
    spaces_between_special_tokens: Yes | None = None
    include_stop_str_in_output: No | None = None

    @property
    def is_constrained(self) -> bool:
        """True if the whole answer has to have a form."""
        forms = (self.guided_regex, self.guided_json, self.structured_outputs)
        return not isinstance(self.response_format, TextFormat | None) or any(form is not None for form in forms)

    @property
    def choices(self) -> int:
        """Number of choices for each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)


class CompletionRequest(RequestOptions, kw_only=True, forbid_unknown_fields=True):
    """A text to continue.

    Fields:
        prompt: One prompt or several, each a text or token ids.
        logprobs: Log-probabilities of each token, and of this many of the likeliest.
        echo: Begin the text with the prompt; not with logprobs.
    """

    prompt: Prompt
    logprobs: Alternatives | None = None
    echo: bool | None = None

    @property
    def alternatives(self) -> int | None:
        """Number of likeliest tokens with log-probabilities; None: no log-probabilities at all."""
        return self.logprobs

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the tokens of the answer, and its value or OpenAI's default."""
        return "max_tokens", self.max_tokens or 16


class TextPart(Struct, kw_only=True):
    """A part of a message. Only texts are accepted."""

    type: Literal["text"]
    text: str


class FunctionCall(Struct, kw_only=True):
    """A call of a function. ``arguments`` are JSON."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call of a tool, as an answer has it and the next request repeats it."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(Struct, kw_only=True):
    """A message. Fields that are not listed are passed to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ToolFunction(Struct, kw_only=True):
    """A function that the model may call. ``parameters``: a JSON Schema of its arguments."""

    name: Text
    description: str | None = None
    parameters: Object | None = None


class Tool(Struct, kw_only=True):
    """A tool. Fields that are not listed are passed to the chat template."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(Struct, kw_only=True):
    """The name of a function."""

    name: Text


class NamedTool(Struct, kw_only=True):
    """A tool that the answer must call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(RequestOptions, kw_only=True, forbid_unknown_fields=True):
    """Messages to answer.

    Fields:
        max_completion_tokens: Most tokens to generate; used rather than max_tokens.
        logprobs: Log-probabilities of each token.
        top_logprobs: And of this many of the likeliest; only with logprobs.
        tools: Passed to the chat template; calls are read out of the answer.
        tool_choice: none leaves the tools out of the prompt; with required, or a tool, the answer must call one.
        parallel_tool_calls: With required: true allows several calls. Default: false.
        chat_template_kwargs: More variables for the chat template. An extension.
        reasoning_effort: A variable for the chat template.
        modalities: Only text.
        verbosity: Accepted; nothing reads it.
        metadata: Accepted; nothing reads it.
        store: Accepted; nothing is stored.
        add_generation_prompt: Only true. An extension.
        echo: Only false. An extension.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: str | None = None
    metadata: Object | None = None
    store: bool | None = None
    add_generation_prompt: Yes | None = None
    echo: No | None = None

    @property
    def alternatives(self) -> int | None:
        """Number of likeliest tokens with log-probabilities; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the tokens of the answer, and its value; None: all that there is room for."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class Conversation(Struct, kw_only=True):
    """Parts of a chat request that its chat template reads, as they were sent: with unlisted fields."""

    messages: list[Object]
    tools: list[Object] | None = None
    chat_template_kwargs: Object | None = None


class Usage(Struct, kw_only=True):
    """Numbers of tokens."""

    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural


class ErrorDetail(Struct, kw_only=True):
    """An error; ``param`` is the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, kw_only=True):
    """The answer to a request that is refused."""

    error: ErrorDetail


class TopLogprob(Struct, kw_only=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class TokenLogprob(TopLogprob, kw_only=True):
    """A token of the answer, its log-probability and the likeliest tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob]


class CompletionLogprobs(Struct, kw_only=True):
    """Log-probabilities of a completion, an item a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[Natural]


class CompletionChoice(Struct, kw_only=True):
    """A text that continues a prompt, or in a stream a piece of it."""

    index: Natural
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class AnswerHead(Struct, kw_only=True):
    """Fields of every answer and of every event of a stream."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET


class Completion(AnswerHead, kw_only=True, tag_field="object", tag="text_completion"):
    """Texts that continue prompts, or one event of a stream of them."""

    choices: list[CompletionChoice]


class AssistantMessage(Struct, kw_only=True, tag_field="role", tag="assistant"):
    """The message that answers a chat."""

    content: str | None
    refusal: None = None
    tool_calls: Annotated[list[ToolCall], Meta(min_length=1)] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One of the answers to a chat."""

    index: Natural
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(AnswerHead, kw_only=True, tag_field="object", tag="chat.completion"):
    """The answer to a chat."""

    choices: list[ChatChoice]


class FunctionPart(Struct, kw_only=True):
    """A piece of a call of a function. ``arguments`` are a piece of JSON."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallPart(Struct, kw_only=True):
    """A piece of a call of a tool. The first one has its id and name."""

    index: Natural
    function: FunctionPart
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct, kw_only=True):
    """Addition of one event to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: Annotated[list[ToolCallPart], Meta(min_length=1)] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    """One event's part of one of the answers to a chat."""

    index: Natural
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(AnswerHead, kw_only=True, tag_field="object", tag="chat.completion.chunk"):
    """One event of a stream that answers a chat."""

    choices: list[ChunkChoice]


class ServerEvent(Struct, kw_only=True):
    """A server-sent event. ``data`` is a chunk, as JSON, or [DONE]."""

    data: str


class ModelCard(Struct, kw_only=True, tag_field="object", tag="model"):
    """The model that is served.

    Fields:
        max_model_len: Most tokens of a prompt and its answer; null while the model is loaded. An extension.
        vocab: Token ids are below this. An extension.
    """

    id: str
    created: int
    owned_by: str
    max_model_len: int | None
    vocab: int


class Models(Struct, kw_only=True, tag_field="object", tag="list"):
    """The models that are served: one."""

    data: list[ModelCard]


class ServerStatus(Struct, kw_only=True):
    """State of the server.

    Attributes:
        step_age_s: Seconds since the engine's step loop last turned; 0 while it has nothing to do.
        doing: The step that hangs, or that the engine was restarted in.
    """

    status: Literal["alive", "loading", "ready", "draining", "restarting", "hung"]
    step_age_s: float | UnsetType = UNSET
    doing: str | UnsetType = UNSET
