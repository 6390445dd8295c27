"""Buffers that SparseCores read: partitions of ids, padding and row pointers.

A buffer has one row per source SparseCore (with minibatching one row per device, its SparseCores one after another). A
row holds the ids for destination 0, then those for destination 1, and so on. Each of these *partitions* is padded to a
multiple of 8; its row pointer is the end of its ids, before the padding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from rooftop.models.embedding_tables.stacking import ALIGNMENT

#: Padding: no row, no sample, not a number.
NO_ID = np.int32(2**31 - 1)
NO_GAIN = np.float32(np.nan)


class Buffers(NamedTuple):
    """Buffers of one stack for the local devices.

    Dims: row_pointers [devices, row pointers of a device] int32, relative to the buffer's row; embedding_ids (local
    rows) and sample_ids (rows of activations of the source) int32, gains float32, each [devices, capacity]. Everything
    after the ids is padding. ``filled`` [rows] int64 is where the padding to the end of each row begins.
    """

    row_pointers: Int32[np.ndarray, "devices pointers"]
    embedding_ids: Int32[np.ndarray, "devices n"]
    sample_ids: Int32[np.ndarray, "devices n"]
    gains: Float32[np.ndarray, "devices n"]
    filled: Int64[np.ndarray, " rows"]

    @classmethod
    def empty(cls, *, devices: int, rows: int, capacity: int, pointers: int) -> Buffers:
        """Buffers without ids: ``rows`` of ``capacity`` ids and ``pointers`` row pointers for each device."""
        return cls(
            row_pointers=np.zeros((devices, pointers), np.int32),
            embedding_ids=np.full((devices, rows * capacity), NO_ID),
            sample_ids=np.full((devices, rows * capacity), NO_ID),
            gains=np.full((devices, rows * capacity), NO_GAIN),
            filled=np.zeros(devices * rows, np.int64),
        )

    def rows(self, first: int, last: int) -> Buffers:
        """Views of rows ``first`` to ``last`` (exclusive): arrays of dims [rows, ...]."""
        count = len(self.filled)
        return Buffers(
            row_pointers=self.row_pointers.reshape(count, -1)[first:last],
            embedding_ids=self.embedding_ids.reshape(count, -1)[first:last],
            sample_ids=self.sample_ids.reshape(count, -1)[first:last],
            gains=self.gains.reshape(count, -1)[first:last],
            filled=self.filled[first:last],
        )


def padded(sizes: Int64[np.ndarray, "*dims"]) -> Int64[np.ndarray, "*dims"]:
    """Sizes of partitions with their padding."""
    # ALIGNMENT is a power of two.
    return (sizes + (ALIGNMENT - 1)) & -ALIGNMENT
