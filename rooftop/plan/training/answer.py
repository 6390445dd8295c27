"""The answer to a training problem: the best plan, the runners-up, and the changes that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Ints
from rooftop.arrays.rules import STAGE_AXES
from rooftop.capabilities import MATMUL_DTYPES, SWITCHES, Choice, TrainingSpec
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.records import Record, field_values
from rooftop.frameworks.answers import FrameworkOffer, PricedRecipe, StatedConfiguration
from rooftop.frameworks.programs import matmul_dtypes, training_obstacles
from rooftop.frameworks.words.configurations import configuration_of, priced_recipe
from rooftop.frameworks.words.table import FrameworkConfiguration
from rooftop.hardware import Slice
from rooftop.plan.documents import PipelineFigures
from rooftop.plan.layouts import Layouts
from rooftop.plan.pricing import OnProgress
from rooftop.plan.training.comparison import ComparisonDocument
from rooftop.plan.training.compiled import CompiledPlans
from rooftop.plan.training.nearest import NearestPlan, nearest_executable, nearest_with_room, refusal
from rooftop.plan.training.plan import PlanSummary, TrainingPlan, TrainingPlanDocument
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.reasons import shortfall
from rooftop.plan.training.search import (
    RANKED,
    Sweep,
    SweepOptions,
    best_of,
    plan_of,
    runnable_layouts,
    searched_switches,
    sweep,
)
from rooftop.plan.training.strategies import Strategies
from rooftop.plan.training.workload import MOST_TOKENS
from rooftop.roofline.achievable import fractions

#: Layouts (the best ones of the search) among which a changed job looks again.
LOOK_AGAIN = 32
#: Tokens of a sequence from which attention takes most of a step, and its kernels decide.
_LONG = 65536
#: A change that gains less is not worth a line.
WORTH_SAYING = 0.005


@dataclass(frozen=True, kw_only=True)
class WhatIf(Record):
    """A change to the job, with its step and rate. ``gain`` is the share of tokens/s that it adds.

    ``obstacle`` says why no program runs the change yet; None if it is not for a program to do.
    """

    change: str
    step_s: float
    tokens_per_s: float
    gain: float
    obstacle: str | None = None


@dataclass(frozen=True, kw_only=True)
class Lever(Record):
    """A part of the strategy that was searched: the plan's setting, and the best step with another one.

    ``gain`` is the share of tokens/s that the plan's setting adds to those of the other.
    """

    lever: str
    chosen: str
    other: str
    step_s: float
    gain: float


@dataclass(frozen=True, kw_only=True)
class OtherBatch(Record):
    """Half or twice the batch of a plan: its step, MFU, days and dollars on the best mesh near the plan's."""

    batch_tokens: int
    step_s: float
    mfu: float
    days: float | None
    cost_usd: float | None


