"""Causal attention over a sequence that is split over a mesh axis.

Without a window, keys and values travel around a ring (Liu et al. 2023), and each device keeps its queries. In n - 1
hops the keys and values of all other devices arrive; a kernel of ``rooftop.programs.attention.attend`` processes each
part, and log-sum-exps merge the results. The next hop overlaps the kernel. The backward pass sends keys and values
around once more, followed by their derivatives, to which every device adds its share and which end on their own device:
twice the bytes of the forward pass. Derivatives travel in the dtype of the keys, so a bf16 derivative is rounded n - 1
times. Half of the key/value heads (or half of the sequences, if the number of heads is odd) travel in each direction,
so that both directions of the links are used. If both numbers are odd, everything travels in one direction.

The segments of a packed sequence travel with their keys, one int32 per token.

With a window, a device needs only the keys and values of the window before its queries. They arrive in as many hops as
that takes, the last one partial, and a single kernel processes them. Their derivatives return the same way. In
``zigzag`` order a window takes two kernels, one per chunk, and exchanges with the neighbours on both sides.
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
from jaxtyping import Array, Float, Int

from rooftop.capabilities import RING_KERNELS
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.models.program_sizes import CONTEXT_CHUNKS, block_size
from rooftop.programs.attention.attend import attend, attend_block, block_gradients
from rooftop.programs.attention.scores import (
    Keys,
    LogSums,
    Outputs,
    Queries,
    Scores,
    Segments,
    Sinks,
    TokenSegments,
    Values,
    add_sinks,
    merge,
    sink_gradients,
)
from rooftop.programs.sharding import varying_alike

#: Ways in which the keys and values of other devices arrive: around a ring, or all gathered.
CONTEXT_ATTENTIONS: tuple[str, ...] = ("ring", "all_gather")


def context_attend(
    kernel: str,
    scores: Scores,
    q: Queries,
    k: Keys,
    v: Values,
    *,
    axes: tuple[str, ...],
    order: str = "contiguous",
    by: str = "ring",
    sinks: Sinks | None = None,
    segments: TokenSegments | None = None,
) -> Outputs:
    """``attend`` with the sequence split over the mesh ``axes``, which are in mesh order; T tokens are on this device.

    ``order`` says which tokens of the sequence these are, and ``segments`` are theirs. ``by`` is one of
    CONTEXT_ATTENTIONS. Called inside a ``jax.shard_map`` that is manual over ``axes``. Raises RooftopError for an
    unknown order, a kernel whose results cannot be merged, or a length that does not divide.
    """
    for name, value, known in (
        ("order of the sequence", order, ORDERS),
        ("kernel over a context axis", kernel, RING_KERNELS),
        ("context_attention", by, CONTEXT_ATTENTIONS),
    ):
        if value not in known:
            raise unknown(name, value, known)
    axis, chunks = axes[0] if len(axes) == 1 else axes, chunks_of(order)
    size = lax.axis_size(axis)
    if size == 1:
        return attend(kernel, scores, q, k, v, sinks=sinks, segments=segments)
    if q.shape[2] % k.shape[2]:
        raise RooftopError("query heads on a device", q.shape[2], f"a multiple of the {k.shape[2]} key/value heads")
    if q.shape[1] % chunks:
        raise RooftopError("sequence length on a device", q.shape[1], f"a multiple of {chunks} for {order} order")
    ring = _KeyRing(axis=axis, size=size, kernel=kernel, scores=scores, chunks=chunks)
    if by == "all_gather":
        return _gathered(ring, order, q, k, v, sinks, segments)
    arrays, tree = jax.tree.flatten((q, k, v, sinks, segments))
    q, k, v, sinks, segments = jax.tree.unflatten(tree, varying_alike(*arrays, axes=axes))
    if scores.window is not None and scores.window < q.shape[1] * size:
        return _windowed(ring, q, k, v, sinks, segments)
    return _ring_attention(ring, q, k, v, sinks, segments)


_Arrays = tuple[jax.Array, ...]
#: Arrays of each chunk of each track.
_Chunks = list[list[_Arrays]]
#: An offset that places all keys before all queries.
_ALL = 1 << 30


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A chunk of this device's queries and a chunk of keys on a track, by index; ``counts``: if the pair counts."""

    track: int
    queries: jax.Array | int
    keys: jax.Array | int
    counts: jax.Array | None

    def counts_for(self, chunk: int, index: jax.Array | int) -> jax.Array | bool:
        """If the pair counts for a chunk of queries or keys, of which the pair has the one at ``index``."""
        if not isinstance(index, int):
            return index == chunk
        return index == chunk and (True if self.counts is None else self.counts)


