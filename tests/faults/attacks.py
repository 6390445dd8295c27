"""Attacks of hostile and careless clients on a server. Each is bounded in count and time, and counts its answers."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import openai

from tests.faults import generated

#: Seconds for an answer, and for which an attack holds what it has.
_PATIENCE_S, _HOLD_S = 60.0, 3.0
_TOOLS: Any = [
    {"type": "function", "function": {"name": "go", "parameters": {
        "type": "object", "properties": {"to": {"enum": ["l", "r"]}}, "required": ["to"],
        "additionalProperties": False}}}
]  # fmt: skip
#: Constraints that grow, and some that do not.
_REGEXES = (
    "a{1000000}", "((a{1,100}){1,100}){1,100}", "(a|b)*a(a|b){20}x", "(.*a){30}b", "(v5e|v6e):[1-9]x[1-9]", "(",
    "|".join(f"w{n}x{n * 7}" for n in range(20_000)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server: its address, its model's name, and the bytes of the longest prompt. ``got`` counts what came back."""

    host: str
    port: int
    model: str
    longest: int
    got: Counter[tuple[str, object]] = field(default_factory=Counter)

    def connect(self, timeout: float = _PATIENCE_S) -> socket.socket:
        """A connection."""
        return socket.create_connection((self.host, self.port), timeout=timeout)

    def post(self, name: str, path: str = "/v1/completions", **fields: Any) -> int | None:
        """Send a request, and count its status; None if the connection was closed."""
        body = json.dumps({"model": self.model, "max_tokens": 8, **fields})
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_PATIENCE_S)
        status: int | None = None
        # A refusal may come while the body is yet sent.
        with suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            status = answer.status
            answer.read()
        connection.close()
        self.got[name, status] += 1
        return status

    def ask(self, name: str, path: str, body: bytes) -> None:
        """Send a request with this body, and count its status, or what is wrong with the answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_PATIENCE_S)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            result = generated.problem_of_answer(answer.status, content) or answer.status
        except (OSError, http.client.HTTPException) as error:
            result = f"no answer: {error!r}"
        connection.close()
        self.got[name, result] += 1

    def head(self, body: bytes) -> bytes:
        """The head of a completion with this body."""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode()

    def stream_body(self, tokens: int) -> bytes:
        """A request for a stream."""
        fields = {"prompt": "the quick brown fox", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        return json.dumps({"model": self.model, **fields}).encode()

    def client(self) -> openai.OpenAI:
        """OpenAI's client."""
        url = f"http://{self.host}:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=_PATIENCE_S)


def huge_prompts(target: Target, draw: random.Random) -> None:
    """Texts of megabytes."""
    text = draw.choice(["a b c " * 1_000_000, " " * 6_000_000 + "a", "a" * 8_000_000])
    target.post("huge_prompts", prompt=text)


def dense_prompts(target: Target, draw: random.Random) -> None:
    """Texts as long as the bound of bytes allows, of as many tokens as possible; several at once."""
    character = draw.choice("~^|`")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: target.post("dense_prompts", prompt=character * (target.longest - 1)), range(4)))


def half_heads(target: Target, draw: random.Random) -> None:
    """Connections that never end the head of their request."""
    with ExitStack() as stack:
        for _ in range(draw.choice([100, 300, 1000])):
            try:
                connection = stack.enter_context(target.connect(5.0))
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half: ")
                target.got["half_heads", "left"] += 1
            except OSError:
                target.got["half_heads", "refused"] += 1
        time.sleep(_HOLD_S)


def large_heads(target: Target, draw: random.Random) -> None:
    """A head of megabytes."""
    answer = b""
    with suppress(OSError), target.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        for number in range(8):
            connection.sendall(b"x-%d: " % number + b"a" * 2**20 + b"\r\n")
        connection.sendall(b"\r\n")
        answer = connection.recv(100)
    target.got["large_heads", int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else None] += 1


def slow_bodies(target: Target, draw: random.Random) -> None:
    """A body of which a byte comes now and then."""
    with ExitStack() as stack:
        connections = [stack.enter_context(target.connect()) for _ in range(20)]
        for connection in connections:
            connection.sendall(target.head(b"x" * 1000))
            target.got["slow_bodies", "left"] += 1
        for _ in range(10):
            for connection in connections:
                with suppress(OSError):
                    connection.sendall(b"{")
            time.sleep(_HOLD_S / 10)


def disconnects(target: Target, draw: random.Random) -> None:
    """Streams that are left after a few parts."""
    for _ in range(20):
        body = target.stream_body(200)
        with suppress(OSError), target.connect() as connection:
            connection.sendall(target.head(body) + body)
            target.got["disconnects", "left"] += 1
            for _ in range(draw.randrange(4)):
                connection.recv(2000)


