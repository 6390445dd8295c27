"""The experts of one layer on one device, and their matmuls, which training and serving share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rooftop.models import ModelConfig, MoE
from rooftop.models.program_sizes import expert_rows, expert_tile
from rooftop.programs.model.activation import activate
from rooftop.programs.model.grouped_matmul import RowGroups, grouped_matmul, grouped_matmul_of
from rooftop.programs.model.moe.axes import MoEAxes, devices_along
from rooftop.programs.model.moe.route import one_hot
from rooftop.programs.model.narrow import NarrowWeight, grouped_narrow_matmul, narrow_matmul
from rooftop.programs.quantised import Quantised, in_full
from rooftop.roofline.rules import expert_visits


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts and shared experts of a layer on one device.

    ``weights`` are those of ``MoEWeights`` by name, gathered, and ``dtype`` is that of activations. ``stored`` counts
    the experts of all devices as stored: with experts that nothing is sent to, where shards do not divide them.
    ``every_token`` counts the tokens of all devices. ``grouped``: the matmuls are grouped ones, of sorted rows.
    """

    model: ModelConfig
    moe: MoE
    axes: MoEAxes
    weights: Mapping[str, Any]
    stored: int
    every_token: int
    grouped: bool
    dtype: Any

    @property
    def shards(self) -> int:
        """Shards that have slots of their own: those of the mesh, or each expert."""
        return devices_along(self.axes.expert) if self.grouped else self.stored

    @property
    def per_shard(self) -> int:
        """Experts of a shard."""
        return self.stored // self.shards

    @property
    def here(self) -> int:
        """Experts of this device."""
        return self.stored // devices_along(self.axes.expert)

    def piece_rows(self, tokens: int) -> int:
        """Rows of a piece, where a device multiplies the sorted pairs of so many tokens piece by piece."""
        return int(
            expert_rows(tokens, self.moe, devices_along(self.axes.expert), self.here, devices_along(self.axes.width))
        )

    def linear(self, rows: jax.Array, name: str, groups: RowGroups | None = None) -> jax.Array:
        """Rows [E, rows, d] times a weight: [E, d, f] of the experts, or [d, f] of the shared ones."""
        weight = self.weights[name]
        if isinstance(weight, NarrowWeight):
            # Hidden columns are split over tensor.
            columns = self.axes.shared if name.startswith("shared_") else self.axes.columns
            split: dict[str, Any] = {"summed" if name.endswith("down") else "summed_back": columns}
            weight = weight.first_rows(rows.shape[-1])
            if groups is not None:
                return grouped_narrow_matmul(rows[0], weight, groups, **split)[None]
            return narrow_matmul(rows, weight, batch=weight.ndim - 2, **split)
        if isinstance(weight, Quantised) and groups is not None:
            tile = int(expert_tile(self.every_token, self.moe))
            visits = float(expert_visits(self.moe.experts, self.moe.active, self.every_token, tile))
            visits /= devices_along(self.axes.expert)
            return grouped_matmul_of(rows[0], weight, groups, tile=tile, visits=visits)[None]
        # The rest are rows that pad the weight at rest.
        weight = in_full(weight, rows.dtype)[..., : rows.shape[-1], :]
        if groups is not None:
            return grouped_matmul(rows[0], weight, groups)[None]
        return jnp.einsum("erd,edf->erf" if weight.ndim == 3 else "erd,df->erf", rows, weight)

    def bias(self, name: str, experts: jax.Array | None) -> jax.Array:
        """Bias of each row: [E, 1, f], or [1, rows, f] for rows of ``experts`` [1, rows, 1]."""
        bias = self.weights[name]
        if experts is None:
            return bias[:, None, :]
        return jnp.einsum("re,ef->rf", one_hot(experts[0, :, 0], self.per_shard).astype(self.dtype), bias)[None]

    def hidden(
        self,
        rows: jax.Array,
        prefix: str,
        groups: RowGroups | None = None,
        experts: jax.Array | None = None,
        shares: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden activations of ``rows``, times their ``shares``; ``experts`` are those of the rows."""
        into = {}
        experts, shares = self.axes.own_rows(experts), self.axes.own_rows(shares)
        for name in (name for name in ("gate", "up") if prefix + name in self.weights):
            y = self.axes.scatter_sums(self.linear(rows, prefix + name, groups))
            if f"{prefix}{name}_bias" in self.weights:
                y = y + self.bias(f"{prefix}{name}_bias", experts)
            into[name] = checkpoint_name(y, "mlp_up")
        act = checkpoint_name(activate(into.get("gate"), into["up"], self.model), "mlp_act")
        return self.axes.gather_rows(act if shares is None else (act * shares).astype(self.dtype))

    def with_gate(self, y: jax.Array, rows: jax.Array) -> jax.Array:
        """Sums ``y`` of the shared experts, times the share that each of the rows gets of them."""
        if "shared_router" not in self.weights:
            return y
        opened = jnp.einsum("nd,do->no", rows, self.weights["shared_router"][: rows.shape[-1]])
        return y * jax.nn.sigmoid(self.axes.summed_width(opened))

    def with_bias(self, y: jax.Array, experts: jax.Array | None, shares: jax.Array) -> jax.Array:
        """Partial sums over hidden columns with the experts' bias, which one of the devices adds."""
        if "down_bias" not in self.weights:
            return y
        bias = self.bias("down_bias", experts) * shares
        return y + jnp.where(self.axes.column_index == 0, bias, 0).astype(y.dtype)
