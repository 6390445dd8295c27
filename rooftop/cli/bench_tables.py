"""Tables of ``rooftop bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rooftop.cli.output import console
from rooftop.quantities import format_bytes, format_seconds


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
