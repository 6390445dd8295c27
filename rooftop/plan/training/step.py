"""A training step on one device: its sizes, for one strategy or for all of a sweep.

Chapters 4 and 5 of the book. The strategy is FSDP (weights and their state split over ``fsdp``, gathered per layer,
gradients scattered) with tensor parallelism over heads and hidden columns, residuals split over the sequence on the
tensor axis (AllGather before a matmul, ReduceScatter after it), ring attention over ``context``, experts over
``expert`` with an AllToAll on both sides, layers over ``stage``, and copies over ``data``, whose gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from rooftop.arrays.mesh import Floats
from rooftop.arrays.rules import (
    BATCH_AXES,
    COLUMN_AXES,
    EXPERT_AXES,
    GATHER_AXES,
    RESIDUAL_AXES,
    SEQUENCE_AXES,
    STAGE_AXES,
    Rules,
    copy_axes,
)
from rooftop.arrays.tiles import VPU, largest_factor
from rooftop.capabilities import AttentionKernel
from rooftop.core.ledger import Number
from rooftop.core.quantities import dtype_bytes
from rooftop.core.rounding import next_multiple
from rooftop.core.scopes import Phase
from rooftop.frameworks.habits import Habits
from rooftop.frameworks.launches import Launches, LayerKernels
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, Weight, weights
from rooftop.models.activations import CHECKPOINTS, LOSS_CHUNK
from rooftop.models.adapters import Adapters
from rooftop.models.attention import AttentionMatmuls, MatmulShape, attention_kind, parameters
from rooftop.models.mixers import Recurrence, recurrences
from rooftop.models.numerics import Numerics
from rooftop.models.program_sizes import CHUNKED_BLOCK, CONTEXT_CHUNKS, LANES, RUNS, block_size, padded_positions
from rooftop.models.segments import layers_alone, segments, shared_segment
from rooftop.models.widths import ModelWidths
from rooftop.plan.shapes import MixerMatmuls, full_attention_share, mean_attended_pairs, mlp_matmuls
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.strategies import Strategies
from rooftop.plan.training.workload import Workload
from rooftop.roofline.achievable import attention_kernels
from rooftop.roofline.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Layers of the ``first`` and of the ``last`` pipeline stage alone, and those of them that are dense, [C, 1]."""

    first: Floats
    last: Floats
    first_dense: Floats
    last_dense: Floats

    @property
    def every(self) -> Floats:
        """Layers of both stages."""
        return self.first + self.last

    @property
    def every_dense(self) -> Floats:
        """The dense ones of both stages."""
        return self.first_dense + self.last_dense


