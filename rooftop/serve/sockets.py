"""Addresses and sockets of servers."""

from __future__ import annotations

import socket

from rooftop.core.errors import RooftopError


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket that can listen at ``host``:``port`` (0: a free port). Raises RooftopError if that fails."""
    if not 0 <= port < 2**16:
        raise RooftopError("port", port, "0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except socket.gaierror as error:
        raise RooftopError("host", host, f"a name or address of this machine ({error.strerror})") from None
    except OSError as error:
        raise RooftopError("port", port, f"one that is free at {host} ({error.strerror})") from None
    return bound


def parse_address(text: str, field: str) -> tuple[str, int]:
    """The host and port of HOST:PORT; the host may be in brackets. Raises RooftopError naming ``field``."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise RooftopError(field, text, "HOST:PORT")
    return host, int(port)


def address_of(bound: socket.socket) -> str:
    """HOST:PORT of a bound socket, an IPv6 host in brackets."""
    host, port = bound.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"
