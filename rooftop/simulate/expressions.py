"""Answers about expressions over sharded arrays: shapes, priced strategies, and simulated collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from rooftop.core.records import Record
from rooftop.simulate.network.collectives import simulate
from rooftop.simulate.network.placement import move
from rooftop.simulate.systolic import SystolicArray


@dataclass(frozen=True, kw_only=True)
class ArrayFacts(Record):
    """Shapes and bytes of an array: on one device, on all of them, and of one copy."""

    array: str
    unicode: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    device_bytes: float
    total_bytes: float
    copy_bytes: float
    replication: int
    tpu_layout: str
    tpu_padded_bytes: int

    @classmethod
    def of(cls, array: ShardedArray, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> ArrayFacts:
        """The facts of an array with dims of some ``sizes`` on a mesh."""
        local = array.local_shape(sizes, mesh)
        layout = default_layout(array.dtype, local)
        return cls(
            array=str(array),
            unicode=array.to_text("unicode"),
            shape=array.shape(sizes),
            local_shape=local,
            device_bytes=array.device_bytes(sizes, mesh),
            total_bytes=array.total_bytes(sizes, mesh),
            copy_bytes=array.one_copy_bytes(sizes),
            replication=array.replication(mesh),
            tpu_layout=str(layout),
            tpu_padded_bytes=layout.nbytes,
        )


#: A matmul, a resharding, a collective, or an array alone.
ShardedExpression = Einsum | Reshard | Step | ShardedArray


def price_expression(
    expression: ShardedExpression, prices: Prices, *, overlapped: bool, backward: bool
) -> tuple[dict[str, Any], tuple[Strategy, ...]]:
    """Return the facts of an expression (kind, arrays, cases) and its priced strategies, the fastest first."""
    arrays: tuple[ShardedArray, ...]
    ways: tuple[Strategy, ...]
    data: dict[str, Any]
    if isinstance(expression, Einsum):
        ways = strategies(expression, prices, overlapped=overlapped)
        arrays = expression.left, expression.right, expression.output
        data = {"kind": "einsum", "cases": [case.to_json() for case in cases(expression)]}
        if backward:
            data["backward"] = derivatives.backward(expression, ways[0], prices).to_json()
    elif isinstance(expression, Reshard):
        arrays = expression.source, expression.target
        if expression.source.at or expression.target.at:
            ways = (move(expression.source, expression.target, prices),)
        else:
            ways = (priced(reshard(expression.source, expression.target, prices), arrays[:1], prices),)
        data = {"kind": "reshard"}
    elif isinstance(expression, Step):
        arrays = expression.inputs[0], expression.output
        ways = (priced((expression,), expression.inputs, prices),)
        data = {"kind": "collective"}
        if backward:
            transposed = derivatives.transposed(expression)
            data["backward"] = priced((transposed,), transposed.inputs, prices).to_json()
    else:
        arrays, ways, data = (expression,), (), {"kind": "array"}
    facts = [ArrayFacts.of(array, prices.dims, prices.mesh.shape).to_json() for array in arrays]
    return data | {"arrays": facts}, ways


def simulate_strategies(
    listed: list[dict[str, Any]], ways: Sequence[Strategy], prices: Prices, *, bidirectional: bool
) -> None:
    """Add ``simulated_s`` to the collectives, link by link, and ``mxu_utilisation`` to the multiplications."""
    known: dict[tuple[Any, ...], float] = {}
    try:
        array = SystolicArray.of(prices.mesh.slice.chip)
    except RooftopError:  # the number of the chip's arrays is unknown
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
