"""The cheapest chips, slices, number formats and mode that serve a rate of requests within targets.

Prefill and generate servers are chosen apart where they are disaggregated: they meet in the KV's transfer only. A
server is kept below ``LOAD`` of what it can take; requests wait for a prefill as before one server with constant
service times (M/D/1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, inf
from typing import Any, Literal, get_args

import numpy as np

from rooftop.arrays.mesh import Floats
from rooftop.core.errors import Infeasible
from rooftop.core.quantities import format_seconds
from rooftop.core.records import Record
from rooftop.hardware import MOST_CHIPS, Slice
from rooftop.plan.pricing import OnProgress
from rooftop.plan.serving.answer import ServingAnswerDocument
from rooftop.plan.serving.nearest import nearest_plans
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import Mode, ServingProblem
from rooftop.plan.serving.search import (
    BatchChoice,
    FrontPoint,
    PrefillSweep,
    batch_grid,
    choices_of,
    most_of_each,
    pareto,
    price_prompts,
    slices_of,
    sweep_slices,
)
from rooftop.plan.serving.workload import ServingNumerics
from rooftop.roofline.rules import interleaved_token_s, interleaved_tokens_per_s, queue_wait_s

#: Largest mean load of a server: the rest is for bursts. A planning choice, not a measurement.
LOAD = 0.8
#: Larger slices are not searched: heads and hidden columns split no further.
MOST_SERVER_CHIPS = 64
Objective = Literal["cost", "chips"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Servers for a rate of requests, and the latencies of a request. Counts are fractional without a rate."""

    plan: ServingPlan
    prefill_servers: float
    generate_servers: float
    ttft_s: float
    tpot_s: float

    @property
    def chips(self) -> float:
        """Chips of all servers."""
        problem = self.plan.problem
        return self.prefill_servers * problem.prefill_server.chips + self.generate_servers * problem.slice.chips

    @property
    def usd_per_hour(self) -> float | None:
        """List price of all servers."""
        price = self.plan.problem.slice.chip.price_usd_per_hour
        return None if price is None else price * self.chips

    @property
    def token_prices(self) -> TokenPrices | None:
        """Dollars per million tokens at the asked rate, and at full load; None without a rate or a price.

        The bill is split between tokens in and out as at full load, so that both at the rate make up the bill.
        """
        work, full = self.plan.problem.workload, self.plan.cost_per_million_tokens
        rate, bill = work.requests_per_second, self.usd_per_hour
        prices = full.input, full.output
        if rate is None or bill is None or prices[0] is None or prices[1] is None:
            return None
        into, out = prices[0], prices[1]
        if self.plan.problem.mode == "interleaved":
            # Tokens out of one server pay for its prefills as well.
            out = max(out - into * work.prompt / work.generate, 0.0)
        millions = rate * 3600 * work.prompt / 1e6, rate * 3600 * work.generate / 1e6
        idle = bill / (millions[0] * into + millions[1] * out)
        return TokenPrices(input=into * idle, output=out * idle, full_load_input=into, full_load_output=out)

    @property
    def is_estimate(self) -> bool:
        """True if no decoding of the kind of model was measured on the chip: its times may flatter it."""
        return self.plan.evidence.decode.level == "estimate"

    def score(self, objective: Objective) -> float:
        """The figure to minimise."""
        if objective == "chips":
            return self.chips
        return inf if self.usd_per_hour is None else self.usd_per_hour

    @property
    def name(self) -> str:
        """One line that describes the fleet."""
        problem = self.plan.problem
        numerics = problem.numerics
        kind = f"{numerics.weights} weights, {numerics.kv} KV"
        if problem.mode == "interleaved":
            return f"{self.generate_servers:.3g} x {problem.slice.name} interleaved, {kind}, batch {self.plan.batch}"
        return (
            f"{self.prefill_servers:.3g} x {problem.prefill_server.name} for prefill and "
            f"{self.generate_servers:.3g} x {problem.slice.name} for generation, {kind}, batch {self.plan.batch}"
        )

    @property
    def document(self) -> FleetDocument:
        """The fleet as a record."""
        problem = self.plan.problem
        return FleetDocument(
            name=self.name,
            mode=problem.mode,
            chip=problem.slice.chip.name,
            prefill_slice=problem.prefill_server.name,
            generate_slice=problem.slice.name,
            prefill_servers=self.prefill_servers,
            generate_servers=self.generate_servers,
            batch=self.plan.batch,
            weights=problem.numerics.weights,
            kv=problem.numerics.kv,
            chips=self.chips,
            usd_per_hour=self.usd_per_hour,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            is_estimate=self.is_estimate,
            token_prices=self.token_prices,
            price_usd_per_hour=problem.slice.chip.price_usd_per_hour,
            price_source=problem.slice.chip.price_source,
            evidence_runs=self.plan.evidence.decode.runs,
            executable=not self.plan.obstacles,
        )


