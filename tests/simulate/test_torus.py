"""Collectives on the links of a torus against their closed forms, and what must hold for any messages."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rooftop.arrays import AxisPiece, AxisSpan, Mesh, span
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import COLLECTIVES
from rooftop.hardware import PhysicalAxis, Slice
from rooftop.roofline.collectives import price
from rooftop.roofline.routing import route
from rooftop.simulate.network.collectives import gather, permute, send, simulate
from rooftop.simulate.network.torus import LinkTransfer, NetworkRun, Torus, run
from tests.support.examples import examples

LINK, HOP_S = 4.5e10, 1e-6
LARGE, TINY = 1e12, 1e-6


def group(
    sizes: tuple[int, ...],
    wrapped: tuple[bool, ...],
    strides: tuple[int, ...] | None = None,
    lengths: tuple[int, ...] | None = None,
) -> AxisSpan:
    """Every ``stride``-th of ``size`` chips per axis, on an axis of ``length`` (all of it unless told)."""
    strides = strides or (1,) * len(sizes)
    physical = tuple(
        PhysicalAxis(
            name="xyz"[axis],
            size=lengths[axis] if lengths else sizes[axis] * strides[axis],
            kind="torus",
            wrapped=wrapped[axis],
            bytes_per_s=LINK,
            hop_s=HOP_S,
            resource="ici",
        )
        for axis in range(len(sizes))
    )
    return span(physical, np.array(sizes), np.array(strides))


def torus(sizes: tuple[int, ...], wrapped: tuple[bool, ...]) -> Torus:
    return Torus(sizes=sizes, wrapped=wrapped, bytes_per_s=LINK, hop_s=HOP_S)


def check(kind: str, g: AxisSpan, chunks: int | None = None) -> None:
    """Within 2 % above the bandwidth bound for large payloads, and its very number of hops for tiny ones."""
    priced = price(kind, g)
    bound_s = float(priced.bound_s(LARGE)["ici"])
    assert bound_s * (1 - 1e-9) <= simulate(kind, g, LARGE, chunks=chunks).seconds <= 1.02 * bound_s
    hops = round(float(priced.latency_s["ici"]) / HOP_S)
    tiny = simulate(kind, g, TINY, chunks=1)
    assert tiny.hops == hops
    assert tiny.seconds == pytest.approx(hops * HOP_S, rel=1e-6)


def arriving(shape: Torus, result: NetworkRun) -> np.ndarray:
    """Bytes into every chip."""
    into = np.zeros(shape.chips)
    for axis, direction, chip in product(range(len(shape.sizes)), range(2), range(shape.chips)):
        if result.link_bytes[axis, direction, chip]:
            into[shape.neighbours[axis][direction][chip]] += result.link_bytes[axis, direction, chip]
    return into


# ---- the simulation itself ------------------------------------------------------------------------------------------


def test_a_message_pays_for_its_hops() -> None:
    line = torus((4,), (False,))
    transfers = [LinkTransfer(line.link(0, 0, chip), LINK, (chip - 1,) if chip else (), 3 - chip) for chip in range(3)]
    # Flowing on, its bytes take a second once; stored whole at each chip, once per hop.
    assert run(line, transfers).seconds == pytest.approx(1 + 3 * HOP_S)
    stored = run(line, transfers, cut_through=False)
    assert stored.seconds == pytest.approx(3 + 3 * HOP_S)
    assert stored.hops == 3
    assert stored.left_s == pytest.approx([0, 1 + HOP_S, 2 + 2 * HOP_S])
    assert stored.busy_s[0, 0] == pytest.approx([1, 1, 1, 0])


def test_a_link_carries_one_message_at_a_time_by_rank_and_arrival() -> None:
    pair = torus((2,), (False,))
    link = pair.link(0, 0, 0)
    result = run(
        pair, [LinkTransfer(link, LINK, (), 1), LinkTransfer(link, LINK, (), 2), LinkTransfer(link, LINK, (), 1)]
    )
    assert result.left_s == pytest.approx([1, 0, 2])
    assert result.seconds == pytest.approx(3 + HOP_S)
    assert result.hops == 1


@pytest.mark.parametrize("cut_through", [True, False])
def test_a_sum_waits_for_the_last_of_its_parts(cut_through: bool) -> None:
    line = torus((4,), (False,))
    ahead, short, long = line.link(0, 0, 2), line.link(0, 0, 1), line.link(0, 1, 3)
    # Chip 2 adds what comes from both sides; the longer message leaves second, since its link is busy until then.
    transfers = [
        LinkTransfer(long, 2 * LINK, (), 9),
        LinkTransfer(long, 2 * LINK, (), 1),
        LinkTransfer(short, LINK, (), 1),
        LinkTransfer(ahead, LINK, (1, 2), 1),
    ]
    expected = 2 + HOP_S if cut_through else 4 + HOP_S
    assert run(line, transfers, cut_through=cut_through).left_s[3] == pytest.approx(expected)


def test_links_lead_to_neighbours_and_back() -> None:
    grid = torus((3, 2), (True, False))
    assert grid.neighbours[0][0] == [2, 3, 4, 5, 0, 1]
    assert grid.neighbours[1] == ([1, -1, 3, -1, 5, -1], [-1, 0, -1, 2, -1, 4])
    assert grid.opposite(grid.link(0, 0, 4)) == grid.link(0, 1, 0)
    assert grid.coordinates(grid.chip((2, 1))) == (2, 1)


def test_a_torus_is_taken_from_a_slice() -> None:
    assert Torus.of(Slice.parse("v5e:8x16@2").physical_axes) == torus((8, 16), (False, True))
    with pytest.raises(RooftopError, match="one TPU slice"):
        Torus.of(Slice.parse("h100:8x4").physical_axes)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: torus((4, 0), (True, True)), "torus"),
        (lambda: torus((4,), (True,)).chip((4,)), "coordinates inside 4"),
        (lambda: torus((4,), (True,)).coordinates(-1), "0 to 3"),
        (lambda: simulate("all_gathr", group((4,), (True,)), 1.0), "all_gather"),
        (lambda: simulate("all_gather", group((4,), (True,)), 1.0, chunks=0), "chunks"),
        (lambda: simulate("all_gather", group((4,), (True,)), np.ones(3)), "nbytes"),
        (lambda: simulate("all_to_all", group((4,), (True,)), -1.0), "nbytes"),
    ],
)
def test_wrong_input_is_named(call, names) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RooftopError, match=names):
        call()


def test_groups_over_dcn_are_refused() -> None:
    mesh = Mesh(
        Slice.parse("v5e:4x4@2"),
        {"data": (AxisPiece("dcn", 1, 2), AxisPiece("x", 1, 4)), "fsdp": (AxisPiece("y", 1, 4),)},
    )
    with pytest.raises(RooftopError, match="within one torus"):
        simulate("all_gather", mesh.span("data"), 1e6)


# ---- against the closed forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_rings_and_lines_of_every_size(kind: str, wrapped: bool) -> None:
    for size in range(2, 33):
        check(kind, group((size,), (wrapped,)), chunks=1)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize(
    ("sizes", "wrapped"),
    [
        ((4, 4), "ww"),
        ((4, 4), "oo"),
        ((4, 4), "wo"),
        ((2, 8), "ow"),
        ((2, 8), "oo"),
        ((3, 5), "wo"),
        ((2, 16), "ow"),
        ((2, 2, 4), "ooo"),
    ],
)
def test_several_axes(kind: str, sizes: tuple[int, ...], wrapped: str) -> None:
    check(kind, group(sizes, tuple(mark == "w" for mark in wrapped)))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("wrapped", ["wwo", "ooo"])
def test_three_axes(kind: str, wrapped: str) -> None:
    check(kind, group((4, 4, 4), tuple(mark == "w" for mark in wrapped)))


def test_a_large_slice() -> None:
    check(
        "all_gather",
        Mesh(Slice.parse("v5e:8x16"), {"fsdp": (AxisPiece("x", 1, 8), AxisPiece("y", 1, 16))}).span("fsdp"),
    )


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_many_rings(kind: str) -> None:
    check(kind, group((4, 4, 4), (True, True, True)))
    check(kind, group((4, 8), (True, True)))


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["wwo", "ooo"])
def test_an_all_reduce_over_three_axes_with_lines(wrapped: str) -> None:
    # Of its own accord it would be cut into fewer chunks, for speed.
    check("all_reduce", group((4, 4, 4), tuple(mark == "w" for mark in wrapped)), chunks=56)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_a_whole_plane_of_rings(kind: str) -> None:
    check(kind, group((8, 16), (True, True)))


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize(
    ("size", "stride", "length", "wrapped"),
    [(4, 4, 16, True), (2, 8, 16, True), (4, 1, 16, True), (4, 2, 16, True), (4, 2, 8, False), (3, 3, 9, True)],
)
def test_groups_that_share_links(kind: str, size: int, stride: int, length: int, wrapped: bool) -> None:
    check(kind, group((size,), (wrapped,), (stride,), (length,)))


@pytest.mark.parametrize("size", [2, 3, 8, 9, 16])
def test_one_direction_of_a_ring(size: int) -> None:
    ring = group((size,), (True,))
    gathered = simulate("all_gather", ring, LARGE, bidirectional=False)
    assert gathered.seconds == pytest.approx((size - 1) / size * LARGE / LINK, rel=1e-3)
    assert gathered.link_bytes[0, 1].max() == 0
    # Problem s9: an AllToAll of the same bytes takes half of that, for a chunk travels half the ring on average.
    exchanged = simulate("all_to_all", ring, LARGE / size, bidirectional=False)
    assert exchanged.seconds / gathered.seconds == pytest.approx(0.5, rel=1e-3)


def test_s9_all_to_all_on_both_directions() -> None:
    ratios = []
    for size in (8, 32):
        ring = group((size,), (True,))
        gathered, exchanged = simulate("all_gather", ring, LARGE), simulate("all_to_all", ring, LARGE / size)
        assert exchanged.link_bytes.max() / gathered.link_bytes.max() == pytest.approx(size / (4 * (size - 1)))
        ratios.append(exchanged.seconds / gathered.seconds)
    # A quarter in the limit of a long ring.
    assert 0.25 < ratios[1] < ratios[0] and ratios[1] == pytest.approx(0.25, rel=0.04)


@pytest.mark.parametrize(("size", "wrapped"), [(5, True), (9, True), (4, False), (9, False)])
def test_stored_whole_a_gather_pays_hops_and_bytes_one_after_the_other(size: int, wrapped: bool) -> None:
    g = group((size,), (wrapped,))
    priced = price("all_gather", g)
    for payload in (1e3, 1e6, 1e9):
        expected = payload * float(priced.seconds_per_byte["ici"]) + float(priced.latency_s["ici"])
        assert simulate("all_gather", g, payload, cut_through=False).seconds == pytest.approx(expected)


def test_an_all_reduce_of_few_bytes_gathers_operands() -> None:
    ring = group((16,), (True,))
    # 8 hops against 16, until the 15/2 operands over each link outweigh the 15/16 of a ReduceScatter and an AllGather.
    assert simulate("all_reduce", ring, 1e3).hops == 8
    assert simulate("all_reduce", ring, 1e6).link_bytes.max() == pytest.approx(15 / 16 * 1e6)


# ---- what must hold -------------------------------------------------------------------------------------------------

tori = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3).filter(
    lambda axes: 1 < np.prod([size for size, _ in axes]) <= 40
)


@settings(max_examples=examples(60), deadline=None)
@given(tori, st.sampled_from(COLLECTIVES), st.floats(1, 1e9), st.integers(1, 3), st.booleans(), st.booleans())
def test_no_simulation_beats_the_closed_form(
    axes: list[tuple[int, bool]], kind: str, payload: float, chunks: int, cut_through: bool, bidirectional: bool
) -> None:
    g = group(tuple(size for size, _ in axes), tuple(wrapped for _, wrapped in axes))
    result = simulate(kind, g, payload, chunks=chunks, cut_through=cut_through, bidirectional=bidirectional)
    assert result.seconds >= float(price(kind, g).bound_s(payload)["ici"]) * (1 - 1e-9)
    assert result.seconds >= result.busy_s.max()


@settings(max_examples=examples(40), deadline=None)
@given(tori, st.data())
def test_every_chip_takes_in_what_it_lacks(axes: list[tuple[int, bool]], data: st.DataObject) -> None:
    g = group(tuple(size for size, _ in axes), tuple(wrapped for _, wrapped in axes))
    shape, count = Torus.of(g.physical), int(g.devices)
    shards = np.array(data.draw(st.lists(st.floats(0, 1e6), min_size=count, max_size=count)))
    gathered = simulate("all_gather", g, shards)
    assert arriving(shape, gathered) == pytest.approx(shards.sum() - shards, abs=1e-3)
    # Backwards: every chip sends what is not its own.
    scattered = simulate("reduce_scatter", g, shards)
    assert scattered.link_bytes.sum(axis=(0, 1)) == pytest.approx(shards.sum() - shards, abs=1e-3)
    assert scattered.link_bytes.sum() == pytest.approx(gathered.link_bytes.sum())


@settings(max_examples=examples(40), deadline=None)
@given(tori, st.sampled_from(["all_gather", "reduce_scatter"]), st.data())
def test_uneven_shards_never_help_where_all_chips_are_alike(
    axes: list[tuple[int, bool]], kind: str, data: st.DataObject
) -> None:
    # On a line they may: the ends, with one port each, take in less if their own shards are the large ones.
    g = group(tuple(size for size, _ in axes), (True,) * len(axes))
    shards = np.array(data.draw(st.lists(st.floats(0, 1e9), min_size=int(g.devices), max_size=int(g.devices))))
    assume(shards.sum() > 0)
    assert simulate(kind, g, shards).seconds >= float(price(kind, g).bound_s(shards.sum())["ici"]) * (1 - 1e-9)


def test_uneven_shards_help_a_line_if_its_ends_hold_most() -> None:
    line, bound_s = group((3,), (False,)), 2 / 3
    assert simulate("all_gather", line, np.array([0.5, 0.0, 0.5]) * LINK).seconds < 0.51 < bound_s
    assert simulate("all_gather", line, np.array([0.0, 0.0, 1.0]) * LINK).seconds > 0.99 > bound_s


def test_uneven_all_to_all() -> None:
    pairs = np.zeros((4, 4))
    pairs[0, 2], pairs[1, 0] = 8.0, 2.0
    ring = simulate("all_to_all", group((4,), (True,)), pairs)
    # To the opposite chip both ways round: 0-1-2 and 0-3-2.
    assert ring.link_bytes[0, 0].tolist() == [4, 4, 0, 0]
    assert ring.link_bytes[0, 1].tolist() == [4, 2, 0, 4]


# ---- messages from chip to chip -------------------------------------------------------------------------------------


def test_t7_corner_to_corner() -> None:
    grid = Torus.of(Slice.parse("v5e:4x4").physical_axes)
    source, target = grid.chip((0, 0)), grid.chip((3, 3))
    first = run(grid, send(grid, source, target, TINY))
    assert first.hops == 6
    assert first.seconds == pytest.approx(6e-6)
    whole = run(grid, send(grid, source, target, 8 * 128 * 8192 * 2))
    assert whole.busy_s.max() == pytest.approx(186.41e-6, rel=1e-4)
    assert whole.seconds == pytest.approx(6e-6 + 186.41e-6, rel=1e-4)


def test_t8_everything_on_a_corner() -> None:
    grid = Torus.of(Slice.parse("v5e:4x4").physical_axes)
    result = run(grid, gather(grid, grid.chip((0, 0)), 2.0**34))
    assert result.seconds == pytest.approx(179e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "wrapped", "ports"),
    [((2, 8), "oo", 2), ((4, 4), "ww", 4), ((8, 16), "ow", 3), ((4, 4, 4), "www", 6), ((4, 4, 4), "ooo", 3)],
)
def test_a_gather_fills_the_ports_of_its_target(sizes: tuple[int, ...], wrapped: str, ports: int) -> None:
    shape = torus(sizes, tuple(mark == "w" for mark in wrapped))
    result = run(shape, gather(shape, 0, LARGE))
    least_s = (shape.chips - 1) / shape.chips * LARGE / (ports * LINK)
    assert least_s * (1 - 1e-9) <= result.seconds <= least_s * 1.001


def test_a_gather_of_shards_of_any_size() -> None:
    line = torus((3,), (False,))
    result = run(line, gather(line, 1, np.array([3.0, 5.0, 0.0]) * LINK))
    assert result.seconds == pytest.approx(3 + HOP_S)
    with pytest.raises(RooftopError, match="nbytes"):
        gather(line, 1, np.ones(2))


@pytest.mark.parametrize(
    ("sizes", "wrapped", "target", "ways"),
    [((4, 4, 4), "ooo", (3, 3, 3), 3), ((4, 4), "ww", (2, 2), 4), ((4,), "w", (2,), 2), ((4, 4), "oo", (0, 3), 1)],
)
def test_a_message_takes_every_disjoint_way(
    sizes: tuple[int, ...], wrapped: str, target: tuple[int, ...], ways: int
) -> None:
    shape = torus(sizes, tuple(mark == "w" for mark in wrapped))
    result = run(shape, send(shape, 0, shape.chip(target), LARGE))
    assert result.busy_s.max() == pytest.approx(LARGE / ways / LINK)


# ---- routing in closed form -----------------------------------------------------------------------------------------


def walked(shape: Torus, sources: np.ndarray, targets: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Bytes over each link, hop by hop."""
    load = np.zeros((len(shape.sizes), 2, *shape.sizes))
    for source, target, amount in zip(sources, targets, nbytes, strict=True):
        axes = range(len(shape.sizes))
        for order, flip in product((tuple(axes), tuple(reversed(axes))), (False, True)):
            at = list(source)
            for axis in order:
                size = shape.sizes[axis]
                ahead = int(target[axis] - at[axis])
                if shape.wrapped[axis]:
                    ahead = min(ahead, ahead - size, ahead + size, key=lambda step: (abs(step), step * (-1) ** flip))
                for _ in range(abs(ahead)):
                    load[(axis, 0 if ahead > 0 else 1, *at)] += amount / 4
                    at[axis] = (at[axis] + (1 if ahead > 0 else -1)) % size
    return load


