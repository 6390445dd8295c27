"""Memory of train steps that keep their state as another framework does (``state`` of a framework's habits).

'reserved': memory that PyTorch's allocator has reserved at the peak of a step of FSDP on one GPU. torchtitan prints
``reserved_bytes.all.peak`` (torchtitan/metrics.py at 9dec370, the commit of its tables). A stream's allocator gives
nothing back and nothing to another stream, so that the figure is a sum of peaks:

- The stream of the step has state, saved activations and all logits at once. Its loss is not compiled: ``pred``
  in 16 bits, ``pred.float()`` and the log-softmax; then, where the first two have ended, the gradient of the
  log-softmax, and after it that of its input, for which the rest of their place is too small (train.py).
- The stream of gathers (torch/distributed/fsdp) has what the root gathers, both tables, and the first layer after it.
- The stream of scatters has the gradients, in float32 and split.

Placed one by one, best fit first and the growing end of a segment last, as ``c10/cuda/CUDACachingAllocator.cpp`` does,
the tensors of a step reserve 0.9 to 1.5 % less than the sum below (tests/plan/test_states.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, SEQUENCE_AXES, STAGE_AXES
from rooftop.core.ledger import Number
from rooftop.core.quantities import dtype_bytes
from rooftop.frameworks.habits import State
from rooftop.models import ModelConfig
from rooftop.plan.training.memory import Memory, in_flight, saved_bytes, saved_per_layer, training_memory
from rooftop.plan.training.step import TrainingStep

#: Bytes of a parameter of Megatron-LM's distributed optimizer with bf16 parameters and f32 gradients; the optimizer's
#: are split over data parallelism (docs/source/api-guide/dist_optimizer.md: 6 + 12/d).
DISTRIBUTED: Mapping[str, float] = {"weights": 2.0, "gradients": 4.0, "optimizer": 12.0}
#: Bytes of a logit at the peak of PyTorch's allocator: in 16 bits and in float32, its log-softmax, and the gradient of
#: the logit in float32.
LOGIT_BYTES = 2 + 4 + 4 + 4
#: torchtitan's policies as ours: the selective one keeps the outputs of each second matmul.
_SELECTIVE, _FULL = "matmuls", ("full", "block")


def step_memory(step: TrainingStep) -> Memory:
    """Bytes of a device at the peak of a step, with state as the framework keeps it, [C, K]."""
    return _STATES[step.habits.state](step)


def stored_weights(step: TrainingStep) -> Number:
    """Bytes of a device's parameters from step to step, [C, 1]."""
    state, elements = step.habits.state, sum(step.held_parameters.values(), np.float64(0.0))
    if state == "distributed_optimizer":
        return DISTRIBUTED["weights"] * sum(_distributed_parameters(step).values(), np.float64(0.0))
    if state == "reserved":
        return 4.0 * elements / step.strategies.devices(*SEQUENCE_AXES)
    padded = elements + step.held_parameters["experts"] * (step.lane_padding - 1)
    return dtype_bytes(step.numerics.weights) * padded


def _distributed_parameters(step: TrainingStep) -> dict[str, Number]:
    """Parameters of a device: of stages the first has the embedding, and the last one the unembedding."""
    parts: dict[str, Number] = dict(step.held_parameters)
    tables = 1 if step.model.tied_embeddings else 2
    parts["vocab"] = parts["vocab"] / np.where(step.strategies.devices(*STAGE_AXES) > 1, tables, 1)
    return parts


def _distributed_optimizer(step: TrainingStep) -> Memory:
    """Megatron-LM's: the optimizer of what copies have in common is split over them."""
    memory, parts, devices = training_memory(step), _distributed_parameters(step), step.strategies.devices
    elements = sum(parts.values(), np.float64(0.0))
    copies = devices("data", "fsdp", *SEQUENCE_AXES)
    # Devices with other experts are copies of all the rest.
    split = (elements - parts["experts"]) / (copies * devices(*EXPERT_AXES)) + parts["experts"] / copies
    # Our program takes a microbatch out of the buffer of all.
    kept = np.where(devices(*STAGE_AXES) > 1, saved_bytes(step, "save"), memory.activations)
    return replace(
        memory,
        weights=DISTRIBUTED["weights"] * elements,
        gradients=DISTRIBUTED["gradients"] * elements,
        optimizer=DISTRIBUTED["optimizer"] * split,
        activations=kept,
    )


def _reserved(step: TrainingStep) -> Memory:
    """Of PyTorch's allocator. FSDP splits weights over context parallelism too.

    Next to stored weights are unsharded ones in 16 bits: both tables and the last layer, which no forward pass frees,
    and what the stream of gathers keeps. ``workspace`` is the loss and what a layer's forward pass leaves free in front
    of it.
    """
    model, tokens = step.model, step.tokens
    tensor = step.strategies.devices(*COLUMN_AXES)
    stored = stored_weights(step)
    tables = 2.0 * model.vocab * model.d_model / tensor
    layer = step.layer_parameters["attn"] + step.layer_parameters["mlp"]
    fused = step.habits.kernels == "fused"
    saved = np.stack(
        [
            np.broadcast_to(saved_elements(model, choice.remat, compiled=fused), (1,))
            for choice in step.strategies.choices
        ],
        axis=1,
    )
    elements = np.where(np.isnan(saved), saved_per_layer(step, "save"), saved)
    activations = 2.0 * tokens * step.layers * elements * in_flight(step) / tensor
    loss = tokens * (LOGIT_BYTES * model.vocab + 2.0 * _forward_elements(model, compiled=fused)) / tensor
    return Memory(
        weights=stored + 2.0 * (2.0 * tables + 2.0 * layer),
        optimizer=2.0 * stored,
        gradients=1.0 * stored,
        activations=activations,
        workspace=loss,
    )


def saved_elements(model: ModelConfig, remat: str, *, compiled: bool) -> float:
    """16-bit elements per token that a layer saves under torchtitan's full and selective policies; else NaN.

    The selective policy saves each second matmul and attention: queries, values, the gate and the MLP's output. Nothing
    reads the last one, so that a compiled layer drops it (parallelize_llama.py).
    """
    if remat in _FULL:
        return float(model.d_model)
    if remat != _SELECTIVE or model.moe is not None:
        return float("nan")
    attention = 2 * model.heads * model.d_head + model.kv_heads * model.d_head + 2 * model.heads
    return float(model.d_model + attention + model.d_ff + (0 if compiled else model.d_model))


def _forward_elements(model: ModelConfig, *, compiled: bool) -> float:
    """16-bit elements per token of a layer's forward pass that have ended before the loss.

    In the MLP: both inputs, the up projection and the product, and, if nothing is fused, the activated gate.
    """
    hidden = model.d_ff if model.moe is None else model.moe.active * model.moe.d_ff + model.moe.shared_d_ff
    return 2.0 * model.d_model + (2.0 if compiled else 3.0) * hidden


_STATES: Mapping[State, Callable[[TrainingStep], Memory]] = {
    "xla": training_memory,
    "distributed_optimizer": _distributed_optimizer,
    "reserved": _reserved,
}
