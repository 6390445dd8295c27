"""The algebra of sharded arrays: steps, resharding, einsum strategies, derivatives, expressions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.algebra import steps
from rooftop.algebra.derivatives import backward, derivative, transposed
from rooftop.algebra.einsums import Einsum, cases, strategies
from rooftop.algebra.expression import Reshard, parse
from rooftop.algebra.pricing import Prices
from rooftop.algebra.resharding import Paths, reshard, shardings
from rooftop.algebra.steps import Step
from rooftop.arrays import Mesh, ShardedArray, parse_axes
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.roofline.routing import route
from tests.support.examples import examples

DIMS = {"I": 4096, "J": 8192, "K": 2048, "E": 64}


def prices(mesh: str, on: str, kind: str = "bound", dims: Mapping[str, int] = DIMS) -> Prices:
    return Prices(mesh=Mesh.lay(Slice.parse(on), parse_axes(mesh, None)), dims=dims, kind=kind)


def array(text: str) -> ShardedArray:
    return ShardedArray.parse(text, "bf16")


SMALL = prices("X=2,Y=4", "v5e:2x4")
CUBE = prices("X=4,Y=4,Z=4", "v5p:4x4x4")


def every(dims: tuple[str, ...], mesh: Mapping[str, int]) -> list[ShardedArray]:
    plain = ShardedArray(dtype="bf16", dims=dims, axes=((),) * len(dims))
    return [plain.with_axes(*split) for split in shardings(len(dims), mesh)]


# Steps


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (steps.all_gather(array("A[I_XY, J]"), [("Y", "I")]), "AllGather_Y(bf16[I_XY, J]) -> bf16[I_X, J]"),
        (
            steps.reduce_scatter(array("A[I, J]{U_X}"), [("X", "J")]),
            "ReduceScatter_{X,J}(bf16[I, J]{U_X}) -> bf16[I, J_X]",
        ),
        (steps.all_reduce(array("A[I_Y, J]{U_X}"), ["X"]), "AllReduce_X(bf16[I_Y, J]{U_X}) -> bf16[I_Y, J]"),
        (steps.all_to_all(array("A[I_X, J]"), ["X"], "I", "J"), "AllToAll_{X,J}(bf16[I_X, J]) -> bf16[I, J_X]"),
        (steps.permute(array("A[I_XY, J]"), array("A[I_YX, J]")), "Permute_{XY}(bf16[I_XY, J]) -> bf16[I_YX, J]"),
        (steps.pad(array("A[I_X, J]"), [("X", "I")]), "Pad_X(bf16[I_X, J]) -> bf16[I, J]{U_X}"),
        (
            steps.einsum(array("A[I_X, J_Y]"), array("B[J_Y, K]"), "IK", "bf16"),
            "bf16[I_X, J_Y] * bf16[J_Y, K] -> bf16[I_X, K]{U_Y}",
        ),
    ],
)
def test_a_step_reads_as_the_book_writes_it(step: Step, text: str) -> None:
    assert str(step) == text


def test_only_the_end_of_a_subscript_can_be_gathered() -> None:
    # Devices that differ in X hold rows far apart: no one of them would hold a run that I_Y names.
    with pytest.raises(RooftopError, match="the last axes of dim I"):
        steps.all_gather(array("A[I_XY, J]"), [("X", "I")])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("A[I_X, J]", "B[J, K_X]"),
        ("A[I, J_X]", "B[J, K]"),
        ("A[I, J]{U_X}", "B[J, K_X]"),
        ("A[I, J]{U_X}", "B[J, K]{U_X}"),
    ],
)
def test_shards_that_do_not_fit_are_not_multiplied(left: str, right: str) -> None:
    with pytest.raises(RooftopError):
        steps.einsum(array(left), array(right), "IK", "bf16")


def test_a_permutation_takes_every_shard_to_its_place() -> None:
    mesh = {"X": 2, "Y": 4, "Z": 2}
    for before, after in (("A[I_XZ, J_Y]", "A[I_Y, J_ZX]"), ("A[I_X, J]{U_Y}", "A[I_Z, J]{U_Y}")):
        step = steps.permute(array(before), array(after))
        pairs = steps.permutation(step, mesh)
        holds, wants = (steps.shard_numbers(array, mesh) for array in (step.inputs[0], step.output))
        assert sorted(pairs[:, 0]) == sorted(pairs[:, 1]) == list(range(16))
        assert (holds[pairs[:, 0]] == wants[pairs[:, 1]]).all()


@pytest.mark.parametrize("on", ["v5p:2x2x4", "v5e:4x4", "v5p:2x2x2@2"])
def test_permutes_that_share_a_price_take_as_long_as_each_of_them(on: str) -> None:
    laid = Mesh.lay(Slice.parse(on), {"X": 4, "Y": 2, "Z": 2})
    prices = Prices(mesh=laid, dims={"I": 64, "J": 64}, kind="bound")
    places = laid.device_coordinates().reshape(16, -1)
    alike = ("I_XYZ, J", "I_ZYX, J", "I_X, J_YZ", "I_YZ, J_X", "I, J_ZXY")
    for before, after in permutations(alike, 2):
        step = steps.permute(array(f"A[{before}]"), array(f"A[{after}]"))
        pairs = steps.permutation(step, laid.shape)
        own = route(laid.slice.physical_axes, places[pairs[:, 0]], places[pairs[:, 1]], prices.bytes(step.inputs[0]))
        cost = prices.cost(step)
        assert dict(cost.resources) == pytest.approx({name: busy for name, busy in own.seconds.items() if busy})
        assert cost.latency_s == own.latency_s


# Resharding


def single_steps(source: ShardedArray, mesh: Mapping[str, int], alike: list[ShardedArray]) -> Iterator[Step]:
    """Every single step from an array, found by trying all arguments; independent of the search."""
    names, dims = list(mesh), source.dims
    for count in range(1, len(names) + 1):
        for axes in permutations(names, count):
            tried = [lambda axes=axes: steps.all_reduce(source, axes), lambda axes=axes: steps.mask(source, axes)]
            for places in product(dims, repeat=count):
                pairs = list(zip(axes, places, strict=True))
                tried += [
                    lambda make=make, pairs=pairs: make(source, pairs)
                    for make in (steps.all_gather, steps.reduce_scatter, steps.slice_, steps.pad)
                ]
            tried += [
                lambda axes=axes, s=s, t=t: steps.all_to_all(source, axes, s, t) for s, t in permutations(dims, 2)
            ]
            for attempt in tried:
                try:
                    yield attempt()
                except RooftopError:
                    continue
    for target in alike:
        if source.local_shape(DIMS, mesh) == target.local_shape(DIMS, mesh) and len(source.unreduced) == len(
            target.unreduced
        ):
            yield steps.permute(source, target)


@pytest.mark.parametrize(("mesh", "on"), [("X=2,Y=4", "v5e:2x4"), ("X=2,Y=2", "v5e:2x2"), ("X=4,Y=4", "v5e:4x4")])
def test_paths_are_the_cheapest_that_there_are(mesh: str, on: str) -> None:
    """Against a relaxation of every edge, found by brute force, until nothing improves."""
    priced = prices(mesh, on)
    shape = priced.mesh.shape
    order = {name: place for place, name in enumerate(shape)}

    def node(array: ShardedArray) -> ShardedArray:
        return array.with_axes(array.axes, tuple(sorted(array.unreduced, key=order.__getitem__)))

    arrays = every(("I", "J"), shape)
    place = {array: index for index, array in enumerate(arrays)}
    best = np.full((len(arrays), len(arrays)), np.inf)
    np.fill_diagonal(best, 0.0)
    for array in arrays:
        for step in single_steps(array, shape, arrays):
            there = place[array], place[node(step.output)]
            best[there] = min(best[there], priced.cost(step).time_s)
    for via in range(len(arrays)):
        best = np.minimum(best, best[:, via, None] + best[None, via])
    for array in arrays:
        paths = Paths(array, priced)
        seconds = np.array([paths.seconds(other) for other in arrays])
        np.testing.assert_allclose(seconds, best[place[array]], rtol=1e-12)


@pytest.mark.parametrize("priced", [SMALL, CUBE], ids=["2x4", "4x4x4"])
@given(data=st.data())
@settings(max_examples=examples(20))
def test_the_price_of_a_path_is_that_of_its_transpose(priced: Prices, data: st.DataObject) -> None:
    """An AllGather costs what its transpose, a ReduceScatter, costs: so paths between dual shardings cost the same."""
    shape = priced.mesh.shape
    arrays = every(("I", "J"), shape)
    source, target = data.draw(st.sampled_from(arrays)), data.draw(st.sampled_from(arrays))

    def dual(array: ShardedArray) -> ShardedArray:
        used = {axis for split in array.axes for axis in split} | set(array.unreduced)
        return array.with_axes(array.axes, tuple(axis for axis in shape if axis not in used))

    there, back = Paths(source, priced).seconds(target), Paths(dual(target), priced).seconds(dual(source))
    assert there == pytest.approx(back, rel=1e-9)


@given(data=st.data())
@settings(max_examples=examples(30))
def test_a_path_leads_where_it_should_and_costs_what_it_says(data: st.DataObject) -> None:
    arrays = every(("I", "J"), SMALL.mesh.shape)
    source, target = data.draw(st.sampled_from(arrays)), data.draw(st.sampled_from(arrays))
    forwards, backwards = Paths(source, SMALL), Paths(target, SMALL, backwards=True)
    for path in (forwards.to(target), backwards.to(source)):
        at = source
        for step in path:
            assert step.inputs == (at,)
            at = step.output
        assert (at.axes, set(at.unreduced)) == (target.axes, set(target.unreduced))
        assert sum(SMALL.cost(step).time_s for step in path) == pytest.approx(forwards.seconds(target))
    assert backwards.seconds(source) == pytest.approx(forwards.seconds(target))


@pytest.mark.parametrize(
    ("source", "target", "mesh", "ops"),
    [
        ("A[I_X, J]", "A[I, J]", "X=4", ["all_gather"]),
        ("A[I_XY, J]", "A[I, J]", "X=2,Y=2", ["all_gather"]),
        ("A[I_X, J_Y]", "A[I, J]", "X=2,Y=2", ["all_gather"]),
        ("A[I, J]{U_X}", "A[I, J]", "X=4", ["all_reduce"]),
        ("A[I, J_Y]{U_X}", "A[I_X, J_Y]", "X=2,Y=2", ["reduce_scatter"]),
        ("A[I_XY, J]", "A[I_X, J_Y]", "X=2,Y=2", ["all_to_all"]),
        ("A[I, J]", "A[I_X, J]", "X=4", ["slice"]),
        ("A[I_XY, J]", "A[I_YX, J]", "X=2,Y=2", ["permute"]),
        ("A[I_X, J]", "A[I_X, J]", "X=4", []),
    ],
)
def test_plain_reshardings_are_one_step(source: str, target: str, mesh: str, ops: list[str]) -> None:
    # No axis is idle here, which could lend its links.
    assert [step.op for step in reshard(array(source), array(target), prices(mesh, "v5e:2x2"))] == ops


def test_an_unused_axis_lends_its_links() -> None:
    """I_X to I on 4 x 4 x 4: cut I over Z first, which is free, and gather over the links of both."""
    alone = CUBE.cost(steps.all_gather(array("A[I_X, J]"), [("X", "I")])).time_s
    path = reshard(array("A[I_X, J]"), array("A[I, J]"), CUBE)
    assert path[0].op == "slice"
    assert sum(CUBE.cost(step).time_s for step in path) < 0.6 * alone


def test_an_array_cannot_become_another() -> None:
    with pytest.raises(RooftopError, match="another sharding"):
        reshard(array("A[I_X, J]"), array("A[J, I_X]"), SMALL)
    with pytest.raises(RooftopError, match="multiple of 4"):
        reshard(array("A[3_Y, J]"), array("A[3, J]"), SMALL)


# Einsums


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", [1]),
        ("A[I, J_X] * B[J, K] -> C[I, K]", [2]),
        ("A[I, J_X] * B[J_X, K] -> C[I, K]", [3]),
        ("A[I_X, J] * B[J, K_X] -> C[I_X, K]", [4]),
        ("A[I, J_X] * B[J, K_X] -> C[I, K_X]", [2]),
        ("A[I_Y, J_X] * B[J_X, K_Y] -> C[I_Y, K]", [3, 4]),
        ("A[E_X, I, J] * B[E_X, J, K] -> C[E_X, I, K]", [1]),
    ],
)
def test_the_cases_of_the_book(text: str, numbers: list[int]) -> None:
    expression = parse(text, "bf16")
    assert isinstance(expression, Einsum)
    assert [case.number for case in cases(expression)] == numbers


def einsum(text: str) -> Einsum:
    expression = parse(text, "bf16")
    assert isinstance(expression, Einsum)
    return expression


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", "multiply"),
        ("A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K]", "multiply, then all_reduce [I_X, K]{U_Y} over Y"),
        ("A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K]{U_Y}", "multiply"),
        ("A[I_X, J]{U_Y} * B[J, K] -> C[I_X, K]{U_Y}", "multiply"),
        ("A[E_Y, I, J] * B[E_Y, J, K] -> C[E_Y, I, K]", "slice"),
    ],
)
def test_the_best_plain_strategy(text: str, rule: str) -> None:
    """The book's way is the best in each case, or is beaten only by using an axis that would be idle."""
    plain = strategies(einsum(text), SMALL, overlapped=False)
    assert rule in plain[0].rule or any(strategy.rule == rule for strategy in plain)
    assert [strategy.time_s for strategy in plain] == sorted(strategy.time_s for strategy in plain)


