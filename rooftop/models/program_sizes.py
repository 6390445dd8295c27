"""Sizes that programs choose, and plans price: blocks of kernels, padded positions, rows of experts and of caches.

Sizes of a model's dims on the devices of a mesh are in ``rooftop.models.widths``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rooftop.core.ledger import Number
from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.models.config import ModelConfig, MoE

#: Elements of a row of a TPU's vector registers. The splash kernel takes positions in multiples of it.
LANES = 128
#: Rows of a TPU's vector registers. XLA:TPU rearranges arrays with another number of tokens on a device, which takes
#: longer than a layer's matmuls where D is split over fsdp: a step's tokens are a multiple of it on each device.
SUBLANES = 8
#: Pieces of the sequence on each device of a context axis: one from either end, so that causal work is balanced.
CONTEXT_CHUNKS = 2
#: Blocks of positions that the splash kernel should not have to go below where padding decides its length, in LANES.
_LEAST_BLOCK, _MOST_BLOCK = 4, 8
#: Keys in a block of the ``chunked`` attention kernel on GPUs, whose matmuls are cuBLAS's.
CHUNKED_BLOCK = 512
#: Runs of queries in ``chunked``. 8 runs compute 56 % of the scores of a long sequence; 16 would compute 53 % in a
#: program of twice the size.
RUNS = 8
#: Tokens of one page of a paged KV cache, as in the PagedAttention paper.
PAGE_TOKENS = 16


def block_size(length: int, block: int) -> int:
    """Positions in a block of an attention kernel: the largest divisor of ``length`` up to ``block``.

    It is a multiple of ``LANES`` if ``length`` is one.
    """
    step = LANES if length % LANES == 0 and block >= LANES else 1
    return max(size for size in range(step, min(block, length) + 1, step) if length % size == 0)


@dataclass(frozen=True, kw_only=True)
class KeyRun:
    """Consecutive queries of a sequence, and the keys that they are multiplied with."""

    queries: slice
    keys: slice

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs."""
        return int((self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start))


def runs(*, q_len: int, kv_len: int, window: int | None, offset: int, block: int) -> list[KeyRun]:
    """About ``RUNS`` runs of queries, one or more blocks long, each with the blocks of keys that count for it.

    Neighbours with the same keys are merged, and all queries are one run if they do not divide into blocks. A run that
    no key counts for gets one block.
    """
    rows, columns = block_size(q_len, max(block, ceil_div(q_len, RUNS))), block_size(kv_len, block)
    if q_len > 2 * RUNS * rows:
        rows = q_len
    result = list[KeyRun]()
    for start in range(0, q_len, rows):
        end, first = start + rows, start + offset
        stop = min(max((first + rows - 1) // columns + 1, 1), kv_len // columns)
        oldest = 0 if window is None else min(max(first - window + 1, 0) // columns, stop - 1)
        keys = slice(oldest * columns, stop * columns)
        if result and result[-1].keys == keys:
            start = result.pop().queries.start
        result.append(KeyRun(queries=slice(start, end), keys=keys))
    return result


def expert_rows(tokens: Number, moe: MoE, shards: Number, here: Number, width: Number) -> Any:
    """Rows of a device's experts that an engine multiplies at once in a step of ``tokens``: all, or a part of them.

    Of the pairs of a token and an expert, a device has those of ``here`` experts, one of ``shards`` parts. It takes so
    many at a time that half more than the mean, and a few, need no second pass: a multiple of the registers of each of
    the ``width`` devices that split them, which have two rows of 16 bits in a sublane. Of other rows XLA:TPU scatters
    whole registers of sums, and permutes the rest.
    """
    most = tokens * np.minimum(moe.active, here)
    often = next_multiple(np.ceil(1.5 * tokens * moe.active / shards) + 2 * SUBLANES, 2 * SUBLANES * width)
    return np.where(np.asarray(shards) > 1, np.minimum(most, often), most)


#: Most rows of a tile of quantised experts, which a TPU multiplies in about the time that it reads a matrix of 8 bits,
#: and fewest: with fewer it takes as long.
_MOST_TILE, _LEAST_TILE = 128, 32


def expert_tile(tokens: Number, moe: MoE) -> Any:
    """Rows that an engine multiplies with a quantised expert at a time in a step of ``tokens``.

    They are two standard deviations more than the mean, so that most experts are read once.
    """
    mean = tokens * moe.active / moe.experts
    rows = next_multiple(np.ceil(mean + 2.0 * np.sqrt(mean)), _LEAST_TILE)
    return np.clip(rows, _LEAST_TILE, _MOST_TILE)


#: Bytes of a cache that a TPU gathers at a time: they and the scores stay in VMEM.
GATHERED_BYTES = 48 * 2**20


def cache_row(model: ModelConfig, lanes: int, *, quantised: bool) -> tuple[int, int]:
    """Rows of a server's cache for a token and key/value head, and their elements, padding to ``lanes`` included.

    There are two rows, of a key and of a value, or one: of a latent, or of both where heads are no whole ``lanes``.
    """
    mla, size = model.mla, model.d_head
    if mla is not None:
        return 1, next_multiple(mla.kv_rank + mla.d_rope, lanes)
    return (1, next_multiple(2 * size, lanes)) if size % lanes and not quantised else (2, size)


def gathered_blocks(pages: Number, page_bytes: Number) -> Any:
    """Blocks in which a step that generates reads ``pages`` of every row, with ``page_bytes`` of all rows together."""
    return np.ceil(pages / np.maximum(1.0, np.floor(GATHERED_BYTES / page_bytes)))


def window_pages(window: int, width: int, page_tokens: int) -> int:
    """Most pages in which tokens are that ``width`` new tokens see through a ``window``."""
    return ceil_div(window + width - 2, page_tokens) + 1


def expert_sum_rows(own: Number) -> Any:
    """Rows that a ReduceScatter over experts' axes sends to a device instead of its ``own``; 0: an AllReduce has less.

    XLA:TPU scatters whole registers. Of other rows it sends as many, and then permutes them until each device has its
    own; of fewer rows than a register has it sums all.
    """
    padded = next_multiple(own, SUBLANES)
    return np.where(padded < 2 * np.asarray(own), padded, 0)


def padded_positions(seq_len: Any, *, ring: Any, residual: Any, kernel: str, chunks: int = CONTEXT_CHUNKS) -> Any:
    """Positions of a sequence with padding at its end, so that devices get equal parts: ``seq_len`` if they do anyway.

    ``ring`` devices split the sequence in attention, in ``chunks`` chunks each, and ``residual`` devices split it
    between matmuls. The splash kernel takes chunks of whole ``LANES``; where padding decides their length, it has a
    divisor of 4 to 8 ``LANES``, a block in which the kernel is fast. Whole numbers, or arrays of them that broadcast.
    """
    pieces = np.where(np.asarray(ring) > 1, chunks * np.asarray(ring), 1)
    unit = np.lcm(pieces * (LANES if kernel == "splash" else 1), residual)
    padded = next_multiple(seq_len, unit)
    if kernel != "splash":
        return padded
    lanes, step = padded // (pieces * LANES), unit // (pieces * LANES)
    for _ in range(_LEAST_BLOCK - 1):
        slow = (lanes > _MOST_BLOCK) & np.all([lanes % n != 0 for n in range(_LEAST_BLOCK, _MOST_BLOCK + 1)], axis=0)
        lanes = np.where(slow & (padded != seq_len), lanes + step, lanes)
    return lanes * pieces * LANES
