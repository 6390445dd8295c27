"""One request from submission to its last token: pieces of its answer, its latencies, and its log record."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from rooftop.core.errors import RooftopError
from rooftop.serve.api.choices import AnswerChoice, AnswerPiece
from rooftop.serve.api.grammars import Matcher
from rooftop.serve.api.metrics import PrometheusMetrics
from rooftop.serve.api.openai import MOST_ANSWER_BYTES, AnyRequest, Form, PreparedRequest, WholeChoice, error, event
from rooftop.serve.api.schemas import Usage
from rooftop.serve.api.texts import Texts
from rooftop.serve.engine.requests import GenerationRequest, Overloaded, Sampling, ServingEngine, Token

#: Tokens and alternatives that wait for readers, some 200 bytes each: of all streams, and tokens of one.
_MOST_WAITING, _MANY_WAITING = 2**21, 2**12
#: Tokens of a stream that are read before others have their turn.
_AT_A_TIME = 32


class BrokenOff(Exception):
    """The engine ended a sequence before its time: 'error', or 'cancelled' because the server stops.

    With a ``field`` the request is the cause: its constraint exceeds the limits of grammars.
    """

    def __init__(self, finish: str, message: str | None, *, field: str | None = None) -> None:
        self.stopping, self.field = finish == "cancelled", field
        super().__init__(message or ("the server is shutting down" if self.stopping else "the engine failed"))


class PendingAnswer:
    """The sequences of one request, as pieces or as a whole. They are cancelled if the reader stops."""

    def __init__(
        self, request: AnyRequest, prepared: PreparedRequest, texts: Texts, form: Form, metrics: PrometheusMetrics
    ) -> None:
        self.request, self.form = request, form
        self._prepared, self._metrics = prepared, metrics
        self._choices = [
            AnswerChoice(
                texts.vocabulary,
                request.stop_strings,
                logprobs=request.alternatives is not None,
                text=text,
                calling=prepared.calling,
            )
            for text in prepared.echo
        ]
        #: Why the answer broke off; None if it did not.
        self.broken_off: str | None = None
        #: Arrival times of the first and the last token of each sequence.
        self._times = dict[int, tuple[float, float]]()
        self._arrival_s = 0.0

    def start(self, stream: TokenStream, arrival_s: float) -> None:
        """Submit all sequences. Raises RooftopError or Overloaded."""
        self._arrival_s, self._stream = arrival_s, stream
        stream.submit(self._prepared.prompts, self._prepared.samplings, arrival_s)
        for prompt in self._prepared.prompts:
            self._metrics.prompt.observe(len(prompt))

    async def pieces(self) -> AsyncGenerator[list[tuple[int, AnswerPiece]], None]:
        """Yield pieces (choice, piece) as they arrive, those that arrived together in one list. Raises BrokenOff."""
        try:
            async with aclosing(self._stream.read()) as reading:
                async for come in reading:
                    result = []
                    for index, token, when in come:
                        choice = self._choices[index]
                        if choice.finish is not None:
                            continue
                        piece = choice.push(token)
                        if choice.failed is not None:
                            raise BrokenOff(choice.failed.finish or "error", choice.failed.message)
                        self._measure(index, when)
                        constraint = self._prepared.samplings[index].constraint
                        if isinstance(constraint, Matcher) and constraint.failed is not None:
                            message = f"the constraint could not be kept: {constraint.failed}"
                            raise BrokenOff("error", message, field=constraint.field)
                        if choice.stopped:
                            self._stream.cancel(index)
                        if piece is not None:
                            result.append((index, piece))
                    if result:
                        yield result
        except BrokenOff as broken:
            self.broken_off = str(broken)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.broken_off = "the client left"
            raise
        finally:
            self._stream.cancel()
            self._count()

    async def whole(self) -> list[bytes | bytearray]:
        """The answer as JSON, in parts. Raises BrokenOff."""
        choices, size = [WholeChoice(chat=self.form.chat) for _ in self._choices], 0
        async with aclosing(self.pieces()) as reading:
            async for come in reading:
                for index, piece in come:
                    size += choices[index].add(piece)
                if size > 2 * MOST_ANSWER_BYTES:
                    # Its tokens are longer than any estimate.
                    message = f"the answer has more than {2 * MOST_ANSWER_BYTES // 2**20} MiB"
                    raise BrokenOff("error", message, field=self.request.token_limit[0])
        return self.form.whole(choices, self.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events. If it breaks off, it ends with an error and without [DONE]."""
        try:
            async with aclosing(self.pieces()) as reading:
                async for come in reading:
                    with_usage = self.request.include_usage
                    yield b"".join(event(self.form.part(index, piece, usage=with_usage)) for index, piece in come)
            if self.request.include_usage:
                yield event(self.form.usage(self.usage()))
            yield b"data: [DONE]\n\n"
        except BrokenOff as broken:
            kind = "server_error" if broken.field is None else "invalid_request_error"
            yield event(error(str(broken), kind, param=broken.field))

    def usage(self) -> Usage:
        """Numbers of tokens. Each prompt is counted once, not once per choice."""
        prompts = self._prepared.prompts[:: self.request.choices]
        read, generated = sum(map(len, prompts)), sum(choice.tokens for choice in self._choices)
        return Usage(prompt_tokens=read, completion_tokens=generated, total_tokens=read + generated)

    def record(self) -> dict[str, Any]:
        """Return the log record of the answer, without any text."""
        first = min((first for first, _ in self._times.values()), default=None)
        return {
            "id": self.form.id,
            "stream": bool(self.request.stream),
            **msgspec.to_builtins(self.usage()),
            "finish": [choice.finish or _why(choice) for choice in self._choices],
            "ttft_s": None if first is None else round(first - self._arrival_s, 6),
            "seconds": round(time.monotonic() - self._arrival_s, 6),
            **({} if self.broken_off is None else {"broken_off": self.broken_off}),
        }

    def _measure(self, index: int, when: float) -> None:
        first, last = self._times.get(index, (when, None))
        if last is None:
            self._metrics.ttft.observe(when - self._arrival_s)
        else:
            self._metrics.itl.observe(when - last)
        self._times[index] = first, when

    def _count(self) -> None:
        """Record the metrics of each sequence, once."""
        for index, choice in enumerate(self._choices):
            self._metrics.finished.labels(choice.finish or _why(choice)).inc()
            self._metrics.output.observe(choice.tokens)
            if index in self._times and choice.finish is not None:
                first, last = self._times[index]
                self._metrics.e2e.observe(last - self._arrival_s)
                if choice.tokens > 1:
                    self._metrics.tpot.observe((last - first) / (choice.tokens - 1))


