"""Embedding tables on SparseCores (the deep dive): what limits, buffers and steps are for tables of your own."""

from __future__ import annotations

from dataclasses import replace

from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.embed.host.limits import expected
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.files import tables_from_toml
from rooftop.plan.embedding.plan import EmbedMemory, EmbedPlan, Pipelining
from rooftop.plan.embedding.problem import EmbedProblem, stacking_on
from rooftop.present.document import (
    Bar,
    Bars,
    ChartAxis,
    ChartSeries,
    Document,
    Lines,
    ShownFigure,
    ShownVerdict,
    Table,
    columns,
)
from rooftop.present.documents.embedding import memory_bars as embedding_memory
from rooftop.requests.planning import PlanEmbedding
from rooftop.ui.controls import Control, Explorer, ExplorerForm, FieldControls, State

_TABLES = """[tables.user]
vocabulary = 50_000_000
width = 64
optimizer = {kind = "adagrad", learning_rate = 0.05}

[tables.item]
vocabulary = 10_000_000
width = 64
optimizer = {kind = "adagrad", learning_rate = 0.05}

[tables.tag]
vocabulary = 100_000
width = 12

[features.user_id]
table = "user"

[features.items]
table = "item"
ids_per_sample = 20

[features.tags]
table = "tag"
ids_per_sample = 5
"""
#: Batches of the curves, as multiples of the one chosen.
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)


def answer(state: State) -> Document:
    """Limits, memory and step of the tables on a slice; the same over batches."""
    slice_, batch = Slice.parse(state["on"]), state.count("batch_samples")
    tables = tables_from_toml(state["tables"])
    stacking = stacking_on(tables, slice_, batch)
    problem = EmbedProblem(
        tables=tables,
        slice=slice_,
        batch=batch,
        limits=expected(stacking, batch=batch),
        dense_flops=float(state.count("dense_flops")),
        host_threads=state.count("host_threads"),
    )
    plan = EmbedPlan(problem=problem)
    memory, step, obstacles = plan.memory, plan.step, plan.obstacles
    in_hbm = embedding_memory(EmbedMemory(**memory))
    sequential, pipelined = step["sequential"], step["pipelined"]
    figures = (
        ShownFigure("pipelined_s", "Step, pipelined", pipelined.expected_s, "s", "estimate",
            formula=f"bound by {pipelined.bound}", source="deep dive, 9"),
        ShownFigure("sequential_s", "Step, sequential", sequential.expected_s, "s", "estimate",
            formula=f"bound by {sequential.bound}", source="deep dive, 9"),
        ShownFigure("tile_bytes", "A tile's memory", memory["tile"], "B", "expected",
            formula=f"worst stack, of {format_bytes(memory['tile_capacity'])}", source="deep dive, 7"),
        ShownFigure("memory_bytes", "HBM of a device", memory["total"]["sequential"], "B", "expected",
            formula=f"of {format_bytes(memory['capacity'])} usable", source="deep dive, 7"),
        ShownFigure("host_ids", "Ids a host prepares", plan.host["ids"], "ids", formula="a step, all features"),
        ShownFigure("sparse_cores", "SparseCores", float(problem.cores), formula="of the slice"),
    )  # fmt: skip
    return Document(
        verdict=ShownVerdict(
            says=obstacles[0][0].upper() + obstacles[0][1:]
            if obstacles
            else f"A pipelined step takes {format_seconds(pipelined.expected_s)}, bound by {_bound(pipelined.bound)}; "
            f"a tile's memory is {memory['tile'] / memory['tile_capacity']:.0%} full.",
            no=obstacles[0] if obstacles else "",
        ),
        figures=figures,
        charts=(_limits(plan), _units(plan), _over_batches(problem), _tiles(plan), in_hbm),
        notes=("Limits follow from ids_per_sample, spread evenly; rooftop embed stats finds them in data.",),
        command=PlanEmbedding(
            "tables.toml",
            on=slice_.name,
            batch_samples=batch,
            dense_flops=state.count("dense_flops"),
            host_threads=state.count("host_threads"),
        ).command(),
        sources=("The SparseCore deep dive. Save the tables of this page as tables.toml; docs/plan-embed.md.",),
    )


