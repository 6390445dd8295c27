"""``rooftop support``: verbs, evidence and rates of a model on a chip."""

from __future__ import annotations

import pytest

import rooftop
from rooftop.core.errors import RooftopError


def _answers(model: str, chip: str) -> dict[str, str]:
    verbs = rooftop.support(model, on=chip).record.verbs
    return {entry.verb: entry.answer for entry in verbs}


def test_a_model_with_all_programs_is_supported_by_every_verb() -> None:
    assert set(_answers("llama3-70b", "v5p").values()) == {"yes"}


@pytest.mark.parametrize(
    ("model", "chip", "lacks"),
    [
        ("qwen3-next-80b-a3b", "v5p", {"compile", "train", "serve"}),
        ("deepseek-v3.2", "v5p", {"plan", "compile", "train", "serve"}),
        ("llama3-8b", "h800", {"compile"}),
    ],
)
def test_a_verb_that_does_not_work_says_why(model: str, chip: str, lacks: set[str]) -> None:
    verbs = rooftop.support(model, on=chip).record.verbs
    assert {entry.verb for entry in verbs if entry.answer == "no"} == lacks
    assert all(entry.note for entry in verbs)


def test_support_agrees_with_the_plan() -> None:
    """A plan on the chip has the same evidence, and is executable where training is supported."""
    result = rooftop.support("llama3-8b", on="v5e")
    plan = rooftop.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=32).to_json()
    assert plan["evidence"]["level"] == result.record.evidence["train"].level == "expected"
    assert plan["executable"] is True
    assert rooftop.support("llama3-8b", on="v3").record.evidence["train"].level == "estimate"


@pytest.mark.parametrize("model", ["gemma3n-e4b", "deepseek-v3.2"])
def test_a_model_that_is_not_planned_has_no_evidence(model: str) -> None:
    result = rooftop.support(model, on="v5e")
    assert _answers(model, "v5e")["plan"] == "no"
    assert result.record.evidence == {}
    assert "off on average" not in str(result.to_json())
    assert not any(str(row["verb"]).startswith("evidence") for row in result.rows)


def test_an_unknown_chip_or_model_is_refused() -> None:
    for model, chip in (("llama3-8b", "v5pp"), ("lama3-8b", "v5p")):
        with pytest.raises(RooftopError, match="did you mean"):
            rooftop.support(model, on=chip)
