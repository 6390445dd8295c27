"""Plans of training runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rooftop.arrays.rules import STAGE_AXES
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import make_folder, write_json, write_text
from rooftop.core.quantities import format_bytes, format_seconds, parse_count, parse_quantity
from rooftop.core.timelines import perfetto, xprof
from rooftop.frameworks.answers import FrameworkOffer, StatedConfiguration
from rooftop.frameworks.framework import FRAMEWORKS
from rooftop.hardware import MOST_CHIPS, Chip, Slice, is_slice, slice_sizes
from rooftop.library.results import Result, ledger_rows
from rooftop.plan.frameworks.offers import offers_of, runnable_offers
from rooftop.plan.frameworks.unused import unused_settings
from rooftop.plan.pricing import OnProgress
from rooftop.plan.training import answer as training
from rooftop.plan.training.answer import TrainingAnswer, TrainingAnswerDocument
from rooftop.plan.training.comparison import (
    MOST_SEARCHED_CHIPS,
    Aim,
    Limits,
    SliceComparison,
    compare,
    searched_on,
)
from rooftop.plan.training.compiled import CompiledPlans, OnCandidate
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.search import RANKED
from rooftop.present.documents import document
from rooftop.requests.configured import configured_request
from rooftop.requests.function import of_request
from rooftop.requests.inputs import calibrated_places, chip_of, priced_places, slice_of
from rooftop.requests.planning import PlanTraining
from rooftop.requests.problems import training_problem
from rooftop.roofline.rates import device_stats
from rooftop.simulate.pipeline import of_plan
from rooftop.simulate.planned import planned_lanes

#: The longest run, a century, and the largest budget in dollars: more is a slip of the keyboard.
LARGEST_DAYS, LARGEST_BUDGET = 36_500, 1e12
#: The most plans that are compiled: each takes minutes.
MOST_COMPILED = 100

if TYPE_CHECKING:
    from rooftop.plan.training.problem import Problem
    from rooftop.plan.training.search import Sweep
    from rooftop.present.document import Document
    from rooftop.requests.likes import SliceLike, SlicesLike


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingPlanResult(Result):
    """The best plan of a training run, the runners-up, and the changes that would help."""

    request: PlanTraining
    answer: TrainingAnswer
    comparison: SliceComparison | None = None
    """The slices that were compared, if there was more than one slice or a limit."""
    frameworks: tuple[FrameworkOffer, ...] = ()
    """The best plans of frameworks for the same job, if they were compared."""
    stated: StatedConfiguration | None = None
    """The configuration that was priced, with what it leaves unused."""
    compiled: CompiledPlans | None = None
    """The best plans next to their compiled programs, if they were compiled."""

    @property
    def plan(self) -> TrainingPlan:
        """The best plan."""
        return self.answer.plan

    @cached_property
    def record(self) -> TrainingAnswerDocument:
        """plan.json as a record."""
        return replace(
            self.answer.document,
            comparison=None if self.comparison is None else self.comparison.document,
            compiled=self.compiled,
            pipeline=of_plan(self.plan) if self.plan.mesh.size(*STAGE_AXES) > 1 else None,
            request=self.request.to_json(),
            stated=self.stated,
            frameworks=self.frameworks,
        )

    def to_json(self) -> dict[str, object]:
        """plan.json: all that is needed to build, compile and run the program."""
        return self.record.to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """The planned ledger."""
        return ledger_rows(self.plan.ledger)

    @property
    def summary(self) -> str:
        """Mesh, step time, MFU and memory."""
        plan = self.plan
        mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.shape.items() if size > 1) or "one device"
        fits = "" if plan.fits else "does not fit: "
        return (
            f"{plan.problem.model.name} on {plan.problem.slice.name}: {mesh}\n"
            f"{fits}{format_seconds(plan.expected_s)} a step expected, bound by {plan.bound}, MFU {plan.mfu:.1%}, "
            f"{format_bytes(plan.memory_bytes)} of {format_bytes(plan.problem.capacity)} a device"
            + ("" if self.compiled is None else f"\n{self.compiled.verdict}")
        )

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible, with the nearest that is one, if no plan fits, no program runs it, or it misses a limit.

        Plans that were compiled have to fit by the compiler.
        """
        self.answer.require_fit()
        self.answer.require_executable()
        if self.compiled is not None and self.compiled.best is None:
            problem = self.plan.problem
            raise Infeasible(
                f"{problem.model.name} on {problem.slice.name}: {self.compiled.verdict}", self.compiled.nearest_text
            )
        if self.comparison is not None:
            self.comparison.require_met()

    @property
    def document(self) -> Document:
        """The plan, its reasons and alternatives, and the planned timeline."""
        return document(self.record, lanes=[planned_lanes(self.plan)])

    def write_plan(self, path: Path | str) -> None:
        """Write plan.json. Raises RooftopError if the path cannot be written."""
        write_json(Path(path), self.to_json())

    def write_configuration(self, folder: Path | str) -> None:
        """Write the files of the framework's configuration, and of its command as ``run.sh`` if no file runs it.

        Raises RooftopError for a plan without one, and if the folder cannot be written.
        """
        configuration = self.record.configuration
        if configuration is None:
            program = self.plan.problem.program
            accepted = (
                "this with --framework megatron, maxtext or torchtitan" if program.is_ours else "a plan that runs"
            )
            raise RooftopError("config", str(folder), accepted)
        try:
            make_folder(Path(folder))
        except OSError as error:
            raise RooftopError("config", str(folder), f"a folder that can be written ({error.strerror})") from None
        files = dict(configuration.files)
        if not any(name.endswith(".sh") for name in files):
            files["run.sh"] = f"#!/bin/bash\n{configuration.command}\n"
        for name, text in files.items():
            write_text(Path(folder) / name, text)

    def write_perfetto(self, path: Path | str) -> None:
        """Write the planned timeline for ui.perfetto.dev."""
        write_text(Path(path), json.dumps(perfetto.trace(planned_lanes(self.plan)), allow_nan=False))

    def write_xprof(self, folder: Path | str) -> None:
        """Write the planned timeline as a profile for XProf and TensorBoard."""
        lanes = planned_lanes(self.plan, every_trip=True)
        stats = device_stats(self.plan.problem.slice.chip)
        xprof.write(xprof.xspace(lanes, program="planned", device=stats), Path(folder), run="planned")


