"""Attention over a sequence that is split over a mesh axis, causal.

Without a window, keys and values travel round a ring (Liu et al. 2023). Each device keeps its queries. In n - 1 hops
all the others' keys and values pass by, each met by a kernel of ``rooftop.programs.attention.attend`` and merged by
log-sum-exps; the next hop is under way meanwhile. The backward pass sends them round once more, with their derivatives
behind them, which every device adds to and which end at home: twice the bytes of the forward pass. Derivatives travel
in the dtype of the keys, so that a bf16 one is rounded n - 1 times. Half of the key/value heads (or, if they are odd,
of the sequences) go each way round, so that both directions of the links are used; an odd number of both goes one way.

The segments of a packed sequence travel with their keys, one int32 a token.

With a window, a device needs no more than the keys and values of the window before its queries: these come by as many
hops as it takes, the last of them in part, and one kernel meets them all. Their derivatives go back the same way.

With a window, ``zigzag`` order takes two kernels, one a chunk, and the neighbours
on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from rooftop.capabilities import CONTEXT_CHUNKS, RING_KERNELS
from rooftop.core.errors import RooftopError, unknown
from rooftop.programs.attention.attend import attend, attend_behind, attend_block, block_gradients
from rooftop.programs.attention.scores import (
    Scores,
    Segments,
    add_sinks,
    block_size,
    merge,
    sink_gradients,
    varying_alike,
)


def ring_attend(
    kernel: str,
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    order: str = "contiguous",
    sinks: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """``attend`` with the sequence split over the mesh axis ``axis``: q [b, T/n, heads, H] -> [b, T/n, heads, d_v].

    ``segments`` [b, T/n] are those of the tokens that are here, and ``order`` says which these are. Called
    inside a ``jax.shard_map`` that is manual over ``axis``. Raises RooftopError for an unknown order, a kernel that
    cannot merge, or a length that does not divide.
    """
    if order not in ORDERS:
        raise unknown("order of the sequence", order, ORDERS)
    if kernel not in RING_KERNELS:
        raise unknown("kernel of ring attention", kernel, RING_KERNELS)
    size = lax.axis_size(axis)
    if size == 1:
        return attend(kernel, scores, q, k, v, sinks=sinks, segments=segments)
    if q.shape[2] % k.shape[2]:
        raise RooftopError("query heads on a device", q.shape[2], f"a multiple of the {k.shape[2]} key/value heads")
    chunks = chunks_of(order)
    if q.shape[1] % chunks:
        raise RooftopError("sequence length on a device", q.shape[1], f"a multiple of {chunks} for {order} order")
    ring = _KeyRing(axis=axis, size=size, kernel=kernel, scores=scores, chunks=chunks)
    arrays, tree = jax.tree.flatten((q, k, v, sinks, segments))
    _, *arrays = varying_alike(lax.pcast(jnp.zeros((), q.dtype), axis, to="varying"), *arrays)
    given = jax.tree.unflatten(tree, arrays)
    if scores.window is not None and scores.window < q.shape[1] * size:
        return _windowed(ring, *given)
    return _ring_attention(ring, *given)


_Arrays = tuple[jax.Array, ...]
#: An offset by which all keys come before all queries.
_ALL = 1 << 30


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A chunk of this device's queries and one of keys on a track, by their indices; ``counts``: whether they do."""

    track: int
    queries: jax.Array | int
    keys: jax.Array | int
    counts: jax.Array | None


