"""The documents of the catalogues: chips, a chip, a slice, models, a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.hardware import Chip, Figure, Slice
from rooftop.models import ModelConfig
from rooftop.plan.catalogue import ModelRecord, ModelTotals, SupportRecord
from rooftop.present.document import Document, ShownVerdict, Table, TableColumn, columns
from rooftop.present.documents.parts import prose, table


def chips(every: list[Chip]) -> Document:
    """All chips of the catalogue."""
    rows = []
    for spec in every:
        eight_bit = max(rate for dtype, rate in spec.flops_per_s.items() if dtype in ("int8", "f8_e4m3"))
        price = spec.price_usd_per_hour
        rows.append(
            (
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
        )
    headings = (
        TableColumn("chip", "text"),
        *columns("bf16 FLOP/s", "8-bit FLOP/s", "HBM", "HBM B/s", "ICI link B/s", text=0),
        TableColumn("pod", "text", drop=2),
        TableColumn("host", "text", drop=1),
        *columns("DCN B/s", "USD per h", text=0),
    )
    return Document(
        title="Chips", verdict=ShownVerdict(), charts=(Table(title="", columns=headings, rows=tuple(rows)),)
    )


def chip(spec: Chip) -> Document:
    """One chip: every figure with its source."""
    also = f"  (also {', '.join(spec.aliases)})" if spec.aliases else ""
    rows = [
        (name, _shown(figure), ", ".join(filter(None, (figure.source, figure.date))))
        for name, figure in spec.figures.items()
    ]
    headings = (
        TableColumn("figure", "text"),
        TableColumn("value", "text", wrap=True),
        TableColumn("source, date", "text", wrap=True),
    )
    return Document(
        title=spec.title,
        verdict=ShownVerdict(subject=f"{spec.name}  {spec.title}{also}"),
        charts=(Table(title="", columns=headings, rows=tuple(rows)),),
    )


def slice_document(spec: Slice) -> Document:
    """A slice: its totals and its physical axes."""
    price = spec.price_usd_per_hour
    totals = (
        ("chips", f"{spec.chips:,}"),
        ("devices", f"{spec.devices:,}"),
        ("cores", f"{spec.cores:,}"),
        ("hosts", f"{spec.hosts:,}"),
        *((f"{dtype} peak", format_count(spec.flops_per_s(dtype), "FLOP/s")) for dtype in spec.chip.flops_per_s),
        ("HBM, nominal", format_bytes(spec.hbm_bytes)),
        ("HBM, usable", format_bytes(spec.hbm_usable_bytes)),
        ("list price", "unknown" if price is None else f"{price:,.2f} USD/h"),
    )
    axes = [
        (
            axis.name,
            str(axis.size),
            axis.kind,
            ("yes" if axis.wrapped else "no") if axis.kind == "torus" else "",
            f"{format_bytes(axis.bytes_per_s)}/s",
            format_seconds(axis.hop_s) if axis.hop_s else "",
            axis.resource,
        )
        for axis in spec.physical_axes
    ]
    text = ("axis", "kind", "wraps", "resource")
    names = ("axis", "size", "kind", "wraps", "one-way, per port and device", "hop", "resource")
    headings = tuple(TableColumn(name, "text" if name in text else "number") for name in names)
    return Document(
        title=spec.name,
        verdict=ShownVerdict(subject=f"{spec.name}  {spec.chip.title}"),
        charts=(table("", ("", ""), totals), Table(title="", columns=headings, rows=tuple(axes))),
    )


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


def _shape(value: tuple[Any, ...]) -> str:
    """A shape as people write it, or several of them."""
    nested = isinstance(value[0], tuple)
    return ", ".join(_shape(shape) for shape in value) if nested else "x".join(str(size) for size in value)


def models(every: Iterable[ModelTotals]) -> Document:
    """All models that ship with rooftop."""
    rows = [
        (
            model.name,
            model.family,
            format_count(model.params),
            format_count(model.active_params) if model.active_params != model.params else "",
            format_bytes(float(model.kv_bytes_per_token.bf16)),
            f"{model.max_seq_len:,}",
        )
        for model in every
    ]
    names = ("model", "family", "parameters", "active", "KV bytes/token (bf16)", "longest sequence")
    return Document(title="Models", verdict=ShownVerdict(), charts=(table("", names, rows, text=2),))


def model(record: ModelRecord) -> Document:
    """One model: parameters, FLOPs and KV bytes."""
    config, flops, stored = record.config, record.flops_per_token, record.stored
    counts = [("total", record.params), ("active per token", record.active_params)]
    counts += [(f"  {part}", count) for part, count in record.params_by_component.items()]
    rows: list[tuple[str, ...]] = [(title, f"{count:,}", format_count(count)) for title, count in counts]
    rows += [(), (f"FLOPs per token at S = {record.seq_len:,}", "", "")]
    rows += [
        (title, f"{amount:,.0f}", format_count(float(amount)))
        for title, amount in (
            ("forward", flops.forward),
            ("  matmuls with weights", flops.forward_matmul),
            ("  attention over the context", flops.forward_attention),
            ("forward and backward", flops.total),
            ("  with full attention", flops.total_full_attention),
        )
    ]
    token, sequence = record.kv_bytes_per_token, record.kv_cache_bytes
    rows += [(), ("KV cache", "", "")]
    rows += [
        (title, f"{amount:,.0f}", format_bytes(float(amount)))
        for title, amount in (
            ("bytes per token, bf16", token.bf16),
            ("bytes of one sequence, bf16", sequence.bf16),
            ("bytes per token, int8", token.int8),
            ("bytes of one sequence, int8", sequence.int8),
        )
    ]
    if stored is not None:
        rows += [(), (f"Checkpoint, {stored.format}", "", "")]
        rows += [
            (title, f"{amount:,}", format_bytes(amount))
            for title, amount in (("bytes of its weights", stored.bytes), ("bytes in bf16", stored.bf16_bytes))
        ]
    return Document(
        title=record.name,
        verdict=ShownVerdict(
            subject=f"{record.name}  {_dims(config)}{_too_long(config, record.seq_len)}",
            details=(f"source: {record.source}",) if record.source else (),
        ),
        charts=(table("", ("parameters", "", ""), rows), prose(f"FLOPs: {flops.convention}")),
    )


def support(record: SupportRecord) -> Document:
    """A model on a chip: verbs, evidence, and the source of each rate."""
    verbs = [(entry.verb, entry.answer, entry.note) for entry in record.verbs]
    evidence = [(phase, one.level, one.text) for phase, one in record.evidence.items()]
    frameworks = [(entry.verb, entry.answer, entry.note) for entry in record.frameworks]
    tables = (
        ("", "verb", "", verbs),
        ("Frameworks that train it", "framework", "", frameworks),
        ("Evidence for its times", "phase", "times are", evidence),
    )
    wide = tuple(
        Table(
            title=title,
            columns=(*columns(first, second, text=2), TableColumn("", "text", wrap=True)),
            rows=tuple(rows),
        )
        for title, first, second, rows in tables
        if rows
    )
    sources = Table(
        title="Rates of the chip, and what each rests on",
        columns=(TableColumn("rate", "text"), TableColumn("source", "text", wrap=True)),
        rows=tuple(record.rates.items()),
    )
    return Document(
        title=f"{record.model} on {record.chip}",
        verdict=ShownVerdict(subject=f"{record.model} on {record.chip}"),
        charts=(*wide, sources),
    )


def _too_long(config: ModelConfig, seq_len: int) -> str:
    """A warning if sequences are longer than those for which the model was made."""
    return f"; sequences of {seq_len:,}, made for {config.max_seq_len:,}" if seq_len > config.max_seq_len else ""


def _dims(config: ModelConfig) -> str:
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


def explorers(forms: Iterable[tuple[str, str, Iterable[str]]]) -> Document:
    """The explorers of the page: the name, the title and the names of the controls of each."""
    rows = [(f"/{name}", title, ", ".join(controls)) for name, title, controls in forms]
    headings = (*columns("address", "explorer", text=2), TableColumn("controls", "text", wrap=True))
    shown = Table(title="", columns=headings, rows=tuple(rows))
    return Document(title="Explorers", verdict=ShownVerdict(), charts=(shown,))
