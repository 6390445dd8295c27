"""Objects between two processes, the arrays in them in memory that both map: one end writes, the other reads in place.

The memory is a file without a name, handed over as an open one: however the processes end, nothing stays behind.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from rooftop.core.errors import RooftopError

#: Where files lie in memory, if the system has it; they go where temporary files do if it has not, or is full.
_MEMORY = Path("/dev/shm")
#: Arrays begin at multiples of so many bytes, a cache line.
_ALIGNMENT = 64

_Span = tuple[int, int]


class Line:
    """One end of a line between two processes. What is sent lies at a ``place`` until something else is sent there."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        # Each has a file of its own to close.
        self._channel = Connection(os.dup(end.fileno()))
        self._own, self._theirs = dict[int, mmap.mmap](), dict[int, mmap.mmap]()

    def send(self, place: int, value: object) -> list[_Span]:
        """Hand over ``value``, of anything that is pickled, and tell where it lies for ``shared``.

        Raises OSError where the other end is gone, RooftopError where there is no room.
        """
        parts: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, 5, buffer_callback=parts.append)
        pieces, spans, end = [memoryview(head), *(part.raw() for part in parts)], list[_Span](), 0
        for piece in pieces:
            spans.append((end, end + piece.nbytes))
            end += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        if place in self._own and len(self._own[place]) >= end:
            self._write(place, pieces, spans)
            self._channel.send((place, spans, 0))
            return spans
        # Room for what is a little larger, the next time.
        size = end + end // 4
        with _file(size) as file:
            self._own[place] = mmap.mmap(file.fileno(), size)
            self._write(place, pieces, spans)
            self._channel.send((place, spans, size))
            socket.send_fds(self._socket, [b"\0"], [file.fileno()])
        return spans

    def _write(self, place: int, pieces: Sequence[memoryview], spans: Sequence[_Span]) -> None:
        memory = memoryview(self._own[place])
        for piece, (begin, end) in zip(pieces, spans, strict=True):
            memory[begin:end] = piece

    def shared(self, place: int, spans: Sequence[_Span]) -> Any:
        """What was sent to ``place``, as the other end has it: to write to its arrays is to write to the other's."""
        return _read(self._own[place], spans)

    def receive(self) -> tuple[int, Any]:
        """The next place and what was sent there. Raises EOFError or OSError where the other end is gone."""
        place, spans, size = self._channel.recv()
        if size:
            _, files, _, _ = socket.recv_fds(self._socket, 1, 1)
            if not files:
                raise EOFError
            try:
                self._theirs[place] = mmap.mmap(files[0], size)
            finally:
                os.close(files[0])
        return place, _read(self._theirs[place], spans)

    def close(self) -> None:
        """Let the other end know that this one is gone. Arrays that were received stay until nobody has them."""
        self._channel.close()
        self._socket.close()


def _read(memory: mmap.mmap, spans: Sequence[_Span]) -> Any:
    whole = memoryview(memory)
    head, *parts = (whole[begin:end] for begin, end in spans)
    return pickle.loads(head, buffers=parts)


def _file(size: int) -> IO[bytes]:
    """A file of ``size`` bytes, for all of which there is room. Raises RooftopError."""
    for folder in (_MEMORY, Path(tempfile.gettempdir())):
        with suppress(OSError), ExitStack() as unless_kept:
            file = unless_kept.enter_context(tempfile.TemporaryFile(dir=folder))
            if hasattr(os, "posix_fallocate"):
                # A process that writes to a page for which there is no room is ended.
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            unless_kept.pop_all()
            return file
    given = f"{size} bytes to hand to another process"
    raise RooftopError("memory", given, f"room for them in {_MEMORY} or {tempfile.gettempdir()}")
