"""Workers: processes that make batches ready ahead of time and in order, and the channel to them.

Threads of one process wait for each other at each short call of NumPy; processes do not. Arrays go through memory that
both processes map: one end writes, the other reads in place. The memory is a file without a name, passed as an open
file descriptor, so nothing stays behind however the processes end. Blocks of ``multiprocessing.shared_memory`` have
names: after SIGKILL they would stay.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, TypeVar

from rooftop.core.errors import RooftopError
from rooftop.core.rounding import next_multiple
from rooftop.embed.host.buffers import Buffers
from rooftop.embed.host.preprocess import Preprocessed, Preprocessor
from rooftop.embed.host.statistics import Statistics

_B = TypeVar("_B")
_R = TypeVar("_R")

#: Batches that a worker has: one that it works on, and one that waits for it or for the caller.
_AHEAD = 2
#: Seconds that a worker has to end by itself.
_PATIENCE = 5.0
#: Where a worker's task lies; its batches and answers lie at 0 to _AHEAD - 1, their buffers behind these.
_TASK = 2 * _AHEAD
#: Most workers.
MOST_WORKERS = 256
#: Where files lie in memory, if the system has it; otherwise, or if it is full, they go to the temporary folder.
_MEMORY = Path("/dev/shm")
#: Arrays begin at multiples of this many bytes, a cache line.
_ALIGNMENT = 64

_Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Ready(Generic[_R]):
    """A batch made ready and the ``rest`` of it. The buffers are written again when the next batch is requested."""

    rest: _R
    made: Preprocessed


@dataclass(frozen=True, kw_only=True)
class _Task(Generic[_B, _R]):
    """Work on each batch: ``split`` it into ids by feature and the rest; preprocess the ids with ``make()``."""

    split: Callable[[_B], tuple[Mapping[str, Any], _R]]
    make: Callable[[], Preprocessor]


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Answer of a worker without the buffers: the ``rest`` of a batch or an error, and its warnings."""

    rest: Any = None
    minibatches: int = 1
    statistics: Statistics | None = None
    error: Exception | None = None
    said: tuple[str, ...] = ()


