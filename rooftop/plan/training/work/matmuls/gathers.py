"""Transfers of a block of matmuls: weights gathered, inputs gathered, outputs and gradients scattered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, GATHER_AXES, REPLICA_AXES, copy_axes
from rooftop.core.ledger import CollectiveKind, Number
from rooftop.models.attention import MatmulShape
from rooftop.plan.pricing import ALWAYS, RingSteps, Transfer
from rooftop.plan.training.work.matmuls.block import MatmulSizes
from rooftop.plan.training.work.matmuls.seconds import BlockSeconds


@dataclass(frozen=True, kw_only=True)
class PhaseTransfers:
    """The transfers of a block in each phase; those of ``again`` where its forward pass is repeated, or is not."""

    forward: tuple[Transfer, ...]
    again: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]


def block_transfers(sizes: MatmulSizes, seconds: BlockSeconds) -> PhaseTransfers:
    """All transfers of a block, in the order of each phase.

    In the backward pass weights, and inputs that are kept as shards, are gathered whether or not the matmul is
    repeated; its scattered output only if its result was not kept.
    """
    step, block = sizes.step, sizes.block
    weights = _gathered_weights(sizes)
    gather_input = _exchange(sizes, "all_gather", block.gathered, seconds.forward_ring)
    scatter_input = _exchange(sizes, "reduce_scatter", block.gathered, seconds.inputs_ring)
    scatter_output = _exchange(sizes, "reduce_scatter", block.scattered, seconds.forward_ring)
    gather_output = _exchange(sizes, "all_gather", block.scattered, seconds.inputs_ring)
    # Where no matmul is repeated, none can be next to the hops.
    ring = seconds.forward_ring
    again_ring = None if ring is None else replace(ring, on=ring.on * block.again)
    input_again = _exchange(sizes, "all_gather", block.gathered, again_ring)
    if step.habits.hides_gradients:
        # Inputs arrive next to matmuls of gradients of inputs, and these are summed next to those of weights.
        input_again, scatter_input = (
            tuple(replace(one, hides="gradient_scatter", ring=None) for one in some)
            for some in (input_again, scatter_input)
        )
    input_maxima, gradient_maxima = _maxima(sizes)
    repeated = tuple(replace(one, payload=one.payload * block.again) for one in (*input_maxima, *scatter_output))
    return PhaseTransfers(
        forward=weights + gather_input + input_maxima + scatter_output,
        again=weights + input_again + repeated,
        backward=_scattered_gradients(sizes) + gather_output + gradient_maxima + scatter_input,
    )


def _exchange(
    sizes: MatmulSizes, kind: CollectiveKind, payload: Number | None, ring: RingSteps | None
) -> tuple[Transfer, ...]:
    """An input, an output or the gradient of one, gathered or scattered over tensor; none without a ``payload``."""
    if payload is None:
        return ()
    if sizes.step.habits.quantises_once and kind == "all_gather":
        # Inputs and gradients are quantised where they are made.
        payload = payload * sizes.operand / sizes.element
    when, pieces = sizes.split, 1 / sizes.block.local
    return (Transfer(kind, COLUMN_AXES, payload, "tensor", when, pieces=pieces, ring=ring),)


def _gathered_weights(sizes: MatmulSizes) -> tuple[Transfer, ...]:
    """The weights gathered over fsdp, with the maxima of their columns if they are quantised."""
    step, block = sizes.step, sizes.block
    gathered: tuple[Transfer, ...] = (
        Transfer(
            "all_gather", GATHER_AXES, sizes.stored_bytes * sizes.sent / sizes.element, "weight_gather",
            pieces=block.pieces,
        ),
    )  # fmt: skip
    if sizes.quantises_weights:
        # Maxima of whole columns of weights, each a float32, where devices split the summed dim.
        columns = 4.0 * sum((m.n for m in block.shapes), 0.0)
        maxima = partial(Transfer, "all_reduce", payload=columns, hides="tensor", pieces=block.pieces)
        if block.scattered is None:
            gathered += (maxima(axes=GATHER_AXES, when=ALWAYS),)
        else:
            gathered += (maxima(axes=(*GATHER_AXES, *COLUMN_AXES), when=sizes.split),)
            if np.any(block.whole):
                gathered += (maxima(axes=GATHER_AXES, when=block.whole),)
    if block.keys and np.any(step.copied_keys):
        copied, both, when = step.copied_keys * sizes.element, (*GATHER_AXES, *COLUMN_AXES), step.widths.copied_keys
        payload = copied * sizes.sent / sizes.element
        gathered += (Transfer("all_gather", both, payload, "weight_gather", when, pieces=2),)
    return gathered


def _maxima(sizes: MatmulSizes) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Maxima of whole tokens of quantised inputs and gradients, each a float32, where devices split the summed dim."""
    block = sizes.block
    if not sizes.narrow:
        return (), ()
    of_tokens = partial(Transfer, "all_reduce", COLUMN_AXES, hides="tensor", when=sizes.split)
    if block.scattered is not None:
        return (of_tokens(4.0 * block.tokens, pieces=1 / block.local),), ()
    if block.gathered is not None:
        return (), (of_tokens(4.0 * block.tokens * block.arrays, pieces=block.pieces),)
    return (), ()


def _scattered_gradients(sizes: MatmulSizes) -> tuple[Transfer, ...]:
    """Gradients of weights scattered over fsdp, and in pipeline stages summed over the axes that hold copies."""
    step, block = sizes.step, sizes.block
    if sizes.frozen:
        return ()
    many = len(block.shapes)
    scattered = tuple(
        Transfer(
            "reduce_scatter", GATHER_AXES,
            sizes.stored_bytes if many == 1 else step.stored([shape]) * sizes.element,
            "gradient_scatter", pieces=block.pieces / many,
            summed=step.summed_whole(MatmulShape(shape.k, sizes.columns(shape))),
        )
        for shape in block.at_rest
    )  # fmt: skip
    if block.keys and np.any(step.copied_keys):
        copied, both, when = step.copied_keys * sizes.element, (*GATHER_AXES, *COLUMN_AXES), step.widths.copied_keys
        scattered += (Transfer("reduce_scatter", both, copied, "gradient_scatter", when, pieces=2),)
    if np.any(step.staged):
        own = sizes.stored_bytes / sizes.gather
        sequence = "residual_seq" if block.whole_over_tensor else "seq"
        copies = tuple(axis for axis in copy_axes(*block.dims, sequence=sequence) if axis not in REPLICA_AXES)
        scattered += (Transfer("all_reduce", copies, own, "gradient_scatter", step.staged),)
    return scattered