@of_request(PlanTraining)
def plan_training(request: PlanTraining, on_progress: OnProgress | None = None) -> TrainingPlanResult:
    """Plan a training run: search mesh, layout, remat and microbatches, and predict time, memory and cost.

    With several slices, chips without a shape, or a limit, compare slices and plan the one that is recommended: the
    cheapest that is in time; the fastest within ``budget`` or ``chips`` without ``days``; or the ``smallest``.
    With ``compile`` the best plans of a slice are compiled, and the one with the fastest compiled schedule that fits is
    the answer. ``on_progress`` is called with mesh shapes, slices or compiled plans that are done, their number, and a
    label.

    A plan that does not fit, that no program runs or that misses a limit is returned: ``raise_if_infeasible`` raises
    Infeasible for it. Raises Infeasible if slices are compared and nothing fits any, and RooftopError naming the
    field that is wrong.
    """
    return planned_training(request, on_progress)


def planned_training(
    request: PlanTraining, on_progress: OnProgress | None = None, on_candidate: OnCandidate | None = None
) -> TrainingPlanResult:
    """``plan_training``, with a callback for each plan that was compiled."""
    limits = _limits(request)
    places, comparing = _places(request.on, limits, request.smallest)
    places = calibrated_places(priced_places(places, request.price), request.calibration)
    if limits.days is not None or limits.budget_usd is not None:
        _require_a_price(places)
    batch_given = request.batch_tokens is not None or request.batch_seqs is not None
    first = next(iter(places.values()))[0]
    if request.framework == "all":
        return _of_all_frameworks(request, first, on_progress, comparing=comparing)
    if request.configuration is not None:
        if comparing:
            raise RooftopError(
                "from", str(request.configuration), "this with one slice, such as h100:8x32, and no limits"
            )
        return _planned_configuration(request, first, on_progress)
    problem = training_problem(request, first, comparing=comparing)
    count = parse_count(request.alternatives, "alternatives")
    compiled_count = _compiled_count(request, problem, comparing=comparing)
    if not comparing:
        searched, compiled = training.search_of(problem, on_progress, ranked=max(RANKED, compiled_count)), None
        if compiled_count:
            searched, compiled = _compiled(searched, compiled_count, on_progress, on_candidate)
        answer = training.answer_of(searched, alternatives=count, on_progress=on_progress)
        return TrainingPlanResult(request=request, answer=answer, compiled=compiled)
    aim: Aim = "chips" if request.smallest else "time" if limits.days is None else "cost"
    compared = compare(problem, places, limits, aim, on_progress)
    answer = training.answer_of(searched_on(compared.best), alternatives=count, batch_given=batch_given)
    return TrainingPlanResult(request=request, answer=answer, comparison=compared)


