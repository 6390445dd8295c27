"""Configuration of a decoder-only transformer: the sizes and switches that counting, planning and building need.

Dims as in the book: L layers, D model, F feed-forward, N query heads, K key/value heads, H head size, V vocabulary,
E experts of which k are active.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rooftop.core.errors import RooftopError
from rooftop.core.records import Record, read_record
from rooftop.core.rounding import ceil_div

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Norm = Literal["rms", "layer"]
NormPlacement = Literal["pre", "post", "sandwich"]
Parallel = Literal["shared", "own"]
QkNorm = Literal["head", "heads", "width", "unit"]
Mixer = Literal["attention", "gated_delta", "mamba", "lightning", "attention+mamba"]
Positions = Literal["rope", "learned", "alibi", "none"]
RopeScalingKind = Literal["linear", "llama3", "yarn"]
Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["max", "top2_sum"]
StoredMethod = Literal["mxfp4", "fp8", "gptq", "awq", "packed"]
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

    ``shared_d_ff`` is the hidden size of the shared experts together (every token uses them), 0 for none; with
    ``shared_gate`` their sum is multiplied by the sigmoid of a projection of the token, D x 1. The first
    ``dense_layers`` layers have an ordinary MLP instead; of the rest, every ``every``-th from the first on has experts.
    ``bias``: router and experts have biases.

    Router: ``scoring`` of the logits over E; if ``groups`` > 1, only the ``active_groups`` groups of experts with the
    largest ``group_score`` (largest member, or sum of the two largest) may be chosen from; ``correction_bias``: a bias
    per expert is added for choosing, not for weighing. The k chosen scores are divided by their sum if ``normalise``,
    then multiplied by ``routed_scaling``. They multiply what experts put out, or what they get if ``weigh_input``
    (Llama 4). ``sparsemixer`` takes one expert after the other, each by a softmax over the scores near the largest
    (Phi-3.5-MoE).
    """

    closed = True

    experts: int
    active: int
    d_ff: int
    shared_d_ff: int = dataclasses.field(default=0, metadata={"least": 0})
    shared_gate: bool = False
    dense_layers: int = dataclasses.field(default=0, metadata={"least": 0})
    every: int = 1
    bias: bool = False
    scoring: Scoring = "softmax"
    normalise: bool = True
    routed_scaling: float = 1.0
    groups: int = 1
    active_groups: int = 1
    group_score: GroupScore = "max"
    correction_bias: bool = False
    weigh_input: bool = False

    def __post_init__(self) -> None:
        _check_fields(self, "moe.")
        if self.shared_gate and not self.shared_d_ff:
            raise RooftopError("moe.shared_gate", True, "false without shared experts")
        if self.experts % self.groups:
            raise RooftopError("moe.groups", self.groups, f"a divisor of the {self.experts} experts")
        if self.active_groups > self.groups:
            raise RooftopError("moe.active_groups", self.active_groups, f"at most the {self.groups} groups")
        choosable = self.experts // self.groups * self.active_groups
        if self.active > choosable:
            raise RooftopError("moe.active", self.active, f"at most the {choosable} experts that can be chosen")


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Record):
    """A gated delta rule (Yang et al. 2024, Gated Delta Networks) of ``value_heads`` heads.

    Groups of them share a key of ``d_key``, one for each of ``key_heads``. A head's state is d_key x ``d_value``.
    Queries, keys and values go through a causal convolution over ``conv`` tokens, each channel by itself.
    """

    closed = True

    key_heads: int
    value_heads: int
    d_key: int
    d_value: int
    conv: int

    def __post_init__(self) -> None:
        _check_fields(self, "gated_delta.")
        if self.value_heads % self.key_heads:
            raise RooftopError("gated_delta.key_heads", self.key_heads, f"a divisor of {self.value_heads} value heads")


@dataclass(frozen=True, kw_only=True)
class Mamba(Record):
    """A selective state space of ``d_inner`` channels, each with a state of ``d_state`` elements.

    Version 1 (Gu and Dao 2023): steps come through a latent of ``step_rank``; ``norms``: that latent and the input and
    output vectors of the state are normalised (Jamba). Version 2 (Dao and Gu 2024), without a ``step_rank``: channels
    form ``heads``, of which ``groups`` have input and output vectors in common; ``norms``: the gated output is
    normalised. A causal convolution over ``conv`` tokens goes before.
    """

    closed = True

    d_inner: int
    d_state: int
    conv: int
    step_rank: int | None = None
    heads: int = 1
    groups: int = 1
    norms: bool = False
    conv_bias: bool = True
    proj_bias: bool = False

    def __post_init__(self) -> None:
        _check_fields(self, "mamba.")
        if self.d_inner % self.heads:
            raise RooftopError("mamba.heads", self.heads, f"a divisor of the {self.d_inner} channels")


