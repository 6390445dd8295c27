"""When to stop: a signal to any of the processes, agreed on by all of them at the same step."""

from __future__ import annotations

import gc
import signal
from types import FrameType, TracebackType

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding


def one_at_a_time() -> bool:
    """Whether a program must be done before the next one begins: over several devices of CPUs (JAX 0.10.2).

    Over processes (gloo) two programs at a time gave wrong numbers; emulated devices share threads, of which those that
    wait for another device leave none for it. Nothing is lost: the cores are busy anyway.
    """
    return jax.device_count() > 1 and jax.default_backend() == "cpu"


class Stopped(Exception):
    """A signal came before there was anything to save."""

    exit_status = 0


class Signals:
    """SIGTERM and SIGINT inside the context: noted in ``caught`` while ``deferred``, and raised as ``Stopped`` before.

    A second one of them ends the process at once.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self.deferred = False
        self._before = dict[int, object]()

    def __enter__(self) -> Signals:
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
        # An exception in a callback of the garbage collector (JAX has one) is printed and lost: the first step stops.
        collecting = frame is not None and any(frame.f_code is getattr(each, "__code__", None) for each in gc.callbacks)
        if not self.deferred and not collecting:
            raise Stopped(f"stopped by {self.caught.name} before the first step")


class Agreement:
    """Whether any process wants to stop, the same on all of them: a sum over one number from each, beside each step."""

    def __init__(self) -> None:
        self._alone = jax.process_count() == 1
        if self._alone:
            return
        # One device of each process.
        first = {device.process_index: device for device in reversed(jax.devices())}
        devices = np.array([first[process] for process in sorted(first)], dtype=object)
        self._mesh = Mesh(devices, ("process",), axis_types=(AxisType.Explicit,))
        self._sum = jax.jit(jnp.sum)

    def post(self, wanted: bool) -> bool | jax.Array:
        """What this process wants at a step; to be read by ``read`` once the step is done."""
        if self._alone:
            return wanted
        mine = np.array([wanted], np.int32)
        split = NamedSharding(self._mesh, P("process"))
        with jax.set_mesh(self._mesh):
            votes = jax.make_array_from_callback((jax.process_count(),), split, lambda _: mine)
            total: jax.Array = self._sum(votes)
        # Processes on CPUs mix up the collectives of programs that run at once.
        return jax.block_until_ready(total) if one_at_a_time() else total

    def read(self, posted: bool | jax.Array) -> bool:
        """Whether any of the processes wanted to stop at that step."""
        return bool(posted)
