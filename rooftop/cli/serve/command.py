"""``rooftop serve``: a checkpoint, or a serving plan of it, as OpenAI's API on the devices that are here."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.options import json_option
from rooftop.cli.output import progress_bar
from rooftop.runs.environment import keep_compilations, prepare_environment

if TYPE_CHECKING:
    from rooftop.serve.engine.requests import ServingEngine

_PATH = click.Path(path_type=Path)
#: What serving imports, by the names of modules.
_PACKAGES = (
    "jax", "safetensors", "tokenizers", "starlette", "uvicorn", "httptools", "prometheus_client", "jinja2",
    "llguidance",
)  # fmt: skip

#: Fields of an engine's configuration by the options that set them.
_OPTIONS = {
    "longest": "max-model-len", "cache": "kv-dtype", "weights": "weights-dtype", "prefill_devices": "prefill-devices",
    "kv_split": "kv-split",
}  # fmt: skip


@click.command(name="serve")
@click.argument("checkpoint", type=_PATH, metavar="CHECKPOINT|PLAN.json|llama:N")
@click.option("--weights-of", type=_PATH, metavar="DIR", help="With a plan: the folder of its model's checkpoint.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", default="8000", show_default=True, metavar="N", help="Where to listen; 0: a free port.")
@click.option("--name", metavar="NAME", help="What requests call the model. [default: the folder's name]")
@click.option(
    "--api-key", multiple=True, envvar="ROOFTOP_API_KEY", metavar="KEY", help="Ask for a key; several are good."
)
@click.option("--cors", multiple=True, metavar="ORIGIN", help="Let web pages of ORIGIN ask; '*': of any.")
@click.option("--max-batch", metavar="N", help="Most sequences in progress. [default: 32, or the plan's]")
@click.option("--max-model-len", metavar="N", help="Most tokens of a prompt and its answer. [default: the model's]")
@click.option("--max-queue", default="1024", show_default=True, metavar="N", help="Most that wait; others get a 429.")
@click.option("--max-body", default="32Mi", show_default=True, metavar="BYTES", help="Largest request.")
@click.option("--chunk-tokens", metavar="N", help="Most tokens of a step; prompts are prefilled in chunks. 0: whole.")
@click.option("--batching", metavar="KIND", help="interleaved or disaggregated. [default: interleaved]")
@click.option("--prefill-devices", metavar="N", help="Disaggregated: devices that prefill.")
@click.option("--generate-at", metavar="local|HOST:PORT", help="Another process generates: one started here, or there.")
@click.option("--role", metavar="generate", help="Be that process: listen at --host and --port for the other one.")
@click.option("--link-key", envvar="ROOFTOP_LINK_KEY", metavar="KEY", help="Known to both, if one is elsewhere.")
@click.option("--preemption", metavar="KIND", help="When pages run out: recompute or swap. [default: recompute]")
@click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True, help="Share KV of equal beginnings.")
@click.option("--guesses", default="0", show_default=True, metavar="N", help="Tokens guessed in a step, by n-grams.")
@click.option("--draft", type=_PATH, metavar="DIR", help="Or by this smaller model of the same vocabulary.")
@click.option("--page-tokens", default="16", show_default=True, metavar="N", help="Tokens of a page of the KV cache.")
@click.option("--pages", metavar="N", help="Pages of the KV cache. [default: what memory allows]")
@click.option("--host-pages", default="0", show_default=True, metavar="N", help="Pages in the host's memory.")
@click.option("--dtype", metavar="DTYPE", help="bfloat16 or float32. [default: bfloat16, on a CPU float32]")
@click.option(
    "--weights-dtype",
    metavar="DTYPE",
    help="plain (--dtype), int8, fp8, or int4-32 (groups of 32; 64, 128). [default: plain, or the plan's]",
)
@click.option("--kv-dtype", metavar="DTYPE", help="plain (--dtype) or int8. [default: plain, or the plan's]")
@click.option("--mesh", metavar="AXES", help="Axes on the devices here: tensor=4,expert=2. [default: the plan's]")
@click.option(
    "--kv-split", metavar="KIND", help="What context splits: batch or seq (tokens). [default: seq, or the plan's]"
)
@click.option("--on", metavar="local", help="'local': shrink the plan's mesh to the devices that are here.")
@click.option("--devices", metavar="N", help="Emulate N devices on the CPU.")
@click.option("--coordinator", metavar="HOST:PORT", help="Be one of several processes; 'auto' on TPU pods and Slurm.")
@click.option("--processes", metavar="N", help="With --coordinator: how many.")
@click.option("--process", metavar="I", help="With --coordinator: which one; 0 answers.")
@click.option("--chat-template", type=_PATH, metavar="FILE", help="Another chat template than the checkpoint's.")
@click.option("--drain", default="30s", show_default=True, metavar="TIME", help="At SIGTERM: time to finish in.")
@click.option("--log-level", default="info", show_default=True, metavar="LEVEL", help="debug, info, warning or error.")
@click.option("--log-texts", is_flag=True, help="Put prompts and answers into the log.")
@json_option
def command(checkpoint: Path, as_json: bool, **options: Any) -> int:
    """Serve a CHECKPOINT as OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    llama:2M is one that is made on the spot, of about so many parameters, all random.

    Beside it /health, /ready, /metrics (Prometheus) and /openapi.json. The log is on stderr, a JSON object a line.
    SIGTERM and Ctrl-C finish what is running; a second one waits no longer. With --json the one object on stdout comes
    when requests are served.

    \b
    Examples: rooftop serve llama:2M --port 8000
              rooftop serve models/llama --port 8000
              rooftop serve models/llama --max-batch 64 --kv-dtype int8 --mesh tensor=4 --host 0.0.0.0 --api-key KEY
              rooftop serve plan.json --weights-of models/llama --on local
    """
    prepare_environment(options["devices"], packages=_PACKAGES, extra="serve")
    if options["coordinator"] is None:
        from rooftop.core.errors import RooftopError

        for name in ("processes", "process"):
            if options[name] is not None:
                raise RooftopError(name, options[name], "this with --coordinator, where the processes find each other")
        return _serve(checkpoint, options, as_json)
    from rooftop.cli.serve.together import as_one_of_several

    return as_one_of_several(options, lambda: _serve(checkpoint, options, as_json))


def _serve(given: Path, options: Mapping[str, Any], as_json: bool) -> int:
    from rooftop.cli.serve.example import is_example, made
    from rooftop.cli.serve.options import configuration, on_local, port, settings, source_of
    from rooftop.cli.serve.processes import apart, generate
    from rooftop.cli.serve.together import Lead, follow, is_first
    from rooftop.core.errors import RooftopError
    from rooftop.core.quantities import parse_seconds
    from rooftop.serve.api.texts import Texts
    from rooftop.serve.engine.loading import stop_tokens
    from rooftop.serve.server import Serving, bind, start_logging

    began_s = time.monotonic()
    if options["on"] not in (None, "local"):
        raise RooftopError("on", options["on"], "local; another slice is what rooftop plan is asked for")
    split = apart(options)
    source = source_of(made(given) if is_example(given) else given, options["weights_of"])
    with _named_as_options(options):
        wanted = split.configured(configuration(split.options(options), source.plan))
    if options["coordinator"] is not None and not is_first():
        keep_compilations()
        import jax

        if options["on"] == "local":
            wanted = on_local(wanted, len(jax.devices()))
        return follow(source.folder, wanted, options["draft"], as_json=as_json)
    if split.role == "generate":
        keep_compilations()
        return generate(source.folder, wanted, split, options, as_json)
    answers = settings(options, source.model.name)
    drain_s = parse_seconds(options["drain"], "drain")
    log = start_logging(options["log_level"], sys.stderr)
    at = port(options)
    ends = tuple(stop_tokens(source.folder))
    texts = Texts.load(source.folder, vocab=source.model.vocab, ends=ends, template=options["chat_template"])
    with bind(options["host"], at) as bound:
        # Before weights are loaded: a port that is taken is known at once.
        keep_compilations()
        import jax

        here = jax.devices()
        if options["on"] == "local":
            wanted = on_local(wanted, len(here))

        lead: Lead | None = None
        if options["coordinator"] is not None:
            lead = Lead(coordinator=options["coordinator"], draft=options["draft"], log=log)

        def start() -> ServingEngine:
            with progress_bar(shown=not as_json) as progress:
                if progress is not None:
                    progress(0, 1, f"loading {source.model.name}")

                def compiling(done: int, total: int) -> None:
                    if progress is not None:
                        progress(done, total, "compiling")

                with _named_as_options(options):
                    engine = split.engine(
                        source.folder, wanted, draft=options["draft"], lead=lead, on_progress=compiling, log=log
                    )
                engine.start()
                if lead is not None:
                    lead.started(engine)
            return engine

        def ready(engine: ServingEngine) -> None:
            about = _about(engine, bound, answers.model) | {
                "devices": f"{len(here)} x {here[0].device_kind}",
                "seconds": round(time.monotonic() - began_s, 3),
            }
            click.echo(json.dumps(about) if as_json else _headline(about))

        serving = Serving(
            bound=bound, settings=answers, texts=texts, log=log, load=start, on_ready=ready, drain_s=drain_s
        )
        if lead is not None:
            lead.serving, lead.stop = serving, serving.stop
        serving.run()
        if lead is not None:
            lead.end()
    return 0


@contextmanager
def _named_as_options(options: Mapping[str, Any]) -> Iterator[None]:
    """What is wrong with a configuration is said of the option."""
    from rooftop.core.errors import RooftopError

    try:
        yield
    except RooftopError as error:
        name = error.field.replace("_", "-") if error.field in options else error.field
        raise RooftopError(_OPTIONS.get(error.field, name), error.given, error.accepted) from None


def _about(engine: ServingEngine, bound: socket.socket, model: str) -> dict[str, Any]:
    """What --json says when requests are served."""
    stats, (host, port) = engine.stats(), bound.getsockname()[:2]
    return {
        "kind": "serve",
        "url": f"http://{f'[{host}]' if ':' in host else host}:{port}",
        "model": model,
        "pid": os.getpid(),
        "max_model_len": engine.longest,
        "pages": stats.pages,
        "page_tokens": stats.page_tokens,
        "programs": stats.programs,
    }


def _headline(about: Mapping[str, Any]) -> str:
    return (
        f"{about['model']} on {about['devices']}: {about['pages']} pages of {about['page_tokens']} tokens, "
        f"{about['max_model_len']} tokens a sequence; {about['programs']} programs; "
        f"ready after {about['seconds']:.1f} s\n{about['url']}/v1"
    )
