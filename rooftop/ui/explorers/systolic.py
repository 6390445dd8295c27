"""A systolic array (chapter 2, appendix B): how long a matmul occupies those of a chip, and the wave on a small one."""

from __future__ import annotations

from rooftop.core.quantities import counted, format_count
from rooftop.hardware import chip
from rooftop.hardware.chips import catalogue
from rooftop.present.document import (
    ChartAxis,
    ChartSeries,
    Document,
    Frame,
    FrameCell,
    Frames,
    Lines,
    ShownFigure,
    ShownVerdict,
    Spans,
)
from rooftop.requests.measuring import Matmul
from rooftop.simulate.systolic import Cycles, SystolicArray
from rooftop.ui.controls import Control, Explorer, ExplorerForm, State, select, slider

_ROWS = tuple(sorted({round(2 ** (power / 2)) for power in range(29)}))


def answer(state: State) -> Document:
    """Cycles and utilisation of [m, k] x [k, n] on a chip; cycle by cycle on a small array."""
    m, k, n, side = (state.count(name) for name in ("m", "k", "n", "side"))
    spec = chip(state["chip"])
    array = SystolicArray.of(spec)
    result = array.cycles(m, k, n)
    seconds = float(result.total) / spec.clock_hz
    figures = (
        ShownFigure("utilisation", "MXU utilisation", float(result.utilisation), "%", "bound",
            formula="2mkn / (cycles x FLOPs of a cycle)", source="chapter 2"),
        ShownFigure("cycles", "Cycles", float(result.total), level="bound", formula="fill + stream + wait + drain",
            source="chapter 2"),
        ShownFigure("time_s", "Time", seconds, "s", "bound", formula="cycles / clock"),
        ShownFigure("stream", "Stream", float(result.stream), formula="a row of activations a cycle"),
        ShownFigure("wait", "Wait for weights", float(result.wait),
            formula="blocks that stream for less than the next weights load"),
        ShownFigure("ends", "Fill and drain", float(result.fill + result.drain),
            formula="rows, and rows + columns - 2"),
        ShownFigure("arrays", "Arrays", _arrays(array), formula="bf16 peak / (2 side^2 clock)"),
    )  # fmt: skip
    return Document(
        verdict=ShownVerdict(
            says=f"{float(result.utilisation):.1%} of what {_arrays(array)} can do: "
            f"{format_count(float(result.total))} cycles."
        ),
        figures=figures,
        charts=(_wave(side, state.count("stream")), _utilisation(array, m, k, n), _cycles(result)),
        command=Matmul(
            "bf16[M, K] @ bf16[K, N] -> bf16[M, N]",
            dims={"M": m, "K": k, "N": n},
            mesh="X=1",
            on=f"{spec.name}:{'x'.join('1' for _ in range(spec.ici_axes))}",
            simulate=True,
            top="all",
        ).command(),
        sources=("Chapter 2, appendix B: weight-stationary, weights double-buffered; the array's memory delivers.",),
    )


def _arrays(array: SystolicArray) -> str:
    return f"{array.mxus} array{'s' if array.mxus > 1 else ''} of {array.rows}x{array.columns}"


def _wave(side: int, m: int) -> Frames:
    """The diagonal wave of m rows through an array of ``side`` cells a side: each cell names the row it works on."""
    array = SystolicArray(rows=side, columns=side)
    total = int(array.cycles(m, side, side).total)
    frames = []
    for cycle in range(total + 1):
        working = array.wave(m, cycle)
        busy = int((working >= 0).sum())
        phase = "weights load" if cycle < side else "nothing is left" if not busy else "rows stream through"
        cells = tuple(
            FrameCell(((int(row) % 8, float(row >= 0)),), f"{row}" if row >= 0 else "")
            for row in working.ravel().tolist()
        )
        frames.append(Frame(cells, f"Cycle {cycle}: {phase}; {busy} of {side * side} cells multiply."))
    return Frames(
        title=f"{counted(m, 'row')} through an array of {side}x{side}",
        about="Each cell holds one weight and shows the row of activations that it multiplies. Sums move down.",
        shape=(side, side),
        names=(),
        frames=tuple(frames),
        start=2 * side,
    )


def _utilisation(array: SystolicArray, m: int, k: int, n: int) -> Lines:
    """Utilisation over m, for these k and n."""
    here = float(array.cycles(m, k, n).utilisation)
    utilisation = tuple((float(rows), float(array.cycles(rows, k, n).utilisation)) for rows in _ROWS)
    return Lines(
        title="Utilisation over rows of activations",
        about="Few rows leave the array waiting for the next weights.",
        x=ChartAxis("m, rows of activations", scale="log"),
        y=ChartAxis("utilisation", "%"),
        series=(
            ChartSeries(f"k={k}, n={n}", utilisation),
            ChartSeries("here", ((float(m), here),), "point"),
        ),
        marks=((float(array.rows), "side of the array"),),
    )  # fmt: skip


def _cycles(cycles: Cycles) -> Spans:
    """Cycles of the busiest array by kind, with the waits between blocks in one sum."""
    parts = ("fill", "stream", "wait", "drain")
    now, spans = 0.0, []
    for colour, name in enumerate(parts):
        lasting = float(getattr(cycles, name))
        if lasting:
            spans.append((now, now + lasting, colour, name))
        now += lasting
    return Spans(
        title="Where the cycles go",
        about="Waits fall between the blocks; here they stand together.",
        unit="",
        lanes=(("busiest", tuple(spans)),),
        colours=parts,
    )


def _chips() -> tuple[str, ...]:
    """Names of the chips with one device whose number of arrays is known."""
    return tuple(
        name for name, spec in catalogue().items() if spec.kind == "tpu" and spec.devices == 1 and spec.name != "v3"
    )


_CONTROLS: tuple[Control, ...] = (
    select("chip", "Chip", _chips(), "v5e"),
    slider("m", "m, rows", "64", 1, 16384, halves=True, fields=("m, k, n",)),
    slider("k", "k, contracted", "8192", 8, 65536, halves=True),
    slider("n", "n, columns", "8192", 8, 65536, halves=True),
    slider("side", "Animated: side", "5", 2, 8, linear=True),
    slider("stream", "Animated: rows", "8", 1, 24, linear=True),
)


FORM = ExplorerForm(
    name="systolic",
    title="A systolic array",
    summary="How a matmul streams through the matrix unit, cycle by cycle, and how much of it is used.",
    chapter="chapter 2",
    controls=_CONTROLS,
)
EXPLORER = Explorer(FORM, answer)
