"""Bytes per device of a training step, by class; formulas follow what XLA was seen to hold at the peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rooftop.ledger import Number
from rooftop.models.activations import checkpoint_widths
from rooftop.plan.training import TrainingStep

#: Tokens whose logits are held at once: the loss is computed in chunks.
LOSS_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device; arrays broadcast to [C, K] in a sweep."""

    weights: Number
    optimizer: Number
    gradients: Number
    activations: Number
    workspace: Number

    @property
    def total(self) -> Number:
        """All classes together."""
        return self.weights + self.optimizer + self.gradients + self.activations + self.workspace


def training_memory(step: TrainingStep) -> Memory:
    """What a device holds at the peak of a step.

    State is split over fsdp, tensor, expert and stage. Saved activations of every layer are alive at the start of the
    backward pass. Beside them the workspace: either one layer's backward pass (its gathered weights twice, since the
    next layer's arrive meanwhile, its whole weight gradient, and hidden activations: three arrays of F if they were
    saved, five if they are computed again), or the loss with the unembedding and its gradient, whichever is larger.
    """
    strategies, numerics, element = step.strategies, step.numerics, step.element_bytes
    held = sum(step.held_parameters.values(), np.float64(0.0))
    # Sums over microbatches are kept in float32.
    gradient = np.where(strategies.microbatches > 1, 4.0, numerics.gradient_bytes)
    own = step.tokens / step.tensor
    return Memory(
        weights=held * numerics.weight_bytes,
        optimizer=held * numerics.optimizer_bytes,
        gradients=held * gradient,
        activations=saved_per_layer(step, "save") * step.layers * in_flight(step) * own * element,
        workspace=np.maximum(_layer_backward(step), _loss(step)),
    )


def book_memory(step: TrainingStep) -> Memory:
    """The book's arithmetic (chapters 5 and 6): bf16 weights, two float32 moments, saved activations, nothing else."""
    held = sum(step.held_parameters.values(), np.float64(0.0))
    zero = np.zeros_like(held)
    activations = saved_per_layer(step, "save") * step.layers * step.strategies.microbatches * step.tokens / step.tensor
    return Memory(weights=2 * held, optimizer=8 * held, gradients=zero, activations=2 * activations, workspace=zero)


def saved_per_layer(step: TrainingStep, action: str) -> Number:
    """Elements per token and layer under ``action``, averaged over dense layers and layers of experts, [1, K]."""
    share = step.dense_share
    total: Number = 0.0
    if share:
        total = total + share * step.strategies.kept(action, checkpoint_widths(step.model, moe_layer=False))
    if share < 1:
        total = total + (1 - share) * step.strategies.kept(action, checkpoint_widths(step.model, moe_layer=True))
    return total


def in_flight(step: TrainingStep) -> Number:
    """Microbatches whose activations the first stage holds at once, [C, K].

    Without a pipeline one; with GPipe all; with 1F1B as many as there are stages, and with interleaved chunks a little
    more (Narayanan et al. 2021).
    """
    strategies = step.strategies
    stages = strategies.devices("stage")
    waiting = np.minimum(strategies.microbatches, stages)
    waiting = np.where(strategies.chunks > 1, waiting * (1 + (stages - 1) / (stages * strategies.chunks)), waiting)
    waiting = np.where(strategies.keeps_all_in_flight, strategies.microbatches, waiting)
    return np.where(stages > 1, waiting, 1.0)


def host_bytes(step: TrainingStep) -> Number:
    """Bytes of offloaded activations that one device keeps in its host's memory, [C, K]."""
    own = step.tokens / step.tensor * step.element_bytes
    return saved_per_layer(step, "offload") * step.layers * in_flight(step) * own


def _layer_backward(step: TrainingStep) -> Number:
    sizes, element = step.layer_parameters, step.element_bytes
    dense = sizes["attn"] + sizes["mlp"]
    hidden = float(step.model.d_ff) if step.dense_share else 0.0
    largest = dense
    if step.model.moe is not None:
        moe = step.model.moe
        largest = np.maximum(dense, sizes["attn"] + sizes["experts"] + sizes["shared"])
        hidden = max(hidden, float(moe.active * moe.d_ff + moe.shared_d_ff))
    arrays = 3 + 2 * step.strategies.recomputed("mlp_up")
    return 3 * largest * element + arrays * hidden * step.tokens / step.tensor * element


def _loss(step: TrainingStep) -> Number:
    table = step.model.d_model * step.model.vocab / step.tensor
    chunk = np.minimum(step.tokens, LOSS_CHUNK) * step.model.vocab / step.tensor
    return 2 * table * step.element_bytes + chunk * (4 + step.element_bytes)
