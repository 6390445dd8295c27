"""The paged KV cache of one server: pages for sequences, shared prefixes, a tier in host memory for both."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.scheduling.serving.prefixes import Copy, PagePool, PrefixCache


@dataclass(eq=False, slots=True, kw_only=True)
class CachedSequence:
    """A request on its way: what is known of it, and the state that its server keeps up to date.

    ``keys`` has one value per full page of the prompt and, as far as they are known, of the tokens generated after it;
    each stands for the tokens of its page and all before it. ``max_tokens`` is the most it may generate.
    """

    id: int
    prompt_tokens: int
    max_tokens: int
    keys: tuple[Hashable, ...] = ()
    #: Tokens generated, and tokens whose KV is in ``pages``; of a sequence that generates, as of when it began to:
    #: ask its server (``Scheduler.kv_tokens``).
    generated: int = 0
    length: int = 0
    #: Tokens found in the prefix cache when it was last admitted.
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    #: Pages in the host's memory, of a sequence that is swapped out.
    host_pages: list[int] = field(default_factory=list)
    #: The step of its server at which it began to generate.
    since: int = 0
    #: Of several groups of devices that have a cache each, the one that has its pages.
    group: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise RooftopError(name, getattr(self, name), "a positive whole number")

    @property
    def target(self) -> int:
        """Tokens whose KV the next token needs, without any to go on from: the prompt and what was generated."""
        return self.prompt_tokens + self.generated


class KvCache:
    """Pages of ``page_tokens`` tokens: ``pages`` in HBM, ``host_pages`` in the host's memory.

    With ``prefixes`` the pages of finished prompts stay until the room is needed, and prompts that begin alike share
    pages. The host's memory holds prefixes that HBM has no room for, and sequences that were swapped out. Pages are
    numbered from ``first`` and ``host_first``: where several groups of devices have a cache each, others have numbers
    before them.
    """

    def __init__(
        self,
        *,
        page_tokens: int,
        pages: int,
        host_pages: int = 0,
        prefixes: bool = False,
        first: int = 0,
        host_first: int = 0,
    ) -> None:
        for name, value, least in (("page_tokens", page_tokens, 1), ("pages", pages, 1), ("host_pages", host_pages, 0)):
            if value < least:
                raise RooftopError(name, value, f"a whole number of {least} or more")
        self.page_tokens = page_tokens
        self.device = PagePool(pages, first)
        self.host = PagePool(host_pages, host_first)
        self.prefixes = PrefixCache(self.device, self.host) if prefixes else None
        self._copies: list[Copy] = []

    def pages_for(self, tokens: int) -> int:
        """Pages that the KV of ``tokens`` tokens takes."""
        return ceil_div(tokens, self.page_tokens)

    def copies(self) -> tuple[Copy, ...]:
        """Copies to make, in this order, before the next step; each call empties the list."""
        pending = tuple(self._copies)
        self._copies.clear()
        return pending

    def match(self, sequence: CachedSequence) -> int:
        """Number of cached pages of the prefix of ``sequence``."""
        return 0 if self.prefixes is None else self.prefixes.match(sequence.keys)

    def admit(self, sequence: CachedSequence, tokens: int, spare: int) -> bool:
        """Give ``sequence`` pages for ``tokens`` tokens, if ``spare`` pages can still be had after that.

        What its prompt has in common with cached ones is there already: ``length`` and ``cached`` say how many tokens,
        at least one fewer than all, because the last one has to be computed for its logits.
        """
        keys = sequence.keys[: (tokens - 1) // self.page_tokens]
        on_device, on_host = self.prefixes.find(keys) if self.prefixes is not None and keys else ([], [])
        need = self.pages_for(tokens) - len(on_device)
        self.device.share(on_device)
        if self.device.available - spare < need:
            self.device.release(on_device)
            return False
        self.host.share(on_host)
        pages = on_device + self._take(need)
        length = len(on_device) + len(on_host)
        if on_host:
            self._copies.append(
                Copy(to_host=False, source=tuple(on_host), target=tuple(pages[len(on_device) : length]))
            )  # fmt: skip
        self.host.release(on_host)
        if on_host and self.prefixes is not None:
            pages[:length] = self.prefixes.insert(keys[:length], pages[:length])
        sequence.pages = pages
        sequence.length = sequence.cached = length * self.page_tokens
        return True

    def grow(self, sequence: CachedSequence) -> None:
        """One page more. The caller has made sure that one can be had."""
        sequence.pages += self._take(1)

    def keep(self, sequence: CachedSequence) -> None:
        """Let later prompts find the full pages of ``sequence`` whose keys are known."""
        if self.prefixes is not None:
            full = min(len(sequence.keys), sequence.length // self.page_tokens)
            if full:
                sequence.pages[:full] = self.prefixes.insert(sequence.keys[:full], sequence.pages[:full])

    def release(self, sequence: CachedSequence) -> None:
        """Take the pages of ``sequence`` back."""
        self.release_pages(sequence.pages, sequence.keys)
        sequence.pages = []

    def release_pages(self, pages: list[int], keys: tuple[Hashable, ...]) -> None:
        """Take ``pages`` back, which a sequence with ``keys`` held."""
        self.device.release(pages)
        if self.prefixes is not None and keys:
            self.prefixes.touch(keys)

    def swap_out(self, sequence: CachedSequence) -> bool:
        """Move the pages of ``sequence`` to the host's memory, if there is room."""
        count = self.pages_for(sequence.length)
        if count > self.host.available:
            return False
        if self.prefixes is not None:
            self.prefixes.evict_host(count - self.host.free)
        sequence.host_pages = self.host.take(count)
        self._copies.append(
            Copy(to_host=True, source=tuple(sequence.pages[:count]), target=tuple(sequence.host_pages))
        )  # fmt: skip
        self.release(sequence)
        return True

    def swap_in(self, sequence: CachedSequence, spare: int) -> bool:
        """Move them back, if ``spare`` pages can still be had after that."""
        count = len(sequence.host_pages)
        if self.device.available - spare < count:
            return False
        sequence.pages = self._take(count)
        self._copies.append(
            Copy(to_host=False, source=tuple(sequence.host_pages), target=tuple(sequence.pages))
        )  # fmt: skip
        self.host.release(sequence.host_pages)
        sequence.host_pages = []
        return True

    def _take(self, count: int) -> list[int]:
        missing = count - self.device.free
        if missing > 0 and self.prefixes is not None:
            self._copies += self.prefixes.evict(missing)
        return self.device.take(count)
