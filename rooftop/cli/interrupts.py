"""Ctrl-C while JAX is imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done. For imports of JAX: interrupted, its extension modules abort."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)
