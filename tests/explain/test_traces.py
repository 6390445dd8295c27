"""Traces beside their module and their plan: the three columns, the roofs, the verdict, and two of a kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import pytest
from jax import P

from rooftop.cli.main import VERBS
from rooftop.cli.output import show
from rooftop.compiler.machine.run import COMPUTE
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Ledger
from rooftop.core.records import schema
from rooftop.explain.compiled.function import inspect
from rooftop.explain.difference import Difference, difference, ledger_side, read_side
from rooftop.explain.measured.modules import program_of, read_module
from rooftop.explain.measured.report import Explained, ExplainedRecord, explain
from rooftop.hardware import Slice, chip
from rooftop.models import load_model
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.runs.folder import RunFolder
from tests.support.traces import GATHER, GATHERED, LOOP, REDUCE, Event, fusion, plane, step, tpu, xspace
from tests.support.training_runs import CONFIG, command, write_corpus
from tests.support.training_runs import run as run_command

V5E = {
    "device_type_string": "TPU v5 lite",
    "peak_teraflops_per_second": 197.0,
    "peak_hbm_bw_gigabytes_per_second": 820.0,
}
#: The module of the synthetic step: fusion.1 makes what all-reduce.3 sums, and all-gather.1 gathers a weight.
MODULE = """HloModule jit_step, is_scheduled=true, num_partitions=8

FileNames
1 "/home/user/model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%fused_computation.1 (p0: bf16[1024,512], p1: bf16[512,1024]) -> f32[1024,1024] {
  %p0 = bf16[1024,512]{1,0} parameter(0)
  %p1 = bf16[512,1024]{1,0} parameter(1)
  ROOT %dot.1 = f32[1024,1024] dot(%p0, %p1), lhs_contracting_dims={1}, at=attn/out/dot_general:1
}

