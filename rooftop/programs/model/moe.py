"""A mixture of experts: tokens routed by the device that has them, exchanged over the expert axes, and back.

Dims: n tokens of one device, E experts, k active ones, C capacity, D model, F feed-forward.

Every pair (token, expert that it chose) takes a slot. A device has C slots for each expert, or for each shard of the
experts, so that all shapes are known and the AllToAll is even. Pairs beyond C are dropped, those of the earliest tokens
kept: a dropped part of a token's sum is missing, and its other weights stay as they are. The experts' matmuls are

- ``batched``: einsums over the slots of each expert. With C = n nothing can be dropped, since a token chooses an expert
  once at most; that is E/k times the rows that evenly chosen experts need, all of them multiplied;
- ``grouped``: slots are a shard's, whichever of its experts they are for. The device that has the shard sorts them by
  expert, and multiplies each expert's rows, as many as there are (``rooftop.programs.model.grouped_matmul``). With
  C = n min(k, E/X) for each of X shards nothing can be dropped: without expert parallelism, the n k pairs that there
  are. Over a mesh the empty slots still travel, and take memory, but are not multiplied; a capacity drops only what a
  whole shard has too much of.

A row's routing weight travels beside it and multiplies the hidden activations, before the second matmul. The gradient
of the router then needs neither that matmul again nor a second exchange, and combining is a plain sum of k rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from rooftop import models
from rooftop.core.errors import RooftopError, unknown
from rooftop.models import ModelConfig
from rooftop.programs.model.grouped_matmul import RowGroups, grouped_matmul
from rooftop.programs.parameters import MoEWeights
from rooftop.programs.sharding import Specs, axes_of, named_reshard, on_shards

Axes = tuple[str, ...]
#: How experts multiply: slots of their own in one batched einsum, or sorted rows in a grouped matmul.
EXPERT_MATMULS: tuple[str, ...] = ("batched", "grouped")


def moe_mlp(
    x: jax.Array,
    layer: MoEWeights[jax.Array],
    model: ModelConfig,
    specs: Specs,
    *,
    capacity_factor: float | None,
    matmul: str = "batched",
    measured: bool = False,
    segments: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The mixture of one layer and its shared experts on the normalised residual stream: x [B, T, D] -> [B, T, D].

    Both are split as the residual stream is. ``layer`` has no leading dim of layers; its norms are the caller's. Its
    weights come at rest and are gathered here; matmuls run in x's dtype, the router's scores are float32. For
    ``capacity_factor`` see ``capacity``, for ``matmul`` above. If ``measured``, the second result is the
    ``rooftop.programs.model.moe.load`` of each device, [devices that split tokens, 3, E] split over them, of the tokens
    whose segment (``segments`` [B, T]) is not padding. Opens the scopes
    moe/{router,dispatch,experts,combine,shared}, in which ``jax.checkpoint`` finds the names mlp_normed (rows as
    experts get them), mlp_up, mlp_act and mlp_down.

    Raises RooftopError when experts or hidden columns do not divide over their mesh axes, when the axes of experts do
    not split tokens, the factor is not positive, or for an unknown ``matmul``.
    """
    if matmul not in EXPERT_MATMULS:
        raise unknown("expert_matmul", matmul, EXPERT_MATMULS)
    moe = model.moe
    if moe is None:
        raise RooftopError("model.moe", None, "a mixture of experts")
    axes = _Axes.of(specs)
    axes.check(moe)
    fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    weights = {name: weight for name, weight in fields.items() if isinstance(weight, jax.Array)}

    shards = _ways(axes.expert) if matmul == "grouped" else moe.experts
    each = moe.experts // shards

    def local(
        x: jax.Array, own: dict[str, jax.Array], segments: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        def linear(rows: jax.Array, name: str, groups: RowGroups | None = None) -> jax.Array:
            """Rows [E, rows, d] times a weight: each expert's own [E, d, f], or [d, f] of the shared."""
            if groups is not None:
                return grouped_matmul(rows[0], own[name], groups)[None]
            return jnp.einsum("erd,edf->erf" if own[name].ndim == 3 else "erd,df->erf", rows, own[name])

        def bias_of(name: str, experts: jax.Array | None) -> jax.Array:
            """An expert's bias for each row: [E, 1, f], or [1, rows, f] of rows of ``experts`` [1, rows, 1]."""
            if experts is None:
                return own[name][:, None, :]
            return jnp.einsum("re,ef->rf", one_hot(experts[0, :, 0], each).astype(x.dtype), own[name])[None]

        def hidden(
            rows: jax.Array, prefix: str, groups: RowGroups | None = None, experts: jax.Array | None = None
        ) -> jax.Array:
            into = {}
            for name in (name for name in ("gate", "up") if prefix + name in own):
                y = linear(rows, prefix + name, groups)
                if f"{prefix}{name}_bias" in own:
                    y = y + bias_of(f"{prefix}{name}_bias", experts)
                into[name] = checkpoint_name(y, "mlp_up")
            return checkpoint_name(activate(into.get("gate"), into["up"], model), "mlp_act")

        tokens = x.reshape(-1, x.shape[-1])
        with named_scope("router"):
            logits = jnp.einsum("nd,de->ne", tokens, own["router"], preferred_element_type=jnp.float32)
            if "router_bias" in own:
                logits = logits + own["router_bias"]
            logits = checkpoint_name(logits, "mlp_up")
            weights, chosen = route(logits, own.get("correction_bias"), moe)
            of_tokens = None if segments is None else segments.reshape(-1)
            measures = load(logits, chosen, of_tokens, moe)[None] if measured else None
        with named_scope("dispatch"):
            shard = chosen if each == 1 else chosen // each
            slots = ExpertSlots.of(shard, shards, capacity(len(tokens), moe, capacity_factor, shards))
            rows = to_slots(tokens, slots.pairs // moe.active, slots.taken)
            shares = to_slots(weights.reshape(-1, 1), slots.pairs, slots.taken.reshape(-1, 1))
            rows, shares = (checkpoint_name(axes.exchange(each, out=True), "mlp_normed") for each in (rows, shares))
            experts = None
            if matmul == "grouped":
                experts = (chosen % each).reshape(-1, 1).at[slots.pairs].get(mode="fill", fill_value=each)
                experts = checkpoint_name(axes.exchange(experts, out=True), "mlp_normed")
        with named_scope("experts"):
            if experts is None:
                act = hidden(axes.gather_tokens(rows), "")
                act = (act * axes.gather_tokens(shares)).astype(x.dtype)
                y = axes.scatter_tokens(linear(act, "down"))
            else:
                every, gathered = axes.gather_tokens(rows), axes.gather_tokens(experts)
                groups = RowGroups.of(gathered[0, :, 0], each)
                act = hidden(groups.sorted(every[0])[None], "", groups, groups.sorted(gathered[0])[None])
                act = (act * groups.sorted(axes.gather_tokens(shares)[0])).astype(x.dtype)
                y = axes.scatter_tokens(groups.back(linear(act, "down", groups)[0])[None])
            if "down_bias" in own:
                y = y + (bias_of("down_bias", experts) * shares).astype(x.dtype)
            y = checkpoint_name(y, "mlp_down")
        with named_scope("combine"):
            out = from_slots(axes.exchange(y, out=False), slots.pairs // moe.active, slots.taken)
        if moe.shared_d_ff:
            with named_scope("shared"):
                act = hidden(axes.gather_tokens(tokens[None]), "shared_")
                y = axes.scatter_tokens(linear(act, "shared_down"))
                out = out + checkpoint_name(y[0], "mlp_down")
        return out.reshape(x.shape), measures

    with named_scope("moe"):
        own = {}
        for name, weight in weights.items():
            with named_scope(_scope(name)):
                own[name] = axes.gather_weight(weight)
        places = {name: jax.typeof(weight).sharding.spec for name, weight in own.items()}
        stream = specs.residual
        padding = None
        if measured and segments is not None:
            padding = reshard(segments, P(*stream.partitions[:2]))
        return on_shards(
            local,
            in_specs=(stream, places, None if padding is None else P(*stream.partitions[:2])),
            out_specs=(stream, P(axes.residual or None) if measured else None),
        )(x, own, padding)


def no_load(model: ModelConfig, specs: Specs) -> jax.Array:
    """What ``moe_mlp`` measures, before any layer."""
    assert model.moe is not None
    axes = _Axes.of(specs).residual
    return jnp.zeros((_ways(axes), 3, model.moe.experts), jnp.float32, out_sharding=P(axes or None))


def _scope(weight: str) -> str:
    """The scope in which a weight of ``MoEWeights`` is used."""
    if weight in ("router", "router_bias", "correction_bias"):
        return "router"
    return "shared" if weight.startswith("shared_") else "experts"


def activate(gate: jax.Array | None, up: jax.Array, model: ModelConfig) -> jax.Array:
    """The hidden activations of an MLP from its projections, by ``activation`` and ``swiglu_limit`` of the model."""
    if gate is None:
        return _ACTIVATIONS[model.activation](up)
    if (limit := model.swiglu_limit) is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit) + 1
        return gate * jax.nn.sigmoid(model.swiglu_alpha * gate) * up
    return _ACTIVATIONS[model.activation](gate) * up


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution's cumulative function of x."""
    return jax.nn.gelu(x, approximate=False)


@_gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # JAX 0.12.0 cannot differentiate a float32 erfc inside a typed shard_map, though it can compute one.
    (x,), (dx,) = primals, tangents
    cumulative = 0.5 * jax.lax.erfc(-x * 0.5**0.5)
    density = jnp.exp(-0.5 * jnp.square(x)) * (2 * math.pi) ** -0.5
    return _gelu(x), (cumulative + x * density) * dx


_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """The mesh axes at work here, each a part of the mesh that splits something.

    ``expert`` splits experts, and tokens outside them; ``tensor`` hidden columns, and tokens between matmuls; ``embed``
    weights at rest. ``residual`` are all that split tokens, and over ``summed`` of them gradients are summed later.
    """

    expert: Axes
    tensor: Axes
    embed: Axes
    residual: Axes
    summed: Set[str]

    @classmethod
    def of(cls, specs: Specs) -> _Axes:
        tables, weights = specs.rules.activations, specs.rules.parameters
        residual = tables["batch"] + tables["residual_seq"]
        return cls(
            expert=weights["expert"], tensor=weights["mlp"], embed=weights["embed"], residual=residual,
            summed=specs.token_axes("residual_seq"),
        )  # fmt: skip

    def check(self, moe: models.MoE) -> None:
        """Whether experts and columns divide, and tokens are split where they are exchanged and gathered."""
        for name, axes in (("expert", self.expert), ("mlp", self.tensor)):
            if missing := [axis for axis in axes if axis not in self.residual]:
                raise RooftopError(f"rules.parameters.{name}", axes, f"axes that split tokens, not {missing[0]}")
        for name, axes in (("experts", self.expert), ("d_ff", self.tensor), ("shared_d_ff", self.tensor)):
            if (size := getattr(moe, name)) % (ways := _ways(axes)):
                raise RooftopError(f"moe.{name}", size, f"a multiple of {ways} (mesh axes {', '.join(axes)})")

    def gather_weight(self, weight: jax.Array) -> jax.Array:
        """AllGather over the axes of ``embed``, wherever they split it; backward, a ReduceScatter.

        It comes out ``reduced`` over the axes that split tokens and not the weight: its gradient is summed here over
        those that it was gathered over, and later over the others.
        """
        at_rest = jax.typeof(weight).sharding.spec
        held = [axes_of(entry) for entry in at_rest.partitions]
        whole = [tuple(axis for axis in entry if axis not in self.embed) for entry in held]
        reduced = frozenset(self.summed).difference(*whole)
        if weight.ndim == 3 and held != whole and weight.shape[0] == _ways(held[0]):
            # One expert on a device: of its ReduceScatter along the second dim XLA:TPU makes an AllReduce, and sends
            # twice the bytes, unless the first is folded into it.
            rows = (weight.shape[0] * weight.shape[1], weight.shape[2])
            folded = weight.reshape(rows, out_sharding=_spec([(*held[0], *held[1]), held[2]], at_rest.reduced))
            folded = named_reshard(folded, _spec([(*whole[0], *whole[1]), whole[2]], reduced))
            return folded.reshape(weight.shape, out_sharding=_spec(whole, reduced))
        return named_reshard(weight, _spec(whole, reduced))

    def gather_tokens(self, rows: jax.Array) -> jax.Array:
        """AllGather of the tensor group's rows [E, rows, D]; backward, a ReduceScatter."""
        if not self.tensor:
            return rows
        whole = lax.all_gather(_in_two(rows), self.tensor, axis=1, tiled=True)
        return whole.reshape(rows.shape[0], -1, rows.shape[-1])

    def scatter_tokens(self, rows: jax.Array) -> jax.Array:
        """ReduceScatter of partial sums [E, rows, D] to each one's rows; backward, an AllGather."""
        if not self.tensor:
            return rows
        own = lax.psum_scatter(_in_two(rows, _ways(self.tensor)), self.tensor, scatter_dimension=1, tiled=True)
        return own.reshape(rows.shape[0], -1, rows.shape[-1])

    def exchange(self, rows: jax.Array, *, out: bool) -> jax.Array:
        """AllToAll over the expert axes: [E, C, D] to the shards of experts [E/X, X C, D], or back."""
        split, joined = (0, 1) if out else (1, 0)
        if not self.expert:
            return rows
        return lax.all_to_all(rows, self.expert, split_axis=split, concat_axis=joined, tiled=True)


def _in_two(rows: jax.Array, ways: int = 1) -> jax.Array:
    """Rows [1, rows, D] as [2, rows / 2, D], others as they are: see ``_Axes.gather_weight``.

    ``rows`` are those of so many devices, each of which must have whole ones in both halves. Which rows lie beside
    which does not matter here, as long as all take the same places.
    """
    return rows.reshape(2, -1, rows.shape[-1]) if rows.shape[0] == 1 and rows.shape[1] % (2 * ways) == 0 else rows


def _spec(entries: Sequence[Axes], reduced: Set[str]) -> P:
    return P(*(entry or None for entry in entries), reduced=reduced)


def _ways(axes: Axes) -> int:
    """Devices of the mesh along ``axes``."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in axes)


def capacity(tokens: int, moe: models.MoE, factor: float | None, shards: int) -> int:
    """Slots C of a device of ``tokens`` n for each of ``shards`` X of the experts: ``factor`` n k / X, at most all.

    All that can be needed, also for None, is n min(k, E/X). A factor of 1 is what evenly chosen experts need, and what
    a plan counts. Raises RooftopError if it is not positive.
    """
    all_ = tokens * min(moe.active, moe.experts // shards)
    if factor is None:
        return all_
    if not factor > 0:
        raise RooftopError("capacity_factor", factor, "a positive number, or none to drop nothing")
    return min(all_, math.ceil(factor * tokens * moe.active / shards))


@dataclass(frozen=True, kw_only=True)
class ExpertSlots:
    """Which pair is in which slot, and the reverse. Pair p = token x k + choice.

    ``pairs`` [E, C]: the pair in each slot, n k where the slot is empty. ``taken`` [n, k]: the slot of each pair, E C
    where it was dropped.
    """

    pairs: jax.Array
    taken: jax.Array

    @classmethod
    def of(cls, chosen: jax.Array, experts: int, capacity: int) -> ExpertSlots:
        """C slots for each expert filled in the order of pairs; ``chosen`` [n, k] are ids of experts."""
        pair, size = jnp.arange(chosen.size, dtype=jnp.int32), chosen.size
        if size * experts >= 2**31:
            raise RooftopError("pairs of token and expert on a device", size, f"fewer than 2**31 / {experts}")
        # One key and nothing beside it: of all ways to rank, the one that XLA:TPU compiles fastest.
        expert, order = jnp.divmod(lax.sort(chosen.reshape(-1) * size + pair, is_stable=False), size)
        count = jnp.sum(one_hot(chosen.reshape(-1), experts), axis=0, dtype=jnp.int32)
        first = jnp.cumsum(count) - count
        place = jnp.arange(capacity, dtype=jnp.int32)
        rank = pair - first[expert]
        slot = jnp.where(rank < capacity, expert * capacity + rank, experts * capacity)
        return cls(
            pairs=jnp.where(place < count[:, None], order.at[first[:, None] + place].get(mode="clip"), size),
            taken=jnp.zeros_like(pair).at[order].set(slot, unique_indices=True).reshape(chosen.shape),
        )


@jax.custom_vjp
def to_slots(x: jax.Array, source: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows of x [n, D] for every slot: row source[e, c], zeros where that is n or more: [E, C, D].

    ``slots`` [n, k] is the reverse, the slots that each row went to: the gradient is ``from_slots``, a gather too.
    """
    return x.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def from_slots(rows: jax.Array, source: jax.Array, slots: jax.Array) -> jax.Array:
    """The sum over k of the rows [E, C, D] in slots [n, k], those beyond E C left out: [n, D]. Summed in float32."""
    flat = rows.reshape(-1, rows.shape[-1])
    picked = flat.at[slots].get(mode="fill", fill_value=0)
    return jnp.sum(picked, axis=1, dtype=jnp.float32).astype(rows.dtype)


_Indices = tuple[jax.Array, jax.Array]


def _to_slots(x: jax.Array, source: jax.Array, slots: jax.Array) -> tuple[jax.Array, _Indices]:
    return to_slots(x, source, slots), (source, slots)


def _from_slots(rows: jax.Array, source: jax.Array, slots: jax.Array) -> tuple[jax.Array, _Indices]:
    return from_slots(rows, source, slots), (source, slots)


to_slots.defvjp(_to_slots, lambda indices, gradient: (from_slots(gradient, *indices), None, None))
from_slots.defvjp(_from_slots, lambda indices, gradient: (to_slots(gradient, *indices), None, None))


def route(logits: jax.Array, correction_bias: jax.Array | None, moe: models.MoE) -> tuple[jax.Array, jax.Array]:
    """Weights [n, k] (float32) and ids [n, k] of the experts chosen by ``logits`` [n, E] (float32), best first.

    The rules are ``rooftop.models.MoE``'s (DeepSeek-V3 paper, equations 13 to 16, for groups and correction).
    """
    scores = jax.nn.softmax(logits) if moe.scoring == "softmax" else jax.nn.sigmoid(logits)
    choice = lax.stop_gradient(scores)
    if correction_bias is not None:
        choice = choice + lax.stop_gradient(correction_bias.astype(jnp.float32))
    if moe.groups > 1:
        groups = choice.reshape(len(choice), moe.groups, -1)
        best = lax.top_k(groups, 1 if moe.group_score == "max" else 2)[0].sum(-1)
        active = one_hot(lax.top_k(best, moe.active_groups)[1], moe.groups).any(1)
        choice = jnp.where(active[..., None], groups, -jnp.inf).reshape(choice.shape)
    chosen = lax.top_k(choice, moe.active)[1]
    # Picked by comparison: the gradient of an index would be a scatter.
    weights = jnp.sum(jnp.where(one_hot(chosen, moe.experts), scores[:, None, :], 0.0), axis=-1)
    if moe.normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights * moe.routed_scaling, chosen


def load(logits: jax.Array, chosen: jax.Array, segments: jax.Array | None, moe: models.MoE) -> jax.Array:
    """What experts get of n tokens, [3, E] float32: how many chose each, their probabilities of each, and n (E times).

    Probabilities are the router's scores, of ``logits`` [n, E], divided by their sum (a softmax's is 1); they alone
    have a gradient. Tokens of segment 0 (``segments`` [n]), which are padding, do not count. Loads of layers and
    devices add up.
    """
    scores = jax.nn.softmax(logits) if moe.scoring == "softmax" else jax.nn.sigmoid(logits)
    probabilities = scores / jnp.sum(scores, axis=-1, keepdims=True) if moe.scoring == "sigmoid" else scores
    choices = jnp.sum(one_hot(chosen, moe.experts), axis=1, dtype=jnp.float32)
    found = jnp.stack([choices, probabilities, jnp.ones_like(probabilities)])
    return jnp.sum(found if segments is None else jnp.where((segments > 0)[:, None], found, 0.0), axis=1)


def balance(load: jax.Array) -> jax.Array:
    """The load-balancing loss of a ``load`` [3, E]: E sum over e of f_e P_e, k where all experts get the same.

    f_e is the number of choices of e for a token and P_e its mean probability (Switch Transformer paper, equations 4 to
    6; over the tokens of all layers together, as the Mixtral models of transformers).
    """
    choices, probabilities, tokens = load
    tokens = jnp.maximum(tokens, 1.0)
    return load.shape[1] * jnp.sum(choices / tokens * (probabilities / tokens))


def one_hot(ids: jax.Array, size: int) -> jax.Array:
    """Whether an id is e, for every e: [..., size] booleans."""
    return ids[..., None] == jnp.arange(size, dtype=ids.dtype)
