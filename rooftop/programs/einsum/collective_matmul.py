"""Matmuls that overlap with their own collective: shards travel round a ring while the matrix unit works on others.

They are the collective matmuls of Wang et al. 2023 and of the book's chapter 10. Every function here is called inside
``jax.shard_map``, on local shards. ``spec`` is an einsum of two operands, such as 'bd,df->bf', and ``dim`` is the
letter of it that is split over the mesh axis ``axis`` (or several axes, major first):

- ``all_gather_einsum``: one operand arrives in shards of ``dim``, which go round while others are multiplied;
- ``einsum_reduce_scatter``: the output leaves in shards of ``dim``, whose partial sums go round;
- ``einsum_all_reduce``: the same for a part of the output at a time, while the part before is gathered.

The gradients overlap as well, since AllGather and ReduceScatter are each other's transposes. On a device products are
summed in float32 (int32 for integers). What travels is the operand or, where sums do, the output's dtype: a bf16 sum
over n devices is rounded n - 1 times on its way, as in XLA's own ReduceScatter.

With ``bidirectional``, half of the data goes each way round: twice the bandwidth where the ring closes, and the same
on an open line, where a ring comes back through the links of the other direction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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
    """The einsum of two operands of which one, number ``gathered``, comes in shards of ``dim`` over ``axis``.

    In[B, D_Y] W[D, F] -> Out[B, F] sums over the shards ('bd,df->bf', dim 'd'); In[B_Y, D] W[D, F] -> Out[B, F] makes
    a block of rows of each ('bd,df->bf', dim 'b'). The other operand and the output have all of ``dim``. The output
    has ``dtype``, by default that of the operands. For the gradient the shard is kept, never the gathered operand.

    Raises RooftopError for a spec or a dim that this does not do, or sizes that do not fit.
    """
    op = _parse(spec, (a, b), _ShardRing(axis=axis, bidirectional=bidirectional), dim, dtype)
    shard, other = a, b
    if gathered:
        (shard, other), op = (b, a), op.over(op.operands[::-1], op.out, op.dtype)
    if dim not in op.operands[0]:
        raise RooftopError("dim", dim, f"a letter of the gathered operand, {op.operands[0]}")
    op.sizes(shard.shape, other.shape, sharded=True)
    return _gather(op, *_varying(op.ring, shard, other))


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
    """The einsum of two operands summed over ``axis``, of which each device gets its shard of the output's ``dim``.

    Tmp[B, F_Y] W[F_Y, D] -> Out[B, D_Y] is 'bf,fd->bd' with dim 'd'. The operands have all of ``dim``. The output has
    ``dtype``, by default that of the operands, and so have the sums on their way.

    Raises RooftopError for a spec or a dim that this does not do, or sizes that do not fit.
    """
    op = _parse(spec, (a, b), _ShardRing(axis=axis, bidirectional=bidirectional), dim, dtype)
    op.scattered(a.shape, b.shape)
    return _scatter(op, *_varying(op.ring, a, b))


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
    scattered in turn, as by ``einsum_reduce_scatter``, and the shards of a part gathered while the next is multiplied.
    JAX takes the output as varying over ``axis``, so its derivative is summed over ``axis``, as a psum's is.

    Raises RooftopError for a spec or a dim that this does not do, or sizes that do not fit.
    """
    op = _parse(spec, (a, b), _ShardRing(axis=axis, bidirectional=bidirectional), dim, dtype)
    op.scattered(a.shape, b.shape)
    return _reduce(op, *_varying(op.ring, a, b))


@dataclass(frozen=True, kw_only=True)
class _ShardRing:
    """The devices along ``axis``, each linked with the next and the last with the first."""

    axis: Axis
    bidirectional: bool

    @property
    def size(self) -> int:
        return lax.axis_size(self.axis)

    def place(self, ahead: int) -> jax.Array:
        """The index of the device so many places ahead of this one."""
        here = lax.axis_index(self.axis)
        return lax.rem(here + ahead % self.size, jnp.asarray(self.size, here.dtype))

    def send(self, x: jax.Array, places: int) -> jax.Array:
        """``x`` of the device so many places behind."""
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        # A permute numbers devices in the order of the mesh, whatever the order of its axes here.
        ordered = [axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes]
        number = np.arange(self.size).reshape([lax.axis_size(axis) for axis in ordered])
        ring = number.transpose([ordered.index(axis) for axis in axes]).ravel().tolist()
        pairs = [(device, ring[(place + places) % self.size]) for place, device in enumerate(ring)]
        return lax.ppermute(x, tuple(ordered), pairs)

    def tracks(self, size: int, *, ways: int) -> list[_Track]:
        """The halves of a dim and the way round of each; all of it and one way if there is nothing to halve."""
        if ways == 1 or size < 2:
            return [_Track(0, size, 1)]
        half = size // 2
        return [_Track(0, half, 1), _Track(half, size - half, -1 if self.bidirectional else 1)]


class _Track(NamedTuple):
    """What goes round together: ``size`` of a dim from ``start`` on, in hops of ``way`` (1 or -1) places."""

    start: int
    size: int
    way: int


