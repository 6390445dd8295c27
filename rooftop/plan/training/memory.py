"""Bytes per device of a training step, by class; formulas follow the peaks of programs that XLA compiled.

Frameworks may keep their state in another way (``state`` of their habits).

'reserved': memory that PyTorch's allocator has reserved at the peak of a step of FSDP on one GPU. torchtitan prints
``reserved_bytes.all.peak`` (torchtitan/metrics.py at 9dec370, the commit of its tables). A stream's allocator gives
nothing back and nothing to another stream, so that the figure is a sum of peaks:

- The stream of the step has state, saved activations and all logits at once. Its loss is not compiled: ``pred``
  in 16 bits, ``pred.float()`` and the log-softmax; then, where the first two have ended, the gradient of the
  log-softmax, and after it that of its input, for which the rest of their place is too small (train.py).
- The stream of gathers (torch/distributed/fsdp) has what the root gathers, both tables, and the first layer after it.
- The stream of scatters has the gradients, in float32 and split.

Placed one by one, best fit first and the growing end of a segment last, as ``c10/cuda/CUDACachingAllocator.cpp`` does,
the tensors of a step reserve 0.9 to 1.5 % less than the sum below (tests/plan/test_reserved_memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, GATHER_AXES, SEQUENCE_AXES, STAGE_AXES
from rooftop.arrays.tiles import VPU
from rooftop.core.ledger import Number
from rooftop.core.quantities import dtype_bytes
from rooftop.core.rounding import next_multiple
from rooftop.frameworks.habits import State
from rooftop.models import ModelConfig
from rooftop.models.activations import MLP_CHECKPOINTS, POLICIES
from rooftop.models.attention import attention_kind
from rooftop.models.program_sizes import LANES
from rooftop.models.segments import segments
from rooftop.plan.training.step import TrainingStep

#: Padded size of a table's rows over their own up to which XLA:TPU copies it: compiled programs copy rows of 320
#: elements as 384 (1.20), of 112 (1.14) and of 100 (1.28) as 128, and do not copy rows of 192 or 96 (1.33).
_MOST_PADDED_COPY = 1.3


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
    """Bytes of a device at the peak of a step.

    State is split over fsdp, tensor, expert and stage, and saved activations of every layer are alive at the start of
    the backward pass. The peak is one of two moments: the loss, when no layer has a gradient yet, or the backward pass
    of a loop's last layer, when the loop's gradients have their place. Tables have no copies in the compute dtype then:
    that of the embedding ends with the lookup, and that of the unembedding with its gather, whose result the loss
    counts. Layers that are alike are one loop (``_at_worst_loop``).

    A pipeline's stage runs both in a loop: all weights, copies and float32 sums of gradients stay. Its backward pass
    takes one microbatch's activations out of the buffer of all, and makes a chunk's gradients before they are added.
    Of offloaded activations it has those of two microbatches: one on its way to the host, one on its way back.
    """
    strategies, numerics, parts = step.strategies, step.numerics, step.trained_parameters
    vocab = parts["vocab"]
    elements = parts["dense"] + parts["experts"] * step.lane_padding + vocab
    tables = 1 if step.model.tied_embeddings else 2
    weights = elements * numerics.weight_bytes
    staged = step.staged
    # Sums over microbatches are kept in float32.
    sums = np.where(np.maximum(strategies.microbatches - 1, staged) > 0, 4.0, 0.0) * elements
    later = np.where(staged, (elements - vocab) / strategies.chunks, elements - vocab + vocab / tables)
    gradients = sums + numerics.gradient_bytes * later
    copies = np.where(staged, 0.0, vocab * (numerics.weight_bytes - dtype_bytes(numerics.weights)))
    taken = staged * saved_bytes(step, "save") / in_flight(step) / strategies.chunks
    under_way = 2 * staged * saved_bytes(step, "offload") / in_flight(step) / strategies.chunks
    state = (elements - vocab) * numerics.optimizer_bytes + vocab * numerics.table_optimizer_bytes
    optimizer = state + _table_copies(step)
    loss, layer = _loss(step), _layer_backward(step)
    saved = saved_bytes(step, "save")
    at_loss = sums + loss > gradients + layer + taken
    stored = elements * dtype_bytes(numerics.weights)
    classes = (
        np.where(at_loss, loss, layer),
        saved + under_way + np.where(at_loss, 0.0, taken),
        np.where(at_loss, sums, gradients),
        weights - copies - stored,
    )
    outside = _outside_vmem(step, classes, at_loss)
    return Memory(
        weights=stored + step.frozen_bytes + outside[3],
        optimizer=optimizer,
        gradients=outside[2],
        activations=outside[1],
        workspace=outside[0],
    )


def _outside_vmem(step: TrainingStep, classes: Sequence[Number], at_loss: npt.NDArray[np.bool_]) -> list[Number]:
    """Bytes in HBM of ``classes`` of temporaries, those that end first in front, [C, K].

    XLA:TPU gives temporaries a place in VMEM while there is room and they are small. ``TrainingStep.in_hbm`` says how
    small: of VMEM, the share that the largest array of a layer, or a chunk of the loss, leaves to them is theirs. What
    the attention kernel writes for its gradient, the log-sum-exps of a layer, is in HBM all the same.
    """
    if not step.habits.vmem_share:
        return list(classes)
    model, chip = step.model, step.slice.chip
    widths: Number = np.float64(model.d_model)
    if model.dense_layers:
        widths = np.maximum(widths, step.columns(model.d_ff))
    if model.moe is not None:
        experts = model.moe.active * step.columns_of_expert * step.widths.expert_split
        widths = np.maximum(widths, experts / step.tensor)
    largest = np.where(at_loss, 4.0 * step.widths.vocab / step.loss_chunks, widths * step.element_bytes) * step.tokens
    room = (1.0 - step.in_hbm(largest)) * chip.vmem_bytes / chip.devices
    outside = list[Number]()
    for nbytes in classes:
        in_vmem = np.minimum(room, nbytes)
        outside.append(nbytes - in_vmem)
        room = room - in_vmem
    written = 4.0 * LANES * step.widths.heads * step.tokens
    outside[0] = np.minimum(np.maximum(outside[0], written), classes[0])
    return outside


def book_memory(step: TrainingStep) -> Memory:
    """The book's arithmetic (chapters 5 and 6): bf16 weights, two float32 moments, saved activations, nothing else."""
    elements = sum(step.trained_parameters.values(), np.float64(0.0))
    zero = np.zeros_like(elements)
    activations = saved_per_layer(step, "save") * step.layers * step.strategies.microbatches * step.tokens / step.tensor
    return Memory(
        weights=2 * elements + step.frozen_bytes,
        optimizer=8 * elements,
        gradients=zero,
        activations=2 * activations,
        workspace=zero,
    )


