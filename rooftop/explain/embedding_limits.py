"""The largest limits that the compiler takes: between what compiles and what does not, in few compilations.

Limits are tried in the proportion of the plan's: a *share* of each. Where to try is what the plan's arithmetic says,
put right by what the compiler found of the last share; once that is at a bound, steps away from it that double, and
then halves of what is left. For HBM what is needed rises with the limits. For a tile's memory it does in updates, where
the compiler counts bytes; in lookups it takes some limits that are larger than others that it refuses. What a search
finds is then a bound next to limits that are refused, and not that nothing beyond them compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rooftop.errors import Infeasible
from rooftop.explain.embedding_programs import STACK_OF_PART, Compilation, needed_bytes, part_request, step_request
from rooftop.models.tables_limits import Limits, StackLimits
from rooftop.models.tables_stacking import Stack
from rooftop.plan.embed import EmbedPlan
from rooftop.plan.embed_limits import share_that
from rooftop.xla.memory import OutOfMemory
from rooftop.xla.sparsecore_marks import refuses_larger

#: Limits that one search tries at most.
MOST_TRIALS = 12
#: A search ends where what compiles and what does not are so near, as a part of the latter.
NEAR = 1e-3
#: Guesses one after the other that do not halve what is left, before it is halved.
_SLOW = 2


@dataclass(frozen=True, kw_only=True)
class LargestLimits:
    """Limits that compile, the nearest beyond that were ``refused``, and ``why``; ``tried`` is how many were."""

    limits: Limits
    refused: Limits
    why: Infeasible
    tried: int

    @property
    def monotonic(self) -> bool:
        """Whether all that are larger are refused too: otherwise the compiler may take some."""
        return refuses_larger(self.why)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The largest share that was found to fit and the smallest that was not, and how many were tried for them."""

    fits: float
    refused: float
    tried: int


def largest_share(
    over: Callable[[float], float],
    guess: Callable[[float, float], float | None],
    *,
    begin: float = math.inf,
    same: Callable[[float, float], bool] = lambda one, other: one == other,
    most: int = MOST_TRIALS,
) -> Bounds | None:
    """The largest share of 1, which does not fit, that does; None where none was found in ``most`` trials.

    ``over`` tries a share: by how much it is too much, 0 or less if it fits, infinity if nobody says. ``guess`` says
    what might just fit, from a share and its ``over`` (1 and ``begin`` at first): None is no idea, 0 the least there
    is. ``same`` shares come to the same: a search ends where nothing is between what fits and what does not.
    """
    low, high, tried, found = 0.0, 1.0, 0, False
    last, excess, reach, slow = 1.0, begin, NEAR, 0
    while tried < most and high - low > NEAR * high and not same(low, high):
        wanted, margin = guess(last, excess), NEAR / 2 * high
        share = (low + high) / 2
        if wanted is not None and wanted <= 0 and not found:
            share = 0.0
        elif slow == _SLOW:
            slow = 0
        elif wanted is not None and low + margin < wanted < high - margin:
            share, slow = wanted, slow + 1
        elif wanted is not None:
            beside = low + reach * (low or high) if wanted <= low + margin else high - reach * high
            reach *= 2
            share = beside if low < beside < high else share
        if found and same(share, low):
            low = share
            continue
        if same(share, high):
            high = share
            continue
        tried, width = tried + 1, high - low
        last, excess = share, over(share)
        if excess <= 0:
            low, found = share, True
        elif share == 0:
            return None
        else:
            high = share
        slow = 0 if high - low <= width / 2 else slow
    return Bounds(fits=low, refused=high, tried=tried) if found else None


def largest_of_step(plan: EmbedPlan, step: str, no: Infeasible, over: float, how: Compilation) -> LargestLimits | None:
    """The largest limits of all stacks with which a ``step`` fits; with the plan's own it does not, by ``no``.

    It then needs ``over`` bytes of HBM too many; infinity where that is not known, as for a tile's memory.
    """
    capacity = plan.problem.slice.chip.hbm_usable_bytes
    count, why = 0, no

    def limits_of(share: float) -> Limits:
        return plan.scaled(share).problem.limits

    def tried(share: float) -> float:
        nonlocal count, why
        count += 1
        about = how.about(f"{step} step with {share:.2%} of the limits, {count} of at most {MOST_TRIALS}")
        try:
            needed = needed_bytes(about.run(step_request(plan, step, how.checks, limits_of(share))), plan)
        except Infeasible as no:
            why = no
            return over_bytes(no)
        if needed > capacity:
            why = beyond_hbm(needed, plan)
        return needed - capacity

    def guess(share: float, excess: float) -> float | None:
        if math.isinf(excess):
            return None
        return plan.share_in_hbm(plan.scaled(share).memory["total"][step] - excess, step)

    bounds = largest_share(tried, guess, begin=over, same=lambda one, other: limits_of(one) == limits_of(other))
    if bounds is None:
        return None
    return LargestLimits(limits=limits_of(bounds.fits), refused=limits_of(bounds.refused), why=why, tried=bounds.tried)


def largest_of_stack(
    plan: EmbedPlan, part: str, stack: Stack, no: Infeasible, how: Compilation
) -> LargestLimits | None:
    """The largest limits of one stack with which lookup and update compile; by ``no``, ``part`` does not with its own.

    Where a tile is too small the search begins with the plan's own largest.
    """
    in_tile, count, why = plan.share_in_tile(stack), 0, no
    # What fits does not say by how much: the last that did not has the word.
    too_much: tuple[float, float] | None = None
    # One part alone may take limits with which the other does not compile.
    parts = sorted(STACK_OF_PART, key=lambda each: each != part)

    def limits_of(share: float) -> StackLimits:
        return plan.scaled(share, (stack,)).problem.limits[stack.name]

    def tried(share: float) -> float:
        nonlocal count, why
        count += 1
        for each in parts:
            what = f"{each} of {stack.name} with {share:.2%} of its limits, {count} of at most {MOST_TRIALS}"
            try:
                how.about(what).run(part_request(plan, each, stack, how.checks, limits_of(share)))
            except Infeasible as no:
                why = no
                return over_bytes(no)
        return -math.inf

    def taken(share: float) -> float:
        memory = plan.scaled(share, (stack,)).stack_memory(stack)
        return memory[STACK_OF_PART[part]] + memory["inputs"]

    def guess(share: float, excess: float) -> float | None:
        nonlocal too_much
        too_much = (share, excess) if 0 < excess < math.inf else too_much
        if too_much is None:
            return in_tile if in_tile < 1 else None
        room = taken(too_much[0]) - too_much[1]
        return min(in_tile, share_that(lambda share: taken(share) <= room))

    bounds = largest_share(
        tried, guess, begin=over_bytes(no), same=lambda one, other: limits_of(one) == limits_of(other)
    )
    if bounds is None:
        return None
    limits, refused = ({stack.name: limits_of(share)} for share in (bounds.fits, bounds.refused))
    return LargestLimits(limits=limits, refused=refused, why=why, tried=bounds.tried)


def beyond_hbm(needed: float, plan: EmbedPlan) -> OutOfMemory:
    """Why a step that needs so many bytes of HBM, heap and stacks of SparseCores together, does not fit."""
    return OutOfMemory("a step", needed_bytes=needed, available_bytes=plan.problem.slice.chip.hbm_usable_bytes)


def over_bytes(no: Infeasible) -> float:
    """Bytes of HBM that a program needs too many, told in hundredths of a GiB; infinity if it is not HBM that lacks."""
    return max(no.needed_bytes - no.available_bytes, 2**30 / 100) if isinstance(no, OutOfMemory) else math.inf
