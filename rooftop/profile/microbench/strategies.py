"""Strategies of the algebra on the local devices: checked against one device, then timed."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh as DeviceMesh

from rooftop.algebra.einsums import Einsum, Strategy, priced, strategies
from rooftop.algebra.expression import Reshard
from rooftop.algebra.pricing import Prices
from rooftop.algebra.resharding import reshard
from rooftop.arrays import ShardedArray
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import format_count
from rooftop.profile.microbench.timing import (
    Progress,
    compile_program,
    device_mesh,
    empty_call,
    normal,
    provenance,
    time_program,
)
from rooftop.programs.einsum.sharded import abstract, einsum_program, path_program
from rooftop.simulate.expressions import MeasuredStrategies, ShardedExpression, StrategyTiming

#: Limit on the elements of operands and result, partial sums included, for which one device checks the result.
CHECKED_ELEMENTS = 1e8
#: Limit on multiply-adds of one ``measure`` on emulated devices: minutes at the 5e10 per second of two CPU cores.
EMULATED_MULTIPLY_ADDS = 1e13
#: Minimum number of timed runs of a strategy.
_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class _TimedStrategy:
    """A requested computation, and its strategies, each with its program."""

    inputs: tuple[ShardedArray, ...]
    output: ShardedArray
    programs: tuple[tuple[Strategy, Callable[..., jax.Array]], ...]

    @property
    def einsum(self) -> str:
        """The computation in NumPy's notation, one letter for each dim: 'ab,bc->ac', 'ab->ab'."""
        dims = dict.fromkeys(dim for array in self.inputs for dim in array.dims)
        letters = dict(zip(dims, string.ascii_letters, strict=False))
        terms = ["".join(letters[dim] for dim in array.dims) for array in (*self.inputs, self.output)]
        return f"{','.join(terms[:-1])}->{terms[-1]}"

    def sizes(self, dims: Mapping[str, int]) -> dict[str, int]:
        """The size of each dim."""
        return {dim: size for array in self.inputs for dim, size in zip(array.dims, array.shape(dims), strict=True)}


def measure(
    expression: ShardedExpression,
    prices: Prices,
    count: int,
    *,
    overlapped: bool = True,
    on_progress: Progress | None = None,
    least_s: float = 0.2,
) -> MeasuredStrategies:
    """Run and time the ``count`` best strategies of an einsum, or the only way of a resharding or a collective.

    Up to ``CHECKED_ELEMENTS`` each result is first compared with that of one device.

    Raises RooftopError for a computation that cannot run here because of its mesh, the memory of its arrays, or its
    size on a CPU, and Infeasible for a program that does not fit or whose result is wrong.
    """
    mesh = device_mesh(prices.mesh.shape)
    used = list(mesh.devices.flat)
    work = _work(expression, prices, count, mesh, overlapped=overlapped)
    if used[0].platform == "cpu":
        _require_patience(work, prices)
    report = on_progress or (lambda done, total, what: None)
    arrays = [abstract(array, dict(prices.dims), mesh) for array in work.inputs]
    compiled = []
    for done, (strategy, program) in enumerate(work.programs):
        report(done, 2 * len(work.programs), f"compile: {strategy.rule}")
        compiled.append(compile_program(program, *arrays, what=strategy.rule, advice="give smaller --dims"))

    elements = sum(array.size for array in (*arrays, abstract(work.output, dict(prices.dims), mesh)))
    checked = elements <= CHECKED_ELEMENTS
    if checked:
        small = _sparse(work, arrays, prices)
        expected = _on_one_device(work, small)
    operands = [normal(array, seed) for seed, array in enumerate(arrays)]
    measured: list[StrategyTiming] = []
    for done, ((strategy, _), program) in enumerate(zip(work.programs, compiled, strict=True)):
        report(len(compiled) + done, 2 * len(compiled), f"run: {strategy.rule}")
        if checked:
            _require_equal(_whole(program(*small), work.output), expected, strategy.rule)
        timing = time_program(program, *operands, least_s=least_s, least_runs=_RUNS)
        measured.append(
            StrategyTiming(
                rule=strategy.rule,
                median_s=timing.median_s,
                fastest_s=timing.fastest_s,
                runs=timing.runs,
                planned_s=strategy.time_s,
                checked=checked,
            )
        )
    return MeasuredStrategies(
        **vars(provenance(used)), empty_call_s=empty_call(mesh).median_s, strategies=tuple(measured)
    )


