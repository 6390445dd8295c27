"""What ``rooftop explain`` prints: the verdict first, then where the time goes, row by row, and what to try."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rooftop.cli.output import console
from rooftop.core.quantities import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rooftop.explain.measured.difference import Difference
    from rooftop.explain.operation.inferred import Inferred


def show_trace(data: Mapping[str, Any], count: int) -> None:
    """Print the report of a trace, at most ``count`` rows of each table."""
    console().print(
        Group(
            *_head(data),
            *_rows(data, count),
            *_collectives(data, count),
            *_sparse_cores(data),
            *_operations(data, count),
            *_losses(data, count),
            *_advice(data),
            *_empty(data),
        )
    )


def show_difference(found: Difference, count: int) -> None:
    """Print two sides and the rows that differ."""
    parts: list[RenderableType] = [
        Text(f"{found.before.name} ({found.before.kind}), then {found.after.name} ({found.after.kind})", style="bold"),
        Text(f"{_sentence(found.verdict)}"),
    ]
    if found.changes:
        table = _table(
            "Rows that differ, the largest change first", "scope", "phase", "before", "after", "change", left=2
        )
        table.add_column("collectives")
        for each in found.changes[:count]:
            sides = (format_seconds(row.time_s) if row is not None else "" for row in (each.before, each.after))
            sign = "+" if each.time_s > 0 else "-"
            table.add_row(
                escape(each.scope), each.phase, *sides, f"{sign}{format_seconds(abs(each.time_s))}",
                escape("; ".join(each.collectives)),
            )  # fmt: skip
        parts += [table, *_rest(len(found.changes), count)]
    console().print(Group(*parts))


def show_operations(data: Mapping[str, Any], inferred: Sequence[Inferred]) -> None:
    """Print HLO instructions made readable, and what they tell together."""
    parts: list[RenderableType] = []
    for each in data["operations"]:
        parts += [*_operation(each), Text("")]
    for found in inferred:
        step = "" if found.step is None else f", {found.step} devices apart"
        parts.append(
            Text(
                f"{found.ways}-way model parallelism: {found.summed_by} sums over {found.ways} devices{step}, of "
                f"{found.devices}",
                style="bold",
            )
        )
        parts += [Text(f"  {matmul}") for matmul in found.matmuls]
        parts.append(
            Text("  B: the batch, of which these lines show one row on a device") if _has_row(found) else Text("")
        )
    console().print(Group(*parts[:-1] if parts and not inferred else parts))


def _has_row(found: Inferred) -> bool:
    return any(len(each.left) == 1 for each in found.matmuls)


def _operation(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"{data['op']}: {data['opcode']}" + (f", calls {data['calls']}" if data["calls"] else ""), style="bold")
    yield _indented(_sentence(data["does"]))
    table = _table("", "", "array", "stored as", "memory", "elements", "in memory", left=4)
    for result in data["results"]:
        table.add_row("result", *_layout(result))
    for operand in data["operands"]:
        empty = ("", "", "", "", "")
        table.add_row(f"%{operand['name']}", *(_layout(operand["layout"]) if operand["layout"] else empty))
    table.title = None
    yield Padding(table, (0, 0, 0, 2))
    if matmul := data["matmul"]:
        batch = f"{matmul['batch']} x " if matmul["batch"] > 1 else ""
        sizes = f"{batch}[{matmul['m']}, {matmul['k']}] x [{matmul['k']}, {matmul['n']}]"
        yield _indented(f"As its shapes tell, a matmul {sizes}: {format_count(matmul['flops'], 'FLOPs')}.")
    if moved := data["collective"]:
        over = f" over {moved['members']} devices" if moved["members"] else ""
        yield _indented(f"It moves as {moved['kind']}{over} {format_bytes(moved['bytes'])} a device.")
    if data["times"]:
        yield from _times(data["times"], data["hbm_bytes"])


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))


def _layout(layout: Mapping[str, Any]) -> tuple[str, ...]:
    order = "row-major" if layout["order"] == list(range(len(layout["shape"]))) else f"order {layout['order']}"
    tiles = "".join(f"({','.join(map(str, tile))})" for tile in layout["tiles"])
    padded = layout["padded_shape"] != layout["shape"]
    stored = order + (f" in tiles of {tiles}" if tiles else "")
    stored += (
        f", padded to [{','.join(map(str, layout['padded_shape']))}], {layout['expansion']:.2f}x" if padded else ""
    )
    return (
        escape(f"{layout['dtype']}[{','.join(map(str, layout['shape']))}]"),
        escape(stored),
        layout["memory"].upper() if layout["memory"].isalpha() else f"space {layout['memory']}",
        format_bytes(layout["element_bytes"]),
        format_bytes(layout["bytes"]),
    )


def _times(found: Mapping[str, Any], hbm_bytes: float) -> Iterator[RenderableType]:
    parts = [f"{name} {format_seconds(seconds)}" for name, seconds in found["bound_s"].items() if seconds]
    wrapped = "" if found["wrapped_s"] is None else f" ({format_seconds(found['wrapped_s'])} on a ring)"
    bound = f": bound by {found['bound']}" if found["bound"] else ""
    yield _indented(f"On a device of {found['chip']} at least {', '.join(parts) or 'no time'}{wrapped}{bound}.")
    if found["intensity"] is not None:
        yield _indented(
            f"{found['intensity']:.0f} FLOPs a byte of HBM ({format_bytes(hbm_bytes)}); the chip needs "
            f"{found['critical_intensity']:.0f} to be bound by its matrix unit."
        )


def _head(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    devices = data["devices"]
    kind = f"{devices['count']} {'emulated ' if devices['emulated'] else ''}{devices['kind']} devices"
    kind += f" of {devices['hosts']} hosts" if devices["hosts"] > 1 else ""
    mesh = " x ".join(f"{name} {size}" for name, size in data["mesh"].items() if size > 1)
    programs = ", ".join(data["programs"])
    yield Text(
        f"{data['trace']}: {kind}" + (f", {mesh}" if mesh else "") + (f"; {programs}" if programs else ""), style="bold"
    )
    yield Text(_sentence(data["verdict"]), style="green" if (data["roofline"] or 0) > 0.5 else "yellow")
    for note in data["notes"]:
        yield Text(f"Note: {note}.", style="dim")
    counted = [each for each in data["steps"] if each["counted"]]
    yield Text(f"Steps: {data['marked']}; {len(counted)} of {len(data['steps'])} counted.", style="dim")
    table = _table("A step", "", "time", "share")
    for name, title in (
        ("compute_s", "computing"), ("exposed_s", "waiting for collectives"), ("held_s", "between the ops of loops"),
        ("idle_s", "idle"), ("step_s", "step"),
    ):  # fmt: skip
        if data[name] or name == "step_s":
            table.add_row(
                title, format_seconds(data[name]), f"{data[name] / data['step_s']:.1%}" if data["step_s"] else ""
            )
    yield table
    yield Text(f"{data['attributed']:.1%} of the busy time stands in a scope.")
    if data["roofs"] is not None and data["achieved"]:
        table = _table(f"Achieved, beside {data['roofs']['source']} roofs", "", "a second", "roof", "of it")
        for each in data["achieved"]:
            unit = "FLOP/s" if each["resource"] == "mxu" else "B/s"
            cells = [format_count(each[name], unit) if each[name] else "" for name in ("per_s", "peak")]
            table.add_row(each["resource"], *cells, f"{each['of_roof']:.0%}" if each["of_roof"] is not None else "")
        yield table


def _rows(data: Mapping[str, Any], count: int) -> Iterator[RenderableType]:
    planned = any(row["planned"] for row in data["rows"])
    bound = any(row["compiled"] and row["compiled"]["bound_s"] for row in data["rows"])
    names = [
        "measured",
        "share",
        "exposed",
        *(["at peak"] if bound else []),
        *(["planned"] if planned else []),
        "FLOPs",
        "HBM",
    ]
    table = _table(
        "By scope, measured beside compiled" + (" beside planned" if planned else ""), "scope", "phase", *names, left=2
    )
    # Beside all three columns there is no room for its name: the line that it comes from tells enough.
    with_op = not (planned and bound)
    if with_op:
        table.add_column("slowest op")
    table.add_column("from", no_wrap=True)
    for row in data["rows"][:count]:
        mine, made, plan = row["measured"], row["compiled"], row["planned"]
        cells = ["", "", ""]
        if mine:
            cells = [
                format_seconds(mine["time_s"]),
                f"{mine['share']:.1%}",
                format_seconds(mine["exposed_s"]) if mine["exposed_s"] else "",
            ]
        if bound:
            cells.append(format_seconds(max(made["bound_s"].values(), default=0.0)) if made else "")
        if planned:
            cells.append(format_seconds(plan["time_s"]) if plan else "")
        flops = made["flops"] if made else 0.0
        moved = made["hbm_bytes"] if made else 0.0
        table.add_row(
            escape(row["scope"]), row["phase"], *cells,
            format_count(flops) if flops else "", format_bytes(moved) if moved else "",
            *([escape((mine or {}).get("slowest") or "")] if with_op else []), _place(mine["source"]) if mine else "",
        )  # fmt: skip
    yield table
    yield from _rest(len(data["rows"]), count)


def _collectives(data: Mapping[str, Any], count: int) -> Iterator[RenderableType]:
    if not data["collectives"]:
        return
    table = _table(
        "Collectives, the most exposed first",
        *("collective", "scope", "bytes", "under way", "exposed"),
        left=2,
    )
    # Several axes go over to the next line before a name or a place is cut.
    table.columns[0].no_wrap = False
    table.add_column("op", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for each in data["collectives"][:count]:
        table.add_row(
            escape(f"{each['kind']} {','.join(each['axes'])}"), escape(f"{each['scope']} {each['phase']}"),
            format_bytes(each["bytes"]) if each["bytes"] is not None else "", format_seconds(each["in_flight_s"]),
            format_seconds(each["exposed_s"]), escape(each["op"]), _place(each["source"]),
        )  # fmt: skip
    yield table


def _operations(data: Mapping[str, Any], count: int) -> Iterator[RenderableType]:
    """The ops that take longest, where there are roofs to set them beside, or no scopes to know them by."""
    unscoped = data["attributed"] < 0.5
    listed = [each for each in data["operations"][:count] if each["of_roof"] or unscoped]
    if not listed:
        return
    names = ("time", "FLOP/s", "HBM/s", "bound", "of roof")
    beside = "" if data["roofs"] is None else f", beside {data['roofs']['source']} roofs"
    table = _table(f"The ops that take longest{beside}", "op", "scope", *names, left=2)
    table.add_column("from", no_wrap=True)
    for each in listed:
        flops, moved = each["flops_per_s"], each["hbm_bytes_per_s"]
        table.add_row(
            escape(_short(each["op"])), escape(f"{each['scope']} {each['phase']}"), format_seconds(each["time_s"]),
            format_count(flops) if flops else "", format_bytes(moved) if moved else "", each["bound"],
            f"{each['of_roof']:.0%}" if each["of_roof"] else "", _place(each["source"]),
        )  # fmt: skip
    yield table


def _sparse_cores(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    found = data["sparse_cores"]
    if not found["cores"]:
        return
    table = _table("SparseCores, a step", "core", "busy", "beside compute", "alone", "idle")
    table.add_column("slowest op")
    for each in found["cores"]:
        seconds = (format_seconds(each[name]) for name in ("busy_s", "beside_s", "alone_s", "idle_s"))
        slowest = each["ops"][0]["name"] if each["ops"] else ""
        table.add_row(f"TPU {each['device']} SparseCore {each['core']}", *seconds, escape(slowest))
    yield table
    dropped = "nothing tells of dropped ids" if found["dropped_ids"] is None else f"{found['dropped_ids']} ids dropped"
    yield Text(f"At most {found['minibatches'] or 'an unknown number of'} passes over the tables a step; {dropped}.")


def _losses(data: Mapping[str, Any], count: int) -> Iterator[RenderableType]:
    if not data["losses"]:
        return
    table = _table("The largest losses", "time", "share", left=0)
    for name in ("what", "waits for", "from"):
        table.add_column(name)
    for each in data["losses"][: min(count, 6)]:
        share = f"{each['seconds'] / data['step_s']:.1%}" if data["step_s"] else ""
        table.add_row(
            format_seconds(each["seconds"]),
            share,
            escape(each["what"]),
            escape(each["waits_for"]),
            escape(_place(each["source"])),
        )
    yield table


def _advice(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    if data["advice"]:
        yield Text("\nWhat to try", style="bold")
    # What is tried for one reason helps against all that have it: it is said once.
    evidence: dict[str, list[str]] = {}
    for each in data["advice"][:6]:
        place = f" [{_place(each['source'])}]" if each["source"] else ""
        evidence.setdefault(each["what"], []).append(f"{each['rule']}: {each['evidence']}{place}.")
    for what, found in evidence.items():
        yield Text(f"- {_sentence(what)}")
        yield from (Padding(Text(line, style="dim"), (0, 0, 0, 2)) for line in found)


def _empty(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    if data["empty"]:
        yield Text("\nNot there", style="bold")
    for name, why in data["empty"].items():
        yield Text(f"{name}: {why}")


def _rest(found: int, count: int) -> Iterable[RenderableType]:
    return [Text(f"... and {found - count} more (--top)")] if found > count else []


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first columns are text and whose others are numbers."""
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
        show_header=any(columns),
    )
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    return table


def _short(name: str, most: int = 22) -> str:
    """A name that leaves room for the figures beside it."""
    return name if len(name) <= most else f"{name[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def _place(source: str) -> str:
    """A 'file:line' without its directories."""
    return source.rpartition("/")[2]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
