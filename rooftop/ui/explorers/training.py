"""Training strategies over the batch (chapter 5): compute against communication, for data, FSDP, tensor and mixes."""

from __future__ import annotations

from dataclasses import replace

from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.frameworks.framework import FRAMEWORKS
from rooftop.frameworks.words.configurations import configuration_of, priced_recipe
from rooftop.hardware import Slice
from rooftop.models import presets
from rooftop.models.activations import SEARCHED
from rooftop.plan.training.batches import BatchCurve, batch_curves, book_meshes
from rooftop.plan.training.nearest import nearest_executable
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import sweep
from rooftop.present.document import (
    Bar,
    Bars,
    ChartAxis,
    ChartSeries,
    Document,
    Lines,
    ShownFigure,
    ShownVerdict,
)
from rooftop.present.documents.parts import level_of, mesh_text, sentence
from rooftop.present.documents.training import configuration_listings, framework_texts, padding_figure, recipe_texts
from rooftop.requests.planning import PlanTraining
from rooftop.requests.problems import training_problem
from rooftop.ui.controls import Control, Explorer, ExplorerForm, FieldControls, State, slider

#: Curves that are drawn, and sequences a step of their points.
_DRAWN = 6
#: Share of a step below which waiting is not worth a sentence.
_LITTLE = 0.005
_SEQS = tuple(2**power for power in range(0, 15, 1))


def answer(state: State) -> Document:
    """The chosen mesh at the chosen batch, and every strategy of chapter 5 over batches."""
    slice_, seqs, seq = Slice.parse(state["on"]), state.count("batch_seqs"), state.count("seq")
    request = PlanTraining(
        state["model"],
        on=slice_.name,
        framework=state["framework"],
        framework_settings=state["framework_settings"] or None,
        batch_seqs=seqs,
        seq=seq,
        remat=state["remat"],
        microbatches=1,
    )
    problem = training_problem(request, slice_)
    axes = _axes(problem, state.count("tensor"))
    problem = replace(problem, axes=axes or {_shards(problem): 1})
    meshes = _meshes(problem)
    batches = sorted({*_SEQS, seqs})
    priced = batch_curves(problem, [item * seq for item in batches], meshes)
    plan = _plan(problem, priced)
    seconds = {name: float(plan.ledger.total(name)) for name in ("mxu", "hbm", "ici", "dcn")}
    network = seconds["ici"] + seconds["dcn"]
    curves = _shown(priced, batches.index(seqs), axes)
    exposed, level = plan.exposed_s(), level_of(plan.evidence.level)
    memory = ShownFigure("memory_bytes", "Memory of a device", plan.memory_bytes, "B", "expected",
        formula=f"of {format_bytes(problem.capacity)} usable")  # fmt: skip
    figures: tuple[ShownFigure, ...] = (
        ShownFigure("expected_s", "Step", plan.expected_s, "s", level, formula="compute and what is not hidden"),
        ShownFigure("mxu_s", "Compute", seconds["mxu"], "s", "bound", formula="matmul FLOPs / C", source="chapter 5"),
        ShownFigure("network_s", "Communication", network, "s", "bound", formula="bytes / links, every collective",
            source="chapter 5"),
        ShownFigure("ratio", "Compute over communication", seconds["mxu"] / network if network else "no communication",
            level="rule", formula="above 1: communication can hide", source="chapter 5"),
        ShownFigure("mfu", "MFU", plan.mfu, "%", level, formula="model FLOPs / (step x C)"),
        ShownFigure("tokens_per_chip", "Tokens per chip", seqs * seq / slice_.chips, "tokens", formula="B / N",
            source="chapter 5"),
        memory,
        *padding_figure(plan.padding, seq, "Padding"),
        ShownFigure("exposed_s", "Not hidden", sum(exposed.values()), "s", level,
            formula=", ".join(f"{name} {format_seconds(item)}" for name, item in exposed.items()) or "nothing"),
    )  # fmt: skip
    if not plan.fits:
        # Times of what no device can hold would read like an answer.
        figures = (memory, *_smallest(plan))
    runs = plan.fits and not plan.obstacles
    listings = configuration_listings(configuration_of(plan.configured)) if runs else ()
    steps = (_steps(curves, batches.index(seqs), plan),) if plan.fits else ()
    return Document(
        verdict=ShownVerdict(
            says=_verdict(plan, seconds["mxu"], network),
            no="It does not fit."
            if not plan.fits
            else f"Not executable: {plan.obstacles[0]}."
            if plan.obstacles
            else "",
            details=(
                *(sentence(text) for text in framework_texts(problem.program.planned)),
                *(sentence(text) for text in (recipe_texts(priced_recipe(plan.configured)) if runs else ())),
                *(f"Not executable as it stands: {obstacle}." for obstacle in plan.obstacles[plan.fits :]),
            ),
        ),
        figures=figures,
        charts=(_times(curves, seqs * seq, axes), _ratios(curves, seqs * seq, axes), *steps, *listings),
        notes=tuple(reason.text for reason in plan.reasons if reason.source in ("chapter 1", "chapter 5")),
        command=replace(request, mesh=problem.axes).command(),
        sources=("Chapter 5. Curves: bounds at peak rates on the fastest layout of each mesh; steps: docs/plan.md.",),
    )


