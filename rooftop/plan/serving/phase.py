"""One phase of serving under one placement: the sizes that its rows, its memory and its times are made of.

Weights stay where they are (chapter 7): hidden columns and query heads are split over ``context`` x ``tensor``, D over
``fsdp`` if that has several devices (2-D weight-stationary), experts over ``expert``, which also spreads the tokens.
When generating, the KV cache is split over heads on ``tensor``, and over the batch or the sequence on ``context`` and
over the batch on ``fsdp``. In a prefill ``context`` splits the sequence instead, and the weights are copied over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from rooftop.arrays.rules import (
    BATCH_AXES,
    COLUMN_AXES,
    EXPERT_AXES,
    GATHER_AXES,
    REPLICA_AXES,
    SEQUENCE_AXES,
    STAGE_AXES,
    Rules,
)
from rooftop.core.ledger import Number
from rooftop.core.quantities import dtype_bytes
from rooftop.core.rounding import next_multiple
from rooftop.hardware import Chip
from rooftop.models import ModelConfig
from rooftop.models.attention import AttentionKind, AttentionMatmuls, MatmulShape, attention_kind
from rooftop.models.counting import kv_cache_bytes
from rooftop.models.mixers import Recurrence, recurrences, state_bytes
from rooftop.models.program_sizes import SUBLANES, cache_row, expert_rows, expert_tile
from rooftop.models.segments import heaviest_stage
from rooftop.models.widths import ModelWidths
from rooftop.plan.serving.assumptions import reads_experts_by_tile
from rooftop.plan.serving.placement import Placed
from rooftop.plan.serving.pricing import Pipeline
from rooftop.plan.serving.workload import ROUTER_DTYPE, ServingNumerics
from rooftop.plan.shapes import MixerMatmuls, mlp_matmuls
from rooftop.roofline.rates import Rates
from rooftop.roofline.rules import distinct_experts, expert_visits

#: Bytes of an activation.
ACTIVATION_BYTES = 2.0
ServingPhase = Literal["prefill", "generate"]

T = TypeVar("T")


class _of_placement(Generic[T]):
    """A property of a phase that depends neither on tokens nor on number formats: computed once for a placement."""

    def __init__(self, compute: Callable[[Phase], T]) -> None:
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, phase: Phase, owner: type[Phase]) -> T:
        """The property; a phase then has it as an attribute of its own."""
        shapes = phase.shapes
        if self.name not in shapes:
            shapes[self.name] = self.compute(phase)
        value: T = shapes[self.name]
        phase.__dict__[self.name] = value
        return value


@dataclass(frozen=True, kw_only=True)
class Phase:
    """``tokens`` tokens over the whole mesh in one step: the last one of so many sequences, or those of a prefill.

    ``phase`` is 'prefill' or 'generate'. When generating, ``guesses`` more tokens of each sequence are checked in the
    same step, and figures may be arrays over batch sizes.
    """

    phase: ServingPhase
    model: ModelConfig
    numerics: ServingNumerics
    placement: Placed
    tokens: Number
    guesses: int = 0

    def ways(self, *axes: str) -> Number:
        """Devices along mesh axes together."""
        return self.placement.ways(axes)

    def splits(self, *axes: str) -> bool:
        """True if there are several devices along mesh axes together, in any of the placements."""
        return bool(self.placement.used(axes))

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Properties that do not depend on tokens, which phases of one placement and model share."""
        return self.placement.shapes.setdefault((self.phase, self.model), {})

    @property
    def generating(self) -> bool:
        """True when generating."""
        return self.phase == "generate"

    @property
    def columns(self) -> tuple[str, ...]:
        """The mesh axes that split heads and hidden columns."""
        return _columns(ring=not self.generating)

    @_of_placement
    def split(self) -> Number:
        """Ways in which heads and hidden columns are split."""
        return self.ways(*self.columns)

    @_of_placement
    def widths(self) -> ModelWidths:
        """Sizes of the model's dims on a device, padded where the mesh does not divide them."""
        return ModelWidths(
            model=self.model,
            tensor=self.ways(*COLUMN_AXES),
            fsdp=self.ways(*GATHER_AXES),
            expert=self.ways(*EXPERT_AXES),
            sharing=self.ways(*SEQUENCE_AXES) if self.generating else 1,
        )

    @cached_property
    def rates(self) -> Rates:
        """Rates of one device."""
        return Rates.of(self.placement.slice.chip)

    @_of_placement
    def stages(self) -> Number:
        """Pipeline stages, and flights: the sequences that generate together while other stages work for others."""
        return self.ways(*STAGE_AXES)

    @cached_property
    def step_tokens(self) -> Number:
        """Tokens that a stage works on at once: those of one flight's sequences, or of a prefill."""
        tokens: Number = (
            np.ceil(self.tokens / self.stages) if self.generating and self.splits(*STAGE_AXES) else self.tokens
        )
        return tokens

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages that the step passes through; None without any."""
        if not self.splits(*STAGE_AXES):
            return None
        flights = np.minimum(self.stages, self.tokens) if self.generating else 1.0
        return Pipeline(layers=self.model.layers, stages=self.stages, flights=flights)

    @_of_placement
    def heaviest(self) -> tuple[Number, Number, Number]:
        """The stage with the most weights: its share of all layers, of those with experts, and of the others."""
        stages, model = np.asarray(self.stages), self.model
        layers, mixtures = np.empty(stages.shape), np.empty(stages.shape)
        for at in np.ndindex(stages.shape):
            layers[at], mixtures[at] = heaviest_stage(model, int(stages[at]))
        experts = mixtures / max(model.moe_layers, 1)
        return layers / model.layers, experts, (layers - mixtures) / max(model.layers - model.moe_layers, 1)

    @cached_property
    def own_tokens(self) -> Number:
        """Tokens that one group of devices which share activations works on: the batch is split over ``expert``."""
        spread = self.ways(*REPLICA_AXES, *EXPERT_AXES, *(() if self.generating else SEQUENCE_AXES))
        own: Number = next_multiple(np.ceil(self.step_tokens / spread), self.token_unit)
        return own * (1 + self.guesses)

    @_of_placement
    def token_unit(self) -> Number:
        """Tokens that a step is padded to a multiple of where D is split over ``fsdp``; 1 elsewhere.

        Between matmuls tokens are split over the axes of columns, and inside of blocks over ``fsdp``.
        """
        if not self.splits(*GATHER_AXES):
            return 1.0
        shared = self.placement.kv_split == "batch" and self.generating
        groups = self.ways(*GATHER_AXES) * (self.ways(*SEQUENCE_AXES) if shared else 1)
        return SUBLANES * np.lcm(np.asarray(groups).astype(np.int64), np.asarray(self.split).astype(np.int64)) * 1.0

    @property
    def scatters(self) -> bool:
        """True if the stream is split over columns' axes between blocks: with D over ``fsdp``, and with experts."""
        return self.model.moe is not None or self.splits(*GATHER_AXES)

    @_of_placement
    def kv_heads(self) -> Number:
        """Key and value heads on a device, copies included where there are fewer heads than ways."""
        return self.widths.kv_heads

    @cached_property
    def kind(self) -> AttentionKind:
        """The model's kind of attention."""
        return attention_kind(self.model)

    @_of_placement
    def _projections(self) -> AttentionMatmuls:
        return self.kind.matmuls(np.float64(self.widths.heads), np.float64(self.kv_heads))  # type: ignore[arg-type]

    @_of_placement
    def attention(self) -> list[MatmulShape]:
        """Projections of the stream into attention on one device, those to latents first."""
        matmuls = self._projections.every[: -len(self._projections.out)]
        return [one for one in matmuls if np.all(one.k == self.model.d_model)]

    @_of_placement
    def attention_up(self) -> list[MatmulShape]:
        """Projections up from latents on one device, whole along ``fsdp``."""
        matmuls = self._projections.every[: -len(self._projections.out)]
        return [one for one in matmuls if not np.all(one.k == self.model.d_model)]

    @_of_placement
    def attention_out(self) -> list[MatmulShape]:
        """The projection out of attention on one device."""
        return list(self._projections.out)

    @_of_placement
    def mixers(self) -> list[tuple[Recurrence, MixerMatmuls, int]]:
        """Recurrent mixers, each with its projections on one device and the number of its layers."""
        return [(kind, MixerMatmuls.of(kind, self.split), layers) for kind, layers in recurrences(self.model)]

    def mlp(self, hidden: int) -> tuple[list[MatmulShape], list[MatmulShape]]:
        """Matmuls into an MLP of ``hidden`` columns, and out of it, on one device."""
        return mlp_matmuls(self.model, np.float64(self.widths.columns(hidden)))  # type: ignore[arg-type]

    @cached_property
    def tokens_of_all(self) -> Number:
        """Tokens of all groups of devices that share activations, in one copy of the model."""
        return self.own_tokens * self.ways(*EXPERT_AXES)

    @cached_property
    def expert_rows(self) -> Number:
        """Rows of its experts that a device works on at once."""
        assert self.model.moe is not None
        here, shards = self.widths.experts, self.ways(*EXPERT_AXES)
        rows: Number = expert_rows(self.tokens_of_all, self.model.moe, shards, here, self.ways(*GATHER_AXES))
        return rows

    @cached_property
    def experts_read(self) -> Number:
        """Reads of experts on a device: of each that at least one token is expected to use.

        Where kernels do so, quantised experts are read once for each tile of their rows.
        """
        moe = self.model.moe
        if moe is None:
            return 0.0
        tokens = self.step_tokens * (1 + self.guesses)
        if reads_experts_by_tile(self.rates.chip) and dtype_bytes(self.numerics.weights) < ACTIVATION_BYTES:
            read = expert_visits(moe.experts, moe.active, tokens, expert_tile(self.tokens_of_all, moe))
        else:
            read = distinct_experts(moe.experts, moe.active, tokens)
        return read / self.ways(*EXPERT_AXES)

    def weight_bytes(
        self, matmuls: Sequence[MatmulShape], dtype: str | None = None, *, whole: bool = False
    ) -> tuple[Number, Number]:
        """Bytes of matrices and of their scales on one device: D is also split over ``fsdp``, unless ``whole``.

        ``dtype``: by default that of all layers but their experts.
        """
        kind = dtype or self.numerics.shared_weights
        elements = [m.parameters / (1.0 if whole else self.ways(*GATHER_AXES)) for m in matmuls]
        scales = (self.numerics.weight_scale_bytes(m.k, kind) for m in matmuls)
        return sum(elements) * dtype_bytes(kind), sum(n * element for n, element in zip(elements, scales, strict=True))

    def convert_s(self, matmuls: Sequence[MatmulShape], dtype: str | None = None) -> Number:
        """Seconds in which a device converts weights in groups for a matmul; 0 of others. ``dtype`` as above."""
        kind = dtype or self.numerics.shared_weights
        if self.numerics.weight_group is None:
            return 0.0
        return self.rates.convert_s(sum(m.parameters for m in matmuls) / self.ways(*GATHER_AXES), kind)

    @_of_placement
    def cache_share(self) -> Number:
        """Share of the heads of a token's KV on a device; a cache without heads is copied over ``tensor``."""
        heads = self.kind.cached_heads
        return 1.0 if heads is None else self.kv_heads / heads

    def cached_bytes(self, context: Number, *, stored: bool) -> Number:
        """Bytes of KV of a sequence of ``context`` tokens: see ``cached_bytes``."""
        return cached_bytes(self.model, self.numerics, context, self.rates.chip, stored=stored)

    def sequences(self, batch: Number) -> Number:
        """Sequences of a flight's ``batch`` whose KV the busiest device has a part of; one split counts as its part."""
        spread = self.ways(*BATCH_AXES)
        if not self.generating:
            return np.ceil(batch / self.ways(*REPLICA_AXES)) / self.ways(*EXPERT_AXES, *SEQUENCE_AXES)
        if self.placement.kv_split == "seq":
            return np.ceil(batch / spread) / self.ways(*SEQUENCE_AXES)
        return np.ceil(batch / (spread * self.ways(*SEQUENCE_AXES)))

    def device_kv_bytes(self, batch: Number, context: Number, *, stored: bool) -> Number:
        """Bytes of all layers' KV of a flight's ``batch`` on the busiest device, as read in a step or as stored."""
        return self.sequences(batch) * self.cached_bytes(context, stored=stored) * self.cache_share

    def resident_kv_bytes(self, batch: Number, context: Number) -> Number:
        """Bytes of KV that the busiest device stores: of its stage's layers, and of all flights of ``batch``."""
        if not self.splits(*STAGE_AXES):
            return self.device_kv_bytes(batch, context, stored=True)
        flights = self.stages if self.generating else 1.0
        most = np.ceil(self.model.layers / np.asarray(self.stages)) / self.model.layers
        return flights * self.device_kv_bytes(np.ceil(batch / flights), context, stored=True) * most

    @cached_property
    def device_weight_bytes(self) -> tuple[Number, Number]:
        """Bytes of all weights on one device, and of their scales."""
        model, moe = self.model, self.model.moe
        every, experts, dense = self.heaviest if self.splits(*STAGE_AXES) else (1.0, 1.0, 1.0)
        parts: list[tuple[Number, tuple[Number, Number]]]
        parts = [(every * model.attention_layers, self.weight_bytes(self.attention + self.attention_out))]
        parts.append((every * model.attention_layers, self.weight_bytes(self.attention_up, whole=True)))
        parts += [(every * layers, self.weight_bytes(shapes.every)) for _, shapes, layers in self.mixers]
        if model.dense_layers:
            up, down = self.mlp(model.d_ff)
            parts.append((dense * model.dense_layers, self.weight_bytes(up + down)))
        if moe is not None:
            up, down = self.mlp(moe.d_ff)
            mixtures = experts * model.moe_layers
            parts.append((mixtures * self.widths.experts, self.weight_bytes(up + down, self.numerics.weights)))
            parts.append((mixtures, self.weight_bytes([self.router], ROUTER_DTYPE)))
            if moe.shared_d_ff:
                up, down = self.mlp(moe.shared_d_ff)
                parts.append((mixtures, self.weight_bytes(up + down)))
        # The first stage looks rows up; the last one computes logits, and has a tied table too.
        logits = np.where((np.asarray(self.stages) > 1) & (not model.tied_embeddings), 0.0, 1.0)
        parts.append((logits, self.weight_bytes([self.table], self.numerics.embeddings)))
        parts.append((1.0, self.weight_bytes([self.lookup], self.numerics.embeddings)))
        return sum(count * plain for count, (plain, _) in parts), sum(count * more for count, (_, more) in parts)

    @_of_placement
    def table(self) -> MatmulShape:
        """The unembedding on one device: V split as hidden columns are, and over ``expert``."""
        return MatmulShape(np.float64(self.model.d_model), np.float64(self.vocab))  # type: ignore[arg-type]

    @_of_placement
    def vocab(self) -> Number:
        """Rows of the vocabulary whose logits a device computes; ``fsdp`` splits them further."""
        return np.ceil(self.model.vocab / (self.split * self.ways(*EXPERT_AXES)))

    @_of_placement
    def lookup(self) -> MatmulShape:
        """The embedding table on one device, without rows where it is the unembedding, on a server of one device."""
        model, own = self.model, self.ways(*GATHER_AXES)
        columns = np.ceil(model.d_model / self.split)
        columns = np.where(np.asarray(own) > 1, columns, next_multiple(columns, self.lanes))
        alone = np.asarray(self.split * own * self.ways(*EXPERT_AXES)) == 1
        rows = model.vocab * np.where(alone & model.tied_embeddings, 0.0, 1.0)
        return MatmulShape(columns, rows)

    @property
    def lanes(self) -> int:
        """Elements of which rows of the cache and of the embedding table are multiples."""
        return self.rates.chip.lanes

    @_of_placement
    def router(self) -> MatmulShape:
        """The router, on every device."""
        experts = 0 if self.model.moe is None else self.model.moe.experts
        return MatmulShape(np.float64(self.model.d_model), np.float64(experts))  # type: ignore[arg-type]

    @cached_property
    def activation_bytes(self) -> Number:
        """Bytes of activations at the peak: stream, sums, queries, keys, values, hidden columns, and logits in float32.

        A prefill keeps logits of its last token only.
        """
        model, tokens = self.model, self.own_tokens
        hidden = max(
            model.d_ff if model.dense_layers else 0, 0 if model.moe is None else model.moe.active * model.moe.d_ff
        )
        projected = sum((m.n for m in self.attention + self.attention_up), 0.0)
        own = self.ways(*GATHER_AXES)
        # The stream is whole before the unembedding.
        width = np.maximum(4 / own, 1) * model.d_model + projected + 3 * hidden / self.split
        logits = 4.0 * (tokens if self.generating else 1) * self.ways(*EXPERT_AXES) * self.vocab / own
        return tokens * width * ACTIVATION_BYTES + logits


