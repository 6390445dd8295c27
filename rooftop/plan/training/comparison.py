"""Chips and slices for a training job: which, how many, how long and how much, within days, dollars and chips.

Each slice is planned by a search of its own, and only plans that programs run and memory holds are recommended. Where
the size of a chip is left open, sizes are searched over all mesh axes but stages (with them where the state needs
several slices), in ascending order:

- for the fewest dollars within some days, from the smallest that could be in time at peak rate to twice the smallest
  that is, as efficiency falls with more chips; or until four in a row are no faster;
- for the fewest days within dollars, until four in a row are too dear;
- for the fewest days on some chips, from the largest down, until none left could be faster at peak rate;
- for the fewest chips, until one meets the limits.

A slice whose lower bounds are worse than the best plan of its chip is ruled out before its meshes are priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Literal

from rooftop.arrays.mesh import Floats, Ints
from rooftop.arrays.rules import AXES
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import counted, format_seconds
from rooftop.core.records import Record, field_values
from rooftop.hardware import Slice
from rooftop.models import flops_per_token
from rooftop.plan.pricing import OnProgress
from rooftop.plan.training.nearest import OUTLINE_AXES, NearestPlan, nearest_executable, refusal, smallest_chips
from rooftop.plan.training.plan import PlanSummary, TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.reasons import shortfall
from rooftop.plan.training.search import Sweep, SweepOptions, sweep

#: The aim of a comparison among slices that meet all limits: fewest dollars, days or chips.
Aim = Literal["cost", "time", "chips"]
#: Sizes in a row that are too dear, or no faster, before larger ones are left out: one may be slow for its shape alone.
_IN_A_ROW = 4
#: The largest slice of a chip that is looked at without a limit of the chips, in chips.
MOST_SEARCHED_CHIPS = 2**15


@dataclass(frozen=True, kw_only=True)
class Limits(Record):
    """Limits of a training job: days and dollars for all tokens, and chips; None: no limit."""

    days: float | None = None
    budget_usd: float | None = None
    chips: int | None = None


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A slice with its best plan; ``plan`` is None where no program runs the job on it, or it does not fit.

    Of a slice that is ``ruled_out`` the figures are lower bounds, and there is no plan.
    """

    problem: Problem
    """The job on this slice."""
    plan: TrainingPlan | None = None
    step_s: float = inf
    """Expected seconds of a step, as the search has them: a plan's own ledger takes longer. Infinite without a plan."""
    axes: Sequence[str]
    """The mesh axes that were searched."""
    ruled_out: bool = False

    @property
    def slice(self) -> Slice:
        """The slice."""
        return self.problem.slice

    @property
    def token_s(self) -> float:
        """Seconds a token."""
        return self.step_s / self.problem.workload.batch_tokens

    @property
    def days(self) -> float | None:
        """Days for all tokens; None without tokens."""
        return self.problem.days_at(self.step_s)

    @property
    def cost_usd(self) -> float | None:
        """List price for all tokens; None without a price or tokens."""
        return self.problem.cost_usd_at(self.step_s)

    def excess(self, limits: Limits) -> float:
        """The largest ratio of a figure to its limit: at most 1 if all are met. An unknown price exceeds any budget."""
        if self.step_s == inf:
            return inf
        figures = ((self.days, limits.days), (self.cost_usd, limits.budget_usd), (self.slice.chips, limits.chips))
        ratios = (inf if figure is None else figure / limit for figure, limit in figures if limit is not None)
        return max(ratios, default=0.0)

    @property
    def is_estimate(self) -> bool:
        """True if its times are estimates, which may flatter it.

        No training of the kind of model was measured on the chip, or the plan leaves the compiler no room in HBM.
        """
        return self.plan is not None and (self.plan.evidence.level == "estimate" or not self.plan.leaves_room)

    def score(self, aim: Aim) -> tuple[float, float, int]:
        """Sort key of slices that meet all limits: the figure to minimise, then time and chips."""
        cost = inf if self.cost_usd is None else self.cost_usd
        first = {"cost": cost, "time": self.token_s, "chips": float(self.slice.chips)}[aim]
        return first, self.token_s, self.slice.chips


