"""Attention over a sequence that is split over a mesh axis, its keys and values gathered; see also ring_attention.

Forward this is one AllGather of them, backward one ReduceScatter of their derivatives (LLaMA 3 paper, section 3.3.2):
no hops, and the same bytes as a ring's forward pass, but a device holds the keys and values of the whole sequence, and
only what comes before can hide the AllGather.

All devices run one program, so that a chunk of queries that lies early on one device and later on another is given as
many keys as the latest needs, masked where the sequence has not begun. Of the T/n x T scores of a device,
``contiguous`` order computes all, ``zigzag``, whose first chunks are all in the first half of the sequence, three
quarters; half would be enough. A window that is shorter than the sequence cuts the keys to those that it sees.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from rooftop.errors import RooftopError, unknown
from rooftop.programs.attention import attend, attend_behind
from rooftop.programs.attention_scores import Scores, block_size
from rooftop.programs.context_order import ORDERS, chunks_of, sequence_order
from rooftop.programs.ring_attention import RING_KERNELS


def gathered_attend(
    kernel: str,
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    order: str = "contiguous",
    sinks: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """``rooftop.programs.ring_attention.ring_attend`` without a ring: the same arguments, results and refusals."""
    if order not in ORDERS:
        raise unknown("order of the sequence", order, ORDERS)
    if kernel not in RING_KERNELS:
        raise unknown("kernel of attention to gathered keys", kernel, RING_KERNELS)
    size, chunks = lax.axis_size(axis), chunks_of(order)
    if size == 1:
        return attend(kernel, scores, q, k, v, sinks=sinks, segments=segments)
    if q.shape[2] % k.shape[2]:
        raise RooftopError("query heads on a device", q.shape[2], f"a multiple of the {k.shape[2]} key/value heads")
    if q.shape[1] % chunks:
        raise RooftopError("sequence length on a device", q.shape[1], f"a multiple of {chunks} for {order} order")
    chunk, here = q.shape[1] // chunks, lax.axis_index(axis)
    # The chunks of the whole sequence, as they lie on the devices, by their places in it.
    lie = sequence_order(size * chunks, size, order).argsort()

    def gathered(x: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, axis, axis=1, tiled=True)
        apart = whole.reshape(x.shape[0], size * chunks, chunk, *x.shape[2:])
        return apart[:, lie].reshape(whole.shape)

    keys, values = gathered(k), gathered(v)
    ids = None if segments is None else gathered(segments)
    outputs = []
    for index in range(chunks):
        # Places of this chunk in the sequence: on this device, and the last on any.
        place = here if index == 0 else 2 * size - 1 - here
        last = size * (index + 1) - 1
        behind = last * chunk
        if scores.window is not None:
            block = block_size(chunk, scores.block)
            behind = min(behind, -(-(scores.window - 1) // block) * block)

        def before(x: jax.Array, place: jax.Array = place, behind: int = behind, last: int = last) -> jax.Array:
            """The chunk at ``place`` and what is ``behind`` it, zeros where the sequence has not begun."""
            padded = jnp.pad(x[:, : (last + 1) * chunk], ((0, 0), (behind, 0)) + ((0, 0),) * (x.ndim - 2))
            return lax.dynamic_slice_in_dim(padded, place * chunk, behind + chunk, axis=1)

        own = slice(index * chunk, (index + 1) * chunk)
        outputs.append(
            attend_behind(
                kernel,
                replace(scores, offset=behind),
                q[:, own],
                before(keys),
                before(values),
                sinks=sinks,
                absent=jnp.maximum(behind - place * chunk, 0),
                segments=None if ids is None or segments is None else (segments[:, own], before(ids)),
            )
        )
    return jnp.concatenate(outputs, axis=1)