@dataclass(frozen=True, kw_only=True)
class _KeyRing:
    """The devices along ``axis``, each with so many ``chunks`` of the sequence: one, or one from either end."""

    axis: str
    size: int
    kernel: str
    scores: Scores
    chunks: int

    def send(self, tracks: list[_Arrays]) -> list[_Arrays]:
        """What the neighbours have: on the first track the one before, on the second the one after."""
        ways = ([(place, (place + way) % self.size) for place in range(self.size)] for way in (1, -1))
        return [tuple(lax.ppermute(x, self.axis, way) for x in track) for track, way in zip(tracks, ways, strict=False)]

    def pairs(self, tracks: int, hops: jax.Array | int) -> list[_Pair]:
        """The pairs to compute when keys have come so many hops. In each, all keys come before all queries."""
        here, found = lax.axis_index(self.axis), []
        for track in range(tracks):
            # From a device before this one, not round the ring from one after it.
            before = here + hops >= self.size if track else here >= hops
            if self.chunks == 1:
                found.append(_Pair(track=track, queries=0, keys=0, counts=before))
                continue
            # Every earlier chunk comes before every later one. Besides, the earlier chunk of a device before comes
            # before the earlier one here, and the later chunk of a device after before the later one here.
            later = (~before).astype(jnp.int32)
            found.append(_Pair(track=track, queries=1, keys=0, counts=None))
            found.append(_Pair(track=track, queries=later, keys=later, counts=None))
        return found

    @property
    def whole(self) -> Scores:
        """The scores of such a pair, none of them masked."""
        return replace(self.scores, window=None, offset=_ALL)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(
    ring: _KeyRing, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: jax.Array | None
) -> jax.Array:
    return _forward(ring, q, k, v, sinks, segments)[0]


_Residuals = tuple[
    jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array, jax.Array
]  # fmt: skip


def _forward(
    ring: _KeyRing, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: jax.Array | None
) -> tuple[jax.Array, _Residuals]:
    halves, ids = _halves(k), () if segments is None else (segments,)
    queries, keys = _cut(ring, halves, q, *ids), _cut(ring, halves, k, v, *ids)

    def meet(
        merged: list[_Arrays], keys: list[_Arrays], hops: jax.Array | int, sent: list[_Arrays]
    ) -> tuple[list[_Arrays], list[_Arrays]]:
        """Outputs and log-sum-exps on each track, with the keys that came so many hops merged in; and what was sent."""
        pairs, merged = ring.pairs(len(keys), hops), list(merged)
        q, *of_queries = _gather([_at(queries[p.track], p.queries) for p in pairs])
        k, v, *of_keys = _gather([_at(keys[p.track], p.keys) for p in pairs])
        found, sent = attend_block(ring.kernel, ring.whole, q, k, v, _met(of_queries, of_keys), sent)
        for pair, (o, lse) in zip(pairs, _scatter(found, len(pairs)), strict=True):
            lse = lse if pair.counts is None else jnp.where(pair.counts, lse, -jnp.inf)
            before, before_lse = _at(merged[pair.track], pair.queries)
            merged[pair.track] = _put(merged[pair.track], pair.queries, merge(before, before_lse, o, lse))
        return merged, sent

    def hop(carry: tuple[list[_Arrays], list[_Arrays]], hops: jax.Array) -> tuple[Any, None]:
        merged, keys = carry
        return meet(merged, keys, hops, ring.send(keys)), None

    # In either order this device's own keys follow one another as its queries do.
    (o, lse), sent = attend_block(ring.kernel, ring.scores, q, k, v, _met(ids, ids), ring.send(keys))
    own = zip(_cut(ring, halves, o.astype(jnp.float32)), _cut_rows(ring, halves, lse), strict=True)
    (merged, keys), _ = lax.scan(hop, ([o + lse for o, lse in own], sent), jnp.arange(1, ring.size - 1))
    merged, _ = meet(merged, keys, ring.size - 1, [])
    o = _join([track[0] for track in merged], halves)
    lse = _join([track[1].swapaxes(2, 3) for track in merged], halves).swapaxes(1, 2)
    if sinks is not None:
        o, lse = add_sinks(o, lse, sinks)
    o, lse = (checkpoint_name(each, "attn_core") for each in (o.astype(q.dtype), lse))
    return o, (q, k, v, sinks, segments, o, lse)


