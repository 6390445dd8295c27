"""Budgets and turns: what requests may take at a time, all together and by client."""

from __future__ import annotations

import os
import threading
from asyncio import Future, get_running_loop
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

#: Nice value of the threads that read requests: where cores are scarce, answers in progress go first.
_NICE = 5


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


class Turns:
    """At most ``most`` turns at a time, and ``per_client`` of one client. Clients that wait take turns in a round.

    Used in one event loop.
    """

    def __init__(self, most: int, *, per_client: int) -> None:
        self._free, self._per_client = most, per_client
        self._busy = Counter[str]()
        #: Those that wait, by client; the client whose turn is next is the first.
        self._waiting = dict[str, deque[Future[None]]]()

    @asynccontextmanager
    async def take(self, client: str) -> AsyncIterator[None]:
        """Have a turn within the context."""
        turn: Future[None] = get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._wake()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._busy[client] -= 1
                if not self._busy[client]:
                    del self._busy[client]
            elif client in self._waiting:
                self._drop(client, turn)
            self._wake()

    def _wake(self) -> None:
        while self._free and (client := self._next()) is not None:
            turn = self._waiting[client][0]
            # The others come first now.
            waiting = self._waiting.pop(client)
            waiting.popleft()
            if waiting:
                self._waiting[client] = waiting
            if not turn.cancelled():
                self._free -= 1
                self._busy[client] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        return next((client for client in self._waiting if self._busy[client] < self._per_client), None)

    def _drop(self, client: str, turn: Future[None]) -> None:
        waiting = deque(item for item in self._waiting.pop(client) if item is not turn)
        if waiting:
            self._waiting[client] = waiting


def be_nice() -> None:
    """Let other threads go first where cores are scarce."""
    if hasattr(os, "setpriority"):
        # Of this thread (Linux); elsewhere there may be no such thread to the system, or no right.
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
