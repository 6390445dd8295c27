"""Arrays that move because of how they lie: the partitioner's warnings, the detour that avoids them, and copies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import P
from jax.sharding import AxisType, NamedSharding

from rooftop.arrays import Mesh
from rooftop.check.layouts import Spec, between, spec_of, written
from rooftop.check.report import CheckReport
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.hlo.scopes import StackFrame
from rooftop.compiler.partitioner import FullRematerialization, rematerializations
from rooftop.explain.compiled.report import CompiledReport
from rooftop.hardware import Slice

AXES = {"x": 2, "y": 4, "z": 2}


def tuples(spec: P, rank: int) -> Spec:
    """The axes of each dim of a PartitionSpec."""
    padded = [*spec, *[None] * (rank - len(spec))]
    return tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in padded)


@st.composite
def specs(draw: st.DrawFn, rank: int = 3) -> Spec:
    order = draw(st.permutations(list(AXES)))
    dims = [draw(st.integers(0, rank)) for _ in order]
    return tuple(tuple(axis for axis, at in zip(order, dims, strict=True) if at == dim) for dim in range(rank))


@given(specs())
def test_shardings_as_jax_writes_them_for_xla(spec: Spec) -> None:
    mesh = jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 3)
    hlo = str(NamedSharding(mesh, P(*spec))._to_xla_hlo_sharding(3)).strip("{}")
    read = spec_of(hlo, AXES)
    assert read is not None
    assert (*read, *[()] * (3 - len(read))) == spec


@given(specs())
def test_shardings_that_name_their_mesh(spec: Spec) -> None:
    """XLA writes those of JAX 0.12 like this."""
    mesh = ",".join(f"'{axis}'={size}" for axis, size in AXES.items())
    dims = ", ".join("{" + ", ".join(f"'{axis}'" for axis in axes) + "}" for axes in spec)
    assert spec_of(f"mesh[{mesh}], [{dims}]", AXES) == spec
    # An axis in parts, and a mesh that is not the program's.
    assert spec_of(f"mesh[{mesh}], [{{'x':(1)2}}, {{}}]", AXES) is None
    assert spec_of("mesh['other'=2], [{'other'}, {}]", AXES) is None


@given(specs(), specs())
def test_each_step_moves_one_axis(before: Spec, after: Spec) -> None:
    """Up to the last one, which may have to gather: then several axes leave at once."""
    steps = [before, *between(before, after), after]
    used = {axis for axes in after for axis in axes}
    for old, new in itertools.pairwise(steps):
        places = [{axis: dim for dim, axes in enumerate(spec) for axis in axes} for spec in (old, new)]
        moved = {axis for axis in AXES if places[0].get(axis) != places[1].get(axis)}
        assert len(moved & used) <= 1
        # Axes keep their order in a dim, or XLA has to exchange parts.
        for axes in new:
            assert len(set(axes)) == len(axes)


def test_a_sharding_over_parts_of_axes_is_none() -> None:
    assert spec_of("devices=[2,8]<=[16]", {"x": 4, "y": 4}) is None
    assert spec_of("maximal device=0", AXES) is None
    assert spec_of("replicated", AXES) == ()
    assert written((("x",), (), ("y", "z"))) == "P('x', None, ('y', 'z'))"


BEFORE = """HloModule jit_step

FileNames
1 "step.py"

FunctionNames
1 "main"
2 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=4 end_column=31}
2 {file_name_id=1 function_name_id=2 line=8 end_line=8 column=4 end_column=31}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY %main.1 (a.1: f32[4]) -> f32[4] {
  ROOT %a.1 = f32[4]{0} parameter(0)
}
"""


def test_warnings_of_a_log(tmp_path: Path) -> None:
    """As libtpu 0.0.42.1 writes them, and as XLA does for other devices. Frames are those of the program as it was."""
    (tmp_path / "module_0000.jit_step.before_optimizations.txt").write_text(BEFORE)
    warning = (
        "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {devices=[1,2,2]<=[4]} to "
        "{devices=[4,1,1]<=[2,2]T(1,0)} efficiently for HLO operation %copy.1 = f32[1024,512,128]{2,1,0} copy(%sin.0), "
        'sharding={devices=[1,2,2]<=[4]}, metadata={op_name="jit(step)/sharding_constraint" stack_frame_id=2}. As the'
    )
    other = (
        "[spmd] Involuntary full rematerialization. The compiler was not able to go from sharding {replicated} to "
        "{devices=[2,1]<=[2]} without doing a full rematerialization of the tensor for HLO operation: %p = bf16[8,4] x"
    )
    log = f"W1126 14:31:52 28188 spmd_partitioner.cc:654] {warning}\nW other line\nW {other}\nW {warning}\n"
    assert rematerializations(log, tmp_path) == (
        FullRematerialization(
            array="f32[1024,512,128]",
            before="devices=[1,2,2]<=[4]",
            after="devices=[4,1,1]<=[2,2]T(1,0)",
            op_name="jit(step)/sharding_constraint",
            stack=(StackFrame("step.py", 8, "step"), StackFrame("step.py", 20, "main")),
        ),
        FullRematerialization(array="bf16[8,4]", before="replicated", after="devices=[2,1]<=[2]", op_name="", stack=()),
    )


# ---- a program that is compiled --------------------------------------------------------------------------------------


def lower(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """Activations that change their sharding, directly or on the way that the advice names."""

    auto = (AxisType.Auto,) * len(mesh.axis_names)
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)

    def step(a: jax.Array, w: jax.Array) -> jax.Array:
        a = jax.lax.with_sharding_constraint(jnp.sin(a), NamedSharding(mesh, P(None, "x", "y")))  # splits
        if arguments["detour"]:
            a = jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P("y", "x")))
        a = jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(("y", "x"))))  # splits again
        return a.reshape(-1, 256) @ w

    shapes = [((256, 256, 256), P("x", "y")), ((256, 256), P())]
    arrays = [jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec)) for dims, spec in shapes]
    return jax.jit(step).lower(*arrays)


def check(detour: bool) -> CheckReport:
    mesh = Mesh.lay(Slice.parse("v5e:2x2"), {"x": 2, "y": 2})
    request = CompileRequest(mesh=mesh, program=f"{__name__}:lower", arguments={"detour": detour})
    return CheckReport(program="step", report=CompiledReport(plan=None, compiled=compile_ahead_of_time(request)))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the extra 'compile' is not installed")
def test_an_array_that_is_made_whole_and_the_detour() -> None:
    report = check(detour=False)
    (finding,) = [item for item in report.findings if item.rule == "involuntary_rematerialization"]
    assert "from P(None, 'x', 'y') to P(('y', 'x'), None, None)" in finding.evidence
    assert "16,777,216 elements" in finding.evidence
    assert "go through P('y', 'x', None)" in finding.what
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first, second = (
        next(at for at, line in enumerate(lines, start=1) if line.endswith(mark))
        for mark in ("# splits", "# splits again")
    )
    assert finding.source.endswith(f"test_layouts.py:{first}")
    assert finding.evidence.endswith(f"for test_layouts.py:{second}")
    assert finding.seconds > 0
    better = check(detour=True)
    assert not [item for item in better.findings if item.rule == "involuntary_rematerialization"]
    assert better.expected_s < report.expected_s
