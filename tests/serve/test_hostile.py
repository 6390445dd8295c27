"""Requests that have ended, stopped or misled servers: drawn ones, and those of published advisories.

Whatever comes, the server lives, answers with 2xx or 4xx in OpenAI's form, runs no body as a request, and answers
others meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rooftop.core.errors import RooftopError
from rooftop.serve.api.compiling import COMPILE_CPU_S, Grammar, TokenizerTask, Trials, Unkeepable
from rooftop.serve.api.grammars import MOST_LEVELS, depth, json_grammar
from tests.faults import generated
from tests.faults.generated import PLACES, Sent
from tests.faults.serving import tree
from tests.serve.test_http_limits import PATIENCE_S, connected, rest, serving
from tests.support import serving_echo
from tests.support.serving_process import Served

COMPLETION = json.dumps({"prompt": "the quick", "max_tokens": 3}).encode()
SMUGGLED = f"GET {generated.SMUGGLED} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    serving_echo.tokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder, limits={"request_s": 2.0}, engine={"max_model_len": 2048}) as server:
        yield server
        assert server.process.poll() is None
        # A stranger writes no log: of many malformed requests there are few lines.
        _, log = server.stop()
    assert sum(line["event"] == "malformed HTTP" for line in log) <= 3
    assert not any(line["event"] == "defect" or "traceback" in line for line in log)


def post(
    headers: bytes = b"", body: bytes = COMPLETION, *, length: bool = True, host: bytes = b"Host: localhost\r\n"
) -> bytes:
    lines = b"POST /v1/completions HTTP/1.1\r\n" + host + b"Content-Type: application/json\r\n" + headers
    return lines + (b"Content-Length: %d\r\n" % len(body) if length else b"") + b"\r\n" + body


def coded(body: bytes, coding: bytes = b"chunked") -> bytes:
    return post(b"Transfer-Encoding: " + coding + b"\r\nConnection: close\r\n", body, length=False)


def chunked(body: bytes, size: int, extension: bytes = b"", last: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces) + last


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in generated._STATUS.findall(received)]


def ask(served: Served, **fields: Any) -> httpx.Response:
    chat = "messages" in fields
    body = {"max_tokens": 4} | ({} if chat else {"prompt": "a"}) | fields
    return httpx.post(f"{served.url}/v1/{'chat/' if chat else ''}completions", json=body, timeout=PATIENCE_S)


# Schemas.


def chain(kind: str, count: int, *, loop: bool, backwards: bool = False) -> dict[str, Any]:
    links = {f"d{at}": generated._LINKS[kind](f"#/$defs/d{(at + 1) % count}") for at in range(count)}
    if not loop:
        links[f"d{count - 1}"] = {"type": "integer"}
    names = sorted(links, key=lambda name: int(name[1:]), reverse=backwards)
    return {"$defs": {name: links[name] for name in names}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize("place", [place for place in PLACES if place != "guided_regex"])
@pytest.mark.parametrize("kind", ["object", "two", "allOf", "plain"])
def test_a_chain_of_references_is_refused_wherever_it_comes(served: Served, place: str, kind: str) -> None:
    """Each of these ended the server: the library that compiles schemas overflowed its stack."""
    answer = ask(
        served, **generated.constrained(place, chain(kind, 1200 if kind != "plain" else 4000, loop=kind == "object"))
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and f"more than {MOST_LEVELS} levels" in error["message"]
    assert error["param"] == {
        "response_format": "response_format.json_schema.schema",
        "structured_outputs": "structured_outputs.json",
    }.get(place, place)
    assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_depth_follows_references_in_any_order(loop: bool, backwards: bool) -> None:
    assert depth({}) == 1 and depth({"a": [{}]}) == 3
    # The schema, its definitions, and for each link an object, its properties and the one of these that refers on.
    assert depth(chain("object", 50, loop=loop, backwards=backwards)) == 2 + 3 * 50 - (0 if loop else 2)
    assert depth({"$ref": "#"}) == 1 and depth({"$ref": "#/a~1b/0", "a/b": [{"x": {}}]}) == 4
    assert depth(chain("object", 5000, loop=loop, backwards=backwards)) > MOST_LEVELS


def test_a_grammar_that_ends_its_process_is_refused_and_others_are_compiled() -> None:
    """The depth is not looked at here: this is what becomes of a grammar that nobody has thought of."""
    tokenizer = serving_echo.tokenizer()
    assert tokenizer.eos is not None
    trials = Trials(TokenizerTask(definition=tokenizer.definition, vocab=tokenizer.vocab, ends=(tokenizer.eos,)))
    try:
        deadly = Grammar(kind="json", text=json.dumps(chain("object", 3000, loop=True)), field="f")
        with pytest.raises(Unkeepable, match="could not be compiled") as refused:
            trials.check(deadly)
        assert f"{COMPILE_CPU_S} s and 512 MiB" in refused.value.accepted and not refused.value.lasting
        starter = trials.pid
        trials.check(json_grammar({"type": "integer"}))
        assert trials.pid == starter is not None
        # And if the one that starts the others ends, it is started again.
        os.kill(starter, signal.SIGKILL)
        trials.check(json_grammar({"type": "boolean"}))
        assert trials.pid != starter
    finally:
        trials.close()


def test_a_request_without_grammar_does_not_wait_for_those_that_have_one(served: Served) -> None:
    """Grammars cannot be compiled for a while, because the process for that is stopped; more come than are compiled."""
    assert ask(served, guided_json={"const": "warm"}).status_code == 200
    (starter,) = [child for child in tree(served.process.pid) if child != served.process.pid]
    with ThreadPoolExecutor(12) as pool:
        os.kill(starter, signal.SIGSTOP)
        try:
            waiting = [pool.submit(ask, served, guided_json={"const": number}) for number in range(12)]
            for _ in range(3):
                assert ask(served).status_code == 200
            assert not any(request.done() for request in waiting)
        finally:
            os.kill(starter, signal.SIGCONT)
        assert [request.result().status_code for request in waiting] == [200] * 12


# HTTP.

UPGRADES = [b"h2c", b"websocket", b"foo"]


@pytest.mark.parametrize("to", UPGRADES)
def test_a_request_to_upgrade_is_answered_as_plain_http(served: Served, to: bytes) -> None:
    """Java's HttpClient sends the first one by default. The body is the body, not another request."""
    wish = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + to + b"\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    )
    for parts in (
        (post(wish),),
        (
            post(wish, b"")[:-2].replace(b"Content-Length: 0\r\n", b"Content-Length: %d\r\n\r\n" % len(COMPLETION)),
            COMPLETION,
        ),
    ):
        received = generated.exchange("127.0.0.1", port(served), Sent(parts=parts, requests=1))
        assert received is not None and statuses(received) == [200, 200] and b'"text_completion"' in received
    for body in (SMUGGLED, SMUGGLED * 3):
        for sent in (post(wish, body), post(wish + b"Transfer-Encoding: chunked\r\n", chunked(body, 7), length=False)):
            received = generated.exchange("127.0.0.1", port(served), Sent(parts=(sent,), requests=1))
            assert (
                received is not None
                and statuses(received) == [400, 200]
                and b"smuggled'" not in received.partition(b"body: got")[0]
            )


