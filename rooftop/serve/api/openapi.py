"""The published OpenAPI document and the requests that it describes, both from the types in ``schemas``."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec

from rooftop import __version__
from rooftop.core.errors import RooftopError
from rooftop.serve.api.schemas import (
    MOST_SEQUENCES,
    PROMPTS,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorAnswer,
    ModelCard,
    Models,
    RequestOptions,
    ServerEvent,
    ServerStatus,
)

Request = TypeVar("Request", CompletionRequest, ChatRequest)
Schema = Mapping[str, Any]

_REF = "#/components/schemas/{name}"
_RETRY = {
    "Retry-After": {
        "description": "Seconds after which to try again.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_ERRORS = {
    400: "The request is wrong: the message names the field and what is accepted.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full.",
    500: "The engine failed.",
    503: "The server is loading or draining.",
}
_STREAM = "The answer; with stream, server-sent events whose data is a chunk, then [DONE]."
_CLIPPED = 60
#: A field and its description, in the docstring of a class.
_DESCRIBED = re.compile(r"^ {8}(\w+): (.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A path of the server, and what the document says of it. ``answers``: types by media type."""

    path: str
    name: str
    summary: str
    method: Literal["get", "post"] = "get"
    needs_key: bool = False
    request: type | None = None
    description: str = "The answer."
    answers: Mapping[str, type]
    errors: tuple[int, ...] = ()


ENDPOINTS = (
    Endpoint(
        path="/v1/models", name="models", summary="The model that is served.", needs_key=True, errors=(401,),
        answers={"application/json": Models},
    ),
    Endpoint(
        path="/v1/models/{model}", name="model", summary="The same, by its name.", needs_key=True, errors=(401, 404),
        answers={"application/json": ModelCard},
    ),
    Endpoint(
        path="/v1/completions", name="complete", summary="Continues a text.", method="post", needs_key=True,
        request=CompletionRequest, errors=tuple(_ERRORS), description=_STREAM,
        answers={"application/json": Completion, "text/event-stream": ServerEvent},
    ),
    Endpoint(
        path="/v1/chat/completions", name="chat", summary="Answers messages, by the model's chat template.",
        method="post", needs_key=True, request=ChatRequest, errors=tuple(_ERRORS), description=_STREAM,
        answers={"application/json": ChatCompletion, "text/event-stream": ServerEvent},
    ),
    Endpoint(
        path="/health", name="health", summary="Answers 200 while the engine's step loop turns or rests.",
        answers={"application/json": ServerStatus},
    ),
    Endpoint(
        path="/ready", name="ready", summary="Answers 200 while requests are served.",
        answers={"application/json": ServerStatus},
    ),
    Endpoint(path="/metrics", name="metrics", summary="Metrics as Prometheus reads them.", answers={"text/plain": str}),
    Endpoint(path="/openapi.json", name="openapi", summary="This document.", answers={"application/json": dict}),
)  # fmt: skip


def document(model: str | None = None, *, keys: bool = False) -> dict[str, Any]:
    """The OpenAPI document of a server of ``model`` (None: of any), to which requests need API ``keys`` or do not."""
    components = dict(_components())
    if model is not None:
        for name in ("CompletionRequest", "ChatRequest"):
            properties = components[name]["properties"]
            properties = properties | {"model": properties["model"] | {"enum": [model, None]}}
            components[name] = components[name] | {"properties": properties}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rooftop serve",
            "version": __version__,
            "description": "A subset of OpenAI's API, with extensions that say so. A field that is not listed is "
            "refused; null is the same as leaving a field out.",
        },
        "paths": {endpoint.path: {endpoint.method: _operation(endpoint, model, keys=keys)} for endpoint in ENDPOINTS},
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": components,
            "responses": {
                f"Error{status}": _response(text, {"application/json": ErrorAnswer}, retry=status in (429, 503))
                for status, text in _ERRORS.items()
            },
        },
    }


