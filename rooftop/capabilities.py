"""Capabilities of our programs: the one table that planners, programs and documentation read.

A *spec* says what a program is asked for: ``TrainingSpec`` for a train step, ``ServingSpec`` for an engine. A
``Capability`` names one property of a spec, what is accepted, and the obstacle where a spec has something else. A plan
is executable if its spec has no obstacles; a program that is built from a spec raises the first of them.

A program that learns something new changes this file, and nothing else says what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, get_args

from rooftop.arrays.rules import (
    BATCH_AXES,
    COLUMN_AXES,
    EXPERT_AXES,
    GATHER_AXES,
    REPLICA_AXES,
    RESIDUAL_AXES,
    SEQUENCE_AXES,
    STAGE_AXES,
    Rules,
    ways,
)
from rooftop.core.errors import RooftopError
from rooftop.core.records import Record, field_values
from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.models import ModelConfig
from rooftop.models.activations import parse_policy
from rooftop.models.adapters import Adapters
from rooftop.models.numerics import Dtypes, Numerics
from rooftop.models.optimizers import OPTIMIZERS
from rooftop.models.program_sizes import CONTEXT_CHUNKS, LANES, PAGE_TOKENS, padded_positions
from rooftop.models.segments import stage_parts
from rooftop.models.stored import KeptWeights
from rooftop.models.widths import HeadSplit
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE, SCHEDULES, PipelineSchedule

if TYPE_CHECKING:
    from rooftop.models.embedding_tables.stacking import Stack

#: Dtypes of arrays that live from step to step, and of activations.
STATE_DTYPES: tuple[str, ...] = ("bf16", "f32")
#: Dtypes of the layers' matmuls beyond that of activations: operands are quantised on the spot.
MATMUL_DTYPES: tuple[str, ...] = ("int8", "f8_e4m3")
#: Attention kernels of a train step.
AttentionKernel = Literal["reference", "chunked", "splash", "cudnn"]
KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
#: The kernels that a plan for a kind of chip prices and runs: the first of them that has all that a model needs.
KERNELS_OF_CHIP: Mapping[str, tuple[AttentionKernel, ...]] = MappingProxyType(
    {"tpu": ("splash",), "gpu": ("cudnn", "chunked")}
)
#: Dtypes of activations that cuDNN's attention has (jax/_src/cudnn/fused_attention_stablehlo.py of jax 0.10.2).
KERNEL_DTYPES: tuple[str, ...] = ("bf16", "f16")
#: Kernels that can merge results over parts of the keys, and so run over a context axis.
RING_KERNELS: tuple[AttentionKernel, ...] = ("reference", "chunked", "splash")
#: Axes of an engine's mesh, those of neighbouring devices last; ``data`` are copies of the others.
ENGINE_AXES: tuple[str, ...] = ("data", "stage", "fsdp", "expert", "tensor", "context")
#: Those of them that one program of an engine knows.
PROGRAM_AXES: tuple[str, ...] = tuple(axis for axis in ENGINE_AXES if axis not in (*REPLICA_AXES, *STAGE_AXES))
#: How an engine holds weights of a dtype, in groups that share a scale (None: a whole column).
ENGINE_WEIGHTS: Mapping[tuple[str, int | None], str] = MappingProxyType(
    {("bf16", None): "plain", ("int8", None): "int8", ("f8_e4m3", None): "f8_e4m3", ("f4_e2m1", 32): "f4_e2m1-32"}
    | {(dtype, group): f"{dtype}-{group}" for dtype in ("int4", "f8_e4m3") for group in (32, 64, 128)}
)
#: How an engine holds keys and values of a dtype.
ENGINE_CACHES: Mapping[str, str] = MappingProxyType({"bf16": "plain", "int8": "int8"})
#: What a context axis splits of a server's cache: its sequences, or the tokens of its pages.
KvSplit = Literal["batch", "seq"]
KV_SPLITS: tuple[KvSplit, ...] = ("batch", "seq")
Spec = TypeVar("Spec")

#: What kernels lack, each with whether a model has it; kernels that are not here lack nothing.
_LACKS: Mapping[str, Mapping[str, Callable[[ModelConfig], bool]]] = MappingProxyType(
    {
        "cudnn": {
            "softcap of attention logits": lambda model: model.attn_softcap is not None,
            "attention sinks": lambda model: model.attention_sinks,
            "values of another size than keys": lambda model: model.d_value != model.d_head,
        }
    }
)  # fmt: skip


def kernel_lacks(kernel: str, model: ModelConfig) -> str | None:
    """The first part of a model's attention that a kernel does not have; None if it has them all."""
    return next((part for part, present in _LACKS.get(kernel, {}).items() if present(model)), None)


