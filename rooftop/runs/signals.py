"""When to stop: a signal to any of the processes, agreed on by all of them at the same step."""

from __future__ import annotations

import gc
import signal
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType

import jax
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding, reshard


def one_at_a_time() -> bool:
    """True if a program must end before the next one starts: on several CPU devices (JAX 0.10.2).

    Between processes (gloo) two programs at a time gave wrong numbers. Emulated devices share threads: those that wait
    in one program for another device may leave no thread for it. Nothing is lost, as the cores are busy anyway.
    """
    return jax.device_count() > 1 and jax.default_backend() == "cpu"


class Stopped(Exception):
    """A signal that came before there was anything to save."""

    exit_status = 0


class Signals:
    """SIGTERM and SIGINT inside the context: noted in ``caught`` while ``deferred``, raised as ``Stopped`` before.

    A second signal ends the process at once. Outside of the main thread, signals are left alone.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self.deferred = False
        self._before = dict[int, object]()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught = signal.Signals(number)
        # Python prints and drops an exception in a callback of the garbage collector (JAX has one). The first step
        # stops the run instead.
        collecting = frame is not None and any(frame.f_code is getattr(call, "__code__", None) for call in gc.callbacks)
        if not self.deferred and not collecting:
            raise Stopped(f"stopped by {self.caught.name} before the first step")


@dataclass(frozen=True, kw_only=True)
class Votes:
    """Votes of all processes at a step: True to ``stop`` if any does, and the seconds that each worked on its host."""

    stop: bool
    host_s: tuple[float, ...]


class Agreement:
    """A vote of all processes, with the same result on all of them: two numbers from each, gathered."""

    def __init__(self) -> None:
        self._alone = jax.process_count() == 1
        if self._alone:
            return
        # One device of each process.
        first = {device.process_index: device for device in reversed(jax.devices())}
        devices = np.array([first[process] for process in sorted(first)], dtype=object)
        self._mesh = Mesh(devices, ("process",), axis_types=(AxisType.Explicit,))
        self._gather = jax.jit(lambda votes: reshard(votes, P()))

    def post(self, stop: bool, host_s: float) -> Votes | jax.Array:
        """Vote at a step, with the seconds of host work before it. ``read`` returns the result once it is done."""
        if self._alone:
            return Votes(stop=stop, host_s=(host_s,))
        vote = np.array([[stop, host_s]], np.float32)
        split = NamedSharding(self._mesh, P("process"))
        with jax.set_mesh(self._mesh):
            votes = jax.make_array_from_callback((jax.process_count(), 2), split, lambda _: vote)
            all_votes: jax.Array = self._gather(votes)
        # Processes on CPUs mix up the collectives of programs that run at once.
        return jax.block_until_ready(all_votes) if one_at_a_time() else all_votes

    def any(self, vote: bool) -> bool:
        """Return True if any process votes so."""
        return self.read(self.post(vote, 0.0)).stop

    def read(self, posted: Votes | jax.Array) -> Votes:
        """The votes of all processes at that step."""
        if isinstance(posted, Votes):
            return posted
        votes = np.asarray(posted)
        return Votes(stop=bool(votes[:, 0].any()), host_s=tuple(votes[:, 1].tolist()))