def _shards(problem: Problem) -> str:
    """The axis of devices that share out state: FSDP, or data with a program whose searches have no FSDP."""
    return "fsdp" if "fsdp" in problem.program.axes else "data"


def _axes(problem: Problem, tensor: int) -> dict[str, int]:
    """The mesh of a number of tensor ways. Raises RooftopError if they do not divide a slice."""
    slices, shards = problem.slice.num_slices, _shards(problem)
    inner = problem.slice.devices // slices
    if inner % tensor:
        raise RooftopError("tensor", tensor, f"a number that divides the {inner} devices of a slice")
    sizes = {"data": slices}
    sizes[shards] = sizes.get(shards, 1) * (inner // tensor)
    return {name: size for name, size in {**sizes, "tensor": tensor}.items() if size > 1}


def _meshes(problem: Problem) -> list[dict[str, int]]:
    """The shapes that chapter 5 compares, by the axes of the program, and the problem's."""
    shapes, shards = list[dict[str, int]](), _shards(problem)
    for shape in book_meshes(problem):
        ways = shape.pop("fsdp", 1)
        if ways > 1:
            shape[shards] = shape.get(shards, 1) * ways
        # Tensor parallelism stands inside.
        shape = {name: shape[name] for name in ("data", "fsdp", "tensor") if name in shape}
        if shape not in shapes:
            shapes.append(shape)
    chosen = {name: size for name, size in (problem.axes or {}).items() if size > 1}
    return shapes if chosen in shapes else [*shapes, chosen]


def _smallest(plan: TrainingPlan) -> tuple[ShownFigure, ...]:
    """The nearest plan that fits and runs, which may be on another slice."""
    near = nearest_executable(plan)
    if near is None:
        return ()
    mesh = " x ".join(f"{name} {size}" for name, size in near.mesh.shape.items() if size > 1) or "one device"
    layout = f"{near.problem.slice.name} as {mesh}"
    step = f"remat {near.choice.remat}: {format_seconds(near.expected_s)} a step"
    return (ShownFigure("nearest", "Nearest that fits", layout, level="expected", formula=step),)


def _plan(problem: Problem, curves: list[BatchCurve]) -> TrainingPlan:
    """The plan on the problem's mesh. Its curve knows the fastest layout; what does not fit is searched."""
    here = next((curve for curve in curves if curve.axes == problem.axes), None)
    if here is not None:
        plan = TrainingPlan(problem=problem, mesh=here.mesh, choice=here.choice)
        if plan.fits:
            return plan
    result = sweep(problem)
    return result.plan(result.best)


def _verdict(plan: TrainingPlan, compute_s: float, network_s: float) -> str:
    share = plan.padding.share
    padding = f" {share:.0%} of its positions are padding." if share >= _LITTLE else ""
    if not plan.fits:
        over = plan.memory_bytes - plan.problem.capacity
        return f"Does not fit: {format_count(over, 'B')} more than a device has. Try remat, or a smaller batch."
    if network_s > compute_s:
        return (
            f"Communication takes {network_s / compute_s:.2g} times as long as compute: no overlap can hide it. "
            f"The step takes {format_seconds(plan.expected_s)}, {plan.mfu:.0%} MFU.{padding}"
        )
    exposed = plan.exposed_s()
    waits = sum(exposed.values()) / plan.expected_s
    most = max(exposed, key=lambda axis: exposed[axis], default="")
    left = f" It waits {waits:.0%} of it for collectives, over {most} most." if waits >= _LITTLE else ""
    if network_s and not left:
        left = f" Compute takes {compute_s / network_s:.2g} times as long as communication, which hides behind it."
    return f"The step takes {format_seconds(plan.expected_s)}, {plan.mfu:.0%} MFU.{padding}{left}"


def _shown(curves: list[BatchCurve], at: int, axes: dict[str, int]) -> list[BatchCurve]:
    """The pure strategies, the one that was chosen, and the fastest mixes at the batch ``at``."""
    ranked = sorted(curves, key=lambda curve: float(curve.expected_s[at]))
    axes_shown = [curve.axes for curve in curves if len(curve.axes) == 1 or curve.axes == axes]
    axes_shown += [curve.axes for curve in ranked if curve.axes not in axes_shown][: max(0, _DRAWN - len(axes_shown))]
    return [curve for curve in curves if curve.axes in axes_shown]


def _name(curve: BatchCurve) -> str:
    return mesh_text(curve.axes)


def _times(curves: list[BatchCurve], tokens: int, axes: dict[str, int]) -> Lines:
    here = next((curve for curve in curves if curve.axes == axes), curves[0])
    return Lines(
        title="Communication over the batch, by strategy",
        about=f"Seconds at peak rates. Compute is that of {_name(here)}, with the padding of batches that do not fill "
        "the mesh; where its communication runs above, communication binds it.",
        x=ChartAxis("tokens of a step", scale="log"),
        y=ChartAxis("time of a step", "s", "log"),
        series=(
            ChartSeries(f"compute, {_name(here)}", _points(here.batch_tokens, here.compute_s), "dashed"),
            *(ChartSeries(_name(curve), _points(curve.batch_tokens, curve.network_s)) for curve in curves),
        ),
        marks=((float(tokens), "this batch"),),
    )


def _ratios(curves: list[BatchCurve], tokens: int, axes: dict[str, int]) -> Lines:
    return Lines(
        title="Compute over communication",
        about="Above 1 communication can hide behind compute. FSDP grows with the batch, tensor parallelism does not.",
        x=ChartAxis("tokens of a step", scale="log"),
        y=ChartAxis("ratio", scale="log"),
        series=(
            ChartSeries(
                "1", ((float(curves[0].batch_tokens[0]), 1.0), (float(curves[0].batch_tokens[-1]), 1.0)), "dashed"
            ),
            *(
                ChartSeries(_name(curve), _points(curve.batch_tokens, curve.compute_s / curve.network_s))
                for curve in curves
                if curve.network_s.all()
            ),
        ),
        marks=((float(tokens), "this batch"),),
    )


def _points(x: object, y: object) -> tuple[tuple[float, float], ...]:
    return tuple(zip(map(float, x), map(float, y), strict=True))  # type: ignore[call-overload]


def _steps(curves: list[BatchCurve], at: int, plan: TrainingPlan) -> Bars:
    """The expected step of each strategy at the batch ``at``; that of the chosen one is the plan's."""
    bars = []
    for curve in curves:
        chosen = curve.axes == {name: size for name, size in plan.mesh.shape.items() if size > 1}
        expected_s = plan.expected_s if chosen else float(curve.expected_s[at])
        matmuls_s = float(plan.ledger.total("mxu")) if chosen else float(curve.compute_s[at])
        fits = chosen or curve.memory_bytes[at] <= plan.problem.capacity
        parts = ("matmuls at peak", min(matmuls_s, expected_s)), ("the rest", max(expected_s - matmuls_s, 0.0))
        bars.append((expected_s, Bar(_name(curve) + ("" if fits else " (does not fit)"), parts)))
    return Bars(
        title=f"Expected step at {format_count(float(curves[0].batch_tokens[at]))} tokens",
        about="Matmuls include those of padding. The rest: slower matmuls, HBM, and collectives that nothing hides.",
        unit="s",
        bars=tuple(bar for _, bar in sorted(bars, key=lambda entry: entry[0])),
    )


_FIELDS = FieldControls(PlanTraining)
_CONTROLS: tuple[Control, ...] = (
    _FIELDS.model("llama3-70b", presets()),
    _FIELDS.text("on", "v5p:4x4x4", suggestions=("v5p:4x4x4", "v5p:8x8x8", "v5p:16x16x16", "v5e:16x16", "v6e:16x16",
                                                  "tpu7x:4x4x4", "h100:8x8", "v5e:16x16@2"), fields=("slice", "chip")),
    _FIELDS.select("framework", options=FRAMEWORKS, fields=("release",)),
    _FIELDS.text("framework_settings", "", suggestions=("gradients=f32", "fused_backward=no", "async_tp=yes"),
                 help="Of the framework: gradients=f32."),
    _FIELDS.slider("batch_seqs", 1, 16384, "64", fields=("batch_tokens", "batch")),
    slider("tensor", "Tensor, ways", "1", 1, 64, fields=("mesh", "mesh axis"),
           help="The other devices of a slice are FSDP; data with Megatron."),
    _FIELDS.slider("seq", 512, 131072, "4096", fields=("seq_len",)),
    _FIELDS.select("remat", "block", options=SEARCHED, fields=("microbatches",)),
)  # fmt: skip


FORM = ExplorerForm(
    name="training",
    title="Training strategies",
    summary="Compute against communication over the batch: where data, FSDP, tensor and mixed sharding become bound.",
    chapter="chapter 5",
    controls=_CONTROLS,
)
EXPLORER = Explorer(FORM, answer)