def _backward(
    ring: _KeyRing, saved: _Residuals, do: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None]:
    q, k, v, sinks, segments, o, lse = saved
    halves, ids = _halves(k), () if segments is None else (segments,)
    given = zip(_cut(ring, halves, q), _cut(ring, halves, o, do, *ids), _cut_rows(ring, halves, lse), strict=True)
    queries, keys = [(*q, o, *lse, *rest) for q, (o, *rest), lse in given], _cut(ring, halves, k, v, *ids)

    def meet(
        dq: list[_Arrays], keys: list[_Arrays], hops: jax.Array | int, sent: list[_Arrays]
    ) -> tuple[list[_Arrays], list[_Arrays], list[_Arrays]]:
        """Derivatives of queries, with the part of keys that came so many hops added, and those of these keys."""
        pairs, dq = ring.pairs(len(keys), hops), list(dq)
        dkv = [_zeros(track[:2]) for track in keys]
        q, o, lse, do, *of_queries = _gather([_at(queries[p.track], p.queries) for p in pairs])
        k, v, *of_keys = _gather([_at(keys[p.track], p.keys) for p in pairs])
        met = _met(of_queries, of_keys)
        found, sent = block_gradients(ring.kernel, ring.whole, q, k, v, o, lse, do, met, sent)
        for pair, parts in zip(pairs, _scatter(found, len(pairs)), strict=True):
            if pair.counts is not None:
                parts = tuple(jnp.where(pair.counts, part, jnp.zeros_like(part)) for part in parts)
            dq[pair.track] = _add_at(dq[pair.track], pair.queries, parts[:1])
            dkv[pair.track] = _add_at(dkv[pair.track], pair.keys, parts[1:])
        both = [track[:2] for track in keys]
        return dq, jax.tree.map(lambda derivative, key: derivative.astype(key.dtype), dkv, both), sent

    def hop(carry: tuple[list[_Arrays], list[_Arrays], list[_Arrays]], hops: jax.Array) -> tuple[Any, None]:
        dq, keys, behind = carry
        dq, found, sent = meet(dq, keys, hops, ring.send(keys) + ring.send(behind))
        return (dq, sent[: len(keys)], jax.tree.map(_add, sent[len(keys) :], found)), None

    own = _met(ids, ids)
    (dq, dk, dv), keys = block_gradients(ring.kernel, ring.scores, q, k, v, o, lse, do, own, ring.send(keys))
    track_dq = _cut(ring, halves, dq.astype(jnp.float32))
    track_dq, behind, sent = meet(track_dq, keys, 1, ring.send(keys) if ring.size > 2 else [])
    if ring.size > 2:
        (track_dq, keys, behind), _ = lax.scan(hop, (track_dq, sent, behind), jnp.arange(2, ring.size - 1))
        track_dq, found, arrived = meet(track_dq, keys, ring.size - 1, ring.send(behind))
        behind = jax.tree.map(_add, arrived, found)
    home = ring.send(behind)
    dk, dv = (_add(x, _join([track[index] for track in home], halves)) for index, x in enumerate((dk, dv)))
    dsinks = None if sinks is None else sink_gradients(sinks, o, lse, do)
    return _join([track[0] for track in track_dq], halves).astype(q.dtype), dk, dv, dsinks, None


_ring_attention.defvjp(_forward, _backward)


def _halves(k: jax.Array) -> int | None:
    """The dim of [b, T, heads, ...] of which half goes each way round; None: all of it goes one way."""
    return next((dim for dim in (2, 0) if k.shape[dim] % 2 == 0), None)


def _met(of_queries: Sequence[jax.Array], of_keys: Sequence[jax.Array]) -> Segments | None:
    """Segments of queries and keys that meet, each one array or none."""
    return (of_queries[0], of_keys[0]) if of_queries and of_keys else None


def _cut(ring: _KeyRing, halves: int | None, *arrays: jax.Array) -> list[_Arrays]:
    """Arrays [b, T, heads, ...] as one or two tracks of arrays [chunk, b, T/chunks, heads, ...].

    Arrays [b, T] have no heads: where these are halved, they are on both tracks as a whole.
    """

    def tracks(x: jax.Array) -> list[jax.Array]:
        if halves is None:
            return [x]
        return jnp.split(x, 2, axis=halves) if halves < x.ndim else [x, x]

    parts = [tracks(x) for x in arrays]
    return [
        tuple(jnp.moveaxis(x.reshape(x.shape[0], ring.chunks, -1, *x.shape[2:]), 1, 0) for x in track)
        for track in zip(*parts, strict=True)
    ]


