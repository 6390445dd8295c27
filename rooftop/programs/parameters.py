"""The weights of a decoder: one description gives shapes, shardings and initial values.

Dims: D model, F feed-forward, N query heads, K key/value heads, H head size, V vocabulary, E experts, n layers of one
kind that a scan runs over. A tree holds arrays, their shapes or their shardings, so shapes are stated in docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AbstractMesh, Mesh, NamedSharding, auto_axes, reshard
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from rooftop.core.errors import RooftopError
from rooftop.core.rounding import next_multiple
from rooftop.models.config import MLA, ModelConfig
from rooftop.models.config import MoE as Mixture
from rooftop.models.segments import LayerKind, Segment, segments, shared_segment
from rooftop.models.widths import HeadSplit, PaddedDim
from rooftop.programs.sharding import Dim, Specs, axes_of

Leaf = TypeVar("Leaf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Norm(Generic[Leaf]):
    """A norm over D (or a latent's size): scale [n, D] and, for a layer norm, bias [n, D]; no n outside of layers.

    None for what a family lacks.
    """

    scale: Leaf | None = None
    bias: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Attention(Generic[Leaf]):
    """Attention weights: q [n, D, N, H], k and v [n, D, K, H], out [n, N*H, D]; None for weights that a family lacks.

    A bias has the shape of the array that it is added to, without D. q_norm and k_norm are [n, H], or of all heads
    together [n, N, H] and [n, K, H]; sinks [n, N].
    """

    norm: Norm[Leaf] | None = None
    q: Leaf
    k: Leaf
    v: Leaf
    out: Leaf
    q_bias: Leaf | None = None
    k_bias: Leaf | None = None
    v_bias: Leaf | None = None
    out_bias: Leaf | None = None
    q_norm: Leaf | None = None
    k_norm: Leaf | None = None
    sinks: Leaf | None = None
    post_norm: Norm[Leaf] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LatentAttention(Generic[Leaf]):
    """Weights of multi-head latent attention (DeepSeek-V2 paper, section 2.1).

    With a query latent q_down [n, D, q_rank], q_norm [n, q_rank] and q [n, q_rank, N, d_nope + d_rope], else only q
    [n, D, N, d_nope + d_rope]. kv_down [n, D, kv_rank + d_rope], kv_norm [n, kv_rank], kv_up [n, kv_rank, N,
    d_nope + d_v], out [n, N*d_v, D].
    """

    norm: Norm[Leaf] | None = None
    q_down: Leaf | None = None
    q_norm: Leaf | None = None
    q: Leaf
    kv_down: Leaf
    kv_norm: Leaf
    kv_up: Leaf
    out: Leaf
    post_norm: Norm[Leaf] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MLP(Generic[Leaf]):
    """Feed-forward weights: gate and up [n, D, F], down [n, F, D]; an MLP of two matrices has no gate.

    Biases: gate_bias and up_bias [n, F], down_bias [n, D]. No ``norm`` where that of attention is the MLP's too.
    """

    norm: Norm[Leaf] | None = None
    gate: Leaf | None = None
    up: Leaf
    down: Leaf
    gate_bias: Leaf | None = None
    up_bias: Leaf | None = None
    down_bias: Leaf | None = None
    post_norm: Norm[Leaf] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MoEWeights(Generic[Leaf]):
    """Weights of a mixture of experts: router [n, D, E], gate and up [n, E, D, F], down [n, E, F, D].

    Biases: router_bias [n, E], gate_bias and up_bias [n, E, F], down_bias [n, E, D]. correction_bias [n, E] is added to
    the scores for the choice of experts only. The shared experts together are one MLP: shared_gate and shared_up
    [n, D, F_shared], shared_down [n, F_shared, D]; the sigmoid of shared_router [n, D, 1] multiplies them. The
    transformer applies ``norm`` and ``post_norm``, not the mixture.
    """

    norm: Norm[Leaf] | None = None
    router: Leaf
    gate: Leaf | None = None
    up: Leaf
    down: Leaf
    router_bias: Leaf | None = None
    correction_bias: Leaf | None = None
    gate_bias: Leaf | None = None
    up_bias: Leaf | None = None
    down_bias: Leaf | None = None
    shared_router: Leaf | None = None
    shared_gate: Leaf | None = None
    shared_up: Leaf | None = None
    shared_down: Leaf | None = None
    post_norm: Norm[Leaf] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Layer(Generic[Leaf]):
    """n layers of one kind, stacked: each weight has a leading dim n."""

    attn: Attention[Leaf] | LatentAttention[Leaf]
    mlp: MLP[Leaf] | MoEWeights[Leaf]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Transformer(Generic[Leaf]):
    """The whole decoder: embed [V, D], learned positions [rows, D], unembed [D, V] (None if tied).

    ``layers[s][j]``: the weights of the layers at position j of segment s's period (see ``rooftop.models.segments``).
    """

    embed: Leaf
    positions: Leaf | None = None
    layers: tuple[tuple[Layer[Leaf], ...], ...]
    final_norm: Norm[Leaf]
    unembed: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch(Generic[Leaf]):
    """Token ids and the ids that follow them, both [B, T] int32. Packed batches also have segments.

    ``segments`` [B, T] int32: the document of each token. Tokens attend within their own segment, and a target of -1
    carries no loss (without segments every target does). The tokens of a segment are adjacent; segment 0 is padding.
    ``positions`` [B, T] int32: positions of the tokens; None: counted from the start of the segment, or of the
    sequence. In a ``padded`` batch without segments, tokens with a target of -1 are padding: the ends of sequences, or
    whole ones.
    """

    tokens: Leaf
    targets: Leaf
    segments: Leaf | None = None
    positions: Leaf | None = None
    padded: bool = field(default=False, metadata={"static": True})

    @property
    def masked(self) -> bool:
        """True if a target of -1 carries no loss; otherwise every target does."""
        return self.padded or self.segments is not None


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Shape as stored, logical dims and initial value of a parameter.

    ``padding`` has an entry for each dim that is stored with zeros, None for others; () without any. ``fan_in`` is None
    for scales, biases and sinks: they start as ``value`` and have no weight decay. ``sequence`` is the logical dim that
    splits the tokens at the parameter's place: ``seq`` inside matmuls, ``residual_seq`` between them. A ``stacked``
    parameter has several layers along its first dim, those of its stack from ``first`` on. A ``plain`` one is small and
    sensitive: no format quantises it.
    """

    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    fan_in: int | None = None
    value: float = 0.0
    sequence: str = "seq"
    stacked: bool = False
    first: int = 0
    plain: bool = False
    padding: tuple[PaddedDim | None, ...] = ()
    reads_padding: bool = False
    """True if the weight meets values in its padding, and so has a gradient there, which is to be dropped."""

    @property
    def pads_inside(self) -> bool:
        """True if some padding is not at the end of its dim."""
        return any(dim is not None and any(parts > 1 for parts, _ in dim.steps) for dim in self.padding)

    @property
    def true_shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        dims = self.padding or (None,) * len(self.shape)
        return tuple(size if dim is None else dim.size for size, dim in zip(self.shape, dims, strict=True))

    def padded(self, padding: tuple[PaddedDim | None, ...]) -> Parameter:
        """The parameter, which has none yet, with ``padding``."""
        if not any(padding):
            return self
        shape = (size if dim is None else dim.stored for size, dim in zip(self.shape, padding, strict=True))
        return replace(self, shape=tuple(shape), padding=padding)


def describe(
    model: ModelConfig, ways: Mapping[str, int] | None = None, *, stationary: bool = False, lanes: int = 1
) -> Transformer[Parameter]:
    """The one description of the weights, which gives shapes, shardings and initial values.

    ``ways`` are devices that split each logical dim (``Specs.ways``), and of ``layers`` stages times their chunks: dims
    that they do not divide are stored padded (``rooftop.models.widths``). Without it no dim is. Key/value heads that
    devices have in common are stored once.

    The weights of a server are ``stationary``: none is gathered. Key/value heads are then stored on each device that
    reads them, and D of every weight, of norms and of biases is split over ``embed`` axes, as the residual stream is.
    A device has whole ``lanes`` of a table's columns, unless ``embed`` axes split D: a TPU then reads rows in place.

    Weights after a nonlinearity are two-dimensional, with tensor and then fsdp on their rows, so that shards stay thick
    enough for the hardware's tiles. Tables are split over D only: a lookup exchanges no rows. Layers that pipeline
    stages share (``shared_segment``) are split over the stages; all stages have the few other layers.
    """
    ways = ways or {}
    d, v = model.d_model, model.vocab
    table = (None, ("embed", "vocab") if model.tied_embeddings else ("vocab", "embed"))
    if stationary:
        table = (None, ("embed", "mlp"))
    learned = model.positions == "learned"
    unembed = Parameter(shape=(d, v), dims=(None, ("vocab", "embed")) if stationary else ("embed", "vocab"), fan_in=d)
    shared = shared_segment(model)
    described = Transformer(
        embed=Parameter(shape=(v, d), dims=table, fan_in=d),
        positions=Parameter(shape=(model.position_offset + model.max_seq_len, d), dims=table, fan_in=d)
        if learned
        else None,
        layers=tuple(
            tuple(
                _layer(model, kind, segment.repeats, "layers" if at == shared else None, ways, stationary)
                for kind in segment.kinds
            )
            for at, segment in enumerate(segments(model))
        ),
        final_norm=_norm(model, (), stationary),
        unembed=None if model.tied_embeddings else unembed,
    )
    rows = next_multiple(v, ways.get("vocab", 1))
    padded: Transformer[Parameter] = jax.tree.map(lambda parameter: _padded(parameter, model, ways), described)
    if stationary and ways.get("embed", 1) == 1:
        columns = next_multiple(d, lanes * ways.get("mlp", 1))
        padded = replace(padded, embed=_with_columns(described.embed, columns))
        if described.positions is not None:
            padded = replace(padded, positions=_with_columns(described.positions, columns))
    # The rows of a tied table are split too, where it is the unembedding.
    return replace(padded, embed=_padded_rows(padded.embed, rows)) if model.tied_embeddings else padded


def of_layers(described: Transformer[Parameter], model: ModelConfig, layers: range) -> Transformer[Parameter]:
    """The weights of a pipeline stage of a server, which has ``layers``; None for what other stages have.

    The first stage has the embedding, the last one the unembedding, which may be the same table.
    """
    first, last = layers.start == 0, layers.stop == model.layers

    def of_stack(segment: Segment, position: int, stack: Layer[Parameter]) -> Any:
        own = [repeat for repeat in range(segment.repeats) if segment.layer(position, repeat) in layers]
        if not own:
            return None
        return jax.tree.map(
            lambda weight: replace(weight, shape=(len(own), *weight.shape[1:]), first=weight.first + own[0]), stack
        )

    absent: Any = None
    return replace(
        described,
        embed=described.embed if first or (last and model.tied_embeddings) else absent,
        positions=described.positions if first else absent,
        layers=tuple(
            tuple(of_stack(segment, position, stack) for position, stack in enumerate(stacks))
            for segment, stacks in zip(segments(model), described.layers, strict=True)
        ),
        final_norm=described.final_norm if last else absent,
        unembed=described.unembed if last else absent,
    )


def _with_columns(table: Parameter, columns: int) -> Parameter:
    """A table [V, D], not padded yet, with its last dim padded to ``columns``."""
    return table.padded((None, PaddedDim.of(table.shape[1], (1, columns))))


def _padded_rows(table: Parameter, rows: int) -> Parameter:
    """A table [V, D] with its first dim padded to ``rows``."""
    dim = PaddedDim.of(table.shape[0], (1, rows))
    if dim is None:
        return table
    return replace(table, shape=(rows, *table.shape[1:]), padding=(dim, *(table.padding[1:] or (None,))))


def _padded(parameter: Parameter, model: ModelConfig, ways: Mapping[str, int]) -> Parameter:
    """A parameter with every dim padded that the devices along its axes do not divide."""
    return parameter.padded(
        tuple(
            _padded_dim(size, axes_of(dim), model, ways)
            for size, dim in zip(parameter.shape, parameter.dims, strict=True)
        )
    )


def _padded_dim(size: int, names: tuple[str, ...], model: ModelConfig, ways: Mapping[str, int]) -> PaddedDim | None:
    """The padding of a dim of ``size`` that the logical dims ``names`` split, outermost first."""
    if not names:
        return None
    if names == ("layers",):
        parts = ways.get("layers", 1)
        return PaddedDim.of(size, (1, next_multiple(size, parts)))
    first, split = names[0], {name: ways.get(name, 1) for name in names}
    if first == "embed" or names == ("vocab", "embed"):
        # D, or a latent, is whole in a matmul: what is added for all of its axes is cut off after the gather.
        spread = math.prod(split.values())
        return PaddedDim.of(size, (1, next_multiple(size, spread)))
    columns = split[first]
    if first == "kv_heads":
        return _head_split(model, ways).padded_keys()
    if first == "heads":
        used = _head_split(model, ways).padded(size // model.heads)
    else:
        used = PaddedDim.of(size, (1, next_multiple(size, columns)))
    part = (size if used is None else used.stored) // columns
    embed = split.get("embed", 1)
    return PaddedDim.of(size, *(() if used is None else used.steps), (columns, next_multiple(part, embed)))


def _head_split(model: ModelConfig, ways: Mapping[str, int]) -> HeadSplit:
    groups = ways.get("kv_heads", 1)
    return HeadSplit.of(model, groups, ways.get("heads", 1) // groups)


def _layer(
    model: ModelConfig, kind: LayerKind, n: int, dim: Dim, ways: Mapping[str, int], stationary: bool
) -> Layer[Parameter]:
    layer = Layer(
        attn=_attention(model, n, ways, stationary) if model.mla is None else _latent(model, model.mla, n, stationary),
        mlp=_mixture(model, model.moe, n, stationary)
        if kind.moe and model.moe is not None
        else _mlp(model, n, stationary),
    )
    return jax.tree.map(lambda weight: replace(weight, dims=(dim, *weight.dims[1:]), stacked=True), layer)


def _norm(model: ModelConfig, stack: tuple[int, ...], stationary: bool) -> Norm[Parameter]:
    if not model.norm_scale:
        return Norm()
    shape = (*stack, model.d_model)
    scale = _vector(shape, _stream(stationary), sequence="residual_seq", value=0.0 if model.norm_offset else 1.0)
    has_bias = model.norm == "layer" and model.norm_bias
    return Norm(scale=scale, bias=_vector(shape, _stream(stationary), sequence="residual_seq") if has_bias else None)


def _stream(stationary: bool) -> Dim:
    """The logical dim of D in norms and biases."""
    return "embed" if stationary else None


def _pre_norm(model: ModelConfig, n: int, stationary: bool, *, mlp: bool = False) -> Norm[Parameter] | None:
    in_common = mlp and model.parallel == "shared"
    return _norm(model, (n,), stationary) if model.pre_norms and not in_common else None


def _post_norm(model: ModelConfig, n: int, stationary: bool) -> Norm[Parameter] | None:
    return _norm(model, (n,), stationary) if model.post_norms else None


def _vector(shape: tuple[int, ...], *dims: Dim, sequence: str = "seq", value: float = 0.0) -> Parameter:
    """A scale, bias or sink: starts as a constant. The last dims are ``dims``."""
    dims = (*(None,) * (len(shape) - len(dims)), *dims)
    return Parameter(shape=shape, dims=dims, value=value, sequence=sequence)


def _attention(model: ModelConfig, n: int, ways: Mapping[str, int], stationary: bool) -> Attention[Parameter]:
    d, h, heads, kv_heads = model.d_model, model.d_head, model.heads, model.kv_heads
    chosen = not stationary and _head_split(model, ways).copies_keys

    def head_norm(name: str, heads: int) -> Parameter | None:
        value = 0.0 if model.norm_offset else 1.0
        if model.qk_norm == "head":
            return _vector((n, h), sequence="residual_seq", value=value)
        return _vector((n, heads, h), name, None, value=value) if model.qk_norm == "width" else None

    def into(name: str, heads: int) -> Parameter:
        parameter = Parameter(shape=(n, d, heads, h), dims=(None, "embed", name, None), fan_in=d)
        if name == "heads" or not chosen:
            return parameter
        # Devices choose their heads from all, which are gathered from all devices along these axes.
        return replace(parameter, dims=(None, ("embed", name), None, None), sequence="residual_seq")

    def bias(name: str, heads: int) -> Parameter | None:
        if not model.qkv_bias:
            return None
        if name == "kv_heads" and chosen:
            return _vector((n, heads, h), sequence="residual_seq")
        return _vector((n, heads, h), name, None)

    return Attention(
        norm=_pre_norm(model, n, stationary),
        q=into("heads", heads),
        k=into("kv_heads", kv_heads),
        v=into("kv_heads", kv_heads),
        # A padded query head has no weights, and so reads the mean of the values that others read too.
        out=replace(_rows(n, heads * h, d, "heads", stationary), reads_padding=kv_heads < heads),
        q_bias=bias("heads", heads),
        k_bias=bias("kv_heads", kv_heads),
        v_bias=bias("kv_heads", kv_heads),
        out_bias=_vector((n, d), _stream(stationary), sequence="residual_seq") if model.attn_out_bias else None,
        q_norm=head_norm("heads", heads),
        k_norm=head_norm("kv_heads", kv_heads),
        sinks=_vector((n, heads), "heads") if model.attention_sinks else None,
        post_norm=_post_norm(model, n, stationary),
    )


def _latent(model: ModelConfig, mla: MLA, n: int, stationary: bool) -> LatentAttention[Parameter]:
    """Weights of latent attention.

    The projections down to latents read the residual stream in its own sharding, so all of its axes sum their
    gradients. Servers do not split the projections up from latents over ``embed`` axes: sums over a part of a latent
    would take longer than reading all of these weights.
    """
    d, heads, rank = model.d_model, model.heads, mla.q_rank
    down = partial(Parameter, dims=(None, "embed", None), fan_in=d, sequence="residual_seq")

    def up(size: int | None, columns: int) -> Parameter:
        inputs = None if stationary and size is not None else "embed"
        return Parameter(shape=(n, size or d, heads, columns), dims=(None, inputs, "heads", None), fan_in=size or d)

    scale = partial(_vector, sequence="residual_seq", value=1.0)
    return LatentAttention(
        norm=_pre_norm(model, n, stationary),
        q_down=None if rank is None else down(shape=(n, d, rank)),
        q_norm=None if rank is None else scale((n, rank)),
        q=up(rank, model.d_head),
        kv_down=down(shape=(n, d, mla.kv_rank + mla.d_rope)),
        kv_norm=scale((n, mla.kv_rank)),
        kv_up=up(mla.kv_rank, mla.d_nope + mla.d_v),
        out=_rows(n, heads * mla.d_v, d, "heads", stationary),
        post_norm=_post_norm(model, n, stationary),
    )


def _rows(n: int, rows: int, d: int, name: str, stationary: bool) -> Parameter:
    return Parameter(shape=(n, rows, d), dims=(None, *_rows_dims(name, stationary)), fan_in=rows)


def _rows_dims(name: str, stationary: bool) -> tuple[Dim, Dim]:
    """The logical dims of a weight back into the stream."""
    return (name, "embed") if stationary else ((name, "embed"), None)


def _mlp(model: ModelConfig, n: int, stationary: bool) -> MLP[Parameter]:
    d, f = model.d_model, model.d_ff
    gated, bias = model.mlp_matrices == 3, model.mlp_bias
    into = Parameter(shape=(n, d, f), dims=(None, "embed", "mlp"), fan_in=d)
    hidden = _vector((n, f), "mlp")
    return MLP(
        norm=_pre_norm(model, n, stationary, mlp=True),
        gate=into if gated else None,
        up=into,
        down=_rows(n, f, d, "mlp", stationary),
        gate_bias=hidden if gated and bias else None,
        up_bias=hidden if bias else None,
        down_bias=_vector((n, d), _stream(stationary), sequence="residual_seq") if bias else None,
        post_norm=_post_norm(model, n, stationary),
    )


def _mixture(model: ModelConfig, moe: Mixture, n: int, stationary: bool) -> MoEWeights[Parameter]:
    d, f, e, shared = model.d_model, moe.d_ff, moe.experts, moe.shared_d_ff
    gated = model.mlp_matrices == 3
    into = Parameter(shape=(n, e, d, f), dims=(None, "expert", "embed", "expert_mlp"), fan_in=d)
    hidden = _vector((n, e, f), "expert", "expert_mlp")
    choice = _vector((n, e), sequence="residual_seq")
    shared_into = Parameter(shape=(n, d, shared), dims=(None, "embed", "mlp"), fan_in=d)
    return MoEWeights(
        norm=_pre_norm(model, n, stationary, mlp=True),
        router=Parameter(shape=(n, d, e), dims=(None, "embed", None), fan_in=d, sequence="residual_seq", plain=True),
        gate=into if gated else None,
        up=into,
        down=Parameter(shape=(n, e, f, d), dims=(None, "expert", *_rows_dims("expert_mlp", stationary)), fan_in=f),
        router_bias=choice if moe.bias else None,
        correction_bias=choice if moe.correction_bias else None,
        gate_bias=hidden if gated and moe.bias else None,
        up_bias=hidden if moe.bias else None,
        down_bias=_vector((n, e, d), "expert", _stream(stationary), sequence="residual_seq") if moe.bias else None,
        shared_router=Parameter(
            shape=(n, d, 1), dims=(None, "embed", None), fan_in=d, sequence="residual_seq", plain=True
        )
        if moe.shared_gate
        else None,
        shared_gate=shared_into if gated and shared else None,
        shared_up=shared_into if shared else None,
        shared_down=_rows(n, shared, d, "mlp", stationary) if shared else None,
        post_norm=_post_norm(model, n, stationary),
    )


def stored(array: Shaped[Array, "*true"], parameter: Parameter) -> Shaped[Array, "*stored"]:
    """The parameter's array with its copies, and zeros for its padding."""
    for at, dim in enumerate(parameter.padding):
        if dim is not None and dim.copies:
            array = jnp.take(array, np.array(dim.copies), axis=at)
        for parts, filled in () if dim is None else dim.steps:
            array = _refilled(array, at, parts, filled)
    return array


def padding_last(array: Shaped[Array, "*stored"], parameter: Parameter) -> Shaped[Array, "*stored"]:
    """The stored array with all padding moved to the ends of its dims, as another mesh can read it."""
    for at, dim in enumerate(parameter.padding):
        if dim is not None:
            sizes = [dim.size, *(parts * filled for parts, filled in dim.steps)]
            for (parts, _), size in reversed(list(zip(dim.steps, sizes, strict=False))):
                array = _refilled(array, at, parts, size // parts)
            array = _refilled(array, at, 1, dim.stored)
    return array


def padding_in_parts(array: Shaped[Array, "*stored"], parameter: Parameter) -> Shaped[Array, "*stored"]:
    """The inverse of ``padding_last``."""
    for at, dim in enumerate(parameter.padding):
        if dim is not None:
            array = _refilled(array, at, 1, dim.size)
    return stored(array, parameter)


def without_padding(array: Shaped[Array, "*stored"], parameter: Parameter) -> Shaped[Array, "*stored"]:
    """The array with zeros for its padding, which it may have values in: see ``Parameter.reads_padding``."""
    if not parameter.reads_padding:
        return array
    spec = jax.typeof(array).sharding.spec
    for at, dim in enumerate(parameter.padding):
        if dim is not None:
            true = np.zeros(dim.stored, np.bool_)
            true[dim.positions] = True
            here = reshard(jnp.asarray(true), P(spec.partitions[at]))
            here = jax.lax.broadcast_in_dim(here, array.shape, (at,), out_sharding=P(*spec.partitions))
            array = jnp.where(here, array, 0)
    return array


def _refilled(array: Shaped[Array, "*dims"], at: int, parts: int, size: int) -> Shaped[Array, "*filled"]:
    """The array with each of the equal ``parts`` of a dim filled up with zeros, or cut, to ``size``."""
    before, after = array.shape[:at], array.shape[at + 1 :]
    split = array.reshape(*before, parts, -1, *after)
    if (missing := size - split.shape[at + 1]) > 0:
        split = jnp.pad(split, [(0, missing if dim == at + 1 else 0) for dim in range(split.ndim)])
    else:
        split = jax.lax.slice_in_dim(split, 0, size, axis=at + 1)
    return split.reshape(*before, parts * size, *after)


def shardings(described: Any, mesh: Mesh | AbstractMesh, specs: Specs) -> Any:
    """Sharding at rest of every parameter of a tree. Raises RooftopError if a dim does not divide over its axes."""

    def sharding(path: tuple[object, ...], parameter: Parameter) -> NamedSharding:
        spec = specs.parameter(*parameter.dims)
        for size, entry in zip(parameter.shape, spec, strict=True):
            ways = math.prod(mesh.shape[axis] for axis in axes_of(entry))
            if size % ways:
                name = f"model weight {jax.tree_util.keystr(path).lstrip('.')}"
                raise RooftopError(name, parameter.shape, f"a multiple of {ways} in place of {size}: {spec} splits it")
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, described)


def abstract(
    described: Transformer[Parameter], mesh: Mesh | AbstractMesh, specs: Specs, dtype: DTypeLike
) -> Transformer[jax.ShapeDtypeStruct]:
    """Stored shapes and shardings of the weights, without memory."""
    return jax.tree.map(
        lambda parameter, sharding: jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=sharding),
        described,
        shardings(described, mesh, specs),
    )


def moved(arrays: Any, places: Any) -> Any:
    """Arrays on another mesh, in the shapes and shardings of ``places``.

    Layers of padding that ``places`` lacks are cut off: a mesh without stages needs none.
    """
    there, tree = jax.tree.flatten(jax.device_put(arrays, jax.tree.map(lambda place: place.sharding, places)))
    aims = jax.tree.leaves(places)
    padded = [at for at, place in enumerate(aims) if there[at].shape != place.shape]

    @jax.jit
    def cut(arrays: list[jax.Array]) -> list[jax.Array]:
        return [array[: aims[at].shape[0]] for at, array in zip(padded, arrays, strict=True)]

    if padded:
        # A caller may be under the mesh that the arrays come from.
        with jax.set_mesh(aims[0].sharding.mesh):
            for at, array in zip(padded, cut([there[at] for at in padded]), strict=True):
                there[at] = array
    return jax.tree.unflatten(tree, there)


def initialise(
    described: Transformer[Parameter],
    key: jax.Array,
    mesh: Mesh,
    specs: Specs,
    dtype: DTypeLike,
    *,
    whole: Transformer[Parameter] | None = None,
) -> Transformer[jax.Array]:
    """Initial weights, each created in its shards: normal with deviation fan_in**-0.5, or constant without a fan-in.

    Padding is zero. The values depend on ``key`` and not on the mesh. Those of some layers (``of_layers``) are the same
    as in the ``whole``.
    """
    sharding_leaves = jax.tree.leaves(shardings(described, mesh, specs))
    parameters, tree = jax.tree.flatten(described)
    every = jax.tree_util.tree_leaves_with_path(described if whole is None else whole)
    sources = {path: (parameter.true_shape, at) for at, (path, parameter) in enumerate(every)}
    chosen = [sources[path] for path, _ in jax.tree_util.tree_leaves_with_path(described)]

    def initial(
        parameter: Parameter, key: jax.Array, sharding: NamedSharding, source: tuple[tuple[int, ...], int]
    ) -> jax.Array:
        def create(key: jax.Array) -> jax.Array:
            if parameter.fan_in is None:
                return stored(jnp.full(parameter.true_shape, parameter.value, dtype), parameter)
            normal = jax.random.normal(key, source[0], jnp.float32)
            if parameter.true_shape != source[0]:
                normal = jax.lax.slice_in_dim(normal, parameter.first, parameter.first + parameter.true_shape[0])
            return stored((normal * parameter.fan_in**-0.5).astype(dtype), parameter)

        # Before it is padded, an array need not divide.
        return auto_axes(create, out_sharding=sharding)(key)

    @jax.jit
    def create(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(every))
        return [
            initial(parameter, keys[source[1]], sharding, source)
            for parameter, sharding, source in zip(parameters, sharding_leaves, chosen, strict=True)
        ]

    with jax.set_mesh(mesh):
        return jax.tree.unflatten(tree, create(key))
