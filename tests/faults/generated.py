"""Attacks that are drawn, not listed: schemas, heads and bodies of HTTP by a grammar and by mutation, and JSON bodies.

Each draw is one request, or a few on one connection, from a seeded generator. ``problem`` says what is wrong with what
came back: whatever is sent, the answers are whole, of status 2xx or 4xx and in OpenAI's form, and no more of them than
requests were sent.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

#: Seconds for an answer. A server that has not answered by then hangs.
PATIENCE_S = 60.0
#: A path that nothing but the body of a drawn request asks for.
SMUGGLED = "/v1/models/smuggled"
_STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")


def schema(draw: random.Random) -> Any:
    """A JSON Schema: chains and loops of references, nests, and keywords with values that no client needs."""
    count = draw.choice((1, 3, 10, 60, 170, 400, 1200, 3000))
    if draw.random() < 0.4:
        kind, step = draw.choice(tuple(_LINKS)), draw.choice((1, 1, 7))
        links = {f"d{at}": _LINKS[kind](f"#/$defs/d{(at * step + 1) % count}") for at in range(count)}
        if draw.random() < 0.5:
            links[f"d{count - 1}"] = {"type": "integer"}
        names = list(links)
        if draw.random() < 0.5:
            names.reverse()
        return {"$defs": {name: links[name] for name in names}, "$ref": "#/$defs/d0"}
    return _part(draw, draw.choice((1, 3, 6)), [draw.choice((10, 100, 1000))])


_LINKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "object": lambda to: {"type": "object", "properties": {"x": {"$ref": to}}},
    "two": lambda to: {"type": "object", "properties": {"x": {"$ref": to}, "y": {"$ref": to}}, "required": ["x"]},
    "allOf": lambda to: {"allOf": [{"$ref": to}]},
    "anyOf": lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]},
    "plain": lambda to: {"$ref": to},
    "items": lambda to: {"type": "array", "items": {"$ref": to}},
    "tuple": lambda to: {"type": "array", "prefixItems": [{"$ref": to}], "minItems": 1},
    "pattern": lambda to: {"type": "object", "patternProperties": {"^a": {"$ref": to}}},
    "additional": lambda to: {"type": "object", "additionalProperties": {"$ref": to}},
    "not": lambda to: {"not": {"$ref": to}},
}
REGEXES = (
    "^(a+)+$", "(a|aa)*b", "a{1000}", "(((a{1,100}){1,100}){1,100})", "(a|b)*a(a|b){20}x", ".*" * 50, "[^\\x00-a]{99}",
    "(?=a)b", "\\1", "(" * 300 + ")" * 300, "[a-", "(?i)\\p{L}{40}", "\\d{1,400}", "^$", "x*" * 200,
)  # fmt: skip
_NUMBERS = (0, -1, 1, 0.1, 1e-9, 1e308, -1e308, 10**18, 2**63, 2**64, 10**40)


def _part(draw: random.Random, levels: int, left: list[int]) -> Any:
    """A part of a schema, with at most ``left`` parts in all."""
    left[0] -= 1
    if levels <= 0 or left[0] <= 0:
        return draw.choice(_LEAVES)(draw)
    inner = [_part(draw, levels - 1, left) for _ in range(draw.choice((1, 2, 2, 5, 40)))]
    names = [
        draw.choice(("a", "b", "x" * 50, "\u00e9", "", "$ref", "0", f"p{at}")) + str(at) for at in range(len(inner))
    ]
    kind = draw.randrange(8)
    if kind == 0:
        few = draw.sample(names, draw.randrange(len(names) + 1))
        return {"type": "object", "properties": dict(zip(names, inner, strict=True)), "required": few}
    if kind == 1:
        return {draw.choice(("allOf", "anyOf", "oneOf")): inner}
    if kind == 2:
        return {"type": "array", "items": inner[0], "minItems": draw.choice((0, 1, 100, 10**6, 10**12))}
    if kind == 3:
        return {"type": "object", "patternProperties": {draw.choice(REGEXES): item for item in inner}}
    if kind == 4:
        return {"type": "object", "additionalProperties": inner[0], "minProperties": draw.choice((0, 5, 10**6))}
    if kind == 5:
        return {"type": "array", "prefixItems": inner, "items": draw.choice((False, True, inner[0]))}
    if kind == 6:
        return {"if": inner[0], "then": inner[-1], "else": {"not": inner[0]}}
    return {
        "$defs": dict(zip(names, inner, strict=True)),
        "$ref": draw.choice(("#", "#/$defs/none", "http://a/b", "#x")),
    }


_LEAVES: tuple[Callable[[random.Random], Any], ...] = (
    lambda draw: {"enum": [f"v{at}" for at in range(draw.choice((1, 100, 5000)))]},
    lambda draw: {"const": draw.choice((None, 1.5, "a" * 1000, [[[]]], {"a": {"b": []}}))},
    lambda draw: {"type": "string", "pattern": draw.choice(REGEXES)},
    lambda draw: {"type": "string", "minLength": draw.choice(_NUMBERS), "maxLength": draw.choice(_NUMBERS)},
    lambda draw: {"type": draw.choice(("integer", "number")), "minimum": draw.choice(_NUMBERS)},
    lambda draw: {"type": "number", "multipleOf": draw.choice(_NUMBERS), "exclusiveMaximum": draw.choice(_NUMBERS)},
    lambda draw: {"type": "string", "format": draw.choice(("date-time", "uuid", "ipv6", "uri", "regex", "none"))},
    lambda draw: draw.choice((True, False, {}, [], None, 7, {"type": "strange"}, {"type": ["null", "object"]})),
    lambda draw: {"x-guidance": {"whitespace_pattern": draw.choice(REGEXES), "item_separator": "(a+)+"}},
)


def fields(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and the fields of a request: most are of the API, with values at and beyond their ends."""
    chat = draw.random() < 0.5
    sent: dict[str, Any] = {"max_tokens": draw.choice((1, 4, 4, 8))}
    sent |= {"messages": [{"role": "user", "content": "a b"}]} if chat else {"prompt": "a b"}
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        name = draw.choice(tuple(_FIELDS))
        sent[name] = draw.choice(_FIELDS[name])
    if draw.random() < 0.3:
        sent |= constrained(draw.choice(PLACES), schema(draw), draw.choice(REGEXES))
    return "/v1/chat/completions" if chat else "/v1/completions", sent


