"""The search over sharding, remat and microbatches, over every layout that the torus carries.

Branch and bound. Memory depends only on how many devices each axis has, and time grows with the price of every
collective; so a mesh shape priced with the best link that any of its layouts gives each axis is a lower bound on all of
them. Layouts are priced in the order of that bound, until none that is left could be among the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Floats, Ints
from rooftop.arrays.rules import (
    AXES,
    BATCH_AXES,
    COLUMN_AXES,
    DCN_AXES,
    EXPERT_AXES,
    GATHER_AXES,
    SEQUENCE_AXES,
    STAGE_AXES,
    ways,
)
from rooftop.capabilities import TRAINING_SPLITS, EvenSplit
from rooftop.core.errors import RooftopError
from rooftop.models.activations import POLICIES, SEARCHED, parse_policy
from rooftop.models.config import ModelConfig
from rooftop.models.segments import stage_parts
from rooftop.models.widths import MOST_PADDING, share
from rooftop.plan.layouts import Layouts, enumerate_layouts, from_mesh
from rooftop.plan.training.pricing import expected_s, priced_collectives
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.rows import training_work
from rooftop.plan.training.strategies import Choice, Strategies, choices

#: Candidates priced in one go: large enough to spread NumPy's overhead, small enough to stay in cache.
BLOCK = 16_384
#: Mesh shapes to be ranked exactly: the winner and the alternatives that a plan shows.
RANKED = 6
#: Mesh shapes priced between two looks at whether those that are left can still matter.
TOGETHER = 8


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The candidates that were priced, with expected step time and memory, [C, K].

    ``allowed`` is False where sizes do not divide. ``searched`` counts all candidates, also those excluded by a bound.
    """

    problem: Problem
    strategies: Strategies
    expected_s: Floats
    memory_bytes: Floats
    allowed: npt.NDArray[np.bool_]
    searched: int
    even: bool
    """True if the layouts split sequences and D evenly, as a program needs."""

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Candidates that are allowed and stay within the device's memory, [C, K]."""
        fits: npt.NDArray[np.bool_] = self.allowed & (self.memory_bytes <= self.problem.capacity)
        return fits

    @cached_property
    def best(self) -> tuple[int, int]:
        """The fastest candidate that fits; if none does, the one that needs the least memory."""
        if self.fits.any():
            return self._least(np.where(self.fits, self.expected_s, np.inf))
        return self._least(np.where(self.allowed, self.memory_bytes, np.inf))

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

    def only(self, candidate: tuple[int, int]) -> Strategies:
        """One candidate as a strategy of its own."""
        layout, choice = candidate
        return Strategies(self.strategies.layouts[layout : layout + 1], (self.strategies.choices[choice],))

    def _least(self, score: Floats) -> tuple[int, int]:
        # Among equals the one with less memory: a tie in time is common when nothing is exposed.
        least = score.min()
        ties = np.argwhere(score <= least * (1 + 1e-9))
        layout, choice = ties[np.argmin(self.memory_bytes[ties[:, 0], ties[:, 1]])]
        return int(layout), int(choice)


