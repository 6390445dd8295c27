"""The search for the largest limits that compile, by itself and with the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.explain.embedding.compiled import MOST_TRIALS, NEAR, EmbedRefusal, compile_embed_plan, largest_share
from rooftop.explain.embedding.programs import Compilation
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, TableOptimizer, Tables
from rooftop.plan.embedding.plan import EmbedPlan
from rooftop.plan.embedding.problem import EmbedProblem, per_device


@given(
    most=st.floats(0.02, 0.999),
    slope=st.floats(0.3, 3),
    bend=st.floats(-0.2, 0.2),
    tells=st.booleans(),
    knows=st.booleans(),
)
def test_the_largest_share_is_between_what_fits_and_what_does_not(
    most: float, slope: float, bend: float, tells: bool, knows: bool
) -> None:
    seen: list[float] = []

    def truth(share: float) -> float:
        return (share - most) * (1 + bend * share)

    def over(share: float) -> float:
        seen.append(share)
        return truth(share) if tells or truth(share) <= 0 else float("inf")

    def guess(share: float, excess: float) -> float | None:
        # The arithmetic of a plan, whose slope is wrong.
        return max(0.0, share - excess / slope) if knows and excess < float("inf") else None

    search = largest_share(over, guess, begin=truth(1.0), most=60)
    assert search is not None and search.tried == len(seen) < 60
    assert search.fits <= most < search.refused and search.refused - search.fits <= NEAR * search.refused
    # In few trials where the arithmetic is good.
    if tells and knows and 0.9 < slope < 1.1 and abs(bend) < 0.01:
        assert search.tried <= MOST_TRIALS


def test_a_search_that_is_cut_short_still_knows_what_fits() -> None:
    search = largest_share(lambda share: share - 0.3, lambda share, over: None, most=4)
    assert search is not None and search.tried == 4 and search.fits <= 0.3 < search.refused
    assert largest_share(lambda share: 1.0, lambda share, over: None, most=4) is None
    assert largest_share(lambda share: 1.0, lambda share, over: 0.0) is None
    # Eighths: what rounds to the same is not tried again.
    tried: list[float] = []
    eighths = largest_share(
        lambda share: (tried.append(share), share - 0.6)[1],
        lambda share, over: None,
        same=lambda one, other: int(one * 8) == int(other * 8),
    )
    assert eighths is not None and len({int(share * 8) for share in tried}) == len(tried) <= 4


@pytest.mark.slow
def test_a_table_that_all_but_fills_hbm_is_answered_with_the_largest_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    where, width, unique = Slice.parse("v6e:2x2"), 64, 256
    cores = per_device(where) * where.devices
    limits = StackLimits(max_ids=2 * unique, max_unique_ids=unique, buffer=full_buffer(2 * unique, cores))

    def filled(vocabulary: int) -> EmbedPlan:
        adagrad = TableOptimizer(kind="adagrad")
        tables = Tables(
            tables=(EmbeddingTable(name="t", vocabulary=vocabulary, width=width, optimizer=adagrad),),
            features=(Feature(name="f", table="t"),),
        )
        return EmbedPlan(problem=EmbedProblem(tables=tables, slice=where, batch=4096, limits={"t": limits}))

    # By the plan all but a few MB are used; the compiler wants a little more.
    room, row = where.chip.hbm_usable_bytes, 2 * 4 * width
    spare = room - 4e6 - filled(8 * cores).memory["total"]["sequential"]
    plan = filled(int(spare * where.devices / row) // (8 * cores) * 8 * cores)
    assert plan.obstacles == []
    messages: list[str] = []
    refusal = compile_embed_plan(plan, Compilation(on_progress=lambda phase, seconds: messages.append(phase)))
    assert isinstance(refusal, EmbedRefusal) and "HBM" in refusal.why and refusal.largest is not None
    largest = refusal.largest
    assert largest.tried <= MOST_TRIALS and largest.refused is not None
    fits, refused = largest.limits["t"], largest.refused["t"]
    # Nothing to speak of is between what compiles and what does not.
    assert fits.buffer < refused.buffer <= limits.buffer and refused.max_unique_ids - fits.max_unique_ids <= 8
    assert any(f", {largest.tried} of at most {MOST_TRIALS}" in message for message in messages)
    # All of it is known now: nothing is compiled a second time.
    messages.clear()
    again = compile_embed_plan(plan, Compilation(on_progress=lambda phase, seconds: messages.append(phase)))
    assert isinstance(again, EmbedRefusal) and again.to_json() == refusal.to_json() and messages == []
