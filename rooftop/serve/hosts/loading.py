"""From a checkpoint to an engine of two parts, each of one process or several."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import rooftop
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.loading import parts
from rooftop.serve.engine.replica import Replica
from rooftop.serve.hosts.generating import Generator
from rooftop.serve.hosts.handover import fingerprint
from rooftop.serve.hosts.prefilling import PrefillEngine
from rooftop.serve.hosts.processes import GeneratorTask, Other
from rooftop.serve.server import bind


def load_prefill(
    checkpoint: Path,
    configuration: Configuration,
    other: Other,
    *,
    options: Mapping[str, Any] | None = None,
    replica: Callable[..., Replica] = Replica,
    on_progress: Callable[[int, int], None] | None = None,
    on_link: Callable[[str], None] = lambda event: None,
) -> PrefillEngine:
    """An engine, not yet started, that prefills here (role 'prefill'), and of which ``other`` generates.

    With a kind of ``replica``, as the first of several processes (``together``). Raises as ``load`` does.
    """
    loaded = parts(checkpoint, configuration, None, None, options, replica)
    return PrefillEngine(
        loaded.replicas[0],
        configuration,
        other,
        facts=_facts(checkpoint, loaded.replicas[0], configuration),
        longest=loaded.longest,
        stops=loaded.stops,
        on_progress=on_progress,
        on_link=on_link,
    )


def load_generator(
    checkpoint: Path,
    configuration: Configuration,
    *,
    options: Mapping[str, Any] | None = None,
    replica: Callable[..., Replica] = Replica,
    on_progress: Callable[[int, int], None] | None = None,
) -> Generator:
    """The other part (role 'generate'), likewise. Raises as ``load`` does."""
    loaded = parts(checkpoint, configuration, None, None, options, replica)
    facts = _facts(checkpoint, loaded.replicas[0], configuration)
    return Generator(loaded.replicas[0], configuration, longest=loaded.longest, facts=facts, on_progress=on_progress)


def _facts(checkpoint: Path, replica: Replica, configuration: Configuration) -> dict[str, Any]:
    """Facts that two processes of one engine must share: the same weights, and pages that can be sent."""
    return {
        "version": rooftop.__version__,
        "checkpoint": fingerprint(checkpoint),
        "weights": configuration.weights,
        "dtype": replica.decoder.dtype,
        "page_tokens": configuration.page_tokens,
        "pools": [[list(leaf.shape[1:]), str(leaf.dtype)] for leaf in replica.pool_leaves],
    }


def main() -> None:
    """The process that is started here: generates for the one that started it, until that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Whatever else is printed goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task: GeneratorTask = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()

    try:
        generator = load_generator(task.checkpoint, task.configuration, options=task.options)
        generator.start()
    except RooftopError as error:
        said = {"field": error.field, "given": str(error.given), "accepted": error.accepted}
        print(json.dumps(said), file=out, flush=True)
        return
    except Infeasible as error:
        print(json.dumps({"what": error.what, "by": error.by}), file=out, flush=True)
        return
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        print(json.dumps({"port": bound.getsockname()[1]}), file=out, flush=True)
        generator.serve(bound, task.key, lambda event: None)


def _end_with(pipe: IO[bytes]) -> None:
    pipe.read()
    os._exit(0)


if __name__ == "__main__":
    main()
