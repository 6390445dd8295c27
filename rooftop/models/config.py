"""Configuration of a decoder-only transformer: the sizes and switches that counting, planning and building need.

Dims as in the book: L layers, D model, F feed-forward, N query heads, K key/value heads, H head size, V vocabulary,
E experts of which k are active.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import Record, read_record

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned"]
RopeScalingKind = Literal["linear", "llama3", "yarn"]
Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]
ROPE_SCALINGS: tuple[RopeScalingKind, ...] = get_args(RopeScalingKind)

#: Bounds that no model comes near; they keep a mistyped figure from exhausting memory before it is noticed.
LARGEST_SIZE = 10**12
MOST_LAYERS = 10_000
_LARGEST_NUMBER = 1e100


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Record):
    """Scaling of rotary frequencies beyond the sequence length of the first training.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides only wavelengths above original_max_seq_len /
    low_freq_factor, keeps those below original_max_seq_len / high_freq_factor and blends between. ``yarn`` (Peng et
    al. 2023) ramps between the dims that make ``beta_fast`` and ``beta_slow`` turns in original_max_seq_len (the ramp's
    ends rounded outwards if ``truncate``) and multiplies cosine and sine by ``attention_factor``.
    """

    closed = True

    kind: RopeScalingKind
    factor: float
    original_max_seq_len: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_fields(self, "rope_scaling.")
        needs = {
            "linear": (),
            "llama3": ("original_max_seq_len", "low_freq_factor", "high_freq_factor"),
            "yarn": ("original_max_seq_len", "beta_fast", "beta_slow"),
        }
        for name in needs[self.kind]:
            if getattr(self, name) is None:
                raise RooftopError(f"rope_scaling.{name}", None, f"a positive number ({self.kind} scaling needs it)")


@dataclass(frozen=True, kw_only=True)
class MLA(Record):
    """Multi-head latent attention (DeepSeek-V2 paper, section 2.1): keys and values share one compressed latent.

    Queries come from D directly or, with ``q_rank``, through a latent of that size. What is cached per token and layer
    is the latent of ``kv_rank`` elements and one rotated key of ``d_rope`` that all heads share. A head's query and
    key have d_nope + d_rope elements, its value ``d_v``.
    """

    closed = True

    q_rank: int | None
    kv_rank: int
    d_nope: int
    d_rope: int
    d_v: int

    def __post_init__(self) -> None:
        _check_fields(self, "mla.")
        if self.d_rope % 2:
            raise RooftopError("mla.d_rope", self.d_rope, "an even number: rotary positions turn pairs")


@dataclass(frozen=True, kw_only=True)
class MoE(Record):
    """A mixture of E = ``experts`` MLPs of hidden size ``d_ff``, of which a token uses k = ``active``.

    ``shared_d_ff`` is the hidden size of the shared experts together (every token uses them), 0 for none. The first
    ``dense_layers`` layers have an ordinary MLP instead. ``bias``: router and experts have biases.

    Router: ``scoring`` of the logits over E; if ``groups`` > 1, only the ``active_groups`` groups of experts with the
    largest ``group_score`` (largest member, or sum of the two largest) may be chosen from; ``correction_bias``: a bias
    per expert is added for choosing, not for weighing. The k chosen scores are divided by their sum if ``normalise``,
    then multiplied by ``routed_scaling``.
    """

    closed = True

    experts: int
    active: int
    d_ff: int
    shared_d_ff: int = dataclasses.field(default=0, metadata={"least": 0})
    dense_layers: int = dataclasses.field(default=0, metadata={"least": 0})
    bias: bool = False
    scoring: Scoring = "softmax"
    normalise: bool = True
    routed_scaling: float = 1.0
    groups: int = 1
    active_groups: int = 1
    group_score: GroupScore = "max"
    correction_bias: bool = False

    def __post_init__(self) -> None:
        _check_fields(self, "moe.")
        if self.experts % self.groups:
            raise RooftopError("moe.groups", self.groups, f"a divisor of the {self.experts} experts")
        if self.active_groups > self.groups:
            raise RooftopError("moe.active_groups", self.active_groups, f"at most the {self.groups} groups")
        choosable = self.experts // self.groups * self.active_groups
        if self.active > choosable:
            raise RooftopError("moe.active", self.active, f"at most the {choosable} experts that can be chosen")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Record):
    """A decoder-only transformer.

    ``family`` is the Hugging Face ``model_type`` it follows. ``d_head`` (H) is the size of a query and key; with
    ``mla`` it is d_nope + d_rope. ``d_ff`` is F of the dense layers (nothing uses it when every layer is MoE).
    ``mlp_matrices``: 3 with a gate, 2 without. ``layer_windows``: per layer the number of last positions, its own
    included, that a token sees, None for all; () when that holds for every layer.

    ``norms_per_layer``: 2, or 4 when the outputs of attention and MLP are normalised too (Gemma). ``norm_offset``: the
    stored scale of a norm is its difference from 1. ``norm`` 'layer' has a bias, 'rms' none. ``qk_norm``: each head's
    query and key are RMS-normalised. ``attention_sinks``: a learned logit per head joins the softmax's denominator.
    ``query_scale`` multiplies query x key (None: H**-0.5). Softcaps c replace x by c tanh(x/c), of attention logits and
    of the final logits. ``embed_scale`` multiplies the embeddings. ``swiglu_limit`` c, with silu only: gate and up are
    clamped (gate above, up on both sides), and gate x sigmoid(swiglu_alpha x gate) x (up + 1) goes down.

    ``rope_interleaved``: neighbours are turned together, not the two halves. ``rope_local_theta``: windowed layers use
    this base, unscaled. 'learned' positions are a table of max_seq_len x D.

    Raises RooftopError naming the field if a figure has the wrong type, is not positive, or contradicts another.
    """

    closed = True

    name: str
    family: str
    layers: int = dataclasses.field(metadata={"most": MOST_LAYERS})
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    d_head: int
    vocab: int
    max_seq_len: int
    mlp_matrices: int = 3
    activation: Activation = "silu"
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    tied_embeddings: bool = False
    embed_scale: float = 1.0
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    norm_offset: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    attention_sinks: bool = False
    query_scale: float | None = None
    attn_softcap: float | None = None
    final_softcap: float | None = None
    layer_windows: tuple[int | None, ...] = ()
    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    rope_interleaved: bool = False
    rope_local_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    moe: MoE | None = None
    mla: MLA | None = None

    def __post_init__(self) -> None:
        _check_fields(self, "")
        if self.mlp_matrices not in (2, 3):
            raise RooftopError("mlp_matrices", self.mlp_matrices, "3 (gated) or 2")
        if self.swiglu_limit is not None and (self.activation, self.mlp_matrices) != ("silu", 3):
            raise RooftopError("swiglu_limit", self.swiglu_limit, "none unless the MLP is gated with silu")
        if self.norms_per_layer not in (2, 4):
            raise RooftopError("norms_per_layer", self.norms_per_layer, "2 or 4")
        if self.heads % self.kv_heads:
            raise RooftopError("kv_heads", self.kv_heads, f"a divisor of the {self.heads} heads")
        if self.positions == "rope" and self.mla is None and self.d_head % 2:
            raise RooftopError("d_head", self.d_head, "an even number: rotary positions turn pairs")
        if self.moe is not None and self.moe.dense_layers >= self.layers:
            raise RooftopError("moe.dense_layers", self.moe.dense_layers, f"fewer than the {self.layers} layers")
        self._check_mla()
        self._check_windows()

    def _check_mla(self) -> None:
        if self.mla is None:
            return
        if self.d_head != self.mla.d_nope + self.mla.d_rope:
            raise RooftopError("d_head", self.d_head, f"d_nope + d_rope = {self.mla.d_nope + self.mla.d_rope}")
        if self.kv_heads != self.heads:
            raise RooftopError("kv_heads", self.kv_heads, f"the {self.heads} heads: latent attention has no groups")
        for name in ("qkv_bias", "attn_out_bias", "qk_norm", "attention_sinks"):
            if getattr(self, name):
                raise RooftopError(name, True, "false with latent attention")

    def _check_windows(self) -> None:
        windows = self.layer_windows
        if not isinstance(windows, tuple) or len(windows) not in (0, self.layers):
            raise RooftopError("layer_windows", windows, f"a tuple of {self.layers} windows, or none")
        for window in windows:
            if window is not None:
                _check_whole("layer_windows", window, 1)
        if windows and all(window is None for window in windows):
            object.__setattr__(self, "layer_windows", ())

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer, L entries: None where a token sees all that came before it."""
        return self.layer_windows or (None,) * self.layers

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts instead of an MLP."""
        return 0 if self.moe is None else self.layers - self.moe.dense_layers

    @property
    def dense_layers(self) -> int:
        """Number of layers with an ordinary MLP."""
        return self.layers - self.moe_layers

    @property
    def d_value(self) -> int:
        """The size of a head's value: H, or d_v with latent attention."""
        return self.d_head if self.mla is None else self.mla.d_v

    @classmethod
    def from_json(cls, data: object) -> ModelConfig:
        """The inverse of ``to_json``. Raises RooftopError on a missing, unknown or malformed field."""
        return read_record(cls, data, "model")


