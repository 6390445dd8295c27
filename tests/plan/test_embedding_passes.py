"""Plans in passes over samples: the sums' memory, what a pass moves, limits of a pass, and passes that are proposed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core import records
from rooftop.core.errors import RooftopError
from rooftop.embed.host.limits import expected, write_limits
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.explain.embedding.compiled import CompiledEmbedRecord
from rooftop.explain.embedding.programs import part_request, step_request
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, TableOptimizer, Tables
from rooftop.plan.embedding.limits import limits_in_passes
from rooftop.plan.embedding.memory import stack_bytes, tile_room
from rooftop.plan.embedding.plan import EmbedPlan, EmbedPlanDocument
from rooftop.plan.embedding.problem import EmbedProblem, per_device, stacking_on
from tests.conftest import Answer
from tests.support.embedding_programs import TOML


def plan(
    optimizer: TableOptimizer | None = None, *, on: str = "v5p:2x2x1", batch: int = 16384, passes: int = 1
) -> EmbedPlan:
    own = optimizer or TableOptimizer(kind="adagrad")
    tables = Tables(
        tables=(EmbeddingTable(name="user", vocabulary=1_000_000, width=64, optimizer=own),),
        features=(Feature(name="f", table="user", ids_per_sample=20),),
    )
    where = Slice.parse(on)
    limits = expected(stacking_on(tables, where, batch), batch=batch, sample_passes=passes)
    return EmbedPlan(problem=EmbedProblem(tables=tables, slice=where, batch=batch, limits=limits, sample_passes=passes))


@pytest.mark.parametrize(
    ("on", "kind", "compiled"),
    [
        ("v5p:2x2x1", "adagrad", 12_762_112), ("v5p:2x2x1", "adam", 16_958_464),
        ("v6e:2x2", "adagrad", 50_903_040), ("tpu7x:2x2x1", "adagrad", 12_762_624),
    ],
)  # fmt: skip
def test_the_stack_of_an_update_by_sums_is_what_the_compiler_marked(on: str, kind: str, compiled: int) -> None:
    # Width 64, 512 unique ids of 1,024, four passes: marks of libtpu 0.0.42.1.
    where = Slice.parse(on)
    needed = stack_bytes(
        "backward",
        width=64,
        max_ids=1024,
        max_unique_ids=512,
        cores=per_device(where) * where.devices,
        slots=len(TableOptimizer(kind=kind).slots(1)),
        room=tile_room(where.chip),
        summed=True,
    )
    assert needed == pytest.approx(compiled, rel=0.001)


def test_sums_take_the_table_once_more_unless_updates_add() -> None:
    for optimizer, sums in (
        (TableOptimizer(kind="adagrad"), 1),
        (TableOptimizer(kind="sgd", clip=1.0), 1),
        (TableOptimizer(kind="sgd"), 0),
    ):
        one, four = (plan(optimizer, passes=passes) for passes in (1, 4))
        assert one.memory["sums"] == 0 and four.memory["sums"] == sums * four.memory["tables"]
        parts = ("tables", "slots", "sums", "backward_stack", "inputs")
        state_bytes = sum(four.memory[name] for name in parts) + 2 * four.memory["activations"]
        assert four.memory["total"]["sequential"] == pytest.approx(state_bytes)
        # Stacks are for what a pass looks up; what is looked up in all is as much.
        assert four.memory["forward_stack"] < 0.5 * one.memory["forward_stack"]
        assert four.memory["activations"] == one.memory["activations"]


def test_a_pass_is_an_execution_of_its_rows_and_sums_are_a_second_loop() -> None:
    one, four = plan(), plan(passes=4)
    lookups, updates = ([plan.ledger.rows[place] for plan in (one, four)] for place in (0, 1))
    assert [row.count for row in (*lookups, *updates)] == [1, 4, 1, 4]
    assert [len(row.collectives) for row in (*lookups, *updates)] == [1, 1, 1, 2]
    # Rows that are in several passes are read in each.
    assert 1 < 4 * lookups[1].hbm_bytes / lookups[0].hbm_bytes < 4
    assert 1.5 < 4 * updates[1].hbm_bytes / updates[0].hbm_bytes < 4
    assert four.step["sequential"].expected_s > one.step["sequential"].expected_s
    assert four.ledger.expected_s == pytest.approx(four.units_s["ici"] + four.units_s["hbm"])
    additive = plan(TableOptimizer(kind="sgd"), passes=4)
    assert len(additive.ledger.rows[1].collectives) == 1


@given(
    batch=st.integers(1, 400),
    ids=st.floats(0.1, 60),
    vocabulary=st.integers(1, 10**7),
    passes=st.integers(2, 64),
)
def test_limits_in_passes_hold_what_is_expected_of_a_pass(batch: int, ids: float, vocabulary: int, passes: int) -> None:
    where = Slice.parse("v6e:2x2")
    tables = Tables(
        tables=(EmbeddingTable(name="t", vocabulary=vocabulary, width=8),),
        features=(Feature(name="f", table="t", ids_per_sample=ids),),
    )
    samples = 8 * batch
    stacking = stacking_on(tables, where, samples)
    whole = expected(stacking, batch=samples)["t"]
    expected_limits = expected(stacking, batch=samples, sample_passes=passes)["t"]
    limits = limits_in_passes(whole, passes, stacking.cores)
    assert all(getattr(limits, name) >= value for name, value in vars(expected_limits).items())
    assert limits.max_ids <= whole.max_ids


def test_limits_in_passes_hold_what_is_observed() -> None:
    tables = Tables(
        tables=(EmbeddingTable(name="t", vocabulary=5000, width=8),), features=(Feature(name="f", table="t"),)
    )  # fmt: skip
    batch = 4096
    stacking = stacking_on(tables, Slice.parse("v6e:2x2"), batch)
    random = np.random.default_rng(0)
    # Few ids are in most samples.
    ids = np.minimum(random.zipf(1.3, (batch, 12)) - 1, 4999)
    whole = Preprocessor(stacking, batch=batch).observe({"f": ids}).stacks["t"]
    limits = StackLimits(
        max_ids=int(whole.max_ids.max()),
        max_unique_ids=int(whole.max_unique_ids.max()),
        buffer=full_buffer(int(whole.max_ids.max()), stacking.cores),
    )
    for passes in (2, 4, 16):
        of_passes = limits_in_passes(limits, passes, stacking.cores)
        one = Preprocessor(stacking, batch=batch, minibatching=True, sample_passes=passes)
        seen = one.observe({"f": ids}).stacks["t"]
        assert seen.max_ids.max() <= of_passes.max_ids < limits.max_ids
        assert seen.max_unique_ids.max() <= of_passes.max_unique_ids
        assert seen.buffer.max() <= of_passes.buffer


def test_limits_that_do_not_fit_in_one_pass_are_answered_with_passes_that_do() -> None:
    whole = plan(batch=262144, on="v6e:2x2")
    (no,) = whole.obstacles
    passes = int(re.findall(r"or --sample-passes (\d+)", no)[0])
    assert "at most max_unique_ids" in no and passes > 1
    said = whole.to_json()
    jsonschema.validate(said, records.schema(EmbedPlanDocument))
    assert said["nearest"]["sample_passes"] == passes and not said["executable"]
    nearest = whole.in_passes_that_fit
    assert nearest is not None and nearest.obstacles == [] and nearest.to_json()["nearest"] is None
    assert not whole.in_passes(passes - 1).fits
    assert plan(batch=262144, on="v6e:2x2", passes=passes).obstacles == []
    # From a few passes that are not enough it is about as many.
    further = plan(batch=262144, on="v6e:2x2", passes=2).in_passes_that_fit
    assert further is not None and passes <= further.problem.sample_passes <= 1.5 * passes


def test_no_passes_are_proposed_where_tables_are_too_large() -> None:
    tables = Tables(
        tables=(EmbeddingTable(name="user", vocabulary=2**30, width=64),), features=(Feature(name="f", table="user"),)
    )
    small = plan(on="v6e:2x2").problem
    big = EmbedPlan(problem=dataclasses.replace(small, tables=tables))
    assert big.obstacles and "passes" not in big.obstacles[0] and big.to_json()["nearest"] is None


@pytest.fixture
def tables_file(tmp_path: Path) -> Path:
    file = tmp_path / "tables.toml"
    file.write_text(TOML)
    return file


def test_the_command_plans_the_passes_that_it_proposes(rooftop: Callable[..., Answer], tables_file: Path) -> None:
    job = ("plan", "embed", str(tables_file), "--on", "v6e:2x2", "--batch-samples", "512Ki")
    no = rooftop(*job)
    assert no.status == 1 and no.err.count("\n") == 1
    passes = re.findall(r"or --sample-passes (\d+)", no.err)
    assert len(passes) == 1
    file = tables_file.with_name("plan.json")
    yes = rooftop(*job, "--sample-passes", passes[0], "-o", str(file))
    assert yes.status == 0 and f"in {passes[0]} passes" in yes.out and "sums" in yes.out
    written = json.loads(file.read_text())
    jsonschema.validate(written, records.schema(EmbedPlanDocument))
    assert written["workload"]["sample_passes"] == int(passes[0]) and written["memory"]["sums"] > 0
    assert written.pop("request")["sample_passes"] == int(passes[0])
    assert json.loads(json.dumps(EmbedPlan.from_json(written).to_json())) == written


def test_a_plan_from_before_passes_is_of_one(rooftop: Callable[..., Answer], tables_file: Path) -> None:
    written = rooftop("plan", "embed", str(tables_file), "--on", "v6e:2x2", "--json").json
    del written["workload"]["sample_passes"]
    assert EmbedPlan.from_json(written).problem.sample_passes == 1
    written["workload"]["sample_passes"] = 65
    with pytest.raises(RooftopError, match="sample_passes: got 65; accepted: a whole number from 1 to 64"):
        EmbedPlan.from_json(written)


def test_limits_are_those_of_as_many_passes(rooftop: Callable[..., Answer], tables_file: Path) -> None:
    four, file = plan(passes=4), tables_file.with_name("limits.json")
    tables_file.write_text(
        '[tables.user]\nvocabulary = 1_000_000\nwidth = 64\n[features.f]\ntable = "user"\nids_per_sample = 20\n'
    )
    write_limits(file, four.problem.limits, four.problem.stacking, batch=four.problem.batch, sample_passes=4)
    job = ("plan", "embed", str(tables_file), "--on", "v5p:2x2x1", "--limits", str(file))
    assert rooftop(*job, "--sample-passes", "4").status == 0
    answer = rooftop(*job)
    assert answer.status == 2 and "limits: sample_passes: got 4; accepted: 1" in answer.err
    answer = rooftop(*job[:-2], "--sample-passes", "65")
    assert answer.status == 2 and answer.err.startswith("rooftop: sample-passes: got 65")


def test_what_is_compiled_is_in_as_many_passes() -> None:
    four = plan(passes=4)
    (stack,) = four.problem.stacking.stacks
    asked = (part_request(four, "update", stack), step_request(four, "pipelined"))
    assert [request.arguments["sample_passes"] for request in asked] == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_compilers_marks_stand_beside_those_of_passes(
    rooftop: Callable[..., Answer], tables_file: Path, on: str
) -> None:
    file = tables_file.with_name("plan.json")
    job = (
        "plan",
        "embed",
        str(tables_file),
        "--on",
        on,
        "--batch-samples",
        "4096",
        "--sample-passes",
        "4",
        "-o",
        str(file),
    )
    assert rooftop(*job).status == 0
    answer = rooftop("compile", str(file), "--json")
    assert answer.status == 0, answer.err
    data, planned = answer.json, json.loads(file.read_text())["memory"]
    jsonschema.validate(data, records.schema(CompiledEmbedRecord))
    assert data["agrees"] and data["sample_passes"] == 4, data["verdict"]
    for step in data["steps"].values():
        # The sums lie beside tables and slots, and are changed where they lie.
        state_bytes = planned["tables"] + planned["slots"] + planned["sums"]
        assert step["arguments_bytes"] == pytest.approx(state_bytes, rel=0.05)
        assert step["needed_bytes"] == pytest.approx(step["planned_bytes"], rel=0.05)
        assert step["heap_bytes"] < 1.3 * step["arguments_bytes"]
