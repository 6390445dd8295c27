"""Limits that strangers meet: time and bytes for a request, connections, descriptors, host names, and TLS."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from rooftop.core.errors import RooftopError
from rooftop.serve.http import HEAD_BYTES, HostGuard, HttpLimits, tls_context
from tests.support import serving_echo
from tests.support.serving_process import TEXT, Served, started

HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
#: Seconds for everything that a test waits for.
PATIENCE_S = 60.0


def serving(folder: Path, **options: Any) -> AbstractContextManager[Served]:
    command = [sys.executable, str(Path(serving_echo.__file__)), json.dumps(options), str(folder)]
    return started(command, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    serving_echo.tokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """A server of eight connections, whose heads and bodies have a second each."""
    with serving(folder, limits={"request_s": 1.0, "connections": 8, "per_address": 8}) as server:
        yield server


def connected(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def rest(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HALF,
        b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 9\r\nContent-Type: application/json\r\n\r\n{",
    ],
    ids=["nothing", "head", "body"],
)
def test_a_request_that_does_not_come_is_ended(served: Served, sent: bytes) -> None:
    # The deadline counts from the connection on, so that this wait is never shorter, however busy the machine.
    begun_s = time.monotonic()
    with connected(served) as connection:
        connection.sendall(sent)
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"error"' in answer
    assert time.monotonic() - begun_s > 0.9


def test_a_slow_head_has_one_deadline(served: Served) -> None:
    """A byte now and then does not extend it."""
    with connected(served) as connection:
        connection.sendall(HALF)
        connection.settimeout(0.1)
        begun_s, answer = time.monotonic(), b""
        while not answer and time.monotonic() - begun_s < PATIENCE_S:
            try:
                connection.sendall(b"a")
                answer = connection.recv(100)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("lines", [False, True])
def test_a_head_has_at_most_so_many_bytes(served: Served, lines: bool) -> None:
    with connected(served) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n")
            for number in range(200):
                connection.sendall(b"x-%d: %s\r\n" % (number, b"a" * 1000) if lines else b"x: a" + b"a" * 1000)
            connection.sendall(b"\r\n\r\n")
        except OSError:
            # It was closed meanwhile.
            pass
        answer = rest(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    # One that has a little less is answered.
    assert served.http.get("/health", headers={"x": "a" * (HEAD_BYTES - 1000)}).status_code == 200


def test_half_requests_keep_nobody_out(served: Served) -> None:
    """A stream goes on, and others are answered, while a hundred connections that say half a head come."""
    body = {"model": "echo", "prompt": TEXT, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        stream = stack.enter_context(served.http.stream("POST", "/v1/completions", json=body))
        lines = stream.iter_lines()
        next(lines)
        for _ in range(100):
            connection = stack.enter_context(connected(served))
            connection.sendall(HALF)
        with httpx.Client(base_url=served.url, timeout=PATIENCE_S) as other:
            assert other.get("/health").status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_where_all_are_answered_the_next_one_is_refused(folder: Path) -> None:
    limits = {"connections": 2, "per_address": 2}
    with serving(folder, engine={"holds_last": True}, limits=limits) as served, ExitStack() as stack:
        body = json.dumps({"model": "echo", "prompt": TEXT, "max_tokens": 40, "ignore_eos": True, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a.localhost\r\nContent-Length: {len(body)}\r\n"
        head = head.replace("a.localhost", "localhost") + "Content-Type: application/json\r\n\r\n"
        for _ in range(2):
            connection = stack.enter_context(connected(served))
            connection.sendall(head.encode() + body.encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        third = stack.enter_context(connected(served))
        assert rest(third).startswith(b"HTTP/1.1 503 ")


def test_used_up_descriptors_are_one_line_and_others_are_answered(folder: Path) -> None:
    """The server has room for more connections than descriptors: it closes those that wait."""
    # The shell lowers the limit: a function between fork and exec is unsafe next to JAX's threads.
    few = ["bash", "-c", 'ulimit -n 100; exec "$@"', "few"]
    echo = [sys.executable, str(Path(serving_echo.__file__)), json.dumps({"reserved": -1000}), str(folder)]
    with started([*few, *echo], folder) as served, ExitStack() as stack:
        idle = [stack.enter_context(connected(served)) for _ in range(300)]
        assert len(idle) == 300
        for _ in range(20):
            with httpx.Client(base_url=served.url, timeout=PATIENCE_S) as other:
                assert other.get("/health").status_code == 200
        stack.close()
        _, log = served.stop()
    scarce = [line for line in log if line["event"].startswith("no descriptor")]
    assert len(scarce) == 1 and scarce[0]["closed"] > 0


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8000", True), ("[::1]:80", True), ("localhost", True), ("LocalHost:1", True), ("10.1.2.3", True),
        ("evil.example", False), ("127.0.0.1.evil.example:8000", False), ("localhost.evil:1", False), ("", False),
        ("[x]", False),
    ],
)  # fmt: skip
def test_a_keyless_server_knows_its_names(host: str, known: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    assert HostGuard(app, ("localhost",)).knows(host) == known
    assert HostGuard(app, ("*",)).knows(host)


def test_another_host_is_refused_unless_there_is_a_key(served: Served, folder: Path) -> None:
    evil = {"host": "evil.example"}
    answer = served.http.get("/v1/models", headers=evil)
    assert answer.status_code == 421 and "--allow-host" in answer.json()["error"]["message"]
    with serving(folder, settings={"keys": ["k"]}) as keyed:
        assert keyed.http.get("/v1/models", headers=evil | {"authorization": "Bearer k"}).status_code == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(folder: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run(command, check=True, capture_output=True)
    with serving(folder, tls=[str(cert), str(key)]) as served:
        assert served.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=served.url, verify=trust, timeout=PATIENCE_S) as client:
            assert client.get("/ready").json()["status"] == "ready"
        # Plain HTTP is no handshake: it ends, and the next client is served.
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=PATIENCE_S) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert b"200" not in rest(plain)
        with httpx.Client(base_url=served.url, verify=trust, timeout=PATIENCE_S) as client:
            assert client.get("/health").status_code == 200
    with pytest.raises(RooftopError, match=r"tls-cert: got .*; accepted: a certificate in PEM"):
        tls_context(key, key)
    locked = tmp_path / "locked.pem"
    lock = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(lock, check=True, capture_output=True)
    with pytest.raises(RooftopError, match=r"tls-key: got .*; accepted: a key without a passphrase"):
        tls_context(cert, locked)
    with pytest.raises(RooftopError, match=r"tls-key: got .*; accepted: a file in PEM"):
        tls_context(cert, tmp_path / "none")


@pytest.mark.parametrize("wrong", [{"request_s": 0}, {"connections": 0}, {"per_address": 0}])
def test_limits_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(RooftopError):
        HttpLimits(**wrong)  # type: ignore[arg-type]
