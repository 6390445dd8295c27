"""``rooftop model``: parameters, FLOPs and KV bytes of a model; alone, the list of those that ship with rooftop."""

from __future__ import annotations

import click

from rooftop.cli.options import MODEL, VerbCommand, json_option, seq_option
from rooftop.cli.output import emit_json, show_document
from rooftop.library.catalogue import model, models


@click.command(
    cls=VerbCommand, examples=("rooftop model llama3-8b --seq 8Ki", "rooftop model ./my-model/config.json --json")
)
@click.argument("name", required=False, type=MODEL)
@seq_option(help="Tokens of a sequence: 8192, 8Ki. [default: 4096, or the model's longest]")
@json_option
def command(*, name: str | None, seq_len: int | None, as_json: bool) -> None:
    """Parameters, FLOPs per token and KV-cache bytes of a model.

    NAME is a preset (alone, the verb lists them), or the path of a Hugging Face config.json or of its directory.
    """
    if name is None:
        every = models()
        emit_json(every.to_json()) if as_json else show_document(every.document)
        return
    result = model(name, seq=seq_len)
    emit_json(result.to_json()) if as_json else show_document(result.document)