def port(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400, b"host: got 0"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400, b"host: got 2"),
        (b"GET /health HTTP/1.0\r\n\r\n", 200, b"alive"),
        (b"GET /health\r\n\r\n", 400, b"HTTP/0.9"),
        (coded(chunked(COMPLETION, 9), b"gzip, chunked"), 400, b"transfer-encoding"),
        (coded(chunked(COMPLETION, 9)).replace(b"/1.1", b"/1.0"), 400, b"transfer-encoding"),
        (coded(chunked(COMPLETION, 9)), 200, b"text_completion"),
        (coded(chunked(COMPLETION, 9, last=b"0\r\nHost: evil.example\r\n\r\n")), 200, b"text_completion"),
        (coded(chunked(b" " * 300_000, 1)), 400, b"chunks"),
        (coded(chunked(b"  ", 1, b";" + b"a" * 400_000)), 400, b"chunks"),
        (b"\x00junk\r\n\r\n", 400, b"not HTTP/1.1"),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", 400, b"no proxy"),
    ],
)  # fmt: skip
def test_heads_that_others_read_differently_are_refused_in_openais_form(
    served: Served, sent: bytes, status: int, said: bytes
) -> None:
    with connected(served) as connection:
        with suppress(OSError):
            connection.sendall(sent)
        received = rest(connection)
    # The system may drop an answer to somebody who is still sending.
    if received or len(sent) < 100_000:
        assert statuses(received) == [status] and said in received
        assert status == 200 or b'{"error":{"message":"' in received


