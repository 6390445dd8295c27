"""The order of a sequence that is split over a mesh axis, its ``context``: which tokens each device has.

For ring attention (``rooftop.programs.ring_attention``) this decides how even the work is (T tokens in all, n devices,
no window):

- ``contiguous``: the T/n tokens after those of the device before. Nothing else of a model has to know. But what a
  device has none of to do (keys from later tokens) it computes too and discards, since the last device must do it and
  the ring waits for that one: n - 1 whole blocks of (T/n)**2 scores and a triangle, where the mean of what counts is
  (n - 1)/2 and a triangle. That is twice the time of an even split, less a little.
- ``zigzag``: chunk i and chunk 2n - 1 - i of 2n. Each device then computes two whole pairs of chunks on each hop, none
  of them masked: half of the above, and even. Tokens, targets and positions must be in that order
  (``sequence_order``).
"""

from __future__ import annotations

import numpy as np

from rooftop.errors import RooftopError, unknown

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
    """Chunks of the sequence that each device has."""
    return 2 if order == "zigzag" else 1
