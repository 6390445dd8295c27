"""A constraint whose grammar is in another process: a mask arrives for each token."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rooftop.serve.hosts.link import LinkLost


class RemoteMasks:
    """See ``rooftop.serve.engine.requests.Constraint``. One thread hears of masks, another one uses them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mask: npt.NDArray[np.uint32] | None = None
        self._words = 0
        self._released = self._ended = False
        self._calls = list[Callable[[], None]]()

    def came(self, payload: bytes | bytearray) -> None:
        """Take the next mask."""
        mask = np.frombuffer(bytes(payload), np.uint32)
        with self._changed:
            self._mask, self._words = mask, len(mask)
            calls, self._calls = self._calls, []
            self._changed.notify_all()
        for call in calls:
            call()

    def release(self) -> None:
        """Allow every token: the request is cancelled, and no mask will arrive."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def end(self) -> None:
        """Fail: the link is lost, and no mask will arrive."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def ready(self, wait_s: float = 0.0) -> bool:
        """See ``Constraint``."""
        with self._changed:
            return self._changed.wait_for(self._is_ready, wait_s)

    def when_ready(self, call: Callable[[], None]) -> None:
        """See ``Constraint``; ``call`` is called by the thread that hears of masks. It is dropped with the request."""
        with self._changed:
            if not self._is_ready():
                self._calls.append(call)
                return
        call()

    def mask(self) -> npt.NDArray[np.uint32]:
        """See ``Constraint``; waits for the other process. Raises LinkLost."""
        with self._changed:
            self._changed.wait_for(self._is_ready)
            if self._mask is not None:
                return self._mask
            if self._released:
                return np.full(self._words, 2**32 - 1, np.uint32)
        raise LinkLost("the link is lost")

    def accept(self, token: int) -> None:
        """Expect another mask: the other process accepts the token."""
        with self._changed:
            self._mask = None

    def _is_ready(self) -> bool:
        return self._mask is not None or self._released or self._ended
