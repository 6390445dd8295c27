"""Pages of a KV cache with reference counts: who holds which page, and what is free.

After Kwon et al. 2023, Efficient Memory Management for Large Language Model Serving with PagedAttention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PagePool:
    """``size`` pages, numbered from ``first``. Each is free, in use (by one sequence or several), or idle.

    An idle page is kept by a prefix cache and used by no sequence: it can be had by evicting it.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first
        self.idle = 0
        self._end = first + size
        #: Pages given back. Pages that were never taken are in no list: a large slice has hundreds of millions.
        self._free: list[int] = []
        # Those before the first one are others', and never taken here.
        self._users = [0] * first
        self._kept = bytearray(first)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + self._end - len(self._users)

    @property
    def available(self) -> int:
        """Pages that can be had: free ones and those that a prefix cache would give up."""
        return len(self._free) + self._end - len(self._users) + self.idle

    @property
    def used(self) -> int:
        """Pages that sequences hold; a shared page counts once."""
        return len(self._users) - self.first - len(self._free) - self.idle

    def users(self, page: int) -> int:
        """How many sequences hold ``page``."""
        return self._users[page] if page < len(self._users) else 0

    def take(self, count: int) -> list[int]:
        """``count`` free pages, each held once. The caller has made sure that they are free."""
        cut = max(0, len(self._free) - count)
        taken = self._free[cut:]
        del self._free[cut:]
        for page in taken:
            self._users[page] = 1
        more = count - len(taken)
        if more:
            first = len(self._users)
            if first + more > self._end:
                raise IndexError(f"{count} pages, and {len(taken) + self._end - first} are free")
            self._users += [1] * more
            self._kept += bytes(more)
            taken += range(first, first + more)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more sequence holds ``pages``, which are in use or idle."""
        for page in pages:
            if not self._users[page]:
                self.idle -= 1
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One sequence fewer holds ``pages``; those that none holds are free, or idle if a prefix cache keeps them."""
        users, kept = self._users, self._kept
        for page in pages:
            users[page] -= 1
            if not users[page]:
                if kept[page]:
                    self.idle += 1
                else:
                    self._free.append(page)

    def keep(self, pages: Iterable[int]) -> None:
        """A prefix cache keeps ``pages``, which are in use, beyond their users."""
        for page in pages:
            self._kept[page] = 1

    def evict(self, pages: Sequence[int]) -> None:
        """The prefix cache gives up ``pages``, which are idle: they are free."""
        self.idle -= len(pages)
        for page in pages:
            self._kept[page] = 0
        self._free.extend(pages)
