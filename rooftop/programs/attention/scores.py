"""What attention kernels compute: which scores count, how many of them a kernel makes, and what that costs.

Dims as in ``rooftop.programs.attention.attend``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rooftop.capabilities import LANES
from rooftop.roofline.achievable import KERNEL_MATMULS

#: Queries and keys in a block of a kernel: the block for which docs/achievable.md prices the TPU kernels.
BLOCK = 1024

#: Runs of queries in ``chunked``. Of the scores of a long sequence 16 would compute 53 %, 8 compute 56 %, in half the
#: program.
RUNS = 8
#: The kernels of a forward and of a backward pass; 'bwd' makes dQ, dK and dV at once.
_PASSES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reference": (("fwd",), ("bwd",)),
    "chunked": (("fwd",), ("bwd",)),
    "splash": (("fwd",), ("dq", "dkv")),
    "cudnn": (("fwd",), ("bwd",)),
}


#: The segments of queries [b, T] and of keys [b, S], int32 and not negative: those of one segment meet each other.
Segments = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores are made of queries and keys, and which of them count.

    A score is ``scale`` times q.k, capped to c tanh(score/c) with c = ``softcap``. Query i and key j count when
    0 <= i + ``offset`` - j < ``window`` (None: no limit): the first query stands ``offset`` positions after the first
    key. ``block`` is the most queries and keys that a kernel takes at a time.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    offset: int = 0
    block: int = BLOCK

    def mask(
        self, queries: jax.Array, keys: jax.Array, absent: jax.Array | None, segments: Segments | None
    ) -> jax.Array:
        """Which of these queries and keys count, by their indices; the first ``absent`` keys do not.

        [T, S]; with ``segments``, [b, 1, 1, T, S].
        """
        behind = queries[:, None] + self.offset - keys
        seen = behind >= 0
        if self.window is not None:
            seen &= behind < self.window
        if absent is not None:
            seen &= keys >= absent
        if segments is None:
            return seen
        of_queries, of_keys = segments
        return seen & (of_queries[:, :, None] == of_keys[:, None, :])[:, None, None]

    def logits(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Capped scores [b, k, g, T, S] float32 of queries [b, T, k, g, H] and keys [b, S, k, H], none masked."""
        return self.scaled(jnp.einsum("btkgh,bskh->bkgts", queries, keys, preferred_element_type=jnp.float32))

    def scaled(self, products: jax.Array) -> jax.Array:
        """Capped scores of products of queries and keys, of any shape."""
        found = products * self.scale
        return found if self.softcap is None else self.softcap * jnp.tanh(found / self.softcap)


def kernel_flops(
    kernel: str,
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    heads: int,
    d_qk: int,
    d_v: int,
    window: int | None = None,
    offset: int = 0,
    block: int = BLOCK,
    backward: bool = False,
) -> float:
    """FLOPs that a kernel's forward or backward pass executes for ``heads`` query heads of ``batch`` sequences.

    Those of whole blocks; blocks that are skipped are not counted. ``reference`` skips none; its matmuls and those of
    ``chunked`` are visible to XLA. With two kernels a backward pass computes the scores twice, and takes 7 matmuls.
    """
    pairs = executed_pairs(kernel, q_len=q_len, kv_len=kv_len, window=window, offset=offset, block=block)
    return float(sum(_flops(each, batch * heads * pairs, d_qk, d_v) for each in _PASSES[kernel][backward]))


def executed_pairs(kernel: str, *, q_len: int, kv_len: int, window: int | None, offset: int, block: int) -> int:
    """(query, key) pairs of one head whose scores a kernel computes.

    All of them for ``reference``, those of ``runs`` for ``chunked``, else those of every block with a pair that counts.
    """
    if kernel == "reference":
        return q_len * kv_len
    if kernel == "chunked":
        found = runs(q_len=q_len, kv_len=kv_len, window=window, offset=offset, block=block)
        return sum(run.pairs for run in found)
    rows, columns = block_size(q_len, block), block_size(kv_len, block)
    first = np.arange(0, q_len, rows) + offset
    newest = np.minimum((first + rows - 1) // columns, kv_len // columns - 1)
    oldest = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0) // columns
    return int(np.maximum(newest - oldest + 1, 0).sum()) * rows * columns


