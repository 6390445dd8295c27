"""The batches of a server, each as a plan, and the one that is taken.

With a target of TPOT it is the one of most tokens/s within the target. Without one it is the knee of the front: the
largest batch whose last doubling raised tokens/s by a factor no smaller than that by which it raised TPOT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.search import PrefillSweep, server_batches, sweep_generate

#: How the batch was chosen: by the user, at the knee, by a target of TPOT, or with a fleet.
BatchRule = Literal["given", "knee", "target", "fleet"]


@dataclass(frozen=True, kw_only=True)
class ServerBatches:
    """Plans of one server, smallest batch first; one that does not fit if none does. ``searched`` placements."""

    plans: Sequence[ServingPlan]
    placements: Sequence[Placement]

    @property
    def rule(self) -> BatchRule:
        """The rule that chooses the best plan."""
        work = self.plans[0].problem.workload
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
    batches = _batches(problem, engines, problem.engine_prefills() or problem.prefill_placements())
    if len(engines) < len(every) and not batches.plans[0].fits:
        others = _batches(problem, every, problem.prefill_placements())
        if others.plans[0].fits:
            return others
    return batches


def _batches(problem: ServingProblem, generate: Sequence[Placement], prefill: Sequence[Placement]) -> ServerBatches:
    if not generate or not prefill:
        raise RooftopError(
            "slice", problem.slice.name, f"a slice whose devices split the {problem.model.heads} heads and F evenly"
        )
    batch_seqs = problem.workload.batch_seqs
    if batch_seqs is None:
        batches = server_batches(problem, generate)
        swept = sweep_generate(problem, generate, batches if len(batches) else np.ones(1))
        chosen = [(choice.placement, choice.batch) for choice in swept.choices()] or [(swept.best(0), 1)]
    else:
        swept = sweep_generate(problem, generate, np.array([float(batch_seqs)]))
        chosen = [(swept.best(0), batch_seqs)]
    prefills = PrefillSweep.of(problem, prefill) if problem.mode == "disaggregated" else None
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