def saved_per_layer(step: TrainingStep, action: str) -> Number:
    """Elements per token and layer under ``action``, averaged over dense layers and layers of experts, [C, K]."""
    share = step.dense_share
    return sum((of * saved for of, saved in zip((share, 1 - share), _kept(step, action), strict=True)), 0.0)


def saved_bytes(step: TrainingStep, action: str) -> Number:
    """Bytes of checkpoints on a device under ``action``, of its layers and the microbatches in flight, [C, K].

    Layers that a pipeline's first or last stage does alone keep their checkpoints within one task.
    """
    alone = step.layers_alone
    once = _checkpoint_bytes(step, action, alone.every_dense, alone.every - alone.every_dense)
    return in_flight(step) * shared_bytes(step, action) + once


def shared_bytes(step: TrainingStep, action: str) -> Number:
    """Bytes of one microbatch's checkpoints on a device under ``action``, of layers that stages share, [C, K]."""
    alone, dense = step.layers_alone, step.dense_layers
    others = step.layers - dense - (alone.every - alone.every_dense)
    return _checkpoint_bytes(step, action, dense - alone.every_dense, others)


def _checkpoint_bytes(step: TrainingStep, action: str, dense: Number, others: Number) -> Number:
    """Bytes of one microbatch's checkpoints of so many dense layers and layers of experts, [C, K]."""
    of_dense, of_experts = _kept(step, action)
    return (dense * of_dense + others * of_experts) * _own(step) * step.element_bytes