def test_a_client_that_closes_its_side_gets_its_answers(served: Served) -> None:
    stream = json.dumps({"prompt": "the quick brown", "max_tokens": 9, "stream": True}).encode()
    for sent, answers in (
        (post(), 1),
        (post(body=stream), 1),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3, 3),
    ):
        received = generated.exchange("127.0.0.1", port(served), Sent(parts=(sent,), requests=answers, half=True))
        assert received is not None and statuses(received) == [200] * answers
        assert received.endswith(b"}") or b"[DONE]" in received


def test_thousands_of_requests_in_a_row_are_answered(served: Served) -> None:
    """Heads are counted one by one, and no more are read than are answered."""
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(served) as connection, ThreadPoolExecutor(1) as pool:
        received = pool.submit(rest, connection)
        connection.sendall(one * 5000 + generated.LAST)
        assert statuses(received.result()) == [200] * 5001


def test_what_is_wrong_is_said_after_the_answers_before(served: Served) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(served) as connection:
        connection.sendall(one * 3 + b"junk\x00\r\n\r\n")
        assert statuses(rest(connection)) == [200, 200, 200, 400]


# Drawn.


@pytest.mark.parametrize("seed", range(4))
def test_drawn_requests(served: Served, seed: int) -> None:
    draw = random.Random(seed)
    sent = [generated.conversation(draw) for _ in range(40)]
    with ThreadPoolExecutor(20) as pool:
        received = pool.map(lambda item: generated.exchange("127.0.0.1", port(served), item), sent)
        problems = [(generated.problem(*pair), pair) for pair in zip(sent, received, strict=True)]
    assert [pair for pair in problems if pair[0] is not None] == []
    assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize("seed", range(4))