def test_either_operand_can_be_gathered_and_overlap_hides_it() -> None:
    wide = prices("Y=4", "v5e:2x2", dims=DIMS | {"K": 65536})
    by_rule = {strategy.rule: strategy for strategy in strategies(einsum("A[I_Y, J] * B[J, K_Y] -> C[I, K_Y]"), wide)}
    gathered = by_rule["all_gather [I_Y, J] over Y, then multiply"]
    hidden = by_rule["multiply while gathering [I_Y, J] over Y"]
    other = next(
        strategy for rule, strategy in by_rule.items() if rule.startswith("all_gather [J, K_Y] over Y, then multiply")
    )
    assert gathered.lower_s <= hidden.time_s < gathered.time_s < other.time_s
    assert gathered.time_s == pytest.approx(sum(cost.time_s for cost in gathered.costs))


@given(data=st.data())
@settings(max_examples=examples(25))
def test_every_strategy_starts_and_ends_as_asked(data: st.DataObject) -> None:
    shape = SMALL.mesh.shape
    left, right, out = (data.draw(st.sampled_from(every(dims, shape))) for dims in (("I", "J"), ("J", "K"), ("I", "K")))
    asked = Einsum(left=left, right=right, output=out)
    ways = strategies(asked, SMALL)
    assert ways
    for strategy in ways:
        multiplications = [step for step in strategy.steps if step.multiplies]
        assert len(multiplications) == 1
        last = strategy.steps[-1].output
        assert (last.axes, set(last.unreduced)) == (out.axes, set(out.unreduced))
        assert strategy.time_s >= strategy.lower_s * (1 - 1e-9)
        # No strategy does less work than an even share of it all.
        assert strategy.flops >= 2 * DIMS["I"] * DIMS["J"] * DIMS["K"] / 8
        for step in strategy.steps:
            if step.multiplies:
                assert step.parts[-1].output.axes == step.output.axes


