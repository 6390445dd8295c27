"""``rooftop simulate``: requests against a serving plan, before anyone pays for it."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack

import click

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
    burstiness_option,
    calibration_option,
    concurrency_option,
    duration_option,
    hash_tokens_option,
    host_dram_option,
    json_option,
    option,
    output_option,
    perfetto_option,
    report_option,
    requests_option,
    seed_option,
    tpot_option,
    ttft_option,
)
from rooftop.cli.output import progress_bar, show
from rooftop.core.files import write_json, write_text

_EXAMPLES = (
    "rooftop simulate plan.json --requests-per-second 2 --duration 1h",
    "rooftop simulate plan.json --concurrency 64",
    "rooftop simulate plan.json --trace trace.jsonl --prefix-cache --replicas 4 --routing affinity",
)


class _SimulateOptions(TypedDict):
    """Arguments and options that ``simulate`` takes."""

    plan: Path
    trace: Path | None
    requests_per_second: float | None
    duration: float
    concurrency: int | None
    requests: int | None
    prompt: str | None
    generate: str | None
    burstiness: float
    seed: int
    hash_tokens: int
    batching: str | None
    chunk_tokens: int | None
    batch_seqs: int | None
    replicas: int | None
    prefill_servers: int | None
    routing: str
    preemption: str
    prefix_cache: bool
    host_dram: int | None
    ttft: float | None
    tpot: float | None
    calibration: Path | None


@click.command(name="simulate", cls=VerbCommand, examples=_EXAMPLES)
@click.argument("plan", type=PATH)
@option("--trace", group=WORKLOAD, type=PATH, help="Requests: JSONL or CSV.")
@option("--requests-per-second", group=WORKLOAD, type=QUANTITY, help="Or drawn at this rate; the plan's by default.")
@duration_option(default="10m")
@concurrency_option()
@requests_option()
@option("--prompt", group=WORKLOAD, metavar="N", help="Tokens of a prompt: 512, or 128:1024. The plan's by default.")
@option("--generate", group=WORKLOAD, metavar="N", help="Tokens of an answer, likewise.")
@burstiness_option()
@seed_option(group=WORKLOAD, default="0")
@hash_tokens_option()
@batching_option(help="How servers batch. The plan's by default.")
@option("--chunk-tokens", group=WORKLOAD, type=COUNT, help="Prefill in chunks: most tokens of a step.")
@batch_seqs_option(help="Sequences that a server has in progress at most. The plan's batch by default.")
@option("--replicas", group=HARDWARE, type=COUNT, help="Servers (disaggregated: that generate). The plan's, or 1.")
@option("--prefill-servers", group=HARDWARE, type=COUNT, help="Disaggregated: servers that prefill. The plan's.")
@option(
    "--routing", group=WORKLOAD, default="least_loaded",
    type=Name("round_robin", "least_loaded", "affinity"), help="How requests are spread over servers.",
)  # fmt: skip
@option(
    "--preemption", group=WORKLOAD, default="recompute", type=Name("recompute", "swap"),
    help="What to do when pages run out.",
)  # fmt: skip
@option("--prefix-cache", group=WORKLOAD, is_flag=True, help="Share the KV of prompts that begin alike.")
@host_dram_option(group=HARDWARE, help="Memory of a host for prefixes and swapped sequences: 400G.")
@ttft_option(help="Target for goodput: 500ms. The plan's by default.")
@tpot_option(help="Target for goodput: 30ms. The plan's by default.")
@calibration_option()
@option("--per-request", group=OUTPUT, type=FILE, help="Write every request's times (CSV).")
@perfetto_option(help="Write the timeline of the first minute here, for ui.perfetto.dev.")
@report_option()
@output_option()
@json_option
def command(
    *,
    per_request: Path | None,
    perfetto: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Unpack[_SimulateOptions],
) -> int:
    """Simulate requests to the servers of PLAN, a plan.json of `rooftop plan serve`: the latencies that users feel."""
    from rooftop.library.simulation import simulate

    with progress_bar(shown=not as_json) as on_progress:
        result = simulate(**options, on_progress=on_progress)
    result.raise_if_infeasible()
    data = result.to_json()
    if per_request is not None:
        result.write_requests(per_request)
    if perfetto is not None:
        result.write_perfetto(perfetto)
    if report is not None:
        write_text(report, result.page())
    if output is not None:
        write_json(output, data)
    files = {"simulation": output, "page": report, "requests": per_request, "timeline": perfetto}
    show(data, files, as_json=as_json)
    return 0
