"""Traffic of a layer's checkpoints: into the stacks of all layers and out of them, to host memory and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from rooftop.core.ledger import Number
from rooftop.models.activations import MLP_CHECKPOINTS
from rooftop.plan.pricing import Work
from rooftop.plan.training.step import TrainingStep


def offloads(step: TrainingStep, count: Number, scopes: Mapping[str, str], *, moe_layer: bool) -> list[Work]:
    """Offloaded checkpoints of a layer on their way to host memory, and back for the backward pass."""
    own = step.tokens / step.tensor * step.element_bytes
    work = []
    for name, scope in scopes.items():
        offloaded = step.strategies.kept("offload", step.model, moe_layer=moe_layer, names=(name,))
        if offloaded.any():
            formula = f"T elements of {name} to host memory and back"
            work += [
                Work(scope=scope, phase=phase, count=count, host_bytes=offloaded * own, formula=formula)
                for phase in ("forward", "backward")
            ]
    return work


def unstacked_bytes(step: TrainingStep, scopes: Iterable[str], *, moe_layer: bool) -> Number:
    """Bytes that a layer's backward pass moves to have the named checkpoints, as counted in compiled programs.

    Layers are scanned, so that checkpoints of all are stacked. XLA copies a layer's out of the stack (a read and a
    write), and does not fuse that with what reads them. A stage takes a microbatch's out of its buffer in the same way.
    The layer's input is counted with the norms.
    """
    if not step.habits.unstacked_passes:
        return 0.0
    names = [name for name in scopes if name != "layer_input"]
    elements = step.strategies.kept("save", step.model, moe_layer=moe_layer, names=names)
    if moe_layer and np.any(step.staged):
        inside = [name for name in names if name in MLP_CHECKPOINTS]
        # A stage keeps nothing of what happens next to its experts.
        elements = elements - step.staged * step.strategies.kept("save", step.model, moe_layer=True, names=inside)
    passes = step.habits.unstacked_passes * (1.0 + step.staged)
    return passes * elements * step.tokens / step.tensor * step.element_bytes