def priced_block(kernel: AttentionKernel, rates: Rates) -> int:
    """Largest side of the blocks of an attention kernel: as it was priced for the chip, or as it is written."""
    return CHUNKED_BLOCK if kernel == "chunked" else rates.attention_block


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A training step under one or many strategies; the rows follow in ``rows``.

    With ``adapters`` they alone are trained, and the model's weights are frozen.
    """

    model: ModelConfig
    slice: Slice
    workload: Workload
    numerics: Numerics
    assumptions: Assumptions
    strategies: Strategies
    habits: Habits = Habits()
    adapters: Adapters | None = None

    @cached_property
    def rates(self) -> Rates:
        """Rates of one device, peak and expected."""
        return Rates.of(self.slice.chip)

    @property
    def kernel(self) -> AttentionKernel:
        """The attention kernel."""
        return self.assumptions.kernel(self.habits)

    @property
    def lanes(self) -> int:
        """Elements to which the last dim of an array is padded."""
        return LANES if self.habits.pads_lanes else 1

    @cached_property
    def tensor(self) -> Floats:
        """Ways of tensor parallelism, [C, 1]."""
        return self.strategies.devices(*COLUMN_AXES)

    @cached_property
    def whole_experts(self) -> Floats:
        """1 where devices along tensor have whole experts, 0 where it splits their columns, [C, K]."""
        whole: Floats = self.strategies.experts_over_tensor * (self.tensor > 1)
        return whole

    @cached_property
    def expert_ways(self) -> Floats:
        """Devices over which experts are dealt out, [C, K]."""
        ways: Floats = self.strategies.devices(*EXPERT_AXES) * np.where(self.whole_experts, self.tensor, 1.0)
        return ways

    @cached_property
    def rings(self) -> Floats:
        """1 where matmuls overlap their collectives over tensor, [C, K]."""
        rings: Floats = self.strategies.collective_matmuls * (self.tensor > 1)
        return rings

    @cached_property
    def positions(self) -> Floats:
        """Positions of a sequence as programs run it, [C, 1]: padded where a mesh does not divide them."""
        positions: Floats = padded_positions(
            self.workload.seq_len,
            ring=self.strategies.layouts.along(*SEQUENCE_AXES)[:, None],
            residual=self.strategies.layouts.along(*RESIDUAL_AXES)[:, None],
            kernel=self.kernel,
        ).astype(np.float64)
        return positions

    @property
    def batch_seqs(self) -> Number:
        """Sequences of a step."""
        return self.workload.batch_seqs

    @cached_property
    def tokens(self) -> Floats:
        """Tokens per microbatch in each tensor group, [C, K]: split over data, fsdp, expert and context.

        Those of the busiest device: devices with fewer sequences, or the end of one, get padding.
        """
        parts = self.strategies.devices(*BATCH_AXES) * self.strategies.microbatches
        sequences = next_multiple(self.batch_seqs, parts) / parts
        tokens: Floats = sequences * (self.positions / self.strategies.devices(*SEQUENCE_AXES))
        return tokens

    @cached_property
    def loss_chunks(self) -> Floats:
        """Chunks in which a device computes its loss, [C, K]: the fewest of at most ``LOSS_CHUNK`` tokens."""
        chunks: Floats = np.maximum(np.ceil(self.tokens / LOSS_CHUNK), 1.0)
        return chunks

    @cached_property
    def padding(self) -> Floats:
        """Share of a step's positions that hold no token, [C, K]."""
        parts = self.strategies.devices(*BATCH_AXES) * self.strategies.microbatches
        padded: Floats = next_multiple(self.batch_seqs, parts) * self.positions
        return 1 - self.batch_seqs * self.workload.seq_len / padded

    @property
    def attention_block(self) -> int:
        """Largest side of the blocks of the attention kernels that are priced."""
        kernels = self.assumptions.attention_kernels
        own = priced_block(self.kernel, self.rates)
        priced = own if kernels is None else attention_kernels(self.slice.chip, kernels).block
        return self.assumptions.attention_block or priced

    @cached_property
    def own_positions(self) -> Floats:
        """Positions of a sequence on a device, [C, 1]."""
        own: Floats = self.positions / self.strategies.devices(*SEQUENCE_AXES)
        return own

    @cached_property
    def run_rows(self) -> Floats:
        """Queries of a run of the ``chunked`` kernel, which are multiplied with a block of keys, [C, 1]."""
        own = self.own_positions
        return np.maximum(own / RUNS, np.minimum(self.attention_block, own))

    @cached_property
    def pairs_per_token(self) -> Floats:
        """(Query, key) pairs that the attention kernel executes per token and head, averaged over layers, [C, 1]."""
        largest, chunked = self.attention_block, self.kernel == "chunked"
        ring = self.strategies.devices(*SEQUENCE_AXES)
        own = self.positions / ring
        # Few layouts differ in these lengths.
        lengths, index = np.unique(self.positions + 1j * own, return_inverse=True)
        pairs, full = [], []
        for positions, on_device in ((int(length.real), int(length.imag)) for length in lengths):
            block = largest
            if self.kernel not in ("cudnn", "chunked"):
                block = positions if self.kernel == "reference" else block_size(on_device, largest)
            devices = positions // on_device
            chunks = devices * CONTEXT_CHUNKS if devices > 1 and self.kernel != "reference" else 1
            pairs.append(mean_attended_pairs(self.model, positions, block, chunks=chunks, in_runs=chunked) / positions)
            full.append(full_attention_share(self.model, positions, block, chunks=chunks, in_runs=chunked))
        per_token, unwindowed = (np.array(values)[index].reshape(own.shape) for values in (pairs, full))
        # Stages gather keys: a kernel cannot leave out those that come later for some devices and not for others.
        more: Floats = per_token * (1 + self.staged * (ring - 1) / (2 * ring) * unwindowed)
        return more

    @cached_property
    def key_exchange(self) -> tuple[Number, Number]:
        """Share of layers whose keys go round a ring, and of a device's keys that windowed layers get, [C, 1].

        A window needs only the blocks before each of a device's chunks. The second figure is a mean of all layers.
        """
        windows = self.model.windows
        largest = self.attention_block
        ring = self.strategies.devices(*SEQUENCE_AXES)
        lengths, index = np.unique(self.positions + 1j * ring, return_inverse=True)
        rings, before = [], []
        for positions, devices in ((int(length.real), int(length.imag)) for length in lengths):
            chunk = positions // (devices * CONTEXT_CHUNKS)
            short = [window for window in windows if window is not None and window < positions]
            rings.append(1.0 - len(short) / len(windows))
            earlier = sum(
                min(next_multiple(window - 1, block_size(chunk, largest)), positions - chunk) for window in short
            )
            before.append(earlier / len(windows) / chunk if devices > 1 else 0.0)
        share, parts = (np.array(values)[index].reshape(ring.shape) for values in (rings, before))
        return share, parts

    def in_hbm(self, nbytes: Number) -> Number:
        """Share of the passes over an array around attention that go to HBM: XLA keeps what is small in VMEM, [C, K].

        ``Habits.vmem_share`` is the share of VMEM from which nothing is kept; below it, less in proportion.
        """
        chip, small = self.slice.chip, self.habits.vmem_share
        if not small:
            return 1.0
        return np.minimum(np.asarray(nbytes) / (small * chip.vmem_bytes / chip.devices), 1.0)

    @cached_property
    def staged(self) -> Floats:
        """1 with a pipeline, 0 without, [C, 1]."""
        return np.where(self.strategies.devices(*STAGE_AXES) > 1, 1.0, 0.0)

    @cached_property
    def layers_alone(self) -> Alone:
        """Layers that pipeline stages do not share: all hold their weights, the first one or the last does them."""
        first, last = ((), ()) if self.habits.fills_stages else layers_alone(self.model)
        return Alone(
            first=self.staged * len(first),
            last=self.staged * len(last),
            first_dense=self.staged * sum(not kind.moe for kind in first),
            last_dense=self.staged * sum(not kind.moe for kind in last),
        )

    @cached_property
    def periods(self) -> Floats:
        """Periods of layers that a pipeline stage has room for, of those that stages share, [C, 1]."""
        shared, chunks = segments(self.model)[shared_segment(self.model)], self.strategies.chunks
        parts = self.strategies.devices(*STAGE_AXES) * chunks
        # Stages that are filled with layers of all kinds have a mixture of them, as the model has.
        repeats = self.model.layers / len(shared.kinds) if self.habits.fills_stages else shared.repeats
        periods: Floats = np.ceil(repeats / parts) * chunks
        return periods

    @cached_property
    def layers(self) -> Floats:
        """Layers that a pipeline stage has room for, [C, 1]: its part of those that are shared, and those that are not.

        It is priced as if it did them all, but for ``padding_layers``.
        """
        period = len(segments(self.model)[shared_segment(self.model)].kinds)
        layers: Floats = np.where(self.staged, self.periods * period + self.layers_alone.every, self.model.layers)
        return layers

    @cached_property
    def last_chunk(self) -> Floats:
        """Periods in the last chunk of all stages, over those that a chunk has room for, [C, 1]."""
        repeats = segments(self.model)[shared_segment(self.model)].repeats
        room = self.periods / self.strategies.chunks
        others = self.strategies.devices(*STAGE_AXES) * self.strategies.chunks - 1
        share: Floats = np.maximum(repeats - others * room, 0) / room
        return share

    @cached_property
    def padding_layers(self) -> Floats:
        """Layers that a stage has room for beyond those that it does, [C, 1], in the mean of all stages."""
        alone = self.layers_alone.every
        padding: Floats = self.layers - alone - (self.model.layers - alone) / self.strategies.devices(*STAGE_AXES)
        return padding

    @cached_property
    def element_bytes(self) -> float:
        """Bytes of one activation, or of a gathered weight whose matmul is in the dtype of activations."""
        return dtype_bytes(self.numerics.compute)

    @property
    def operand_bytes(self) -> float:
        """Bytes of an operand of the layers' matmuls, and so of a layer's gathered weight."""
        return min(self.element_bytes, dtype_bytes(self.numerics.matmul))

    @cached_property
    def widths(self) -> ModelWidths:
        """Sizes of the model's dims on the busiest device, [C, 1], of experts [C, K], with padding."""
        devices = self.strategies.devices
        return ModelWidths(
            model=self.model, tensor=self.tensor, fsdp=devices(*GATHER_AXES), expert=self.expert_ways,
            expert_columns=np.where(self.whole_experts, 1.0, self.tensor),
        )  # fmt: skip

    @cached_property
    def kv_heads(self) -> Floats:
        """Key and value heads on a device, [C, 1]: copied where devices have heads in common."""
        return np.asarray(self.widths.kv_heads, np.float64)

    @cached_property
    def attention(self) -> AttentionMatmuls:
        """The projections of a layer's attention on a device, sizes [C, 1]."""
        return attention_kind(self.model).matmuls(np.asarray(self.widths.heads), self.kv_heads)

    @cached_property
    def mixers(self) -> list[tuple[Recurrence, MixerMatmuls, float]]:
        """Recurrent mixers, each with its projections on a device, sizes [C, 1], and its share of the layers."""
        layers = self.model.layers
        return [(kind, MixerMatmuls.of(kind, self.tensor), n / layers) for kind, n in recurrences(self.model)]

    @property
    def attention_share(self) -> float:
        """Share of layers that have attention."""
        return self.model.attention_layers / self.model.layers

    def columns(self, hidden: int) -> Floats:
        """Columns of an MLP of ``hidden`` ones on a device, [C, 1]."""
        return np.asarray(self.widths.columns(hidden))

    @property
    def columns_of_expert(self) -> Floats:
        """Columns of an expert on a device, [C, K]."""
        return np.asarray(self.widths.columns_of_expert)

    def stored(self, shapes: Iterable[MatmulShape]) -> Floats:
        """Elements of the gathered weights of ``shapes`` as they are stored, [C, 1]: with rows that fsdp pads."""
        padded = (MatmulShape(np.asarray(self.widths.stored(shape.k)), shape.n) for shape in shapes)
        return parameters(padded)

    def summed_whole(self, shape: MatmulShape) -> Number:
        """1 where gradients of a weight are summed on every device instead of scattered over fsdp, [C, 1].

        So if a part has no whole tiles of rows, or if the ring is longer than ``Habits.scatters_up_to`` over the
        largest prime factor of the tiles across: every step of it holds a piece of each.
        """
        parts, limit = self.strategies.devices(*GATHER_AXES), self.habits.scatters_up_to
        if limit is None or not np.any(parts > 1):
            return 0.0
        factor = largest_factor(np.ceil(shape.n / LANES))
        summed = (factor > 2) & (factor * parts > limit)
        if self.habits.scatters_tiles:
            summed = summed | (np.asarray(self.widths.stored(shape.k)) / parts % VPU[0] > 0)
        return np.where((parts > 1) & summed, 1.0, 0.0)

    @cached_property
    def copied_keys(self) -> Floats:
        """Elements of a layer's key and value weights that devices gather over tensor too, [C, 1]; mostly 0."""
        model, widths = self.model, self.widths
        elements = widths.copied_keys * widths.spread(model.d_model) * 2.0 * model.kv_heads * model.d_head
        return np.asarray(elements)

    @cached_property
    def own_keys(self) -> Floats:
        """Elements of those weights that a device uses, [C, 1], as ``stored`` counts them."""
        shape = MatmulShape(self.model.d_model * np.ones_like(self.tensor), 2.0 * self.kv_heads * self.model.d_head)
        elements: Floats = self.widths.copied_keys * self.stored([shape])
        return elements

    @cached_property
    def layer_parameters(self) -> dict[str, Floats]:
        """Gathered parameters per layer on a device, [C, 1]: 'attn', 'mlp', 'shared', and 'experts', [C, K].

        They are counted as stored. 'attn' is the mean of layers with different mixers.
        """
        attention = self.stored(self.attention.every) - self.own_keys + self.copied_keys / self.tensor
        mixers = sum(
            (share * self.stored(shapes.every) for _, shapes, share in self.mixers), np.zeros_like(self.tensor)
        )
        sizes = {
            "attn": self.attention_share * attention + mixers,
            "mlp": np.zeros_like(self.tensor),
            "experts": np.zeros_like(self.tensor),
        }
        moe = self.model.moe
        if self.model.dense_layers:
            up, down = mlp_matmuls(self.model, self.columns(self.model.d_ff))
            sizes["mlp"] = self.stored(up + down)
        if moe is not None:
            up, down = mlp_matmuls(self.model, self.columns_of_expert)
            sizes["experts"] = self.stored(up + down) * self.widths.experts
            shared = self.stored([self.router])
            if moe.shared_d_ff:
                up, down = mlp_matmuls(self.model, self.columns(moe.shared_d_ff))
                shared = shared + self.stored(up + down)
            sizes["shared"] = shared
        return sizes

    @cached_property
    def router(self) -> MatmulShape:
        """The matrix of a layer's router, [C, 1]."""
        assert self.model.moe is not None
        one = np.ones_like(self.tensor)
        return MatmulShape(float(self.model.d_model) * one, float(self.model.moe.experts) * one)

    @cached_property
    def dense_layers(self) -> Floats:
        """Dense layers that a stage has room for, [C, 1]."""
        period = sum(not kind.moe for kind in segments(self.model)[shared_segment(self.model)].kinds)
        dense = self.periods * period + self.layers_alone.every_dense
        if self.habits.fills_stages:
            dense = self.layers * (self.model.dense_layers / self.model.layers)
        layers: Floats = np.where(self.staged, dense, self.model.dense_layers)
        return layers

    @cached_property
    def dense_share(self) -> Floats:
        """Share of ``layers`` whose MLP is dense, [C, 1]."""
        return self.dense_layers / self.layers

    @cached_property
    def held_parameters(self) -> dict[str, Floats]:
        """Parameters in one device's shards, [C, 1]: 'dense' (copied over expert), 'experts', and 'vocab'."""
        fsdp, one = self.strategies.devices(*GATHER_AXES), np.ones_like(self.tensor)
        rows = self.widths.vocab * self.tensor if self.model.tied_embeddings else self.model.vocab
        vocab = rows * self.widths.spread(self.model.d_model) / self.tensor
        if not self.model.tied_embeddings:
            vocab = vocab + self.stored([MatmulShape(self.model.d_model * one, np.asarray(self.widths.vocab))])
        return {**self._in_layers(self.layer_parameters), "vocab": vocab / fsdp}

    def _in_layers(self, sizes: Mapping[str, Floats]) -> dict[str, Floats]:
        """Parameters in one device's shards of all layers, [C, 1], by the ``sizes`` of a layer's parts."""
        fsdp, share = self.strategies.devices(*GATHER_AXES), self.dense_share
        dense = sizes["attn"] + share * sizes["mlp"] + (1 - share) * sizes.get("shared", 0.0)
        return {
            "dense": self.layers * dense / fsdp,
            "experts": self.layers * (1 - share) * sizes["experts"] / fsdp,
        }

    @cached_property
    def trained_parameters(self) -> dict[str, Floats]:
        """Those of ``held_parameters`` that have gradients and optimizer state; with adapters these alone."""
        if self.adapters is None:
            return self.held_parameters
        return {**self._in_layers(self.adapter_parameters()), "vocab": np.zeros_like(self.tensor)}

    @cached_property
    def frozen_bytes(self) -> Number:
        """Bytes of a device's frozen weights, [C, 1]: matrices of layers in their format, tables as activations."""
        if self.adapters is None:
            return 0.0
        parts = self.held_parameters
        matrices = parts["dense"] + parts["experts"] * self.lane_padding
        return self.adapters.base_bytes * matrices + self.element_bytes * parts["vocab"]

    def adapter_matmuls(
        self, scope: str, shapes: Sequence[MatmulShape], arrays: int = 1
    ) -> tuple[list[MatmulShape], list[MatmulShape]]:
        """The matrices A and B of the adapters of a block of matmuls; none if it has no adapters.

        ``arrays`` weights are in the block; several ``shapes`` are one each.
        """
        if self.adapters is None or not self.adapters.adapts(scope):
            return [], []
        pairs = [self.adapters.matmuls(shape, 1 if len(shapes) > 1 else arrays) for shape in shapes]
        return [into for into, _ in pairs], [out for _, out in pairs]

    def adapter_parameters(self, *, whole: bool = False) -> dict[str, Floats]:
        """Gathered parameters of a layer's adapters on a device, as ``layer_parameters`` has them, [C, 1].

        ``whole``: only of matrices that tensor does not split, so that their gradients are summed over it: A of
        weights whose columns are split, B of those whose rows are.
        """
        model, moe, attention = self.model, self.model.moe, self.attention
        into, out = "layers/attn/qkv", "layers/attn/out"

        def block(scope: str, shapes: Sequence[MatmulShape], *, rows: bool, arrays: int = 1) -> Floats:
            down, up = self.adapter_matmuls(scope, shapes, arrays)
            parts = (self.stored(down) * (not whole or not rows), self.stored(turned(up)) * (not whole or rows))
            return parts[0] + parts[1] + np.zeros_like(self.tensor)

        def mlp(scopes: tuple[str, str], columns: Floats) -> Floats:
            up, down = mlp_matmuls(model, columns)
            return block(scopes[0], up, rows=False, arrays=model.mlp_matrices - 1) + block(scopes[1], down, rows=True)

        latent = block(into, attention.latent, rows=False) + whole * block(into, attention.latent, rows=True)
        sizes = {
            "attn": latent
            + block(into, attention.into, rows=False, arrays=attention_arrays(model))
            + block(out, attention.out, rows=True),
            "mlp": np.zeros_like(self.tensor),
            "experts": np.zeros_like(self.tensor),
        }
        if model.dense_layers:
            sizes["mlp"] = mlp(("layers/mlp/up", "layers/mlp/down"), self.columns(model.d_ff))
        if moe is not None:
            experts = self.widths.experts * mlp(("layers/moe/experts",) * 2, self.columns_of_expert)
            sizes["experts"] = experts * (1 - self.whole_experts) if whole else experts
            if moe.shared_d_ff:
                sizes["shared"] = mlp(("layers/moe/shared",) * 2, self.columns(moe.shared_d_ff))
        return sizes

    @cached_property
    def launch_s(self) -> Mapping[Phase, Number]:
        """Seconds in which the host launches the kernels of a stage's layers, [C, K], by pass; {} for graphs alone.

        A kernel counts alike whichever it is. Those outside of the layers are few, and left out.
        """
        habits, recomputed = self.habits, self.strategies.recomputed
        if not habits.launch_s:
            return {}
        narrow = self.operand_bytes < self.element_bytes
        kernels = LayerKernels(
            model=self.model,
            quantise=habits.quantising_kernels if narrow else 0,
            scales=habits.scaling_kernels if narrow else 0,
            experts=self.widths.experts,
            grouped=habits.groups_experts,
            dispatch=habits.dispatch,
            tensor=np.where(self.tensor > 1, 1.0, 0.0),
            graphs=habits.graphs,
            again={name: recomputed(name) for name in CHECKPOINTS},
        )
        alone = self.layers_alone
        dense, layers = self.dense_layers - alone.every_dense, self.layers - alone.every
        total = Launches(0.0, 0.0)
        if self.model.dense_layers:
            total += kernels.of(moe=False) * dense
        if self.model.moe is not None:
            total += kernels.of(moe=True) * (layers - dense)
        kernel_s = habits.launch_s * self.strategies.microbatches
        return {"forward": kernel_s * total.forward, "backward": kernel_s * total.backward}

    @cached_property
    def lane_padding(self) -> Floats:
        """Elements of an expert's weights at rest with those that fill whole registers, over those alone, [C, 1].

        XLA lays that dim into the lanes of registers which it pads least: D or F, as a device has them.
        """
        moe = self.model.moe
        if moe is None or not self.habits.pads_lanes:
            return np.ones_like(self.tensor)
        rows = self.widths.stored(self.model.d_model) / self.strategies.devices(*GATHER_AXES)
        padding: Floats = reduce(
            np.minimum, (next_multiple(size, LANES) / size for size in (rows, self.columns_of_expert))
        )
        return padding

    @cached_property
    def parameters_alone(self) -> Floats:
        """Parameters of a device in layers that no stage shares, [C, 1]: stages sum their gradients."""
        sizes = self.layer_parameters if self.adapters is None else self.adapter_parameters()
        alone = self.layers_alone
        experts = (alone.every - alone.every_dense) * (sizes["experts"] + sizes.get("shared", 0.0))
        elements: Floats = alone.every * sizes["attn"] + alone.every_dense * sizes["mlp"] + experts
        return elements / self.strategies.devices(*GATHER_AXES)

    @cached_property
    def vectors(self) -> dict[tuple[str, ...], Number]:
        """Elements of scales, biases and sinks on a device, by the mesh axes over which copies of them are spread.

        None is split over fsdp. Those that belong to heads or hidden columns are split over tensor.
        """
        elements: dict[tuple[str, ...], Number] = {}
        for weight, own, axes in self.vector_weights:
            elements[axes] = elements.get(axes, 0.0) + weight.layers * own
        return elements

    @cached_property
    def vector_weights(self) -> list[tuple[Weight, Floats, tuple[str, ...]]]:
        """Each of them with a layer's elements on a device, [C, 1], and the axes that hold copies; frozen, none."""
        rules, vectors = Rules().parameters, []
        if self.adapters is not None:
            return []
        for weight in weights(self.model):
            if not weight.matmul and weight.name not in ("tokens", "correction_bias"):
                split = [axis for dim in weight.dims for axis in rules[dim]]
                own = weight.params / weight.layers / self.strategies.devices(*split)
                axes = copy_axes(*weight.dims, sequence="residual_seq")
                if "expert" in weight.dims and np.any(self.whole_experts):
                    # Of what tensor does not split, devices along it have only their own experts' part.
                    whole = own * self.strategies.devices(*split) / self.strategies.devices(*{*split, *COLUMN_AXES})
                    alone = tuple(axis for axis in axes if axis not in COLUMN_AXES)
                    vectors.append((weight, whole * self.whole_experts, alone))
                    own = own * (1 - self.whole_experts)
                vectors.append((weight, own, axes))
        return vectors

    @cached_property
    def sequence_parameters(self) -> Floats:
        """Parameters in one device's shards that meet only its own part of the sequence, [C, 1].

        Routers and the down-projections of MLA: their gradients are summed over tensor too. So are those of adapters'
        matrices that tensor does not split.
        """
        if self.adapters is not None:
            return self.whole_adapters["dense"]
        latent = self.stored(self.attention.latent)
        router = 0.0 if self.model.moe is None else (1 - self.dense_share) * self.stored([self.router])
        elements: Floats = self.layers * (latent + router) / self.strategies.devices(*GATHER_AXES)
        return elements

    @cached_property
    def whole_adapters(self) -> dict[str, Floats]:
        """Adapters' parameters in one device's shards that tensor does not split, [C, 1]: 'dense' and 'experts'."""
        return self._in_layers(self.adapter_parameters(whole=True))


def attention_arrays(model: ModelConfig) -> int:
    """Weights that make queries, keys and values, of those that share an input."""
    return 3 if model.mla is None else len(attention_kind(model).matmuls(np.ones(1), np.ones(1)).into)


def turned(shapes: Iterable[MatmulShape]) -> list[MatmulShape]:
    """The shapes [n, k] of weights [k, n] of which fsdp splits the columns."""
    return [MatmulShape(shape.n, shape.k) for shape in shapes]