#: Fields that ask for a grammar.
PLACES = ("response_format", "guided_json", "structured_outputs", "tools", "guided_regex")


def constrained(place: str, of: Any, regex: str = "a") -> dict[str, Any]:
    """Fields that ask for a schema, or a regular expression, in one of their places."""
    if place == "response_format":
        return {place: {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}}
    if place == "structured_outputs":
        return {place: {"json": of}}
    if place == "tools":
        return {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": of}}],
            "tool_choice": "required",
        }
    return {place: regex if place == "guided_regex" else of}


def _deep(levels: int) -> Any:
    value: Any = "a"
    for _ in range(levels):
        value = [value]
    return value


_FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (1, 2, 128, 129, 10**9, -1, 1.5, "2"), "best_of": (1, 2, 10**9), "max_tokens": (0, 1, 10**9, 2**40, None),
    "logprobs": (True, 5, 20, 21, 10**9), "top_logprobs": (0, 20, 21, -1), "prompt_logprobs": (1, 10**9),
    "echo": (True,), "top_k": (1, 2**31 - 1, 2**31, -1, 0), "top_p": (0, 1e-300, 1, 2), "min_p": (1, -1),
    "temperature": (0, 2, 1e308, -1), "seed": (2**63 - 1, 2**64, -1),
    "logit_bias": ({"1": 100}, {str(at): 1 for at in range(5000)}, {"-1": 1}, {"9" * 99: 1}),
    "stop": (["a"] * 16, ["a"] * 17, ["x" * 50_000], [""], "", ["a", 1]),
    "stop_token_ids": ([1], [2**31], list(range(99))),
    "frequency_penalty": (2, 3, -2), "repetition_penalty": (0, 1e-9, 100), "user": ("\u0000", "a" * 100_000),
    "chat_template": ("{{ 1/0 }}", "{% for a in range(10**9) %}{% endfor %}"), "metadata": (_deep(50), _deep(700)),
    "chat_template_kwargs": ({"a": "b"}, {"messages": []}, {"bos_token": "x" * 10**5}, {"tokenize": True}, _deep(300)),
    "prompt": ([], [[]], [65, 66, 67], [-1], [10**9], ["a"] * 129, "a" * 100_000, [[65], [66]], {"a": 1}),
    "messages": ([], [{"role": "user"}], [{"role": "x", "content": ""}], [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}], [{"role": "tool", "content": "a"}]),
    "tools": ([], [{}], [{"type": "function", "function": {"name": "", "parameters": {"type": "x", "pattern": "("}}}]),
    "stream": (True, False, 1), "stream_options": ({"include_usage": True}, {}), "guided_regex": REGEXES,
    "model": ("none", "a" * 10_000, 5), "suffix": ("a",), "prompt_embeds": ("AAAA",), "guided_grammar": ("start: a",),
    "nothing": (1,), "ignore_eos": (True,), "truncate_prompt_tokens": (1,), "add_special_tokens": (True,),
}  # fmt: skip