def _kept(step: TrainingStep, action: str) -> tuple[Number, Number]:
    """Elements per token of a dense layer and of one of experts under ``action``, [C, K]; 0 where there is none.

    In a stage of our loop nothing of an MLP of experts is kept (``programs.sharding.on_shards``).
    """
    model, strategies, dropped = step.model, step.strategies, _drops_experts(step)
    # TPU kernels write heads of whole registers, and XLA pads heads that are wider than one.
    (d_qk, d_v), lanes = attention_kind(model).head_sizes, step.lanes
    more: Number = 0.0
    for name, head in (("attn_core", d_v), ("rope", max(d_qk, lanes) if action == "save" else lanes)):
        if head % lanes:
            padding = next_multiple(head, lanes) / head - 1
            more = more + padding * strategies.kept(action, model, moe_layer=False, names=(name,))
    if d_qk < lanes and action == "save":
        # Of several sequences XLA puts the tokens of queries, keys and values into the lanes, of one their heads.
        alone = step.tokens * strategies.devices(*SEQUENCE_AXES) <= step.positions
        narrow = strategies.kept(action, model, moe_layer=False, names=("qkv", "rope"))
        more = more + np.where(alone, (lanes / d_qk - 1) * narrow, 0.0)
    return (
        strategies.kept(action, model, moe_layer=False) + more + _padding(step, action, moe_layer=False)
        if model.dense_layers
        else 0.0,
        strategies.kept(action, model, moe_layer=True)
        - dropped * strategies.kept(action, model, moe_layer=True, names=MLP_CHECKPOINTS)
        + more
        + _padding(step, action, moe_layer=True)
        if model.moe_layers
        else 0.0,
    )


def _drops_experts(step: TrainingStep) -> Number:
    """1 where a pipeline's stage repeats its experts in the backward pass, 0 elsewhere, [C, 1]."""
    return step.staged if step.habits.staged_loop else np.zeros_like(step.staged)


def _padding(step: TrainingStep, action: str, *, moe_layer: bool) -> Number:
    """Elements per token of a layer under ``action`` that are padding, or copies of key/value heads, [C, K]."""
    model, moe, tensor = step.model, step.model.moe, step.tensor
    heads, kv_heads = step.widths.heads * tensor, step.kv_heads * tensor
    hidden, columns = model.d_ff, step.columns(model.d_ff) * tensor
    if moe_layer and moe is not None:
        hidden = moe.active * moe.d_ff + moe.shared_d_ff
        experts = moe.active * step.columns_of_expert * step.widths.expert_split
        columns = experts + step.columns(moe.shared_d_ff) * tensor
    padded: Number = 0.0
    for names, size, true in (
        (("qkv", "rope"), heads + 2 * kv_heads, model.heads + 2 * model.kv_heads),
        (("attn_core",), heads, model.heads),
        (("mlp_up", "mlp_act"), np.where(_drops_experts(step) * moe_layer, hidden, columns), hidden),
    ):
        if np.any(size != true):
            padded = padded + (size / true - 1) * step.strategies.kept(action, model, moe_layer=moe_layer, names=names)
    return padded


def in_flight(step: TrainingStep) -> Number:
    """Microbatches whose activations the first stage holds at once, [C, K].

    Without a pipeline one; with GPipe all; with 1F1B as many as there are stages, with interleaved chunks a little more
    (Narayanan et al. 2021), and with eager 1F1B one less than twice as many.
    """
    strategies = step.strategies
    stages = strategies.devices(*STAGE_AXES)
    waiting = np.minimum(strategies.microbatches, stages)
    early = waiting * (1 + (stages - 1) / (stages * strategies.chunks))
    waiting = np.where(strategies.chunks > 1, np.minimum(early, strategies.microbatches), waiting)
    waiting = np.where(strategies.eager, np.minimum(2 * stages - 1, strategies.microbatches), waiting)
    waiting = np.where(strategies.keeps_all_in_flight | step.habits.stages_keep_all, strategies.microbatches, waiting)
    return np.where(stages > 1, waiting, 1.0)


def host_bytes(step: TrainingStep) -> Number:
    """Bytes of offloaded activations that one device keeps in its host's memory, [C, K].

    Buffers of pipeline stages have one more place, for copies of trips without a task.
    """
    return saved_bytes(step, "offload") * (1 + step.staged / in_flight(step) / step.strategies.chunks)