@dataclass(frozen=True, kw_only=True)
class _KeyRing:
    """The devices along ``axis``. Each has ``chunks`` chunks of the sequence: one, or one from either end."""

    axis: str | tuple[str, ...]
    size: int
    kernel: str
    scores: Scores
    chunks: int

    def send(self, tracks: list[_Arrays]) -> list[_Arrays]:
        """Arrays of the neighbours: the previous device's on the first track, the next device's on the second."""
        ways = ([(device, (device + way) % self.size) for device in range(self.size)] for way in (1, -1))
        return [tuple(lax.ppermute(x, self.axis, way) for x in track) for track, way in zip(tracks, ways, strict=False)]

    def pairs(self, tracks: int, hops: jax.Array | int) -> list[_Pair]:
        """Pairs to compute after keys have travelled ``hops`` hops. In each pair, all keys come before all queries."""
        here, pairs = lax.axis_index(self.axis), []
        for track in range(tracks):
            # True for keys of an earlier device, false for those that came around the ring from a later one.
            before = here + hops >= self.size if track else here >= hops
            if self.chunks == 1:
                pairs.append(_Pair(track=track, queries=0, keys=0, counts=before))
                continue
            # The first chunk of any device comes before the second chunk of any device. Also, the first chunk of an
            # earlier device comes before the first one here, and the second chunk of a later device before the second
            # one here.
            later = (~before).astype(jnp.int32)
            pairs.append(_Pair(track=track, queries=1, keys=0, counts=None))
            pairs.append(_Pair(track=track, queries=later, keys=later, counts=None))
        return pairs

    @property
    def whole(self) -> Scores:
        """The scores of such a pair: no score is masked."""
        return replace(self.scores, window=None, offset=_ALL)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(
    ring: _KeyRing, q: Queries, k: Keys, v: Values, sinks: Sinks | None, segments: TokenSegments | None
) -> Outputs:
    return _forward(ring, q, k, v, sinks, segments)[0]


_Residuals = tuple[
    jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array, jax.Array
]  # fmt: skip


def _forward(
    ring: _KeyRing, q: Queries, k: Keys, v: Values, sinks: Sinks | None, segments: TokenSegments | None
) -> tuple[Outputs, _Residuals]:
    halves, ids = _halves(k), () if segments is None else (segments,)
    queries, keys = _cut(ring, halves, q, *ids), _cut(ring, halves, k, v, *ids)

    def meet(
        merged: _Chunks, keys: list[_Arrays], hops: jax.Array | int, sent: list[_Arrays]
    ) -> tuple[_Chunks, list[_Arrays]]:
        """Merge keys that travelled ``hops`` hops into each chunk's output and log-sum-exps; also return ``sent``."""
        pairs, merged = ring.pairs(len(keys), hops), [list(track) for track in merged]
        q, *of_queries = _gather([_at(queries[p.track], p.queries) for p in pairs])
        k, v, *of_keys = _gather([_at(keys[p.track], p.keys) for p in pairs])
        results, sent = attend_block(ring.kernel, ring.whole, q, k, v, _pair_segments(of_queries, of_keys), sent)
        for pair, (o, lse) in zip(pairs, _scatter(results, len(pairs)), strict=True):
            for chunk, (before, before_lse) in enumerate(merged[pair.track]):
                counts = pair.counts_for(chunk, pair.queries)
                if counts is not False:
                    of_pair = lse if counts is True else jnp.where(counts, lse, -jnp.inf)
                    merged[pair.track][chunk] = merge(before, before_lse, o, of_pair)
        return merged, sent

    def hop(carry: tuple[_Chunks, list[_Arrays]], hops: jax.Array) -> tuple[Any, None]:
        merged, keys = carry
        return meet(merged, keys, hops, ring.send(keys)), None

    # In either order, this device's own keys are in the order of its queries.
    (o, lse), sent = attend_block(ring.kernel, ring.scores, q, k, v, _pair_segments(ids, ids), ring.send(keys))
    own = zip(_cut(ring, halves, o.astype(jnp.float32)), _cut_rows(ring, halves, lse), strict=True)
    # Chunks are arrays of their own: XLA updates them in place, and copies what it updates in a stack.
    apart = [list(zip(*o, *lse, strict=True)) for o, lse in own]
    (merged, keys), _ = lax.scan(hop, (apart, sent), jnp.arange(1, ring.size - 1))
    merged, _ = meet(merged, keys, ring.size - 1, [])
    o = _join([jnp.stack([o for o, _ in track]) for track in merged], halves)
    lse = _join([jnp.stack([lse.swapaxes(1, 2) for _, lse in track]) for track in merged], halves).swapaxes(1, 2)
    if sinks is not None:
        o, lse = add_sinks(o, lse, sinks)
    o, lse = (checkpoint_name(x, "attn_core") for x in (o.astype(q.dtype), lse))
    return o, (q, k, v, sinks, segments, o, lse)


