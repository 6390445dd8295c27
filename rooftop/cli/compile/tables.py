"""A compiled program as tables: planned beside compiled, what differs, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rooftop.arrays import Mesh
from rooftop.cli.output import console
from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.core.scopes import UNSCOPED
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.compiled.training import Refusal
from rooftop.plan.training.plan import TrainingPlan

#: What a compiled figure shows when it is the planned one.
SAME = "="
#: Operations that take a smaller share of the time are not listed.
WORTH = 1e-3
_TIMES = (
    ("mxu_s", "matrix unit at peak"),
    ("hbm_s", "HBM at peak"),
    ("exposed_ici_s", "exposed on ICI"),
    ("exposed_dcn_s", "exposed on DCN"),
)


def show(answer: CompiledReport | Refusal, data: dict[str, Any], written: Mapping[str, str]) -> None:
    """Print a report: the verdict first, then the figures, row by row, and what differs; then the files ``written``."""
    parts: list[RenderableType]
    if isinstance(answer, Refusal):
        parts = [_refusal(answer), _memory(data), *_buffers(data), *_nearest(data)]
        written = {name: file for name, file in written.items() if name in ("report", "page")}
    elif answer.plan is not None:
        parts = [_headline(answer), _summary(data), _memory(data), _rows(answer), *_findings(data), _operations(data)]
    else:
        parts = [_headline(answer), _figures(data), _collectives(data), _operations(data), *_buffers(data)]
    parts += [Text(f"\n{name} written to {file}") for name, file in written.items()]
    console().print(Group(*parts))


def _refusal(answer: Refusal) -> Text:
    problem = answer.plan.problem
    text = Text(f"{problem.model.name} on {_where(answer.plan.mesh)}", style="bold")
    text.append(f"; {_choice(answer.plan)}\n", style="not bold")
    return text.append(_sentence(answer.verdict), style="red")


def _headline(report: CompiledReport) -> Text:
    compiled, plan = report.compiled, report.plan
    name = f"{plan.problem.model.name} on " if plan is not None else ""
    text = Text(f"{name}{_where(compiled.mesh)}", style="bold")
    if plan is not None:
        text.append(f"; {_choice(plan)}", style="not bold")
    versions = ", ".join(f"{name} {version}" for name, version in compiled.versions.items())
    once = "once " if compiled.cached else ""
    text.append(f"\nXLA:TPU ({versions}), {once}compiled in {compiled.compile_s:.0f} s\n", style="not bold dim")
    return text.append(_sentence(report.verdict), style="green" if report.agrees else "yellow")


def _where(mesh: Mesh) -> str:
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1) or "one device"
    return f"{mesh.slice.name}: {sizes}"


def _choice(plan: TrainingPlan) -> str:
    count = plan.choice.microbatches
    return f"remat {plan.choice.remat}; {count} microbatch{'es' if count > 1 else ''}"


def _sentence(verdict: str) -> str:
    return f"{verdict[0].upper()}{verdict[1:]}."


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first columns are text and whose others are numbers."""
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0),
        show_header=any(columns),
    )  # fmt: skip
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    return table


def _summary(data: dict[str, Any]) -> Table:
    table = _table("Per step on one device", "", "planned", "compiled", "ratio", "")
    formats = {"matmul FLOPs": format_count, "expected time": format_seconds}
    for check in data["checks"]:
        write = formats.get(check["name"], format_bytes)
        ratio = "" if check["ratio"] is None else f"{check['ratio']:.3f}"
        holds = "" if check["holds"] else "differs"
        table.add_row(check["name"], write(check["planned"]), write(check["compiled"]), ratio, holds)
        if check["name"] == "matmul FLOPs" and (data["kernel_flops"] or data["planned_kernel_flops"]):
            table.add_row("kernels' FLOPs", *map(format_count, (data["planned_kernel_flops"], data["kernel_flops"])))
    for name, title in _TIMES:
        if data["planned_step"][name] or data["step"][name]:
            table.add_row(title, format_seconds(data["planned_step"][name]), format_seconds(data["step"][name]))
    return table


