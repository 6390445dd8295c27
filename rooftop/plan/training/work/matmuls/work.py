"""The work of a block of matmuls in each phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rooftop.core.ledger import Number
from rooftop.plan.pricing import Work
from rooftop.plan.training.step import TrainingStep, attention_arrays
from rooftop.plan.training.work.elements import VECTOR_OPS
from rooftop.plan.training.work.matmuls.block import MatmulBlock, MatmulSizes
from rooftop.plan.training.work.matmuls.gathers import block_transfers
from rooftop.plan.training.work.matmuls.seconds import block_seconds


def matmul_work(step: TrainingStep, block: MatmulBlock) -> list[Work]:
    """Forward, recompute and backward of a block, and of its adapters; outside the layers nothing is recomputed."""
    if not block.shapes:
        return []
    return [*_block_work(step, block), *(work for part in _adapters(step, block) for work in _block_work(step, part))]


def _adapters(step: TrainingStep, block: MatmulBlock) -> Iterator[MatmulBlock]:
    """The matmuls A and B next to those of a block of frozen weights; none without adapters.

    x A is not kept, and made again in the backward pass. Where tensor splits the rows of a block, each device puts its
    part of x A through B, so that the sum over devices is that of the block; where it splits columns, all have x A.
    """
    arrays = block.arrays if block.experts is not None or not block.keys else attention_arrays(step.model)
    a, b = step.adapter_matmuls(block.scope, block.shapes, arrays)
    if not a:
        return
    own = replace(
        block, gathered=None, scattered=None, residual=False, keys=False, unstacked=0.0, rings=0.0, arrays=arrays
    )
    by_rows, alike = block.scattered is not None, block.gathered is None and block.scattered is None
    yield replace(own, shapes=a, adapter="a", again=1.0, whole_over_tensor=not by_rows)
    yield replace(own, shapes=b, adapter="b", whole_over_tensor=by_rows or alike)


def _block_work(step: TrainingStep, block: MatmulBlock) -> list[Work]:
    sizes = MatmulSizes(step=step, block=block)
    scope, count, again, flops = block.scope, block.count, block.again, sizes.flops
    seconds, operands, moved = block_seconds(sizes), _operands(sizes), _moved(sizes)
    transfers = block_transfers(sizes, seconds)
    stream = block.tokens * step.model.d_model * sizes.element / step.tensor
    terms = " + ".join("2 T k n" for _ in block.shapes)
    forward = Work(
        scope=scope, phase="forward", count=count, flops={sizes.dtype: flops}, matmul_s=seconds.forward_s,
        hbm_bytes=operands.forward,
        elementwise_bytes=moved.inputs + moved.weight + seconds.forward_passes + moved.cut + moved.out_of_stack,
        vector_flops=VECTOR_OPS["add"] * stream / sizes.element if block.residual else 0.0,
        collectives=transfers.forward, formula=terms,
    )  # fmt: skip
    backward = Work(
        scope=scope, phase="backward", count=count,
        flops={sizes.of_sum: 2 * flops}
        if sizes.of_gradient == sizes.of_sum
        else {sizes.of_gradient: flops, sizes.of_sum: flops},
        matmul_s=seconds.inputs_s + seconds.weights_s, hbm_bytes=operands.backward,
        elementwise_bytes=moved.outputs + block.unstacked + seconds.backward_passes + moved.cut,
        collectives=transfers.backward, formula=f"dX and dW: 2 x ({terms})",
    )  # fmt: skip
    if sizes.frozen:
        backward = replace(
            backward, flops={sizes.of_gradient: flops}, matmul_s=seconds.inputs_s,
            elementwise_bytes=moved.outputs + block.unstacked + seconds.backward_passes,
            formula=f"dX alone, the weight is frozen: {terms}",
        )  # fmt: skip
    if scope == "unembed":
        # The gathered weight is still there.
        return [forward, backward]
    regather = Work(
        scope=scope, phase="recompute", count=count, flops={sizes.dtype: flops * again},
        matmul_s=seconds.forward_s * again, hbm_bytes=operands.forward * again,
        elementwise_bytes=moved.inputs * again + moved.weight + seconds.again_passes
        + moved.cut + moved.out_of_stack_again,
        collectives=transfers.again,
        formula="weights and inputs gathered again; the matmul repeated where its output was not kept",
    )  # fmt: skip
    return [forward, regather, backward]


@dataclass(frozen=True, kw_only=True)
class _OperandBytes:
    """Bytes that the matmuls of a pass read and write while they run."""

    forward: Number
    backward: Number


def _operands(sizes: MatmulSizes) -> _OperandBytes:
    """The bytes of operands and results of each pass."""
    step, element, operand = sizes.step, sizes.element, sizes.operand
    # Arrays that share an input read it one by one, and their gradients of it are added up in HBM. Those of matmuls in
    # 8 bits are of 32 bits until the last one.
    sharing = sizes.block.arrays if len(sizes.block.shapes) == 1 and step.habits.separate_arrays else 1
    read, of_input = sharing * sizes.inputs, (sharing - 1) * 2.0 * (4.0 if sizes.narrow else element) + element
    forward = (read + sizes.weights) * operand + sizes.outputs * element
    backward = (sizes.outputs + sizes.weights) * (operand + element) + read * element + sizes.inputs * of_input
    if sizes.frozen:
        backward = (sizes.outputs + sizes.weights) * operand + sizes.inputs * of_input
        return _OperandBytes(forward=forward, backward=backward)
    # What adapters add to is read: the output of the frozen weights, and the gradient of their input.
    forward = forward + (sizes.block.adapter == "b") * sizes.outputs * element
    backward = backward + (sizes.block.adapter == "a") * sizes.inputs * element
    # Sums of gradients are read by the matmuls that add to them.
    summed = element * sizes.weights if step.habits.adds_in_matmuls else 0.0
    return _OperandBytes(forward=forward, backward=backward + summed)


@dataclass(frozen=True, kw_only=True)
class _MovedBytes:
    """Bytes of passes before and after the matmuls.

    ``inputs``, ``outputs`` and ``weight`` are those of quantisation, and of weights that are unpacked; ``cut`` those of
    rows that fsdp adds, which are cut off once the weight is gathered, and put to its gradient. A device's part of a
    weight is copied ``out_of_stack`` of layers before it is gathered.
    """

    inputs: Number
    outputs: Number
    weight: Number
    cut: Number
    out_of_stack: Number
    out_of_stack_again: Number


def _moved(sizes: MatmulSizes) -> _MovedBytes:
    """The bytes that a block moves besides its operands."""
    step, element, operand = sizes.step, sizes.element, sizes.operand
    weights = sizes.weights
    # An activation is read and written in fewer bits: its maxima are fused into what makes it. A device quantises its
    # own part of a weight, which it reads for the maxima and once more.
    of_weight = weights / sizes.gather * (2.0 * element + operand) if sizes.quantises_weights else 0.0
    if step.habits.quantises_once:
        of_weight = of_weight / step.strategies.microbatches
    if sizes.resting < operand:
        of_weight = weights * (sizes.resting + operand)
    quantised = step.habits.quantising_reads * element + step.habits.quantised_copies * operand
    copied: tuple[Number, Number] = (0.0, 0.0)
    if sizes.block.scope.startswith("layers") and step.habits.unstacks_weights:
        # Forward into VMEM. What is not gathered is copied for the backward pass only.
        part = weights / sizes.gather * sizes.resting
        copied = np.where(sizes.gather > 1, part, 0.0), 2.0 * part
    return _MovedBytes(
        inputs=sizes.inputs * quantised if sizes.narrow else 0.0,
        outputs=sizes.outputs * quantised if sizes.narrow else 0.0,
        weight=of_weight,
        cut=step.habits.cuts_padding * np.where(sizes.stored > weights, (sizes.stored + weights) * element, 0.0),
        out_of_stack=copied[0],
        out_of_stack_again=copied[1],
    )
