"""A serving workload, its number formats and draft model: the part of a plan that the user decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Number
from rooftop.core.quantities import dtype_bytes
from rooftop.core.records import Record
from rooftop.models import ModelConfig
from rooftop.models.attention import attention_kind
from rooftop.roofline.rules import speculated_tokens

#: Bytes of one scale of a column of quantised weights, or of a cache entry: f32.
SCALE_BYTES = 4.0
#: Dtype of routers, which are small and sensitive.
ROUTER_DTYPE = "bf16"
#: Tokens of the longest sequence that is planned: a longer one is a slip of the keyboard.
LONGEST = 10**12
#: Sequences that are generated together at most, on all devices.
MOST_SEQS = 10**9
#: Most tokens that a draft guesses a round: engines guess fewer than twenty.
MOST_GUESSES = 1024
#: Largest target of a latency, a day: longer ones are slips too.
SLOWEST_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class ClientLoad(Record):
    """A closed loop: ``concurrency`` clients, each of which sends its next request when its last answer ends.

    They send ``requests`` in all, whose lengths are drawn from the share ``shortest`` of the workload's up to these, to
    ``replicas`` servers; disaggregated these generate, and ``prefill_servers`` others prefill.
    """

    closed = True

    concurrency: int
    requests: int
    shortest: float = 1.0
    replicas: int = 1
    prefill_servers: int = 1

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests", "replicas", "prefill_servers"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_SEQS:
                raise RooftopError(name, value, f"a whole number from 1 to {MOST_SEQS:,}")
        if not 0 < self.shortest <= 1:
            raise RooftopError("shortest", self.shortest, "a share above 0, and up to 1")

    @property
    def mean(self) -> float:
        """The mean length of requests, as a share of the workload's."""
        return (1 + self.shortest) / 2


@dataclass(frozen=True, kw_only=True)
class ServingWorkload(Record):
    """Requests of ``prompt`` tokens that are answered with ``generate`` tokens, ``batch_seqs`` generated together.

    ``batch_seqs`` None: as many as the targets and the memory allow. ``context``: tokens in a sequence's cache at the
    step whose time is given; None: the prompt and half of the answer. ``ttft_s`` and ``tpot_s`` are targets.
    ``hit_rate``: share of the prompt's tokens whose KV a prefix cache already holds. ``load``: clients that wait for
    their answers; None: latencies are those of a full batch.
    """

    closed = True

    prompt: int = 8192
    generate: int = 512
    batch_seqs: int | None = None
    context: int | None = None
    requests_per_second: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    hit_rate: float = 0.0
    load: ClientLoad | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "generate", "batch_seqs", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RooftopError(name, value, "a positive whole number")
        if self.batch_seqs is not None and self.batch_seqs > MOST_SEQS:
            raise RooftopError("batch_seqs", self.batch_seqs, f"at most {MOST_SEQS:,} sequences")
        for name in ("context", "prompt", "generate"):
            value = getattr(self, name)
            if value is not None and value > LONGEST:
                raise RooftopError(name, value, f"at most {LONGEST:,} tokens")
        for name, most in (("requests_per_second", math.inf), ("ttft_s", SLOWEST_S), ("tpot_s", SLOWEST_S)):
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise RooftopError(name, value, "a positive number" if most == math.inf else f"up to {most:,.0f} s")
        if not 0 <= self.hit_rate < 1:
            raise RooftopError("hit_rate", self.hit_rate, "a share from 0 up to, but not including, 1")

    @property
    def held_tokens(self) -> int:
        """Tokens for which a sequence needs room: its prompt and all that it may generate."""
        return self.prompt + self.generate

    @property
    def step_context(self) -> float:
        """Tokens in a sequence's cache at the step that is priced."""
        if self.context is not None:
            return float(self.context)
        return (self.prompt + self.generate / 2) * (1.0 if self.load is None else self.load.mean)

    @property
    def new_prompt_tokens(self) -> int:
        """Tokens of a prompt that are prefilled: those that no prefix cache holds, and at least one."""
        return max(1, round(self.prompt * (1 - self.hit_rate)))


@dataclass(frozen=True, kw_only=True)
class ServingNumerics(Record):
    """Number formats, each chosen apart: ``weights`` of the layers, ``kv`` of the cache, ``flops`` of the matmuls.

    ``embeddings`` is the dtype of the embedding table and of the unembedding. Routers are bf16, and so is all but the
    experts with ``only_experts``. A weight narrower than bf16 has a scale per output column, or one for every
    ``weight_group`` inputs of a column; so has an entry of the cache per token and head. Activations are bf16.
    ``kv_sharing`` layers share one cache. ``group_scale_bytes``: of a group's scale, bf16 by default.
    """

    closed = True

    weights: str = "bf16"
    kv: str = "bf16"
    flops: str = "bf16"
    embeddings: str = "bf16"
    weight_group: int | None = None
    only_experts: bool = False
    kv_sharing: int = 1
    group_scale_bytes: float = 2.0

    def __post_init__(self) -> None:
        dtype_bytes(self.weights, "weights-dtype")
        dtype_bytes(self.kv, "kv-dtype")
        dtype_bytes(self.flops, "matmul-dtype")
        dtype_bytes(self.embeddings, "embeddings-dtype")
        for name in ("weight_group", "kv_sharing"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RooftopError(name, value, "a positive whole number")

    @property
    def shared_weights(self) -> str:
        """Dtype of the weights of layers that all tokens use."""
        return "bf16" if self.only_experts else self.weights

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight of a layer, without its scale."""
        return dtype_bytes(self.weights)

    @property
    def kv_bytes(self) -> float:
        """Bytes of one element of the cache, without its scale."""
        return dtype_bytes(self.kv)

    def weight_scale_bytes(self, inputs: Number, dtype: str) -> Number:
        """Bytes of scales per weight in a matrix with so many ``inputs`` (rows)."""
        if dtype_bytes(dtype) >= dtype_bytes("bf16"):
            return 0.0
        if self.weight_group is None:
            return SCALE_BYTES / inputs
        return self.group_scale_bytes / np.minimum(inputs, self.weight_group)

    def kv_scale_bytes(self, model: ModelConfig) -> float:
        """Bytes of scales per element of the cache: one scale for each head's key and value, or for a latent."""
        if self.kv_bytes >= dtype_bytes("bf16"):
            return 0.0
        return SCALE_BYTES / attention_kind(model).cached_together


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A small model that guesses ``length`` tokens a round, each right with probability ``acceptance``."""

    model: ModelConfig
    length: int = 4
    acceptance: float = 0.7

    def __post_init__(self) -> None:
        if self.length < 1:
            raise RooftopError("draft-length", self.length, "a positive whole number")
        if self.length > MOST_GUESSES:
            raise RooftopError("draft-length", self.length, f"at most {MOST_GUESSES:,} tokens")
        speculated_tokens(self.length, self.acceptance)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round is expected to yield."""
        return speculated_tokens(self.length, self.acceptance)
