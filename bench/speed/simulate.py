"""Time to simulate an hour of serving: 20 requests a second, 72,000 in all, on one core.

    python bench/speed/simulate.py --runs 3

Step times are those of a plan (LLaMA-3 70B in int8 on v5e 4x4). Prompts are uniform from 100 to 900 tokens and answers
from 50 to 450, 54 million tokens together; the conversations repeat what was said before. CPU seconds of the simulation
and of its figures together, as minimum, median and maximum; NumPy runs on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import numpy as np

from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.serving.answer import plan_serving
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ServingNumerics, ServingWorkload
from rooftop.scheduling.serving.scheduler import Policy, Routing
from rooftop.scheduling.serving.times import StepTimes
from rooftop.simulate.serving.engine import simulate
from rooftop.simulate.serving.metrics import ServingMetrics, Targets
from rooftop.simulate.serving.records import Deployment
from rooftop.simulate.serving.traces import Lengths, RequestTrace, draw_trace

RATE, SECONDS = 20, 3600


def step_times() -> StepTimes:
    """Step times: 64 sequences together on v5e 4x4."""
    problem = ServingProblem(
        model=load_model("llama3-70b"),
        slice=Slice.parse("v5e:4x4"),
        workload=ServingWorkload(prompt=500, generate=250, batch_seqs=64),
        numerics=ServingNumerics(weights="int8", kv="int8"),
    )
    return plan_serving(problem).plan.step_times()


def independent() -> RequestTrace:
    """Poisson arrivals of requests that have nothing in common."""
    return draw_trace(
        requests_per_second=RATE,
        requests=RATE * SECONDS,
        prompt=Lengths(low=100, high=900),
        output=Lengths(low=50, high=450),
    )


def conversations(turns: int = 6) -> RequestTrace:
    """As many requests, in conversations of some turns, a minute apart; each repeats all blocks of those before it."""
    random = np.random.default_rng(0)
    people = RATE * SECONDS // turns
    person, turn = np.divmod(np.arange(people * turns), turns)
    arrival = np.repeat(random.uniform(0, SECONDS, people), turns) + 60 * turn + random.uniform(0, 20, len(turn))
    order = np.argsort(arrival)
    said = [
        tuple(range(who * turns, who * turns + n + 1)) for who, n in zip(person.tolist(), turn.tolist(), strict=True)
    ]
    return RequestTrace(
        arrival_s=arrival[order],
        prompt_tokens=(128 * (turn + 1) + random.integers(1, 128, len(turn)))[order],
        output_tokens=random.integers(50, 450, len(turn), endpoint=True)[order],
        hashes=tuple(said[index] for index in order),
        hash_tokens=128,
    )


def cases(times: StepTimes) -> Iterator[tuple[str, RequestTrace, Deployment]]:
    """A simulation: a name, requests, servers."""
    trace = independent()
    yield "static", trace, Deployment(policy=Policy(max_batch=64, batching="static"), times=times, replicas=4)
    yield "interleaved", trace, Deployment(policy=Policy(max_batch=64), times=times, replicas=3)
    chunked = Policy(max_batch=64, chunk_tokens=512)
    yield "interleaved, chunks of 512", trace, Deployment(policy=chunked, times=times, replicas=3)
    apart = Policy(max_batch=128, batching="disaggregated")
    yield "disaggregated", trace, Deployment(policy=apart, times=times, replicas=1, prefill_servers=2)
    yield (
        "conversations, prefix cache, affinity",
        conversations(),
        Deployment(
            policy=Policy(max_batch=64),
            times=times,
            replicas=3,
            prefix_cache=True,
            host_kv_tokens=1_000_000,
            routing=Routing(kind="affinity"),
        ),
    )


def measure(trace: RequestTrace, deployment: Deployment) -> tuple[float, float, dict[str, Any], int]:
    """CPU and wall seconds of a simulation with its figures, the figures, and how many runs of steps it took."""
    cpu, wall = time.process_time(), time.perf_counter()
    metrics = ServingMetrics(simulation=simulate(trace, deployment), targets=Targets(ttft_s=1.0, tpot_s=0.05))
    figures = metrics.figures.to_json()
    runs = sum(len(server.runs) for server in metrics.simulation.servers)
    return time.process_time() - cpu, time.perf_counter() - wall, figures, runs


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    chosen = parser.parse_args()
    rows = []
    for name, trace, deployment in cases(step_times()):
        cpu, wall = [], []
        for _ in range(chosen.runs):
            cpu_s, wall_s, figures, runs = measure(trace, deployment)
            cpu.append(cpu_s)
            wall.append(wall_s)
        steps = sum(server["steps"]["prefill"] + server["steps"]["generate"] for server in figures["servers"])
        rows.append(
            {
                "case": name,
                "requests": figures["requests"]["finished"],
                "tokens": figures["tokens"]["prompt"] + figures["tokens"]["generated"],
                "steps": steps,
                "runs_of_steps": runs,
                "cpu_s": spread(cpu),
                "wall_s": spread(wall),
                "simulated_s": figures["duration_s"],
                "ttft_p99_s": figures["ttft_s"]["p99"],
                "tpot_p99_s": figures["tpot_s"]["p99"],
                "cached_share": figures["tokens"]["cached"] / figures["tokens"]["prompt"],
            }
        )
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cores": os.cpu_count(),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cases": rows,
    }
    print(json.dumps(result, indent=1))


def spread(values: list[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


if __name__ == "__main__":
    main()
