"""A simulation as a trace that ui.perfetto.dev and chrome://tracing open (the Trace Event Format, JSON).

A process per server: a track of its steps, and counters of its KV pages, its batch and its queue. One more process
has a span per request, from its arrival to its first and to its last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isnan

from rooftop.simulate.serving.records import SimulatedServer, Simulation, StepRun

_MICROSECONDS = 1e6


def timeline(simulation: Simulation, until_s: float) -> dict[str, object]:
    """Return the events that begin in the first ``until_s`` seconds as a JSON object; times in microseconds."""
    events: list[dict[str, object]] = []
    for server in simulation.servers:
        events += _server(server, until_s)
    events += _requests(simulation, until_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _server(server: SimulatedServer, until_s: float) -> Iterator[dict[str, object]]:
    process = {"pid": server.number + 1}
    role = {"both": "server", "prefill": "prefill server", "generate": "generate server"}[server.role]
    yield process | {"ph": "M", "name": "process_name", "args": {"name": f"{role} {server.number}"}}
    yield process | {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "steps"}}
    end_s = 0.0
    for run in server.runs:
        if run.start_s > until_s:
            return
        if run.start_s > end_s:
            yield from _counters(process, end_s, 0, 0)
        end_s = run.end_s
        yield process | {
            "ph": "X",
            "name": _name(run),
            "tid": 1,
            "ts": run.start_s * _MICROSECONDS,
            "dur": (run.end_s - run.start_s) * _MICROSECONDS,
            "args": {"steps": run.steps, "generating": run.generating, "prefill_tokens": run.prefill_tokens},
        }
        yield from _counters(process, run.start_s, run.generating, run.waiting)
        yield process | {
            "ph": "C", "name": "KV pages", "ts": run.end_s * _MICROSECONDS, "args": {"used": run.kv_pages}
        }  # fmt: skip
    yield from _counters(process, end_s, 0, 0)


def _counters(process: Mapping[str, object], at_s: float, generating: int, waiting: int) -> Iterator[dict[str, object]]:
    for name, value in (("generating", generating), ("waiting", waiting)):
        yield {**process, "ph": "C", "name": name, "ts": at_s * _MICROSECONDS, "args": {name: value}}


def _name(run: StepRun) -> str:
    if not run.generating:
        return f"prefill {run.prefill_tokens}"
    return f"generate {run.generating}" + (f" and prefill {run.prefill_tokens}" if run.prefill_tokens else "")


def _requests(simulation: Simulation, until_s: float) -> Iterator[dict[str, object]]:
    trace, requests = simulation.trace, simulation.requests
    process = {"pid": len(simulation.servers) + 1, "cat": "request"}
    yield process | {"ph": "M", "name": "process_name", "args": {"name": "requests"}}
    for request, arrival_s in enumerate(trace.arrival_s.tolist()):
        if arrival_s > until_s:
            return
        first_s, last_s = requests.first_s[request], requests.last_s[request]
        if isnan(first_s):
            continue
        lengths = {
            "prompt_tokens": int(trace.prompt_tokens[request]),
            "cached": requests.cached[request],
            "output_tokens": requests.tokens[request],
            "preemptions": requests.preemptions[request],
        }
        span = process | {"id": request, "tid": 1}
        yield span | {"ph": "b", "name": f"request {request}", "ts": arrival_s * _MICROSECONDS, "args": lengths}
        for name, start_s, end_s in (("to first token", arrival_s, first_s), ("to last token", first_s, last_s)):
            yield span | {"ph": "b", "name": name, "ts": start_s * _MICROSECONDS}
            yield span | {"ph": "e", "name": name, "ts": end_s * _MICROSECONDS}
        yield span | {"ph": "e", "name": f"request {request}", "ts": last_s * _MICROSECONDS}
