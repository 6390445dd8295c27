"""HTTP within limits: time and bytes for a request, connections in all and from one address, descriptors.

A connection *waits* until it has sent a whole request, and again after the answer. Where there are too many, the one
that has waited longest is closed for the next one: half requests and idle connections keep nobody out, and a request
whose answer is under way is never closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rooftop.core.errors import RooftopError
from rooftop.serve.api.openai import error
from rooftop.serve.api.schemas import ErrorAnswer
from rooftop.serve.logs import Seldom

#: Bytes of a request's head.
HEAD_BYTES = 64 * 1024
#: Seconds that a connection may be idle: longer than clients keep them, so that clients close them first.
_IDLE_S = 65.0
#: Seconds for a TLS handshake.
_HANDSHAKE_S = 10.0
#: Connections that the system keeps until they are accepted: one that finds no room tries again after a second.
_BACKLOG = 4096
#: Connections that are accepted in a row, and descriptors that are kept for everything else.
_ACCEPTS, _RESERVED = 64, 64
#: Seconds to wait for a descriptor.
_PAUSE_S = 0.1
#: Connections that are closed when there is no descriptor.
_EVICTED = 16
_SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
#: Most descriptors to ask for: tables of the system grow with them.
_MOST_DESCRIPTORS = 2**20
_REASONS = {status: HTTPStatus(status).phrase for status in (400, 408, 431, 503)}
_TOO_LARGE = f"a head of more than {HEAD_BYTES:,} bytes"
#: Bytes that are parsed at a time: of heads, where each may be a request, and of bodies.
_HEAD_PIECE, _BODY_PIECE = 1024, 16 * 1024
#: Seconds between two looks if a client that has sent all it will is still there.
_PROBE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Limits of connections: ``request_s`` seconds for a head and as many for a body, and numbers of connections."""

    request_s: float = 30.0
    connections: int = 4096
    per_address: int | None = None

    def __post_init__(self) -> None:
        if not self.request_s > 0:
            raise RooftopError("request-timeout", self.request_s, "a time above 0")
        if self.connections < 1:
            raise RooftopError("max-connections", self.connections, "1 or more")
        if self.per_address is not None and self.per_address < 1:
            raise RooftopError("max-connections-per-address", self.per_address, "1 or more")


def raise_descriptors() -> int:
    """Raise this process's limit of descriptors as far as it may, and return the limit."""
    try:
        import resource
    except ImportError:  # not on this system
        return _MOST_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return min(soft, _MOST_DESCRIPTORS) if soft != resource.RLIM_INFINITY else _MOST_DESCRIPTORS
    # Some systems have a lower limit that they do not say.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    """The TLS context of a server with this certificate (chain) and key. Raises RooftopError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for name, path in (("tls-cert", cert), ("tls-key", key)):
        if not path.is_file():
            raise RooftopError(name, str(path), "a file in PEM")

    def passphrase() -> str:
        # Otherwise OpenSSL asks the terminal, and a service waits.
        accepted = "a key without a passphrase: openssl pkey -in KEY -out PLAIN"
        raise RooftopError("tls-key", str(key), accepted)

    try:
        context.load_cert_chain(cert, key, passphrase)
    except (ssl.SSLError, OSError) as wrong:
        raise RooftopError("tls-cert", str(cert), f"a certificate in PEM, and its key in tls-key ({wrong})") from None
    return context


class Connections:
    """The connections of a server: at most ``most``, and at most ``per_address`` from one address."""

    def __init__(self, most: int, per_address: int) -> None:
        self.most, self.per_address = most, per_address
        self._all = set[LimitedProtocol]()
        self._of = Counter[str]()
        #: Those that wait, the longest first. Dicts are used as ordered sets.
        self._waiting = dict[LimitedProtocol, None]()

    def admit(self, connection: LimitedProtocol) -> bool:
        """Add a connection, which waits; return False if there is no room and no other one waits."""
        if self._of[connection.address] >= self.per_address and not self.evict(connection.address):
            return False
        if len(self._all) >= self.most and not self.evict():
            return False
        self._all.add(connection)
        self._of[connection.address] += 1
        self._waiting[connection] = None
        return True

    def evict(self, address: str | None = None) -> bool:
        """Close the connection, from ``address``, that has waited longest; return False if none waits."""
        for connection in self._waiting:
            if address is None or connection.address == address:
                self.forget(connection)
                connection.abort()
                return True
        return False

    def answering(self, connection: LimitedProtocol) -> None:
        """Note that a whole request has come: its connection is not closed for others."""
        self._waiting.pop(connection, None)

    def waits(self, connection: LimitedProtocol) -> None:
        """Note that a connection waits from now on."""
        if connection in self._all:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def forget(self, connection: LimitedProtocol) -> None:
        """Remove a connection."""
        self._waiting.pop(connection, None)
        if connection in self._all:
            self._all.remove(connection)
            self._of[connection.address] -= 1
            if not self._of[connection.address]:
                del self._of[connection.address]


