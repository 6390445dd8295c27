"""A serving plan as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rooftop.cli.output import console
from rooftop.cli.plan.tables import why
from rooftop.core.quantities import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rooftop.core.ledger import Ledger
    from rooftop.plan.serving.answer import ServingAnswer
    from rooftop.plan.serving.fleet import Recommendation
    from rooftop.plan.serving.plan import ServingPlan

#: Points of the front that are shown; --json has all.
_SHOWN = 12
_OTHERS = 6


def show_serving(
    answer: ServingAnswer, data: dict[str, Any], found: Recommendation | None, output: Path | None, plot: Path | None
) -> None:
    """Print the plan: the recommendation if there is one, the answer, where the time goes, why, and the front."""
    plan = answer.plan
    parts: list[RenderableType] = [] if found is None else [_recommendation(found)]
    parts += [_headline(plan), _summary(plan, data, answer)]
    if plan.obstacles:
        parts.append(Text("\n".join(("\nNot executable as it stands:", *plan.obstacles)), style="yellow"))
    parts += [
        _ledger(plan.generate, "Where a generate step goes (ms on one device)"),
        _ledger(plan.prefill, "Where a prefill goes (ms on one device)"),
        why(plan.reasons),
        _front(data["pareto"], "Batches worth having"),
    ]
    for path, what in ((output, "plan"), (plot, "picture")):
        if path is not None:
            parts.append(Text(f"{what} written to {path}"))
    console().print(Group(*parts))


def show_front(points: list[dict[str, Any]]) -> None:
    """Print the front of a search over chips."""
    console().print(_front(points, "Nothing generates both faster and cheaper"))


def _recommendation(found: Recommendation) -> Text:
    text = Text("\nRecommended: ", style="bold")
    text.append(found.best.name, style="bold green")
    text.append(f"\n  {found.best.chips:,.4g} chips", style="not bold")
    if found.best.usd_per_hour is not None:
        text.append(f", ${found.best.usd_per_hour:,.2f} an hour at list prices", style="not bold")
    if found.best.plan.problem.workload.requests_per_second is None:
        text.append(" for each request a second", style="not bold")
    text.append(
        f"; TTFT {format_seconds(found.best.ttft_s)} with its queue, TPOT {format_seconds(found.best.tpot_s)}",
        style="not bold",
    )
    for rank, other in enumerate(found.others[:_OTHERS]):
        text.append(f"\n{'Runner-up' if rank == 0 else 'Then'}: {other.name}", style="not bold")
        text.append(f"\n  {found.why(other)}", style="not bold dim")
    return text


def _headline(plan: ServingPlan) -> Text:
    problem = plan.problem
    text = Text(f"\n{problem.model.name} on {problem.slice.name}: ", style="bold")
    text.append(f"batch {plan.batch}, {problem.mode}", style="bold green" if plan.fits else "bold red")
    split = f"; context splits the cache's {'sequences' if plan.generate_on.kv_split == 'batch' else 'tokens'}"
    text.append(f"\ngenerate as {plan.generate_on.mesh.layout or 'one device'}", style="not bold")
    if plan.generate_on.mesh.size("context") > 1:
        text.append(split, style="not bold")
    text.append(
        f"\nprefill on {problem.prefill_server.name} as {plan.prefill_on.mesh.layout or 'one device'}", style="not bold"
    )
    return text


def _summary(plan: ServingPlan, data: dict[str, Any], answer: ServingAnswer) -> Table:
    problem, step, memory = plan.problem, data["generate"], data["memory"]
    parts = {name.removesuffix("_s"): format_seconds(seconds) for name, seconds in step["breakdown"].items()}
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row(
        "step",
        format_seconds(plan.step_s),
        f"expected, at least {format_seconds(plan.lower_s)} (bound by {step['bound']}); at peak rates: weights "
        f"{parts['weights']}, KV {parts['kv']}, FLOPs {parts['flops']}, ICI {parts['ici']}",
    )
    if data["draft"] is not None:
        draft = data["draft"]
        table.add_row(
            "speculation",
            f"{draft['gain']:+.0%} tok/s",
            f"{draft['tokens_per_round']:.2f} tokens a round: {draft['length']} guesses of {draft['model']} in "
            f"{format_seconds(draft['guess_s'])}, checked in {format_seconds(draft['check_s'])}",
        )
    table.add_row(
        "rate", format_count(plan.tokens_per_s, "tok/s"), f"{step['tokens_per_s_per_chip']:.4g} tok/s per chip"
    )
    both = "" if data["draft"] is None else " by both models"
    prefill = f"one prefill of {problem.workload.prompt} tokens{both}, no queue"
    table.add_row("TTFT", format_seconds(plan.ttft_s), prefill)
    why = "with the prefills of others between" if problem.mode == "interleaved" else "with the KV's transfer"
    table.add_row("TPOT", format_seconds(plan.tpot_s), "a step" if problem.book else f"a step, {why}")
    classes = ", ".join(f"{name} {format_bytes(memory[name])}" for name in ("weights", "scales", "kv", "activations"))
    table.add_row("memory", format_bytes(memory["total"]), f"of {format_bytes(memory['capacity'])}: {classes}")
    smallest = "no slice" if answer.smallest is None else answer.smallest.name
    table.add_row("largest batch", str(plan.max_batch), f"here; this one fits {smallest} at the smallest")
    transfer = data["kv_transfer"]
    table.add_row(
        "prefill", f"{plan.prefill_per_generate:.3g} servers",
        f"for each generate server; a prompt's KV of {format_bytes(transfer['bytes'])} moves in "
        f"{format_seconds(transfer['ici_s'])} over ICI, {format_seconds(transfer['dcn_s'])} over DCN",
    )  # fmt: skip
    cost = data["cost_per_million_tokens"]
    if cost["input"] is not None:
        table.add_row(
            "cost", f"${cost['output']:.3g}", f"per million tokens out, ${cost['input']:.3g} in, of slices always busy"
        )
    cache = data["prefix_cache"]
    if cache["hit_rate"]:
        held = "" if cache["prompts_held"] is None else f"; host memory holds {cache['prompts_held']:,} prompts' KV"
        table.add_row(
            "prefix cache", f"{cache['speedup']:.2f}x", f"faster prefill at {cache['hit_rate']:.0%} hits{held}"
        )
    return table


def _ledger(ledger: Ledger, title: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None)
    table.add_column("scope", no_wrap=True)
    for name in ("expected", "share", "exposed", "at peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound")
    whole = float(ledger.expected_s)
    for (scope, _), rows in ledger.by_key().items():
        busy: dict[str, float] = {}
        for row in rows:
            for name, seconds in row.time_s.items():
                busy[name] = busy.get(name, 0.0) + float(row.count * seconds)
        bound = max(busy, key=lambda name: busy[name])
        expected = sum(float(row.count * row.expected_s) for row in rows)
        exposed = sum(float(row.count * one.exposed_s) for row in rows for one in row.collectives)
        table.add_row(
            scope,
            f"{expected * 1e3:.3f}",
            f"{expected / whole:.1%}",
            f"{exposed * 1e3:.3f}" if exposed else "",
            f"{busy[bound] * 1e3:.3f}",
            bound,
        )
    return table


def _front(points: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None)
    many = "slice" in points[0] if points else False
    for name in (
        *(("slice", "weights", "kv") if many else ()),
        "context",
        "batch",
        "step",
        "tok/s per chip",
        "$/M tokens",
    ):
        table.add_column(name, justify="left" if name in ("slice", "weights", "kv") else "right")
    stride = max(1, len(points) // _SHOWN)
    for point in points[:: stride if not many else 1]:
        cost = point["usd_per_million_tokens"]
        table.add_row(
            *((point["slice"], point["weights"], point["kv"]) if many else ()),
            f"{point['context']:,.0f}",
            str(point["batch"]),
            format_seconds(point["step_s"]),
            f"{point['tokens_per_s_per_chip']:.4g}",
            "" if cost is None else f"{cost:.3g}",
        )
    return table
