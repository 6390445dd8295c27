"""Every strategy of the algebra runs as it is written: on eight devices it gives what one device gives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooftop.algebra.derivatives import backward
from rooftop.algebra.einsums import Einsum, Strategy, strategies
from rooftop.algebra.expression import parse
from rooftop.algebra.pricing import Prices
from rooftop.algebra.resharding import Paths, shardings
from rooftop.algebra.steps import Step
from rooftop.arrays import Mesh, ShardedArray, parse_axes
from rooftop.hardware import Slice
from rooftop.programs.einsum.sharded import einsum_program, partition, path_program
from tests.support.examples import examples

SIZES = {"E": 8, "I": 64, "J": 64, "K": 64}
#: Strategies are chosen for arrays so large that bandwidth counts, and run on small ones.
SCALE = 128


@cache
def prices(mesh: str = "X=2,Y=4", on: str = "v5e:2x4") -> Prices:
    large = {dim: size * SCALE for dim, size in SIZES.items()}
    return Prices(mesh=Mesh.lay(Slice.parse(on), parse_axes(mesh, None)), dims=large)


@cache
def devices(**axes: int) -> jax.sharding.Mesh:
    shape = tuple(axes.values())
    local = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(local, tuple(axes))


MESH = {"X": 2, "Y": 4}


def whole(array: ShardedArray, seed: int) -> np.ndarray:
    """Small whole numbers: every order of adding them gives the same, in bf16 too."""
    return np.random.default_rng(seed).integers(-1, 2, array.shape(SIZES)).astype(np.float32)


def placed(array: ShardedArray, value: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """``value`` as the JAX array that holds ``array``; partial sums are made up that add to it."""
    stacked = tuple(mesh.shape[axis] for axis in mesh.axis_names if axis in array.unreduced)
    if stacked:
        terms = np.random.default_rng(9).integers(-1, 2, (math.prod(stacked), *value.shape)).astype(np.float32)
        terms[0] += value - terms.sum(0)
        value = terms.reshape(*stacked, *value.shape)
    return jax.device_put(jnp.asarray(value, "float32"), partition(array, mesh))


def summed(array: ShardedArray, value: jax.Array) -> np.ndarray:
    return np.asarray(value, np.float32).sum(tuple(range(len(array.unreduced))))


def expected(einsum: Einsum) -> np.ndarray:
    left, right, out = ("".join(array.dims) for array in (einsum.left, einsum.right, einsum.output))
    return np.einsum(f"{left},{right}->{out}", whole(einsum.left, 1), whole(einsum.right, 2))


def operands(einsum: Einsum, mesh: jax.sharding.Mesh) -> tuple[jax.Array, jax.Array]:
    return placed(einsum.left, whole(einsum.left, 1), mesh), placed(einsum.right, whole(einsum.right, 2), mesh)


def every(dims: str, *, unreduced: bool = False) -> list[ShardedArray]:
    plain = ShardedArray(dtype="f32", dims=tuple(dims), axes=((),) * len(dims))
    return [plain.with_axes(*split) for split in shardings(len(dims), MESH, unreduced=unreduced)]


@cache
def compiled(steps: tuple[Step, ...], *sources: ShardedArray) -> Callable[..., jax.Array]:
    """The program of a path or of one multiplication, compiled once for all the strategies that it is part of."""
    return jax.jit(path_program(steps, sources, devices(**MESH)))


def prepared(
    strategy: Strategy, einsum: Einsum, left: jax.Array, right: jax.Array
) -> tuple[int, tuple[jax.Array, jax.Array]]:
    """The index of the multiplication among the steps of a strategy, and both operands as it gets them."""
    place = next(index for index, step in enumerate(strategy.steps) if step.multiplies)
    before, split = strategy.steps[:place], 0
    array = einsum.left
    while array != strategy.steps[place].inputs[0]:
        array, split = before[split].output, split + 1
    return place, (compiled(before[:split], einsum.left)(left), compiled(before[split:], einsum.right)(right))


def run_in_parts(strategy: Strategy, einsum: Einsum, left: jax.Array, right: jax.Array) -> jax.Array:
    """A strategy part by part: what it shares with others has been compiled before."""
    place, both = prepared(strategy, einsum, left, right)
    multiply = strategy.steps[place]
    return compiled(strategy.steps[place + 1 :], multiply.output)(compiled((multiply,), *multiply.inputs)(*both))


def einsums(left: str, right: str, out: str) -> list[Einsum]:
    return [Einsum(left=a, right=b, output=c) for a, b, c in product(every(left), every(right), every(out))]


def check_best(asked: Sequence[Einsum]) -> None:
    mesh, known = devices(**MESH), prices()
    for einsum in asked:
        best = strategies(einsum, known)[0]
        product = run_in_parts(best, einsum, *operands(einsum, mesh))
        assert product.sharding.is_equivalent_to(partition(einsum.output, mesh), product.ndim), str(einsum)
        np.testing.assert_array_equal(summed(einsum.output, product), expected(einsum), err_msg=str(einsum))


def sample(asked: list[Einsum], count: int) -> list[Einsum]:
    return random.Random(0).sample(asked, count)


def test_best_strategies_equal_one_device() -> None:
    check_best(sample(einsums("IJ", "JK", "IK"), examples(40, quick=20)))


def test_best_strategies_with_a_batch_dim_equal_one_device() -> None:
    check_best(sample(einsums("EIJ", "EJK", "EIK"), examples(15, quick=8)))


@pytest.mark.slow
def test_every_sharding_of_a_matmul_equals_one_device() -> None:
    asked = einsums("IJ", "JK", "IK")
    assert len(asked) == 11**3
    check_best(asked)


@pytest.mark.slow
def test_every_sharding_of_a_batched_matmul_equals_one_device() -> None:
    asked = einsums("EIJ", "EJK", "EIK")
    assert len(asked) == 19**3
    check_best(asked)


def distinct(text: str) -> Iterator[tuple[Einsum, Strategy]]:
    asked = parse(text)
    assert isinstance(asked, Einsum)
    for strategy in strategies(asked, prices()):
        yield asked, strategy


@pytest.mark.parametrize(
    "text",
    [
        "f32[I_X, J_Y] @ f32[J_Y, K] -> f32[I_X, K]",
        "f32[I_Y, J] @ f32[J, K_Y] -> f32[I, K_Y]",
        "f32[I_X, J]{U_Y} @ f32[J, K_X] -> f32[I_X, K]",
        "f32[E_X, I_Y, J] @ f32[E_X, J, K] -> f32[E_X, I, K_Y]",
    ],
)
def test_all_strategies_of_an_einsum_equal_one_device(text: str) -> None:
    """Not the best alone: every one that is listed, as one program."""
    mesh, ops = devices(**MESH), set()
    for asked, strategy in list(distinct(text))[: examples(16, quick=8)]:
        ops |= {step.op for step in strategy.steps}
        product = jax.jit(einsum_program(strategy, asked, mesh))(*operands(asked, mesh))
        np.testing.assert_array_equal(summed(asked.output, product), expected(asked), err_msg=strategy.rule)
    assert len(ops) > 2


def test_every_resharding_keeps_the_array() -> None:
    mesh, arrays = devices(**MESH), every("IJ", unreduced=True)
    pairs = random.Random(1).sample(list(product(arrays, arrays)), 60)
    used = set()
    for source, target in pairs:
        steps = Paths(source, prices()).to(target)
        used |= {step.op for step in steps}
        value = whole(source, 3)
        result = jax.jit(path_program(steps, (source,), mesh))(placed(source, value, mesh))
        np.testing.assert_array_equal(summed(target, result), value, err_msg=f"{source} -> {target}")
    assert used >= {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice", "permute"}


@pytest.mark.parametrize("step", ["pad", "mask"])
def test_what_is_free_keeps_the_array(step: str) -> None:
    mesh = devices(**MESH)
    for source, target in (("f32[I_X, J]", "f32[I, J]{U_X}"), ("f32[I, J_Y]", "f32[I, J_Y]{U_X}")):
        array, target_array = ShardedArray.parse(source), ShardedArray.parse(target)
        steps = Paths(array, prices()).to(target_array)
        result = path_program(steps, (array,), mesh)(placed(array, whole(array, 4), mesh))
        np.testing.assert_array_equal(summed(target_array, result), whole(array, 4))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("f32[I_X, J_Y] @ f32[J_Y, K] -> f32[I_X, K]", marks=pytest.mark.slow),
        pytest.param("f32[I_X, J_Y] @ f32[J, K_Y] -> f32[I_X, K_Y]", marks=pytest.mark.slow),
        pytest.param("f32[I_Y, J] @ f32[J_Y, K_X] -> f32[I_Y, K_X]", marks=pytest.mark.slow),
        "f32[I_X, J_Y] @ f32[J_Y, K] -> f32[I_X, K_Y]",
        pytest.param("f32[I_Y, J] @ f32[J, K_Y] -> f32[I, K_Y]", marks=pytest.mark.slow),
        "f32[I_X, J]{U_Y} @ f32[J, K_X] -> f32[I_X, K]",
        pytest.param("f32[I_X, J_Y] @ f32[J_Y, K] -> f32[I_X, K]{U_Y}", marks=pytest.mark.slow),
        "f32[E_X, I_Y, J] @ f32[E_X, J, K] -> f32[E_X, I, K_Y]",
    ],
)
def test_backward_programs_give_the_gradients(text: str) -> None:
    mesh = devices(**MESH)
    pairs = list(distinct(text))
    chosen = pairs[:4] + [pair for pair in pairs[4:] if "while" in pair[1].rule][:3]
    for asked, strategy in chosen:
        programs = backward(asked, strategy, prices())
        output = replace(asked.output, unreduced=())
        weight = whole(output, 5)
        _, (left, right) = prepared(strategy, asked, *operands(asked, mesh))
        derivative = compiled(programs.output.steps, output)(placed(output, weight, mesh))
        of_left, of_right, out = ("".join(array.dims) for array in (asked.left, asked.right, asked.output))
        # A partial sum has the derivative of the sum.
        for array, program, factors, gradient_expected in (
            (
                asked.left, programs.left, (derivative, right),
                np.einsum(f"{out},{of_right}->{of_left}", weight, whole(asked.right, 2)),
            ),
            (
                asked.right, programs.right, (left, derivative),
                np.einsum(f"{of_left},{out}->{of_right}", whole(asked.left, 1), weight),
            ),
        ):  # fmt: skip
            gradient = compiled(program.steps, *program.steps[0].inputs)(*factors)
            assert program.steps[-1].output == replace(array, unreduced=())
            np.testing.assert_array_equal(np.asarray(gradient), gradient_expected, err_msg=f"{array}: {strategy.rule}")