%fused_computation.2 (p0: f32[1024,1024]) -> f32[1024,1024] {
  %p0 = f32[1024,1024] parameter(0)
  ROOT %tanh.1 = f32[1024,1024] tanh(%p0)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[1024,512], w: bf16[512,1024], v: bf16[8,128]) -> f32[1024,1024] {
  %x = bf16[1024,512]{1,0} parameter(0), metadata={op_name="x"}
  %w = bf16[512,1024]{1,0} parameter(1), metadata={op_name="weights.up"}
  %v = bf16[8,128]{1,0} parameter(2), metadata={op_name="weights.down"}
  %fusion.1 = f32[1024,1024] fusion(%x, %w), kind=kOutput, calls=%fused_computation.1, at=attn/out/dot_general:1
  %all-gather-start.1 = (bf16[8,128], bf16[64,128]) all-gather-start(%v), replica_groups={}, at=mlp/down/gather:2
  %fusion.2 = f32[1024,1024] fusion(%fusion.1), kind=kLoop, calls=%fused_computation.2, at=mlp/act/tanh:2
  %all-gather-done.1 = bf16[64,128]{1,0} all-gather-done(%all-gather-start.1), at=mlp/down/gather:2
  ROOT %all-reduce.3 = f32[1024,1024] all-reduce(%fusion.2), replica_groups=[2,4]<=[8], to_apply=%add, at=mlp/up/dot:1
}
"""
MODULE = re.sub(r"at=(\S+):(\d)", r'metadata={op_name="jit(step)/jvp(layers)/\1" stack_frame_id=\2}', MODULE)


def explained(
    folder: Path, *, stats: dict[str, Any] | None = None, ops: list[Event] | None = None, **how: Any
) -> Explained:
    """The synthetic step of a v5e, with its module."""
    file = folder / "host.xplane.pb"
    file.write_bytes(xspace(tpu(stats=V5E if stats is None else stats, ops=ops)))
    return explain(file, modules=[MODULE], mesh={"data": 2, "tensor": 4}, **how)


def test_the_module_tells_scope_line_and_mesh_axes(tmp_path: Path) -> None:
    result = explained(tmp_path)
    rows = {(row.scope, row.phase): row for row in result.rows}
    out = rows["layers/attn/out", "forward"]
    assert out.measured is not None
    assert out.compiled is not None
    assert out.measured.time_s == pytest.approx(30e-6)
    assert out.compiled.flops == 2 * 1024 * 512 * 1024
    (gathered,), (reduced,) = (rows[f"layers/mlp/{name}", "forward"].collectives for name in ("down", "up"))
    assert (gathered.kind, gathered.axes, gathered.compiled_bytes) == ("all_gather", ("data", "tensor"), 64 * 128 * 2)
    assert gathered.in_flight_s == pytest.approx(40e-6)
    assert gathered.exposed_s == pytest.approx(11e-6)
    assert (reduced.axes, reduced.compiled_bytes) == (("tensor",), 1024 * 1024 * 4)
    sources = {op.name: op.facts.source for op in result.measured.ops}
    assert sources["fusion.1"] == "/home/user/model.py:10"
    assert sources["all-gather-start.1"] == "/home/user/model.py:20"


def test_rates_stand_beside_the_roofs_exactly(tmp_path: Path) -> None:
    result = explained(tmp_path)
    assert result.roofs is not None
    assert (result.chip, result.roofs.chip) == (chip("v5e"), "v5e")
    data = {operation["op"]: operation for operation in result.to_json()["operations"]}
    flops = 2 * 1024 * 512 * 1024
    assert data["fusion.1"]["flops_per_s"] == pytest.approx(flops / 30e-6)
    moved = 2 * (1024 * 512 + 512 * 1024) + 4 * 1024 * 1024
    assert data["fusion.1"]["hbm_bytes_per_s"] == pytest.approx(moved / 30e-6)
    bound = max(flops / chip("v5e").flops_per_s["bf16"], moved / chip("v5e").hbm_bytes_per_s)
    assert data["fusion.1"]["of_roof"] == pytest.approx(bound / 30e-6)
    (gather,) = (collective for collective in result.to_json()["collectives"] if collective["kind"] == "all_gather")
    sent = 64 * 128 * 2 * 7 / 8
    assert gather["wire_bytes_per_s"] == pytest.approx(sent / 40e-6)
    assert gather["of_roof"] == pytest.approx(sent / 40e-6 / (2 * chip("v5e").ici_bytes_per_s))


def test_what_is_achieved_over_a_step_stands_beside_the_roofs(tmp_path: Path) -> None:
    data = {rate["resource"]: rate for rate in explained(tmp_path).to_json()["achieved"]}
    flops = 2 * 1024 * 512 * 1024
    assert data["mxu"]["per_s"] == pytest.approx(flops / 100e-6)
    assert data["mxu"]["of_roof"] == pytest.approx(flops / 100e-6 / chip("v5e").flops_per_s["bf16"])
    moved = 2 * (1024 * 512 + 512 * 1024) + 4 * 1024 * 1024 + 2 * 4 * 1024 * 1024
    assert data["hbm"]["per_s"] == pytest.approx(moved / 100e-6)
    sent = 64 * 128 * 2 * 7 / 8 + 2 * 4 * 1024 * 1024 * 3 / 4
    assert data["ici"]["per_s"] == pytest.approx(sent / 100e-6)
    assert data["ici"]["peak"] == 2 * chip("v5e").ici_bytes_per_s
    own = {rate["resource"]: rate["peak"] for rate in explained(tmp_path, stats={}).to_json()["achieved"]}
    assert own == {"mxu": None, "hbm": None, "ici": None}


def test_peaks_that_are_wrong_are_said_to_be(tmp_path: Path) -> None:
    result = explained(tmp_path, stats=V5E | {"peak_teraflops_per_second": 400.0})
    note, *rest = result.notes
    assert (
        note
        == "the trace says that a device's peak is 400 TFLOP/s, the catalogue 197 TFLOP/s for v5e: the catalogue's is "
        "used"
    )
    assert explained(tmp_path).notes == tuple(rest), "the others have nothing to do with it"


def test_a_rate_that_beats_its_roof_means_that_an_input_is_wrong(tmp_path: Path) -> None:
    slow = chip("v5e").replace(flops_per_s={"bf16": 1e13})
    result = explained(tmp_path, chip=slow)
    beaten = [note for note in result.notes if "beats the roof" in note]
    # 4 MiB summed over 4 devices in 10 us is more than any v5e can send.
    assert beaten == [
        "fusion.1 beats the roof, at 35.8 TFLOP/s of 10 TFLOP/s: an input is wrong",
        "all-reduce.3 beats the roof, at 629 GB/s sent of 180 GB/s over all links: an input is wrong",
    ]


def test_the_verdict_names_the_share_the_loss_and_its_line(tmp_path: Path) -> None:
    result = explained(tmp_path)
    moved = {
        "fusion.1": 2 * (1024 * 512 + 512 * 1024) + 4 * 1024 * 1024,
        "fusion.2": 2 * 4 * 1024 * 1024,
    }
    # fusion.5 is not in the module, and the trace tells no bytes of it.
    share = sum(moved.values()) / chip("v5e").hbm_bytes_per_s / 100e-6
    sent = (64 * 128 * 2 * 7 / 8 + 2 * 4 * 1024 * 1024 * 3 / 4) / (2 * chip("v5e").ici_bytes_per_s) / 100e-6
    assert result.verdict.roofline == pytest.approx(max(share, sent))
    assert result.verdict.bound == ("ici" if sent > share else "hbm")
    losses = {loss.what: loss for loss in result.verdict.losses}
    gather = losses["an all_gather over data,tensor"]
    assert gather.seconds == pytest.approx(11e-6)
    assert gather.waits_for == "nothing but the argument weights.down, so that it could begin earlier"
    reduce = losses["an all_reduce over tensor"]
    assert reduce.waits_for == "fusion.2 (model.py:20)"
    assert reduce.source == "/home/user/model.py:10"
    assert result.verdict.line.startswith(f"{result.verdict.roofline:.0%} of the roofline ({result.verdict.bound}); ")


def test_what_to_try_has_its_evidence(tmp_path: Path) -> None:
    said = explained(tmp_path).advice
    gather, reduce = (advice for advice in said if advice.rule == "exposed_collective")
    assert gather.seconds == pytest.approx(11e-6)
    assert "29 us pass beside compute" in gather.evidence
    assert "the device waits for all of it" in reduce.evidence
    assert "its operand is made by fusion.2 (model.py:20)" in reduce.evidence
    assert "gathered_activation" not in [advice.rule for advice in said], "what is gathered is a weight"


def test_what_helps_against_several_things_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = explained(tmp_path).to_json()
    first, *others = data["advice"]
    show(data | {"advice": [first, *others[:2], first | {"evidence": "another reason"}]}, top=3)
    printed = " ".join(capsys.readouterr().out.split())
    what = f"{first['what'][0].upper()}{first['what'][1:]}."
    assert printed.count(what) == 1
    assert f"{first['rule']}: another reason" in printed


def test_a_trace_without_a_module_says_so(tmp_path: Path) -> None:
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xspace(tpu()))
    result = explain(file)
    note = "jit_step: the trace has no HLO of it (a CPU's has none of programs out of a cache); --hlo gives one"
    assert result.empty["compiled"] == note
    assert result.empty["roofline"] == "no roof of these devices is known; --on CHIP"
    assert result.verdict.line.startswith("no roofline")


def test_the_module_that_a_run_keeps_beside_its_trace_serves_where_the_trace_has_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder(path=run).profile.mkdir(parents=True)
    (run / "profile" / "host.xplane.pb").write_bytes(xspace(tpu()))
    (run / "run.json").write_text(json.dumps({"mesh": {"data": 2, "tensor": 4}}))
    assert "the trace has no HLO of it" in explain(run).empty["compiled"]
    RunFolder(path=run).write_module(MODULE)
    result = explain(run)
    assert "compiled" not in result.empty
    assert any(row.compiled for row in result.rows)
    # A module of another program says nothing of this one.
    RunFolder(path=run).write_module(MODULE.replace("HloModule jit_step", "HloModule jit_other"))
    assert "the trace has no HLO of it" in explain(run).empty["compiled"]


def test_a_mesh_of_another_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xspace(tpu()))
    with pytest.raises(RooftopError, match="mesh: got 'data 3'; accepted: axes whose sizes multiply to the 8 devices"):
        explain(file, modules=[MODULE], mesh={"data": 3})
    assert explain(file, mesh={"data": 3}).missing, "without a module nobody knows of how many devices it is"


@pytest.mark.parametrize(("content", "where"), [(MODULE, "--hlo"), ('{"kind": "train"}', "--diff")])
def test_files_that_belong_elsewhere_are_told_where(content: str, where: str, tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text(content)
    with pytest.raises(RooftopError, match=f"a trace or a run; .*{where}"):
        explain(file)


def test_modules_are_read_as_text_and_refused_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "module"
    file.write_text(MODULE)
    assert read_module(file) == MODULE
    for content in (b"", b"hello", bytes(range(200))):
        file.write_bytes(content)
        with pytest.raises(RooftopError, match="hlo: got"):
            read_module(file)


def test_matmuls_that_a_library_does_on_a_gpu_are_counted() -> None:
    numbers = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
    text = f"""HloModule jit_f, is_scheduled=true

