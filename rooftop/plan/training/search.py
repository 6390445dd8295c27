"""The search over sharding, remat and microbatches, over every layout that the torus carries.

Branch and bound. Memory depends only on how many devices each axis has, and time grows with the price of every
collective; so a mesh shape priced with the best link that any of its layouts gives each axis is a lower bound on all of
them. Layouts are priced in the order of that bound, until none that is left could be among the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from sys import float_info
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Floats, Ints
from rooftop.arrays.rules import (
    AXES,
    BATCH_AXES,
    COLUMN_AXES,
    EXPERT_AXES,
    GATHER_AXES,
    STAGE_AXES,
    ways,
)
from rooftop.capabilities import Choice
from rooftop.core.errors import RooftopError
from rooftop.core.rounding import next_multiple
from rooftop.frameworks.programs import training_obstacles
from rooftop.frameworks.remat import remat_policies
from rooftop.models.activations import parse_policy, searched_policies
from rooftop.models.config import ModelConfig
from rooftop.models.segments import stage_parts
from rooftop.models.widths import MOST_PADDING, ModelWidths
from rooftop.plan.layouts import Layouts, enumerate_layouts, from_mesh, mesh_shapes, ranked_layouts, shapes_alone
from rooftop.plan.pricing import OnProgress
from rooftop.plan.training.memory import host_bytes
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.pricing import expected_s
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.strategies import Strategies, choices
from rooftop.plan.training.work.rows import training_work

#: The batch in one piece: padding of layouts, before any other choice.
_WHOLE = Choice(remat="none")
#: The remat policy with which meshes are tried: every program has it.
PROBED = "block"
#: Candidates priced in one go: large enough to spread NumPy's overhead, small enough to stay in cache.
BLOCK = 65_536
#: Layouts of which the choices are looked at together.
ROWS = 512
#: Mesh shapes to be ranked exactly: the winner and the alternatives that a plan shows.
RANKED = 6
#: Accepted meshes, the nearest first, among which one that programs run is sought as an example.
_EXAMPLES = 200
#: Mesh shapes priced before those that are left are looked at: can they still matter? Each time twice as many.
TOGETHER = 8


#: True where something holds.
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The candidates that were priced, with expected step time and memory, [C, K].

    ``allowed`` is False where much would be padding, or a chunk of a stage would have no layer. ``limit_bytes`` is the
    memory within which the best is sought.
    ``searched`` counts all candidates, also those excluded by a bound. ``chosen`` is the best by something else than
    the expected time, such as the time of the compiled program.
    """

    problem: Problem
    strategies: Strategies
    expected_s: Floats
    memory_bytes: Floats
    allowed: Mask
    limit_bytes: float
    searched: int
    chosen: tuple[int, int] | None = None

    @property
    def fits(self) -> Mask:
        """Candidates that are allowed and stay within ``limit_bytes``, [C, K]."""
        fits: Mask = self.allowed & (self.memory_bytes <= self.limit_bytes)
        return fits

    @cached_property
    def best(self) -> tuple[int, int]:
        """The chosen candidate, or the fastest that fits; if none does, the fastest of those of least memory."""
        if self.chosen is not None:
            return self.chosen
        if self.fits.any():
            # Among equals the one with less memory: a tie in time is common when nothing is exposed.
            return _least(np.where(self.fits, self.expected_s, np.inf), self.memory_bytes)
        return _least(np.where(self.allowed, self.memory_bytes, np.inf), self.expected_s)

    def alternatives(self, count: int) -> list[tuple[int, int]]:
        """The fastest candidate that fits of each other mesh shape, fastest first."""
        score = np.where(self.fits, self.expected_s, np.inf)
        chosen = np.argmin(score, axis=1)
        ranked = np.argsort(score[np.arange(len(score)), chosen], kind="stable")
        devices = self.strategies.layouts.devices
        seen = {tuple(devices[self.best[0]])}
        fastest: list[tuple[int, int]] = []
        for index in ranked:
            key = tuple(devices[index])
            if key not in seen and np.isfinite(score[index, chosen[index]]):
                seen.add(key)
                fastest.append((int(index), int(chosen[index])))
                if len(fastest) == count:
                    break
        return fastest

    def plan(self, candidate: tuple[int, int]) -> TrainingPlan:
        """The plan of one candidate."""
        return plan_of(self.problem, self.strategies, candidate)