def _own(step: TrainingStep) -> Number:
    """Tokens whose residual stream a device has, [C, K]: those of its tensor group are split over it."""
    return step.tokens / step.tensor


def _layer_backward(step: TrainingStep) -> Number:
    """Bytes that the backward pass of one layer adds, as in peaks of compiled programs (docs/evidence/accuracy.md).

    Its weights as gathered over fsdp and the largest one's whole gradient; three arrays of hidden activations; five of
    the stream at the width of the matmuls' inputs (those of both blocks, their gradients, partial sums) and four as the
    residual stream is split; queries, keys, values and output of attention; tokens sent to experts and back.
    What fsdp does not split a pipeline's stage takes out of the stack of its layers, and puts gradients back into it.
    With matmuls in 8 bits the gradients of attention's input are summed in 32 bits, one for each array: then eight
    arrays of the stream and two of hidden activations may be more.
    """
    model, sizes, moe = step.model, step.layer_parameters, step.model.moe
    weights, sent = sizes["attn"], 0.0
    matrix: Number = 0.0
    hidden: Number = 0.0
    if model.dense_layers:
        weights, hidden = weights + sizes["mlp"], step.columns(model.d_ff) * step.tensor
        matrix = model.d_model * step.columns(model.d_ff)
    if moe is not None:
        weights = np.maximum(weights, sizes["attn"] + sizes["experts"] + sizes["shared"])
        experts = moe.active * step.columns_of_expert * step.widths.expert_split
        hidden = np.maximum(hidden, experts + step.columns(moe.shared_d_ff) * step.tensor)
        sent = 2.0 * moe.active * model.d_model
        matrix = np.maximum(matrix, sizes["experts"] / model.mlp_matrices)
    heads, kv_heads = step.widths.heads * step.tensor, step.kv_heads * step.tensor
    gathered = np.where(step.strategies.devices(*GATHER_AXES) > 1, weights + matrix, step.staged * 2.0 * weights)
    if step.adapters is not None:
        # Frozen weights arrive as they are stored, the largest one is unpacked, and none has a gradient.
        packed = min(step.adapters.base_bytes / step.element_bytes, 1.0)
        own = sum(step.adapter_parameters().values(), np.float64(0.0))
        split = step.strategies.devices(*GATHER_AXES) > 1
        gathered = np.where(split, packed * weights + own, step.staged * packed * weights) + (packed < 1) * matrix
    d_qk, d_v = attention_kind(model).head_sizes
    queries_and_keys = d_qk * (heads + kv_heads) + d_v * (heads + kv_heads)
    # A ring also has its running sums, and the keys and values in transit.
    ring = np.where(step.strategies.devices(*SEQUENCE_AXES) > 1, 5.0 * heads * d_v, 0.0)
    streams = 3.0 * hidden + 5.0 * step.tensor * model.d_model
    if step.habits.asynchronous == "gathers" and moe is None and step.habits.as_scheduled:
        streams = np.where(step.staged > 0, streams, _streams_of_mlp(step, hidden, heads))
    if step.operand_bytes < step.element_bytes and model.mla is None:
        streams = np.maximum(streams, 2.0 * hidden + 8.0 * step.tensor * model.d_model)
    inside = queries_and_keys + ring + sent + 4.0 * model.d_model
    return (gathered + _own(step) * (inside + streams)) * step.element_bytes + _blocks_of_scores(step)


def _blocks_of_scores(step: TrainingStep) -> Number:
    """Bytes of a block of scores of the ``chunked`` kernel, and of the sums of gradients of keys and values.

    Scores and their gradients, in float32 and in 16 bits, are there at once; sums are in float32.
    """
    if step.kernel != "chunked":
        return 0.0
    rows = step.run_rows
    scores = step.tokens * step.widths.heads * (rows / step.own_positions) * np.minimum(step.attention_block, rows)
    return 12.0 * scores + 4.0 * step.tokens * step.kv_heads * sum(attention_kind(step.model).head_sizes)


