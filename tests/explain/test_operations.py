"""HLO instructions made readable: the examples of chapter 9, and what several lines tell together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rooftop.cli.main import VERBS
from rooftop.compiler.hlo.text import parse
from rooftop.core.errors import RooftopError
from rooftop.core.records import schema
from rooftop.explain.axes import axes_of, devices_of, infer_mesh, stride
from rooftop.explain.operations import HloMatmul, OperationRecord, OperationsRecord, infer, read_operation, times
from rooftop.hardware import chip

#: A core of the TPU v2 of the book's figures: a v3 has two devices a chip as well.
V2 = chip("v3").replace(flops_per_s={"bf16": 2 * 23e12}, ici_bytes_per_s=6e10)
FUSED_SCATTER = (
    "%fusion.3 = bf16[32,32,4096]{2,1,0:T(8,128)(2,1)S(1)} fusion(bf16[32,32,8192]{2,1,0:T(8,128)(2,1)S(1)} "
    "%fusion.32), "
    "kind=kCustom, calls=%all-reduce-scatter.3"
)
UP = (
    "%fusion.7 = bf16[8,1024,16384]{2,1,0:T(8,128)(2,1)} fusion(bf16[8,1024,8192]{2,1,0:T(8,128)(2,1)} %x, "
    "bf16[8192,16384]{1,0:T(8,128)(2,1)} %w), kind=kOutput, calls=%fused_computation.7"
)
SCATTER = (
    "%fusion.1 = bf16[8,1024,4096]{2,1,0:T(8,128)(2,1)} fusion(bf16[8,1024,8192]{2,1,0:T(8,128)(2,1)} %fusion.31), "
    "kind=kCustom, calls=%all-reduce-scatter.1"
)
#: The first of the two matmuls of the chapter's problem, and what follows from its text for the other two.
TWO_MATMULS = (
    "%fusion.1 = bf16[4096]{0:T(1024)(128)(2,1)} fusion(bf16[4096,8192]{1,0:T(8,128)(2,1)} %param.1, "
    "bf16[8192]{0:T(1024)(128)(2,1)} %reduce.6), kind=kLoop, calls=%fused_computation.1",
    "%fusion.2 = bf16[8192]{0:T(1024)(128)(2,1)} fusion(bf16[8192,4096]{1,0:T(8,128)(2,1)} %param.0, "
    "bf16[4096]{0:T(1024)(128)(2,1)} %fusion.1), kind=kLoop, calls=%fused_computation.2",
    "ROOT %all-reduce = bf16[8192]{0:T(1024)(128)(2,1)} all-reduce(bf16[8192]{0:T(1024)(128)(2,1)} %fusion.2), "
    "replica_groups={{0,16,32,48,64,80,96,112}, ...}, to_apply=%add",
)


def test_the_layout_string_of_the_book() -> None:
    array = OperationRecord.of(read_operation("%x = f32[3,5]{1,0:T(2,2)} parameter(0)"), None).to_json()["results"][0]
    assert (array["padded_shape"], array["memory"]) == ([4, 6], "hbm")
    assert array["expansion"] == 1.6
    assert (array["element_bytes"], array["bytes"]) == (60, 96)


def test_the_fusion_string_of_the_book() -> None:
    record = OperationRecord.of(read_operation(FUSED_SCATTER), None).to_json()
    assert (record["op"], record["opcode"], record["calls"]) == ("fusion.3", "fusion", "all-reduce-scatter")
    assert record["does"].startswith("a ReduceScatter")
    (result,), (operand,) = record["results"], record["operands"]
    assert (result["shape"], result["dtype"], result["tiles"], result["memory"]) == (
        [32, 32, 4096],
        "bf16",
        [[8, 128], [2, 1]],
        "vmem",
    )
    assert (operand["name"], operand["layout"]["shape"]) == ("fusion.32", [32, 32, 8192])
    assert record["collective"] == {"kind": "reduce_scatter", "bytes": 32 * 32 * 8192 * 2, "members": 2}
    assert record["hbm_bytes"] == 0, "both arrays are in VMEM"


def test_a_matmul_of_the_book_takes_95_6_ms() -> None:
    operation = read_operation(UP)
    assert operation.matmul == HloMatmul(batch=1, m=8192, k=8192, n=16384, contracted=(8192,))
    seconds = times(operation, V2)
    assert seconds.bound == "mxu"
    # The book, of the whole array on 8 cores: 2 * 32 * 1024 * 8192 * 32768 / (23e12 * 8).
    assert seconds.bound_s["mxu"] == pytest.approx(2 * 32 * 1024 * 8192 * 32768 / (23e12 * 8), rel=1e-12)
    assert round(seconds.bound_s["mxu"] * 1e3, 1) == 95.6


def test_a_reduce_scatter_of_the_book_takes_1_1_ms() -> None:
    operation = read_operation(SCATTER)
    assert operation.moved is not None
    assert round(operation.moved.bytes / 1e6) == 134
    seconds = times(operation, V2)
    assert (seconds.bound, seconds.wrapped_s) == ("ici", None)
    assert seconds.bound_s["ici"] == pytest.approx(1.1185e-3, rel=1e-4)


def test_the_true_shapes_of_the_two_matmuls_of_the_book() -> None:
    (inferred,) = infer([read_operation(line) for line in TWO_MATMULS])
    assert (inferred.ways, inferred.step, inferred.devices) == (8, 16, 128)
    first, second = inferred.matmuls
    assert (first.right, first.result, first.contracts) == ((32768, 8192), (32768,), False)
    assert (second.left, second.right, second.contracts) == ((32768,), (8192, 32768), True)
    assert (first.name, first.left, first.split) == ("fusion.1", (8192,), 32768)


def test_without_the_sum_nothing_is_inferred() -> None:
    assert infer([read_operation(line) for line in TWO_MATMULS[:2]]) == ()


@pytest.mark.parametrize(
    ("line", "matmul"),
    [
        ("%d = f32[4,8]{1,0} dot(f32[4,16]{1,0} %a, f32[16,8]{1,0} %b), lhs_contracting_dims={1}", (1, 4, 16, 8)),
        (
            "%d = bf16[2,4,8]{2,1,0} fusion(bf16[2,4,16]{2,1,0} %a, bf16[2,16,8]{2,1,0} %b), kind=kOutput, calls=%f",
            (2, 4, 16, 8),
        ),
        ("%d = bf16[4,8]{1,0} fusion(bf16[4,8]{1,0} %a, bf16[4,8]{1,0} %b), kind=kLoop, calls=%f", None),
        ("%d = bf16[4,8]{1,0} fusion(bf16[4,8]{1,0} %a), kind=kLoop, calls=%f", None),
    ],
)
def test_matmuls_by_their_shapes(line: str, matmul: tuple[int, ...] | None) -> None:
    parsed = read_operation(line).matmul
    assert (parsed and (parsed.batch, parsed.m, parsed.k, parsed.n)) == matmul


def test_the_spelling_of_a_trace_that_is_no_hlo() -> None:
    line = "ROOT %AllReduce = bf16[4,8192]{1,0:T(4,128)(2,1)} AllReduce(bf16[4,8192]{1,0:T(4,128)(2,1)S(1)} %fusion)"
    operation = read_operation(line)
    assert operation.opcode == "all-reduce"
    assert operation.moved is not None
    assert (operation.moved.kind, operation.moved.members) == ("all_reduce", None)


def test_collectives_over_a_ring_and_over_a_line() -> None:
    line = "%g = bf16[1024,1024]{1,0} all-gather(bf16[256,1024]{1,0} %x), replica_groups=[4,4]<=[16], dimensions={0}"
    seconds = times(read_operation(line), chip("v5p"))
    bandwidth = chip("v5p").ici_bytes_per_s
    assert seconds.bound_s["ici"] == pytest.approx(3 / 4 * 2 * 1024**2 / bandwidth)
    assert seconds.wrapped_s == pytest.approx(3 / 4 * 2 * 1024**2 / (2 * bandwidth))


@pytest.mark.parametrize("line", ["", "nonsense", "%x = ", "%x = bf16[2] fusion(", "%x = qq7[2]{0} add(qq7[2]{0} %a)"])
def test_what_is_no_instruction_is_refused_in_one_line(line: str) -> None:
    with pytest.raises(RooftopError) as error:
        read_operation(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("groups", "devices", "mesh"),
    [
        ([((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5))], 8, {"axis_0": 2, "axis_1": 4}),
        ([((0, 16, 32, 48),)], 64, {"axis_0": 4, "axis_1": 16}),
        ([((0, 1, 4, 5), (2, 3, 6, 7))], 8, {"axis_0": 2, "axis_1": 2, "axis_2": 2}),
        ([], 4, {"axis_0": 4}),
        ([((0, 1, 2),)], 8, {"axis_0": 8}),
    ],
)
def test_mesh_axes_out_of_groups(groups: Any, devices: int, mesh: dict[str, int]) -> None:
    assert axes_of(groups, devices) == mesh


def test_mesh_axes_out_of_a_permute() -> None:
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %p = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
}
"""
    assert infer_mesh(parse(text), devices_of(text)) == {"axis_0": 2, "axis_1": 4}


