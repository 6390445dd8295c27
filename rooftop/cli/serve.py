"""``rooftop serve``: a checkpoint, or a serving plan of it, as OpenAI's API on the devices that are here."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from rooftop.cli.options import (
    BYTES,
    COUNT,
    COUNT_OR_ZERO,
    FILE,
    PATH,
    TIME,
    Name,
    VerbCommand,
    batch_seqs_option,
    batching_option,
    compute_dtype_option,
    coordinator_option,
    devices_option,
    draft_length_option,
    draft_option,
    json_option,
    kv_dtype_option,
    mesh_option,
    option,
    process_option,
    processes_option,
    shrink_option,
    weight_group_option,
    weights_dtype_option,
)
from rooftop.cli.output import progress_bar, say
from rooftop.requests.words import CACHE, HARDWARE, PARALLELISM, PROCESSES, SERVER, WORKLOAD

if TYPE_CHECKING:
    from rooftop.serve.run import ReadyProcess

_EXAMPLES = (
    "rooftop serve llama:2M --port 8000",
    "rooftop serve models/llama --port 8000",
    "rooftop serve models/llama --batch-seqs 64 --kv-dtype int8 --mesh tensor=4 --host 0.0.0.0 --api-key KEY",
    "rooftop serve plan.json --weights-of models/llama --shrink",
)


class _ServeOptions(TypedDict):
    """Arguments and options that are fields of ``ServeRequest``."""

    checkpoint: Path
    weights_of: Path | None
    host: str
    port: int
    name: str | None
    cors: tuple[str, ...]
    batch_seqs: int | None
    max_model_len: int | None
    max_queue: int
    max_body: int | None
    chunk_tokens: int | None
    batching: str | None
    generate_at: str | None
    role: str | None
    link_key: str | None
    preemption: str | None
    prefix_cache: bool
    draft_length: int
    draft: Path | None
    page_tokens: int
    pages: int | None
    host_pages: int
    compute_dtype: str | None
    weights_dtype: str | None
    weight_group: int | None
    kv_dtype: str | None
    kv_split: str | None
    shrink: bool
    devices: int | None
    coordinator: str | None
    processes: int | None
    process: int | None
    chat_template: Path | None
    allow_host: tuple[str, ...]
    max_connections: int
    max_connections_per_address: int | None
    tls_cert: Path | None
    tls_key: Path | None
    log_level: str
    log_texts: bool


@click.command(name="serve", cls=VerbCommand, examples=_EXAMPLES)
@click.argument("checkpoint", type=PATH, metavar="CHECKPOINT|PLAN.json|llama:N")
@option("--weights-of", group=HARDWARE, type=PATH, metavar="DIR", help="With a plan: its model's checkpoint.")
@option("--host", group=SERVER, default="127.0.0.1", metavar="ADDRESS", help="Where to listen.")
@option(
    "--port", group=SERVER, default="8000", type=click.IntRange(0, 65535), metavar="N",
    help="Where to listen; 0: a free port.",
)  # fmt: skip
@option("--name", group=SERVER, metavar="NAME", help="The model's name in requests. [default: the folder's name]")
@option(
    "--api-key", group=SERVER, multiple=True, envvar="ROOFTOP_API_KEY", metavar="KEY",
    help="Require this key; several may be given.",
)  # fmt: skip
@option(
    "--cors",
    group=SERVER,
    multiple=True,
    metavar="ORIGIN",
    help="Let web pages of ORIGIN send requests; '*': any page.",
)
@batch_seqs_option(help="Sequences in progress at most. [default: 32, or the plan's]")
@option("--max-model-len", group=WORKLOAD, type=COUNT, help="Most tokens of prompt and answer. [default: the model's]")
@option("--max-queue", group=SERVER, default="1024", type=COUNT, help="Most waiting requests; others get a 429.")
@option(
    "--max-body", group=SERVER, type=BYTES,
    help="Largest request. [default: 1Mi and what the longest prompt may take, at most 32Mi]",
)  # fmt: skip
@option(
    "--allow-host", group=SERVER, multiple=True, metavar="NAME",
    help="Without keys: answer requests to this host name too; '*': to any. [default: localhost, --host, addresses]",
)  # fmt: skip
@option("--tls-cert", group=SERVER, type=FILE, metavar="FILE", help="Serve HTTPS with this certificate (PEM).")
@option("--tls-key", group=SERVER, type=FILE, metavar="FILE", help="Its private key (PEM).")
@option(
    "--request-timeout", group=SERVER, default="30s", type=TIME, help="Time for a request's head, and for its body."
)
@option("--max-connections", group=SERVER, default="4096", type=COUNT, help="Most connections at a time.")
@option(
    "--max-connections-per-address", group=SERVER, type=COUNT,
    help="Most of them from one address. [default: half of all]",
)  # fmt: skip
@option("--step-timeout", group=SERVER, default="2m", type=TIME, help="A step that takes longer hangs: restart.")
@option(
    "--chunk-tokens", group=WORKLOAD, type=COUNT_OR_ZERO,
    help="Most tokens of a step; prompts are prefilled in chunks. 0: whole prompts.",
)  # fmt: skip
@batching_option(type=Name("interleaved", "disaggregated"), help="How requests are batched. [default: interleaved]")
@option("--prefill-devices", group=PARALLELISM, type=COUNT, help="Disaggregated: devices that prefill.")
@option(
    "--generate-at", group=PROCESSES, metavar="local|HOST:PORT",
    help="Another process generates: one started here, or one that listens there.",
)  # fmt: skip
@option("--role", group=PROCESSES, type=Name("generate"), help="Run as that process; it listens at --host and --port.")
@option(
    "--link-key",
    group=PROCESSES,
    envvar="ROOFTOP_LINK_KEY",
    metavar="KEY",
    help="Key of the link to the other machine.",
)
@option(
    "--preemption",
    group=WORKLOAD,
    type=Name("recompute", "swap"),
    help="What to do when pages run out. [default: recompute]",
)
@option("--prefix-cache/--no-prefix-cache", group=CACHE, default=True, help="Share KV of equal prefixes.")
@draft_length_option(default="0", help="Tokens guessed a round: by --draft, or by n-grams.")
@draft_option(type=PATH, metavar="MODEL", help="Smaller model of the same vocabulary that guesses tokens.")
@option("--page-tokens", group=CACHE, default="16", type=COUNT, help="Tokens of a page.")
@option("--pages", group=CACHE, type=COUNT, help="Pages on the devices. [default: what memory allows]")
@option("--host-pages", group=CACHE, default="0", type=COUNT_OR_ZERO, help="Pages in the host's memory.")
@compute_dtype_option(help="bf16 or f32. [default: bf16, on a CPU f32]")
@weights_dtype_option(
    help="int8, f8_e4m3, f4_e2m1 (MXFP4), int4 (with --weight-group), or the compute dtype. [default: the plan's, or "
    "the checkpoint's]"
)
@weight_group_option(help="Input channels that share a scale: 32, 64 or 128 in int4 and f8_e4m3.")
@kv_dtype_option(help="int8, or the compute dtype. [default: the latter, or the plan's]")
@mesh_option(help="Axes on the devices here: tensor=4,expert=2. [default: the plan's]")
@option(
    "--kv-split", group=PARALLELISM, type=Name("batch", "seq"),
    help="What context splits: sequences or their tokens. [default: seq, or the plan's]",
)  # fmt: skip
@shrink_option()
@devices_option()
@coordinator_option(help="Run as one of several processes; 'auto' on TPU pods and Slurm.")
@processes_option(help="With --coordinator: number of processes.")
@process_option(help="With --coordinator: index of this process; 0 answers.")
@option("--chat-template", group=SERVER, type=FILE, help="Another chat template than the checkpoint's.")
@option("--drain", group=SERVER, default="30s", type=TIME, help="Time to finish requests after SIGTERM.")
@option(
    "--log-level", group=SERVER, default="info", type=Name("debug", "info", "warning", "error"),
    help="Least level that is logged.",
)  # fmt: skip
@option("--log-texts", group=SERVER, is_flag=True, help="Put prompts and answers into the log.")
@json_option
def command(
    *,
    api_key: tuple[str, ...],
    drain: float,
    request_timeout: float,
    step_timeout: float,
    prefill_devices: int | None,
    mesh: str | None,
    as_json: bool,
    **options: Unpack[_ServeOptions],
) -> int:
    """Serve a CHECKPOINT as OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    llama:2M is a small model with about 2 million random parameters.

    The server also answers /health, /ready, /metrics (Prometheus) and /openapi.json. The log goes to stderr, a JSON
    object a line. SIGTERM and Ctrl-C finish running requests; a second signal ends the server at once. --json prints
    its object once requests are served.
    """
    from rooftop.arrays import parse_axes
    from rooftop.serve.request import ServeRequest
    from rooftop.serve.run import run

    request = ServeRequest(
        api_keys=api_key,
        drain_s=drain,
        request_timeout_s=request_timeout,
        step_timeout_s=step_timeout,
        prefill_devices=prefill_devices or 0,
        mesh=None if mesh is None else parse_axes(mesh),
        **options,
    )
    with ExitStack() as starting:
        progress = starting.enter_context(progress_bar(shown=not as_json))
        if progress is not None:
            progress(0, 1, "importing JAX")

        def show(ready: ReadyProcess) -> None:
            starting.close()
            say(json.dumps(ready.to_json()) if as_json else ready.line)

        run(request, on_ready=show, on_progress=progress)
    return 0
