"""Pipeline schedules (chapter 5): who does what when, what waits, what is held, with the durations of a real plan."""

from __future__ import annotations

from rooftop.core.errors import RooftopError, one_of
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import sweep
from rooftop.plan.training.workload import Workload
from rooftop.present.document import (
    Bar,
    Bars,
    ChartAxis,
    ChartSeries,
    Document,
    Lines,
    ShownFigure,
    ShownVerdict,
    Spans,
)
from rooftop.requests.planning import PlanTraining
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE, SCHEDULES, pipeline_table
from rooftop.simulate.pipeline import Durations, PipelineTimeline, bubble, durations_of, lockstep_s, run
from rooftop.ui.controls import Control, Explorer, ExplorerForm, FieldControls, State, select

#: Number of stages -> shape of the smallest v5p slice for them.
_SLICES = {"2": "2x2x1", "4": "2x2x1", "8": "2x2x2", "16": "2x2x4"}
_SEQ = 4096
#: Tasks that are drawn; more would be too narrow to see.
_DRAWN = 4000
_COLOURS = ("forward", "backward", "dW")
_FORMULA = {
    "eager_1f1b": "(S-1) / (M + S-1)",
    "gpipe": "(S-1) / (M + S-1)",
    "1f1b": "(S-1) / (M + S-1)",
    "interleaved": "(S-1) / (v M + S-1)",
    "zero_bubble": "(S-1)(F + dX - dW) over that and M (F + dX + dW)",
}
#: Schedules with the same bubble.
_ALIKE = ("eager_1f1b", "gpipe", "1f1b")