def slow_readers(target: Target, draw: random.Random) -> None:
    """Streams that are read slower than they come."""
    body = target.stream_body(400)
    with ExitStack() as stack, suppress(OSError):
        connections = [stack.enter_context(target.connect()) for _ in range(4)]
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(target.head(body) + body)
            target.got["slow_readers", "left"] += 1
        for _ in range(10):
            for connection in connections:
                connection.recv(200)
            time.sleep(_HOLD_S / 10)


def grammars(target: Target, draw: random.Random) -> None:
    """Constraints, most of them hostile."""
    for regex in draw.sample(_REGEXES, 3):
        target.post("grammars", prompt="a", guided_regex=regex)
    size = draw.choice([10, 500, 5000])
    properties = {f"p{n}": {"type": "string"} for n in range(size)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    target.post("grammars", prompt="a", response_format=answer_format)


def tools(target: Target, draw: random.Random) -> None:
    """Calls of tools, by OpenAI's client."""
    with target.client() as client:
        try:
            answer = client.chat.completions.create(
                model=target.model, messages=[{"role": "user", "content": "hi"}], tools=_TOOLS, tool_choice="required",
                max_tokens=60,
            )  # fmt: skip
            (call,) = answer.choices[0].message.tool_calls or ()
            target.got["tools", call.function.name] += 1
        except openai.APIStatusError as error:
            target.got["tools", error.status_code] += 1
        except openai.APIConnectionError:
            target.got["tools", None] += 1


def flood(target: Target, draw: random.Random) -> None:
    """Many short requests at once."""
    with ThreadPoolExecutor(8) as pool:
        numbers = [draw.randrange(3) for _ in range(40)]
        list(pool.map(lambda number: target.post("flood", prompt="a b", n=1 + number), numbers))


def malformed(target: Target, draw: random.Random) -> None:
    """Requests that are wrong."""
    for fields in (
        {"prompt": ["a"] * 500}, {"prompt": [10**9]}, {"n": 0, "prompt": "a"}, {"prompt": "a", "max_tokens": 10**9},
        {"prompt": "a", "logit_bias": {str(10**9): 1}}, {"prompt": "a", "nothing": 1},
    ):  # fmt: skip
        target.post("malformed", **fields)
    with suppress(OSError), target.connect() as connection:
        body = b"[" * 100_000
        connection.sendall(target.head(body) + body)
        target.got["malformed", int(connection.recv(100)[9:12])] += 1


def foreign_hosts(target: Target, draw: random.Random) -> None:
    """Requests as web pages make them whose name was bound to this address."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=_PATIENCE_S)
    connection.request("GET", "/v1/models", headers={"Host": "page.example"})
    target.got["foreign_hosts", connection.getresponse().status] += 1
    connection.close()


def generated_schemas(target: Target, draw: random.Random) -> None:
    """Grammars that are drawn."""
    for _ in range(5):
        fields = generated.constrained(
            draw.choice(generated.PLACES), generated.schema(draw), draw.choice(generated.REGEXES)
        )
        chat = "messages" in fields
        sent = {"max_tokens": 4, **({} if chat else {"prompt": "a"}), **fields}
        target.ask(
            "generated_schemas", "/v1/chat/completions" if chat else "/v1/completions", json.dumps(sent).encode()
        )


def generated_bodies(target: Target, draw: random.Random) -> None:
    """Bodies that are drawn."""
    for _ in range(10):
        path, body = generated.body(draw)
        target.ask("generated_bodies", path, body)


def generated_requests(target: Target, draw: random.Random) -> None:
    """Heads and framing that are drawn."""
    for _ in range(10):
        sent = generated.conversation(draw)
        received = generated.exchange(target.host, target.port, sent)
        target.got["generated_requests", generated.problem(sent, received) or 200] += 1


def long_answers(target: Target, draw: random.Random) -> None:
    """Answers of megabytes, and of more than the server makes."""
    for choices in draw.sample((8, 32, 128), 2):
        target.post("long_answers", prompt="a", n=choices, max_tokens=200, logprobs=20, ignore_eos=True)
    target.post("long_answers", prompt="a", n=128, max_tokens=2**20, logprobs=20)


Attack = Callable[[Target, random.Random], None]
#: All attacks, and the statuses that the server may answer them with; None: it closed the connection, and "left": the
#: client did.
ATTACKS: dict[Attack, frozenset[object]] = {
    huge_prompts: frozenset((400, 413, None)),
    dense_prompts: frozenset((400, 413, None)),
    half_heads: frozenset(("refused", "left")),
    large_heads: frozenset((431, None)),
    slow_bodies: frozenset(("left",)),
    disconnects: frozenset(("left",)),
    slow_readers: frozenset(("left",)),
    grammars: frozenset((200, 400, 429)),
    tools: frozenset(("go", 429)),
    flood: frozenset((200, 429)),
    malformed: frozenset((400,)),
    foreign_hosts: frozenset((421,)),
    generated_schemas: frozenset((200, 400, 413, 429)),
    generated_bodies: frozenset((200, 400, 404, 413, 415, 429)),
    generated_requests: frozenset((200,)),
    long_answers: frozenset((200, 400, 429)),
}