def _backward(ring: _KeyRing, saved: _Residuals, do: Outputs) -> tuple[Queries, Keys, Values, Sinks | None, None]:
    q, k, v, sinks, segments, o, lse = saved
    halves, ids = _halves(k), () if segments is None else (segments,)
    tracks = zip(_cut(ring, halves, q), _cut(ring, halves, o, do, *ids), _cut_rows(ring, halves, lse), strict=True)
    queries, keys = [(*q, o, *lse, *rest) for q, (o, *rest), lse in tracks], _cut(ring, halves, k, v, *ids)

    def meet(
        dq: _Chunks, keys: list[_Arrays], hops: jax.Array | int, sent: list[_Arrays]
    ) -> tuple[_Chunks, list[_Arrays], list[_Arrays]]:
        """Add the derivatives through keys that travelled ``hops`` hops to the queries'; also return the keys' own."""
        pairs, dq = ring.pairs(len(keys), hops), [list(track) for track in dq]
        dkv: _Chunks = [[()] * ring.chunks for _ in keys]
        q, o, lse, do, *of_queries = _gather([_at(queries[p.track], p.queries) for p in pairs])
        k, v, *of_keys = _gather([_at(keys[p.track], p.keys) for p in pairs])
        met = _pair_segments(of_queries, of_keys)
        results, sent = block_gradients(ring.kernel, ring.whole, q, k, v, o, lse, do, met, sent)
        for pair, (for_queries, *for_keys) in zip(pairs, _scatter(results, len(pairs)), strict=True):
            of_track = ((dq[pair.track], (for_queries,), pair.queries), (dkv[pair.track], for_keys, pair.keys))
            for sums, parts, index in of_track:
                for chunk, before in enumerate(sums):
                    sums[chunk] = _add_counted(before, parts, pair.counts_for(chunk, index))
        stacked = [tuple(map(jnp.stack, zip(*track, strict=True))) for track in dkv]
        both = [track[:2] for track in keys]
        return dq, jax.tree.map(lambda derivative, key: derivative.astype(key.dtype), stacked, both), sent

    def hop(carry: tuple[_Chunks, list[_Arrays], list[_Arrays]], hops: jax.Array) -> tuple[Any, None]:
        dq, keys, travelling = carry
        dq, dkv, sent = meet(dq, keys, hops, ring.send(keys) + ring.send(travelling))
        return (dq, sent[: len(keys)], jax.tree.map(_add, sent[len(keys) :], dkv)), None

    own = _pair_segments(ids, ids)
    (dq, dk, dv), keys = block_gradients(ring.kernel, ring.scores, q, k, v, o, lse, do, own, ring.send(keys))
    track_dq: _Chunks = [[(chunk,) for chunk in track] for (track,) in _cut(ring, halves, dq.astype(jnp.float32))]
    track_dq, travelling, sent = meet(track_dq, keys, 1, ring.send(keys) if ring.size > 2 else [])
    if ring.size > 2:
        (track_dq, keys, travelling), _ = lax.scan(hop, (track_dq, sent, travelling), jnp.arange(2, ring.size - 1))
        track_dq, dkv, arrived = meet(track_dq, keys, ring.size - 1, ring.send(travelling))
        travelling = jax.tree.map(_add, arrived, dkv)
    home = ring.send(travelling)
    dk, dv = (_add(x, _join([track[index] for track in home], halves)) for index, x in enumerate((dk, dv)))
    dsinks = None if sinks is None else sink_gradients(sinks, o, lse, do)
    whole = _join([jnp.stack([chunk for (chunk,) in track]) for track in track_dq], halves)
    return whole.astype(q.dtype), dk, dv, dsinks, None