@dataclass(frozen=True, kw_only=True)
class OtherWeight(Record):
    """A weight of a part that no program has: it counts, and a ``matmul`` costs FLOPs. ``layers`` layers have one."""

    closed = True

    name: str
    shape: tuple[int, ...]
    layers: int = 1
    matmul: bool = False

    def __post_init__(self) -> None:
        _check_fields(self, "others.")
        for size in self.shape:
            _check_whole("others.shape", size, 1)
        if self.matmul and len(self.shape) != 2:
            raise RooftopError("others.shape", self.shape, "two sizes of a matmul")


@dataclass(frozen=True, kw_only=True)
class StoredFormat(Record):
    """A format of quantised matrices, [out, in].

    A scale of ``scale_bytes`` covers ``block`` = (outputs, inputs) of a matrix; 0 stands for all of them. ``mxfp4`` has
    two e2m1 values in a byte, ``fp8`` is e4m3, ``gptq`` and ``awq`` are whole numbers of ``bits`` packed into int32,
    with a zero point of ``bits`` for each scale; ``packed`` ones, of compressed-tensors, have no zero points. GPTQ says
    each input's group; ``zeros_less_one``: it stores the zero points less one. Modules that ``skipped`` matches are not
    quantised: regular expressions of the beginning of a name, up to a dot, or the end of a name.
    """

    closed = True

    method: StoredMethod
    bits: int
    block: tuple[int, int]
    scale_bytes: int
    zeros_less_one: bool = False
    skipped: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The format in words: 'fp8, a scale for 128 x 128 weights'."""
        name = f"{self.method} of {self.bits} bits" if self.method in ("gptq", "awq", "packed") else self.method
        rows, columns = self.block
        if not rows and not columns:
            return f"{name}, a scale for each matrix"
        if not columns:
            return f"{name}, a scale for each output"
        return f"{name}, a scale for {f'{rows} x {columns}' if rows > 1 else columns} weights"

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix with its scales, zero points and groups."""
        rows, columns = self.block
        scales = (ceil_div(outputs, rows) if rows else 1) * (ceil_div(inputs, columns) if columns else 1)
        size = outputs * inputs * self.bits // 8 + scales * self.scale_bytes
        if self.method in ("gptq", "awq"):
            size += scales * self.bits // 8
        if self.method == "packed":
            # The shape: two numbers of 64 bits.
            size += 16
        # GPTQ says the group of each input in 32 bits.
        return size + (inputs * 4 if self.method == "gptq" else 0)

    def skips(self, module: str) -> bool:
        """True if the module of this name is not quantised; as transformers reads the list."""
        return any(re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(key) for key in self.skipped)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Record):
    """A decoder-only language model, as the blocks that it is made of.

    ``family`` is the Hugging Face ``model_type`` it follows. ``d_head`` (H) is the size of a query and key; with
    ``mla`` it is d_nope + d_rope. ``d_ff`` is F of the dense layers (nothing uses it when every layer is MoE).
    ``mlp_matrices``: 3 with a gate, 2 without, 0 for layers that have no MLP.

    Layers: ``layer_windows``, per layer the number of last positions, its own included, that a token sees, None for
    all; () when that holds for every layer. ``windows_chunked``: a token sees the positions of its own chunk instead,
    up to itself. ``rope_layers``: the layers whose positions are rotated, () for all. ``mixers``: what mixes the tokens
    of each layer, () for attention in all; ``gated_delta`` and ``mamba`` are their sizes. The last ``shared_kv_layers``
    layers read keys and values of layers before them.

    Norms: ``norm`` 'rms' has a scale, 'layer' a scale and a bias, but for ``norm_scale`` and ``norm_bias``.
    ``norm_placement``: norms of the inputs of attention and MLP (pre), of their outputs (post), or both (sandwich).
    ``parallel``: attention and MLP read the same stream, and both are added to it; they have a norm in common, or their
    own. ``norm_offset``: the stored scale is its difference from 1. ``embed_norm``: embeddings are normalised.
    ``qk_norm``: queries and keys are normalised: RMS of each head with a scale of H (head), layer norm of each head
    with scales of its own (heads), RMS of all heads together (width), or RMS of each head without a scale (unit), and
    rotated before that if ``qk_norm_after_rope``.

    Numbers: ``query_scale`` multiplies query x key (None: H**-0.5). Softcaps c replace x by c tanh(x/c), of attention
    logits and of the final logits. ``embed_scale`` multiplies the embeddings, ``residual_scale`` what attention and MLP
    add to the stream, ``logits_scale`` the logits. ``swiglu_limit`` c, with silu only: gate and up are clamped (gate
    above, up on both sides), and gate x sigmoid(swiglu_alpha x gate) x (up + 1) goes down.

    Attention: ``attention_sinks``, a learned logit per head, joins the softmax's denominator. ``attn_gate``: outputs of
    heads are multiplied by the sigmoid of a projection of their own.

    Positions: ``rotary_dims`` of a head are rotated, the first ones (None: all). ``rope_interleaved``: neighbours are
    turned together, not the two halves. ``rope_local_theta``: windowed layers use this base, unscaled. 'learned'
    positions are a table of max_seq_len x D, after ``position_offset`` rows that nothing reads. 'alibi' adds to the
    logits of attention a slope per head times the distance.

    ``others`` are weights of parts that these fields do not describe, and ``not_run`` names what else they leave out of
    the computation: such a model is counted and planned, and no program runs it.

    ``stored`` is the format of its matrices in the published checkpoint, None for plain ones. It changes no
    computation, and models that differ only in it are equal.

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
    mlp_matrices: int = dataclasses.field(default=3, metadata={"least": 0})
    activation: Activation = "silu"
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    tied_embeddings: bool = False
    unembed_bias: bool = False
    embed_scale: float = 1.0
    embed_norm: bool = False
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    norm_scale: bool = True
    norm_bias: bool = True
    norm_offset: bool = False
    norm_placement: NormPlacement = "pre"
    parallel: Parallel | None = None
    qk_norm: QkNorm | None = None
    qk_norm_after_rope: bool = False
    attention_sinks: bool = False
    attn_gate: bool = False
    query_scale: float | None = None
    attn_softcap: float | None = None
    final_softcap: float | None = None
    layer_windows: tuple[int | None, ...] = ()
    windows_chunked: bool = False
    positions: Positions = "rope"
    position_offset: int = dataclasses.field(default=0, metadata={"least": 0})
    rope_theta: float = 10_000.0
    rope_layers: tuple[bool, ...] = ()
    rotary_dims: int | None = None
    rope_interleaved: bool = False
    rope_local_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    mixers: tuple[Mixer, ...] = ()
    gated_delta: GatedDelta | None = None
    mamba: Mamba | None = None
    shared_kv_layers: int = dataclasses.field(default=0, metadata={"least": 0})
    moe: MoE | None = None
    mla: MLA | None = None
    others: tuple[OtherWeight, ...] = ()
    not_run: tuple[str, ...] = ()
    stored: StoredFormat | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_fields(self, "")
        if self.mlp_matrices not in (0, 2, 3):
            raise RooftopError("mlp_matrices", self.mlp_matrices, "3 (gated), 2, or 0 for no MLP")
        if not self.mlp_matrices and self.moe is not None:
            raise RooftopError("mlp_matrices", 0, "3 or 2 with experts")
        if self.swiglu_limit is not None and (self.activation, self.mlp_matrices) != ("silu", 3):
            raise RooftopError("swiglu_limit", self.swiglu_limit, "none unless the MLP is gated with silu")
        if self.parallel is not None and self.norm_placement != "pre":
            raise RooftopError("norm_placement", self.norm_placement, "pre, where attention and MLP are parallel")
        if self.heads % self.kv_heads:
            raise RooftopError("kv_heads", self.kv_heads, f"a divisor of the {self.heads} heads")
        if self.positions == "rope" and self.mla is None and self.rotated % 2:
            name = "d_head" if self.rotary_dims is None else "rotary_dims"
            raise RooftopError(name, self.rotated, "an even number: rotary positions turn pairs")
        if not self.rotated <= self.d_head:
            raise RooftopError("rotary_dims", self.rotary_dims, f"at most the {self.d_head} of a head")
        if self.shared_kv_layers >= self.layers:
            raise RooftopError("shared_kv_layers", self.shared_kv_layers, f"fewer than the {self.layers} layers")
        if self.moe is not None and self.moe.dense_layers >= self.layers:
            raise RooftopError("moe.dense_layers", self.moe.dense_layers, f"fewer than the {self.layers} layers")
        self._check_mla()
        self._check_windows()
        self._check_layers()

    def _check_mla(self) -> None:
        if self.mla is None:
            return
        if self.d_head != self.mla.d_nope + self.mla.d_rope:
            raise RooftopError("d_head", self.d_head, f"d_nope + d_rope = {self.mla.d_nope + self.mla.d_rope}")
        if self.kv_heads != self.heads:
            raise RooftopError("kv_heads", self.kv_heads, f"the {self.heads} heads: latent attention has no groups")
        for name in ("qkv_bias", "attn_out_bias", "qk_norm", "attention_sinks", "attn_gate", "rotary_dims"):
            if getattr(self, name):
                raise RooftopError(name, getattr(self, name), "none with latent attention")

    def _check_windows(self) -> None:
        windows = self.layer_windows
        if not isinstance(windows, tuple) or len(windows) not in (0, self.layers):
            raise RooftopError("layer_windows", windows, f"a tuple of {self.layers} windows, or none")
        for window in windows:
            if window is not None:
                _check_whole("layer_windows", window, 1)
        if windows and all(window is None for window in windows):
            object.__setattr__(self, "layer_windows", ())

    def _check_layers(self) -> None:
        """Lists with an entry for each layer: a list that says the same as none becomes ()."""
        for name, usual, accepted in (
            ("rope_layers", True, (True, False)),
            ("mixers", "attention", get_args(Mixer)),
        ):
            entries = getattr(self, name)
            if not isinstance(entries, tuple) or len(entries) not in (0, self.layers):
                raise RooftopError(name, entries, f"a tuple of {self.layers} entries, or none")
            for entry in entries:
                if entry not in accepted:
                    raise RooftopError(name, entry, " or ".join(map(str, accepted)))
            if set(entries) == {usual}:
                object.__setattr__(self, name, ())
        for name, kind in (("gated_delta", "gated_delta"), ("mamba", "mamba")):
            if any(kind in mixer for mixer in self.mixers) != (getattr(self, name) is not None):
                raise RooftopError(name, getattr(self, name), f"sizes if a mixer is {kind}, none if no mixer is")
        for name in ("others", "not_run"):
            if not isinstance(getattr(self, name), tuple):
                raise RooftopError(name, getattr(self, name), "a tuple")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer, L entries: None where a token sees all that came before it."""
        return self.layer_windows or (None,) * self.layers

    def has_experts(self, layer: int) -> bool:
        """True if a layer has experts instead of an MLP."""
        moe = self.moe
        return moe is not None and layer >= moe.dense_layers and (layer - moe.dense_layers) % moe.every == 0

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts instead of an MLP."""
        return 0 if self.moe is None else ceil_div(self.layers - self.moe.dense_layers, self.moe.every)

    @property
    def dense_layers(self) -> int:
        """Number of layers with an ordinary MLP."""
        return self.layers - self.moe_layers if self.mlp_matrices else 0

    @property
    def attention_layers(self) -> int:
        """Number of layers that have attention, alone or beside another mixer."""
        return sum("attention" in mixer for mixer in self.mixers) if self.mixers else self.layers

    @property
    def rotated(self) -> int:
        """Elements of a head's query and key that are rotated."""
        return self.d_head if self.rotary_dims is None else self.rotary_dims

    @property
    def pre_norms(self) -> bool:
        """True if the inputs of attention and MLP are normalised."""
        return self.norm_placement != "post"

    @property
    def post_norms(self) -> bool:
        """True if the outputs of attention and MLP are normalised."""
        return self.norm_placement != "pre"

    @property
    def norms_per_layer(self) -> int:
        """Number of norms over D that a layer has."""
        if not self.mlp_matrices or self.parallel == "shared":
            return 1
        return 4 if self.norm_placement == "sandwich" else 2

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
            if value not in get_args(kind):
                raise RooftopError(name, value, " or ".join(get_args(kind)))
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
        elif kind in (MoE, MLA, RopeScaling, GatedDelta, Mamba) and not isinstance(value, kind):
            raise RooftopError(name, value, f"a {kind.__name__}, or none")