def cached_bytes(model: ModelConfig, numerics: ServingNumerics, context: Number, chip: Chip, *, stored: bool) -> Number:
    """Bytes of KV of a sequence of ``context`` tokens, scales and padding included, over all heads and layers.

    As read in a step; as ``stored``, layers that share a cache have it once, and recurrent mixers their states.
    """
    states, kind = state_bytes(model), attention_kind(model)
    rows, size = cache_row(model, chip.lanes, quantised=numerics.kv_bytes < ACTIVATION_BYTES)
    padding = rows * size / (kind.cached_together * (1 if kind.cached_heads is None else 2))
    plain = (kv_cache_bytes(model, numerics.kv, context) - states) * padding
    scales = 1.0 + numerics.kv_scale_bytes(model) / numerics.kv_bytes
    return plain * scales / numerics.kv_sharing + states if stored else plain * scales


def _columns(*, ring: bool) -> tuple[str, ...]:
    return COLUMN_AXES if ring else (*SEQUENCE_AXES, *COLUMN_AXES)


def serving_rules(*, generating: bool, ring: bool = False) -> Rules:
    """Sharding rules of a serving program. D of a weight is on fsdp, where it stays (2-D weight-stationary).

    ``context`` splits columns, or the sequence of a prefill in a ``ring``.
    """
    columns = _columns(ring=ring)
    split = dict.fromkeys(("heads", "mlp", "expert_mlp"), columns) | {"vocab": (*EXPERT_AXES, *columns)}
    split |= {"kv_heads": COLUMN_AXES, "expert": EXPERT_AXES}
    sequence = () if generating else (*EXPERT_AXES, *(SEQUENCE_AXES if ring else ()))
    return Rules(
        parameters={"embed": GATHER_AXES, **split},
        activations={"batch": (*REPLICA_AXES, *EXPERT_AXES), "seq": sequence, **split},
    )