_ring_attention.defvjp(_forward, _backward)


def _halves(k: jax.Array) -> int | None:
    """The dim of [b, T, heads, ...] whose halves travel in opposite directions; None: all in one direction."""
    return next((dim for dim in (2, 0) if k.shape[dim] % 2 == 0), None)


def _pair_segments(of_queries: Sequence[jax.Array], of_keys: Sequence[jax.Array]) -> Segments | None:
    """Segments of queries and of the keys that they attend to; None without segments."""
    return (of_queries[0], of_keys[0]) if of_queries and of_keys else None


def _cut(ring: _KeyRing, halves: int | None, *arrays: jax.Array) -> list[_Arrays]:
    """Arrays [b, T, heads, ...] as one or two tracks of arrays [chunk, b, T/chunks, heads, ...].

    Arrays [b, T] have no heads: if heads are halved, both tracks get the whole array.
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


def _cut_rows(ring: _KeyRing, halves: int | None, lse: LogSums) -> list[_Arrays]:
    """Log-sum-exps as tracks of [chunk, b, heads, T/chunks]."""
    return [(x.swapaxes(2, 3),) for (x,) in _cut(ring, halves, lse.swapaxes(1, 2))]


def _join(tracks: list[jax.Array], halves: int | None) -> jax.Array:
    """The inverse of ``_cut`` for one array."""
    whole = [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in tracks]
    return whole[0] if halves is None else jnp.concatenate(whole, axis=halves)


def _at(arrays: _Arrays, chunk: jax.Array | int) -> _Arrays:
    return tuple(lax.dynamic_index_in_dim(x, chunk, keepdims=False) for x in arrays)


def _add(x: Float[Array, "*dims"], y: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """The sum, computed in float32, in the dtype of ``x``."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


def _add_counted(arrays: _Arrays, parts: Sequence[jax.Array], counts: jax.Array | bool) -> _Arrays:
    """Float32 sums of arrays and parts if these count; no arrays are zeros."""
    if counts is False:
        return arrays
    if counts is not True:
        parts = [jnp.where(counts, part, jnp.zeros_like(part)) for part in parts]
    return tuple(map(_add, arrays, parts)) if arrays else tuple(part.astype(jnp.float32) for part in parts)


def _gather(pairs: list[_Arrays]) -> _Arrays:
    """Pairs concatenated as the sequences of one batch: a kernel that is called once is compiled once."""
    return tuple(jnp.concatenate(arrays) for arrays in zip(*pairs, strict=True))


def _scatter(arrays: _Arrays, pairs: int) -> list[_Arrays]:
    return list(zip(*(jnp.split(x, pairs) for x in arrays), strict=True))


def _windowed(
    ring: _KeyRing, q: Queries, k: Keys, v: Values, sinks: Sinks | None, segments: TokenSegments | None
) -> Outputs:
    """Attention to a window that is shorter than the sequence. The keys before a chunk are sent to its device."""
    scores, chunk = ring.scores, q.shape[1] // ring.chunks
    assert scores.window is not None
    block = block_size(chunk, scores.block)
    earlier = min(next_multiple(scores.window - 1, block), (ring.chunks * ring.size - 1) * chunk)
    queries, keys, values = (jnp.split(x, ring.chunks, axis=1) for x in (q, k, v))
    ids = [] if segments is None else jnp.split(segments, ring.chunks, axis=1)
    arrived: list[list[_Arrays]] = [[arrays] for arrays in zip(keys, values, *([ids] if ids else []), strict=True)]
    for hop in range(ceil_div(earlier, chunk)):
        missing = min(earlier - hop * chunk, chunk)
        last = [tuple(x[:, chunk - missing :] for x in parts[0]) for parts in arrived]
        for parts, received in zip(arrived, _chunk_before(ring, last), strict=True):
            parts.insert(0, received)
    here = lax.axis_index(ring.axis)
    outputs = []
    for index, parts in enumerate(arrived):
        k, v, *of_keys = (jnp.concatenate(pieces, axis=1) for pieces in zip(*parts, strict=True))
        position = 2 * ring.size - 1 - here if index else here
        outputs.append(
            attend(
                ring.kernel,
                replace(scores, offset=earlier),
                queries[index],
                k,
                v,
                sinks=sinks,
                absent=jnp.maximum(earlier - position * chunk, 0),
                segments=_pair_segments(ids[index : index + 1], of_keys),
            )
        )
    return jnp.concatenate(outputs, axis=1)


