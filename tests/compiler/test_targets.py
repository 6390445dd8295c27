"""Programs for GPUs, compiled with no GPU: targets, the reader of what XLA:GPU writes, and whole train steps.

The last need JAX's CUDA plugin, which ``make test-gpu`` installs in an environment of its own.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import rooftop
from rooftop.arrays import Mesh
from rooftop.compiler import targets
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time, require_compiler
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.hlo.costs import is_matmul, matmul_batch, matmul_flops, matmul_sizes, work
from rooftop.compiler.ledger import compiled_ledger, read_ledger
from rooftop.compiler.targets import PLUGIN, target_text, topology_text
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.hardware import Slice, catalogue
from rooftop.library.programs.compiling import CompileResult

NEEDS_PLUGIN = pytest.mark.skipif(importlib.util.find_spec(PLUGIN) is None, reason="no CUDA plugin: make test-gpu")


@pytest.mark.parametrize(
    ("slice_", "topology"), [("h100:8", "1x1x8"), ("h100:8x32", "32x1x8"), ("h200:2", "1x1x2"), ("b200:4x2", "2x1x4")]
)
def test_a_slice_is_domains_of_hosts_of_gpus(slice_: str, topology: str) -> None:
    assert topology_text(Slice.parse(slice_)) == topology


def test_a_target_has_the_figures_of_the_catalogue() -> None:
    chip = catalogue()["h100"]
    text = target_text(chip)
    assert f"core_count: {chip.cores} " in text
    assert f"memory_bandwidth: {int(chip.hbm_bytes_per_s)} " in text
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text
    faster = target_text(chip.replace(hbm_bytes_per_s=4e12))
    assert "memory_bandwidth: 4000000000000 " in faster


def test_every_gpu_of_the_catalogue_is_a_target_or_refused_by_name() -> None:
    for name, chip in catalogue().items():
        if name in targets._table()["chips"]:
            assert chip.kind == "gpu" and target_text(chip).count("{") == target_text(chip).count("}")
        else:
            with pytest.raises(RooftopError, match="a GPU that XLA compiles for"):
                target_text(chip)


def test_a_missing_compiler_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.core.extras.find_spec", lambda name: None if name == PLUGIN else object())
    require_compiler("tpu")
    with pytest.raises(RooftopError, match=r"XLA:GPU without a GPU: pip install 'rooftop\[gpu-compile\]'"):
        require_compiler("gpu")


CUBLAS = """HloModule step, is_scheduled=true

ENTRY %main (a: bf16[4,128,64], b: bf16[4,32,64]) -> f32[4,128,32] {
  %a = bf16[4,128,64]{2,1,0} parameter(0)
  %b = bf16[4,32,64]{2,1,0} parameter(1)
  %call = (f32[4,128,32]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(step)/layers/mlp/up/dot_general"}, backend_config={"gemm_backend_config":{\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],\
"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
  ROOT %out = f32[4,128,32]{2,1,0} get-tuple-element(%call), index=0
}
"""


def test_a_call_of_cublas_is_a_matmul() -> None:
    module = hlo.parse(CUBLAS)
    main = module.computations[module.entry]
    call = main.instructions["call"]
    assert is_matmul(call) and not is_matmul(main.instructions["out"])
    assert matmul_flops(main, call) == 2 * 4 * 128 * 32 * 64
    assert matmul_sizes(main, call) == (4 * 128, 64, 32)
    assert matmul_batch(main, call) == 4
    # Its workspace moves nothing.
    assert work(module, main, call).hbm_bytes == 2 * (4 * 128 * 64 + 4 * 32 * 64) + 4 * 4 * 128 * 32
    (row,) = read_ledger(module, {"data": 1})
    assert (row.scope, row.flops) == ("layers/mlp/up", {"bf16": 2 * 4 * 128 * 32 * 64})


# ---- XLA:GPU --------------------------------------------------------------------------------------------------------


def compiled(model: str, on: str, **options: Any) -> CompileResult:
    """The step of a plan, compiled for GPUs."""
    result = rooftop.compile(rooftop.plan_training(model, on=on, **options))
    assert isinstance(result, CompileResult)
    return result


@NEEDS_PLUGIN
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "on", "options"),
    [
        ("llama3-8b", "h100:8", {"batch_seqs": 16, "seq": 4096}),
        ("llama3-70b", "h100:8x4", {"batch_seqs": 64, "seq": 8192}),
        ("mixtral-8x7b", "h100:8x2", {"batch_seqs": 32, "seq": 8192}),
        # Attention that cuDNN lacks, in blocks of keys: softcaps, latents, sinks.
        ("gemma2-9b", "h100:8", {"batch_seqs": 16, "seq": 4096}),
        ("deepseek-v2-lite", "h100:8", {"batch_seqs": 16, "seq": 4096}),
        ("gpt-oss-20b", "h100:8", {"batch_seqs": 8, "seq": 4096}),
        ("llama3-8b", "b200:8", {"batch_seqs": 32, "seq": 8192}),
        ("llama3.1-405b", "h200:8x32", {"batch_seqs": 256, "seq": 8192}),
    ],
)
def test_a_step_for_gpus_is_compiled_as_planned(model: str, on: str, options: dict[str, int]) -> None:
    record = compiled(model, on, **options).to_json()
    assert record["flops"] == pytest.approx(record["planned_flops"], rel=1e-6)
    assert record["peak_bytes"] == pytest.approx(record["planned_peak_bytes"], rel=0.03)
    moved = [check for check in record["checks"] if check["name"].startswith("collectives over")]
    assert moved
    for check in moved:
        assert check["ratio"] == pytest.approx(1, abs=0.001), check["name"]
    assert set(record["versions"]) == {"jax", "jaxlib", targets.XLA_GPU}


@NEEDS_PLUGIN
@pytest.mark.slow
def test_a_step_that_is_too_large_for_a_gpu_is_refused_with_the_nearest_plan() -> None:
    tight = rooftop.plan_training(
        "llama3-8b", on="h100:8", batch_seqs=64, seq=4096, remat="none", mesh="fsdp=8", microbatches=1
    )
    with pytest.raises(Infeasible, match="does not fit: XLA needs"):
        rooftop.compile(tight).raise_if_infeasible()


@NEEDS_PLUGIN
@pytest.mark.slow
def test_a_step_that_generates_reads_pages_in_a_kernel_without_a_copy_of_them() -> None:
    """On GPUs, with heads over two of them: weights and the tokens of 64 sequences are read once."""
    batch, context, layers = 64, 1024, 2
    arguments = {
        "model": "llama3-8b", "layers": layers, "batch": batch, "context": context, "kv_split": "seq",
        "axes": {"tensor": 2}, "platform": "gpu",
    }  # fmt: skip
    mesh = Mesh.lay(Slice.parse("h100:2"), {"tensor": 2})
    program = "tests.support.serving_steps:lower"
    step = compile_ahead_of_time(CompileRequest(mesh=mesh, program=program, arguments=arguments))
    rows = {(row.scope, row.phase): row for row in compiled_ledger(step).ledger.rows}
    core = rows["layers/attn/core", "forward"]
    # 32 heads of 128 and 8 key/value heads in bf16, half of them on each GPU.
    assert float(core.count * core.kernel_flops) == layers * 4 * batch * context * 16 * 128
    cache = layers * batch * context * 2 * 4 * 128 * 2
    assert cache < float(core.count * core.hbm_bytes) < 1.3 * cache
