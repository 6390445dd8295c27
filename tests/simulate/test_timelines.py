"""Timelines that are planned, and what is written of them: Perfetto's format, and traces that JAX's profiler reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from rooftop.core.timelines import COMPUTE, MORE, TRANSFER, WAIT, Lane, Lanes, TimeSpan
from rooftop.core.timelines.perfetto import trace
from rooftop.core.timelines.xprof import write, xspace
from rooftop.explain.measured.report import explain
from rooftop.hardware import Slice, chip, chip_of_kind
from rooftop.models import load_model
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.roofline.rates import device_stats
from rooftop.simulate.pipeline import of_plan
from rooftop.simulate.planned import planned_lanes


def plan(model: str = "llama3-8b", on: str = "v5e:4x4", **how: Any) -> TrainingPlan:
    """A plan on the axes that it is given."""
    problem = Problem(
        model=load_model(model),
        slice=Slice.parse(on),
        workload=Workload(batch_tokens=how.pop("tokens", 16 * 2048), seq_len=2048),
        remat=how.pop("remat", "block"),
        **how,
    )
    return plan_training(problem, alternatives=0).plan


PLANS = {
    "dense": {"axes": {"fsdp": 4, "tensor": 4}, "microbatches": 1},
    "microbatches": {"axes": {"fsdp": 4, "tensor": 4}, "microbatches": 4},
    "experts": {
        "model": "deepseek-v2-lite", "on": "v5p:4x4x4", "axes": {"fsdp": 16, "expert": 4}, "microbatches": 1,
        "tokens": 64 * 2048,
    },
}  # fmt: skip


@pytest.mark.parametrize("every_trip", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_a_planned_timeline_lasts_as_long_as_the_plan_expects(name: str, every_trip: bool) -> None:
    planned = plan(**PLANS[name])
    drawn = planned_lanes(planned, every_trip=every_trip)
    assert drawn.total_s == pytest.approx(float(planned.ledger.expected_s), rel=1e-9)
    for lane in drawn.lanes:
        assert all(one.end_s <= two.start_s * (1 + 1e-12) for one, two in pairwise(lane.spans))
    compute = drawn.lanes[0].spans
    # Nothing is left out between spans: a device computes, waits, or does what is not drawn one by one.
    assert sum(span.seconds for span in compute) == pytest.approx(drawn.total_s, rel=1e-9)
    assert any(span.sort == MORE for span in compute) is not every_trip


def test_every_row_has_its_time_and_its_waits() -> None:
    planned = plan(**PLANS["dense"])
    spans = planned_lanes(planned, every_trip=True).lanes[0].spans
    for key, rows in planned.ledger.by_key().items():
        mine = [span for span in spans if (span.scope, span.phase) == key]
        expected = sum(float(row.count * row.expected_s) for row in rows)
        assert sum(span.seconds for span in mine) == pytest.approx(expected, rel=1e-9)
        shown = sum(float(row.count * collective.exposed_s) for row in rows for collective in row.collectives)
        assert sum(span.seconds for span in mine if span.sort == WAIT) == pytest.approx(shown, rel=1e-9, abs=1e-15)


def test_a_transfer_stands_beside_the_wait_for_it() -> None:
    planned = plan(**PLANS["dense"])
    drawn = planned_lanes(planned)
    waits = {span.flight: span for span in drawn.lanes[0].spans if span.flight is not None}
    transfers = [span for lane in drawn.lanes[1:] for span in lane.spans]
    assert {lane.name for lane in drawn.lanes[1:]} >= {"ici fsdp", "ici tensor"}
    for span in transfers:
        assert span.sort == TRANSFER
        if span.flight in waits:
            assert span.seconds >= waits[span.flight].seconds * (1 - 1e-9)
            assert span.end_s >= waits[span.flight].start_s


def test_dense_layers_come_before_those_with_experts() -> None:
    spans = planned_lanes(plan(**PLANS["experts"]), every_trip=True).lanes[0].spans
    forward = [span.scope for span in spans if span.phase == "forward" and span.sort == COMPUTE]
    assert forward.index("layers/mlp/up") < forward.index("layers/moe/experts")
    assert forward.count("layers/mlp/up") == 1
    assert forward.count("layers/moe/shared") % (forward.count("layers/attn/core") - 1) == 0
    assert forward.count("layers/mlp/norm") == forward.count("layers/attn/core")


def test_stages_of_a_pipeline_are_lanes() -> None:
    mesh = {"stage": 4, "fsdp": 16}
    planned = plan(on="v5p:4x4x4", axes=mesh, microbatches=8, tokens=128 * 2048, schedule="1f1b")
    drawn = planned_lanes(planned)
    assert [lane.name for lane in drawn.lanes] == [f"stage {stage}" for stage in range(4)]
    names = [span.name for span in drawn.lanes[0].spans]
    assert names[:4] == ["F0", "F1", "F2", "F3"]
    assert drawn.lanes[3].spans[1].name == "B0", "1F1B: the last stage goes back at once"
    passes = max(span.end_s for lane in drawn.lanes for span in lane.spans if span.name[0] in "FB")
    assert passes == pytest.approx(of_plan(planned).passes_s)
    assert drawn.total_s > passes, "then comes the update"


def test_stages_of_a_pipeline_are_devices_of_a_trace(tmp_path: Path) -> None:
    planned = plan(on="v5p:4x4x4", axes={"stage": 4, "fsdp": 16}, microbatches=8, tokens=128 * 2048)
    drawn = planned_lanes(planned, every_trip=True)
    write(xspace(drawn, program="planned", device=device_stats(chip("v5p"))), tmp_path, run="planned")
    result = explain(tmp_path).measured
    assert result.devices == 4
    assert result.step_s == pytest.approx(drawn.total_s, abs=1e-11)
    busy = sum(span.seconds for lane in drawn.lanes for span in lane.spans) / 4
    assert result.busy_s == pytest.approx(busy, abs=1e-9)
    assert result.idle.seconds == pytest.approx(drawn.total_s - busy, abs=1e-9), "the bubble"


def test_what_is_written_for_perfetto_has_every_span() -> None:
    drawn = planned_lanes(plan(**PLANS["dense"]))
    written = json.loads(json.dumps(trace(drawn), allow_nan=False))
    slices = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == sum(len(lane.spans) for lane in drawn.lanes)
    assert sum(event["dur"] for event in slices if event["tid"] == 1) == pytest.approx(1e6 * drawn.total_s)
    gather = next(event for event in slices if event["name"] == "all_gather over tensor")
    assert gather["args"]["axes"] == "tensor"
    assert gather["cat"] == "transfer"


def test_a_trace_is_read_back_by_jax_and_measured_as_planned(tmp_path: Path) -> None:
    planned = plan(**PLANS["dense"])
    drawn = planned_lanes(planned, every_trip=True)
    data = xspace(drawn, program="planned", device=device_stats(chip("v5e")))
    (device,) = ProfileData.from_serialized_xspace(data).planes
    assert device.name == "/device:TPU:0"
    lines = {line.name: list(line.events) for line in device.lines}
    assert set(lines) == {"Steps", "XLA Modules", "XLA Ops", "Async XLA Ops"}
    assert len(lines["XLA Ops"]) == len(drawn.lanes[0].spans)
    assert lines["Steps"][0].duration_ns == pytest.approx(drawn.total_s * 1e9, abs=1)
    file = write(data, tmp_path, run="planned")
    assert file == tmp_path / "plugins" / "profile" / "planned" / "rooftop.xplane.pb"
    result = explain(tmp_path)
    assert result.roofs is not None
    assert result.roofs.chip == "v5e"
    (note,) = result.notes
    assert note.startswith("a planned timeline, no measurement: ")
    assert result.measured.step_s == pytest.approx(drawn.total_s, abs=1e-11)
    assert result.measured.attributed == 1.0
    shown = sum(
        float(row.count) * float(collective.exposed_s) for row in planned.ledger for collective in row.collectives
    )
    assert result.measured.exposed_s == pytest.approx(shown, abs=1e-8)
    times = {(row.scope, row.phase): row.time_s for row in result.measured.rows}
    by_key = planned.ledger.by_key().items()
    alone = [(key, rows) for key, rows in by_key if not any(row.collectives for row in rows)]
    assert len(alone) > 10
    for key, rows in alone:
        expected = sum(float(row.count * row.expected_s) for row in rows)
        assert times[key] == pytest.approx(expected, rel=1e-4), key
    assert result.verdict.roofline == pytest.approx(float(planned.ledger.total("mxu")) / drawn.total_s, rel=1e-6)


@pytest.mark.parametrize("name", ["v3", "v4", "v5e", "v5p", "v6e", "h100"])
def test_readers_know_the_device_of_a_trace_again(name: str) -> None:
    assert chip_of_kind(str(device_stats(chip(name))["device_type_string"])) == chip(name)


def test_a_module_travels_with_the_trace(tmp_path: Path) -> None:
    span = TimeSpan(name="x", sort=COMPUTE, start_s=0.0, end_s=1e-6, op="%x.1 = f32[8]{0} negate(%p)", flops=8.0)
    drawn = Lanes(title="", source="compiled", total_s=2e-6, lanes=(Lane(name=COMPUTE, spans=(span,)),))
    planes = ProfileData.from_serialized_xspace(xspace(drawn, program="jit_f", module=b"\x0a\x00")).planes
    assert [plane.name for plane in planes] == ["/device:TPU:0", "/host:metadata"]


def test_on_the_command_line(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    options = (
        "--on",
        "v5e:4x4",
        "--batch-seqs",
        "16",
        "--seq",
        "2048",
        "--mesh",
        "fsdp=4,tensor=4",
        "--remat",
        "block",
    )
    files = (
        "--perfetto",
        str(tmp_path / "t.json"),
        "--xprof",
        str(tmp_path / "x"),
        "--report",
        str(tmp_path / "r.html"),
    )
    answer = rooftop("plan", "train", "llama3-8b", *options, *files, "--json")
    assert answer.status == 0, answer.err
    drawn = json.loads((tmp_path / "t.json").read_text())
    assert drawn["otherData"]["total_s"] == pytest.approx(answer.json["step"]["expected_s"])
    assert explain(tmp_path / "x").measured.step_s == pytest.approx(answer.json["step"]["expected_s"])
    assert "layers/mlp/up" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("option", ["--perfetto", "--report", "--xprof"])
def test_a_place_that_cannot_be_written_is_one_line(rooftop: Callable[..., Any], tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "below")
    options = ("--on", "v5e:2x2", "--batch-seqs", "4", "--seq", "2048", "--mesh", "fsdp=4", "--remat", "block")
    answer = rooftop("plan", "train", "llama3.2-1b", *options, option, place)
    assert answer.status == 2
    assert len(answer.err.strip().splitlines()) == 1
    assert "can be written" in answer.err
