"""Parts that documents of several kinds share: ledgers, rooflines, memory, reasons, fronts of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rooftop.arrays.mesh import MeshLayout
from rooftop.core.ledger import Row
from rooftop.core.quantities import counted, format_bytes, format_count, format_seconds
from rooftop.hardware import GIVEN, Slice
from rooftop.models.stored import StoredWeights
from rooftop.plan.documents import PlannedSlice, Reason
from rooftop.plan.evidence import Evidence
from rooftop.present.document import (
    Bar,
    Bars,
    Chart,
    ChartAxis,
    ChartSeries,
    Item,
    Items,
    Level,
    Lines,
    ShownFigure,
    Table,
    TableColumn,
    columns,
)
from rooftop.roofline.rates import Rates

#: Sides of a ledger, in their order.
SIDES = ("measured", "compiled", "planned")
#: Scopes that bars show, the longest first.
_SHOWN = 14
#: Entries of a plan's memory that are no class of it.
_NO_CLASS = ("total", "capacity", "fits", "host", "free", "kv_per_token", "per_device")


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Mesh axes and their sizes, those of size 1 left out."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"


def layout_text(slice_: str, mesh: MeshLayout) -> str:
    """The layout of a mesh on its slice, as ``--layout`` takes it."""
    return mesh.on(Slice.parse(slice_)).layout or "one device"


def place(source: str) -> str:
    """A 'file:line' without its directories."""
    return source.rpartition("/")[2]


def stored_figures(stored: StoredWeights | None, loaded: str) -> Iterator[ShownFigure]:
    """The bytes of a quantised checkpoint, in its format and in bf16; ``loaded`` says as what a program loads it."""
    if stored is not None:
        note = f"{stored.format}; {format_bytes(stored.bf16_bytes)} in bf16; {loaded}"
        yield ShownFigure("checkpoint_bytes", "checkpoint", stored.bytes, "B", note=note)


def sentence(text: str) -> str:
    """A clause as a sentence."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def microbatches_text(count: int) -> str:
    """A number of microbatches."""
    return f"{count} microbatch{'es' if count > 1 else ''}"


def pipeline_text(schedule: str | None, chunks: int) -> str:
    """A pipeline's schedule and chunks, behind other words; '' without stages."""
    return "" if schedule is None else f", {schedule}" + (f" {chunks} chunks" if chunks > 1 else "")


def milliseconds(seconds: float, digits: int = 2) -> str:
    """Seconds as a number of milliseconds, '' for none."""
    return f"{seconds * 1e3:.{digits}f}" if seconds else ""


def reasons(rules: Iterable[Reason]) -> Items:
    """The rules of a plan: the verdict, formula and source of each."""
    return Items(
        title="Why",
        section="Why",
        items=tuple(
            Item(
                # Without its rule a yes or no has no sense.
                reason.text if reason.text.startswith(reason.rule) else f"{reason.rule}: {reason.text}",
                mark="yes" if reason.holds else "no",
                note=f"{reason.source}; {reason.formula}",
                good=reason.holds,
            )
            for reason in rules
        ),
    )


def obstacles(texts: Sequence[str], *more: str) -> tuple[Items, ...]:
    """The obstacles to running a plan as it stands, and ``more`` lines."""
    if not texts:
        return ()
    items = tuple(Item(text) for text in (*texts, *more))
    return (Items(title="Not executable as it stands:", section="Obstacles", items=items, warns=True),)


def version_note(version: str, more: str = "") -> tuple[str, ...]:
    """The version of rooftop that wrote an answer."""
    return (f"Written by rooftop {version}{more}.",)


