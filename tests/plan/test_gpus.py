"""Training plans on GPUs: what is in a node and what goes between nodes follows from prices alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rooftop.arrays import AXES, Mesh, parse_axes
from rooftop.arrays.mesh import Ints
from rooftop.frameworks.framework import framework_of
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.models.numerics import Numerics
from rooftop.plan.layouts import mesh_shapes, ranked_layouts
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import sweep
from rooftop.plan.training.workload import Workload


def best(
    model: str, on: str, seqs: int, seq_len: int = 4096, axes: str | None = None, remat: str | None = None
) -> TrainingPlan:
    swept = sweep(
        Problem(
            model=load_model(model),
            slice=Slice.parse(on),
            workload=Workload(batch_tokens=seqs * seq_len, seq_len=seq_len, tokens=1e12),
            axes=None if axes is None else parse_axes(axes),
            remat=remat,
            microbatches=None if remat is None else 1,
        )
    )
    return swept.plan(swept.best)


def networks(mesh: Mesh, axis: str) -> set[str]:
    """The physical axes that a logical one lies on."""
    return {piece.axis for piece in mesh.axes[axis]}


@pytest.mark.parametrize(
    ("model", "on", "axes", "inner"),
    [
        ("llama3-70b", "h100:8x8", "tensor=8,fsdp=8", "tensor"),
        ("qwen3-30b-a3b", "h100:8x8", "expert=8,fsdp=8", "expert"),
        ("deepseek-v3", "gb200:64x2", "expert=64,fsdp=2", "expert"),
    ],
)
def test_tensor_and_expert_axes_lie_within_a_node(model: str, on: str, axes: str, inner: str) -> None:
    mesh = best(model, on, seqs=512, axes=axes).mesh
    assert networks(mesh, inner) == {"node"}
    assert networks(mesh, "fsdp") == {"network"}


def test_ranks_of_devices_are_in_an_order_of_the_framework() -> None:
    """Each axis has the ranks that arithmetic gives it: those of the axes inside it times its own, node by node."""
    slice_ = Slice.parse("h100:8x8")
    orders = framework_of("megatron", chip=slice_.chip).orders
    shapes = mesh_shapes(64, ["data", "expert", "context", "tensor", "stage"], {"tensor": 16})
    laid = ranked_layouts(slice_, shapes, orders)
    assert {tuple(shape) for shape in laid.devices.tolist()} == {tuple(shape) for shape in shapes.tolist()}
    # Ranks of 64 devices in 8 nodes of 8, as (node, place); an axis of n devices with k inside it steps by k.
    for index in range(0, len(laid), 7):
        mesh = laid.mesh(index)
        steps = {}
        for name in AXES:
            pieces = {piece.axis: piece for piece in mesh.axes[name]}
            inner = pieces.get("node", pieces.get("network"))
            if inner is not None:
                steps[name] = inner.stride * (1 if inner.axis == "node" else 8)
        assert any(steps == _steps(order, mesh) for order in orders)
    places = [index for index, devices in enumerate(laid.devices) if _is(devices, data=4, stage=4, tensor=4)]
    both = [laid.mesh(index).layout for index in places]
    assert len(both) == 2 and all("tensor=node[1:4]" in layout for layout in both)


def _steps(order: Sequence[str], mesh: Mesh) -> dict[str, int]:
    """Ranks between neighbours of each axis of several devices."""
    steps, inside = {}, 1
    for name in order:
        if mesh.size(name) > 1:
            steps[name] = inside
        inside *= mesh.size(name)
    return steps


def _is(devices: Ints, **sizes: int) -> bool:
    return devices.tolist() == [sizes.get(name, 1) for name in AXES]


def test_a_search_leaves_only_weights_between_nodes() -> None:
    """Few long sequences: context and tensor share a node, and FSDP goes over the network."""
    mesh = best("llama3-8b", "h100:8x4", seqs=4, seq_len=131072).mesh
    assert mesh.shape["context"] * mesh.shape["tensor"] > 1
    for axis in ("context", "tensor"):
        assert networks(mesh, axis) <= {"node"}
    assert "network" in networks(mesh, "fsdp")


def test_domains_of_72_are_used_whole() -> None:
    mesh = best("llama3-70b", "gb200:72x4", seqs=1152, seq_len=8192).mesh
    assert mesh.size("data", "fsdp", "tensor", "context", "stage") == 288
    assert networks(mesh, "tensor") | networks(mesh, "context") <= {"node"}


def test_gathers_over_parts_of_nodes_are_not_hidden() -> None:
    """XLA:GPU has no estimate for groups with some GPUs of several nodes: fsdp over two of eight GPUs in four nodes."""
    parts = best("llama3-70b", "h100:8x4", seqs=64, seq_len=8192, axes="fsdp=8,tensor=4")
    whole = best("llama3-70b", "h100:8x4", seqs=64, seq_len=8192, axes="fsdp=32")
    for plan, least, most in ((parts, 0.9, 1.0), (whole, 0.0, 0.1)):
        gathers = [
            (float(row.count * one.exposed_s), float(row.count * one.expected_s))
            for row in plan.ledger
            if row.scope.startswith("layers/")
            for one in row.collectives
            if one.kind in ("all_gather", "reduce_scatter") and one.axes == ("fsdp",)
        ]
        exposed, total = map(sum, zip(*gathers, strict=True))
        assert least <= exposed / total <= most


@pytest.mark.parametrize("on", ["h100:8x4", "gb200:72x2", "h800:8x4"])
def test_expectations_are_no_less_than_bounds(on: str) -> None:
    plan = best("llama3-8b", on, seqs=288)
    assert plan.expected_s >= max(plan.lower_s.values())
    for row in plan.ledger:
        for collective in row.collectives:
            assert float(collective.expected_s) >= max(map(float, collective.time_s.values())) * (1 - 1e-12)


def test_slower_nvlink_is_slower() -> None:
    """H800 is an H100 with less than half of its NVLink."""
    h100, h800 = (best("llama3-8b", f"{name}:8", seqs=64, axes="tensor=8", remat="block") for name in ("h100", "h800"))
    assert h800.expected_s > h100.expected_s
    assert h800.ledger.total("ici") == pytest.approx(450 / 200 * h100.ledger.total("ici"), rel=0.01)


@pytest.mark.parametrize(
    ("model", "on", "axes", "rules"),
    [
        (
            "llama3-70b",
            "h100:8x8",
            "tensor=8,fsdp=8",
            ["FSDP and data parallelism", "tensor parallelism", "egress of a node"],
        ),
        (
            "mixtral-8x7b",
            "gb200:8x8",
            "expert=8,fsdp=8",
            ["FSDP and data parallelism", "tensor parallelism", "expert parallelism", "egress of a node"],
        ),
        ("llama3-8b", "b200:8", "fsdp=8", ["FSDP and data parallelism", "tensor parallelism"]),
        ("llama3-8b", "v5e:4x4", "fsdp=16", []),
    ],
)
def test_plans_say_the_rules_of_gpus(model: str, on: str, axes: str, rules: list[str]) -> None:
    reasons = [reason for reason in best(model, on, seqs=256, axes=axes).reasons if reason.source == "chapter 12"]
    assert [reason.rule for reason in reasons] == rules


def test_racks_of_72_are_bound_by_nvlink_and_nodes_of_8_by_the_network() -> None:
    for on, holds in (("h100:8x2", False), ("gb200:72x2", True)):
        reasons = best("llama3-8b", on, seqs=288).reasons
        assert next(reason for reason in reasons if reason.rule == "egress of a node").holds == holds


def test_eight_bits_on_gpus_are_int8() -> None:
    """XLA:GPU multiplies float8 operands as float16; TPU7x multiplies them as they are."""

    def obstacles(on: str, dtype: str) -> str:
        problem = Problem(
            model=load_model("llama3-8b"),
            slice=Slice.parse(on),
            workload=Workload(batch_tokens=16 * 4096, seq_len=4096),
            numerics=Numerics(matmul=dtype),
            axes={"fsdp": 8},
            remat="block",
        )
        swept = sweep(problem)
        return "; ".join(swept.plan(swept.best).obstacles)

    assert "float16" in obstacles("h100:8", "f8_e4m3")
    assert not obstacles("h100:8", "int8")
    assert not obstacles("tpu7x:2x2x1", "f8_e4m3")


def test_memory_is_that_of_the_compiled_program() -> None:
    """LLaMA-3 8B as compiled for eight H100 (docs/compile.md)."""
    plan = best("llama3-8b", "h100:8", seqs=16, axes="fsdp=8", remat="matmuls")
    assert plan.memory_bytes == pytest.approx(42470351916, rel=0.03)
