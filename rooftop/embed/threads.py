"""The same work on many things, in the caller's thread and those of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


class Threads:
    """``count`` threads, the caller's among them. Handing a thread one item is dear: each takes the next by itself."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count - 1) if count > 1 else None

    def each(
        self,
        items: Sequence[_T],
        do: Callable[[_T], _R],
        *,
        alone: bool = False,
        size: Callable[[_T], float] = lambda _: 0,
    ) -> list[_R]:
        """What ``do`` gives for each, in their order; of several errors the first item's is raised.

        ``alone``, the caller's thread does it: many short calls of NumPy wait for the interpreter's lock more than
        they gain. Those of the largest ``size`` come first, so that all threads end at about the same time.
        """
        if self._pool is None or alone:
            return [do(item) for item in items]
        found: dict[int, _R] = {}
        errors: dict[int, Exception] = {}
        turns = iter(sorted(range(len(items)), key=lambda at: -size(items[at])))

        def work() -> None:
            for at in turns:
                try:
                    found[at] = do(items[at])
                except Exception as error:
                    errors[at] = error

        others = [self._pool.submit(work) for _ in range(min(self._count, len(items)) - 1)]
        work()
        for other in others:
            other.result()
        if errors:
            raise errors[min(errors)]
        return [found[at] for at in range(len(items))]
