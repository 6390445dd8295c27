"""``rooftop bench`` (measurements of collectives and of a server) and ``rooftop calibrate`` (devices or a run)."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack

import click

from rooftop.cli.options import (
    COUNT,
    FILE,
    FOLDER,
    PATH,
    QUANTITY,
    VerbCommand,
    burstiness_option,
    concurrency_option,
    devices_option,
    dtype_option,
    duration_option,
    hash_tokens_option,
    json_option,
    mesh_option,
    on_option,
    option,
    output_option,
    requests_option,
    seed_option,
    tpot_option,
    ttft_option,
)
from rooftop.cli.output import VerbGroup, progress_bar, show
from rooftop.core.files import write_json
from rooftop.requests.words import OUTPUT, RUN, SERVER, WORKLOAD


@click.group(name="bench", cls=VerbGroup)
def command() -> None:
    """Measure: collectives on the devices that are here, a server under load."""


class _CollectivesOptions(TypedDict):
    """Options that ``bench_collectives`` takes."""

    on: str | None
    mesh: str | None
    axis: str | None
    kinds: str | None
    sizes: str
    dtype: str


@command.command(
    name="collectives",
    cls=VerbCommand,
    examples=(
        "rooftop bench collectives",
        "rooftop bench collectives --mesh X=2,Y=4 --axis Y --kinds all_gather --sizes 1Mi,64Mi --on v5e:2x4",
    ),
)
@on_option(help="Show what is planned for this slice too: CHIP:SHAPE[@SLICES].")
@mesh_option(help="Mesh axes and their sizes: X=2,Y=4. One axis X of all devices by default.")
@option("--axis", group=WORKLOAD, metavar="AXES", help="The axes that collectives run over: X or X,Y. All by default.")
@option(
    "--kinds", group=WORKLOAD, metavar="KINDS",
    help="Some of all_gather, reduce_scatter, all_reduce, all_to_all, permute.",
)  # fmt: skip
@option("--sizes", group=WORKLOAD, default="64Ki,1Mi,16Mi", metavar="BYTES", help="Payloads, as a list.")
@dtype_option(default="bf16", help="Dtype of the elements.")
@output_option()
@json_option
def collectives(*, output: Path | None, as_json: bool, **options: Unpack[_CollectivesOptions]) -> int:
    """Time collectives over the axes of a mesh, for several sizes.

    A size is the payload of one device: the output of an all_gather, the input of a reduce_scatter, the operand of an
    all_reduce or all_to_all, what a permute sends to its neighbour. Groups along the other axes run at the same time.
    """
    from rooftop.library.benchmarks import bench_collectives

    with progress_bar(shown=not as_json) as on_progress:
        result = bench_collectives(**options, on_progress=on_progress)
    data = result.to_json()
    if output is not None:
        write_json(output, data)
    show(data, {"report": output}, as_json=as_json, kind="bench collectives")
    return 0


_SERVING = (
    "rooftop bench serve --url http://127.0.0.1:8000 --requests-per-second 4 --prompt 128:512 --generate 64",
    "rooftop bench serve --url http://127.0.0.1:8000 --concurrency 16 --requests 200",
    "rooftop bench serve --url http://127.0.0.1:8000 --trace trace.jsonl --plan plan.json --ttft 1s --tpot 50ms",
)


class _ReplayOptions(TypedDict):
    """Options that ``bench_serving`` takes."""

    url: str
    trace: Path | None
    requests_per_second: float | None
    duration: float
    concurrency: int | None
    requests: int | None
    prompt: str
    texts: Path | None
    generate: str
    burstiness: float
    seed: int
    hash_tokens: int
    model: str | None
    api_key: str | None
    vocab: int | None
    ignore_eos: bool
    plan: Path | None
    ttft: float | None
    tpot: float | None


@command.command(name="serve", cls=VerbCommand, examples=_SERVING)
@option("--url", group=SERVER, required=True, metavar="URL", help="The server: http://127.0.0.1:8000.")
@option("--trace", group=WORKLOAD, type=PATH, help="Requests: JSONL or CSV.")
@option("--requests-per-second", group=WORKLOAD, type=QUANTITY, help="Or drawn at this rate.")
@duration_option(default="60s")
@concurrency_option()
@requests_option()
@option("--prompt", group=WORKLOAD, default="512", metavar="N", help="Tokens of a prompt: 512, or 128:1024.")
@option("--texts", group=WORKLOAD, type=PATH, help='Prompts: JSONL of {"prompt": ...}, or ShareGPT\'s JSON.')
@option("--generate", group=WORKLOAD, default="128", metavar="N", help="Tokens of an answer, likewise.")
@burstiness_option()
@seed_option(group=WORKLOAD, default="0")
@hash_tokens_option()
@option("--model", group=SERVER, metavar="NAME", help="The model to ask. [default: the one that is served]")
@option("--api-key", group=SERVER, envvar="OPENAI_API_KEY", metavar="KEY", help="If the server asks for one.")
@option("--vocab", group=WORKLOAD, type=COUNT, help="Prompts have token ids below N. [default: the server's, or 1000]")
@option("--ignore-eos/--no-ignore-eos", group=WORKLOAD, default=True, help="Ask for answers of their full length.")
@option("--plan", group=WORKLOAD, type=FILE, help="Predict by a plan.json, not by the steps that the server measured.")
@ttft_option(help="Target for goodput: 500ms.")
@tpot_option(help="Target for goodput: 30ms.")
@output_option()
@json_option
def serve(*, output: Path | None, as_json: bool, **options: Unpack[_ReplayOptions]) -> int:
    """Load a server with OpenAI's API, and report how long its clients wait.

    Requests are those of a trace, come at a rate, or are sent by clients that wait for their answers. The same requests
    are simulated: with the step times that a server of rooftop measured meanwhile (its /metrics), or with those of a
    --plan.
    """
    from rooftop.library.benchmarks import bench_serving

    with progress_bar(shown=not as_json) as on_progress:
        result = bench_serving(**options, on_progress=on_progress)
    data = result.to_json()
    if output is not None:
        write_json(output, data)
    show(data, {"report": output}, as_json=as_json, kind="bench serve")
    return 0


@click.command(
    name="calibrate",
    cls=VerbCommand,
    examples=(
        "rooftop calibrate -o v5e.json",
        "rooftop calibrate run1 -o run1.json",
    ),
)
@click.argument("run", metavar="[RUN]", type=FOLDER, required=False)
@on_option(help="The slice that the devices are. [default: by their kind and number]")
@option("--minutes", group=RUN, default="10", type=QUANTITY, help="Time after which measurements end.")
@devices_option()
@option(
    "-o", "--output", group=OUTPUT, default="calibration.json", type=FILE, help="The calibration file; goes on with it."
)
@json_option
def calibrate(
    *, run: Path | None, on: str | None, minutes: float, devices: int | None, output: Path, as_json: bool
) -> int:
    """Measure the devices that are here: matmuls, attention, HBM, collectives, calls. Plans take --calibration FILE.

    The file is written after each measurement: the same command goes on where a killed one stopped. With RUN, the
    folder of `rooftop train plan.json`, compare three or more measured steps with their plan: which term is off
    (compute, HBM, collectives, host gaps), and what the next plan changes.
    """
    from rooftop.library import benchmarks

    with progress_bar(shown=not as_json) as on_progress:
        result = benchmarks.calibrate(
            run, output=output, on=on, minutes=minutes, devices=devices, on_progress=on_progress
        )
    show(result.to_json(), {"calibration": output}, as_json=as_json)
    return 0
