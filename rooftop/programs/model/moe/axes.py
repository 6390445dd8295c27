"""Mesh axes of a mixture of experts, and the collectives over them."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Float, Shaped

from rooftop.core.errors import RooftopError
from rooftop.models.program_sizes import expert_sum_rows
from rooftop.programs.sharding import Specs, axes_of, named_reshard

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MoEAxes:
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
    def of(cls, specs: Specs) -> MoEAxes:
        """The axes that the rules of ``specs`` name."""
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
        if weight.ndim == 3 and stored != whole and weight.shape[0] == devices_along(stored[0]):
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
        own = lax.psum_scatter(_split_in_two(rows, devices_along(columns)), columns, scatter_dimension=1, tiled=True)
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
        own = rows.shape[1] // devices_along(self.width)
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
            if scattered := int(expert_sum_rows(own)):
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
    """Rows [1, rows, D] as [2, rows / 2, D], other shapes unchanged: see ``MoEAxes.gather_weight``.

    ``rows`` are those of ``ways`` devices, and both halves need whole rows of each device. The order of the rows does
    not matter, as long as all arrays use the same one.
    """
    return rows.reshape(2, -1, rows.shape[-1]) if rows.shape[0] == 1 and rows.shape[1] % (2 * ways) == 0 else rows


def _spec(entries: Sequence[Axes], reduced: Set[str]) -> P:
    return P(*(entry or None for entry in entries), reduced=reduced)


def devices_along(axes: Axes) -> int:
    """Devices of the mesh along ``axes``."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in axes)
