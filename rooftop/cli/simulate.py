"""``rooftop simulate``: requests against a serving plan, before anyone pays for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rooftop.cli.options import (
    COUNT,
    FILE,
    HARDWARE,
    OUTPUT,
    PATH,
    QUANTITY,
    WORKLOAD,
    Name,
    VerbCommand,
    batch_seqs_option,
    batching_option,
    duration_option,
    host_dram_option,
    json_option,
    option,
    output_option,
    perfetto_option,
    seed_option,
    tpot_option,
    ttft_option,
)
from rooftop.cli.output import console, emit_json, progress_bar
from rooftop.core.quantities import format_count, format_seconds

_EXAMPLES = (
    "rooftop simulate plan.json --requests-per-second 2 --duration 1h",
    "rooftop simulate plan.json --trace trace.jsonl --prefix-cache --replicas 4 --routing affinity",
)


@click.command(name="simulate", cls=VerbCommand, examples=_EXAMPLES)
@click.argument("plan", type=PATH)
@option("--trace", group=WORKLOAD, type=PATH, help="Requests: JSONL or CSV.")
@option("--requests-per-second", group=WORKLOAD, type=QUANTITY, help="Or drawn at this rate; the plan's by default.")
@duration_option(default="10m", show_default=True)
@option("--prompt", group=WORKLOAD, metavar="N", help="Tokens of a prompt: 512, or 128:1024. The plan's by default.")
@option("--generate", group=WORKLOAD, metavar="N", help="Tokens of an answer, likewise.")
@option(
    "--burstiness", group=WORKLOAD, default="1", show_default=True, type=QUANTITY,
    help="1: Poisson; below it requests come in bursts.",
)  # fmt: skip
@seed_option(group=WORKLOAD, default="0", show_default=True)
@option(
    "--hash-tokens", group=WORKLOAD, default="512", show_default=True, type=COUNT,
    help="Tokens that a hash of a trace stands for.",
)  # fmt: skip
@batching_option(help="How servers batch. The plan's by default.")
@option("--chunk-tokens", group=WORKLOAD, type=COUNT, help="Prefill in chunks: most tokens of a step.")
@batch_seqs_option(help="Sequences that a server has in progress at most. The plan's batch by default.")
@option("--replicas", group=HARDWARE, type=COUNT, help="Servers (disaggregated: that generate). The plan's, or 1.")
@option("--prefill-servers", group=HARDWARE, type=COUNT, help="Disaggregated: servers that prefill. The plan's.")
@option(
    "--routing", group=WORKLOAD, default="least_loaded", show_default=True,
    type=Name("round_robin", "least_loaded", "affinity"), help="How requests are spread over servers.",
)  # fmt: skip
@option(
    "--preemption", group=WORKLOAD, default="recompute", show_default=True, type=Name("recompute", "swap"),
    help="When pages run out.",
)  # fmt: skip
@option("--prefix-cache", group=WORKLOAD, is_flag=True, help="Keep the KV of prompts for those that begin alike.")
@host_dram_option(group=HARDWARE, help="Memory of a host for prefixes and swapped sequences: 400G.")
@ttft_option(help="Target for goodput: 500ms. The plan's by default.")
@tpot_option(help="Target for goodput: 30ms. The plan's by default.")
@option("--per-request", group=OUTPUT, type=FILE, help="Write every request's times (CSV).")
@perfetto_option(help="Write the timeline of the first minute here, for ui.perfetto.dev.")
@output_option()
@json_option
def command(
    *,
    plan: Path,
    trace: Path | None,
    requests_per_second: float | None,
    duration: float,
    prompt: str | None,
    generate: str | None,
    burstiness: float,
    seed: int,
    hash_tokens: int,
    batching: str | None,
    chunk_tokens: int | None,
    batch_seqs: int | None,
    replicas: int | None,
    prefill_servers: int | None,
    routing: str,
    preemption: str,
    prefix_cache: bool,
    host_dram: int | None,
    ttft: float | None,
    tpot: float | None,
    per_request: Path | None,
    perfetto: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Serve requests by PLAN, a plan.json of `rooftop plan serve`: the latencies that users would feel."""
    from rooftop.core.files import write_text
    from rooftop.library.serving import simulate

    with progress_bar(shown=not as_json) as on_progress:
        result = simulate(
            plan, trace=trace, requests_per_second=requests_per_second, duration=duration, prompt=prompt,
            generate=generate, burstiness=burstiness, seed=seed, hash_tokens=hash_tokens, batching=batching,
            chunk_tokens=chunk_tokens, batch_seqs=batch_seqs, replicas=replicas, prefill_servers=prefill_servers,
            routing=routing, preemption=preemption, prefix_cache=prefix_cache, host_dram=host_dram, ttft=ttft,
            tpot=tpot, on_progress=on_progress,
        )  # fmt: skip
    result.raise_if_infeasible()
    data = result.to_json()
    if per_request is not None:
        result.write_requests(per_request)
    if perfetto is not None:
        result.write_perfetto(perfetto)
    if output is not None:
        write_text(output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit_json(data)
    else:
        show(data, [str(path) for path in (output, per_request, perfetto) if path is not None])
    return 0


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
