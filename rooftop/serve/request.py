"""A request to serve a model. Everything in it is checked before JAX or the HTTP server is imported."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from rooftop.arrays import parse_axes
from rooftop.capabilities import ENGINE_WEIGHTS, KV_SPLITS, published_weights
from rooftop.core.errors import RooftopError, one_of, unknown
from rooftop.models import ModelConfig
from rooftop.requests.serving import Serve
from rooftop.scheduling.serving.scheduler import BATCHING, Policy
from rooftop.serve.engine.configuration import Configuration

#: Levels of the server's log.
LEVELS = ("debug", "info", "warning", "error")
#: Compute dtypes, which are stored without conversion, and their JAX names.
_COMPUTED = {"bf16": "bfloat16", "f32": "float32"}
_QUANTISED = ("int8", "f8_e4m3", "int4", "f4_e2m1")
_WEIGHTS = (*_COMPUTED, *_QUANTISED)
_CACHES = (*_COMPUTED, "int8")
#: Tokens of a step for prompts, next to one for every sequence that generates.
_PROMPT_TOKENS = 224


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the API.

    A keyless server answers requests to the host names ``hosts`` and to addresses; '*': to any. A step of the engine
    that takes longer than ``step_s`` hangs.
    ``model`` is the model's name in requests. Without ``keys`` everyone may ask. Web pages of ``origins`` may ask from
    a browser. A request has at most ``body_bytes`` (None: as many as the model's longest prompt may take).
    ``log_texts`` writes prompts and answers to the log.
    """

    model: str
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    body_bytes: int | None = None
    log_texts: bool = False
    hosts: tuple[str, ...] = ("localhost",)
    step_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise RooftopError("step-timeout", self.step_s, "a time above 0")
        if self.body_bytes is not None and self.body_bytes < 1:
            raise RooftopError("max-body", self.body_bytes, "a positive number of bytes")
        if not all(self.keys):
            raise RooftopError("api-key", "", "a key that is not empty")


