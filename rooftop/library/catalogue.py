"""Chips, slices and models: the catalogue's figures, the counts of a model, and its support on a chip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, get_args

from rooftop.capabilities import SERVING, TRAINING, ServingSpec, TrainingSpec, obstacles
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import counted, format_bytes, format_count, parse_count
from rooftop.core.records import Record
from rooftop.frameworks.framework import FRAMEWORKS, framework_of, runs_on
from rooftop.frameworks.programs import training_obstacles
from rooftop.hardware import Chip, Slice, catalogue, is_slice
from rooftop.hardware.chips import Figure
from rooftop.hardware.slices import PhysicalAxis
from rooftop.library.results import Result, flat
from rooftop.models import (
    ModelConfig,
    count_params,
    flops_per_token,
    kv_bytes_per_token,
    kv_cache_bytes,
    preset_source,
    presets,
)
from rooftop.models.stored import StoredWeights
from rooftop.plan.catalogue import KvBytes, ModelRecord, ModelTotals, Supported, SupportRecord, TokenFlops
from rooftop.plan.evidence import Evidence, Phase, Question, evidence_for
from rooftop.plan.shapes import require_planned
from rooftop.requests.inputs import chip_of, model_of, slice_of
from rooftop.requests.likes import ChipLike, CountLike, ModelLike
from rooftop.roofline.rates import Rates

if TYPE_CHECKING:
    from rooftop.present.document import Document

#: Tokens of the sequence for which FLOPs are counted by default; fewer for models with shorter sequences.
_DEFAULT_SEQ = 4096
#: Tokens of the sequences that are asked about, or the longest of the model.
_ASKED_SEQ = 4096


@dataclass(frozen=True, kw_only=True)
class ChipRecord(Record):
    """A chip: names, kind, and every figure with its unit, source and date."""

    name: str
    title: str
    aliases: tuple[str, ...]
    kind: str
    figures: Mapping[str, Figure]

    @classmethod
    def of(cls, chip: Chip) -> ChipRecord:
        """The record of a chip."""
        return cls(name=chip.name, title=chip.title, aliases=chip.aliases, kind=chip.kind, figures=chip.figures)


@dataclass(frozen=True, kw_only=True, repr=False)
class ChipResult(Result):
    """One chip of the catalogue."""

    chip: Chip

    def to_json(self) -> dict[str, object]:
        """Names, kind, and every figure with its unit, source and date."""
        return ChipRecord.of(self.chip).to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """A figure a row."""
        return [{"figure": name} | vars(figure) for name, figure in self.chip.figures.items()]

    @property
    def document(self) -> Document:
        """Every figure with its source."""
        from rooftop.present.documents import catalogue

        return catalogue.chip(self.chip)

    @property
    def summary(self) -> str:
        """Name, peak and memory."""
        spec = self.chip
        peak, hbm = format_count(spec.flops_per_s["bf16"], "FLOP/s"), format_bytes(spec.hbm_bytes)
        return f"{spec.name}: {spec.title}, {peak} in bf16, {hbm} HBM at {format_bytes(spec.hbm_bytes_per_s)}/s"


@dataclass(frozen=True, kw_only=True)
class SliceRecord(Record):
    """A slice: counts and totals of all its chips, FLOP/s by dtype, bytes, and the axes of its network."""

    name: str
    chip: str
    shape: tuple[int, ...]
    num_slices: int
    chips: int
    devices: int
    cores: int
    hosts: int
    wraparound: tuple[bool, ...]
    flops_per_s: Mapping[str, float]
    hbm_bytes: float
    hbm_usable_bytes: float
    price_usd_per_hour: float | None
    physical_axes: tuple[PhysicalAxis, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class SliceResult(Result):
    """A slice: its totals and its network."""

    slice: Slice

    @property
    def chip(self) -> Chip:
        """The chip that the slice is made of."""
        return self.slice.chip

    def to_json(self) -> dict[str, object]:
        """Shape, totals and physical axes."""
        spec = self.slice
        return SliceRecord(
            name=spec.name,
            chip=spec.chip.name,
            shape=spec.shape,
            num_slices=spec.num_slices,
            chips=spec.chips,
            devices=spec.devices,
            cores=spec.cores,
            hosts=spec.hosts,
            wraparound=spec.wraparound,
            flops_per_s={dtype: spec.flops_per_s(dtype) for dtype in spec.chip.flops_per_s},
            hbm_bytes=spec.hbm_bytes,
            hbm_usable_bytes=spec.hbm_usable_bytes,
            price_usd_per_hour=spec.price_usd_per_hour,
            physical_axes=spec.physical_axes,
        ).to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """A physical axis a row."""
        return [dict(vars(axis)) for axis in self.slice.physical_axes]

    @property
    def document(self) -> Document:
        """Totals and physical axes."""
        from rooftop.present.documents import catalogue

        return catalogue.slice_document(self.slice)

    @property
    def summary(self) -> str:
        """Name and totals."""
        spec = self.slice
        peak = format_count(spec.flops_per_s("bf16"), "FLOP/s")
        return (
            f"{spec.name}: {counted(spec.chips, 'chip')}, {counted(spec.devices, 'device')}, "
            f"{counted(spec.hosts, 'host')}, {peak} in bf16, {format_bytes(spec.hbm_bytes)} HBM"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class ChipsResult(Result):
    """All chips of the catalogue."""

    chips: tuple[Chip, ...]

    def to_json(self) -> dict[str, object]:
        """Every chip with all its figures."""
        return {"chips": [ChipRecord.of(spec).to_json() for spec in self.chips]}

    @property
    def rows(self) -> list[dict[str, object]]:
        """A chip a row, a figure a column."""
        return [
            {"chip": spec.name} | flat({name: figure.value for name, figure in spec.figures.items()})
            for spec in self.chips
        ]

    @property
    def document(self) -> Document:
        """A chip a row."""
        from rooftop.present.documents import catalogue

        return catalogue.chips(list(self.chips))

    @property
    def summary(self) -> str:
        """Names of the chips."""
        return f"{counted(len(self.chips), 'chip')}: {', '.join(spec.name for spec in self.chips)}"


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelResult(Result):
    """A model's parameters, FLOPs per token in sequences of ``seq_len`` tokens, and KV cache.

    ``source`` is where the figures of a preset come from.
    """

    config: ModelConfig
    seq_len: int
    source: str | None = None

    @cached_property
    def totals(self) -> ModelTotals:
        """The figures that a list of models shows."""
        counts = count_params(self.config)
        return ModelTotals(
            name=self.config.name,
            family=self.config.family,
            params=counts.total,
            active_params=counts.active,
            kv_bytes_per_token=KvBytes(
                bf16=kv_bytes_per_token(self.config, "bf16"), int8=kv_bytes_per_token(self.config, "int8")
            ),
            max_seq_len=self.config.max_seq_len,
        )

    @cached_property
    def record(self) -> ModelRecord:
        """Parameters by component, FLOPs and their convention, KV bytes, and the configuration."""
        config, seq_len = self.config, self.seq_len
        flops = flops_per_token(config, seq_len)
        return ModelRecord(
            **vars(self.totals),
            source=self.source,
            params_by_component=count_params(config).by_component,
            seq_len=seq_len,
            flops_per_token=TokenFlops(
                convention=flops.convention,
                forward=flops.forward,
                backward=flops.backward,
                total=flops.total,
                forward_matmul=flops.matmul,
                forward_attention=flops.attention,
                total_full_attention=flops_per_token(config, seq_len, attention="full").total,
            ),
            kv_cache_bytes=KvBytes(
                bf16=kv_cache_bytes(config, "bf16", seq_len), int8=kv_cache_bytes(config, "int8", seq_len)
            ),
            stored=StoredWeights.of(config),
            config=config,
        )

    def to_json(self) -> dict[str, object]:
        """The record as plain JSON values."""
        return self.record.to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """A component a row: its parameters."""
        parts = count_params(self.config).by_component
        return [{"component": name, "params": count} for name, count in parts.items()]

    @property
    def document(self) -> Document:
        """Parameters, FLOPs and KV bytes."""
        from rooftop.present.documents import catalogue

        return catalogue.model(self.record)

    @property
    def summary(self) -> str:
        """Name and size."""
        counts = count_params(self.config)
        active = f" ({format_count(counts.active)} active)" if counts.active != counts.total else ""
        flops = format_count(float(flops_per_token(self.config, self.seq_len).total))
        kv_bytes = format_bytes(float(kv_bytes_per_token(self.config, "bf16")))
        return (
            f"{self.config.name}: {format_count(counts.total)} parameters{active}, {flops} training FLOPs a token at "
            f"{self.seq_len:,} tokens, {kv_bytes} KV a token in bf16"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelsResult(Result):
    """All models that ship with rooftop."""

    models: tuple[ModelResult, ...]

    def to_json(self) -> dict[str, object]:
        """Totals of every model."""
        return {"models": [model.totals.to_json() for model in self.models]}

    @property
    def rows(self) -> list[dict[str, object]]:
        """A model a row."""
        return [flat(model.totals.to_json()) for model in self.models]

    @property
    def document(self) -> Document:
        """A model a row."""
        from rooftop.present.documents import catalogue

        return catalogue.models([entry.totals for entry in self.models])

    @property
    def summary(self) -> str:
        """Names of the models."""
        return f"{counted(len(self.models), 'model')}: {', '.join(model.config.name for model in self.models)}"


def chip(name: ChipLike) -> ChipResult | SliceResult:
    """Figures of a chip ('v5p') or of a slice ('v5e:16x16@4').

    Raises RooftopError for a name that is not in the catalogue, and for a slice that cannot be built.
    """
    if isinstance(name, str):
        return SliceResult(slice=slice_of(name)) if is_slice(name) else ChipResult(chip=chip_of(name))
    if isinstance(name, Slice):
        return SliceResult(slice=name)
    return name if isinstance(name, SliceResult) else ChipResult(chip=chip_of(name))


def chips() -> ChipsResult:
    """All chips of the catalogue, TPUs by generation and then GPUs."""
    return ChipsResult(chips=tuple(catalogue().values()))


def model(name: ModelLike, *, seq: CountLike | None = None) -> ModelResult:
    """Parameters, FLOPs per token and KV-cache bytes of a model.

    Args:
        name: A preset, a ModelConfig, or the path of a Hugging Face config.json or of its folder.
        seq: Tokens of a sequence; 4096, or the longest that the model takes, by default.

    Raises RooftopError for a model that is not known, and for more positions than the model has learned.
    """
    config = model_of(name)
    seq_len = min(_DEFAULT_SEQ, config.max_seq_len) if seq is None else parse_count(seq, "seq")
    if config.positions == "learned" and seq_len > config.max_seq_len:
        raise RooftopError("seq", seq, f"at most {config.max_seq_len}: the model has learned no more positions")
    return ModelResult(config=config, seq_len=seq_len, source=preset_source(name) if isinstance(name, str) else None)


def models() -> ModelsResult:
    """All models that ship with rooftop."""
    return ModelsResult(models=tuple(model(name) for name in presets()))


@dataclass(frozen=True, kw_only=True, repr=False)
class SupportResult(Result):
    """A model on a chip: the verbs that work, and the evidence of its times."""

    record: SupportRecord

    def to_json(self) -> dict[str, object]:
        """Verbs, evidence and rates."""
        return self.record.to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """A verb a row, and then the evidence of a phase a row."""
        verbs = [dict(vars(entry)) for entry in self.record.verbs]
        phases = [
            {"verb": f"evidence: {phase}", "answer": evidence.level, "note": evidence.text}
            for phase, evidence in self.record.evidence.items()
        ]
        return [*verbs, *phases]

    @property
    def document(self) -> Document:
        """Verbs, evidence, and what the rates of the chip rest on."""
        from rooftop.present.documents import catalogue

        return catalogue.support(self.record)

    @property
    def summary(self) -> str:
        """The verbs that work and those that do not."""
        record = self.record
        does = [entry.verb for entry in record.verbs if entry.answer == "yes"]
        lacks = [entry.verb for entry in record.verbs if entry.answer == "no"]
        without = f"; not: {', '.join(lacks)}" if lacks else ""
        return f"{record.model} on {record.chip}: {', '.join(does)}{without}"


def support(name: ModelLike, *, on: ChipLike) -> SupportResult:
    """Return the verbs that work for a model on a chip, and the evidence of its times. Needs no JAX.

    Args:
        name: A preset, llama:N, a ModelConfig, or the path of a Hugging Face config.json or of its folder.
        on: A chip, or a slice of it.

    Raises RooftopError for a model or a chip that is not known.
    """
    config, spec = model_of(name), chip_of(on)
    verbs = tuple(_verbs(config, spec))
    planned = any(entry.verb == "plan" and entry.answer == "yes" for entry in verbs)
    phases = {phase: _evidence(phase, config, spec) for phase in get_args(Phase)} if planned else {}
    record = SupportRecord(
        model=config.name,
        chip=spec.name,
        verbs=verbs,
        frameworks=tuple(_frameworks(config, spec)) if planned else (),
        evidence=phases,
        rates=dict(Rates.of(spec).fractions.sources),
    )
    return SupportResult(record=record)


def _frameworks(model: ModelConfig, chip: Chip) -> Iterator[Supported]:
    """The frameworks that train the model on the chip, with their evidence, and the others with what they lack."""
    for name in FRAMEWORKS:
        if not runs_on(name, chip):
            yield Supported(verb=name, answer="no", note=f"does not run on {chip.name}")
            continue
        program = framework_of(name, chip=chip, model=model)
        obstacle = next(training_obstacles(name, TrainingSpec.plain(model, chip.kind)), None)
        question = Question.about("train", model, chip, min(_ASKED_SEQ, model.max_seq_len))
        evidence = evidence_for(question.priced_as(program.published))
        yield Supported(verb=name, answer="yes" if obstacle is None else "no", note=obstacle or evidence.text)


def _evidence(phase: Phase, model: ModelConfig, chip: Chip) -> Evidence:
    return evidence_for(Question.about(phase, model, chip, min(_ASKED_SEQ, model.max_seq_len)))


def _verbs(model: ModelConfig, chip: Chip) -> Iterator[Supported]:
    parameters = count_params(model)
    yield Supported(verb="model", answer="yes", note=f"{format_count(parameters.total)} parameters are counted")
    try:
        require_planned(model)
    except RooftopError as error:
        for verb in ("plan", "compile", "train", "serve"):
            yield Supported(verb=verb, answer="no", note=f"accepted: {error.accepted}")
        return
    yield Supported(verb="plan", answer="yes", note="training and serving")
    obstacle = next(obstacles(TRAINING, TrainingSpec.plain(model, chip.kind)), None)
    compiler = _compiler(chip)
    compiles = obstacle is None and compiler.answer == "yes"
    yield Supported(verb="compile", answer="yes" if compiles else "no", note=obstacle or compiler.note)
    note = obstacle or "on any mesh; docs/capabilities.md has the choices"
    yield Supported(verb="train", answer="no" if obstacle else "yes", note=note)
    served = next(obstacles(SERVING, ServingSpec(model=model, axes={})), None)
    stored = f"checkpoints as published: {model.stored.words}" if model.stored is not None else "bf16, int8, fp8, int4"
    yield Supported(verb="serve", answer="no" if served else "yes", note=served or stored)


def _compiler(chip: Chip) -> Supported:
    """The compiler for a chip: XLA:TPU, or XLA:GPU where its target is known."""
    if chip.kind == "tpu":
        return Supported(verb="compile", answer="yes", note="XLA:TPU, without a TPU: pip install 'rooftop[compile]'")
    from rooftop.compiler.targets import target_text

    try:
        target_text(chip)
    except RooftopError as error:
        return Supported(verb="compile", answer="no", note=f"accepted: {error.accepted}")
    return Supported(verb="compile", answer="yes", note="XLA:GPU, without a GPU: pip install 'rooftop[gpu-compile]'")