@pytest.mark.parametrize(
    ("product", "output"),
    [
        ("A[I_X, J] * B[J, K_Y]", "bf16[I_X, K_Y]"),
        ("A[I, J_X] · B[J, K]", "bf16[I, K]"),
        ("A[I_Y, J_X] * B[J_X, K]", "bf16[I_Y, K]{U_X}"),
        ("A[I_X, J] * B[J, K_X]", "bf16[I_X, K]"),
        ("A[I, J]{U_X} * B[J, K_X]", "bf16[I, K]{U_X}"),
    ],
)
def test_an_output_that_is_left_out_is_the_one_of_the_book(product: str, output: str) -> None:
    """Cases 1 to 4 of chapter 3, and a factor that is unreduced."""
    einsum = parse(product, "bf16")
    assert isinstance(einsum, Einsum)
    assert str(einsum.output) == output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A[I, J] * B[J, K] -> C[I, L]", "dim L"),
        ("A[I, J] * B[K, L] -> C[I, L]", "dim J"),
        ("A[I] * B[I]", "expression"),
        ("A[I, J] * B[J, K] * C[K]", "expression"),
        ("A[I_X, J_X] * B[J, K] -> C[I, K]", "X is used 2 times"),
        ("bf15[I, J]", "bf16"),
    ],
)
def test_what_is_no_einsum_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(RooftopError, match=message) as refused:
        parse(text, None if text.startswith("bf15") else "bf16")
    assert "\n" not in str(refused.value)