class _Flow(FlowControl):
    """Flow control of a connection that reads more only if it ``wants`` more."""

    def __init__(self, transport: asyncio.Transport, wants: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._wants = wants

    def resume_reading(self) -> None:
        """See uvicorn."""
        if self._wants():
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP within limits. A request is read in the phases head and body; then it is answered.

    Heads are read in small pieces, and no more of them while a read one waits for the answer to another. A request to
    upgrade to another protocol is answered as any other: the parser would take its body for that protocol, so that it
    gets the head again without that wish.
    """

    def __init__(self, table: Connections, limits: HttpLimits, seldom: Seldom, **options: Any) -> None:
        super().__init__(**options)
        self.address = ""
        self._table, self._limits, self._seldom = table, limits, seldom
        self._timer: asyncio.TimerHandle | None = None
        self._phase = "head"
        #: Bytes of a head, as they came and as they were read; bytes that were received as a body, and those of it.
        self._head_bytes = self._size = self._received = self._body_bytes = 0
        self._unparsed = bytearray()
        #: The head of a request to upgrade, without that.
        self._plain = b""
        #: Status and message of what is wrong with a head; and those that are sent after the answers under way.
        self._wrong: tuple[int, str] | None = None
        self._refusal: tuple[int, str] | None = None
        #: True if nothing more is read.
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: not self.pipeline and not self._unparsed)
        self.address = self.client[0] if self.client else ""
        if self._table.admit(self):
            self._within(self._limits.request_s)
        else:
            self._refuse(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._within(None)
        self._refused = True
        self._table.forget(self)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """See ``asyncio.Protocol``: a client that has sent all it will still gets its answers."""
        answers = self.cycle is not None and not self.cycle.response_complete and self._phase != "body"
        if not answers or self.scheme == "https":
            return False
        self._refused = True
        self.cycle.keep_alive = False
        self.loop.call_later(_PROBE_S, self._probe)
        return True

    def _probe(self) -> None:
        """Send a word to a client that has sent all it will: the system says if it has left altogether."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if not self._waits_for_answer():
            self.loop.call_later(_PROBE_S, self._probe)
        elif self.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self.loop.call_later(_PROBE_S, self._probe)
        else:
            # Older clients know no such words.
            self.abort()

    def _waits_for_answer(self) -> bool:
        """True if the last answer is the only one under way, and has not begun."""
        return not self.pipeline and not self.cycle.response_started

    def abort(self) -> None:
        """Close the connection at once."""
        self._within(None)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._unset_keepalive_if_required()
        if self._refused:
            return
        if self._phase == "idle":
            self._phase, self._head_bytes = "head", 0
            self._within(self._limits.request_s)
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parse what has come, until a request waits for the answer to another."""
        while self._unparsed and not self.pipeline and not self._refused:
            size = _BODY_PIECE if self._phase == "body" else _HEAD_PIECE
            piece = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            if self._phase == "body":
                self._received += len(piece)
            else:
                self._head_bytes += len(piece)
            try:
                self._feed(piece)
            except httptools.HttpParserError as error:
                self._seldom.warn("malformed HTTP", address=self.address)
                self._refuse(*(self._wrong or (400, f"the request is not HTTP/1.1: {_reason(error)}")))
                return
            if self._phase == "head" and self._head_bytes > HEAD_BYTES:
                self._refuse(431, _TOO_LARGE)
            elif self._phase == "body" and self._received > 2 * self._body_bytes + HEAD_BYTES + _BODY_PIECE:
                self._refuse(400, "the sizes and extensions of chunks take more bytes than the body")
        if self._unparsed and not self._refused:
            self.flow.pause_reading()

    def _feed(self, piece: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(piece)
                return
            except httptools.HttpParserUpgrade as upgrade:
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                piece = self._plain + piece[upgrade.args[0] :]
                self._plain = b""

    def on_message_begin(self) -> None:
        """See ``httptools``."""
        super().on_message_begin()
        # The piece in which it begins is not counted: it may have the end of another one.
        self._phase, self._size, self._head_bytes = "head", 0, 0

    def on_url(self, url: bytes) -> None:
        """See ``httptools``."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See ``httptools``."""
        self._count(len(name) + len(value))
        # Fields after a body are no part of the head.
        if self._phase == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See ``httptools``."""
        version, method = self.parser.get_http_version(), self.parser.get_method()
        self._check(version, method)
        if self.parser.should_upgrade():
            lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
            lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
            self._plain = b"\r\n".join(lines) + b"\r\n\r\n"
            return
        self._phase, self._received, self._body_bytes = "body", 0, 0
        self._within(self._limits.request_s)
        super().on_headers_complete()

    def _check(self, version: str, method: bytes) -> None:
        """Raise ValueError for a head whose meaning others may take for another one."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            self._wrong = 400, f"HTTP/{version}: HTTP/1.1 is served"
        elif hosts > 1 or (not hosts and version == "1.1"):
            self._wrong = 400, f"host: got {hosts} of it; accepted: one"
        elif codings and (codings != [b"chunked"] or version == "1.0"):
            self._wrong = 400, "transfer-encoding: accepted: chunked, of HTTP/1.1"
        elif method == b"CONNECT":
            self._wrong = 400, "CONNECT: this is no proxy"
        if self._wrong is not None:
            raise ValueError(self._wrong[1])

    def on_body(self, body: bytes) -> None:
        """See ``httptools``."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See ``httptools``."""
        if self._plain:
            return
        self._within(None)
        self._phase = "answer"
        self._table.answering(self)
        super().on_message_complete()
        if self.cycle.response_complete:
            self._rest()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        last = not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._refused:
            if last and self._refusal is not None:
                self._answer_error(*self._refusal)
            return
        self._parse()
        self.flow.resume_reading()
        if self._phase == "answer":
            if self.cycle.response_complete:
                self._rest()
        elif not self.transport.is_closing():
            # The rest of a body, or the head of a next request, is yet to come.
            self._table.waits(self)
            if self._timer is None:
                self._within(self._limits.request_s)

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``; a client that reads nothing for long is left."""
        super().pause_writing()
        self._within(2 * self._limits.request_s)

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        super().resume_writing()
        if self._phase == "answer":
            self._within(None)

    def _rest(self) -> None:
        self._phase = "idle"
        self._table.waits(self)

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > HEAD_BYTES:
            self._wrong = 431, _TOO_LARGE
            raise ValueError(_TOO_LARGE)

    def _within(self, seconds: float | None) -> None:
        """Close the connection after so many seconds, instead of what was set before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self.flow.read_paused and self._phase in ("head", "body") and not self.flow.write_paused:
            # It is not read yet, because others are answered first.
            self._within(self._limits.request_s)
        elif self._phase == "head":
            self._refuse(408, "the head of the request has not come in time")
        elif self._phase == "body" and (self.cycle is None or not self.cycle.response_started):
            self._refuse(408, "the body of the request has not come in time")
        else:
            self.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error in OpenAI's form, after the answers under way, and close."""
        if self._refused:
            return
        self._refused = True
        self._within(None)
        cycle = self.cycle
        if self._phase == "body" and cycle is not None:
            if cycle.response_started:
                # Its answer is there, or will not be whole.
                self.transport.close() if cycle.response_complete else self.transport.abort()
                return
            cycle.disconnected = True
            cycle.message_event.set()
            if self.pipeline:
                # It is the last of those that wait; the one that is answered is none of them.
                self.pipeline.popleft()
                self._refusal = status, message
                return
        elif cycle is not None and not cycle.response_complete:
            self._refusal = status, message
            return
        self._answer_error(status, message)

    def _answer_error(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        content = _encoded(error(message, "server_error" if status >= 500 else "invalid_request_error"))
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + content)
        self.transport.close()
        # A client that does not read its refusal is not waited for.
        self.loop.call_later(1.0, self.transport.abort)


def _reason(error: Exception) -> str:
    """A parser's reason, without the place in its own code."""
    return " ".join(str(error).split())[:100]


def _encoded(answer: ErrorAnswer) -> bytes:
    import msgspec

    return msgspec.json.encode(answer)


class LimitedServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal and not with a status.

    It accepts connections itself, so that used up descriptors are back-pressure and not an error for each attempt.
    """

    def __init__(
        self, config: uvicorn.Config, limits: HttpLimits, log: logging.Logger, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._limits, self._log, self._tls = limits, log, tls
        most = max(1, min(limits.connections, _room(raise_descriptors())))
        self.table = Connections(most, min(most, limits.per_address or max(1, most // 2)))
        self._listening = list[socket.socket]()
        self._greeting = dict[asyncio.Task[None], None]()
        self._malformed, self._scarce = Seldom(log), Seldom(log)
        self._closed = 0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on ``sockets``."""
        await self.lifespan.startup()
        self.servers = []
        self._loop = asyncio.get_running_loop()
        for listening in sockets or []:
            listening.listen(self.config.backlog)
            listening.setblocking(False)
            self._listening.append(listening)
            self._loop.add_reader(listening, self._accept, listening)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end when all connections have."""
        for listening in self._listening:
            self._loop.remove_reader(listening)
        self._listening.clear()
        for task in self._greeting:
            task.cancel()
        await super().shutdown(sockets)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as failure:
                if failure.errno not in _SCARCE:
                    raise
                self._wait_for_descriptors(listening, failure)
                return
            connection.setblocking(False)
            if len(self._greeting) >= self.table.most:
                next(iter(self._greeting)).cancel()
            task = self._loop.create_task(self._greet(connection))
            self._greeting[task] = None
            task.add_done_callback(lambda done: self._greeting.pop(done, None))

    async def _greet(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
            )
        except (OSError, asyncio.CancelledError):
            # No TLS came, or not in time.
            connection.close()

    def _protocol(self) -> asyncio.Protocol:
        return LimitedProtocol(
            self.table, self._limits, self._malformed, config=self.config, server_state=self.server_state,
            app_state=self.lifespan.state, _loop=self._loop,
        )  # fmt: skip

    def _wait_for_descriptors(self, listening: socket.socket, failure: OSError) -> None:
        """Close connections that wait, and accept again when they are closed."""
        self._closed += sum(self.table.evict() for _ in range(_EVICTED))
        # Connections that have just been accepted wait from the next turn of the loop on.
        if self._closed:
            self._scarce.warn(f"no descriptor for a connection: {failure.strerror}", closed=self._closed)
        self._loop.remove_reader(listening)
        self._loop.call_later(_PAUSE_S, self._listen_again, listening)

    def _listen_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)


def _room(descriptors: int) -> int:
    """Connections that a limit of descriptors has room for."""
    return descriptors - min(_RESERVED, descriptors // 2)


class HostGuard:
    """``app`` for requests to known hosts: a web page whose name was bound to this address anew has another one.

    An address is always known: such a page cannot have it as its name.
    """

    def __init__(self, app: ASGIApp, names: tuple[str, ...]) -> None:
        self._app, self._names = app, frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)
        if host is None or self.knows(host):
            await self._app(scope, receive, send)
            return
        message = f"host: got {host[:60]!r}; accepted: an address, localhost, or a name of --allow-host"
        await _respond(send, 421, _encoded(error(message, "invalid_request_error", param="host")))

    def knows(self, host: str) -> bool:
        """Return True if requests to ``host`` (a Host header) are answered."""
        name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.rpartition(":")[0] or host
        if "*" in self._names or name.lower() in self._names:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


async def _respond(send: Callable[[Any], Awaitable[None]], status: int, content: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def serving_config(app: ASGIApp, drain_s: int) -> uvicorn.Config:
    """uvicorn's configuration of a server that is within limits."""
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=int(_IDLE_S),
        timeout_graceful_shutdown=drain_s,
    )
