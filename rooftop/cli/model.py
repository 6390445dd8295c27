"""``rooftop model``: parameters, FLOPs and KV bytes of a model; alone, the list of those that ship with rooftop."""

from __future__ import annotations

from typing import Any

import click

from rooftop.cli.options import json_option
from rooftop.cli.output import console, emit_json
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_bytes, format_count, parse_count
from rooftop.models import (
    ModelConfig,
    count_params,
    flops_per_token,
    kv_bytes_per_token,
    kv_cache_bytes,
    load_model,
    preset_source,
    presets,
)

#: Context at which FLOPs are given unless the caller says; shorter for models that reach less far.
_DEFAULT_SEQ = 4096
_KV_DTYPES = ("bf16", "int8")


@click.command()
@click.argument("name", required=False)
@click.option("--seq", help="Tokens in a sequence, such as 8192 or 8Ki. [default: 4096, or the model's longest]")
@json_option
def command(name: str | None, seq: str | None, as_json: bool) -> None:
    r"""Parameters, FLOPs per token and KV-cache bytes of a model.

    NAME is a preset (alone, the verb lists them), or the path of a Hugging Face config.json or of its directory.

    \b
    Examples: rooftop model llama3-8b --seq 8Ki
              rooftop model ./my-model/config.json --json
    """
    if name is None:
        models = [_summary(load_model(preset)) for preset in presets()]
        emit_json({"models": models}) if as_json else _print_list(models)
        return
    config = load_model(name)
    seq_len = min(_DEFAULT_SEQ, config.max_seq_len) if seq is None else parse_count(seq, "--seq")
    if config.positions == "learned" and seq_len > config.max_seq_len:
        raise RooftopError("--seq", seq, f"at most {config.max_seq_len}: the model has learned no more positions")
    figures = _figures(config, preset_source(name), seq_len)
    emit_json(figures) if as_json else _print_model(config, figures)


def _summary(config: ModelConfig) -> dict[str, Any]:
    counts = count_params(config)
    return {
        "name": config.name,
        "family": config.family,
        "params": counts.total,
        "active_params": counts.active,
        "kv_bytes_per_token": {dtype: kv_bytes_per_token(config, dtype) for dtype in _KV_DTYPES},
        "max_seq_len": config.max_seq_len,
    }


def _figures(config: ModelConfig, source: str | None, seq_len: int) -> dict[str, Any]:
    flops = flops_per_token(config, seq_len)
    return {
        **_summary(config),
        "source": source,
        "params_by_component": count_params(config).by_component,
        "seq_len": seq_len,
        "flops_per_token": {
            "convention": flops.convention,
            "forward": flops.forward,
            "backward": flops.backward,
            "total": flops.total,
            "forward_matmul": flops.matmul,
            "forward_attention": flops.attention,
            "total_full_attention": flops_per_token(config, seq_len, attention="full").total,
        },
        "kv_cache_bytes": {dtype: kv_cache_bytes(config, dtype, seq_len) for dtype in _KV_DTYPES},
        "config": config.to_json(),
    }


def _print_list(models: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("model", no_wrap=True)
    table.add_column("family", no_wrap=True)
    for title in ("parameters", "active", "KV bytes/token (bf16)", "longest sequence"):
        table.add_column(title, justify="right")
    for model in models:
        table.add_row(
            model["name"],
            model["family"],
            format_count(model["params"]),
            format_count(model["active_params"]) if model["active_params"] != model["params"] else "",
            format_bytes(model["kv_bytes_per_token"]["bf16"]),
            f"{model['max_seq_len']:,}",
        )
    console().print(table)


def _print_model(config: ModelConfig, figures: dict[str, Any]) -> None:
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
    for dtype in _KV_DTYPES:
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
