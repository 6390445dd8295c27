"""Tables of ``rooftop matmul``."""

from __future__ import annotations

from typing import Any

from rooftop.cli.output import console
from rooftop.core.quantities import format_bytes, format_count, format_seconds

_PRICES = {
    "bound": "times are lower bounds at peak rates, each step after the one before",
    "expected": "times are expected, at the named fractions of docs/achievable.md",
    "book": "times follow the book: whole shards on even rings",
}


def show(data: dict[str, Any]) -> None:
    """Print an answer."""
    out = console()
    place = f" on {data['slice']}" if "slice" in data else ""
    axes = ", ".join(f"{name}={size}" for name, size in data["mesh"]["axes"].items())
    out.print(f"[bold]{_escaped(data['expression'])}[/bold]\nmesh {axes}{place}")
    out.print()
    out.print(_arrays(data["arrays"], layouts=data["kind"] == "array"))
    for case in data.get("cases", ()):
        over = f" over {','.join(case['axes'])}" if case["axes"] else ""
        out.print(f"\nCase {case['case']}{over}: {case['rule']}.")
    if data.get("strategies"):
        out.print()
        _strategies(out, data)
    if "backward" in data:
        out.print("\n[bold]Backward[/bold]")
        parts = data["backward"]
        for name in ("output", "left", "right") if "left" in parts else ():
            out.print(f"derivative of the {name}")
            out.print(_steps(parts[name]["steps"]))
        if "left" not in parts:
            out.print(_steps(parts["steps"]))
    if "compiled" in data:
        _compiled(out, data)
    if "measured" in data:
        _measured(out, data)


def _arrays(arrays: list[dict[str, Any]], *, layouts: bool) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("array", no_wrap=True)
    table.add_column("local shape")
    for title in ("per device", "on all devices", "one copy", "copies"):
        table.add_column(title, justify="right")
    if layouts:
        table.add_column("TPU layout, padded")
    for array in arrays:
        padded = f"{_escaped(array['tpu_layout'])} {format_bytes(array['tpu_padded_bytes'])}"
        table.add_row(
            _escaped(array["array"]),
            "x".join(map(str, array["local_shape"])),
            format_bytes(array["device_bytes"]),
            format_bytes(array["total_bytes"]),
            format_bytes(array["copy_bytes"]),
            str(array["replication"]),
            *((padded,) if layouts else ()),
        )
    return table


def _strategies(out: Any, data: dict[str, Any]) -> None:
    from rich.table import Table

    found, listed = data["strategies_found"], data["strategies"]
    if found > 1:
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("", justify="right")
        table.add_column("time", justify="right")
        table.add_column("binds")
        table.add_column("memory", justify="right")
        table.add_column(f"strategy ({len(listed)} of {found}, best first)")
        for rank, strategy in enumerate(listed, start=1):
            memory = format_bytes(strategy["memory_bytes"]) + ("" if strategy["fits"] else " too much")
            table.add_row(
                str(rank),
                format_seconds(strategy["time_s"]),
                strategy["bound"],
                memory,
                _escaped(strategy["rule"]),
            )
        out.print(table)
        out.print()
    best = listed[0]
    if best["steps"]:
        out.print(_steps(best["steps"]))
        out.print(f"{format_seconds(best['time_s'])} in all, {best['bound']} binds; {_PRICES[data['price']]}.")
    else:
        out.print("Nothing to do: it already is sharded so.")


def _steps(steps: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    simulated = any("simulated_s" in step or "mxu_utilisation" in step for step in steps)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("step", "axes", "in", "out"):
        table.add_column(title)
    for title in ("bytes", "FLOPs", "time", *(("simulated",) if simulated else ())):
        table.add_column(title, justify="right")
    for step in steps:
        shown = format_seconds(step["simulated_s"]) if "simulated_s" in step else ""
        if "mxu_utilisation" in step:
            shown = f"MXU {step['mxu_utilisation']:.1%}"
        table.add_row(
            step["op"],
            ",".join(step["axes"]),
            _escaped(" * ".join(step["in"])),
            _escaped(step["out"]),
            format_bytes(step["bytes"]) if step["bytes"] else "",
            format_count(step["flops"]) if step["flops"] else "",
            format_seconds(step["time_s"]) if step["time_s"] else "free",
            *((shown,) if simulated else ()),
        )
    return table


def _compiled(out: Any, data: dict[str, Any]) -> None:
    from rich.table import Table

    compiled = data["compiled"]
    versions = ", ".join(f"{name} {version}" for name, version in compiled["versions"].items())
    out.print(f"\n[bold]XLA:TPU[/bold] ({versions})")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("collective", "axes"):
        table.add_column(title)
    for title in ("bytes", "times", "price", "exposed"):
        table.add_column(title, justify="right")
    for each in compiled["collectives"]:
        table.add_row(
            each["kind"] + (" (ring)" if each.get("ring") else ""),
            ",".join(each["axes"]),
            format_bytes(each["bytes"]),
            str(each["count"]),
            format_seconds(each["expected_s"]),
            format_seconds(each["exposed_s"]),
        )
    if compiled["collectives"]:
        out.print(table)
    else:
        out.print("no collectives")
    out.print(("Agrees: " if data["agrees"] else "Differs: ") + data["verdict"])


def _measured(out: Any, data: dict[str, Any]) -> None:
    from rich.table import Table

    measured = data["measured"]
    out.print(f"\n[bold]Measured[/bold] on {measured['devices']}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("median", justify="right")
    table.add_column("fastest", justify="right")
    table.add_column("strategy")
    for each in measured["strategies"]:
        table.add_row(format_seconds(each["median_s"]), format_seconds(each["fastest_s"]), _escaped(each["rule"]))
    out.print(table)
    if measured["emulated"]:
        out.print("The devices are emulated on CPU: these times say that it runs, nothing about an accelerator.")


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