def _cut_rows(ring: _KeyRing, halves: int | None, lse: jax.Array) -> list[_Arrays]:
    """Log-sum-exps [b, heads, T] as tracks of [chunk, b, heads, T/chunks]."""
    return [(x.swapaxes(2, 3),) for (x,) in _cut(ring, halves, lse.swapaxes(1, 2))]


def _join(tracks: list[jax.Array], halves: int | None) -> jax.Array:
    """One array of ``_cut`` put together again."""
    whole = [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in tracks]
    return whole[0] if halves is None else jnp.concatenate(whole, axis=halves)


def _at(arrays: _Arrays, chunk: jax.Array | int) -> _Arrays:
    return tuple(lax.dynamic_index_in_dim(x, chunk, keepdims=False) for x in arrays)


def _put(arrays: _Arrays, chunk: jax.Array | int, parts: _Arrays) -> _Arrays:
    return tuple(lax.dynamic_update_index_in_dim(x, y, chunk, 0) for x, y in zip(arrays, parts, strict=True))


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    """A sum made in float32, in the dtype of ``x``."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


def _add_at(arrays: _Arrays, chunk: jax.Array | int, parts: _Arrays) -> _Arrays:
    return _put(arrays, chunk, tuple(map(_add, _at(arrays, chunk), parts)))


def _zeros(arrays: _Arrays) -> _Arrays:
    """Float32 zeros that vary as the arrays do."""
    return tuple(varying_alike(x, jnp.zeros(x.shape, jnp.float32))[1] for x in arrays)


def _gather(pairs: list[_Arrays]) -> _Arrays:
    """Pairs as sequences of one batch: a kernel that is called once is also compiled once."""
    return tuple(jnp.concatenate(arrays) for arrays in zip(*pairs, strict=True))


def _scatter(arrays: _Arrays, pairs: int) -> list[_Arrays]:
    return list(zip(*(jnp.split(x, pairs) for x in arrays), strict=True))


def _windowed(
    ring: _KeyRing, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: jax.Array | None
) -> jax.Array:
    """Attention to a window that is shorter than the sequence: the keys before a chunk are brought to it."""
    scores, chunk = ring.scores, q.shape[1] // ring.chunks
    assert scores.window is not None
    block = block_size(chunk, scores.block)
    behind = min(-(-(scores.window - 1) // block) * block, (ring.chunks * ring.size - 1) * chunk)
    queries, keys, values = (jnp.split(x, ring.chunks, axis=1) for x in (q, k, v))
    ids = [] if segments is None else jnp.split(segments, ring.chunks, axis=1)
    brought: list[list[_Arrays]] = [[each] for each in zip(keys, values, *([ids] if ids else []), strict=True)]
    for hop in range(-(-behind // chunk)):
        missing = min(behind - hop * chunk, chunk)
        last = [tuple(x[:, chunk - missing :] for x in each[0]) for each in brought]
        for each, found in zip(brought, _chunk_before(ring, last), strict=True):
            each.insert(0, found)
    here = lax.axis_index(ring.axis)
    outputs = []
    for index, each in enumerate(brought):
        k, v, *of_keys = (jnp.concatenate(parts, axis=1) for parts in zip(*each, strict=True))
        place = 2 * ring.size - 1 - here if index else here
        outputs.append(
            attend_behind(
                ring.kernel,
                replace(scores, offset=behind),
                queries[index],
                k,
                v,
                sinks=sinks,
                absent=jnp.maximum(behind - place * chunk, 0),
                segments=_met(ids[index : index + 1], of_keys),
            )
        )
    return jnp.concatenate(outputs, axis=1)


def _chunk_before(ring: _KeyRing, chunks: list[_Arrays]) -> list[_Arrays]:
    """In place of each of this device's chunks what is there of the one before it; zeros if there is none."""
    up = [(place, place + 1) for place in range(ring.size - 1)]
    found = [tuple(lax.ppermute(x, ring.axis, up) for x in chunks[0])]
    if ring.chunks == 2:
        down = [(after, before) for before, after in up]
        turn = lax.axis_index(ring.axis) == ring.size - 1
        later = (lax.ppermute(x, ring.axis, down) for x in chunks[1])
        found.append(tuple(jnp.where(turn, own, x) for own, x in zip(chunks[0], later, strict=True)))
    return found


