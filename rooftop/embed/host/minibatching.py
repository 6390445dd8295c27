"""Minibatching: look up a batch whose partitions would overflow in several passes, over ids or over samples.

Over the vocabulary, ids fall into BUCKETS by a hash. Neighbouring buckets are joined, in a binary tree, while they
fit; the joints that must stay open are the bits of a mask, which is OR-ed over partitions, tables and hosts, so that
all agree on the passes. The hash is HighwayHash (Alakuijala et al. 2016) of a lookup's column, with the key that the
public preprocessing library uses: hosts that run either agree. Every row is looked up in one pass.

Over the samples, each SparseCore's rows of activations are cut into as many parts as there are passes: a sample is
looked up in one pass, and an id that very many samples share may be in every one (the SparseCore deep dive, section
14). How many passes there are is settled before, so that hosts have nothing to agree on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, Integer, UInt8, UInt64
from numpy.typing import NDArray

from rooftop.embed.host.lookups import TableLayout
from rooftop.embed.host.reference import Entries
from rooftop.models.embedding_tables.limits import BUCKETS

_KEY = (0x4451E30F87DB9609, 0xCA7358A1FD2737F8, 0x4B2C991FCEE4FDEA, 0x0B2658E18326F6BA)
#: HighwayHash's initial state: digits of pi.
_MUL0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_MUL1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)
#: Hashed at once: what fits into a core's cache.
_BLOCK = 4096

_U = np.uint64
_Lanes = list[NDArray[np.uint64]]


def bucket_of(columns: Integer[np.ndarray, " n"]) -> UInt8[np.ndarray, " n"]:
    """Bucket of each of ``columns`` (32-bit): HighwayHash64 of its 4 bytes, modulo BUCKETS."""
    buckets = np.empty(len(columns), np.uint8)
    for at in range(0, len(columns), _BLOCK):
        buckets[at : at + _BLOCK] = _hash(columns[at : at + _BLOCK].astype(np.uint64)) & _U(BUCKETS - 1)
    return buckets


def _hash(words: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """HighwayHash64 of 4-byte words."""

    def lanes(values: tuple[int, ...]) -> _Lanes:
        return [np.full(words.shape, value, np.uint64) for value in values]

    swapped = tuple((key >> 32) | (key & 0xFFFFFFFF) << 32 for key in _KEY)
    mul0, mul1 = lanes(_MUL0), lanes(_MUL1)
    v0 = lanes(tuple(a ^ b for a, b in zip(_MUL0, _KEY, strict=True)))
    v1 = lanes(tuple(a ^ b for a, b in zip(_MUL1, swapped, strict=True)))
    size = 4
    for lane in range(4):
        v0[lane] += _U((size << 32) + size)
        low, high = v1[lane] & _U(0xFFFFFFFF), v1[lane] >> _U(32)
        low = ((low << _U(size)) | (low >> _U(32 - size))) & _U(0xFFFFFFFF)
        high = ((high << _U(size)) | (high >> _U(32 - size))) & _U(0xFFFFFFFF)
        v1[lane] = low | (high << _U(32))
    # A packet of 32 bytes of which the word fills the first 4.
    nothing = np.zeros(words.shape, np.uint64)
    _update([words, nothing, nothing, nothing], v0, v1, mul0, mul1)
    for _ in range(4):
        turned = [(v0[lane] >> _U(32)) | (v0[lane] << _U(32)) for lane in (2, 3, 0, 1)]
        _update(turned, v0, v1, mul0, mul1)
    return v0[0] + v1[0] + mul0[0] + mul1[0]


def _update(packet: _Lanes, v0: _Lanes, v1: _Lanes, mul0: _Lanes, mul1: _Lanes) -> None:
    low = _U(0xFFFFFFFF)
    for lane in range(4):
        v1[lane] = v1[lane] + mul0[lane] + packet[lane]
        mul0[lane] = mul0[lane] ^ ((v1[lane] & low) * (v0[lane] >> _U(32)))
        v0[lane] = v0[lane] + mul1[lane]
        mul1[lane] = mul1[lane] ^ ((v0[lane] & low) * (v1[lane] >> _U(32)))
    for sums, of in ((v0, v1), (v1, v0)):
        for lane in (0, 2):
            even, odd = _zipped(of[lane], of[lane + 1])
            sums[lane] = sums[lane] + even
            sums[lane + 1] = sums[lane + 1] + odd


def _zipped(even: NDArray[np.uint64], odd: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """HighwayHash's permutation of the 16 bytes of two lanes."""

    def byte(of: NDArray[np.uint64], index: int, to: int) -> NDArray[np.uint64]:
        part = of & _U(0xFF << 8 * index)
        return part << _U(8 * (to - index)) if to >= index else part >> _U(8 * (index - to))

    order_even = ((even, 3), (odd, 4), (even, 2), (even, 5), (odd, 6), (even, 1), (odd, 7), (even, 0))
    order_odd = ((odd, 3), (even, 4), (odd, 2), (odd, 5), (odd, 1), (even, 6), (odd, 0), (even, 7))
    result = [np.zeros(even.shape, np.uint64), np.zeros(even.shape, np.uint64)]
    for half, order in enumerate((order_even, order_odd)):
        for to, (of, index) in enumerate(order):
            result[half] |= byte(of, index, to)
    return result[0], result[1]


