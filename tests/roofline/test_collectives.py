"""Prices of collectives: closed forms of the book and of the design, and what must hold for any group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.arrays import AxisPiece, AxisSpan, Mesh, span
from rooftop.core.errors import RooftopError
from rooftop.hardware import CollectiveFit, PhysicalAxis, Slice
from rooftop.roofline.collectives import FORMS, NetworkRates, price

LINK = 4.5e10


def group(*axes: tuple[int, int, bool], length: tuple[int, ...] | None = None) -> AxisSpan:
    """A group from (size, stride, wrapped) per physical axis of a torus."""
    physical = tuple(
        PhysicalAxis(
            name="xyz"[i],
            size=length[i] if length else size * stride,
            kind="torus",
            wrapped=wrapped,
            bytes_per_s=LINK,
            hop_s=1e-6,
            resource="ici",
        )
        for i, (size, stride, wrapped) in enumerate(axes)
    )
    return span(physical, np.array([a[0] for a in axes]), np.array([a[1] for a in axes]))


def rate(kind: str, g: AxisSpan) -> float:
    return float(price(kind, g).seconds_per_byte["ici"])


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_rings_and_lines_follow_the_closed_forms(n: int) -> None:
    share = (n - 1) / n
    ring, line = group((n, 1, True)), group((n, 1, False))
    for kind in ("all_gather", "reduce_scatter"):
        assert rate(kind, ring) == pytest.approx(share / (2 * LINK))
        assert rate(kind, line) == pytest.approx(share / LINK)
    assert rate("all_reduce", ring) == pytest.approx(2 * share / (2 * LINK))
    assert rate("all_reduce", line) == pytest.approx(1 / LINK)
    # An AllToAll's payload is one device's operand, V / N of the bytes in the group.
    assert rate("all_to_all", ring) == pytest.approx(n / 8 / LINK)
    assert rate("all_to_all", line) == pytest.approx(n / 4 / LINK)


def test_three_rings_share_an_all_gather_evenly() -> None:
    cube = group((16, 1, True), (16, 1, True), (16, 1, True))
    assert rate("all_gather", cube) == pytest.approx((4095 / 4096) / (6 * LINK))


def test_a_short_axis_cannot_carry_its_share() -> None:
    # 2 x 16, both open: the long axis must carry at least (16 - 1)/32 of V, whatever the short one does.
    both = group((2, 1, False), (16, 1, False))
    assert rate("all_gather", both) == pytest.approx(max(31 / 32 / (2 * LINK), 15 / 32 / LINK))


def test_interleaved_groups_share_their_links() -> None:
    # Four groups of four on one ring of 16: each hop crosses four links that four groups use.
    interleaved = group((4, 4, True))
    assert bool(interleaved.ring[0])
    assert rate("all_gather", interleaved) == pytest.approx(3 / 4 * 4 / (2 * LINK))


def test_part_of_a_ring_is_an_open_line() -> None:
    part = group((4, 1, True), length=(16,))
    assert not part.ring[0]
    assert rate("all_gather", part) == pytest.approx(3 / 4 / LINK)


def test_over_dcn_only_the_slowest_bytes_move() -> None:
    mesh = Mesh(
        Slice.parse("v5e:4x4@4"),
        {"data": (AxisPiece("dcn", 1, 4), AxisPiece("x", 1, 4)), "fsdp": (AxisPiece("y", 1, 4),)},
    )
    reduced = price("all_reduce", mesh.span("data"))
    dcn = next(axis for axis in mesh.slice.physical_axes if axis.resource == "dcn")
    # Each device reduces over ICI first and sends a quarter of its operand over DCN.
    assert float(reduced.seconds_per_byte["dcn"]) == pytest.approx(2 * 3 / 4 / 4 / dcn.bytes_per_s)


def test_gpu_nodes_are_a_switch() -> None:
    mesh = Mesh(Slice.parse("h100:8x4"), {"fsdp": (AxisPiece("network", 1, 4), AxisPiece("node", 1, 8))})
    node, network = (axis for axis in mesh.slice.physical_axes)
    gathered = price("all_gather", mesh.span("fsdp"))
    # The book's GPU chapter: every level takes V (n - 1)/n over what its members can take in together.
    assert float(gathered.seconds_per_byte["ici"]) == pytest.approx(7 / 8 / node.bytes_per_s)
    assert float(gathered.seconds_per_byte["dcn"]) == pytest.approx(3 / 4 / (8 * network.bytes_per_s))


def test_latency_counts_hops() -> None:
    assert float(price("all_gather", group((4, 1, False))).latency_s["ici"]) == pytest.approx(3e-6)
    assert float(price("all_gather", group((4, 1, True))).latency_s["ici"]) == pytest.approx(2e-6)
    assert float(price("all_gather", group((4, 4, True))).latency_s["ici"]) == pytest.approx(8e-6)


def test_an_all_reduce_may_take_as_few_hops_as_a_gather_but_is_expected_to_take_twice() -> None:
    ring = group((16, 1, True))
    reduce, gather = price("all_reduce", ring), price("all_gather", ring)
    assert float(reduce.bound_s(0.0)["ici"]) == float(gather.bound_s(0.0)["ici"]) == pytest.approx(8e-6)
    ideal = NetworkRates(within=CollectiveFit(), dcn=1.0)
    assert float(reduce.expected_s(0.0, ideal)) == pytest.approx(2 * float(gather.expected_s(0.0, ideal)))


def test_the_next_device_of_two_lies_both_ways_round() -> None:
    assert rate("permute", group((2, 1, True))) == pytest.approx(1 / (2 * LINK))
    assert rate("permute", group((2, 8, True))) == pytest.approx(8 / (2 * LINK))
    assert rate("permute", group((2, 1, False))) == pytest.approx(1 / LINK)
    assert rate("permute", group((4, 1, True))) == pytest.approx(1 / LINK)


def test_what_crosses_slices_uses_dcn_alone() -> None:
    """XLA:TPU gathers over both networks; all of an AllToAll or a permute it hands to the hosts."""
    across = Mesh.from_layout(Slice.parse("v5e:4x4@2"), "fsdp=x+y+dcn").span("fsdp")
    for kind, over_ici in (("all_gather", True), ("all_reduce", True), ("all_to_all", False), ("permute", False)):
        seconds = price(kind, across).seconds_per_byte
        assert float(seconds["dcn"]) > 0
        assert (float(seconds["ici"]) > 0) == over_ici


def test_unknown_collective_is_refused() -> None:
    with pytest.raises(RooftopError, match="all_gather"):
        price("all_gathr", group((4, 1, True)))


# ---- the book's forms and its worked problems (rows of the table of problems) ---------------------------------------


def seconds(kind: str, on: str, layout: str, axis: str, payload: float, form: str = "exact") -> float:
    priced = price(kind, Mesh.from_layout(Slice.parse(on), layout).span(axis), form)
    return float(priced.bound_s(payload)["ici"])


def wrapped(g: AxisSpan) -> AxisSpan:
    """The same group, were its axes rings."""
    physical = tuple(replace(axis, wrapped=True) for axis in g.physical)
    return span(physical, g.size, g.stride)


V5E, V4P = "fsdp=x,tensor=y", "fsdp=x,tensor=y,context=z"


def test_s2_gather_with_and_without_wraparound() -> None:
    # v5e has no 4x8: a line of four chips of a 4x4 slice is the same line.
    line = Mesh.from_layout(Slice.parse("v5e:4x4"), V5E).span("tensor")
    payload = 2 * 2048 * 8192
    ring = wrapped(line)
    assert float(price("all_gather", ring, "book").bound_s(payload)["ici"]) == pytest.approx(372.83e-6, rel=1e-4)
    assert float(price("all_gather", ring).bound_s(payload)["ici"]) == pytest.approx(279.6e-6, rel=1e-3)
    for form in FORMS:
        assert float(price("all_gather", line, form).bound_s(payload)["ici"]) == pytest.approx(559.24e-6, rel=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_s3_small_gather_is_bound_by_its_hops(form: str) -> None:
    assert seconds("all_gather", "v5e:4x4", V5E, "tensor", 2 * 256 * 256, form) == pytest.approx(3e-6)


@pytest.mark.parametrize(
    ("kind", "axes", "shards", "book", "exact"),
    [
        pytest.param("all_gather", "x", 4, 23.302e-6, 17.48e-6, id="s5"),
        pytest.param("all_gather", "x+y", 1, 46.603e-6, 43.69e-6, id="s6"),
        pytest.param("all_reduce", "z", 16, 11.651e-6, 8.74e-6, id="s7"),
    ],
)
def test_s5_to_s7_on_a_cube(kind: str, axes: str, shards: int, book: float, exact: float) -> None:
    rest = "+".join(axis for axis in "xyz" if axis not in axes)
    payload = 2 * 1024 * 4096 / shards
    layout = f"fsdp={axes},tensor={rest}"
    assert seconds(kind, "v4p:4x4x4", layout, "fsdp", payload, "book") == pytest.approx(book, rel=1e-4)
    assert seconds(kind, "v4p:4x4x4", layout, "fsdp", payload) == pytest.approx(exact, rel=1e-3)


def test_s8_tiny_gather_takes_two_hops() -> None:
    assert seconds("all_gather", "v4p:4x4x4", V4P, "fsdp", 2 * 128) == pytest.approx(2e-6)


@pytest.mark.parametrize("n", [4, 16, 32])
def test_s9_an_all_to_all_is_a_quarter_of_a_gather(n: int) -> None:
    ring = group((n, 1, True))
    # The payload of an AllToAll is one device's operand, 1/N of what is gathered.
    gather, exchange = (
        float(price(kind, ring, "book").seconds_per_byte["ici"]) for kind in ("all_gather", "all_to_all")
    )
    assert exchange / n / gather == pytest.approx(0.25)


def test_s11_smallest_buffer_that_is_bandwidth_bound() -> None:
    permuted = price("permute", Mesh.from_layout(Slice.parse("v5e:4x4"), V5E).span("fsdp"))
    assert float(permuted.latency_s["ici"] / permuted.seconds_per_byte["ici"]) == pytest.approx(45000)


@pytest.mark.parametrize("form", FORMS)
def test_x2_reduce_scatter_over_two_chips(form: str) -> None:
    # 1.2e11 bytes/s both ways; over one hop the exact form and the book's are the same.
    pair = group((2, 1, False))
    half = tuple(replace(axis, bytes_per_s=1.2e11 / 2) for axis in pair.physical)
    scattered = price("reduce_scatter", replace(pair, physical=half), form)
    assert float(scattered.bound_s(2 * 32 * 1024 * 8192 / 4)["ici"]) == pytest.approx(1.1185e-3, rel=1e-4)


def test_the_book_counts_whole_shards_and_every_axis_as_full() -> None:
    ring = group((8, 1, True))
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert rate(kind, ring) == pytest.approx(7 / 8 * float(price(kind, ring, "book").seconds_per_byte["ici"]))
    # That is below the bound where a short axis cannot carry its share.
    uneven = group((2, 1, True), (16, 1, False))
    assert rate("all_gather", uneven) == pytest.approx(15 / 32 / LINK)
    assert float(price("all_gather", uneven, "book").seconds_per_byte["ici"]) == pytest.approx(31 / 32 / (3 * LINK))
    # Twice the hops for an AllReduce, as for its two halves.
    hops = [float(price(kind, ring, "book").latency_s["ici"]) for kind in ("all_gather", "all_reduce")]
    assert hops == pytest.approx([4e-6, 8e-6])


def test_the_book_forms_leave_switches_and_dcn_as_they_are() -> None:
    h100 = Mesh(Slice.parse("h100:8x4"), {"fsdp": (AxisPiece("network", 1, 4), AxisPiece("node", 1, 8))}).span("fsdp")
    for kind in ("all_gather", "all_reduce", "all_to_all"):
        assert price(kind, h100, "book").seconds_per_byte == price(kind, h100).seconds_per_byte


def test_unknown_form_is_refused() -> None:
    with pytest.raises(RooftopError, match="book, exact"):
        price("all_gather", group((4, 1, True)), "bok")


# ---- what must hold for any group -----------------------------------------------------------------------------------

axes = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.booleans()), min_size=1, max_size=3
)


@given(axes)
def test_prices_of_any_group(sizes: list[tuple[int, int, bool]]) -> None:
    g = group(*sizes)
    gather, reduce, exchange = (rate(kind, g) for kind in ("all_gather", "all_reduce", "all_to_all"))
    assert gather >= 0
    assert (gather == 0) == (int(g.devices) == 1)
    # An AllReduce is at most a ReduceScatter and an AllGather, and at least one of them.
    assert gather * (1 - 1e-12) <= reduce <= 2 * gather * (1 + 1e-12)
    # The operand of an AllToAll is 1/N of what is gathered: exchanging it costs no more than gathering it.
    assert exchange / int(g.devices) <= gather * (1 + 1e-12)


@given(axes, st.integers(min_value=0, max_value=2))
def test_wraparound_never_costs(sizes: list[tuple[int, int, bool]], which: int) -> None:
    which %= len(sizes)
    opened = [(n, s, False) if i == which else (n, s, w) for i, (n, s, w) in enumerate(sizes)]
    closed = [(n, s, True) if i == which else (n, s, w) for i, (n, s, w) in enumerate(sizes)]
    for kind in ("all_gather", "all_reduce", "all_to_all"):
        assert rate(kind, group(*closed)) <= rate(kind, group(*opened)) * (1 + 1e-12)


@given(axes)
def test_many_layouts_are_priced_as_each_alone(sizes: list[tuple[int, int, bool]]) -> None:
    g = group(*sizes)
    many = span(g.physical, np.stack([g.size, np.ones_like(g.size)]), np.stack([g.stride, np.ones_like(g.stride)]))
    for kind in ("all_gather", "all_reduce", "all_to_all", "permute"):
        both = price(kind, many).seconds_per_byte["ici"]
        assert both[0] == pytest.approx(rate(kind, g))
        assert both[1] == 0
        booked = price(kind, many, "book").seconds_per_byte["ici"]
        assert booked[0] == pytest.approx(float(price(kind, g, "book").seconds_per_byte["ici"]))
        assert booked[1] == 0
