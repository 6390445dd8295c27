"""``rooftop model``: parameters, FLOPs and KV bytes of a model; alone, the list of those that ship with rooftop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from rooftop.cli.options import MODEL, VerbCommand, json_option, seq_option
from rooftop.cli.output import console, emit_json
from rooftop.core.quantities import format_bytes, format_count
from rooftop.library.catalogue import KV_DTYPES, model, models
from rooftop.models import ModelConfig


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
        emit_json(every.to_json()) if as_json else _print_list([entry.totals for entry in every.models])
        return
    result = model(name, seq=seq_len)
    emit_json(result.to_json()) if as_json else _print_model(result.config, result.to_json())


def _print_list(totals: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("model", no_wrap=True)
    table.add_column("family", no_wrap=True)
    for title in ("parameters", "active", "KV bytes/token (bf16)", "longest sequence"):
        table.add_column(title, justify="right")
    for row in totals:
        table.add_row(
            row["name"],
            row["family"],
            format_count(row["params"]),
            format_count(row["active_params"]) if row["active_params"] != row["params"] else "",
            format_bytes(row["kv_bytes_per_token"]["bf16"]),
            f"{row['max_seq_len']:,}",
        )
    console().print(table)


def _print_model(config: ModelConfig, figures: Mapping[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    out, flops = console(), figures["flops_per_token"]
    out.print(f"[bold]{escape(config.name)}[/bold]  {_shape(config)}", soft_wrap=True)
    if figures["source"]:
        out.print(f"source: {escape(figures['source'])}", style="dim", soft_wrap=True)
    table = Table("parameters", box=None, header_style="bold")
    for _ in range(2):
        table.add_column(justify="right")
    rows = [("total", figures["params"]), ("active per token", figures["active_params"])]
    for title, count in rows + [(f"  {part}", count) for part, count in figures["params_by_component"].items()]:
        table.add_row(title, f"{count:,}", format_count(count))
    table.add_section()
    table.add_row(f"[bold]FLOPs per token at S = {figures['seq_len']:,}[/bold]")
    for title, key in (
        ("forward", "forward"),
        ("  matmuls with weights", "forward_matmul"),
        ("  attention over the context", "forward_attention"),
        ("forward and backward", "total"),
        ("  with full attention", "total_full_attention"),
    ):
        table.add_row(title, f"{flops[key]:,.0f}", format_count(flops[key]))
    table.add_section()
    table.add_row("[bold]KV cache[/bold]")
    for dtype in KV_DTYPES:
        for title, amount in (
            (f"bytes per token, {dtype}", figures["kv_bytes_per_token"][dtype]),
            (f"bytes of one sequence, {dtype}", figures["kv_cache_bytes"][dtype]),
        ):
            table.add_row(title, f"{amount:,.0f}", format_bytes(amount))
    out.print(table)
    out.print(f"FLOPs: {flops['convention']}", style="dim", soft_wrap=True)


def _shape(config: ModelConfig) -> str:
    """The dims of the model in the book's letters."""
    dims = f"L={config.layers} D={config.d_model} N={config.heads} K={config.kv_heads} H={config.d_head}"
    if config.dense_layers:
        dims += f" F={config.d_ff}"
    if config.moe is not None:
        dims += f" E={config.moe.experts} k={config.moe.active} F_expert={config.moe.d_ff}"
    if config.layer_windows:
        windowed = [window for window in config.layer_windows if window is not None]
        dims += f" window={windowed[0]} in {len(windowed)} layers"
    return f"{dims} V={config.vocab}"