def answer(state: State) -> Document:
    """The schedule's timeline, its bubble and what stages hold; and the other schedules."""
    schedule, stages = state["schedule"], int(state["stages"])
    microbatches, chunks = state.count("microbatches"), state.count("chunks")
    chunks = chunks if schedule == "interleaved" else 1
    if schedule == "interleaved" and chunks < 2:
        raise RooftopError("chunks", chunks, "2 or more with the interleaved schedule")
    slice_ = Slice.parse(f"v5p:{_SLICES[state['stages']]}")
    axes = {"stage": stages} | ({"fsdp": slice_.devices // stages} if slice_.devices > stages else {})
    seqs = microbatches * (slice_.devices // stages)
    problem = Problem(
        model=load_model(state["model"]),
        slice=slice_,
        workload=Workload(batch_tokens=seqs * _SEQ, seq_len=_SEQ),
        axes=axes,
        remat="block",
        microbatches=microbatches,
        schedule=one_of("schedule", schedule, SCHEDULES),
        chunks=chunks,
    )
    result = sweep(problem)
    plan = result.plan(result.best)
    durations = durations_of(plan)
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    timeline = run(pipeline_table(schedule, **sizes), durations)
    waiting, in_flight = float(timeline.bubble.max()), float(timeline.in_flight.max())
    figures = (
        ShownFigure("bubble", "Bubble", waiting, "%", "expected", formula="the longest wait of a stage / passes",
            source="chapter 5"),
        ShownFigure("bubble_closed_form", "Bubble, closed form", float(bubble(schedule, durations=durations, **sizes)),
            "%", "rule", formula=_FORMULA[schedule], source="chapter 5"),
        ShownFigure("passes_s", "Passes", timeline.makespan, "s", "expected", formula="first start to last end"),
        ShownFigure("lockstep_s", "In lockstep", lockstep_s(plan), "s", "expected",
            formula="slots as long as their longest task"),
        ShownFigure("in_flight", "Microbatches held", in_flight, formula="activations held at once, most of any stage"),
        ShownFigure("forward_s", "Forward of a microbatch", float(durations.forward), "s", "expected",
            formula="the plan's rows"),
        ShownFigure("backward_s", "Backward of a microbatch",
            float(durations.input_gradient + durations.weight_gradient), "s", "expected",
            formula="dX, with what is recomputed, and dW"),
    )  # fmt: skip
    return Document(
        verdict=ShownVerdict(says=f"A stage waits {waiting:.1%} of the passes at most, and holds {in_flight:.3g} "
        f"microbatch{'' if in_flight == 1 else 'es'} at once at most."),
        figures=figures,
        charts=(
            _timeline(timeline, schedule),
            _bubbles(schedule, stages, microbatches, chunks, durations, waiting),
            Bars(
                title="What each stage holds",
                about="Microbatches whose activations are held at once.",
                unit="",
                bars=tuple(
                    Bar(f"stage {stage}", (("microbatches", stage_microbatches),))
                    for stage, stage_microbatches in enumerate(timeline.in_flight.tolist())
                ),
            ),
        ),
        notes=(
            f"A microbatch is one sequence of {_SEQ} tokens of {state['model']}, whose blocks are recomputed; "
            "stages take what the plan's rows say.",
        ),
        command=PlanTraining(
            state["model"], on=slice_.name, mesh=axes, batch_seqs=seqs, seq=_SEQ, microbatches=microbatches,
            remat="block", schedule=schedule, chunks=chunks,
        ).command(),
        sources=("Chapter 5; Huang et al. 2019, Narayanan et al. 2021, Qi et al. 2023. In JSON: the plan's pipeline.",),
    )  # fmt: skip


def _bubbles(schedule: str, stages: int, microbatches: int, chunks: int, durations: Durations, waiting: float) -> Lines:
    """The bubble of every schedule over the number of microbatches."""
    counts = [stages * 2**power for power in range(6)]
    series = []
    shown = schedule if schedule in _ALIKE else _ALIKE[0]
    for name in SCHEDULES:
        if name == shown or name not in _ALIKE:
            parts = max(chunks, 2) if name == "interleaved" else 1
            bubbles = [
                float(bubble(name, stages=stages, microbatches=count, chunks=parts, durations=durations))
                for count in counts
            ]
            label = f"{name}, {parts} chunks" if parts > 1 else name
            points = tuple(zip(map(float, counts), bubbles, strict=True))
            series.append(ChartSeries(label, points, "line" if name == schedule else "dashed"))
    return Lines(
        title="Bubble over microbatches",
        about="More microbatches fill the pipeline; interleaving and split gradients shorten its ends.",
        x=ChartAxis("microbatches", scale="log"),
        y=ChartAxis("bubble", "%"),
        series=(*series, ChartSeries("here", ((float(microbatches), waiting),), "point")),
    )


def _timeline(timeline: PipelineTimeline, schedule: str) -> Spans:
    split = timeline.table.split
    tasks = sum(len(spans) for spans in timeline.spans)
    share = 1.0 if tasks <= _DRAWN else _DRAWN / tasks
    last = timeline.makespan * share
    colours = (_COLOURS[0], "dX" if split else _COLOURS[1], *((_COLOURS[2],) if split else ()))
    return Spans(
        title=f"The {schedule} schedule",
        about="Numbers are microbatches; what is empty is the bubble."
        + ("" if share == 1.0 else f" The first {share:.0%} of the step."),
        unit="s",
        lanes=tuple(
            (
                f"stage {stage}",
                tuple(
                    (start, end, int(task.op) - 1, f"{task.microbatch}" + (f".{task.chunk}" if task.chunk else ""))
                    for task, start, end in spans
                    if end <= last
                ),
            )
            for stage, spans in enumerate(timeline.spans)
        ),
        colours=colours,
    )


_FIELDS = FieldControls(PlanTraining)
_CONTROLS: tuple[Control, ...] = (
    _FIELDS.select("schedule", default=DEFAULT_SCHEDULE, options=SCHEDULES),
    select("stages", "Stages", _SLICES, "4"),
    _FIELDS.slider("microbatches", 1, 64, "8", halves=True),
    _FIELDS.slider("chunks", 1, 8, "2", described=True, fields=("pipeline",), only=("schedule", "interleaved")),
    _FIELDS.model("llama3-8b", ("llama3.2-1b", "llama3-8b", "qwen3-32b", "llama3-70b")),
)


FORM = ExplorerForm(
    name="pipeline",
    title="Pipeline schedules",
    summary="Which stage does what when under GPipe, 1F1B, interleaving and zero bubble; how long stages wait.",
    chapter="chapter 5",
    controls=_CONTROLS,
)
EXPLORER = Explorer(FORM, answer)
