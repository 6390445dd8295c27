"""TLS 1.3 for links between machines, without certificates that somebody has to issue.

The listening process makes a certificate of its own when it starts, for a key that never leaves it. Nobody has to trust
it: the greeting that follows (``link``) proves on both sides who knows the link key, over the certificate that each of
them sees (RFC 5929, tls-server-end-point). Somebody between them has another certificate, and the proof fails.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, cast

#: Bytes that are encrypted, and read, at a time.
_CHUNK = 1 << 18
#: A certificate is trusted by its greeting, not by its dates: the first that there is, and no known end (RFC 5280).
_BEGIN, _END = datetime(1950, 1, 1), datetime(9999, 12, 31, 23, 59, 59)


def certificate() -> tuple[bytes, bytes]:
    """DER of a certificate without a name that its own Ed25519 key has signed, and PEM of key and certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key, nobody = ed25519.Ed25519PrivateKey.generate(), x509.Name([])
    signed = (
        x509.CertificateBuilder(nobody, nobody)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .sign(key, algorithm=None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return signed.public_bytes(Encoding.DER), private + signed.public_bytes(Encoding.PEM)


@cache
def _listening() -> tuple[ssl.SSLContext, bytes]:
    """The context of this process's listeners, and the DER of its certificate."""
    der, pem = certificate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Each connection is greeted anew.
    context.num_tickets = 0
    # OpenSSL reads keys from files only.
    with tempfile.TemporaryDirectory(prefix="rooftop-link-") as folder:
        path = Path(folder) / "key.pem"
        path.touch(0o600)
        path.write_bytes(pem)
        context.load_cert_chain(path)
    return context, der


@cache
def _asking() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The greeting verifies the certificate, by the link key.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class EncryptedConnection:
    """A connection in TLS 1.3, with those methods of a socket that a link uses. One thread sends, and one receives.

    OpenSSL's state is under a lock, which is never held in a call that waits for the network.
    """

    def __init__(self, connection: socket.socket, *, asks: bool, until_s: float) -> None:
        """Shake hands, until the clock ``time.monotonic`` shows ``until_s``. Raises OSError if that fails."""
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._lock = threading.Lock()
        listening = None if asks else _listening()
        context = _asking() if listening is None else listening[0]
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not asks)
        while not self._is_done(self._tls.do_handshake):
            self._flush()
            connection.settimeout(max(1e-3, until_s - time.monotonic()))
            self._feed()
        self._flush()
        certificate = self._tls.getpeercert(binary_form=True) if listening is None else listening[1]
        #: SHA-256 of the listener's certificate, as this end sees it.
        self.binding = hashlib.sha256(certificate or b"").digest()

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of it."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _CHUNK):
            with self._lock:
                self._tls.write(view[at : at + _CHUNK])
                encrypted = self._outgoing.read()
            self._connection.sendall(encrypted)

    def recv_into(self, view: memoryview) -> int:
        """Receive some bytes, 0 at the end."""
        count, read_into = 0, cast(Callable[[int, memoryview], int], self._tls.read)

        def read() -> None:
            nonlocal count
            count = read_into(len(view), view)

        while True:
            try:
                with self._lock:
                    done = self._is_done(read)
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            if done:
                return count
            self._feed()

    def _is_done(self, call: Callable[[], Any]) -> bool:
        """Call it; False if it needs more bytes from the other side."""
        try:
            call()
        except ssl.SSLWantReadError:
            return False
        return True

    def _feed(self) -> None:
        data = self._connection.recv(_CHUNK)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self._connection.sendall(data)

    def settimeout(self, seconds: float | None) -> None:
        """See ``socket``."""
        self._connection.settimeout(seconds)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """See ``socket``."""
        self._connection.setsockopt(level, name, value)

    def shutdown(self, how: int) -> None:
        """See ``socket``; without a farewell, as every message has a digest."""
        self._connection.shutdown(how)

    def close(self) -> None:
        """See ``socket``."""
        self._connection.close()