@dataclass(frozen=True, kw_only=True)
class TokenPrices(Record):
    """Dollars per million tokens of a fleet: of its bill at the asked rate, and at full load."""

    input: float
    output: float
    full_load_input: float
    full_load_output: float


@dataclass(frozen=True, kw_only=True)
class FleetDocument(Record):
    """Servers for a rate of requests as JSON. ``price_usd_per_hour`` is of one chip, ``evidence_runs`` of decoding."""

    name: str
    mode: Mode
    chip: str
    prefill_slice: str
    generate_slice: str
    prefill_servers: float
    generate_servers: float
    batch: int
    weights: str
    kv: str
    chips: float
    usd_per_hour: float | None
    ttft_s: float
    tpot_s: float
    is_estimate: bool
    token_prices: TokenPrices | None = None
    price_usd_per_hour: float | None = None
    price_source: str | None = None
    evidence_runs: int = 0
    executable: bool = True


@dataclass(frozen=True, kw_only=True)
class LostFleet(FleetDocument):
    """A fleet that is not the best, and why."""

    why: str


@dataclass(frozen=True, kw_only=True)
class LostChip(Record):
    """A chip of which no fleet is within the targets, and what comes nearest."""

    chip: str
    why: str


@dataclass(frozen=True, kw_only=True)
class RecommendationDocument(Record):
    """The best fleet, the others with the reasons why they lost, and the largest load of a server, as JSON."""

    objective: Objective
    best: FleetDocument
    others: tuple[LostFleet, ...]
    left_out: tuple[LostChip, ...] = ()
    load: float
    searched: int


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The best fleet, and the best of every other kind (chip, number formats, mode), best first."""

    best: Fleet
    others: Sequence[Fleet]
    left_out: Sequence[LostChip] = ()
    objective: Objective
    searched: int

    def why(self, other: Fleet) -> str:
        """The reason why ``other`` lost."""
        best, lost = self.best.score(self.objective), other.score(self.objective)
        if lost == inf:
            return f"no list price: --price {other.plan.problem.slice.chip.name}=USD"
        what = {"cost": "dollars an hour", "chips": "chips"}[self.objective]
        parts = [f"{lost:,.4g} {what} against {best:,.4g}, {lost / best - 1:+.0%}"]
        for name, its, ours in (
            ("TTFT", other.ttft_s, self.best.ttft_s),
            ("TPOT", other.tpot_s, self.best.tpot_s),
        ):
            if its < ours:
                parts.append(f"{name} {format_seconds(its)} against {format_seconds(ours)}")
        if other.is_estimate:
            parts.append("times are estimates")
        return "; ".join(parts)

    @property
    def document(self) -> RecommendationDocument:
        """The recommendation as a record."""
        return RecommendationDocument(
            objective=self.objective,
            best=self.best.document,
            others=tuple(LostFleet(**vars(other.document), why=self.why(other)) for other in self.others),
            left_out=tuple(self.left_out),
            load=LOAD,
            searched=self.searched,
        )


@dataclass(frozen=True, kw_only=True)
class FleetAnswerDocument(ServingAnswerDocument):
    """plan.json of a server, and of the fleet that is recommended of it."""

    sparse = frozenset({"request"})

    recommendation: RecommendationDocument | None = None
    request: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ServingFrontDocument(Record):
    """The front over slices, number formats and batches as JSON."""

    sparse = frozenset({"request"})

    kind: Literal["pareto"]
    model: str
    pareto: tuple[FleetPoint, ...]
    request: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _FleetServer:
    """A prefill or generate server of some kind, and how many of them the rate needs."""

    problem: ServingProblem
    placement: Placement
    batch: int
    count: float
    seconds: float
    latency_s: float

    @property
    def chips(self) -> float:
        return self.count * self.placement.slice.chips


def recommend(
    problem: ServingProblem,
    where: Mapping[str, Sequence[Slice]],
    numerics: Sequence[ServingNumerics],
    modes: Sequence[Mode],
    objective: Objective = "cost",
    on_progress: OnProgress | None = None,
) -> Recommendation:
    """The cheapest fleet (or that of fewest chips) for the workload's rate and targets.

    ``where``: the slices that a server may be, by chip (prefill is on the problem's ``prefill_slice`` if it has one).
    Raises Infeasible with the nearest that can be reached.
    """
    best_of_kinds: list[Fleet] = []
    searched, kinds_done, kinds_in_all = 0, 0, len(where) * len(modes) * len(numerics)
    for slices, mode in product(where.values(), modes):
        # Smallest first: a fleet has a whole server at least.
        ordered = sorted(slices, key=lambda slice_: slice_.chips)
        sized = [replace(problem, slice=slice_, mode=mode) for slice_ in ordered]
        placements = [_placements(on_slice) for on_slice in sized]
        for kinds in numerics:
            if on_progress is not None:
                on_progress(kinds_done, kinds_in_all, f"{mode} servers of {ordered[0].chip.name}")
            kinds_done += 1
            fleets_of = _interleaved if mode == "interleaved" else _Disaggregated()
            best: Fleet | None = None
            for servers in _priced_servers([replace(on_slice, numerics=kinds) for on_slice in sized], placements):
                if best is not None and _is_settled(best, servers.problem.slice):
                    break
                for fleet in fleets_of(servers):
                    searched += 1
                    if best is None or _order(fleet, objective) < _order(best, objective):
                        best = fleet
            if best is not None:
                best_of_kinds.append(best)
    if not best_of_kinds:
        largest = [max(slices, key=lambda slice_: slice_.chips) for slices in where.values()]
        by = f"not one sequence on slices up to {', '.join(slice_.name for slice_ in largest)}"
        raise Infeasible(f"{problem.model.name} does not fit", by, _smallest_server(problem, largest))
    best_of_kinds.sort(key=lambda fleet: _order(fleet, objective))
    best = best_of_kinds[0]
    if _excess(best) > 1:
        raise Infeasible(_targets(problem), _nearest(best))
    rate = problem.workload.requests_per_second
    if rate is not None and best.chips > MOST_CHIPS:
        most = rate * MOST_CHIPS / best.chips
        raise Infeasible(
            f"{problem.model.name} at {rate:,.4g} requests a second",
            f"takes {best.chips:,.4g} chips, more than {MOST_CHIPS:,}; those serve {most:,.4g} a second",
        )
    others = [fleet for fleet in best_of_kinds[1:] if _excess(fleet) <= 1]
    shown = {fleet.plan.problem.slice.chip.name for fleet in (best, *others)}
    nearest: dict[str, Fleet] = {}
    for fleet in best_of_kinds:
        nearest.setdefault(fleet.plan.problem.slice.chip.name, fleet)
    left_out = [
        LostChip(chip=name, why=_nearest(nearest[name]) if name in nearest else "not one sequence fits")
        for name in dict.fromkeys(slices[0].chip.name for slices in where.values())
        if name not in shown
    ]
    return Recommendation(best=best, others=others, left_out=left_out, objective=objective, searched=searched)


def _smallest_server(problem: ServingProblem, slices: Sequence[Slice]) -> str | None:
    """The server of fewest chips, of those larger than ``slices``, that an engine runs; None if there is none."""
    near = [plan for slice_ in slices for plan in nearest_plans(replace(problem, slice=slice_))]
    if not near:
        return None
    plan = min(near, key=lambda plan: plan.problem.slice.chips)
    return f"batch {plan.batch} on {plan.problem.slice.name}"


def _placements(problem: ServingProblem) -> tuple[list[Placement], list[Placement]]:
    """Placements of generation on a slice and, on a server of its own, of prefill: those of engines."""
    generate = problem.generate_placements()
    return problem.nearest_engines(generate) if generate else [], (
        problem.engine_prefills() if problem.mode == "disaggregated" else []
    )


def _order(fleet: Fleet, objective: Objective) -> tuple[float, bool, float, float, float]:
    """Sort key: fleets within the targets, those that engines run first, by the objective; others by their excess."""
    excess = _excess(fleet)
    if excess > 1:
        return excess, True, 0.0, 0.0, 0.0
    return 1.0, bool(fleet.plan.obstacles), fleet.score(objective), fleet.chips, fleet.tpot_s


def _is_settled(best: Fleet, slice_: Slice) -> bool:
    """True if no fleet with a server on a slice, of the same chip, can be as good as one that meets the targets."""
    whole = best.plan.problem.workload.requests_per_second is not None
    return whole and slice_.chips > best.chips and _excess(best) <= 1 and not best.plan.obstacles


def _excess(fleet: Fleet) -> float:
    """The larger ratio of a latency to its target; at most 1 where both are met."""
    work = fleet.plan.problem.workload
    return max(fleet.ttft_s / (work.ttft_s or inf), fleet.tpot_s / (work.tpot_s or inf))


def _targets(problem: ServingProblem) -> str:
    work = problem.workload
    targets = [("TTFT", work.ttft_s), ("TPOT", work.tpot_s)]
    text = " and ".join(f"{name} {format_seconds(target)}" for name, target in targets if target is not None)
    return f"no configuration of {problem.model.name} reaches {text}"


def _nearest(fleet: Fleet) -> str:
    return (
        f"nearest is TTFT {format_seconds(fleet.ttft_s)} and TPOT {format_seconds(fleet.tpot_s)} "
        f"({_excess(fleet):.2f} times the target) with {fleet.name}"
    )


def candidate_slices(like: Slice) -> list[Slice]:
    """Slices of the chip that are searched: all of the catalogue up to ``MOST_SERVER_CHIPS``."""
    return [slice_ for slice_ in slices_of(like) if slice_.chips <= MOST_SERVER_CHIPS]


@dataclass(frozen=True, kw_only=True)
class FleetPoint(FrontPoint):
    """A point of the front of a slice and its number formats."""

    slice: str
    weights: str
    kv: str


def front(
    problem: ServingProblem,
    where: Mapping[str, Sequence[Slice]],
    numerics: Sequence[ServingNumerics],
    on_progress: OnProgress | None = None,
) -> list[FleetPoint]:
    """Slices, number formats and batches at which no other generates both faster and at less cost, fastest first.

    Cost is dollars per token, or chips per token/s where a chip has no price.
    """
    priced = all(slices[0].price_usd_per_hour is not None for slices in where.values())
    points = []
    kinds_of_servers = list(product([slice_ for slices in where.values() for slice_ in slices], numerics))
    for done, (slice_, kinds) in enumerate(kinds_of_servers):
        if on_progress is not None:
            on_progress(done, len(kinds_of_servers), f"servers on {slice_.name}")
        sized = replace(problem, slice=slice_, numerics=kinds)
        points += [
            FleetPoint(**vars(point), slice=slice_.name, weights=kinds.weights, kv=kinds.kv)
            for point in pareto(sized, sized.nearest_engines(sized.generate_placements()))
        ]
    undominated = []
    least = inf
    for point in sorted(points, key=lambda point: (point.step_s, -point.tokens_per_s_per_chip)):
        cost = point.usd_per_million_tokens if priced else None
        cost = 1 / point.tokens_per_s_per_chip if cost is None else cost
        if cost < least:
            least = cost
            undominated.append(point)
    return undominated


@dataclass(frozen=True)
class _Disaggregated:
    """Prefill and generate servers of every slice so far, by key/value heads of their caches, copies included.

    An engine sends a cache to another only if both have as many.
    """

    prefills: defaultdict[tuple[object, ...], list[_FleetServer]] = field(default_factory=lambda: defaultdict(list))
    generates: defaultdict[tuple[object, ...], list[_FleetServer]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, servers: _Servers) -> Iterator[Fleet]:
        """Yield fleets with these servers, and those of earlier calls."""
        problem = servers.problem
        work = problem.workload
        changed = set[tuple[object, ...]]()
        for server in _prefill_servers(servers.prefills):
            heads = problem.cache_kind(server.placement)
            self.prefills[heads].append(server)
            changed.add(heads)
        rate = work.requests_per_second
        for step in servers.steps:
            heads = problem.cache_kind(step.placement)
            count = _whole((rate or 1.0) * work.generate * step.seconds / (LOAD * step.batch), rate)
            self.generates[heads].append(
                _FleetServer(
                    problem=problem, placement=step.placement, batch=step.batch, count=count, seconds=step.seconds,
                    latency_s=step.seconds,
                )
            )  # fmt: skip
            changed.add(heads)
        for heads in changed:
            if not (self.prefills[heads] and self.generates[heads]):
                continue
            pairs = product(_best(self.prefills[heads], work.ttft_s), _best(self.generates[heads], work.tpot_s))
            for first, second in pairs:
                joint = replace(second.problem, prefill_slice=first.placement.slice)
                plan = ServingPlan(
                    problem=joint, generate_on=second.placement, prefill_on=first.placement, batch=second.batch
                )
                yield Fleet(
                    plan=plan,
                    prefill_servers=first.count,
                    generate_servers=second.count,
                    ttft_s=first.latency_s,
                    tpot_s=plan.tpot_at(second.seconds),
                )


@dataclass(frozen=True, kw_only=True)
class _Servers:
    """Servers of one kind on the problem's slice: a step of each batch, and prefills that are apart, or shared."""

    problem: ServingProblem
    steps: Sequence[BatchChoice]
    prefills: PrefillSweep
    shared: Sequence[tuple[Placement, float]]
    """For each step the prefill on the same server, where both phases share one, and the seconds of a prompt."""


def _priced_servers(
    problems: Sequence[ServingProblem], placements: Sequence[tuple[list[Placement], list[Placement]]]
) -> Iterator[_Servers]:
    """Price the servers of one kind on several slices of a chip."""
    first = problems[0]
    if (first.book or first.assumptions.mfu is not None) and len(problems) > 1:
        # The book's arithmetic knows devices, and not how they are laid out.
        for problem, some in zip(problems, placements, strict=True):
            yield from _priced_servers([problem], [some])
        return
    steps = _steps(problems, [generate for generate, _ in placements])
    prefills = PrefillSweep.of_slices(problems, [prefill for _, prefill in placements])
    shared: list[list[Placement]] = [[] for _ in problems]
    if first.mode == "interleaved":
        shared = [[first.shared_prefill(step.placement) for step in some] for some in steps]
    different = list({id(on): on for some in shared for on in some}.values())
    seconds = price_prompts(first, different).tolist() if different else []
    seconds_of = dict(zip(map(id, different), seconds, strict=True))
    for problem, chosen, apart, joined in zip(problems, steps, prefills, shared, strict=True):
        yield _Servers(
            problem=problem, steps=chosen, prefills=apart, shared=[(on, seconds_of[id(on)]) for on in joined]
        )  # fmt: skip


def _prefill_servers(swept: PrefillSweep) -> Iterator[_FleetServer]:
    """The fastest prefill servers that fit, one for each cache of key/value heads."""
    problem = swept.problem
    work = problem.workload
    memory_of = dict(zip(map(id, swept.placements), swept.memory_bytes.tolist(), strict=True))
    for heads in dict.fromkeys(map(problem.cache_kind, swept.placements)):
        best = swept.best(heads)
        assert best is not None
        placement, seconds = best
        if memory_of[id(placement)] <= problem.capacity:
            count, wait = _prefill_count(seconds, work.requests_per_second, work.ttft_s)
            yield _FleetServer(
                problem=problem, placement=placement, batch=1, count=count, seconds=seconds, latency_s=seconds + wait
            )


def _interleaved(servers: _Servers) -> Iterator[Fleet]:
    """Yield fleets of one kind of server."""
    problem = servers.problem
    work = problem.workload
    for step, (on, prefill) in zip(servers.steps, servers.shared, strict=True):
        between = interleaved_token_s(step.seconds, prefill, step.batch, work.generate)
        tokens_per_s = interleaved_tokens_per_s(step.seconds, prefill, step.batch, work.generate)
        served = LOAD * tokens_per_s / work.generate
        wait = queue_wait_s(prefill, min(served * prefill, 0.99)) + step.seconds / 2
        plan = ServingPlan(problem=problem, generate_on=step.placement, prefill_on=on, batch=step.batch)
        count = _whole((work.requests_per_second or 1.0) / served, work.requests_per_second)
        yield Fleet(plan=plan, prefill_servers=0, generate_servers=count, ttft_s=prefill + wait, tpot_s=between)


def _steps(problems: Sequence[ServingProblem], placements: Sequence[Sequence[Placement]]) -> list[list[BatchChoice]]:
    """For each slice the fastest placement of every batch that fits, with the seconds between two tokens."""
    batch_seqs = problems[0].workload.batch_seqs
    most = iter(most_of_each(problems[0], [placement for some in placements for placement in some]))
    largest = [max((next(most) for _ in some), default=0) for some in placements]
    fitting = [at for at, size in enumerate(largest) if size]
    batches = [
        # A third of the grid: steps of a quarter in the batch are fine enough to compare fleets.
        _third(batch_grid(largest[at])) if batch_seqs is None else np.array([float(batch_seqs)])
        for at in fitting
    ]
    sweeps = sweep_slices([problems[at] for at in fitting], [placements[at] for at in fitting], batches)
    steps: list[list[BatchChoice]] = [[] for _ in problems]
    if batch_seqs is None:
        for at, choices in zip(fitting, choices_of(sweeps), strict=True):
            steps[at] = choices
        return steps
    for at, swept in zip(fitting, sweeps, strict=True):
        if np.isfinite(swept.fastest_s[0]):
            steps[at] = [BatchChoice(placement=swept.best(0), batch=batch_seqs, seconds=float(swept.fastest_s[0]))]
    return steps


def _third(batches: Floats) -> Floats:
    """Every third batch, and the last one."""
    return batches[sorted({*range(0, len(batches), 3), len(batches) - 1})]


def _prefill_count(seconds: float, rate: float | None, target_s: float | None) -> tuple[float, float]:
    """Servers that keep the load and, if it can be, the mean time to first token; and the mean wait before one."""
    if rate is None:
        return seconds / LOAD, queue_wait_s(seconds, LOAD)
    load = rate * seconds
    slack = inf if target_s is None else max(target_s - seconds, 0.0)
    # The mean wait, S r / (2 (1 - r)) at r = load / count, is no longer than the slack. More servers than ten times the
    # load would only wait for a burst.
    enough = load * (1 + seconds / (2 * slack)) if slack else inf
    count = max(1, ceil(load / LOAD), ceil(min(enough, 10 * load)))
    return float(count), queue_wait_s(seconds, load / count)


def _whole(count: float, rate: float | None) -> float:
    return count if rate is None else float(ceil(count))


def _best(servers: Sequence[_FleetServer], target_s: float | None) -> list[_FleetServer]:
    """The server of fewest chips within the target, if there is one, and the fastest of all."""
    within = [server for server in servers if target_s is None or server.latency_s <= target_s]
    fastest = min(servers, key=lambda server: server.latency_s)
    if not within:
        return [fastest]
    return [min(within, key=lambda server: (server.chips, server.latency_s)), fastest]
