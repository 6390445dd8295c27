"""The MLP of dense layers."""

from __future__ import annotations

from rooftop.core.ledger import Number
from rooftop.plan.pricing import Work
from rooftop.plan.shapes import mlp_matmuls
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.checkpoints import offloads, stacked_bytes, unstacked_bytes
from rooftop.plan.training.work.elements import activation, norm
from rooftop.plan.training.work.matmuls import matmuls

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
    up, down = mlp_matmuls(step.model, columns)
    stream = step.tokens * step.model.d_model * step.element_bytes
    again = recomputed("mlp_down") * step.model.post_norms
    unstacked = unstacked_bytes(step, _DENSE_CHECKPOINTS, moe_layer=False)
    return [
        *norm(step, "layers/mlp/norm", count, recomputed("mlp_normed")),
        *matmuls(
            step,
            "layers/mlp/up",
            count,
            up,
            step.tokens,
            gathered=stream,
            again=recomputed("mlp_up"),
            rings=step.rings,
            arrays=step.model.mlp_matrices - 1,
            stacked=stacked_bytes(step, _DENSE_CHECKPOINTS, moe_layer=False),
        ),
        *activation(step, "layers/mlp/act", count, step.tokens * columns, dense=True),
        *matmuls(
            step,
            "layers/mlp/down",
            count,
            down,
            step.tokens,
            scattered=stream,
            again=again,
            residual=True,
            rings=step.rings,
            unstacked=unstacked,
        ),
        *offloads(step, count, _DENSE_CHECKPOINTS, moe_layer=False),
    ]
