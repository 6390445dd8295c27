"""The matmuls of an MLP as one device sees them, and the (query, key) pairs that attention executes.

Every matmul is [tokens, k] x [k, n] in the forward pass; its backward pass is dX = [tokens, n] x [n, k] and
dW = [k, tokens] x [tokens, n]. Sizes may be arrays over strategies.
"""

from __future__ import annotations

import numpy as np

from rooftop.arrays.mesh import Floats
from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.models.attention import MatmulShape
from rooftop.models.config import ModelConfig


def require_planned(config: ModelConfig) -> None:
    """Raise RooftopError for a model with layers that plans do not price yet."""
    if config.mixers or config.others or not config.mlp_matrices:
        raise RooftopError(
            "model", config.name, "a model whose layers are attention and an MLP: others are only counted"
        )


def mlp_matmuls(config: ModelConfig, columns: Floats) -> tuple[list[MatmulShape], list[MatmulShape]]:
    """The matmuls into the ``columns`` of an MLP that a device has (gate and up together) and out of them."""
    d = config.d_model * np.ones_like(columns)
    return [MatmulShape(d, (config.mlp_matrices - 1) * columns)], [MatmulShape(columns, d)]


def attended_pairs(seq_len: int, window: int | None, block: int) -> float:
    """(query, key) pairs of one sequence that a causal kernel executes when it skips whole blocks of ``block``.

    Block row i runs its i + 1 block columns (the diagonal block whole), less those wholly outside the window.
    """
    block = min(block, seq_len)
    rows = ceil_div(seq_len, block)
    width = rows if window is None else min(rows, ceil_div(window - 1, block) + 1)
    blocks = width * (width + 1) / 2 + (rows - width) * width
    return blocks * block * block


def full_attention_share(config: ModelConfig, seq_len: int, block: int) -> float:
    """Share of ``mean_attended_pairs`` in layers without a window."""
    windows = config.layer_windows or (None,)
    full = windows.count(None) / len(windows) * attended_pairs(seq_len, None, block)
    return full / mean_attended_pairs(config, seq_len, block)


def mean_attended_pairs(config: ModelConfig, seq_len: int, block: int) -> float:
    """Executed pairs per sequence, averaged over layers (some of which may be windowed)."""
    windows = config.layer_windows or (None,)
    return sum(attended_pairs(seq_len, window, block) for window in windows) / len(windows)
