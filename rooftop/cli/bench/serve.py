"""``rooftop bench serve``: a trace against a server with OpenAI's API, beside what the simulator says of it."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.output import emit_json, json_option, progress_bar, read_plan_file, show

if TYPE_CHECKING:
    from rooftop.serve.client.prediction import PredictionInput
    from rooftop.serve.client.replay import Replayed
    from rooftop.simulate.serving.metrics import Targets
    from rooftop.simulate.serving.traces import RequestTrace

_FILE = click.Path(dir_okay=False, path_type=Path)
_PACKAGES = ("httpx", "prometheus_client")


@click.command(name="serve")
@click.option("--url", required=True, metavar="URL", help="The server: http://127.0.0.1:8000.")
@click.option("--trace", "trace_file", type=click.Path(path_type=Path), help="Requests: JSONL or CSV.")
@click.option("--requests-per-second", metavar="N", help="Or drawn at this rate.")
@click.option("--seconds", default="60", show_default=True, metavar="N", help="For so long, when drawn.")
@click.option("--prompt", default="512", show_default=True, metavar="N", help="Tokens of a prompt: 512, or 128:1024.")
@click.option("--generate", default="128", show_default=True, metavar="N", help="Tokens of an answer, likewise.")
@click.option("--burstiness", default="1", show_default=True, metavar="SHAPE", help="1: Poisson; below it bursts.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of what is drawn.")
@click.option("--hash-tokens", default="512", show_default=True, metavar="N", help="Tokens that a hash stands for.")
@click.option("--model", metavar="NAME", help="The model to ask. [default: the one that is served]")
@click.option("--api-key", envvar="OPENAI_API_KEY", metavar="KEY", help="If the server asks for one.")
@click.option("--vocab", metavar="N", help="Prompts have token ids below N. [default: as the server tells, or 1000]")
@click.option(
    "--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Ask for answers of their full length."
)
@click.option("--plan", type=_FILE, help="Predict by a plan.json of `rooftop plan serve`, not by measured steps.")
@click.option("--ttft", metavar="TIME", help="Target for goodput: 500ms.")
@click.option("--tpot", metavar="TIME", help="Target for goodput: 30ms.")
@click.option("-o", "--output", type=_FILE, help="Write the JSON object here.")
@json_option
def command(as_json: bool, output: Path | None, **options: Any) -> int:
    """Replay a trace against a server with OpenAI's API, and report what its clients wait for.

    Beside it stands what the simulator says of the same requests: with the step times that a server of rooftop
    measured meanwhile (its /metrics), or with those of a --plan.

    \b
    Examples: rooftop bench serve --url http://127.0.0.1:8000 --requests-per-second 4 --prompt 128:512 --generate 64
              rooftop bench serve --url http://127.0.0.1:8000 --trace trace.jsonl --plan plan.json --ttft 1s --tpot 50ms
    """
    from rooftop.cli.process import require_packages
    from rooftop.core.files import write_text

    require_packages(_PACKAGES, "serve")
    with progress_bar(shown=not as_json) as on_progress:
        data = _bench(options, on_progress)
    if output is not None:
        write_text(output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit_json(data)
    else:
        show(data, {"report": output}, kind="bench serve")
    return 0


def _bench(options: dict[str, Any], on_progress: Any) -> dict[str, Any]:
    """The answer as JSON values. Raises RooftopError for what is wrong, Infeasible if no request was answered."""
    from rooftop import __version__
    from rooftop.core.errors import Infeasible
    from rooftop.core.quantities import parse_count, parse_seconds
    from rooftop.serve.client.prediction import PredictionInput
    from rooftop.serve.client.replay import ReplayTarget, find_model, prompts_of, replay
    from rooftop.simulate.serving.metrics import Targets

    trace = _trace(options)
    targets = Targets(
        **{f"{name}_s": parse_seconds(options[name], name) for name in ("ttft", "tpot") if options[name] is not None}
    )
    vocab = None if options["vocab"] is None else parse_count(options["vocab"], "vocab")
    plan = None if options["plan"] is None else _plan(options["plan"])
    url = options["url"].rstrip("/").removesuffix("/v1")
    model, told = find_model(url, options["model"], options["api_key"])
    vocab = vocab or told or 1000
    target = ReplayTarget(url=url, model=model, vocab=vocab, key=options["api_key"], exact=options["ignore_eos"])
    before = PredictionInput.read(url)
    replayed = asyncio.run(replay(trace, prompts_of(trace, vocab, options["seed"]), target, targets, on_progress))
    measured = replayed.to_json()
    if not replayed.served:
        raise Infeasible("no request was answered", str(measured["requests"]["why"]))
    return {
        "kind": "bench serve",
        "schema": 1,
        "rooftop_version": __version__,
        "command": shlex.join(["rooftop", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": url,
        "model": model,
        "trace": {
            "requests": len(trace),
            "seconds": float(trace.arrival_s[-1]),
            "mean_prompt_tokens": float(trace.prompt_tokens.mean()),
            "mean_output_tokens": float(trace.output_tokens.mean()),
        },
        "measured": measured,
    } | _prediction(replayed, trace, before, PredictionInput.read(url), plan, targets)


def _trace(options: dict[str, Any]) -> RequestTrace:
    from rooftop.core.errors import RooftopError
    from rooftop.core.quantities import parse_count, parse_quantity
    from rooftop.simulate.serving.traces import Lengths, draw_trace, read_trace

    rate, file = options["requests_per_second"], options["trace_file"]
    if (rate is None) == (file is None):
        raise RooftopError("trace", file and str(file), "--trace FILE or --requests-per-second N, one of them")
    if file is not None:
        return read_trace(file, hash_tokens=parse_count(options["hash_tokens"], "hash-tokens"))
    per_second = parse_quantity(rate, "requests-per-second")
    return draw_trace(
        requests_per_second=per_second,
        requests=max(1, round(per_second * parse_quantity(options["seconds"], "seconds"))),
        prompt=Lengths.parse(options["prompt"], "prompt"),
        output=Lengths.parse(options["generate"], "generate"),
        burstiness=parse_quantity(options["burstiness"], "burstiness"),
        seed=options["seed"],
    )


def _plan(file: Path) -> Any:
    from rooftop.plan.serving.plan import ServingPlan

    return ServingPlan.from_json(read_plan_file(file, accepted="a plan.json written by rooftop plan serve"))


def _prediction(
    replayed: Replayed,
    trace: RequestTrace,
    before: PredictionInput | None,
    after: PredictionInput | None,
    plan: Any,
    targets: Targets,
) -> dict[str, Any]:
    """``predicted``, and ``predicted_by``: what it was made from, or why there is none.

    ``outside_engine_ttft_s`` is what of the measured mean TTFT no simulation knows of; None where no engine tells.
    """
    from dataclasses import replace

    from rooftop.core.errors import RooftopError
    from rooftop.scheduling.serving.scheduler import Policy
    from rooftop.serve.client.prediction import deployment_of, measured_times, outside_s, predict

    outside = None
    if before is not None and after is not None:
        outside = outside_s(before, after, replayed.to_json()["ttft_s"]["mean"])
    found: dict[str, Any] = {"outside_engine_ttft_s": outside, "predicted": None}
    if plan is None and (before is None or after is None):
        return found | {"predicted_by": "no --plan, and no step times at /metrics of the server"}
    served = replayed.trace()
    if trace.hashes is not None and len(served) == len(trace):
        served = replace(served, hashes=trace.hashes, hash_tokens=trace.hash_tokens)
    try:
        policy, cached = (Policy(max_batch=plan.batch), False) if after is None else after.policy
        times = plan.step_times() if plan is not None else measured_times(before, after)  # type: ignore[arg-type]
        told = after if plan is None else None
        cached = cached and served.hashes is not None
        predicted = predict(served, deployment_of(told, times, policy=policy, prefix_cache=cached), targets)
    except RooftopError as error:
        return found | {"predicted_by": str(error)}
    by = f"the plan for {plan.problem.slice.name}" if plan is not None else "step times that the server measured"
    return found | {"predicted": predicted, "predicted_by": by}