def _operation(endpoint: Endpoint, model: str | None, *, keys: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": endpoint.name, "summary": endpoint.summary}
    if endpoint.needs_key and keys:
        operation["security"] = [{"key": []}]
    if "{model}" in endpoint.path:
        names = {"type": "string"} | ({} if model is None else {"enum": [model]})
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": names}]
    if endpoint.request is not None:
        operation["requestBody"] = {"required": True, "content": _content({"application/json": endpoint.request})}
    operation["responses"] = {"200": _response(endpoint.description, endpoint.answers)} | {
        str(status): {"$ref": f"#/components/responses/Error{status}"} for status in endpoint.errors
    }
    if endpoint.name in ("health", "ready"):
        operation["responses"]["503"] = _response("Not yet, or no longer.", endpoint.answers, retry=True)
    return operation


def _response(description: str, answers: Mapping[str, type], *, retry: bool = False) -> dict[str, Any]:
    headers = {"headers": _RETRY} if retry else {}
    return {"description": description, "content": _content(answers), **headers}


def _content(types: Mapping[str, type]) -> dict[str, Any]:
    return {media: {"schema": _schemas(kind)[0][0]} for media, kind in types.items()}


def _schemas(*types: Any) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    return msgspec.json.schema_components(types, ref_template=_REF)


@cache
def _components() -> Mapping[str, dict[str, Any]]:
    """Schemas of all requests and answers, by name."""
    named = [endpoint.request for endpoint in ENDPOINTS if endpoint.request is not None]
    named += [kind for endpoint in ENDPOINTS for kind in endpoint.answers.values()]
    _, components = _schemas(*named, ChatCompletionChunk, ErrorAnswer)
    components["CompletionRequest"]["properties"]["prompt"]["anyOf"] = list(_schemas(*PROMPTS)[0])
    # Lines of docstrings describe fields; those of RequestOptions are fields of its subclasses.
    inherited = _DESCRIBED.findall(RequestOptions.__doc__ or "")
    for component in components.values():
        text = component["description"]
        component["description"] = text.partition("\n")[0]
        for name, description in [*_DESCRIBED.findall(text), *inherited]:
            if name in component["properties"]:
                component["properties"][name] = {"description": description, **component["properties"][name]}
    return components


def read_body(body: bytes, kind: type[Request]) -> Request:
    """The request in ``body``. Whole numbers such as 1.0 are accepted as integers.

    Raises RooftopError naming the field (``messages[0].role``) that is wrong.
    """
    try:
        value = msgspec.json.Decoder(float_hook=_number).decode(body)
        return _read(value, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        accepted = f"JSON in UTF-8, without NaN, Infinity or half a surrogate pair ({error})"
        raise RooftopError("body", _clip(body.decode("utf-8", errors="replace")), accepted) from None
    except RecursionError:
        raise RooftopError("body", "JSON that is nested too deeply", "fewer levels") from None


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _read(value: object, kind: type[Request]) -> Request:
    try:
        request = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _wrong(str(error), value, kind) from None
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        kinds = set(map(type, request.prompt))
        if len(kinds) > 1 or (kinds != {int} and len(request.prompt) > MOST_SEQUENCES):
            prompts = _options(_components()["CompletionRequest"]["properties"]["prompt"], None)
            raise RooftopError("prompt", f"{len(request.prompt)} items", _accepted(prompts))
    return request


#: A message of msgspec, and the path of the value that it is about.
_MESSAGE = re.compile(r"(?P<text>.*?)(?: - at `(?:key` in `)?\$(?P<path>[^`]*?)(?:\[\.\.\.\])?`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?:(?P<missing>missing required)|contains unknown) field `(?P<name>.*)`", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")


def _wrong(message: str, value: Any, kind: type) -> RooftopError:
    """The error that msgspec's ``message`` is about: the field, the value in it, and what its schema accepts."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None  # every string matches
    path = match["path"] or ""
    options = [*_options(_components()[kind.__name__], value)]
    for step in _STEP.finditer(path):
        value = value[step["key"] or int(step["index"])]
        options = _inside(options, step["key"], value)
    named, dot = path.removeprefix("."), "." if path else ""
    field = _FIELD.fullmatch(match["text"])
    if field is None:
        return RooftopError(named or "body", _clip(value), _accepted(options))
    name = field["name"]
    if field["missing"]:
        return RooftopError(f"{named}{dot}{name}", None, _accepted(_inside(options, name, None)))
    known = dict.fromkeys(name for option in options for name in option.get("properties", ()))
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    shown = _clip(name if name.isprintable() else repr(name))
    return RooftopError(f"{named}{dot}{shown}", _clip(value[name]), f"{hint}one of {', '.join(known)}")


def _options(schema: Schema, value: object) -> Iterator[Schema]:
    """The alternatives of a schema, with references followed. Of tagged objects, the one that ``value`` names."""
    if "$ref" in schema:
        yield from _options(_components()[schema["$ref"].rpartition("/")[2]], value)
    elif "anyOf" in schema:
        options = schema["anyOf"]
        if "discriminator" in schema and isinstance(value, dict):
            tag, mapping = schema["discriminator"]["propertyName"], schema["discriminator"]["mapping"]
            options = [{"$ref": ref} for name, ref in mapping.items() if name == value.get(tag)] or options
        for option in options:
            yield from _options(option, value)
    else:
        yield schema


def _inside(options: Iterable[Schema], key: str | None, value: object) -> list[Schema]:
    """The alternatives of field ``key``, or of the items of a list."""
    schemas = [option.get("items") if key is None else option.get("properties", {}).get(key) for option in options]
    return [option for schema in schemas if schema is not None for option in _options(schema, value)]


def _accepted(options: Iterable[Schema]) -> str:
    """Describe in words what one of several schemas accepts."""
    return " or ".join(dict.fromkeys(map(_words, options)))


def _words(schema: Schema) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(item) for item in schema["enum"])
    kind = str(schema.get("type", "a value"))
    if kind == "array":
        least, most = schema.get("minItems"), schema.get("maxItems")
        size = f" of {least or 0} to {most} items" if most else (f" of {least} items or more" if least else "")
        return f"an array{size} of {_accepted(_options(schema['items'], None))}"
    if kind == "object" and "propertyNames" in schema:
        names, values = schema["propertyNames"]["pattern"], _accepted(_options(schema["additionalProperties"], None))
        return f"an object whose names match {names} and whose values are {values}"
    if kind in ("number", "integer"):
        low = f"from {schema['minimum']:,}" if "minimum" in schema else f"above {schema.get('exclusiveMinimum')}"
        return f"{kind} {low}" + (f" to {schema['maximum']:,}" if "maximum" in schema else "")
    return "a string that is not empty" if schema.get("minLength") else kind


def _clip(value: object) -> object:
    """``value``, short enough to be repeated in a message."""
    shown = value if isinstance(value, str) else repr(value)
    return value if len(shown) <= _CLIPPED else f"{shown[:_CLIPPED]}..."