_BODIES = (b"", b"null", b"[" * 50_000, b'{"a":' * 5000, b"\xff\xfe{}", b'{"n":NaN}', b"1" * 9000)


def body(draw: random.Random) -> tuple[str, bytes]:
    """A path and a body: of drawn fields, and sometimes damaged."""
    path, drawn = fields(draw)
    kind = draw.randrange(8)
    if kind == 0:
        return path, draw.choice(_BODIES)
    sent = json.dumps(drawn).encode()
    return path, _damaged(draw, sent) if kind == 1 else sent


def _damaged(draw: random.Random, sent: bytes) -> bytes:
    result = bytearray(sent)
    for _ in range(draw.choice((1, 2, 5))):
        at = draw.randrange(len(result) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            result[at:at] = draw.choice((b"\x00", b"\r\n", b"\n", b" ", b"\xff", b":", b";", b",", b"\t", b"0"))
        elif kind == 1:
            del result[at : at + draw.choice((1, 2, 20))]
        elif kind == 2 and at < len(result):
            result[at] = draw.randrange(256)
        else:
            result[at:at] = result[at : at + draw.choice((1, 10, 100))]
    return bytes(result)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes on a connection, in the ``parts`` in which they are sent, of so many ``requests``.

    ``damaged``: some bytes were changed, so that any line may begin a request. ``half``: the client then closes its
    side.
    """

    parts: tuple[bytes, ...]
    requests: int
    damaged: bool = False
    half: bool = False


def conversation(draw: random.Random) -> Sent:
    """Requests in a row, with heads and framing that some servers and proxies read in different ways."""
    requests = [_request(draw) for _ in range(draw.choice((1, 1, 1, 2, 5, 40)))]
    sent, damaged = b"".join(requests), draw.random() < 0.3
    if damaged:
        sent = _damaged(draw, sent)
    cuts = [0, *sorted(draw.randrange(len(sent) + 1) for _ in range(draw.choice((0, 0, 1, 3)))), len(sent)]
    parts = tuple(sent[start:end] for start, end in pairwise(cuts))
    return Sent(parts=parts, requests=len(requests), damaged=damaged, half=draw.random() < 0.2)


_PATHS = (
    b"/health",
    b"/v1/models",
    b"/v1/completions",
    b"/metrics",
    b"//v1",
    b"/%00",
    b"*",
    b"http://a/b",
    b"/" * 3000,
)
_METHODS = (b"GET", b"GET", b"HEAD", b"OPTIONS", b"CONNECT", b"PRI")
_VERSIONS = (*(b"HTTP/1.1",) * 8, b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1 ", b"http/1.1")
_HOSTS = (*([b"Host: localhost"],) * 8, [], [b"Host: localhost", b"Host: evil.example"], [b"Host:"], [b"host: a, b"])
_LENGTHS = (b"Content-Length: %d", b"Content-Length: +%d", b"Content-Length: %d, %d", b"Content-Length:%d")


def _request(draw: random.Random) -> bytes:
    path, content = draw.choice(_PATHS), b""
    method = b"POST" if path == b"/v1/completions" else draw.choice(_METHODS)
    if method == b"POST":
        smuggled = f"GET {SMUGGLED} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        content = draw.choice((smuggled, json.dumps({"prompt": "a", "max_tokens": 2}).encode(), b"{", smuggled * 3))
    lines = [*draw.choice(_HOSTS), b"Content-Type: application/json"]
    lines += [draw.choice(_LINES) for _ in range(draw.choice((0, 0, 1, 2)))]
    if draw.random() < 0.3:
        lines += [b"Connection: %s" % draw.choice((b"Upgrade", b"upgrade, close", b"Upgrade, HTTP2-Settings"))]
        lines += [b"Upgrade: %s" % draw.choice((b"h2c", b"websocket", b"foo", b"TLS/1.0, h2c"))]
    framing = draw.randrange(6) if content else 6
    if framing < 2:
        lines += draw.choice(_CODINGS) if framing else [b"Transfer-Encoding: chunked"]
        content = _chunked(draw, content)
    elif framing < 6:
        length = draw.choice(_LENGTHS if framing == 2 else _LENGTHS[:1])
        lines.append(length.replace(b"%d", str(len(content)).encode()))
    draw.shuffle(lines)
    return b"\r\n".join([b"%s %s %s" % (method, path, draw.choice(_VERSIONS)), *lines]) + b"\r\n\r\n" + content


_LINES = (
    b"Expect: 100-continue", b"Connection: close", b"Connection: keep-alive", b"X: " + b"a" * 30_000, b"Trailer: Host",
    b"Range: bytes=" + b"0-1," * 2000, b"Content-Length: 5", b"Transfer-Encoding: identity", b"X : y", b" folded",
    b"Authorization: Bearer " + b"a" * 9999, b"Accept-Encoding: " + b"gzip;q=0.1," * 900, b"Cookie: " + b"a=b;" * 2000,
    b"Content-Type: multipart/form-data; boundary=" + b"x" * 500, b"\xff\xfe: a", b"Upgrade: h2c", b"X: \x00",
    b"X: " + b"a" * 70_000,
)  # fmt: skip
_CODINGS: tuple[list[bytes], ...] = (
    [b"Transfer-Encoding: gzip, chunked"], [b"Transfer-Encoding: chunked, identity"], [b"Transfer-Encoding: xchunked"],
    [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"], [b"Transfer-Encoding:\x0bchunked"],
    [b"Transfer-Encoding: chunked", b"Content-Length: 3"], [b"Content-Length: 3", b"Transfer-Encoding: CHUNKED"],
)  # fmt: skip


_LAST_CHUNKS = (*(b"0\r\n\r\n",) * 5, b"0\r\nHost: evil.example\r\n\r\n", b"0\r\n", b"00000000\r\n\r\n", b"-1\r\n\r\n")


def _chunked(draw: random.Random, content: bytes) -> bytes:
    size, extension = draw.choice((1, 7, 1000)), draw.choice((b"", b"", b";a=b", b";" + b"a" * 5000))
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    ends = draw.choice((*(b"\r\n",) * 6, b"\n", b"xx"))
    chunks = b"".join(b"%x%s\r\n%s%s" % (len(piece), extension, piece, ends) for piece in pieces)
    return chunks + draw.choice(_LAST_CHUNKS)


def exchange(host: str, port: int, sent: Sent) -> bytes | None:
    """Everything that comes back until both sides are silent; None if the server has closed without a word."""
    received = bytearray()
    with suppress(OSError), socket.create_connection((host, port), timeout=PATIENCE_S) as connection:
        for part in sent.parts:
            connection.sendall(part)
        # One more request, which has to be answered or refused after all others, ends the conversation.
        if sent.half:
            connection.shutdown(socket.SHUT_WR)
        else:
            connection.sendall(LAST)
        while data := connection.recv(65536):
            received += data
    return bytes(received) or None


#: A request after whose answer the server closes.
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def problem(sent: Sent, received: bytes | None) -> str | None:
    """Fault of an answer; None if there is none."""
    if received is None:
        return None
    statuses = [int(status) for status in _STATUS.findall(received)]
    if not received.startswith(b"HTTP/1.1 "):
        return f"no status: {received[:60]!r}"
    if any(status >= 500 for status in statuses):
        return f"statuses {statuses[:9]}"
    if sent.damaged:
        return None
    answers = sum(status >= 200 for status in statuses)
    if answers > sent.requests + (not sent.half):
        return f"{answers} answers to {sent.requests} requests"
    if b"model_not_found" in received:
        return "the body of a request was run as a request"
    return None


def problem_of_answer(status: int, content: bytes) -> str | None:
    """Fault of the answer to one request with a drawn body; None if there is none."""
    if not (200 <= status < 300 or 400 <= status < 500):
        return f"status {status}: {content[:200]!r}"
    if content.startswith(b"data: "):
        return None if content.rstrip().endswith(b"[DONE]") or b'"error"' in content else "a stream without an end"
    try:
        answer = json.loads(content)
    except ValueError:
        return f"no JSON: {content[:60]!r}"
    if status >= 400 and not isinstance(answer.get("error", {}).get("message"), str):
        return f"an error that is not in OpenAI's form: {content[:60]!r}"
    return None