def _memory(data: dict[str, Any]) -> RenderableType:
    """HBM at the peak by class."""
    planned, compiled = data["planned_memory"] or {}, data["memory"] or {}
    table = _table("HBM of a device at the peak", "", "planned", "compiled")
    for name in dict.fromkeys([*planned, *compiled]):
        table.add_row(name, *(format_bytes(side[name]) if name in side else "" for side in (planned, compiled)))
    table.add_row("all", *(format_bytes(data[name]) for name in ("planned_peak_bytes", "peak_bytes")))
    return table


def _buffers(data: dict[str, Any]) -> Iterable[RenderableType]:
    if data["buffers"]:
        table = _table("The largest arrays at the peak", "array", "shape", "class", "bytes", left=3)
        table.add_column("from", no_wrap=True)
        for each in data["buffers"]:
            # An argument, or what has no scope, goes by its name.
            name = each["name"] if each["scope"] in ("", UNSCOPED) else f"{each['scope']} {each['phase']}"
            source = place(each["source"])
            table.add_row(
                escape(name), escape(each["shape"]), each["memory_class"], format_bytes(each["bytes"]), source
            )
        yield table


def _nearest(data: dict[str, Any]) -> Iterable[RenderableType]:
    near = data["nearest"]
    if near is not None:
        mesh = " x ".join(f"{name} {size}" for name, size in near["mesh"].items())
        yield Text(
            f"\nThe nearest plan that should fit, by what XLA asked for here: {mesh}, remat {near['remat']}, "
            f"{near['microbatches']} microbatches: {format_seconds(near['expected_s'])} a step."
        )


def _rows(report: CompiledReport) -> Table:
    table = _table(
        "By scope, planned and then as XLA compiled it ('=': as planned; ms with what collectives expose)",
        "scope", "phase", "collective", "bytes", "XLA", "FLOPs", "XLA", "ms", "XLA", left=3,
    )  # fmt: skip
    planned = _seconds(report.plan.ledger if report.plan is not None else Ledger(()))
    compiled, before = _seconds(report.ledger), ""
    for row in report.joined:
        moved = [
            (f"{each.kind} {','.join(each.axes)}", each.planned_bytes or 0.0, each.compiled_bytes or 0.0)
            for each in row.collectives
        ]
        key = row.scope, row.phase
        table.add_row(
            "" if row.scope == before else row.scope,
            row.phase,
            "\n".join(name for name, _, _ in moved),
            "\n".join(format_bytes(ours) if ours else "" for _, ours, _ in moved),
            "\n".join(_beside(ours, theirs, format_bytes) for _, ours, theirs in moved),
            format_count(row.planned_flops) if row.planned_flops else "",
            _beside(row.planned_flops, row.compiled_flops, format_count),
            _milliseconds(planned.get(key, 0.0)),
            _milliseconds(compiled.get(key, 0.0)),
        )
        before = row.scope
    shown = {(row.scope, row.phase) for row in report.joined}
    rest = [sum(seconds for key, seconds in side.items() if key not in shown) for side in (planned, compiled)]
    table.add_row("elementwise, other", "", "", "", "", "", "", *(_milliseconds(seconds) for seconds in rest))
    return table


def _seconds(ledger: Ledger) -> dict[tuple[str, str], float]:
    """Expected seconds per step by scope and phase."""
    found: dict[tuple[str, str], float] = {}
    for row in ledger:
        found[row.key] = found.get(row.key, 0.0) + float(row.count) * float(row.expected_s)
    return found


def _beside(planned: float, compiled: float, write: Any) -> str:
    if not planned and not compiled:
        return ""
    return SAME if abs(planned - compiled) <= 1e-6 * max(planned, compiled) else str(write(compiled))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds else ""


