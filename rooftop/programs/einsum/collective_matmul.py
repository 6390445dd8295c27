"""Matmuls that overlap their own collective: shards travel around a ring while the matrix unit multiplies others.

These are the collective matmuls of Wang et al. 2023 and of the book's chapter 10. Every function here is called inside
``jax.shard_map``, on local shards. ``spec`` is an einsum of two operands, such as 'bd,df->bf', and ``dim`` is the
letter of it that is split over the mesh axis ``axis`` (or several axes, major first):

- ``all_gather_einsum``: one operand arrives in shards of ``dim``, which travel while others are multiplied;
- ``einsum_reduce_scatter``: the output leaves in shards of ``dim``, whose partial sums travel;
- ``einsum_all_reduce``: the same for one part of the output at a time, while the previous part is gathered.

The gradients overlap as well, since AllGather and ReduceScatter are each other's transposes. On a device products are
summed in float32 (int32 for integers). Travelling data has the dtype of the operand, or for partial sums of the output:
a bf16 sum over n devices is rounded n - 1 times, as in XLA's own ReduceScatter.

With ``bidirectional``, half of the data travels in each direction: twice the bandwidth on a closed ring, and the same
on an open line, where a ring returns through the links of the other direction.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from rooftop.algebra.steps import ALL_REDUCE_PARTS
from rooftop.core.errors import RooftopError
from rooftop.programs.sharding import varying_alike

Axis = str | tuple[str, ...]


def all_gather_einsum(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    *,
    axis: Axis,
    dim: str,
    gathered: int = 0,
    bidirectional: bool = True,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """The einsum of two operands, one of which (number ``gathered``) arrives in shards of ``dim`` over ``axis``.

    In[B, D_Y] W[D, F] -> Out[B, F] sums over the shards ('bd,df->bf', dim 'd'). In[B_Y, D] W[D, F] -> Out[B, F]
    computes a block of rows from each shard ('bd,df->bf', dim 'b'). The other operand and the output have all of
    ``dim``. The output has ``dtype``, by default that of the operands. The gradient needs only the shard, not the
    gathered operand.

    Raises RooftopError for an unsupported spec or dim, or sizes that do not fit.
    """
    op = _parse(spec, (a, b), _ShardRing(axis=axis, bidirectional=bidirectional), dim, dtype)
    shard, other = a, b
    if gathered:
        (shard, other), op = (b, a), op.over(op.operands[::-1], op.out, op.dtype)
    if dim not in op.operands[0]:
        raise RooftopError("dim", dim, f"a letter of the gathered operand, {op.operands[0]}")
    op.sizes(shard.shape, other.shape, sharded=True)
    return _gather(op, *varying_alike(shard, other, axes=op.ring.axes))


def einsum_reduce_scatter(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    *,
    axis: Axis,
    dim: str,
    bidirectional: bool = True,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """The einsum of two operands summed over ``axis``; each device gets its shard of the output's ``dim``.

    Tmp[B, F_Y] W[F_Y, D] -> Out[B, D_Y] is 'bf,fd->bd' with dim 'd'. The operands have all of ``dim``. The output and
    the travelling sums have ``dtype``, by default that of the operands.

    Raises RooftopError for an unsupported spec or dim, or sizes that do not fit.
    """
    op = _parse(spec, (a, b), _ShardRing(axis=axis, bidirectional=bidirectional), dim, dtype)
    op.scattered(a.shape, b.shape)
    return _scatter(op, *varying_alike(a, b, axes=op.ring.axes))


def einsum_all_reduce(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    *,
    axis: Axis,
    dim: str,
    bidirectional: bool = True,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """The einsum of two operands summed over ``axis``, the same on every device.

    In[B, D_Y] W[D_Y, F] -> Out[B, F] is 'bd,df->bf' with dim 'f', a letter of the output. Parts of ``dim`` are
    scattered one after the other, as by ``einsum_reduce_scatter``, and the shards of a part are gathered while the next
    part is multiplied. JAX treats the output as varying over ``axis``, so its derivative is summed over ``axis``, as a
    psum's is.

    Raises RooftopError for an unsupported spec or dim, or sizes that do not fit.
    """
    op = _parse(spec, (a, b), _ShardRing(axis=axis, bidirectional=bidirectional), dim, dtype)
    op.scattered(a.shape, b.shape)
    return _reduce(op, *varying_alike(a, b, axes=op.ring.axes))


@dataclass(frozen=True, kw_only=True)
class _ShardRing:
    """The devices along ``axis`` as a ring: the last one is linked with the first.

    ``order`` lists the devices' indices along ``axis`` as the ring visits them; None: as they are.
    """

    axis: Axis
    bidirectional: bool
    order: tuple[int, ...] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def size(self) -> int:
        return lax.axis_size(self.axis)

    def place(self, ahead: int) -> jax.Array:
        """Index of the device ``ahead`` steps further along the ring."""
        here = lax.axis_index(self.axis)
        if self.order is None:
            return lax.rem(here + ahead % self.size, jnp.asarray(self.size, here.dtype))
        order = np.array(self.order)
        table = order[(np.argsort(order) + ahead) % self.size]
        return lax.dynamic_index_in_dim(jnp.asarray(table, here.dtype), here, keepdims=False)

    def send(self, x: jax.Array, places: int) -> jax.Array:
        """``x`` of the device ``places`` steps back along the ring."""
        axes = self.axes
        # A permute numbers devices in the order of the mesh, whatever the order of its axes here.
        ordered = [axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes]
        number = np.arange(self.size).reshape([lax.axis_size(axis) for axis in ordered])
        ring = number.transpose([ordered.index(axis) for axis in axes]).ravel()[list(self.order or range(self.size))]
        ring = ring.tolist()
        pairs = [(device, ring[(place + places) % self.size]) for place, device in enumerate(ring)]
        return lax.ppermute(x, tuple(ordered), pairs)

    def tracks(self, size: int, *, ways: int) -> list[_Track]:
        """The halves of a dim and the direction of each; the whole dim and one direction if it cannot be halved."""
        if ways == 1 or size < 2:
            return [_Track(0, size, 1)]
        half = size // 2
        return [_Track(0, half, 1), _Track(half, size - half, -1 if self.bidirectional else 1)]


class _Track(NamedTuple):
    """A part of a dim that travels together: ``size`` from ``start`` on, in hops of ``way`` (1 or -1)."""

    start: int
    size: int
    way: int


@dataclass(frozen=True, kw_only=True)
class _Einsum:
    """An einsum and the letter that a collective works on. The first of two operands is the gathered one."""

    operands: tuple[str, str]
    out: str
    dim: str
    ring: _ShardRing
    dtype: jnp.dtype[Any]

    def over(self, operands: tuple[str, str], out: str, dtype: DTypeLike) -> _Einsum:
        """Another einsum of the same letters, with the same dim and ring."""
        return replace(self, operands=operands, out=out, dtype=jnp.dtype(dtype))

    def local(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The product of the local operands, in the dtype in which it is summed."""
        integers = jnp.issubdtype(a.dtype, jnp.integer) and jnp.issubdtype(b.dtype, jnp.integer)
        wide = jnp.int32 if integers else jnp.float32
        return jnp.einsum(f"{','.join(self.operands)}->{self.out}", a, b, preferred_element_type=wide)

    def sizes(self, a: tuple[int, ...], b: tuple[int, ...], *, sharded: bool = False) -> Mapping[str, int]:
        """The size of each letter; with ``sharded``, ``a`` has only a shard of ``dim``."""
        sizes: dict[str, int] = {}
        for letters, shape, shards in zip(self.operands, (a, b), (self.ring.size if sharded else 1, 1), strict=True):
            if len(shape) != len(letters):
                raise RooftopError(f"operand {letters}", f"an array with {len(shape)} dims", f"one with {len(letters)}")
            for letter, size in zip(letters, shape, strict=True):
                whole = size * shards if letter == self.dim else size
                if sizes.setdefault(letter, whole) != whole:
                    raise RooftopError(f"size of {letter}", whole, f"{sizes[letter]}, as in the other operand")
        return sizes

    def scattered(self, a: tuple[int, ...], b: tuple[int, ...]) -> Mapping[str, int]:
        """The size of each letter. Raises RooftopError if ``dim`` does not divide over the ring of the output."""
        if self.dim not in self.out:
            raise RooftopError("dim", self.dim, f"a letter of the output, {self.out}")
        sizes = self.sizes(a, b)
        if sizes[self.dim] % self.ring.size:
            raise RooftopError(f"size of {self.dim}", sizes[self.dim], f"a multiple of the {self.ring.size} devices")
        return sizes