def sweep(problem: Problem, *, exhaustive: bool = False) -> Sweep:
    """Price candidates, best bound first; all of them if ``exhaustive``.

    Raises RooftopError if a given mesh or number of microbatches cannot be.
    """
    layouts, even = searched_layouts(problem)
    options = searched_choices(problem, layouts)
    order, starts = _by_shape(layouts)
    layouts = layouts[order]
    shapes = layouts[starts]
    ends = np.append(starts[1:], len(layouts))
    whole = Strategies(layouts, options)
    if len(starts) == 1:
        # There is nothing to leave out: a bound would cost as much as the answer.
        allowed = allowed_candidates(problem, whole, even)
        seconds, memory_bytes = _evaluate(problem, whole)
        return Sweep(
            problem=problem,
            strategies=whole,
            expected_s=seconds,
            memory_bytes=memory_bytes,
            allowed=allowed,
            searched=int(allowed.sum()),
            even=even,
        )
    prices = {key: whole.price(*key) for key in _priced_collectives(problem, whole)}
    whole = replace(whole, prices=prices)
    cheapest = Strategies(
        shapes, options, {key: price.map(lambda v: np.minimum.reduceat(v, starts)) for key, price in prices.items()}
    )
    allowed = allowed_candidates(problem, cheapest, even)
    bound_s, memory = _evaluate(problem, cheapest)
    feasible = allowed & (memory <= problem.capacity)
    if not feasible.any():
        # Nothing fits: the answer is the candidate with the least memory, which does not depend on the layout.
        feasible = allowed & (memory <= np.where(allowed, memory, np.inf).min())
    optimistic = np.where(feasible, bound_s, np.inf).min(axis=1)
    ranked = np.argsort(optimistic, kind="stable")
    best: list[float] = []
    priced: list[tuple[Floats, Ints, Ints]] = []
    for start in range(0, len(ranked), len(ranked) if exhaustive else TOGETHER):
        near = ranked[start : start + (len(ranked) if exhaustive else TOGETHER)]
        if not exhaustive and len(best) >= RANKED and sorted(best)[RANKED - 1] <= optimistic[near[0]]:
            break
        members = np.concatenate([np.arange(starts[shape], ends[shape]) for shape in near])
        of_shape = np.repeat(near, ends[near] - starts[near])
        seconds, _ = _evaluate(problem, whole[members], memory=False)
        fitting = np.where(feasible[of_shape], seconds, np.inf).min(axis=1)
        best += [float(fitting[of_shape == shape].min()) for shape in near]
        priced.append((seconds, members, of_shape))
    seconds, members, of_shape = (np.concatenate(parts) for parts in zip(*priced, strict=True))
    return Sweep(
        problem=problem,
        strategies=Strategies(layouts[members], options),
        expected_s=seconds,
        memory_bytes=memory[of_shape],
        allowed=allowed[of_shape],
        searched=int(np.sum(allowed.sum(axis=1) * (ends - starts))),
        even=even,
    )


def _priced_collectives(problem: Problem, strategies: Strategies) -> set[tuple[str, str]]:
    """(kind, axis) of every collective of the step: the same on all layouts, so one of them is enough to tell."""
    one = Strategies(strategies.layouts[:1], strategies.choices)
    step = problem.step(one)
    return priced_collectives(training_work(step), step.rates)


def _by_shape(layouts: Layouts) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """An order of layouts that groups equal axis sizes, and the start of each group."""
    order = np.lexsort(layouts.devices.T)
    ordered = layouts.devices[order]
    new = np.any(ordered[1:] != ordered[:-1], axis=1)
    return order, np.concatenate([[0], np.flatnonzero(new) + 1]).astype(np.intp)


