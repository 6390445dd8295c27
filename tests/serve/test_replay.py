"""A trace against a server of another make, over a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from rooftop.serve.client.replay import ReplayedRequest, ReplayTarget, read_texts, replay
from rooftop.simulate.serving.metrics import Targets
from rooftop.simulate.serving.traces import Lengths, RequestTrace, closed_trace


@contextmanager
def answering(*pieces: bytes, on_body: Callable[[dict[str, Any]], object] = lambda body: None) -> Iterator[str]:
    """The address of a server that answers everything with these pieces of a stream of events, each sent alone.

    ``on_body`` is called with each request before its answer.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            on_body(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def replayed(*pieces: bytes) -> ReplayedRequest:
    trace = RequestTrace(arrival_s=np.zeros(1), prompt_tokens=np.array([3]), output_tokens=np.array([2]))
    with answering(*pieces) as url:
        result = asyncio.run(replay(trace, [[1, 2, 3]], ReplayTarget(url=url, model="m", vocab=10), Targets()))
    (record,) = result.records
    return record


def event(text: str) -> bytes:
    said = {"choices": [{"index": 0, "text": text}]}
    return f"data: {json.dumps(said, ensure_ascii=False)}\n\n".encode()


LAST = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\r\n\r\ndata: [DONE]\n\n'


def test_texts_may_hold_what_ends_lines_elsewhere() -> None:
    """Unicode has seven more ends of lines than streams of events; a character may come in two pieces."""
    first = event("a\u2028b\u2029c\u0085d\x0b")
    cut = first.index("\u2028".encode()) + 1
    record = replayed(first[:cut], first[cut:] + event("e"), LAST)
    assert record.error is None
    assert (len(record.times_s), record.prompt_tokens, record.output_tokens) == (2, 3, 2)


def test_what_is_no_event_ends_one_request_only() -> None:
    record = replayed(event("a"), b'data: {"choices": [\n\n', LAST)
    assert record.error == 'an event that is no JSON: {"choices": ['


def test_an_answer_that_breaks_off_is_told() -> None:
    assert replayed(event("a")).error == "the answer broke off"


def test_each_client_waits_for_its_answer() -> None:
    """Three clients: the server always has three requests, no more and, until the last ones, no fewer."""
    three, lock, running, most = threading.Barrier(3), threading.Lock(), 0, 0

    def wait(body: dict[str, Any]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(30.0)
        with lock:
            running -= 1

    trace = closed_trace(clients=3, requests=9, prompt=Lengths(low=3, high=3), output=Lengths(low=2, high=2))
    with answering(event("a"), LAST, on_body=wait) as url:
        target = ReplayTarget(url=url, model="m", vocab=10)
        result = asyncio.run(replay(trace, [[1, 2, 3]] * 9, target, Targets()))
    sent = result.sent(trace)
    assert (len(result.served), most, sent.clients) == (9, 3, 3)
    assert result.metrics.worst_lag_s < sent.arrival_s[3]
    # The fourth request is sent after the first answer.
    assert sent.arrival_s[3] > min(record.times_s[-1] for record in result.records[:3]) > sent.arrival_s[2]


def test_texts_of_a_data_set_are_sent_as_they_are(tmp_path: Path) -> None:
    conversations = [
        {
            "id": "a",
            "conversations": [{"from": "human", "value": "What is\u2028a mesh?"}, {"from": "gpt", "value": "x"}],
        },
        {"id": "b", "conversations": []},
        {"id": "c", "conversations": [{"from": "human", "value": "And a slice?"}]},
    ]
    (tmp_path / "sharegpt.json").write_text(json.dumps(conversations))
    lines = "".join(
        json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in ("What is\u2028a mesh?", "And a slice?")
    )
    (tmp_path / "texts.jsonl").write_text(lines, encoding="utf-8")
    texts = read_texts(tmp_path / "sharegpt.json")
    assert texts == read_texts(tmp_path / "texts.jsonl") == ["What is\u2028a mesh?", "And a slice?"]
    bodies = list[dict[str, Any]]()
    trace = closed_trace(clients=1, requests=2, prompt=Lengths(low=9, high=9), output=Lengths(low=2, high=2))
    with answering(event("a"), LAST, on_body=bodies.append) as url:
        target = ReplayTarget(url=url, model="m", vocab=10)
        result = asyncio.run(replay(trace, texts, target, Targets()))
    assert [body["prompt"] for body in bodies] == texts
    # Lengths are those that the server counted.
    assert result.trace().prompt_tokens.tolist() == [3, 3]