def attention_kernel(kind: str, model: ModelConfig | None) -> AttentionKernel:
    """The kernel of a model's attention on a kind of chip; without a ``model``, of those that lack nothing."""
    kernels = KERNELS_OF_CHIP[kind]
    return kernels[0] if model is None else next(name for name in kernels if kernel_lacks(name, model) is None)


@dataclass(frozen=True, kw_only=True)
class Switches(Record):
    """The parts of a strategy that are on or off.

    ``collective_matmuls``: dense matmuls of layers overlap their collectives over tensor. ``experts_over_tensor``:
    tensor splits no expert, but deals out whole ones.
    """

    collective_matmuls: bool = False
    experts_over_tensor: bool = False


@dataclass(frozen=True, kw_only=True)
class AskedSwitches:
    """The switches that a job asks for: a search prices both settings of one that is None."""

    collective_matmuls: bool | None = None
    experts_over_tensor: bool | None = None


#: A schedule of pipeline stages, and the model chunks of each.
Pipeline = tuple[PipelineSchedule, int]
#: Names of the switches.
SWITCHES: tuple[str, ...] = tuple(switch.name for switch in fields(Switches))


@dataclass(frozen=True, kw_only=True)
class Choice(Switches):
    """The part of a strategy that is not its layout. ``chunks``: model chunks per stage of the interleaved schedule.

    Raises RooftopError on an unknown ``remat`` policy.
    """

    remat: str = "block"
    microbatches: int = 1
    schedule: PipelineSchedule = DEFAULT_SCHEDULE
    chunks: int = 1

    def __post_init__(self) -> None:
        _policy(self.remat)

    @property
    def policy(self) -> Mapping[str, str]:
        """The action for each checkpoint of a layer."""
        return _policy(self.remat)

    @property
    def pipeline(self) -> Pipeline:
        """The schedule and the chunks of a stage."""
        return self.schedule, self.chunks

    @property
    def rest(self) -> tuple[int, Pipeline, Switches]:
        """All that choices of one search differ in but ``remat``."""
        return self.microbatches, self.pipeline, Switches(**field_values(self, Switches))


_policy = cache(parse_policy)


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """The train step that is asked for: the model, sizes of mesh ``axes``, the batch, and how the step is computed.

    A batch has ``sequences`` of ``seq_len`` tokens. ``kernel`` computes attention, in blocks of ``attention_block``
    positions. ``kind`` is that of the chips, where it is known.
    """

    model: ModelConfig
    axes: Mapping[str, int]
    sequences: int
    seq_len: int
    kernel: AttentionKernel
    attention_block: int
    kind: str | None = None
    choice: Choice = Choice()
    numerics: Numerics = Numerics()
    rules: Rules = field(default_factory=Rules)
    adapters: Adapters | None = None

    def ways(self, *axes: str) -> int:
        """Devices along mesh axes together; 1 for an axis that the mesh does not have."""
        return ways(self.axes, *axes)

    @property
    def padded(self) -> tuple[int, int]:
        """Sequences of a step and positions of a sequence as a program runs them: padded where they are uneven."""
        axes = self.rules.activations
        positions = padded_positions(
            self.seq_len, ring=self.ways(*axes["seq"]), residual=self.ways(*axes["residual_seq"]), kernel=self.kernel
        )
        return next_multiple(self.sequences, self.ways(*axes["batch"]) * self.choice.microbatches), int(positions)

    @classmethod
    def plain(cls, model: ModelConfig, kind: str) -> TrainingSpec:
        """The spec of one short sequence on one device of a ``kind``: what refuses it, refuses the model there."""
        return cls(
            model=model, axes={}, sequences=1, seq_len=LANES, kernel=attention_kernel(kind, model),
            attention_block=LANES, kind=kind,
        )  # fmt: skip

    @property
    def runnable_numerics(self) -> Numerics:
        """The dtypes and the optimizer, with dtypes that programs have where the spec asks for others."""
        asked = self.numerics
        known = {name: dtype if dtype in STATE_DTYPES else "f32" for name, dtype in field_values(asked, Dtypes).items()}
        is_narrow = asked.matmul in MATMUL_DTYPES and not self.choice.collective_matmuls
        if self.kernel == "cudnn" and known["compute"] not in KERNEL_DTYPES:
            known["compute"] = KERNEL_DTYPES[0]
        return replace(asked, **known | {"matmul": asked.matmul if is_narrow else known["compute"]})


