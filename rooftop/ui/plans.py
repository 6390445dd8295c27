"""Plans that were written to files, as answers: training, serving, embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.hardware import Slice
from rooftop.ui.answers import Answer, Axis, Bar, Bars, Figure, Lines, Series, Table
from rooftop.ui.ledgers import embedding_memory, ledger_charts, memory_bars

#: What a server's memory holds.
_SERVED = ("weights", "scales", "kv", "activations")


def train(data: Mapping[str, Any]) -> Answer:
    """A plan of a training run: step, memory, ledger, alternatives, reasons."""
    step, memory, ledger = data["step"], data["memory"], Ledger.from_json(data["ledger"])
    mesh = " x ".join(f"{name} {size}" for name, size in data["mesh"]["axes"].items() if size > 1)
    return Answer(
        verdict=f"{data['model']['name']} on {data['slice']['name']}, {mesh}: {format_seconds(step['expected_s'])} "
        f"a step, {data['mfu']:.1%} MFU, bound by {step['bound']}." + ("" if memory["fits"] else " It does not fit."),
        no="" if memory["fits"] else "It does not fit.",
        figures=(
            Figure(name="expected_s", label="Step", value=step["expected_s"], unit="s", level="expected"),
            Figure(name="lower_s", label="If all overlapped", value=step["lower_s"], unit="s", level="bound",
                   formula=f"bound by {step['bound']}"),
            Figure(name="upper_s", label="Nothing overlapped", value=step["upper_s"], unit="s", level="expected"),
            Figure(name="mfu", label="MFU", value=data["mfu"], unit="%", level="expected",
                   formula=data["flops"]["convention"]),
            Figure(name="tokens_per_s", label="Tokens/s", value=data["tokens_per_s"], unit="tok/s", level="expected"),
            Figure(name="memory_bytes", label="Memory of a device", value=memory["total"], unit="B", level="expected",
                   formula=f"of {format_bytes(memory['capacity'])}"),
        ),
        charts=(
            *ledger_charts(ledger, Slice.parse(data["slice"]["name"]), data["dtypes"]["matmul"]),
            memory_bars({name: memory[name] for name in memory if name not in ("total", "capacity", "fits", "host")},
                    memory["capacity"]),
            *_alternatives(data),
        ),
        notes=tuple(reason["text"] for reason in data["reasons"]),
        sources=(f"Written by rooftop {data['rooftop_version']}.",),
    )  # fmt: skip


def _alternatives(data: Mapping[str, Any]) -> tuple[Table, ...]:
    """The runners-up of a search; () of a plan that was given."""
    rows = tuple(
        (
            " x ".join(f"{name} {size}" for name, size in each["mesh"].items()),
            each["remat"],
            str(each["microbatches"]),
            format_seconds(each["expected_s"]),
            f"{each['mfu']:.1%}",
            format_bytes(each["memory_bytes"]),
        )
        for each in data.get("alternatives", ())
    )
    columns = ("mesh", "remat", "microbatches", "step", "MFU", "memory")
    return (Table(title="Alternatives", columns=columns, rows=rows),) if rows else ()


def serve(data: Mapping[str, Any]) -> Answer:
    """A plan of a server: a step, latencies, the front of batches, memory."""
    generate, device = data["generate"], data["memory"]["per_device"]
    step = generate["step_s"]
    return Answer(
        verdict=f"{data['model']['name']} on {data['slice']['name']}: {generate['batch']} sequences, "
        f"{format_seconds(step['expected_s'])} a step, "
        f"{format_count(generate['tokens_per_s_per_chip'], 'tok/s')} a chip.",
        figures=(
            Figure(name="step_s", label="Step", value=step["expected_s"], unit="s", level="expected"),
            Figure(name="lower_s", label="If all overlapped", value=step["lower_s"], unit="s", level="bound"),
            Figure(name="ttft_s", label="TTFT", value=data["ttft_s"], unit="s", level="expected",
                   formula=data["definitions"]["ttft_s"]),
            Figure(name="tpot_s", label="TPOT", value=data["tpot_s"], unit="s", level="expected"),
            Figure(name="tokens_per_s", label="Tokens/s", value=generate["tokens_per_s"], unit="tok/s",
                   level="expected"),
            Figure(name="max_batch", label="Largest batch", value=data["max_batch"]),
        ),
        charts=(
            _front(data["pareto"]),
            memory_bars({name: device[name] for name in _SERVED}, device["capacity"]),
            *ledger_charts(Ledger.from_json(generate["ledger"]), Slice.parse(data["slice"]["name"])),
        ),
        notes=tuple(reason["text"] for reason in data["reasons"]),
        sources=(f"Written by rooftop {data['rooftop_version']}.",),
    )  # fmt: skip


def _front(points: list[Mapping[str, Any]]) -> Lines:
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        lines.setdefault(str(point.get("slice") or f"context {point['context']:,.0f}"), []).append(point)
    return Lines(
        title="Latency against throughput",
        about="A point for each batch.",
        x=Axis(label="step", unit="s", scale="log"),
        y=Axis(label="tokens/s per chip"),
        series=tuple(
            Series(
                name=name,
                points=tuple((float(each["step_s"]), float(each["tokens_per_s_per_chip"])) for each in found),
                names=tuple(f"batch {each['batch']}" for each in found),
            )
            for name, found in lines.items()
        ),
    )


def pareto(data: Mapping[str, Any]) -> Answer:
    """A front of servers."""
    return Answer(verdict=f"{data['model']}: the front of batches over servers.", charts=(_front(data["pareto"]),))


def embed(data: Mapping[str, Any]) -> Answer:
    """A plan of embedding tables: step, units, memory."""
    step = data["step"]
    return Answer(
        verdict=f"{len(data['stacks'])} stacks on {data['slice']['name']}: a pipelined step of "
        f"{format_seconds(step['pipelined']['expected_s'])}, bound by {step['pipelined']['bound']}.",
        figures=tuple(
            Figure(name=mode, label=f"Step, {mode}", value=each["expected_s"], unit="s", level="expected",
                   formula=f"bound by {each['bound']}")
            for mode, each in step.items()
        ),
        charts=(
            Bars(title="What each unit does in a step", unit="s",
                 bars=tuple(Bar(name=name, parts=(("busy", value),)) for name, value in data["units_s"].items())),
            embedding_memory(data["memory"]),
            *ledger_charts(Ledger.from_json(data["ledger"]), None),
        ),
        notes=tuple(data["obstacles"]),
        sources=(f"Written by rooftop {data['rooftop_version']}.",),
    )  # fmt: skip
