"""The GPU chapter (12): collectives over the levels of a GPU network, on the chapter's own cases.

Each case is a question or a formula of the chapter. Where it rounds, (N-1)/N left out, the exact value is asserted.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.algebra.pricing import Prices
from rooftop.arrays import Mesh
from rooftop.core.ledger import COLLECTIVES
from rooftop.hardware import CollectiveFit, Slice, chip
from rooftop.roofline import matmul, rules
from rooftop.roofline.collectives import NetworkRates, Price, joined_price, price

#: bf16[4096, 65536], in bytes.
ARRAY = 2 * 4096 * 65536
#: Links at their peak rates, and no start.
IDEAL = NetworkRates(within=CollectiveFit(), dcn=1.0)


def priced(kind: str, on: str, layout: str = "fsdp=network+node", axis: str = "fsdp", form: str = "exact") -> Price:
    return price(kind, Mesh.from_layout(Slice.parse(on), layout).span(axis), form)


# ---- within a node --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_gather_in_a_node(kind: str) -> None:
    # Quiz 2, question 3: bf16[4096_X, 65536] over 8 H100.
    assert float(priced(kind, "h100:8", "fsdp=node").least_s(ARRAY)) == pytest.approx(1.0439e-3, rel=1e-4)


def test_gather_of_the_pop_quiz() -> None:
    assert float(priced("all_gather", "h100:8", "fsdp=node").least_s(2 * 1024 * 16384)) == pytest.approx(
        65e-6, rel=0.01
    )


def test_all_to_all_in_a_node() -> None:
    # B (N-1) / (W N^2), and B / N of it is a device's operand.
    exchange = priced("all_to_all", "h100:8", "fsdp=node")
    assert float(exchange.least_s(ARRAY / 8)) == pytest.approx(ARRAY * 7 / (450e9 * 64))


# ---- over nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "seconds", "level"),
    [
        # Quiz 4, question 5: over exactly two nodes it is the node that binds, over four it still is.
        (2, ARRAY * 7 / 8 / 450e9, "ici"),
        (4, 1.0439e-3, "ici"),
        # An SU of 32 nodes: 413 GB/s.
        (32, ARRAY * 31 / 32 / 400e9, "dcn"),
    ],
)
def test_a_gather_takes_as_long_as_its_slowest_level(nodes: int, seconds: float, level: str) -> None:
    gather = priced("all_gather", f"h100:8x{nodes}")
    levels = gather.bound_s(ARRAY)
    assert float(gather.least_s(ARRAY)) == pytest.approx(seconds, rel=1e-4)
    assert max(levels, key=lambda name: float(levels[name])) == level
    mesh = Mesh.from_layout(Slice.parse(f"h100:8x{nodes}"), "fsdp=network+node")
    for form in ("bound", "book"):
        assert Prices(mesh=mesh, dims={}, kind=form).collective_s("all_gather", ("fsdp",), ARRAY) == pytest.approx(
            seconds, rel=1e-4
        )


def test_a_rack_of_72_is_bound_within_it() -> None:
    """Appendix A: 3.6 TB/s out of a domain, 0.9 TB/s out of a GPU."""
    levels = priced("all_gather", "gb200:72x4").bound_s(ARRAY)
    assert float(levels["ici"]) == pytest.approx(ARRAY * 71 / 72 / 900e9)
    assert float(levels["dcn"]) == pytest.approx(ARRAY * 3 / 4 / 3600e9)


def test_slices_of_tpus_do_one_network_after_the_other() -> None:
    """XLA's programs gather over DCN, and then over ICI."""
    gather = price("all_gather", Mesh.from_layout(Slice.parse("v5e:4x4@2"), "fsdp=x+y+dcn").span("fsdp"))
    levels = [float(seconds) for seconds in gather.bound_s(ARRAY).values()]
    assert min(levels) > 0
    assert float(gather.least_s(ARRAY)) == pytest.approx(sum(levels))