@dataclass(frozen=True, kw_only=True)
class ServingSpec:
    """The engine that is asked for: the model, sizes of mesh ``axes``, and formats. Any batch is padded to its slots.

    ``tokens`` of the longest sequence (None: as many as the model allows). ``prefill_axes`` are those of a server that
    prefills alone (None: the same); with ``prefill_ring`` its context axis splits sequences, not columns. Dtypes:
    ``weights`` of the layers, or of their experts alone (``only_experts``), in groups of ``weight_group`` inputs that
    share a scale (None: a whole column), ``tables`` of the embedding and the unembedding, ``kv`` of the cache,
    ``matmul`` of the matmuls. ``kv_sharing`` layers share one cache. ``drafted``: a draft model guesses.
    ``priced_as``: an engine of others that has these formats.
    """

    model: ModelConfig
    axes: Mapping[str, int]
    tokens: int | None = None
    prefill_axes: Mapping[str, int] | None = None
    prefill_ring: bool = False
    kv_split: KvSplit = "batch"
    weights: str = "bf16"
    weight_group: int | None = None
    only_experts: bool = False
    tables: str = "bf16"
    kv: str = "bf16"
    matmul: str = "bf16"
    kv_sharing: int = 1
    disaggregated: bool = False
    drafted: bool = False
    priced_as: str | None = None

    def ways(self, *axes: str) -> int:
        """Devices along mesh axes together; 1 for an axis that the mesh does not have."""
        return ways(self.axes, *axes)

    @property
    def engine_weights(self) -> str | None:
        """The engine's name of the format of weights; None if it has no such format."""
        # Weights as wide as activations have no scales, and so no groups.
        return ENGINE_WEIGHTS.get((self.weights, None if self.weights == "bf16" else self.weight_group))


@dataclass(frozen=True, kw_only=True)
class Capability(Generic[Spec]):
    """One property of a spec: its name, what programs accept, and the obstacle of a spec that has something else.

    ``obstacle`` returns None where programs run the spec.
    """

    name: str
    accepted: str
    obstacle: Callable[[Spec], str | None]


#: Parts of models that no program has, each with whether a model has it.
UNRUNNABLE: Mapping[str, Callable[[ModelConfig], bool]] = MappingProxyType(
    {
        "parts that only plans know": lambda model: bool(model.others or model.not_run),
        "a gated delta rule": lambda model: model.gated_delta is not None,
        "Mamba layers": lambda model: model.mamba is not None,
        "lightning attention": lambda model: "lightning" in model.mixers,
        "layers without an MLP": lambda model: not model.mlp_matrices,
        "parallel attention and MLP with norms of their own": lambda model: model.parallel == "own",
        "a norm of embeddings": lambda model: model.embed_norm,
        "norms of heads with scales of their own, or with none": lambda model: model.qk_norm in ("heads", "unit"),
        "a gate of attention": lambda model: model.attn_gate,
        "chunked attention": lambda model: bool(model.windows_chunked and model.layer_windows),
        "positions of attention by ALiBi": lambda model: model.positions == "alibi",
        "a bias of the unembedding": lambda model: model.unembed_bias,
        "layers that share a cache": lambda model: model.shared_kv_layers > 0,
        "experts whose input is weighed": lambda model: model.moe is not None and model.moe.weigh_input,
        "the sparse mixer's router": lambda model: model.moe is not None and model.moe.scoring == "sparsemixer",
    }
)  # fmt: skip


