"""Run a server: one process, the first of several, a follower, or the process that generates for another."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from rooftop.core.errors import Infeasible
from rooftop.core.garbage import settle
from rooftop.core.records import Record
from rooftop.runs.environment import join_processes, keep_compilations, prepare_environment, process_of
from rooftop.serve.engine.configuration import Configuration, configuration_of
from rooftop.serve.hosts.engine_process import EngineTask
from rooftop.serve.hosts.keeper import Keeper
from rooftop.serve.hosts.parts import EnginePart, Lead, choose_part, follow, replicas_of
from rooftop.serve.logs import start_logging
from rooftop.serve.request import ServeRequest, named_as_options, shrunk
from rooftop.serve.signals import stopping_signals
from rooftop.serve.sockets import address_of, bind
from rooftop.serve.source import (
    ServeSource,
    example_model,
    is_example,
    make_example,
    make_example_apart,
    read_source,
    stop_tokens,
)

if TYPE_CHECKING:
    import socket
    import ssl

    from rooftop.serve.engine.requests import ServingEngine
    from rooftop.serve.hosts.engine_child import EngineChild
    from rooftop.serve.hosts.generating import Generator
    from rooftop.serve.server import Serving

#: Options of a process that the others have otherwise, or that no log may have.
_OWN = ("--process", "--api-key", "--link-key", "--port", "--host")
#: Seconds between two log lines about compilation.
_LOG_EVERY_S = 5.0

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class ReadyServer(Record):
    """A server that answers at ``url``: its process ``pid``, and that of its engine."""

    kind: Literal["serve"] = "serve"
    url: str
    model: str
    pid: int = field(default_factory=os.getpid)
    engine_pid: int | None
    max_model_len: int
    pages: int
    page_tokens: int
    programs: int
    devices: str
    seconds: float

    @property
    def line(self) -> str:
        """One or two lines for a terminal."""
        return (
            f"{self.model} on {self.devices}: {self.pages} pages of {self.page_tokens} tokens, "
            f"{self.max_model_len} tokens a sequence; {self.programs} programs; "
            f"ready after {self.seconds:.1f} s\n{self.url}/v1"
        )


@dataclass(frozen=True, kw_only=True)
class ReadyGenerator(Record):
    """A process that generates for the server that connects to ``address``."""

    kind: Literal["serve"] = "serve"
    role: Literal["generate"] = "generate"
    address: str
    model: str
    pid: int = field(default_factory=os.getpid)
    max_model_len: int
    pages: int
    page_tokens: int

    @property
    def line(self) -> str:
        """One line for a terminal."""
        return f"{self.model} generates at {self.address}"


@dataclass(frozen=True, kw_only=True)
class ReadyFollower(Record):
    """Process ``process`` of ``processes``, which follows the first one."""

    kind: Literal["serve"] = "serve"
    role: Literal["follow"] = "follow"
    process: int
    processes: int
    model: str
    pid: int = field(default_factory=os.getpid)

    @property
    def line(self) -> str:
        """One line for a terminal."""
        return f"{self.model}: process {self.process} of {self.processes} is ready"


#: A process that is ready: it has a line for people, and JSON.
ReadyProcess: TypeAlias = ReadyServer | ReadyGenerator | ReadyFollower


def run(
    request: ServeRequest, *, on_ready: Callable[[ReadyProcess], None], on_progress: Progress | None = None
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. ``on_ready`` is called when requests are answered.

    ``on_progress`` (done, total, label) hears how many programs are compiled; without it, the log says so now and then.
    Options and the port are checked before JAX is imported. Raises RooftopError for wrong input and Infeasible if the
    weights or the cache do not fit. Call it in the main thread of a process that has not imported JAX.
    """
    prepare_environment(request.devices, extra="serve")
    if request.coordinator is not None:
        known = process_of(request.coordinator, request.processes, request.process)
        if known is None or known[1] > 0 or request.role == "generate":
            Keeper(request, on_ready, start_logging(request.log_level, sys.stderr)).run()
            return
    _run(request, on_ready, on_progress)


def run_member(request: ServeRequest, on_ready: Callable[[ReadyProcess], None]) -> None:
    """Run one of several processes of an engine, in this process, until the engine ends.

    Raises RooftopError and Infeasible.
    """
    assert request.coordinator is not None
    join_processes(request.coordinator, request.processes, request.process)
    _run(request, on_ready, None, joined=True)