# Derivatives


@pytest.mark.parametrize("array", every(("I", "J"), {"X": 2, "Y": 4})[:40])
def test_transposing_twice_gives_the_step_again(array: ShardedArray) -> None:
    for step in single_steps(array, {"X": 2, "Y": 4}, []):
        twice = transposed(transposed(step))
        assert twice.op == step.op
        assert (twice.axes, twice.dims) == (step.axes, step.dims)


def test_gathers_and_scatters_transpose_into_each_other() -> None:
    gather = steps.all_gather(array("A[I_X, J]"), [("X", "I")])
    assert str(transposed(gather)) == "ReduceScatter_{X,I}(bf16[I, J]{U_X}) -> bf16[I_X, J]"
    assert str(transposed(transposed(gather))) == str(gather)


def test_the_backward_program_of_the_book() -> None:
    """In[B_X, D] W[D_X, F]: the gathered weights' derivative comes back through a ReduceScatter."""
    asked = einsum("A[I_Y, J] * B[J_Y, K] -> C[I_Y, K]")
    priced = prices("Y=4", "v5e:2x2")
    forward = next(
        strategy
        for strategy in strategies(asked, priced)
        if strategy.rule == "all_gather [J_Y, K] over Y, then multiply"
    )
    program = backward(asked, forward, priced)
    assert [step.op for step in program.left.steps] == ["einsum"]
    assert [step.op for step in program.right.steps] == ["einsum", "reduce_scatter"]
    assert program.right.steps[-1].output == derivative(asked.right)
    hidden = next(
        strategy
        for strategy in strategies(asked, priced)
        if strategy.rule == "multiply while gathering [J_Y, K] over Y"
    )
    program = backward(asked, hidden, priced)
    assert [step.op for step in program.left.steps] == ["all_gather_einsum"]
    assert [step.op for step in program.right.steps] == ["einsum_reduce_scatter"]