def _least(score: Floats, then: Floats) -> tuple[int, int]:
    """The candidate of least ``score``, [C, K]; among equals that of the least of ``then``."""
    ties = np.argwhere(score <= score.min() * (1 + 1e-9))
    layout, choice = ties[np.argmin(then[ties[:, 0], ties[:, 1]])]
    return int(layout), int(choice)


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The candidates that a sweep considers, and when it stops.

    It prices candidates, best bound first, until the ``ranked`` best mesh shapes are known; all if ``exhaustive``.
    ``executable``: of each shape only what programs run is allowed; ``axes``: the mesh axes of a search; ``within``:
    the layouts to price, in place of all; ``roomy``: leave the compiler room if a candidate does. ``worth``: called
    with the devices of several shapes, [S, A], and lower bounds of their seconds, [S]; if it returns False, no
    candidate is priced. ``score``: the best shapes are those of the least score, which rises with seconds; called with
    devices, [S, A], and seconds, [S, K]. By default they are the fastest.
    """

    exhaustive: bool = False
    executable: bool = False
    axes: Sequence[str] = AXES
    within: Layouts | None = None
    ranked: int = RANKED
    roomy: bool = True
    worth: Callable[[Ints, Floats], bool] | None = None
    score: Callable[[Ints, Floats], Floats] | None = None
    on_progress: OnProgress | None = None

    def scored(self, devices: Ints, seconds: Floats) -> Floats:
        """The score of shapes of ``devices``, [S, A], by their ``seconds``, [S, K]."""
        return seconds if self.score is None else self.score(devices, seconds)


#: The search of a plan: any candidate, and the fastest are the best.
FASTEST = SweepOptions()


def sweep(problem: Problem, options: SweepOptions = FASTEST) -> Sweep:
    """Price candidates, best bound first, until the best mesh shapes are known.

    Raises RooftopError if a given mesh or number of microbatches cannot be.
    """
    layouts = searched_layouts(problem, options.axes) if options.within is None else options.within
    chosen = searched_choices(problem, layouts)
    layouts, starts, finer = layouts.by_shape()
    whole = Strategies(layouts, chosen)
    if len(starts) == 1:
        return _of_one_shape(problem, whole, options)
    search = _ShapeSearch.of(problem, options, whole, starts, finer)
    bounds = search.bounds_s()
    if options.worth is not None and not options.worth(search.shapes, bounds.min(axis=1)):
        return search.unpriced
    search.price(bounds)
    if options.executable and search.limit < problem.capacity and not np.isfinite(list(search.best.values())).any():
        # What leaves the compiler room is not run; what is run may still fit.
        return sweep(problem, replace(options, roomy=False))
    return search.result


def _of_one_shape(problem: Problem, whole: Strategies, options: SweepOptions) -> Sweep:
    """The candidates of one mesh shape.

    There is nothing to leave out: a bound would cost as much as the answer.
    """
    allowed = allowed_candidates(problem, whole)
    memory_bytes = np.broadcast_to(_memory(problem, whole[:1]), whole.shape)
    allowed = allowed & _needed(whole, allowed & (memory_bytes <= limit_bytes(problem, allowed, memory_bytes)))
    worth_it = _worth_pricing(allowed, memory_bytes, problem.capacity)
    seconds = _seconds(problem, whole, None if options.exhaustive else worth_it)
    if options.executable:
        fitting = np.where(allowed & (memory_bytes <= problem.capacity), seconds, np.inf).min(axis=0)
        allowed = allowed & ~_refused(problem, whole.layouts.devices[0], whole.choices, fitting)
    return Sweep(
        problem=problem,
        strategies=whole,
        expected_s=seconds,
        memory_bytes=memory_bytes,
        allowed=allowed,
        limit_bytes=limit_bytes(problem, allowed, memory_bytes),
        searched=int(allowed.sum()),
    )


@dataclass(kw_only=True)
class _ShapeSearch:
    """A search over S mesh shapes, of which each has the layouts from ``starts``, [S], to the next one's.

    Layouts are cut at ``finer`` where bounds are to be closer. ``cheapest`` has the best price that a layout of each
    shape has for every collective. ``allowed``, ``memory`` and ``feasible`` are of shapes, [S, K]: memory depends on
    the shape alone, and costs little next to time, so that most candidates are left out for it. ``best`` is the least
    score of each shape that was priced; ``priced`` are seconds of layouts, their indices and their shapes.
    """

    problem: Problem
    options: SweepOptions
    whole: Strategies
    starts: Ints
    finer: Ints
    cheapest: Strategies
    allowed: Mask
    memory: Floats
    limit: float
    feasible: Mask
    searched: int
    best: dict[int, float] = field(default_factory=dict)
    priced: list[tuple[Floats, Ints, Ints]] = field(default_factory=list)

    @classmethod
    def of(cls, problem: Problem, options: SweepOptions, whole: Strategies, starts: Ints, finer: Ints) -> _ShapeSearch:
        """The search before anything is priced."""
        cheapest = whole.cheapest(starts)
        allowed, memory = allowed_candidates(problem, cheapest), _memory(problem, cheapest)
        limit = limit_bytes(problem, allowed, memory) if options.roomy else problem.capacity
        allowed = allowed & _needed(cheapest, allowed & (memory <= limit))
        return cls(
            problem=problem,
            options=options,
            whole=whole,
            starts=starts,
            finer=finer,
            cheapest=cheapest,
            allowed=allowed,
            memory=memory,
            limit=limit,
            feasible=_worth_pricing(allowed, memory, limit),
            searched=int(np.sum(allowed.sum(axis=1) * np.diff(starts, append=len(whole.layouts)))),
        )

    @cached_property
    def shapes(self) -> Ints:
        """Devices along each axis, [S, A]."""
        return self.whole.layouts[self.starts].devices

    def bounds_s(self) -> Floats:
        """Lower bounds of the seconds of each shape, [S, K], infinite where a choice is not feasible."""
        possible = np.flatnonzero(self.feasible.any(axis=1))
        bounds = np.full(self.cheapest.shape, np.inf)
        bounds[possible] = _bounds_s(self.problem, self.cheapest[possible], self.feasible[possible])
        return bounds

    def price(self, bounds: Floats) -> None:
        """Price the shapes in the order of their ``bounds``, until none that is left could be among the best."""
        problem, options, count = self.problem, self.options, len(self.starts) if self.options.exhaustive else TOGETHER
        left = _LayoutGroups(
            shape=np.arange(len(self.starts)),
            starts=self.starts,
            ends=np.append(self.starts[1:], len(self.whole.layouts)),
            bounds=options.scored(self.shapes, bounds),
        ).in_order
        slowest = np.inf
        while len(left):
            if options.on_progress is not None:
                options.on_progress(len(self.best), len(self.starts), f"mesh shapes on {problem.slice.name}")
            near, left, count = left[:count], left[count:], 2 * count
            if self.priced and len(self.finer) > len(self.starts):
                near = self._closer(near, slowest)
            if options.executable:
                near = self._run(near)
            if len(near):
                self._price(near, slowest)
                slowest = _slowest(self.best, options.ranked)
                left = left.within(slowest)

    def _closer(self, near: _LayoutGroups, slowest: float) -> _LayoutGroups:
        """The groups cut finer, and those left that could be among the best.

        Bounds are loose where one layout of a shape has cheap sums between slices, and another cheap gathers.
        """
        could = self.feasible[near.shape] & (near.bounds <= slowest)
        near = _finer(self.problem, self.whole, could, near, self.finer)
        scores = self.options.scored(self.shapes[near.shape], near.bounds)
        return replace(near, bounds=scores).in_order.within(slowest)

    def _run(self, near: _LayoutGroups) -> _LayoutGroups:
        """The groups whose shapes a program runs; one shape is priced in any case, so that there is an answer."""
        plain = self.whole.choices[0]
        runs = np.array([runs_some(self.problem, self.shapes[shape], plain) for shape in near.shape], np.bool_)
        self.allowed[near.shape[~runs]] = self.feasible[near.shape[~runs]] = False
        return near[runs] if runs.any() or self.priced else near[:1]

    def _price(self, near: _LayoutGroups, slowest: float) -> None:
        """Price all layouts of the groups; of ``executable`` ones, leave out the choices that no program runs."""
        problem, options = self.problem, self.options
        members, of_shape = near.members, np.repeat(near.shape, near.ends - near.starts)
        could = np.repeat(self.feasible[near.shape] & (near.bounds <= slowest), near.ends - near.starts, axis=0)
        seconds = _seconds(problem, self.whole[members], None if options.exhaustive else could)
        fitting = np.where(self.feasible[of_shape], seconds, np.inf)
        for shape in np.unique(near.shape).tolist():
            by_choice = fitting[of_shape == shape].min(axis=0)
            if options.executable:
                refused = _refused(problem, self.shapes[shape], self.whole.choices, by_choice)
                self.allowed[shape] &= ~refused
                self.feasible[shape] &= ~refused
                by_choice = np.where(refused, np.inf, by_choice)
            least = options.scored(self.shapes[shape][None], by_choice.min().reshape(1, 1))
            self.best[shape] = min(self.best.get(shape, np.inf), float(least[0, 0]))
        self.priced.append((seconds, members, of_shape))

    @property
    def unpriced(self) -> Sweep:
        """The sweep of a search that is not worth it, without a candidate."""
        none = np.zeros((0, self.whole.shape[1]))
        return Sweep(
            problem=self.problem,
            strategies=self.whole[:0],
            expected_s=none,
            memory_bytes=none,
            allowed=none > 0,
            limit_bytes=self.limit,
            searched=self.searched,
        )

    @property
    def result(self) -> Sweep:
        """The sweep of all candidates that were priced."""
        seconds, members, of_shape = (np.concatenate(parts) for parts in zip(*self.priced, strict=True))
        return Sweep(
            problem=self.problem,
            strategies=Strategies(self.whole.layouts[members], self.whole.choices),
            expected_s=seconds,
            memory_bytes=self.memory[of_shape],
            allowed=self.allowed[of_shape],
            limit_bytes=self.limit,
            searched=self.searched,
        )


@dataclass(frozen=True, kw_only=True)
class _LayoutGroups:
    """G groups of layouts of one mesh shape each, from ``starts`` to ``ends``, with lower bounds of scores, [G, K]."""

    shape: Ints
    starts: Ints
    ends: Ints
    bounds: Floats

    def __len__(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> _LayoutGroups:
        return _LayoutGroups(**{name: value[index] for name, value in vars(self).items()})

    @property
    def in_order(self) -> _LayoutGroups:
        """The groups in order of their bounds."""
        return self[np.argsort(self.bounds.min(axis=1), kind="stable")]

    def within(self, most: float) -> _LayoutGroups:
        """The groups whose bounds do not exceed ``most``."""
        return self[self.bounds.min(axis=1) <= most]

    @property
    def members(self) -> Ints:
        """The layouts of all groups."""
        return np.concatenate([np.arange(start, end) for start, end in zip(self.starts, self.ends, strict=True)])


def _slowest(best: Mapping[int, float], ranked: int) -> float:
    """The score that none of the ``ranked`` best shapes exceeds; finite, and the largest if fewer are known."""
    # A bound and the price that it is reached by may differ in the last digit.
    known = sorted(best.values())[ranked - 1 : ranked]
    return min(*(seconds * (1 + 1e-9) for seconds in known), float_info.max, float_info.max)


def _bounds_s(problem: Problem, cheapest: Strategies, feasible: Mask) -> Floats:
    """Lower bounds of the seconds of groups of layouts, [G, K], infinite where a choice is not ``feasible``, [G, K]."""
    return np.where(feasible, _seconds(problem, cheapest, feasible), np.inf)


def _finer(problem: Problem, whole: Strategies, could: Mask, left: _LayoutGroups, starts: Ints) -> _LayoutGroups:
    """The groups cut at ``starts``, with lower bounds of seconds; ``could``: choices that may be the best, [G, K]."""
    begin = [
        starts[np.searchsorted(starts, at) : np.searchsorted(starts, end)]
        for at, end in zip(left.starts, left.ends, strict=True)
    ]
    whose = np.repeat(np.arange(len(left)), [len(cut) for cut in begin])
    cut = np.concatenate(begin)
    ends = np.append(starts, len(whole.layouts))[np.searchsorted(starts, cut) + 1]
    sizes = ends - cut
    cheapest = whole[left.members].cheapest(np.cumsum(sizes) - sizes)
    bounds = _bounds_s(problem, cheapest, could[whose])
    return _LayoutGroups(shape=left.shape[whose], starts=cut, ends=ends, bounds=bounds)


def _worth_pricing(allowed: Mask, memory: Floats, limit: float) -> Mask:
    """Candidates that are allowed and fit; if none does, those of least memory, of which one is then the answer."""
    fitting: Mask = allowed & (memory <= limit)
    return fitting if fitting.any() else allowed & (memory <= np.where(allowed, memory, np.inf).min())


def limit_bytes(problem: Problem, allowed: Mask, memory: Floats) -> float:
    """Bytes of a device within which the best candidate is sought.

    They leave the compiler room if an allowed candidate does; otherwise they are all that is usable.
    """
    return problem.roomy_bytes if np.any(allowed & (memory <= problem.roomy_bytes)) else problem.capacity


def runs_some(problem: Problem, devices: Ints, plain: Choice) -> bool:
    """True if a program runs a mesh of ``devices``, [A], with one microbatch, or one for each stage."""
    counts = {1, int(devices[AXES.index(STAGE_AXES[0])])}
    probed = (replace(plain, remat=PROBED, microbatches=count) for count in sorted(counts))
    return any(_runs(problem, devices, choice) for choice in probed)


def _runs(problem: Problem, devices: Ints, choice: Choice) -> bool:
    """True if a program runs a choice on a mesh of ``devices`` along each axis, [A]."""
    sizes = dict(zip(AXES, map(int, devices), strict=True))
    return next(training_obstacles(problem.framework.name, problem.spec(sizes, choice)), None) is None


def _refused(problem: Problem, devices: Ints, options: Sequence[Choice], seconds: Floats) -> Mask:
    """Choices that no program runs on a mesh of ``devices`` along each axis, [K].

    Only choices that are faster than the first that is run are tried. ``seconds`` of the choices, [K], infinite where
    one is not to be considered.
    """
    refused = np.zeros(len(seconds), np.bool_)
    for choice in np.argsort(seconds, kind="stable"):
        if not np.isfinite(seconds[choice]) or _runs(problem, devices, options[choice]):
            break
        refused[choice] = True
    return refused


def _seconds(problem: Problem, strategies: Strategies, priced: Mask | None) -> Floats:
    """Expected step time of every candidate, [C, K], block by block.

    Candidates that are not ``priced``, [C, K], may be infinite; None prices all. Without stages all schedules but the
    plainest are infinite.
    """
    seconds = np.full(strategies.shape, np.inf)
    for rows, worth in _kinds(strategies):
        start = 0
        if priced is not None and len(rows) > ROWS:
            # Layouts with much the same choices stand together.
            rows = rows[np.lexsort(np.packbits(priced[rows], axis=1).T)]
        while start < len(rows):
            part = rows[start : start + ROWS]
            chosen = strategies.choices_with(worth if priced is None else worth & np.any(priced[part], axis=0))
            if not len(chosen):
                start += len(part)
                continue
            part = part[: max(1, BLOCK // len(chosen))]
            start += len(part)
            some = strategies.with_choices([strategies.choices[index] for index in chosen])
            block = (some[part] if len(part) < len(seconds) else some).factored()
            step = problem.step(block)
            seconds[part[:, None], chosen] = block.flat(expected_s(training_work(step), step))
    return seconds


def _kinds(strategies: Strategies) -> Iterator[tuple[Ints, Mask]]:
    """The layouts without stages and those with stages, each with the choices to look at, [K]."""
    every, worth = np.arange(len(strategies.layouts)), np.ones(strategies.shape[1], np.bool_)
    plain = np.array([choice.pipeline == strategies.choices[0].pipeline for choice in strategies.choices])
    if plain.all():
        yield every, worth
        return
    staged = strategies.layouts.along(*STAGE_AXES) > 1
    yield every[~staged], plain
    yield every[staged], worth


def _memory(problem: Problem, strategies: Strategies) -> Floats:
    """Bytes of a device of every candidate, [C, K]; infinite without stages in all schedules but the plainest."""
    memory = np.full(strategies.shape, np.inf)
    for rows, worth in _kinds(strategies):
        if len(rows):
            some = strategies[rows] if len(rows) < len(memory) else strategies
            chosen = [choice for choice, is_worth in zip(strategies.choices, worth, strict=True) if is_worth]
            factored = some.with_choices(chosen).factored()
            memory[rows[:, None], np.flatnonzero(worth)] = factored.flat(problem.memory(problem.step(factored)).total)
    return memory


def _host_bytes(problem: Problem, strategies: Strategies) -> Floats:
    """Bytes of host memory that a device of every candidate takes, [C, K]; of few policies they are not zero."""
    choices = strategies.choices
    offloading = [index for index, choice in enumerate(choices) if "offload" in choice.policy.values()]
    taken = np.zeros(strategies.shape)
    if offloading:
        some = strategies.with_choices([choices[index] for index in offloading])
        taken[:, offloading] = host_bytes(problem.step(some))
    return taken


def _needed(strategies: Strategies, fits: Mask) -> Mask:
    """Candidates of which no twin fits that keeps on the device what they offload, [C, K]: it is at least as fast.

    ``fits``: candidates that are allowed and stay within the memory of a device, [C, K].
    """
    needed = np.ones(fits.shape, np.bool_)
    places = {(tuple(choice.policy.values()), choice.rest): index for index, choice in enumerate(strategies.choices)}
    for index, choice in enumerate(strategies.choices):
        on_device = tuple("save" if action == "offload" else action for action in choice.policy.values())
        twin = places.get((on_device, choice.rest), index)
        if twin != index:
            needed[:, index] = ~fits[:, twin]
    return needed


def plan_of(problem: Problem, strategies: Strategies, candidate: tuple[int, int]) -> TrainingPlan:
    """The plan of one of many strategies, a candidate (layout, choice)."""
    layout, choice = candidate
    return TrainingPlan(problem=problem, mesh=strategies.layouts.mesh(layout), choice=strategies.choices[choice])


def best_of(problem: Problem, within: Strategies, *, executable: bool = False) -> tuple[float, tuple[int, int]]:
    """The best fitting candidate among given strategies, with its expected step time: infinite if none fits.

    ``executable``: of those that the program runs.
    """
    if problem.slice != within.layouts.slice:
        within = Strategies(replace(within.layouts, slice=problem.slice), within.choices)
    allowed = allowed_candidates(problem, within)
    memory = _memory(problem, within)
    allowed = allowed & _needed(within, allowed & (memory <= limit_bytes(problem, allowed, memory)))
    seconds = _seconds(problem, within, _worth_pricing(allowed, memory, problem.capacity))
    score = np.where(allowed & (memory <= limit_bytes(problem, allowed, memory)), seconds, np.inf)
    if executable:
        for row, devices in enumerate(within.layouts.devices):
            score[row, _refused(problem, devices, within.choices, score[row])] = np.inf
    layout, choice = np.unravel_index(np.argmin(score), score.shape)
    return float(score[layout, choice]), (int(layout), int(choice))


def wasteful(problem: Problem, strategies: Strategies) -> Mask:
    """Candidates in which more than ``MOST_PADDING`` of the positions are padding, [C, K], but not those with least."""
    padding = problem.step(strategies).padding
    most: Mask = padding > max(MOST_PADDING, float(padding.min()))
    return most


def searched_layouts(problem: Problem, among: Sequence[str] = AXES) -> Layouts:
    """The layouts to be priced, of the axes ``among`` where they are searched.

    Raises RooftopError if a given mesh cannot be.
    """
    if problem.mesh is not None:
        return from_mesh(problem.mesh)
    if problem.axes is not None:
        return _given(problem, problem.axes)
    return _free_layouts(problem, among, partial(_wanted, problem))


def runnable_layouts(problem: Problem) -> Layouts:
    """The layouts to be priced of meshes that a program runs; none if it runs no mesh."""
    plain = _probed(problem)

    def accepts(shapes: Layouts) -> Mask:
        good = _wanted(problem, shapes)
        good[good] = [runs_some(problem, devices, plain) for devices in shapes.devices[good]]
        return good

    return _free_layouts(problem, AXES, accepts)


def free_layouts(problem: Problem, among: Sequence[str] = AXES) -> Layouts:
    """All layouts on the slice that the model's sizes allow, of the axes ``among``, whatever the batch."""
    return _free_layouts(problem, among, partial(_possible, problem))