@dataclass(frozen=True)
class ServeRequest(Serve):
    """A request for a server, checked. Raises RooftopError naming the field that is wrong."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise RooftopError("port", self.port, "0 to 65535")
        if self.log_level not in LEVELS:
            raise unknown("log-level", self.log_level, LEVELS)
        for name, known in (
            ("compute_dtype", _COMPUTED), ("weights_dtype", _WEIGHTS), ("kv_dtype", _CACHES),
            ("batching", [kind for kind in BATCHING if kind != "static"]),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value not in known:
                raise unknown(name.replace("_", "-"), value, known)
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise RooftopError(other.replace("_", "-"), None, f"a file in PEM, with --{name.replace('_', '-')}")
        if self.coordinator is None:
            for name in ("processes", "process"):
                if getattr(self, name) is not None:
                    accepted = "this with --coordinator, where the processes find each other"
                    raise RooftopError(name, getattr(self, name), accepted)
        elif self.generate_at == "local":
            accepted = "HOST:PORT with --coordinator: the processes that generate are started as these are"
            raise RooftopError("generate-at", "local", accepted)

    @property
    def axes(self) -> Mapping[str, int] | None:
        """Mesh axes and their sizes. Raises RooftopError if the text names none."""
        return parse_axes(self.mesh) if isinstance(self.mesh, str) else self.mesh

    def api_settings(self, model: str) -> Settings:
        """Settings of the API for ``model``. Raises RooftopError."""
        return Settings(
            model=self.name or model,
            keys=self.api_keys,
            origins=self.cors,
            body_bytes=self.max_body,
            log_texts=self.log_texts,
            hosts=("localhost", self.host, socket.gethostname(), *self.allow_host),
            step_s=self.step_timeout_s,
        )

    def configuration(self, planned: Configuration | None, model: ModelConfig | None = None) -> Configuration:
        """The engine's configuration: this request's values, then the plan's, then defaults.

        Without either, weights have the published format of ``model``, if the engine keeps it. Raises RooftopError,
        naming the option that is wrong.
        """
        base = Configuration() if planned is None else planned
        if planned is None and model is not None and (published := published_weights(model, self.axes)) is not None:
            name = ENGINE_WEIGHTS[published.dtype, published.group]
            base = replace(base, weights_dtype=name, only_experts=published.only_experts)
        weights = self._weights()
        batch = self.batch_seqs or base.policy.max_batch
        batching = self.batching or base.policy.batching
        if self.draft is not None and not (self.draft / "config.json").is_file():
            raise RooftopError("draft", str(self.draft), "the folder of a checkpoint (config.json, safetensors)")
        if self.draft is not None and not self.draft_length:
            raise RooftopError("draft-length", 0, "1 or more with a draft model")
        if self.pages is not None and self.pages < batch:
            accepted = f"{batch} or more: a page for each of the {batch} sequences in progress (--batch-seqs)"
            raise RooftopError("pages", self.pages, accepted)
        chunk = self.chunk_tokens
        if chunk is None and batching == "interleaved":
            chunk = max(base.policy.chunk_tokens or 0, batch + _PROMPT_TOKENS)
        with named_as_options():
            return Configuration(
                policy=Policy(
                    max_batch=batch,
                    batching=batching,
                    chunk_tokens=chunk or None,
                    preemption=self.preemption or base.policy.preemption,
                ),
                page_tokens=self.page_tokens,
                pages=self.pages,
                host_pages=self.host_pages,
                prefix_cache=self.prefix_cache,
                max_model_len=self.max_model_len,
                max_queue=self.max_queue,
                mesh=base.mesh if (axes := self.axes) is None else tuple(axes.items()),
                kv_split=base.kv_split if self.kv_split is None else one_of("kv-split", self.kv_split, KV_SPLITS),
                prefill_devices=self.prefill_devices,
                compute_dtype=self._computed(),
                weights_dtype=weights or base.weights_dtype,
                only_experts=base.only_experts if weights is None else False,
                kv_dtype=self._cache() or base.kv_dtype,
                draft_length=self.draft_length,
            )

    def _computed(self) -> str | None:
        """JAX's name of the compute dtype, which weights and caches share if they are not quantised."""
        dtypes = {
            name.replace("_", "-"): dtype
            for name in ("compute_dtype", "weights_dtype", "kv_dtype")
            if (dtype := getattr(self, name)) in _COMPUTED
        }
        if len(set(dtypes.values())) > 1:
            requested = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise RooftopError("compute-dtype", requested, "one dtype for all that is not quantised")
        return _COMPUTED[next(iter(dtypes.values()))] if dtypes else None

    def _weights(self) -> str | None:
        """The engine's name of the weights' format; None if the plan decides."""
        dtype, group = self.weights_dtype, self.weight_group
        if dtype is None or dtype in _COMPUTED:
            if group is not None:
                raise RooftopError("weight-group", group, "this with --weights-dtype int4, f8_e4m3 or f4_e2m1")
            return None if dtype is None else "plain"
        groups = [size for kind, size in ENGINE_WEIGHTS if kind == dtype]
        if group is None and len(groups) == 1:
            (group,) = groups
        if group not in groups:
            sizes = ", ".join(str(size) for size in groups if size is not None) or "none"
            raise RooftopError("weight-group", group, f"{sizes}: weights of a column that share a scale in {dtype}")
        return ENGINE_WEIGHTS[dtype, group]

    def _cache(self) -> str | None:
        """The engine's name of the KV cache's format; None if the plan decides."""
        return "plain" if self.kv_dtype in _COMPUTED else self.kv_dtype


def shrunk(configuration: Configuration, devices: int) -> Configuration:
    """``configuration`` with a mesh of at most ``devices``, by dividing its largest axis by its least prime."""
    sizes = dict(configuration.mesh)
    while math.prod(sizes.values()) > devices:
        largest = max(sizes, key=lambda axis: sizes[axis])
        size = sizes[largest]
        sizes[largest] = size // next(prime for prime in range(2, size + 1) if size % prime == 0)
    return replace(configuration, mesh=tuple(sizes.items()))


@contextmanager
def named_as_options() -> Iterator[None]:
    """Name the option in errors about an engine's configuration."""
    try:
        yield
    except RooftopError as error:
        name = "batch_seqs" if error.field == "max_batch" else error.field
        if name in {option.name for option in fields(ServeRequest)}:
            name = name.replace("_", "-")
        raise RooftopError(name, error.given, error.accepted) from None
