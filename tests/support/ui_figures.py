"""For every explorer: a slider, its figures in the JSON of the command that the page shows, and in its own charts.

A figure that the command does not print has the reason in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from rooftop.algebra.steps import COLLECTIVES
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.present.document import Bars, Chart, Document, Lines, Spans
from rooftop.present.documents.parts import mesh_text
from rooftop.ui.controls import ExplorerForm, read_state
from rooftop.ui.explorers import explorer

#: The value of a figure in the JSON of a command and a state, or the reason why it is not there.
Printed = Callable[[Any, Mapping[str, str]], Any] | str


@dataclass(frozen=True)
class Shown:
    """``slider`` changes ``figure``."""

    slider: str
    figure: str


FIGURES: dict[str, Shown] = {
    "roofline": Shown("B", "time_s"),
    "systolic": Shown("m", "utilisation"),
    "sharding": Shown("way", "time_s"),
    "collectives": Shown("bytes", "time_s"),
    "training": Shown("batch_seqs", "expected_s"),
    "pipeline": Shown("microbatches", "bubble"),
    "serving": Shown("context", "step_s"),
    "embedding": Shown("batch_samples", "pipelined_s"),
}


def _plain(data: Any) -> Any:
    """The strategy that only multiplies."""
    return next(strategy for strategy in data["strategies"] if strategy["rule"] == "multiply")


def _way(data: Any, state: Mapping[str, str]) -> Any:
    """The strategy that a state of the sharding explorer looks at."""
    return data["strategies"][min(int(state.get("way", "1")), len(data["strategies"])) - 1]


def _step(data: Any) -> Any:
    return data["strategies"][0]["steps"][0]


def _network(data: Any) -> float:
    return float(data["step"]["ici_s"] + data["step"]["dcn_s"])


def _near_training(data: Any, _: object) -> str | None:
    near = data["nearest_executable"]
    return None if near is None else f"{near['slice']} as {mesh_text(near['mesh'])}"


_CYCLES = "matmul --simulate prints what follows from the cycles: the utilisation"
_ROWS = "the plan prints rows by scope and phase, not the two passes of one microbatch"

PRINTED: dict[str, dict[str, Printed]] = {
    "roofline": {
        "time_s": lambda data, _: _plain(data)["time_s"],
        "mxu_s": lambda data, _: _plain(data)["resources"]["mxu"],
        "hbm_s": lambda data, _: _plain(data)["resources"]["hbm"],
        "intensity": lambda data, _: _plain(data)["flops"] / _plain(data)["steps"][0]["hbm_bytes"],
        "critical_intensity": "matmul prints times, not the rates of the chip",
        "critical_batch": "matmul prints one batch",
        "flops_per_s": lambda data, _: _plain(data)["flops"] / _plain(data)["time_s"],
        "flops": lambda data, _: _plain(data)["flops"],
        "hbm_bytes": lambda data, _: _plain(data)["steps"][0]["hbm_bytes"],
    },
    "systolic": {
        "utilisation": lambda data, _: _plain(data)["steps"][0]["mxu_utilisation"],
        **dict.fromkeys(("cycles", "time_s", "stream", "wait", "ends", "arrays"), _CYCLES),
    },
    "sharding": {
        "time_s": lambda data, state: _way(data, state)["time_s"],
        "collectives_s": lambda data, state: sum(
            step["time_s"] for step in _way(data, state)["steps"] if step["op"] in COLLECTIVES
        ),
        "lower_s": lambda data, state: _way(data, state)["lower_s"],
        "flops": lambda data, state: _way(data, state)["flops"],
        "memory_bytes": lambda data, state: _way(data, state)["memory_bytes"],
        "device_bytes": lambda data, _: data["arrays"][-1]["device_bytes"],
        "total_bytes": lambda data, _: data["arrays"][-1]["total_bytes"],
        "replication": lambda data, _: data["arrays"][-1]["replication"],
    },
    "collectives": {
        "time_s": lambda data, _: data["strategies"][0]["time_s"],
        "simulated_s": lambda data, _: _step(data)["simulated_s"],
        "latency_s": lambda data, _: _step(data)["latency_s"],
        "bandwidth": lambda data, state: data["dims"]["I"] / data["strategies"][0]["time_s"],
        "devices": "matmul prints the mesh, not the product of some of its axes",
        "ring": "matmul prints the layout, not its rings",
    },
    "training": {
        "expected_s": lambda data, _: data["step"]["expected_s"],
        "mxu_s": lambda data, _: data["step"]["mxu_s"],
        "network_s": lambda data, _: _network(data),
        "ratio": lambda data, _: data["step"]["mxu_s"] / _network(data) if _network(data) else "no communication",
        "mfu": lambda data, _: data["mfu"],
        "tokens_per_chip": lambda data, _: data["workload"]["batch_tokens"] / data["slice"]["chips"],
        "memory_bytes": lambda data, _: data["memory"]["total"],
        "padding": lambda data, _: data["padding"]["share"],
        "exposed_s": lambda data, _: sum(data["step"]["exposed_s"].values()),
        "nearest": _near_training,
    },
    "pipeline": {
        "bubble": lambda data, _: data["pipeline"]["bubble"],
        "bubble_closed_form": lambda data, _: data["pipeline"]["bubble_closed_form"],
        "passes_s": lambda data, _: data["pipeline"]["passes_s"],
        "lockstep_s": lambda data, _: data["pipeline"]["lockstep_s"],
        "in_flight": lambda data, _: data["pipeline"]["in_flight"],
        "forward_s": _ROWS,
        "backward_s": _ROWS,
    },
    "serving": {
        "step_s": lambda data, _: data["generate"]["step_s"]["expected_s"],
        "tokens_per_s_per_chip": lambda data, _: data["generate"]["tokens_per_s_per_chip"],
        "tokens_per_s": lambda data, _: data["generate"]["tokens_per_s"],
        "ttft_s": lambda data, _: data["ttft_s"],
        "max_batch": lambda data, _: data["max_batch"],
        "memory_bytes": lambda data, _: data["memory"]["per_device"]["total"],
        "kv_bytes": lambda data, _: data["memory"]["per_device"]["kv"],
        "usd_per_million_tokens": lambda data, _: data["cost_per_million_tokens"]["output"],
        "nearest": lambda data, _: data["nearest"][0]["slice"] if data["nearest"] else None,
    },
    "embedding": {
        "pipelined_s": lambda data, _: data["step"]["pipelined"]["expected_s"],
        "sequential_s": lambda data, _: data["step"]["sequential"]["expected_s"],
        "tile_bytes": lambda data, _: data["memory"]["tile"],
        "memory_bytes": lambda data, _: data["memory"]["total"]["sequential"],
        "host_ids": lambda data, _: data["host"]["ids"],
        "sparse_cores": lambda data, _: data["slice"]["sparse_cores"],
    },
}


#: Figures that an explorer may not leave out where the command prints one that is not 0.
ALWAYS = {"training": ("padding",)}


def random_state(name: str, seed: int) -> dict[str, str]:
    """A state of the explorer's declared controls that has an answer, other than the first one."""
    random, one = Random(f"{name} {seed}"), explorer(name)
    while True:
        state = _drawn(one.form, random)
        try:
            one.answer(read_state(one.form.controls, state.items()))
        except (RooftopError, Infeasible):
            continue
        return state


