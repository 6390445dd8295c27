"""The process of the API: its socket, signals, loading, and graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from rooftop.serve.api.app import Api
from rooftop.serve.api.texts import Texts
from rooftop.serve.engine.requests import ServingEngine
from rooftop.serve.http import HostGuard, HttpLimits, LimitedServer, serving_config
from rooftop.serve.request import Settings
from rooftop.serve.signals import stopping_signals

#: Seconds for HTTP after the last token.
_MARGIN_S = 5
#: Seconds between two looks at the heartbeat of an engine in this process.
_LOOK_S = 1.0


@dataclass(kw_only=True)
class Serving:
    """A server from its first request to its last.

    It listens on ``bound`` while ``load`` makes and starts the engine; ``on_ready`` is called with it. Then it serves
    until SIGTERM, SIGINT or SIGHUP, and finishes what is running, for ``drain_s`` seconds at most; a second signal
    waits no longer. A signal that comes before the engine is there ends the process, with status 0. ``on_hang`` is
    called when a step takes too long.
    """

    bound: socket.socket
    settings: Settings
    texts: Texts
    log: logging.Logger
    load: Callable[[], ServingEngine]
    on_ready: Callable[[ServingEngine], None]
    drain_s: float
    limits: HttpLimits = field(default_factory=HttpLimits)
    tls: ssl.SSLContext | None = None
    on_hang: Callable[[str], None] = lambda message: None

    def run(self) -> None:
        """Serve until the server has ended. Raises the errors of ``load``."""
        asyncio.run(self._run())

    def stop(self) -> None:
        """Stop as SIGTERM does, once. From any thread."""
        self._loop.call_soon_threadsafe(lambda: None if self._api.draining else self._stop(signal.SIGTERM))

    def refuse(self) -> None:
        """Shut down because the engine takes no more requests. From any thread."""
        self._loop.call_soon_threadsafe(self._refuse)

    def _refuse(self) -> None:
        self._api.draining = self._server.should_exit = True

    async def _run(self) -> None:
        self._api = Api(self.settings, self.texts, self.log)
        self._drained: asyncio.Task[bool] | None = None
        app: ASGIApp = self._api.app()
        if not self.settings.keys:
            app = HostGuard(app, self.settings.hosts)
        config = serving_config(app, int(self.drain_s) + _MARGIN_S)
        self._server = LimitedServer(config, self.limits, self.log, self.tls)
        self._loop = asyncio.get_running_loop()
        for number in stopping_signals():
            self._loop.add_signal_handler(number, self._stop, number)
        serving = asyncio.create_task(self._server.serve(sockets=[self.bound]))
        try:
            self._api.engine = await asyncio.to_thread(self.load)
            self.on_ready(self._api.engine)
            self.log.info("ready")
            watching = asyncio.create_task(self._watch(self._api.engine))
            await serving
            watching.cancel()
            if self._drained is not None:
                whole = await self._drained
                self.log.info("drained", extra={"fields": {"all_finished": whole}})
        finally:
            self._server.should_exit = self._server.force_exit = True
            await serving

    async def _watch(self, engine: ServingEngine) -> None:
        """Log when the step loop stops turning, and when it turns again."""
        was = False
        while True:
            await asyncio.sleep(_LOOK_S)
            beat = engine.beat()
            hangs = beat.age_s > self.settings.step_s
            if hangs and not was:
                fields = {"seconds": round(beat.age_s, 1), "doing": beat.doing}
                self.log.error("the step loop hangs", extra={"fields": fields})
                self.on_hang(f"a step has taken {beat.age_s:.0f} s; it was {beat.doing}")
            elif was and not hangs:
                self.log.info("the step loop turns again")
            was = hangs

    def _stop(self, number: signal.Signals) -> None:
        if self._api.engine is None:
            # Nothing is served yet, and compiling cannot be interrupted otherwise.
            self.log.info("stopped", extra={"fields": {"signal": number.name}})
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self._api.draining = self._server.should_exit = True
        if self._drained is None:
            self.log.info("draining", extra={"fields": {"signal": number.name}})
            self._drained = asyncio.create_task(asyncio.to_thread(self._api.engine.drain, self.drain_s))
        else:
            self._server.force_exit = True
            self._drained = asyncio.create_task(asyncio.to_thread(self._api.engine.drain, 0.0))