ENTRY %main (a: bf16[64,128], b: bf16[128,256]) -> bf16[64,256] {{
  %a = bf16[64,128] parameter(0)
  %b = bf16[128,256] parameter(1)
  %gemm.1 = (bf16[64,256], s8[4096]) custom-call(%a, %b), custom_call_target="__cublas$gemm", at=mlp/dot, x={numbers}
  ROOT %out = bf16[64,256] get-tuple-element(%gemm.1), index=0
}}
""".replace("at=mlp/dot", 'metadata={op_name="jit(f)/mlp/dot"}')
    facts = program_of(text, None).facts["gemm.1"]
    assert (facts.flops, facts.matmul, facts.dtype) == (2 * 64 * 128 * 256, (64.0, 128.0, 256.0), "bf16")
    assert facts.place.scope == "mlp"


def test_two_traces_row_by_row(tmp_path: Path) -> None:
    paths = []
    for name, longer in (("before", 0.0), ("after", 5.0)):
        (tmp_path / name).mkdir()
        events = [
            Event(event.name, event.start, event.end + (longer if event.name == REDUCE else 0.0), event.stats)
            for at in (0, 100)
            for event in step(at)
            if event.name != LOOP and event.name != fusion(5)
        ]
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(explained(tmp_path / name, ops=events).to_json()))
        paths.append(file)
    changes = difference(*(read_side(path) for path in paths))
    most = changes.changes[0]
    assert (most.scope, most.change_s) == ("layers/mlp/up", pytest.approx(5e-6))
    idle = next(change for change in changes.changes if change.scope == "idle")
    assert idle.change_s == pytest.approx(-5e-6)
    assert changes.verdict.startswith("100 us a step, then 100 us (+0.0%)")
    same = difference(*(read_side(paths[0]) for _ in range(2)))
    assert same.verdict.endswith("no row differs")


def test_two_plans_row_by_row(rooftop: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, "explain", ("rooftop.cli.explain", ""))
    paths = [tmp_path / f"{name}.json" for name in ("one", "two")]
    for path, mesh in zip(paths, ("fsdp=16", "fsdp=4,tensor=4"), strict=True):
        common = ("--on", "v5e:4x4", "--batch-seqs", "16", "--seq", "2048", "--remat", "block", "--microbatches", "1")
        assert rooftop("plan", "train", "llama3-8b", *common, "--mesh", mesh, "-o", str(path)).status == 0
    data = rooftop("explain", "--diff", *map(str, paths), "--json").json
    jsonschema.validate(data, schema(Difference))
    assert (data["before"]["kind"], data["after"]["kind"]) == ("planned", "planned")
    times = [json.loads(path.read_text())["step"]["expected_s"] for path in paths]
    assert [data[side]["step_s"] for side in ("before", "after")] == pytest.approx(times)
    assert sum(change["change_s"] for change in data["changes"]) == pytest.approx(times[1] - times[0], rel=1e-2)
    assert any("new reduce_scatter over tensor" in text for row in data["changes"] for text in row["collectives"])
    assert "Rows that differ" in rooftop("explain", "--diff", *map(str, paths)).out
    totals = [json.loads(path.read_text())["memory"]["total"] for path in paths]
    assert [data[side]["peak_bytes"] for side in ("before", "after")] == totals
    assert sum(change["change"] for change in data["memory"]) == pytest.approx(totals[1] - totals[0])


def test_a_difference_of_memory_alone_is_named(tmp_path: Path) -> None:
    sides = [
        ledger_side(name, "compiled", Ledger(()), sum(memory.values()), memory=memory)
        for name, memory in (
            ("one", {"arguments": 2e9, "temporaries": 1e9}),
            ("two", {"arguments": 2e9, "temporaries": 1.5e9}),
        )
    ]
    changes = difference(*sides)
    assert [(one.name, one.change) for one in changes.memory] == [("temporaries", 0.5e9)]
    assert (changes.before.peak_bytes, changes.after.peak_bytes) == (3e9, 3.5e9)


def test_two_serving_plans_row_by_row(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    paths = [tmp_path / f"{weights}.json" for weights in ("bf16", "int8")]
    common = ("plan", "serve", "llama3-70b", "--on", "v5e:4x4", "--kv-dtype", "int8", "--batch-seqs", "16")
    for path in paths:
        assert rooftop(*common, "--weights-dtype", path.stem, "-o", str(path)).status == 0
    data = rooftop("explain", "--diff", *map(str, paths), "--json").json
    jsonschema.validate(data, schema(Difference))
    changes = {(change["scope"], change["phase"]): change["change_s"] for change in data["changes"]}
    assert changes["layers/mlp/up", "generate"] < 0, "half the bytes of weights are read"
    weights = next(change for change in data["memory"] if change["name"] == "weights")
    assert 0.45 < weights["after"] / weights["before"] < 0.6
    assert weights["change"] == weights["after"] - weights["before"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            {"kind": "serve", "generate": {}, "prefill": {"ledger": []}},
            "one.json schema: got nothing; accepted: a value",
        ),
        ({"kind": "explained", "rows": [{"scope": "embed"}]}, "one.json schema: got nothing; accepted: a value"),
        ({"kind": "compiled", "fits": True, "ledger": {}}, "one.json schema: got nothing; accepted: a value"),
        ({"kind": "pareto"}, "a run, a trace, a plan.json"),
        ([], "this is no JSON object"),
    ],
)
def test_a_file_that_cannot_be_compared_is_one_line(
    rooftop: Callable[..., Any], tmp_path: Path, content: object, line: str
) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps(content))
    answer = rooftop("explain", "--diff", str(file), str(file))
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert line in answer.err


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"devices": "8 x cpu"}, "run devices: got '8 x cpu'; accepted: an object"),
        ({"job": {"program": None}}, "run job.program: got nothing; accepted: an object"),
        ({"mesh": {"data": "2"}}, "run mesh.data: got '2'; accepted: a whole number"),
    ],
)
def test_a_run_with_a_wrong_field_is_refused_by_its_name(tmp_path: Path, about: dict[str, object], said: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps(about))
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "host.xplane.pb").write_bytes(xspace(tpu()))
    with pytest.raises(RooftopError) as refused:
        explain(tmp_path)
    assert str(refused.value) == said


def test_a_plan_of_training_is_not_compared_with_one_of_serving(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    train, serve = str(tmp_path / "train.json"), str(tmp_path / "serve.json")
    job = ("--on", "v5e:2x2", "--batch-seqs", "8")
    assert rooftop("plan", "train", "llama3.2-1b", *job, "-o", train).status == 0
    assert rooftop("plan", "serve", "llama3.2-1b", *job, "-o", serve).status == 0
    answer = rooftop("explain", "--diff", train, serve)
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert "(train) and" in answer.err
    assert "accepted: two of training, or two of serving" in answer.err


def test_a_run_that_computes_in_another_dtype_than_planned_says_so(tmp_path: Path) -> None:
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xspace(tpu(stats=V5E)))
    problem = Problem(
        model=load_model("llama3.2-1b"), slice=Slice.parse("v5e:2x4"), axes={"data": 2, "tensor": 4},
        workload=Workload(batch_tokens=8 * 2048, seq_len=2048), remat="block", microbatches=1,
    )  # fmt: skip
    plan = plan_training(problem, alternatives=0).plan
    result = explain(file, modules=[MODULE], mesh={"data": 2, "tensor": 4}, plan=plan)
    assert not any("dtype" in note for note in result.notes)
    (note,) = (note for note in replace(result, compute_dtype="f32").notes if "dtype" in note)
    assert note == "the plan computes in bf16, the run in f32: bytes, and rates, are those of another dtype"


def test_json_follows_its_schema_and_tables_print(
    rooftop: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "explain", ("rooftop.cli.explain", ""))
    trace, module = tmp_path / "host.xplane.pb", tmp_path / "step.hlo"
    trace.write_bytes(xspace(tpu(stats=V5E)))
    module.write_text(MODULE)
    arguments = ("explain", str(trace), "--hlo", str(module), "--mesh", "data=2,tensor=4")
    jsonschema.validate(rooftop(*arguments, "--json").json, schema(ExplainedRecord))
    text = rooftop(*arguments).out
    for part in ("of the roofline", "layers/attn/out", "all_gather data,tensor", "What to try", "model.py:10"):
        assert part in text
    assert GATHERED not in text
    assert GATHER not in text


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Two matmuls whose weights every device gathers first."""
    with jax.named_scope("layers/mlp/up"):
        hidden = jnp.einsum("bd,df->bf", x, jax.reshard(up, P(None, None)))
    with jax.named_scope("layers/mlp/down"):
        return jnp.einsum("bf,fd->bd", jax.nn.gelu(hidden), jax.reshard(down, P(None, None)))


