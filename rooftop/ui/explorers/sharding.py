"""Sharded arrays (chapter 3): the blocks that every device holds, and what multiplying or moving them takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from rooftop.algebra.einsums import Strategy
from rooftop.algebra.expression import dims_of, parse
from rooftop.algebra.pricing import Prices
from rooftop.arrays import Mesh, ShardedArray, parse_axes
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.hardware import Slice
from rooftop.present.document import (
    PRICE_LEVELS,
    Blocks,
    Chart,
    Document,
    Held,
    ShownFigure,
    ShownVerdict,
    Spans,
    Table,
    TableColumn,
    columns,
)
from rooftop.requests.measuring import Matmul
from rooftop.simulate.expressions import PricedExpression, ShardedExpression, parse_sizes, price_expression
from rooftop.ui.controls import Control, Explorer, ExplorerForm, FieldControls, State, slider

#: Devices that are drawn along each side of a mesh, arrays that are drawn, and strategies that are listed.
_SIDE, _ARRAYS, _LISTED = 8, 3, 6
#: Axes of a mesh.
_AXES = 3
#: What a span of a timeline is coloured by.
_COLOURS = ("multiply", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "between places")
_EXAMPLES = (
    "A[I_X, J_Y]",
    "A[I_X, J] @ B[J, K_Y] -> C[I_X, K_Y]",
    "A[I, J_X] @ B[J, K] -> C[I, K]",
    "A[I, J_X] @ B[J_X, K] -> C[I, K]",
    "A[I_X, J] @ B[J, K_X] -> C[I_X, K]",
    "A[I_X, J_Y] @ B[J_Y, K] -> C[I_X, K]",
    "A[I_X, J_Y] -> A[I, J_XY]",
    "AllGather_Y(A[I_X, J_Y])",
    "ReduceScatter_{X,J}(A[I, J]{U_X})",
)


_SOURCE = (
    "Chapter 3: sharded matrices. Collectives: max(hops, bytes through the busiest link), or as the book has them."
)


def answer(state: State) -> Document:
    """Blocks of each array on the mesh; the best strategy step by step, and the ones after it."""
    named = ("expression", "dtype", "dims", "mesh", "on", "level")
    asked, prices, priced = _priced(*(state[name] for name in named))
    dims, shape, slice_ = prices.dims, prices.mesh.shape, prices.mesh.slice
    arrays, result = _arrays(asked), priced.strategies
    command = Matmul(
        state["expression"],
        dims={name: size for name, size in dims.items() if name in dims_of(asked)},
        mesh=state["mesh"],
        on=slice_.name,
        dtype=state["dtype"],
        level=state["level"],
        overlap=False,
        top="all",
    ).command()
    blocks = tuple(_blocks(array, dims, shape) for array in arrays[:_ARRAYS] if not array.at)
    if isinstance(asked, ShardedArray):
        return Document(
            verdict=ShownVerdict(says=_block_text(asked, dims, shape)),
            figures=_sizes(asked, dims, shape),
            charts=blocks,
            command=command,
            sources=(_SOURCE,),
        )
    # A slider has more stops than some products have ways: its end is the last one.
    way = min(state.count("way"), len(result))
    chosen = result[way - 1]
    return Document(
        verdict=ShownVerdict(says=_verdict(chosen, result, way)),
        figures=(*_times(chosen, prices.kind), *_sizes(arrays[-1], dims, shape)),
        charts=(*blocks, *_programs(result, max(way, _LISTED)), _steps(chosen, way)),
        notes=tuple(
            f"Case {case.number}{' over ' + ','.join(case.axes) if case.axes else ''}: {case.rule}."
            for case in priced.cases
        ),
        command=command,
        sources=(_SOURCE,),
    )


@lru_cache(maxsize=16)
def _priced(
    expression: str, dtype: str, dims: str, mesh: str, on: str, level: str
) -> tuple[ShardedExpression, Prices, PricedExpression]:
    """The expression, its prices, and all strategies. Cached while the user steps through the strategies."""
    asked = parse(expression, dtype)
    sizes, shape = parse_sizes(dims), parse_axes(mesh, None)
    if len(shape) > _AXES:
        raise RooftopError("mesh", mesh, f"{_AXES} axes at most: the ways of more take minutes (rooftop matmul)")
    prices = Prices(mesh=Mesh.lay(Slice.parse(on), shape), dims=sizes, kind=level)
    return asked, prices, price_expression(asked, prices, overlapped=False, backward=False)


def _arrays(asked: ShardedExpression) -> tuple[ShardedArray, ...]:
    """The arrays of an expression, its result last."""
    if isinstance(asked, ShardedArray):
        return (asked,)
    names = ("left", "right", "source", "inputs", "output", "target")
    result = [getattr(asked, name) for name in names if hasattr(asked, name)]
    return tuple(array for item in result for array in (item if isinstance(item, tuple) else (item,)))


def _block_text(array: ShardedArray, dims: Mapping[str, int], shape: Mapping[str, int]) -> str:
    local = " x ".join(map(str, array.local_shape(dims, shape)))
    copies = array.replication(shape)
    copies_text = "no device holds what another does" if copies == 1 else f"{copies} devices hold the same block"
    return f"Every device holds {local} of {array}, {format_bytes(array.device_bytes(dims, shape))}; {copies_text}."


def _verdict(chosen: Strategy, strategys: Sequence[Strategy], way: int) -> str:
    if not chosen.steps:
        return "Nothing to do: it already is sharded so."
    first = chosen.rule[0].upper() + chosen.rule[1:]
    others = f" The best of {len(strategys)} ways." if len(strategys) > 1 else ""
    if way > 1:
        slower = chosen.time_s / strategys[0].time_s - 1
        others = (
            f" Way {way} of {len(strategys)}, {slower:.0%} slower than the best." if slower else " As fast as the best."
        )
    return f"{first}: {format_seconds(chosen.time_s)}, bound by {chosen.bound or 'nothing'}.{others}"


def _times(chosen: Strategy, price: str) -> tuple[ShownFigure, ...]:
    level = PRICE_LEVELS[price]
    moving = sum(cost.time_s for step, cost in zip(chosen.steps, chosen.costs, strict=True) if step.collective)
    return (
        ShownFigure(
            "time_s", "Time", chosen.time_s, "s", level, formula="the steps, one after another", source="chapter 3"
        ),
        ShownFigure(
            "collectives_s", "In collectives", moving, "s", level, formula="hops, or bytes / links", source="chapter 3"
        ),
        ShownFigure("lower_s", "If all overlapped", chosen.lower_s, "s", "bound", formula="the busiest resource"),
        ShownFigure("flops", "FLOPs of a device", chosen.flops, "FLOP", formula="2 I J K of shards"),
        ShownFigure("memory_bytes", "Memory of a device", chosen.memory_bytes, "B", formula="most held at once"),
    )


def _sizes(array: ShardedArray, dims: Mapping[str, int], shape: Mapping[str, int]) -> tuple[ShownFigure, ...]:
    return (
        ShownFigure("device_bytes", f"{array} on a device", array.device_bytes(dims, shape), "B",
            formula="local shape x bytes", source="chapter 3"),
        ShownFigure("total_bytes", "on all devices", array.total_bytes(dims, shape), "B",
            formula="copies and partial sums counted"),
        ShownFigure("replication", "Copies", float(array.replication(shape)), formula="devices along unused axes"),
    )  # fmt: skip


def _blocks(array: ShardedArray, dims: Mapping[str, int], shape: Mapping[str, int]) -> Blocks:
    """A cell for each device of the mesh, first axis down and the others across; the first two split dims are drawn."""
    names = list(shape)
    local = array.local_shape(dims, shape)
    whole = array.shape(dims)
    split = [at for at, axes in enumerate(array.axes) if axes]
    drawn = sorted({*split, *range(len(whole))}, key=lambda at: (at not in split, at))[:2]
    drawn.sort()
    tall = names[0] if len(names) > 1 else ""
    across = [name for name in names if name != tall]
    most = (min(shape.get(tall, 1), _SIDE), min(prod(shape[name] for name in across), _SIDE))
    cells: list[Held] = []
    for row, places in product(range(most[0]), list(product(*(range(shape[name]) for name in across)))[: most[1]]):
        at = {tall: row} | dict(zip(across, places, strict=True))
        index = [_shard(axes, at, shape) for axes in array.axes]
        starts = [part * size for part, size in zip(index, local, strict=True)]
        parts = [(starts[dim] / whole[dim], (starts[dim] + local[dim]) / whole[dim]) for dim in drawn]
        parts += [(0.0, 1.0)] * (2 - len(parts))
        block = 0
        for part, axes in zip(index, array.axes, strict=True):
            block = block * prod(shape[axis] for axis in axes) + part
        contents = ", ".join(
            f"{dim} {start}:{start + size}" for dim, start, size in zip(array.dims, starts, local, strict=True)
        )
        partial = f" (a part of the sum over {','.join(array.unreduced)})" if array.unreduced else ""
        cells.append(
            Held(
                device=" ".join(f"{name}{at[name]}" for name in names),
                place=(row, len(cells) % most[1]),
                block=block,
                rows=parts[0],
                columns=parts[1],
                label=contents + partial,
            )
        )
    devices = prod(shape.values())
    same = "the same colour is the same block." if max(cell.block for cell in cells) < 32 else "colours repeat."
    shown = "" if devices == len(cells) else f" The first {len(cells)} of {devices} devices are drawn."
    return Blocks(
        title=str(array),
        about=f"Each device's block of the array, {' by '.join(array.dims[dim] for dim in drawn) or 'a scalar'}; "
        f"{same}{shown}",
        shape=most,
        axes=(tall, ",".join(across)),
        cells=tuple(cells),
    )


def _shard(axes: Sequence[str], at: Mapping[str, int], shape: Mapping[str, int]) -> int:
    """Which shard of a dim a device holds: its coordinates along the axes, the first one slowest."""
    index = 0
    for axis in axes:
        index = index * shape[axis] + at[axis]
    return index


def _programs(strategys: Sequence[Strategy], listed: int) -> tuple[Chart, ...]:
    """The best strategies as timelines."""
    lanes = []
    for rank, strategy in enumerate(strategys[:listed], start=1):
        now, spans = 0.0, []
        for step, cost in zip(strategy.steps, strategy.costs, strict=True):
            name = "multiply" if step.multiplies else step.op
            if name not in _COLOURS:
                name = _COLOURS[-1]
            if cost.time_s:
                spans.append((now, now + cost.time_s, _COLOURS.index(name), f"over {','.join(step.axes)}"
                              if step.axes else name))  # fmt: skip
            now += cost.time_s
        lanes.append((f"{rank}", tuple(spans)))
    if not any(spans for _, spans in lanes):
        return ()
    table = Table(
        title="Ways to do it",
        columns=(
            *columns("way", "time"),
            TableColumn("binds", "text"),
            TableColumn("memory"),
            TableColumn("steps", "text", wrap=True),
        ),
        rows=tuple(
            (str(rank), format_seconds(item.time_s), item.bound, format_bytes(item.memory_bytes), item.rule)
            for rank, item in enumerate(strategys[:listed], start=1)
        ),
    )
    return Spans(
        title="What each way takes",
        about="Steps run one after another: each needs the result of the one before.",
        unit="s",
        lanes=tuple(lanes),
        colours=_COLOURS,
    ), table


def _steps(chosen: Strategy, way: int) -> Table:
    return Table(
        title="The best way, step by step" if way == 1 else f"Way {way}, step by step",
        columns=columns("step", "axes", "in", "out", "bytes", "FLOPs", "time", text=4),
        rows=tuple(
            (
                step.op,
                ",".join(step.axes),
                " * ".join(map(str, step.inputs)),
                str(step.output),
                format_bytes(cost.bytes) if cost.bytes else "",
                format_count(cost.flops) if cost.flops else "",
                format_seconds(cost.time_s) if cost.time_s else "free",
            )
            for step, cost in zip(chosen.steps, chosen.costs, strict=True)
        ),
    )


_FIELDS = FieldControls(Matmul)
_CONTROLS: tuple[Control, ...] = (
    _FIELDS.text("expression", _EXAMPLES[5], suggestions=_EXAMPLES,
         help="An array, A @ B -> C, A -> B, or a collective such as AllGather_X(A). I_X: I is split over X.",
         fields=("array", "dim", "axes", "sharding", "output", "collective", "mesh axis")),
    _FIELDS.text("dims", "I=8192,J=8192,K=32768", fields=("dim I", "dim J", "dim K"),
         help="NAME=SIZE, with commas."),
    _FIELDS.text("mesh", "X=4,Y=4", suggestions=("X=4,Y=4", "X=16", "X=8,Y=2", "X=4,Y=4,Z=4"),
         help="NAME=SIZE, with commas; three axes at most."),
    _FIELDS.text("on", "v5e:4x4", suggestions=("v5e:4x4", "v6e:4x4", "v5p:4x4x1", "v5p:4x4x4", "h100:8x2"),
         fields=("slice", "chip")),
    slider("way", "Way to look at", "1", 1, 24, linear=True, help="Of an einsum: 1 is the best, the end is the last."),
    _FIELDS.select("dtype", options=("bf16", "f32", "int8", "f8_e4m3")),
    _FIELDS.select("level", described=True),
)  # fmt: skip


FORM = ExplorerForm(
    name="sharding",
    title="Sharded arrays",
    summary="Write A[I_X, J_Y]: the block that every device holds, and the collectives that a product of such needs.",
    chapter="chapter 3",
    controls=_CONTROLS,
)
EXPLORER = Explorer(FORM, answer)
