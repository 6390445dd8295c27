"""The nearest plan that programs run and memory holds, if the one asked for is none.

Its batch, mesh, slice, remat or number formats may be others. Of all such plans the nearest has the least product of
the ratio of batches, the ratio of chips and the loss of tokens/s a chip. The ratio by which devices move between the
axes of a mesh that was asked for counts little: another mesh costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, log

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Floats, Ints
from rooftop.arrays.rules import AXES, BATCH_AXES
from rooftop.capabilities import Choice
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import counted, format_seconds
from rooftop.frameworks.framework import runs_on
from rooftop.frameworks.programs import runnable_numerics, training_obstacles
from rooftop.hardware import Slice, catalogue, slice_sizes
from rooftop.models import count_params
from rooftop.plan.layouts import Layouts
from rooftop.plan.pricing import OnProgress
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.plan import PlanSummary, TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import PROBED, SweepOptions, free_layouts, searched_layouts, sweep

#: Mesh axes of searches over many slices: a stage rarely pays where these fit, and searching it takes most of the time.
OUTLINE_AXES: tuple[str, ...] = tuple(name for name in AXES if name != "stage")
#: The largest ratio of batches, and of chips, between the nearest plan and the one asked for.
MOST_BATCH_RATIO, MOST_CHIPS_RATIO = 16, 256
#: Weight of the devices that move between mesh axes: a choice, so that of plans about as good the most alike wins.
_MOVED = 1 / 16
#: Slices on which meshes with stages are sought, where none without stages runs.
_STAGED = 6
#: Larger slices on which a plan is sought that leaves the compiler room in HBM.
_ROOMY = 4


@dataclass(frozen=True, kw_only=True)
class NearestPlan(PlanSummary):
    """An executable plan that fits, with the slice, batch, matmul dtype and optimizer in which it may differ."""

    slice: str
    chips: int
    batch_seqs: int
    batch_tokens: int
    tokens_per_s: float
    matmul: str
    optimizer: str

    @property
    def text(self) -> str:
        """The plan in a few words, for an error."""
        sequences = counted(self.batch_seqs, "sequence")
        return f"{sequences} a step on {self.slice}: {format_seconds(self.expected_s)} a step"

    @classmethod
    def of(cls, plan: TrainingPlan) -> NearestPlan:
        """The record of a plan."""
        problem = plan.problem
        return cls(
            slice=problem.slice.name,
            chips=problem.slice.chips,
            batch_seqs=problem.workload.batch_seqs,
            batch_tokens=problem.workload.batch_tokens,
            tokens_per_s=plan.tokens_per_s,
            matmul=problem.formats.matmul,
            optimizer=problem.formats.optimizer,
            **vars(plan.summary),
        )


def nearest_executable(plan: TrainingPlan, on_progress: OnProgress | None = None) -> TrainingPlan | None:
    """The nearest plan that is executable and fits; None if there is none, as for a part that no program has.

    Where no mesh runs on the chip, as with a kernel that the model cannot have, it is on a chip of another kind.
    """
    problem = runnable(plan.problem)
    search = _Search(plan=plan, on_progress=on_progress)
    if refusal(problem) is not None:
        return search.on_other_chips(problem)
    state, own = smallest_chips(problem), problem.slice.chips
    for asked in _relaxed(problem) if own >= state else ():
        search.own_slice(asked)
    # A smaller slice does not fit where a larger one does not.
    sizes = [size for size in _slices(problem.slice) if plan.fits or size.chips > own]
    free = replace(problem, axes=None, mesh=None, remat=None, microbatches=None)
    # Between slices only copies and stages run: without stages one slice has to hold the state.
    search.other_slices(free, [size for size in sizes if size.chips // size.num_slices >= state], OUTLINE_AXES)
    if search.best is None:
        search.other_slices(free, [size for size in sizes if size.chips >= state][:_STAGED], AXES)
    return search.best


def nearest_with_room(plan: TrainingPlan, on_progress: OnProgress | None = None) -> TrainingPlan | None:
    """The best plan with the same batch that leaves the compiler its room in HBM, on the nearest slice that has one.

    What was asked of remat, microbatches and mesh is given up in turn, then the slice for a larger one.
    """
    problem = plan.problem
    if refusal(problem) is not None:
        return None
    free = replace(problem, axes=None, mesh=None, remat=None, microbatches=None)
    larger = [size for size in _slices(problem.slice) if size.chips > problem.slice.chips]
    own = list(_relaxed(problem))[1:]
    for asked in (*own, *(replace(free, slice=size) for size in larger[:_ROOMY])):
        axes = AXES if asked.slice == problem.slice else OUTLINE_AXES
        if on_progress is not None:
            on_progress(0, 1, f"the nearest plan with room in HBM: {asked.slice.name}")
        try:
            searched = sweep(asked, SweepOptions(executable=True, axes=axes, ranked=1))
        except RooftopError:
            # More pinned microbatches than this batch has sequences.
            continue
        if searched.fits.any():
            roomy = searched.plan(searched.best)
            if roomy.fits and roomy.leaves_room and not roomy.obstacles:
                return roomy
    return None


def runnable(problem: Problem) -> Problem:
    """The problem in the dtypes, and with the optimizer, that its program has."""
    asked = problem.numerics
    known = runnable_numerics(problem.framework.name, replace(problem.spec({}, _PLAIN), numerics=asked))
    return replace(problem, numerics=known)


def refusal(problem: Problem) -> str | None:
    """The reason why programs refuse a problem on one device already, so that no mesh can help; None if they do not."""
    return next(training_obstacles(problem.framework.name, problem.spec({}, _PLAIN)), None)


_PLAIN = Choice(remat=PROBED)


def smallest_chips(problem: Problem) -> float:
    """Chips below which weights and the optimizer's state alone do not fit, however they are sharded."""
    numerics = problem.numerics
    # With the book's bounds: its ten bytes a parameter.
    per_parameter = 10.0 if problem.bounds == "book" else numerics.weight_bytes + numerics.optimizer_bytes
    devices = count_params(problem.model).total * per_parameter / problem.capacity
    return devices / problem.slice.chip.devices