@pytest.mark.slow
def test_what_xla_makes_for_a_tpu_is_measured_as_its_timeline_runs(tmp_path: Path) -> None:
    arrays = ("bf16[8192_X,4096]", "bf16[4096_X,8192]", "bf16[8192_X,4096]")
    report = inspect(mlp, *arrays, on="v5e:2x2", mesh={"X": 4}, cache=False)
    line = report.timeline
    # A trace as a TPU would write it if it took as long as the timeline says; what takes no time takes a picosecond.
    ops = [
        Event(event.place[1], event.start_s * 1e6, max(event.end_s, event.start_s + 1e-12) * 1e6)
        for event in line.events
        if event.track == COMPUTE
    ]
    whole = Event("jit_mlp(1)", 0, line.total_s * 1e6)
    lines = {"Steps": [Event("1", 0, whole.end)], "XLA Modules": [whole], "XLA Ops": ops}
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xspace(plane("/device:TPU:0", lines, V5E)))
    result = explain(file, modules=[report.compiled.hlo_text], mesh={"X": 4})
    assert result.measured.step_s == pytest.approx(line.total_s, abs=1e-11)
    assert result.measured.exposed_s == pytest.approx(line.exposed_s, abs=1e-10)
    gathers = {collective.facts.place.scope: collective for collective in result.measured.collectives}
    assert {collective.facts.kind for collective in gathers.values()} == {"all_gather"}
    first, second = gathers["layers/mlp/up"], gathers["layers/mlp/down"]
    assert first.facts.axes == second.facts.axes == ("X",)
    assert first.hidden_s == pytest.approx(0, abs=1e-10), "nothing can run before it"
    assert second.hidden_s > 0.9 * second.in_flight_s, "XLA:TPU carries it on beside the first matmul"
    assert result.measured.attributed > 0.95
    flops = {(row.scope, row.phase): row.compiled.flops for row in result.rows if row.compiled is not None}
    assert flops["layers/mlp/up", "forward"] == 2 * 2048 * 4096 * 8192
    assert result.notes == ()


