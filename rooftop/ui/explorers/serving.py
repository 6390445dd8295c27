"""Serving (chapters 7 and 8): latency against throughput over the batch, at any context, and what the memory holds."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rooftop.arrays import parse_axes
from rooftop.core.errors import RooftopError, one_of
from rooftop.core.quantities import counted, format_bytes, format_count, format_seconds
from rooftop.core.records import field_values
from rooftop.hardware import Slice
from rooftop.models import load_model, presets
from rooftop.plan.pricing import BOUNDS
from rooftop.plan.serving.nearest import nearest_plans
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.search import at_context, best_prefill, pareto, sweep_generate
from rooftop.plan.serving.workload import ServingNumerics, ServingWorkload
from rooftop.present.document import (
    Bar,
    Bars,
    Chart,
    ChartAxis,
    ChartSeries,
    Document,
    Lines,
    ShownFigure,
    ShownVerdict,
)
from rooftop.present.documents.parts import level_of
from rooftop.requests.planning import PlanServing
from rooftop.ui.controls import Control, Explorer, ExplorerForm, FieldControls, State

#: Contexts of the curves in addition to the chosen one.
_CONTEXTS = (2048, 8192, 32768, 131072)
_ANSWER = 512
#: Figures that stand although a batch does not fit.
_OF_MEMORY = ("max_batch", "memory_bytes", "kv_bytes")


def answer(state: State) -> Document:
    """One step at the chosen batch and context, and the fronts of batches at several contexts."""
    batch, context = state.count("batch_seqs"), state.count("context")
    kind = tuple(state[name].strip() for name in ("model", "on", "weights_dtype", "kv_dtype", "bounds", "mesh"))
    problem, placements = _server(*kind)
    asked = at_context(replace(problem, workload=replace(problem.workload, batch_seqs=batch)), context)
    placement = sweep_generate(asked, placements, np.array([float(batch)])).best(0)
    at = placements.index(placement)
    pinned, prefills = _pinned(kind, at)
    sized = replace(pinned, workload=asked.workload)
    prefill_on, _ = best_prefill(sized, prefills)
    plan = ServingPlan(problem=sized, generate_on=placement, prefill_on=prefill_on, batch=batch)
    fronts = {item: _points(kind, at, item) for item in sorted({*_CONTEXTS, context})}
    memory = field_values(plan.memory_of_slice.per_device)
    work = sized.workload
    rate = plan.tokens_per_s / sized.slice.chips
    figures = _figures(plan, rate, memory)
    charts: tuple[Chart, ...] = (_memory(plan, memory),)
    if plan.fits:
        charts = (_front(fronts, context, plan, rate), _batches(fronts, context), _step(plan), *charts)
    else:
        # Times of what no device can hold would read like an answer.
        figures = tuple(figure for figure in figures if figure.name in _OF_MEMORY) + _nearest(plan)
    return Document(
        verdict=ShownVerdict(says=_verdict(plan, rate), no=_no(plan)),
        figures=figures,
        charts=charts,
        notes=tuple(reason.text for reason in plan.reasons),
        command=PlanServing(
            state["model"], on=sized.slice.name, weights_dtype=state["weights_dtype"], kv_dtype=state["kv_dtype"],
            bounds=state["bounds"], prompt=work.prompt, generate=work.generate, context=context, batch_seqs=batch,
            mesh=sized.axes, prefill_mesh=sized.prefill_axes, kv_split=sized.kv_split, contexts=[context],
        ).command(),
        sources=("Chapters 7 and 8. 'book': everything spread evenly, no network; 'usable': docs/plan-serve.md.",),
    )  # fmt: skip


@lru_cache(maxsize=16)
def _server(
    model: str, on: str, weights: str, kv: str, bounds: str, mesh: str
) -> tuple[ServingProblem, tuple[Placement, ...]]:
    """The server before batch and context, and where a step may run on it.

    Kept while sliders move, since placements keep the prices of their collectives.
    """
    problem = ServingProblem(
        model=load_model(model),
        slice=Slice.parse(on),
        workload=ServingWorkload(prompt=8192, generate=_ANSWER),
        numerics=ServingNumerics(weights=weights, kv=kv),
        bounds=one_of("bounds", bounds, BOUNDS),
        axes=parse_axes(mesh) if mesh else None,
    )
    placements = tuple(problem.generate_placements())
    if not placements:
        raise RooftopError("slice", on, f"a slice whose devices split the {problem.model.heads} heads and F evenly")
    return problem, placements


@lru_cache(maxsize=64)
def _pinned(kind: tuple[str, ...], at: int) -> tuple[ServingProblem, tuple[Placement, ...]]:
    """The server with generation where it is best, the placement ``at`` of all, and where a prefill may run then.

    Prefills are on tensor alone where that can be.
    """
    problem, placements = _server(*kind)
    if problem.book:
        return problem, tuple(problem.prefill_placements())
    best = placements[at]
    axes = {name: size for name, size in best.sizes.items() if size > 1}
    fixed = replace(problem, axes=axes or {"tensor": 1}, kv_split=best.kv_split)
    try:
        alone = replace(fixed, prefill_axes={"tensor": best.slice.devices})
        return alone, tuple(alone.prefill_placements())
    except RooftopError:  # more devices than heads: the search finds another way
        return fixed, tuple(fixed.prefill_placements())


@lru_cache(maxsize=256)
def _points(kind: tuple[str, ...], at: int, context: int) -> list[dict[str, Any]]:
    """The front over batches at one context.

    The same server for every context: fronts over all placements would differ by their layouts too.
    """
    points = pareto(_pinned(kind, at)[0], [_server(*kind)[1][at]], [context])
    return [point.to_json() for point in points]


def _verdict(plan: ServingPlan, rate: float) -> str:
    if not plan.fits:
        most = plan.max_batch
        room = f"at most {most} sequences do" if most else "not one sequence does"
        return f"A batch of {plan.batch} at this context does not fit {plan.problem.slice.name}: {room}."
    busy: dict[str, float] = field_values(plan.breakdown)
    most_of = max(busy, key=lambda name: busy[name])
    why = {"weights_s": "reading weights", "kv_s": "reading the KV cache", "flops_s": "FLOPs", "ici_s": "the network"}
    return (
        f"{format_seconds(plan.step_s)} a token, {format_count(rate, 'tok/s')} per chip; "
        f"{why[most_of]} takes most of a step."
    )


def _no(plan: ServingPlan) -> str:
    """The reason why the answer is no; empty if it is not."""
    if not plan.fits:
        return "It does not fit."
    return f"Not executable: {plan.obstacles[0]}." if plan.is_refused else ""


def _nearest(plan: ServingPlan) -> tuple[ShownFigure, ...]:
    """The nearest plan that fits, on another slice if no batch fits this one."""
    near = next(nearest_plans(plan.problem), None)
    if near is None:
        return ()
    step = f"batch {near.batch}: {format_seconds(near.step_s)} a token"
    return (ShownFigure("nearest", "Nearest that fits", near.problem.slice.name, level="expected", formula=step),)


def _figures(plan: ServingPlan, rate: float, memory: dict[str, float]) -> tuple[ShownFigure, ...]:
    cost = plan.cost_per_million_tokens.output
    level, prefill = (level_of(evidence.level) for evidence in (plan.evidence.decode, plan.evidence.prefill))
    return (
        ShownFigure(
            "step_s",
            "Step",
            plan.step_s,
            "s",
            level,
            formula="KV / W + max(2 B P / C, weights / W)" if plan.problem.book else "rows of the ledger",
            source="chapter 7",
        ),
        ShownFigure(
            "tokens_per_s_per_chip",
            "Throughput of a chip",
            rate,
            "tok/s",
            level,
            formula="batch / step / chips",
            source="chapter 8",
        ),
        ShownFigure(
            "tokens_per_s",
            "Throughput",
            plan.tokens_per_s,
            "tok/s",
            level,
            formula="batch / step",
            source="chapter 8",
        ),
        ShownFigure(
            "ttft_s",
            "Prefill (TTFT)",
            plan.ttft_s,
            "s",
            prefill,
            formula=f"{plan.problem.workload.prompt:,} tokens, no queue",
            source="chapter 8",
        ),
        ShownFigure("max_batch", "Largest batch", float(plan.max_batch), formula="what memory holds"),
        ShownFigure(
            "memory_bytes",
            "Memory of a device",
            memory["total"],
            "B",
            "expected",
            formula=f"of {format_bytes(memory['capacity'])} {_room(plan)}",
        ),
        ShownFigure(
            "kv_bytes",
            "KV of a device",
            memory["kv"],
            "B",
            formula="2 K H L x context x batch x bytes / devices",
            source="chapter 4",
        ),
        ShownFigure(
            "usd_per_million_tokens",
            "Cost of a million tokens",
            cost,
            level=level,
            formula="generation, list price",
            shown="" if cost is None else f"${cost:,.2f}",
        ),
    )


def _front(fronts: dict[int, list[dict[str, Any]]], context: int, plan: ServingPlan, rate: float) -> Lines:
    return Lines(
        title="Latency against throughput",
        about="A point for each batch: up is cheaper, left is faster. Long contexts cost both.",
        x=ChartAxis("step", "s", "log"),
        y=ChartAxis("tokens/s per chip"),
        series=(
            *(
                ChartSeries(
                    f"context {front:,}",
                    tuple((point["step_s"], point["tokens_per_s_per_chip"]) for point in points),
                    "line" if front == context else "dashed",
                    names=tuple(f"batch {point['batch']}" for point in points),
                )
                for front, points in fronts.items()
                if points
            ),
            ChartSeries(f"batch {plan.batch}", ((plan.step_s, rate),), "point"),
        ),
    )


def _batches(fronts: dict[int, list[dict[str, Any]]], context: int) -> Lines:
    return Lines(
        title="Step over the batch",
        about="Flat while the weights' bytes bind; it rises with the caches.",
        x=ChartAxis("batch, sequences", scale="log"),
        y=ChartAxis("step", "s", "log"),
        series=tuple(
            ChartSeries(
                f"context {front:,}",
                tuple((float(point["batch"]), point["step_s"]) for point in points),
                "line" if front == context else "dashed",
            )
            for front, points in fronts.items()
            if points
        ),
    )


def _step(plan: ServingPlan) -> Bars:
    names = {"weights_s": "reading weights", "kv_s": "reading the cache", "flops_s": "FLOPs", "ici_s": "network"}
    return Bars(
        title="What a step needs",
        about="Seconds at peak rates, each alone; the expected step is the line.",
        unit="s",
        bars=tuple(Bar(names[name], (("at peak", value),)) for name, value in field_values(plan.breakdown).items()),
        limit=(plan.step_s, "step"),
    )


def _memory(plan: ServingPlan, memory: dict[str, float]) -> Bars:
    classes = tuple((name, memory[name]) for name in ("weights", "scales", "kv", "activations") if memory[name])
    return Bars(
        title="Memory of a device",
        about=f"{counted(plan.batch, 'sequence')} beside the weights.",
        unit="B",
        bars=(Bar(plan.problem.slice.name, classes),),
        limit=(memory["capacity"], _room(plan)),
    )


def _room(plan: ServingPlan) -> str:
    """The size of HBM that memory is compared with: docs/chips.md has both."""
    return "nominal, as in the book" if plan.problem.book else "usable"


_FIELDS = FieldControls(PlanServing)
_DTYPES = ("bf16", "int8", "int4", "f8_e4m3")
_CONTROLS: tuple[Control, ...] = (
    _FIELDS.model("llama3-70b", presets()),
    _FIELDS.text("on", "v5e:4x4", suggestions=("v5e:2x4", "v5e:4x4", "v5e:4x8", "v6e:2x4", "v5p:2x2x2", "h100:8"),
         fields=("slice", "chip", "flops dtype")),
    _FIELDS.slider("context", 128, 131072, "8192", halves=True),
    _FIELDS.slider("batch_seqs", 1, 4096, "32", halves=True, fields=("batch",)),
    _FIELDS.select("weights_dtype", "int8", options=_DTYPES, fields=("weights",)),
    _FIELDS.select("kv_dtype", "int8", options=_DTYPES, fields=("kv",)),
    _FIELDS.select("bounds", "book", described=True),
    _FIELDS.text("mesh", "", suggestions=("tensor=16", "context=2,tensor=8"), fields=("mesh axis",),
         help="Searched if empty. The book's arithmetic spreads everything evenly and has none.",
         only=("bounds", "usable")),
)  # fmt: skip


FORM = ExplorerForm(
    name="serving",
    title="Serving: latency and throughput",
    summary="The Pareto front of a server over its batch, at any context: seconds a token against tokens a second.",
    chapter="chapter 8",
    controls=_CONTROLS,
)
EXPLORER = Explorer(FORM, answer)
