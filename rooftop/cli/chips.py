"""``rooftop chips``: the hardware catalogue, one chip of it with its sources, or a slice and its network."""

from __future__ import annotations

import click

from rooftop.cli.options import HARDWARE_NAME, VerbCommand, json_option
from rooftop.cli.output import console, emit_json
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.hardware import Chip, Figure, Slice


@click.command(
    cls=VerbCommand,
    examples=("rooftop chips v5p", "rooftop chips v5e:16x16@4 --json", "rooftop chips h100:8x128"),
)
@click.argument("name", metavar="[NAME|SLICE]", required=False, type=HARDWARE_NAME)
@json_option
def command(*, name: str | None, as_json: bool) -> None:
    """The hardware catalogue, every figure with its source.

    Alone: a table of all chips. With the NAME of a chip: each figure with unit, source and date. With a SLICE
    (CHIP:SHAPE[@SLICES]): its chips, devices, hosts, wraparound, totals and physical axes.

    Rates are per chip and one-way; HBM is nominal, and usable HBM is the part that the compiler allows per device.
    """
    from rooftop.library.catalogue import SliceResult, chip, chips

    if name is None:
        every = chips()
        emit_json(every.to_json()) if as_json else _print_all(every.chips)
        return
    result = chip(name)
    if as_json:
        emit_json(result.to_json())
    elif isinstance(result, SliceResult):
        _print_slice(result.slice)
    else:
        _print_chip(result.chip)


def _print_all(chips: tuple[Chip, ...]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("chip", no_wrap=True)
    for title in ("bf16\nFLOP/s", "8-bit\nFLOP/s", "HBM", "HBM\nB/s", "ICI link\nB/s"):
        table.add_column(title, justify="right")
    for title in ("pod", "host"):
        table.add_column(title)
    for title in ("DCN\nB/s", "USD\nper h"):
        table.add_column(title, justify="right")
    for spec in chips:
        eight_bit = max(rate for dtype, rate in spec.flops_per_s.items() if dtype in ("int8", "f8_e4m3"))
        price = spec.price_usd_per_hour
        table.add_row(
            spec.name,
            format_count(spec.flops_per_s["bf16"]),
            format_count(eight_bit),
            format_bytes(spec.hbm_bytes),
            format_count(spec.hbm_bytes_per_s),
            format_count(spec.ici_bytes_per_s),
            _shape(spec.pod_shape),
            _shape(spec.host_shape),
            format_count(spec.dcn_bytes_per_s),
            "" if price is None else f"{price:.2f}",
        )
    console().print(table)


def _print_chip(spec: Chip) -> None:
    from rich.table import Table

    out = console()
    also = f"  (also {', '.join(spec.aliases)})" if spec.aliases else ""
    out.print(f"[bold]{spec.name}[/bold]  {spec.title}{also}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", max_width=16)
    table.add_column("source, date", overflow="fold")
    for name, figure in spec.figures.items():
        table.add_row(name, _shown(figure), ", ".join(filter(None, (figure.source, figure.date))))
    out.print(table)


def _print_slice(spec: Slice) -> None:
    from rich.table import Table

    out = console()
    out.print(f"[bold]{spec.name}[/bold]  {spec.chip.title}")
    totals = Table(box=None, show_header=False, pad_edge=False)
    totals.add_column()
    totals.add_column(justify="right")
    price = spec.price_usd_per_hour
    for title, value in (
        ("chips", f"{spec.chips:,}"),
        ("devices", f"{spec.devices:,}"),
        ("cores", f"{spec.cores:,}"),
        ("hosts", f"{spec.hosts:,}"),
        *((f"{dtype} peak", format_count(spec.flops_per_s(dtype), "FLOP/s")) for dtype in spec.chip.flops_per_s),
        ("HBM, nominal", format_bytes(spec.hbm_bytes)),
        ("HBM, usable", format_bytes(spec.hbm_usable_bytes)),
        ("list price", "unknown" if price is None else f"{price:,.2f} USD/h"),
    ):
        totals.add_row(title, value)
    out.print(totals)
    out.print()
    axes = Table("axis", box=None, header_style="bold", pad_edge=False)
    axes.add_column("size", justify="right")
    axes.add_column("kind")
    axes.add_column("wraps")
    axes.add_column("one-way, per port and device", justify="right")
    axes.add_column("hop", justify="right")
    axes.add_column("resource")
    for axis in spec.physical_axes:
        axes.add_row(
            axis.name,
            str(axis.size),
            axis.kind,
            ("yes" if axis.wrapped else "no") if axis.kind == "torus" else "",
            f"{format_bytes(axis.bytes_per_s)}/s",
            format_seconds(axis.hop_s) if axis.hop_s else "",
            axis.resource,
        )
    out.print(axes)


def _shown(figure: Figure) -> str:
    value = figure.value
    if value is None:
        return "unpublished"
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return _shape(value)
    if figure.unit in ("B", "B/s"):
        return format_bytes(value) + figure.unit[1:]
    if figure.unit == "s":
        return format_seconds(value)
    if figure.unit == "USD/h":
        return f"{value:.2f} {figure.unit}"
    return format_count(value, figure.unit) if figure.unit else str(value)


def _shape(value: tuple[object, ...]) -> str:
    """A shape as people write it, or several of them."""
    return ", ".join(_shape(shape) for shape in value if isinstance(shape, tuple)) or "x".join(map(str, value))
