"""A training plan as tables."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rooftop.cli.output import console
from rooftop.core.ledger import Row
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.plan.reasons import Reason
from rooftop.plan.training.answer import TrainingAnswer
from rooftop.plan.training.plan import TrainingPlan

_PHASES = ("forward", "recompute", "backward", "update")


def show_training(answer: TrainingAnswer, data: dict[str, Any], output: Path | None) -> None:
    """Print the plan: the answer first, then where the time goes, why, and what else there is."""
    plan = answer.plan
    parts: list[RenderableType] = [
        _headline(plan),
        _summary(plan, data),
        _ledger(plan),
        why(plan.reasons),
    ]
    if answer.alternatives:
        parts.append(_alternatives(answer))
    if answer.what_if:
        parts.append(_what_if(answer))
    if plan.obstacles:
        parts.insert(2, _obstacles(answer))
    if output is not None:
        parts.append(Text(f"plan written to {output}"))
    console().print(Group(*parts))


def _headline(plan: TrainingPlan) -> Text:
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.shape.items() if size > 1) or "one device"
    text = Text(f"\n{plan.problem.model.name} on {plan.problem.slice.name}: ", style="bold")
    text.append(mesh, style="bold green" if plan.fits else "bold red")
    text.append(f"\nlaid out as {plan.mesh.layout or 'one device'}; remat {plan.choice.remat}; ")
    text.append(f"{plan.choice.microbatches} microbatch{'es' if plan.choice.microbatches > 1 else ''}")
    return text


def _summary(plan: TrainingPlan, data: dict[str, Any]) -> Table:
    step, memory = data["step"], data["memory"]
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row(
        "step",
        format_seconds(step["expected_s"]),
        f"expected, between {format_seconds(step['lower_s'])} (all overlapped, bound by {step['bound']}) and "
        f"{format_seconds(step['upper_s'])} (nothing overlapped)",
    )
    table.add_row("MFU", f"{plan.mfu:.1%}", "causal attention and unembedding counted, recomputation not")
    table.add_row(
        "rate",
        f"{format_count(plan.tokens_per_s, 'tok/s')}",
        f"{plan.tokens_per_s / data['slice']['chips']:.0f} tok/s per chip",
    )
    if data["days"] is not None:
        price = plan.problem.slice.chip.price_usd_per_hour
        cost = (
            "no price is published"
            if data["cost_usd"] is None
            else f"${data['cost_usd']:,.0f} at ${price:g} a chip-hour"
        )
        table.add_row(
            "budget", f"{data['days']:.1f} days", f"for {format_count(data['workload']['tokens'])} tokens; {cost}"
        )
    classes = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.memory.items())
    table.add_row("memory", format_bytes(memory["total"]), f"of {format_bytes(memory['capacity'])} a device: {classes}")
    exposed = {name: seconds for name, seconds in step["exposed_s"].items() if seconds > 0}
    waits = ", ".join(f"{name} {format_seconds(s)} ({s / step['expected_s']:.0%})" for name, s in exposed.items())
    table.add_row("not hidden", format_seconds(sum(exposed.values())), waits or "no collectives")
    if (pipeline := data.get("pipeline")) is not None:
        table.add_row(
            "bubble",
            f"{pipeline['bubble']:.1%}",
            f"of the passes, {pipeline['schedule']} simulated; {pipeline['bubble_closed_form']:.1%} in closed form; "
            f"{pipeline['in_flight']:g} microbatches held at most",
        )
    return table


def _obstacles(answer: TrainingAnswer) -> Text:
    text = Text("\nNot executable as it stands:", style="yellow")
    for obstacle in answer.plan.obstacles:
        text.append(f"\n  {obstacle}")
    near = answer.nearest_executable
    if near is not None:
        mesh = " x ".join(f"{name} {size}" for name, size in near["mesh"].items())
        other = "" if near["matmul"] == answer.plan.spec.matmul else f" with {near['matmul']} matmuls"
        seconds = format_seconds(near["expected_s"])
        text.append(f"\n  nearest that runs: {near['slice']} as {mesh or 'one device'}{other}, {seconds} a step")
    return text


def _ledger(plan: TrainingPlan) -> Table:
    table = Table(
        title="\nWhere the step goes (ms per step on one device)", title_justify="left", title_style="bold", box=None
    )
    table.add_column("scope", no_wrap=True)
    for name in (*_PHASES, "share", "exposed", "at peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound")
    scopes: dict[str, list[Row]] = {}
    for row in plan.ledger:
        scopes.setdefault(row.scope, []).append(row)
    for scope, rows in scopes.items():
        phases = {name: sum(float(r.count * r.expected_s) for r in rows if r.phase == name) for name in _PHASES}
        exposed = sum(float(r.count * c.exposed_s) for r in rows for c in r.collectives)
        busy: dict[str, float] = {}
        for row in rows:
            for name, seconds in row.time_s.items():
                busy[name] = busy.get(name, 0.0) + float(row.count * seconds)
        bound = max(busy, key=lambda name: busy[name], default="")
        table.add_row(
            scope,
            *(_milliseconds(phases[name]) for name in _PHASES),
            f"{sum(phases.values()) / plan.expected_s:.1%}",
            _milliseconds(exposed),
            _milliseconds(busy.get(bound, 0.0)),
            bound or "idle",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds else ""


def why(reasons: Iterable[Reason]) -> Text:
    """The rules of a plan, of training or of serving, with what each says of it."""
    text = Text("\nWhy", style="bold")
    for reason in reasons:
        text.append("\n  yes " if reason.holds else "\n  no  ", style="green" if reason.holds else "yellow")
        text.append(reason.text, style="not bold")
        text.append(f"  [{reason.source}; {reason.formula}]", style="not bold dim")
    return text


def _alternatives(answer: TrainingAnswer) -> Table:
    table = Table(
        title=f"\nAlternatives ({answer.searched:,} candidates searched)",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    for name in ("mesh", "remat", "microbatches", "step", "MFU", "memory", ""):
        table.add_column(name, justify="left" if name in ("mesh", "remat", "") else "right")
    for plan in answer.alternatives:
        found = plan.summary()
        table.add_row(
            " x ".join(f"{name} {size}" for name, size in found["mesh"].items()),
            found["remat"],
            str(found["microbatches"]),
            format_seconds(found["expected_s"]),
            f"{found['mfu']:.1%}",
            format_bytes(found["memory_bytes"]),
            "" if found["fits"] else "does not fit",
        )
    return table


def _what_if(answer: TrainingAnswer) -> Text:
    text = Text("\nWhat would change it (tokens/s)", style="bold")
    for entry in answer.what_if:
        missing = "" if entry["obstacle"] is None else f": {entry['obstacle']}"
        text.append(f"\n  {entry['gain']:+.1%}  {entry['change']}{missing}", style="not bold")
    return text