def _check_whole(field: str, value: Any, least: int, most: int = LARGEST_SIZE) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RooftopError(field, value, f"a whole number from {least} to {most:,}")


_types = cache(get_type_hints)


def _check_fields(config: Any, prefix: str) -> None:
    """Types and signs, as the annotations say: whole numbers at least 1 (or ``least``), other numbers positive."""
    types = _types(config.__class__)
    for field in dataclasses.fields(config):
        value, name, kind = getattr(config, field.name), f"{prefix}{field.name}", types[field.name]
        kinds = get_args(kind)
        if value is None and NoneType in kinds:
            continue
        kind = kinds[0] if NoneType in kinds else kind
        if get_origin(kind) is Literal:
            if value not in kinds:
                raise unknown(name, value, kinds)
        elif kind is int:
            _check_whole(name, value, field.metadata.get("least", 1), field.metadata.get("most", LARGEST_SIZE))
        elif kind is float:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_NUMBER:
                raise RooftopError(name, value, "a positive number")
        elif kind is bool:
            if not isinstance(value, bool):
                raise RooftopError(name, value, "true or false")
        elif kind is str:
            if not isinstance(value, str) or not value:
                raise RooftopError(name, value, "a text that is not empty")
        elif kind in (MoE, MLA, RopeScaling) and not isinstance(value, kind):
            raise RooftopError(name, value, f"a {kind.__name__}, or none")
