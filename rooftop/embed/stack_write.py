"""What ``stack_sort`` sorted, into the buffers of its stacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import NO_GAIN, NO_ID, Buffers, Space, padding
from rooftop.embed.stack_sort import PADS, SortedStacks


def emit_stacks(found: SortedStacks, buffers: Sequence[Buffers | None], first: int, per_row: int, space: Space) -> None:
    """Write sorted stacks, whose first source is ``first``, into their buffers, where there are; see ``emit.emit``."""
    fields = found.fields
    partitions = found.sizes.sum(axis=1)
    sizes, runs = partitions.reshape(-1), found.runs
    pads, each = padding(sizes), np.arange(PADS)
    whole = sizes + pads if found.padded else sizes
    behind = np.cumsum(whole)
    if found.padded:
        tables = found.sizes.shape[1]
        ends_partition = (found.in_table % tables == tables - 1).nonzero()[0]
        lasts = found.lasts[ends_partition]
        found.kept[(lasts[:, None] - each)[each < PADS - pads[:, None]]] = False
        runs[ends_partition] -= PADS - pads
    ends = found.kept.nonzero()[0]
    rows, samples = (space.take(name, len(ends), np.uint32) for name in ("rows", "samples"))
    found.keys.take(ends, out=samples, mode="clip")
    np.right_shift(samples, np.uint32(fields.row), out=rows)
    rows &= np.uint32((1 << (fields.table - fields.row)) - 1)
    samples &= np.uint32((1 << fields.row) - 1)
    # Duplicates of an id lie before it, and before a partition's first the padding that was left out.
    gains = space.take("gains", len(ends), np.float32)
    gains[0] = ends[0] + 1
    np.subtract(ends[1:], ends[:-1], out=gains[1:], casting="unsafe")
    if found.padded:
        filled = sizes.nonzero()[0]
        begins = (behind - whole)[filled]
        gains[begins] = ends[begins] - np.concatenate([[-1], lasts[:-1]])[filled]
    del ends
    if found.sizes.shape[1] > 1:
        _into_stacks(found, runs, rows, samples)
    of_sources = whole.reshape(-1, fields.cores).sum(axis=1)
    if any(one.gains is not None for own in found.stacks for one in own.tables):
        gains *= _scale(found, of_sources, samples)

    ids, of_samples, row = rows.view(np.int32), samples.view(np.int32), first // per_row
    in_rows = (found.last - found.first) // per_row
    if found.padded:
        where = (behind - pads)[:, None] + each
        empty = where[each < pads[:, None]]
        ids[empty] = of_samples[empty] = NO_ID
        gains[empty] = NO_GAIN
        at = 0
        for index, width in enumerate(of_sources.reshape(-1, per_row).sum(axis=1).tolist()):
            own, these = buffers[index // in_rows], slice(at, at + width)
            if own is not None:
                own.write(row + index % in_rows, ids[None, these], of_samples[None, these], gains[None, these])
            at += width
        return
    spans = np.stack([sizes, pads], axis=1).reshape(len(buffers), in_rows, -1)
    used = spans.sum(axis=2)
    widths = used.max(axis=1)
    spans[:, :, -1] += widths[:, None] - used
    there = np.tile([True, False], spans.size // 2).repeat(spans.reshape(-1))
    at = place = 0
    for own, count, width in zip(buffers, partitions.sum(axis=(1, 2)).tolist(), widths.tolist(), strict=True):
        if own is not None:
            filled, these = there[place : place + in_rows * width].reshape(in_rows, width), slice(at, at + count)
            own.write(row, ids[these], of_samples[these], gains[these], where=filled)
        at, place = at + count, place + in_rows * width


def _into_stacks(
    found: SortedStacks, runs: NDArray[np.int64], rows: NDArray[np.uint32], samples: NDArray[np.uint32]
) -> None:
    """Rows and rows of activations of tables become those of stacks; ``runs`` [R] of them follow each other."""
    added = np.array(
        [(one.table.layout.place.offset, one.table.first_sample) for own in found.stacks for one in own.tables],
        np.uint32,
    )
    # Both side by side: repeating keeps other threads from the interpreter.
    every = added.view(np.uint64).reshape(-1).take(found.in_table).repeat(runs).view(np.uint32)
    rows += every[::2]
    samples += every[1::2]


def _scale(found: SortedStacks, counts: NDArray[np.int64], samples: NDArray[np.uint32]) -> NDArray[np.float32]:
    """The gains of the merged ids' samples, where ``counts`` [K x G] of them follow each other."""
    sources, parts, widths = found.last - found.first, list[NDArray[np.float32]](), list[int]()
    for stack in found.stacks:
        of_tables = [
            np.ones((sources, one.table.layout.samples), np.float32)
            if one.gains is None
            else one.gains[found.first : found.last]
            for one in stack.tables
        ]
        parts.append(np.concatenate(of_tables, axis=1).reshape(-1))
        widths += [len(parts[-1]) // sources] * sources
    begins = np.cumsum([0, *widths])[:-1]
    where: NDArray[np.int64] = begins.repeat(counts)
    where += samples
    # Clipped, padding takes that of some sample.
    return np.concatenate(parts).take(where, mode="clip")