@pytest.mark.slow
def test_a_run_of_rooftop_train_with_its_plan(
    rooftop: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "explain", ("rooftop.cli.explain", ""))
    folder, plan, run = write_corpus(tmp_path), tmp_path / "plan.json", tmp_path / "run"
    # The plan pads shorter sequences to the 128 positions of the chip's attention kernel, which a CPU does not do.
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 128}))
    planned = ["--on", "v5e:2x2", "--mesh", "fsdp=2,tensor=2", "--batch-seqs", "8", "--seq", "128"]
    planned += ["--microbatches", "1", "--remat", "block", "-o", str(plan)]
    assert rooftop("plan", "train", str(folder / "config.json"), *planned).status == 0
    words = command(folder, run, steps=6, profile="steps=3..6", devices=4, as_is=True, compute_dtype="f32")
    words = [word for at, word in enumerate(words) if not {word, words[at - 1]} & {"--model", "--seq", "--batch-seqs"}]
    words.insert(words.index("train") + 1, str(plan))
    done = run_command(words)
    assert done.status == 0, done.err
    data = rooftop("explain", str(run), "--json").json
    jsonschema.validate(data, schema(ExplainedRecord))
    assert data["devices"] == {"kind": "cpu", "count": 4, "hosts": 1, "emulated": True}
    assert any("emulates" in note for note in data["notes"])
    assert data["attributed"] >= 0.95
    assert {name: size for name, size in data["mesh"].items() if size > 1} == {"fsdp": 2, "tensor": 2}
    assert [record["number"] for record in data["steps"]] == [3, 4, 5, 6]
    rows = {(row["scope"], row["phase"]): row for row in data["rows"]}
    for key in (("layers/mlp/up", "forward"), ("layers/attn/qkv", "backward"), ("unembed", "forward")):
        row = rows[key]
        assert row["measured"]["time_s"] > 0
        assert row["compiled"]["flops"] > 0
        assert row["compiled"]["flops"] == pytest.approx(row["planned"]["flops"])
    whole = sum(row["measured"]["time_s"] for row in data["rows"] if row["measured"])
    assert whole == pytest.approx(data["busy_s"])
    assert whole + data["idle_s"] == pytest.approx(data["step_s"])