def _drawn(form: ExplorerForm, random: Random) -> dict[str, str]:
    state = {}
    for control in form.controls:
        offered = control.stops or control.options or control.suggestions or (control.default,)
        state[control.name] = str(random.choice(offered))
    for control in form.controls:
        if control.only is not None and state[control.only[0]] != control.only[1]:
            state[control.name] = control.default
    return state


#: The figure of an explorer that its charts mark with a point.
_POINTS = {
    "roofline": "flops_per_s", "systolic": "utilisation", "collectives": "time_s", "pipeline": "bubble",
    "serving": "tokens_per_s_per_chip",
}  # fmt: skip


def repeated(name: str, document: Document, state: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    """Figures of an answer that its charts have too: the figure, where it stands, its value there."""
    if document.verdict.no:
        return
    for chart in document.charts:
        if isinstance(chart, Lines):
            points = [series.points[0] for series in chart.series if series.style == "point"]
            yield from ((_POINTS[name], f"{chart.title}: point", y) for _, y in points)
        for figure, where, value in _OTHERS.get(name, lambda *_: ())(chart, document, state):
            yield figure, f"{chart.title}: {where}", value


def _systolic(chart: Chart, _: Document, __: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    if isinstance(chart, Spans):
        yield "cycles", "end", max(end for _, spans in chart.lanes for _, end, *_ in spans)


def _sharding(chart: Chart, _: Document, state: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    if isinstance(chart, Spans):
        lane = chart.lanes[min(int(state.get("way", "1")), len(chart.lanes)) - 1]
        yield "time_s", f"end of way {lane[0]}", max((end for _, end, *_ in lane[1]), default=0.0)


def _collectives(chart: Chart, _: Document, state: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    if isinstance(chart, Bars):
        kind = state.get("kind", "all_gather")
        yield "time_s", kind, next(bar.parts[0][1] for bar in chart.bars if bar.name == kind)


def _training(chart: Chart, document: Document, _: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    words = dict(zip(document.command, document.command[1:], strict=False))
    mesh = mesh_text(
        {axis: int(size) for axis, _, size in (part.partition("=") for part in words["--mesh"].split(","))}
    )
    tokens = float(words["--batch-seqs"]) * float(words["--seq"])
    if isinstance(chart, Bars):
        parts = dict(next(bar for bar in chart.bars if bar.name == mesh).parts)
        yield "expected_s", mesh, sum(parts.values())
        yield "mxu_s", f"{mesh}, matmuls", parts["matmuls at peak"]
    if isinstance(chart, Lines):
        names = {"Compute over communication": {mesh: "ratio"}}.get(chart.title, {f"compute, {mesh}": "mxu_s"})
        for series in chart.series:
            if (figure := names.get(series.name)) is not None:
                yield figure, series.name, dict(series.points)[tokens]


def _pipeline(chart: Chart, _: Document, __: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    if isinstance(chart, Bars):
        yield "in_flight", "longest bar", max(part for bar in chart.bars for _, part in bar.parts)


def _serving(chart: Chart, _: Document, __: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    if isinstance(chart, Bars) and chart.title == "What a step needs" and chart.limit is not None:
        yield "step_s", "line", chart.limit[0]
    if isinstance(chart, Bars) and chart.title == "Memory of a device":
        yield "memory_bytes", "bar", sum(part for _, part in chart.bars[0].parts)


def _embedding(chart: Chart, _: Document, state: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    if isinstance(chart, Bars) and chart.title == "What each unit does in a step" and chart.limit is not None:
        yield "pipelined_s", "line", chart.limit[0]
    if isinstance(chart, Bars) and chart.title == "A tile's memory, by stack":
        yield "tile_bytes", "longest bar", max(part for bar in chart.bars for _, part in bar.parts)
    if isinstance(chart, Lines):
        batch = float(state.get("batch_samples", "16384"))
        for series in chart.series:
            yield f"{series.name}_s", series.name, dict(series.points)[batch]


_OTHERS: dict[str, Callable[[Chart, Document, Mapping[str, str]], Iterator[tuple[str, str, float]]]] = {
    "systolic": _systolic, "sharding": _sharding, "collectives": _collectives, "training": _training,
    "pipeline": _pipeline, "serving": _serving, "embedding": _embedding,
}  # fmt: skip
