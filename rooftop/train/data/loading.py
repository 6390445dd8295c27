"""Batches as a function of the step: there is no state to save, and any process can make any row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from time import perf_counter
from typing import Generic, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from rooftop.arrays.rules import ways
from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.programs.attention.context import sequence_order
from rooftop.programs.parameters import Batch
from rooftop.programs.sharding import Specs, axes_of
from rooftop.train.data.packing import Ints, Packing, fill
from rooftop.train.data.tokens import TokenStore

Made = TypeVar("Made")
_ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """A permutation of 0 .. size - 1 for each seed and epoch; its memory does not grow with the size.

    A Feistel network (Luby and Rackoff 1988) on the next power of four, walked until it falls below ``size`` (Black and
    Rogaway 2002).
    """

    size: int
    seed: int
    epoch: int = 0

    def __call__(self, places: Ints) -> Ints:
        """Return the entries at ``places`` [n], each from 0 to size - 1: [n] int64."""
        result = self._network(places.astype(np.uint64))
        while (outside := result >= self.size).any():
            result[outside] = self._network(result[outside])
        return result.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half = np.uint64(max((self.size - 1).bit_length() + 1, 2) // 2)
        mask = (np.uint64(1) << half) - np.uint64(1)
        left, right = values >> half, values & mask
        for key in self._keys:
            left, right = right, left ^ (_scrambled(right + key) & mask)
        return (left << half) | right

    @cached_property
    def _keys(self) -> npt.NDArray[np.uint64]:
        return np.random.SeedSequence([self.seed, self.epoch]).generate_state(_ROUNDS, np.uint64).astype(np.uint64)


def hold_out(documents: int, share: float, seed: int) -> tuple[Ints, Ints]:
    """Return the documents to train on and those to evaluate on, a ``share``, by index and sorted.

    Each part has at least one. The same for the same number of documents, share and seed. Raises RooftopError for a
    share that is not between 0 and 1, or for fewer than two documents.
    """
    if not 0 < share < 1:
        raise RooftopError("share of documents for evaluation", share, "more than 0 and less than 1")
    if documents < 2:
        raise RooftopError("documents", documents, "at least 2, for some to be held out for evaluation")
    count = min(max(round(documents * share), 1), documents - 1)
    mixed = Permutation(size=documents, seed=seed)(np.arange(documents))
    return np.sort(mixed[count:]), np.sort(mixed[:count])


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Global batches of ``batch`` sequences each, by the number of the step.

    With a ``seed``, for training: epoch after epoch, the sequences in another order in each, so that every token is an
    input once in each; a batch may begin in one epoch and end in the next. Without one, for evaluation: the sequences
    once, in order, the last batch filled up with padding. Raises RooftopError for a batch below 1, a negative seed, or
    documents to train on that are together shorter than one sequence.
    """

    store: TokenStore
    packing: Packing
    batch: int
    seed: int | None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise RooftopError("batch", self.batch, "a positive whole number of sequences")
        if self.seed is None:
            return
        if self.seed < 0:
            raise RooftopError("seed", self.seed, "a whole number from 0")
        if self.packing.seq_len > self.packing.tokens:
            length = self.packing.seq_len
            accepted = f"more: a sequence of {length} at least, or a shorter one with --seq"
            raise RooftopError("data", f"{self.packing.tokens} tokens to train on", accepted)

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every token has been an input; rounded up."""
        return ceil_div(self.packing.rows, self.batch)

    def rows(self, step: int, rows: slice | Sequence[int]) -> Batch[npt.NDArray[np.int32]]:
        """Return rows of the global batch of ``step``, [rows, T]; see ``rooftop.train.data.packing.fill``.

        Raises RooftopError for a negative step, and for rows that a batch does not have.
        """
        if step < 0:
            raise RooftopError("step", step, "a whole number from 0")
        chosen = range(self.batch)[rows] if isinstance(rows, slice) else rows
        places = np.array(chosen, np.int64)
        if places.size and not 0 <= places.min() <= places.max() < self.batch:
            raise RooftopError("rows", list(chosen), f"0 to {self.batch - 1}, the rows of a batch")
        epochs, places = np.divmod(step * self.batch + places, self.packing.rows)
        if self.seed is None:
            places += epochs * self.packing.rows
        else:
            for epoch in np.unique(epochs).tolist():
                order = Permutation(size=self.packing.rows, seed=self.seed, epoch=epoch)
                places[epochs == epoch] = order(places[epochs == epoch])
        return fill(self.store, self.packing, places)


def place(
    loader: Loader, step: int, mesh: Mesh, specs: Specs, order: str, *, padded: tuple[int, int] | None = None
) -> Batch[jax.Array]:
    """Return the global batch of ``step`` on ``mesh``, [B, T] each; a process makes the rows of its own devices.

    ``specs`` are those of the program on this mesh, and ``order`` its ``context_order``, in which a sequence lies over
    the mesh axis that splits it. ``padded`` are the sequences and positions that the program has there
    (``TrainProgram.padded``), None for those of the loader: padding follows the loader's own. Raises RooftopError where
    they do not divide over the mesh.
    """
    spec, (batch, seq_len) = specs.activation("batch", "seq"), padded or (loader.batch, loader.packing.seq_len)
    for name, size, entry in zip(("batch", "seq_len"), (batch, seq_len), spec, strict=True):
        if size % (parts := ways(mesh.shape, *axes_of(entry))):
            raise RooftopError(name, size, f"a multiple of {parts} (mesh axes {', '.join(axes_of(entry))})")
    sharding = NamedSharding(mesh, spec)
    ring = specs.rules.activations["seq"]
    columns = sequence_order(seq_len, ways(mesh.shape, *ring), order) if ring else np.arange(seq_len)
    by_shape: dict[tuple[int, int, int], Batch[npt.NDArray[np.int32]]] = {}

    def array(name: str) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> npt.NDArray[np.int32]:
            rows, span = index or (slice(None), slice(None))
            # Devices that differ in tensor or context have the same rows: these are made once.
            key = rows.indices(batch)
            if key not in by_shape:
                own = range(loader.batch)[slice(*key)]
                by_shape[key] = _with_padding(loader.rows(step, own), len(range(*key)), seq_len)
            shard: npt.NDArray[np.int32] = getattr(by_shape[key], name)[:, columns[span]]
            return shard

        return jax.make_array_from_callback((batch, seq_len), sharding, shard)

    return Batch(
        tokens=array("tokens"), targets=array("targets"), segments=array("segments"), positions=array("positions")
    )


def _with_padding(batch: Batch[npt.NDArray[np.int32]], rows: int, seq_len: int) -> Batch[npt.NDArray[np.int32]]:
    """A packed batch with padding at the end of its sequences, and sequences of padding: [rows, seq_len]."""
    more = [(0, rows - batch.tokens.shape[0]), (0, seq_len - batch.tokens.shape[1])]
    padded: Batch[npt.NDArray[np.int32]] = jax.tree.map(lambda ids: np.pad(ids, more), batch)
    return replace(padded, targets=np.pad(batch.targets, more, constant_values=-1))


@dataclass(frozen=True, kw_only=True)
class Fetched(Generic[Made]):
    """The batch of a step, and the seconds that the step waited for it."""

    step: int
    batch: Made
    waited_s: float


def prefetch(make: Callable[[int], Made], steps: Iterable[int], *, depth: int = 2) -> Generator[Fetched[Made]]:
    """Yield ``make(step)`` for each of ``steps``, in order, from a thread that is up to ``depth`` of them ahead.

    What ``make`` raises is raised at its step. When the iterator is closed, or an exception passes through the loop
    over it, what was not begun is dropped and the thread has ended. Raises RooftopError for a depth below 1.
    """
    if depth < 1:
        raise RooftopError("prefetch depth", depth, "a positive whole number of batches")
    return _prefetched(make, iter(steps), depth)


def _prefetched(make: Callable[[int], Made], steps: Iterator[int], depth: int) -> Generator[Fetched[Made]]:
    pending: deque[tuple[int, Future[Made]]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as thread:

        def begin(count: int) -> None:
            pending.extend((step, thread.submit(make, step)) for step in islice(steps, count))

        try:
            begin(depth)
            while pending:
                step, future = pending.popleft()
                began = perf_counter()
                batch = future.result()
                waited = perf_counter() - began
                begin(1)
                yield Fetched(step=step, batch=batch, waited_s=waited)
        finally:
            for _, future in pending:
                future.cancel()


def _scrambled(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finishing rounds of splitmix64 (Steele, Lea and Flood 2014): every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