# ---- ledgers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SideFigures:
    """One side of a ledger line, per device and step; None: that side does not know."""

    time_s: float | None = None
    exposed_s: float | None = None
    flops: float | None = None
    hbm_bytes: float | None = None
    at_peak_s: float | None = None

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of HBM."""
        return self.flops / self.hbm_bytes if self.flops and self.hbm_bytes else None


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """A scope in a phase: its ``sides``, its collectives, and the op and the source line that take longest."""

    scope: str
    phase: str
    sides: Mapping[str, SideFigures]
    moves: tuple[str, ...] = ()
    slowest: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Scope and phase."""
        return f"{self.scope} {self.phase}"


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The peaks of a device: FLOP/s of its matrix unit, bytes/s of its HBM."""

    name: str
    flops_per_s: float
    hbm_bytes_per_s: float


@dataclass(kw_only=True)
class _SideSums:
    time_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    at_peak_s: float = 0.0

    def add(self, row: Row) -> None:
        """Add a row, its count applied."""
        count = float(row.count)
        self.time_s += count * float(row.expected_s)
        self.exposed_s += count * sum(float(moved.exposed_s) for moved in row.collectives)
        self.flops += count * float(sum(row.flops.values()) + row.kernel_flops)
        self.hbm_bytes += count * float(row.hbm_bytes)
        self.at_peak_s += count * max(map(float, row.time_s.values()), default=0.0)


@dataclass(kw_only=True)
class _LineSums:
    sides: dict[str, _SideSums] = field(default_factory=dict)
    moves: list[str] = field(default_factory=list)


def ledger_lines(
    ledgers: Mapping[str, Iterable[Row]], notes: Mapping[tuple[str, str], str] | None = None
) -> list[LedgerLine]:
    """Rows of the ledgers of several sides, joined on scope and phase in the order of the first; ``notes`` by both."""
    lines: dict[tuple[str, str], _LineSums] = {}
    for side, ledger in ledgers.items():
        for row in ledger:
            line = lines.setdefault(row.key, _LineSums())
            line.sides.setdefault(side, _SideSums()).add(row)
            line.moves += (
                f"{moved.kind} over {','.join(moved.axes)}: {format_bytes(float(row.count * moved.bytes))} {side}"
                for moved in row.collectives
            )
    return [
        LedgerLine(
            scope=key[0],
            phase=key[1],
            sides={side: SideFigures(**vars(sums)) for side, sums in line.sides.items()},
            moves=tuple(line.moves),
            notes=(notes[key],) if notes and key in notes else (),
        )
        for key, line in lines.items()
    ]


def ledger_bars(ledger: Iterable[Row], *, title: str = "Where the step goes", section: str = "") -> Bars:
    """Seconds by scope, a part for each phase, counts applied."""
    scopes: dict[str, dict[str, float]] = {}
    for row in ledger:
        phases = scopes.setdefault(row.scope, {})
        phases[row.phase] = phases.get(row.phase, 0.0) + float(row.count * row.expected_s)
    longest = sorted(scopes, key=lambda scope: -sum(scopes[scope].values()))
    return Bars(
        title=title,
        section=section,
        about="Expected seconds by scope and phase, counts applied."
        + (f" The {_SHOWN} longest of {len(longest)}." if len(longest) > _SHOWN else ""),
        unit="s",
        bars=tuple(Bar(scope, tuple(scopes[scope].items())) for scope in longest[:_SHOWN]),
    )


def busy(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds at peak rates by resource, counts applied."""
    seconds: dict[str, float] = {}
    for row in rows:
        for name, each_s in row.time_s.items():
            seconds[name] = seconds.get(name, 0.0) + float(row.count * each_s)
    return seconds


def ledger_table(lines: Sequence[LedgerLine], title: str, *, section: str = "", about: str = "") -> Table:
    """Every line, with a group of columns for each side that has figures."""
    sides = [side for side in SIDES if any(side in line.sides for line in lines)]
    names = {side: _figure_names(side, lines) for side in sides}
    headings = [TableColumn(name, "text") for name in ("scope", "phase")]
    headings += [TableColumn(f"{side}: {name}") for side in sides for name in names[side]]
    extras = {"collectives": "moves", "slowest op": "slowest", "from": "source", "": "notes"}
    shown = [name for name, field in extras.items() if any(getattr(line, field) for line in lines)]
    headings += [TableColumn(name, "text", wrap=True, drop=1) for name in shown]
    rows = []
    for line in lines:
        cells = [line.scope, line.phase]
        for side in sides:
            cells += [_cell(line.sides.get(side), name) for name in names[side]]
        extra = {
            "collectives": "; ".join(line.moves), "slowest op": line.slowest, "from": place(line.source),
            "": "; ".join(line.notes),
        }  # fmt: skip
        rows.append((*cells, *(extra[name] for name in shown)))
    return Table(title=title, about=about, section=section, columns=tuple(headings), rows=tuple(rows), detail=True)


def _figure_names(side: str, lines: Sequence[LedgerLine]) -> list[str]:
    """The figures that a side has for any line."""
    own = [line.sides[side] for line in lines if side in line.sides]
    return [name for name, (field, _) in _CELLS.items() if any(getattr(figures, field) for figures in own)]


_CELLS = {
    "time": ("time_s", format_seconds), "exposed": ("exposed_s", format_seconds),
    "at peak": ("at_peak_s", format_seconds), "FLOPs": ("flops", format_count), "HBM": ("hbm_bytes", format_bytes),
}  # fmt: skip


def _cell(figures: SideFigures | None, name: str) -> str:
    if figures is None:
        return "\N{EN DASH}"
    field, text = _CELLS[name]
    value = getattr(figures, field)
    return text(value) if value or (name == "time" and value is not None) else ""


# ---- rooflines ------------------------------------------------------------------------------------------------------


