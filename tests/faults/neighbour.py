"""A client that nobody should disturb: it reads streams and asks for /health, and prints how long each wait was.

``python -m tests.faults.neighbour HOST PORT MODEL`` prints ``KIND ENDED SECONDS`` a line, ENDED on ``time.monotonic``:
``token`` between two parts of a stream, ``first`` until the first one (of long streams, and of requests of one token),
``health`` for an answer of /health and ``failed`` for a stream that ended early. Raw sockets, so that no client library
adds waits of its own.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

#: Seconds between two questions for /health, and between two requests of one token.
_EVERY_S, _SHORT_EVERY_S = 0.1, 0.3
#: Two threads print.
_LOCK = threading.Lock()
#: Seconds after which an answer counts as missing.
_PATIENCE_S = 30.0


def say(kind: str, seconds: float) -> None:
    """Print one wait."""
    with _LOCK:
        print(f"{kind} {time.monotonic():.4f} {seconds:.4f}", flush=True)


def read_stream(host: str, port: int, model: str, tokens: int) -> None:
    """Read one stream to its end."""
    body = json.dumps(
        {
            "model": model, "prompt": "the quick brown fox", "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "temperature": 1.0,
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    begun_s = time.monotonic()
    # A full queue is an answer, and not an end: the wait for a first token goes on until the server takes the request.
    while not _read_answer(host, port, head.encode() + body, begun_s):
        time.sleep(_EVERY_S)


def _read_answer(host: str, port: int, request: bytes, begun_s: float) -> bool:
    """Read an answer to its end; False if the server refused the request because its queue is full."""
    with socket.create_connection((host, port), timeout=_PATIENCE_S) as connection:
        connection.sendall(request)
        last_s, kind, tail, is_first_read = begun_s, "first", b"", True
        while data := connection.recv(65536):
            if is_first_read and data.startswith(b"HTTP/1.1 429 "):
                return False
            now_s, is_first_read = time.monotonic(), False
            if kind == "first" and b"data:" not in data:
                tail = data
                continue
            say(kind, now_s - last_s)
            last_s, kind, tail = now_s, "token", (tail + data)[-200:]
        if b"[DONE]" not in tail:
            say("failed", time.monotonic() - last_s)
            print(tail[-200:], file=sys.stderr, flush=True)
            time.sleep(0.2)
    return True


def ask_health(host: str, port: int) -> None:
    """Ask for /health once, on a connection of its own."""
    begun_s = time.monotonic()
    with socket.create_connection((host, port), timeout=_PATIENCE_S) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while data := connection.recv(65536):
            answer += data
    kind = "health" if answer.startswith(b"HTTP/1.1 200") else "unwell"
    say(kind, time.monotonic() - begun_s)


def _watch_health(host: str, port: int) -> None:
    while True:
        begun_s = time.monotonic()
        try:
            ask_health(host, port)
        except OSError:
            say("unwell", time.monotonic() - begun_s)
        time.sleep(_EVERY_S)


def _ask_for_streams(host: str, port: int, model: str, tokens: int, every_s: float) -> None:
    while True:
        begun_s = time.monotonic()
        try:
            read_stream(host, port, model, tokens)
        except OSError as error:
            say("failed", time.monotonic() - begun_s)
            print(error, file=sys.stderr, flush=True)
            time.sleep(0.2)
        time.sleep(every_s)


def main() -> None:
    """Watch until the process is ended."""
    host, port, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    tokens = int(sys.argv[4])
    threading.Thread(target=_watch_health, args=(host, port), daemon=True).start()
    short = threading.Thread(target=_ask_for_streams, args=(host, port, model, 1, _SHORT_EVERY_S), daemon=True)
    short.start()
    _ask_for_streams(host, port, model, tokens, 0.0)


if __name__ == "__main__":
    main()
