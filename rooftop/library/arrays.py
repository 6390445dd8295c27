"""Sharded arrays: costs of multiplying, resharding, gathering and summing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rooftop.algebra.einsums import Einsum, cases
from rooftop.algebra.expression import dims_of, parse
from rooftop.algebra.pricing import Prices
from rooftop.arrays import Mesh, ShardedArray
from rooftop.arrays.mesh import MeshLayout
from rooftop.core.errors import RooftopError, refuse, unknown
from rooftop.core.quantities import format_bytes, format_seconds, parse_count, parse_dtype
from rooftop.explain.compiled.checks import ExpressionRecord
from rooftop.explain.compiled.einsum import check
from rooftop.hardware import Slice
from rooftop.library.inputs import axes_of, chip_of, mesh_on, slice_of
from rooftop.library.results import Result, flat
from rooftop.present.documents import document
from rooftop.requests.function import of_request
from rooftop.requests.measuring import Matmul
from rooftop.runs.environment import prefer_cpus, uninterrupted
from rooftop.simulate.expressions import (
    ArrayFacts,
    PricedStrategy,
    ShardedExpression,
    parse_sizes,
    price_expression,
    simulate_strategies,
)

if TYPE_CHECKING:
    from rooftop.present.document import Document


@dataclass(frozen=True, kw_only=True, repr=False)
class MatmulResult(ExpressionRecord, Result):
    """Arrays of an expression and the strategies that do it, the fastest first, as many as were asked for."""

    @property
    def document(self) -> Document:
        """Arrays, strategies, and the steps of the best one."""
        return document(self, kind="matmul")

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


@of_request(Matmul)
def matmul(request: Matmul, on_progress: Callable[[int, int, str], None] | None = None) -> MatmulResult:
    """Price an einsum, a resharding or one collective of sharded arrays, and rank the strategies.

    A product alone, without mesh, dims and slice, is answered with its case of the book; without a slice there are
    shapes and bytes, no times. ``on_progress`` is called with measurements done, their number, and a label.

    Raises RooftopError naming the field that is wrong, and Infeasible for a measurement that does not fit.
    """
    expression, dims, mesh = request.expression, request.dims, request.mesh
    asked = parse(expression, parse_dtype(request.dtype)) if isinstance(expression, str) else expression
    sizes = parse_sizes(dims) if dims is None or isinstance(dims, str) else dict(dims)
    known = dims_of(asked)
    for name in sizes:
        if name not in known:
            raise unknown("dim", name, known)
    if not request.bidirectional and not request.simulate:
        raise RooftopError("unidirectional", "no --simulate", "this with --simulate, whose rings it changes")
    if mesh is None:
        return _case(request, asked, sizes)
    if request.on is None:
        if not isinstance(asked, ShardedArray):
            raise RooftopError("on", None, "a slice, such as v5e:4x4: without one there are no times")
        shape = mesh.shape if isinstance(mesh, Mesh) else axes_of(mesh)
        return MatmulResult(
            request=request.to_json(),
            expression=str(expression),
            kind="array",
            dims=sizes,
            mesh=MeshLayout(axes=shape, layout={}),
            arrays=(ArrayFacts.of(asked, sizes, shape),),
        )
    return _priced(request, asked, sizes, on_progress)


def _case(request: Matmul, asked: ShardedExpression, sizes: Mapping[str, int]) -> MatmulResult:
    """The case of the book of a product without mesh, dims and slice. Raises RooftopError."""
    if not isinstance(asked, Einsum) or sizes or request.on is not None:
        raise RooftopError("mesh", None, "mesh axes and their sizes, such as X=4,Y=4")
    names = ("layout", "figures", "backward", "simulate", "compile", "measure")
    options = {name.removesuffix("s"): getattr(request, name) for name in names}
    refuse(options, "this with --dims, --mesh and --on")
    alone = MeshLayout(axes={}, layout={})
    return MatmulResult(
        request=request.to_json(), expression=str(asked), kind="einsum", dims={}, mesh=alone, arrays=(),
        cases=cases(asked),
    )  # fmt: skip


def _priced(
    request: Matmul,
    asked: ShardedExpression,
    sizes: Mapping[str, int],
    on_progress: Callable[[int, int, str], None] | None,
) -> MatmulResult:
    """The strategies on a slice, the fastest first. Raises RooftopError."""
    expression, top = str(request.expression), request.top
    elsewhere = isinstance(asked, Einsum) and any(array.at for array in asked.arrays)
    where = slice_of(request.on or "")
    if request.figures:
        where = Slice(chip_of(where.chip, request.figures), where.shape, where.num_slices)
    prices = Prices(mesh=mesh_on(where, request.mesh, request.layout), dims=sizes, kind=request.level)
    answer = price_expression(asked, prices, overlapped=request.overlap, backward=request.backward)
    count = len(answer.strategies) if top == "all" else min(parse_count(top, "top"), len(answer.strategies))
    listed = answer.strategies[:count]
    if request.simulate:
        strategies = simulate_strategies(listed, prices, bidirectional=request.bidirectional)
    else:
        strategies = tuple(PricedStrategy.of(strategy, prices) for strategy in listed)
    result = MatmulResult(
        request=request.to_json(),
        expression=expression,
        kind=answer.kind,
        dims=sizes,
        mesh=prices.mesh.described,
        slice=where.name,
        level=request.level,
        arrays=answer.arrays,
        cases=answer.cases,
        strategies_found=len(answer.strategies),
        strategies=strategies,
        backward={name: PricedStrategy.of(strategy, prices) for name, strategy in answer.backward.items()},
    )
    for name in ("compile", "measure"):
        if getattr(request, name) and elsewhere:
            raise RooftopError(name, expression, "a product of arrays in the HBM of the mesh")
    if request.compile:
        result = replace(result, compiled=check(asked, prices))
    if request.measure:
        prefer_cpus()
        with uninterrupted():
            from rooftop.profile.microbench.strategies import measure as run_and_time

        measured = run_and_time(asked, prices, count, overlapped=request.overlap, on_progress=on_progress)
        result = replace(result, measured=measured)
    return result
