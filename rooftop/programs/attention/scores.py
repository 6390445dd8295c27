"""The scores of attention kernels: which of them count, how many a kernel computes, and their FLOPs.

Dims as in ``rooftop.programs.attention.attend``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from rooftop.models import ModelConfig
from rooftop.models.program_sizes import block_size, runs
from rooftop.roofline.achievable import KERNEL_MATMULS

#: Queries and keys in a block of a kernel: the block for which docs/evidence/achievable.md prices the TPU kernels.
BLOCK = 1024

#: The kernels of a forward and of a backward pass; 'bwd' computes dQ, dK and dV at once.
_PASSES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reference": (("fwd",), ("bwd",)),
    "chunked": (("fwd",), ("bwd",)),
    "splash": (("fwd",), ("dq", "dkv")),
    "cudnn": (("fwd",), ("bwd",)),
}


Queries: TypeAlias = Float[Array, "b T n H"]
Keys: TypeAlias = Float[Array, "b S k H"]
Values: TypeAlias = Float[Array, "b S k d_v"]
Outputs: TypeAlias = Float[Array, "b T n d_v"]
WideOutputs: TypeAlias = Float32[Array, "b T n d_v"]
#: Log-sum-exps of the scores of each query.
LogSums: TypeAlias = Float32[Array, "b n T"]
#: Logits that join the denominator of the softmax without a value.
Sinks: TypeAlias = Float[Array, " n"]
#: The number of keys, from the first one on, that do not exist (None: all do). Devices may differ in it.
Absent: TypeAlias = Int[Array, ""] | None
#: Segments that are not negative: a query attends to keys of its own segment. Of the queries, or of both.
TokenSegments: TypeAlias = Int[Array, "b T"]
Segments: TypeAlias = tuple[TokenSegments, Int[Array, "b S"]]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Parameters of the scores of queries and keys, and of their mask.

    A score is ``scale`` times q.k, capped to c tanh(score/c) with c = ``softcap``. Query i and key j count when
    0 <= i + ``offset`` - j < ``window`` (None: no limit): the first query is ``offset`` positions after the first key.
    ``block`` is the largest number of queries and keys that a kernel processes at a time.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    offset: int = 0
    block: int = BLOCK

    @classmethod
    def of(cls, model: ModelConfig, window: int | None, block: int = BLOCK) -> Scores:
        """The scores of a layer of ``model`` with this window."""
        scale = model.d_head**-0.5 if model.query_scale is None else model.query_scale
        return cls(scale=float(scale), window=window, softcap=model.attn_softcap, block=block)

    def seen(self, distance: Int[Array, "*dims"]) -> Bool[Array, "*dims"]:
        """True for keys that count, by their distance before the query."""
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)

    def mask(
        self, queries: Int[Array, " T"], keys: Int[Array, " S"], absent: Absent, segments: Segments | None
    ) -> Bool[Array, "*b T S"]:
        """Mask of the queries and keys that count, given by index; the first ``absent`` keys do not exist.

        [T, S]; with ``segments``, [b, 1, 1, T, S].
        """
        seen = self.seen(queries[:, None] + self.offset - keys)
        if absent is not None:
            seen &= keys >= absent
        if segments is None:
            return seen
        of_queries, of_keys = segments
        return seen & (of_queries[:, :, None] == of_keys[:, None, :])[:, None, None]

    def pairs(
        self,
        q: Float[Array, "b T k g H"],
        k: Keys,
        queries: Int[Array, " T"],
        keys: Int[Array, " S"],
        absent: Absent,
        segments: Segments | None,
    ) -> tuple[Float32[Array, "b k g T S"], Bool[Array, "*b T S"]]:
        """Capped scores of all pairs of queries and keys, and the ``mask`` of those that count."""
        mask = self.mask(queries, keys, absent, segments)
        return self.scaled(jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)), mask

    def scaled(self, products: Float32[Array, "*dims"]) -> Float32[Array, "*dims"]:
        """Capped scores of products of queries and keys."""
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def product_gradients(
        self, gradients: Float32[Array, "*dims"], scores: Float32[Array, "*dims"]
    ) -> Float32[Array, "*dims"]:
        """Gradients of the products of queries and keys, from the ``gradients`` of their capped ``scores``."""
        gradients = gradients * self.scale
        return gradients if self.softcap is None else gradients * (1 - jnp.square(scores / self.softcap))


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
    """FLOPs of a kernel's forward or backward pass for ``heads`` query heads of ``batch`` sequences.

    Whole blocks count in full, skipped blocks do not count. ``reference`` skips none. XLA sees the matmuls of
    ``reference`` and ``chunked``. With two backward kernels the scores are computed twice, which makes 7 matmuls.
    """
    pairs = executed_pairs(kernel, q_len=q_len, kv_len=kv_len, window=window, offset=offset, block=block)
    return float(sum(_flops(name, batch * heads * pairs, d_qk, d_v) for name in _PASSES[kernel][backward]))


def executed_pairs(kernel: str, *, q_len: int, kv_len: int, window: int | None, offset: int, block: int) -> int:
    """(query, key) pairs of one head whose scores a kernel computes.

    All pairs for ``reference``, those of ``runs`` for ``chunked``, and those of every block that is not fully masked
    for the other kernels.
    """
    if kernel == "reference":
        return q_len * kv_len
    if kernel == "chunked":
        return sum(run.pairs for run in runs(q_len=q_len, kv_len=kv_len, window=window, offset=offset, block=block))
    rows, columns = block_size(q_len, block), block_size(kv_len, block)
    first = np.arange(0, q_len, rows) + offset
    newest = np.minimum((first + rows - 1) // columns, kv_len // columns - 1)
    oldest = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0) // columns
    return int(np.maximum(newest - oldest + 1, 0).sum()) * rows * columns


def kernel_scope(flops: Mapping[str, float]) -> AbstractContextManager[None]:
    """The named scope that declares the FLOPs of the kernels called inside it, keyed by a word of their names."""
    return jax.named_scope("kernel_flops[" + ",".join(f"{name}={round(flops[name])}" for name in flops) + "]")


def _flops(name: str, pairs: float, d_qk: int, d_v: int) -> float:
    of_qk, of_v = KERNEL_MATMULS[name]
    return 2.0 * pairs * (of_qk * d_qk + of_v * d_v)


def declared(kernel: str, scores: Scores, q: Queries, v: Values) -> AbstractContextManager[None]:
    """The scope for the kernels of both passes: the backward pass inherits it from the forward pass."""
    (batch, q_len, heads, d_qk), (_, kv_len, _, d_v) = q.shape, v.shape
    window, offset, block = scores.window, scores.offset, scores.block
    pairs = executed_pairs(kernel, q_len=q_len, kv_len=kv_len, window=window, offset=offset, block=block)
    names = (name for names in _PASSES[kernel] for name in names)
    return kernel_scope({name: _flops(name, batch * heads * pairs, d_qk, d_v) for name in names})


def merge(o: WideOutputs, lse: LogSums, other: Outputs, other_lse: LogSums) -> tuple[WideOutputs, LogSums]:
    """Attention to two sets of keys, from attention to each set; lse is finite."""
    both = jnp.logaddexp(lse, other_lse)
    # The output of a query without keys is arbitrary.
    other = jnp.where(jnp.isneginf(_by_query(other_lse)), 0.0, other.astype(jnp.float32))
    return o * _by_query(jnp.exp(lse - both)) + other * _by_query(jnp.exp(other_lse - both)), both


def add_sinks(o: Outputs, lse: LogSums, sinks: Sinks) -> tuple[Outputs, LogSums]:
    """Add ``sinks`` to the denominators of the outputs o, whose log-sum-exps are lse."""
    both = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
    return (o * _by_query(jnp.exp(lse - both))).astype(o.dtype), both


def sink_gradients(sinks: Sinks, o: Outputs, lse: LogSums, do: Outputs) -> Sinks:
    """The derivative of sinks, from the results of ``add_sinks`` and the derivative of its output."""
    share = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    return -jnp.einsum("bnt,btnh,btnh->n", share, o.astype(jnp.float32), do.astype(jnp.float32)).astype(sinks.dtype)


def _by_query(lse: LogSums) -> Float32[Array, "b T n 1"]:
    """Values per query as a factor of outputs."""
    return lse.swapaxes(1, 2)[..., None]
