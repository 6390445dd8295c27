"""A prefix cache: a radix trie over pages of KV, the least recently used given up first, with a tier in host memory.

A page is known by its key: a hash (or any other value) that stands for the tokens of the page *and of all before it*.
A node of the trie is a run of pages with no branch; all pages of a node are in the same tier. Below a page in host
memory there are only pages in host memory, and whoever uses a page uses all pages before it: so the idle pages (which
no sequence uses) can always be had, leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

Keys = tuple[Hashable, ...]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Pages copied, ``source[i]`` to ``target[i]``: out of HBM into the host's memory, or back."""

    to_host: bool
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Node:
    """A run of pages: their keys, where they lie (in ``pool``), when last used."""

    keys: Keys
    pages: list[int]
    pool: PagePool
    parent: _Node | None
    used_at: int = 0
    children: dict[Hashable, _Node] = field(default_factory=dict)
    device_children: int = 0
    #: The tier among whose leaves it is queued to be given up.
    queued: PagePool | None = None


class PrefixCache:
    """The trie, over the pages of ``device`` and, when these are needed for something else, of ``host``."""

    def __init__(self, device: PagePool, host: PagePool) -> None:
        self._device, self._host = device, host
        self._root = _Node((), [], device, None)
        self._uses = 0
        self._entries = 0
        #: Leaves by last use, per tier; of those that have been used since, by an earlier use.
        self._leaves: dict[PagePool, list[tuple[int, int, _Node]]] = {device: [], host: []}

    def match(self, keys: Keys) -> int:
        """Number of cached pages of a prompt with ``keys``, in either tier. Changes nothing; routing calls it."""
        return sum(common for _, common in self._walk(keys))

    def find(self, keys: Keys) -> tuple[list[int], list[int]]:
        """The pages of the longest prefix that is here, in HBM and after them in the host's memory: used now."""
        on_device, on_host = list[int](), list[int]()
        for node in self.touch(keys):
            (on_device if node.pool is self._device else on_host).extend(node.pages)
        return on_device, on_host

    def touch(self, keys: Keys) -> list[_Node]:
        """Note that the longest prefix that is here is used now; its nodes, which end where the prefix ends."""
        path = list(self._walk(keys))
        self._uses += 1
        for node, common in path:
            if common < len(node.keys):
                node = self._split(node, common)
                path[-1] = (node, common)
            node.used_at = self._uses
            # Of a path into the host's memory two are leaves of their tiers.
            self._push(node)
        return [node for node, _ in path]

    def insert(self, keys: Keys, pages: Sequence[int]) -> list[int]:
        """Keep ``pages``, which a sequence holds; returns the pages that it holds instead.

        Where the same content is here already, the sequence gives up its own copy for the one that is here.
        """
        pages_now = list(pages)
        done = 0
        parent = self._root
        for node in self.touch(keys):
            own = pages_now[done : done + len(node.keys)]
            if node.pool is self._host:
                node.pool.evict(node.pages)
                node.pages, node.pool = own, self._device
                self._device.keep(own)
                parent.device_children += 1
            elif node.pages != own:
                self._device.share(node.pages)
                self._device.release(own)
                pages_now[done : done + len(node.keys)] = node.pages
            done += len(node.keys)
            parent = node
        if done < len(keys):
            rest = _Node(keys[done:], pages_now[done:], self._device, parent, self._uses)
            self._device.keep(rest.pages)
            parent.children[rest.keys[0]] = rest
            parent.device_children += 1
            parent = rest
        self._push(parent)
        return pages_now

    def evict(self, count: int) -> list[Copy]:
        """Free ``count`` idle pages of HBM, the least recently used; returns what is to be copied to the host."""
        copies: list[Copy] = []
        while count > 0:
            node = self._oldest(self._device)
            idle = 0
            for page in reversed(node.pages):
                if idle == count or self._device.users(page):
                    break
                idle += 1
            count -= idle
            if idle < len(node.pages):
                self._split(node, len(node.pages) - idle)
            copies += self._demote(node)
        return copies

    def evict_host(self, count: int) -> None:
        """Free ``count`` idle pages of the host's memory, the least recently used."""
        while count > 0:
            node = self._oldest(self._host)
            cut = max(0, len(node.pages) - count)
            count -= len(node.pages) - cut
            if cut:
                self._host.evict(node.pages[cut:])
                node.pages, node.keys = node.pages[:cut], node.keys[:cut]
                self._push(node)
            else:
                self._remove(node)

    def _walk(self, keys: Keys) -> Iterator[tuple[_Node, int]]:
        """The nodes along ``keys`` and how many keys each has in common with them; only the last may have fewer."""
        node, start, end = self._root, 0, len(keys)
        while start < end:
            child = node.children.get(keys[start])
            if child is None:
                return
            common = _common(child.keys, keys[start : start + len(child.keys)])
            yield child, common
            if common < len(child.keys):
                return
            node, start = child, start + common

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut ``node`` before its page ``at``; it remains the lower part. Returns the upper."""
        parent = _parent(node)
        upper = _Node(node.keys[:at], node.pages[:at], node.pool, parent, node.used_at)
        parent.children[upper.keys[0]] = upper
        node.keys, node.pages, node.parent = node.keys[at:], node.pages[at:], upper
        upper.children = {node.keys[0]: node}
        upper.device_children = int(node.pool is self._device)
        return upper

    def _demote(self, node: _Node) -> list[Copy]:
        """Move an idle leaf of HBM to the host, or give it up, and what is below it, where there is no room."""
        pages, parent = node.pages, _parent(node)
        if len(pages) > self._host.available:
            parent.device_children -= 1
            self._remove(node)
            return []
        self.evict_host(len(pages) - self._host.free)
        self._device.evict(pages)
        node.pages, node.pool = self._host.take(len(pages)), self._host
        self._host.keep(node.pages)
        self._host.release(node.pages)
        parent.device_children -= 1
        self._push(node)
        self._push(parent)
        return [Copy(to_host=True, source=tuple(pages), target=tuple(node.pages))]

    def _remove(self, node: _Node) -> None:
        """Give up an idle node and what is below it."""
        parent = _parent(node)
        del parent.children[node.keys[0]]
        for below in _subtree(node):
            below.pool.evict(below.pages)
            below.parent = None
        self._push(parent)

    def _push(self, node: _Node) -> None:
        if node is not self._root and node.queued is not node.pool and self._is_leaf(node):
            node.queued = node.pool
            self._entries += 1
            heappush(self._leaves[node.pool], (node.used_at, self._entries, node))

    def _is_leaf(self, node: _Node) -> bool:
        """Return True if no node of its own tier lies below it."""
        return not (node.device_children if node.pool is self._device else node.children)

    def _oldest(self, pool: PagePool) -> _Node:
        """The least recently used leaf of a tier whose last page is idle."""
        while True:
            used_at, _, node = heappop(self._leaves[pool])
            if node.queued is not pool:
                continue
            node.queued = None
            # A page in use comes back to the queue when it is released, a node with pages below when these have gone.
            if node.parent is None or node.pool is not pool or not self._is_leaf(node) or pool.users(node.pages[-1]):
                continue
            if node.used_at == used_at:
                return node
            self._push(node)


def _common(ours: Keys, theirs: Keys) -> int:
    """Length of the common prefix; ``theirs`` is no longer than ``ours``."""
    if ours[: len(theirs)] == theirs:
        return len(theirs)
    return next(index for index, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)


def _parent(node: _Node) -> _Node:
    assert node.parent is not None, "only the root has no parent, and it has no pages"
    return node.parent


def _subtree(node: _Node) -> Iterator[_Node]:
    nodes = [node]
    for current in nodes:
        nodes.extend(current.children.values())
        yield current


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
        """Number of sequences that hold ``page``."""
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
        users, cached = self._users, self._kept
        for page in pages:
            users[page] -= 1
            if not users[page]:
                if cached[page]:
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
