"""Layers of experts: router, the AllToAll of tokens there and back, routed and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, GATHER_AXES
from rooftop.core.ledger import Number
from rooftop.plan.pricing import Transfer, Work, unless
from rooftop.plan.shapes import mlp_matmuls
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.checkpoints import offloads, stacked_bytes, unstacked_bytes
from rooftop.plan.training.work.elements import activation, norm
from rooftop.plan.training.work.matmuls import matmuls
from rooftop.plan.training.work.phases import backward, recompute
from rooftop.roofline.rules import distinct_parts

#: The scope in which each checkpoint of such a layer is made, and so leaves for host memory and comes back.
_EXPERT_CHECKPOINTS = {
    "mlp_input": "layers/mlp/norm",
    "mlp_normed": "layers/moe/dispatch",
    "mlp_up": "layers/moe/experts",
    "mlp_act": "layers/moe/experts",
    "mlp_down": "layers/moe/experts",
}


#: Passes over the rows of experts on their way there or back, as counted in compiled programs: rows gathered by index,
#: zeros in empty slots, and copies into the layouts of the AllToAll and of the matmuls.
_EXCHANGE_PASSES = 4.0
#: Passes more over rows of experts, in units of bf16, before they are quantised in the forward pass: a read and a write
#: as float32 (3), a copy of these into the layout of the matmul (4), and a read of float32 in place of bf16 (1).
#: Counted in the program of DeepSeek-V2-Lite in int8 (docs/accuracy.md).
_WIDENED_PASSES = 8.0
#: Passes (a read or a write) of a kernel that puts the rows of experts in order, by token or by expert.
_PERMUTE_PASSES = 2.0


def expert_work(step: TrainingStep, count: Number) -> list[Work]:
    """Work of ``count`` layers of experts, with the norm before them and the shared experts next to them."""
    model, moe = step.model, step.model.moe
    assert moe is not None
    element = step.element_bytes

    def recomputed(name: str) -> Number:
        """1 where a checkpoint is made again, as all are in a stage (``programs.sharding.on_shards``)."""
        nested = step.staged if step.assumptions.own_program else 0.0
        again: Number = np.maximum(step.strategies.recomputed(name), nested)
        return again

    own = step.tokens / step.tensor  # The router and the exchange work on the sequence shard of each device.
    # Experts that pad a shard have slots like any other.
    slots = step.habits.capacity * moe.active * (step.widths.experts * step.expert_ways / moe.experts)
    up_tiles, down_tiles = step.habits.group_rows or (None, None)
    whole, columns = step.whole_experts, step.columns_of_expert
    # Tokens of the whole tensor group, unless each of its devices has its own experts.
    routed = np.where(whole, own, step.tokens) * slots
    sent = own * slots * model.d_model * element
    again = recomputed("mlp_up")
    exchange = _exchange(step, sent)
    # Each pair's weight goes with it, in float32; the expert's output comes back weighed.
    dispatch = _exchange(step, sent + 4.0 * own * slots)
    up, down = mlp_matmuls(model, columns)
    # Tokens of all expert shards meet here; each local expert sees its share of them.
    local = step.widths.experts
    per_expert = routed / local
    gathered = routed * model.d_model * element
    passes = _EXCHANGE_PASSES * step.passed(sent)
    if step.slice.chip.kind == "gpu":
        # PyTorch's AllToAll needs rows in order on either side; a dispatcher of nodes has one copy for each GPU until
        # then. XLA:GPU gathers and scatters rows by index, 10.7 passes in the five times that they are moved.
        twice = step.habits.kernels is not None and step.habits.dispatch == "experts"
        passes = _PERMUTE_PASSES * sent * (2.0 if twice else 1.0)
    masked_s: Number = 0.0
    if step.habits.one_hot:
        # Of each sequence, [slots, T] x [T, D]. The mask is written and read, and so are the rows.
        length = step.workload.seq_len
        masked_s = step.rates.matmul_s(
            slots * length, length, model.d_model, step.numerics.compute, np.maximum(1.0, own / length)
        )
        passes = 2.0 * own * slots * length * element + sent + own * model.d_model * element
    move = Work(
        scope="layers/moe/dispatch", phase="forward", count=count, hbm_bytes=passes, collectives=dispatch,
        matmul_s=masked_s,
        formula="k T D bytes put into slots and sent to their experts by an AllToAll, with the weights of k experts",
    )  # fmt: skip
    back = Work(
        scope="layers/moe/combine", phase="forward", count=count, hbm_bytes=passes, collectives=exchange,
        vector_flops=2 * sent / element, matmul_s=masked_s, formula="AllToAll back, then the weighted sum of k experts",
    )  # fmt: skip
    # Shards of several experts arrive device by device: a copy puts those of each expert together.
    together = np.where(
        (local > 1) & (step.strategies.devices(*GATHER_AXES) > 1),
        step.passed(step.stored(down) * local * step.operand_bytes),
        0.0,
    )
    hidden = routed * columns * element
    # The experts' inputs are gathered over tensor with their weights.
    shares = Work(
        scope="layers/moe/experts", phase="forward", count=count,
        collectives=(Transfer("all_gather", COLUMN_AXES, 4.0 * routed, "tensor", unless(whole)),),
        formula="weights of k experts",
    )  # fmt: skip
    # The gradients of these weights read all hidden activations once more.
    of_shares = replace(backward(shares, 1.0), hbm_bytes=model.mlp_matrices * hidden)
    copies = Work(
        scope="layers/moe/experts", phase="forward", count=count, hbm_bytes=model.mlp_matrices * together,
        formula="gathered weights of several experts put together",
    )  # fmt: skip
    narrow = step.operand_bytes < step.element_bytes and step.assumptions.own_program
    widened = Work(
        scope="layers/moe/experts", phase="forward", count=count,
        elementwise_bytes=_WIDENED_PASSES * sent if narrow and step.slice.chip.kind == "tpu" else 0.0,
        formula="rows of experts made float32 before they are copied into the layout of matmuls in 8 bits",
    )  # fmt: skip
    scattered = (Transfer("reduce_scatter", COLUMN_AXES, 4.0 * routed, "tensor", unless(whole)),)
    work = [
        # Kept are the rows of experts, not the norm's output that the router's gradient reads.
        *norm(step, "layers/mlp/norm", count, 1.0),
        *matmuls(step, "layers/moe/router", count, [step.router], own, again=again),
        move,
        recompute(move, recomputed("mlp_normed")),
        _moved_back(step, move),
        *matmuls(
            step,
            "layers/moe/experts",
            count * local,
            up,
            per_expert,
            gathered=gathered / local,
            again=again,
            dims=("embed", "expert"),
            experts=local,
            arrays=model.mlp_matrices - 1,
            whole=whole,
            stacked=stacked_bytes(step, _EXPERT_CHECKPOINTS, moe_layer=True) / local,
            tiles=up_tiles,
        ),
        shares,
        copies,
        widened,
        recompute(shares, 1.0),
        replace(of_shares, collectives=scattered),
        *activation(step, "layers/moe/experts", count, routed * columns, again=recomputed("mlp_act")),
        *matmuls(
            step,
            "layers/moe/experts",
            count * local,
            down,
            per_expert,
            scattered=gathered / local,
            again=recomputed("mlp_down") if step.habits.weighs_outputs else 0.0,
            dims=("embed", "expert"),
            experts=local,
            whole=whole,
            unstacked=unstacked_bytes(step, _EXPERT_CHECKPOINTS, moe_layer=True) / local,
            tiles=down_tiles,
        ),
        back,
        # A mask with the weights has a gradient too.
        replace(backward(back, 1.0), matmul_s=2.0 * masked_s),
        *offloads(step, count, _EXPERT_CHECKPOINTS, moe_layer=True),
    ]
    if moe.shared_d_ff:
        stream = step.tokens * model.d_model * element
        columns = step.columns(moe.shared_d_ff)
        up, down = mlp_matmuls(model, columns)
        scope = "layers/moe/shared"
        work += [
            *matmuls(step, scope, count, up, step.tokens, gathered=stream, again=again, arrays=model.mlp_matrices - 1),
            *activation(step, scope, count, step.tokens * columns, again=recomputed("mlp_act")),
            *matmuls(step, scope, count, down, step.tokens, scattered=stream, again=0.0),
        ]
    return work


def _moved_back(step: TrainingStep, move: Work) -> Work:
    """The way back of gradients of rows; XLA:GPU has gradients of experts' weights next to it."""
    back = backward(move, 1.0)
    if step.slice.chip.kind != "gpu" or step.habits.kernels is not None:
        return back
    return replace(back, collectives=tuple(replace(one, hides="gradient_scatter") for one in back.collectives))