@settings(max_examples=examples(60), deadline=None)
@given(tori, st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_routes_are_what_walking_them_gives(axes: list[tuple[int, bool]], seed: int, count: int) -> None:
    g = group(tuple(size for size, _ in axes), tuple(wrapped for _, wrapped in axes))
    shape, draw = Torus.of(g.physical), np.random.default_rng(seed)
    sources, targets = (draw.integers(0, shape.sizes, (count, len(axes))) for _ in range(2))
    nbytes = draw.uniform(1, 1e6, count)
    routed = route(g.physical, sources, targets, nbytes)
    assert routed.seconds["ici"] == pytest.approx(walked(shape, sources, targets, nbytes).max() / LINK)
    pairs = [(shape.chip(a.tolist()), shape.chip(b.tolist())) for a, b in zip(sources, targets, strict=True)]
    simulated = run(shape, permute(shape, pairs, nbytes))
    assert routed.seconds["ici"] == pytest.approx(simulated.busy_s.max())
    assert simulated.seconds >= max(routed.seconds["ici"], routed.latency_s) * (1 - 1e-9)
    assert run(shape, permute(shape, pairs, TINY)).hops == routed.hops
    # The way back costs the same.
    back = route(g.physical, targets, sources, nbytes)
    assert (back.hops, back.latency_s) == (routed.hops, routed.latency_s)
    assert back.seconds["ici"] == pytest.approx(routed.seconds["ici"])


def test_a_shift_is_routed_as_the_closed_form_says() -> None:
    for size, wrapped in product(range(2, 9), (True, False)):
        g = group((size,), (wrapped,))
        places = np.arange(size if wrapped else size - 1)[:, None]
        routed = route(g.physical, places, (places + 1) % size, 1e6)
        assert routed.seconds["ici"] == pytest.approx(float(price("permute", g).seconds_per_byte["ici"]) * 1e6)
        assert routed.latency_s == pytest.approx(float(price("permute", g).latency_s["ici"]))


def test_ports_of_switches_and_dcn() -> None:
    physical = Slice.parse("h100:8x4").physical_axes
    node, network = physical
    # Two devices of a node send to a third, and one of them to another node.
    routed = route(physical, [[0, 0], [1, 0], [1, 0]], [[2, 0], [2, 0], [1, 3]], [4.0, 2.0, 5.0])
    assert routed.seconds == pytest.approx({"ici": 6 / node.bytes_per_s, "dcn": 5 / network.bytes_per_s})
    assert routed.hops == 1


def test_messages_that_stay_cost_nothing() -> None:
    physical = Slice.parse("v5e:4x4@2").physical_axes
    routed = route(physical, [[1, 2, 0]], [[1, 2, 0]], 1e9)
    assert (routed.seconds, routed.latency_s, routed.hops) == ({"ici": 0.0, "dcn": 0.0}, 0.0, 0)


@pytest.mark.parametrize(
    ("source", "target", "nbytes", "names"),
    [
        ([[0, 4]], [[0, 0]], 1.0, "source"),
        ([[0, 0]], [[0]], 1.0, "target"),
        ([[0, 0]], [[0, 1], [1, 0]], 1.0, "messages"),
        ([[0, 0]], [[0, 1]], [1.0, 2.0], "messages"),
        ([[0, 0]], [[0, 1]], -1.0, "messages"),
    ],
)
def test_wrong_routes_are_named(source, target, nbytes, names) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RooftopError, match=names):
        route(Slice.parse("v5e:4x4").physical_axes, source, target, nbytes)