@dataclass(frozen=True, kw_only=True)
class _Einsum:
    """An einsum with the letter that a collective works on. Of two operands, the first is the one gathered."""

    operands: tuple[str, str]
    out: str
    dim: str
    ring: _ShardRing
    dtype: jnp.dtype[Any]

    def over(self, operands: tuple[str, str], out: str, dtype: DTypeLike) -> _Einsum:
        """Another einsum of the same letters, with the same dim and ring."""
        return replace(self, operands=operands, out=out, dtype=jnp.dtype(dtype))

    def local(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The product of what is here, as wide as it is summed."""
        whole = jnp.issubdtype(a.dtype, jnp.integer) and jnp.issubdtype(b.dtype, jnp.integer)
        wide = jnp.int32 if whole else jnp.float32
        return jnp.einsum(f"{','.join(self.operands)}->{self.out}", a, b, preferred_element_type=wide)

    def sizes(self, a: tuple[int, ...], b: tuple[int, ...], *, sharded: bool = False) -> Mapping[str, int]:
        """The size of each letter; with ``sharded``, ``a`` has only a shard of ``dim``."""
        found: dict[str, int] = {}
        for letters, shape, shards in zip(self.operands, (a, b), (self.ring.size if sharded else 1, 1), strict=True):
            if len(shape) != len(letters):
                raise RooftopError(f"operand {letters}", f"an array with {len(shape)} dims", f"one with {len(letters)}")
            for letter, size in zip(letters, shape, strict=True):
                whole = size * shards if letter == self.dim else size
                if found.setdefault(letter, whole) != whole:
                    raise RooftopError(f"size of {letter}", whole, f"{found[letter]}, as in the other operand")
        return found

    def scattered(self, a: tuple[int, ...], b: tuple[int, ...]) -> Mapping[str, int]:
        """The size of each letter, of which ``dim`` must divide over the output's ring."""
        if self.dim not in self.out:
            raise RooftopError("dim", self.dim, f"a letter of the output, {self.out}")
        found = self.sizes(a, b)
        if found[self.dim] % self.ring.size:
            raise RooftopError(f"size of {self.dim}", found[self.dim], f"a multiple of the {self.ring.size} devices")
        return found


def _parse(
    spec: str, operands: tuple[jax.Array, jax.Array], ring: _ShardRing, dim: str, dtype: DTypeLike | None
) -> _Einsum:
    found = re.fullmatch(r"(\w+),(\w+)->(\w+)", spec.replace(" ", ""))
    terms = found.groups() if found else ()
    # A letter in one place only would have to be summed away or broadcast, and has no transpose in these terms.
    once = [letter for letter in "".join(terms) if "".join(terms).count(letter) == 1]
    if not found or once or any(len(set(term)) < len(term) for term in terms):
        raise RooftopError("spec", spec, "two operands and an output, each letter in two of the three: 'bd,df->bf'")
    left, right, out = terms
    if len(dim) != 1 or dim not in left + right:
        raise RooftopError("dim", dim, f"a letter of {spec}")
    kind = jnp.dtype(jnp.result_type(*operands) if dtype is None else dtype)
    return _Einsum(operands=(left, right), out=out, dim=dim, ring=ring, dtype=kind)


def _varying(ring: _ShardRing, *operands: jax.Array) -> list[jax.Array]:
    """The operands as JAX's types see them once multiplied: what is the same along an axis sums its gradient there."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset(ring.axis if isinstance(ring.axis, tuple) else (ring.axis,)).union(*varying)
    return [lax.pcast(x, tuple(union - had), to="varying") for x, had in zip(operands, varying, strict=True)]


def _slice(x: jax.Array, letters: str, letter: str, start: jax.Array | int, size: int) -> jax.Array:
    """A slice of one letter's dim, or all of an array that does not have it."""
    if not letter or letter not in letters:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, letters.index(letter), allow_negative_indices=False)


def _update(x: jax.Array, part: jax.Array, start: jax.Array | int, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, start, axis, allow_negative_indices=False)


def _empty(op: _Einsum, sizes: Mapping[str, int], like: jax.Array) -> jax.Array:
    """A buffer for the output: parts that a matmul writes straight into it need not be copied together."""
    out = lax.empty(tuple(sizes[letter] for letter in op.out), op.dtype)
    return lax.pcast(out, tuple(jax.typeof(like).manual_axis_type.varying), to="varying")


def _longest(op: _Einsum, letters: str, sizes: Mapping[str, int]) -> str:
    """The longest dim of the output that is in ``letters`` and is not ``dim``, to be halved; '' if there is none."""
    return max(
        (letter for letter in op.out if letter in letters and letter != op.dim), key=sizes.__getitem__, default=""
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(op: _Einsum, shard: jax.Array, other: jax.Array) -> jax.Array:
    return (_gather_blocks if op.dim in op.out else _gather_sums)(op, shard, other)


def _gather_blocks(op: _Einsum, shard: jax.Array, other: jax.Array) -> jax.Array:
    """Each shard makes a block of the output."""
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
    """Each shard makes a term of the output. What is halved is another dim, for few long sums, not many short ones."""
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
        """What this device adds to the shard of the device so many places ahead."""
        start = first + ring.place(owner) * width
        return op.local(_slice(a, left, op.dim, start, width), _slice(b, right, op.dim, start, width))

    if ring.size == 1:
        return term(0, a, b).astype(op.dtype)

    def sum_of_others(track: _Track) -> jax.Array:
        """The half of this device's shard that ``track`` brings: the sum of what all the others add to it."""
        x, y = (_slice(z, at, letter, track.start, track.size) for z, at in ((a, left), (b, right)))
        total = term((ring.size - 1) * track.way, x, y).astype(op.dtype)
        for ahead in range(ring.size - 2, 0, -1):
            # Tied to what arrives, a matmul adds to it. Else XLA multiplies first and adds by itself, which takes two
            # more passes over a float32 term.
            total, whole = lax.optimization_barrier((ring.send(total, track.way), b))
            y = _slice(whole, right, letter, track.start, track.size)
            total = (term(ahead * track.way, x, y) + total).astype(op.dtype)
        return ring.send(total, track.way)

    # Two sums take turns: while one travels, the other gets its term. The last hop hides behind this device's own
    # term, which must not wait to be added to what that brings.
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
