"""Links in TLS: nobody between the two ends reads them or takes the place of one; OpenSSL takes the certificate."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from rooftop.serve.hosts import encryption
from rooftop.serve.hosts import link as link_module
from rooftop.serve.hosts.encryption import EncryptedConnection, certificate
from rooftop.serve.hosts.link import Link, LinkListener, LinkLost, connect
from rooftop.serve.sockets import bind

SECRET = b"a word of a prompt that is private"
PAGES = bytes(range(256)) * 5000


def test_openssl_verifies_the_certificate() -> None:
    listening, der = encryption._listening()
    for trusted, is_taken in ((der, True), (certificate()[0], False)):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata=trusted)
        one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
        client, server = context.wrap_bio(one, other), listening.wrap_bio(other, one, server_side=True)
        if is_taken:
            _shake(client, server)
            assert client.version() == "TLSv1.3" and client.getpeercert(binary_form=True) == der
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                _shake(client, server)


def _shake(client: ssl.SSLObject, server: ssl.SSLObject) -> None:
    for _ in range(3):
        for end in (client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _pipe(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            record += data
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def between(port: int, relay: Callable[[socket.socket, socket.socket], None]) -> Iterator[int]:
    """Somebody between the two ends; the port that the one end takes for the other's."""
    with bind("127.0.0.1", 0) as listening:
        listening.listen()

        def run() -> None:
            with suppress(OSError):
                came, _ = listening.accept()
                with came, socket.create_connection(("127.0.0.1", port)) as onward:
                    relay(came, onward)

        thread = threading.Thread(target=run)
        thread.start()
        yield listening.getsockname()[1]
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def listener(*, encrypted: bool = True) -> Iterator[tuple[int, LinkListener]]:
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        yield bound.getsockname()[1], LinkListener(bound, "key", encrypted=encrypted)
        with suppress(OSError):
            bound.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_passes_between_the_ends(encrypted: bool) -> None:
    """Both directions at once. Without encryption the words are there: the recording would show them."""
    record = bytearray()

    def relay(came: socket.socket, onward: socket.socket) -> None:
        back = threading.Thread(target=_pipe, args=(onward, came, record))
        back.start()
        _pipe(came, onward, record)
        back.join()

    with listener(encrypted=encrypted) as (port, links), between(port, relay) as there:
        one = connect("127.0.0.1", there, "key", encrypted=encrypted)
        other = links.accept()
        for end in (one, other):
            for number in range(20):
                end.send("kv", payload=lambda: [PAGES, memoryview(PAGES)[:100]], text=SECRET.decode(), number=number)
        for end in (other, one):
            for number in range(20):
                message = end.receive()
                assert message.payload == PAGES + PAGES[:100]
                assert message.fields == {"text": SECRET.decode(), "number": number}
        for end in (one, other):
            end.discard()
    assert len(record) > 40 * len(PAGES)
    assert (SECRET in record) is not encrypted and (PAGES[:64] in record) is not encrypted


def test_somebody_between_the_ends_is_refused() -> None:
    """He speaks TLS to both, and passes the greeting on: the proofs are over another certificate."""
    until_s, passed = time.monotonic() + 30, bytearray()

    def relay(came: socket.socket, onward: socket.socket) -> None:
        his, others, thread = encryption._listening.__wrapped__(), encryption._listening, threading.current_thread()
        with pytest.MonkeyPatch.context() as patch:
            # The listener greets in a thread at the same time: its certificate stays its own.
            patch.setattr(encryption, "_listening", lambda: his if threading.current_thread() is thread else others())
            there = EncryptedConnection(came, asks=False, until_s=until_s)
        onwards = EncryptedConnection(onward, asks=True, until_s=until_s)

        def pipe(source: EncryptedConnection, sink: EncryptedConnection) -> None:
            view = memoryview(bytearray(1000))
            with suppress(OSError):
                while count := source.recv_into(view):
                    passed.extend(view[:count])
                    sink.sendall(bytes(view[:count]))
                sink.shutdown(socket.SHUT_RDWR)

        back = threading.Thread(target=pipe, args=(onwards, there))
        back.start()
        pipe(there, onwards)
        back.join()

    with listener() as (port, links), between(port, relay) as middle:
        with pytest.raises(LinkLost):
            connect("127.0.0.1", middle, "key")
        with pytest.raises(LinkLost, match="another link key"):
            links.accept()
    assert passed, "the greeting was read: only the proofs refuse it"


@pytest.mark.parametrize("encrypted", [True, False])
def test_both_ends_say_so(encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_HANDSHAKE_S", 0.5)
    with listener(encrypted=encrypted) as (port, links):
        with pytest.raises(LinkLost):
            connect("127.0.0.1", port, "key", encrypted=not encrypted)
        with pytest.raises(LinkLost):
            links.accept()
        link: Link = connect("127.0.0.1", port, "key", encrypted=encrypted)
        links.accept().discard()
        link.discard()
