"""Ports for processes that tests start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