# Expressions


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("AllGather_X(A[I_X, J])", "AllGather_X(bf16[I_X, J]) -> bf16[I, J]"),
        (r"\textbf{AllGather}_{XY}(A[I_{XY}, J]) \to A[I, J]", "AllGather_{XY}(bf16[I_XY, J]) -> bf16[I, J]"),
        ("ReduceScatter_{Y,J}(A[I_X, J]{U_Y})", "ReduceScatter_{Y,J}(bf16[I_X, J]{U_Y}) -> bf16[I_X, J_Y]"),
        (r"\textbf{AllReduce}_Y A[I_X, J] \{U_Y\}", "AllReduce_Y(bf16[I_X, J]{U_Y}) -> bf16[I_X, J]"),
        ("AllToAll_{X,J}(A[I_X, J]) -> A[I, J_X]", "AllToAll_{X,J}(bf16[I_X, J]) -> bf16[I, J_X]"),
    ],
)
def test_a_collective_reads_as_the_book_writes_it(text: str, written: str) -> None:
    assert str(parse(text, "bf16")) == written


def test_the_forms_of_an_expression() -> None:
    plain = parse("bf16[B_X, D_Y] @ bf16[D_Y, F] -> bf16[B_X, F]")
    assert isinstance(plain, Einsum)
    assert plain.contracted == ("D",)
    for text in (
        "A[B_X, D_Y] *_D W[D_Y, F] -> Out[B_X, F]",
        r"$\mathbf{A}[B_X, D_Y] \cdot \mathbf{B}[D_Y, F] \rightarrow \mathbf{C}[B_X, F]$",
        "A[B_X, D_Y] · W[D_Y, F] → Out[B_X, F]",
    ):
        assert parse(text, "bf16") == plain
    assert isinstance(parse("int8[I_X, J]@host -> int8[I, J]@(0,0)"), Reshard)
    assert isinstance(parse("int8[I_XY, J]"), ShardedArray)
