"""Sharded arrays: costs of multiplying, resharding, gathering and summing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rooftop.algebra.einsums import Einsum, Strategy
from rooftop.algebra.expression import Reshard, parse
from rooftop.algebra.pricing import Prices
from rooftop.algebra.steps import Step
from rooftop.arrays import Mesh, ShardedArray
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_bytes, format_seconds, parse_count, parse_dtype
from rooftop.hardware import Slice
from rooftop.library.inputs import AxesLike, CountLike, SliceLike, axes_of, chip_of, mesh_on, slice_of
from rooftop.library.results import Result, flat
from rooftop.simulate.expressions import ArrayFacts, parse_sizes, price_expression, simulate_strategies


@dataclass(frozen=True, kw_only=True, repr=False)
class MatmulResult(Result):
    """Arrays of an expression and the priced strategies that do it, the fastest first.

    ``data`` is the JSON object, with ``strategies`` as far as they were asked for.
    """

    document_kind = "matmul"

    data: Mapping[str, object]
    arrays: tuple[Mapping[str, object], ...]
    strategies: tuple[Strategy, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Arrays, cases, strategies with their steps, and comparisons that were asked for."""
        return dict(self.data)

    @property
    def rows(self) -> list[dict[str, object]]:
        """A strategy a row; an array alone is the only row."""
        strategies = [flat(strategy.to_json()) for strategy in self.strategies]
        return strategies or [flat(array) for array in self.arrays]

    @property
    def summary(self) -> str:
        """The best strategy, or the bytes of an array."""
        if not self.strategies:
            array = self.arrays[0]
            return f"{array['array']}: {format_bytes(float(str(array['device_bytes'])))} a device"
        best = self.strategies[0]
        rule = best.to_json()["rule"]
        if not best.steps:
            return f"{self.data['expression']}: nothing to do"
        return f"{self.data['expression']}: {format_seconds(best.time_s)}, {best.bound} binds\n{rule}"


def matmul(
    expression: str | Einsum | Reshard | Step | ShardedArray,
    *,
    mesh: AxesLike | Mesh,
    dims: Mapping[str, int] | str | None = None,
    on: SliceLike | None = None,
    layout: str | None = None,
    dtype: str = "bf16",
    level: str = "bound",
    figures: Mapping[str, float | str] | None = None,
    top: CountLike | Literal["all"] = 8,
    overlap: bool = True,
    backward: bool = False,
    simulate: bool = False,
    bidirectional: bool = True,
    compile: bool = False,
    measure: bool = False,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> MatmulResult:
    """Price an einsum, a resharding or one collective of sharded arrays, and rank the strategies.

    Args:
        expression: 'A @ B -> C', 'A -> B', 'AllGather_X(A)' or 'A'; an array is 'bf16[B_X, D_YZ]{U_W}'.
        mesh: Mesh axes and their sizes, 'X=4,Y=4', or a Mesh with its layout.
        dims: Sizes of the dims, 'B=8192,F=32Ki'.
        on: The slice; without one there are shapes and bytes, no times.
        layout: Axes pinned to the torus, 'X=x,Y=y[1:2]+z'.
        dtype: Dtype of arrays written with a name, as in 'A[I_X, J]'.
        level: 'bound' (peak rates), 'expected' (achievable rates) or 'book'.
        figures: Figures of the chip to override, {'ici_bytes_per_s': 4.5e10}.
        top: Strategies in the JSON, or 'all'.
        overlap: Include collective matmuls.
        backward: Price the backward program of the best strategy too.
        simulate: Simulate each collective link by link on the torus.
        bidirectional: Let simulated rings send both ways.
        compile: Compile with XLA:TPU for the slice and compare the collectives.
        measure: Run the listed strategies on the devices here, and time them.
        on_progress: Callback (done, total, label) of measurements.

    Raises RooftopError naming the argument that is wrong, and Infeasible for a measurement that does not fit.
    """
    asked = parse(expression, parse_dtype(dtype)) if isinstance(expression, str) else expression
    sizes = parse_sizes(dims) if dims is None or isinstance(dims, str) else dict(dims)
    shape = mesh.shape if isinstance(mesh, Mesh) else axes_of(mesh)
    data: dict[str, object] = {"expression": str(expression), "dims": sizes, "mesh": {"axes": shape}}
    if on is None:
        if not isinstance(asked, ShardedArray):
            raise RooftopError("on", None, "a slice, such as v5e:4x4: without one there are no times")
        array = ArrayFacts.of(asked, sizes, shape).to_json()
        return MatmulResult(data=data | {"kind": "array", "arrays": [array]}, arrays=(array,))
    where = slice_of(on)
    if figures:
        where = Slice(chip_of(where.chip, figures), where.shape, where.num_slices)
    laid = mesh_on(where, mesh, layout)
    prices = Prices(mesh=laid, dims=sizes, kind=level)
    facts, strategies = price_expression(asked, prices, overlapped=overlap, backward=backward)
    count = len(strategies) if top == "all" else min(parse_count(top, "top"), len(strategies))
    listed = [
        strategy.to_json() | {"fits": strategy.memory_bytes <= where.device_hbm_usable_bytes}
        for strategy in strategies[:count]
    ]
    if simulate:
        simulate_strategies(listed, strategies, prices, bidirectional=bidirectional)
    data |= {"slice": where.name, "mesh": laid.to_json(), "price": level} | facts
    data |= {"strategies_found": len(strategies), "strategies": listed}
    if compile:
        from rooftop.explain.compiled.einsum import check

        data |= check(asked, prices)
    if measure:
        from rooftop.runs.environment import prefer_cpus, uninterrupted

        prefer_cpus()
        with uninterrupted():
            from rooftop.profile.microbench.strategies import measure as run_and_time

        measured = run_and_time(asked, prices, count, overlapped=overlap, on_progress=on_progress)
        data["measured"] = measured.to_json()
    return MatmulResult(data=data, arrays=tuple(facts["arrays"]), strategies=strategies)
