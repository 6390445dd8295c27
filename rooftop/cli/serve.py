"""``rooftop serve``: a checkpoint, or a serving plan of it, as OpenAI's API on the devices that are here."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from rooftop.cli.options import VerbCommand, json_option, request_options
from rooftop.cli.output import progress_bar, say
from rooftop.requests.serving import Serve

if TYPE_CHECKING:
    from rooftop.serve.request import ServeRequest
    from rooftop.serve.run import ReadyProcess

_EXAMPLES = (
    "rooftop serve llama:2M --port 8000",
    "rooftop serve models/llama --port 8000",
    "rooftop serve models/llama --batch-seqs 64 --kv-dtype int8 --mesh tensor=4 --host 0.0.0.0 --api-key KEY",
    "rooftop serve plan.json --weights-of models/llama --shrink",
)


@click.command(name="serve", cls=VerbCommand, examples=_EXAMPLES)
@request_options(Serve)
@json_option
def command(*, request: ServeRequest, as_json: bool) -> int:
    """Serve a CHECKPOINT as OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    llama:2M is a small model with about 2 million random parameters.

    The server also answers /health, /ready, /metrics (Prometheus) and /openapi.json. The log goes to stderr, a JSON
    object a line. SIGTERM and Ctrl-C finish running requests; a second signal ends the server at once. --json prints
    its object once requests are served.
    """
    from rooftop.serve.run import run

    with ExitStack() as starting:
        progress = starting.enter_context(progress_bar(shown=not as_json))
        if progress is not None:
            progress(0, 1, "importing JAX")

        def show(ready: ReadyProcess) -> None:
            starting.close()
            say(json.dumps(ready.to_json()) if as_json else ready.line)

        run(request, on_ready=show, on_progress=progress)
    return 0