def _free_layouts(problem: Problem, among: Sequence[str], accepts: Callable[[Layouts], Mask]) -> Layouts:
    names = [name for name in AXES if name in among and name in problem.program.axes]
    if orders := problem.program.orders:
        shapes = mesh_shapes(problem.slice.devices, names, _most(problem.model))
        shapes = shapes[accepts(shapes_alone(problem.slice, shapes))]
        return ranked_layouts(problem.slice, shapes, orders)
    return enumerate_layouts(problem.slice, names, {}, _most(problem.model), accepts)


def _possible(problem: Problem, shapes: Layouts) -> Mask:
    """Mesh shapes that the model's sizes allow, [S]."""
    good = _stages_filled(problem, shapes)
    narrow = good & (_padding(problem.model, shapes) <= MOST_PADDING)
    good = narrow if narrow.any() else good
    positions = problem.step(Strategies(shapes, (_WHOLE,))).positions[:, 0]
    # A sequence that is shorter than a row of lanes is padded on every mesh.
    least = float(positions[good].min(initial=np.inf))
    return good & (positions <= max(problem.workload.seq_len / (1 - MOST_PADDING), least))


def _wanted(problem: Problem, shapes: Layouts) -> Mask:
    """Mesh shapes that the model's sizes allow and on which little of the batch is padding, [S]."""
    good = _possible(problem, shapes)
    good[good] = ~wasteful(problem, Strategies(shapes[good], (_WHOLE,)))[:, 0]
    return good