def _run(
    request: ServeRequest,
    on_ready: Callable[[ReadyProcess], None],
    on_progress: Progress | None,
    *,
    joined: bool = False,
) -> None:
    """``joined``: this process is one of several of an engine, and has joined the others."""
    began_s = time.monotonic()

    def say_ready(process: ReadyProcess) -> None:
        settle()
        on_ready(process)

    part = choose_part(request)
    request = part.requested(request)
    example = is_example(request.checkpoint)
    source = None if example else read_source(request.checkpoint, request.weights_of)
    model = example_model(request.checkpoint) if source is None else source.model
    planned = None if source is None or source.plan is None else configuration_of(source.plan)
    with named_as_options():
        configuration = part.configured(request.configuration(planned, model))
    request.api_settings(model.name)  # Checked now, used once the model is there.
    # The engine has a process of its own, which alone starts JAX.
    apart = not joined and part.role != "generate"
    tls: ssl.SSLContext | None = None
    if request.tls_cert is not None and request.tls_key is not None and part.role != "generate":
        from rooftop.serve.http import tls_context

        tls = tls_context(request.tls_cert, request.tls_key)
    # One of several processes does not know yet if it listens.
    early = None if joined else bind(request.host, request.port)
    try:
        if source is None:
            folder = make_example_apart(request.checkpoint) if apart else make_example(request.checkpoint)
            source = read_source(folder, request.weights_of)
        if not apart:
            keep_compilations()
            import jax

            if request.shrink:
                configuration = shrunk(configuration, len(jax.devices()))
            if joined and jax.process_index() > 0:
                name, process, processes = source.folder.resolve().name, jax.process_index(), jax.process_count()
                ready = ReadyFollower(model=name, process=process, processes=processes)
                follow(source.folder, configuration, request.draft, lambda: say_ready(ready))
                return
        bound = early or bind(request.host, request.port)
    except BaseException:
        if early is not None:
            early.close()
        raise
    with bound:
        log = start_logging(request.log_level, sys.stderr)
        lead: Lead | None = None
        if joined and request.coordinator is not None:
            draft = None if part.role == "generate" else request.draft
            lead = Lead(coordinator=request.coordinator, draft=draft, log=log)
        if part.role == "generate":
            _generate(source.folder, configuration, part, lead, bound, log, say_ready)
        else:
            _Server(
                request=request, source=source, configuration=configuration, part=part, lead=lead, bound=bound, log=log,
                on_ready=say_ready, on_progress=on_progress, began_s=began_s, tls=tls,
            ).run()  # fmt: skip
        if lead is not None:
            lead.end()


