"""Tables of ``rooftop bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rooftop.cli.output import console
from rooftop.core.quantities import format_bytes, format_count, format_seconds


def show_collectives(data: dict[str, Any], output: Path | None) -> None:
    """Print the times of collectives."""
    from rich.table import Table

    out = console()
    measured = data["measured"]
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    out.print(f"[bold]{measured['devices']}[/bold], {versions}, {measured['date']}")
    axes = ", ".join(f"{name}={size}" for name, size in data["mesh"]["axes"].items())
    out.print(f"mesh {axes}; over {','.join(data['axes'])}; {data['dtype']}")
    planned = data["slice"] is not None
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("collective")
    for title in ("bytes", "median", "fastest", "runs", "bandwidth", *(("bound", "expected") if planned else ())):
        table.add_column(title, justify="right")
    before = ""
    for each in measured["collectives"]:
        if before and each["kind"] != before:
            table.add_row()
        table.add_row(
            each["kind"] if each["kind"] != before else "",
            format_bytes(each["bytes"]),
            format_seconds(each["median_s"]),
            format_seconds(each["fastest_s"]),
            str(each["runs"]),
            f"{format_bytes(each['wire_bytes_per_s'])}/s",
            *((format_seconds(each["planned"][price]) for price in ("bound_s", "expected_s")) if planned else ()),
        )
        before = each["kind"]
    out.print()
    out.print(table)
    out.print()
    out.print(
        "bytes: the payload of one device. bandwidth: what one device sends, by the median time; of N devices it is "
        "(N-1)/N of the payload, twice that in an all_reduce, and all of it in a permute."
    )
    out.print(f"A call that does nothing takes {format_seconds(measured['empty_call_s'])}; every time includes it.")
    if planned:
        out.print(f"bound, expected: planned for {data['slice']}, not for the devices that are here.")
    if measured["emulated"]:
        out.print("The devices are emulated on CPU: these times say that it runs, nothing about an accelerator.")
    if output is not None:
        out.print(f"written: {output}", soft_wrap=True)


_TIMES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("end to end", "e2e_s"))
#: Seconds that a request may be sent late without a word.
_LAG_S = 0.05
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def show_serving(data: dict[str, Any], output: Path | None) -> None:
    """Print what clients of a server waited for, and what the simulator says."""
    from rich.table import Table

    out, measured, predicted = console(), data["measured"], data["predicted"]
    requests, tokens, goodput = measured["requests"], measured["tokens"], measured["goodput"]
    out.print(f"[bold]{data['model']}[/bold] at {data['url']}, rooftop {data['rooftop_version']}, {data['date']}")
    out.print(
        f"{requests['finished']:,} of {requests['offered']:,} requests in {format_seconds(measured['duration_s'])}, "
        f"{requests['per_second']:.4g} a second; {format_count(tokens['generated'], 'tok')} generated, "
        f"{tokens['generated_per_second']:,.0f} tok/s"
    )
    if requests["finished"] < requests["offered"]:
        out.print(
            f"{requests['refused']:,} were refused and {requests['failed']:,} failed, such as: {requests['why']}",
            markup=False,
        )
    targets = [
        f"{name} {format_seconds(goodput[key])}"
        for name, key in (("TTFT", "ttft_target_s"), ("TPOT", "tpot_target_s"))
        if goodput[key] is not None
    ]
    if targets:
        rate = f"{goodput['requests_per_second']:.4g} a second"
        out.print(f"goodput: {rate}, {goodput['share']:.1%} of the requests within {' and '.join(targets)}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    table.add_column("")
    for title in _COLUMNS:
        table.add_column(title, justify="right")
    for name, key in _TIMES:
        found = {"measured": measured[key], "predicted": None if predicted is None else predicted[key]}
        for row, (kind, values) in enumerate(found.items()):
            if values is not None:
                cells = [format_seconds(values[column]) for column in _COLUMNS]
                table.add_row("" if row else name, kind, *cells)
    out.print()
    out.print(table)
    out.print()
    made = "predicted: simulated with" if predicted is not None else "no prediction:"
    out.print(f"{made} {data['predicted_by']}", markup=False)
    if (outside := data["outside_engine_ttft_s"]) is not None:
        out.print(
            f"TTFT outside the engine (HTTP, the client), which is not simulated: {format_seconds(outside)}, mean"
        )
    if measured["worst_lag_s"] > _LAG_S:
        out.print(
            f"The client fell behind by up to {format_seconds(measured['worst_lag_s'])}: it is too slow for this."
        )
    if output is not None:
        out.print(f"written: {output}", soft_wrap=True)