def test_drawn_bodies_and_schemas(served: Served, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        path, body = generated.body(draw)
        answer = served.http.post(path, content=body, headers={"content-type": "application/json"})
        assert generated.problem_of_answer(answer.status_code, answer.content) is None, body[:500]
    for _ in range(5):
        fields = generated.constrained(draw.choice(PLACES), generated.schema(draw), draw.choice(generated.REGEXES))
        answer = ask(served, **fields)
        assert generated.problem_of_answer(answer.status_code, answer.content) is None, str(fields)[:500]
    assert served.http.get("/health").status_code == 200


# Advisories: what ended or stopped other servers of this kind.

HI = [{"role": "user", "content": "a"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/"}}]
PATTERN = {"type": "string", "pattern": "("}
DEEP: Any = "a"
for _ in range(600):
    DEEP = {"a": DEEP}
ADVISORIES: dict[str, dict[str, Any]] = {
    "vllm CVE-2026-34756, n": {"n": 10**9},
    "vllm CVE-2024-8939, best_of": {"best_of": 10**6},
    "vllm CVE-2024-8768, an empty prompt": {"prompt": ""},
    "vllm CVE-2025-48942, a schema that is none": {"guided_json": {"type": "strange"}},
    "vllm CVE-2025-48943, a regular expression that is none": {"guided_regex": "[a-"},
    "vllm CVE-2025-48944, a tool whose pattern is none": generated.constrained("tools", PATTERN),
    "vllm CVE-2025-61620, a template": {"messages": HI, "chat_template": "{% for a in range(9**9) %}{% endfor %}"},
    "vllm CVE-2025-62426, arguments of the template": {"messages": HI, "chat_template_kwargs": {"tokenize": True}},
    "vllm CVE-2025-62372, embeddings": {"prompt_embeds": "AAAA"},
    "vllm CVE-2025-6242, a picture of another host": {"messages": [{"role": "user", "content": IMAGE}]},
    "vllm, prompt_logprobs": {"prompt_logprobs": -1},
    "xgrammar 207, a schema that refers to itself": {"guided_json": {"allOf": [{"$ref": "#"}]}},
    "llama.cpp 25283, a deep schema": {"guided_json": DEEP},
    "outlines-core 96, a repetition": {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    "a number of digits": {"guided_json": {"type": "integer", "maximum": 10**300}},
    "top_k": {"top_k": 2**31}, "logit_bias": {"logit_bias": {str(10**9): 1}}, "stop": {"stop": ["a"] * 10_000},
    "echo with logprobs": {"echo": True, "logprobs": 1}, "max_tokens": {"max_tokens": 2**31 - 1},
}  # fmt: skip


@pytest.mark.parametrize("name", ADVISORIES)
def test_requests_of_advisories_are_refused(served: Served, name: str) -> None:
    answer = ask(served, **ADVISORIES[name])
    # These are answered: they cost nothing here.
    accepted = name.startswith(("vllm CVE-2025-62426", "xgrammar", "outlines", "a number"))
    assert answer.status_code == 400 or (accepted and answer.status_code == 200), answer.text
    assert generated.problem_of_answer(answer.status_code, answer.content) is None


def test_heads_and_forms_of_advisories(served: Served) -> None:
    """vLLM's CVE-2025-48956 (large heads), Starlette's CVE-2024-47874 and CVE-2025-62727 (forms, ranges)."""
    answer = served.http.get("/v1/models", headers={"range": "bytes=" + "0-1," * 5000})
    assert answer.status_code == 200
    answer = served.http.post("/v1/completions", files={"a": b"b" * 100_000})
    assert answer.status_code == 415 and answer.json()["error"]["message"]
    with connected(served) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000)
        assert statuses(rest(connection)) in ([431], [])


# Long answers.


def test_an_answer_that_is_too_long_is_refused_before_it_is_made(served: Served) -> None:
    answer = ask(
        served, messages=[{"role": "user", "content": "a"}], n=128, max_tokens=1500, logprobs=True, top_logprobs=20
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(
        "max_tokens: got '128 x 1,500 tokens, each with 21 log-probabilities'; accepted: at most "
    )


def test_a_long_answer_in_parts_is_the_same_as_its_stream(served: Served) -> None:
    fields: dict[str, Any] = {
        "prompt": "the quick brown fox",
        "n": 3,
        "max_tokens": 40,
        "logprobs": 5,
        "ignore_eos": True,
    }
    whole = ask(served, **fields).json()["choices"]
    lines = ask(served, **fields, stream=True).text.split("\n\n")
    events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    for choice in whole:
        parts = [event for event in events if event["index"] == choice["index"]]
        assert choice["text"] == "".join(part["text"] for part in parts)
        for name, column in choice["logprobs"].items():
            assert column == [item for part in parts for item in part["logprobs"][name]] and len(column) == 40


def test_refused_forms_name_their_field() -> None:
    with pytest.raises(RooftopError, match=r"^tools: got 'more than 512 levels'"):
        json_grammar(chain("items", 400, loop=True), "tools")


def test_hangups_drain(folder: Path) -> None:
    """A closed terminal sends SIGHUP: the stream is finished, and the status is 0."""
    # Under nohup, and next to it, the signal is ignored by all that is started: the server leaves it so.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        _hang_up(folder)
    finally:
        signal.signal(signal.SIGHUP, before)


def _hang_up(folder: Path) -> None:
    with serving(folder, engine={"holds_last": True}) as server:
        body = {"prompt": "the quick", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGHUP)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        status, log = server.ended()
    assert status == 0 and log[-1]["event"] == "drained" and log[-1]["all_finished"]