def _evaluate(problem: Problem, strategies: Strategies, *, memory: bool = True) -> tuple[Floats, Floats]:
    """Expected step time and memory of every candidate, [C, K], block by block."""
    shape = strategies.shape
    expected, memory_bytes = np.empty(shape), np.empty(shape if memory else (0, 0))
    rows = max(1, BLOCK // shape[1])
    for start in range(0, shape[0], rows):
        part = slice(start, start + rows)
        step = problem.step(strategies[part] if shape[0] > rows else strategies)
        seconds = expected_s(training_work(step), step.strategies, step.rates, step.assumptions)
        expected[part] = np.broadcast_to(seconds, expected[part].shape)
        if memory:
            memory_bytes[part] = np.broadcast_to(problem.memory(step).total, expected[part].shape)
    return expected, memory_bytes


def best_of(problem: Problem, within: Strategies) -> float:
    """Expected step time of the best fitting candidate among given strategies; infinite if none fits."""
    if problem.slice != within.layouts.slice:
        within = Strategies(replace(within.layouts, slice=problem.slice), within.choices)
    seconds, memory = _evaluate(problem, within)
    allowed = allowed_candidates(problem, within, even=not uneven(problem, within.layouts).any())
    return float(np.where(allowed & (memory <= problem.capacity), seconds, np.inf).min())


def uneven(problem: Problem, layouts: Layouts) -> npt.NDArray[np.bool_]:
    """Layouts over which the sequences of a step or D do not divide, [C]: no program runs them as they stand."""
    batch, columns = layouts.along(*BATCH_AXES), layouts.along(*GATHER_AXES, *COLUMN_AXES)
    bad: npt.NDArray[np.bool_] = (problem.workload.batch_seqs % batch != 0) | (problem.model.d_model % columns != 0)
    return bad


def searched_layouts(problem: Problem) -> tuple[Layouts, bool]:
    """The layouts to be priced, and whether they split batch and model evenly.

    Raises RooftopError if a given mesh cannot be.
    """
    if problem.mesh is not None:
        layouts = from_mesh(problem.mesh)
        return layouts, not uneven(problem, layouts).any()
    if problem.axes is not None:
        layouts = _given(problem, problem.axes)
        return layouts, not uneven(problem, layouts).any()
    axes, divides = _searched(problem)
    layouts = enumerate_layouts(problem.slice, axes, divides)
    layouts = layouts[_heads_split(problem.model, layouts) & _stages_filled(problem, layouts)]
    good = ~uneven(problem, layouts)
    even = bool(good.any())
    if even:
        layouts = layouts[good]
    return layouts, even


def _searched(problem: Problem) -> tuple[list[str], dict[str, int]]:
    """The axes that are searched, and the size that each must divide."""
    divides = dict.fromkeys(SEQUENCE_AXES, problem.workload.seq_len)
    for split in TRAINING_SPLITS:
        if split.planner != "prices" and (dim := _dim(problem, split)) is not None:
            divides |= {axis: gcd(divides.get(axis, 0), dim[0]) for axis in split.axes}
    return [name for name in AXES if name not in EXPERT_AXES or problem.model.moe is not None], divides


def _dim(problem: Problem, split: EvenSplit) -> tuple[int, str] | None:
    """Size and name of the dim that a rule splits, before any mesh is chosen."""
    return split.size(problem.spec({}, Choice(remat="none", policy=POLICIES["none"])))


def _heads_split(model: ModelConfig, layouts: Layouts) -> npt.NDArray[np.bool_]:
    """Key and value heads must split over tensor, or be copied a whole number of times."""
    tensor = layouts.along(*COLUMN_AXES)
    good: npt.NDArray[np.bool_] = (model.kv_heads % tensor == 0) | (tensor % model.kv_heads == 0)
    return good


def _stages_filled(problem: Problem, layouts: Layouts) -> npt.NDArray[np.bool_]:
    """Each chunk of a stage must have room for a layer, or a period, and few may be padding."""
    stages, (parts, _) = layouts.along(*STAGE_AXES), stage_parts(problem.model)
    chunks = stages * problem.chunks
    room = share(parts, chunks) * chunks
    good: npt.NDArray[np.bool_] = (stages == 1) | (chunks <= parts) & (room <= (1 + MOST_PADDING) * parts)
    return good


def _given(problem: Problem, sizes: Mapping[str, int]) -> Layouts:
    """Layouts with exactly the given axis sizes."""
    devices = problem.slice.devices
    product = int(np.prod(list(sizes.values())))
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    if product != devices:
        raise RooftopError(
            "mesh", text, f"sizes whose product is the {devices} devices of {problem.slice.name} "
            f"(yours is {product}), such as {_nearest(sizes, devices)}",
        )  # fmt: skip
    for split in TRAINING_SPLITS:
        dim = _dim(problem, split) if split.planner == "refuses" else None
        size = ways(sizes, *split.axes)
        if dim is not None and dim[0] % size:
            divisors = [n for n in range(1, dim[0] + 1) if dim[0] % n == 0]
            near = sorted(divisors, key=lambda n: abs(n - size))[:2]
            name = " x ".join(axis for axis in split.axes if sizes.get(axis, 1) > 1)
            raise RooftopError(f"mesh axis {name}", size, f"a divisor of the {dim[1]}: {sorted(near)}")
    parts, what = stage_parts(problem.model)
    if (stages := ways(sizes, *STAGE_AXES)) > parts:
        raise RooftopError("mesh axis stage", stages, f"at most the {parts} {what}")
    names = [name for name in AXES if sizes.get(name, 1) > 1] or list(BATCH_AXES[:1])
    divides = {name: sizes.get(name, 1) for name in AXES}
    layouts = enumerate_layouts(problem.slice, names, divides)
    asked = np.array([divides[name] for name in AXES])
    layouts = layouts[np.all(layouts.devices == asked, axis=1)]
    if not len(layouts):
        physical = " x ".join(f"{axis.name}={axis.size}" for axis in problem.slice.physical_axes)
        raise RooftopError(
            "mesh",
            text,
            f"axes that whole or split physical axes ({physical}) make up; over DCN only {' and '.join(DCN_AXES)}",
        )
    return layouts


def _nearest(sizes: Mapping[str, int], devices: int) -> str:
    """The given mesh with its largest axis changed so that the product is right, the others rounded to divisors."""
    largest = max(sizes, key=lambda name: sizes[name])
    nearest: dict[str, int] = {}
    left = devices
    for name, size in sizes.items():
        if name != largest:
            nearest[name] = max(n for n in range(1, size + 1) if left % n == 0)
            left //= nearest[name]
    nearest[largest] = left
    return ",".join(f"{name}={nearest[name]}" for name in sizes)


def searched_choices(problem: Problem, layouts: Layouts) -> tuple[Choice, ...]:
    """The remat policies and microbatches to be priced, in the problem's schedule.

    Raises RooftopError if a given number of microbatches does not divide the sequences.
    """
    if problem.remat is None:
        policies = {name: POLICIES[name] for name in SEARCHED}
    else:
        policies = {problem.remat: parse_policy(problem.remat)}
    counts: Sequence[int]
    if problem.microbatches is not None:
        if problem.workload.batch_seqs % problem.microbatches:
            raise RooftopError(
                "microbatches", problem.microbatches, f"a divisor of the {problem.workload.batch_seqs} sequences"
            )
        counts = (problem.microbatches,)
    else:
        replicas = layouts.along(*BATCH_AXES)
        most = max(1, problem.workload.batch_seqs // int(replicas.min(initial=1)))
        counts = [2**power for power in range(8) if 2**power <= most]
    return choices(policies, counts, schedule=problem.schedule, chunks=problem.chunks)


def allowed_candidates(problem: Problem, strategies: Strategies, even: bool) -> npt.NDArray[np.bool_]:
    """True where microbatches divide a replica's sequences, and a stage has a layer for each of its chunks, [C, K].

    Raises RooftopError if no candidate does.
    """
    layouts = strategies.layouts
    replicas = strategies.devices(*BATCH_AXES)
    counts = strategies.microbatches
    good = np.ones(strategies.shape, np.bool_)
    if even:
        good &= problem.workload.batch_seqs % (replicas * counts) == 0
    else:
        good &= counts == counts.min()
    stages = layouts.along(*STAGE_AXES)[:, None]
    parts, what = stage_parts(problem.model)
    filled = (stages == 1) | (stages * problem.chunks <= parts)
    if not filled.any():
        most = parts // int(stages.min())
        accepted = f"at most {most}" if most > 1 else "no interleaving"
        raise RooftopError("chunks", problem.chunks, f"{accepted} ({int(stages.min())} stages share {parts} {what})")
    good &= filled
    if not good.any():
        raise RooftopError(
            "microbatches",
            int(counts.max()),
            f"a divisor of the {problem.workload.batch_seqs} sequences of count replica",
        )
    return good