def _work(
    expression: ShardedExpression,
    prices: Prices,
    count: int,
    mesh: DeviceMesh,
    *,
    overlapped: bool,
) -> _TimedStrategy:
    if isinstance(expression, Einsum):
        best = strategies(expression, prices, overlapped=overlapped)[:count]
        programs = tuple((strategy, einsum_program(strategy, expression, mesh)) for strategy in best)
        return _TimedStrategy(inputs=(expression.left, expression.right), output=expression.output, programs=programs)
    if isinstance(expression, ShardedArray):
        raise RooftopError("measure", str(expression), "something to run: 'A @ B -> C', 'A -> B' or a collective")
    if isinstance(expression, Reshard):
        source, target = expression.source, expression.target
    else:
        source, target = expression.inputs[0], expression.output
    if source.at or target.at:
        raise RooftopError("measure", f"{source} -> {target}", "arrays in the HBM of the mesh")
    path = reshard(source, target, prices) if isinstance(expression, Reshard) else (expression,)
    strategy = priced(path, (source,), prices)
    return _TimedStrategy(inputs=(source,), output=target, programs=((strategy, path_program(path, (source,), mesh)),))


def _require_patience(work: _TimedStrategy, prices: Prices) -> None:
    """Raise RooftopError if the multiply-adds would take a CPU very long."""
    devices = math.prod(prices.mesh.shape.values())
    once = sum(strategy.flops / 2 * devices for strategy, _ in work.programs)
    # One run to check, one to warm up, and the timed ones.
    total = once * (_RUNS + 2)
    if total <= EMULATED_MULTIPLY_ADDS:
        return
    sizes = work.sizes(prices.dims)
    smaller = dict(sizes)
    while total > EMULATED_MULTIPLY_ADDS and max(smaller.values()) > 1:
        longest = max(smaller, key=lambda dim: smaller[dim])
        smaller[longest] //= 2
        total /= 2
    accepted = (
        f"less than these {format_count(once)} multiply-adds (one run of {len(work.programs)} strategies) on devices "
        f"that a CPU emulates: try --dims {_text(smaller)}, or a smaller --top"
    )
    raise RooftopError("dims", _text(sizes), accepted)


def _text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{dim}={size}" for dim, size in sizes.items())


def _sparse(work: _TimedStrategy, arrays: Sequence[jax.ShapeDtypeStruct], prices: Prices) -> list[jax.Array]:
    """Operands of -1, 0 and 1, so sparse that the mean result is a sum of half a product.

    Results are then whole numbers, exact in any order of addition and in every dtype: even those with three significant
    bits (8 at most) fail with a probability of only 1e-11 each.
    """
    sizes = work.sizes(prices.dims)
    summed = math.prod(size for dim, size in sizes.items() if dim not in work.output.dims)
    partial_sums = math.prod(array.partial_sums(prices.mesh.shape) for array in work.inputs)
    density = min(1.0, 0.5 / (summed * partial_sums)) ** (1 / len(arrays))
    operands = []
    for seed, array in enumerate(arrays):
        uniform = np.random.default_rng(seed).random(array.shape, np.float32)
        value = np.where(uniform < density, np.where(uniform < density / 2, -1, 1), 0)
        operands.append(jax.device_put(value.astype(array.dtype), array.sharding))
    return operands


def _on_one_device(work: _TimedStrategy, operands: Sequence[jax.Array]) -> npt.NDArray[np.float32]:
    """The unsharded result for ``operands``, in float32."""
    here = jax.local_devices()[0]
    factors = [_whole(value, array) for value, array in zip(operands, work.inputs, strict=True)]
    return np.asarray(jnp.einsum(work.einsum, *(jax.device_put(factor, here) for factor in factors)))


def _whole(value: jax.Array, array: ShardedArray) -> npt.NDArray[np.float32]:
    """The array that ``value`` represents, partial sums added."""
    terms = np.asarray(value).astype(np.float32)
    return np.asarray(terms.sum(tuple(range(len(array.unreduced)))))


def _require_equal(result: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], rule: str) -> None:
    wrong = int(np.count_nonzero(result != expected))
    if wrong:
        worst = float(np.max(np.abs(result - expected)))
        by = f"{wrong} of {expected.size} numbers differ from those of one device, by up to {worst:g}"
        raise Infeasible(f"wrong result of '{rule}'", by)
