"""The document of a simulation of a server: the latencies that users feel, and the servers' work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rooftop.core.quantities import format_count, format_seconds
from rooftop.present.document import Bar, Bars, Document, ShownFigure, ShownVerdict, Table, columns
from rooftop.present.documents.parts import written_by

_TIMES = (
    ("TTFT", "ttft_s", "ttft_s"),
    ("TPOT", "tpot_s", "tpot_s"),
    ("ITL", "itl_s", None),
    ("worst ITL", "worst_itl_s", None),
    ("end to end", "e2e_s", None),
)
_SHARES = ("busy", "prefill", "generate", "mixed")


def simulation(data: Mapping[str, Any]) -> Document:
    """A simulation of requests to the servers of a plan."""
    requests, tokens = data["requests"], data["tokens"]
    return Document(
        title=f"{data['plan']['model']}: a simulation",
        verdict=ShownVerdict(
            subject=_subject(data),
            says=f"{requests['finished']:,} of {requests['offered']:,} requests finished, "
            f"{format_count(tokens['generated_per_second'], 'tok/s')}.",
        ),
        figures=tuple(_figures(data)),
        charts=(_latencies(data), _servers(data), _busy(data)),
        sources=written_by(data),
    )


def _subject(data: Mapping[str, Any]) -> str:
    plan, deployment = data["plan"], data["deployment"]
    servers = f"{deployment['replicas']} x {plan['slice']}"
    if deployment["prefill_servers"]:
        servers = f"{deployment['prefill_servers']} x {plan['prefill_slice']} for prefill and {servers} to generate"
    text = f"{plan['model']} on {servers}: {deployment['batching']}"
    if deployment["chunk_tokens"] is not None:
        text += f", prefill in chunks of {deployment['chunk_tokens']} tokens a step"
    return text + f", batches up to {deployment['max_batch']}"


def _figures(data: Mapping[str, Any]) -> Iterator[ShownFigure]:
    requests, tokens, goodput = data["requests"], data["tokens"], data["goodput"]
    note = f"{requests['per_second']:.4g} a second over {format_seconds(data['duration_s'])}"
    if requests["refused"]:
        note += f"; {requests['refused']:,} refused, such as: {requests['refused_why']}"
    yield ShownFigure("finished", "requests", requests["finished"], shown=f"{requests['finished']:,}", note=note,
        level="simulated")  # fmt: skip
    yield ShownFigure("generated", "generated", tokens["generated"], "tok", "simulated",
        note=f"{tokens['generated_per_second']:,.0f} tok/s in all")  # fmt: skip
    share = tokens["cached"] / tokens["prompt"] if tokens["prompt"] else 0.0
    note = f"{share:.1%} of the prompts' tokens were cached" if data["deployment"]["prefix_cache"] else ""
    yield ShownFigure("prefilled", "prefilled", tokens["prefilled"], "tok", "simulated", note=note)
    if data["preemptions"]:
        yield ShownFigure("preemptions", "preemptions", data["preemptions"], shown=f"{data['preemptions']:,}",
            level="simulated", note=f"{format_count(tokens['recomputed'], 'tok')} computed again")  # fmt: skip
    targets = [
        f"{name} {format_seconds(goodput[key])}"
        for name, key in (("TTFT", "ttft_target_s"), ("TPOT", "tpot_target_s"))
        if goodput[key] is not None
    ]
    if targets:
        yield ShownFigure("goodput", "goodput", goodput["requests_per_second"], level="simulated",
            shown=f"{goodput['requests_per_second']:.4g} a second",
            note=f"{goodput['share']:.1%} of the requests within {' and '.join(targets)}")  # fmt: skip


def _latencies(data: Mapping[str, Any]) -> Table:
    rows = []
    for name, key, planned in _TIMES:
        percentiles = data[key]
        if percentiles is not None:
            plan = "" if planned is None else format_seconds(data["plan"][planned])
            rows.append((name, plan, *(format_seconds(seconds) for seconds in percentiles.values())))
    names = ("", "planned", "mean", "p50", "p90", "p95", "p99", "max")
    return Table(title="What users feel", section="Latencies", columns=columns(*names), rows=tuple(rows))


def _servers(data: Mapping[str, Any]) -> Table:
    """Servers of a role together: means over them, and the most of any."""
    rows = []
    for role in dict.fromkeys(server["role"] for server in data["servers"]):
        servers = [server for server in data["servers"] if server["role"] == role]
        shares = [sum(s["utilisation"][name] for s in servers) / len(servers) for name in _SHARES]
        rows.append(
            (
                f"{len(servers)}" + ("" if role == "both" else f" {role}"),
                *(f"{share:.1%}" if share else "" for share in shares),
                "" if role == "prefill" else f"{sum(s['mean_batch'] for s in servers) / len(servers):.1f}",
                f"{sum(s['kv']['mean_occupancy'] for s in servers) / len(servers):.1%}",
                f"{max(s['kv']['max_occupancy'] for s in servers):.1%}",
                f"{max(s['max_waiting'] for s in servers)}",
            )
        )
    names = ("servers", "busy", "prefill", "generate", "mixed", "batch", "KV used", "KV most", "queue most")
    return Table(
        title="What servers do (means of a role)", section="Servers", columns=columns(*names), rows=tuple(rows)
    )


def _busy(data: Mapping[str, Any]) -> Bars:
    """The share of time of each role that its servers spend on what."""
    bars = []
    for role in dict.fromkeys(server["role"] for server in data["servers"]):
        servers = [server for server in data["servers"] if server["role"] == role]
        parts = tuple(
            (name, sum(s["utilisation"][name] for s in servers) / len(servers)) for name in _SHARES if name != "busy"
        )
        bars.append(Bar("servers" if role == "both" else role, parts))
    return Bars(title="Time of a server", about="Means over the servers of a role.", unit="%", bars=tuple(bars))
