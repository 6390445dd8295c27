"""Matmuls of a layer that overlap the AllGather before them, or the ReduceScatter after them, as rings over tensor.

``project_gathered`` multiplies the residual stream by several weights while its shards go round the ring: all weights
multiply the same travelling shard. ``project_scattered`` multiplies, and sends partial sums round the ring. Backward
they trade places: the gradient of a gathered stream is a sum that travels, that of a scattered one is gathered. Rings
of shards in the backward pass also put the whole stream together, for gradients of weights of one matmul each.

Dims: B batch, T sequence, D model; the stream is split over T by tensor, as ``Specs.residual`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import P
from jax.sharding import reshard
from jaxtyping import Array, Float

from rooftop.programs.einsum.collective_matmul import multiply_gathered, multiply_scattered
from rooftop.programs.model.operations import weight_gradient
from rooftop.programs.sharding import Specs, axes_of, on_shards, split_sequence


@dataclass(frozen=True, kw_only=True)
class StreamRing:
    """The ring over which the residual stream, split by ``residual``, is gathered to ``whole`` and scattered.

    It visits the devices in ``order`` (None: as they are), in one direction or both.
    """

    residual: P
    whole: P
    order: tuple[int, ...] | None
    bidirectional: bool

    @classmethod
    def of(cls, specs: Specs, *, order: tuple[int, ...] | None, bidirectional: bool) -> StreamRing | None:
        """The ring of these specs; None if nothing splits the stream more than matmuls do."""
        whole = specs.activation("batch", "seq", None)
        ring = cls(residual=specs.residual, whole=whole, order=order, bidirectional=bidirectional)
        return ring if ring.axes else None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the ring, major first."""
        inside = axes_of(self.whole.partitions[1])
        return tuple(axis for axis in axes_of(self.residual.partitions[1]) if axis not in inside)

    @property
    def options(self) -> dict[str, Any]:
        """The ring's options of collective matmuls."""
        return {"axis": self.axes, "order": self.order, "bidirectional": self.bidirectional}

    def output(self, weight: jax.Array, *, transposed: bool) -> P:
        """The spec of the gathered stream times ``weight`` [D, *F], or the transpose of [F, D]."""
        entries = jax.typeof(weight).sharding.spec.partitions
        return P(*self.whole.partitions[:2], *(entries[:1] if transposed else entries[1:]))


def project_gathered(
    x: Float[Array, "B T D"], weights: Sequence[Float[Array, " D ..."]], ring: StreamRing, *, saved: bool
) -> tuple[Float[Array, "B T ..."], ...]:
    """x, gathered over the ring, times each of the weights, whose first dim is whole and another one split.

    ``saved``: the backward pass has the products. Then x is gathered for it by itself, without the matmuls of the ring.
    """
    return _gathered(ring, saved, x, tuple(weights))


def project_scattered(
    x: Float[Array, "B T rows"], weight: Float[Array, "rows D"], ring: StreamRing
) -> Float[Array, "B T D"]:
    """x times weight, whose rows are split; partial sums are scattered over the ring into the stream's sharding."""
    return _scattered(ring, x, weight)


def _gather(
    ring: StreamRing,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    transposed: bool = False,
    keeps_whole: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """The products of the gathered x, and x itself, gathered, if it ``keeps_whole``."""
    local = partial(multiply_gathered, **ring.options, transposed=transposed, keeps_whole=keeps_whole)
    plain = tuple(_plain(weight) for weight in weights)
    specs = tuple(jax.typeof(weight).sharding.spec for weight in plain)
    outputs = tuple(ring.output(weight, transposed=transposed) for weight in weights)
    out_specs = outputs, ring.whole if keeps_whole else None
    # The result of a ring is the same on all its devices, which its type does not say.
    result: tuple[tuple[jax.Array, ...], jax.Array | None] = on_shards(
        local, in_specs=(ring.residual, specs), out_specs=out_specs, check_vma=False
    )(x, plain)
    return result


def _scatter(
    ring: StreamRing, xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...], *, transposed: bool = False
) -> jax.Array:
    """The sum of the products of all xs with their weights, scattered over the ring."""
    local = partial(multiply_scattered, **ring.options, transposed=transposed)
    plain = tuple(_plain(weight) for weight in weights)
    specs = tuple(tuple(jax.typeof(y).sharding.spec for y in arrays) for arrays in (xs, plain))
    result: jax.Array = on_shards(local, in_specs=specs, out_specs=ring.residual, check_vma=False)(xs, plain)
    return result


def _plain(weight: jax.Array) -> jax.Array:
    """The weight without the axes that its gradient is to be summed over: the derivatives here sum by themselves."""
    return reshard(weight, P(*jax.typeof(weight).sharding.spec.partitions))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(ring: StreamRing, saved: bool, x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return _gather(ring, x, weights)[0]


_Saved = tuple[jax.Array, tuple[jax.Array, ...]]


def _gathered_forward(
    ring: StreamRing, saved: bool, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], _Saved]:
    products, whole = _gather(ring, x, weights, keeps_whole=not saved)
    return products, (split_sequence(x, ring.whole) if whole is None else whole, weights)


def _gathered_backward(
    ring: StreamRing, saved: bool, residuals: _Saved, dys: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    whole, weights = residuals
    dx = _scatter(ring, dys, weights, transposed=True)
    return dx, tuple(weight_gradient(whole, dy, weight) for dy, weight in zip(dys, weights, strict=True))


_gathered.defvjp(_gathered_forward, _gathered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered(ring: StreamRing, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _scatter(ring, (x,), (weight,))


def _scattered_backward(
    ring: StreamRing, residuals: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    (dx,), whole = _gather(ring, dy, (weight,), transposed=True, keeps_whole=True)
    assert whole is not None
    return dx, weight_gradient(x, whole, weight)


_scattered.defvjp(lambda ring, x, weight: (_scattered(ring, x, weight), (x, weight)), _scattered_backward)