def bucketed(ids: Entries, cores: int) -> UInt8[np.ndarray, " n"]:
    """Bucket of each id. A row is hashed once per partition."""
    firsts = np.flatnonzero(ids.fresh)
    columns = ids.rows[firsts].astype(np.int64) * cores + ids.cores[firsts]
    return np.repeat(bucket_of(columns), np.diff(firsts, append=len(ids.rows)))


def split_mask(
    ids: Entries, buckets: UInt8[np.ndarray, " n"], sources: int, cores: int, max_ids: int, max_unique_ids: int
) -> int:
    """Joints that must stay open so that every pass keeps within the limits of a partition: 63 bits, as an int."""
    places = ids.partitions(cores) * BUCKETS + buckets
    fresh = ids.fresh
    total = 0
    for keys, limit in ((places, max_ids), (places[fresh], max_unique_ids)):
        counts = np.bincount(keys, minlength=sources * cores * BUCKETS).reshape(-1, BUCKETS)
        total |= _splits(counts[counts.sum(axis=1) > limit], limit)
    return total


def _splits(counts: Int64[np.ndarray, "partitions buckets"], limit: int) -> int:
    """Open joints of the bucket trees [partitions, BUCKETS] together, from the leaves to the root."""
    mask, bit = 0, 0
    while counts.shape[1] > 1:
        left, right = counts[:, 0::2], counts[:, 1::2]
        split = left + right > limit
        for index in np.flatnonzero(split.any(axis=0)).tolist():
            mask |= 1 << (bit + index)
        bit += split.shape[1]
        counts = np.where(split, np.maximum(left, right), left + right)
    return mask


def passes_of(mask: int) -> Int64[np.ndarray, " buckets"]:
    """Pass (minibatch) of each bucket if the joints of ``mask`` are open: [BUCKETS], rising from 0."""
    begins = np.zeros(BUCKETS, np.int64)
    bit, size = 0, 2
    while size <= BUCKETS:
        for at in range(0, BUCKETS, size):
            begins[at + size // 2] = mask >> bit & 1
            bit += 1
        size *= 2
    return np.cumsum(begins)


def into_passes(ids: Entries, buckets: UInt8[np.ndarray, " n"], mask: int, cores: int) -> Entries:
    """Order ids by source, pass, destination, bucket, row and sample; groups become source x passes + pass."""
    of_bucket = passes_of(mask)
    passes = int(of_bucket[-1]) + 1
    groups = ids.groups * passes + of_bucket[buckets]
    order = np.argsort((groups * cores + ids.cores) * BUCKETS + buckets, kind="stable")
    return dataclasses.replace(ids, groups=groups).taken(order)


def by_samples(ids: Entries, pass_of_row: Int64[np.ndarray, " samples"], passes: int, cores: int) -> Entries:
    """Order ids by source, pass, destination, row and sample; ``pass_of_row`` [samples] is by row of activations."""
    groups = ids.groups * passes + pass_of_row[ids.samples]
    order = np.argsort(groups * cores + ids.cores, kind="stable")
    return dataclasses.replace(ids, groups=groups).taken(order)


def pass_of_rows(tables: Sequence[TableLayout], passes: int) -> Int64[np.ndarray, " samples"]:
    """Pass of each row of activations of a source: every feature's rows are cut into even parts."""
    spans = [span for table in tables for span in table.spans.values()]
    return np.concatenate([np.arange(rows) * passes // rows for _, rows in spans])
