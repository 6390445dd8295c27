"""The roofline of one matmul on one device (chapter 1): B, D, F, dtypes and chip."""

from __future__ import annotations

from collections.abc import Iterator

from rooftop.algebra.expression import parse
from rooftop.algebra.pricing import Cost, Prices
from rooftop.algebra.steps import Step, einsum
from rooftop.arrays import Mesh
from rooftop.core.quantities import DTYPE_BYTES, format_count
from rooftop.hardware import Slice, chip
from rooftop.hardware.chips import catalogue
from rooftop.present.document import PRICE_LEVELS, ChartAxis, ChartSeries, Document, Lines, ShownFigure, ShownVerdict
from rooftop.requests.measuring import Matmul
from rooftop.roofline.matmul import attainable
from rooftop.roofline.rates import Rates
from rooftop.roofline.rules import critical_batch
from rooftop.ui.controls import Control, Explorer, ExplorerForm, FieldControls, State, select, slider

_SOURCES = ("Chapter 1: rooflines; chapter 2: chips. Peaks: the hardware catalogue (rooftop chips NAME).",)
#: Batches of the curves: two to every doubling.
_BATCHES = tuple(sorted({round(2 ** (power / 2)) for power in range(2 * 16 + 1)}))
#: Square weights in addition to the chosen ones, as in chapter 1's third problem.
_SQUARES = (1024, 4096)


def answer(state: State) -> Document:
    """Time, intensity and what binds for [B, D] x [D, F]; the roofline, and FLOP/s over B."""
    b, d, f = (state.count(name) for name in ("B", "D", "F"))
    spec = chip(state["chip"])
    slice_ = Slice(spec, spec.slice_shapes[0])
    mesh = Mesh.lay(slice_, {"X": slice_.devices})
    expression = f"{state['dtype']}[B, D] @ {state['weights']}[D, F] -> {state['dtype']}[B, F]"
    rates = Rates.of(spec)
    step = _multiply(expression)

    def cost(b: int, d: int, f: int) -> Cost:
        return Prices(mesh=mesh, dims={"B": b, "D": d, "F": f}, kind=state["level"]).cost(step)

    here = cost(b, d, f)
    dtype = max(state["dtype"], state["weights"], key=lambda name: DTYPE_BYTES[name])
    peak, bandwidth = rates.flops_per_s[dtype], rates.hbm_bytes_per_s
    critical = critical_batch(
        peak, bandwidth, weight_dtype=state["weights"], activation_dtype=state["dtype"], d=d, f=f
    )  # fmt: skip
    level = PRICE_LEVELS[state["level"]]
    binds = {"mxu": "compute", "hbm": "memory"}[here.bound]
    rate = here.flops / here.time_s
    figures = (
        ShownFigure("time_s", "Time", here.time_s, "s", level, formula="max(2BDF / C, bytes / W)", source="chapter 1"),
        ShownFigure("mxu_s", "Compute", here.resources["mxu"], "s", "bound", formula="2BDF / C", source="chapter 1"),
        ShownFigure("hbm_s", "HBM", here.resources["hbm"], "s", "bound", formula="(BD + DF + BF bytes) / W",
            source="chapter 1"),
        ShownFigure("intensity", "Arithmetic intensity", here.flops / here.hbm_bytes, "FLOP/B",
            formula="FLOPs / bytes", source="chapter 1"),
        ShownFigure("critical_intensity", "Critical intensity", peak / bandwidth, "FLOP/B", "rule", formula="C / W",
            source="chapter 1"),
        ShownFigure("critical_batch", "Critical batch",
            critical if critical != float("inf") else "none: memory binds at any B", "tokens", "rule",
            formula="B at which 2BDF / C = bytes / W", source="chapter 1"),
        ShownFigure("flops_per_s", "FLOP/s", rate, "FLOP/s", level, formula="2BDF / time"),
        ShownFigure("flops", "FLOPs", here.flops, "FLOP", formula="2BDF", source="chapter 1"),
        ShownFigure("hbm_bytes", "Bytes through HBM", here.hbm_bytes, "B",
            formula="operands read once, result written once", source="chapter 1"),
    )  # fmt: skip
    return Document(
        verdict=ShownVerdict(
            says=f"Bound by {binds}: {rate / peak:.0%} of {format_count(peak, 'FLOP/s')}, the peak of {spec.title} "
            f"in {dtype}{', on one of its devices' if spec.devices > 1 else ''}."
        ),
        figures=figures,
        charts=(
            _roofline(spec.title, peak, rates, here, [cost(item, d, f) for item in _BATCHES]),
            Lines(
                title="Speed over the batch",
                about="The batch at which a curve bends is the critical one: below it the weights' bytes bind.",
                x=ChartAxis("B, tokens", scale="log"),
                y=ChartAxis("FLOP/s", "FLOP/s"),
                series=(
                    *(
                        ChartSeries(
                            name,
                            tuple((float(n), _rate(cost(n, *sizes))) for n in _BATCHES),
                            "line" if sizes == (d, f) else "dashed",
                        )
                        for name, sizes in _weights(d, f)
                    ),
                    ChartSeries("here", ((float(b), rate),), "point"),
                ),
                marks=((critical, "critical B"),) if critical <= _BATCHES[-1] else (),
            ),
        ),
        command=Matmul(
            expression, dims={"B": b, "D": d, "F": f}, mesh=mesh.shape, on=slice_.name, level=state["level"], top="all"
        ).command(),
        sources=_SOURCES,
    )


