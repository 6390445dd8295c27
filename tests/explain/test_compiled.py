"""Planned beside compiled: what is found, what explains it, within which tolerances, and the roofline of each op."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from rooftop.arrays import Mesh
from rooftop.compiler.collectives.logical import LogicalCollective
from rooftop.compiler.machine.schedule import Scheduled
from rooftop.compiler.memory import HbmBuffer, OutOfMemory, PeakMemory
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Collective, Ledger, Row
from rooftop.explain.compiled.findings import Findings, find
from rooftop.explain.compiled.function import inspect, laid_mesh
from rooftop.explain.compiled.report import Check, CompiledReport, bytes_by_axes, verdict
from rooftop.explain.compiled.rooflines import OperationRoofline
from rooftop.explain.compiled.training import Refusal, nearest_fit, request
from rooftop.explain.join import join
from rooftop.hardware import Slice
from rooftop.models import ModelConfig
from rooftop.models.numerics import Numerics
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload

MESH = Mesh.from_layout(Slice.parse("v5e:4x4"), "fsdp=x,tensor=y")
TOY = ModelConfig(
    name="toy", family="llama", layers=2, d_model=1024, d_ff=4096, heads=8, kv_heads=4, d_head=128, vocab=8192,
    max_seq_len=512,
)  # fmt: skip


def planned(scope: str, *moved: tuple[str, str, float], flops: float = 0.0, phase: str = "forward") -> Row:
    entries = tuple(
        Collective(kind=kind, axes=tuple(axes.split(",")), bytes=nbytes, wire_bytes=0.0, critical=True, expected_s=1e-3)
        for kind, axes, nbytes in moved
    )
    return Row(scope=scope, phase=phase, count=2, flops={"bf16": flops}, collectives=entries, expected_s=5e-3)


def scheduled(
    scope: str, kind: str, axes: str, nbytes: float, *, phase: str = "forward", name: str = "op.1"
) -> Scheduled:
    one = LogicalCollective(
        kind=kind, axes=tuple(axes.split(",")), bytes=nbytes, wire_bytes=0.0, executions=2, synchronous=True, hops=0,
        scope=scope, phase=phase, source="model.py:7", instructions=(("main", name),),
    )  # fmt: skip
    return Scheduled(collective=one, start_s=0.0, done_s=0.0, price_s=2e-3, exposed_s=2e-3, time_s={})


def compiled(collectives: Iterable[Scheduled], *rows: Row) -> Ledger:
    """A compiled ledger with those collectives, beside rows that are given."""
    compiled_rows = [
        Row(scope=c.scope, phase=c.phase, count=c.executions, collectives=(c.ledger_entry,))
        for c in (entry.collective for entry in collectives)
    ]
    return Ledger((*compiled_rows, *rows))


def operation(scope: str, flops: float, *, phase: str = "forward", name: str = "fusion.1") -> OperationRoofline:
    return OperationRoofline(
        op=name, opcode="fusion", scope=scope, phase=phase, source="model.py:3", count=2, shape="", matmul="",
        flops=flops, hbm_bytes=1.0, time_s={"mxu": 1e-3, "hbm": 2e-3}, expected_s=3e-3, kernel=False,
    )  # fmt: skip


def findings_of(
    plan: Iterable[Row], moved: Iterable[Scheduled] = (), operations: Iterable[OperationRoofline] = (), *rows: Row
) -> Findings:
    moved, plan = list(moved), Ledger(tuple(plan))
    return find(join(plan, compiled(moved, *rows)), plan, moved, list(operations), MESH)


def test_what_is_as_planned_is_no_finding() -> None:
    plan = planned("layers/mlp/up", ("all_gather", "fsdp", 4e6), flops=1e9)
    real = scheduled("layers/mlp/up", "all_gather", "fsdp", 4e6)
    rows = Row(scope="layers/mlp/up", phase="forward", count=1, flops={"bf16": 2e9})
    nothing = findings_of([plan], [real], [operation("layers/mlp/up", 1e9)], rows)
    assert nothing == Findings(unexpected=(), missing=(), recomputed=(), spelled=())


def test_unexpected_has_bytes_price_and_source() -> None:
    (stray,) = findings_of([], [scheduled("embed", "all_reduce", "tensor", 4e6)]).unexpected
    assert (stray.scope, stray.kind, stray.axes) == ("embed", "all_reduce", ("tensor",))
    assert (stray.bytes, stray.cost_s, stray.source, stray.rule) == (8e6, 4e-3, "model.py:7", "")


def test_missing_has_the_planned_price() -> None:
    (absent,) = findings_of([planned("embed", ("all_to_all", "fsdp", 4e6))]).missing
    assert (absent.bytes, absent.cost_s, absent.source, absent.rule) == (8e6, 2e-3, "", "")


def test_a_part_more_costs_its_part() -> None:
    plan = planned("embed", ("all_gather", "fsdp", 4e6))
    more = findings_of([plan], [scheduled("embed", "all_gather", "fsdp", 5e6)])
    (stray,) = more.unexpected
    assert (stray.bytes, stray.cost_s) == (pytest.approx(2e6), pytest.approx(4e-3 / 5))
    assert more.unexplained == more.unexpected


def test_the_same_under_another_name_is_explained_on_both_sides() -> None:
    """Collectives that XLA names after another scope, spelled as an AllReduce or not; the rest is not explained."""
    plan = [planned("layers/mlp/up", ("reduce_scatter", "fsdp", 4e6), phase="backward")]
    real = [scheduled("unscoped", "all_reduce", "fsdp", 5e6, phase="backward")]
    findings = findings_of(plan, real)
    assert [(finding.rule, finding.bytes) for finding in findings.unexpected] == [("", 2e6), ("named", 8e6)]
    assert [(finding.rule, finding.bytes) for finding in findings.missing] == [("named", 8e6)]
    assert "layers/mlp/up backward" in findings.unexpected[1].why
    assert "unscoped backward" in findings.missing[0].why
    assert [finding.bytes for finding in findings.unexplained] == [2e6]


@pytest.mark.parametrize("axes", ["tensor", "fsdp,tensor"])
def test_other_axes_are_another_collective(axes: str) -> None:
    plan = [planned("embed", ("all_gather", "fsdp", 4e6))]
    findings = findings_of(plan, [scheduled("loss", "all_gather", axes, 4e6)])
    assert [finding.rule for finding in (*findings.unexpected, *findings.missing)] == ["", ""]


def test_repeated_by_xla_is_explained_by_its_name() -> None:
    stray = scheduled("layers/attn/qkv", "all_gather", "tensor", 4e6, name="all-gather.7.remat2")
    findings = findings_of([], [stray])
    assert [finding.rule for finding in findings.unexpected] == ["rematerialised"]
    assert [finding.rule for finding in findings.recomputed] == ["rematerialised"]
    assert findings.unexplained == ()


def test_small_collectives_need_no_reason() -> None:
    (small,) = findings_of([], [scheduled("loss", "all_reduce", "fsdp", 1000.0)]).unexpected
    assert small.rule == "small"
    # Nor is it taken for a part of something large elsewhere.
    large = planned("embed", ("all_reduce", "fsdp", 4e6))
    findings = findings_of([large], [scheduled("loss", "all_reduce", "fsdp", 1000.0)])
    assert [finding.rule for finding in findings.unexpected] == ["small"]
    assert [(finding.rule, finding.bytes) for finding in findings.missing] == [("", 8e6)]


@pytest.mark.parametrize(("axes", "rule"), [("fsdp,tensor", "whole_slice"), ("fsdp", "spelled")])
def test_an_all_reduce_for_a_scatter_is_said(axes: str, rule: str) -> None:
    plan = [planned("unembed", ("reduce_scatter", axes, 4e6), phase="backward")]
    findings = findings_of(plan, [scheduled("unembed", "all_reduce", axes, 4e6, phase="backward")])
    assert (findings.unexpected, findings.missing) == ((), ())
    assert [(finding.kind, finding.rule, finding.cost_s) for finding in findings.spelled] == [
        ("all_reduce", rule, 4e-3)
    ]


def test_a_sum_over_slices_in_three_steps_is_one() -> None:
    """AllReduce over data and fsdp, where data is DCN: sums within a slice, between slices, then the parts gathered."""
    mesh = Mesh.from_layout(Slice.parse("v5e:4x4@2"), "data=dcn,fsdp=x+y")
    plan = Ledger((planned("gradients", ("all_reduce", "data,fsdp", 4e6), phase="update"),))
    steps = ("all_reduce", "fsdp", 4e6), ("all_reduce", "data", 25e4), ("all_gather", "fsdp", 4e6)
    moved = [scheduled("gradients", *step, phase="update") for step in steps]
    rows = join(plan, compiled(moved))
    findings = find(rows, plan, moved, [], mesh)
    assert {finding.rule for finding in (*findings.unexpected, *findings.missing)} == {"in_steps"}
    assert bytes_by_axes(rows, findings) == {}
    # Within one slice nothing is done in steps.
    findings = find(rows, plan, moved, [], MESH)
    assert {finding.rule for finding in (*findings.unexpected, *findings.missing)} == {""}


def test_a_sum_over_an_axis_across_slices_in_three_steps_is_one() -> None:
    """AllReduce over four stages on two slices: what is left between slices has the planned name."""
    mesh = Mesh.from_layout(Slice.parse("v5e:4x4@2"), "stage=dcn+x[1:2],tensor=x[2:2]+y")
    plan = Ledger((planned("gradients", ("all_reduce", "stage", 4e6), phase="update"),))
    steps = ("reduce_scatter", 4e6), ("all_reduce", 2e6), ("all_gather", 4e6)
    moved = [scheduled("gradients", kind, "stage", size, phase="update") for kind, size in steps]
    findings = find(join(plan, compiled(moved)), plan, moved, [], mesh)
    assert {finding.rule for finding in (*findings.unexpected, *findings.missing)} == {"in_steps"}


def test_recomputed_says_whether_the_plan_asked_for_it() -> None:
    plan = [planned("layers/mlp/up", flops=1e9, phase="recompute")]
    twice = [operation(scope, 1e9, phase="recompute") for scope in ("layers/mlp/up", "layers/attn/qkv")]
    rows = [
        Row(scope=scope, phase="recompute", count=2, flops={"bf16": 1e9})
        for scope in ("layers/mlp/up", "layers/attn/qkv")
    ]
    findings = findings_of(plan, [], twice, *rows)
    assert [(finding.scope, finding.rule, finding.flops) for finding in findings.recomputed] == [
        ("layers/attn/qkv", "", 2e9),
        ("layers/mlp/up", "policy", 2e9),
    ]
    assert [finding.flops for finding in findings.unexpected] == [2e9]


def test_a_kernel_that_is_none_is_said() -> None:
    row = replace(planned("layers/attn/core"), kernel_flops=3e9)
    real = Row(scope="layers/attn/core", phase="forward", count=2, flops={"bf16": 1e9})
    (absent,) = findings_of([row], [], [operation("layers/attn/core", 1e9)], real).missing
    assert (absent.rule, absent.flops) == ("no_kernel", 4e9)


@pytest.mark.parametrize(("kernel", "rule"), [(False, "scores"), (True, "")])
def test_scores_are_computed_again_where_no_kernel_keeps_them(kernel: bool, rule: str) -> None:
    row = planned("layers/attn/core", flops=1e9, phase="backward")
    real = Row(scope="layers/attn/core", phase="backward", count=2, flops={"bf16": 2e9})
    one = replace(operation("layers/attn/core", 2e9, phase="backward"), kernel=kernel)
    (more,) = findings_of([row], [], [one], real).unexpected
    assert (more.rule, more.flops) == (rule, 2e9)


# ---- tolerances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned_bytes", "holds"), [(100.0, True), (109.0, True), (111.0, False), (98.0, True), (96.0, False)]
)
def test_planned_memory_may_be_high_rather_than_low(planned_bytes: float, holds: bool) -> None:
    check = Check.of("peak memory", "B", planned_bytes, 100.0, above=0.10, below=0.03)
    assert check.holds is holds


def test_bytes_are_summed_by_axes() -> None:
    plan = [planned("embed", ("all_gather", "tensor,fsdp", 4e6)), planned("loss", ("all_reduce", "fsdp", 1e6))]
    rows = join(Ledger(tuple(plan)), compiled([scheduled("embed", "all_gather", "fsdp,tensor", 4e6)]))
    nothing = Findings(unexpected=(), missing=(), recomputed=(), spelled=())
    assert bytes_by_axes(rows, nothing) == {"fsdp+tensor": (8e6, 8e6), "fsdp": (2e6, 0.0)}


def toy_plan(name: str = "v5e:2x2") -> TrainingPlan:
    problem = Problem(model=TOY, slice=Slice.parse(name), workload=Workload(batch_tokens=2048, seq_len=512))
    return plan_training(problem, alternatives=0).plan


def test_verdict_names_what_differs() -> None:
    low = Check.of("peak memory", "B", 8e9, 9e9, above=0.1, below=0.03)
    assert verdict(toy_plan(), 9e9, [low]) == ("differs: peak memory 9 GB for 8 GB planned; 9 GB of 16.9 GB a device")
    assert verdict(toy_plan(), 9e9, []).startswith("as planned")


def test_verdict_says_when_only_the_compiler_makes_it_fit() -> None:
    plan = toy_plan()
    tight = plan.problem.slice.chip.replace(hbm_usable_bytes=1e6)
    small = replace(plan, problem=replace(plan.problem, slice=Slice(tight, plan.problem.slice.shape)))
    assert "though not by the plan's arithmetic" in verdict(small, 9e5, [])


# ---- what does not fit -----------------------------------------------------------------------------------------------


def refusal(plan: TrainingPlan, needed: float) -> Refusal:
    buffers = (HbmBuffer(bytes=7, shape="f32[7]", memory_class="workspace", name="fusion.1", source="model.py:9"),)
    at_peak = PeakMemory(allocated_bytes=7, buffers=buffers)
    answer = OutOfMemory("toy", needed_bytes=needed, available_bytes=plan.problem.capacity, at_peak=at_peak)
    return Refusal(plan=plan, answer=answer, nearest=nearest_fit(plan, needed))


def test_a_refusal_names_the_nearest_plan_that_fits() -> None:
    """Twice the memory that was planned: on the same mesh another policy will do."""
    model = replace(TOY, layers=16)
    workload = Workload(batch_tokens=128 * 512, seq_len=512)
    problem = Problem(
        model=model, slice=Slice.parse("v5e:2x2"), workload=workload, axes={"fsdp": 4}, remat="none", microbatches=1
    )
    plan = plan_training(problem, alternatives=0).plan
    needed = plan.memory_bytes * 1.6
    assert plan.fits
    assert needed > plan.problem.capacity
    no = refusal(plan, needed)
    assert no.nearest is not None
    assert no.nearest.mesh.shape == plan.mesh.shape
    assert no.nearest.memory_bytes * 1.6 <= plan.problem.capacity
    assert "though it fits by the plan's arithmetic" in no.verdict
    assert "nearest that should fit: --mesh fsdp=4 --remat" in str(no.infeasible)
    data = no.to_json()
    assert data["over_bytes"] == pytest.approx(needed - plan.problem.capacity)
    assert [buffer["source"] for buffer in data["buffers"]] == ["model.py:9"]


def test_a_refusal_says_when_nothing_fits() -> None:
    no = refusal(toy_plan(), 1e15)
    assert no.nearest is None
    assert "fits on this slice" in str(no.infeasible)


def test_the_request_is_the_plan() -> None:
    plan = toy_plan()
    asked = request(plan)
    assert (asked.mesh, asked.arguments["batch"], asked.arguments["seq_len"]) == (plan.mesh, 4, 512)
    assert asked.arguments["computation"]["remat"] == plan.choice.remat


def test_a_plan_that_cannot_run_is_refused() -> None:
    workload, numerics = Workload(batch_tokens=4 * 512, seq_len=512), Numerics(matmul="int4")
    narrow = Problem(model=TOY, slice=Slice.parse("v5e:2x2"), workload=workload, numerics=numerics)
    with pytest.raises(RooftopError, match="no program multiplies in int4"):
        request(plan_training(narrow, alternatives=0).plan)


# ---- any JAX function ------------------------------------------------------------------------------------------------


def gathered_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("layers/mlp/up"):
        return jax.nn.relu(jnp.einsum("bd,df->bf", x, jax.reshard(w, jax.P(None, "Y"))))


@pytest.fixture(scope="module")
def report() -> CompiledReport:
    return inspect(gathered_matmul, "bf16[8192_X, D]", "bf16[D_X, F_Y]", on="v5e:4x4", mesh="X=4,Y=4", dims=DIMS)


DIMS = {"D": 4096, "F": 16384}


def test_operations_add_up_to_the_timeline(report: CompiledReport) -> None:
    line = report.timeline
    assert sum(operation.total_s for operation in report.operations) == pytest.approx(
        line.compute_s + line.other_wait_s
    )
    assert float(report.ledger.expected_s) == pytest.approx(line.total_s)
    assert report.to_json()["step"]["expected_s"] == line.total_s


def test_a_function_is_read_with_its_roofline(report: CompiledReport) -> None:
    """2048 x 4096 x 4096 on a device: 68.7 GFLOPs; the gather of the weight over X is 4096 x 4096 x 2 bytes."""
    assert report.flops == 2 * 2048 * 4096 * 4096
    assert report.timed.step.mxu_s == pytest.approx(report.flops / 1.97e14)
    (gather,) = report.to_json()["collectives"]
    assert (gather["kind"], gather["axes"], gather["bytes"]) == ("all_gather", ["X"], 2 * 4096 * 4096)
    assert gather["source"].rpartition("/")[2].startswith("test_compiled.py:")
    matmuls = [operation for operation in report.slowest(20) if operation.flops]
    assert {(operation.scope, operation.bound) for operation in matmuls} == {("layers/mlp/up", "mxu")}
    assert all(operation.intensity is not None and operation.intensity > 240 for operation in matmuls)
    assert (report.plan, report.agrees, report.joined) == (None, True, ())


def test_arguments_may_be_any_pytree_of_anything_with_a_shape() -> None:
    def add(pair: dict[str, jax.Array], z: jax.Array) -> jax.Array:
        return pair["x"] + pair["y"] + z

    spec = jax.sharding.NamedSharding(jax.sharding.AbstractMesh((2, 2), ("x", "y")), jax.P("x"))
    split = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=spec)
    pair = {"x": split, "y": "f32[256_x, 128]"}
    alone = inspect(add, pair, "f32[256_x, 128]", on="v5e:2x2")
    assert alone.compiled.mesh.shape == {"x": 2, "y": 2}
    assert alone.timeline.collectives == ()
    assert float(sum(row.hbm_bytes for row in alone.ledger)) == 4 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("bf16[8191_X]", "multiple of 4"),
        ("bf16[8_Q]", "one of X, Y"),
        ("bf16[D_X]", "no size"),
        ("bf16[8]{U_X}", "partial sums"),
        ("bf17[8]", "bf16"),
        (object(), "as an abstract array"),
    ],
)
def test_wrong_arguments_are_named(argument: object, message: str) -> None:
    with pytest.raises(RooftopError, match=message):
        inspect(jnp.sin, argument, on="v5e:4x4", mesh="X=4,Y=4")


def test_a_mesh_lies_on_the_slice() -> None:
    with pytest.raises(RooftopError, match="16 devices"):
        laid_mesh(Slice.parse("v5e:4x4"), "X=4,Y=2")
