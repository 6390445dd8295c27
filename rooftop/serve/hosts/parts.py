"""The part of an engine that this process runs, and the processes that run it together.

An engine may have two parts: one prefills and answers, the other generates. Each part is one process or several, of
which the first leads and the others follow.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rooftop.core.errors import RooftopError, unknown
from rooftop.runs.supervise import LOST_STATUS
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.hosts.processes import Child, Other, Remote
from rooftop.serve.request import ServeRequest
from rooftop.serve.signals import stopping_signals
from rooftop.serve.sockets import parse_address

if TYPE_CHECKING:
    from rooftop.serve.engine.engine import PagedEngine
    from rooftop.serve.engine.replica import Replica
    from rooftop.serve.hosts.together import Followers
    from rooftop.serve.server import Serving

_LOCAL = "local"
#: Least characters of a key, and different ones of them: 32 of base 16 are 128 bits.
_KEY_CHARACTERS, _KEY_KINDS = 32, 8
#: Seconds for clients to receive errors after a process is lost; a hanging collective ends by then.
_GRACE_S = 10.0
#: Seconds from a failed collective to the news that a process of it is lost: its link ends at the same time.
_NEWS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class EnginePart:
    """The part of an engine that this process runs, and the address of the other part.

    ``at`` is the other part's host and port. None: there is no other part, or it is started here with ``environment``
    added to ours. ``key`` is the key of the link between them. A step of the other part that takes ``step_s`` hangs.
    """

    role: str = "both"
    address: tuple[str, int] | None = None
    key: str = field(default="", repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)
    step_s: float = math.inf

    def requested(self, request: ServeRequest) -> ServeRequest:
        """``request`` with the batching that two parts imply."""
        return request if self.role == "both" else replace(request, batching="disaggregated")

    def configured(self, configuration: Configuration) -> Configuration:
        """``configuration`` of this part."""
        return replace(configuration, role=self.role)

    def engine(
        self,
        checkpoint: Path,
        configuration: Configuration,
        *,
        draft: Path | None,
        lead: Lead | None,
        on_progress: Callable[[int, int], None],
        log: logging.Logger,
    ) -> PagedEngine:
        """The engine of this process, not yet started; with a ``lead``, of several processes.

        Raises RooftopError and Infeasible as ``rooftop.serve.engine.loading.load`` does.
        """
        from rooftop.serve.engine.loading import load
        from rooftop.serve.hosts.prefilling import load_prefill

        replica = replicas_of(lead, checkpoint, configuration)
        if self.role == "both":
            return load(checkpoint, configuration, draft=draft, replica=replica, on_progress=on_progress)
        child: Child | None = None
        other: Other
        if self.address is None:
            environment = {**_compilations(), **self.environment}
            other = child = Child(checkpoint, replace(configuration, role="generate"), environment=environment)
        else:
            other = Remote(*self.address, self.key)

        def on_link(event: str) -> None:
            fields = {} if child is None else {"generate_pid": child.pid}
            log.log(logging.INFO if event == "linked" else logging.WARNING, f"link {event}", extra={"fields": fields})

        engine = load_prefill(
            checkpoint, configuration, other, replica=replica, on_progress=on_progress, on_link=on_link
        )
        engine.step_s = self.step_s
        return engine


def choose_part(request: ServeRequest) -> EnginePart:
    """The part that ``request`` asks for. Call it before JAX starts: two processes here share the GPUs.

    Raises RooftopError naming the option that is wrong.
    """
    role, peer = request.role, request.generate_at
    if role not in (None, "generate"):
        raise unknown("role", role, ("generate",))
    if role is None and peer is None:
        return EnginePart()
    for name, value in (("draft", request.draft), ("prefill-devices", request.prefill_devices or None)):
        if value is not None:
            accepted = "none where two processes serve: a draft's cache is not sent, and all devices do the same"
            raise RooftopError(name, str(value), accepted)
    if request.batching not in (None, "disaggregated"):
        raise RooftopError("batching", request.batching, "disaggregated where two processes serve")
    if role is not None and peer is not None:
        raise RooftopError("generate-at", peer, "none with --role generate: the other process has this option")
    if peer == _LOCAL:
        return EnginePart(role="prefill", environment=_share_devices(), step_s=request.step_timeout_s)
    check_link_key(request.link_key)
    assert request.link_key is not None
    if role is not None:
        return EnginePart(role="generate", key=request.link_key)
    assert peer is not None
    address = parse_address(peer, "generate-at")
    return EnginePart(role="prefill", address=address, key=request.link_key, step_s=request.step_timeout_s)


def check_link_key(key: str | None) -> None:
    """Raise RooftopError for a key that can be guessed. Whoever answers in place of the other process may try words."""
    if key is None or len(key) < _KEY_CHARACTERS or len(set(key)) < _KEY_KINDS:
        shown = None if not key else f"{len(key)} characters"
        accepted = f"a secret of both processes (or ROOFTOP_LINK_KEY), {_KEY_CHARACTERS} random characters or more"
        raise RooftopError("link-key", shown, f"{accepted}: openssl rand -hex 32 writes one")


def replicas_of(lead: Lead | None, checkpoint: Path, configuration: Configuration) -> Callable[..., Replica]:
    """The constructor of this process's replicas; with a ``lead``, of replicas over several processes."""
    from rooftop.serve.engine.replica import Replica
    from rooftop.serve.hosts.together import Leading

    return Replica if lead is None else partial(Leading, lead.followers(checkpoint, configuration))


