"""``rooftop model``: parameters, FLOPs and KV bytes of a model; alone, the list of those that ship with rooftop."""

from __future__ import annotations

from typing import Any

import click

from rooftop.cli.output import emit_json, json_option, show_document
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import parse_count
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
    from rooftop.present.documents import catalogue

    if name is None:
        models = [_summary(load_model(preset)) for preset in presets()]
        emit_json({"models": models}) if as_json else show_document(catalogue.models(models))
        return
    config = load_model(name)
    seq_len = min(_DEFAULT_SEQ, config.max_seq_len) if seq is None else parse_count(seq, "--seq")
    if config.positions == "learned" and seq_len > config.max_seq_len:
        raise RooftopError("--seq", seq, f"at most {config.max_seq_len}: the model has learned no more positions")
    figures = _figures(config, preset_source(name), seq_len)
    emit_json(figures) if as_json else show_document(catalogue.model(config, figures))


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
