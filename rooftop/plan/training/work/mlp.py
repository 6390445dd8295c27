"""The MLP of dense layers."""

from __future__ import annotations

from functools import partial

from rooftop.core.ledger import Number
from rooftop.plan.pricing import Work
from rooftop.plan.shapes import mlp_matmuls
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.checkpoints import offloads, unstacked_bytes
from rooftop.plan.training.work.elements import activation, norm
from rooftop.plan.training.work.matmuls.block import MatmulBlock
from rooftop.plan.training.work.matmuls.work import matmul_work

#: The scope in which each checkpoint of such a layer is made, and so leaves for host memory and comes back.
_DENSE_CHECKPOINTS = {
    "mlp_input": "layers/mlp/norm",
    "mlp_normed": "layers/mlp/norm",
    "mlp_up": "layers/mlp/up",
    "mlp_act": "layers/mlp/act",
    "mlp_down": "layers/mlp/down",
}


def mlp_work(step: TrainingStep, count: Number) -> list[Work]:
    """Work of ``count`` dense MLPs, with the norm before them."""
    recomputed = step.strategies.recomputed
    columns = step.columns(step.model.d_ff)
    shapes_up, shapes_down = mlp_matmuls(step.model, columns)
    stream = step.tokens * step.model.d_model * step.element_bytes
    block = partial(MatmulBlock, count=count, tokens=step.tokens, rings=step.rings)
    up = block(
        scope="layers/mlp/up",
        shapes=shapes_up,
        gathered=stream,
        again=recomputed("mlp_up"),
        arrays=step.model.mlp_matrices - 1,
    )
    down = block(
        scope="layers/mlp/down",
        shapes=shapes_down,
        scattered=stream,
        # A norm after it reads its output again.
        again=recomputed("mlp_down") * step.model.post_norms,
        residual=True,
        unstacked=unstacked_bytes(step, _DENSE_CHECKPOINTS, moe_layer=False),
    )
    return [
        *norm(step, "layers/mlp/norm", count, recomputed("mlp_normed")),
        *matmul_work(step, up),
        *activation(step, "layers/mlp/act", count, step.tokens * columns, dense=True),
        *matmul_work(step, down),
        *offloads(step, count, _DENSE_CHECKPOINTS, moe_layer=False),
    ]