@dataclass(frozen=True, kw_only=True)
class OfferDocument(PlanSummary):
    """A slice of a comparison with its best plan as JSON; ``why`` it is not the one that is recommended.

    Intervals are the 5th and 95th percentile of ``days`` and ``cost_usd``, of the same evidence as those of its plan.
    ``price_usd_per_hour`` is of one chip.
    """

    chip: str
    slice: str
    chips: int
    bound: str
    tokens_per_s: float
    days: float | None
    cost_usd: float | None
    interval_days: tuple[float, float] | None = None
    interval_usd: tuple[float, float] | None = None
    evidence_runs: int = 0
    price_usd_per_hour: float | None = None
    price_source: str | None = None
    meets: bool
    is_estimate: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class LeftOut(Record):
    """A chip or slice on which nothing runs, and why."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class ComparisonDocument(Record):
    """A comparison of slices as JSON: the best first. If it does not meet the limits, it comes nearest to them."""

    aim: Aim
    limits: Limits
    best: OfferDocument
    others: tuple[OfferDocument, ...]
    left_out: tuple[LeftOut, ...]
    planned: int


@dataclass(frozen=True, kw_only=True)
class SliceComparison:
    """The slice that meets all limits at the least of the aim, or comes nearest; the best of every other chip next.

    ``others``: the best of the other chips, then the sizes next to the best, each with a plan.
    """

    aim: Aim
    limits: Limits
    best: Offer
    others: Sequence[Offer]
    left_out: Sequence[LeftOut]
    planned: int

    @property
    def meets(self) -> bool:
        """True if the best meets all limits."""
        return self.best.excess(self.limits) <= 1

    @property
    def document(self) -> ComparisonDocument:
        """The comparison as a record."""
        return ComparisonDocument(
            aim=self.aim,
            limits=self.limits,
            best=self._described(self.best),
            others=tuple(map(self._described, self.others)),
            left_out=tuple(self.left_out),
            planned=self.planned,
        )

    def require_met(self) -> None:
        """Raise Infeasible with the nearest slice if none meets all limits."""
        if not self.meets:
            limits = " and ".join(_limit_texts(self.limits))
            assert self.best.plan is not None
            raise Infeasible(
                f"no slice trains {self.best.plan.problem.model.name} within {limits}",
                f"nearest is {self.best.slice.name}: {self.why(self.best)}",
            )

    def why(self, offer: Offer) -> str:
        """The reason why an offer is not the one that is recommended: limits that it misses, or what it costs more."""
        estimate = ["its times are estimates"] if offer.is_estimate else []
        return "; ".join([*self._worse(offer), *self._alike(offer), *estimate])

    def _alike(self, offer: Offer) -> list[str]:
        """Marks of an offer that the intervals hardly tell from the best, if both meet the limits alike.

        "not distinguishable": either figure is within the interval of the other. "intervals overlap": only the
        intervals share some values. Nothing if they share none.
        """
        if offer is self.best or self.aim == "chips" or (offer.excess(self.limits) <= 1) != self.meets:
            return []
        figures = []
        for one in (self.best, offer):
            # Dollars of a step, or its seconds: all slices have the same batch.
            price = one.slice.price_usd_per_hour if self.aim == "cost" else 1.0
            if one.plan is None or price is None:
                return []
            interval = one.plan.interval_s or (one.plan.expected_s, one.plan.expected_s)
            figures.append((one.plan.expected_s * price, [seconds * price for seconds in interval]))
        (ours, (our_low, our_high)), (its, (its_low, its_high)) = figures
        if its_low <= ours <= its_high or our_low <= its <= our_high:
            return ["not distinguishable"]
        return ["intervals overlap"] if its_low <= our_high and our_low <= its_high else []

    def _worse(self, offer: Offer) -> list[str]:
        """The limits that an offer misses, or its figures next to the best ones; nothing for the best itself."""
        missed = list(_missed(offer, self.limits))
        if missed or offer is self.best:
            return missed
        ours, its = self.best.score(self.aim), offer.score(self.aim)
        if its[0] == inf:
            return [_unpriced(offer)]
        name = {"cost": "dollars", "time": "time", "chips": "chips"}[self.aim]
        more = f"{its[0] / ours[0] - 1:+.0%} {name}"
        if self.aim != "time" and offer.token_s < self.best.token_s:
            return [f"{more}, {offer.token_s / self.best.token_s - 1:+.0%} time"]
        if self.aim == "time" and offer.cost_usd is not None and self.best.cost_usd is not None:
            return [f"{more}, {offer.cost_usd / self.best.cost_usd - 1:+.0%} dollars"]
        return [more]

    def _described(self, offer: Offer) -> OfferDocument:
        plan = offer.plan
        assert plan is not None
        return OfferDocument(
            chip=offer.slice.chip.name,
            slice=offer.slice.name,
            chips=offer.slice.chips,
            bound=plan.bound,
            tokens_per_s=plan.tokens_per_s,
            days=plan.days,
            cost_usd=plan.cost_usd,
            interval_days=_over(plan.interval_s, plan.problem.days_at),
            interval_usd=_over(plan.interval_s, plan.problem.cost_usd_at),
            evidence_runs=plan.evidence.runs,
            price_usd_per_hour=offer.slice.chip.price_usd_per_hour,
            price_source=offer.slice.chip.price_source,
            meets=offer.excess(self.limits) <= 1,
            is_estimate=offer.is_estimate,
            why=self.why(offer),
            **field_values(plan.summary),
        )


def compare(
    problem: Problem,
    where: Mapping[str, Sequence[Slice]],
    limits: Limits,
    aim: Aim,
    on_progress: OnProgress | None = None,
) -> SliceComparison:
    """Plan a job on slices and recommend one. ``where``: for each name that was asked for the slices it may be.

    A name with one slice is planned as it is; of a name with several the sizes that matter are. Raises Infeasible if
    nothing fits and runs, and RooftopError on limits that need tokens that the workload has not.
    """
    if problem.workload.tokens is None and (limits.days is not None or limits.budget_usd is not None):
        name = "days" if limits.days is not None else "budget"
        raise RooftopError(name, limits.days or limits.budget_usd, "this with --tokens, the tokens of the whole run")
    looker = _Looker(
        problem=problem, limits=limits, aim=aim, on_progress=on_progress, total=sum(map(len, where.values()))
    )
    bests: list[Offer] = []
    left_out: list[LeftOut] = []
    of_best: dict[str, list[Offer]] = {}
    for name, sizes in where.items():
        offers = looker.offers(sizes)
        if offers:
            bests.append(offers[0])
            of_best[bests[-1].slice.name] = offers
        else:
            left_out.append(LeftOut(name=name, why=_nothing(problem, sizes, limits)))
    if not bests:
        what = f"{problem.model.name} cannot be trained on {', '.join(where)}"
        largest = max((size for sizes in where.values() for size in sizes), key=lambda size: size.hbm_bytes)
        near = _nearest(replace(problem, slice=largest), on_progress)
        raise Infeasible(what, "; ".join(entry.why for entry in left_out), near)
    bests.sort(key=looker.order)
    best = bests[0]
    by_size = sorted(of_best[best.slice.name], key=lambda offer: offer.slice.chips)
    at = by_size.index(best)
    return SliceComparison(
        aim=aim,
        limits=limits,
        best=best,
        others=[*bests[1:], *looker.first_planned(by_size[:at][::-1]), *looker.first_planned(by_size[at + 1 :])],
        left_out=left_out,
        planned=looker.planned,
    )


def searched_on(offer: Offer) -> Sweep:
    """The search of which an offer is the best, with its alternatives."""
    return sweep(offer.problem, SweepOptions(executable=True, axes=offer.axes))


@dataclass(kw_only=True)
class _Looker:
    """Plans of one job on slices, those that matter."""

    problem: Problem
    limits: Limits
    aim: Aim
    on_progress: OnProgress | None
    total: int
    planned: int = 0
    passed: int = field(default=0)

    def offers(self, sizes: Sequence[Slice]) -> list[Offer]:
        """Offers of ascending sizes of a chip, or of one slice, those with a plan or ruled out; the best is first."""
        begun = self.passed
        if len(sizes) == 1:
            looked = iter([self._offer(sizes[0], axes=AXES)])
        elif self.aim == "chips":
            looked = self._first(self._possible(sizes))
        elif self.limits.days is not None:
            looked = self._in_time(self._possible(sizes))
        elif self.limits.budget_usd is not None:
            looked = self._within_budget(self._possible(sizes))
        else:
            looked = self._fastest(self._possible(sizes))
        offers = sorted((offer for offer in looked if offer.step_s < inf), key=self.order)
        # A slice that was ruled out comes first where no other meets the limits: its bound may be better than its plan.
        while offers and offers[0].ruled_out:
            planned = self._planned(offers.pop(0))
            offers = sorted([*offers, *([planned] if planned.plan is not None else [])], key=self.order)
        self.passed = begun + len(sizes)
        return offers

    def order(self, offer: Offer) -> tuple[float, float, float, int]:
        """Sort key: offers within the limits by the aim, then the others by their excess."""
        excess = offer.excess(self.limits)
        return (1.0 if excess <= 1 else excess, *offer.score(self.aim))

    def first_planned(self, offers: Sequence[Offer]) -> list[Offer]:
        """The first offer that has a plan, planned now if it was ruled out; none if no offer has one."""
        planned = (self._planned(offer) if offer.ruled_out else offer for offer in offers)
        return list(islice((offer for offer in planned if offer.plan is not None), 1))

    def _possible(self, sizes: Sequence[Slice]) -> list[Slice]:
        """Sizes that are large enough for the state, and could be in time at peak rate; ascending."""
        state = smallest_chips(replace(self.problem, slice=sizes[0]))
        tokens, days = self.problem.workload.tokens, self.limits.days
        most = inf if days is None or tokens is None else days * 86400 / tokens
        large = [size for size in sizes if size.chips >= state]
        # If none could be in time, the largest comes nearest.
        return [size for size in large if self._least_token_s(size) <= most] or large[-1:]

    def _first(self, sizes: Sequence[Slice]) -> Iterator[Offer]:
        for size in sizes:
            offer = self._offer(size)
            yield offer
            if offer.excess(self.limits) <= 1:
                return

    def _in_time(self, sizes: Sequence[Slice]) -> Iterator[Offer]:
        most, least, slower = inf, inf, 0
        rival: Offer | None = None
        for size in sizes:
            if size.chips > most or slower == _IN_A_ROW:
                return
            offer = self._offer(size, rival)
            yield offer
            if offer.excess(self.limits) <= 1:
                most = min(most, 2 * size.chips)
                rival = self._better(rival, offer)
            if offer.step_s < inf:
                # The bound of a slice that was ruled out is no time to beat.
                slower = 0 if offer.token_s < least else slower + 1
                least = least if offer.ruled_out else min(least, offer.token_s)

    def _within_budget(self, sizes: Sequence[Slice]) -> Iterator[Offer]:
        dear = 0
        rival: Offer | None = None
        for size in sizes:
            offer = self._offer(size, rival)
            yield offer
            excess = offer.excess(self.limits)
            rival = self._better(rival, offer) if excess <= 1 else rival
            if offer.step_s < inf:
                dear = dear + 1 if excess > 1 else 0
            if dear == _IN_A_ROW:
                return

    def _fastest(self, sizes: Sequence[Slice]) -> Iterator[Offer]:
        rival: Offer | None = None
        for size in reversed(sizes):
            if rival is not None and self._least_token_s(size) >= rival.token_s:
                return
            offer = self._offer(size, rival)
            yield offer
            rival = self._better(rival, offer)

    def _better(self, rival: Offer | None, offer: Offer) -> Offer | None:
        """The better one of two offers with a plan."""
        if offer.plan is None:
            return rival
        return offer if rival is None else min(rival, offer, key=self.order)

    def _least_token_s(self, size: Slice) -> float:
        """Seconds of a token's FLOPs at the peak of all chips."""
        flops = float(flops_per_token(self.problem.model, self.problem.workload.seq_len).total)
        return flops / size.flops_per_s(self.problem.numerics.matmul)

    def _offer(self, size: Slice, rival: Offer | None = None, *, axes: Sequence[str] = ()) -> Offer:
        """The offer of a slice; ruled out if its bounds miss a limit, or are worse than a ``rival``."""
        if self.on_progress is not None:
            self.on_progress(self.passed, self.total, size.name)
        self.passed += 1
        self.planned += 1
        problem = replace(self.problem, slice=size)
        bounded = not axes
        # Between slices only copies and stages run.
        axes = axes or (OUTLINE_AXES if size.chips // size.num_slices >= smallest_chips(problem) else AXES)
        return self._planned(Offer(problem=problem, axes=axes), rival, bounded=bounded)

    def _planned(self, offer: Offer, rival: Offer | None = None, *, bounded: bool = False) -> Offer:
        """An offer with its plan if it has one; ``bounded``: ruled out if its bounds leave no hope."""
        problem, bound = offer.problem, offer
        offer = replace(offer, step_s=inf, ruled_out=False)
        if refusal(problem) is not None:
            return offer

        def worth(devices: Ints, seconds: Floats) -> bool:
            nonlocal bound
            bound = replace(offer, step_s=float(seconds.min()), ruled_out=True)
            if bound.step_s == inf:
                return True
            return bound.excess(self.limits) <= 1 and (rival is None or self.order(bound) < self.order(rival))

        try:
            options = SweepOptions(executable=True, axes=offer.axes, ranked=1, worth=worth if bounded else None)
            searched = sweep(problem, options)
        except RooftopError:
            # A slice on which no mesh or schedule can be.
            return offer
        if not len(searched.expected_s):
            return bound
        if not searched.fits.any() or (plan := searched.plan(searched.best)).obstacles:
            return offer
        return replace(offer, plan=plan, step_s=float(searched.expected_s[searched.best]))


def _over(
    interval_s: tuple[float, float] | None, figure_at: Callable[[float], float | None]
) -> tuple[float, float] | None:
    """The figure at both ends of an interval of step times; None without an interval, or without the figure."""
    if interval_s is None:
        return None
    low, high = map(figure_at, interval_s)
    return None if low is None or high is None else (low, high)


def _unpriced(offer: Offer) -> str:
    """The price that is missing, and how to give it."""
    return f"no list price: --price {offer.slice.chip.name}=USD"


def _missed(offer: Offer, limits: Limits) -> Iterator[str]:
    """The limits that an offer misses, in words."""
    if limits.days is not None and offer.days is not None and offer.days > limits.days:
        yield f"{offer.days:,.1f} days, not {limits.days:g}"
    if limits.budget_usd is not None:
        if offer.cost_usd is None:
            yield _unpriced(offer)
        elif offer.cost_usd > limits.budget_usd:
            yield f"${offer.cost_usd:,.0f}, not ${limits.budget_usd:,.0f}"
    if limits.chips is not None and offer.slice.chips > limits.chips:
        yield f"{counted(offer.slice.chips, 'chip')}, not {limits.chips:,}"


def _limit_texts(limits: Limits) -> Iterator[str]:
    if limits.days is not None:
        yield format_seconds(limits.days * 86400)
    if limits.budget_usd is not None:
        yield f"${limits.budget_usd:,.0f}"
    if limits.chips is not None:
        yield counted(limits.chips, "chip")


def _nearest(problem: Problem, on_progress: OnProgress | None) -> str | None:
    """The nearest plan that programs run and memory holds, and is not on the slice of the problem, as a text."""
    searched = sweep(problem)
    if (plan := nearest_executable(searched.plan(searched.best), on_progress)) is None:
        return None
    return NearestPlan.of(plan).text


def _nothing(problem: Problem, sizes: Sequence[Slice], limits: Limits) -> str:
    """The reason why no slice runs a job."""
    in_time = "" if limits.days is None else f", that could take {limits.days:g} days"
    largest = replace(problem, slice=max(sizes, key=lambda size: size.chips))
    if (refused := refusal(largest)) is not None:
        return refused
    if len(sizes) > 1:
        return f"nothing that programs run fits, up to {largest.slice.name}{in_time}"
    searched = sweep(largest)
    plan = searched.plan(searched.best)
    return plan.obstacles[0] if plan.fits and plan.obstacles else f"does not fit: {shortfall(largest, plan.memory)}"
