"""``rooftop matmul``: what an einsum, a resharding or one collective of sharded arrays costs, and how best to do it."""

from __future__ import annotations

import click

from rooftop.cli.options import VerbCommand, json_option, request_options
from rooftop.cli.output import progress_bar, show
from rooftop.requests.measuring import Matmul


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
@request_options(Matmul)
@json_option
def command(*, request: Matmul, as_json: bool) -> int:
    """Price the multiplying, resharding, gathering or summing of sharded arrays, and rank the ways to do it.

    EXPRESSION is 'A @ B -> C', 'A @ B' (the output follows), 'A -> B', a collective such as 'AllGather_X(A)', or 'A'
    alone. An array is written bf16[B_X, D_YZ]{U_W}: B split over X, D over Y then Z, unreduced over W; @host and
    @(0,0) say where it lies.
    """
    from rooftop.library.arrays import matmul

    with progress_bar(shown=not as_json) as on_progress:
        result = matmul(request, on_progress=on_progress)
    show(result, as_json=as_json, kind="matmul")
    return 0