def model_obstacle(model: ModelConfig) -> str | None:
    """Reason why no program runs ``model``: all parts of it that none has; None if programs have them all."""
    parts = [name for name, present in UNRUNNABLE.items() if present(model)]
    if not parts:
        return None
    named = [*(other.name for other in model.others), *model.not_run]
    of_plans = f" ({', '.join(named)})" if named else ""
    return f"no program has {'; '.join(parts).replace('only plans know', f'only plans know{of_plans}')}: {model.name}"


def _parts(spec: TrainingSpec | ServingSpec) -> str | None:
    return model_obstacle(spec.model)


def _schedule(spec: TrainingSpec) -> str | None:
    if spec.choice.schedule not in SCHEDULES:
        return f"no program has the schedule {spec.choice.schedule}: {', '.join(SCHEDULES)}"
    if spec.choice.schedule == "zero_bubble" and min(spec.ways(*STAGE_AXES), spec.ways(*SEQUENCE_AXES)) > 1:
        return "no program has a zero_bubble pipeline over a context axis"
    staged = spec.choice.schedule == "zero_bubble" and spec.ways(*STAGE_AXES) > 1
    recomputed = staged and parse_policy(spec.choice.remat)["qkv"] == "recompute"
    if recomputed and HeadSplit.of(spec.model, spec.ways(*COLUMN_AXES)).copies_keys:
        return "no zero_bubble pipeline recomputes keys where devices share key/value heads: qkv is to be saved"
    return None


def _interleaved(spec: TrainingSpec) -> str | None:
    stages, count = spec.ways(*STAGE_AXES), spec.choice.microbatches
    if stages > 1 and spec.choice.chunks > 1 and count > stages and count % stages:
        return f"interleaved stages want a multiple of {stages} microbatches, not {count}"
    return None


def _stage_layers(spec: TrainingSpec) -> str | None:
    stages, (parts, name) = spec.ways(*STAGE_AXES), stage_parts(spec.model)
    if stages > 1 and stages * spec.choice.chunks > parts:
        return f"{parts} {name} are too few for {stages} stages of {spec.choice.chunks} chunks"
    return None


def _width_norms(spec: TrainingSpec) -> str | None:
    model, ways_ = spec.model, spec.ways(*COLUMN_AXES)
    if model.qk_norm == "width" and HeadSplit.of(model, ways_).copies_keys:
        return f"keys of all heads are normalised together, and {model.kv_heads} do not divide over tensor of {ways_}"
    return None


def _experts(spec: TrainingSpec) -> str | None:
    if spec.model.moe is None and spec.ways(*EXPERT_AXES) > 1:
        return f"{spec.model.name} has no experts for an expert axis of {spec.ways(*EXPERT_AXES)}"
    return None


def _matmul_dtype(spec: TrainingSpec) -> str | None:
    if spec.numerics.matmul in MATMUL_DTYPES and spec.choice.collective_matmuls:
        return f"collective matmuls are in the dtype of activations, not in {spec.numerics.matmul}"
    if spec.numerics.matmul == "f8_e4m3" and (spec.kind == "gpu" or spec.kernel == KERNELS_OF_CHIP["gpu"][0]):
        # XLA:GPU (jax 0.10.2) has cuBLAS multiply int8 operands of our programs as they are, and converts these.
        return "on GPUs XLA multiplies f8_e4m3 operands as float16, which gains nothing: int8, or as activations"
    if spec.numerics.matmul in (spec.numerics.compute, *MATMUL_DTYPES):
        return None
    return f"no program multiplies in {spec.numerics.matmul}: {', '.join((spec.numerics.compute, *MATMUL_DTYPES))}"


def _state_dtypes(spec: TrainingSpec) -> str | None:
    for name in ("compute", "weights", "moments", "gradients"):
        if (dtype := getattr(spec.numerics, name)) not in STATE_DTYPES:
            return f"no program has {name} in {dtype}: {' or '.join(STATE_DTYPES)}"
    return None


def _context(spec: TrainingSpec) -> str | None:
    ring = spec.ways(*SEQUENCE_AXES)
    if ring > 1 and spec.kernel not in RING_KERNELS:
        return f"the {spec.kernel} kernel cannot attend to keys of other devices: no context axis with it"
    return None


