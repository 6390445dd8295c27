"""Ids as sort keys: one number holds where an id comes from, where it goes, its row there and its sample.

A source is a SparseCore that holds samples; a destination one that holds rows. A key is, from the highest bits on

    source within the chunk | destination | local row of the table | row of activations of the source

so that sorting keys brings ids into the order in which a SparseCore reads them, and a sample's duplicates together.
Bits are as few as the sizes need: keys of 32 bits sort twice as fast as keys of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.embed import runs
from rooftop.embed.inputs import Ragged
from rooftop.embed.space import Space
from rooftop.models.embedding_tables.stacking import StackPlace


def bits(count: int) -> int:
    """Bits that tell ``count`` things apart."""
    return (count - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The keys of one table: how many bits each part has. ``samples`` are a source's rows of activations of it."""

    place: StackPlace
    cores: int
    samples: int

    @cached_property
    def row_bits(self) -> int:
        """Bits of the local row."""
        return bits(self.place.rows)

    @cached_property
    def sample_bits(self) -> int:
        """Bits of the row of activations."""
        return bits(self.samples)

    @cached_property
    def core_shift(self) -> int:
        """Where the destination begins."""
        return self.row_bits + self.sample_bits

    @cached_property
    def source_shift(self) -> int:
        """Where the source begins."""
        return self.core_shift + bits(self.cores)

    def dtype(self, sources: int) -> type[np.unsignedinteger[Any]]:
        """The narrowest dtype for the keys of ``sources`` sources."""
        return np.uint32 if sources << self.source_shift <= 1 << 32 else np.uint64

    def most_sources(self) -> int:
        """Sources that fit together into keys of 32 bits, or if not even one does of 64; 0 if none does of those."""
        return (1 << 32) >> self.source_shift or (1 << 64) >> self.source_shift


@dataclass(frozen=True, kw_only=True)
class Looked:
    """A feature's ids and their weights' gains, ready for keys: ``offset`` is its first row of activations.

    ``rows`` are the rows of activations that one source has of it.
    """

    ids: Ragged
    offset: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The ids of one table for some sources, sorted, a sample's duplicates merged.

    Dims: N merged ids, G sources, C destinations. keys [N]; counts [N], how many ids became one, or None where all are
    1; gains [N] of float32, or None where they are the counts; sizes [G, C] merged ids; uniques [G, C] different rows.
    """

    keys: NDArray[Any]
    gains: NDArray[np.float32] | None
    counts: NDArray[np.int64] | None
    sizes: NDArray[np.int64]
    uniques: NDArray[np.int64]


def gaps(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many each run holds of runs that follow each other from 0 on, along the last dim, and end at ``ends``."""
    found = np.empty_like(ends)
    found[..., 0] = ends[..., 0] + 1
    np.subtract(ends[..., 1:], ends[..., :-1], out=found[..., 1:])
    return found