def _parse(
    spec: str, operands: tuple[jax.Array, jax.Array], ring: _ShardRing, dim: str, dtype: DTypeLike | None
) -> _Einsum:
    match = re.fullmatch(r"(\w+),(\w+)->(\w+)", spec.replace(" ", ""))
    terms = match.groups() if match else ()
    # A letter that occurs once would be summed or broadcast, and has no transpose of the same form.
    once = [letter for letter in "".join(terms) if "".join(terms).count(letter) == 1]
    if not match or once or any(len(set(term)) < len(term) for term in terms):
        raise RooftopError("spec", spec, "two operands and an output, each letter in two of the three: 'bd,df->bf'")
    left, right, out = terms
    if len(dim) != 1 or dim not in left + right:
        raise RooftopError("dim", dim, f"a letter of {spec}")
    kind = jnp.dtype(jnp.result_type(*operands) if dtype is None else dtype)
    return _Einsum(operands=(left, right), out=out, dim=dim, ring=ring, dtype=kind)


def _slice(x: jax.Array, letters: str, letter: str, start: jax.Array | int, size: int) -> jax.Array:
    """A slice along one letter's dim; the whole array if it has no such dim."""
    if not letter or letter not in letters:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, letters.index(letter), allow_negative_indices=False)


def _update(x: jax.Array, part: jax.Array, start: jax.Array | int, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, start, axis, allow_negative_indices=False)


