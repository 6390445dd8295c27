"""Every number of a plan.json, spoiled: a plan with it is refused by the name of the field, or read and used."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import rooftop
from rooftop.core.errors import RooftopError
from rooftop.plan.embedding.plan import EmbedPlan
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.training.plan import TrainingPlan
from rooftop.requests.planning import PlanEmbedding, PlanServing, PlanTraining
from rooftop.requests.request import Request

ROOT = Path(__file__).parents[2]
#: What no figure of a plan is.
SPOILED = (math.nan, math.inf, -math.inf, 10**40, 1e300)
#: Figures of the search's answer, which no reader of a plan has, the errors of its evidence, and values of tables.
UNREAD = (
    "reasons.", "what_if.", "levers.", "searched", "smallest_batch.", "largest_batch.", "pareto.",
    "evidence.mean_error", "evidence.prefill.mean_error", "evidence.generate.mean_error", "tables.tables.",
)  # fmt: skip


def _reader(read: Callable[[Any], object], request: type[Request]) -> Callable[[Any], object]:
    """The reader of a plan and of the request in its answer."""
    return lambda data: (read(data), request.from_json(data).to_json())


@pytest.fixture(scope="module")
def plans() -> Mapping[str, tuple[Callable[[object], object], dict[str, Any]]]:
    """A plan of each kind, as JSON, and its reader."""
    training = rooftop.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=32, seq=1024, mesh="fsdp=8,tensor=2")
    serving = rooftop.plan_serving("llama3-8b", on="v5e:2x4", prompt=512, generate=128)
    embedding = rooftop.plan_embedding(ROOT / "docs" / "tables.toml", on="v5p:2x2x1", batch_samples=1024)
    readers = {
        "train": _reader(TrainingPlan.from_json, PlanTraining),
        "serve": _reader(ServingPlan.from_json, PlanServing),
        "embed": _reader(EmbedPlan.from_json, PlanEmbedding),
    }
    results = {"train": training, "serve": serving, "embed": embedding}
    return {kind: (readers[kind], json.loads(json.dumps(results[kind].to_json()))) for kind in readers}


def numbers(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all numbers in JSON values."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        if type(value) in (int, float):
            yield (*path, key)
        yield from numbers(value, (*path, key))


def with_number(data: Any, path: tuple[str | int, ...], value: float) -> tuple[Any, float]:
    """A copy with another number at a path, and the number that was there."""
    changed = copy.deepcopy(data)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    before = holder[path[-1]]
    holder[path[-1]] = value
    return changed, before


def kinds_of_field(data: Any) -> dict[tuple[str, ...], tuple[str | int, ...]]:
    """One path of each field: those that differ in the index of a list alone are one field."""
    fields: dict[tuple[str, ...], tuple[str | int, ...]] = {}
    for path in numbers(data):
        fields.setdefault(tuple("[]" if isinstance(key, int) else key for key in path), path)
    return fields


@pytest.mark.parametrize("kind", ["train", "serve", "embed"])
def test_numbers_that_no_plan_has_are_refused_by_name(
    plans: Mapping[str, tuple[Callable[[object], object], dict[str, Any]]], kind: str
) -> None:
    read, data = plans[kind]
    read(data)
    fields = kinds_of_field(data)
    assert len(fields) > 60
    unread, refused = set[str](), 0
    for number, (field, path) in enumerate(fields.items()):
        # Each field has a negative number and one of the others: all of them over the fields.
        _, before = with_number(data, path, 0)
        for value in (-before - 1, SPOILED[number % len(SPOILED)]):
            changed, _ = with_number(data, path, value)
            try:
                read(changed)
            except RooftopError as error:
                refused += 1
                assert "\n" not in str(error)
            else:
                unread.add(f"{'.'.join(field)} = {value}")
    assert not [name for name in unread if not name.startswith(UNREAD)]
    assert refused > 100


def test_a_field_is_named_with_its_path(
    plans: Mapping[str, tuple[Callable[[object], object], dict[str, Any]]],
) -> None:
    read, data = plans["serve"]
    changed, _ = with_number(data, ("assumptions", "shares", "hbm_read"), -0.5)
    with pytest.raises(RooftopError, match=r"^plan assumptions\.shares\.hbm_read: got -0\.5; accepted: a number from"):
        read(changed)
    changed, _ = with_number(data, ("prefill_per_generate",), math.nan)
    with pytest.raises(RooftopError, match=r"^plan prefill_per_generate: got nan"):
        read(changed)
    data = copy.deepcopy(data)
    data["workload"]["batch_seqs"] = 10**12
    with pytest.raises(
        RooftopError, match=r"^batch_seqs: got 1000000000000; accepted: at most 1,000,000,000 sequences"
    ):
        read(data)
