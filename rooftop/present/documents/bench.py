"""The documents of ``rooftop bench``: collectives of devices, and the latencies of a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.present.document import Chart, Document, ShownVerdict, Table, columns
from rooftop.present.documents.matmul import EMULATED
from rooftop.present.documents.parts import prose

_TIMES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("end to end", "e2e_s"))
#: Seconds that a request may be sent late without a word.
_LAG_S = 0.05
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def collectives(data: Mapping[str, Any]) -> Document:
    """The times of collectives, next to the planned ones of a slice."""
    measured, planned = data["measured"], data["slice"] is not None
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    axes = ", ".join(f"{name}={size}" for name, size in data["mesh"]["axes"].items())
    rows: list[tuple[str, ...]] = []
    before = ""
    for timed in measured["collectives"]:
        if before and timed["kind"] != before:
            rows.append(())
        rows.append(
            (
                timed["kind"] if timed["kind"] != before else "",
                format_bytes(timed["bytes"]),
                format_seconds(timed["median_s"]),
                format_seconds(timed["fastest_s"]),
                str(timed["runs"]),
                f"{format_bytes(timed['wire_bytes_per_s'])}/s",
                *((format_seconds(timed["planned"][price]) for price in ("bound_s", "expected_s")) if planned else ()),
            )
        )
        before = timed["kind"]
    names = (
        "collective",
        "bytes",
        "median",
        "fastest",
        "runs",
        "bandwidth",
        *(("bound", "expected") if planned else ()),
    )
    lines = [
        "bytes: the payload of one device. bandwidth: what one device sends, by the median time; of N devices it is "
        "(N-1)/N of the payload, twice that in an all_reduce, and all of it in a permute.",
        f"A call that does nothing takes {format_seconds(measured['empty_call_s'])}; every time includes it.",
    ]
    if planned:
        lines.append(f"bound, expected: planned for {data['slice']}, not for the devices that are here.")
    if measured["emulated"]:
        lines.append(EMULATED)
    return Document(
        title="Collectives",
        verdict=ShownVerdict(
            subject=f"{measured['devices']}, {versions}, {measured['date']}",
            details=(f"mesh {axes}; over {','.join(data['axes'])}; {data['dtype']}",),
        ),
        charts=(Table(title="", columns=columns(*names), rows=tuple(rows)), prose("\n".join(lines))),
    )


def server(data: Mapping[str, Any]) -> Document:
    """The latencies that clients of a server saw, next to those that the simulator predicts."""
    return Document(
        title=f"{data['model']} at {data['url']}",
        verdict=ShownVerdict(
            subject=f"{data['model']} at {data['url']}, rooftop {data['rooftop_version']}, {data['date']}",
            details=tuple(_served(data["measured"])),
        ),
        charts=(_latencies(data), prose("\n".join(_notes(data)))),
    )


def _served(measured: Mapping[str, Any]) -> Iterator[str]:
    requests, tokens, goodput = measured["requests"], measured["tokens"], measured["goodput"]
    yield (
        f"{requests['finished']:,} of {requests['offered']:,} requests in {format_seconds(measured['duration_s'])}, "
        f"{requests['per_second']:.4g} a second; {format_count(tokens['generated'], 'tok')} generated, "
        f"{tokens['generated_per_second']:,.0f} tok/s"
    )
    if requests["finished"] < requests["offered"]:
        yield f"{requests['refused']:,} were refused and {requests['failed']:,} failed, such as: {requests['why']}"
    targets = [
        f"{name} {format_seconds(goodput[key])}"
        for name, key in (("TTFT", "ttft_target_s"), ("TPOT", "tpot_target_s"))
        if goodput[key] is not None
    ]
    if targets:
        rate = f"{goodput['requests_per_second']:.4g} a second"
        yield f"goodput: {rate}, {goodput['share']:.1%} of the requests within {' and '.join(targets)}"


def _latencies(data: Mapping[str, Any]) -> Chart:
    measured, predicted = data["measured"], data["predicted"]
    rows = []
    for name, key in _TIMES:
        sides = {"measured": measured[key], "predicted": None if predicted is None else predicted[key]}
        for at, (kind, values) in enumerate(sides.items()):
            if values is not None:
                rows.append(("" if at else name, kind, *(format_seconds(values[column]) for column in _COLUMNS)))
    return Table(title="", columns=columns("", "", *_COLUMNS, text=2), rows=tuple(rows))


def _notes(data: Mapping[str, Any]) -> Iterator[str]:
    how = "predicted: simulated with" if data["predicted"] is not None else "no prediction:"
    yield f"{how} {data['predicted_by']}"
    if (outside := data["outside_engine_ttft_s"]) is not None:
        yield f"TTFT outside the engine (HTTP, the client), which is not simulated: {format_seconds(outside)}, mean"
    if (lag := data["measured"]["worst_lag_s"]) > _LAG_S:
        yield f"The client fell behind by up to {format_seconds(lag)}: it is too slow for this."
