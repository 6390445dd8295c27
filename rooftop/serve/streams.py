"""From the engine's thread to the event loop: tokens of many requests, one wake-up for all that have come."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from rooftop.errors import RooftopError
from rooftop.serve.requests import Engine, Overloaded, Request, Sampling, Token


class Inbox:
    """Takes tokens from the engine's thread, and hands them out in the event loop in which it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._come = deque[tuple[Stream, int, Token, float]]()
        self._woken = False

    def put(self, stream: Stream, index: int, token: Token) -> None:
        """From any thread; returns at once."""
        self._come.append((stream, index, token, time.monotonic()))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._hand_out)

    def number(self) -> int:
        """A number for a request, never given before."""
        return next(self._ids)

    def _hand_out(self) -> None:
        # First: what comes from now on wakes the loop again.
        self._woken = False
        while self._come:
            stream, index, token, when = self._come.popleft()
            stream.tokens.append((index, token, when))
            stream.ready.set()


class Stream:
    """The sequences of one answer in the engine. ``tokens``: (sequence, token, when on ``time.monotonic``) to read."""

    def __init__(self, inbox: Inbox, engine: Engine) -> None:
        self.tokens = deque[tuple[int, Token, float]]()
        self.ready = asyncio.Event()
        self._inbox, self._engine = inbox, engine
        self._running = dict[int, int]()

    def submit(self, prompts: Sequence[tuple[int, ...]], samplings: Sequence[Sampling], arrival_s: float) -> None:
        """Queue all of them, or none. Raises RooftopError or Overloaded, as the engine does."""
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            request = Request(id=self._inbox.number(), prompt=prompt, sampling=sampling, arrival_s=arrival_s)
            self._running[index] = request.id
            try:
                self._engine.submit(request, partial(self._inbox.put, self, index))
            except (RooftopError, Overloaded):
                del self._running[index]
                self.cancel()
                raise

    async def read(self) -> AsyncGenerator[list[tuple[int, Token, float]], None]:
        """What has come since the last time; until all sequences have ended."""
        while self._running:
            await self.ready.wait()
            self.ready.clear()
            come = list(self.tokens)
            self.tokens.clear()
            for index, token, _ in come:
                if token.finish is not None:
                    self._running.pop(index, None)
            yield come

    def cancel(self, index: int | None = None) -> None:
        """End sequence ``index``, or all: no one reads on."""
        for each in [*self._running] if index is None else [index]:
            number = self._running.pop(each, None)
            if number is not None:
                self._engine.cancel(number)
