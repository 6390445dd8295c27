"""Programs that are wasteful on purpose, compiled for TPUs that are not there: each fault is found, with its line."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax import P

from rooftop.arrays import Mesh
from rooftop.check.arguments import arguments
from rooftop.check.report import CheckRecord, CheckReport
from rooftop.check.rules import ProgramFinding
from rooftop.compiler.compiling import CompileRequest
from rooftop.compiler.hlo.text import parse
from rooftop.compiler.worker import compile_here
from rooftop.core.errors import RooftopError
from rooftop.core.records import read_record
from rooftop.explain.compiled.module import explain_module
from rooftop.hardware import Slice, chip
from rooftop.library import testing
from rooftop.library.explaining import diff
from rooftop.library.programs.checking import CheckResult, check
from rooftop.library.programs.compiling import explain_module as explained
from rooftop.library.testing import TestLedger, assert_fits, assert_no_exposed
from rooftop.roofline.collectives import price

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="the extra 'compile' is not installed")

HERE = Path(__file__)
#: Weights of [D, D] in float32, rows of x on a device.
D, ROWS = 8192, 256
SLICE = Slice.parse("v5e:2x2")


def line_of(mark: str) -> str:
    """'file:line' of the line here that ends with a mark."""
    lines = HERE.read_text(encoding="utf-8").splitlines()
    return f"{HERE}:{next(at for at, line in enumerate(lines, start=1) if line.endswith(f'# {mark}'))}"


WHOLE, SPLIT = P(), P("data")


def data_parallel(function: Callable[..., Any], out: P = WHOLE) -> Callable[..., Any]:
    specs = (P(), P("data"), P("data"))
    return jax.shard_map(function, in_specs=specs, out_specs=out, check_vma=False)


def gradient(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)


def trap(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Replicated float32 weights, no donation, and gradients that are summed twice."""
    once = jax.lax.psum(gradient(w, x, y), "data") / 4
    twice = jax.lax.psum(once, "data") / 4  # twice
    return w - 0.1 * twice  # updates