def _limits(plan: EmbedPlan) -> Table:
    problem = plan.problem
    return Table(
        title="Limits of each stack",
        about="What the SparseCores are compiled for: ids and different rows of a partition, and ids of a buffer.",
        columns=columns("stack", "tables", "width", "max_ids", "max_unique_ids", "buffer", "tile"),
        rows=tuple(
            (
                stack.name,
                str(len(stack.places)),
                str(stack.width),
                *(f"{getattr(problem.limits[stack.name], name):,}" for name in ("max_ids", "max_unique_ids", "buffer")),
                format_bytes(plan.stack_memory(stack)["tile"]),
            )
            for stack in problem.stacking.stacks
        ),
    )


def _bound(unit: str) -> str:
    """Unit that binds a step, in words: those of the tables work one after another."""
    return f"the tables, {unit} most" if unit in ("sparsecore", "ici", "hbm") else unit


def _units(plan: EmbedPlan) -> Bars:
    units = dict(plan.units_s)
    return Bars(
        title="What each unit does in a step",
        about="Tables go through HBM (or SparseCore), then ICI. Pipelined, host, tables and TensorCore run side by "
        "side; in a sequential step tables and TensorCore take turns.",
        unit="s",
        bars=(
            Bar("tables", tuple((name, units[name]) for name in ("hbm", "ici"))),
            *(Bar(name, (("busy", units[name]),)) for name in ("sparsecore", "tensorcore", "host")),
        ),
        limit=(plan.step["pipelined"].expected_s, "pipelined step"),
    )


def _tiles(plan: EmbedPlan) -> Bars:
    stacks = plan.problem.stacking.stacks
    return Bars(
        title="A tile's memory, by stack",
        about="Ids and different rows of one partition must lie in the memory of a tile.",
        unit="B",
        bars=tuple(Bar(stack.name, (("tile", plan.stack_memory(stack)["tile"]),)) for stack in stacks[:12]),
        limit=(float(plan.memory["tile_capacity"]), "there is"),
    )


def _over_batches(problem: EmbedProblem) -> Lines:
    """Pipelined and sequential steps at other batches, with limits that follow."""
    points: dict[Pipelining, list[tuple[float, float]]] = {"sequential": [], "pipelined": []}
    for scale in _SCALES:
        batch = int(problem.batch * scale) // problem.cores * problem.cores
        if not batch:
            continue
        try:
            stacking = stacking_on(problem.tables, problem.slice, batch)
            plan = EmbedPlan(problem=replace(problem, batch=batch, limits=expected(stacking, batch=batch)))
        except RooftopError:
            # A batch so large that a table cannot be stacked says nothing about the one asked for.
            continue
        for mode, seconds in points.items():
            seconds.append((float(batch), plan.step[mode].expected_s))
    return Lines(
        title="Step over the batch",
        x=ChartAxis("samples of a step", scale="log"),
        y=ChartAxis("step", "s", "log"),
        series=tuple(ChartSeries(mode, tuple(result)) for mode, result in points.items()),
        marks=((float(problem.batch), "this batch"),),
    )


_FIELDS = FieldControls(PlanEmbedding)
_CONTROLS: tuple[Control, ...] = (
    _FIELDS.slider("batch_samples", 256, 1048576, fields=("limits", "batch")),
    _FIELDS.slider("dense_flops", 1, 2**31, "5000000", help="Of a sample, forward."),
    _FIELDS.slider("host_threads", 1, 256, "16"),
    _FIELDS.text("on", "v5p:2x2x1", suggestions=("v5p:2x2x1", "v5p:2x2x2", "v6e:2x2", "v6e:4x4", "tpu7x:2x2x1"),
         fields=("slice", "chip")),
    _FIELDS.text("tables", _TABLES, area=True,
         fields=("tables file", "features", "config", "table", "feature")),
)  # fmt: skip


FORM = ExplorerForm(
    name="embedding",
    title="Embedding tables",
    summary="Limits, memory and step of tables on SparseCores: what fits a tile, and what binds.",
    chapter="SparseCore deep dive",
    controls=_CONTROLS,
)
EXPLORER = Explorer(FORM, answer)