def _padding(model: ModelConfig, layouts: Layouts) -> Floats:
    """The largest padding of a dim of the model over each layout, relative to its size, [C]."""
    tensor, fsdp, expert = (
        np.prod(layouts.shapes[:, [AXES.index(axis) for axis in axes]], axis=-1, dtype=np.float64)
        for axes in (COLUMN_AXES, GATHER_AXES, EXPERT_AXES)
    )
    widths = partial(ModelWidths, model=model, tensor=tensor, fsdp=fsdp)
    padding: Floats = np.asarray(widths(expert=expert).padding)
    if model.moe is not None:
        padding = np.minimum(padding, widths(expert=expert * tensor, expert_columns=1.0).padding)
    return padding[layouts.shape_of]


def _most(model: ModelConfig) -> dict[str, int]:
    """The most devices along axes that split heads, experts and layers: more would need too much padding."""
    experts = 1 if model.moe is None else model.moe.experts
    sizes = dict.fromkeys(COLUMN_AXES, model.heads) | dict.fromkeys(EXPERT_AXES, experts)
    return {axis: int(size * (1 + MOST_PADDING)) for axis, size in sizes.items()} | dict.fromkeys(
        STAGE_AXES, stage_parts(model)[0]
    )


def _stages_filled(problem: Problem, layouts: Layouts) -> Mask:
    """Each chunk of a stage must have room for a layer, or a period, and few may be padding."""
    stages, (parts, _) = layouts.along(*STAGE_AXES), stage_parts(problem.model)
    fewest = min(chunks for _, chunks in problem.pipelines)
    good: Mask = (stages == 1) | _filled(parts, stages * fewest)
    return good


