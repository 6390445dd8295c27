"""The training plan: the best strategy for a model, a slice and a batch, with its ledger and its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from rooftop import __version__
from rooftop.arrays.mesh import Mesh, MeshLayout
from rooftop.arrays.rules import AXES, STAGE_AXES, Rules, ways
from rooftop.capabilities import Choice, Switches, TrainingSpec
from rooftop.core.ledger import Ledger, Number, Row
from rooftop.core.records import Record, field_values, read_record
from rooftop.frameworks.framework import PlannedFramework
from rooftop.frameworks.programs import training_obstacles
from rooftop.frameworks.words.step import ConfiguredStep
from rooftop.models.adapters import Adapters, training_flops_per_token
from rooftop.models.numerics import Dtypes, Numerics
from rooftop.plan.documents import PlannedModel, PlannedSlice, Reason
from rooftop.plan.evidence import Evidence, Question, evidence_for
from rooftop.plan.layouts import from_mesh
from rooftop.plan.pricing import Bounds, scalar, scalar_row
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.memory import host_bytes
from rooftop.plan.training.pricing import waits_s
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.reasons import training_reasons
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.strategies import Strategies
from rooftop.plan.training.work.rows import training_ledger, training_work
from rooftop.plan.training.workload import Workload
from rooftop.roofline.bounds import lower_s
from rooftop.roofline.rules import model_flops_utilisation
from rooftop.scheduling.pipeline import PipelineSchedule


@dataclass(frozen=True, kw_only=True)
class PlannedRemat(Record):
    """A remat policy by name, and its action for each checkpoint."""

    name: str
    policy: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule(Record):
    """A pipeline schedule, and the model chunks per stage of the interleaved one."""

    name: PipelineSchedule
    chunks: int


@dataclass(frozen=True, kw_only=True)
class PlannedAssumptions(Assumptions):
    """The assumptions of a plan with the shares that apply to its chip, and the memory that it counts on."""

    bounds: Bounds

    @property
    def assumptions(self) -> Assumptions:
        """The assumptions alone."""
        return Assumptions(**field_values(self, Assumptions))


@dataclass(frozen=True, kw_only=True)
class PlannedAdapters(Adapters):
    """The adapters of a plan, and their parameters: those that are trained."""

    parameters: int


@dataclass(frozen=True, kw_only=True)
class StepFlops(Record):
    """FLOPs of the model per token and step, and those that all devices execute in a step."""

    per_token: float
    per_step: float
    executed_per_step: float
    convention: str


@dataclass(frozen=True, kw_only=True)
class PlannedMemory(Record):
    """HBM bytes of a device by class, their total and the capacity; ``host`` are bytes in the host's memory."""

    weights: float
    optimizer: float
    gradients: float
    activations: float
    workspace: float
    total: float
    capacity: float
    fits: bool
    host: float


@dataclass(frozen=True, kw_only=True)
class PlannedStep(Record):
    """Seconds of a step: each resource at its peak, the bounds, the expectation, and what nothing hides by axis.

    ``interval_s``: the 5th and 95th percentile around the expectation; None without evidence. ``lower_s``: all of
    the plan's work at peak rates, overlapped. ``leaves_room``: False for a plan that leaves the compiler no room in
    HBM; its expectation has nothing of the work that the compiler repeats for that.
    """

    mxu_s: float
    vpu_s: float
    hbm_s: float
    ici_s: float
    dcn_s: float
    pcie_s: float
    lower_s: float
    expected_s: float
    upper_s: float
    bound: str
    lower_by_resource_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    interval_s: tuple[float, float] | None = None
    leaves_room: bool = True


@dataclass(frozen=True, kw_only=True)
class Padding(Record):
    """Sequences of a step and positions of a sequence as a program runs them, padded where the mesh splits unevenly.

    ``share`` of all positions hold no token; ``sequence_tokens`` of them are at the end of each sequence, and
    ``empty_sequences`` have none.
    """

    sequences: int
    positions: int
    empty_sequences: int
    sequence_tokens: int
    share: float


@dataclass(frozen=True, kw_only=True)
class PlanSummary(Record):
    """The fields in which alternatives differ: mesh, remat, microbatches, schedule, switches, time and memory.

    ``schedule`` and ``chunks`` are those of pipeline stages; None without stages.
    """

    mesh: Mapping[str, int]
    layout: str
    remat: str
    microbatches: int
    schedule: str | None = None
    chunks: int = 1
    collective_matmuls: bool = False
    experts_over_tensor: bool = False
    expected_s: float
    mfu: float
    memory_bytes: float
    fits: bool
    executable: bool


