"""Prices of collectives: closed forms of the book and of the design, and what must hold for any group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.arrays import Mesh, Piece, Span, span
from rooftop.errors import RooftopError
from rooftop.hardware import PhysicalAxis, Slice
from rooftop.roofline.collectives import price

LINK = 4.5e10


def group(*axes: tuple[int, int, bool], length: tuple[int, ...] | None = None) -> Span:
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


def rate(kind: str, g: Span) -> float:
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
        {"data": (Piece("dcn", 1, 4), Piece("x", 1, 4)), "fsdp": (Piece("y", 1, 4),)},
    )
    found = price("all_reduce", mesh.span("data"))
    dcn = next(axis for axis in mesh.slice.physical_axes if axis.resource == "dcn")
    # Each device reduces over ICI first and sends a quarter of its operand over DCN.
    assert float(found.seconds_per_byte["dcn"]) == pytest.approx(2 * 3 / 4 / 4 / dcn.bytes_per_s)


def test_gpu_nodes_are_a_switch() -> None:
    mesh = Mesh(Slice.parse("h100:8x4"), {"fsdp": (Piece("network", 1, 4), Piece("node", 1, 8))})
    node, network = (axis for axis in mesh.slice.physical_axes)
    found = price("all_gather", mesh.span("fsdp"))
    # The book's GPU chapter: every level takes V (n - 1)/n over what its members can take in together.
    assert float(found.seconds_per_byte["ici"]) == pytest.approx(7 / 8 / node.bytes_per_s)
    assert float(found.seconds_per_byte["dcn"]) == pytest.approx(3 / 4 / (8 * network.bytes_per_s))


def test_latency_counts_hops() -> None:
    assert float(price("all_gather", group((4, 1, False))).latency_s["ici"]) == pytest.approx(3e-6)
    assert float(price("all_gather", group((4, 1, True))).latency_s["ici"]) == pytest.approx(2e-6)
    assert float(price("all_gather", group((4, 4, True))).latency_s["ici"]) == pytest.approx(8e-6)


def test_unknown_collective_is_refused() -> None:
    with pytest.raises(RooftopError, match="all_gather"):
        price("all_gathr", group((4, 1, True)))


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