def _of_all_frameworks(
    request: PlanTraining, slice_: Slice, on_progress: OnProgress | None, *, comparing: bool
) -> TrainingPlanResult:
    """The plan of the framework whose interval has the least middle, next to the best of each."""
    for name, value in (
        ("release", request.release), ("set", request.framework_settings), ("from", request.configuration),
        ("lora", request.lora), ("compile", request.compile), ("on", request.on if comparing else None),
    ):  # fmt: skip
        if value is not None:
            raise RooftopError(name, str(value), "this with one framework, not --framework all")
    problem = training_problem(replace(request, framework=FRAMEWORKS[0]), slice_)
    count = parse_count(request.alternatives, "alternatives")
    offers = list(offers_of(problem, on_progress=on_progress))
    runs = [(offer, searched) for offer, searched in offers if searched is not None]
    # Frameworks are off by different factors: intervals say by how much.
    best, searched = min(runs, key=lambda entry: (entry[0].obstacle is not None, entry[0].likely_s))
    answer = training.answer_of(searched, alternatives=count, on_progress=on_progress)
    others = sorted((offer for offer, _ in offers), key=lambda offer: (offer.obstacle is not None, offer.likely_s))
    return TrainingPlanResult(request=request, answer=answer, frameworks=(best, *(o for o in others if o is not best)))


def with_best_known(result: TrainingPlanResult, on_progress: OnProgress | None = None) -> TrainingPlanResult:
    """A searched plan of rooftop's own program next to the best of the other frameworks that run on the chip.

    A plan of a mesh that was asked for, of another framework or of compared slices stays alone.
    """
    problem, request = result.plan.problem, result.request
    pinned = problem.axes is not None or problem.mesh is not None or result.comparison is not None
    if pinned or request.framework != FRAMEWORKS[0] or request.compile is not None or problem.adapters is not None:
        return result
    known = [offer for offer in runnable_offers(problem, on_progress) if offer.obstacle is None]
    return replace(result, frameworks=tuple(sorted(known, key=lambda offer: offer.likely_s)[:1]))


def _planned_configuration(request: PlanTraining, slice_: Slice, on_progress: OnProgress | None) -> TrainingPlanResult:
    """The plan of a configuration, and the settings that would make it faster."""
    configured, stated = configured_request(request, slice_)
    problem = training_problem(configured, slice_)
    answer = training.plan_training(
        problem, alternatives=parse_count(request.alternatives, "alternatives"), on_progress=on_progress
    )
    unused = unused_settings(problem, answer.plan)
    shown = StatedConfiguration(
        file=Path(str(request.configuration)).name, unpriced=stated.unpriced, notes=stated.notes, unused=tuple(unused)
    )
    return TrainingPlanResult(request=request, answer=answer, stated=shown)


