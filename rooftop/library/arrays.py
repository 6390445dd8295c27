"""Sharded arrays: costs of multiplying, resharding, gathering and summing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rooftop.algebra.einsums import Case, Einsum, Strategy, cases
from rooftop.algebra.expression import dims_of, parse
from rooftop.algebra.pricing import Prices
from rooftop.arrays import Mesh, ShardedArray
from rooftop.arrays.mesh import MeshLayout
from rooftop.core.amounts import Count
from rooftop.core.errors import RooftopError, refuse, unknown
from rooftop.core.quantities import format_bytes, format_seconds, parse_count, parse_dtype
from rooftop.core.records import Record
from rooftop.explain.compiled.checks import EinsumCheck
from rooftop.explain.compiled.einsum import check
from rooftop.hardware import Slice
from rooftop.library.inputs import axes_of, chip_of, mesh_on, slice_of
from rooftop.library.results import Result, flat
from rooftop.requests.likes import AxesLike, CountLike, SliceLike
from rooftop.runs.environment import prefer_cpus, uninterrupted
from rooftop.simulate.expressions import (
    ArrayFacts,
    ExpressionKind,
    MeasuredStrategies,
    PricedStrategy,
    ShardedExpression,
    parse_sizes,
    price_expression,
    simulate_strategies,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class MatmulResult(Record, Result):
    """Arrays of an expression and the strategies that do it, the fastest first, as many as were asked for.

    ``level`` is the kind of the prices; without a ``slice`` there are neither prices nor a layout of the ``mesh``, and
    of a product without a mesh only its ``cases``.
    ``strategies_found`` counts all strategies. ``backward`` has the programs of the derivatives: of an einsum that of
    the output, then of the left and the right operand, of a collective that of its input.
    """

    document_kind = "matmul"

    expression: str
    kind: ExpressionKind
    dims: Mapping[str, int]
    mesh: MeshLayout
    slice: str | None = None
    level: str | None = None
    arrays: tuple[ArrayFacts, ...]
    cases: tuple[Case, ...] = ()
    strategies_found: Count = 0
    strategies: tuple[PricedStrategy, ...] = ()
    backward: Mapping[str, PricedStrategy] = field(default_factory=dict)
    compiled: EinsumCheck | None = None
    measured: MeasuredStrategies | None = None

    @property
    def rows(self) -> list[dict[str, object]]:
        """A strategy a row; an array alone is the only row."""
        return [flat(row.to_json()) for row in self.strategies or self.arrays]

    @property
    def summary(self) -> str:
        """The best strategy, or the bytes of an array."""
        if not self.arrays:
            return "\n".join((self.expression, *(case.rule for case in self.cases)))
        if not self.strategies:
            array = self.arrays[0]
            return f"{array.array}: {format_bytes(array.device_bytes)} a device"
        best = self.strategies[0]
        if not best.steps:
            return f"{self.expression}: nothing to do"
        return f"{self.expression}: {format_seconds(best.time_s)}, {best.bound} binds\n{best.rule}"


def matmul(
    expression: str | ShardedExpression,
    *,
    mesh: AxesLike | Mesh | None = None,
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
        expression: 'A @ B -> C', 'A @ B', 'A -> B', 'AllGather_X(A)' or 'A'; an array is 'bf16[B_X, D_YZ]{U_W}'.
        mesh: Mesh axes and their sizes, 'X=4,Y=4', or a Mesh with its layout. A product alone, without mesh, dims and
            slice, is answered with its case of the book.
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
    known = dims_of(asked)
    for name in sizes:
        if name not in known:
            raise unknown("dim", name, known)
    if mesh is None:
        if not isinstance(asked, Einsum) or sizes or on is not None:
            raise RooftopError("mesh", None, "mesh axes and their sizes, such as X=4,Y=4")
        options = {"layout": layout, "figure": figures, "backward": backward, "simulate": simulate}
        refuse(options | {"compile": compile, "measure": measure}, "this with --dims, --mesh and --on")
        alone = MeshLayout(axes={}, layout={})
        return MatmulResult(expression=str(asked), kind="einsum", dims={}, mesh=alone, arrays=(), cases=cases(asked))
    if on is None:
        if not isinstance(asked, ShardedArray):
            raise RooftopError("on", None, "a slice, such as v5e:4x4: without one there are no times")
        shape = mesh.shape if isinstance(mesh, Mesh) else axes_of(mesh)
        return MatmulResult(
            expression=str(expression),
            kind="array",
            dims=sizes,
            mesh=MeshLayout(axes=shape, layout={}),
            arrays=(ArrayFacts.of(asked, sizes, shape),),
        )
    where = slice_of(on)
    if figures:
        where = Slice(chip_of(where.chip, figures), where.shape, where.num_slices)
    laid = mesh_on(where, mesh, layout)
    prices = Prices(mesh=laid, dims=sizes, kind=level)
    answer = price_expression(asked, prices, overlapped=overlap, backward=backward)
    count = len(answer.strategies) if top == "all" else min(parse_count(top, "top"), len(answer.strategies))
    listed = answer.strategies[:count]

    def record(strategy: Strategy) -> PricedStrategy:
        return PricedStrategy.of(strategy, prices)

    result = MatmulResult(
        expression=str(expression),
        kind=answer.kind,
        dims=sizes,
        mesh=laid.described,
        slice=where.name,
        level=level,
        arrays=answer.arrays,
        cases=answer.cases,
        strategies_found=len(answer.strategies),
        strategies=(
            simulate_strategies(listed, prices, bidirectional=bidirectional) if simulate else tuple(map(record, listed))
        ),
        backward={name: record(strategy) for name, strategy in answer.backward.items()},
    )
    elsewhere = isinstance(asked, Einsum) and any(array.at for array in asked.arrays)
    for name, is_set in (("compile", compile), ("measure", measure)):
        if is_set and elsewhere:
            raise RooftopError(name, str(expression), "a product of arrays in the HBM of the mesh")
    if compile:
        result = replace(result, compiled=check(asked, prices))
    if measure:
        prefer_cpus()
        with uninterrupted():
            from rooftop.profile.microbench.strategies import measure as run_and_time

        measured = run_and_time(asked, prices, count, overlapped=overlap, on_progress=on_progress)
        result = replace(result, measured=measured)
    return result
