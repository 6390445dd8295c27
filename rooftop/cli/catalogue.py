"""``rooftop chips``, ``rooftop model`` and ``rooftop support``: the catalogues, and a model on a chip."""

from __future__ import annotations

import click

from rooftop.cli.options import HARDWARE_NAME, MODEL, VerbCommand, json_option, on_option, seq_option
from rooftop.cli.output import emit_json, show_document


@click.command(
    "chips",
    cls=VerbCommand,
    examples=("rooftop chips v5p", "rooftop chips v5e:16x16@4 --json", "rooftop chips h100:8x128"),
)
@click.argument("name", metavar="[NAME|SLICE]", required=False, type=HARDWARE_NAME)
@json_option
def chips(*, name: str | None, as_json: bool) -> None:
    """The hardware catalogue, every figure with its source.

    Alone: a table of all chips. With the NAME of a chip: each figure with unit, source and date. With a SLICE
    (CHIP:SHAPE[@SLICES]): its chips, devices, hosts, wraparound, totals and physical axes.

    Rates are per chip and one-way; HBM is nominal, and usable HBM is the part that the compiler allows per device.
    """
    from rooftop.library import catalogue

    result = catalogue.chips() if name is None else catalogue.chip(name)
    emit_json(result.to_json()) if as_json else show_document(result.document)


@click.command(
    "model",
    cls=VerbCommand,
    examples=("rooftop model llama3-8b --seq 8Ki", "rooftop model ./my-model/config.json --json"),
)
@click.argument("name", required=False, type=MODEL)
@seq_option(help="Tokens of a sequence: 8192, 8Ki. [default: 4096, or the model's longest]")
@json_option
def model(*, name: str | None, seq_len: int | None, as_json: bool) -> None:
    """Parameters, FLOPs per token and KV-cache bytes of a model.

    NAME is a preset (alone, the verb lists them), llama:N or mixtral:N for a small model of about N parameters, or the
    path of a Hugging Face config.json or of its directory.
    """
    from rooftop.library import catalogue

    result = catalogue.models() if name is None else catalogue.model(name, seq=seq_len)
    emit_json(result.to_json()) if as_json else show_document(result.document)


@click.command(
    "support",
    cls=VerbCommand,
    examples=("rooftop support llama3-70b --on v5p", "rooftop support deepseek-v3 --on h100 --json"),
)
@click.argument("name", metavar="MODEL", type=MODEL)
@on_option(required=True, help="A chip, such as v5p or h100.")
@json_option
def support(*, name: str, on: str, as_json: bool) -> None:
    """Say what rooftop does with a model on a chip, and with which evidence: before you trust a figure.

    Lists the verbs that work, or why one does not; the published runs next to which its times stand; and the source of
    every rate of the chip: measured, counted in compiled programs, borrowed from another chip, or at peak.
    """
    from rooftop.library import catalogue

    result = catalogue.support(name, on=on)
    emit_json(result.to_json()) if as_json else show_document(result.document)