@dataclass(kw_only=True)
class _Server:
    """A process that answers requests. With a ``lead`` its engine is in this process, otherwise in one of its own."""

    request: ServeRequest
    source: ServeSource
    configuration: Configuration
    part: EnginePart
    lead: Lead | None
    bound: socket.socket
    log: logging.Logger
    on_ready: Callable[[ReadyProcess], None]
    on_progress: Progress | None
    began_s: float
    tls: ssl.SSLContext | None
    _serving: Serving | None = field(default=None, init=False)
    _child: EngineChild | None = field(default=None, init=False)

    def run(self) -> None:
        # One thread a text, whose lock is free meanwhile: a pool of the tokenizer's own would take all cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from rooftop.serve.api.texts import Texts
        from rooftop.serve.http import HttpLimits
        from rooftop.serve.server import Serving

        folder = self.source.folder
        texts = Texts.load(
            folder,
            vocab=self.source.model.vocab,
            ends=tuple(stop_tokens(folder)),
            template=self.request.chat_template,
        )
        serving = Serving(
            bound=self.bound,
            settings=self.request.api_settings(self.source.model.name),
            texts=texts,
            log=self.log,
            load=self._load,
            on_ready=self._ready,
            drain_s=self.request.drain_s,
            limits=HttpLimits(
                request_s=self.request.request_timeout_s,
                connections=self.request.max_connections,
                per_address=self.request.max_connections_per_address,
            ),
            tls=self.tls,
        )
        self._serving = serving
        if self.lead is not None:
            self.lead.serving, self.lead.stop = serving, serving.stop
            serving.on_hang = self.lead.fail
        serving.run()
        if self._child is not None and self._child.failed is not None:
            raise Infeasible("the engine has stopped", self._child.failed)

    def _load(self) -> ServingEngine:
        """Load weights, compile every program and start the engine."""
        report = self.on_progress or _log_progress(self.log)
        report(0, 1, f"loading {self.source.model.name}")

        def on_progress(done: int, total: int) -> None:
            report(done, total, "compiling")

        folder, configuration = self.source.folder, self.configuration
        if self.lead is None:
            from rooftop.serve.hosts.engine_child import EngineChild

            assert self._serving is not None
            task = EngineTask(request=self.request, part=self.part, configuration=configuration, folder=folder)
            child = self._child = EngineChild(
                task, hang_s=self.request.step_timeout_s, log=self.log, on_progress=on_progress,
                on_failed=self._serving.refuse, on_end=self._serving.stop, others=_other_commands(self.request),
            )  # fmt: skip
            child.start()
            return child
        with named_as_options():
            engine = self.part.engine(
                folder, configuration, draft=self.request.draft, lead=self.lead, on_progress=on_progress, log=self.log
            )
        engine.start()
        self.lead.started(engine)
        return engine

    def _ready(self, engine: ServingEngine) -> None:
        stats = engine.stats()
        self.on_ready(
            ReadyServer(
                url=f"{'http' if self.tls is None else 'https'}://{address_of(self.bound)}",
                engine_pid=os.getpid() if self._child is None else self._child.pid,
                model=self.request.name or self.source.model.name,
                max_model_len=engine.max_model_len,
                pages=stats.pages,
                page_tokens=stats.page_tokens,
                programs=stats.programs,
                devices=engine.devices,
                seconds=round(time.monotonic() - self.began_s, 3),
            )
        )


def _other_commands(request: ServeRequest) -> str | None:
    """The command lines of the engine's other processes, from that of this one; None where it has no such line.

    Keys are left out.
    """
    words, skipped = list[str](), False
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        if not skipped and name not in _OWN:
            words.append(word)
        skipped = name in _OWN and not value
    if request.processes is None or len(words) == len(sys.argv) - 1:
        return None
    commands = (
        [*words, "--process", str(process)] + (["--link-key", "KEY"] if request.link_key else [])
        for process in range(1, int(request.processes))
    )
    return "; ".join(shlex.join(["rooftop", *command]) for command in commands)


def _log_progress(log: logging.Logger) -> Progress:
    """A progress callback that logs every few seconds how many programs are compiled."""
    logged_s = -_LOG_EVERY_S

    def report(done: int, total: int, label: str) -> None:
        nonlocal logged_s
        if label == "compiling" and (time.monotonic() - logged_s >= _LOG_EVERY_S or done == total):
            logged_s = time.monotonic()
            log.info(f"compiling {done}/{total}")

    return report


def _generate(
    checkpoint: Path,
    configuration: Configuration,
    part: EnginePart,
    lead: Lead | None,
    bound: socket.socket,
    log: logging.Logger,
    on_ready: Callable[[ReadyProcess], None],
) -> None:
    """Generate for another process until SIGTERM, SIGINT or SIGHUP. Raises RooftopError and Infeasible."""
    from rooftop.serve.hosts.generating import load_generator

    generator: Generator | None = None

    def stop(number: int, frame: object) -> None:
        log.info("stopped", extra={"fields": {"signal": signal.Signals(number).name}})
        if lead is not None and generator is not None:
            # The others are in the middle of a step, which needs all processes.
            generator.stop(bound)
            return
        # The linked process has all that it needs to continue elsewhere.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    for number in stopping_signals():
        signal.signal(number, stop)
    loaded = load_generator(checkpoint, configuration, replica=replicas_of(lead, checkpoint, configuration))
    loaded.start()
    if lead is not None:
        lead.started(None)
        lead.stop = lambda: loaded.stop(bound)
    generator = loaded
    bound.listen()
    on_ready(
        ReadyGenerator(
            address=address_of(bound),
            model=checkpoint.resolve().name,
            max_model_len=generator.max_model_len,
            pages=generator.pages,
            page_tokens=configuration.page_tokens,
        )
    )
    log.info("ready")
    generator.serve(bound, part.key, lambda event: log.info(f"link {event}"))