def plain(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The same step, summed once."""
    return w - 0.1 * jax.lax.psum(gradient(w, x, y), "data") / 4


def of_a_part(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Each device uses a quarter of the sum. Barriers keep XLA from writing a ReduceScatter."""
    whole = jax.lax.optimization_barrier(jax.lax.psum(gradient(w, x, y), ("data",)))  # sums
    at = jax.lax.axis_index("data") * (D // 4)
    return jax.lax.dynamic_slice_in_dim(whole, at, D // 4) * 2.0


def narrow(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Bf16 everywhere, with a dim of 80 that a matrix unit of 128 does not fill."""
    return x @ w  # pads


def shape(*dims: int, spec: P = WHOLE, dtype: Any = jnp.float32) -> tuple[tuple[int, ...], P, Any]:
    return dims, spec, dtype


WIDE = [shape(D, D), shape(4 * ROWS, D, spec=P("data")), shape(4 * ROWS, D, spec=P("data"))]
PADDED = [
    shape(D, 80, dtype=jnp.bfloat16), shape(64 * ROWS, D, spec=P("data"), dtype=jnp.bfloat16),
    shape(64 * ROWS, 128, spec=P("data")),
]  # fmt: skip
PROGRAMS: Mapping[str, tuple[Callable[..., Any], list[Any], dict[str, Any]]] = {
    "trap": (data_parallel(trap), WIDE, {}),
    "plain": (data_parallel(plain), WIDE, {}),
    "donated": (data_parallel(plain), WIDE, {"donate_argnums": 0}),
    "part": (data_parallel(of_a_part, P("data")), WIDE, {}),
    "padded": (data_parallel(narrow, P("data")), PADDED, {}),
}


def lower(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """One of the programs, for ``rooftop.compiler.compiling.CompileRequest``."""
    program, shapes, options = PROGRAMS[arguments["name"]]
    arrays = [
        jax.ShapeDtypeStruct(dims, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        for dims, spec, dtype in shapes
    ]
    with jax.set_mesh(mesh):
        return jax.jit(program, **options).lower(*arrays)


@functools.cache
def compiled_text(name: str) -> str:
    mesh = Mesh.lay(SLICE, {"data": 4})
    return compile_here(CompileRequest(mesh=mesh, program=f"{__name__}:lower", arguments={"name": name})).hlo_text


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], Path]:
    """Write the text of one of the programs."""

    def write(name: str) -> Path:
        path = tmp_path / f"{name}.hlo"
        path.write_text(compiled_text(name), encoding="utf-8")
        return path

    return write


def checked(path: Path, **options: Any) -> CheckResult:
    return check(path, on="v5e:2x2", mesh="data=4", **options)


def finding(result: CheckResult, rule: str) -> ProgramFinding:
    (one,) = [item for item in result.findings if item.rule == rule]
    return one


def test_the_trap(module: Callable[[str], Path]) -> None:
    """Replicated weights, no donation, a doubled AllReduce: all three are named, with their lines and prices."""
    result = checked(module("trap"))
    nbytes = 4.0 * D * D
    doubled = finding(result, "repeated_all_reduce")
    assert doubled.source == line_of("twice")
    span = Mesh.lay(SLICE, {"data": 4}).span("data")
    bound_s = sum(price("all_reduce", span).bound_s(nbytes).values())
    assert bound_s <= doubled.seconds <= 2 * bound_s
    twofold = finding(result, "not_donated")
    assert (twofold.bytes, twofold.source) == (nbytes, line_of("updates"))
    if "sharding=" not in compiled_text("trap"):
        return  # Modules of JAX 0.12 do not say how arguments are split.
    whole = finding(result, "replicated_argument")
    assert whole.bytes == nbytes * 3 / 4
    assert whole.source.startswith(str(HERE))
    assert whole.evidence.startswith(f"w f32[{D},{D}]")


def test_arrays_that_equinox_hands_on_have_its_words(module: Callable[[str], Path]) -> None:
    """eqx.filter_jit flattens arguments: a finding names the argument, and the option that donates it."""
    path = module("trap")
    path.write_text(re.sub(r'op_name="w"', r"""op_name="dynamic_nodonate['first'][2]\"""", compiled_text("trap")))
    twofold = finding(checked(path), "not_donated")
    assert twofold.what.startswith("donate the first argument (eqx.filter_jit(..., donate='all')), if")
    assert twofold.evidence.startswith(f"array 2 of the first argument f32[{D},{D}]")
    rest = replace(arguments(parse(path.read_text()))[0], name="dynamic_nodonate['rest'][0]")
    assert (rest.group, rest.donation) == ("the other arguments", "eqx.filter_jit(..., donate='all-except-first')")


def test_a_program_that_sums_once(module: Callable[[str], Path]) -> None:
    rules = [item.rule for item in checked(module("plain")).findings]
    assert "repeated_all_reduce" not in rules
    assert "all_reduce_of_a_shard" not in rules


def test_donation_is_not_asked_for_twice(module: Callable[[str], Path]) -> None:
    assert "not_donated" in [item.rule for item in checked(module("plain")).findings]
    assert "not_donated" not in [item.rule for item in checked(module("donated")).findings]


def test_a_sum_of_which_a_device_keeps_a_part(module: Callable[[str], Path]) -> None:
    result = checked(module("part"))
    part = finding(result, "all_reduce_of_a_shard")
    assert part.source == line_of("sums")
    exposed = finding(result, "exposed_collective")
    assert part.seconds == pytest.approx(exposed.seconds / 2)
    assert "25%" in part.evidence


def test_a_dim_that_does_not_fill_the_matrix_unit(module: Callable[[str], Path]) -> None:
    padded = finding(checked(module("padded")), "padded_matmul")
    assert padded.source == line_of("pads")
    assert "80" in padded.evidence
    assert padded.seconds > 0


def test_figures(module: Callable[[str], Path]) -> None:
    result = checked(module("plain"), tokens="1Ki")
    data = result.to_json()
    flops = 2.0 * 2 * ROWS * D * D
    assert data["mfu"] == pytest.approx(flops / (197e12 * float(data["expected_s"])))  # type: ignore[arg-type]
    assert data["tokens_per_s"] == pytest.approx(1024 / float(data["expected_s"]))  # type: ignore[arg-type]
    assert data["sums"]["arguments"] == {"parameters": 4.0 * D * D, "batch": 2 * 4.0 * ROWS * D}  # type: ignore[index]
    assert read_record(CheckRecord, json.loads(json.dumps(data)), "check").findings == result.findings


def test_limits_against_an_earlier_ledger(module: Callable[[str], Path], tmp_path: Path) -> None:
    """The doubled sum takes longer than the ledger of the plain step allows; what changed is named."""
    ledger = tmp_path / "ledger.json"
    checked(module("plain")).save(ledger)
    limits: dict[str, Any] = {"against": ledger, "max_time": "+2%", "max_memory": "1%"}
    assert checked(module("plain"), **limits).holds
    worse = checked(module("trap"), **limits)
    assert not worse.holds
    assert [gate.name for gate in worse.report.gates if not gate.holds] == ["time"]
    assert worse.summary.startswith("over the limit: time ")
    assert "all_reduce over data" in worse.summary
    assert checked(module("trap"), against=ledger, max_time="+500%").holds


def test_limits_of_a_finding(module: Callable[[str], Path], tmp_path: Path) -> None:
    result = checked(module("trap"), fail_on="5ms")
    assert not result.holds
    result.write_junit(tmp_path / "tests.xml")
    suite = ElementTree.parse(tmp_path / "tests.xml").getroot()
    failures = [case.get("name") for case in suite if case.find("failure") is not None]
    assert any(str(name).startswith("repeated_all_reduce") for name in failures)
    assert int(suite.get("failures", "0")) == len(failures)
    assert int(suite.get("tests", "0")) == len(suite)
    assert checked(module("trap"), fail_on="1s").holds


def test_a_saved_report(module: Callable[[str], Path], tmp_path: Path) -> None:
    """A saved check has its findings; a saved compilation has only what the device waits for."""
    before = checked(module("trap"), tokens=1024)
    before.save(tmp_path / "ledger.json")
    again = check(tmp_path / "ledger.json")
    assert again.findings == before.findings
    ignored = {"program", "gates", "request"}
    old, new = before.to_json(), again.to_json()
    assert {name: new[name] for name in new if name not in ignored} == {
        name: old[name] for name in old if name not in ignored
    }
    compiled = tmp_path / "compiled.json"
    compiled.write_text(json.dumps(old["compiled"]))
    waits = check(compiled, against=tmp_path / "ledger.json", max_time="+1%")
    assert waits.holds and waits.to_json()["mfu"] == old["mfu"]
    exposed = [item for item in before.findings if item.rule == "exposed_collective"]
    assert sum(item.seconds for item in exposed) <= sum(item.seconds for item in waits.findings)
    checked(module("plain")).save(tmp_path / "plain.json")
    assert not check(compiled, against=tmp_path / "plain.json", max_time="+1%").holds
    with pytest.raises(RooftopError, match="nothing with a saved report"):
        check(compiled, on="v5e:2x2")
    compiled.write_text(json.dumps(old["compiled"] | {"kind": "plan"}))
    with pytest.raises(RooftopError, match="report: got 'plan'; accepted: what rooftop check --save"):
        check(compiled)


def test_differences_between_checks(module: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("plain", "trap"):
        checked(module(name)).save(tmp_path / f"{name}.json")
    changes = diff(tmp_path / "plain.json", tmp_path / "trap.json").difference.changes
    assert any("all_reduce over data" in text for change in changes for text in change.collectives)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_time": "+2%"}, "max-time: got '+2%'; accepted: a ledger"),
        ({"against": "nowhere.json"}, "against: got 'nowhere.json'"),
        ({"fail_on": "fast"}, "fail-on: got 'fast'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str, module: Callable[[str], Path]) -> None:
    with pytest.raises(RooftopError) as caught:
        checked(module("plain"), **options)
    assert str(caught.value).startswith(message)


def test_a_share_that_is_none(module: Callable[[str], Path], tmp_path: Path) -> None:
    checked(module("plain")).save(tmp_path / "ledger.json")
    with pytest.raises(RooftopError, match=r"max-time: got 'much'; accepted: a share such as \+2% or 0.02"):
        checked(module("plain"), against=tmp_path / "ledger.json", max_time="much")


# ---- modules alone --------------------------------------------------------------------------------------------------


def test_a_module_alone_is_the_program_that_was_compiled(module: Callable[[str], Path]) -> None:
    """Text and proto, with a mesh or without one, on a slice or on a kind of chip."""
    from rooftop.explain.measured.modules import hlo_proto

    path = module("plain")
    report = explain_module(path, on=SLICE, mesh={"data": 4})
    assert report.flops == 2.0 * 2 * ROWS * D * D
    proto = path.with_name("plain.hlo.pb")
    proto.write_bytes(hlo_proto(compiled_text("plain")))
    same = explain_module(proto, on=chip("v5e"))
    assert (same.flops, same.timeline.total_s) == (report.flops, pytest.approx(report.timeline.total_s))
    # Newer programs name their axes.
    assert same.compiled.mesh.shape in ({"axis_0": 4}, {"data": 4})
    assert explained(path, on="v5e", mesh="data=4").to_json()["flops"] == report.flops
    # Arguments and the result; nothing is donated.
    assert report.peak_bytes == 4.0 * (2 * D * D + 2 * ROWS * D)
    assert "arguments and results" in report.verdict
    assert CheckReport(program="plain", report=same).findings


def test_a_folder_of_dumped_modules(tmp_path: Path, module: Callable[[str], Path]) -> None:
    for name, text in (("0001.jit_a", "trap"), ("0002.jit_b", "padded")):
        (tmp_path / f"module_{name}.tpu_after_optimizations.txt").write_text(compiled_text(text), encoding="utf-8")
    report = explain_module(tmp_path, on=SLICE, mesh={"data": 4})
    largest = max(("trap", "padded"), key=lambda name: len(compiled_text(name)))
    assert report.compiled.hlo_text == compiled_text(largest)


UNSCHEDULED = "HloModule jit_f\n\nENTRY %main (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n"


@pytest.mark.parametrize(
    ("on", "text", "message"),
    [
        ("v5e:4x4", None, "on: got 'v5e:4x4'; accepted: a slice of the 4 devices"),
        (
            "v5e:2x2",
            "HloModule jit_f\n\nENTRY %main (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n",
            "module: got ",
        ),
        ("v5e:2x2", "what is this", "hlo: got "),
    ],
)
def test_modules_that_are_none(on: str, text: str | None, message: str, module: Callable[[str], Path]) -> None:
    path = module("plain")
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(RooftopError) as caught:
        explained(path, on=on)
    assert str(caught.value).startswith(message)


# ---- in tests -------------------------------------------------------------------------------------------------------


def test_assertions(module: Callable[[str], Path]) -> None:
    compiled = explained(module("plain"), on="v5e:2x2", mesh="data=4")
    assert_fits(compiled)
    with pytest.raises(AssertionError, match="needs 554 MB of 169 MB"):
        assert_fits(compiled, share=0.01)
    assert_no_exposed(compiled, at_most_s=0.01)
    with pytest.raises(AssertionError, match=r"waits 6\.\d+ ms a step for collectives; the longest: all_reduce"):
        assert_no_exposed(compiled)


def test_the_ledger_of_a_test(module: Callable[[str], Path], tmp_path: Path) -> None:
    """Written the first time; a slower program fails, and with --rooftop-save it is the new one."""
    plain, trapped = (explained(module(name), on="v5e:2x2", mesh="data=4") for name in ("plain", "trap"))
    ledger = TestLedger(path=tmp_path / "ledgers" / "test.json", save=False)
    ledger.check(plain)
    assert ledger.check(plain).holds
    with pytest.raises(AssertionError, match="over the limit: time"):
        ledger.check(trapped)
    TestLedger(path=ledger.path, save=True).check(trapped)
    assert ledger.check(trapped).holds


own_ledger = testing.rooftop_ledger


def test_the_fixture(own_ledger: TestLedger) -> None:
    assert own_ledger.path == HERE.parent / "ledgers" / "test_the_fixture.json"