def test_the_stride_of_a_group() -> None:
    assert (stride((0, 16, 32)), stride((0, 1, 3)), stride((5,))) == (16, None, None)


def test_a_run_without_a_trace_says_how_to_make_one(
    rooftop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(VERBS, "explain", ("rooftop.cli.explain", ""))
    (tmp_path / "run.json").write_text("{}")
    answer = rooftop("explain", str(tmp_path))
    assert answer.status == 2
    assert "a run with a trace: rooftop train ... --profile steps=A..B" in answer.err


def test_on_the_command_line(rooftop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, "explain", ("rooftop.cli.explain", ""))
    chip_of_the_book = ("--on", "v3", "--figure", "flops_per_s.bf16=46T", "--figure", "ici_bytes_per_s=60G")
    data = rooftop("explain", "--op", UP, "--op", SCATTER, *chip_of_the_book, "--json").json
    up, scatter = (record["times"] for record in data["operations"])
    assert (round(up["bound_s"]["mxu"] * 1e3, 1), round(scatter["bound_s"]["ici"] * 1e3, 1)) == (95.6, 1.1)
    jsonschema.validate(data, schema(OperationsRecord))
    inferred = rooftop("explain", "--op", "\n".join(TWO_MATMULS), "--json").json
    jsonschema.validate(inferred, schema(OperationsRecord))
    assert inferred["inferred"][0]["ways"] == 8
    text = rooftop("explain", "--op", "\n".join(TWO_MATMULS)).out
    assert "8-way model parallelism" in text
    assert "fusion.1: [B,8192] x [32768,8192] -> [B,32768], the output dim of 32768 split" in " ".join(text.split())
    assert "[B,8192] x [32768,8192] -> [B,32768]" in text
    assert "padded to [4,6], 1.60x" in rooftop("explain", "--op", "%x = f32[3,5]{1,0:T(2,2)} parameter(0)").out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "explain: got nothing; accepted: one of: a run or a trace, --op HLO, --diff A B"),
        (["run", "--op", UP], "explain: got 'RUN and op'; accepted: one of: a run or a trace, --op HLO, --diff A B"),
        (["--op", UP, "--mesh", "X=4"], "mesh: got"),
        (["--op", UP, "--figure", "hop_s=1"], "figure: got 'hop_s=1'; accepted: a chip to override it of: --on CHIP"),
        (["--op", UP, "--on", "v5q"], "chip: got 'v5q'"),
        (["nowhere"], "trace: got 'nowhere'; accepted: a run, a trace of JAX's profiler"),
        (["--diff", "a.json", "b.json"], "diff: got 'a.json'; accepted: a run, a trace, a plan.json"),
    ],
)
def test_wrong_input_is_one_line(
    rooftop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str
) -> None:
    monkeypatch.setitem(VERBS, "explain", ("rooftop.cli.explain", ""))
    answer = rooftop("explain", *arguments)
    assert answer.status == 2
    assert answer.err.startswith(f"rooftop: {line}")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    "operands",
    [
        "f32[128,256]{1,0} %p0, f32[256,512]{1,0} %p1",
        "f32[128,256]{1,0} p0, f32[256,512]{1,0} p1",
        "f32[128,256] p0, f32[256,512] p1",
        "f32[128,256]{1,0}, f32[256,512]{1,0}",
    ],
)
def test_operands_that_are_written_inline(operands: str) -> None:
    """With and without the sign before a name, a layout, a name."""
    operation = read_operation(f"d = f32[128,512]{{1,0}} dot({operands}), lhs_contracting_dims={{1}}")
    assert operation.matmul is not None
    assert operation.matmul.flops == 2.0 * 128 * 256 * 512
    assert operation.hbm_bytes == 4.0 * (128 * 256 + 256 * 512 + 128 * 512)