def _streams_of_mlp(step: TrainingStep, hidden: Number, heads: Number) -> Number:
    """Elements per token of the streams and hidden activations at the peak of a dense layer's backward pass on v5e.

    On v5e gradient reductions finish inside their own block, so that the MLP's backward pass holds no buffers of the
    attention block. Where activations are gathered over tensor, it holds the inputs of both blocks, the gradient of its
    output, and partial sums of its input's gradient. The gradients of gate and up projection come after these sums,
    unless permutes move rows of their padded parts: permutes are asynchronous and start early, and then the MLP's input
    is freed before the sums. Where nothing is gathered over tensor, the residual streams remain, and attention's output
    twice. An output norm adds one more sum; layers that alternate in kind also keep the previous layer's input: five.
    """
    model = step.model
    plain = model.norm_placement == "pre" and all(len(run.kinds) == 1 for run in segments(model))
    arrays = 4.0 if plain else 5.0
    d_v = attention_kind(model).head_sizes[1]
    return 3.0 * hidden + np.where(step.tensor > 1, arrays * step.tensor * model.d_model, heads * d_v)


def _table_copies(step: TrainingStep) -> Number:
    """Bytes of copies of a tied embedding table and of its optimizer state, [C, 1].

    A table whose shards do not fill registers is stored with tokens in the lanes, which pads least. Where it is the
    unembedding too, XLA:TPU copies it and its state into rows of whole registers for the whole step, unless that makes
    them larger than ``_MOST_PADDED_COPY`` times.
    """
    model, numerics = step.model, step.numerics
    if not model.tied_embeddings or not step.habits.pads_lanes:
        return 0.0
    columns = step.widths.spread(model.d_model) / (step.strategies.devices(*GATHER_AXES) * step.tensor)
    rows = step.widths.vocab * step.tensor
    padded = next_multiple(columns, LANES)
    turned = (padded / columns > next_multiple(rows, LANES) / rows) & (padded <= _MOST_PADDED_COPY * columns)
    state = dtype_bytes(numerics.weights) + numerics.table_optimizer_bytes
    copies: Number = turned * rows * padded * (state if step.adapters is None else step.element_bytes)
    return copies


def _loss(step: TrainingStep) -> Number:
    """The unembedding as gathered and its gradient, a chunk's float32 logits, the stream before and its gradient.

    A frozen unembedding has no gradient. Before the first logits the table may be there a second time, as it arrives
    (``_table_pieces``).
    """
    table = step.model.d_model * step.widths.vocab
    chunk = step.tokens / step.loss_chunks * step.widths.vocab
    streams = (2.0 * step.tensor + 1.0) * _own(step) * step.model.d_model
    logits = 4.0 * chunk
    if step.habits.table_in_pieces:
        logits = np.maximum(logits, step.element_bytes * _table_pieces(step))
    gradients = 1.0 if step.adapters is None else 0.0
    return ((1.0 + gradients) * table + streams) * step.element_bytes + logits


def _table_pieces(step: TrainingStep) -> Number:
    """Elements of the unembedding as it arrives on a TPU, if the layout of its matmul is another one, [C, 1].

    On TPU7x SparseCores copy a tied table. Elsewhere, an untied one of which a device's rows do not fill registers
    arrives in padded pieces. XLA has room for its gradient by then if the gather is asynchronous.
    """
    habits, vocab = step.habits, step.widths.vocab
    if step.model.tied_embeddings:
        return step.model.d_model * vocab if habits.asynchronous == "all" else 0.0
    parts = step.strategies.devices(*GATHER_AXES)
    rows = step.widths.stored(step.model.d_model) / parts
    ahead = step.strategies.gathers_ahead(habits) | (habits.asynchronous == "all")
    # Up to half a register has tiles of its own size.
    padded = np.where(rows > VPU[0] / 2, next_multiple(rows, VPU[0]), rows)
    return np.where(ahead & (parts > 1) & (rows % VPU[0] > 0), parts * padded * vocab, 0.0)


# ---------------------------------------------------------------- state as other frameworks keep it

#: Bytes of a logit at the peak of PyTorch's allocator: in 16 bits and in float32, its log-softmax, and the gradient of
#: the logit in float32.
LOGIT_BYTES = 2 + 4 + 4 + 4


def step_memory(step: TrainingStep) -> Memory:
    """Bytes of a device at the peak of a step, with state as the framework keeps it, [C, K]."""
    return _STATES[step.habits.state](step)