@dataclass(frozen=True, kw_only=True)
class TrainingPlanDocument(Record):
    """A training plan as JSON: all that its program needs, and its figures. ``TrainingAnswer`` adds advice."""

    sparse = frozenset({"adapters"})

    kind: Literal["train"]
    schema: Literal[1]
    rooftop_version: str
    model: PlannedModel
    slice: PlannedSlice
    framework: PlannedFramework = PlannedFramework()
    workload: Workload
    padding: Padding | None = None
    mesh: MeshLayout
    rules: Rules
    dtypes: Dtypes
    optimizer: str
    remat: PlannedRemat
    microbatches: int
    collective_matmuls: bool = False
    experts_over_tensor: bool = False
    schedule: PlannedSchedule
    assumptions: PlannedAssumptions
    flops: StepFlops
    memory: PlannedMemory
    step: PlannedStep
    evidence: Evidence | None = None
    mfu: float
    tokens_per_s: float
    days: float | None
    cost_usd: float | None
    executable: bool
    obstacles: tuple[str, ...]
    ledger: tuple[Row, ...]
    reasons: tuple[Reason, ...] = ()
    adapters: PlannedAdapters | None = None

    @property
    def summary(self) -> PlanSummary:
        """The fields in which alternatives differ."""
        return PlanSummary(
            mesh={name: size for name, size in self.mesh.axes.items() if size > 1},
            layout=self.mesh.on(self.slice.hardware).layout,
            remat=self.remat.name,
            microbatches=self.microbatches,
            **_pipeline(ways(self.mesh.axes, *STAGE_AXES), self.schedule.name, self.schedule.chunks),
            collective_matmuls=self.collective_matmuls,
            experts_over_tensor=self.experts_over_tensor,
            expected_s=self.step.expected_s,
            mfu=self.mfu,
            memory_bytes=self.memory.total,
            fits=self.memory.fits,
            executable=self.executable,
        )

    @property
    def plan(self) -> TrainingPlan:
        """The plan, priced anew. Raises RooftopError on a slice, mesh or policy that cannot be."""
        slice_ = self.slice.hardware
        choice = Choice(
            remat=self.remat.name,
            microbatches=self.microbatches,
            schedule=self.schedule.name,
            chunks=self.schedule.chunks,
            **field_values(self, Switches),
        )
        problem = Problem(
            model=self.model.config,
            slice=slice_,
            workload=self.workload,
            numerics=Numerics(optimizer=self.optimizer, **field_values(self.dtypes)),
            assumptions=self.assumptions.assumptions,
            framework=self.framework,
            schedule=choice.schedule,
            chunks=choice.chunks,
            bounds=self.assumptions.bounds,
            adapters=None if self.adapters is None else Adapters(**field_values(self.adapters, Adapters)),
        )
        return TrainingPlan(problem=problem, mesh=self.mesh.on(slice_), choice=choice)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """One strategy for one job, with its expected time and memory.

    MFU counts model FLOPs (causal attention, unembedding in, embedding lookup out, nothing recomputed) over peak.
    """

    problem: Problem
    mesh: Mesh
    choice: Choice

    @cached_property
    def step(self) -> TrainingStep:
        """The step as the planner prices it, arrays [1, 1]."""
        return self.problem.step(Strategies(from_mesh(self.mesh), (self.choice,)))

    @cached_property
    def _priced(self) -> Ledger:
        """Every row of the step, arrays [1, 1]."""
        return training_ledger(self.step)

    @cached_property
    def ledger(self) -> Ledger:
        """The planned ledger: scalar rows, without those that take no time."""
        rows = (_shown_row(row, self.mesh) for row in self._priced)
        return Ledger(tuple(row for row in rows if row.count and (row.expected_s or row.time_s)))

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes per device by class, in the plan's bounds."""
        memory = self.problem.memory(self.step)
        return {name: scalar(value) for name, value in asdict(memory).items()}

    @property
    def memory_bytes(self) -> float:
        """Bytes per device, all classes."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """True if the plan stays within the device's HBM."""
        return self.memory_bytes <= self.problem.capacity

    @property
    def leaves_room(self) -> bool:
        """True if the plan leaves the compiler its room in HBM, or does not fit at all."""
        return not self.problem.roomy_bytes < self.memory_bytes <= self.problem.capacity

    @property
    def expected_s(self) -> float:
        """Expected seconds per step: the sum of the ledger."""
        return float(self.ledger.expected_s)

    @cached_property
    def evidence(self) -> Evidence:
        """Published runs of the chip and kind of model, and how far off they were planned."""
        problem = self.problem
        question = Question.of("train", problem.model, problem.slice, problem.workload.seq_len)
        if problem.adapters is not None:
            unknown = replace(evidence_for(question, ()), unlike=("no run that trains adapters was measured",))
            return unknown.calibrated(problem.slice.chip.calibrated)
        return evidence_for(question.priced_as(problem.program.published)).calibrated(problem.slice.chip.calibrated)

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The 5th and 95th percentile of seconds per step; None without evidence."""
        return self.evidence.interval_s(self.expected_s, max(self.lower_s.values()))

    @cached_property
    def lower_s(self) -> dict[str, float]:
        """Lower bound by resource, with the time in which pipeline stages wait for it."""
        spans = {name: self.mesh.span(name) for name in AXES}
        bounds = {name: scalar(seconds) for name, seconds in lower_s(self.ledger, spans).items()}
        if self.mesh.size(*STAGE_AXES) == 1:
            return bounds
        step, work = self.step, training_work(self.step)
        waits = waits_s(
            work,
            self._priced.rows[: len(work)],
            lambda ledger: lower_s(ledger, spans),
            step,
        )
        return {name: seconds + scalar(waits[name]) for name, seconds in bounds.items()}

    @property
    def bound(self) -> str:
        """The resource that binds: the largest lower bound."""
        return max(self.lower_s, key=lambda name: self.lower_s[name])

    @property
    def padding(self) -> Padding:
        """The padding of the batch on the plan's mesh."""
        (sequences, positions), workload = self.spec.padded, self.problem.workload
        return Padding(
            sequences=sequences,
            positions=positions,
            empty_sequences=sequences - workload.batch_seqs,
            sequence_tokens=positions - workload.seq_len,
            share=1 - workload.batch_tokens / (sequences * positions),
        )

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs per token in the convention of MFU."""
        return float(self._flops[0])

    @cached_property
    def _flops(self) -> tuple[Number, str]:
        problem = self.problem
        return training_flops_per_token(problem.model, problem.workload.seq_len, problem.adapters)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation at the expected step time; the peak is that of the matmuls' dtype."""
        return self._mfu(self.expected_s)

    def _mfu(self, step_s: float) -> float:
        problem = self.problem
        return model_flops_utilisation(
            self.flops_per_token * problem.workload.batch_tokens,
            step_s,
            problem.slice.flops_per_s(problem.numerics.matmul),
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole slice."""
        return self.problem.workload.batch_tokens / self.expected_s

    @property
    def days(self) -> float | None:
        """Days for the token budget."""
        return self.problem.days_at(self.expected_s)

    @property
    def cost_usd(self) -> float | None:
        """List price of the chips for the token budget; None without either."""
        return self.problem.cost_usd_at(self.expected_s)

    def require_ours(self) -> None:
        """Raises RooftopError for a plan of another framework, which is not ours to build, compile or run."""
        self.problem.program.require_ours()

    @cached_property
    def spec(self) -> TrainingSpec:
        """The train step that a program is asked for."""
        return self.problem.spec(self.mesh.shape, self.choice)

    @cached_property
    def configured(self) -> ConfiguredStep:
        """The train step as a configuration of the framework says it."""
        problem = self.problem
        return ConfiguredStep(
            framework=problem.program,
            model=problem.model,
            slice=problem.slice,
            axes=self.mesh.shape,
            batch_seqs=problem.workload.batch_seqs,
            seq_len=problem.workload.seq_len,
            choice=self.choice,
            numerics=problem.formats,
            dcn={axis: self.mesh.across(axis) for axis in AXES},
        )

    @cached_property
    def obstacles(self) -> list[str]:
        """Reasons why no program runs the plan as it stands; empty if one does."""
        return list(training_obstacles(self.problem.framework.name, self.spec))

    @cached_property
    def reasons(self) -> list[Reason]:
        """The rules of the book that apply."""
        return training_reasons(self.problem, self.step)

    def exposed_s(self) -> dict[str, float]:
        """Seconds per step of collectives that nothing hides, by mesh axis, and of pipeline idle time."""
        exposed: dict[str, float] = {}
        for row in self.ledger:
            for collective in row.collectives:
                name = collective.axes[0]
                exposed[name] = exposed.get(name, 0.0) + float(row.count * collective.exposed_s)
        idle = sum(float(row.count * row.expected_s) for row in self.ledger if row.is_idle)
        return exposed | ({"idle": idle} if idle else {})

    @property
    def summary(self) -> PlanSummary:
        """The fields in which alternatives differ."""
        return self.summarised(self.expected_s, self.memory_bytes)

    def summarised(self, expected_s: float, memory_bytes: float) -> PlanSummary:
        """The summary, with the step time and memory that a sweep has found already."""
        return PlanSummary(
            mesh={name: size for name, size in self.mesh.shape.items() if size > 1},
            layout=self.mesh.layout,
            remat=self.choice.remat,
            microbatches=self.choice.microbatches,
            **_pipeline(self.mesh.size(*STAGE_AXES), *self.choice.pipeline),
            **field_values(self.choice, Switches),
            expected_s=expected_s,
            mfu=self._mfu(expected_s),
            memory_bytes=memory_bytes,
            fits=memory_bytes <= self.problem.capacity,
            executable=not self.obstacles,
        )

    @cached_property
    def document(self) -> TrainingPlanDocument:
        """The plan as a record."""
        problem, numerics = self.problem, self.problem.formats
        assumptions = replace(problem.assumed, hidden=problem.assumed.shares(self.step.habits))
        adapters = problem.adapters
        return TrainingPlanDocument(
            kind="train",
            schema=1,
            rooftop_version=__version__,
            model=PlannedModel.of(problem.model),
            slice=PlannedSlice.of(problem.slice),
            framework=problem.program.planned,
            workload=problem.workload,
            padding=self.padding,
            mesh=self.mesh.described,
            rules=self.spec.rules,
            dtypes=numerics.dtypes,
            optimizer=numerics.optimizer,
            remat=PlannedRemat(name=self.choice.remat, policy=self.choice.policy),
            microbatches=self.choice.microbatches,
            **field_values(self.choice, Switches),
            schedule=PlannedSchedule(name=self.choice.schedule, chunks=self.choice.chunks),
            assumptions=PlannedAssumptions(**vars(assumptions), bounds=problem.bounds),
            flops=StepFlops(
                per_token=self.flops_per_token,
                per_step=self.flops_per_token * problem.workload.batch_tokens,
                executed_per_step=float(self.ledger.flops()) * problem.slice.devices,
                convention=self._flops[1],
            ),
            memory=PlannedMemory(
                **self.memory,
                total=self.memory_bytes,
                capacity=problem.capacity,
                fits=self.fits,
                host=scalar(host_bytes(self.step)),
            ),
            step=PlannedStep(
                mxu_s=float(self.ledger.total("mxu")),
                vpu_s=float(self.ledger.total("vpu")),
                hbm_s=float(self.ledger.total("hbm")),
                ici_s=float(self.ledger.total("ici")),
                dcn_s=float(self.ledger.total("dcn")),
                pcie_s=float(self.ledger.total("pcie")),
                lower_s=max(self.lower_s.values()),
                expected_s=self.expected_s,
                upper_s=float(self.ledger.serial_s),
                bound=self.bound,
                lower_by_resource_s=self.lower_s,
                exposed_s=self.exposed_s(),
                interval_s=self.interval_s,
                leaves_room=self.leaves_room,
            ),
            evidence=self.evidence,
            mfu=self.mfu,
            tokens_per_s=self.tokens_per_s,
            days=self.days,
            cost_usd=self.cost_usd,
            executable=not self.obstacles,
            obstacles=tuple(self.obstacles),
            ledger=self.ledger.rows,
            reasons=tuple(self.reasons),
            adapters=None
            if adapters is None
            else PlannedAdapters(**field_values(adapters), parameters=adapters.count(problem.model)),
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values; ``TrainingAnswer`` adds alternatives and advice."""
        return self.document.to_json()

    @classmethod
    def from_json(cls, data: object) -> TrainingPlan:
        """The plan that a plan.json describes, priced anew. Raises RooftopError on a file that is not one."""
        return read_record(TrainingPlanDocument, data, "plan", amounts=True).plan


def _pipeline(stages: int, schedule: str, chunks: int) -> dict[str, Any]:
    """The fields of a summary that are about pipeline stages."""
    return {"schedule": schedule, "chunks": chunks} if stages > 1 else {}


def _shown_row(row: Row, mesh: Mesh) -> Row:
    """A row with plain numbers, without axes of size 1, collectives that move nothing, and figures that are 0."""
    row = scalar_row(row)
    collectives = (
        replace(collective, axes=tuple(axis for axis in collective.axes if mesh.size(axis) > 1))
        for collective in row.collectives
        if float(collective.wire_bytes) > 0
    )
    return replace(
        row,
        flops={name: value for name, value in row.flops.items() if value},
        collectives=tuple(collectives),
        time_s={name: value for name, value in row.time_s.items() if value},
    )
