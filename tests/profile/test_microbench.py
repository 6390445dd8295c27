"""Measurements: the programs are right, numbers carry what they must, and what cannot be run is refused."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest

from rooftop.algebra.einsums import strategies
from rooftop.algebra.expression import parse
from rooftop.algebra.pricing import Prices
from rooftop.arrays import Mesh, parse_axes
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.ledger import COLLECTIVES
from rooftop.core.records import schema
from rooftop.hardware import Slice
from rooftop.library.benchmarks import CollectivesResult
from rooftop.profile.microbench import collectives, timing
from rooftop.profile.microbench import strategies as measured
from tests.conftest import Answer

MESH = {"X": 2, "Y": 4}
MATMUL = "bf16[B_X, D_Y] @ bf16[D_Y, F] -> bf16[B_X, F]"
SIZES = {"B": 16, "D": 32, "F": 64}


def prices(kind: str = "bound", **sizes: int) -> Prices:
    return Prices(mesh=Mesh.lay(Slice.parse("v6e:2x4"), MESH), dims=SIZES | sizes, kind=kind)


@pytest.fixture
def bench(rooftop: Callable[..., Answer]) -> Callable[..., Answer]:
    return lambda *arguments: rooftop("bench", "collectives", *arguments)


# Collectives


def expected(kind: str, groups: np.ndarray) -> np.ndarray:
    """Results of a collective for the operands of a group: both [..., devices of a group, elements]."""
    members = groups.shape[-2]
    total = groups.sum(-2, keepdims=True)
    return {
        "all_gather": lambda: np.broadcast_to(
            groups.reshape(*groups.shape[:-2], 1, -1), (*groups.shape[:-1], members * groups.shape[-1])
        ),
        "reduce_scatter": lambda: total.reshape(*groups.shape[:-2], members, -1),
        "all_reduce": lambda: np.broadcast_to(total, groups.shape),
        "all_to_all": lambda: groups.reshape(*groups.shape[:-1], members, -1).swapaxes(-3, -2).reshape(groups.shape),
        "permute": lambda: np.roll(groups, 1, axis=-2),
    }[kind]()


@pytest.mark.parametrize("axes", [("X",), ("Y",), ("X", "Y"), ("Y", "X")], ids="".join)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_each_program_does_its_collective(kind: str, axes: tuple[str, ...]) -> None:
    mesh = timing.device_mesh(MESH)
    operand = collectives.operand(kind, axes, 64, "f32", mesh)
    value = np.random.default_rng(0).integers(-9, 10, operand.shape).astype(np.float32)
    program = jax.jit(collectives.program(kind, axes, mesh))(jax.device_put(value, operand.sharding))

    # Axes of the collective last, in mesh order; the others number the groups.
    order = sorted(range(len(MESH)), key=lambda place: (tuple(MESH)[place] in axes, place))
    members = math.prod(MESH[axis] for axis in axes)

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.transpose(*order, len(order)).reshape(-1, members, x.shape[-1])

    np.testing.assert_array_equal(grouped(np.asarray(program)), expected(kind, grouped(value)))


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_sizes_are_payloads_as_in_the_ledger(kind: str) -> None:
    mesh = timing.device_mesh(MESH)
    taken = collectives.operand(kind, ("Y",), 1024, "bf16", mesh)
    output = jax.eval_shape(collectives.program(kind, ("Y",), mesh), taken)
    payload = output if kind == "all_gather" else taken
    assert payload.shape == (2, 4, 512)
    # What a payload does not divide into is rounded up, alike for all kinds.
    assert collectives.operand(kind, ("Y",), 1025, "bf16", mesh).shape[-1] * (4 if kind == "all_gather" else 1) == 516


def test_wire_bytes_are_what_one_device_sends() -> None:
    assert {kind: collectives.wire_bytes(kind, 4, 1000.0) for kind in COLLECTIVES} == {
        "all_gather": 750.0,
        "reduce_scatter": 750.0,
        "all_reduce": 1500.0,
        "all_to_all": 750.0,
        "permute": 1000.0,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "gather"}, "collective: got 'gather'"),
        ({"axes": ("Z",)}, "axis: got 'Z'; accepted: one of X, Y"),
        ({"axes": ("X",), "mesh": {"X": 1, "Y": 4}}, "axis: got 'X'; accepted: axes of two devices or more"),
        ({"dtype": "f64"}, "dtype: got 'f64'"),
    ],
)
def test_what_is_no_collective_is_refused(change: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"kind": "permute", "axes": ("Y",), "payload": 64, "dtype": "bf16", "mesh": MESH} | change
    with pytest.raises(RooftopError, match=re.escape(message)):
        collectives.operand(**asked | {"mesh": timing.device_mesh(asked["mesh"])})


# Timing


def test_every_run_but_the_first_is_timed() -> None:
    calls: list[int] = []
    timed = timing.time_program(calls.append, 1, least_s=0.0, least_runs=7)
    assert timed.runs == len(calls) - 1 == 7
    assert all(seconds > 0 for seconds in timed.seconds)


def test_runs_go_on_for_the_least_time() -> None:
    assert sum(timing.time_program(lambda: None, least_s=1e-3, least_runs=1).seconds) >= 1e-3


def test_a_timing_is_its_median_and_fastest() -> None:
    timed = timing.Timing(seconds=(3.0, 1.0, 2.0, 9.0))
    assert (timed.median_s, timed.fastest_s, timed.runs) == (2.5, 1.0, 4)


def test_a_measured_number_carries_where_and_when() -> None:
    used = timing.devices(8)
    origin = timing.provenance(used).to_json()
    assert origin["devices"] == "8 x cpu (emulated)"
    assert (origin["platform"], origin["count"], origin["emulated"]) == ("cpu", 8, True)
    assert origin["versions"]["jax"] == importlib.metadata.version("jax")
    assert origin["versions"]["jaxlib"] == importlib.metadata.version("jaxlib")
    assert datetime.fromisoformat(origin["date"]).utcoffset() == timedelta(0)
    assert json.loads(json.dumps(origin)) == origin


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(RooftopError, match="mesh: got 'X=4,Y=4'; accepted: at most the 8 x cpu here"):
        timing.device_mesh({"X": 4, "Y": 4})


@pytest.mark.parametrize(
    ("flags", "count", "devices"),
    [
        ("", 12, 12),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("", 3, 3), ("", None, 8), ("=2", 2, 2))),
    ],
)
def test_a_cpu_emulates_what_is_asked_for(flags: str, count: int | None, devices: int) -> None:
    code = f"from rooftop.profile.microbench.timing import devices; print(len(devices({count})))"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags and f"--xla_force_host_platform_device_count{flags}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout) == devices


# Strategies


def test_the_best_strategies_are_run_and_checked() -> None:
    priced = prices("expected")
    answer = measured.measure(parse(MATMUL), priced, 3, least_s=0.0).to_json()
    best = strategies(parse(MATMUL), priced)[:3]
    assert [entry["rule"] for entry in answer["strategies"]] == [strategy.rule for strategy in best]
    assert [entry["planned_s"] for entry in answer["strategies"]] == [strategy.time_s for strategy in best]
    assert all(entry["checked"] and entry["runs"] >= 3 for entry in answer["strategies"])
    assert all(0 < entry["fastest_s"] <= entry["median_s"] for entry in answer["strategies"])
    assert answer["empty_call_s"] > 0
    assert answer["emulated"]


def test_collective_matmuls_can_be_left_out() -> None:
    answer = measured.measure(parse(MATMUL), prices(), 2, overlapped=False, least_s=0.0).to_json()
    plain = strategies(parse(MATMUL), prices(), overlapped=False)[:2]
    assert [entry["rule"] for entry in answer["strategies"]] == [strategy.rule for strategy in plain]


@pytest.mark.parametrize(
    "text",
    [
        "f32[B_X, D]{U_Y} @ f32[D, F] -> f32[B_X, F_Y]",
        "int8[E_Y, B, D_X] @ int8[E_Y, D_X, F] -> int8[E_Y, B, F_X]",
        "bf16[B_X, D]{U_Y} -> bf16[B, D_XY]",
        "bf16[B_X, D_Y] -> bf16[B_Y, D_X]",
        "AllToAll_{X,D}(bf16[B_X, D])",
        "AllReduce_Y(f32[B_X, D]{U_Y})",
    ],
)
def test_einsums_reshardings_and_collectives_run(text: str) -> None:
    (entry,) = measured.measure(parse(text), prices(E=8), 1, least_s=0.0).to_json()["strategies"]
    assert entry["checked"]


def test_progress_names_what_comes_next() -> None:
    reports: list[tuple[int, int, str]] = []
    measured.measure(
        parse("bf16[B_X, D] -> bf16[B, D_X]"), prices(), 1, on_progress=lambda *news: reports.append(news), least_s=0.0
    )
    rule = "all_to_all [B_X, D] over X"
    assert reports == [(0, 2, f"compile: {rule}"), (1, 2, f"run: {rule}")]


@pytest.mark.parametrize("wrong", [lambda x: -x, lambda x: x.at[0, 0].add(1), lambda x: x[::-1]])
def test_a_wrong_result_is_not_timed(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = measured.einsum_program
    monkeypatch.setattr(
        measured, "einsum_program", lambda *arguments: lambda *operands: wrong(right(*arguments)(*operands))
    )
    with pytest.raises(Infeasible, match=r"wrong result of 'multiply.*numbers differ from those of one device"):
        measured.measure(parse(MATMUL), prices(), 1, least_s=0.0)


def test_what_is_too_large_for_one_device_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "CHECKED_ELEMENTS", 16 * 32 + 32 * 64 + 16 * 64 - 1)
    (entry,) = measured.measure(parse(MATMUL), prices(), 1, least_s=0.0).to_json()["strategies"]
    assert not entry["checked"]


def test_what_a_cpu_cannot_do_in_time_is_refused_with_sizes_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "EMULATED_MULTIPLY_ADDS", 1e5)
    with pytest.raises(RooftopError, match=r"dims: got 'B=16,D=32,F=64'; .*try --dims B=[0-9]+,D=") as caught:
        measured.measure(parse(MATMUL), prices(), 1, least_s=0.0)
    smaller = re.search(r"--dims (\S+),", caught.value.accepted)
    assert smaller is not None
    sizes = parse_axes(smaller.group(1), None)
    assert measured.measure(parse(MATMUL), prices(**sizes), 1, least_s=0.0)
    # And the sizes are the first that do: with one of them doubled it is too much again.
    with pytest.raises(RooftopError):
        measured.measure(parse(MATMUL), prices(**sizes | {"B": 2 * sizes["B"]}), 1, least_s=0.0)


def test_what_does_not_fit_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "usable_bytes", lambda used: 100.0)
    with pytest.raises(
        Infeasible, match=r"all_to_all .*needs .* more than each of the 8 has here; give smaller --dims"
    ):
        measured.measure(parse("bf16[B_X, D] -> bf16[B, D_X]"), prices(), 1)


@pytest.mark.parametrize("text", ["bf16[B_X, D]", "bf16[B_X, D]@host -> bf16[B_X, D]"])
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(RooftopError, match="measure: got 'bf16"):
        measured.measure(parse(text), prices(), 1)


# The command


def test_the_answer_in_json(bench: Callable[..., Answer], tmp_path: Path) -> None:
    written = tmp_path / "times.json"
    sizes = ("--sizes", "4Ki,16Ki")
    answer = bench("--mesh", "X=2,Y=4", "--axis", "Y", *sizes, "--on", "v5e:2x4", "-o", str(written), "--json")
    assert (answer.status, answer.err) == (0, "")
    data = answer.json
    assert json.loads(written.read_text(encoding="utf-8")) == data
    jsonschema.validate(data, schema(CollectivesResult))
    assert data["mesh"] == Mesh.lay(Slice.parse("v5e:2x4"), MESH).to_json()
    assert (data["axes"], data["slice"]) == (["Y"], "v5e:2x4")
    run = data["measured"]
    assert run["command"].startswith("rooftop bench collectives --mesh X=2,Y=4 --axis Y --kinds all_gather,")
    assert run["emulated"]
    assert run["versions"].keys() == {"rooftop", "jax", "jaxlib"}
    assert [(entry["kind"], entry["bytes"]) for entry in run["collectives"]] == [
        (kind, size) for kind in COLLECTIVES for size in (4096, 16384)
    ]
    planned = Prices(mesh=Mesh.lay(Slice.parse("v5e:2x4"), MESH), dims={}, kind="expected")
    for entry in run["collectives"]:
        assert entry["wire_bytes_per_s"] == pytest.approx(entry["wire_bytes"] / entry["median_s"])
        assert entry["planned"]["expected_s"] == planned.collective_s(entry["kind"], ("Y",), entry["bytes"])
        assert 0 < entry["planned"]["bound_s"] <= entry["planned"]["expected_s"]


def test_a_table_says_that_devices_are_emulated(bench: Callable[..., Answer]) -> None:
    answer = bench("--kinds", "permute", "--sizes", "4Ki")
    assert (answer.status, answer.err) == (0, "")
    assert "8 x cpu (emulated)" in answer.out
    assert "permute" in answer.out
    assert "nothing about an accelerator" in answer.out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--kinds", "all_gatr"), 2, "kinds: got 'all_gatr'; accepted: did you mean all_gather"),
        (("--axis", "Z"), 2, "axis: got 'Z'; accepted: one of X"),
        (("--mesh", "X=8", "--axis", "X,X"), 2, "axis: got 'X,X'; accepted: each axis once"),
        (("--mesh", "X=1"), 2, "axis: got 'X=1'; accepted: two devices or more"),
        (("--mesh", "X=16"), 2, "mesh: got 'X=16'; accepted: at most the 8 x cpu"),
        (("--mesh", "X=4", "--on", "v5e:2x4"), 2, "mesh: got 'X=4'; accepted: sizes that multiply to the 8 devices"),
        (("--sizes", "4Ki,x"), 2, "sizes: got 'x'"),
        (("--dtype", "fp7"), 2, "dtype: got 'fp7'"),
        (("--sizes", "1P", "--kinds", "permute"), 1, "permute of 1000000000000000 bytes: needs "),
    ],
)
def test_what_cannot_be_is_one_line(
    bench: Callable[..., Answer], arguments: tuple[str, ...], status: int, message: str
) -> None:
    answer = bench(*arguments)
    assert (answer.status, answer.out) == (status, "")
    assert answer.err.startswith(f"rooftop: {message}")
    assert answer.err.count("\n") == 1


def test_the_command_starts_without_jax() -> None:
    code = "import sys, rooftop.cli.bench; assert not {'jax', 'numpy', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
