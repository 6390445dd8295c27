"""A collective over axes of a mesh (chapter 3): time over bytes, what links it uses, and its rounds one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from rooftop.algebra.expression import parse
from rooftop.algebra.pricing import PRICES, Cost, Prices
from rooftop.algebra.steps import Step
from rooftop.arrays import Mesh, parse_axes
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_count
from rooftop.hardware import Slice
from rooftop.present.document import (
    PRICE_LEVELS,
    Bar,
    Bars,
    Chart,
    ChartAxis,
    ChartSeries,
    Document,
    Frame,
    FrameCell,
    Frames,
    Lines,
    ShownFigure,
    ShownVerdict,
)
from rooftop.requests.measuring import Matmul
from rooftop.simulate.network.collectives import simulate
from rooftop.ui.controls import Control, Explorer, ExplorerForm, FieldControls, State, select, slider, text
from rooftop.ui.rounds import KINDS, Rounds, torus_rounds

#: One-byte elements along dim I, so that bytes are its size; an AllToAll splits J, which has one element a device.
_WRITTEN: Mapping[str, str] = {
    "all_gather": "AllGather_{under}(int8[I_{under}])",
    "reduce_scatter": "ReduceScatter_{{{axes},I}}(int8[I]{{U_{under}}})",
    "all_reduce": "AllReduce_{under}(int8[I]{{U_{under}}})",
    "all_to_all": "AllToAll_{{{axes},J}}(int8[I_{under}, J])",
}
_PAYLOAD: Mapping[str, str] = {
    "all_gather": "its output",
    "reduce_scatter": "its input",
    "all_reduce": "its operand",
    "all_to_all": "its operand",
}
_NAMES = {"all_gather": "An AllGather", "reduce_scatter": "A ReduceScatter", "all_reduce": "An AllReduce",
          "all_to_all": "An AllToAll"}  # fmt: skip
_FORMULA = {
    "all_gather": "max(hops, (N-1)/N V / (ports x w))",
    "reduce_scatter": "max(hops, (N-1)/N V / (ports x w))",
    "all_reduce": "max(hops, 2 (N-1)/N V / (ports x w)); V / w on a line",
    "all_to_all": "max(hops, N V / (8 w) on a ring, N V / (4 w) on a line)",
}
_ABOUT = {
    "all_gather": "A square for each shard: filled where a device has it.",
    "reduce_scatter": "A square for each shard of the result: as full as operands are summed up in it.",
    "all_reduce": "A ReduceScatter, then an AllGather: squares fill up to whole sums, which then spread.",
    "all_to_all": "A square for each device that bytes came from: at the end every device has a piece of each.",
}
#: Devices of a group that are drawn; chips times group that are simulated link by link while someone waits.
_DRAWN, _SIMULATED = 16, 512


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """One collective over some axes of a laid mesh."""

    mesh: Mesh
    axes: tuple[str, ...]

    def priced(self, kind: str, nbytes: int, price: str) -> tuple[Cost, dict[str, int], str]:
        """Its cost, its dims and the expression that the command line takes."""
        listed = ",".join(self.axes)
        under = listed if len(self.axes) == len(listed) == 1 else f"{{{listed}}}"
        expression = _WRITTEN[kind].format(under=under, axes=listed)
        size = self.mesh.size(*self.axes)
        dims = {"I": nbytes} | ({"J": size} if kind == "all_to_all" else {})
        step = parse(expression)
        assert isinstance(step, Step)
        return Prices(mesh=self.mesh, dims=dims, kind=price).cost(step), dims, expression


def answer(state: State) -> Document:
    """Time of a collective by each price and at each size, and its rounds."""
    slice_, shape = Slice.parse(state["on"]), parse_axes(state["mesh"], None)
    kind, nbytes = state["kind"], state.count("bytes")
    axes = tuple(name.strip() for name in state["axis"].split(","))
    if not set(axes) <= set(shape) or len(set(axes)) < len(axes):
        raise RooftopError("axis", state["axis"], f"some of {', '.join(shape)}, each once")
    asked = _Asked(mesh=Mesh.lay(slice_, shape), axes=axes)
    size = asked.mesh.size(*axes)
    if size < 2:
        raise RooftopError("axis", state["axis"], "axes of two devices or more: one alone sends nothing")
    cost, dims, expression = asked.priced(kind, nbytes, state["level"])
    group = asked.mesh.span(*axes)
    ring = bool(group.ring[group.size > 1].all())
    level = PRICE_LEVELS[state["level"]]
    formula = {
        "bound": _FORMULA[kind],
        "expected": "start + hops + bytes / (w x efficiency)",
        "book": "whole shards on even rings: V / (ports x w), twice that, or N / 4 of it",
    }[state["level"]]
    binds = "latency: its hops take longer than its bytes" if cost.latency_s >= sum(cost.resources.values()) else (
        f"{'the network' if 'dcn' in cost.resources else 'links'}: {format_count(nbytes / cost.time_s, 'B/s')} a device"
    )  # fmt: skip
    simulated, drawn = _simulated(kind, asked, nbytes), _rounds(kind, asked)
    notes = [f"The payload is {_PAYLOAD[kind]} on one device, as in every ledger."]
    if not drawn:
        notes.append(
            f"Rounds are drawn of up to {_DRAWN} devices over one or two axes of the mesh, each along one axis of a "
            f"torus; these are {size} over {', '.join(axes)}."
        )
    figures = [
        ShownFigure("time_s", "Time", cost.time_s, "s", level, formula=formula, source="chapter 3"),
        ShownFigure("latency_s", "Latency", cost.latency_s, "s", "bound", formula="hops x time of a hop",
            source="chapter 3"),
        ShownFigure("bandwidth", "Bytes/s", nbytes / cost.time_s, "B/s", level, formula="payload / time"),
        ShownFigure("devices", "Devices of a group", float(size), formula=f"along {', '.join(axes)}"),
        ShownFigure("ring", "Shape of the group", _shape(slice_, ring, int((group.size > 1).sum())),
            formula=asked.mesh.layout),
    ]  # fmt: skip
    if simulated is not None:
        by_link = ShownFigure(
            "simulated_s",
            "Link by link",
            simulated,
            "s",
            "simulated",
            formula="messages on the links of the torus, simulated",
        )
        figures.insert(1, by_link)
    return Document(
        verdict=ShownVerdict(
            says=f"{_NAMES[kind]} of {format_count(nbytes, 'B')} over {size} devices is bound by {binds}."
        ),
        figures=tuple(figures),
        charts=(_over_bytes(asked, kind, nbytes, cost), _kinds(asked, nbytes, state["level"]), *drawn),
        notes=tuple(notes),
        command=Matmul(
            expression,
            dims=dims,
            mesh=state["mesh"],
            on=slice_.name,
            level=state["level"],
            simulate=simulated is not None,
        ).command(),
        sources=("Chapter 3; chapter 2 for which axes are rings. Expected times: docs/evidence/achievable.md.",),
    )


def _shape(slice_: Slice, ring: bool, axes: int) -> str:
    if slice_.chip.kind == "gpu":
        return "a switch"
    return f"{'ring' if ring else 'line'}{'s' if axes > 1 else ''}{f' of {axes} axes' if axes > 1 else ''}"


def _simulated(kind: str, asked: _Asked, nbytes: int) -> float | None:
    """Seconds on the links one by one, where that takes no longer than a look; None for others."""
    mesh = asked.mesh
    small = mesh.slice.chips * mesh.size(*asked.axes) <= _SIMULATED
    if mesh.slice.chip.kind != "tpu" or mesh.slice.num_slices > 1 or not small or kind == "all_reduce":
        return None
    try:
        return simulate(kind, mesh.span(*asked.axes), float(nbytes)).seconds
    except RooftopError:  # a group over the cores of a chip is no part of its torus
        return None


def _over_bytes(asked: _Asked, kind: str, nbytes: int, here: Cost) -> Lines:
    size = asked.mesh.size(*asked.axes)
    sizes = [size * 2**power for power in range(6, 27, 2)]
    prices = {price: Prices(mesh=asked.mesh, dims={}, kind=price) for price in PRICES}
    return Lines(
        title="Time over bytes",
        about="Flat where hops bind, straight where bytes do.",
        x=ChartAxis("payload, bytes", "B", "log"),
        y=ChartAxis("time", "s", "log"),
        series=(
            *(
                ChartSeries(
                    price,
                    tuple((float(size), prices[price].collective_s(kind, asked.axes, size)) for size in sizes),
                    "line" if price == "bound" else "dashed",
                )
                for price in PRICES
            ),
            ChartSeries("here", ((float(nbytes), here.time_s),), "point"),
        ),
    )


def _kinds(asked: _Asked, nbytes: int, price: str) -> Bars:
    prices = Prices(mesh=asked.mesh, dims={}, kind=price)
    return Bars(
        title="The four collectives at these bytes",
        about="An AllToAll's payload is one device's operand: gathered it would be N times as much, of which "
        "a ring moves a quarter.",
        unit="s",
        bars=tuple(
            Bar(kind, ((price, prices.collective_s(kind, asked.axes, nbytes)),)) for kind in KINDS
        ),
    )  # fmt: skip


def _rounds(kind: str, asked: _Asked) -> tuple[Chart, ...]:
    """The rounds of the collective on rings or lines of the torus, for a group small enough to be seen.

    Each axis of the mesh must lie on one axis of the torus, and two of them at most make a picture.
    """
    axes = [axis for axis in asked.axes if asked.mesh.size(axis) > 1]
    spans = [asked.mesh.span(axis) for axis in axes]
    whole = all((span.size > 1).sum() == 1 for span in spans)
    torus = all(
        kind.kind == "torus" for span in spans for kind, n in zip(span.physical, span.size, strict=True) if n > 1
    )
    sizes = [asked.mesh.size(axis) for axis in axes]
    if len(axes) > 2 or not whole or not torus or prod(sizes) > _DRAWN:
        return ()
    rings = [bool(span.ring[span.size > 1].all()) for span in spans]
    result = torus_rounds(kind, sizes, rings)
    named = " by ".join(f"a {'ring' if ring else 'line'} of {size}" for ring, size in zip(rings, sizes, strict=True))
    order = (
        f" Over {axes[0]} and then {axes[1]}; another part of the bytes takes them the other way round."
        if len(axes) > 1
        else ""
    )
    return (
        Frames(
            title=f"Round by round on {named}",
            about=_ABOUT[kind] + order,
            shape=(1, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1]),
            names=tuple(f"{device}" for device in range(prod(sizes))),
            frames=tuple(_frame(kind, result, at) for at in range(len(result.held))),
            start=1,
        ),
    )


def _frame(kind: str, rounds: Rounds, at: int) -> Frame:
    holdings = rounds.held[at]
    whole = int((holdings > 1 - 1e-9).sum())
    shards = len(holdings)
    says = {
        "all_gather": f"Round {at}: {whole} of {shards * shards} shards are where they are wanted.",
        "all_to_all": f"Round {at}: pieces have gone {at} hop{'' if at == 1 else 's'}.",
    }.get(kind, f"Round {at}: {min(whole, shards)} of {shards} sums are whole{_copies(whole, shards)}.")
    # A piece of an AllToAll is a small part of a shard: what is full is a device's share of one source.
    scale = float(shards) if kind == "all_to_all" else 1.0
    return Frame(
        tuple(FrameCell(tuple(enumerate(np.minimum(row * scale, 1.0).tolist()))) for row in holdings),
        says,
        rounds.sent[at] if at < len(rounds.sent) else (),
    )


def _copies(whole: int, shards: int) -> str:
    return f", in {whole / shards:.3g} places each" if whole > shards else ""


_FIELDS = FieldControls(Matmul)
_CONTROLS: tuple[Control, ...] = (
    select("kind", "Collective", KINDS, "all_gather"),
    slider("bytes", "Payload, bytes", "67108864", 4096, 2**34, unit="bytes", fields=("dim I", "dim J")),
    _FIELDS.text("on", "v5e:8x16", fields=("slice", "chip", "group", "torus"),
         suggestions=("v5e:4x4", "v5e:8x16", "v5e:16x16", "v5p:4x4x4", "v5p:8x8x8", "tpu7x:4x4x4", "h100:8x4")),
    _FIELDS.text("mesh", "X=8,Y=16", suggestions=("X=4,Y=4", "X=8,Y=16", "X=16,Y=16", "X=4,Y=4,Z=4", "X=8,Y=64")),
    text("axis", "Over axes", "Y", suggestions=("X", "Y", "X,Y", "Z"), fields=("devices",)),
    _FIELDS.select("level", described=True),
)  # fmt: skip


FORM = ExplorerForm(
    name="collectives",
    title="Collectives on a torus",
    summary="What gathering, scattering, summing and exchanging take on the links of a slice, and how they go.",
    chapter="chapter 3",
    controls=_CONTROLS,
)
EXPLORER = Explorer(FORM, answer)
