"""A connection between the process that prefills and the one that generates: messages over TCP, each of them checked.

Both know a key. They prove it to each other before anything else is read, and every digest depends on it and on the
number of the message: none can be made, changed, left out or repeated by others. Between machines they are encrypted
(``encryption``), so that others cannot read them either.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from queue import Queue, SimpleQueue
from typing import Any

from rooftop.serve.hosts.encryption import EncryptedConnection

#: Part of a payload.
Buffer = bytes | memoryview
_LENGTHS = struct.Struct(">II")
_DIGEST = 16
_NONCE = 32
#: Most queued messages: few, because queued pages take memory.
_WAITING = 16
_HANDSHAKE_S = 10.0
#: Connections that are greeted at a time, and seconds to wait for a descriptor.
_GREETINGS, _PAUSE_S = 32, 0.1
#: Seconds without confirmation after which the other machine counts as lost.
_LOST_S = 30


class LinkLost(Exception):
    """There is no connection; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message: its ``fields`` are JSON; its ``payload`` is empty if there is none, and None if it is damaged."""

    kind: str
    fields: Mapping[str, Any]
    payload: bytearray | None


class Link:
    """One end of a connection. Any thread may send and close, one receives.

    A thread of the link writes messages in order. If that fails, the receiver raises LinkLost.
    """

    def __init__(self, connection: socket.socket | EncryptedConnection, *, send_key: bytes, receive_key: bytes) -> None:
        self._connection = connection
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        self._reason: str | None = None
        self._waiting = Queue[tuple[bytes, Callable[[], Sequence[Buffer]] | None] | None](_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="rooftop link writer", daemon=True)
        self._writer.start()

    @property
    def open(self) -> bool:
        """True until the connection is closed or lost here."""
        return self._reason is None

    def send(self, kind: str, *, payload: Callable[[], Sequence[Buffer]] | None = None, **fields: Any) -> None:
        """Queue a message; after the connection is lost nothing happens. ``payload`` is made when it is its turn."""
        if self._reason is None:
            self._waiting.put((json.dumps([kind, fields]).encode(), payload))

    def receive(self) -> Message:
        """The next message. Raises LinkLost at the end, and if a message is damaged."""
        lengths, number = self._take(_LENGTHS.size), self._received
        self._received += 1
        self._verify(lengths, number, b"lengths")
        head_bytes, payload_bytes = _LENGTHS.unpack(lengths)
        head = self._take(head_bytes)
        self._verify(head, number, b"head")
        payload: bytearray | None = bytearray()
        if payload_bytes:
            payload = self._take(payload_bytes)
            if not self._has_digest(payload, number, b"payload"):
                payload = None
        kind, fields = json.loads(bytes(head))
        return Message(kind=kind, fields=fields, payload=payload)

    def close(self, reason: str = "closed") -> None:
        """Close the connection, for both sides. Queued messages are not sent."""
        if self._reason is None:
            self._reason = reason
        # It may have ended already.
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """Send all queued messages, then close the connection."""
        self._waiting.put(None)
        self._writer.join()
        self.close()

    def discard(self) -> None:
        """Close the connection and join its thread; called by the receiver, after the end."""
        self.close()
        self._waiting.put(None)
        self._writer.join()
        self._connection.close()

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._reason is not None:
                continue
            head, payload = item
            try:
                self._write(head, [] if payload is None else payload())
            except Exception as error:  # of the connection, or of a device that pages are on
                self.close(f"{type(error).__name__}: {error}")

    def _write(self, head: bytes, payload: Sequence[Buffer]) -> None:
        number = self._sent
        self._sent += 1
        size = sum(len(part) for part in payload)
        lengths = _LENGTHS.pack(len(head), size)
        result = [lengths, self._digest(self._send_key, number, b"lengths", lengths).digest()]
        result += [head, self._digest(self._send_key, number, b"head", head).digest()]
        self._connection.sendall(b"".join(result))
        if size:
            digest = self._digest(self._send_key, number, b"payload", b"")
            for part in payload:
                digest.update(part)
                self._connection.sendall(part)
            self._connection.sendall(digest.digest())

    def _take(self, count: int) -> bytearray:
        try:
            return _exactly(self._connection, count)
        except LinkLost as error:
            raise LinkLost(self._reason or str(error)) from None

    def _verify(self, data: bytearray, number: int, what: bytes) -> None:
        if not self._has_digest(data, number, what):
            self.close(f"the {what.decode()} of message {number} came damaged")
            raise LinkLost(str(self._reason))

    def _has_digest(self, data: bytearray, number: int, what: bytes) -> bool:
        came = self._take(_DIGEST)
        return hmac.compare_digest(came, self._digest(self._receive_key, number, what, data).digest())

    @staticmethod
    def _digest(key: bytes, number: int, what: bytes, data: bytes | bytearray) -> blake2b:
        digest = blake2b(number.to_bytes(_DIGEST, "big"), digest_size=_DIGEST, key=key, person=what)
        digest.update(data)
        return digest


def connect(host: str, port: int, key: str, *, encrypted: bool = True) -> Link:
    """A link to a process that listens at ``host``:``port`` and knows ``key``. Raises LinkLost.

    Both ends say whether it is ``encrypted``; on one machine it need not be.
    """
    try:
        connection = socket.create_connection((host, port), timeout=_HANDSHAKE_S)
    except OSError as error:
        raise LinkLost(f"{host}:{port} cannot be reached ({error.strerror or error})") from None
    return _shake_hands(connection, key, asks=True, encrypted=encrypted)


class LinkListener:
    """Links from processes that know ``key``, at a socket that listens.

    Each connection is greeted in a thread of its own, so that strangers who say nothing keep nobody waiting. Of more
    than ``_GREETINGS`` at a time the first one is closed: who knows the key needs milliseconds.
    """

    def __init__(self, listening: socket.socket, key: str, *, encrypted: bool = True) -> None:
        self._listening, self._key, self._encrypted = listening, key, encrypted
        self._come = SimpleQueue[Link | Exception]()
        self._lock = threading.Lock()
        self._greeting = dict[socket.socket, None]()
        threading.Thread(target=self._accept_all, name="rooftop link listener", daemon=True).start()

    def accept(self) -> Link:
        """The next link. Raises LinkLost for one from a stranger, and OSError when the socket is shut down."""
        come = self._come.get()
        if isinstance(come, Exception):
            raise come
        return come

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._close_first()
                    time.sleep(_PAUSE_S)
                    continue
                self._come.put(error)
                return
            if len(self._greeting) >= _GREETINGS:
                self._close_first()
            with self._lock:
                self._greeting[connection] = None
            threading.Thread(target=self._greet, args=(connection,), name="rooftop link greeting", daemon=True).start()

    def _close_first(self) -> None:
        with self._lock:
            first = next(iter(self._greeting), None)
            if first is not None:
                del self._greeting[first]
                # It may have ended already. Its thread closes it.
                with suppress(OSError):
                    first.shutdown(socket.SHUT_RDWR)

    def _greet(self, connection: socket.socket) -> None:
        try:
            come: Link | Exception = _shake_hands(connection, self._key, asks=False, encrypted=self._encrypted)
        except LinkLost as error:
            come = error
        with self._lock:
            self._greeting.pop(connection, None)
        self._come.put(come)


def _shake_hands(accepted: socket.socket, key: str, *, asks: bool, encrypted: bool) -> Link:
    """Handshake: each side proves that it knows the key, over random numbers of both, and over the certificate."""
    connection: socket.socket | EncryptedConnection = accepted
    try:
        until_s, binding = time.monotonic() + _HANDSHAKE_S, b""
        if encrypted:
            connection = EncryptedConnection(accepted, asks=asks, until_s=until_s)
            binding = connection.binding
        connection.settimeout(_HANDSHAKE_S)
        ours = secrets.token_bytes(_NONCE)
        connection.sendall(ours)
        theirs = bytes(_exactly(connection, _NONCE, until_s=until_s))
        root, nonces = blake2b(key.encode()).digest(), ours + theirs if asks else theirs + ours
        nonces += binding

        def derived(what: bytes) -> bytes:
            return blake2b(nonces, key=root, person=what, digest_size=32).digest()

        # The connecting side proves first: the listener sends a stranger nothing that depends on the key.
        proofs = (derived(b"asks"), derived(b"answers"))
        if asks:
            connection.sendall(proofs[0])
        theirs = bytes(_exactly(connection, len(proofs[asks]), until_s=until_s))
        if not hmac.compare_digest(theirs, proofs[asks]):
            raise LinkLost("the other side has another link key")
        if not asks:
            connection.sendall(proofs[1])
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Not every system has these options.
        for name, value in (
            ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 1000 * _LOST_S),
        ):  # fmt: skip
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except OSError as error:
        connection.close()
        raise LinkLost(f"no link ({error.strerror or error})") from None
    except LinkLost as error:
        connection.close()
        raise LinkLost(f"no link ({error}); is its key the same?" if asks else str(error)) from None
    to, back = derived(b"to answering"), derived(b"to asking")
    return Link(connection, send_key=to if asks else back, receive_key=back if asks else to)


def _exactly(connection: socket.socket | EncryptedConnection, count: int, *, until_s: float | None = None) -> bytearray:
    """Read ``count`` bytes, until ``until_s``. Raises LinkLost if they do not arrive."""
    exactly = bytearray(count)
    view, at = memoryview(exactly), 0
    while at < count:
        try:
            if until_s is not None:
                # One deadline for all bytes, however slowly they arrive.
                connection.settimeout(max(1e-3, until_s - time.monotonic()))
            more = connection.recv_into(view[at:])
        except OSError as error:
            raise LinkLost(error.strerror or str(error)) from None
        if not more:
            raise LinkLost("the other side has closed the link")
        at += more
    return exactly
