"""``rooftop serve`` in two parts, each a process or the first of several: one prefills and answers, one generates."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.core.errors import RooftopError, unknown
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.hosts.link import address

if TYPE_CHECKING:
    from rooftop.cli.serve.together import Lead
    from rooftop.serve.engine.engine import PagedEngine
    from rooftop.serve.engine.replica import Replica

_LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Which part of an engine this process is, and where the other one is.

    ``at`` is its host and port (None: it is started here, with ``environment`` beside ours, or there is none), and
    ``key`` the one of the link between them.
    """

    role: str = "both"
    at: tuple[str, int] | None = None
    key: str = field(default="", repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)

    def options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """``options`` with the batching that they imply."""
        return options if self.role == "both" else {**options, "batching": "disaggregated"}

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
        """The engine, not yet started, of this process or with a ``lead`` of several.

        Raises RooftopError and Infeasible as ``rooftop.serve.engine.loading.load`` does.
        """
        from rooftop.serve.engine.loading import load
        from rooftop.serve.hosts.loading import load_prefill
        from rooftop.serve.hosts.processes import Child, Other, Remote
        from rooftop.serve.hosts.together import load_together

        if self.role == "both":
            if lead is None:
                return load(checkpoint, configuration, draft=draft, on_progress=on_progress)
            followers = lead.followers(checkpoint, configuration)
            return load_together(checkpoint, configuration, followers, draft=draft, on_progress=on_progress)
        child: Child | None = None
        other: Other
        if self.at is None:
            other = child = Child(
                checkpoint, replace(configuration, role="generate"), environment={**_compilations(), **self.environment}
            )
        else:
            other = Remote(*self.at, self.key)

        def on_link(event: str) -> None:
            fields = {} if child is None else {"generate_pid": child.pid}
            log.log(logging.INFO if event == "linked" else logging.WARNING, f"link {event}", extra={"fields": fields})

        replica = _replica(lead, checkpoint, configuration)
        return load_prefill(checkpoint, configuration, other, replica=replica, on_progress=on_progress, on_link=on_link)


def apart(options: Mapping[str, Any]) -> Apart:
    """What --role, --generate-at and --link-key say; before JAX starts, because two processes share the GPUs here.

    Raises RooftopError naming the option that is wrong.
    """
    role, at, key = options["role"], options["generate_at"], options["link_key"]
    if role not in (None, "generate"):
        raise unknown("role", role, ("generate",))
    if role is None and at is None:
        return Apart()
    for name in ("draft", "prefill_devices"):
        if options[name] is not None:
            accepted = "none where two processes serve: a draft's cache is not sent, and all devices do the same"
            raise RooftopError(name.replace("_", "-"), str(options[name]), accepted)
    if options["batching"] not in (None, "disaggregated"):
        raise RooftopError("batching", options["batching"], "disaggregated where two processes serve")
    if role is not None and at is not None:
        raise RooftopError("generate-at", at, "none with --role generate: that is what the other process is told")
    if at == _LOCAL:
        return Apart(role="prefill", environment=_share_devices())
    if not key:
        accepted = "a word that both processes are given (or ROOFTOP_LINK_KEY): no one else may send or read KV"
        raise RooftopError("link-key", key, accepted)
    if role is not None:
        return Apart(role="generate", key=key)
    return Apart(role="prefill", at=address(at, "generate-at"), key=key)


def generate(
    checkpoint: Path, configuration: Configuration, split: Apart, options: Mapping[str, Any], as_json: bool
) -> int:
    """Generate for others, until SIGTERM or SIGINT. Raises RooftopError and Infeasible."""
    import jax

    from rooftop.cli.serve.options import on_local, port
    from rooftop.cli.serve.together import Lead
    from rooftop.serve.hosts.generating import Generator
    from rooftop.serve.hosts.loading import load_generator
    from rooftop.serve.server import bind, start_logging

    log = start_logging(options["log_level"], sys.stderr)
    lead: Lead | None = None
    if options["coordinator"] is not None:
        lead = Lead(coordinator=options["coordinator"], draft=None, log=log)
    generator: Generator | None = None

    def stop(number: int, frame: object) -> None:
        # Whoever is linked has everything that is needed to go on elsewhere.
        log.info("stopped", extra={"fields": {"signal": signal.Signals(number).name}})
        if lead is not None and generator is not None:
            # The others are in the middle of a step, which takes all of them.
            generator.stop(bound)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with bind(options["host"], port(options)) as bound:
        if options["on"] == "local":
            configuration = on_local(configuration, len(jax.devices()))
        made = load_generator(checkpoint, configuration, replica=_replica(lead, checkpoint, configuration))
        made.start()
        if lead is not None:
            lead.started(None)
            lead.stop = lambda: made.stop(bound)
        generator = made
        bound.listen()
        host, at = bound.getsockname()[:2]
        about = {
            "kind": "serve",
            "role": "generate",
            "address": f"{f'[{host}]' if ':' in host else host}:{at}",
            "model": checkpoint.resolve().name,
            "pid": os.getpid(),
            "max_model_len": generator.longest,
            "pages": generator.pages,
            "page_tokens": configuration.page_tokens,
        }
        click.echo(json.dumps(about) if as_json else f"{about['model']} generates at {about['address']}")
        sys.stdout.flush()
        log.info("ready")
        generator.serve(bound, split.key, lambda event: log.info(f"link {event}"))
        if lead is not None:
            lead.end()
    return 0


def _replica(lead: Lead | None, checkpoint: Path, configuration: Configuration) -> Callable[..., Replica]:
    """What makes the replicas of this process, or with a ``lead`` of the first of several."""
    from rooftop.serve.engine.replica import Replica
    from rooftop.serve.hosts.together import leading

    return Replica if lead is None else leading(lead.followers(checkpoint, configuration))


def _compilations() -> dict[str, str]:
    """Where this process keeps what it compiled, for another one."""
    import jax

    folder = jax.config.values["jax_compilation_cache_dir"]
    return {} if folder is None else {"JAX_COMPILATION_CACHE_DIR": str(folder)}


def _share_devices() -> dict[str, str]:
    """Half of the GPUs for us, and what tells another process to take the other half; nothing where there are none."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return {}
    devices = Path("/dev")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = sorted(path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    gpus = here if visible is None else [each for each in visible.split(",") if each]
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
