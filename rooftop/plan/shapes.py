"""The matmuls of an MLP as one device sees them, and the (query, key) pairs that attention executes.

Every matmul is [tokens, k] x [k, n] in the forward pass; its backward pass is dX = [tokens, n] x [n, k] and
dW = [k, tokens] x [tokens, n]. Sizes may be arrays over strategies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooftop.arrays.mesh import Floats
from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.models.attention import MatmulShape
from rooftop.models.config import ModelConfig
from rooftop.models.mixers import Recurrence, projections
from rooftop.models.program_sizes import CONTEXT_CHUNKS, block_size, runs


def require_planned(config: ModelConfig) -> None:
    """Raise RooftopError for a model with layers that plans do not price yet."""
    priced = not any(other.matmul or math.prod(other.shape) > config.d_model for other in config.others)
    if not (priced and config.mlp_matrices and config.attention_layers):
        accepted = "a model of attention, recurrent mixers, MLPs and experts: others are only counted"
        raise RooftopError("model", config.name, accepted)


def mlp_matmuls(config: ModelConfig, columns: Floats) -> tuple[list[MatmulShape], list[MatmulShape]]:
    """The matmuls into the ``columns`` of an MLP that a device has (gate and up together) and out of them."""
    d = config.d_model * np.ones_like(columns)
    return [MatmulShape(d, (config.mlp_matrices - 1) * columns)], [MatmulShape(columns, d)]


@dataclass(frozen=True, kw_only=True)
class MixerMatmuls:
    """The projections of a recurrent mixer on one device: those into its channels, between them, and out of them."""

    into: list[MatmulShape]
    inside: list[MatmulShape]
    out: list[MatmulShape]

    @classmethod
    def of(cls, kind: Recurrence, ways: Any) -> MixerMatmuls:
        """The projections with channels split over ``ways`` devices; latents of steps are whole on each."""
        into, inside, (inner, d) = projections(kind)
        one: Any = np.ones_like(np.asarray(ways, np.float64))
        shapes = []
        for k, n in inside:
            split_rows = k == inner
            shapes.append(MatmulShape(k / ways if split_rows else k * one, n * one if split_rows else n / ways))
        return cls(
            into=[MatmulShape(k * one, n / ways) for k, n in into],
            inside=shapes,
            out=[MatmulShape(inner / ways, d * one)],
        )

    @property
    def every(self) -> list[MatmulShape]:
        """All of them."""
        return self.into + self.inside + self.out


def attended_pairs(seq_len: int, window: int | None, block: int, *, chunks: int = 1) -> float:
    """(query, key) pairs of one sequence that a causal kernel executes when it skips whole blocks of ``block``.

    Block row i runs its i + 1 block columns (the diagonal block whole), less those wholly outside the window. Devices
    that split a sequence have ``chunks`` of it, each with the keys of the window before it. Their kernels are one
    program, so that the first chunk has them too, though none of them exists.
    """
    if window is not None and chunks > 1 and window < seq_len:
        chunk = seq_len // chunks
        block = block_size(chunk, block)
        before = ceil_div(window - 1, block)
        earlier = min(before, (seq_len - chunk) // block)
        return chunks * block * block * sum(min(before, earlier + row) + 1 for row in range(chunk // block))
    block = min(block, seq_len)
    rows = ceil_div(seq_len, block)
    width = rows if window is None else min(rows, ceil_div(window - 1, block) + 1)
    blocks = width * (width + 1) / 2 + (rows - width) * width
    return blocks * block * block


def run_pairs(seq_len: int, window: int | None, block: int, *, chunks: int = 1) -> float:
    """(query, key) pairs of one sequence that the ``chunked`` kernel executes in its ``runs`` of queries.

    Devices that split a sequence in ``chunks``, two each, meet their own keys in runs and whole chunks of others; those
    of a window get the keys of it before each chunk, as in ``attended_pairs``.
    """

    def pairs(q_len: int, kv_len: int, offset: int) -> int:
        counted = runs(q_len=q_len, kv_len=kv_len, window=window, offset=offset, block=block)
        return sum(run.pairs for run in counted)

    chunk = seq_len // chunks
    if chunks == 1:
        return pairs(seq_len, seq_len, 0)
    if window is not None and window < seq_len:
        earlier = min(next_multiple(window - 1, block_size(chunk, block)), seq_len - chunk)
        return chunks * pairs(chunk, earlier + chunk, earlier)
    devices = chunks // CONTEXT_CHUNKS
    own, others = pairs(seq_len // devices, seq_len // devices, 0), (devices - 1) * CONTEXT_CHUNKS * chunk * chunk
    return devices * (own + others)


def _layer_pairs(
    config: ModelConfig, seq_len: int, window: int | None, block: int, chunks: int, in_runs: bool
) -> float:
    """``attended_pairs``, or ``run_pairs``, of one layer: of whole chunks, where the model attends in chunks."""
    counted = run_pairs if in_runs else attended_pairs
    if window is None or not config.windows_chunked or window >= seq_len:
        return counted(seq_len, window, block, chunks=chunks)
    return seq_len / window * counted(window, None, block)


def full_attention_share(
    config: ModelConfig, seq_len: int, block: int, *, chunks: int = 1, in_runs: bool = False
) -> float:
    """Share of ``mean_attended_pairs`` in layers without a window."""
    windows = config.layer_windows or (None,)
    whole = run_pairs(seq_len, None, block, chunks=chunks) if in_runs else attended_pairs(seq_len, None, block)
    full = windows.count(None) / len(windows) * whole
    return full / mean_attended_pairs(config, seq_len, block, chunks=chunks, in_runs=in_runs)


def mean_attended_pairs(
    config: ModelConfig, seq_len: int, block: int, *, chunks: int = 1, in_runs: bool = False
) -> float:
    """Executed pairs per sequence in ``chunks``, averaged over layers (some of which may be windowed).

    ``in_runs``: those of ``run_pairs``.
    """
    windows = config.layer_windows or (None,)
    return sum(_layer_pairs(config, seq_len, window, block, chunks, in_runs) for window in windows) / len(windows)
