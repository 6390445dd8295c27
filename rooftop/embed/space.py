"""Arrays to write over and over."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGE_BLOCK = 31 << 20


class Space:
    """Arrays to write over and over: fresh ones cost more in page faults than in what is written to them."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, type[np.generic]], NDArray[Any]] = {}
        # Some calls only make fresh arrays. glibc gives freed memory back to the system, to fault in again, beyond
        # twice the largest block that was freed as yet, of those below 32 MiB: this one, of which no page is touched.
        np.empty(_LARGE_BLOCK, np.uint8)

    def take(self, name: str, count: int, dtype: type[np.generic]) -> NDArray[Any]:
        """An array of ``count`` elements, of any values, that is free until the name is asked for again."""
        found = self._arrays.get((name, dtype))
        if found is None or len(found) < count:
            found = self._arrays[name, dtype] = np.empty(count + count // 4 + 8, dtype)
        return found[:count]

    def flags(self, name: str, rows: int, count: int) -> NDArray[np.bool_]:
        """In each of ``rows``, ``count`` flags of any values and as many more as fill a word of 8, not set."""
        width = -(-count // 8) * 8
        found = self.take(name, rows * width, np.bool_).reshape(rows, width)
        found[:, count:] = False
        return found
