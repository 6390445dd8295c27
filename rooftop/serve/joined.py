"""A replica over the devices of several processes, as one part of a disaggregated engine: its KV goes out whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rooftop.serve.programs import COPIED, Key
from rooftop.serve.replica import Ints, Replica


class Joined(Replica):
    """A ``Replica`` of several processes. What one that only prefills takes from its pages, each process has whole."""

    _role = "both"

    def compile(self, on_progress: Callable[[int, int], None] | None = None, *, role: str = "both") -> int:
        """See ``Replica``."""
        self._role = role
        return super().compile(on_progress, role=role)

    def _wanted(self, role: str) -> list[Key]:
        return super()._wanted(role) + ([("gather",)] if role == "prefill" else [])

    def take(self, pages: Ints) -> Sequence[jax.Array]:
        """See ``Replica``."""
        if self._role != "prefill":
            return super().take(pages)
        padded = self._put(self._padded(pages, self.pages))
        found: Sequence[jax.Array] = self._programs["gather",](self._pools, padded)
        return jax.block_until_ready(found) if self._one_at_a_time else found

    def fill(self, pages: Ints, contents: Sequence[np.ndarray[Any, Any]]) -> None:
        """``put`` of pages as ``page_parts`` has them."""
        arrays = [
            part.view(leaf.dtype).reshape(COPIED, *leaf.shape[1:])
            for part, leaf in zip(contents, self.pool_leaves, strict=True)
        ]
        self.put(pages, arrays)


def page_parts(contents: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Pages [COPIED, ...] of each pool array as bytes: a dtype such as bfloat16 has no name that NumPy knows."""
    return [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in contents]