def roofs_of_slice(name: str, whose: str = "", dtype: str = "bf16") -> list[Roof]:
    """The roofs of one device of a slice, for matmuls in ``dtype`` (bf16 if the chip has no such rate)."""
    rates = Rates.of(Slice.parse(name).chip)
    dtype = dtype if dtype in rates.flops_per_s else "bf16"
    label = f"{name.partition(':')[0]}, {dtype}" + (f" ({whose})" if whose else "")
    return [Roof(name=label, flops_per_s=rates.flops_per_s[dtype], hbm_bytes_per_s=rates.hbm_bytes_per_s)]


def rooflines(
    lines: Sequence[LedgerLine],
    roofs: Sequence[Roof],
    title: str = "Roofline",
    *,
    section: str = "",
    sides: Sequence[str] = SIDES,
) -> tuple[Chart, ...]:
    """Lines with FLOPs and HBM bytes under their roofs; those with HBM bytes alone in a chart of their own."""
    timed = [
        (side, line.name, figures)
        for line in lines
        for side, figures in line.sides.items()
        if side in sides and figures.time_s
    ]
    computes = [entry for entry in timed if entry[2].intensity]
    copies = [entry for entry in timed if entry[2].hbm_bytes and not entry[2].flops]
    rest = len(timed) - len(computes) - len(copies)
    are = "row is not drawn: its" if rest == 1 else "rows are not drawn: their"
    missing = f" {rest} {are} HBM traffic is unknown." if rest else ""
    charts: list[Chart] = []
    if computes:
        knees = [roof.flops_per_s / roof.hbm_bytes_per_s for roof in roofs]
        xs = [figures.intensity or 0.0 for _, _, figures in computes]
        limits = [
            (roof.name, [(x, min(roof.flops_per_s, x * roof.hbm_bytes_per_s)) for x in ends])
            for roof, knee in zip(roofs, knees, strict=True)
            for ends in [(min(*xs, knee) / 1.3, knee, max(*xs, knee) * 1.3)]
        ]
        charts.append(
            Lines(
                title=title,
                section=section,
                about="FLOP/s over FLOPs per byte of HBM, per device. Under the slope HBM binds, under the level the "
                "matrix unit; a point far below its roof waits for something else." + missing,
                x=ChartAxis("FLOPs per byte of HBM", scale="log"),
                y=ChartAxis("FLOP/s", "FLOP/s", "log"),
                series=(
                    *_placed(computes, roofs, sides, "flops"),
                    *(ChartSeries(name, tuple(path), "dashed") for name, path in limits),
                ),
            )
        )
    if copies:
        moved = [figures.hbm_bytes or 0.0 for _, _, figures in copies]
        ends = min(moved) / 1.3, max(moved) * 1.3
        charts.append(
            Lines(
                title=f"{title}: rows without matmuls",
                section="" if charts else section,
                about="Bytes of HBM a second over bytes of HBM. The level is HBM at its peak.",
                x=ChartAxis("bytes of HBM", "B", "log"),
                y=ChartAxis("bytes/s", "B/s", "log"),
                series=(
                    *_placed(copies, roofs, sides, "hbm_bytes"),
                    *(
                        ChartSeries(f"HBM of {roof.name}", level, "dashed")
                        for roof in roofs
                        for level in [tuple((x, roof.hbm_bytes_per_s) for x in ends)]
                    ),
                ),
            )
        )
    return tuple(charts)


def _placed(
    entries: Iterable[tuple[str, str, SideFigures]], roofs: Sequence[Roof], sides: Sequence[str], rate: str
) -> list[ChartSeries]:
    """A series for each side. The ``rate`` of a point is 'flops', over intensity, or 'hbm_bytes', over bytes."""
    series: list[ChartSeries] = []
    every = list(entries)
    for side in sides:
        own = [(name, figures) for entry_side, name, figures in every if entry_side == side]
        if own:
            points = []
            for _, figures in own:
                amount = getattr(figures, rate) or 0.0
                across = (figures.intensity or 0.0) if rate == "flops" else amount
                points.append((across, amount / (figures.time_s or 1.0)))
            series.append(
                ChartSeries(
                    side,
                    tuple(points),
                    "dots",
                    names=tuple(name for name, _ in own),
                    notes=tuple(_point_note(figures, roofs) for _, figures in own),
                )
            )
    return series


