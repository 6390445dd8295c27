"""``rooftop bench``: measurements; each kind is a subcommand."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.bench.serve import command as serve
from rooftop.cli.options import (
    WORKLOAD,
    VerbCommand,
    dtype_option,
    json_option,
    mesh_option,
    on_option,
    option,
    output_option,
)
from rooftop.cli.output import emit_json, progress_bar, show
from rooftop.cli.usage import VerbGroup


@click.group(name="bench", cls=VerbGroup)
def command() -> None:
    """Measure: collectives on the devices that are here, a server under load."""


command.add_command(serve)


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
@option(
    "--sizes", group=WORKLOAD, default="64Ki,1Mi,16Mi", show_default=True, metavar="BYTES", help="Payloads, as a list."
)
@dtype_option(default="bf16", show_default=True, help="Dtype of the elements.")
@output_option()
@json_option
def collectives(
    *,
    on: str | None,
    mesh: str | None,
    axis: str | None,
    kinds: str | None,
    sizes: str,
    dtype: str,
    output: Path | None,
    as_json: bool,
) -> int:
    """Time collectives over the axes of a mesh, for several sizes.

    A size is the payload of one device: the output of an all_gather, the input of a reduce_scatter, the operand of an
    all_reduce or all_to_all, what a permute sends to its neighbour. Groups along the other axes run at the same time.
    """
    from rooftop.core.files import write_json
    from rooftop.library.benchmarks import bench_collectives

    with progress_bar(shown=not as_json) as on_progress:
        result = bench_collectives(
            mesh=mesh, axis=axis, kinds=kinds, sizes=sizes, dtype=dtype, on=on, on_progress=on_progress
        )
    data = result.to_json()
    if output is not None:
        write_json(output, data)
    if as_json:
        emit_json(data)
    else:
        show(data, {"report": output}, kind="bench collectives")
    return 0