def test_all_to_all_over_nodes_has_a_gpus_own_network_rate() -> None:
    # B (M-1) / (M^2 W_node): 50 GB/s a GPU, from B / (8 x 450e9) in a node to B / (2 x 2 x 400e9) over two.
    for nodes in (2, 4, 32):
        exchange = priced("all_to_all", f"h100:8x{nodes}")
        total = float(exchange.least_s(ARRAY / (8 * nodes)))
        assert total == pytest.approx(ARRAY * (nodes - 1) / (nodes**2 * 400e9))
        # NVLink has only what stays within the node.
        assert float(exchange.bound_s(ARRAY)["ici"]) == pytest.approx(ARRAY * 7 / (8 * nodes) / 450e9)


@pytest.mark.parametrize("inner", [1, 2, 8])
def test_inner_axes_within_a_node_save_nothing_between_nodes(inner: int) -> None:
    """Pop quiz 3: AllGather of bf16[D_X, F_Y] over an SU takes 2 D F (32 - 1) / (32 x 400e9) for any Y up to 8."""
    layout = "fsdp=network+node" if inner == 1 else f"fsdp=network+node[{inner}:{8 // inner}],tensor=node[1:{inner}]"
    gather = priced("all_gather", "h100:8x32", layout if inner < 8 else "fsdp=network,tensor=node")
    assert float(gather.bound_s(ARRAY / inner)["dcn"]) == pytest.approx(ARRAY * 31 / (32 * 400e9))


def test_inner_axes_over_nodes_save_their_share() -> None:
    """Pop quiz 3, Y of 32: the array of a GPU is 1/32, and its gather over 8 nodes has a GPU's 50 GB/s."""
    gather = priced("all_gather", "h100:8x32", "fsdp=network[4:8],tensor=network[1:4]+node")
    assert float(gather.least_s(ARRAY / 32)) == pytest.approx(ARRAY / 32 * 7 / 8 / 50e9)


# ---- switches that sum ----------------------------------------------------------------------------------------------


def test_switches_may_sum_in_bounds_but_not_in_expectations() -> None:
    """Exactly B / W with SHARP, 2 (N-1)/N B / W without: NCCL was measured between the two."""
    reduced = priced("all_reduce", "h100:8", "fsdp=node")
    assert float(reduced.least_s(ARRAY)) == pytest.approx(ARRAY / 450e9)
    assert float(reduced.expected_s(ARRAY, IDEAL)) == pytest.approx(2 * 7 / 8 * ARRAY / 450e9, rel=1e-3)
    # nccl-tests, 8 H100, beyond 8 GiB: 479 GB/s of bus bandwidth (github.com/NVIDIA/nccl-tests/issues/347).
    assert float(reduced.least_s(2**33)) < 2 * 7 / 8 * 2**33 / 479e9 < float(reduced.expected_s(2**33, IDEAL))
    # The book's form has no SHARP, and A100's switches do not sum.
    for other in (
        priced("all_reduce", "h100:8", "fsdp=node", form="book"),
        priced("all_reduce", "a100:8", "fsdp=node"),
    ):
        assert float(other.least_s(ARRAY)) == pytest.approx(float(other.expected_s(ARRAY, IDEAL)), rel=2e-3)
    assert chip("h100").sharp_gain == 1.3 < 2 * 7 / 8


def test_two_gpus_gain_nothing_by_a_switch_that_sums() -> None:
    pair = priced("all_reduce", "h100:2", "fsdp=node")
    assert float(pair.least_s(ARRAY)) == pytest.approx(ARRAY / 450e9)
    assert float(pair.expected_s(ARRAY, IDEAL)) == pytest.approx(ARRAY / 450e9, rel=2e-3)


# ---- what must hold for any group -----------------------------------------------------------------------------------

