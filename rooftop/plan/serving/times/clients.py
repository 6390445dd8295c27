"""An engine under load: mean TTFT and TPOT of clients that wait for their answers, and the bounds of both.

The steps are those that the plan prices, with its overheads; ``rooftop.plan.serving.engines.closed_loop`` has the
arithmetic. ``served_loads`` takes the loads of one server, which differ in their clients alone, together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rooftop.arrays.rules import EXPERT_AXES
from rooftop.core.errors import RooftopError
from rooftop.frameworks.engines import Engine, Overheads
from rooftop.plan.serving.engines.closed_loop import (
    ClosedLoop,
    Floats,
    LoopSteps,
    LoopTimes,
    PrefillServers,
    StepCosts,
    disaggregated_loop,
    loop_times,
)
from rooftop.plan.serving.engines.rows import launches
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ClientLoad

_RESOURCES = ("hbm", "mxu", "ici", "dcn")


@dataclass(frozen=True, kw_only=True)
class LoadBounds:
    """Seconds that nothing can beat, arrays [R]: of a step of the batch, and of one prefill of a prompt, at peak."""

    ttft_s: Floats
    tpot_s: Floats


@dataclass(frozen=True, kw_only=True)
class ServedLoads:
    """Loads [R] of one server of an engine, whose steps are priced without overheads; ``kernels`` of a step.

    ``steps`` are those of servers that also prefill; others have ``prefill`` servers next to them.
    """

    engine: Engine
    load: ClosedLoop
    costs: StepCosts
    replicas: float
    kernels: float
    steps: LoopSteps | None
    prefill: PrefillServers | None
    bounds: LoadBounds

    def times(self, overheads: Overheads) -> LoopTimes:
        """Mean TTFT and TPOT with the overheads of an engine."""
        gap_s, host_s = self.kernels * overheads.gap_s, self.kernels * overheads.host_s
        graphs = self.engine.habits.graphs

        def front_s(tokens: Floats) -> Floats:
            return overheads.request_s + overheads.token_s * tokens

        if self.steps is not None:
            steps = self.steps.with_overheads(gap_s, host_s, front_s(self.load.prompt), graphs=graphs)
            return loop_times(self.load, steps)
        assert self.prefill is not None
        prefill_s = self.prefill.prefill_s
        prefill = replace(
            self.prefill,
            prefill_s=lambda tokens, together: np.maximum(prefill_s(tokens, together) + gap_s, host_s),
            front_s=front_s,
        )
        costs = replace(
            self.costs,
            generate_s=lambda batch, context: np.maximum(
                self.costs.generate_s(batch, context) + gap_s, 0.0 if graphs else host_s
            ),
        )
        return disaggregated_loop(self.load, self.replicas, costs, prefill)


def served_loads(
    problem: ServingProblem, generate_on: Placement, prefill_on: Placement, loads: Sequence[ClientLoad]
) -> ServedLoads:
    """Loads of a problem's server, which differ in their clients and requests alone.

    Raises RooftopError without an engine.
    """
    engine, work = problem.engine, problem.workload
    if engine is None:
        raise RooftopError(
            "concurrency", loads[0].concurrency, "this with --engine; `rooftop simulate --concurrency` has our own"
        )
    # Overheads are added to whole steps.
    bare = replace(problem, assumptions=replace(problem.assumptions, overheads=Overheads()))
    first, habits = loads[0], engine.habits
    clients = np.array([load.concurrency for load in loads], np.float64)
    load = ClosedLoop(
        clients=clients,
        prompt=np.full(len(loads), work.prompt * first.mean),
        generate=np.full(len(loads), work.generate * first.mean),
        requests=np.array([load.requests for load in loads], np.float64) / clients,
        equal=first.shortest == 1.0,
        budget=habits.step_tokens,
        reserved=habits.reserved,
    )
    costs = _costs(bare, generate_on, engine)
    interleaved = problem.mode == "interleaved"
    steps = LoopSteps.of(load, costs) if interleaved else None
    # Disaggregated it is not known here how many generate: one at least.
    active = np.ones(len(loads)) if steps is None else steps.active
    return ServedLoads(
        engine=engine,
        load=load,
        costs=costs,
        replicas=float(first.replicas),
        kernels=float(launches(bare.phase("generate", generate_on, 1.0))),
        steps=steps,
        prefill=None if interleaved else _prefill_servers(bare, generate_on, prefill_on, first),
        bounds=_bounds(bare, generate_on, prefill_on, load, active),
    )


def _costs(problem: ServingProblem, placement: Placement, engine: Engine) -> StepCosts:
    habits = engine.habits
    # Copies of attention that are balanced prefill at the same time.
    together = placement.mesh.size(*EXPERT_AXES) if habits.balanced else 1
    return StepCosts(
        generate_s=lambda batch, context: np.asarray(problem.generate_s(placement, batch, context)),
        mixed_s=lambda prompt, count, batch, context: np.asarray(
            problem.mixed_s(placement, prompt, batch, context, together * count)
        ),
        together=together,
        kv_tokens=engine_room_tokens(problem, placement, engine),
    )


def engine_room_tokens(problem: ServingProblem, placement: Placement, engine: Engine) -> float:
    """Tokens whose KV fits a server: in a share of all memory, or of that which weights leave."""
    if engine.habits.memory_of_free:
        return engine.habits.memory * problem.room_tokens(placement, generating=True)
    return float(problem.room_tokens(placement, generating=True, share=engine.habits.memory))


def _prefill_servers(
    problem: ServingProblem, generate_on: Placement, prefill_on: Placement, load: ClientLoad
) -> PrefillServers:
    copies = prefill_on.mesh.size(*EXPERT_AXES)
    per_token = float(problem.phase("generate", generate_on, 1.0).cached_bytes(1.0, stored=True))
    # Every GPU of a server that generates has a part of a prompt's KV.
    rate = problem.slice.chips * problem.slice.chip.dcn_bytes_per_s
    return PrefillServers(
        count=float(load.prefill_servers),
        copies=float(copies),
        prefill_s=lambda tokens, together: np.asarray(problem.prompts_s(prefill_on, tokens, copies * together)),
        transfer_s=lambda tokens: tokens * per_token / rate,
    )


def _bounds(
    problem: ServingProblem, generate_on: Placement, prefill_on: Placement, load: ClosedLoop, active: Floats
) -> LoadBounds:
    step = problem.generate(generate_on, active, load.context)
    prompt = problem.prefill(prefill_on, float(load.prompt[0]))
    return LoadBounds(
        tpot_s=np.max([np.broadcast_to(step.total(name), len(active)) for name in _RESOURCES], axis=0),
        ttft_s=np.full(len(active), max(float(prompt.total(name)) for name in _RESOURCES)),
    )