def gathered_attend(
    kernel: str,
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    order: str = "contiguous",
    sinks: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """``rooftop.programs.attention.context.ring_attend`` without a ring: the same arguments, results and refusals."""
    if order not in ORDERS:
        raise unknown("order of the sequence", order, ORDERS)
    if kernel not in RING_KERNELS:
        raise unknown("kernel of attention to gathered keys", kernel, RING_KERNELS)
    size, chunks = lax.axis_size(axis), chunks_of(order)
    if size == 1:
        return attend(kernel, scores, q, k, v, sinks=sinks, segments=segments)
    if q.shape[2] % k.shape[2]:
        raise RooftopError("query heads on a device", q.shape[2], f"a multiple of the {k.shape[2]} key/value heads")
    if q.shape[1] % chunks:
        raise RooftopError("sequence length on a device", q.shape[1], f"a multiple of {chunks} for {order} order")
    chunk, here = q.shape[1] // chunks, lax.axis_index(axis)
    # The chunks of the whole sequence, as they lie on the devices, by their places in it.
    lie = sequence_order(size * chunks, size, order).argsort()

    def gathered(x: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, axis, axis=1, tiled=True)
        apart = whole.reshape(x.shape[0], size * chunks, chunk, *x.shape[2:])
        return apart[:, lie].reshape(whole.shape)

    keys, values = gathered(k), gathered(v)
    ids = None if segments is None else gathered(segments)
    outputs = []
    for index in range(chunks):
        # Places of this chunk in the sequence: on this device, and the last on any.
        place = here if index == 0 else 2 * size - 1 - here
        last = size * (index + 1) - 1
        behind = last * chunk
        if scores.window is not None:
            block = block_size(chunk, scores.block)
            behind = min(behind, -(-(scores.window - 1) // block) * block)

        def before(x: jax.Array, place: jax.Array = place, behind: int = behind, last: int = last) -> jax.Array:
            """The chunk at ``place`` and what is ``behind`` it, zeros where the sequence has not begun."""
            padded = jnp.pad(x[:, : (last + 1) * chunk], ((0, 0), (behind, 0)) + ((0, 0),) * (x.ndim - 2))
            return lax.dynamic_slice_in_dim(padded, place * chunk, behind + chunk, axis=1)

        own = slice(index * chunk, (index + 1) * chunk)
        outputs.append(
            attend_behind(
                kernel,
                replace(scores, offset=behind),
                q[:, own],
                before(keys),
                before(values),
                sinks=sinks,
                absent=jnp.maximum(behind - place * chunk, 0),
                segments=None if ids is None or segments is None else (segments[:, own], before(ids)),
            )
        )
    return jnp.concatenate(outputs, axis=1)


ORDERS: tuple[str, ...] = ("contiguous", "zigzag")


def sequence_order(seq_len: int, devices: int, order: str) -> np.ndarray:
    """Positions [T] of the tokens in the order in which a mesh axis of so many devices splits them.

    ``tokens[:, sequence_order(...)]`` is what the axis shards; its argsort puts outputs back. Raises RooftopError for
    an unknown order, or a length that does not divide.
    """
    if order not in ORDERS:
        raise unknown("order of the sequence", order, ORDERS)
    chunks = devices * chunks_of(order)
    if seq_len % chunks:
        raise RooftopError("sequence length", seq_len, f"a multiple of {chunks} for {devices} devices in {order} order")
    positions = np.arange(seq_len).reshape(chunks, -1)
    if order == "zigzag":
        positions = np.stack([positions[:devices], positions[: devices - 1 : -1]], axis=1)
    return positions.reshape(-1)


def chunks_of(order: str) -> int:
    """Chunks of the sequence on each device."""
    return CONTEXT_CHUNKS if order == "zigzag" else 1