def check_workers(count: object) -> None:
    """Raises RooftopError unless there may be so many workers."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_WORKERS:
        raise RooftopError("workers", count, f"a whole number from 0 to {MOST_WORKERS}")


def make_ready(
    batches: Iterable[_B],
    split: Callable[[_B], tuple[Mapping[str, Any], _R]],
    make: Callable[[], Preprocessor],
    *,
    workers: int = 0,
) -> Generator[Ready[_R]]:
    """Make each of ``batches`` ready with the preprocessor of ``make``; ``split`` gives ids by feature and the rest.

    ``workers`` processes work a few batches ahead, until the generator is closed. With 0, the caller's process works
    when a batch is requested. ``split``, ``make`` and batches are pickled, so they belong to modules that can be
    imported. An error of a batch is raised in its turn. Raises RooftopError.
    """
    check_workers(workers)
    task = _Task(split=split, make=make)
    return _here(batches, task) if workers == 0 else _ahead(batches, task, workers)


def _here(batches: Iterable[_B], task: _Task[_B, _R]) -> Generator[Ready[_R]]:
    preprocessor = task.make()
    buffers = preprocessor.buffers()
    for batch in batches:
        ids, rest = task.split(batch)
        yield Ready(rest=rest, made=preprocessor.preprocess(ids, out=buffers))


def _ahead(batches: Iterable[_B], task: _Task[_B, _R], count: int) -> Generator[Ready[_R]]:
    """Batches go to each worker in turn, and come back from it."""
    wrong, sent, taken = list[Exception](), 0, 0

    def readable() -> Iterator[_B]:
        # Those before what cannot be read come first.
        try:
            yield from batches
        except Exception as error:
            wrong.append(error)

    reading = readable()
    with ExitStack() as ends:
        workers = [ends.enter_context(_Worker(count)) for _ in range(count)]
        for worker in workers:
            worker.send(_TASK, task)
        while True:
            for batch in islice(reading, count * _AHEAD - (sent - taken)):
                workers[sent % count].send(sent // count % _AHEAD, batch)
                sent += 1
            if taken == sent:
                break
            yield workers[taken % count].take()
            taken += 1
    for error in wrong:
        raise error


class _Worker:
    """The caller's view of a worker process, which ends with the context."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._buffers = dict[int, Mapping[str, Buffers]]()
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"import sys; sys.path[:] = {sys.path!r}; from rooftop.embed.host.workers import work"
            # In a session of its own, Ctrl-C is for the caller alone.
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}; work({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._line = Line(ours)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def send(self, place: int, value: object) -> None:
        """Hand over the task or a batch."""
        try:
            self._line.send(place, value)
        except ConnectionError:
            raise self._ended() from None

    def take(self) -> Ready[Any]:
        """The next batch that was handed over, made ready."""
        try:
            place, value = self._line.receive()
            if place >= _AHEAD:
                self._buffers[place - _AHEAD] = value
                place, value = self._line.receive()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        answer: _Answer = pickle.loads(value)
        for message in answer.said:
            warnings.warn(message, stacklevel=2)
        if answer.error is not None:
            raise answer.error
        assert answer.statistics is not None
        preprocessed = Preprocessed(
            buffers=self._buffers[place], minibatches=answer.minibatches, statistics=answer.statistics
        )
        return Ready(rest=answer.rest, made=preprocessed)

    def _ended(self) -> RooftopError:
        """Error for a process that ended by itself, most likely for lack of memory."""
        status = self._process.wait()
        end = f"signal {-status}" if status < 0 else f"status {status}"
        return RooftopError("workers", f"one of {self._count} that ended with {end}", "fewer, or more memory for each")


def work(file: int) -> NoReturn:
    """Make batches ready for the process at the other end of the socket ``file``, until it is gone; then this ends."""
    line = Line(socket.socket(fileno=file))
    with suppress(EOFError, ConnectionError):
        _, task = line.receive()
        ready: Callable[[Any, int], _Answer] | None = None
        while True:
            place, batch = line.receive()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    ready = ready or _readier(task, line)
                    answer = ready(batch, place)
                except Exception as error:
                    answer = _Answer(error=error)
                    if not isinstance(error, RooftopError):
                        error.add_note("".join(traceback.format_exception(error)))
            answer = replace(answer, said=tuple(str(warning.message) for warning in said))
            # Within the bytes: the caller may keep what it gets.
            line.send(place, pickle.dumps(answer, 5))
    # The caller waits for the end, which takes Python a while and has nothing left to do.
    sys.stderr.flush()
    os._exit(0)


def _readier(task: _Task[Any, Any], line: Line) -> Callable[[Any, int], _Answer]:
    preprocessor = task.make()
    buffers = dict[int, Mapping[str, Buffers]]()

    def ready(batch: Any, place: int) -> _Answer:
        ids, rest = task.split(batch)
        if place not in buffers:
            spans = line.send(_AHEAD + place, preprocessor.buffers())
            buffers[place] = line.shared(_AHEAD + place, spans)
        preprocessed = preprocessor.preprocess(ids, out=buffers[place])
        return _Answer(rest=rest, minibatches=preprocessed.minibatches, statistics=preprocessed.statistics)

    return ready


class Line:
    """One end of a channel between two processes. An object stays at its ``place`` until another is sent there."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        # Each has a file of its own to close.
        self._channel = Connection(os.dup(end.fileno()))
        self._own, self._theirs = dict[int, mmap.mmap](), dict[int, mmap.mmap]()

    def send(self, place: int, value: object) -> list[_Span]:
        """Pickle ``value`` into shared memory; return its spans, for ``shared``.

        Raises OSError if the other end is gone, RooftopError if there is no room.
        """
        parts: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, 5, buffer_callback=parts.append)
        pieces, spans, end = [memoryview(head), *(part.raw() for part in parts)], list[_Span](), 0
        for piece in pieces:
            spans.append((end, end + piece.nbytes))
            end += next_multiple(piece.nbytes, _ALIGNMENT)
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
        """The object sent to ``place``: writing to its arrays writes to those of the other end."""
        return _read(self._own[place], spans)

    def receive(self) -> tuple[int, Any]:
        """Receive the next object and its place. Raises EOFError or OSError if the other end is gone."""
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
        """Tell the other end that this one is gone. Received arrays stay valid while they are referenced."""
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
    problem = f"{size} bytes to hand to another process"
    raise RooftopError("memory", problem, f"room for them in {_MEMORY} or {tempfile.gettempdir()}")
