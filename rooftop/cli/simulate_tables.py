"""A simulation of serving as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rooftop.cli.output import console
from rooftop.quantities import format_count, format_seconds

_TIMES = (
    ("TTFT", "ttft_s", "ttft_s"),
    ("TPOT", "tpot_s", "tpot_s"),
    ("ITL", "itl_s", None),
    ("worst ITL", "worst_itl_s", None),
    ("end to end", "e2e_s", None),
)


def show(data: dict[str, Any], written: list[str]) -> None:
    """Print the simulation: what was served, what users felt, what servers did."""
    parts: list[RenderableType] = [_headline(data), _summary(data), _latencies(data), _servers(data)]
    parts += [Text(f"written to {path}") for path in written]
    console().print(Group(*parts))


def _headline(data: dict[str, Any]) -> Text:
    plan, deployment = data["plan"], data["deployment"]
    servers = f"{deployment['replicas']} x {plan['slice']}"
    if deployment["prefill_servers"]:
        servers = f"{deployment['prefill_servers']} x {plan['prefill_slice']} for prefill and {servers} to generate"
    text = Text(f"\n{plan['model']} on {servers}: {deployment['batching']}", style="bold")
    if deployment["chunk_tokens"] is not None:
        text.append(f", prefill in chunks of {deployment['chunk_tokens']} tokens a step")
    text.append(f", batches up to {deployment['max_batch']}")
    return text


def _summary(data: dict[str, Any]) -> Table:
    requests, tokens, goodput = data["requests"], data["tokens"], data["goodput"]
    table = Table(show_header=False, box=None, padding=(0, 2))
    note = f"{requests['per_second']:.4g} a second over {format_seconds(data['duration_s'])}"
    if requests["refused"]:
        note += f"; {requests['refused']:,} refused, such as: {requests['refused_why']}"
    table.add_row("requests", f"{requests['finished']:,}", note)
    table.add_row(
        "generated", format_count(tokens["generated"], "tok"), f"{tokens['generated_per_second']:,.0f} tok/s in all"
    )
    share = tokens["cached"] / tokens["prompt"] if tokens["prompt"] else 0.0
    table.add_row(
        "prefilled",
        format_count(tokens["prefilled"], "tok"),
        f"{share:.1%} of the prompts' tokens were cached" if data["deployment"]["prefix_cache"] else "",
    )
    if data["preemptions"]:
        again = f"{format_count(tokens['recomputed'], 'tok')} computed again"
        table.add_row("preemptions", f"{data['preemptions']:,}", again)
    wanted = [
        f"{name} {format_seconds(goodput[key])}"
        for name, key in (("TTFT", "ttft_target_s"), ("TPOT", "tpot_target_s"))
        if goodput[key] is not None
    ]
    if wanted:
        table.add_row(
            "goodput",
            f"{goodput['requests_per_second']:.4g} a second",
            f"{goodput['share']:.1%} of the requests within {' and '.join(wanted)}",
        )
    return table


def _latencies(data: dict[str, Any]) -> Table:
    table = Table(title="\nWhat users feel", title_justify="left", title_style="bold", box=None)
    table.add_column("")
    for name in ("planned", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, key, planned in _TIMES:
        found = data[key]
        if found is not None:
            plan = "" if planned is None else format_seconds(data["plan"][planned])
            table.add_row(name, plan, *(format_seconds(value) for value in found.values()))
    return table


def _servers(data: dict[str, Any]) -> Table:
    """Servers of a role together: means over them, and the most of any."""
    table = Table(title="\nWhat servers do (means of a role)", title_justify="left", title_style="bold", box=None)
    table.add_column("servers", no_wrap=True)
    for name in ("busy", "prefill", "generate", "mixed", "batch", "KV used", "KV most", "queue most"):
        table.add_column(name, justify="right", no_wrap=True)
    for role in dict.fromkeys(server["role"] for server in data["servers"]):
        servers = [server for server in data["servers"] if server["role"] == role]
        shares = [sum(s["utilisation"][name] for s in servers) / len(servers) for name in _SHARES]
        table.add_row(
            f"{len(servers)}" + ("" if role == "both" else f" {role}"),
            *(f"{share:.1%}" if share else "" for share in shares),
            "" if role == "prefill" else f"{sum(s['mean_batch'] for s in servers) / len(servers):.1f}",
            f"{sum(s['kv']['mean_occupancy'] for s in servers) / len(servers):.1%}",
            f"{max(s['kv']['max_occupancy'] for s in servers):.1%}",
            f"{max(s['max_waiting'] for s in servers)}",
        )
    return table


_SHARES = ("busy", "prefill", "generate", "mixed")