def _kernel(spec: TrainingSpec) -> str | None:
    if spec.kernel == "cudnn" and spec.numerics.compute not in KERNEL_DTYPES:
        return f"the cudnn kernel attends in {' or '.join(KERNEL_DTYPES)}, not in {spec.numerics.compute}"
    lacks = kernel_lacks(spec.kernel, spec.model)
    return None if lacks is None else f"the {spec.kernel} kernel has no {lacks}, which {spec.model.name} has"


def _positions(spec: TrainingSpec) -> str | None:
    if spec.model.positions == "learned" and spec.seq_len > spec.model.max_seq_len:
        return f"{spec.model.name} has learned positions for {spec.model.max_seq_len} tokens, not {spec.seq_len}"
    return None


def _collective_matmuls(spec: TrainingSpec) -> str | None:
    # Stages take different branches, and a permute meets all devices.
    staged = spec.choice.collective_matmuls and spec.ways(*STAGE_AXES) > 1 and spec.ways(*COLUMN_AXES) > 1
    return "no program has collective matmuls in a pipeline stage" if staged else None


def _adapters(spec: TrainingSpec) -> str | None:
    return None if spec.adapters is None else "no program of rooftop trains adapters of frozen weights (--lora)"


def _runs(spec: TrainingSpec | ServingSpec) -> None:
    """No obstacle: programs run every value of the property."""


#: What a train step can be, in the order in which obstacles are listed.
TRAINING: tuple[Capability[TrainingSpec], ...] = (
    Capability(
        name="parts of the model",
        accepted="any that a ModelConfig has; not " + "; ".join(UNRUNNABLE),
        obstacle=_parts,
    ),
    Capability(name="adapters (LoRA)", accepted="none: they are only planned", obstacle=_adapters),
    Capability(name="offload", accepted="any checkpoint of a layer", obstacle=_runs),
    Capability(
        name="schedule",
        accepted=f"{', '.join(SCHEDULES)}; zero_bubble without a context axis, and not with shared key/value heads "
        "that are recomputed",
        obstacle=_schedule,
    ),
    Capability(
        name="microbatches, interleaved",
        accepted="a multiple of the stages, or no more than there are stages",
        obstacle=_interleaved,
    ),
    Capability(
        name="layers that stages share, or periods of them",
        accepted="at least one for each chunk of each stage; dealt out unevenly, the last chunks have fewer",
        obstacle=_stage_layers,
    ),
    Capability(
        name="sequences of a step",
        accepted=f"any number, padded to a multiple of {' x '.join(BATCH_AXES)} x microbatches",
        obstacle=_runs,
    ),
    Capability(
        name="positions of a sequence",
        accepted=f"any number, padded to a multiple of {' x '.join(RESIDUAL_AXES)}",
        obstacle=_runs,
    ),
    Capability(name="expert axis", accepted="1 without experts", obstacle=_experts),
    Capability(
        name="experts",
        accepted="whole ones over expert, or over expert and tensor together; tensor splits their columns otherwise, "
        "and fsdp the rows of each on any mesh",
        obstacle=_runs,
    ),
    Capability(
        name="norms of all heads together",
        accepted="key/value heads a multiple of tensor",
        obstacle=_width_norms,
    ),
    Capability(
        name="D, F, heads, key/value heads, latents, vocabulary, experts",
        accepted="any: padded with zeros where a mesh does not divide them",
        obstacle=_runs,
    ),
    Capability(
        name="dtype of the layers' matmuls",
        accepted=f"as activations; {', '.join(MATMUL_DTYPES)}, quantised on the spot, without collective matmuls; "
        "on GPUs not f8_e4m3",
        obstacle=_matmul_dtype,
    ),
    Capability(
        name="dtypes of activations, weights, moments, gradients",
        accepted=", ".join(STATE_DTYPES),
        obstacle=_state_dtypes,
    ),
    Capability(name="optimizer", accepted=", ".join(OPTIMIZERS), obstacle=_runs),
    Capability(
        name="context axis",
        accepted=f"kernels {', '.join(RING_KERNELS)}; any length, padded to a multiple of {CONTEXT_CHUNKS} x context",
        obstacle=_context,
    ),
    Capability(
        name="attention kernel",
        accepted=f"splash (TPU): any length, padded to a multiple of {LANES} positions, {CONTEXT_CHUNKS} x context "
        f"times as many over a context axis; cudnn (GPU): activations in {' or '.join(KERNEL_DTYPES)}, no softcap, "
        "no sinks, values as large as keys; chunked (GPU): models with these, in blocks of keys",
        obstacle=_kernel,
    ),
    Capability(
        name="collective matmuls",
        accepted="queries, keys, values and outputs of attention, and dense MLPs, on any mesh without stages; where "
        "devices share key/value heads, or these come from latents, not the matmuls into them; no experts",
        obstacle=_collective_matmuls,
    ),
    Capability(name="sequence length", accepted="any; at most the table's with learned positions", obstacle=_positions),
)


