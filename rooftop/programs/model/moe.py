"""A mixture of experts: each device routes its tokens, exchanges them over the expert axes, and gets the results back.

Dims: n tokens of one device, E experts, k active ones, C capacity, D model, F feed-forward.

Every pair (token, chosen expert) takes a slot. A device has C slots for each expert, or for each shard of experts, so
that all shapes are static and the AllToAll is even. If an expert has more than C pairs, those of the later tokens are
dropped: the token's sum lacks that part, and its other weights are unchanged. The experts' matmuls are

- ``batched``: einsums over the slots of each expert. With C = n nothing is dropped, since a token chooses an expert at
  most once; that is E/k times the rows of evenly chosen experts, and all of them are multiplied;
- ``grouped``: a slot belongs to a shard, for any of its experts. The device of the shard sorts its rows by expert, and
  multiplies only the rows of each expert (``rooftop.programs.model.grouped_matmul``). With C = n min(k, E/X) for each
  of X shards nothing is dropped: without expert parallelism, exactly the n k pairs. Over a mesh empty slots take memory
  and bandwidth, but are not multiplied; a capacity drops only pairs over the limit of a whole shard.

Servers, whose steps have few tokens and drop none, have no slots of shards: all devices get all tokens and choices, and
each multiplies the rows of its own experts. Their partial sums are scattered back. That moves as many rows as there are
tokens, where slots for any choice of them are min(k, E/X) times as many.

A row travels with its routing weight, which multiplies the hidden activations before the second matmul. The gradient of
the router then needs neither that matmul again nor a second exchange, and combining is a plain sum of k rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from rooftop.capabilities import expert_rows, expert_tile, scattered_rows
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import field_values
from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.models import ModelConfig, MoE
from rooftop.programs.model.grouped_matmul import RowGroups, grouped_matmul, grouped_matmul_of
from rooftop.programs.model.narrow import NarrowWeight, grouped_narrow_matmul, narrow_matmul, narrowed
from rooftop.programs.parameters import MoEWeights
from rooftop.programs.quantised import Quantised, in_full
from rooftop.programs.sharding import Specs, axes_of, named_reshard, on_shards
from rooftop.roofline.rules import expert_visits

Axes = tuple[str, ...]
#: Matmuls of experts: slots of each expert in one batched einsum, or sorted rows in a grouped matmul.
EXPERT_MATMULS: tuple[str, ...] = ("batched", "grouped")
#: Weights of experts, and of shared ones, whose matmuls run in the dtype of the layers'.
_NARROWED = ("gate", "up", "down")


def moe_mlp(
    x: Float[Array, "B T D"],
    layer: MoEWeights[jax.Array],
    model: ModelConfig,
    specs: Specs,
    *,
    capacity_factor: float | None,
    matmul: str = "batched",
    dtype: str | None = None,
    measured: bool = False,
    real: Bool[Array, "B T"] | None = None,
    gathers: bool = False,
) -> tuple[Float[Array, "B T D"], Float32[Array, "devices 3 E"] | None]:
    """The experts and the shared experts of one layer, on the normalised residual stream.

    x and the result are split as the residual stream. ``layer`` has no leading dim of layers; the caller applies its
    norms. Its weights are at rest and are gathered here. Matmuls run in x's dtype, those of experts in ``dtype`` unless
    it is None (``rooftop.programs.model.narrow``); the router's scores are float32. For ``capacity_factor`` see
    ``capacity``; ``matmul`` is one of EXPERT_MATMULS. If ``measured``, the second result is the
    ``rooftop.programs.model.moe.load`` of each device that splits tokens, split over them. Tokens of padding, False in
    ``real``, go to no expert and do not count. With ``gathers`` all devices get all tokens; it drops none and measures
    nothing. Opens the scopes moe/{router,dispatch,experts,combine,shared}, with the
    checkpoint names mlp_normed (rows as experts get them), mlp_up, mlp_act and mlp_down.

    Raises RooftopError if the axes of experts or hidden columns do not split tokens, if the factor is not positive, and
    for an unknown ``matmul``.
    """
    if matmul not in EXPERT_MATMULS:
        raise unknown("expert_matmul", matmul, EXPERT_MATMULS)
    moe = model.moe
    if moe is None:
        raise RooftopError("model.moe", None, "a mixture of experts")
    axes = _Axes.of(specs)
    axes.check()
    weights = {
        name: weight for name, weight in field_values(layer).items() if isinstance(weight, jax.Array | Quantised)
    }

    # As stored: with experts that nothing is sent to, where shards do not divide them.
    experts_stored = layer.up.shape[0]
    shards = _ways(axes.expert) if matmul == "grouped" else experts_stored
    per_shard = experts_stored // shards
    # Of quantised experts, for tokens that all devices get.
    every_token = x.shape[0] * x.shape[1]
    tile = int(expert_tile(every_token, moe))
    visits = float(expert_visits(moe.experts, moe.active, every_token, tile)) / _ways(axes.expert)

    def local(x: jax.Array, used_weights: dict[str, Any], real: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        def linear(rows: jax.Array, name: str, groups: RowGroups | None = None) -> jax.Array:
            """Rows [E, rows, d] times a weight: [E, d, f] of the experts, or [d, f] of the shared ones."""
            weight = used_weights[name]
            if isinstance(weight, NarrowWeight):
                # Hidden columns are split over tensor.
                columns = axes.shared if name.startswith("shared_") else axes.columns
                split: dict[str, Any] = {"summed" if name.endswith("down") else "summed_back": columns}
                weight = weight.first_rows(rows.shape[-1])
                if groups is not None:
                    return grouped_narrow_matmul(rows[0], weight, groups, **split)[None]
                return narrow_matmul(rows, weight, batch=weight.ndim - 2, **split)
            if isinstance(weight, Quantised) and groups is not None:
                return grouped_matmul_of(rows[0], weight, groups, tile=tile, visits=visits)[None]
            # The rest are rows that pad the weight at rest.
            weight = in_full(weight, rows.dtype)[..., : rows.shape[-1], :]
            if groups is not None:
                return grouped_matmul(rows[0], weight, groups)[None]
            return jnp.einsum("erd,edf->erf" if weight.ndim == 3 else "erd,df->erf", rows, weight)

        def bias_of(name: str, experts: jax.Array | None) -> jax.Array:
            """Bias of each row: [E, 1, f], or [1, rows, f] for rows of ``experts`` [1, rows, 1]."""
            if experts is None:
                return used_weights[name][:, None, :]
            return jnp.einsum("re,ef->rf", one_hot(experts[0, :, 0], per_shard).astype(x.dtype), used_weights[name])[
                None
            ]

        def hidden(
            rows: jax.Array,
            prefix: str,
            groups: RowGroups | None = None,
            experts: jax.Array | None = None,
            shares: jax.Array | None = None,
        ) -> jax.Array:
            """Hidden activations of ``rows``, times their ``shares``; ``experts`` are those of the rows."""
            into = {}
            experts, shares = axes.own_rows(experts), axes.own_rows(shares)
            for name in (name for name in ("gate", "up") if prefix + name in used_weights):
                y = axes.scatter_sums(linear(rows, prefix + name, groups))
                if f"{prefix}{name}_bias" in used_weights:
                    y = y + bias_of(f"{prefix}{name}_bias", experts)
                into[name] = checkpoint_name(y, "mlp_up")
            act = checkpoint_name(activate(into.get("gate"), into["up"], model), "mlp_act")
            return axes.gather_rows(act if shares is None else (act * shares).astype(x.dtype))

        def gathered(tokens: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
            """The sums of the experts and of the shared ones for tokens that all devices get."""
            here, active = experts_stored // _ways(axes.expert), moe.active
            with named_scope("dispatch"):
                every = axes.of_all(tokens)
                both = axes.of_all(jnp.concatenate([lax.bitcast_convert_type(weights, jnp.int32), chosen], axis=1))
                shares, chosen = lax.bitcast_convert_type(both[:, :active], jnp.float32), both[:, active:]
                own = chosen - axes.expert_index * here
                own = jnp.where((own >= 0) & (own < here), own, here)
            if matmul == "batched":
                total = of_slots(every, shares, own, here)
            else:
                total = of_rows(every, shares, own, here, expert_trips(chosen // here, len(every)))
            if moe.shared_d_ff:
                with named_scope("shared"):
                    size = len(every) // _ways(axes.expert)
                    rows = lax.dynamic_slice_in_dim(every, axes.expert_index * size, size)
                    y = linear(hidden(rows[None], "shared_"), "shared_down")[0]
                    y = y if (opened := gate_of(rows)) is None else y * opened
                    total = axes.added_rows(total, y)
            with named_scope("combine"):
                return axes.scatter_all(total)

        def gate_of(rows: jax.Array) -> jax.Array | None:
            """The share of the shared experts' sum that each of the rows gets; None if all of it."""
            if "shared_router" not in used_weights:
                return None
            opened = jnp.einsum("nd,do->no", rows, used_weights["shared_router"][: rows.shape[-1]])
            return jax.nn.sigmoid(axes.summed_width(opened))

        def with_bias(y: jax.Array, experts: jax.Array | None, shares: jax.Array) -> jax.Array:
            """Partial sums over hidden columns with the experts' bias, which one of the devices adds."""
            if "down_bias" not in used_weights:
                return y
            bias = bias_of("down_bias", experts) * shares
            return y + jnp.where(axes.column_index == 0, bias, 0).astype(y.dtype)

        def of_slots(every: jax.Array, shares: jax.Array, own: jax.Array, here: int) -> jax.Array:
            """Sums of this device's experts, each of which has a slot for any token."""
            with named_scope("dispatch"):
                slots = ExpertSlots.of(own, here, len(every))
                rows = to_slots(every, slots.pairs // moe.active, slots.taken)
                shares = to_slots(shares.reshape(-1, 1), slots.pairs, slots.taken.reshape(-1, 1))
            with named_scope("experts"):
                y = with_bias(linear(hidden(rows, "", shares=shares), "down"), None, shares)
            with named_scope("combine"):
                return from_slots(y, slots.pairs // moe.active, slots.taken)

        def of_rows(every: jax.Array, shares: jax.Array, own: jax.Array, here: int, trips: jax.Array) -> jax.Array:
            """Sums of this device's experts over sorted pairs, in as many pieces as the busiest device has."""
            count, active = len(every), moe.active
            size = int(expert_rows(count, moe, _ways(axes.expert), here, _ways(axes.width)))
            with named_scope("dispatch"):
                groups = RowGroups.of(own.reshape(-1), here)
                ends, filled = jnp.cumsum(groups.sizes), jnp.sum(groups.sizes)
                order = jnp.pad(groups.order, (0, max(0, next_multiple(len(groups.order), size) - len(groups.order))))

            def piece(first: jax.Array | int) -> tuple[jax.Array, jax.Array]:
                with named_scope("dispatch"):
                    pairs = lax.dynamic_slice_in_dim(order, first, size)
                    there = (first + jnp.arange(size) < filled)[:, None]
                    of_pairs = jnp.where(there, own.reshape(-1, 1)[pairs], here)[None]
                    sizes = jnp.diff(jnp.clip(ends - first, 0, size), prepend=0)
                    some = RowGroups(order=pairs, places=groups.places, sizes=sizes)
                    rows, weight = every[pairs // active][None], shares.reshape(-1, 1)[pairs][None]
                with named_scope("experts"):
                    act = hidden(rows, "", some, of_pairs, weight)
                    return pairs // active, with_bias(linear(act, "down", some), of_pairs, weight)[0]

            if size >= len(groups.order):
                _, y = piece(0)
                with named_scope("combine"):
                    return from_slots(y[None], groups.order[None] // active, groups.places.reshape(-1, active))

            def add(index: jax.Array, total: jax.Array) -> jax.Array:
                source, y = piece(index * size)
                with named_scope("combine"):
                    # A TPU multiplies faster than it adds rows by index.
                    places = one_hot(source, count).astype(y.dtype)
                    return total + jnp.einsum("rt,rd->td", places, y)

            return lax.fori_loop(0, trips, add, jnp.zeros_like(every))

        def expert_trips(shards: jax.Array, count: int) -> jax.Array:
            """Pieces of ``of_rows`` on the device with the most pairs: all devices agree on it, and so meet in each."""
            ways = _ways(axes.expert)
            size = int(expert_rows(count, moe, ways, experts_stored // ways, _ways(axes.width)))
            return -(-jnp.max(jnp.sum(one_hot(shards.reshape(-1), ways), axis=0, dtype=jnp.int32)) // size)

        tokens = x.reshape(-1, x.shape[-1])
        with named_scope("router"):
            router = used_weights["router"][: tokens.shape[-1]]
            logits = axes.summed_width(jnp.einsum("nd,de->ne", tokens, router, preferred_element_type=jnp.float32))
            if "router_bias" in used_weights:
                logits = logits + used_weights["router_bias"]
            logits = checkpoint_name(logits, "mlp_up")
            weights, chosen = route(logits, used_weights.get("correction_bias"), moe)
            of_tokens = None if real is None else real.reshape(-1)
            measures = load(logits, chosen, of_tokens, moe)[None] if measured else None
            if of_tokens is not None:
                chosen = jnp.where(of_tokens[:, None], chosen, moe.experts)
        if gathers:
            return gathered(tokens, weights, chosen).reshape(x.shape), None
        with named_scope("dispatch"):
            shard = chosen if per_shard == 1 else chosen // per_shard
            slots = ExpertSlots.of(shard, shards, capacity(len(tokens), moe, capacity_factor, shards))
            rows = to_slots(tokens, slots.pairs // moe.active, slots.taken)
            shares = to_slots(weights.reshape(-1, 1), slots.pairs, slots.taken.reshape(-1, 1))
            rows, shares = (checkpoint_name(axes.exchange(x, out=True), "mlp_normed") for x in (rows, shares))
            experts = None
            if matmul == "grouped":
                experts = (chosen % per_shard).reshape(-1, 1).at[slots.pairs].get(mode="fill", fill_value=per_shard)
                experts = checkpoint_name(axes.exchange(experts, out=True), "mlp_normed")
        with named_scope("experts"):
            if experts is None:
                act = hidden(
                    axes.gather_tokens(rows, axes.columns), "", shares=axes.gather_tokens(shares, axes.columns)
                )
                y = axes.scatter_tokens(linear(act, "down"), axes.columns)
            else:
                all_rows, all_experts = (
                    axes.gather_tokens(rows, axes.columns),
                    axes.gather_tokens(experts, axes.columns),
                )
                groups = RowGroups.of(all_experts[0, :, 0], per_shard)
                all_rows, all_experts, all_shares = (
                    groups.sorted(array[0])[None]
                    for array in (all_rows, all_experts, axes.gather_tokens(shares, axes.columns))
                )
                act = hidden(all_rows, "", groups, all_experts, all_shares)
                y = axes.scatter_tokens(groups.unsorted(linear(act, "down", groups)[0])[None], axes.columns)
            if "down_bias" in used_weights:
                bias, apart = bias_of("down_bias", experts), shares
                if experts is None:
                    # Rows stay apart by sender, as they are exchanged. To sum the gradient of the bias over joined
                    # rows, XLA:TPU writes it in float32 in another layout.
                    bias, apart = bias[:, None], shares.reshape(len(shares), _ways(axes.expert), -1, 1)
                y = y + (bias * apart).astype(x.dtype).reshape(y.shape)
            y = checkpoint_name(y, "mlp_down")
        with named_scope("combine"):
            out = from_slots(axes.exchange(y, out=False), slots.pairs // moe.active, slots.taken)
        if moe.shared_d_ff:
            with named_scope("shared"):
                act = hidden(axes.gather_tokens(tokens[None], axes.shared), "shared_")
                y = checkpoint_name(axes.scatter_tokens(linear(act, "shared_down"), axes.shared), "mlp_down")[0]
                out = out + (y if (opened := gate_of(tokens)) is None else y * opened)
        return out.reshape(x.shape), measures

    with named_scope("moe"):
        used_weights: dict[str, Any] = {}
        for name, weight in weights.items():
            with named_scope(_scope(name)):
                used_weights[name] = jax.tree.map(axes.gather_weight, weight)
                if dtype is not None and isinstance(weight, jax.Array) and name.removeprefix("shared_") in _NARROWED:
                    used_weights[name] = narrowed(
                        weight, used_weights[name], axes.gather_weight, dtype, batch=weight.ndim - 2
                    )
        places = jax.tree.map(lambda weight: jax.typeof(weight).sharding.spec, used_weights)
        stream = specs.residual
        if real is not None:
            real = reshard(real, P(*stream.partitions[:2]))
        return on_shards(
            local,
            in_specs=(stream, places, None if real is None else P(*stream.partitions[:2])),
            out_specs=(stream, P(axes.residual or None) if measured else None),
        )(x, used_weights, real)


def no_load(model: ModelConfig, specs: Specs) -> Float32[Array, "devices 3 E"]:
    """The load before any layer, in the form in which ``moe_mlp`` returns it."""
    assert model.moe is not None
    axes = _Axes.of(specs).residual
    return jnp.zeros((_ways(axes), 3, model.moe.experts), jnp.float32, out_sharding=P(axes or None))


def _scope(weight: str) -> str:
    """The scope that uses a weight of ``MoEWeights``."""
    if weight in ("router", "router_bias", "correction_bias"):
        return "router"
    return "shared" if weight.startswith("shared_") else "experts"


def activate(
    gate: Float[Array, "*rows F"] | None, up: Float[Array, "*rows F"], model: ModelConfig
) -> Float[Array, "*rows F"]:
    """The hidden activations of an MLP from its projections, by the model's ``activation`` and ``swiglu_limit``."""
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
    # JAX 0.12.0 computes a float32 erfc inside a typed shard_map, but cannot differentiate it.
    (x,), (dx,) = primals, tangents
    cumulative = 0.5 * jax.lax.erfc(-x * 0.5**0.5)
    density = jnp.exp(-0.5 * jnp.square(x)) * (2 * math.pi) ** -0.5
    return _gelu(x), (cumulative + x * density) * dx


_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """The mesh axes of a mixture of experts.

    ``expert`` splits experts in here and tokens elsewhere; ``columns`` and ``shared`` split hidden columns in here, of
    experts and of shared ones, and tokens elsewhere; ``embed`` splits weights at rest. ``residual`` are all axes that
    split tokens; gradients are summed over ``summed`` later. A server's ``width`` axes split D of weights and rows, and
    hidden rows between two matmuls; ``columns`` and ``shared`` are the same there.
    """

    expert: Axes
    columns: Axes
    shared: Axes
    embed: Axes
    residual: Axes
    summed: Set[str]
    width: Axes = ()

    @classmethod
    def of(cls, specs: Specs) -> _Axes:
        tables, weights = specs.rules.activations, specs.rules.parameters
        residual = tables["batch"] + tables["residual_seq"]
        return cls(
            expert=weights["expert"],
            columns=weights["expert_mlp"],
            shared=weights["mlp"],
            embed=() if specs.width else weights["embed"],
            residual=residual,
            summed=specs.token_axes("residual_seq"),
            width=specs.width,
        )

    def check(self) -> None:
        """Raise RooftopError unless the exchanged and gathered axes split tokens."""
        for name, axes in (("expert", self.expert), ("expert_mlp", self.columns), ("mlp", self.shared)):
            if missing := [axis for axis in axes if axis not in self.residual]:
                raise RooftopError(f"rules.parameters.{name}", axes, f"axes that split tokens, not {missing[0]}")

    def gather_weight(self, weight: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
        """AllGather over the axes of ``embed``; in the backward pass, a ReduceScatter.

        The result is ``reduced`` over the axes that split tokens and not the weight. Its gradient is summed here over
        the gathered axes, and later over the others.
        """
        at_rest = jax.typeof(weight).sharding.spec
        stored = [axes_of(entry) for entry in at_rest.partitions]
        whole = [tuple(axis for axis in entry if axis not in self.embed) for entry in stored]
        reduced = frozenset(self.summed).difference(*whole)
        if weight.ndim == 3 and stored != whole and weight.shape[0] == _ways(stored[0]):
            # With one expert on a device, XLA:TPU turns the ReduceScatter along the second dim into an AllReduce of
            # twice the bytes, unless the first dim is folded into the second.
            rows = (weight.shape[0] * weight.shape[1], weight.shape[2])
            folded = weight.reshape(rows, out_sharding=_spec([(*stored[0], *stored[1]), stored[2]], at_rest.reduced))
            folded = named_reshard(folded, _spec([(*whole[0], *whole[1]), whole[2]], reduced))
            return folded.reshape(weight.shape, out_sharding=_spec(whole, reduced))
        return named_reshard(weight, _spec(whole, reduced))

    @staticmethod
    def gather_tokens(rows: Shaped[Array, "E rows D"], columns: Axes) -> Shaped[Array, "E all_rows D"]:
        """AllGather of the rows of the devices that split ``columns``; in the backward pass, a ReduceScatter."""
        if not columns:
            return rows
        whole = lax.all_gather(_split_in_two(rows), columns, axis=1, tiled=True)
        return whole.reshape(rows.shape[0], -1, rows.shape[-1])

    @staticmethod
    def scatter_tokens(rows: Float[Array, "E rows D"], columns: Axes) -> Float[Array, "E own_rows D"]:
        """ReduceScatter of partial sums to the device of each row; in the backward pass, an AllGather."""
        if not columns:
            return rows
        own = lax.psum_scatter(_split_in_two(rows, _ways(columns)), columns, scatter_dimension=1, tiled=True)
        return own.reshape(rows.shape[0], -1, rows.shape[-1])

    def summed_width(self, sums: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        """Sums over D, of which each device along ``width`` has a part."""
        return lax.psum(sums, self.width) if self.width else sums

    def scatter_sums(self, rows: Float[Array, "E rows F"]) -> Float[Array, "E own_rows F"]:
        """Partial sums over D, each added up on the device of its row along ``width``."""
        if not self.width:
            return rows
        if rows.shape[0] == 1:
            # XLA:TPU would sum all rows on every device.
            return lax.psum_scatter(rows[0], self.width, tiled=True)[None]
        return lax.psum_scatter(rows, self.width, scatter_dimension=1, tiled=True)

    def gather_rows(self, rows: Float[Array, "E own_rows F"]) -> Float[Array, "E rows F"]:
        """The rows of all devices along ``width``."""
        return lax.all_gather(rows, self.width, axis=1, tiled=True) if self.width else rows

    def own_rows(self, rows: Shaped[Array, "E rows *rest"] | None) -> Shaped[Array, "E own_rows *rest"] | None:
        """The rows of this device along ``width``."""
        if rows is None or not self.width:
            return rows
        own = rows.shape[1] // _ways(self.width)
        return lax.dynamic_slice_in_dim(rows, lax.axis_index(self.width) * own, own, axis=1)

    @property
    def expert_index(self) -> jax.Array | int:
        """The place of this device along ``expert``."""
        return lax.axis_index(self.expert) if self.expert else 0

    @property
    def column_index(self) -> jax.Array | int:
        """The place of this device along ``columns``."""
        return lax.axis_index(self.columns) if self.columns else 0

    def of_all(self, rows: Shaped[Array, "own size"]) -> Shaped[Array, "all size"]:
        """The rows of all devices that split tokens, one axis after the other: XLA:TPU would sum both at once."""
        for axis in reversed((*self.expert, *self.columns)):
            rows = lax.all_gather(rows, axis, tiled=True)
        return rows

    def scatter_all(self, sums: Float[Array, "all D"]) -> Float[Array, "n D"]:
        """Partial sums of all devices, added up on the device of each row."""
        for axis in (*self.expert, *self.columns):
            ways = lax.axis_size(axis)
            own, size = len(sums) // ways, sums.shape[1]
            if scattered := int(scattered_rows(own)):
                apart = jnp.pad(sums.reshape(ways, own, size), ((0, 0), (0, scattered - own), (0, 0)))
                sums = apart.reshape(ways * scattered, size)
            sums = lax.psum_scatter(sums, axis, tiled=True)[:own]
        return sums

    def added_rows(self, total: Float[Array, "all D"], rows: Float[Array, "group D"]) -> Float[Array, "all D"]:
        """The total with the rows of this device's part along ``expert`` added."""
        first = self.expert_index * len(rows)
        own = lax.dynamic_slice_in_dim(total, first, len(rows))
        return lax.dynamic_update_slice_in_dim(total, own + rows, first, 0)

    def exchange(self, rows: Shaped[Array, "E C D"], *, out: bool) -> Shaped[Array, "E2 C2 D"]:
        """AllToAll over the expert axes: [E, C, D] to the shards of experts [E/X, X C, D], or back if not ``out``."""
        split, joined = (0, 1) if out else (1, 0)
        if not self.expert:
            return rows
        return lax.all_to_all(rows, self.expert, split_axis=split, concat_axis=joined, tiled=True)


def _split_in_two(rows: jax.Array, ways: int = 1) -> jax.Array:
    """Rows [1, rows, D] as [2, rows / 2, D], other shapes unchanged: see ``_Axes.gather_weight``.

    ``rows`` are those of ``ways`` devices, and both halves need whole rows of each device. The order of the rows does
    not matter, as long as all arrays use the same one.
    """
    return rows.reshape(2, -1, rows.shape[-1]) if rows.shape[0] == 1 and rows.shape[1] % (2 * ways) == 0 else rows


def _spec(entries: Sequence[Axes], reduced: Set[str]) -> P:
    return P(*(entry or None for entry in entries), reduced=reduced)


def _ways(axes: Axes) -> int:
    """Devices of the mesh along ``axes``."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in axes)


def capacity(tokens: int, moe: MoE, factor: float | None, shards: int) -> int:
    """Slots C of a device of ``tokens`` n for each of ``shards`` X of the experts: ``factor`` n k / X, and at most all.

    A shard has E/X experts, rounded up. All, which None means too, is n min(k, E/X). Evenly chosen experts need a
    factor of 1, and plans assume it. Raises RooftopError if it is not positive.
    """
    per_shard = ceil_div(moe.experts, shards)
    largest = tokens * min(moe.active, per_shard)
    if factor is None:
        return largest
    if not factor > 0:
        raise RooftopError("capacity_factor", factor, "a positive number, or none to drop nothing")
    return min(largest, math.ceil(factor * tokens * moe.active / (moe.experts / per_shard)))


@dataclass(frozen=True, kw_only=True)
class ExpertSlots:
    """The pair in each slot and the slot of each pair. Pair p = token x k + choice.

    ``pairs``: the pair in each slot, n k if the slot is empty. ``taken``: the slot of each pair, E C if it was dropped.
    """

    pairs: Int[Array, "E C"]
    taken: Int[Array, "n k"]

    @classmethod
    def of(cls, chosen: Int[Array, "n k"], experts: int, capacity: int) -> ExpertSlots:
        """Fill C slots of each expert in the order of pairs; ``chosen`` are ids of experts, or E for no expert."""
        pair, size = jnp.arange(chosen.size, dtype=jnp.int32), chosen.size
        if size * (experts + 1) >= 2**31:
            raise RooftopError("pairs of token and expert on a device", size, f"fewer than 2**31 / {experts + 1}")
        # A single key without a payload is the ranking that XLA:TPU compiles fastest.
        expert, order = jnp.divmod(lax.sort(chosen.reshape(-1) * size + pair, is_stable=False), size)
        count = jnp.sum(one_hot(chosen.reshape(-1), experts), axis=0, dtype=jnp.int32)
        first = jnp.cumsum(count) - count
        place = jnp.arange(capacity, dtype=jnp.int32)
        # Pairs of no expert come last: their rank is at least the number of all.
        rank = pair - first.at[expert].get(mode="fill", fill_value=-size)
        slot = jnp.where(rank < capacity, expert * capacity + rank, experts * capacity)
        return cls(
            pairs=jnp.where(place < count[:, None], order.at[first[:, None] + place].get(mode="clip"), size),
            taken=jnp.zeros_like(pair).at[order].set(slot, unique_indices=True).reshape(chosen.shape),
        )


@jax.custom_vjp
def to_slots(x: Float[Array, "n D"], source: Int[Array, "E C"], slots: Int[Array, "n k"]) -> Float[Array, "E C D"]:
    """Rows of x for every slot: row source[e, c], and zeros if that is n or more.

    ``slots`` is the inverse, the slots of each row, so that the gradient is ``from_slots``, a gather too.
    """
    return x.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def from_slots(rows: Float[Array, "E C D"], source: Int[Array, "E C"], slots: Int[Array, "n k"]) -> Float[Array, "n D"]:
    """The sum over k of the rows in ``slots``, summed in float32. Slots from E C on are left out."""
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


def route(
    logits: Float32[Array, "n E"], correction_bias: Float[Array, " E"] | None, moe: MoE
) -> tuple[Float32[Array, "n k"], Int[Array, "n k"]]:
    """Weights and ids of the experts chosen by ``logits``, best first.

    The rules are those of ``rooftop.models.MoE`` (DeepSeek-V3 paper, equations 13 to 16, for groups and correction).
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
    # Selected by comparison: the gradient of an index would be a scatter.
    weights = jnp.sum(jnp.where(one_hot(chosen, moe.experts), scores[:, None, :], 0.0), axis=-1)
    if moe.normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights * moe.routed_scaling, chosen


def load(
    logits: Float32[Array, "n E"], chosen: Int[Array, "n k"], real: Bool[Array, " n"] | None, moe: MoE
) -> Float32[Array, "3 E"]:
    """Load of the experts: for each, the choices of n tokens, the sum of their probabilities, and n.

    Probabilities are the router's scores of ``logits`` divided by their sum (1 for a softmax); only they have a
    gradient. Tokens of padding, False in ``real``, do not count. Loads of layers and devices add up.
    """
    scores = jax.nn.softmax(logits) if moe.scoring == "softmax" else jax.nn.sigmoid(logits)
    probabilities = scores / jnp.sum(scores, axis=-1, keepdims=True) if moe.scoring == "sigmoid" else scores
    choices = jnp.sum(one_hot(chosen, moe.experts), axis=1, dtype=jnp.float32)
    counts = jnp.stack([choices, probabilities, jnp.ones_like(probabilities)])
    return jnp.sum(counts if real is None else jnp.where(real[:, None], counts, 0.0), axis=1)


def balance(load: Float32[Array, "3 E"]) -> Float32[Array, ""]:
    """The load-balancing loss: E sum over e of f_e P_e, which is k if all experts get the same.

    f_e is the number of choices of e per token and P_e its mean probability (Switch Transformer paper, equations 4 to
    6; over the tokens of all layers together, as the Mixtral models of transformers).
    """
    choices, probabilities, tokens = load
    tokens = jnp.maximum(tokens, 1.0)
    return load.shape[1] * jnp.sum(choices / tokens * (probabilities / tokens))


def one_hot(ids: Int[Array, "*dims"], size: int) -> Bool[Array, "*dims size"]:
    """Booleans [..., size]: true at each id."""
    return ids[..., None] == jnp.arange(size, dtype=ids.dtype)
