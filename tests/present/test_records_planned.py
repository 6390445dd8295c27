"""Documents of plans, simulations and products: a record, its file and an older file say the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rooftop
from rooftop.core.errors import RooftopError
from rooftop.core.records import Record
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.documents import Reason
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import sweep
from rooftop.plan.training.workload import Workload
from rooftop.present.documents import document
from rooftop.ui.opened import opened_json

TABLES = Path(__file__).parents[2] / "docs" / "tables.toml"
SERVE: Mapping[str, Any] = {"weights_dtype": "int8", "kv_dtype": "int8", "prompt": 512, "generate": 64}


@pytest.fixture(scope="module")
def answers() -> dict[str, Record]:
    """The record of an answer of each kind."""
    train = {"on": "v5e:2x2", "mesh": "fsdp=4", "batch_seqs": 8, "seq": 2048, "remat": "block"}
    staged = {"on": "v5e:2x2@2", "mesh": "stage=2,fsdp=4", "batch_seqs": 16, "seq": 2048, "microbatches": 4}
    served = rooftop.plan_serving("llama3.2-1b", on="v5e:2x2", batch_seqs=4, mesh="tensor=4", **SERVE)
    embedded = rooftop.plan_embedding(TABLES, on="v5p:2x2x1", batch_samples=4096)
    product = rooftop.matmul("A[B_X, D] * B[D, F]", dims="B=64,D=64,F=64", mesh="X=4,Y=4", on="v5e:4x4", backward=True)
    return {
        "train": rooftop.plan_training("llama3.2-1b", alternatives=2, **train).record,
        "stages": rooftop.plan_training("llama3.2-1b", alternatives=1, **staged).record,
        "compared": rooftop.plan_training(
            "llama3.2-1b", on="v5e:2x2,v5p:2x2x1", batch_seqs=8, seq=2048, tokens="1B", alternatives=1
        ).record,
        "serve": served.record,
        "fleet": rooftop.plan_serving("llama3.2-1b", on="v5e", requests_per_second=2, **SERVE).record,
        "pareto": rooftop.serving_front("llama3.2-1b", on="v5e:2x2", weights_dtype="int8", kv_dtype="int8").record,
        "simulation": rooftop.simulate(served, requests_per_second=2, duration="5s").report,
        "embed": embedded.record,
        "matmul": product,
    }


NAMES = ("train", "stages", "compared", "serve", "fleet", "pareto", "simulation", "embed", "matmul")


@pytest.mark.parametrize("name", NAMES)
def test_a_record_and_its_file_give_one_document(answers: dict[str, Record], name: str) -> None:
    kind = name if name == "matmul" else None
    written = json.loads(json.dumps(answers[name].to_json()))
    assert document(written, kind=kind) == document(answers[name], kind=kind)


#: Fields that answers of earlier versions do not have.
ADDED = {
    "train": (
        "padding", "reasons", "alternatives", "what_if", "nearest_executable", "nearest_with_room", "other_batches",
        "searched", "comparison", "pipeline", "request", "collective_matmuls", "evidence",
    ),
    "serve": ("recommendation", "request", "tpot_together_s", "evidence"),
    "pareto": ("request",),
    "simulation": ("notes", "request"),
    "embed": ("nearest", "request"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDED)
def test_answers_of_earlier_versions_open(answers: dict[str, Record], name: str) -> None:
    data = {field: value for field, value in answers[name].to_json().items() if field not in ADDED[name]}
    assert opened_json("x.json", json.loads(json.dumps(data))).answer.title == document(answers[name]).title


#: A field of each kind, and what is said of text in its place.
WRONG: Mapping[str, tuple[tuple[str, ...], str]] = {
    "train": (("step", "expected_s"), "step.expected_s: got 'soon'; accepted: a number"),
    "compared": (("comparison", "best", "mfu"), "comparison.best.mfu: got 'soon'; accepted: a number"),
    "stages": (("pipeline", "bubble"), "pipeline.bubble: got 'soon'; accepted: a number"),
    "serve": (("generate", "batch"), "generate.batch: got 'soon'; accepted: a whole number"),
    "fleet": (("recommendation", "best", "chips"), "recommendation.best.chips: got 'soon'; accepted: a number"),
    "pareto": (("pareto", "0", "step_s"), "pareto[0].step_s: got 'soon'; accepted: a number"),
    "simulation": (("tokens", "cached"), "tokens.cached: got 'soon'; accepted: a whole number"),
    "embed": (("memory", "tile"), "memory.tile: got 'soon'; accepted: a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_saved_answer_with_a_wrong_field_is_refused_by_its_name(answers: dict[str, Record], name: str) -> None:
    (*path, last), said = WRONG[name]
    data = json.loads(json.dumps(answers[name].to_json()))
    at: Any = data
    for step in path:
        at = at[int(step)] if step.isdigit() else at[step]
    at[last] = "soon"
    with pytest.raises(RooftopError) as refused:
        opened_json("x.json", data)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_parts_that_an_answer_does_not_have_are_not_written(answers: dict[str, Record]) -> None:
    assert {"comparison", "pipeline"}.isdisjoint(answers["train"].to_json())
    assert "comparison" in answers["compared"].to_json() and "pipeline" in answers["stages"].to_json()
    problem = Problem(
        model=load_model("llama3.2-1b"), slice=Slice.parse("v5e:2x2"), axes={"fsdp": 4}, remat="block", microbatches=1,
        workload=Workload(batch_tokens=4 * 2048, seq_len=2048),
    )  # fmt: skip
    searched = sweep(problem)
    plan: TrainingPlan = searched.plan(searched.best)
    # A plan alone opens too.
    assert opened_json("x.json", plan.to_json()).what == "a plan of a training run"


def test_a_saved_reason_keeps_its_verdict() -> None:
    words = {"rule": "fewest bytes moved", "source": "chapter 5", "formula": "X = Y", "text": ""}
    far, near = (Reason.balanced(**words, value=value, limit=4.0) for value in (32.0, 6.0))
    assert (far.holds, near.holds, Reason.at_least(**words, value=32.0, limit=4.0).holds) == (False, True, True)
    assert Reason(**far.to_json()) == far  # type: ignore[arg-type]