def _empty(op: _Einsum, sizes: Mapping[str, int], like: jax.Array) -> jax.Array:
    """A buffer for the output. Matmuls write their parts directly into it, which saves a copy."""
    out = lax.empty(tuple(sizes[letter] for letter in op.out), op.dtype)
    return lax.pcast(out, tuple(jax.typeof(like).manual_axis_type.varying), to="varying")


def _longest(op: _Einsum, letters: str, sizes: Mapping[str, int]) -> str:
    """The longest dim of the output, other than ``dim``, that is in ``letters``; '' if there is none."""
    return max(
        (letter for letter in op.out if letter in letters and letter != op.dim), key=sizes.__getitem__, default=""
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(op: _Einsum, shard: jax.Array, other: jax.Array) -> jax.Array:
    return (_gather_blocks if op.dim in op.out else _gather_sums)(op, shard, other)


def _gather_blocks(op: _Einsum, shard: jax.Array, other: jax.Array) -> jax.Array:
    """Each shard gives a block of the output."""
    (left, right), ring = op.operands, op.ring
    sizes, axis = op.sizes(shard.shape, other.shape, sharded=True), op.out.index(op.dim)
    width, out = sizes[op.dim] // ring.size, _empty(op, sizes, shard)
    for track in ring.tracks(width, ways=2 if ring.bidirectional else 1):
        x = _slice(shard, left, op.dim, track.start, track.size)
        for step in range(ring.size):
            x = ring.send(x, track.way) if step else x
            start = ring.place(-track.way * step) * width + track.start
            block = op.local(x, _slice(other, right, op.dim, start, track.size)).astype(op.dtype)
            out = _update(out, block, start, axis)
    return out


def _gather_sums(op: _Einsum, shard: jax.Array, other: jax.Array) -> jax.Array:
    """Each shard gives a term of the output. Another dim is halved, to get few long sums and not many short ones."""
    (left, right), ring = op.operands, op.ring
    sizes = op.sizes(shard.shape, other.shape, sharded=True)
    width, letter = sizes[op.dim] // ring.size, _longest(op, left, sizes)
    tracks = ring.tracks(sizes.get(letter, 1), ways=2 if ring.bidirectional else 1)
    totals = []
    for track in tracks:
        x, y = (_slice(z, at, letter, track.start, track.size) for z, at in ((shard, left), (other, right)))
        total = op.local(x, _slice(y, right, op.dim, ring.place(0) * width, width))
        for step in range(1, ring.size):
            x = ring.send(x, track.way)
            total += op.local(x, _slice(y, right, op.dim, ring.place(-track.way * step) * width, width))
        totals.append(total.astype(op.dtype))
    if len(totals) == 1:
        return totals[0]
    out = _empty(op, sizes, shard)
    for track, total in zip(tracks, totals, strict=True):
        out = _update(out, total, track.start, op.out.index(letter))
    return out


def _gather_backward(
    op: _Einsum, saved: tuple[jax.Array, jax.Array], derivative: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (left, right), (shard, other) = op.operands, saved
    return (
        _scatter(op.over((op.out, right), left, shard.dtype), derivative, other),
        _gather(op.over((left, op.out), right, other.dtype), shard, derivative),
    )


_gather.defvjp(lambda op, *operands: (_gather(op, *operands), operands), _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(op: _Einsum, a: jax.Array, b: jax.Array) -> jax.Array:
    return _scatter_part(op, a, b, 0, op.sizes(a.shape, b.shape)[op.dim])


def _scatter_part(op: _Einsum, a: jax.Array, b: jax.Array, first: int, size: int) -> jax.Array:
    """This device's shard of the part of ``dim`` that begins at ``first`` and has ``size``."""
    (left, right), ring = op.operands, op.ring
    sizes = op.sizes(a.shape, b.shape)
    width, letter = size // ring.size, _longest(op, op.out, sizes)

    def term(owner: int, a: jax.Array, b: jax.Array) -> jax.Array:
        """Term that this device adds to the shard of the device ``owner`` steps ahead."""
        start = first + ring.place(owner) * width
        return op.local(_slice(a, left, op.dim, start, width), _slice(b, right, op.dim, start, width))

    if ring.size == 1:
        return term(0, a, b).astype(op.dtype)

    def sum_of_others(track: _Track) -> jax.Array:
        """The half of this device's shard that arrives on ``track``: the sum of the terms of all other devices."""
        x, y = (_slice(z, at, letter, track.start, track.size) for z, at in ((a, left), (b, right)))
        total = term((ring.size - 1) * track.way, x, y).astype(op.dtype)
        for ahead in range(ring.size - 2, 0, -1):
            # The barrier ties the matmul to the arriving sum, so that XLA fuses the addition into the matmul. Without
            # it, the addition is an operation of its own, with two more passes over a float32 term.
            total, other = lax.optimization_barrier((ring.send(total, track.way), b))
            y = _slice(other, right, letter, track.start, track.size)
            total = (term(ahead * track.way, x, y) + total).astype(op.dtype)
        return ring.send(total, track.way)

    # Two sums alternate: while one travels, the other gets its term. This device's own term overlaps the last hop, so
    # it must not be fused with the addition of the arriving sum.
    arrived = [sum_of_others(track) for track in ring.tracks(sizes.get(letter, 1), ways=2)]
    own = lax.optimization_barrier(term(0, a, b))
    others = lax.concatenate(arrived, op.out.index(letter)) if len(arrived) > 1 else arrived[0]
    return (own + others).astype(op.dtype)


def _scatter_backward(
    op: _Einsum, saved: tuple[jax.Array, jax.Array], derivative: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (left, right), (a, b) = op.operands, saved
    return (
        _gather(op.over((op.out, right), left, a.dtype), derivative, b),
        _gather(op.over((op.out, left), right, b.dtype), derivative, a),
    )


_scatter.defvjp(lambda op, *operands: (_scatter(op, *operands), operands), _scatter_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(op: _Einsum, a: jax.Array, b: jax.Array) -> jax.Array:
    ring, axis, sizes = op.ring, op.out.index(op.dim), op.sizes(a.shape, b.shape)
    out, width = _empty(op, sizes, a), sizes[op.dim] // ring.size
    width //= math.gcd(width, ALL_REDUCE_PARTS)
    for first in range(0, sizes[op.dim], width * ring.size):
        shard = _scatter_part(op, a, b, first, width * ring.size)
        for track in ring.tracks(width, ways=2 if ring.bidirectional else 1):
            x = lax.slice_in_dim(shard, track.start, track.start + track.size, axis=axis)
            for step in range(ring.size):
                x = ring.send(x, track.way) if step else x
                out = _update(out, x, first + ring.place(-track.way * step) * width + track.start, axis)
    return out


def _reduce_backward(
    op: _Einsum, saved: tuple[jax.Array, jax.Array], derivative: jax.Array
) -> tuple[jax.Array, jax.Array]:
    shard = lax.psum_scatter(derivative, op.ring.axis, scatter_dimension=op.out.index(op.dim), tiled=True)
    return _scatter_backward(op, saved, shard)


_reduce.defvjp(lambda op, *operands: (_reduce(op, *operands), operands), _reduce_backward)


def multiply_gathered(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    axis: Axis,
    order: tuple[int, ...] | None = None,
    bidirectional: bool = False,
    transposed: bool = False,
    keeps_whole: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Products of x [B, T_axis, D], gathered over ``axis``, with weights [D, *F]: [B, T, *F] each.

    All weights multiply the same travelling shard of x. ``transposed`` weights are [*F, D]. The second result is x
    [B, T, D] if it ``keeps_whole``. There is no derivative: ``multiply_scattered`` is the transpose.
    """
    ring = _ShardRing(axis=axis, bidirectional=bidirectional, order=order)
    batch, width, depth = x.shape
    outs = [
        _buffer((batch, width * ring.size, *(weight.shape[:1] if transposed else weight.shape[1:])), x.dtype, number)
        for number, weight in enumerate(weights)
    ]
    whole = _buffer((batch, width * ring.size, depth), x.dtype, len(outs)) if keeps_whole else None
    tracks = ring.tracks(width, ways=2 if bidirectional else 1)
    shards = [lax.slice_in_dim(x, track.start, track.start + track.size, axis=1) for track in tracks]
    for step in range(ring.size):
        arriving = [ring.send(shard, track.way) for shard, track in zip(shards, tracks, strict=True)]
        for shard, track in zip(shards, tracks, strict=True):
            start = ring.place(-track.way * step) * width + track.start
            products = (_product(shard, weight, transposed=transposed).astype(x.dtype) for weight in weights)
            outs = [_update(out, product, start, 1) for out, product in zip(outs, products, strict=True)]
            whole = None if whole is None else _update(whole, shard, start, 1)
        if step < ring.size - 1:
            # No shard is used before the matmuls of those before it are done. Otherwise XLA puts several of these next
            # to one hop, and none next to others.
            shards, outs = lax.optimization_barrier((arriving, outs))
    return tuple(outs), whole


def _buffer(shape: tuple[int, ...], dtype: DTypeLike, number: int) -> jax.Array:
    """A buffer for an output. XLA would take those of one shape for one value, and copy it: each has another shape."""
    return lax.empty((1,) * number + shape, dtype).reshape(shape)


def multiply_scattered(
    xs: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    *,
    axis: Axis,
    order: tuple[int, ...] | None = None,
    bidirectional: bool = False,
    transposed: bool = False,
) -> jax.Array:
    """The sum of products of xs [B, T, *F] with weights [*F, D], scattered over ``axis``: [B, T_axis, D].

    Each device's products are its part of the sum. ``transposed`` weights are [D, *F].
    """
    ring = _ShardRing(axis=axis, bidirectional=bidirectional, order=order)
    dtype, width = xs[0].dtype, xs[0].shape[1] // ring.size

    def term(owner: int, start: int, size: int, tied: Sequence[jax.Array]) -> jax.Array:
        """This device's products for ``size`` rows from ``start`` on of the device ``owner`` places ahead."""
        first = ring.place(owner) * width + start
        rows = (lax.dynamic_slice_in_dim(x, first, size, 1, allow_negative_indices=False) for x in xs)
        *others, last = (_product(x, weight, transposed=transposed) for x, weight in zip(rows, tied, strict=True))
        # Sums of several matmuls are stored between them, in ``dtype``.
        return functools.reduce(jnp.add, (lax.optimization_barrier(y.astype(dtype)) for y in others), last)

    tied = tuple(weights)
    if ring.size == 1:
        return term(0, 0, width, tied).astype(dtype)
    # Two sums alternate: while one travels, the other gets its term. Barriers keep the order, and tie each matmul to
    # the sum that has arrived, so that XLA fuses the addition into the matmul.
    tracks = ring.tracks(width, ways=2)
    sums: list[jax.Array | None] = [None] * len(tracks)
    for ahead in range(ring.size - 1, 0, -1):
        for number, track in enumerate(tracks):
            arrived = sums[number]
            if arrived is not None:
                arrived, *tied_again = lax.optimization_barrier((arrived, *tied))
                tied = tuple(tied_again)
            total = term(ahead * track.way, track.start, track.size, tied)
            total, *tied_again = lax.optimization_barrier(
                ((total if arrived is None else total + arrived).astype(dtype), *tied)
            )
            tied, sums[number] = tuple(tied_again), ring.send(total, track.way)
    arrived_all = [total for total in sums if total is not None]
    own = lax.optimization_barrier(term(0, 0, width, tied).astype(dtype))
    total = own + (lax.concatenate(arrived_all, 1) if len(arrived_all) > 1 else arrived_all[0])
    # The sum is stored before it is used, so that readers of the compiled program find all of the ring.
    return lax.optimization_barrier(total)


def _product(x: jax.Array, weight: jax.Array, *, transposed: bool) -> jax.Array:
    """[B, T, D] x [D, *F] -> [B, T, *F], or [B, T, *F] x [D, *F] -> [B, T, D]; summed in float32."""
    dims = tuple(range(1, weight.ndim)) if transposed else (0,)
    own = tuple(range(2, 2 + len(dims)))
    return lax.dot_general(x, weight, ((own, dims), ((), ())), preferred_element_type=jnp.float32)
