"""Layers of experts: router, the AllToAll of tokens there and back, routed and shared experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, GATHER_AXES
from rooftop.core.ledger import Number
from rooftop.models.attention import MatmulShape
from rooftop.models.config import MoE
from rooftop.plan.pricing import Transfer, Work, unless
from rooftop.plan.shapes import mlp_matmuls
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.checkpoints import offloads, stacked_bytes, unstacked_bytes
from rooftop.plan.training.work.elements import activation, norm
from rooftop.plan.training.work.matmuls.block import ExpertBatch, MatmulBlock
from rooftop.plan.training.work.matmuls.work import matmul_work
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
#: Counted in the program of DeepSeek-V2-Lite in int8 (docs/evidence/accuracy.md).
_WIDENED_PASSES = 8.0
#: Passes (a read or a write) of a kernel that puts the rows of experts in order, by token or by expert.
_PERMUTE_PASSES = 2.0


@dataclass(frozen=True, kw_only=True)
class _Routed:
    """Tokens of a layer and the rows of experts that a device makes of them."""

    step: TrainingStep
    moe: MoE

    @property
    def own(self) -> Number:
        """Tokens of a device's shard of the sequence, on which the router and the exchange work."""
        return self.step.tokens / self.step.tensor

    @cached_property
    def slots(self) -> Number:
        """Rows of experts per token; experts that pad a shard have slots like any other."""
        step = self.step
        return step.habits.capacity * self.moe.active * (step.widths.experts * step.expert_ways / self.moe.experts)

    @cached_property
    def rows(self) -> Number:
        """Rows of all local experts: of the whole tensor group, unless each of its devices has its own experts."""
        return np.where(self.step.whole_experts, self.own, self.step.tokens) * self.slots

    @cached_property
    def sent(self) -> Number:
        """Bytes of a device's rows on their way to their experts."""
        return self.own * self.slots * self.step.model.d_model * self.step.element_bytes

    @cached_property
    def masked_s(self) -> Number:
        """Seconds of a matmul with a one-hot mask that puts rows in their slots: [slots, T] x [T, D] a sequence."""
        step, length = self.step, self.step.workload.seq_len
        if not step.habits.one_hot:
            return 0.0
        return step.rates.matmul_s(
            self.slots * length, length, step.model.d_model, step.numerics.compute, np.maximum(1.0, self.own / length)
        )

    @cached_property
    def moved(self) -> Number:
        """HBM bytes of putting rows into slots, or of taking them out."""
        step = self.step
        if step.habits.one_hot:
            # The mask is written and read, and so are the rows.
            masks = 2.0 * self.own * self.slots * step.workload.seq_len * step.element_bytes
            return masks + self.sent + self.own * step.model.d_model * step.element_bytes
        if step.slice.chip.kind == "gpu":
            # PyTorch's AllToAll needs rows in order on either side; a dispatcher of nodes has one copy for each GPU
            # until then. XLA:GPU gathers and scatters rows by index, 10.7 passes in the five times that they are moved.
            twice = step.habits.kernels is not None and step.habits.dispatch == "experts"
            return _PERMUTE_PASSES * self.sent * (2.0 if twice else 1.0)
        return _EXCHANGE_PASSES * step.passed(self.sent)

    def recomputed(self, name: str) -> Number:
        """1 where a checkpoint is made again, as all are in a stage (``programs.sharding.on_shards``)."""
        nested = self.step.staged if self.step.assumptions.own_program else 0.0
        again: Number = np.maximum(self.step.strategies.recomputed(name), nested)
        return again


def expert_work(step: TrainingStep, count: Number) -> list[Work]:
    """Work of ``count`` layers of experts, with the norm before them and the shared experts next to them."""
    assert step.model.moe is not None
    routed = _Routed(step=step, moe=step.model.moe)
    router = MatmulBlock(
        scope="layers/moe/router",
        count=count,
        shapes=[step.router],
        tokens=routed.own,
        again=routed.recomputed("mlp_up"),
    )
    return [
        # Kept are the rows of experts, not the norm's output that the router's gradient reads.
        *norm(step, "layers/mlp/norm", count, 1.0),
        *matmul_work(step, router),
        *_dispatched(routed, count),
        *_multiplied(routed, count),
        *_combined(routed, count),
        *offloads(step, count, _EXPERT_CHECKPOINTS, moe_layer=True),
        *(_shared(routed, count) if routed.moe.shared_d_ff else ()),
    ]


def _dispatched(routed: _Routed, count: Number) -> list[Work]:
    """Rows on their way to their experts."""
    # Each pair's weight goes with it, in float32; the expert's output comes back weighed.
    exchange = _exchange(routed.step, routed.sent + 4.0 * routed.own * routed.slots)
    move = Work(
        scope="layers/moe/dispatch", phase="forward", count=count, hbm_bytes=routed.moved, collectives=exchange,
        matmul_s=routed.masked_s,
        formula="k T D bytes put into slots and sent to their experts by an AllToAll, with the weights of k experts",
    )  # fmt: skip
    return [move, recompute(move, routed.recomputed("mlp_normed")), _moved_back(routed.step, move)]


