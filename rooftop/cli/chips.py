"""``rooftop chips``: the hardware catalogue, one chip of it with its sources, or a slice and its network."""

from __future__ import annotations

from typing import Any

import click

from rooftop.cli.output import emit_json, json_option, show_document
from rooftop.hardware import Chip, Slice, catalogue, chip


@click.command()
@click.argument("name", metavar="[NAME|SLICE]", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    r"""The hardware catalogue, every figure with its source.

    Alone: a table of all chips. With the NAME of a chip: each figure with unit, source and date. With a SLICE
    (CHIP:SHAPE[@SLICES]): its chips, devices, hosts, wraparound, totals and physical axes.

    Rates are per chip and one-way; HBM is nominal, and usable HBM is what the compiler allows per device.

    \b
    Examples: rooftop chips v5p
              rooftop chips v5e:16x16@4 --json
              rooftop chips h100:8x128
    """
    from rooftop.present.documents import catalogue as catalogued

    if name is None:
        chips = list(catalogue().values())
        emit_json({"chips": [_chip_figures(spec) for spec in chips]}) if as_json else show_document(
            catalogued.chips(chips)
        )
    elif ":" in name:
        spec = Slice.parse(name)
        emit_json(_slice_figures(spec)) if as_json else show_document(catalogued.slice_document(spec))
    else:
        one = chip(name)
        emit_json(_chip_figures(one)) if as_json else show_document(catalogued.chip(one))


def _chip_figures(spec: Chip) -> dict[str, Any]:
    return {
        "name": spec.name,
        "title": spec.title,
        "aliases": spec.aliases,
        "kind": spec.kind,
        "figures": {name: vars(figure) for name, figure in spec.figures.items()},
    }


def _slice_figures(spec: Slice) -> dict[str, Any]:
    return {
        "name": spec.name,
        "chip": spec.chip.name,
        "shape": spec.shape,
        "num_slices": spec.num_slices,
        "chips": spec.chips,
        "devices": spec.devices,
        "cores": spec.cores,
        "hosts": spec.hosts,
        "wraparound": spec.wraparound,
        "flops_per_s": {dtype: spec.flops_per_s(dtype) for dtype in spec.chip.flops_per_s},
        "hbm_bytes": spec.hbm_bytes,
        "hbm_usable_bytes": spec.hbm_usable_bytes,
        "price_usd_per_hour": spec.price_usd_per_hour,
        "physical_axes": [vars(axis) for axis in spec.physical_axes],
    }