def stored_weights(step: TrainingStep) -> Number:
    """Bytes of a device's parameters from step to step, [C, 1]."""
    state, elements = step.habits.state, sum(step.trained_parameters.values(), np.float64(0.0))
    if state == "distributed_optimizer":
        return dtype_bytes(step.numerics.compute) * sum(_distributed_parameters(step).values(), np.float64(0.0))
    if state == "reserved":
        # Experts are dealt out within the devices over which FSDP splits all the rest (torchtitan's parallel_dims.py).
        experts, devices = step.held_parameters["experts"], step.strategies.devices
        return 4.0 * ((elements - experts) / devices(*EXPERT_AXES) + experts) / devices(*SEQUENCE_AXES)
    padded = elements + step.trained_parameters["experts"] * (step.lane_padding - 1)
    return dtype_bytes(step.numerics.weights) * padded + step.frozen_bytes


def _distributed_parameters(step: TrainingStep) -> dict[str, Number]:
    """Parameters of a device: of stages the first has the embedding, and the last one the unembedding.

    Where weights are split, it is over all their copies, as Megatron-FSDP has it: those along a sequence, and of all
    but experts those of devices with other experts.
    """
    parts: dict[str, Number] = dict(step.held_parameters)
    devices, tables = step.strategies.devices, 1 if step.model.tied_embeddings else 2
    parts["vocab"] = parts["vocab"] / np.where(devices(*STAGE_AXES) > 1, tables, 1)
    is_split = devices(*GATHER_AXES) > 1
    for name, part in parts.items():
        copies = devices(*SEQUENCE_AXES) if name == "experts" else devices(*SEQUENCE_AXES, *EXPERT_AXES)
        parts[name] = part / np.where(is_split, copies, 1)
    return parts


def _distributed_optimizer(step: TrainingStep) -> Memory:
    """Megatron-LM's: the optimizer of what copies have in common is split over them.

    With float32 gradients 6 + 12/d bytes a parameter over d copies (docs/source/api-guide/dist_optimizer.md). Gradients
    have a buffer in the dtype in which they are reduced (megatron/core/distributed/param_and_grad_buffer.py,
    ``grad_reduce_in_fp32``). Narrower moments need the precision-aware optimizer, which keeps of a master weight the 16
    bits that the stored one lacks (``store_param_remainders``).
    """
    memory, parts, devices = training_memory(step), _distributed_parameters(step), step.strategies.devices
    numerics, elements = step.numerics, sum(parts.values(), np.float64(0.0))
    # Of weights that are split no copies are left but those along data. Devices with other experts are copies of all
    # but the experts.
    is_split = devices(*GATHER_AXES) > 1
    copies = devices("data") * np.where(is_split, 1, devices(*SEQUENCE_AXES))
    shared = copies * np.where(is_split, 1, devices(*EXPERT_AXES))
    master = 4.0 if numerics.moments == "f32" else 4.0 - dtype_bytes(numerics.compute)
    layers = parts["dense"] / shared + parts["experts"] / copies
    tables = parts["vocab"] / shared
    # Our program takes a microbatch out of the buffer of all.
    activations = np.where(devices(*STAGE_AXES) > 1, saved_bytes(step, "save"), memory.activations)
    return replace(
        memory,
        weights=dtype_bytes(numerics.compute) * elements,
        gradients=numerics.gradient_bytes * elements,
        optimizer=(master + numerics.optimizer_bytes) * layers + (master + numerics.table_optimizer_bytes) * tables,
        activations=activations,
    )


def _reserved(step: TrainingStep) -> Memory:
    """Of PyTorch's allocator. FSDP splits weights over context parallelism too, and over devices with other experts.

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
    saved = step.strategies.by_policy(lambda policy: saved_elements(model, policy, compiled=fused))
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


def saved_elements(model: ModelConfig, policy: Mapping[str, str], *, compiled: bool) -> float:
    """16-bit elements per token that a layer saves under torchtitan's full and selective policies; else NaN.

    The selective policy saves each second matmul and attention: queries, values, the gate and the MLP's output; ours of
    the same place keeps the outputs of all matmuls. Nothing reads the last one, so that a compiled layer drops it
    (parallelize_llama.py).
    """
    if policy == POLICIES["full"]:
        return float(model.d_model)
    if policy != POLICIES["matmuls"] or model.moe is not None:
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
