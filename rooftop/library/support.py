"""Support for a model on a chip: what is counted, planned, compiled and run, and with which evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from rooftop.capabilities import SERVING, ServingSpec, model_obstacle, obstacles
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_count
from rooftop.core.records import Record
from rooftop.hardware import Chip
from rooftop.library.inputs import ChipLike, ModelLike, chip_of, model_of
from rooftop.library.results import Result
from rooftop.models import ModelConfig, count_params
from rooftop.plan.evidence import Evidence, Phase, Question, evidence_for
from rooftop.plan.shapes import require_planned
from rooftop.roofline.rates import Rates

if TYPE_CHECKING:
    from rooftop.present.document import Document

Standing = Literal["yes", "no"]
#: Tokens of the sequences that are asked about, or the longest of the model.
_SEQ_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class Supported(Record):
    """One thing that rooftop does: ``verb``, whether it does it for this model and chip, and how or why not."""

    verb: str
    answer: Standing
    note: str


@dataclass(frozen=True, kw_only=True)
class SupportRecord(Record):
    """A model on a chip: verbs, evidence by phase, and the source of each fraction of peak by resource."""

    model: str
    chip: str
    verbs: tuple[Supported, ...]
    evidence: Mapping[str, Evidence]
    rates: Mapping[str, str]


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
            {"verb": f"evidence: {phase}", "answer": one.level, "note": one.text}
            for phase, one in self.record.evidence.items()
        ]
        return [*verbs, *phases]

    @property
    def document(self) -> Document:
        """Verbs, evidence, and what the rates of the chip rest on."""
        from rooftop.present.documents import catalogue

        return catalogue.support(self.to_json())

    @property
    def summary(self) -> str:
        """The verbs that work and those that do not."""
        record = self.record
        does = [entry.verb for entry in record.verbs if entry.answer == "yes"]
        lacks = [entry.verb for entry in record.verbs if entry.answer == "no"]
        without = f"; not: {', '.join(lacks)}" if lacks else ""
        return f"{record.model} on {record.chip}: {', '.join(does)}{without}"


def support(model: ModelLike, *, on: ChipLike) -> SupportResult:
    """Return the verbs that work for a model on a chip, and the evidence of its times. Needs no JAX.

    Args:
        model: A preset, llama:N, a ModelConfig, or the path of a Hugging Face config.json or of its folder.
        on: A chip, or a slice of it.

    Raises RooftopError for a model or a chip that is not known.
    """
    config, chip = model_of(model), chip_of(on)
    phases = {phase: _evidence(phase, config, chip) for phase in get_args(Phase)}
    record = SupportRecord(
        model=config.name,
        chip=chip.name,
        verbs=tuple(_verbs(config, chip)),
        evidence=phases,
        rates=dict(Rates.of(chip).fractions.sources),
    )
    return SupportResult(record=record)


def _evidence(phase: Phase, model: ModelConfig, chip: Chip) -> Evidence:
    return evidence_for(Question.about(phase, model, chip, min(_SEQ_LEN, model.max_seq_len)))


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
    obstacle = model_obstacle(model)
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