def _findings(data: dict[str, Any]) -> Iterable[RenderableType]:
    titles = {
        "unexpected": "Unexpected: compiled, not planned",
        "missing": "Missing: planned, not compiled",
        "spelled": "As planned, under another name",
    }
    for name, title in titles.items():
        listed = [each for each in data[name] if each["rule"] != "named"]
        if listed:
            yield _finding_table(title, listed)
    renamed = [each for each in data["unexpected"] if each["rule"] == "named"]
    if renamed:
        moved = format_bytes(sum(each["bytes"] for each in renamed))
        yield Text(f"\nAs planned, but under another scope or phase in XLA's names: {len(renamed)} items, {moved}.")
    # What the remat policy asks for stands in the rows already.
    strange = [each for each in data["recomputed"] if each["rule"] != "policy"]
    if strange:
        yield _finding_table("Recomputed, not as planned", strange)
    elif data["recomputed"]:
        cost = sum(each["cost_s"] for each in data["recomputed"])
        yield Text(f"\nRecomputed as the remat policy asks: {format_seconds(cost)} a step.")


def _finding_table(title: str, findings: list[dict[str, Any]]) -> Table:
    table = _table(title, "scope", "phase", "what", "how much", "time", left=3)
    table.add_column("from", no_wrap=True)
    table.add_column("why")
    for each in findings:
        much = format_count(each["flops"], "FLOPs") if each["kind"] == "matmul" else format_bytes(each["bytes"])
        what = f"{each['kind']} {','.join(each['axes'])}"
        why = each["why"] or "no reason is known"
        table.add_row(
            each["scope"], each["phase"], what, much, format_seconds(each["cost_s"]), place(each["source"]), why
        )
    return table


def _figures(data: dict[str, Any]) -> Table:
    table = _table("Per execution on one device", "", "")
    table.add_row("matmul FLOPs", format_count(data["flops"]))
    if data["kernel_flops"]:
        table.add_row("kernels' FLOPs", format_count(data["kernel_flops"]))
    table.add_row("peak memory", f"{format_bytes(data['peak_bytes'])} of {format_bytes(data['capacity_bytes'])}")
    for name, title in (*_TIMES, ("expected_s", "expected time")):
        if data["step"][name]:
            table.add_row(title, format_seconds(data["step"][name]))
    return table


def _collectives(data: dict[str, Any]) -> RenderableType:
    if not data["collectives"]:
        return Text("\nNo collectives.")
    table = _table("Collectives", "collective", "axes", "bytes", "times", "time", "exposed", left=2)
    table.add_column("from", no_wrap=True)
    for each in sorted(data["collectives"], key=lambda each: -each["count"] * each["expected_s"]):
        table.add_row(
            each["kind"] + (" (ring)" if each["ring"] else ""),
            ",".join(each["axes"]),
            format_bytes(each["bytes"]),
            str(each["count"]),
            format_seconds(each["expected_s"]),
            format_seconds(each["exposed_s"]),
            place(each["source"]),
        )
    return table


def _operations(data: dict[str, Any]) -> RenderableType:
    listed = [
        each for each in data["operations"] if each["count"] * each["expected_s"] > WORTH * data["step"]["expected_s"]
    ]
    if not listed:
        return Text("\nNo operation takes a thousandth of the time.")
    # A program with scopes is known by them, any other by XLA's names.
    scoped = any(each["scope"] != UNSCOPED for each in listed)
    names = ("scope", "phase") if scoped else ("operation",)
    table = _table(
        f"The {len(listed)} operations that take the longest (time of all executions)",
        *names, "M x K x N, or result", "FLOPs", "HBM", "FLOPs/B", "bound", "time", left=len(names) + 1,
    )  # fmt: skip
    table.add_column("from", no_wrap=True)
    for each in listed:
        intensity = each["intensity"]
        table.add_row(
            *((each["scope"], each["phase"]) if scoped else (escape(each["op"]),)),
            each["matmul"] or escape(each["shape"].split(", ")[0]),
            format_count(each["flops"]) if each["flops"] else "",
            format_bytes(each["hbm_bytes"]),
            f"{intensity:.0f}" if intensity else "",
            each["bound"],
            format_seconds(each["count"] * each["expected_s"]),
            place(each["source"]),
        )
    return table


def place(source: str) -> str:
    """A 'file:line' without its directories."""
    return source.rpartition("/")[2]