@dataclass(frozen=True, kw_only=True)
class KeyRun:
    """Queries that one after the other stand in a sequence, and the keys that they are held against."""

    queries: slice
    keys: slice

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key."""
        return (self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start)


def runs(*, q_len: int, kv_len: int, window: int | None, offset: int, block: int) -> list[KeyRun]:
    """Queries in about ``RUNS`` runs of one or more blocks, each with the blocks of keys from its oldest to its newest.

    Neighbours with the same keys are one run, and so are all queries if they do not divide into blocks. A run for whom
    no key counts gets a block all the same.
    """
    rows, columns = block_size(q_len, max(block, -(-q_len // RUNS))), block_size(kv_len, block)
    if q_len > 2 * RUNS * rows:
        rows = q_len
    found = list[KeyRun]()
    for start in range(0, q_len, rows):
        end, first = start + rows, start + offset
        stop = min(max((first + rows - 1) // columns + 1, 1), kv_len // columns)
        oldest = 0 if window is None else min(max(first - window + 1, 0) // columns, stop - 1)
        keys = slice(oldest * columns, stop * columns)
        if found and found[-1].keys == keys:
            start = found.pop().queries.start
        found.append(KeyRun(queries=slice(start, end), keys=keys))
    return found


def block_size(length: int, block: int) -> int:
    """The largest size up to ``block`` into which ``length`` divides; in whole registers of 128 where it is such."""
    step = LANES if length % LANES == 0 and block >= LANES else 1
    return max(size for size in range(step, min(block, length) + 1, step) if length % size == 0)


def kernel_scope(flops: Mapping[str, float]) -> AbstractContextManager[None]:
    """The named scope that declares the FLOPs of the kernels called in it, by a word of their names."""
    return jax.named_scope("kernel_flops[" + ",".join(f"{name}={round(flops[name])}" for name in flops) + "]")


def varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays as varying over every mesh axis that any of them varies over, so that gradients are summed outside."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset[str]().union(*varying)
    return [lax.pcast(x, tuple(union - had), to="varying") for x, had in zip(arrays, varying, strict=True)]


def _flops(name: str, pairs: float, d_qk: int, d_v: int) -> float:
    of_qk, of_v = KERNEL_MATMULS[name]
    return 2.0 * pairs * (of_qk * d_qk + of_v * d_v)


def declared(kernel: str, scores: Scores, q: jax.Array, v: jax.Array) -> AbstractContextManager[None]:
    """The scope for the kernels of both passes, which inherit it from the forward one."""
    (batch, q_len, heads, d_qk), (_, kv_len, _, d_v) = q.shape, v.shape
    window, offset, block = scores.window, scores.offset, scores.block
    pairs = executed_pairs(kernel, q_len=q_len, kv_len=kv_len, window=window, offset=offset, block=block)
    names = (name for names in _PASSES[kernel] for name in names)
    return kernel_scope({name: _flops(name, batch * heads * pairs, d_qk, d_v) for name in names})


def merge(o: jax.Array, lse: jax.Array, other: jax.Array, other_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention to two sets of keys from attention to each: o [b, T, n, d_v] float32 and lse [b, n, T], finite."""
    both = jnp.logaddexp(lse, other_lse)
    # A query without keys may come with any output.
    other = jnp.where(jnp.isneginf(_by_query(other_lse)), 0.0, other.astype(jnp.float32))
    return o * _by_query(jnp.exp(lse - both)) + other * _by_query(jnp.exp(other_lse - both)), both


def add_sinks(o: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sinks [n] joined to the denominators of o [b, T, n, d_v], whose log-sum-exps are lse [b, n, T]."""
    both = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
    return (o * _by_query(jnp.exp(lse - both))).astype(o.dtype), both


def sink_gradients(sinks: jax.Array, o: jax.Array, lse: jax.Array, do: jax.Array) -> jax.Array:
    """The derivative of sinks [n], from what ``add_sinks`` returned and the derivative of its output."""
    share = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    return -jnp.einsum("bnt,btnh,btnh->n", share, o.astype(jnp.float32), do.astype(jnp.float32)).astype(sinks.dtype)


def _by_query(lse: jax.Array) -> jax.Array:
    """[b, n, T] as a factor of outputs [b, T, n, d_v]."""
    return lse.swapaxes(1, 2)[..., None]
