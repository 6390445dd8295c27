"""``rooftop matmul``: what an einsum, a resharding or one collective of sharded arrays costs, and how best to do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from rooftop.cli.output import emit_json, json_option, progress_bar, show


@click.command()
@click.argument("expression")
@click.option("--dims", metavar="SIZES", help="Sizes of the dims: B=8192,D=8192,F=32Ki.")
@click.option("--mesh", metavar="AXES", required=True, help="Mesh axes and their sizes: X=4,Y=4.")
@click.option("--on", "slice_", metavar="SLICE", help="CHIP:SHAPE[@SLICES], such as v5e:4x4; needed for times.")
@click.option("--layout", metavar="LAYOUT", help="Pin the axes to the torus: X=x,Y=y[1:2]+z.")
@click.option("--dtype", metavar="DTYPE", help="Dtype of arrays that are written with a name, as in A[I_X, J].")
@click.option(
    "--price", default="bound", show_default=True, help="bound (peak rates), expected (named fractions) or book."
)
@click.option("--figure", "figures", multiple=True, metavar="NAME=VALUE", help="Override a figure of the chip.")
@click.option("--top", default="8", show_default=True, metavar="N", help="Strategies to list, or all.")
@click.option("--no-overlap", is_flag=True, help="Leave collective matmuls out.")
@click.option("--backward", is_flag=True, help="Also the backward program of the best strategy.")
@click.option("--simulate", is_flag=True, help="Also simulate each collective link by link on the torus.")
@click.option("--unidirectional", is_flag=True, help="With --simulate: rings that send one way only.")
@click.option("--check", is_flag=True, help="Compile it with XLA:TPU for the slice and compare the collectives.")
@click.option("--measure", is_flag=True, help="Run the listed strategies on the devices that are here, and time them.")
@json_option
def command(as_json: bool, **options: Any) -> int:
    r"""What sharded arrays cost to multiply, to reshard, to gather or to sum, and the best way to do it.

    EXPRESSION is 'A @ B -> C', 'A -> B', a collective such as 'AllGather_X(A)', or 'A' alone. An array is written
    bf16[B_X, D_YZ]{U_W}: B split over X, D over Y then Z, unreduced over W; @host and @(0,0) say where it lies.

    \b
    Examples: rooftop matmul 'bf16[B_X, D_Y] @ bf16[D_Y, F] -> bf16[B_X, F]' \
                  --dims B=8192,D=8192,F=32768 --mesh X=4,Y=4 --on v5e:4x4
              rooftop matmul 'bf16[I_X, J] -> bf16[I, J_X]' --dims I=4096,J=4096 --mesh X=16 --on v5e:4x4
              rooftop matmul 'AllGather_Y(bf16[E_Y, F])' --dims E=2048,F=8192 --mesh X=8,Y=4 --on v5e:4x8
              rooftop matmul 'int8[I_XY, J]' --dims I=128,J=2048 --mesh X=2,Y=8,Z=2
    """
    with progress_bar(shown=not as_json) as on_progress:
        data = _answer(**options, on_progress=on_progress)
    if as_json:
        emit_json(data)
    else:
        show(data, kind="matmul")
    return 0


def _answer(
    *,
    expression: str,
    dims: str | None,
    mesh: str,
    slice_: str | None,
    layout: str | None,
    dtype: str | None,
    price: str,
    figures: tuple[str, ...],
    top: str,
    no_overlap: bool,
    backward: bool,
    simulate: bool,
    unidirectional: bool,
    check: bool,
    measure: bool,
    on_progress: Callable[[int, int, str], None] | None,
) -> dict[str, Any]:
    """The answer as JSON values. Raises RooftopError naming the option that is wrong."""
    from rooftop.algebra.expression import parse
    from rooftop.algebra.pricing import Prices
    from rooftop.arrays import Mesh, ShardedArray, parse_axes
    from rooftop.core.errors import RooftopError
    from rooftop.core.quantities import parse_count
    from rooftop.hardware import Slice
    from rooftop.simulate.expressions import array_facts, parse_sizes, price_expression, simulate_strategies

    asked = parse(expression, dtype)
    sizes, shape = parse_sizes(dims), parse_axes(mesh, None)
    data: dict[str, Any] = {"expression": expression, "dims": sizes, "mesh": {"axes": shape}}
    if slice_ is None:
        if not isinstance(asked, ShardedArray):
            raise RooftopError("on", slice_, "a slice, such as v5e:4x4: without one there are no times")
        return data | {"kind": "array", "arrays": [array_facts(asked, sizes, shape)]}
    where = Slice.parse(slice_)
    if figures:
        where = Slice(where.chip.replace(**_figures(figures)), where.shape, where.num_slices)
    laid = Mesh.lay(where, shape) if layout is None else Mesh.from_layout(where, layout)
    if laid.shape != shape:
        raise RooftopError("layout", layout, f"a layout of the mesh {mesh}; this one is of {laid.shape}")
    prices = Prices(mesh=laid, dims=sizes, kind=price)
    data |= {"slice": where.name, "mesh": laid.to_json(), "price": price}
    facts, found = price_expression(asked, prices, overlapped=not no_overlap, backward=backward)
    count = len(found) if top == "all" else parse_count(top, "top")
    usable = where.device_hbm_usable_bytes
    data |= facts | {
        "strategies_found": len(found),
        "strategies": [each.to_json() | {"fits": each.memory_bytes <= usable} for each in found[:count]],
    }
    if simulate:
        simulate_strategies(data["strategies"], found, prices, bidirectional=not unidirectional)
    if check:
        from rooftop.explain.compiled.einsum import check as compile_and_compare

        data |= compile_and_compare(asked, prices)
    if measure:
        from rooftop.cli.process import prefer_cpus, uninterrupted

        prefer_cpus()
        with uninterrupted():
            from rooftop.profile.microbench.strategies import measure as run_and_time

        data |= run_and_time(asked, prices, count, overlapped=not no_overlap, on_progress=on_progress)
    return data


def _figures(entries: tuple[str, ...]) -> dict[str, Any]:
    """Figures from 'NAME=VALUE'; the FLOPs of a dtype are 'flops_per_s.bf16=2e14'."""
    from rooftop.core.errors import RooftopError
    from rooftop.core.quantities import parse_quantity

    found: dict[str, Any] = {}
    for entry in entries:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals:
            raise RooftopError("figure", entry, "NAME=VALUE, such as ici_bytes_per_s=4.5e10")
        number = parse_quantity(value, f"figure {name}")
        if name.startswith("flops_per_s."):
            found.setdefault("flops_per_s", {})[name.removeprefix("flops_per_s.")] = number
        else:
            found[name] = number
    return found