@dataclass(frozen=True, kw_only=True)
class TrainingAnswerDocument(TrainingPlanDocument):
    """plan.json of a training run.

    ``comparison`` is there if slices were compared, ``compiled`` if the best plans were compiled, and ``pipeline`` if
    the mesh has stages. ``configuration`` is there if another framework than rooftop runs the plan, ``recipe`` if its
    published recipes are of several kinds, and ``stated`` if the plan is of a configuration. ``frameworks`` are the
    best plans of frameworks for the same job. A plan alone has none of these fields.
    """

    sparse = TrainingPlanDocument.sparse | {
        "comparison", "compiled", "pipeline", "request", "configuration", "stated", "recipe",
    }  # fmt: skip

    alternatives: tuple[PlanSummary, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    levers: tuple[Lever, ...] = ()
    nearest_executable: NearestPlan | None = None
    nearest_with_room: NearestPlan | None = None
    other_batches: tuple[OtherBatch, ...] = ()
    searched: int = 0
    comparison: ComparisonDocument | None = None
    compiled: CompiledPlans | None = None
    pipeline: PipelineFigures | None = None
    request: Mapping[str, Any] | None = None
    configuration: FrameworkConfiguration | None = None
    stated: StatedConfiguration | None = None
    recipe: PricedRecipe | None = None
    frameworks: tuple[FrameworkOffer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainingAnswer:
    """The best plan, the runners-up, and the changes that would help; ``searched`` is the number of candidates.

    ``nearest_with_room`` is set if the plan leaves the compiler none, and ``other_batches`` if the batch was not given.
    """

    plan: TrainingPlan
    alternatives: list[PlanSummary]
    what_if: list[WhatIf]
    levers: Sequence[Lever] = ()
    nearest_executable: NearestPlan | None
    nearest_with_room: NearestPlan | None
    other_batches: Sequence[OtherBatch] = ()
    searched: int

    @property
    def configuration(self) -> FrameworkConfiguration | None:
        """The configuration of the plan's framework; None of rooftop's own, and for a plan that no program runs."""
        return None if self.plan.obstacles else configuration_of(self.plan.configured)

    @property
    def recipe(self) -> PricedRecipe | None:
        """The kind of recipe that the framework's price is of; None of a plan that no program runs."""
        return None if self.plan.obstacles else priced_recipe(self.plan.configured)

    @property
    def document(self) -> TrainingAnswerDocument:
        """plan.json."""
        plan = self.plan.document
        return TrainingAnswerDocument(
            **field_values(plan),
            alternatives=tuple(self.alternatives),
            what_if=tuple(self.what_if),
            levers=tuple(self.levers),
            nearest_executable=self.nearest_executable,
            nearest_with_room=self.nearest_with_room,
            other_batches=tuple(self.other_batches),
            searched=self.searched,
            configuration=self.configuration,
            recipe=self.recipe,
        )

    def to_json(self) -> dict[str, Any]:
        """plan.json as plain JSON values."""
        return self.document.to_json()

    def require_executable(self) -> None:
        """Raises Infeasible, with the nearest plan that programs run, if none runs the plan as it stands."""
        if self.plan.obstacles:
            near = self.nearest_executable
            raise Infeasible(
                f"no program trains {self.plan.problem.model.name} on {self.plan.problem.slice.name} as it is planned",
                self.plan.obstacles[0],
                None if near is None else near.text,
            )

    def require_fit(self) -> None:
        """Raises Infeasible, saying by how many bytes and in which class, if even the smallest does not fit."""
        if not self.plan.fits:
            raise Infeasible(
                f"{self.plan.problem.model.name} does not fit {self.plan.problem.slice.name}",
                shortfall(self.plan.problem, self.plan.memory),
            )


def plan_training(problem: Problem, *, alternatives: int = 5, on_progress: OnProgress | None = None) -> TrainingAnswer:
    """Search and answer: the best plan that programs run, or else the best of all and the nearest that programs run.

    Raises RooftopError on sizes that cannot be.
    """
    return answer_of(search_of(problem, on_progress), alternatives=alternatives, on_progress=on_progress)


def search_of(problem: Problem, on_progress: OnProgress | None = None, *, ranked: int = RANKED) -> Sweep:
    """The search among plans that programs run; among all if there is none, or if the mesh is not searched.

    The ``ranked`` best mesh shapes are priced exactly.
    """
    searched = search_of_executable(problem, on_progress, ranked=ranked)
    return searched or sweep(problem, SweepOptions(ranked=ranked, on_progress=on_progress))


def search_of_executable(
    problem: Problem, on_progress: OnProgress | None = None, *, ranked: int = RANKED
) -> Sweep | None:
    """The search among plans that programs run; None if there is none, or if the mesh is not searched."""
    pinned = problem.axes is not None or problem.mesh is not None
    # Very many meshes take long to bound, and little to refuse.
    if pinned or refusal(problem) is not None or not len(layouts := runnable_layouts(problem)):
        return None
    options = SweepOptions(executable=True, ranked=ranked, within=layouts, on_progress=on_progress)
    searched = sweep(problem, options)
    return searched if searched.fits.any() else None


def answer_of(
    searched: Sweep, *, alternatives: int = 5, batch_given: bool = True, on_progress: OnProgress | None = None
) -> TrainingAnswer:
    """The answer that follows from a search; with half and twice the batch if that was not given."""
    best = searched.plan(searched.best)
    near = nearest_executable(best, on_progress) if best.obstacles or not best.fits else None
    roomy = None if best.leaves_room or near is not None else nearest_with_room(best, on_progress)
    return TrainingAnswer(
        plan=best,
        alternatives=[
            searched.plan(candidate).summarised(
                float(searched.expected_s[candidate]), float(searched.memory_bytes[candidate])
            )
            for candidate in searched.alternatives(alternatives)
        ],
        what_if=what_if(searched, best),
        levers=list(levers(searched, best)),
        other_batches=[] if batch_given else list(_other_batches(searched, best)),
        nearest_executable=None if near is None else NearestPlan.of(near),
        nearest_with_room=None if roomy is None else NearestPlan.of(roomy),
        searched=searched.searched,
    )


def what_if(searched: Sweep, best: TrainingPlan) -> list[WhatIf]:
    """Changes to the job, one at a time, that would give more tokens/s.

    Those that programs run come first, then the others; the most helpful of both first.
    """
    near = _near_layouts(searched)
    answers = []
    for change in _changes(searched.problem):
        within = _candidates(change.problem, near, searched.strategies.choices)
        seconds, candidate = _best_that_runs(change.problem, within)
        if np.isfinite(seconds):
            rate = change.problem.workload.batch_tokens / seconds
            gain = rate / best.tokens_per_s - 1
            if gain >= WORTH_SAYING:
                spec = plan_of(change.problem, within, candidate).spec
                obstacle = change.obstacle or next(_new_obstacles(best, spec), None)
                answers.append(
                    WhatIf(change=change.text, step_s=seconds, tokens_per_s=rate, gain=gain, obstacle=obstacle)
                )
    return sorted(answers, key=lambda answer: (answer.obstacle is not None, -answer.gain))


def levers(searched: Sweep, best: TrainingPlan) -> Iterator[Lever]:
    """The parts of the strategy of which a search tried several settings, each with what the plan's setting gains."""
    for name, (setting, differs) in _LEVERS.items():
        others = np.array([differs(choice, best.choice) for choice in searched.strategies.choices])
        if not others.any() or (name in _OF_STAGES and best.mesh.size(*STAGE_AXES) == 1):
            continue
        if name == _HOST and _offloaded(best.choice) != _NOTHING:
            # Without host memory other meshes fit, which bounds have left out.
            seconds, choice = _without_host(searched.problem, executable=not best.obstacles)
        else:
            seconds, choice = _best_among(searched, others, executable=not best.obstacles)
        # Where the device has room nothing is offloaded, though that may gain a little.
        if np.isfinite(seconds) and seconds >= best.expected_s:
            gain = seconds / best.expected_s - 1
            yield Lever(lever=name, chosen=setting(best.choice), other=setting(choice), step_s=seconds, gain=gain)


def _best_among(searched: Sweep, others: npt.NDArray[np.bool_], *, executable: bool) -> tuple[float, Choice]:
    """The least seconds of the choices ``others``, [K], on the best layouts of a search; infinite if none fits."""
    strategies = searched.strategies
    score = np.where(searched.fits & others, searched.expected_s, np.inf).min(axis=1)
    near = np.concatenate([np.argsort(score, kind="stable")[:LOOK_AGAIN], _nearest_first(searched)[:LOOK_AGAIN]])
    choices = tuple(choice for choice, is_other in zip(strategies.choices, others, strict=True) if is_other)
    within = Strategies(strategies.layouts[np.unique(near)], choices)
    try:
        seconds, candidate = best_of(searched.problem, within, executable=executable)
    except RooftopError:
        # No stages of these layouts have a layer for each chunk.
        return np.inf, choices[0]
    return seconds, choices[candidate[1]]


def _without_host(problem: Problem, *, executable: bool) -> tuple[float, Choice]:
    """The least seconds of a search without host memory; infinite if nothing fits."""
    slice_ = problem.slice
    without = Slice(slice_.chip.replace(host_bytes=None), slice_.shape, slice_.num_slices)
    searched = sweep(replace(problem, slice=without), SweepOptions(executable=executable, ranked=1))
    seconds = float(searched.expected_s[searched.best]) if searched.fits.any() else np.inf
    return seconds, searched.strategies.choices[searched.best[1]]


#: The name of a lever, and its setting without any.
_HOST, _NOTHING = "checkpoints in host memory", "none"


def _offloaded(choice: Choice) -> str:
    return " and ".join(name for name, action in choice.policy.items() if action == "offload") or _NOTHING


def _offload_differs(choice: Choice, other: Choice) -> bool:
    return (_offloaded(choice) == _NOTHING) != (_offloaded(other) == _NOTHING)


def _remat_differs(choice: Choice, other: Choice) -> bool:
    return choice.remat != other.remat and not _offload_differs(choice, other)


def _chunks_differ(choice: Choice, other: Choice) -> bool:
    return choice.schedule == other.schedule and choice.chunks != other.chunks


def _switched(name: str, choice: Choice) -> str:
    return "on" if getattr(choice, name) else "off"


def _switch_differs(name: str, choice: Choice, other: Choice) -> bool:
    return bool(getattr(choice, name) != getattr(other, name))


#: The parts of a strategy that a search tries: its setting in words, and whether two choices differ in it.
_LEVERS: Mapping[str, tuple[Callable[[Choice], str], Callable[[Choice, Choice], bool]]] = {
    _HOST: (_offloaded, _offload_differs),
    "remat": (lambda choice: choice.remat, _remat_differs),
    "schedule": (lambda choice: choice.schedule, lambda choice, other: choice.schedule != other.schedule),
    "chunks": (lambda choice: str(choice.chunks), _chunks_differ),
} | {name.replace("_", " "): (partial(_switched, name), partial(_switch_differs, name)) for name in SWITCHES}
_OF_STAGES = ("schedule", "chunks")


def _best_that_runs(problem: Problem, within: Strategies) -> tuple[float, tuple[int, int]]:
    """The best of some strategies that the program runs, with its step time; the best of all where it runs none."""
    best = best_of(problem, within, executable=True)
    return best if np.isfinite(best[0]) else best_of(problem, within)


def _near_layouts(searched: Sweep) -> Layouts:
    """The best layouts of a search, among which a changed job looks again."""
    return searched.strategies.layouts[_nearest_first(searched)[:LOOK_AGAIN]]


def _nearest_first(searched: Sweep) -> Ints:
    """Layouts of a search, the best first, [C]."""
    score = np.where(searched.fits, searched.expected_s, np.inf).min(axis=1)
    order: Ints = np.argsort(score, kind="stable")
    return order


def _other_batches(searched: Sweep, best: TrainingPlan) -> Iterator[OtherBatch]:
    """Half and twice the batch, where they fit."""
    workload, near = searched.problem.workload, _near_layouts(searched)
    for seqs in (workload.batch_seqs // 2, 2 * workload.batch_seqs):
        tokens = seqs * workload.seq_len
        if not 1 <= tokens <= MOST_TOKENS:
            continue
        job = replace(searched.problem, workload=replace(workload, batch_tokens=tokens, asked_tokens=None))
        seconds, _ = best_of(job, _candidates(job, near, searched.strategies.choices), executable=not best.obstacles)
        if np.isfinite(seconds):
            yield OtherBatch(
                batch_tokens=tokens,
                step_s=seconds,
                mfu=best.mfu * (tokens / seconds) / best.tokens_per_s,
                days=job.days_at(seconds),
                cost_usd=job.cost_usd_at(seconds),
            )


def _candidates(problem: Problem, layouts: Layouts, choices: Sequence[Choice]) -> Strategies:
    """The layouts with choices, and with the switches that a search of ``problem`` would price."""
    for name, (setting, *others) in searched_switches(problem, layouts).items():
        if not others:
            pinned: dict[str, Any] = {name: setting}
            choices = tuple(replace(choice, **pinned) for choice in choices)
    return Strategies(layouts, choices)


@dataclass(frozen=True, kw_only=True)
class JobChange:
    """A job with one change. ``obstacle``: the reason why our program does not run it, beyond those of its spec."""

    text: str
    problem: Problem
    obstacle: str | None = None


def _changes(problem: Problem) -> Iterator[JobChange]:
    workload, assumptions, chip = problem.workload, problem.assumptions, problem.slice.chip
    if 2 * workload.batch_tokens <= MOST_TOKENS:
        larger = replace(workload, batch_tokens=2 * workload.batch_tokens)
        yield JobChange(text="twice the batch", problem=replace(problem, workload=larger))
    shares = problem.assumed.shares(problem.program.habits)
    for name, text in (
        ("weight_gather", "asynchronous weight AllGathers"),
        ("gradient_scatter", "asynchronous gradient ReduceScatters"),
    ):
        if shares[name] < 1:
            hidden = replace(assumptions, hidden={**assumptions.hidden, name: 1.0})
            yield JobChange(text=text, problem=replace(problem, assumptions=hidden))
    if problem.pinned("collective_matmuls") is False and problem.program.habits.hides_rings:
        yield JobChange(text="collective matmuls over tensor", problem=replace(problem, collective_matmuls=True))
    able = matmul_dtypes(problem.program.name, MATMUL_DTYPES)
    faster_dtypes = (dtype for dtype in able if chip.flops_per_s.get(dtype, 0.0) > chip.flops_per_s.get("bf16", 0.0))
    if problem.numerics.matmul == "bf16" and (dtype := next(faster_dtypes, None)) is not None:
        narrow = replace(problem, numerics=replace(problem.numerics, matmul=dtype))
        # Releases of frameworks have not all dtypes of the framework.
        with suppress(RooftopError):
            narrow.program  # noqa: B018
            yield JobChange(text=f"{dtype} matmuls in the layers", problem=narrow)
    # Published kernels were counted for heads of 128, over long sequences.
    obstacle = problem.program.other_kernels
    long = obstacle is not None and problem.model.d_head == 128 and workload.seq_len >= _LONG
    known = fractions(chip).kernels if long else {}
    for name in known:
        theirs = replace(assumptions, attention_kernels=name, fused_attention_gradients=True)
        yield JobChange(
            text=f"the attention kernels of published runs ({name})",
            problem=replace(problem, assumptions=theirs),
            obstacle=obstacle,
        )
    faster = _chip(problem, lambda figures: {"ici_bytes_per_s": 2 * figures.ici_bytes_per_s})
    yield JobChange(text=f"{chip.link} twice as fast", problem=faster)
    larger_hbm = _chip(problem, lambda figures: {"hbm_usable_bytes": 2 * figures.hbm_usable_bytes})
    yield JobChange(text="HBM twice as large", problem=larger_hbm)


def _new_obstacles(before: TrainingPlan, after: TrainingSpec) -> Iterator[str]:
    """Obstacles that ``after`` has and a plan has not."""
    framework, known = before.problem.framework.name, set(before.obstacles)
    return (obstacle for obstacle in training_obstacles(framework, after) if obstacle not in known)


def _chip(problem: Problem, change: Callable[[Any], dict[str, float]]) -> Problem:
    chip = problem.slice.chip.replace(**change(problem.slice.chip))
    return replace(problem, slice=Slice(chip, problem.slice.shape, problem.slice.num_slices))
