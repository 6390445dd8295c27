"""TLS 1.3 for links between machines, without certificates that somebody has to issue.

The listening process makes a certificate of its own when it starts, for a key that never leaves it. Nobody has to trust
it: the greeting that follows (``link``) proves on both sides who knows the link key, over the certificate that each of
them sees (RFC 5929, tls-server-end-point). Somebody between them has another certificate, and the proof fails.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

#: Bytes that are encrypted, and read, at a time.
_CHUNK = 1 << 18
#: Tags and texts of the times of a certificate: RFC 5280 has another tag from 2050 on, and this for no known end.
_VALID = (0x17, b"000101000000Z"), (0x18, b"99991231235959Z")

# ---- a certificate: Ed25519, RFC 8032 and 8410 -----------------------------------------------------------------------

_PRIME = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_CURVE = -121665 * pow(121666, -1, _PRIME) % _PRIME
_BASE_Y = 4 * pow(5, -1, _PRIME) % _PRIME
#: DER of the algorithm's identifier, 1.3.101.112.
_ED25519 = bytes.fromhex("300506032b6570")
#: A point (X, Y, Z, T) with x = X/Z, y = Y/Z and x y = T/Z.
_Point = tuple[int, int, int, int]


def _x_of(y: int) -> int:
    """The even x of a point with this y."""
    square = (y * y - 1) * pow(_CURVE * y * y + 1, -1, _PRIME) % _PRIME
    x = pow(square, (_PRIME + 3) // 8, _PRIME)
    if (x * x - square) % _PRIME:
        x = x * pow(2, (_PRIME - 1) // 4, _PRIME) % _PRIME
    return x if x % 2 == 0 else _PRIME - x


_BASE: _Point = (_x_of(_BASE_Y), _BASE_Y, 1, _x_of(_BASE_Y) * _BASE_Y % _PRIME)


def _sum(a: _Point, b: _Point) -> _Point:
    s, t = (a[1] - a[0]) * (b[1] - b[0]) % _PRIME, (a[1] + a[0]) * (b[1] + b[0]) % _PRIME
    u, v = 2 * a[3] * b[3] * _CURVE % _PRIME, 2 * a[2] * b[2] % _PRIME
    e, f, g, h = t - s, v - u, v + u, t + s
    return e * f % _PRIME, g * h % _PRIME, f * g % _PRIME, e * h % _PRIME


def _encoded(scalar: int) -> bytes:
    """The point ``scalar`` times the base."""
    result, power = (0, 1, 1, 0), _BASE
    while scalar:
        if scalar & 1:
            result = _sum(result, power)
        power, scalar = _sum(power, power), scalar >> 1
    inverse = pow(result[2], -1, _PRIME)
    x, y = result[0] * inverse % _PRIME, result[1] * inverse % _PRIME
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _scalar(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    return int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | (1 << 254), digest[32:]


def public_key(seed: bytes) -> bytes:
    """The public key [32] of a private one [32]."""
    return _encoded(_scalar(seed)[0])


def sign(seed: bytes, message: bytes) -> bytes:
    """The signature [64] of a message by a private key [32]."""
    scalar, prefix = _scalar(seed)

    def number(*parts: bytes) -> int:
        return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER

    nonce = number(prefix, message)
    point = _encoded(nonce)
    answer = (nonce + number(point, public_key(seed), message) * scalar) % _ORDER
    return point + answer.to_bytes(32, "little")


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content).to_bytes((len(content).bit_length() + 7) // 8 or 1, "big")
    return bytes([tag]) + (size if len(content) < 128 else bytes([128 + len(size)]) + size) + content


def certificate(seed: bytes) -> bytes:
    """DER of a certificate that an Ed25519 key [32] has signed for itself; it has no name."""
    sequence, integer, bits = 0x30, 0x02, 0x03
    nobody = _der(sequence)
    signed = _der(
        sequence, _der(0xA0, _der(integer, b"\2")), _der(integer, b"\1" + secrets.token_bytes(8)), _ED25519, nobody,
        _der(sequence, *(_der(tag, moment) for tag, moment in _VALID)), nobody,
        _der(sequence, _ED25519, _der(bits, b"\0" + public_key(seed))),
    )  # fmt: skip
    return _der(sequence, signed, _ED25519, _der(bits, b"\0" + sign(seed, signed)))


# ---- connections -----------------------------------------------------------------------------------------------------


@cache
def _listening() -> tuple[ssl.SSLContext, bytes]:
    """The context of this process's listeners, and the DER of its certificate."""
    seed = secrets.token_bytes(32)
    der = certificate(seed)
    private = _private_pem(seed)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Each connection is greeted anew.
    context.num_tickets = 0
    # OpenSSL reads keys from files only.
    with tempfile.TemporaryDirectory(prefix="rooftop-link-") as folder:
        path = Path(folder) / "key.pem"
        path.touch(0o600)
        path.write_text(private + ssl.DER_cert_to_PEM_cert(der), encoding="ascii")
        context.load_cert_chain(path)
    return context, der


def _private_pem(seed: bytes) -> str:
    """The private key in PKCS 8 (RFC 8410)."""
    der = _der(0x30, _der(0x02, b"\0"), _ED25519, _der(0x04, _der(0x04, seed)))
    return f"-----BEGIN PRIVATE KEY-----\n{base64.b64encode(der).decode()}\n-----END PRIVATE KEY-----\n"


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
