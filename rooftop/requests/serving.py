"""The request for a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ClassVar

from rooftop.requests.kinds import COUNT, COUNT_OR_ZERO, PATH, Kind, Name, Port
from rooftop.requests.request import Request, setting
from rooftop.requests.words import CACHE


@dataclass(frozen=True)
class Serve(Request):
    """A checkpoint to serve, the address to listen at, and how the engine runs. None: the plan's value or a default."""

    verb: ClassVar[str] = "serve"
    checked_by: ClassVar[str] = "rooftop.serve.request:ServeRequest"

    checkpoint: Path = setting(kind=PATH, metavar="CHECKPOINT|PLAN.json|llama:N")
    """A folder (config.json, safetensors, tokenizer.json), a plan.json with ``weights_of``, or llama:2M for a small
    random model."""
    _: KW_ONLY
    weights_of: Path | None = None
    """With a plan: its model's checkpoint."""
    host: str = "127.0.0.1"
    """Where to listen."""
    port: int = setting(8000, kind=Port())
    """Where to listen; 0: a free port."""
    name: str | None = None
    """The model's name in requests. [default: the folder's name]"""
    api_keys: tuple[str, ...] = setting((), option="api-key", several=True, envvar="ROOFTOP_API_KEY", secret=True)
    """Require this key; several may be given."""
    cors: tuple[str, ...] = setting((), several=True)
    """Let web pages of ORIGIN send requests; '*': any page."""
    max_queue: int = 1024
    """Most waiting requests; others get a 429."""
    max_body: int | None = None
    """Largest request. [default: 1Mi and what the longest prompt may take, at most 32Mi]"""
    allow_host: tuple[str, ...] = setting((), several=True)
    """Without keys: answer requests to this host name too; '*': to any. [default: localhost, --host, addresses]"""
    tls_cert: Path | None = None
    """Serve HTTPS with this certificate (PEM)."""
    tls_key: Path | None = None
    """Its private key (PEM)."""
    request_timeout_s: float = setting(30.0, option="request-timeout")
    """Time for a request's head, and for its body."""
    max_connections: int = 4096
    """Most connections at a time."""
    max_connections_per_address: int | None = None
    """Most of them from one address. [default: half of all]"""
    step_timeout_s: float = setting(120.0, option="step-timeout")
    """A step that takes longer hangs: restart."""
    chat_template: Path | None = None
    """Another chat template than the checkpoint's."""
    drain_s: float = setting(30.0, option="drain")
    """Time to finish requests after SIGTERM."""
    log_level: str = "info"
    """Least level that is logged."""
    log_texts: bool = False
    """Put prompts and answers into the log."""
    batch_seqs: int | None = None
    """Sequences in progress at most. [default: 32, or the plan's]"""
    max_model_len: int | None = None
    """Most tokens of prompt and answer. [default: the model's]"""
    chunk_tokens: int | None = setting(None, kind=COUNT_OR_ZERO)
    """Most tokens of a step; prompts are prefilled in chunks. 0: whole prompts."""
    batching: str | None = setting(None, kind=Name("interleaved", "disaggregated"))
    """Batching of requests. [default: interleaved]"""
    preemption: str | None = None
    """Preemption of sequences when pages run out. [default: recompute]"""
    draft: Path | None = setting(None, kind=PATH, metavar="MODEL")
    """Smaller model of the same vocabulary that guesses tokens."""
    draft_length: int = 0
    """Tokens guessed a round: by ``draft``, or by n-grams."""
    prefill_devices: int = setting(0, kind=COUNT_OR_ZERO)
    """Disaggregated: devices that prefill."""
    mesh: Mapping[str, int] | str | None = None
    """Axes on local devices: tensor=4,expert=2. [default: the plan's]"""
    kv_split: str | None = None
    """Split of the cache over the context axis: by sequences or tokens. [default: seq, or the plan's]"""
    compute_dtype: str | None = None
    """bf16 or f32. [default: bf16, on a CPU f32]"""
    weights_dtype: str | None = None
    """int8, f8_e4m3, f4_e2m1 (MXFP4), int4 (with ``weight_group``), or the compute dtype. [default: the plan's, or the
    checkpoint's]"""
    weight_group: int | None = None
    """Input channels that share a scale: 32, 64 or 128 in int4 and f8_e4m3."""
    kv_dtype: str | None = None
    """int8, or the compute dtype. [default: the latter, or the plan's]"""
    prefix_cache: bool = setting(True, group=CACHE)
    """Share KV of equal prefixes."""
    page_tokens: int = 16
    """Tokens of a page."""
    pages: int | None = None
    """Pages on the devices. [default: what memory allows]"""
    host_pages: int = 0
    """Pages in the host's memory."""
    shrink: bool = False
    """Shrink the plan's mesh to the local devices."""
    devices: int | None = None
    """Emulate N devices on the CPU."""
    coordinator: str | None = None
    """Run as one of several processes; 'auto' on TPU pods and Slurm."""
    processes: int | None = setting(None, kind=COUNT)
    """With ``coordinator``: number of processes."""
    process: int | None = None
    """With ``coordinator``: index of this process; 0 answers."""
    generate_at: str | None = setting(None, kind=Kind("local|HOST:PORT"))
    """Another process generates: one started here, or one that listens there."""
    role: str | None = setting(None, kind=Name("generate"))
    """Run as that process; it listens at ``host`` and ``port``."""
    link_key: str | None = setting(None, envvar="ROOFTOP_LINK_KEY", secret=True)
    """Key of the link to the other machine."""