def _multiplied(routed: _Routed, count: Number) -> list[Work]:
    """The experts' matmuls, the activation between them, and what their weights and inputs need."""
    step, model, local = routed.step, routed.step.model, routed.step.widths.experts
    columns, gathered = step.columns_of_expert, routed.rows * model.d_model * step.element_bytes
    shapes_up, shapes_down = mlp_matmuls(model, columns)
    up_tiles, down_tiles = step.habits.group_rows or (None, None)
    batch = partial(ExpertBatch, local=local, whole=step.whole_experts)
    # Tokens of all expert shards meet here; each local expert sees its share of them.
    block = partial(MatmulBlock, scope="layers/moe/experts", count=count * local, tokens=routed.rows / local)
    up = block(
        shapes=shapes_up,
        gathered=gathered / local,
        again=routed.recomputed("mlp_up"),
        experts=batch(tiles=up_tiles),
        arrays=model.mlp_matrices - 1,
        stacked=stacked_bytes(step, _EXPERT_CHECKPOINTS, moe_layer=True) / local,
    )
    down = block(
        shapes=shapes_down,
        scattered=gathered / local,
        again=routed.recomputed("mlp_down") if step.habits.weighs_outputs else 0.0,
        experts=batch(tiles=down_tiles),
        unstacked=unstacked_bytes(step, _EXPERT_CHECKPOINTS, moe_layer=True) / local,
    )
    shares, *of_shares = _shares(routed, count)
    return [
        *matmul_work(step, up),
        shares,
        *_copies(routed, shapes_down, count),
        *of_shares,
        *activation(step, "layers/moe/experts", count, routed.rows * columns, again=routed.recomputed("mlp_act")),
        *matmul_work(step, down),
    ]


def _shares(routed: _Routed, count: Number) -> list[Work]:
    """The weights of each token's experts, gathered over tensor with the experts' inputs."""
    step, (when, nbytes) = routed.step, (unless(routed.step.whole_experts), 4.0 * routed.rows)
    shares = Work(
        scope="layers/moe/experts", phase="forward", count=count,
        collectives=(Transfer("all_gather", COLUMN_AXES, nbytes, "tensor", when),),
        formula="weights of k experts",
    )  # fmt: skip
    # The gradients of these weights read all hidden activations once more.
    hidden = routed.rows * step.columns_of_expert * step.element_bytes
    of_shares = replace(
        backward(shares, 1.0),
        hbm_bytes=step.model.mlp_matrices * hidden,
        collectives=(Transfer("reduce_scatter", COLUMN_AXES, nbytes, "tensor", when),),
    )
    return [shares, recompute(shares, 1.0), of_shares]


def _copies(routed: _Routed, down: Sequence[MatmulShape], count: Number) -> list[Work]:
    """Copies of gathered weights, and of rows into the layout of matmuls in 8 bits."""
    step, local = routed.step, routed.step.widths.experts
    # Shards of several experts arrive device by device: a copy puts those of each expert together.
    together = np.where(
        (local > 1) & (step.strategies.devices(*GATHER_AXES) > 1),
        step.passed(step.stored(down) * local * step.operand_bytes),
        0.0,
    )
    narrow = step.operand_bytes < step.element_bytes and step.assumptions.own_program
    return [
        Work(
            scope="layers/moe/experts", phase="forward", count=count, hbm_bytes=step.model.mlp_matrices * together,
            formula="gathered weights of several experts put together",
        ),
        Work(
            scope="layers/moe/experts", phase="forward", count=count,
            elementwise_bytes=_WIDENED_PASSES * routed.sent if narrow and step.slice.chip.kind == "tpu" else 0.0,
            formula="rows of experts made float32 before they are copied into the layout of matmuls in 8 bits",
        ),
    ]  # fmt: skip


def _combined(routed: _Routed, count: Number) -> list[Work]:
    """Rows on their way back, summed with their weights. A mask with the weights has a gradient too."""
    back = Work(
        scope="layers/moe/combine", phase="forward", count=count, hbm_bytes=routed.moved,
        collectives=_exchange(routed.step, routed.sent),
        vector_flops=2 * routed.sent / routed.step.element_bytes, matmul_s=routed.masked_s,
        formula="AllToAll back, then the weighted sum of k experts",
    )  # fmt: skip
    return [back, replace(backward(back, 1.0), matmul_s=2.0 * routed.masked_s)]


def _shared(routed: _Routed, count: Number) -> list[Work]:
    """The shared experts, an MLP of all tokens."""
    step, model, scope = routed.step, routed.step.model, "layers/moe/shared"
    stream = step.tokens * model.d_model * step.element_bytes
    columns = step.columns(routed.moe.shared_d_ff)
    shapes_up, shapes_down = mlp_matmuls(model, columns)
    block = partial(MatmulBlock, scope=scope, count=count, tokens=step.tokens)
    up = block(shapes=shapes_up, gathered=stream, again=routed.recomputed("mlp_up"), arrays=model.mlp_matrices - 1)
    down = block(shapes=shapes_down, scattered=stream, again=0.0)
    return [
        *matmul_work(step, up),
        *activation(step, scope, count, step.tokens * columns, again=routed.recomputed("mlp_act")),
        *matmul_work(step, down),
    ]


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
