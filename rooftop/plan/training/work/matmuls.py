"""Matmuls with their weights: gathered, multiplied three times, and their gradients scattered.

Chapter 5 of the book. Forward is [T, k] x [k, n]; backward is dX = [T, n] x [n, k] and dW = [k, T] x [T, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, GATHER_AXES, REPLICA_AXES, copy_axes
from rooftop.core.ledger import CollectiveKind, Number
from rooftop.core.rounding import next_multiple
from rooftop.models.attention import MatmulShape, parameters
from rooftop.plan.pricing import ALWAYS, RingSteps, Transfer, Work, unless
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.elements import VECTOR_OPS
from rooftop.roofline.achievable import grouped_matmul_seconds

#: HBM passes of collective matmuls beyond those of plain ones, as counted in compiled layers
#: (docs/collective-matmul.md): of their outputs, whose buffers XLA copies; of a gathered stream that the gradients of
#: weights read, put together from shards; and of a scattered shard, of which a device's own term is added last.
_BUFFER_PASSES, _WHOLE_PASSES, _SCATTER_PASSES = 2.0, 2.0, 4.0
#: Pieces of a matmul whose output is scattered piece by piece: Megatron's user buffers have four (Megatron-Bridge's
#: performance guide).
_SCATTER_PIECES = 4


def matmuls(
    step: TrainingStep,
    scope: str,
    count: Number,
    shapes: Sequence[MatmulShape],
    tokens: Number,
    *,
    again: Number,
    gathered: Number | None = None,
    scattered: Number | None = None,
    residual: bool = False,
    dims: tuple[str, ...] = ("embed",),
    keys: bool = False,
    experts: Number = 1.0,
    arrays: int = 1,
    heads: Sequence[int] = (),
    unstacked: Number = 0.0,
    stacked: Number = 0.0,
    rings: Number = 0.0,
    whole: Number = 0.0,
    tiles: tuple[int, int, int] | None = None,
) -> list[Work]:
    """Forward, recompute and backward of ``shapes``, matmuls that share an input or feed one output.

    ``gathered`` is the bytes of the input once gathered over tensor, ``scattered`` those of the partial sums that
    are scattered over it; ``again`` is 1 where the forward pass is recomputed; ``residual`` adds the sum into the
    residual stream. ``dims`` are logical dims of the weights: axes that split none of them hold copies, whose
    gradients are summed at once in pipeline stages, elsewhere once a step. ``keys``: key and value heads are among the
    columns, which are gathered over tensor too where devices have heads in common. Weights are in ``arrays`` arrays,
    each with collectives of its own, of as many ``experts`` at once; ``shapes`` are of one. The columns of each may be
    ``heads`` of so many elements. ``stacked`` are bytes of checkpoints that the forward pass moves, ``unstacked`` those
    that the backward pass moves before it. Where ``rings`` is 1, shards of the input or the output travel next to the
    matmul, which is done in pieces. Where ``whole`` is 1, tensor splits nothing here, and nothing is gathered or
    scattered over it. ``tiles`` are rows of a tile of the kernels that multiply the rows of all ``experts``, forward,
    for gradients of inputs and of weights; None: the compiler multiplies the experts as one batch.
    """
    if not shapes:
        return []
    element, compute = step.element_bytes, step.numerics.compute
    # Routers and the unembedding multiply in the dtype of activations.
    dtype = step.numerics.matmul if scope.startswith("layers") and scope != "layers/moe/router" else compute
    operand = element if dtype == compute else step.operand_bytes
    narrow = operand < element
    of_gradient = "f8_e5m2" if dtype == "f8_e4m3" else dtype
    of_sum = of_gradient if step.assumptions.narrow_gradients else compute
    weights = parameters(shapes)
    inputs = sum((tokens * m.k for m in shapes), 0.0)
    outputs = sum((tokens * m.n for m in shapes), 0.0)
    flops = 2.0 * sum((tokens * m.parameters for m in shapes), 0.0)
    # Arrays that share an input read it one by one, and their gradients of it are added up in HBM. Those of matmuls in
    # 8 bits are of 32 bits until the last one.
    sharing = arrays if len(shapes) == 1 and step.assumptions.own_program else 1
    read, of_input = sharing * inputs, (sharing - 1) * 2.0 * (4.0 if narrow else element) + element
    forward_bytes = (read + weights) * operand + outputs * element
    backward_bytes = (outputs + weights) * (operand + element) + read * element + inputs * of_input
    # Rows that fsdp adds are cut off once the weight is gathered, and put to its gradient.
    stored = step.stored(shapes)
    cut = np.where(stored > weights, (stored + weights) * element, 0.0) if step.assumptions.own_program else 0.0
    # An activation is read and written in fewer bits: its maxima are fused into what makes it. A device quantises its
    # own part of a weight, which it reads for the maxima and once more.
    of_weight = weights / step.strategies.devices(*GATHER_AXES) * (2.0 * element + operand) if narrow else 0.0
    if step.habits.quantises_once:
        of_weight = of_weight / step.strategies.microbatches
    # A device's part of a weight is copied out of the stack of layers before it is gathered, forward into VMEM. What is
    # not gathered is copied for the backward pass only.
    out_of_stack: tuple[Number, Number] = (0.0, 0.0)
    if scope.startswith("layers") and step.assumptions.own_program and step.slice.chip.kind == "tpu":
        ways = step.strategies.devices(*GATHER_AXES)
        part = weights / ways * element
        out_of_stack = np.where(ways > 1, part, 0.0), 2.0 * part
    # Sums of gradients are read by the matmuls that add to them.
    summed_bytes = element * weights if step.habits.adds_in_matmuls else 0.0
    quantised = step.habits.quantising_reads * element + step.habits.quantised_copies * operand
    of_inputs, of_outputs = (size * quantised if narrow else 0.0 for size in (inputs, outputs))
    stream = tokens * step.model.d_model * element / step.tensor
    weights = (stored - (step.own_keys if keys else 0.0)) * element

    def share_s(m: Number, k: Number, n: Number, dtype: str) -> Number:
        """Seconds of one expert's part of the batch, or of its own matmul."""
        if not step.habits.groups_experts:
            return step.rates.matmul_s(m, k, n, dtype)
        return step.rates.matmul_s(m, k, n, dtype, experts) / experts

    def grouped_s(of: Literal["forward", "inputs", "weights"], rows: Number, shape: MatmulShape, dtype: str) -> Number:
        """Seconds of one expert's part of a kernel, which executes tiles that two experts share for both.

        The cores of a device deal out the columns of the result by tiles.
        """
        assert tiles is not None
        executed = rows + tiles[("forward", "inputs", "weights").index(of)] * (1.0 - 1.0 / experts)
        tile, chip = step.habits.group_dim, step.rates.chip
        columns = shape.n if len(shapes) > 1 else shape.n / arrays
        k, n = shape.k, columns
        if tile:
            dealt = tile * chip.cores // chip.devices
            of_k, of_n = (dealt, tile) if of == "inputs" else (tile, dealt)
            k, n = next_multiple(k, of_k), next_multiple(n, of_n)
        return grouped_matmul_seconds(chip, of, executed, k, n * (shape.n / columns), dtype)

    def into_s(rows: Number) -> Number:
        if tiles is not None:
            return sum((grouped_s("forward", rows, m, dtype) for m in shapes), 0.0)
        return sum((share_s(rows, m.k, m.n, dtype) for m in shapes), 0.0)

    def back_s(rows: Number) -> Number:
        if tiles is not None:
            return sum((grouped_s("inputs", rows, m, of_gradient) for m in shapes), 0.0)
        return sum((share_s(rows, m.n, m.k, of_gradient) for m in shapes), 0.0)

    forward_s, dx_s = into_s(tokens), back_s(tokens)
    forward_ring: RingSteps | None = None
    backward_ring: RingSteps | None = None
    forward_passes: Number = 0.0
    again_passes: Number = 0.0
    backward_passes: Number = 0.0
    payload = gathered if scattered is None else scattered
    if payload is not None and np.any(rings):
        # A gathered input makes one matmul of each shard. A scattered output has this device's shard as one, and the
        # others in halves.
        shard, into, out = tokens / step.tensor, *((into_s, back_s) if scattered is None else (back_s, into_s))
        gathered_s: Number = step.tensor * into(shard)
        scattered_s: Number = out(shard) + 2 * (step.tensor - 1) * out(shard / 2)
        if step.habits.kernels is not None:
            # An input is quantised once; what each piece more costs is the start of its matmul.
            start_s = step.rates.fractions.matmul["16-bit"].start_s
            gathered_s, scattered_s = into(tokens), out(tokens) + (_SCATTER_PIECES - 1) * start_s
            gathered_s = gathered_s + (step.tensor - 1) * start_s
        pieces_s = gathered_s, scattered_s
        ring = partial(
            RingSteps,
            on=rings,
            members=step.tensor,
            pieces=0 if step.habits.kernels is None else _SCATTER_PIECES,
            at_once=step.rates.overlap.asynchronous == "all",
        )
        gathering, scattering = ring(beside_s=into(shard), sums=False), ring(beside_s=out(shard), sums=True)
        added = rings * _SCATTER_PASSES * payload / step.tensor
        if scattered is None:
            forward_s, dx_s = np.where(rings, pieces_s[0], forward_s), np.where(rings, pieces_s[1], dx_s)
            forward_ring, backward_ring = gathering, scattering
            forward_passes = rings * _BUFFER_PASSES * outputs * element
            again_passes = again * (forward_passes + rings * _WHOLE_PASSES * payload)
            backward_passes = added + rings * (arrays - 1) * payload
        else:
            forward_s, dx_s = np.where(rings, pieces_s[1], forward_s), np.where(rings, pieces_s[0], dx_s)
            forward_ring, backward_ring = scattering, gathering
            forward_passes, again_passes = added, again * added
            backward_passes = rings * _WHOLE_PASSES * payload
    if tiles is None:
        dw_s = sum((share_s(m.k, tokens, m.n, of_sum) for m in shapes), 0.0)
    else:
        dw_s = sum((grouped_s("weights", tokens, m, of_sum) for m in shapes), 0.0)
    pieces = arrays / experts
    gather_weight: tuple[Transfer, ...] = (
        Transfer("all_gather", GATHER_AXES, weights * operand / element, "weight_gather", pieces=pieces),
    )
    split_columns = unless(whole)
    # Maxima of whole columns of weights, and of whole tokens, each a float32, where devices split the summed dim.
    input_maxima: tuple[Transfer, ...] = ()
    gradient_maxima: tuple[Transfer, ...] = ()
    if narrow:
        columns = 4.0 * sum((m.n for m in shapes), 0.0)
        over_columns = scattered is not None
        split = (*GATHER_AXES, *COLUMN_AXES) if over_columns else GATHER_AXES
        gather_weight += (
            Transfer("all_reduce", split, columns, "tensor", split_columns if over_columns else ALWAYS, pieces=pieces),
        )
        if over_columns and np.any(whole):
            gather_weight += (Transfer("all_reduce", GATHER_AXES, columns, "tensor", whole, pieces=pieces),)
        of_tokens = partial(Transfer, "all_reduce", COLUMN_AXES, hides="tensor", when=split_columns)
        if over_columns:
            input_maxima = (of_tokens(4.0 * tokens, pieces=1 / experts),)
        elif gathered is not None:
            gradient_maxima = (of_tokens(4.0 * tokens * arrays, pieces=pieces),)
    several_experts = experts if "expert" in dims else 0.0
    scatter_weight: tuple[Transfer, ...] = ()
    for shape, head in zip(shapes, heads or (0,) * len(shapes), strict=True):
        # Several shapes are one array each; a gate and an up are one shape.
        columns = shape.n if len(shapes) > 1 or head else shape.n / arrays
        summed = step.summed_whole(MatmulShape(shape.k, columns), head=head, experts=several_experts)
        share = weights if len(shapes) == 1 else step.stored([shape]) * element
        # Parts of heads or experts are scattered in whole tiles or not at all.
        moves, rows = (0.0, 0.0) if head or "expert" in dims else step.shifts(shape.k)
        scatter_weight += (
            Transfer(
                "reduce_scatter", GATHER_AXES, share, "gradient_scatter", pieces=pieces / len(shapes), summed=summed,
                shifts=moves * pieces / len(shapes), shifted=rows * columns * element,
            ),
        )  # fmt: skip
    if keys and np.any(step.copied_keys):
        copied, both, when = step.copied_keys * element, (*GATHER_AXES, *COLUMN_AXES), step.widths.copied_keys
        gather_weight += (Transfer("all_gather", both, copied * operand / element, "weight_gather", when, pieces=2),)
        scatter_weight += (Transfer("reduce_scatter", both, copied, "gradient_scatter", when, pieces=2),)
    if np.any(step.staged):
        own = weights / step.strategies.devices(*GATHER_AXES)
        copies = tuple(axis for axis in copy_axes(*dims) if axis not in REPLICA_AXES)
        scatter_weight += (Transfer("all_reduce", copies, own, "gradient_scatter", step.staged),)

    def exchange(kind: CollectiveKind, payload: Number | None, ring: RingSteps | None) -> tuple[Transfer, ...]:
        if payload is None:
            return ()
        if step.habits.quantises_once and kind == "all_gather":
            # Inputs and gradients are quantised where they are made.
            payload = payload * operand / element
        return (Transfer(kind, COLUMN_AXES, payload, "tensor", split_columns, pieces=1 / experts, ring=ring),)

    gather_input = exchange("all_gather", gathered, forward_ring)
    scatter_input = exchange("reduce_scatter", gathered, backward_ring)
    scatter_output = exchange("reduce_scatter", scattered, forward_ring)
    gather_output = exchange("all_gather", scattered, backward_ring)
    # Where no matmul is repeated, none can be next to the hops.
    again_ring = None if forward_ring is None else replace(forward_ring, on=forward_ring.on * again)
    input_again = exchange("all_gather", gathered, again_ring)
    if step.habits.hides_gradients:
        # Inputs arrive next to matmuls of gradients of inputs, and these are summed next to those of weights.
        input_again, scatter_input = (
            tuple(replace(one, hides="gradient_scatter", ring=None) for one in some)
            for some in (input_again, scatter_input)
        )
    terms = " + ".join("2 T k n" for _ in shapes)
    once = scope == "unembed"  # Outside the layers nothing is recomputed and the gathered weight is still there.
    forward = Work(
        scope=scope, phase="forward", count=count, flops={dtype: flops}, matmul_s=forward_s,
        hbm_bytes=forward_bytes,
        elementwise_bytes=of_inputs + of_weight + forward_passes + cut + out_of_stack[0] + stacked,
        vector_flops=VECTOR_OPS["add"] * stream / element if residual else 0.0,
        collectives=gather_weight + gather_input + input_maxima + scatter_output, formula=terms,
    )  # fmt: skip
    backward = Work(
        scope=scope, phase="backward", count=count,
        flops={of_sum: 2 * flops} if of_gradient == of_sum else {of_gradient: flops, of_sum: flops},
        matmul_s=dx_s + dw_s, hbm_bytes=backward_bytes + summed_bytes,
        elementwise_bytes=of_outputs + unstacked + backward_passes + cut,
        collectives=scatter_weight + gather_output + gradient_maxima + scatter_input,
        formula=f"dX and dW: 2 x ({terms})",
    )  # fmt: skip
    # In the backward pass weights, and inputs that are kept as shards, are gathered whether or not the matmul is
    # repeated; the matmul and its scattered output only if its result was not kept.
    regather = Work(
        scope=scope, phase="recompute", count=0 if once else count,
        flops={dtype: flops * again}, matmul_s=forward_s * again,
        hbm_bytes=forward_bytes * again,
        elementwise_bytes=of_inputs * again + of_weight + again_passes + cut + out_of_stack[1],
        collectives=gather_weight
        + input_again
        + tuple(replace(t, payload=t.payload * again) for t in (*input_maxima, *scatter_output)),
        formula="weights and inputs gathered again; the matmul repeated where its output was not kept",
    )  # fmt: skip
    return [forward, backward] if once else [forward, regather, backward]