def _relaxed(problem: Problem) -> Iterator[Problem]:
    """The problem, then without its remat and microbatches, then without its mesh."""
    yield problem
    if problem.remat is not None or problem.microbatches is not None:
        yield replace(problem, remat=None, microbatches=None)
    if _is_pinned(problem):
        yield replace(problem, axes=None, mesh=None, remat=None, microbatches=None)


def _is_pinned(problem: Problem) -> bool:
    return problem.axes is not None or problem.mesh is not None


@dataclass(kw_only=True)
class _Search:
    """The nearest plan so far, and its distance: a sum of logarithms of ratios."""

    plan: TrainingPlan
    on_progress: OnProgress | None
    best: TrainingPlan | None = None
    distance: float = inf

    @property
    def pinned(self) -> bool:
        """True if the plan has a mesh that was asked for."""
        return _is_pinned(self.plan.problem)

    @cached_property
    def _asked_s(self) -> float:
        return self.plan.expected_s

    def own_slice(self, problem: Problem) -> None:
        """Look at all batches near, the nearest first; a mesh that the problem has is kept."""
        own = problem.workload.batch_seqs
        pinned = _is_pinned(problem)
        layouts = searched_layouts(problem) if pinned else free_layouts(problem, OUTLINE_AXES)
        if pinned or problem != self.plan.problem:
            # Else the plan is what a search of this very problem has come to.
            self._look(problem, hopeful=True)
        batches = _batches(layouts, own, smaller=not self.plan.fits)
        for batch in sorted(batches, key=lambda batch: (abs(log(batch / own)), batch)):
            if abs(log(batch / own)) >= self.distance:
                break
            tokens = batch * problem.workload.seq_len
            sized = replace(problem, workload=replace(problem.workload, batch_tokens=tokens))
            self._look(sized, within=layouts[batches[batch]], hopeful=True)

    def other_slices(self, problem: Problem, sizes: Sequence[Slice], axes: Sequence[str]) -> None:
        """Look at meshes of ``axes`` on ``sizes``, the nearest first, with the batch or one that is easier to split."""
        own, batch = problem.slice.chips, problem.workload.batch_seqs
        for size in sizes:
            if abs(log(size.chips / own)) >= self.distance:
                break
            for seqs in dict.fromkeys((batch, _rounded(batch))):
                workload = replace(problem.workload, batch_tokens=seqs * problem.workload.seq_len)
                if self._look(replace(problem, slice=size, workload=workload), axes=axes):
                    break

    def on_other_chips(self, problem: Problem) -> TrainingPlan | None:
        """The plan on a chip of another kind that programs run, the most alike in FLOP/s, on slices about as fast."""
        asked = problem.slice
        name = problem.framework.name
        others = [chip for chip in catalogue().values() if chip.switched != asked.chip.switched and runs_on(name, chip)]
        peak = asked.chip.flops_per_s["bf16"]
        for chip in sorted(others, key=lambda chip: abs(log(chip.flops_per_s["bf16"] / peak))):
            sizes = slice_sizes(chip, asked.chips * MOST_CHIPS_RATIO)
            sizes.sort(key=lambda size: abs(log(size.flops_per_s("bf16") / asked.flops_per_s("bf16"))))
            free = replace(
                problem,
                slice=sizes[0],
                axes=None,
                mesh=None,
                remat=None,
                microbatches=None,
                assumptions=Assumptions(),
                framework=replace(problem.framework, settings={}),
            )
            if refusal(free) is not None:
                continue
            for size in [size for size in sizes if size.chips // size.num_slices >= smallest_chips(free)][:_ROOMY]:
                if self._look(replace(free, slice=size), axes=OUTLINE_AXES):
                    return self.best
        return None

    def _look(
        self, problem: Problem, within: Layouts | None = None, axes: Sequence[str] = AXES, *, hopeful: bool = False
    ) -> bool:
        """Keep the nearest plan of a search, if it is nearer than the best; True if a plan runs and fits.

        ``hopeful``: only where bounds leave hope of a nearer one; False without it.
        """
        if self.on_progress is not None:
            own, chips = problem.workload.batch_seqs, problem.slice.name
            self.on_progress(0, 1, f"the nearest plan that runs: {own:,} sequences on {chips}")

        def worth(devices: Ints, seconds: Floats) -> bool:
            bounds = zip(devices[np.isfinite(seconds)], seconds[np.isfinite(seconds)].tolist(), strict=True)
            return any(self._distance(problem, shape, least_s) < self.distance for shape, least_s in bounds)

        def farther(devices: Ints, seconds: Floats) -> Floats:
            """Seconds times the factor by which a mesh is farther from the one asked for, as in ``_distance``."""
            moved = np.exp([_MOVED * _moved(self.plan.mesh.shape, shape) for shape in devices])
            least_s = self._asked_s * self._eased(problem)
            return np.maximum(seconds, least_s) * moved[:, None]

        options = SweepOptions(
            executable=True,
            axes=axes,
            within=within,
            ranked=1,
            worth=worth if hopeful else None,
            # Of meshes that nobody asked for the fastest is the nearest.
            score=farther if self.pinned else None,
        )
        try:
            searched = sweep(problem, options)
        except RooftopError:
            # More pinned microbatches than this batch has sequences, or more chunks than layers.
            return False
        if not searched.fits.any():
            return False
        for candidate in (searched.best, *searched.alternatives(len(searched.fits) if self.pinned else 0)):
            devices, seconds = searched.strategies.layouts.devices[candidate[0]], searched.expected_s[candidate]
            if (distance := self._distance(problem, devices, float(seconds))) < self.distance:
                plan = searched.plan(candidate)
                if plan.fits and not plan.obstacles:
                    self.best, self.distance = plan, distance
        return True

    def _distance(self, own: Problem, devices: Ints, step_s: float) -> float:
        """The distance of a plan of ``own`` on a mesh of ``devices`` along each axis, [A]."""
        asked = self.plan.problem
        batches = own.workload.batch_tokens / asked.workload.batch_tokens
        chips = own.slice.chips / asked.slice.chips
        seconds = step_s / self._asked_s
        moved = _moved(self.plan.mesh.shape, devices) if self.pinned else 0.0
        return abs(log(batches)) + abs(log(chips)) + _MOVED * moved + max(0.0, log(seconds / self._eased(own)))

    def _eased(self, own: Problem) -> float:
        """The ratio of steps' seconds at which a plan of ``own`` has as many tokens/s a chip as the one asked for."""
        asked = self.plan.problem
        batches = own.workload.batch_tokens / asked.workload.batch_tokens
        return batches * asked.slice.chips / own.slice.chips


def _batches(layouts: Layouts, own: int, *, smaller: bool) -> dict[int, npt.NDArray[np.intp]]:
    """Batches near ``own``, in sequences, and the layouts to look at with each: those over which it divides.

    Of halves of the batch too if it may be ``smaller``.
    """
    ways = layouts.along(*BATCH_AXES)
    members: dict[int, list[npt.NDArray[np.intp]]] = {}
    for power in range(MOST_BATCH_RATIO.bit_length() if smaller else 1):
        below = own // 2**power // ways * ways
        for near in (below, below + ways):
            for batch in np.unique(near[(near > 0) & (near != own)]):
                if max(batch / own, own / batch) <= (MOST_BATCH_RATIO if smaller else 2):
                    members.setdefault(int(batch), []).append(np.flatnonzero(near == batch))
    return {batch: np.unique(np.concatenate(parts)) for batch, parts in members.items()}


def _rounded(batch: int) -> int:
    """A batch within an eighth, in sequences, that more meshes split: the nearest of three or four binary digits."""
    unit = 1 << max(0, batch.bit_length() - 3)
    return (2 * batch + unit) // (2 * unit) * unit


def _slices(own: Slice) -> list[Slice]:
    """Other slices of the same chip, the nearest in chips first."""
    sizes = slice_sizes(own.chip, own.chips * MOST_CHIPS_RATIO)
    others = [size for size in sizes if size.name != own.name and size.chips * MOST_CHIPS_RATIO >= own.chips]
    return sorted(others, key=lambda size: (abs(log(size.chips / own.chips)), size.chips))


def _moved(sizes: Mapping[str, int], devices: Ints) -> float:
    """The logarithm of the ratio by which devices move between mesh axes: from ``sizes`` to ``devices``, [A]."""
    ratios = [log(size / sizes.get(name, 1)) for name, size in zip(AXES, devices.tolist(), strict=True)]
    return min(sum(max(ratio, 0.0) for ratio in ratios), sum(max(-ratio, 0.0) for ratio in ratios))