def _compiled_count(request: PlanTraining, problem: Problem, *, comparing: bool) -> int:
    """Plans to compile, 0 for none. Raises RooftopError where they cannot be, before anything is searched."""
    if request.compile is None:
        return 0
    count = parse_count(request.compile, "compile", largest=MOST_COMPILED)
    if comparing:
        raise RooftopError("compile", count, "this with one slice, such as --on v5p:16x16x16, and no limits")
    if not problem.program.is_ours:
        accepted = "this with rooftop's own program, --framework rooftop: XLA compiles no other"
        raise RooftopError("compile", count, f"{accepted} (got --framework {problem.program.name})")
    from rooftop.compiler.compiling import require_compiler

    require_compiler(problem.slice.chip.kind)
    return count


def _compiled(
    searched: Sweep, count: int, on_progress: OnProgress | None, on_candidate: OnCandidate | None
) -> tuple[Sweep, CompiledPlans | None]:
    """The search with the plan that compiles to the fastest step, and the plans that were compiled.

    None are compiled if the best does not fit, or no program runs it.
    """
    best = searched.plan(searched.best)
    if not best.fits or best.obstacles:
        return searched, None
    from rooftop.compiler.compiling import compiler_versions
    from rooftop.runs.environment import uninterrupted

    with uninterrupted():
        from rooftop.tune.candidates import CandidateCompiler
        from rooftop.tune.compilations import usual_jobs

    compiler = CandidateCompiler(
        jobs=usual_jobs(),
        versions=compiler_versions(searched.problem.slice.chip.kind),
        on_progress=on_progress,
        on_candidate=on_candidate,
    )
    return compiler.fastest(searched, count)


def _limits(request: PlanTraining) -> Limits:
    days, budget, chips = request.days, request.budget, request.chips
    dollars = None if budget is None else str(budget).removeprefix("$")
    return Limits(
        days=None if days is None else parse_quantity(days, "days", largest=LARGEST_DAYS),
        budget_usd=None if dollars is None else parse_quantity(dollars, "budget", largest=LARGEST_BUDGET),
        chips=None if chips is None else parse_count(chips, "chips", largest=MOST_CHIPS),
    )


def _require_a_price(places: Mapping[str, Sequence[Slice]]) -> None:
    """Raise RooftopError, with the chips, if none has a price: their dollars cannot be compared."""
    chips = dict.fromkeys(slices[0].chip for slices in places.values())
    if all(spec.price_usd_per_hour is None for spec in chips):
        names = [spec.name for spec in chips]
        prices = ",".join(f"{name}=USD" for name in names)
        raise RooftopError("price", None, f"dollars per chip-hour, --price {prices}: no list price is known")


def _places(on: SlicesLike, limits: Limits, smallest: bool) -> tuple[dict[str, list[Slice]], bool]:
    """The slices that are meant, by the names that were given, and whether they are compared. Raises RooftopError."""
    if isinstance(on, str):
        names: Sequence[SliceLike | Chip] = [name.strip() for name in on.split(",")]
    else:
        names = on if isinstance(on, Sequence) else [on]
    is_open = smallest or limits != Limits()
    places = {}
    for name in names:
        # A record of a slice has that of its chip.
        is_chip = isinstance(name, Chip) or (isinstance(name, str) and not is_slice(name))
        is_chip = is_chip or (isinstance(name, Mapping) and "chip" not in name)
        if not smallest and not is_chip:
            slice_ = slice_of(cast("SliceLike", name))
            places[slice_.name] = [slice_]
            continue
        spec = chip_of(cast("Chip | str", name)) if is_chip else slice_of(cast("SliceLike", name)).chip
        if not is_open:
            accepted = "with a shape, such as v5p:16x16x16; or with --days, --budget, --chips or --smallest"
            raise RooftopError("on", spec.name, accepted)
        sizes = slice_sizes(spec, MOST_SEARCHED_CHIPS if limits.chips is None else limits.chips)
        if not sizes:
            raise RooftopError("chips", limits.chips, f"at least the smallest slice of {spec.name}")
        places[spec.name] = sizes
    return places, is_open or len(places) > 1
