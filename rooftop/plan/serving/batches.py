"""The batches of a server, each as a plan, and the one that is taken.

With a target of TPOT it is the one of most tokens/s within the target. Without one it is the knee of the front: the
largest batch whose last doubling raised tokens/s by a factor no smaller than that by which it raised TPOT. Of clients
that wait for their answers it is those that have a place in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.search import PrefillSweep, server_batches, sweep_generate

#: How the batch was chosen: by the user, at the knee, by a target of TPOT, with a fleet, or by the clients of a load.
BatchRule = Literal["given", "knee", "target", "fleet", "clients"]


@dataclass(frozen=True, kw_only=True)
class ServerBatches:
    """Plans of one server, smallest batch first; one that does not fit if none does. ``searched`` placements."""

    plans: Sequence[ServingPlan]
    placements: Sequence[Placement]

    @property
    def rule(self) -> BatchRule:
        """The rule that chooses the best plan."""
        work = self.plans[0].problem.workload
        if work.load is not None:
            return "clients"
        if work.batch_seqs is not None:
            return "given"
        return "knee" if work.tpot_s is None else "target"

    @property
    def best(self) -> ServingPlan:
        """The plan at the knee, or of most tokens/s within the target of TPOT; the fastest if none is within it."""
        target = self.plans[0].problem.workload.tpot_s
        if target is None:
            return self.knee
        within = [plan for plan in self.plans if plan.tpot_s <= target]
        if not within:
            return min(self.plans, key=lambda plan: plan.tpot_s)
        return max(within, key=lambda plan: plan.batch / plan.tpot_s)

    @property
    def knee(self) -> ServingPlan:
        """The largest batch whose last doubling paid: see the module. The smallest batch if none did."""
        # With a mixture of experts the first doublings pay less than later ones: more experts are read.
        for at in range(len(self.plans) - 1, 0, -1):
            plan = self.plans[at]
            halves = [half for half in self.plans[:at] if 2 * half.batch <= plan.batch]
            half = halves[-1] if halves else self.plans[0]
            slower = plan.tpot_s / half.tpot_s
            if plan.batch / half.batch >= slower**2:
                return plan
        return self.plans[0]


def search_batches(problem: ServingProblem) -> ServerBatches:
    """Search placements that engines have, others only where those do not fit, and the batch if it is not given.

    Raises RooftopError if no placement divides the model.
    """
    every = problem.generate_placements()
    engines = problem.nearest_engines(every) if every else []
    if problem.workload.load is not None:
        return _under_load(problem, engines)
    batches = _batches(problem, engines, problem.engine_prefills() or problem.prefill_placements())
    if len(engines) < len(every) and not batches.plans[0].fits:
        others = _batches(problem, every, problem.prefill_placements())
        if others.plans[0].fits:
            return others
    return batches


def _under_load(problem: ServingProblem, generate: Sequence[Placement]) -> ServerBatches:
    """The placement on which the clients of the problem's load wait least for a whole answer.

    The batch of its plan are the sequences that have a place at once, and not more than fit with whole answers.
    """
    prefills = problem.engine_prefills() if problem.mode == "disaggregated" else [None]
    load, intervals = problem.workload.load, max(problem.workload.generate - 1, 1)
    if not generate or not prefills or load is None:
        raise _undivided(problem)
    best: tuple[float, ServingPlan] | None = None
    for place in generate:
        prefill_on = _prefill_on(problem, place, _sweep(problem, [one for one in prefills if one is not None]))
        plan = ServingPlan(problem=problem, generate_on=place, prefill_on=prefill_on, batch=1)
        assert plan.under_load is not None
        waits_s = plan.under_load.ttft_s + intervals * plan.under_load.tpot_s
        batch = max(1, min(math.ceil(plan.under_load.active), plan.max_batch))
        if best is None or (plan.fits, -waits_s) > (best[1].fits, -best[0]):
            best = waits_s, replace(plan, batch=batch)
    assert best is not None
    return ServerBatches(plans=[best[1]], placements=generate)


def _undivided(problem: ServingProblem) -> RooftopError:
    accepted = f"a slice whose devices split the {problem.model.heads} heads and F evenly"
    return RooftopError("slice", problem.slice.name, accepted)


def _sweep(problem: ServingProblem, prefill: Sequence[Placement]) -> PrefillSweep | None:
    return PrefillSweep.of(problem, prefill) if problem.mode == "disaggregated" else None


def _batches(problem: ServingProblem, generate: Sequence[Placement], prefill: Sequence[Placement]) -> ServerBatches:
    if not generate or not prefill:
        raise _undivided(problem)
    batch_seqs = problem.workload.batch_seqs
    if batch_seqs is None:
        batches = server_batches(problem, generate)
        swept = sweep_generate(problem, generate, batches if len(batches) else np.ones(1))
        chosen = [(choice.placement, choice.batch) for choice in swept.choices()] or [(swept.best(0), 1)]
    else:
        swept = sweep_generate(problem, generate, np.array([float(batch_seqs)]))
        chosen = [(swept.best(0), batch_seqs)]
    prefills = _sweep(problem, prefill)
    plans = [
        ServingPlan(problem=problem, generate_on=place, prefill_on=_prefill_on(problem, place, prefills), batch=batch)
        for place, batch in chosen
    ]
    return ServerBatches(plans=plans, placements=generate)


def _prefill_on(problem: ServingProblem, generate: Placement, prefills: PrefillSweep | None) -> Placement:
    """The best prefill whose cache an engine can send, or the best of all; on the same mesh where phases share it."""
    if prefills is None:
        return problem.shared_prefill(generate)
    best = prefills.best(problem.cache_kind(generate)) or prefills.best()
    assert best is not None
    return best[0]