def _multiply(expression: str) -> Step:
    """The plain multiplication of an expression without shardings."""
    asked = parse(expression)
    left, right, output = asked.left, asked.right, asked.output  # type: ignore[union-attr]
    return einsum(left, right, output.dims, output.dtype)


def _rate(cost: Cost) -> float:
    return cost.flops / cost.time_s


def _weights(d: int, f: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"D={d}, F={f}", (d, f)
    for side in _SQUARES:
        if (side, side) != (d, f):
            yield f"D=F={side}", (side, side)


def _roofline(title: str, peak: float, rates: Rates, here: Cost, others: list[Cost]) -> Lines:
    """The roof of HBM and that of VMEM, the matmul, and the way it takes as B grows."""
    xs = [2.0 ** (power / 4) for power in range(-8, 4 * 13 + 1)]
    vmem = rates.chip.vmem_bytes_per_s / rates.chip.devices

    def roof(bandwidth: float) -> tuple[tuple[float, float], ...]:
        ridge = peak / bandwidth
        return tuple((x, float(attainable(x, peak, bandwidth))) for x in sorted({*xs, ridge}))

    return Lines(
        title=f"Roofline of a {title}",
        about="Left of the ridge memory binds, right of it compute. The dots are the same weights with other B.",
        x=ChartAxis("FLOPs per byte", scale="log"),
        y=ChartAxis("FLOP/s", "FLOP/s", "log"),
        series=(
            ChartSeries("roof, from HBM", roof(rates.hbm_bytes_per_s)),
            ChartSeries("roof, from VMEM", roof(vmem), "dashed"),
            ChartSeries(
                "other B",
                tuple((other.flops / other.hbm_bytes, _rate(other)) for other in others),
                "dots",
                names=tuple(f"B={n}" for n in _BATCHES),
            ),
            ChartSeries("this matmul", ((here.flops / here.hbm_bytes, _rate(here)),), "point"),
        ),
        marks=((peak / rates.hbm_bytes_per_s, "ridge"),),
    )


def _controls() -> tuple[Control, ...]:
    chips = tuple(catalogue())
    dtypes = ("bf16", "int8", "f8_e4m3", "f8_e5m2", "int4", "f32")
    return (
        select("chip", "Chip", chips, "v5e"),
        slider("B", "B, tokens", "256", 1, 65536, halves=True, help="Rows of the activations.", fields=("dim B",)),
        slider("D", "D, contracted", "8192", 128, 65536, halves=True, fields=("dim D",)),
        slider("F", "F, columns", "32768", 128, 131072, halves=True, fields=("dim F",)),
        select("dtype", "Activations", dtypes, "bf16", fields=("matmul dtype",)),
        select("weights", "Weights", dtypes, "bf16"),
        FieldControls(Matmul).select("level", options=("bound", "expected"), described=True),
    )


FORM = ExplorerForm(
    name="roofline",
    title="Roofline of a matmul",
    summary="How long [B, D] x [D, F] takes on one device, and whether its FLOPs or its bytes bind.",
    chapter="chapter 1",
    controls=_controls(),
)
EXPLORER = Explorer(FORM, answer)
