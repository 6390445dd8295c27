"""A serving problem: its input, its placements, and the time and memory of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, get_args

import numpy as np

from rooftop.arrays.mesh import Mesh
from rooftop.arrays.rules import (
    AXES,
    COLUMN_AXES,
    EXPERT_AXES,
    GATHER_AXES,
    REPLICA_AXES,
    SEQUENCE_AXES,
    STAGE_AXES,
    ways,
)
from rooftop.capabilities import ENGINE_CACHES, KV_SPLITS, SERVING, KvSplit, ServingSpec, engine_heads, obstacles
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.ledger import Ledger, Number, Row
from rooftop.core.quantities import dtype_bytes
from rooftop.frameworks.engines import Engine, Overheads, engine_of
from rooftop.frameworks.framework import ENGINES
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, count_params
from rooftop.models.attention import attention_kind
from rooftop.models.counting import kv_cache_bytes
from rooftop.models.mixers import recurrences
from rooftop.models.widths import MOST_PADDING, ModelWidths
from rooftop.plan.pricing import BOUNDS, Bounds, Work
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.engines.kernels import EngineKernels, engine_kernels
from rooftop.plan.serving.engines.rows import KernelStep
from rooftop.plan.serving.phase import Phase, ServingPhase, cached_bytes
from rooftop.plan.serving.placement import Placed, Placement
from rooftop.plan.serving.pricing import price_serving, serving_s, slowest_stage_s
from rooftop.plan.serving.rows import generate_work, mixed_work, prefill_work
from rooftop.plan.serving.workload import DraftModel, ServingNumerics, ServingWorkload
from rooftop.plan.shapes import require_planned
from rooftop.roofline.rates import Rates
from rooftop.roofline.rules import distinct_experts, generate_step_s, prefill_s
from rooftop.scheduling.serving.times import FrontEnd

Mode = Literal["disaggregated", "interleaved"]
MODES: tuple[Mode, ...] = get_args(Mode)
#: The network between a prefill and a generate server.
Link = Literal["ici", "dcn"]
LINKS: tuple[Link, ...] = get_args(Link)
#: The axes over which one copy of a model may be split.
_SPLIT_AXES = tuple(axis for axis in AXES if axis not in REPLICA_AXES)


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Bytes of one device by class; arrays over batch sizes."""

    weights: Number
    scales: Number
    kv: Number
    activations: Number

    @property
    def total(self) -> Number:
        """All classes together."""
        return self.weights + self.scales + self.kv + self.activations


