"""Budgets of bytes: what requests may take at a time, all together."""

from __future__ import annotations

from asyncio import Future, get_running_loop
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """At most ``most`` bytes at a time; who needs more than is left waits, first come, first served.

    A request for more than ``most`` has all of it. Used in one event loop.
    """

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self._waiting = deque[tuple[int, Future[None]]]()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Have ``size`` bytes within the context."""
        size = min(size, self.most)
        if self._waiting or self.used + size > self.most:
            turn: Future[None] = get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except BaseException:
                # Cancelled: the turn may have come all the same.
                if turn.done() and not turn.cancelled():
                    self._give_back(size)
                else:
                    self._waiting = deque(item for item in self._waiting if item[1] is not turn)
                    self._wake()
                raise
        else:
            self.used += size
        try:
            yield
        finally:
            self._give_back(size)

    def _give_back(self, size: int) -> None:
        self.used -= size
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.most:
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.used += size
                turn.set_result(None)
