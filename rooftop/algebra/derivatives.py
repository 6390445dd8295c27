"""The backward program of a strategy, in the same steps.

The derivative of an array is sharded like the array. Where the array is whole over an axis, its derivative is too, but
it may be there as partial sums on the way: so an AllGather's derivative is a ReduceScatter, and the other way round
(chapter 3 of the book). Where the array is unreduced, every term gets the whole derivative, and nothing is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftop.algebra import steps
from rooftop.algebra.einsums import Einsum, Strategy, priced
from rooftop.algebra.pricing import Prices
from rooftop.algebra.resharding import TRANSPOSES, Paths
from rooftop.algebra.steps import Step
from rooftop.arrays import ShardedArray
from rooftop.core.errors import RooftopError


def derivative(array: ShardedArray) -> ShardedArray:
    """The derivative of a scalar by ``array``: split alike, and whole where the array is unreduced."""
    return array.with_axes(array.axes, ())


def transposed(step: Step) -> Step:
    """The step that takes the derivative of a collective's output to that of its input, unreduced where it was whole.

    Raises RooftopError for a multiplication, which has two derivatives: see ``backward``.
    """
    if step.multiplies:
        raise RooftopError("step", str(step), "a collective; a multiplication has a derivative for each operand")
    cotangent, target = (_dual(array, step.axes) for array in (step.output, step.inputs[0]))
    if step.op == "permute":
        return steps.permute(cotangent, target)
    dims = step.dims[::-1] if step.op == "all_to_all" else step.dims
    return steps.make(TRANSPOSES[step.op], cotangent, axes=step.axes, dims=dims)


def _dual(array: ShardedArray, axes: Sequence[str]) -> ShardedArray:
    """Of ``axes``, those that the array does not use become unreduced; what is unreduced becomes whole."""
    used = {axis for split in array.axes for axis in split} | set(array.unreduced)
    return array.with_axes(array.axes, tuple(axis for axis in axes if axis not in used))


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The programs for the derivatives of both operands, given that of the output.

    ``output`` brings the derivative of the output to where the product was made; ``left`` and ``right`` go on from
    there. Operands are used as they were multiplied: what the forward program gathered is kept, except that a
    collective matmul keeps its shard and gathers again, overlapped again.
    """

    output: Strategy
    left: Strategy
    right: Strategy


def backward(einsum: Einsum, strategy: Strategy, prices: Prices) -> Backward:
    """The backward program of a strategy of ``einsum``."""
    multiply = next(step for step in strategy.steps if step.multiplies)
    plain = next(step for step in multiply.parts if step.op == "einsum")
    output_gradient = derivative(einsum.output)
    # A gather of the derivative that belongs to an overlapped scatter stays with the multiplications.
    partial_gradient = derivative(multiply.output if multiply.op == "einsum_reduce_scatter" else plain.output)
    to_made = Paths(output_gradient, prices).to(partial_gradient)
    programs = []
    for side, array in enumerate((einsum.left, einsum.right)):
        product = _product(side, partial_gradient, multiply, plain)
        chosen = (product, *Paths(product.output, prices).to(derivative(array)))
        programs.append(priced(chosen, product.inputs, prices))
    return Backward(output=priced(to_made, (output_gradient,), prices), left=programs[0], right=programs[1])


def _product(side: int, partial_gradient: ShardedArray, multiply: Step, plain: Step) -> Step:
    """The multiplication of the output's derivative by the other operand: overlapped where the forward one was."""
    target = plain.inputs[side]
    factor = multiply.inputs[1 - side]
    inputs = (partial_gradient, factor) if side == 0 else (factor, partial_gradient)
    at = inputs.index(partial_gradient)
    if multiply.op == "einsum_reduce_scatter":
        return _gathering(inputs, at, multiply, target)
    if multiply.op == "all_gather_einsum" and side != multiply.operand:
        return _gathering(inputs, 1 - at, multiply, target)
    product = steps.einsum(*inputs, target.dims, target.dtype)
    if multiply.op == "all_gather_einsum" and set(multiply.axes) <= set(product.output.unreduced):
        scattered = steps.reduce_scatter(product.output, list(zip(multiply.axes, multiply.dims, strict=True))).output
        return Step(
            op="einsum_reduce_scatter",
            inputs=product.inputs,
            output=scattered,
            axes=multiply.axes,
            dims=multiply.dims,
            bidirectional=multiply.bidirectional,
        )
    return product


def _gathering(inputs: Sequence[ShardedArray], operand: int, multiply: Step, target: ShardedArray) -> Step:
    """An overlapped multiplication that gathers ``inputs[operand]`` along the axis and dim of ``multiply``."""
    gathered = list(inputs)
    gathered[operand] = steps.all_gather(inputs[operand], list(zip(multiply.axes, multiply.dims, strict=True))).output
    product = steps.einsum(gathered[0], gathered[1], target.dims, target.dtype)
    return Step(
        op="all_gather_einsum",
        inputs=tuple(inputs),
        output=product.output,
        axes=multiply.axes,
        dims=multiply.dims,
        operand=operand,
        bidirectional=multiply.bidirectional,
    )