@dataclass(frozen=True, kw_only=True)
class ServingProblem:
    """The input of a serving plan.

    ``slice`` is a generate server, and a prefill server too unless ``prefill_slice`` is (of the same chip). KV goes
    from one to the other over ``link``. ``axes`` and ``kv_split`` fix where generation runs, ``prefill_axes`` where
    prefill does. ``bounds`` 'book' is the arithmetic of chapters 7 and 8: nominal HBM, everything spread evenly, no
    network. ``host_bytes``: memory of a host that a prefix cache may fill.
    """

    model: ModelConfig
    slice: Slice
    workload: ServingWorkload
    numerics: ServingNumerics = ServingNumerics()
    assumptions: ServingAssumptions = ServingAssumptions()
    mode: Mode = "disaggregated"
    bounds: Bounds = "usable"
    axes: Mapping[str, int] | None = None
    prefill_axes: Mapping[str, int] | None = None
    kv_split: KvSplit | None = None
    link: Link = "dcn"
    draft: DraftModel | None = None
    host_bytes: float | None = None
    prefill_slice: Slice | None = None

    def __post_init__(self) -> None:
        require_planned(self.model)
        if self.mode not in MODES:
            raise unknown("batching", self.mode, MODES)
        if self.bounds not in BOUNDS:
            raise unknown("bounds", self.bounds, BOUNDS)
        if self.link not in LINKS:
            raise unknown("link", self.link, LINKS)
        if self.kv_split is not None and self.kv_split not in KV_SPLITS:
            raise unknown("kv-split", self.kv_split, KV_SPLITS)
        if self.assumptions.engine is not None:
            self._require_engine()
        if self.book and self.draft is not None:
            raise RooftopError("bounds", self.bounds, "usable with a draft model")
        if self.prefill_slice is not None:
            if self.mode == "interleaved":
                raise RooftopError("prefill-on", self.prefill_slice.name, "nothing where both phases share a server")
            if self.prefill_slice.chip != self.slice.chip or self.prefill_slice.num_slices > 1:
                raise RooftopError("prefill-on", self.prefill_slice.name, f"one slice of {self.slice.chip.name}")
        if self.numerics.flops not in self.slice.chip.flops_per_s:
            accepted = ", ".join(self.slice.chip.flops_per_s)
            raise RooftopError(f"matmul-dtype on {self.slice.chip.name}", self.numerics.flops, accepted)
        if self.numerics.kv_sharing > self.model.layers:
            raise RooftopError("kv-sharing", self.numerics.kv_sharing, f"at most the {self.model.layers} layers")
        inputs = max(self.model.d_model, self.model.d_ff, self.model.heads * self.model.d_value)
        if self.numerics.weight_group is not None and self.numerics.weight_group > inputs:
            raise RooftopError("weight-group", self.numerics.weight_group, f"at most the {inputs} inputs of a matmul")
        if self.numerics.weight_group is not None and dtype_bytes(self.numerics.weights) >= dtype_bytes("bf16"):
            accepted = f"this with weights in 8 or 4 bits: {self.numerics.weights} has no scales"
            raise RooftopError("weight-group", self.numerics.weight_group, accepted)
        if self.draft is not None and self.draft.model.vocab != self.model.vocab:
            accepted = f"a model with the vocabulary of {self.model.name}: {self.model.vocab:,} tokens"
            raise RooftopError("draft", f"{self.draft.model.name} with {self.draft.model.vocab:,}", accepted)
        if self.draft is not None and self.draft.length > self.workload.generate:
            accepted = f"at most the {self.workload.generate} tokens of an answer"
            raise RooftopError("draft-length", self.draft.length, accepted)
        if self.draft is not None and count_params(self.draft.model).total >= self.params[0]:
            accepted = f"a model with fewer parameters than {self.model.name}, for which it guesses"
            raise RooftopError("draft", self.draft.model.name, accepted)

    def _require_engine(self) -> None:
        """Raise RooftopError if the engine's kernels are not known for this problem."""
        engine, kernels = self.assumptions.engine, self.kernels
        if kernels is None:
            return
        for field, value, known in (
            ("weights-dtype", self.numerics.weights, kernels.matmul),
            ("kv-dtype", self.numerics.kv, kernels.attention),
        ):
            if value not in known:
                accepted = ", ".join(name for name in known if name != "f8_block")
                raise RooftopError(f"{field} with engine {engine} on {self.slice.chip.name}", value, accepted)
        if self.draft is not None or self.assumptions.mfu is not None:
            other = "mfu" if self.draft is None else "draft"
            raise RooftopError("engine", engine, f"no --{other} next to it")
        if self.book:
            raise RooftopError("bounds", self.bounds, "usable with an engine")
        if recurrences(self.model):
            raise RooftopError("engine", engine, "a model of attention alone")

    @cached_property
    def engine(self) -> Engine | None:
        """The engine whose kernels are priced; None: our own programs."""
        asked = self.assumptions
        if asked.engine is None:
            return None
        return engine_of(
            asked.engine, chip=self.slice.chip, model=self.model, weights=self.numerics.weights, release=asked.release,
            settings=asked.settings,
        )  # fmt: skip

    @cached_property
    def kernels(self) -> EngineKernels | None:
        """The kernels of the engine; None: our own programs."""
        return None if self.engine is None else engine_kernels(self.engine.habits.kernels, self.slice.chip)

    @property
    def overheads(self) -> Overheads:
        """The overheads of the engine; our own programs have none in a plan."""
        if self.engine is None:
            return Overheads()
        return self.engine.overheads if self.assumptions.overheads is None else self.assumptions.overheads

    @property
    def book(self) -> bool:
        """True with the book's arithmetic."""
        return self.bounds == "book"

    @cached_property
    def rates(self) -> Rates:
        """Rates of one device."""
        return Rates.of(self.slice.chip)

    @property
    def prefill_server(self) -> Slice:
        """The slice of a server that prefills."""
        return self.prefill_slice or self.slice

    @property
    def capacity(self) -> float:
        """HBM bytes of a device: usable, or nominal with the book's bounds; for other engines the driver's."""
        chip = self.slice.chip
        if self.engine is not None and not self.book:
            return chip.driver_hbm_bytes
        return chip.hbm_bytes / chip.devices if self.book else chip.hbm_usable_bytes

    @property
    def step_context(self) -> float:
        """Tokens in a sequence's cache at the step that is priced; the book takes the prompt's."""
        if self.book and self.workload.context is None:
            return float(self.workload.prompt)
        return self.workload.step_context

    @property
    def held_tokens(self) -> float:
        """Tokens for which a sequence needs room; the book counts those of the step."""
        return self.step_context if self.book else float(self.workload.held_tokens)

    @cached_property
    def params(self) -> tuple[int, int]:
        """Parameters in all, and those that one token uses."""
        count = count_params(self.model)
        return count.total, count.active

    def phase(self, phase: ServingPhase, placement: Placed, tokens: Number, model: ModelConfig | None = None) -> Phase:
        """A phase of this problem, of the draft model if one is given."""
        return Phase(phase=phase, model=model or self.model, numerics=self.numerics, placement=placement, tokens=tokens)

    def generate(
        self,
        placement: Placed,
        batch: Number,
        context: Number | None = None,
        *,
        model: ModelConfig | None = None,
        guesses: int = 0,
    ) -> Ledger:
        """The ledger of a step that gives each of ``batch`` sequences its next token, with ``context`` tokens cached.

        ``model`` is the draft model, if it is its step; ``guesses`` more tokens of each sequence are checked.
        """
        tokens = self.step_context if context is None else context
        if self.book:
            return book_generate(self.model, self.numerics, self.slice.devices, self.rates, batch, tokens)
        phase = replace(self.phase("generate", placement, batch, model), guesses=guesses)
        work = self._generate_work(phase, tokens)
        return price_serving(work, placement, self.rates, self.assumptions, phase.pipeline)

    def generate_s(
        self,
        placement: Placed,
        batch: Number,
        context: Number | None = None,
        *,
        model: ModelConfig | None = None,
        guesses: int = 0,
    ) -> Number:
        """Expected seconds of such a step, without its rows."""
        if self.book:
            return self.generate(placement, batch, context).expected_s
        phase = replace(self.phase("generate", placement, batch, model), guesses=guesses)
        work = self._generate_work(phase, self.step_context if context is None else context)
        return serving_s(work, placement, self.rates, self.assumptions, phase.pipeline)

    def mixed_s(
        self, placement: Placement, prompt: Number, batch: Number, context: Number, prompts: Number = 1
    ) -> Number:
        """Expected seconds of steps that prefill ``prompt`` tokens of each prompt and generate a token for ``batch``.

        The others hold ``context`` tokens of KV each; all may be arrays over steps. One pass over the weights is for
        all tokens.
        """
        shared = self.shared_prefill(placement)
        prefilling, generating = (
            self.phase("prefill", shared, prompts * prompt + batch),
            self.phase("generate", placement, batch),
        )
        step = self._engine_step(prefilling)
        if step is None:
            work = mixed_work(prefilling, generating, context, prompts)
        else:
            work = replace(step, batch=batch, context=context, prompt=prompt, prompts=prompts).work
        return serving_s(work, shared, self.rates, self.assumptions)

    def _generate_work(self, phase: Phase, context: Number) -> list[Work]:
        """The rows of a step, of our programs or of an engine."""
        step = self._engine_step(phase)
        return (
            generate_work(phase, context) if step is None else replace(step, batch=phase.tokens, context=context).work
        )

    def _prefill_work(self, phase: Phase, prompt: Number, before: float = 0.0, prompts: Number = 1) -> list[Work]:
        """The rows of a prefill of ``prompts`` prompts of ``prompt`` tokens: our programs take one."""
        step = self._engine_step(phase)
        if step is None:
            return prefill_work(phase, before)
        return replace(step, prompt=prompt, prompts=prompts, before=before).work

    def _engine_step(self, phase: Phase) -> KernelStep | None:
        """An empty step of the engine whose kernels are priced; None: our programs."""
        if self.engine is None or self.kernels is None:
            return None
        overheads = self.overheads
        return KernelStep(
            phase=phase,
            kernels=self.kernels,
            gap_s=overheads.gap_s,
            host_s=overheads.host_s,
            graphs=self.engine.habits.graphs,
        )

    @property
    def front_end(self) -> FrontEnd:
        """The front end of the engine whose kernels are priced; ours takes no time in a plan."""
        return FrontEnd(request_s=self.overheads.request_s, token_s=self.overheads.token_s)

    def prompts_s(self, placement: Placed, prompt: Number, count: Number) -> Number:
        """Expected seconds of an engine's prefill of ``count`` prompts of ``prompt`` tokens; both may be arrays."""
        work = self._prefill_work(self.phase("prefill", placement, prompt * count), prompt, 0.0, count)
        return serving_s(work, placement, self.rates, self.assumptions)

    def prefill(
        self, placement: Placed, tokens: float, before: float = 0.0, *, model: ModelConfig | None = None
    ) -> Ledger:
        """The ledger of a prefill of ``tokens`` tokens of one sequence, after ``before`` tokens whose KV is there."""
        if self.book or self.assumptions.mfu is not None:
            mfu = self.assumptions.mfu or 1.0
            return book_prefill(model or self.model, self.numerics, placement.slice.devices, self.rates, tokens, mfu)
        phase = self.phase("prefill", placement, float(tokens), model)
        work = self._prefill_work(phase, float(tokens), before)
        return price_serving(work, placement, self.rates, self.assumptions)

    def prompt_s(self, placement: Placed) -> Number:
        """Expected seconds until a prompt is prefilled: the cached part is read, then the models run."""
        new = float(self.workload.new_prompt_tokens)
        before = self.workload.prompt - new
        models = [self.model] if self.draft is None else [self.model, self.draft.model]
        return sum((self._prefill_s(placement, new, before, model) for model in models), 0.0) + self.prefix_read_s(
            placement
        )

    def prompt_interval_s(self, placement: Placed) -> Number:
        """Expected seconds from a prompt to the next one on a server that does nothing else.

        Pipeline stages prefill prompts of different flights at the same time: the slowest one decides.
        """
        prompt_s, new = self.prompt_s(placement), float(self.workload.new_prompt_tokens)
        phase = self.phase("prefill", placement, new)
        if phase.pipeline is None or self.book or self.assumptions.mfu is not None:
            return prompt_s
        work = self._prefill_work(phase, new, self.workload.prompt - new)
        slowest = slowest_stage_s(work, placement, self.rates, self.assumptions, phase.pipeline)
        interval: Number = np.where(np.asarray(phase.stages) > 1, slowest, prompt_s)
        return interval

    def _prefill_s(self, placement: Placed, tokens: float, before: float, model: ModelConfig) -> Number:
        """Expected seconds of a prefill, without its rows."""
        if self.book or self.assumptions.mfu is not None:
            return self.prefill(placement, tokens, before, model=model).expected_s
        phase = self.phase("prefill", placement, tokens, model)
        return serving_s(self._prefill_work(phase, tokens, before), placement, self.rates, self.assumptions)

    @cached_property
    def prompt_kv_bytes(self) -> float:
        """Bytes of one prompt's KV, the draft model's included."""
        models = [self.model] if self.draft is None else [self.model, self.draft.model]
        prompt, chip = self.workload.prompt, self.slice.chip
        return sum(float(cached_bytes(model, self.numerics, prompt, chip, stored=True)) for model in models)

    def prefix_read_s(self, placement: Placed) -> Number:
        """Seconds in which the part of a prompt's KV that the prefix cache has comes from host memory over PCIe."""
        rate = placement.chips * self.slice.chip.pcie_bytes_per_s
        return self.workload.hit_rate * self.prompt_kv_bytes / rate

    def memory(self, placement: Placed, batch: Number, *, prefilling: bool, generating: bool) -> ServingMemory:
        """Bytes on one device of a server that holds the KV of ``batch`` sequences and runs one phase or both."""
        if self.book:
            devices = placement.slice.devices
            kv = batch * kv_cache_bytes(self.model, self.numerics.kv, self.held_tokens) / devices
            weights_bytes = self.params[0] * self.numerics.weight_bytes / devices
            return ServingMemory(weights=weights_bytes, scales=0.0, kv=kv, activations=0.0)
        phase = self.phase("generate" if generating else "prefill", placement, batch if generating else 1.0)
        tokens = self.held_tokens if generating else float(self.workload.prompt)
        activations: Number = phase.activation_bytes if generating else 0.0
        # What does not depend on the batch is the same for all batches that are tried.
        key = self.numerics, self.model, phase.phase, self.workload.prompt if prefilling else None
        if key not in placement.resting:
            prefill: Number = 0.0
            if prefilling:
                whole = self.phase("prefill", placement.joined() if generating else placement, self.workload.prompt)
                prefill = whole.activation_bytes
            placement.resting[key] = (*phase.device_weight_bytes, prefill)
        weights, scales, prefill_activations = placement.resting[key]
        if prefilling:
            activations = np.maximum(activations, prefill_activations)
        kv = phase.resident_kv_bytes(batch, tokens)
        if self.draft is not None:
            # A draft model is split as the large one is, and has a cache of its own.
            small = replace(phase, model=self.draft.model)
            draft_weights, draft_scales = small.device_weight_bytes
            weights, scales = weights + draft_weights, scales + draft_scales
            kv = kv + small.resident_kv_bytes(batch, tokens)
        plain = kv / (1 + self.numerics.kv_scale_bytes(self.model) / self.numerics.kv_bytes)
        return ServingMemory(weights=weights, scales=scales + kv - plain, kv=plain, activations=activations)

    def room_tokens(self, placement: Placement, *, generating: bool, share: float = 1.0) -> int:
        """Tokens whose KV fits a server, next to its weights and working memory in a ``share`` of its HBM."""
        many = 2.0**20
        both = {"prefilling": self.mode == "interleaved" or not generating, "generating": generating}
        empty, full = (self.memory(placement, batch, **both) for batch in (0.0, many))
        # Activations are those of the batch that fits, which is small next to its cache: one sequence's are taken.
        working = float(self.memory(placement, 1.0, **both).activations)
        tokens = self.held_tokens if generating else self.workload.prompt
        per_token = (full.total - full.activations - empty.total + empty.activations) / many / tokens
        left = share * self.capacity - float(empty.total - empty.activations) - working
        return max(0, int(left / float(per_token)))

    def spec(self, generate: Placement, prefill: Placement | None = None) -> ServingSpec:
        """The engine of these placements; without ``prefill`` one that prefills where it generates."""
        numerics = self.numerics
        return ServingSpec(
            model=self.model,
            axes=generate.mesh.shape,
            tokens=self.workload.held_tokens,
            prefill_axes=None if prefill is None else prefill.engine_mesh.shape,
            prefill_ring=prefill is not None and prefill.joined_of is None,
            kv_split=generate.kv_split,
            weights=numerics.weights,
            weight_group=numerics.weight_group,
            only_experts=numerics.only_experts,
            tables=numerics.embeddings,
            kv=numerics.kv,
            matmul=numerics.flops,
            kv_sharing=numerics.kv_sharing,
            disaggregated=self.mode == "disaggregated",
            drafted=self.draft is not None,
            priced_as=None if numerics.kv in ENGINE_CACHES else self.other_engine,
        )

    @cached_property
    def other_engine(self) -> str | None:
        """An engine of others whose kernels are known for this problem; None without one."""
        for engine in ENGINES[1:]:
            try:
                replace(self, assumptions=replace(self.assumptions, engine=engine, release=None, settings={}))
            except RooftopError:
                continue
            return engine
        return None

    def obstacles(self, generate: Placement, prefill: Placement | None = None) -> list[str]:
        """Reasons why ``rooftop serve`` has not these placements; empty if one does."""
        if self.book:
            return ["the book's arithmetic spreads everything evenly: plan with --bounds usable"]
        if self.engine is not None:
            name = self.engine.title
            return [f"priced for {name}, to be run by {name}; `rooftop serve` does not run it"]
        return list(obstacles(SERVING, self.spec(generate, prefill)))

    def cache_kind(self, placement: Placement) -> tuple[object, ...]:
        """Properties of an engine's cache that a cache must share to be sent to it.

        Key/value heads, copies included (none of latents, which all devices have), and the mesh of pipeline stages.
        """
        axes = placement.engine_mesh.shape
        stages = tuple(axes.items()) if ways(axes, *STAGE_AXES) > 1 else ()
        if attention_kind(self.model).cached_heads is None:
            return stages
        return *stages, *engine_heads(self.model, axes).cached

    def nearest_engines(self, placements: Sequence[Placement]) -> list[Placement]:
        """The placements of generation with the fewest obstacles: those that engines have, if there are any."""
        counts = [len(self.obstacles(placement)) for placement in placements]
        fewest = min(counts, default=0)
        return [placement for placement, count in zip(placements, counts, strict=True) if count == fewest]

    def generate_placements(self) -> list[Placement]:
        """Placements of a step, fewest ways first: every split of the slice that needs little padding."""
        if self.book:
            return [Placement(mesh=_alone(self.slice))]
        placements = []
        for sizes in self._sizes(self.slice, self.axes, _SPLIT_AXES, self._divides_generate):
            whole = ways(sizes, *SEQUENCE_AXES) == 1
            splits = [self.kv_split or "batch"] if whole or self.kv_split else list(KV_SPLITS)
            placements += [_placement(self.slice, tuple(sizes.items()), split) for split in splits]
        return placements

    def prefill_placements(self) -> list[Placement]:
        """Placements of a prefill: tensor, expert and sequence sharding, the last in a ring that no engine has."""
        if self.book or self.assumptions.mfu is not None:
            return [Placement(mesh=_alone(self.prefill_server))]
        axes = tuple(axis for axis in _SPLIT_AXES if axis not in GATHER_AXES)
        sizes = self._sizes(self.prefill_server, self.prefill_axes, axes, self._divides_prefill, ring=True)
        return [_placement(self.prefill_server, tuple(item.items())) for item in sizes]

    def engine_prefills(self) -> list[Placement]:
        """Placements of a prefill in engines: as a generate server's, with columns over context and tensor together."""
        if self.book or (self.prefill_axes is not None and self.engine is None):
            return self.prefill_placements()
        if self.prefill_axes is not None:
            sizes = self._sizes(self.prefill_server, self.prefill_axes, _SPLIT_AXES, self._divides_generate)
            return [_placement(self.prefill_server, tuple(item.items())).joined() for item in sizes]
        # A cache of pipeline stages is sent to the same mesh only.
        same = self.axes is not None and ways(self.axes, *STAGE_AXES) > 1 and self.prefill_slice is None
        sizes = self._sizes(self.prefill_server, self.axes if same else None, _SPLIT_AXES, self._divides_generate)
        engines = self.nearest_engines([_placement(self.prefill_server, tuple(item.items())) for item in sizes])
        return [engine.joined() for engine in engines]

    def shared_prefill(self, placement: Placement) -> Placement:
        """The placement of a prefill on a generate server: on the same weights, whose columns stay in place."""
        return placement if self.book else placement.joined()

    def _sizes(
        self,
        slice_: Slice,
        requested: Mapping[str, int] | None,
        axes: tuple[str, ...],
        refused: Callable[[Mapping[str, int]], str | None],
        *,
        ring: bool = False,
    ) -> Iterator[dict[str, int]]:
        """Axis sizes, as given or every one that is not ``refused`` and needs little padding.

        Raises RooftopError if those given cannot be.
        """
        devices = slice_.devices
        if requested is None:
            # Only stages lie over DCN, whose latency nobody publishes: any other axis has collectives in every layer.
            slices, inside = slice_.num_slices, [axis for axis in axes if axis not in STAGE_AXES]
            meshes = [
                dict.fromkeys(AXES, 1) | dict.fromkeys(STAGE_AXES, slices) | dict(zip(inside, chosen, strict=True))
                for chosen in _divisions(devices // slices, len(inside))
            ]
            yield from self._little_padding([sizes for sizes in meshes if refused(sizes) is None], ring=ring)
            return
        text = ",".join(f"{name}={size}" for name, size in requested.items())
        for name in requested:
            if name not in AXES:
                raise unknown("mesh axis", name, AXES)
        sizes = {name: requested.get(name, 1) for name in AXES}
        if prod(sizes.values()) != devices:
            raise RooftopError("mesh", text, f"sizes whose product is the {devices} devices of {slice_.name}")
        why = refused(sizes)
        if why is not None:
            raise RooftopError("mesh", text, why)
        yield sizes

    def _layers(self, sizes: Mapping[str, int]) -> str | None:
        if self.model.moe is None and ways(sizes, *EXPERT_AXES) > 1:
            return "no expert axis: the model has no experts"
        if self.engine is not None and ways(sizes, *COLUMN_AXES, *EXPERT_AXES) != prod(sizes.values()):
            return "tensor and expert axes alone: the kernels of engines are known there"
        if ways(sizes, *STAGE_AXES) > self.model.layers:
            return f"at most one stage for each of {self.model.layers} layers"
        return None

    def _divides_generate(self, sizes: Mapping[str, int]) -> str | None:
        if (own := ways(sizes, *GATHER_AXES)) > 1:
            split = own * ways(sizes, *COLUMN_AXES, *SEQUENCE_AXES)
            if self.model.d_model % split:
                return f"fsdp x context x tensor that divide a D of {self.model.d_model}"
        return self._layers(sizes)

    def _divides_prefill(self, sizes: Mapping[str, int]) -> str | None:
        if ways(sizes, *GATHER_AXES) > 1:
            return "no fsdp axis in a prefill: weights stay where they are"
        if ways(sizes, *EXPERT_AXES) > 1 and self.model.moe is None:
            # One sequence is spread over the experts' axis by its tokens.
            return "no expert axis without several sequences"
        return self._layers(sizes)

    def _little_padding(self, meshes: Sequence[dict[str, int]], *, ring: bool) -> list[dict[str, int]]:
        """The meshes that pad no dim by more than ``MOST_PADDING`` of its size.

        ``ring``: context splits the sequence of a prefill, not columns.
        """
        tensor, context, fsdp, expert = (
            np.array([ways(sizes, *axes) for sizes in meshes], np.float64)
            for axes in (COLUMN_AXES, SEQUENCE_AXES, GATHER_AXES, EXPERT_AXES)
        )
        sharing = np.ones_like(context) if ring else context
        widths = ModelWidths(model=self.model, tensor=tensor, fsdp=fsdp, expert=expert, sharing=sharing)
        padding = np.broadcast_to(widths.padding, len(meshes)).tolist()
        return [sizes for sizes, more in zip(meshes, padding, strict=True) if more <= MOST_PADDING]


def _alone(slice_: Slice) -> Mesh:
    """The mesh of a server whose devices all split columns: where the network is not priced."""
    return _lay(slice_, ((COLUMN_AXES[0], slice_.devices),))


@lru_cache(maxsize=1 << 12)
def _placement(slice_: Slice, sizes: tuple[tuple[str, int], ...], kv_split: KvSplit = "batch") -> Placement:
    """One object for problems alike: what is known of its network is computed once."""
    return Placement(mesh=_lay(slice_, sizes), kv_split=kv_split)


@lru_cache(maxsize=1 << 12)
def _lay(slice_: Slice, sizes: tuple[tuple[str, int], ...]) -> Mesh:
    return Mesh.lay(slice_, dict.fromkeys(AXES, 1) | dict(sizes))


def _divisions(value: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``value`` as an ordered product of ``count`` factors, ones included."""
    if count == 1:
        yield (value,)
        return
    for factor in range(1, value + 1):
        if value % factor == 0:
            for rest in _divisions(value // factor, count - 1):
                yield (factor, *rest)


def book_generate(
    model: ModelConfig, numerics: ServingNumerics, devices: int, rates: Rates, batch: Number, context: Number
) -> Ledger:
    """Two rows of a step on one of ``devices``: the cache, and all else as one matmul (chapter 7).

    Of experts those that the batch is expected to use are read.
    """
    kv = batch * kv_cache_bytes(model, numerics.kv, context) / devices
    count = count_params(model)
    read: Number = float(count.total)
    if model.moe is not None:
        used = distinct_experts(model.moe.experts, model.moe.active, batch)
        read = count.total - count.by_component["experts"] * (1 - used / model.moe.experts)
    weights = read * numerics.weight_bytes / devices
    flops = 2.0 * batch * count.active / devices
    hbm, peak = rates.hbm_bytes_per_s, rates.flops_per_s[numerics.flops]
    step = generate_step_s(kv, weights, flops, hbm, peak)
    cache = Row(
        scope="layers/attn/core",
        phase="generate",
        hbm_bytes=kv,
        time_s={"hbm": kv / hbm},
        expected_s=kv / hbm,
        serial_s=kv / hbm,
        formula="batch x KV / HBM",
    )
    rest = Row(
        scope="unscoped",
        phase="generate",
        hbm_bytes=weights,
        flops={numerics.flops: flops},
        time_s={"hbm": weights / hbm, "mxu": flops / peak},
        expected_s=step - kv / hbm,
        serial_s=weights / hbm + flops / peak,
        formula="max(2 B P / C, bytes of P / HBM)",
    )
    return Ledger((cache, rest))


def book_prefill(
    model: ModelConfig, numerics: ServingNumerics, devices: int, rates: Rates, tokens: float, mfu: float
) -> Ledger:
    """One row: 2 FLOPs per (active) parameter and token, at a given utilisation (chapter 8)."""
    count = count_params(model)
    peak = rates.flops_per_s[numerics.flops]
    seconds = prefill_s(count.active, tokens, devices * peak, mfu)
    flops = 2.0 * count.active * tokens / devices
    weights = count.total * numerics.weight_bytes / devices
    row = Row(
        scope="unscoped",
        phase="prefill",
        flops={numerics.flops: flops},
        hbm_bytes=weights,
        time_s={"mxu": flops / peak, "hbm": weights / rates.hbm_bytes_per_s},
        expected_s=seconds,
        serial_s=seconds,
        formula="2 P T / (C x MFU)",
    )
    return Ledger((row,))
