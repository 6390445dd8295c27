"""``rooftop matmul``: what an einsum, a resharding or one collective of sharded arrays costs, and how best to do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.output import emit_json, json_option, progress_bar

if TYPE_CHECKING:
    from rooftop.algebra.einsums import Strategy
    from rooftop.algebra.pricing import Prices


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
        from rooftop.cli.matmul.tables import show

        show(data)
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

    asked = parse(expression, dtype)
    sizes, shape = parse_sizes(dims), parse_axes(mesh, None)
    data: dict[str, Any] = {"expression": expression, "dims": sizes, "mesh": {"axes": shape}}
    if slice_ is None:
        if not isinstance(asked, ShardedArray):
            raise RooftopError("on", slice_, "a slice, such as v5e:4x4: without one there are no times")
        return data | {"kind": "array", "arrays": [_array(asked, sizes, shape)]}
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
        _simulate(data["strategies"], found, prices, bidirectional=not unidirectional)
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


def price_expression(
    asked: Any, prices: Prices, *, overlapped: bool, backward: bool
) -> tuple[dict[str, Any], tuple[Strategy, ...]]:
    """What is said about an expression, its arrays first, and its strategies."""
    from rooftop.algebra import derivatives
    from rooftop.algebra.einsums import Einsum, cases, priced, strategies
    from rooftop.algebra.expression import Reshard
    from rooftop.algebra.resharding import reshard
    from rooftop.algebra.steps import Step
    from rooftop.arrays import ShardedArray

    sizes, shape = prices.dims, prices.mesh.shape
    arrays: tuple[ShardedArray, ...]
    found: tuple[Strategy, ...]
    data: dict[str, Any]
    if isinstance(asked, Einsum):
        found = strategies(asked, prices, overlapped=overlapped)
        arrays = asked.left, asked.right, asked.output
        data = {"kind": "einsum", "cases": [case.to_json() for case in cases(asked)]}
        if backward:
            data["backward"] = derivatives.backward(asked, found[0], prices).to_json()
    elif isinstance(asked, Reshard):
        arrays = asked.source, asked.target
        if asked.source.at or asked.target.at:
            from rooftop.simulate.network.placement import move

            found = (move(asked.source, asked.target, prices),)
        else:
            found = (priced(reshard(asked.source, asked.target, prices), arrays[:1], prices),)
        data = {"kind": "reshard"}
    elif isinstance(asked, Step):
        arrays = asked.inputs[0], asked.output
        found = (priced((asked,), asked.inputs, prices),)
        data = {"kind": "collective"}
        if backward:
            transposed = derivatives.transposed(asked)
            data["backward"] = priced((transposed,), transposed.inputs, prices).to_json()
    else:
        arrays, found, data = (asked,), (), {"kind": "array"}
    return data | {"arrays": [_array(array, sizes, shape) for array in arrays]}, found


def _array(array: Any, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, Any]:
    """Shapes and bytes of one array."""
    from rooftop.arrays.tiles import default_layout

    local = array.local_shape(sizes, mesh)
    layout = default_layout(array.dtype, local)
    return {
        "array": str(array),
        "unicode": array.to_text("unicode"),
        "shape": list(array.shape(sizes)),
        "local_shape": list(local),
        "device_bytes": array.device_bytes(sizes, mesh),
        "total_bytes": array.total_bytes(sizes, mesh),
        "copy_bytes": array.one_copy_bytes(sizes),
        "replication": array.replication(mesh),
        "tpu_layout": str(layout),
        "tpu_padded_bytes": layout.nbytes,
    }


def _simulate(listed: list[dict[str, Any]], found: Sequence[Strategy], prices: Prices, *, bidirectional: bool) -> None:
    """Add ``simulated_s`` to the collectives, link by link, and ``mxu_utilisation`` to the multiplications."""
    from rooftop.core.errors import RooftopError
    from rooftop.simulate.network.collectives import simulate
    from rooftop.simulate.systolic import SystolicArray

    known: dict[tuple[Any, ...], float] = {}
    try:
        array = SystolicArray.of(prices.mesh.slice.chip)
    except RooftopError:  # a chip whose arrays are not known to be so many
        array = None
    for data, strategy in zip(listed, found, strict=False):
        for entry, step, cost in zip(data["steps"], strategy.steps, strategy.costs, strict=True):
            if step.op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
                key = step.op, step.axes, cost.bytes
                if key not in known:
                    run = simulate(step.op, prices.mesh.span(*step.axes), cost.bytes, bidirectional=bidirectional)
                    known[key] = run.seconds
                entry["simulated_s"] = known[key]
            elif step.op == "einsum" and array is not None:
                _, m, k, n = prices.matmul_sizes(step)
                entry["mxu_utilisation"] = float(array.cycles(m, k, n).utilisation)


def parse_sizes(text: str | None) -> dict[str, int]:
    """Sizes of dims from 'B=8192,D=32Ki'."""
    from rooftop.core.errors import RooftopError
    from rooftop.core.quantities import parse_count

    sizes: dict[str, int] = {}
    for entry in (text or "").split(",") if text else ():
        name, equals, size = (part.strip() for part in entry.partition("="))
        if not equals or not name:
            raise RooftopError("dims", entry, "NAME=SIZE, such as B=8192 or F=32Ki")
        if name in sizes:
            raise RooftopError("dims", text, f"each dim once; {name} is given twice")
        sizes[name] = parse_count(size, f"dim {name}")
    return sizes


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