def test_operands_by_name_alone() -> None:
    assert read_operation("%a = f32[8] add(%x, %y)").operands == (("x", None), ("y", None))
    assert read_operation("a = f32[8] add(x, y.1)").operands == (("x", None), ("y.1", None))


@pytest.mark.parametrize(
    ("rows", "space", "line"),
    [
        (6144, "S(1)", "It does not fit: its arrays in VMEM are 279 MB, and a device of v5e has 134 MB."),
        (128, "S(1)", ""),
        (10**6, "", "It does not fit: its arrays in HBM are 42 GB, and a device of v5e has 16 GB."),
        (6144, "", ""),
    ],
)
def test_arrays_larger_than_their_memory_are_said_not_to_fit(
    rooftop: Callable[..., Any], rows: int, space: str, line: str
) -> None:
    """The prefetch of chapter 9 into VMEM, of weights that fit and of weights that do not."""
    tiles = f"{{1,0:T(8,128)(2,1){space}}}"
    text = (
        f"%fusion.3 = bf16[512,{rows}]{tiles} fusion(bf16[512,20480]{tiles} %a, bf16[20480,{rows}]{tiles} %b), "
        "kind=kOutput, calls=%dot"
    )
    assert bool(times(read_operation(text), chip("v5e")).overfull) is bool(line)
    out = rooftop("explain", "--op", text, "--on", "v5e").out
    assert line in " ".join(out.split()) if line else "does not fit" not in out