def _engine_axes(spec: ServingSpec) -> str | None:
    for axis, size in spec.axes.items():
        if size > 1 and axis not in ENGINE_AXES:
            return f"rooftop serve splits no model over {axis}: {', '.join(ENGINE_AXES)}"
    return None


def _engine_weights(spec: ServingSpec) -> str | None:
    if spec.engine_weights is not None:
        return None
    scales = "a scale for each column" if spec.weight_group is None else f"groups of {spec.weight_group}"
    return f"rooftop serve has no weights in {spec.weights} with {scales}: {_weight_formats()}"


def published_weights(model: ModelConfig, axes: Mapping[str, int] | None = None) -> KeptWeights | None:
    """The format in which an engine over mesh ``axes`` keeps the values of the model's published checkpoint.

    None if it reads them as plain weights: others are plain already, have zero points, or groups that a device has part
    of.
    """
    stored = KeptWeights.of(model)
    if stored is None or (stored.dtype, stored.group) not in ENGINE_WEIGHTS:
        return None
    spec = ServingSpec(
        model=model,
        axes=axes or {},
        weights=stored.dtype,
        weight_group=stored.group,
        only_experts=stored.only_experts,
    )
    return None if _weight_groups(spec) is not None else stored


def _weight_groups(spec: ServingSpec) -> str | None:
    group = spec.weight_group
    if group is None or spec.weights == "bf16" or spec.engine_weights is None:
        return None
    for axes in (spec.axes, spec.prefill_axes or {}):
        for name, inputs in _matmul_inputs(spec.model, tuple(axes.items()), spec.only_experts):
            if inputs % group:
                return f"groups of {group} weights do not divide the {inputs} {name} that a device sums over"
    return None


