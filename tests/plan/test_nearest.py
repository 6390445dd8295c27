"""The nearest executable plan: it runs, it fits, and it is near in batch, chips and speed."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.arrays import parse_axes
from rooftop.arrays.mesh import Floats, Ints
from rooftop.arrays.rules import AXES
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.models.numerics import Numerics
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.nearest import nearest_executable, smallest_chips
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import Sweep, SweepOptions, sweep
from rooftop.plan.training.workload import Workload
from tests.support.examples import examples


def problem(model: str, on: str, seqs: int, *, seq_len: int = 4096, **more: Any) -> Problem:
    workload = Workload(batch_tokens=seqs * seq_len, seq_len=seq_len)
    return Problem(model=load_model(model), slice=Slice.parse(on), workload=workload, **more)


def runs(plan: TrainingPlan) -> bool:
    """True if the very mesh, remat and microbatches of a plan are planned again as a plan that runs and fits."""
    asked = plan.problem
    again = Problem(
        model=asked.model,
        slice=asked.slice,
        workload=asked.workload,
        numerics=asked.numerics,
        mesh=plan.mesh,
        remat=plan.choice.remat,
        microbatches=plan.choice.microbatches,
        schedule=asked.schedule,
        chunks=asked.chunks,
    )
    searched = sweep(again)
    planned = searched.plan(searched.best)
    return planned.fits and not planned.obstacles


@settings(max_examples=examples(4), deadline=None)
@given(
    st.sampled_from(["llama3-8b", "qwen3-8b", "mixtral-8x7b", "gemma2-9b"]),
    st.sampled_from(["v5e:2x2", "v5e:8x8", "v5e:16x16@3", "v5p:4x4x12", "v6e:8x8", "h100:8x3"]),
    st.integers(1, 300),
    st.sampled_from([1024, 4096]),
    st.sampled_from([None, "none", "block"]),
    st.sampled_from(["bf16", "int8"]),
)
def test_the_nearest_plan_runs_and_fits(
    model: str, on: str, seqs: int, seq_len: int, remat: str | None, matmul: str
) -> None:
    asked = problem(model, on, seqs, seq_len=seq_len, remat=remat, numerics=Numerics(matmul=matmul))
    try:
        searched = sweep(asked)
    except RooftopError:
        return
    near = nearest_executable(searched.plan(searched.best))
    assert near is None or (near.fits and not near.obstacles and runs(near))


def test_nothing_is_priced_that_is_not_worth_it() -> None:
    job, bounds = problem("llama3-8b", "v5e:4x4", 64), []

    def never(devices: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> bool:
        bounds.append(seconds.min())
        return False

    assert not sweep(job, SweepOptions(worth=never)).fits.any()
    everything = sweep(job, SweepOptions(worth=lambda devices, seconds: True))
    assert bounds[0] <= everything.expected_s[everything.best]


def test_a_search_by_score_finds_the_least_score_of_all() -> None:
    asked = problem("llama3-8b", "v5p:4x4x4", 256)

    def score(devices: Ints, seconds: Floats) -> Floats:
        # Far from what is fastest here, fsdp alone.
        return seconds * (1.0 + devices[:, AXES.index("fsdp"), None])

    def least(searched: Sweep) -> float:
        scores = score(searched.strategies.layouts.devices, searched.expected_s)
        return float(np.where(searched.fits, scores, np.inf).min())

    every, by_score, fastest = (
        sweep(asked, options)
        for options in (SweepOptions(exhaustive=True), SweepOptions(ranked=1, score=score), SweepOptions(ranked=1))
    )
    assert least(by_score) == pytest.approx(least(every))
    assert len(by_score.expected_s) < len(every.expected_s)
    assert least(fastest) > least(every)


def test_another_batch_uses_the_whole_pod() -> None:
    """1024 sequences cannot be dealt evenly to 8,960 chips; a batch that can be is nearer than half of the chips."""
    answer = plan_training(problem("llama3-70b", "v5p:16x20x28", 1024), alternatives=0)
    near = answer.nearest_executable
    if near is None:
        assert answer.plan.summary.executable
    else:
        assert near.chips == 8960
        assert abs(log(near.batch_seqs / 1024)) < log(1.25)
        assert near.tokens_per_s > 0.75 * answer.plan.tokens_per_s


def test_a_plan_that_does_not_fit_names_a_larger_slice() -> None:
    answer = plan_training(problem("llama3-70b", "v5e:4x4", 64), alternatives=0)
    near = answer.nearest_executable
    assert not answer.plan.fits and near is not None
    assert near.fits and near.executable
    assert near.chips >= smallest_chips(answer.plan.problem) > 16


def test_a_fixed_remat_that_does_not_fit_gives_way_on_the_same_slice() -> None:
    asked = problem("llama3-70b", "h100:8x8", 1024, axes=parse_axes("stage=8,data=2,tensor=4"), remat="none")
    answer = plan_training(asked, alternatives=0)
    near = answer.nearest_executable
    assert not answer.plan.fits and near is not None
    assert (near.slice, near.batch_seqs) == ("h100:8x8", 1024)
    assert near.remat != "none"


def test_where_a_kernel_lacks_a_feature_another_of_the_chip_runs_it() -> None:
    answer = plan_training(problem("gemma2-9b", "h100:8x2", 64), alternatives=0)
    assert answer.nearest_executable is None
    assert not answer.plan.obstacles and answer.plan.spec.kernel == "chunked"


def test_a_mesh_that_does_not_fit_is_laid_as_well_as_one_that_does() -> None:
    """Tensor parallelism stays inside the node, where the time is least, although no layout fits."""
    asked = problem("llama3-70b", "h100:8x8", 1024, axes=parse_axes("stage=8,data=2,tensor=4"), remat="none")
    searched = sweep(asked)
    assert not searched.fits.any()
    least = np.where(searched.allowed, searched.memory_bytes, np.inf)
    ties = least <= least.min() * (1 + 1e-9)
    assert searched.expected_s[searched.best] == searched.expected_s[ties].min()
    assert searched.expected_s[ties].max() > 1.5 * searched.expected_s[ties].min()
    assert {piece.axis for piece in searched.plan(searched.best).mesh.axes["tensor"]} == {"node"}


@settings(max_examples=examples(3), deadline=None)
@given(
    st.sampled_from(["llama3-8b", "mixtral-8x7b", "gpt-oss-20b"]),
    st.sampled_from(["v5e:4x8", "v5p:4x4x4", "v6e:16x16@2"]),
    st.integers(1, 512),
)
def test_a_search_for_what_runs_finds_the_fastest_that_runs(model: str, on: str, seqs: int) -> None:
    """Bounds and early ends do not change the answer: all candidates priced, no faster one runs."""
    asked = problem(model, on, seqs)
    searched = sweep(asked, SweepOptions(executable=True, ranked=1))
    if not searched.fits.any():
        return
    best = searched.plan(searched.best)
    assert best.fits and not best.obstacles
    every = sweep(asked, SweepOptions(exhaustive=True))
    faster = every.fits & (every.expected_s < searched.expected_s[searched.best] * (1 - 1e-9))
    for layout in {tuple(row): at for at, row in enumerate(every.strategies.layouts.devices)}.values():
        for choice in np.flatnonzero(faster[layout]):
            assert every.plan((layout, int(choice))).obstacles
