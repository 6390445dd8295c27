"""Records of a model: its sizes, and its support on a chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rooftop.core.ledger import Number
from rooftop.core.records import Record
from rooftop.models import ModelConfig
from rooftop.models.stored import StoredWeights
from rooftop.plan.evidence import Evidence

Standing = Literal["yes", "no"]


@dataclass(frozen=True, kw_only=True)
class KvBytes(Record):
    """Bytes of a KV cache by its dtype."""

    bf16: Number
    int8: Number


@dataclass(frozen=True, kw_only=True)
class ModelTotals(Record):
    """The figures that a list of models shows. KV bytes are of all layers, by dtype."""

    name: str
    family: str
    params: int
    active_params: int
    kv_bytes_per_token: KvBytes
    max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class TokenFlops(Record):
    """FLOPs of training on one token: those of ``forward`` are of matmuls and of attention."""

    convention: str
    forward: Number
    backward: Number
    total: Number
    forward_matmul: Number
    forward_attention: Number
    total_full_attention: Number


@dataclass(frozen=True, kw_only=True)
class ModelRecord(ModelTotals):
    """A model with its configuration: parameters, FLOPs and the KV cache of sequences of ``seq_len`` tokens."""

    source: str | None
    params_by_component: Mapping[str, int]
    seq_len: int
    flops_per_token: TokenFlops
    kv_cache_bytes: KvBytes
    stored: StoredWeights | None
    config: ModelConfig


@dataclass(frozen=True, kw_only=True)
class Supported(Record):
    """One thing that rooftop does: ``verb``, whether it does it for this model and chip, and how or why not."""

    verb: str
    answer: Standing
    note: str


@dataclass(frozen=True, kw_only=True)
class SupportRecord(Record):
    """A model on a chip: verbs, frameworks, evidence by phase, and the source of each fraction of peak by resource.

    A model that is not planned has no evidence.
    """

    model: str
    chip: str
    verbs: tuple[Supported, ...]
    frameworks: tuple[Supported, ...] = ()
    evidence: Mapping[str, Evidence]
    rates: Mapping[str, str]
