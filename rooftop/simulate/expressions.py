"""Expressions over sharded arrays: shapes, priced strategies, and simulated collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rooftop.algebra import derivatives
from rooftop.algebra.einsums import Case, Einsum, Strategy, cases, priced, strategies
from rooftop.algebra.expression import Reshard
from rooftop.algebra.pricing import Cost, Prices
from rooftop.algebra.resharding import reshard
from rooftop.algebra.steps import Step
from rooftop.arrays import ShardedArray
from rooftop.arrays.tiles import default_layout
from rooftop.core.amounts import Amount, Share
from rooftop.core.errors import RooftopError
from rooftop.core.measurements import Provenance, TimedRecord
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


#: The kinds of expressions, in the order of ``ShardedExpression``.
ExpressionKind = Literal["einsum", "reshard", "collective", "array"]


@dataclass(frozen=True, kw_only=True)
class PricedStep(Record):
    """One step of a strategy: its arrays, and its cost on one device as in ``algebra.pricing.Cost``.

    ``bidirectional``: the shards of a collective matmul travel both ways round. ``simulated_s`` is the time of a
    collective link by link, ``mxu_utilisation`` that of the matrix unit in a multiplication; None where not simulated.
    """

    op: str
    axes: tuple[str, ...]
    dims: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    bidirectional: bool
    bytes: Amount
    flops: Amount
    hbm_bytes: Amount
    resources: Mapping[str, Amount]
    latency_s: Amount
    time_s: Amount
    bound: str
    simulated_s: Amount | None = None
    mxu_utilisation: Share | None = None

    @classmethod
    def of(cls, step: Step, cost: Cost) -> PricedStep:
        """The record of a step with its cost."""
        return cls(
            op=step.op,
            axes=step.axes,
            dims=step.dims,
            inputs=tuple(map(str, step.inputs)),
            output=str(step.output),
            bidirectional=step.bidirectional,
            bytes=cost.bytes,
            flops=cost.flops,
            hbm_bytes=cost.hbm_bytes,
            resources=cost.resources,
            latency_s=cost.latency_s,
            time_s=cost.time_s,
            bound=cost.bound,
        )


@dataclass(frozen=True, kw_only=True)
class PricedStrategy(Record):
    """A strategy in words and as steps, with the seconds, bytes and FLOPs of one device.

    ``lower_s`` are the seconds of the busiest resource, and ``time_s`` too if it is ``streamed``. ``fits``:
    ``memory_bytes`` are no more than a device has.
    """

    rule: str
    time_s: Amount
    lower_s: Amount
    bound: str
    resources: Mapping[str, Amount]
    flops: Amount
    memory_bytes: Amount
    fits: bool
    streamed: bool
    steps: tuple[PricedStep, ...]

    @classmethod
    def of(cls, strategy: Strategy, prices: Prices) -> PricedStrategy:
        """The record of a strategy that was priced with ``prices``."""
        return cls(
            rule=strategy.rule,
            time_s=strategy.time_s,
            lower_s=strategy.lower_s,
            bound=strategy.bound,
            resources=strategy.resources,
            flops=strategy.flops,
            memory_bytes=strategy.memory_bytes,
            fits=strategy.memory_bytes <= prices.mesh.slice.device_hbm_usable_bytes,
            streamed=strategy.streamed,
            steps=tuple(map(PricedStep.of, strategy.steps, strategy.costs)),
        )


@dataclass(frozen=True, kw_only=True)
class StrategyTiming(TimedRecord):
    """A strategy by its ``rule``: measured here, and ``planned_s`` for the slice.

    ``checked``: its result was first compared with that of one device.
    """

    rule: str
    planned_s: Amount
    checked: bool


@dataclass(frozen=True, kw_only=True)
class MeasuredStrategies(Provenance):
    """Strategies timed on the devices here, and the seconds of an empty call."""

    empty_call_s: Amount
    strategies: tuple[StrategyTiming, ...]


@dataclass(frozen=True, kw_only=True)
class PricedExpression:
    """An expression: its arrays, the book's cases of an einsum, and its strategies, the fastest first.

    ``backward`` are the programs of the derivatives, by the array that is differentiated: of an einsum the output,
    then the left and the right operand, of a collective its input.
    """

    kind: ExpressionKind
    arrays: tuple[ArrayFacts, ...]
    cases: tuple[Case, ...] = ()
    strategies: tuple[Strategy, ...] = ()
    backward: Mapping[str, Strategy] = field(default_factory=dict)


def price_expression(
    expression: ShardedExpression, prices: Prices, *, overlapped: bool, backward: bool
) -> PricedExpression:
    """Price every strategy of an expression, and the ``backward`` program of the fastest."""

    def facts(*arrays: ShardedArray) -> tuple[ArrayFacts, ...]:
        return tuple(ArrayFacts.of(array, prices.dims, prices.mesh.shape) for array in arrays)

    if isinstance(expression, Einsum) and any(array.at for array in expression.arrays):
        if backward:
            accepted = "operands and an output in HBM: gradients of arrays elsewhere have no program"
            raise RooftopError("backward", str(expression), accepted)
        return PricedExpression(
            kind="einsum",
            arrays=facts(*expression.arrays),
            cases=cases(expression),
            strategies=tuple(_moved(expression, prices, overlapped=overlapped)),
        )
    if isinstance(expression, Einsum):
        ways = strategies(expression, prices, overlapped=overlapped)
        return PricedExpression(
            kind="einsum",
            arrays=facts(expression.left, expression.right, expression.output),
            cases=cases(expression),
            strategies=ways,
            backward=vars(derivatives.backward(expression, ways[0], prices)) if backward else {},
        )
    if isinstance(expression, Reshard):
        source, target = expression.source, expression.target
        if source.at or target.at:
            way = move(source, target, prices)
        else:
            way = priced(reshard(source, target, prices), (source,), prices)
        return PricedExpression(kind="reshard", arrays=facts(source, target), strategies=(way,))
    if isinstance(expression, Step):
        gradients: dict[str, Strategy] = {}
        if backward:
            transposed = derivatives.transposed(expression)
            gradients["input"] = priced((transposed,), transposed.inputs, prices)
        return PricedExpression(
            kind="collective",
            arrays=facts(expression.inputs[0], expression.output),
            strategies=(priced((expression,), expression.inputs, prices),),
            backward=gradients,
        )
    return PricedExpression(kind="array", arrays=facts(expression))


def _moved(einsum: Einsum, prices: Prices, *, overlapped: bool) -> Iterator[Strategy]:
    """Strategies of a product whose operands or output lie elsewhere, fastest first.

    Operands are copied to the HBM of the mesh, in the sharding that they have, before the first step, and the output is
    copied to its place after the last.
    """
    left, right, output = (replace(array, at="") for array in einsum.arrays)
    copies = [move(array, near, prices) for array, near in ((einsum.left, left), (einsum.right, right)) if array.at]
    stored = [move(output, einsum.output, prices)] if einsum.output.at else []
    for way in strategies(replace(einsum, left=left, right=right, output=output), prices, overlapped=overlapped):
        parts = (*copies, way, *stored)
        yield Strategy(
            steps=tuple(step for part in parts for step in part.steps),
            costs=tuple(cost for part in parts for cost in part.costs),
            memory_bytes=max(part.memory_bytes for part in parts),
            # The bound of a program that streams them is the longest part.
            streamed=prices.kind == "bound" and all(array.at in ("", "host") for array in einsum.arrays),
        )


def simulate_strategies(ways: Sequence[Strategy], prices: Prices, *, bidirectional: bool) -> tuple[PricedStrategy, ...]:
    """Strategies with ``simulated_s`` of collectives, link by link, and ``mxu_utilisation`` of multiplications."""
    known: dict[tuple[str, tuple[str, ...], float], float] = {}
    try:
        array = SystolicArray.of(prices.mesh.slice.chip)
    except RooftopError:  # the number of the chip's arrays is unknown
        array = None

    def simulated(step: Step, cost: Cost) -> PricedStep:
        record = PricedStep.of(step, cost)
        if step.op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            key = step.op, step.axes, cost.bytes
            if key not in known:
                run = simulate(step.op, prices.mesh.span(*step.axes), cost.bytes, bidirectional=bidirectional)
                known[key] = run.seconds
            return replace(record, simulated_s=known[key])
        if step.op == "einsum" and array is not None:
            _, m, k, n = prices.matmul_sizes(step)
            return replace(record, mxu_utilisation=float(array.cycles(m, k, n).utilisation))
        return record

    return tuple(
        replace(PricedStrategy.of(way, prices), steps=tuple(map(simulated, way.steps, way.costs))) for way in ways
    )


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
