"""OpenAI's API over HTTP, in front of an engine."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rooftop.core.errors import RooftopError
from rooftop.serve.api.answers import BrokenOff, Inbox, PendingAnswer, TokenStream
from rooftop.serve.api.budget import ByteBudget, be_nice
from rooftop.serve.api.grammars import GrammarQueue, TooManyGrammars
from rooftop.serve.api.metrics import PrometheusMetrics
from rooftop.serve.api.openai import AnyRequest, Form, PreparedRequest, error, prepare, read_request
from rooftop.serve.api.openapi import ENDPOINTS, document
from rooftop.serve.api.schemas import ModelCard, Models, ServerStatus
from rooftop.serve.api.texts import Texts, TooLong
from rooftop.serve.engine.requests import Beat, Overloaded, ServingEngine
from rooftop.serve.request import Settings

_Answer = TypeVar("_Answer")
#: Seconds after which to ask a server again that is loading or draining.
_RETRY_S = 5
#: Bytes of a request besides its prompt, and of any request. JSON spells a byte with at most six (``\u0041``).
_BODY_BYTES, _MOST_BODY_BYTES, _SPELLED = 2**20, 32 * 2**20, 6
#: Bytes of all requests that are being read and have not been tokenised.
_READING_BYTES = 256 * 2**20
#: Bytes of all long whole answers in progress, by their estimates, of an answer that is not long, and of a piece of one
#: that is sent.
_ANSWERS_BYTES, _SMALL_ANSWER_BYTES, _PIECE_BYTES = 512 * 2**20, 2**20, 64 * 1024
#: Least bytes of all requests that are being tokenised.
_TOKENISING_BYTES = 2**20


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        self.status, self.param, self.code = status, param, code
        self.headers = {} if retry_s is None else {"Retry-After": str(max(1, math.ceil(retry_s)))}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        super().__init__(message)

    def response(self) -> JSONResponse:
        """The error in OpenAI's form."""
        kind = {429: "rate_limit_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        content = error(str(self), kind, param=self.param, code=self.code)
        return _Json(content, status_code=self.status, headers=self.headers)


class Api:
    """State of a server: its ``engine`` (None while it loads), and ``draining`` if it shuts down.

    Create it in the event loop that serves it.
    """

    def __init__(self, settings: Settings, texts: Texts, log: logging.Logger) -> None:
        self.settings, self.texts, self.log = settings, texts, log
        self.engine: ServingEngine | None = None
        self.draining = False
        self.metrics = PrometheusMetrics(lambda: self.engine)
        self._inbox = Inbox()
        self._reading = self._answer_bytes = 0
        self._tokenising: ByteBudget | None = None
        self._readers = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "rooftop texts", be_nice)
        # Apart from the readers: a request without a grammar never waits for one.
        self._grammars = GrammarQueue(lambda: texts.grammars)
        self._created = int(time.time())
        self._document = document(settings.model, keys=bool(settings.keys))

    def app(self) -> Starlette:
        """The ASGI application."""
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "models": self._models,
            "model": self._model,
            "complete": partial(self._generate, chat=False),
            "chat": partial(self._generate, chat=True),
            "health": self._health,
            "ready": self._ready,
            "metrics": self._metrics,
            "openapi": self._openapi,
        }
        routes = [
            Route(
                # The name of a model may have slashes.
                endpoint.path.replace("{model}", "{model:path}"),
                self._guarded(handlers[endpoint.name], key=endpoint.needs_key),
                methods=[endpoint.method.upper()],
            )
            for endpoint in ENDPOINTS
        ]
        origins = list(self.settings.origins)
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
        return Starlette(
            routes=routes,
            middleware=[cors] if origins else [],
            exception_handlers={HTTPException: _http_error},
        )

    def _guarded(
        self, handle: Callable[[Request], Awaitable[Response]], *, key: bool
    ) -> Callable[[Request], Awaitable[Response]]:
        """``handle``, for clients with an API key if ``key``; refusals and defects are answered with errors."""

        async def guarded(request: Request) -> Response:
            try:
                if key:
                    self._require_key(request)
                response = await handle(request)
            except Refused as refused:
                response = refused.response()
                fields = {"path": request.url.path, "status": refused.status, "param": refused.param}
                # The message repeats a value of the request.
                fields |= {"message": str(refused)} if self.settings.log_texts else {}
                self.log.info("refused", extra={"fields": fields})
            except Exception as defect:
                response = Refused(500, "a defect of the server; its log has more").response()
                self.log.error("defect", exc_info=defect, extra={"fields": {"path": request.url.path}})
            self.metrics.responses.labels(request.scope["route"].path, response.status_code).inc()
            return response

        return guarded

    def _require_key(self, request: Request) -> None:
        if not self.settings.keys:
            return
        scheme, _, presented = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(presented.encode(), key.encode()) for key in self.settings.keys]
        if scheme.lower() != "bearer" or not any(known):
            raise Refused(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _models(self, request: Request) -> Response:
        return _Json(Models(data=[self._card()]))

    async def _model(self, request: Request) -> Response:
        self._require_model(request.path_params["model"])
        return _Json(self._card())

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self.settings.model,
            created=self._created,
            owned_by="rooftop",
            max_model_len=None if self.engine is None else self.engine.max_model_len,
            vocab=self.texts.vocab,
        )

    def _require_model(self, model: str) -> None:
        if model != self.settings.model:
            message = f"model: got {model[:60]!r}; accepted: {self.settings.model!r}"
            raise Refused(404, message, param="model", code="model_not_found")

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        arrival_s = time.monotonic()
        engine = self._require_ready()
        if self._tokenising is None:
            self._tokenising = ByteBudget(max(_TOKENISING_BYTES, self.texts.most_bytes(engine.max_model_len)))
        body = await self._body(request, engine)
        claims = ExitStack()
        try:
            async with self._tokenising.take(len(body)):
                requested, prepared = await asyncio.get_running_loop().run_in_executor(
                    self._readers, self._prepare, body, chat, engine.max_model_len
                )
            if prepared.grammar is not None:
                matcher = await self._grammars.matcher(prepared.grammar, self._client(request))
                prepared = await asyncio.to_thread(prepared.constrained, matcher)
            if not requested.stream:
                self._hold(prepared.answer_bytes, claims)
            form = Form(
                id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
                created=int(time.time()),
                model=self.settings.model,
                chat=chat,
            )
            # Long requests wait for their turn in the engine without their bodies.
            body = body if self.settings.log_texts else b""
            answer = PendingAnswer(requested, prepared, self.texts, form, self.metrics)
            answer.start(TokenStream(self._inbox, engine), arrival_s)
            ending = claims.pop_all()
        except RooftopError as wrong:
            # Clients shorten their prompt when they see this code.
            code = "context_length_exceeded" if isinstance(wrong, TooLong) else None
            raise Refused(400, str(wrong), param=wrong.field, code=code) from None
        except Overloaded as full:
            self._require_ready()
            raise Refused(429, str(full), code="rate_limit_exceeded", retry_s=full.retry_after_s) from None
        except TooManyGrammars:
            message = "too many different grammars at a time"
            raise Refused(429, message, code="rate_limit_exceeded", retry_s=_RETRY_S) from None
        finally:
            claims.close()
        headers = {"x-request-id": form.id}
        if requested.stream:
            return _EventStream(answer.events(), headers, lambda: self._note(request, answer, body))
        with ending:
            try:
                whole = await _unless_left(request.receive, answer.whole())
            except BrokenOff as broken:
                self._note(request, answer, body)
                status = 503 if broken.stopping else 500 if broken.field is None else 400
                retry_s = _RETRY_S if broken.stopping else None
                raise Refused(status, str(broken), param=broken.field, retry_s=retry_s) from None
            if whole is None:
                self._note(request, answer, body)
                return Response(status_code=499)
            self._note(request, answer, body, whole)
            return _Parts(whole, headers, ending.pop_all().close)

    def _hold(self, size: int, claims: ExitStack) -> None:
        """Count the bytes of an answer until ``claims`` is closed. Raises Refused if there are too many."""
        if size <= _SMALL_ANSWER_BYTES:
            return
        if self._answer_bytes + size > _ANSWERS_BYTES:
            raise Refused(429, "too many long answers at a time", code="rate_limit_exceeded", retry_s=_RETRY_S)
        self._answer_bytes += size
        claims.callback(self._release, size)

    def _release(self, size: int) -> None:
        self._answer_bytes -= size

    def _require_ready(self) -> ServingEngine:
        if self.draining:
            raise Refused(503, "the server is shutting down", retry_s=_RETRY_S)
        if self.engine is None:
            raise Refused(503, "the server is loading its model", retry_s=_RETRY_S)
        return self.engine

    def _client(self, request: Request) -> str:
        """Who asks: the one with this key, or at this address."""
        if self.settings.keys:
            return request.headers["authorization"]
        return "" if request.client is None else request.client.host

    def _prepare(self, body: bytes, chat: bool, max_model_len: int) -> tuple[AnyRequest, PreparedRequest]:
        requested = read_request(body, chat=chat)
        if requested.model is not None:
            self._require_model(requested.model)
        return requested, prepare(requested, body, self.texts, max_model_len)

    async def _body(self, request: Request, engine: ServingEngine) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, f"content-type: got {kind[:60]!r}; accepted: 'application/json'")
        most = self.settings.body_bytes or min(
            _MOST_BODY_BYTES, _BODY_BYTES + _SPELLED * self.texts.most_bytes(engine.max_model_len)
        )
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                self._reading += len(part)
                if len(body) > most:
                    raise Refused(413, f"body: got more than {most:,} bytes; accepted: at most those")
                if self._reading > _READING_BYTES:
                    raise Refused(429, "too many long requests at a time", code="rate_limit_exceeded", retry_s=_RETRY_S)
        except ClientDisconnect:
            raise Refused(400, "the client left") from None
        finally:
            self._reading -= len(body)
        return bytes(body)

    def _note(
        self, request: Request, answer: PendingAnswer, body: bytes, whole: Sequence[bytes | bytearray] = ()
    ) -> None:
        fields = {"path": request.url.path, **answer.record()}
        if self.settings.log_texts:
            whole_answer = msgspec.json.decode(b"".join(whole)) if whole else None
            fields |= {"request": body.decode(errors="replace"), "answer": whole_answer}
        self.log.info("answered" if answer.broken_off is None else "broken off", extra={"fields": fields})

    async def _health(self, request: Request) -> Response:
        if self.engine is None:
            return _Json(ServerStatus(status="alive"))
        beat = self.engine.beat()
        age_s = round(beat.age_s, 3)
        if self._hangs(beat):
            status = ServerStatus(status="hung", step_age_s=age_s, doing=beat.doing)
            return _Json(status, status_code=503, headers={"Retry-After": str(_RETRY_S)})
        return _Json(ServerStatus(status="alive", step_age_s=age_s))

    def _hangs(self, beat: Beat) -> bool:
        return beat.age_s > self.settings.step_s

    async def _ready(self, request: Request) -> Response:
        status = ServerStatus(status="draining" if self.draining else "loading")
        if self.engine is not None and not self.draining:
            beat = self.engine.beat()
            if not beat.restarting and not self._hangs(beat):
                return _Json(ServerStatus(status="ready"))
            status = ServerStatus(status="restarting" if beat.restarting else "hung", doing=beat.doing)
        return _Json(status, status_code=503, headers={"Retry-After": str(_RETRY_S)})

    async def _metrics(self, request: Request) -> Response:
        # The engine may be in another process, and may not answer.
        text = await run_in_threadpool(self.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request) -> Response:
        return _Json(self._document)


