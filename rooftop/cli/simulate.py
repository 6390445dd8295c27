"""``rooftop simulate``: requests against a serving plan, before anyone pays for it."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.options import (
    FILE,
    VerbCommand,
    json_option,
    option,
    output_option,
    perfetto_option,
    report_option,
    request_options,
)
from rooftop.cli.output import progress_bar, show
from rooftop.core.files import write_json, write_text
from rooftop.requests.simulating import Simulate
from rooftop.requests.words import OUTPUT

_EXAMPLES = (
    "rooftop simulate plan.json --requests-per-second 2 --duration 1h",
    "rooftop simulate plan.json --concurrency 64",
    "rooftop simulate plan.json --trace trace.jsonl --prefix-cache --replicas 4 --routing affinity",
)


@click.command(name="simulate", cls=VerbCommand, examples=_EXAMPLES)
@request_options(Simulate)
@option("--per-request", group=OUTPUT, type=FILE, help="Write every request's times (CSV).")
@perfetto_option(help="Write the timeline of the first minute here, for ui.perfetto.dev.")
@report_option()
@output_option()
@json_option
def command(
    *,
    request: Simulate,
    per_request: Path | None,
    perfetto: Path | None,
    report: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Simulate requests to the servers of PLAN, a plan.json of `rooftop plan serve`: the latencies that users feel."""
    from rooftop.library.simulation import simulate

    with progress_bar(shown=not as_json) as on_progress:
        result = simulate(request, on_progress=on_progress)
    result.raise_if_infeasible()
    if per_request is not None:
        result.write_requests(per_request)
    if perfetto is not None:
        result.write_perfetto(perfetto)
    if report is not None:
        write_text(report, result.page())
    if output is not None:
        write_json(output, result.to_json())
    files = {"simulation": output, "page": report, "requests": per_request, "timeline": perfetto}
    show(result.report, files, as_json=as_json)
    return 0
