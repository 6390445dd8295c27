"""``rooftop chips``: the hardware catalogue, one chip of it with its sources, or a slice and its network."""

from __future__ import annotations

import click

from rooftop.cli.options import HARDWARE_NAME, VerbCommand, json_option
from rooftop.cli.output import emit_json, show_document


@click.command(
    cls=VerbCommand, examples=("rooftop chips v5p", "rooftop chips v5e:16x16@4 --json", "rooftop chips h100:8x128")
)
@click.argument("name", metavar="[NAME|SLICE]", required=False, type=HARDWARE_NAME)
@json_option
def command(*, name: str | None, as_json: bool) -> None:
    """The hardware catalogue, every figure with its source.

    Alone: a table of all chips. With the NAME of a chip: each figure with unit, source and date. With a SLICE
    (CHIP:SHAPE[@SLICES]): its chips, devices, hosts, wraparound, totals and physical axes.

    Rates are per chip and one-way; HBM is nominal, and usable HBM is the part that the compiler allows per device.
    """
    from rooftop.library.catalogue import chip, chips

    result = chips() if name is None else chip(name)
    emit_json(result.to_json()) if as_json else show_document(result.document)