def _compilations() -> dict[str, str]:
    """The variable that gives another process our compilation cache."""
    import jax

    folder = jax.config.values["jax_compilation_cache_dir"]
    return {} if folder is None else {"JAX_COMPILATION_CACHE_DIR": str(folder)}


def _share_devices() -> dict[str, str]:
    """Keep half of the GPUs, and return the variable that gives another process the other half; none without GPUs."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return {}
    devices = Path("/dev")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = sorted(path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    gpus = here if visible is None else [name for name in visible.split(",") if name]
    if not gpus and (any(devices.glob("accel*")) or any(devices.glob("vfio/[0-9]*"))):
        accepted = "HOST:PORT of another machine; here TPUs are split with --batching disaggregated --prefill-devices N"
        raise RooftopError("generate-at", _LOCAL, accepted)
    if len(gpus) == 1:
        raise RooftopError("generate-at", _LOCAL, "HOST:PORT of another machine: this one has one GPU")
    half = len(gpus) // 2
    if not half:
        return {}
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:half])
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[half : 2 * half])}


@dataclass(kw_only=True)
class Lead:
    """The first process: its links to the followers, and the end of its ``serving`` when one of them is lost.

    ``draft`` is the folder of a draft model. ``stop`` is called when a follower is told to end. ``on_lost`` is called
    when one is lost; without it requests end with an error, and this process soon.
    """

    coordinator: str
    draft: Path | None
    log: logging.Logger
    stop: Callable[[], None] = lambda: None
    on_lost: Callable[[str], None] | None = None
    #: True once all processes are there.
    joined: bool = False
    serving: Serving | None = None
    _followers: Followers | None = field(default=None, init=False)
    _engine: PagedEngine | None = field(default=None, init=False)
    _lost: str | None = field(default=None, init=False)

    def followers(self, checkpoint: Path, configuration: Configuration) -> Followers:
        """The other processes. Raises RooftopError as ``rooftop.serve.hosts.together.gather`` does."""
        from rooftop.serve.hosts.together import gather, own_host

        self._followers = gather(
            checkpoint,
            configuration,
            own_host(self.coordinator),
            draft=self.draft,
            on_lost=self.fail,
            on_stop=lambda: self.stop(),
        )
        return self._followers

    def started(self, engine: PagedEngine | None) -> None:
        """Wait until the followers have started. ``engine`` (None: it has no requests) hears of losses."""
        assert self._followers is not None
        self._followers.wait()
        self._engine = engine
        if engine is not None and self.on_lost is not None:
            # A collective may hear of a loss before the link does. ``on_lost`` ends this process meanwhile, and
            # requests that have sent nothing are repeated.
            engine.on_failed = lambda: time.sleep(_NEWS_S)

    @property
    def doing(self) -> str:
        """The commands that each follower has begun, in a line."""
        return "" if self._followers is None else self._followers.doing

    def end(self) -> None:
        """End the followers after the last request."""
        if self._lost is not None:
            end_process(self._lost, LOST_STATUS)
        if self._followers is not None:
            self._followers.stop()

    def fail(self, message: str) -> None:
        """End every request with an error, and all processes soon: one of them is lost, or a step hangs."""
        self._lost = message
        if self.on_lost is not None:
            self.on_lost(message)
            return
        if self._engine is None or self.serving is None:
            end_process(message, LOST_STATUS)
        self.log.error(message)
        threading.Timer(_GRACE_S, end_process, (message, LOST_STATUS)).start()
        self._engine.abandon(message)
        self.serving.refuse()


def follow(checkpoint: Path, configuration: Configuration, draft: Path | None, on_ready: Callable[[], None]) -> None:
    """Follow the first process until it ends. Raises RooftopError and Infeasible."""
    from rooftop.serve.hosts.together import Follower

    follower = Follower(
        checkpoint, configuration, draft=draft, on_lost=lambda message: end_process(message, LOST_STATUS)
    )

    def stop(number: int, frame: object) -> None:
        # Running requests are finished first, and that needs all processes.
        follower.stop()

    for number in stopping_signals():
        signal.signal(number, stop)
    follower.run(on_ready)


def end_process(line: str, status: int) -> NoReturn:
    """Print one line and end this process at once: the usual way out waits for the other processes."""
    print(f"rooftop: {line}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
