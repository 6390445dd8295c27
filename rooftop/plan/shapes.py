"""The matmuls of a layer as one device sees them, and the tokens that attention pairs up.

Every matmul is [tokens, k] x [k, n] in the forward pass; its backward pass is dX = [tokens, n] x [n, k] and
dW = [k, tokens] x [tokens, n]. Sizes may be arrays over strategies: ``tensor`` splits heads and hidden columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rooftop.arrays.mesh import Floats
from rooftop.models.config import ModelConfig


@dataclass(frozen=True)
class MatmulShape:
    """One weight matrix on one device after its gather: [k, n], and how many such (a gate beside an up)."""

    k: Floats
    n: Floats

    @property
    def parameters(self) -> Floats:
        """Elements of the gathered weight."""
        return self.k * self.n


@dataclass(frozen=True, kw_only=True)
class AttentionMatmuls:
    """The projections of a layer's attention on one device.

    ``latent`` are the down-projections of MLA, which each device computes for its own part of the sequence; ``into``
    make queries, keys and values for its own heads, ``out`` adds up what its heads found.
    """

    latent: tuple[MatmulShape, ...]
    into: tuple[MatmulShape, ...]
    out: tuple[MatmulShape, ...]

    @property
    def every(self) -> tuple[MatmulShape, ...]:
        """All of them."""
        return self.latent + self.into + self.out


def attention_matmuls(config: ModelConfig, tensor: Floats) -> AttentionMatmuls:
    """The projections into attention and out of it, heads split over ``tensor``.

    Key and value heads are copied where there are fewer of them than ways. The down-projections of MLA have no heads:
    every device has them whole.
    """
    d, one = float(config.d_model), np.ones_like(tensor)
    heads = config.heads / tensor
    if config.mla is not None:
        mla = config.mla
        queries = heads * (mla.d_nope + mla.d_rope)
        latent = [MatmulShape(d * one, (mla.kv_rank + mla.d_rope) * one)]
        into = [MatmulShape(mla.kv_rank * one, heads * (mla.d_nope + mla.d_v))]
        if mla.q_rank is None:
            into.append(MatmulShape(d * one, queries))
        else:
            latent.append(MatmulShape(d * one, mla.q_rank * one))
            into.append(MatmulShape(mla.q_rank * one, queries))
        return AttentionMatmuls(latent=tuple(latent), into=tuple(into), out=(MatmulShape(heads * mla.d_v, d * one),))
    kv_heads = np.maximum(config.kv_heads / tensor, 1.0)
    into = [MatmulShape(d * one, (heads + 2 * kv_heads) * config.d_head)]
    return AttentionMatmuls(latent=(), into=tuple(into), out=(MatmulShape(heads * config.d_head, d * one),))


def mlp_matmuls(config: ModelConfig, hidden: float, tensor: Floats) -> tuple[list[MatmulShape], list[MatmulShape]]:
    """The matmuls into an MLP of ``hidden`` columns (gate and up together) and out of it."""
    d, columns = config.d_model * np.ones_like(tensor), hidden / tensor
    return [MatmulShape(d, (config.mlp_matrices - 1) * columns)], [MatmulShape(columns, d)]


def parameters(matmuls: Iterable[MatmulShape]) -> Floats:
    """Elements of all the weights together."""
    total: Floats = sum((m.parameters for m in matmuls), np.zeros(()))
    return total


def attention_head_sizes(config: ModelConfig) -> tuple[int, int]:
    """Head size of queries and keys, and of values."""
    if config.mla is not None:
        return config.mla.d_nope + config.mla.d_rope, config.mla.d_v
    return config.d_head, config.d_head


def attended_pairs(seq_len: int, window: int | None, block: int) -> float:
    """(query, key) pairs of one sequence that a causal kernel executes when it skips whole blocks of ``block``.

    Block row i runs its i + 1 block columns (the diagonal block whole), less those wholly outside the window.
    """
    block = min(block, seq_len)
    rows = -(-seq_len // block)
    width = rows if window is None else min(rows, -(-(window - 1) // block) + 1)
    blocks = width * (width + 1) / 2 + (rows - width) * width
    return blocks * block * block


def mean_attended_pairs(config: ModelConfig, seq_len: int, block: int) -> float:
    """Executed pairs per sequence, averaged over layers (some of which may be windowed)."""
    windows = config.layer_windows or (None,)
    return sum(attended_pairs(seq_len, window, block) for window in windows) / len(windows)
