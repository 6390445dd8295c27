"""Every kind of program on every chip, with the installed release of XLA: ``make test-newest`` tries the newest.

A quick test is of the program where releases differ most, the slow ones are of the others.
"""

from __future__ import annotations

from typing import Any

import pytest

from rooftop.arrays import Mesh
from rooftop.capabilities import Choice
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.options import _table, compile_without_refused, options_for
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.compiled.training import request
from rooftop.hardware import Slice
from rooftop.models.sizing import small_model
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload

#: A slice of eight devices of each chip. XLA:TPU compiles for no older one.
SLICES = {"v4": "v4:2x2x2", "v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
MESHES = {
    "fsdp": {"fsdp": 8},
    "tensor": {"fsdp": 4, "tensor": 2},
    "stage": {"stage": 2, "fsdp": 4},
    "expert": {"fsdp": 2, "expert": 4},
    "context": {"fsdp": 4, "context": 2},
    "slices": {"data": 2, "fsdp": 8},
}
#: Where releases differ most.
QUICK = {("v5p", "fsdp")}
MATRIX = [
    pytest.param(chip, kind, marks=() if (chip, kind) in QUICK else pytest.mark.slow)
    for chip in SLICES
    for kind in MESHES
]


def plan(chip: str, kind: str) -> TrainingPlan:
    """A small step on eight devices of a chip, or on two slices of eight."""
    slice_ = Slice.parse(SLICES[chip] + ("@2" if kind == "slices" else ""))
    name = "mixtral:3M" if kind == "expert" else "llama:1M"
    problem = Problem(
        model=small_model(name, vocab=512, max_seq_len=256),
        slice=slice_,
        workload=Workload(batch_tokens=16 * 256, seq_len=256),
    )
    choice = Choice(remat="block", microbatches=2 if kind == "stage" else 1)
    return TrainingPlan(problem=problem, mesh=Mesh.lay(slice_, MESHES[kind]), choice=choice)


@pytest.mark.parametrize(("chip", "kind"), MATRIX)
def test_a_step_compiles_and_is_read(chip: str, kind: str) -> None:
    """With every option of its plan: what this release refuses has an entry in options.toml."""
    planned = plan(chip, kind)
    compiled = compile_ahead_of_time(request(planned))
    assert compiled.left_out == ()
    report = CompiledReport(plan=planned, compiled=compiled)
    assert report.flops == pytest.approx(float(planned.ledger.flops(kernels=False)), rel=1e-6)
    assert report.timed.step.expected_s > 0 and compiled.at_peak is not None


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("chip", SLICES)
def test_a_serving_step_compiles_and_is_read(chip: str, model: str) -> None:
    axes = {"tensor": 8}
    arguments: dict[str, Any] = {
        "model": model, "layers": 2, "batch": 16, "context": 1024, "kv_split": "seq", "axes": axes
    }  # fmt: skip
    mesh = Mesh.lay(Slice.parse(SLICES[chip]), axes)
    compiled = compile_ahead_of_time(
        CompileRequest(mesh=mesh, program="tests.support.serving_steps:lower", arguments=arguments)
    )
    assert CompiledReport(plan=None, compiled=compiled).timed.step.expected_s > 0


# ---- options --------------------------------------------------------------------------------------------------------


def test_a_release_takes_the_newest_entry_that_is_not_newer() -> None:
    fuses = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
    assert fuses in options_for("whole-slice gathers", "0.0.42.1") and fuses in options_for(
        "whole-slice gathers", "0.0.48"
    )
    assert fuses not in options_for("whole-slice gathers", "0.0.49")
    assert options_for("whole-slice gathers", "0.0.50.1") == options_for("whole-slice gathers", "1.2.dev20270101+g1")


def test_every_purpose_has_an_entry_for_the_first_release_and_a_source() -> None:
    for purpose in {entry["purpose"] for entry in _table()}:
        entries = [entry for entry in _table() if entry["purpose"] == purpose]
        assert sum("since" not in entry for entry in entries) == 1
        assert all(entry["source"] and entry["set"] for entry in entries)


class Compiler:
    """A compiler that refuses options as XLA does."""

    def __init__(self, error: str, refused: str) -> None:
        self.error, self.refused = error, refused

    def __call__(self, options: dict[str, Any]) -> tuple[str, ...]:
        if self.refused in options:
            raise ValueError(self.error)
        return tuple(options)


PLATFORM = (
    "FAILED_PRECONDITION: Continuation fusion for AllGather is enabled on platform viperfish, but it is not supported "
    "on platforms other than TPU v5e. Please disable it with xla_tpu_enable_async_collective_fusion=false"
)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        ("INVALID_ARGUMENT: No such compile option: 'xla_tpu_old'", "xla_tpu_old"),
        (PLATFORM, "xla_tpu_enable_async_collective_fusion_fuse_all_gather"),
    ],
)
def test_only_options_of_rooftop_are_left_out(error: str, refused: str) -> None:
    compiler, options = Compiler(error, refused), {"xla_a": True, refused: True}
    assert compile_without_refused(compiler, options, options) == (("xla_a",), (refused,))
    with pytest.raises(ValueError, match=error[:20]):
        compile_without_refused(compiler, options, ["xla_a"])
    with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"):
        compile_without_refused(Compiler(f"RESOURCE_EXHAUSTED: try {refused}", refused), options, options)


def test_a_report_names_the_options_that_the_compiler_refuses() -> None:
    """XLA's own refusal, of an option that there is not."""
    asked = CompileRequest(
        mesh=Mesh.lay(Slice.parse("v5e:1x1"), {"fsdp": 1}),
        program="tests.compiler.test_compiling:multiply",
        arguments={"size": 256},
        options={"xla_tpu_enable_latency_hiding_scheduler": False},
        defaults={"xla_tpu_no_such_option": True},
    )
    compiled = compile_ahead_of_time(asked)
    assert (dict(compiled.options), compiled.left_out) == (dict(asked.options), ("xla_tpu_no_such_option",))