groups = st.tuples(
    st.sampled_from(["a100", "h100", "h800", "b200", "gb200"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from(["fsdp=network+node", "fsdp=node,data=network", "fsdp=network,tensor=node"]),
)


@given(groups, st.sampled_from(COLLECTIVES), st.floats(1.0, 1e10))
def test_no_expectation_is_below_its_bound(group: tuple[str, int, int, str], kind: str, nbytes: float) -> None:
    name, gpus, nodes, layout = group
    on = Slice.parse(f"{name}:{gpus}x{nodes}")
    if nodes == 1:
        layout = "fsdp=node"
    whole = price(kind, Mesh.from_layout(on, layout).span("fsdp"))
    for some in (whole, whole.over(("ici",)), whole.over(("dcn",))):
        assert float(some.expected_s(nbytes, IDEAL)) >= float(some.least_s(nbytes)) * (1 - 1e-12)
    assert float(whole.least_s(nbytes)) == max(map(float, whole.bound_s(nbytes).values()))
    # A price of many layouts is that of each, also where groups of several slices stand next to each other.
    many = joined_price([whole.map(np.atleast_1d), whole.map(np.atleast_1d)])
    assert many.least_s(nbytes) == pytest.approx([float(whole.least_s(nbytes))] * 2)


# ---- rooflines ------------------------------------------------------------------------------------------------------

#: FLOPs/s in bf16, and bytes/s of a GPU into its node and into the network, of a node's GPUs.
H100 = (990e12, 450e9, 50e9, 8)
B200 = (2250e12, 900e9, 50e9, 8)
MANY = 10**6


@pytest.mark.parametrize(("name", "batch"), [("h100", 295), ("b200", 281)])
def test_critical_batches(name: str, batch: int) -> None:
    # Quiz 1, question 3: FLOPs per byte of HBM, twice that in 8 bits.
    spec = chip(name)
    assert int(rules.critical_batch(spec.flops_per_s["bf16"], spec.hbm_bytes_per_s)) == batch
    double = spec.flops_per_s["f8_e4m3"] / spec.hbm_bytes_per_s
    assert double == pytest.approx(2 * batch, rel=0.015)


def test_a_small_matmul_on_b200() -> None:
    # Quiz 1, question 4: fp16[64, 4096] x [4096, 8192] reads and writes for 8.6 us, 512 rows compute for 15.
    spec = chip("b200")
    moved = matmul.flops(64, 4096, 8192) / matmul.intensity(64, 4096, 8192, dtype="f16")
    assert moved / spec.hbm_bytes_per_s == pytest.approx(8.6e-6, rel=0.01)
    assert matmul.flops(64, 4096, 8192) / spec.flops_per_s["f16"] < 8.6e-6
    assert matmul.flops(512, 4096, 8192) / spec.flops_per_s["f16"] == pytest.approx(15e-6, rel=0.02)


def test_bisection_of_a_node_and_of_a_pod() -> None:
    # Quiz 2, question 2: 3.6 TB/s; an SU of 256 GPUs has 12.8 TB/s, a pod of 1024 51.2 TB/s.
    assert rules.bisection_bytes_per_s(8, 450e9) == 3.6e12
    assert [rules.bisection_bytes_per_s(gpus, 50e9) for gpus in (256, 1024)] == [12.8e12, 51.2e12]
    # An AllToAll of V bytes takes V over it, less the share that stays where it is.
    total = float(priced("all_to_all", "h100:8", "fsdp=node").least_s(ARRAY / 8))
    assert total == pytest.approx(7 / 8 * ARRAY / 3.6e12)


@pytest.mark.parametrize(
    ("rates", "nodes", "more", "tokens"),
    [
        (H100, MANY, {}, 2475),  # C / W_node
        (H100, 1, {}, 2200 * 7 / 8),  # C / W_GPU
        (B200, MANY, {}, 5625),  # quiz 5, question 1
        (B200, 1, {}, 2500 * 7 / 8),
        (H100, MANY, {"sparsity": 128 / 4}, 79200),  # GPT-OSS: 4 of 128 experts
        (H100, 64, {"model_ways": 64}, 309 * 7 / 8),  # quiz 5, question 2: tensor 8 and 8 stages, FSDP over 8 more
        (H100, MANY, {"model_ways": 16}, 2475 / 2),  # quiz 5, question 3
        (H100, 2, {"model_ways": 8}, 1237),  # two nodes move half
        ((990e12, 450e9, 50e9, 72), MANY, {}, 2200 * 71 / 72),  # a domain of 72 is bound within
        (H100, 1, {"model_ways": 8}, 0),  # nothing to gather
    ],
)
def test_tokens_per_gpu(
    rates: tuple[float, float, float, int], nodes: int, more: dict[str, float], tokens: float
) -> None:
    assert rules.fsdp_tokens_per_gpu(*rates, nodes, **more) == pytest.approx(tokens, rel=2e-3)


@given(st.sampled_from([H100, B200]), st.sampled_from([1, 2, 4, 16]), st.sampled_from([1, 2, 8]))
def test_at_the_critical_tokens_gathers_take_as_long_as_math(
    rates: tuple[float, float, float, int], nodes: int, ways: int
) -> None:
    """The rule is what the prices of the collectives say."""
    on = Slice.parse(f"{'h100' if rates == H100 else 'b200'}:8x{nodes}")
    axes = [f"network[1:{nodes}]"] * (nodes > 1) + [f"node[{ways}:{8 // ways}]"] * (ways < 8)
    if not axes:
        return
    layout = f"fsdp={'+'.join(axes)}" + (f",tensor=node[1:{ways}]" if ways > 1 else "")
    d, f = 8192, 28672
    gather = price("all_gather", Mesh.from_layout(on, layout).span("fsdp"))
    tokens = rules.fsdp_tokens_per_gpu(*rates, nodes, model_ways=ways)
    # Two matrices in bf16 are gathered, and their gradients scattered.
    levels = gather.seconds_per_byte.values()
    assert 8 * tokens * d * f / rates[0] == pytest.approx(max(float(rate) for rate in levels) * 8 * d * f / ways)


def test_tensor_limits() -> None:
    # F W / C: 1/2200 of F in a node; over two nodes F > 2475 (Y - 8), which leaves 19 ways of F = 28000.
    assert rules.tensor_limit_on_gpus(7000, *H100) == pytest.approx(1 + 7000 / 2200)
    assert rules.tensor_limit_on_gpus(28000, H100[0], 1e30, *H100[2:]) == pytest.approx(8 + 28000 / 2475)
    # The node's own level is the slower one there.
    assert rules.tensor_limit_on_gpus(28000, *H100) == pytest.approx(28000 / 2200 * 8 / 7)
    assert 8 < rules.tensor_limit_on_gpus(28672, *B200) < 16
    # At the limit matmuls take as long as the gather and the scatter of activations.
    d, tokens, ways = 8192, 4096, 4
    f = (ways - 1) * H100[0] / H100[1]
    gather = priced("all_gather", "h100:4", "tensor=node", "tensor")
    assert rules.tensor_limit_on_gpus(f, *H100) == pytest.approx(ways)
    assert 2 * float(gather.least_s(2 * tokens * d)) == pytest.approx(4 * tokens * d * f / (ways * H100[0]))


def test_experts_over_nodes() -> None:
    # F > 8 C / W_node where a token's experts are on nodes of their own, F > C / W_node (Z - 8) / k where they are not.
    alpha = 2475
    assert rules.expert_d_ff(*H100, expert_ways=8 * MANY, active=8) == pytest.approx(8 * alpha, rel=1e-5)
    assert rules.expert_d_ff(*H100, expert_ways=32, active=8) == pytest.approx(alpha * (32 - 8) / 8)
    # Within a node as tensor parallelism, less what stays.
    assert rules.expert_d_ff(*H100, expert_ways=8, active=8) == pytest.approx(2200 * 7 / 8)
    assert rules.expert_d_ff(*H100, expert_ways=8, active=2) == pytest.approx(2200 * 7 / 8)
    assert rules.expert_d_ff(*H100, expert_ways=4, active=8) == pytest.approx(2200 / 2 * 3 / 4)
    # A domain of 72 exchanges within it what nodes of 8 send over the network.
    rack = (*B200[:3], 72)
    assert rules.expert_d_ff(*rack, expert_ways=64, active=8) < rules.expert_d_ff(*B200, expert_ways=64, active=8) / 7
