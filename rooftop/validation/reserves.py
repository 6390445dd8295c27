"""Memory that PyTorch's allocator has reserved at the peak of a step of torchtitan, on one GPU.

torchtitan prints ``reserved_bytes.all.peak`` (torchtitan/metrics.py at 9dec370, the commit of its tables). A stream's
allocator gives nothing back and nothing to another stream, so that the figure is a sum of peaks:

- The stream of the step has state, saved activations and all logits at once. Its loss is not compiled: ``pred``
  in 16 bits, ``pred.float()`` and the log-softmax; then, where the first two have ended, the gradient of the
  log-softmax, and after it that of its input, for which the rest of their place is too small (train.py).
- The stream of gathers (torch/distributed/fsdp) has what the root gathers, both tables, and the first layer after it.
- The stream of scatters has the gradients, in float32 and split.

Placed one by one, best fit first and the growing end of a segment last, as ``c10/cuda/CUDACachingAllocator.cpp`` does,
the tensors of a step reserve 0.9 to 1.5 % less than the sum below (tests/validation/test_reserves.py).
"""

from __future__ import annotations

from rooftop.models import ModelConfig
from rooftop.plan.pricing import scalar
from rooftop.plan.training.plan import TrainingPlan
from rooftop.validation.runs import PublishedRun

#: Bytes of a logit at the peak: in 16 bits and in float32, its log-softmax, and the gradient of the logit in float32.
LOGIT_BYTES = 2 + 4 + 4 + 4


def reserved_memory(run: PublishedRun, plan: TrainingPlan) -> dict[str, float]:
    """Bytes that the allocator of one GPU has reserved at the peak, by class of a plan's memory.

    ``copies`` are unsharded weights in 16 bits: both tables and the last layer, which no forward pass frees, and what
    the stream of gathers keeps. ``workspace`` is the loss and what a layer's forward pass leaves free in front of it.
    FSDP splits weights over context parallelism too.
    """
    model, step = run.model, plan.step
    tokens = scalar(step.tokens)
    elements = sum(scalar(part) for part in step.held_parameters.values()) / plan.mesh.size("context")
    tables = 2.0 * model.vocab * model.d_model
    layer = scalar(step.layer_parameters["attn"] + step.layer_parameters["mlp"])
    return {
        "weights": 4.0 * elements,
        "optimizer": 8.0 * elements,
        "gradients": 4.0 * elements,
        "copies": 2.0 * (2.0 * tables + 2.0 * layer),
        "activations": 2.0 * tokens * model.layers * saved_elements(run),
        "workspace": tokens * (LOGIT_BYTES * model.vocab + 2.0 * _forward_elements(model, compiled=run.compiled)),
    }


def saved_elements(run: PublishedRun) -> float:
    """16-bit elements per token that a layer saves under torchtitan's policy, 'full' or 'selective'.

    The selective policy saves each second matmul and attention: queries, values, the gate and the MLP's output. Nothing
    reads the last one, so that a compiled layer drops it (parallelize_llama.py).
    """
    model = run.model
    if run.remat.policy != "selective":
        return float(model.d_model)
    attention = 2 * model.heads * model.d_head + model.kv_heads * model.d_head + 2 * model.heads
    return float(model.d_model + attention + model.d_ff + (0 if run.compiled else model.d_model))


def _forward_elements(model: ModelConfig, *, compiled: bool) -> float:
    """16-bit elements per token of a layer's forward pass that have ended before the loss.

    In the MLP: both inputs, the up projection and the product, and, if nothing is fused, the activated gate.
    """
    return 2.0 * model.d_model + (2.0 if compiled else 3.0) * model.d_ff
