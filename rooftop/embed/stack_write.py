"""What ``stack_sort`` sorted, into the buffers of its stacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import NO_GAIN, NO_ID, Buffers, padding
from rooftop.embed.space import Space
from rooftop.embed.stack_sort import SortedStacks


def emit_stacks(found: SortedStacks, buffers: Sequence[Buffers | None], first: int, per_row: int, space: Space) -> None:
    """Write sorted stacks, whose first source is ``first``, into their buffers, where there are; see ``emit.emit``."""
    fields, in_rows = found.fields, (found.last - found.first) // per_row
    sizes = found.sizes.sum(axis=1).reshape(len(buffers), in_rows, -1)
    pads = padding(sizes)
    used = (sizes + pads).sum(axis=2)
    reached = used.max(axis=1).tolist()
    widths = [width if own is None else own.to_write(width) for own, width in zip(buffers, reached, strict=True)]
    # Behind its last partition a row has padding as far as it is written.
    pads[:, :, -1] += np.array(widths)[:, None] - used
    count, most = len(found.keys), int(pads.max())
    # Behind the ids lies padding: as much as the partition has that has most of it.
    pairs = space.take("pairs", 2 * (count + most), np.uint32).reshape(2, -1)
    gains = found.gains
    if len(gains) < count + most:
        gains = space.take("more gains", count + most, np.float32)
        gains[:count] = found.gains[:count]
    pairs[:, count:] = NO_ID
    gains[count : count + most] = NO_GAIN
    # Local rows and rows of activations, in as few calls: threads wait for each other at each.
    of_ids = pairs[:, :count]
    np.right_shift(found.keys, np.array([[fields.row], [0]], np.uint32), out=of_ids)
    of_ids &= np.array([[(1 << (fields.table - fields.row)) - 1], [(1 << fields.row) - 1]], np.uint32)
    if found.sizes.shape[1] > 1:
        _into_stacks(found, of_ids)
    if any(one.gains is not None for own in found.stacks for one in own.tables):
        of_sources = found.sizes.sum(axis=(1, 3)).reshape(-1)
        gains[:count] *= _scale(found, of_sources, of_ids[1])

    # From and to where each partition lies, and its padding.
    bounds = np.empty((*sizes.shape, 2, 2), np.int32)
    bounds[..., 1, 0] = count
    np.add(pads, count, out=bounds[..., 1, 1], casting="same_kind")
    bounds[..., 0, 1] = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
    np.subtract(bounds[..., 0, 1], sizes, out=bounds[..., 0, 0], casting="same_kind")
    ids, samples = pairs.view(np.int32)
    for own, of_rows, filled in zip(buffers, bounds, reached, strict=True):
        if own is not None:
            own.write_runs(first // per_row, of_rows, ids, samples, gains, filled, space)


def _into_stacks(found: SortedStacks, pairs: NDArray[np.uint32]) -> None:
    """Rows, and rows of activations, of tables become those of stacks: ``pairs`` [2, N]."""
    added = np.array(
        [(one.table.layout.place.offset, one.table.first_sample) for own in found.stacks for one in own.tables],
        np.uint32,
    )
    # Row by row, and with take: indices of two dims cost as much as all the rest.
    for own, of_tables in zip(pairs, added.T, strict=True):
        own += of_tables.take(found.in_table).repeat(found.runs)


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
    return np.concatenate(parts).take(where)
