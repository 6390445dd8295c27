"""``rooftop compile`` of plans of embeddings: reports, refusals, checks; and what stands for the dense part."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from rooftop.arrays import Mesh
from rooftop.compiler.compiling import Compiled, CompileRequest
from rooftop.compiler.memory import OutOfMemory
from rooftop.compiler.sparsecore import CHECKS, TILE_MEMORY, Marks, check_options, parse_checks, require_checks
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.records import schema
from rooftop.explain.embedding.compiled import (
    MOST_TRIALS,
    CompiledEmbedRecord,
    EmbedRefusal,
    EmbedReport,
    RefusedEmbedRecord,
    compile_embed_plan,
)
from rooftop.explain.embedding.programs import Compilation
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.limits import StackLimits
from rooftop.plan.embedding.plan import EmbedPlan
from rooftop.programs.embedding.lowering import Tower
from tests.conftest import Answer
from tests.support.embedding_programs import HLO, TOML


@pytest.fixture
def plan_file(rooftop: Callable[..., Answer], tmp_path: Path) -> Path:
    (tmp_path / "tables.toml").write_text(TOML)
    file = tmp_path / "plan.json"
    job = ("plan", "embed", str(tmp_path / "tables.toml"), "--on", "v5p:2x2x1", "--batch-samples", "4096")
    assert rooftop(*job, "--dense-flops", "1M", "-o", str(file)).status == 0
    return file


@pytest.fixture
def plan(plan_file: Path) -> EmbedPlan:
    return EmbedPlan.from_json(json.loads(plan_file.read_text()))


@dataclass(frozen=True, kw_only=True)
class Pretended(Compilation):
    """A compiler that takes limits up to ``most`` unique ids and just ``island``, and whose heap is ``heap`` bytes."""

    plan: EmbedPlan
    most: int = 10**9
    island: int = 10**9
    tile_says: str = "Can't fit a single row."
    heap: int = 10**6
    factor: float = 1.0
    beyond_plan: int | None = None
    no_hbm: bool = False

    def run(self, request: CompileRequest) -> Marks:
        part, only = request.arguments["part"], request.arguments.get("only")
        limits = request.arguments["limits"]
        if only is not None and self.most < limits[only]["max_unique_ids"] != self.island:
            raise Infeasible(TILE_MEMORY, self.tile_says)
        if self.no_hbm and only is None:
            # As it is printed: what is too much is less than the last digit.
            raise OutOfMemory("a step", needed_bytes=1e11, available_bytes=1e11, at_peak=None)
        name = {"lookup": "forward_stack", "update": "backward_stack"}.get(part, "backward_stack")
        stack = self.plan.problem.stacking.stack(only or self.plan.problem.stacking.stacks[0].name)
        sizes = ("argument", "output", "alias", "temp", "generated_code", "host_argument", "host_temp")
        compiled = Compiled(
            mesh=request.mesh, hlo_text=HLO, peak_bytes=self.heap, memory=dict.fromkeys(sizes, 7), lower_s=0.0,
            compile_s=1.0, versions={"jax": "1", "jaxlib": "1", "libtpu": "1"},
            options={**request.defaults, **request.options},
        )  # fmt: skip
        hbm = round(self.factor * self.plan.stack_memory(stack)[name] / 4)
        if self.beyond_plan is not None and only is None:
            stack_limits = {name: StackLimits(**one) for name, one in limits.items()}
            memory = EmbedPlan(problem=replace(self.plan.problem, limits=stack_limits)).memory
            hbm = round(memory["backward_stack"] / 4)
            heap = memory["total"][part] - memory["backward_stack"] + self.beyond_plan
            compiled = replace(compiled, peak_bytes=round(heap))
        return Marks(hbm_bytes=hbm, tile_bytes=1000, compiled=compiled)


def test_a_plan_comes_back_from_its_file(plan_file: Path, plan: EmbedPlan) -> None:
    written = json.loads(plan_file.read_text())
    del written["request"]
    assert json.loads(json.dumps(plan.to_json())) == written


def test_a_report_sets_each_stack_beside_the_plan(plan: EmbedPlan) -> None:
    report = compile_embed_plan(plan, Pretended(plan=plan))
    assert isinstance(report, EmbedReport)
    data = report.to_json()
    jsonschema.validate(data, schema(CompiledEmbedRecord))
    assert [(row["stack"], row["part"]) for row in data["stacks"]] == [
        (stack.name, part) for stack in plan.problem.stacking.stacks for part in ("lookup", "update")
    ]
    assert all(row["ratio"] == pytest.approx(1, abs=1e-4) for row in data["stacks"])
    assert data["agrees"] and data["steps"]["pipelined"]["overlap"] == pytest.approx(1 / 3)
    own = data["steps"]["pipelined"]
    assert own["needed_bytes"] == 10**6 + 4 * own["sparsecore_hbm_bytes"]
    assert own["planned_bytes"] == plan.memory["total"]["pipelined"]
    assert "xla_tpu_rerun_latency_hiding_scheduler_post_sc_assignment" in own["options"]
    assert data["steps"]["sequential"]["options"] == {}
    # The first words are of stacks alone: whole steps have their own figure.
    over = own["needed_bytes"] / own["planned_bytes"] - 1
    assert report.verdict.startswith("stacks as planned within 5%; memory of whole steps over the plan's: sequential ")
    assert f"pipelined {over:+.0%}; at most" in report.verdict


def test_a_stack_that_differs_is_named(plan: EmbedPlan) -> None:
    report = compile_embed_plan(plan, Pretended(plan=plan, factor=1.2))
    assert isinstance(report, EmbedReport)
    assert not report.agrees and "user lookup +20.0%" in report.verdict


def test_limits_beyond_a_tile_are_refused_with_limits_that_compile(plan: EmbedPlan) -> None:
    most = plan.problem.limits["user"].max_unique_ids - 8
    refusal = compile_embed_plan(plan, Pretended(plan=plan, most=most))
    assert isinstance(refusal, EmbedRefusal)
    jsonschema.validate(refusal.to_json(), schema(RefusedEmbedRecord))
    assert (refusal.stack, refusal.part) == ("user", "lookup")
    largest = refusal.largest
    assert largest is not None and set(largest.limits) == {"user"} and largest.tried <= MOST_TRIALS
    assert largest.refused is not None
    # Limits are whole eights: nothing is between what compiles and what does not.
    assert most - 8 < largest.limits["user"].max_unique_ids <= most < largest.refused["user"].max_unique_ids <= most + 8
    assert f"at most max_unique_ids {largest.limits['user'].max_unique_ids} " in str(refusal.infeasible)


@pytest.mark.parametrize(
    ("says", "larger_refused"),
    [
        ("Can't fit a single row. TileSpmem bytes: 262112", False),
        ("No viable logical replica count: 520,864 bytes of unique ids and 173,280 of ids", True),
    ],
)
def test_a_tile_too_small_is_answered_with_limits_next_to_refused_ones(
    plan: EmbedPlan, says: str, larger_refused: bool
) -> None:
    # What the plan refuses too: its own largest compiles, and a few more do.
    own = StackLimits(max_ids=50_000, max_unique_ids=50_000, buffer=400_000)
    large = EmbedPlan(problem=replace(plan.problem, limits={**plan.problem.limits, "user": own}))
    stack = large.problem.stacking.stack("user")
    planned = large.largest_in_tile(stack).max_unique_ids
    most = planned + 40
    refusal = compile_embed_plan(large, Pretended(plan=large, most=most, island=2 * planned, tile_says=says))
    assert isinstance(refusal, EmbedRefusal) and refusal.largest is not None
    largest, said = refusal.largest, refusal.to_json()
    jsonschema.validate(said, schema(RefusedEmbedRecord))
    fits, refused = largest.limits["user"].max_unique_ids, largest.refused["user"].max_unique_ids
    assert planned <= most - 16 < fits <= most < refused <= most + 16 and largest.tried <= MOST_TRIALS
    assert said["larger_refused"] is larger_refused and says in said["refused_why"]
    # Of refusals that follow no size the answer says so; of others that passes over samples would do.
    assert (", though the compiler may take more)" in said["verdict"]) is not larger_refused
    assert f"(max_unique_ids {refused} with" in said["verdict"] and "--sample-passes" in said["verdict"]


@pytest.mark.parametrize("compiler", [{"no_hbm": True}, {"heap": 10**12}])
def test_hbm_that_overflows_is_an_answer(plan: EmbedPlan, compiler: dict[str, int]) -> None:
    refusal = compile_embed_plan(plan, Pretended(plan=plan, **compiler))  # type: ignore[arg-type]
    assert isinstance(refusal, EmbedRefusal) and refusal.stack is None
    jsonschema.validate(refusal.to_json(), schema(RefusedEmbedRecord))
    assert "HBM" in str(refusal.infeasible) and refusal.largest is None


def test_hbm_that_only_the_compiler_fills_is_answered_with_limits_that_compile(plan: EmbedPlan) -> None:
    least = {name: one.scaled(0.0) for name, one in plan.problem.limits.items()}
    bounds = [
        option.memory["total"]["sequential"]
        for option in (plan, EmbedPlan(problem=replace(plan.problem, limits=least)))
    ]
    # Of what limits decide, half has to go.
    smallest = plan.largest_in_hbm(sum(bounds) / 2)
    assert smallest is not None and plan.obstacles == []
    beyond = round(plan.problem.slice.chip.hbm_usable_bytes - sum(bounds) / 2)
    refusal = compile_embed_plan(plan, Pretended(plan=plan, beyond_plan=beyond))
    assert isinstance(refusal, EmbedRefusal) and refusal.part == "sequential step" and refusal.largest is not None
    said = refusal.to_json()
    jsonschema.validate(said, schema(RefusedEmbedRecord))
    assert said["largest"] is None and set(said["largest_limits"]) == set(plan.problem.limits)
    assert said["limits_tried"] == refusal.largest.tried <= MOST_TRIALS
    assert refusal.largest.refused is not None
    for name, limits in refusal.largest.limits.items():
        assert limits.max_unique_ids <= refusal.largest.refused[name].max_unique_ids
        assert 0.998 * smallest[name].max_unique_ids - 8 <= limits.max_unique_ids
        assert f"{name} max_unique_ids {limits.max_unique_ids} with" in str(refusal.infeasible)
    totals = [
        EmbedPlan(problem=replace(plan.problem, limits=choice)).memory["total"]["sequential"]
        for choice in (refusal.largest.limits, refusal.largest.refused)
    ]
    assert totals[0] <= sum(bounds) / 2 < totals[1] and totals[1] < 1.002 * totals[0]


@pytest.mark.parametrize(
    ("change", "words", "says"),
    [
        ({"schema": 99}, (), "plan schema: got 99; accepted: 1"),
        ({"limits": None}, (), "plan limits: got nothing; accepted: an object"),
        ({"limits": {}}, (), "limits for each stack"),
        ({}, ("--check", "nam"), "did you mean nan"),
        ({}, ("--save", "x"), "save:"),
        ({}, ("--mesh", "X=4"), "mesh:"),
    ],
)
def test_what_is_no_such_plan_is_one_line(
    rooftop: Callable[..., Answer], plan_file: Path, change: dict[str, object], words: tuple[str, ...], says: str
) -> None:
    plan_file.write_text(json.dumps(json.loads(plan_file.read_text()) | change))
    answer = rooftop("compile", str(plan_file), *words)
    assert answer.status == 2 and says in answer.err and answer.err.count("\n") == 1


def test_checks_are_compiler_options() -> None:
    assert parse_checks(None) == () and parse_checks(" nan, bounds,nan") == ("nan", "bounds")
    assert check_options(["nan"]) == CHECKS["nan"]
    with pytest.raises(RooftopError, match="did you mean bounds"):
        parse_checks("bound")


def test_a_tower_computes_what_is_asked() -> None:
    for flops in (1e5, 1e6, 3e7):
        tower = Tower(features=(("a", 64), ("b", 12)), flops=flops)
        assert tower.flops_per_sample == pytest.approx(flops, rel=0.15)
    assert Tower(features=(("a", 64),), flops=0).width == 8


def test_a_tower_learns_on_any_number_of_devices() -> None:
    tower = Tower(features=(("a", 8), ("b", 4)), flops=2000)
    random = np.random.default_rng(0)
    weights = [random.standard_normal(shape).astype(np.float32) for shape in tower.shapes()]
    features = {"a": random.standard_normal((8, 8)), "b": random.standard_normal((8, 3, 4))}
    label = random.standard_normal(8).astype(np.float32)
    losses = []
    for devices in (1, 4):
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        split = NamedSharding(mesh, P("data"))
        with jax.set_mesh(mesh):
            placed = jax.device_put({name: one.astype(np.float32) for name, one in features.items()}, split)
            losses.append(jax.jit(tower)(weights, placed, jax.device_put(label, split)))
    for one, other in zip(jax.tree.leaves(losses[0]), jax.tree.leaves(losses[1]), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)
    assert float(jnp.abs(losses[0][1]["b"]).max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_compilers_marks_stand_beside_the_plans(rooftop: Callable[..., Answer], plan_file: Path, on: str) -> None:
    folder = plan_file.parent
    job = ("plan", "embed", str(folder / "tables.toml"), "--on", on, "--batch-samples", "4096", "-o", str(plan_file))
    assert rooftop(*job).status == 0
    answer = rooftop("compile", str(plan_file), "--json")
    assert answer.status == 0, answer.err
    data = answer.json
    jsonschema.validate(data, schema(CompiledEmbedRecord))
    assert data["agrees"], data["verdict"]
    assert data["steps"]["pipelined"]["overlap"] > 0.5
    # Tables and slots are updated where they lie: nothing as large is there twice.
    for step in data["steps"].values():
        assert step["heap_bytes"] < 1.3 * step["arguments_bytes"]


@pytest.mark.slow
def test_what_no_tile_holds_is_refused_by_the_compiler_too(rooftop: Callable[..., Answer], plan_file: Path) -> None:
    # A narrow table for small tiles: next to a full one programs take long to compile.
    job = ("plan", "embed", str(plan_file.with_name("tables.toml")), "--on", "v6e:2x2", "--batch-samples", "4096")
    assert rooftop(*job, "-o", str(plan_file)).status == 0
    data = json.loads(plan_file.read_text())
    data["limits"]["tag"] = {"max_ids": 16384, "max_unique_ids": 16384, "buffer": 16384 * 8}
    plan_file.write_text(json.dumps(data))
    answer = rooftop("compile", str(plan_file), "--json")
    assert answer.status == 1 and answer.json["stack"] == "tag" and answer.json["limits_tried"] <= MOST_TRIALS
    fits, refused = (answer.json[f"{name}_limits"]["tag"]["max_unique_ids"] for name in ("largest", "refused"))
    assert fits < refused <= fits + 16 and answer.json["larger_refused"]
    assert "which compiles" in answer.err and answer.err.count("\n") == 1


@pytest.mark.slow
def test_a_flag_that_libtpu_does_not_know_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Slice.parse("v5p:2x2x1")
    require_checks(CHECKS, where)
    changed = {**CHECKS, "nan": {"xla_sparse_core_enable_id_bound_check": "true"}}
    monkeypatch.setattr("rooftop.compiler.sparsecore.CHECKS", changed)
    with pytest.raises(RooftopError, match="xla_sparse_core_enable_id_bound_check"):
        require_checks(["nan"], where)


def test_a_pretended_compiler_is_given_the_plans_mesh(plan: EmbedPlan) -> None:
    seen: list[CompileRequest] = []

    @dataclass(frozen=True, kw_only=True)
    class Watched(Pretended):
        def run(self, request: CompileRequest) -> Marks:
            seen.append(request)
            return super().run(request)

    compile_embed_plan(plan, Watched(plan=plan))
    assert all(request.mesh == Mesh.lay(plan.problem.slice, {"data": 4}) for request in seen)
    assert [request.arguments["part"] for request in seen] == ["lookup", "update"] * 2 + ["sequential", "pipelined"]
