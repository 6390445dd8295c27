"""``rooftop bench`` (measurements of collectives and of a server) and ``rooftop calibrate`` (devices or a run)."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack

import click

from rooftop.cli.options import (
    FILE,
    FOLDER,
    QUANTITY,
    VerbCommand,
    devices_option,
    dtype_option,
    json_option,
    mesh_option,
    on_option,
    option,
    output_option,
    request_options,
)
from rooftop.cli.output import VerbGroup, progress_bar, show
from rooftop.core.files import write_json
from rooftop.requests.measuring import BenchServing
from rooftop.requests.words import OUTPUT, RUN, WORKLOAD


@click.group(name="bench", cls=VerbGroup)
def command() -> None:
    """Measure: collectives on local devices, a server under load."""


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
    if output is not None:
        write_json(output, result.to_json())
    show(result, {"report": output}, as_json=as_json, kind="bench collectives")
    return 0


_SERVING = (
    "rooftop bench serve --url http://127.0.0.1:8000 --requests-per-second 4 --prompt 128:512 --generate 64",
    "rooftop bench serve --url http://127.0.0.1:8000 --concurrency 16 --requests 200",
    "rooftop bench serve --url http://127.0.0.1:8000 --trace trace.jsonl --plan plan.json --ttft 1s --tpot 50ms",
)


@command.command(name="serve", cls=VerbCommand, examples=_SERVING)
@request_options(BenchServing)
@output_option()
@json_option
def serve(*, request: BenchServing, output: Path | None, as_json: bool) -> int:
    """Load a server with OpenAI's API, and report how long its clients wait.

    Requests are those of a trace, come at a rate, or are sent by clients that wait for their answers. The same requests
    are simulated: with the step times that a server of rooftop measured meanwhile (its /metrics), or with those of a
    --plan.
    """
    from rooftop.library.benchmarks import bench_serving

    with progress_bar(shown=not as_json) as on_progress:
        result = bench_serving(request, on_progress=on_progress)
    if output is not None:
        write_json(output, result.to_json())
    show(result, {"report": output}, as_json=as_json)
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
    """Measure the local devices: matmuls, attention, HBM, collectives, calls. Plans take --calibration FILE.

    The file is written after each measurement: the same command goes on where a killed one stopped. With RUN, the
    folder of `rooftop train plan.json`, compare three or more measured steps with their plan: which term is off
    (compute, HBM, collectives, host gaps), and what the next plan changes.
    """
    from rooftop.library import benchmarks

    with progress_bar(shown=not as_json) as on_progress:
        result = benchmarks.calibrate(
            run, output=output, on=on, minutes=minutes, devices=devices, on_progress=on_progress
        )
    show(result.calibration, {"calibration": output}, as_json=as_json)
    return 0