def _point_note(figures: SideFigures, roofs: Sequence[Roof]) -> str:
    """The figures of a point, one a line."""
    seconds, texts = figures.time_s or 0.0, []
    texts.append(f"time: {format_seconds(seconds)}")
    if figures.flops:
        texts += [f"FLOPs: {format_count(figures.flops)}", f"FLOP/s: {format_count(figures.flops / seconds)}"]
    if figures.hbm_bytes:
        texts += [f"HBM: {format_bytes(figures.hbm_bytes)}", f"HBM/s: {format_bytes(figures.hbm_bytes / seconds)}/s"]
    if figures.intensity:
        texts.append(f"FLOPs per byte: {figures.intensity:.3g}")
    if figures.exposed_s:
        texts.append(f"exposed: {format_seconds(figures.exposed_s)}")
    if roofs:
        flops, moved = figures.flops or 0.0, figures.hbm_bytes or 0.0
        bound = max(flops / roofs[0].flops_per_s, moved / roofs[0].hbm_bytes_per_s)
        if bound:
            texts.append(f"of its roof: {bound / seconds:.1%}")
    return "\n".join(texts)


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory_bars(
    sides: Mapping[str, Mapping[str, Any]],
    capacity: float,
    *,
    title: str = "Memory of a device",
    section: str = "Memory",
) -> Bars:
    """HBM of a device by class, a bar for each side, against the usable bytes."""
    return Bars(
        title=title,
        section=section,
        unit="B",
        bars=tuple(
            Bar(side, tuple((name, float(size)) for name, size in classes.items() if name not in _NO_CLASS and size))
            for side, classes in sides.items()
        ),
        limit=(float(capacity), "usable"),
    )


def bound_text(resource: str) -> str:
    """The resource that binds, as an adjective: 'HBM-bound'."""
    names = {"pcie": "PCIe", "sparsecore": "SparseCore", "tensorcore": "TensorCore", "host": "host"}
    return f"{names.get(resource, resource.upper())}-bound"


def exposed_text(exposed: Mapping[str, float], step_s: float) -> str:
    """The seconds that each axis does not hide, with their share of a step."""
    return ", ".join(f"{name} {format_seconds(s)} ({s / step_s:.0%})" for name, s in exposed.items())


def prose(text: str) -> Items:
    """Lines of text between tables."""
    return Items(title="", about=text, items=())


def table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1, section: str = "",
          detail: bool = False) -> Table:  # fmt: skip
    """A table whose first ``text`` columns are text."""
    return Table(
        title=title, columns=columns(*names, text=text), rows=tuple(map(tuple, rows)), section=section, detail=detail
    )


# ---- evidence -------------------------------------------------------------------------------------------------------


class PricedChip(Protocol):
    """A thing of one chip with the price of a chip-hour, and the source of that price: "given", or a list and date."""

    @property
    def chip(self) -> str:
        """Name of the chip."""

    @property
    def price_usd_per_hour(self) -> float | None:
        """Dollars of one chip."""

    @property
    def price_source(self) -> str | None:
        """Where the price is from."""


def calibrated_by(where: PlannedSlice) -> str:
    """The calibration of a slice, after its subject; empty without one."""
    return "" if where.calibrated is None else f", calibrated by {where.calibrated.by}"


def price_text(usd_per_hour: float, source: str | None) -> str:
    """The price of a chip-hour with its source and date: '$4.2 a chip-hour (list: Scaling Book, ch. 8, 2025-02)'."""
    cited = "" if source is None else " (given)" if source == GIVEN else f" (list: {source})"
    return f"${usd_per_hour:g} a chip-hour{cited}"


def prices_text(priced: Iterable[PricedChip]) -> str:
    """Prices of a chip-hour by chip, those of one source together: 'v5e $1.2, v5p $4.2 (list: Scaling Book, 2025-02)'.

    Empty where no source is known.
    """
    by_source: dict[str, dict[str, None]] = {}
    for one in priced:
        if one.price_source is not None:
            cited = one.price_source if one.price_source == GIVEN else f"list: {one.price_source}"
            by_source.setdefault(cited, {})[f"{one.chip} ${one.price_usd_per_hour:g}"] = None
    return "; ".join(f"{', '.join(prices)} ({cited})" for cited, prices in by_source.items())


def level_of(evidence: str) -> Level:
    """The level of a planned time, by that of its evidence: those calibrated by a user are expected too."""
    return "bound" if evidence == "bound" else "estimate" if evidence == "estimate" else "expected"


def interval_text(level: str, interval_s: Sequence[float] | None) -> str:
    """The interval of a planned time with evidence of a ``level``: 'expected; 90% interval 1.9 s to 2.3 s'."""
    if interval_s is None:
        return {"bound": "a bound", "estimate": "an estimate"}.get(level, f"{level}; no interval")
    low, high = interval_s
    return f"{level}; 90% interval {format_seconds(low)} to {format_seconds(high)}"


def evidence_figure(evidence: Evidence, name: str = "evidence") -> ShownFigure:
    """The runs that speak for a planned time, or that none does."""
    runs = evidence.runs
    return ShownFigure(name, "evidence", runs or None, "runs", "measured", note=evidence.text,
        shown=counted(runs, "run") if runs else "")  # fmt: skip
