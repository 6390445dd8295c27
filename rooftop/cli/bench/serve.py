"""``rooftop bench serve``: a trace against a server with OpenAI's API, next to its simulation."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.options import (
    COUNT,
    FILE,
    PATH,
    QUANTITY,
    SERVER,
    WORKLOAD,
    VerbCommand,
    duration_option,
    json_option,
    option,
    output_option,
    seed_option,
    tpot_option,
    ttft_option,
)
from rooftop.cli.output import emit_json, progress_bar, show

_EXAMPLES = (
    "rooftop bench serve --url http://127.0.0.1:8000 --requests-per-second 4 --prompt 128:512 --generate 64",
    "rooftop bench serve --url http://127.0.0.1:8000 --trace trace.jsonl --plan plan.json --ttft 1s --tpot 50ms",
)


@click.command(name="serve", cls=VerbCommand, examples=_EXAMPLES)
@option("--url", group=SERVER, required=True, metavar="URL", help="The server: http://127.0.0.1:8000.")
@option("--trace", group=WORKLOAD, type=PATH, help="Requests: JSONL or CSV.")
@option("--requests-per-second", group=WORKLOAD, type=QUANTITY, help="Or drawn at this rate.")
@duration_option(default="60s", show_default=True)
@option(
    "--prompt", group=WORKLOAD, default="512", show_default=True, metavar="N",
    help="Tokens of a prompt: 512, or 128:1024.",
)  # fmt: skip
@option(
    "--generate", group=WORKLOAD, default="128", show_default=True, metavar="N", help="Tokens of an answer, likewise."
)
@option(
    "--burstiness", group=WORKLOAD, default="1", show_default=True, type=QUANTITY,
    help="1: Poisson; below it requests come in bursts.",
)  # fmt: skip
@seed_option(group=WORKLOAD, default="0", show_default=True)
@option(
    "--hash-tokens", group=WORKLOAD, default="512", show_default=True, type=COUNT,
    help="Tokens that a hash of a trace stands for.",
)  # fmt: skip
@option("--model", group=SERVER, metavar="NAME", help="The model to ask. [default: the one that is served]")
@option("--api-key", group=SERVER, envvar="OPENAI_API_KEY", metavar="KEY", help="If the server asks for one.")
@option(
    "--vocab",
    group=WORKLOAD,
    type=COUNT,
    help="Prompts have token ids below N. [default: the server's, or 1000]",
)
@option(
    "--ignore-eos/--no-ignore-eos", group=WORKLOAD, default=True, show_default=True,
    help="Ask for answers of their full length.",
)  # fmt: skip
@option("--plan", group=WORKLOAD, type=FILE, help="Predict by a plan.json, not by the steps that the server measured.")
@ttft_option(help="Target for goodput: 500ms.")
@tpot_option(help="Target for goodput: 30ms.")
@output_option()
@json_option
def command(
    *,
    url: str,
    trace: Path | None,
    requests_per_second: float | None,
    duration: float,
    prompt: str,
    generate: str,
    burstiness: float,
    seed: int,
    hash_tokens: int,
    model: str | None,
    api_key: str | None,
    vocab: int | None,
    ignore_eos: bool,
    plan: Path | None,
    ttft: float | None,
    tpot: float | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Replay a trace against a server with OpenAI's API, and report how long its clients wait.

    The same requests are simulated: with the step times that a server of rooftop measured meanwhile (its /metrics), or
    with those of a --plan.
    """
    from rooftop.core.files import write_json
    from rooftop.library.benchmarks import bench_serving

    with progress_bar(shown=not as_json) as on_progress:
        result = bench_serving(
            url, trace=trace, requests_per_second=requests_per_second, duration=duration, prompt=prompt,
            generate=generate, burstiness=burstiness, seed=seed, hash_tokens=hash_tokens, model=model,
            api_key=api_key, vocab=vocab, ignore_eos=ignore_eos, plan=plan, ttft=ttft, tpot=tpot,
            on_progress=on_progress,
        )  # fmt: skip
    data = result.to_json()
    if output is not None:
        write_json(output, data)
    if as_json:
        emit_json(data)
    else:
        show(data, {"report": output}, kind="bench serve")
    return 0
