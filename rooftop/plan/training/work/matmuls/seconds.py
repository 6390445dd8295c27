"""Seconds of a block's matmuls, whole or in pieces next to the hops of a ring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from rooftop.core.ledger import Number
from rooftop.core.rounding import next_multiple
from rooftop.models.attention import MatmulShape
from rooftop.plan.pricing import RingSteps
from rooftop.plan.training.work.matmuls.block import MatmulSizes
from rooftop.roofline.achievable import grouped_matmul_seconds

#: HBM passes of collective matmuls beyond those of plain ones, as counted in compiled layers
#: (docs/evidence/collective-matmul.md): of their outputs, whose buffers XLA copies; of a gathered stream that the
#: gradients of weights read, put together from shards; and of a scattered shard, to which a device's own term is
#: added last.
_BUFFER_PASSES, _WHOLE_PASSES, _SCATTER_PASSES = 2.0, 2.0, 4.0

#: The matmul of the forward pass, that for gradients of inputs and that for gradients of weights.
_Kernel = Literal["forward", "inputs", "weights"]


@dataclass(frozen=True, kw_only=True)
class BlockSeconds:
    """Seconds of the forward matmuls, of those for gradients of inputs and of those for gradients of weights.

    ``forward_ring`` and ``inputs_ring`` are the hops next to them, if any; the passes are HBM bytes that such a matmul
    moves beyond a plain one, in the forward, recompute and backward phases.
    """

    forward_s: Number
    inputs_s: Number
    weights_s: Number
    forward_ring: RingSteps | None = None
    inputs_ring: RingSteps | None = None
    forward_passes: Number = 0.0
    again_passes: Number = 0.0
    backward_passes: Number = 0.0


def block_seconds(sizes: MatmulSizes) -> BlockSeconds:
    """The seconds of all three matmuls, in pieces where shards travel next to them."""
    block = sizes.block
    forward_s, inputs_s = _forward_s(sizes, block.tokens), _inputs_s(sizes, block.tokens)
    payload = block.gathered if block.scattered is None else block.scattered
    if payload is None or not np.any(block.rings):
        return BlockSeconds(forward_s=forward_s, inputs_s=inputs_s, weights_s=_weights_s(sizes))
    return _in_pieces(sizes, payload, forward_s, inputs_s)


def _in_pieces(sizes: MatmulSizes, payload: Number, forward_s: Number, inputs_s: Number) -> BlockSeconds:
    """The seconds where a ring moves shards of the gathered or scattered ``payload``; elsewhere those of one piece.

    A gathered input makes one matmul of each shard. A scattered output has this device's shard as one, and the others
    in halves.
    """
    step, block = sizes.step, sizes.block
    rings, tokens, shard = block.rings, block.tokens, block.tokens / step.tensor
    into, out = partial(_forward_s, sizes), partial(_inputs_s, sizes)
    if block.scattered is not None:
        into, out = out, into
    gathered_s: Number = step.tensor * into(shard)
    scattered_s: Number = out(shard) + 2 * (step.tensor - 1) * out(shard / 2)
    if step.habits.scatter_pieces:
        # An input is quantised once; what each piece more costs is the start of its matmul.
        start_s = step.rates.fractions.matmul["16-bit"].start_s
        gathered_s, scattered_s = into(tokens), out(tokens) + (step.habits.scatter_pieces - 1) * start_s
        gathered_s = gathered_s + (step.tensor - 1) * start_s
    ring = partial(
        RingSteps,
        on=rings,
        members=step.tensor,
        pieces=step.habits.scatter_pieces,
        at_once=step.habits.asynchronous == "all",
    )
    gathering, scattering = ring(beside_s=into(shard), sums=False), ring(beside_s=out(shard), sums=True)
    added = rings * _SCATTER_PASSES * payload / step.tensor
    if block.scattered is None:
        forward_passes = rings * _BUFFER_PASSES * sizes.outputs * sizes.element
        return BlockSeconds(
            forward_s=np.where(rings, gathered_s, forward_s),
            inputs_s=np.where(rings, scattered_s, inputs_s),
            weights_s=_weights_s(sizes),
            forward_ring=gathering,
            inputs_ring=scattering,
            forward_passes=forward_passes,
            again_passes=block.again * (forward_passes + rings * _WHOLE_PASSES * payload),
            backward_passes=added + rings * (block.arrays - 1) * payload,
        )
    return BlockSeconds(
        forward_s=np.where(rings, scattered_s, forward_s),
        inputs_s=np.where(rings, gathered_s, inputs_s),
        weights_s=_weights_s(sizes),
        forward_ring=scattering,
        inputs_ring=gathering,
        forward_passes=added,
        again_passes=block.again * added,
        backward_passes=rings * _WHOLE_PASSES * payload,
    )


def _forward_s(sizes: MatmulSizes, rows: Number) -> Number:
    """Seconds of the forward matmuls of so many ``rows``."""
    shapes, dtype = sizes.block.shapes, sizes.dtype
    if (tiles := _tiles(sizes)) is not None:
        return sum((_grouped_s(sizes, "forward", rows + tiles[0], m, dtype) for m in shapes), 0.0)
    return sum((_plain_s(sizes, (rows, m.k, m.n), dtype) for m in shapes), 0.0)


def _inputs_s(sizes: MatmulSizes, rows: Number) -> Number:
    """Seconds of the matmuls for gradients of inputs of so many ``rows``."""
    shapes, dtype = sizes.block.shapes, sizes.of_gradient
    if (tiles := _tiles(sizes)) is not None:
        return sum((_grouped_s(sizes, "inputs", rows + tiles[1], m, dtype) for m in shapes), 0.0)
    return sum((_plain_s(sizes, (rows, m.n, m.k), dtype) for m in shapes), 0.0)


def _weights_s(sizes: MatmulSizes) -> Number:
    """Seconds of the matmuls for gradients of weights."""
    shapes, rows, dtype = sizes.block.shapes, sizes.block.tokens, sizes.of_sum
    if (tiles := _tiles(sizes)) is not None:
        return sum((_grouped_s(sizes, "weights", rows + tiles[2], m, dtype) for m in shapes), 0.0)
    return sum((_plain_s(sizes, (m.k, rows, m.n), dtype) for m in shapes), 0.0)


def _plain_s(sizes: MatmulSizes, dims: tuple[Number, Number, Number], dtype: str) -> Number:
    """Seconds of one expert's part of the batch, or of its own matmul, [m, k] x [k, n] of ``dims``."""
    rates = sizes.step.rates
    if not sizes.step.habits.groups_experts:
        return rates.matmul_s(*dims, dtype)
    return rates.matmul_s(*dims, dtype, sizes.block.local) / sizes.block.local


def _tiles(sizes: MatmulSizes) -> tuple[Number, Number, Number] | None:
    """Rows that an expert has more where two experts share a tile, which is executed for both; None without tiles."""
    experts = sizes.block.experts
    if experts is None or experts.tiles is None:
        return None
    forward, inputs, weights = (tile * (1.0 - 1.0 / experts.local) for tile in experts.tiles)
    return forward, inputs, weights


def _grouped_s(sizes: MatmulSizes, of: _Kernel, rows: Number, shape: MatmulShape, dtype: str) -> Number:
    """Seconds of one expert's part of a kernel that executes ``rows`` of it.

    The cores of a device deal out the columns of the result by tiles.
    """
    tile, chip = sizes.step.habits.group_dim, sizes.step.rates.chip
    columns = sizes.columns(shape)
    k, n = shape.k, columns
    if tile:
        dealt = tile * chip.cores // chip.devices
        of_k, of_n = (dealt, tile) if of == "inputs" else (tile, dealt)
        k, n = next_multiple(k, of_k), next_multiple(n, of_n)
    return grouped_matmul_seconds(chip, of, rows, k, n * (shape.n / columns), dtype)
