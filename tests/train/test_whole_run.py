"""Whole runs of random plans, as a user has them. ``python -m tests.support.whole_run`` runs more, and counts them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.training_runs import write_corpus
from tests.support.whole_run import draw, outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="every command is a fork with its own devices")
#: Runs that are drawn, of which about half are planned as executable.
RANDOM_RUNS = 300
#: Of them one with uneven stages, in 16 bits: without flags that hurry XLA a run takes long enough.
QUICK_RUNS = (182,)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data")) / "corpus"


@pytest.mark.parametrize("number", QUICK_RUNS)
def test_a_plan_is_trained_evaluated_resumed_elsewhere_and_exported(corpus: Path, number: int) -> None:
    result = outcome(draw(1, number), corpus, compared=False)
    assert (result.kind, result.reason) == ("passed", ""), result.commands


@pytest.mark.slow
@pytest.mark.parametrize("number", range(RANDOM_RUNS))
def test_random_plans_that_are_executable_run_to_their_end(corpus: Path, number: int) -> None:
    result = outcome(draw(1, number), corpus, compared=True)
    if result.kind == "refused":
        assert result.reason
        pytest.skip(result.reason)
    assert (result.kind, result.reason) == ("passed", ""), result.commands