@lru_cache(maxsize=1 << 12)
def _matmul_inputs(
    model: ModelConfig, axes: tuple[tuple[str, int], ...], only_experts: bool
) -> tuple[tuple[str, int], ...]:
    """Inputs of matmuls with quantised weights on one device, padding included, with their names."""
    sizes = dict(axes)
    heads = engine_heads(model, sizes)
    columns = heads.ways * heads.sharing
    stream = ("of D", model.d_model // ways(sizes, *GATHER_AXES))
    if only_experts and model.moe is not None:
        return stream, ("columns of an expert", ceil_div(model.moe.d_ff, columns))
    latents: list[tuple[str, int]] = []
    if model.mla is not None:
        latents.append(("of the latent", model.mla.kv_rank))
        if model.mla.q_rank is not None:
            latents.append(("of the queries' latent", model.mla.q_rank))
    hidden = [(name, ceil_div(size, columns)) for name, size in _hidden_columns(model)]
    return stream, ("outputs of heads", heads.queries // heads.sharing * model.d_value), *latents, *hidden


def _hidden_columns(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """F of each kind of MLP that the model has."""
    if model.dense_layers:
        yield "columns of an MLP", model.d_ff
    if model.moe is not None:
        yield "columns of an expert", model.moe.d_ff
        if model.moe.shared_d_ff:
            yield "columns of shared experts", model.moe.shared_d_ff


def _weight_formats() -> str:
    return ", ".join(dtype if group is None else f"{dtype} in groups of {group}" for dtype, group in ENGINE_WEIGHTS)


def _engine_tables(spec: ServingSpec) -> str | None:
    return None if spec.tables == "bf16" else f"rooftop serve has no embedding tables in {spec.tables}: bf16"


def _engine_cache(spec: ServingSpec) -> str | None:
    if spec.kv in ENGINE_CACHES:
        return None
    other = "" if spec.priced_as is None else f"; `--engine {spec.priced_as}` prices it"
    return f"rooftop serve has no KV cache in {spec.kv} (it has {', '.join(ENGINE_CACHES)}){other}"


def _engine_matmuls(spec: ServingSpec) -> str | None:
    return None if spec.matmul == "bf16" else f"rooftop serve multiplies in bf16, not in {spec.matmul}"


def _kv_sharing(spec: ServingSpec) -> str | None:
    return None if spec.kv_sharing == 1 else f"rooftop serve has no cache that {spec.kv_sharing} layers share"


def _pages(spec: ServingSpec) -> str | None:
    ring = spec.ways(*SEQUENCE_AXES)
    if spec.kv_split == "seq" and PAGE_TOKENS % ring:
        return f"pages of {PAGE_TOKENS} tokens cannot be split {ring} ways over context"
    return None


def _draft(spec: ServingSpec) -> str | None:
    if spec.drafted and spec.disaggregated:
        return "rooftop serve sends no draft model's cache to a generate server: plan with --batching interleaved"
    return None


def _copies(spec: ServingSpec) -> str | None:
    copies, stages = spec.ways(*REPLICA_AXES), spec.ways(*STAGE_AXES)
    if copies > 1 and (spec.disaggregated or spec.drafted):
        return f"an engine with disaggregated batching or a draft model is one copy, not {copies} over data"
    if stages > 1 and spec.drafted:
        return f"an engine with a draft model has one stage, not {stages}"
    return None


def engine_mesh_errors(model: ModelConfig, axes: Mapping[str, int]) -> Iterator[RooftopError]:
    """Errors of mesh ``axes`` over which an engine cannot split a model. Sizes that do not divide are padded."""
    expert = ways(axes, *EXPERT_AXES)
    if model.moe is None and expert > 1:
        yield RooftopError("mesh axis expert", expert, f"1: {model.name} has no experts")
    if (stages := ways(axes, *STAGE_AXES)) > model.layers:
        yield RooftopError("mesh axis stage", stages, f"at most one for each of {model.layers} layers")
    if (width := ways(axes, *GATHER_AXES)) == 1:
        return
    split = width * ways(axes, *COLUMN_AXES, *SEQUENCE_AXES)
    if model.d_model % split:
        yield RooftopError("mesh axes fsdp, tensor and context", split, f"a divisor of a D of {model.d_model}")


def engine_heads(model: ModelConfig, axes: Mapping[str, int]) -> HeadSplit:
    """Query and key/value heads of an engine: over tensor, and query heads over context too."""
    return HeadSplit.of(model, ways(axes, *COLUMN_AXES), ways(axes, *SEQUENCE_AXES))


def _engine_tokens(spec: ServingSpec) -> str | None:
    if spec.tokens is None or spec.tokens <= spec.model.max_seq_len:
        return None
    return f"{spec.model.name} was made for {spec.model.max_seq_len:,} tokens, not {spec.tokens:,}"


def _prefill(spec: ServingSpec) -> str | None:
    axes, model = spec.prefill_axes, spec.model
    if axes is None:
        return None
    if spec.prefill_ring and ways(axes, *SEQUENCE_AXES) > 1:
        return "rooftop serve splits no prompt over context in a ring: plan without --prefill-mesh"
    for error in engine_mesh_errors(model, axes):
        return f"rooftop serve prefills over no {error.field} of {error.given}, only {error.accepted}"
    if max(ways(sizes, *STAGE_AXES) for sizes in (axes, spec.axes)) > 1 and _split(axes) != _split(spec.axes):
        return "a cache of pipeline stages can only be sent to the same mesh: plan with --batching interleaved"
    copies = [engine_heads(model, sizes).cached for sizes in (axes, spec.axes)]
    if model.mla is None and copies[0] != copies[1]:
        return f"a cache of key/value heads {_numbers(copies[0])} cannot be sent to one of {_numbers(copies[1])}"
    return None


def _split(axes: Mapping[str, int]) -> dict[str, int]:
    """The axes of several devices."""
    return {axis: size for axis, size in axes.items() if size > 1}


def _numbers(heads: tuple[int, ...]) -> str:
    """Heads with their copies, shortened."""
    shown = " ".join(map(str, heads[:8]))
    return shown if len(heads) <= 8 else f"{shown} ... ({len(heads)} in all)"


def _engine_mesh(spec: ServingSpec) -> str | None:
    error = next(engine_mesh_errors(spec.model, spec.axes), None)
    return None if error is None else f"rooftop serve has no {error.field} of {error.given}, only {error.accepted}"


#: What an engine can be, in the order in which obstacles are listed.
SERVING: tuple[Capability[ServingSpec], ...] = (
    Capability(
        name="parts of the model",
        accepted="any that a ModelConfig has; not " + "; ".join(UNRUNNABLE),
        obstacle=_parts,
    ),
    Capability(name="mesh axes", accepted=", ".join(ENGINE_AXES), obstacle=_engine_axes),
    Capability(name="weights", accepted=_weight_formats(), obstacle=_engine_weights),
    Capability(
        name="groups of weights",
        accepted="a divisor of the inputs of every matmul on a device: D, heads and F over tensor x context",
        obstacle=_weight_groups,
    ),
    Capability(name="embedding and unembedding", accepted="bf16", obstacle=_engine_tables),
    Capability(name="KV cache", accepted=", ".join(ENGINE_CACHES), obstacle=_engine_cache),
    Capability(name="matmul dtype", accepted="bf16", obstacle=_engine_matmuls),
    Capability(name="layers that share a cache", accepted="1", obstacle=_kv_sharing),
    Capability(
        name="context where it splits sequences",
        accepted=f"a divisor of the {PAGE_TOKENS} tokens of a page",
        obstacle=_pages,
    ),
    Capability(name="draft model", accepted="interleaved batching", obstacle=_draft),
    Capability(name="data and stage axes", accepted="no draft model; data: interleaved batching", obstacle=_copies),
    Capability(
        name="layers of a stage",
        accepted="any number of them; dealt out unevenly, the first stages have more",
        obstacle=_runs,
    ),
    Capability(
        name="expert and fsdp axes",
        accepted="expert: 1 without experts; fsdp: fsdp x tensor x context a divisor of D",
        obstacle=_engine_mesh,
    ),
    Capability(
        name="D, F, heads, key/value heads, latents, vocabulary, experts",
        accepted="any: padded with zeros where a mesh does not divide them; key/value heads that devices have in "
        "common are stored on each",
        obstacle=_runs,
    ),
    Capability(name="sequence length", accepted="at most the model's longest", obstacle=_engine_tokens),
    Capability(
        name="prefill on its own server",
        accepted="columns over tensor x context, as in generation; the same copies of key/value heads; with pipeline "
        "stages the same mesh",
        obstacle=_prefill,
    ),
)


def embedding_obstacles(stacks: Iterable[Stack]) -> Iterator[str]:
    """Reasons why SparseCores cannot train the tables of ``stacks``; nothing if they can."""
    for stack in stacks:
        if not stack.optimizer.elementwise:
            kind = stack.optimizer.kind
            yield f"optimizer {kind} of stack {stack.name}: SparseCores update each float of a row by itself"


def obstacles(capabilities: Iterable[Capability[Spec]], spec: Spec) -> Iterator[str]:
    """Reasons why programs cannot run ``spec`` as it is; nothing if they can."""
    for capability in capabilities:
        if (obstacle := capability.obstacle(spec)) is not None:
            yield obstacle


def require(capabilities: Iterable[Capability[Spec]], spec: Spec, accepted: str) -> None:
    """Raises RooftopError with the first obstacle, if there is one; ``accepted`` says what to give instead."""
    for obstacle in obstacles(capabilities, spec):
        raise RooftopError("plan", obstacle, accepted)


def table() -> str:
    """All capabilities as the Markdown table of docs/capabilities.md."""
    lines = ["| program | property | accepted |", "|---|---|---|"]
    rows = [("train", item.name, item.accepted) for item in TRAINING]
    rows += [("serve", item.name, item.accepted) for item in SERVING]
    rows.append(
        ("embed", "optimizer of a stack", "one that updates each float of a row by itself: not rowwise_adagrad")
    )
    return "\n".join([*lines, *(f"| {program} | {name} | {accepted} |" for program, name, accepted in rows)]) + "\n"
