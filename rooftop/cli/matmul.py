"""``rooftop matmul``: what an einsum, a resharding or one collective of sharded arrays costs, and how best to do it."""

from __future__ import annotations

from typing import TypedDict, Unpack

import click

from rooftop.cli.options import (
    VerbCommand,
    dtype_option,
    figure_option,
    json_option,
    layout_option,
    level_option,
    mesh_option,
    on_option,
    option,
    top_option,
)
from rooftop.cli.output import progress_bar, show
from rooftop.core.errors import RooftopError
from rooftop.requests.words import ASSUMPTIONS, PARALLELISM, RUN, WORKLOAD


class _MatmulOptions(TypedDict):
    """Arguments and options that ``matmul`` takes."""

    expression: str
    on: str | None
    figures: dict[str, float]
    dims: str | None
    backward: bool
    mesh: str | None
    layout: str | None
    dtype: str
    level: str
    simulate: bool
    measure: bool
    top: int | str


@click.command(
    cls=VerbCommand,
    examples=(
        "rooftop matmul 'A[I_X, J_Y] * B[J, K] -> C[I_X, K]'",
        "rooftop matmul 'bf16[B_X, D_Y] @ bf16[D_Y, F] -> bf16[B_X, F]' \\\n"
        "    --dims B=8192,D=8192,F=32768 --mesh X=4,Y=4 --on v5e:4x4",
        "rooftop matmul 'A[I_X, J] -> A[I, J_X]' --dims I=4096,J=4096 --mesh X=16 --on v5e:4x4",
        "rooftop matmul 'AllGather_Y(bf16[E_Y, F])' --dims E=2048,F=8192 --mesh X=8,Y=4 --on v5e:4x8",
        "rooftop matmul 'int8[I_XY, J]' --dims I=128,J=2048 --mesh X=2,Y=8,Z=2",
    ),
)
@click.argument("expression")
@on_option(help="CHIP:SHAPE[@SLICES], such as v5e:4x4; needed for times.")
@figure_option()
@option("--dims", metavar="SIZES", group=WORKLOAD, help="Sizes of the dims: B=8192,D=8192,F=32Ki.")
@option("--backward", is_flag=True, group=WORKLOAD, help="Price the backward program of the best strategy too.")
@mesh_option(help="Mesh axes and their sizes: X=4,Y=4. Without mesh, dims and slice: the case of the book.")
@layout_option()
@option("--no-overlap", is_flag=True, group=PARALLELISM, help="Leave collective matmuls out.")
@dtype_option(default="bf16", help="Dtype of arrays that are written with a name, as in A[I_X, J].")
@level_option(default="bound")
@option("--simulate", is_flag=True, group=ASSUMPTIONS, help="Simulate each collective link by link on the torus.")
@option("--unidirectional", is_flag=True, group=ASSUMPTIONS, help="With --simulate: rings that send one way only.")
@option("--compile", "compiled", is_flag=True, group=RUN, help="Compile with XLA:TPU for the slice, and compare.")
@option("--measure", is_flag=True, group=RUN, help="Run the listed strategies on the devices here, and time them.")
@top_option(default="8", help="Strategies to list, or all.")
@json_option
def command(
    *, no_overlap: bool, unidirectional: bool, compiled: bool, as_json: bool, **options: Unpack[_MatmulOptions]
) -> int:
    """Price the multiplying, resharding, gathering or summing of sharded arrays, and rank the ways to do it.

    EXPRESSION is 'A @ B -> C', 'A @ B' (the output follows), 'A -> B', a collective such as 'AllGather_X(A)', or 'A'
    alone. An array is written bf16[B_X, D_YZ]{U_W}: B split over X, D over Y then Z, unreduced over W; @host and
    @(0,0) say where it lies.
    """
    if unidirectional and not options["simulate"]:
        raise RooftopError("unidirectional", "no --simulate", "this with --simulate, whose rings it changes")
    from rooftop.library.arrays import matmul

    with progress_bar(shown=not as_json) as on_progress:
        result = matmul(
            **options,
            overlap=not no_overlap,
            bidirectional=not unidirectional,
            compile=compiled,
            on_progress=on_progress,
        )
    show(result.to_json(), as_json=as_json, kind="matmul")
    return 0