def _exchange(step: TrainingStep, payload: Number) -> tuple[Transfer, ...]:
    """The AllToAll of tokens over the devices that have experts."""
    whole, both = step.whole_experts, (*EXPERT_AXES, *COLUMN_AXES)
    over_experts = Transfer(
        "all_to_all", EXPERT_AXES, payload, "all_to_all", unless(whole), shares=_sent_once(step, EXPERT_AXES)
    )
    if not np.any(whole):
        return (over_experts,)
    return over_experts, Transfer("all_to_all", both, payload, "all_to_all", whole, shares=_sent_once(step, both))


def _sent_once(step: TrainingStep, axes: tuple[str, ...]) -> Mapping[str, Number]:
    """The shares of an AllToAll's bytes that are left where a token is sent once to each node, and there to each GPU.

    A token goes to the nodes and GPUs that its experts are in; those of other nodes arrive at one GPU of a node, and go
    on to the others within it.
    """
    moe = step.model.moe
    if moe is None or step.habits.dispatch == "experts":
        return {}
    devices, within = step.strategies.devices(*axes), step.strategies.price("all_to_all", axes).ranks
    # Groups of layouts have least prices, those of the most devices in a node.
    node = float(np.prod(step.slice.chip.pod_shape))
    nodes = devices / (np.minimum(devices, node) if within is None else within)
    parts = partial(distinct_parts, moe.experts, moe.active, groups=moe.groups, active_groups=moe.active_groups)
    return {"ici": nodes * parts(devices) / moe.active, "dcn": parts(nodes) / moe.active}