def _filled(parts: int, places: Ints | Floats) -> Mask:
    """True where the ``parts`` of a model that stages share fill ``places`` in them, and few places are padding."""
    filled: Mask = (places <= parts) & (next_multiple(parts, places) <= (1 + MOST_PADDING) * parts)
    return filled


def _given(problem: Problem, sizes: Mapping[str, int]) -> Layouts:
    """Layouts with exactly the given axis sizes."""
    devices = problem.slice.devices
    product = int(np.prod(list(sizes.values())))
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    if product != devices:
        raise RooftopError(
            "mesh", text, f"sizes whose product is the {devices} devices of {problem.slice.name} "
            f"(yours is {product}){_such_as(problem, sizes)}",
        )  # fmt: skip
    if problem.model.moe is None and (experts := ways(sizes, *EXPERT_AXES)) > 1:
        accepted = f"1: {problem.model.name} has no experts{_such_as(problem, sizes)}"
        raise RooftopError("mesh axis expert", experts, accepted)
    parts, what = stage_parts(problem.model)
    if (stages := ways(sizes, *STAGE_AXES)) > parts:
        raise RooftopError("mesh axis stage", stages, f"at most the {parts} {what}{_such_as(problem, sizes)}")
    names = [name for name in AXES if sizes.get(name, 1) > 1] or list(BATCH_AXES[:1])
    divides = {name: sizes.get(name, 1) for name in AXES}
    asked = np.array([divides[name] for name in AXES])
    if orders := problem.program.orders:
        layouts = ranked_layouts(problem.slice, asked[None], orders)
    else:
        layouts = enumerate_layouts(problem.slice, names, divides)
        layouts = layouts[np.all(layouts.devices == asked, axis=1)]
    if not len(layouts):
        physical = " x ".join(f"{axis.name}={axis.size}" for axis in problem.slice.physical_axes)
        raise RooftopError(
            "mesh",
            text,
            f"axes that whole or split physical axes ({physical}) make up{_such_as(problem, sizes)}",
        )
    return layouts


