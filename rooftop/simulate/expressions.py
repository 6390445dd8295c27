"""Answers about expressions over sharded arrays: shapes, priced strategies, and simulated collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rooftop.algebra import derivatives
from rooftop.algebra.einsums import Einsum, Strategy, cases, priced, strategies
from rooftop.algebra.expression import Reshard
from rooftop.algebra.pricing import Prices
from rooftop.algebra.resharding import reshard
from rooftop.algebra.steps import Step
from rooftop.arrays import ShardedArray
from rooftop.arrays.tiles import default_layout
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import parse_count
from rooftop.simulate.network.collectives import simulate
from rooftop.simulate.network.placement import move
from rooftop.simulate.systolic import SystolicArray


def price_expression(
    asked: Any, prices: Prices, *, overlapped: bool, backward: bool
) -> tuple[dict[str, Any], tuple[Strategy, ...]]:
    """Return the facts of an expression (kind, arrays, cases) and its priced strategies, the fastest first."""
    sizes, shape = prices.dims, prices.mesh.shape
    arrays: tuple[ShardedArray, ...]
    ways: tuple[Strategy, ...]
    data: dict[str, Any]
    if isinstance(asked, Einsum):
        ways = strategies(asked, prices, overlapped=overlapped)
        arrays = asked.left, asked.right, asked.output
        data = {"kind": "einsum", "cases": [case.to_json() for case in cases(asked)]}
        if backward:
            data["backward"] = derivatives.backward(asked, ways[0], prices).to_json()
    elif isinstance(asked, Reshard):
        arrays = asked.source, asked.target
        if asked.source.at or asked.target.at:
            ways = (move(asked.source, asked.target, prices),)
        else:
            ways = (priced(reshard(asked.source, asked.target, prices), arrays[:1], prices),)
        data = {"kind": "reshard"}
    elif isinstance(asked, Step):
        arrays = asked.inputs[0], asked.output
        ways = (priced((asked,), asked.inputs, prices),)
        data = {"kind": "collective"}
        if backward:
            transposed = derivatives.transposed(asked)
            data["backward"] = priced((transposed,), transposed.inputs, prices).to_json()
    else:
        arrays, ways, data = (asked,), (), {"kind": "array"}
    return data | {"arrays": [array_facts(array, sizes, shape) for array in arrays]}, ways


def array_facts(array: Any, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, Any]:
    """Shapes and bytes of one array."""
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


def simulate_strategies(
    listed: list[dict[str, Any]], ways: Sequence[Strategy], prices: Prices, *, bidirectional: bool
) -> None:
    """Add ``simulated_s`` to the collectives, link by link, and ``mxu_utilisation`` to the multiplications."""
    known: dict[tuple[Any, ...], float] = {}
    try:
        array = SystolicArray.of(prices.mesh.slice.chip)
    except RooftopError:  # a chip whose arrays are not known to be so many
        array = None
    for data, strategy in zip(listed, ways, strict=False):
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
    sizes: dict[str, int] = {}
    for entry in (text or "").split(",") if text else ():
        name, equals, size = (part.strip() for part in entry.partition("="))
        if not equals or not name:
            raise RooftopError("dims", entry, "NAME=SIZE, such as B=8192 or F=32Ki")
        if name in sizes:
            raise RooftopError("dims", text, f"each dim once; {name} is given twice")
        sizes[name] = parse_count(size, f"dim {name}")
    return sizes