async def _http_error(request: Request, exception: Exception) -> Response:
    """Answer errors of the router: an unknown path or method."""
    assert isinstance(exception, HTTPException)
    hint = "; GET /openapi.json lists what is there" if exception.status_code == 404 else ""
    content = error(f"{request.method} {request.url.path[:60]}: {exception.detail}{hint}", "invalid_request_error")
    return _Json(content, status_code=exception.status_code, headers=exception.headers)


class _Json(JSONResponse):
    """A Struct or plain values as JSON."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class _Parts(Response):
    """JSON in parts, which are sent a piece at a time. ``on_end`` is called after the last one."""

    def __init__(self, parts: Sequence[bytes | bytearray], headers: dict[str, str], on_end: Callable[[], None]) -> None:
        super().__init__(headers=headers, media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts, self._on_end = parts, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for piece in self._pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                # Others have their turn between two pieces, even if the client reads at once.
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()

    def _pieces(self) -> Iterator[bytes]:
        short = bytearray()
        for part in self._parts:
            for start in range(0, len(part), _PIECE_BYTES):
                short += part[start : start + _PIECE_BYTES]
                if len(short) >= _PIECE_BYTES:
                    yield bytes(short)
                    short.clear()
        yield bytes(short)


class _EventStream(Response):
    """Server-sent events, until the client leaves. ``on_end`` is called after the last one."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: dict[str, str], on_end: Callable[[], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _unless_left(receive, self._send_all(send))
        self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, _Answer]) -> _Answer | None:
    """Return the result of ``work``; cancel it and return None if the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