def _such_as(problem: Problem, sizes: Mapping[str, int]) -> str:
    """The mesh nearest to ``sizes`` that is accepted, as an example; one that programs run, if there is one."""
    devices = np.unique(free_layouts(replace(problem, axes=None)).devices, axis=0)
    asked = np.array([sizes.get(name, 1) for name in AXES])
    off = np.abs(np.log(devices / asked)).sum(axis=1)
    near = devices[np.argsort(off, kind="stable")]
    plain = _probed(problem)
    accepted = next((mesh for mesh in near[:_EXAMPLES] if _runs(problem, mesh, plain)), near[0] if len(near) else None)
    if accepted is None:
        return ""
    shown = ",".join(f"{name}={size}" for name, size in zip(AXES, accepted.tolist(), strict=True) if size > 1)
    return f", such as {shown or 'data=1'}"


def _probed(problem: Problem) -> Choice:
    """The choice with which meshes are tried."""
    schedule, chunks = problem.pipelines[0]
    return Choice(remat=PROBED, schedule=schedule, chunks=chunks)


def searched_choices(problem: Problem, layouts: Layouts) -> tuple[Choice, ...]:
    """The remat policies and microbatches to be priced, in the problem's schedule.

    Raises RooftopError for more microbatches than sequences.
    """
    if problem.remat is None:
        exchanges = problem.model.moe is not None and layouts.along(*EXPERT_AXES, *COLUMN_AXES).max(initial=1) > 1
        # Where nobody knows how much memory hosts have, none of it is planned.
        offloads = () if problem.host_capacity is None else problem.program.offloads
        policies: Mapping[str, Mapping[str, str]] = searched_policies(exchanges=exchanges, offloads=offloads)
        if theirs := remat_policies(problem.program.name, problem.model):
            policies = {name: parse_policy(name) for name in dict.fromkeys((*theirs, *offloads))}
    else:
        policies = {problem.remat: parse_policy(problem.remat)}
    counts: Sequence[int]
    if problem.microbatches is not None:
        if problem.microbatches > problem.workload.batch_seqs:
            raise RooftopError(
                "microbatches", problem.microbatches, f"at most the {problem.workload.batch_seqs} sequences"
            )
        counts = (problem.microbatches,)
    else:
        replicas = layouts.along(*BATCH_AXES)
        most = max(1, problem.workload.batch_seqs // int(replicas.min(initial=1)))
        counts = [2**power for power in range(8) if 2**power <= most]
    switches = searched_switches(problem, layouts)
    staged = layouts.along(*STAGE_AXES).max(initial=1) > 1
    pipelines = problem.pipelines if staged else problem.pipelines[:1]
    return choices(policies, counts, pipelines=pipelines, **switches)


def searched_switches(problem: Problem, layouts: Layouts) -> dict[str, tuple[bool, ...]]:
    """The settings of each switch of a ``Choice`` that are priced, the plain one first.

    Collective matmuls are where the chip's compiler overlaps them, whole experts over tensor where there are experts.
    """
    tensor = layouts.along(*COLUMN_AXES).max(initial=1) > 1
    plain = problem.formats.matmul == problem.formats.compute
    worth = {
        "collective_matmuls": tensor and plain and problem.program.habits.hides_rings,
        "experts_over_tensor": tensor and problem.model.moe is not None,
    }
    settings: dict[str, tuple[bool, ...]] = {}
    for name, pays in worth.items():
        pinned = problem.pinned(name)
        tried = (False, True) if pays and name in problem.program.searched else (False,)
        settings[name] = tried if pinned is None else (pinned,)
    return settings


def allowed_candidates(problem: Problem, strategies: Strategies) -> Mask:
    """True where little is padding, and a stage has a layer for each of its chunks, [C, K].

    Raises RooftopError if no candidate does.
    """
    layouts = strategies.layouts
    good = np.broadcast_to(~wasteful(problem, strategies), strategies.shape)
    stages = layouts.along(*STAGE_AXES)[:, None]
    parts, what = stage_parts(problem.model)
    if problem.program.habits.fills_stages:
        parts, what = problem.model.layers + 2, "layers, embedding and loss"
    chunks, plain = strategies.chunks, strategies.choices[0].pipeline
    # Other numbers of microbatches have no interleaved table (``rooftop.scheduling.pipeline``).
    in_groups = (chunks == 1) | (strategies.microbatches <= stages) | (strategies.microbatches % stages == 0)
    if len(problem.pipelines) > 1:
        # Without stages schedules do not differ.
        is_plain = np.array([[choice.pipeline == plain for choice in strategies.choices]])
        filled: Mask = np.where(stages == 1, is_plain, (chunks == 1) | _filled(parts, stages * chunks) & in_groups)
    else:
        filled = (stages == 1) | (stages * chunks <= parts) & (in_groups | (problem.microbatches is not None))
    if not filled.any():
        most = parts // int(stages.min())
        accepted = f"at most {most}" if most > 1 else "no interleaving"
        raise RooftopError("chunks", int(chunks.min()), f"{accepted} ({int(stages.min())} stages share {parts} {what})")
    if problem.pinned("collective_matmuls") is None:
        # No program has them in stages.
        filled = filled & ((stages == 1) | (strategies.collective_matmuls == 0))
    if problem.pinned("experts_over_tensor") is None and strategies.experts_over_tensor.any():
        whole = strategies.experts_over_tensor > 0
        padding = np.asarray(problem.step(strategies).widths.padding)
        fewest = np.maximum(MOST_PADDING, padding.min(axis=1, keepdims=True))
        filled = filled & (padding <= fewest) & (~whole | (layouts.along(*COLUMN_AXES)[:, None] > 1))
    if problem.remat is None and problem.host_capacity is not None:
        # A policy that was asked for is planned all the same, with a reason that says so.
        filled = filled & (_host_bytes(problem, strategies) <= problem.host_capacity)
    # Little padding matters less than a schedule that can be.
    return good & filled if (good & filled).any() else np.broadcast_to(filled, strategies.shape)