def flags(count: int) -> NDArray[np.bool_]:
    """``count`` flags that are not set, and as many more as fill a word of 8."""
    return np.zeros(-(-count // 8) * 8, np.bool_)


def set_up_to(of: NDArray[np.bool_], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of ``flags`` [..., count] are set from the first up to each place, that one included."""
    # Words are summed up: a sum over the flags themselves takes as long as a gather of all ids.
    words = of.view("<u8")
    at, shifts = places >> 3, ((places & 7) + 1) << 3
    found: NDArray[np.int64] = np.cumsum(np.bitwise_count(words), axis=-1, dtype=np.int64).take(at, axis=-1)
    found -= np.bitwise_count(words.take(at, axis=-1) >> shifts.astype(np.uint64))
    return found


def merge(
    layout: Layout,
    features: Sequence[Looked],
    gains: NDArray[np.float32] | None,
    first: int,
    last: int,
    masked: bool,
    space: Space,
) -> Merged:
    """Sort and merge the ids that sources ``first`` to ``last`` (exclusive) look up in one table.

    ``gains`` [all sources, samples] are those of a sample's every id: where given, weights of an id multiply them.
    Rows are kept within their bits if ``masked``: ids were not checked.
    """
    sources = last - first
    keys, weights = _keys(layout, features, first, last, masked)
    used = layout.source_shift + bits(sources)
    # Ids come in the order of their samples.
    if keys.dtype != np.uint32:
        keys, weights = _sorted(keys, weights, used)
    elif weights is None:
        runs.sort(keys, layout.sample_bits, used, space)
    else:
        runs.sort_pairs(keys, weights, layout.sample_bits, used, space)
    counts = None
    behind = (keys[1:] != keys[:-1]).nonzero()[0]
    if len(behind) + 1 < len(keys):
        ends = np.empty(len(behind) + 1, np.int64)
        ends[:-1], ends[-1] = behind, len(keys) - 1
        counts = gaps(ends)
        if weights is not None:
            weights = np.add.reduceat(weights, ends - counts + 1)
        keys = keys.take(ends)
    found = weights
    if gains is not None:
        of_sample = gains[first:last].reshape(-1)[_sample_of(layout, keys, sources)]
        factors = counts if found is None else found
        found = of_sample if factors is None else np.multiply(factors, of_sample, out=of_sample, casting="same_kind")
    sizes, uniques = _sizes(layout, keys, sources)
    return Merged(keys=keys, gains=found, counts=counts, sizes=sizes, uniques=uniques)


def _keys(
    layout: Layout, features: Sequence[Looked], first: int, last: int, masked: bool
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Keys in the order of the input, and weights if any of the features has them."""
    dtype = layout.dtype(last - first)
    spans = [(int(one.ids.row_splits[first * one.rows]), int(one.ids.row_splits[last * one.rows])) for one in features]
    keys = np.empty(sum(end - begin for begin, end in spans), dtype)
    weighted = any(one.ids.weights is not None for one in features)
    weights = np.ones(len(keys), np.float32) if weighted else None
    at = 0
    for one, (begin, end) in zip(features, spans, strict=True):
        out = keys[at : at + end - begin]
        splits = one.ids.row_splits[first * one.rows : last * one.rows + 1]
        # Heads of keys: a source and a row of activations, for each row of the input.
        heads = np.arange(one.offset, one.offset + one.rows, dtype=dtype)
        if last - first > 1:
            sources = np.arange(0, (last - first) << layout.source_shift, 1 << layout.source_shift, dtype=dtype)
            heads = (sources[:, None] | heads).reshape(-1)
        ids = one.ids.values[begin:end]
        # As many bits are taken as they are: ids out of range that are not looked for become some other row.
        ids = ids.view(dtype) if ids.dtype.itemsize == np.dtype(dtype).itemsize else ids.astype(dtype)
        if layout.cores & (layout.cores - 1) == 0:
            rows = ids >> dtype(bits(layout.cores))
            np.add(ids, dtype(layout.place.rotation), out=out)
            out &= dtype(layout.cores - 1)
        else:
            rows = ids // dtype(layout.cores)
            np.subtract(ids, rows * dtype(layout.cores), out=out)
            out += dtype(layout.place.rotation)
            out %= dtype(layout.cores)
        if masked:
            rows &= dtype((1 << layout.row_bits) - 1)
        out <<= dtype(layout.row_bits)
        out |= rows
        out <<= dtype(layout.sample_bits)
        out |= heads.repeat(splits[1:] - splits[:-1])
        if weights is not None and one.ids.weights is not None:
            weights[at : at + end - begin] = one.ids.weights[begin:end]
        at += end - begin
    return keys, weights


def _sorted(
    keys: NDArray[Any], weights: NDArray[np.float32] | None, used: int
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Keys of ``used`` bits sorted, and their weights, those of equal keys in the order of the input."""
    if weights is None:
        keys.sort()
        return keys, None
    index_bits = bits(max(len(keys), 1))
    if used + index_bits > 64:
        order = np.argsort(keys, kind="stable")
        return keys[order], weights[order]
    # The place in the input, below the key: one sort of numbers is faster than a sort of places.
    keys <<= np.uint64(index_bits)
    keys |= np.arange(len(keys), dtype=np.uint64)
    keys.sort()
    order = (keys & np.uint64((1 << index_bits) - 1)).astype(np.int64)
    keys >>= np.uint64(index_bits)
    return keys, weights[order]


def _sample_of(layout: Layout, keys: NDArray[Any], sources: int) -> NDArray[Any]:
    """Place of each key's sample in an array of dims [sources, samples], flat."""
    samples: NDArray[Any] = keys & keys.dtype.type((1 << layout.sample_bits) - 1)
    if sources > 1:
        samples += (keys >> keys.dtype.type(layout.source_shift)) * keys.dtype.type(layout.samples)
    return samples


def _sizes(layout: Layout, keys: NDArray[Any], sources: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merged ids, and different rows, of every source and destination: [G, C] each."""
    dtype, core_bits = keys.dtype.type, bits(layout.cores)
    sizes = np.zeros(sources << core_bits, np.int64)
    uniques = np.zeros(sources << core_bits, np.int64)
    if len(keys):
        # The highest bit in which an id differs from the one before says what begins with it: partition, row, sample.
        differs = keys[1:] ^ keys[:-1]
        behind = (differs > dtype((1 << layout.core_shift) - 1)).nonzero()[0]
        lasts = np.empty(len(behind) + 1, np.int64)
        lasts[:-1], lasts[-1] = behind, len(keys) - 1
        those = keys.take(lasts) >> dtype(layout.core_shift)
        sizes[those] = gaps(lasts)
        # Whether an id is the last of its row: so many are there up to each partition's last id.
        ends = flags(len(keys))
        np.greater(differs, dtype((1 << layout.sample_bits) - 1), out=ends[: len(differs)])
        ends[len(differs)] = True
        uniques[those] = gaps(set_up_to(ends, lasts) - 1)
    shape = (sources, 1 << core_bits)
    return sizes.reshape(shape)[:, : layout.cores], uniques.reshape(shape)[:, : layout.cores]