def _chunk_before(ring: _KeyRing, chunks: list[_Arrays]) -> list[_Arrays]:
    """For each of this device's chunks, the same slice of the chunk that precedes it; zeros if there is none."""
    up = [(device, device + 1) for device in range(ring.size - 1)]
    before_chunks = [tuple(lax.ppermute(x, ring.axis, up) for x in chunks[0])]
    if ring.chunks == 2:
        down = [(after, before) for before, after in up]
        turn = lax.axis_index(ring.axis) == ring.size - 1
        later = (lax.ppermute(x, ring.axis, down) for x in chunks[1])
        before_chunks.append(tuple(jnp.where(turn, own, x) for own, x in zip(chunks[0], later, strict=True)))
    return before_chunks


def _gathered(
    ring: _KeyRing, order: str, q: Queries, k: Keys, v: Values, sinks: Sinks | None, segments: TokenSegments | None
) -> Outputs:
    """Attention to gathered keys: each chunk of queries gets those of its sequence that come before it."""
    scores, size, chunks = ring.scores, ring.size, ring.chunks
    chunk, here = q.shape[1] // chunks, lax.axis_index(ring.axis)
    # Index on the devices of each chunk of the sequence.
    sorted_chunks = jnp.asarray(sequence_order(size * chunks, size, order).argsort())

    def gathered(x: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, ring.axis, axis=1, tiled=True)
        apart = whole.reshape(x.shape[0], size * chunks, chunk, *x.shape[2:])
        return apart[:, sorted_chunks].reshape(whole.shape)

    keys, values = gathered(k), gathered(v)
    ids = None if segments is None else gathered(segments)
    outputs = []
    for index in range(chunks):
        # Index of this chunk in the sequence: on this device, and the largest on any device.
        position = here if index == 0 else 2 * size - 1 - here
        last = size * (index + 1) - 1
        earlier = last * chunk
        if scores.window is not None:
            block = block_size(chunk, scores.block)
            earlier = min(earlier, next_multiple(scores.window - 1, block))

        def up_to(x: jax.Array, position: jax.Array = position, earlier: int = earlier, last: int = last) -> jax.Array:
            """The chunk at ``position`` and ``earlier`` tokens before it; zeros before the start of the sequence."""
            padded = jnp.pad(x[:, : (last + 1) * chunk], ((0, 0), (earlier, 0)) + ((0, 0),) * (x.ndim - 2))
            return lax.dynamic_slice_in_dim(padded, position * chunk, earlier + chunk, axis=1)

        own = slice(index * chunk, (index + 1) * chunk)
        outputs.append(
            attend(
                ring.kernel,
                replace(scores, offset=earlier),
                q[:, own],
                up_to(keys),
                up_to(values),
                sinks=sinks,
                absent=jnp.maximum(earlier - position * chunk, 0),
                segments=None if ids is None or segments is None else (segments[:, own], up_to(ids)),
            )
        )
    return jnp.concatenate(outputs, axis=1)


ORDERS: tuple[str, ...] = ("contiguous", "zigzag")


def sequence_order(seq_len: int, devices: int, order: str) -> Int[np.ndarray, " T"]:
    """Positions [T] of the tokens, in the order in which a mesh axis of ``devices`` devices splits them.

    The axis shards ``tokens[:, sequence_order(...)]``; its argsort restores the order of outputs. Raises RooftopError
    for an unknown order, or a length that does not divide.
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
