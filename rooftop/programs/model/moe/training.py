"""Experts of a train step: each device sends rows in slots to the experts' devices, and gets the results back."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import named_scope
from jax.ad_checkpoint import checkpoint_name

from rooftop.programs.model.grouped_matmul import RowGroups
from rooftop.programs.model.moe.axes import devices_along
from rooftop.programs.model.moe.experts import Experts
from rooftop.programs.model.moe.slots import ExpertSlots, capacity, from_slots, to_slots


def exchanged(
    tokens: jax.Array, shares: jax.Array, chosen: jax.Array, experts: Experts, *, capacity_factor: float | None
) -> jax.Array:
    """The sums [n, D] of the experts and of the shared ones for a device's ``tokens`` [n, D].

    ``chosen`` [n, k] are the tokens' experts, and ``shares`` their weights.
    """
    moe = experts.moe
    with named_scope("dispatch"):
        shard = chosen if experts.per_shard == 1 else chosen // experts.per_shard
        slots = ExpertSlots.of(shard, experts.shards, capacity(len(tokens), moe, capacity_factor, experts.shards))
        arrived = _Arrived.of(tokens, shares, chosen, slots, experts)
    with named_scope("experts"):
        y = _grouped(arrived, experts) if experts.grouped else _batched(arrived, experts)
        if "down_bias" in experts.weights:
            y = y + arrived.bias(experts).reshape(y.shape)
        y = checkpoint_name(y, "mlp_down")
    with named_scope("combine"):
        out = from_slots(experts.axes.exchange(y, out=False), slots.pairs // moe.active, slots.taken)
    return _with_shared(out, tokens, experts) if moe.shared_d_ff else out


@dataclass(frozen=True, kw_only=True)
class _Arrived:
    """Rows [E, rows, D] that a device got for its experts, with their ``shares`` [E, rows, 1].

    Rows of grouped matmuls have the ``ids`` [1, rows, 1] of their experts in the shard; others are in slots of each.
    """

    rows: jax.Array
    shares: jax.Array
    ids: jax.Array | None

    @classmethod
    def of(
        cls, tokens: jax.Array, shares: jax.Array, chosen: jax.Array, slots: ExpertSlots, experts: Experts
    ) -> _Arrived:
        """Exchange the rows in ``slots``."""
        axes, per_shard = experts.axes, experts.per_shard
        rows = to_slots(tokens, slots.pairs // experts.moe.active, slots.taken)
        shares = to_slots(shares.reshape(-1, 1), slots.pairs, slots.taken.reshape(-1, 1))
        rows, shares = (checkpoint_name(axes.exchange(x, out=True), "mlp_normed") for x in (rows, shares))
        ids = None
        if experts.grouped:
            ids = (chosen % per_shard).reshape(-1, 1).at[slots.pairs].get(mode="fill", fill_value=per_shard)
            ids = checkpoint_name(axes.exchange(ids, out=True), "mlp_normed")
        return cls(rows=rows, shares=shares, ids=ids)

    def bias(self, experts: Experts) -> jax.Array:
        """Bias of the second matmul, times the shares of the rows."""
        bias, apart = experts.bias("down_bias", self.ids), self.shares
        if self.ids is None:
            # Rows stay apart by sender, as they are exchanged. To sum the gradient of the bias over joined rows,
            # XLA:TPU writes it in float32 in another layout.
            bias, apart = bias[:, None], apart.reshape(len(apart), devices_along(experts.axes.expert), -1, 1)
        return (bias * apart).astype(experts.dtype)


def _batched(arrived: _Arrived, experts: Experts) -> jax.Array:
    """Results of the rows in the slots of each expert, [E, rows, D]."""
    axes = experts.axes
    rows, shares = (axes.gather_tokens(array, axes.columns) for array in (arrived.rows, arrived.shares))
    return axes.scatter_tokens(experts.linear(experts.hidden(rows, "", shares=shares), "down"), axes.columns)


def _grouped(arrived: _Arrived, experts: Experts) -> jax.Array:
    """Results of the rows of a shard, [1, rows, D], sorted by expert to be multiplied."""
    axes = experts.axes
    assert arrived.ids is not None
    rows, ids = (axes.gather_tokens(array, axes.columns) for array in (arrived.rows, arrived.ids))
    groups = RowGroups.of(ids[0, :, 0], experts.per_shard)
    rows, ids, shares = (
        groups.sorted(array[0])[None] for array in (rows, ids, axes.gather_tokens(arrived.shares, axes.columns))
    )
    act = experts.hidden(rows, "", groups, ids, shares)
    return axes.scatter_tokens(groups.unsorted(experts.linear(act, "down", groups)[0])[None], axes.columns)


def _with_shared(out: jax.Array, tokens: jax.Array, experts: Experts) -> jax.Array:
    """Sums of the experts with those of the shared ones added."""
    axes = experts.axes
    with named_scope("shared"):
        act = experts.hidden(axes.gather_tokens(tokens[None], axes.shared), "shared_")
        y = axes.scatter_tokens(experts.linear(act, "shared_down"), axes.shared)
        return out + experts.with_gate(checkpoint_name(y, "mlp_down")[0], tokens)
