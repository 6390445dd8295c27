"""The search over sharding, remat and microbatches, over every layout that the torus carries.

Branch and bound. Memory depends only on how many devices each axis has, and time grows with the price of every
collective; so a mesh shape priced with the best link that any of its layouts gives each axis is a lower bound on all of
them. Layouts are priced in the order of that bound, until none that is left could be among the best.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Floats, Ints
from rooftop.plan.candidates import allowed_candidates, searched_choices, searched_layouts, uneven
from rooftop.plan.layouts import Layouts
from rooftop.plan.problem import Problem
from rooftop.plan.strategies import Strategies

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
    """Whether the layouts split batch and model evenly, as a program needs."""

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
        found: list[tuple[int, int]] = []
        for index in ranked:
            key = tuple(devices[index])
            if key not in seen and np.isfinite(score[index, chosen[index]]):
                seen.add(key)
                found.append((int(index), int(chosen[index])))
                if len(found) == count:
                    break
        return found

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
        seconds, held = _evaluate(problem, whole)
        return Sweep(
            problem=problem,
            strategies=whole,
            expected_s=seconds,
            memory_bytes=held,
            allowed=allowed,
            searched=int(allowed.sum()),
            even=even,
        )
    one = Strategies(layouts[:1], options)
    _evaluate(problem, one)  # Pricing one layout tells which collectives there are.
    prices = {key: whole.price(*key) for key in one.prices}
    cheapest = Strategies(
        shapes, options, {key: found.map(lambda v: np.minimum.reduceat(v, starts)) for key, found in prices.items()}
    )
    allowed = allowed_candidates(problem, cheapest, even)
    bound_s, memory = _evaluate(problem, cheapest)
    feasible = allowed & (memory <= problem.capacity)
    if not feasible.any():
        # Nothing fits: what needs the least is the answer, and it does not depend on the layout.
        feasible = allowed & (memory <= np.where(allowed, memory, np.inf).min())
    optimistic = np.where(feasible, bound_s, np.inf).min(axis=1)
    ranked = np.argsort(optimistic, kind="stable")
    best: list[float] = []
    found: list[tuple[Floats, Ints, Ints]] = []
    for start in range(0, len(ranked), len(ranked) if exhaustive else TOGETHER):
        near = ranked[start : start + (len(ranked) if exhaustive else TOGETHER)]
        if not exhaustive and len(best) >= RANKED and sorted(best)[RANKED - 1] <= optimistic[near[0]]:
            break
        members = np.concatenate([np.arange(starts[shape], ends[shape]) for shape in near])
        of_shape = np.repeat(near, ends[near] - starts[near])
        seconds, _ = _evaluate(problem, whole[members], memory=False)
        fitting = np.where(feasible[of_shape], seconds, np.inf).min(axis=1)
        best += [float(fitting[of_shape == shape].min()) for shape in near]
        found.append((seconds, members, of_shape))
    seconds, members, of_shape = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Sweep(
        problem=problem,
        strategies=Strategies(layouts[members], options),
        expected_s=seconds,
        memory_bytes=memory[of_shape],
        allowed=allowed[of_shape],
        searched=int(np.sum(allowed.sum(axis=1) * (ends - starts))),
        even=even,
    )


def _by_shape(layouts: Layouts) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """An order of layouts in which equal axis sizes stand together, and where each group of them starts."""
    order = np.lexsort(layouts.devices.T)
    ordered = layouts.devices[order]
    new = np.any(ordered[1:] != ordered[:-1], axis=1)
    return order, np.concatenate([[0], np.flatnonzero(new) + 1]).astype(np.intp)


def _evaluate(problem: Problem, strategies: Strategies, *, memory: bool = True) -> tuple[Floats, Floats]:
    """Expected step time and memory of every candidate, [C, K], block by block."""
    shape = strategies.shape
    expected, held = np.empty(shape), np.empty(shape if memory else (0, 0))
    rows = max(1, BLOCK // shape[1])
    for start in range(0, shape[0], rows):
        part = slice(start, start + rows)
        step = problem.step(strategies[part] if shape[0] > rows else strategies)
        expected[part] = np.broadcast_to(step.ledger.expected_s, expected[part].shape)
        if memory:
            held[part] = np.broadcast_to(problem.memory(step).total, expected[part].shape)
    return expected, held


def best_of(problem: Problem, within: Strategies) -> float:
    """Expected step time of the best fitting candidate among given strategies; infinite if none fits."""
    within = Strategies(replace(within.layouts, slice=problem.slice), within.choices)
    seconds, memory = _evaluate(problem, within)
    allowed = allowed_candidates(problem, within, even=not uneven(problem, within.layouts).any())
    return float(np.where(allowed & (memory <= problem.capacity), seconds, np.inf).min())