def _why(choice: AnswerChoice) -> str:
    """The finish reason of a choice that did not end by itself."""
    return "error" if choice.failed is not None and choice.failed.finish == "error" else "cancelled"


class Inbox:
    """Takes tokens from the engine's thread and hands them out in the event loop that created it.

    Where too many wait for readers, streams of which many wait are broken off.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._come = deque[tuple[TokenStream, int, Token, float]]()
        self._woken = False
        #: Tokens and alternatives of them that were handed out and not read.
        self.waiting = 0

    def put(self, stream: TokenStream, index: int, token: Token) -> None:
        """Add a token. From any thread; returns at once."""
        self._come.append((stream, index, token, time.monotonic()))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._hand_out)

    def number(self) -> int:
        """A new number for a request."""
        return next(self._ids)

    def _hand_out(self) -> None:
        # Reset first: a token that arrives from now on wakes the loop again.
        self._woken = False
        while self._come:
            stream, index, token, when = self._come.popleft()
            if stream.closed:
                continue
            self.waiting += 1 + len(token.top)
            stream.tokens.append((index, token, when))
            stream.ready.set()
            if self.waiting > _MOST_WAITING and len(stream.tokens) > _MANY_WAITING:
                stream.drop(when)


class TokenStream:
    """The sequences of one answer in the engine. ``tokens``: (sequence, token, when on ``time.monotonic``) to read."""

    def __init__(self, inbox: Inbox, engine: ServingEngine) -> None:
        self.tokens = deque[tuple[int, Token, float]]()
        self.ready = asyncio.Event()
        self._inbox, self._engine = inbox, engine
        self._running = dict[int, int]()
        #: True once no more tokens are taken.
        self.closed = False

    def submit(self, prompts: Sequence[tuple[int, ...]], samplings: Sequence[Sampling], arrival_s: float) -> None:
        """Queue all sequences, or none. Raises RooftopError or Overloaded, as the engine does."""
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            request = GenerationRequest(id=self._inbox.number(), prompt=prompt, sampling=sampling, arrival_s=arrival_s)
            self._running[index] = request.id
            try:
                self._engine.submit(request, partial(self._inbox.put, self, index))
            except (RooftopError, Overloaded):
                del self._running[index]
                self.cancel()
                raise

    async def read(self) -> AsyncGenerator[list[tuple[int, Token, float]], None]:
        """Yield the tokens since the last call, a few at a time, until all sequences have ended."""
        while self._running:
            await self.ready.wait()
            come = self._take(_AT_A_TIME)
            if self.tokens:
                # Others have their turn first.
                await asyncio.sleep(0)
            else:
                self.ready.clear()
            for index, token, _ in come:
                if token.finish is not None:
                    self._running.pop(index, None)
            yield come

    def drop(self, when: float) -> None:
        """Break off: the client does not read what comes."""
        index = self._take()[0][0]
        for number in self._running.values():
            self._engine.cancel(number)
        self._running, self.closed = {index: 0}, True
        message = "the client reads more slowly than the server can keep what it sends"
        self.tokens.append((index, Token(id=0, token=None, finish="error", message=message), when))
        self._inbox.waiting += 1

    def _take(self, most: int | None = None) -> list[tuple[int, Token, float]]:
        come = [self.tokens.popleft() for _ in range(min(len(self.tokens), most or len(self.tokens)))]
        self._inbox.waiting -= sum(1 + len(token.top) for _, token, _ in come)
        return come

    def cancel(self, index: int | None = None) -> None:
        """End sequence ``index``, or all of them."""
        if index is None:
            # Nobody reads what is yet to come.
            self.closed = True
            self._take()
        for item in [*self._running] if index is None else [index]:
            number = self._running.pop(item, None)
            if number is not None:
                self._engine.cancel(number)
