"""Twenty steps of training on eight emulated devices, split in every way there is: the curve of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rooftop.models import ModelConfig, MoE
from tests.support.curves import MODEL, mesh_of, program, train

STEPS = 20
EXPERTS = ModelConfig(**(MODEL.__dict__ | {"family": "mixtral", "moe": MoE(experts=4, active=2, d_ff=16)}))
SLOW = pytest.mark.slow
CASES = [
    pytest.param({"data": 8}, {}, id="data", marks=SLOW),
    pytest.param({"fsdp": 8}, {}, id="fsdp", marks=SLOW),
    pytest.param(
        {"data": 2, "tensor": 4}, {"model": ModelConfig(**(MODEL.__dict__ | {"kv_heads": 4}))}, id="tensor", marks=SLOW
    ),
    pytest.param({"fsdp": 2, "context": 4}, {}, id="context", marks=SLOW),
    pytest.param({"fsdp": 2, "context": 4}, {"context_attention": "all_gather"}, id="context-gathered", marks=SLOW),
    pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 2}, id="microbatches", marks=SLOW),
    pytest.param({"fsdp": 2, "tensor": 2, "context": 2}, {"remat": "block", "packed": True}, id="packed", marks=SLOW),
    pytest.param({"fsdp": 2, "expert": 4}, {"model": EXPERTS}, id="experts", marks=SLOW),
    pytest.param({"expert": 2, "tensor": 2}, {"model": EXPERTS, "expert_matmul": "grouped"}, id="grouped", marks=SLOW),
    pytest.param(
        {"expert": 2, "fsdp": 2}, {"model": EXPERTS, "balance_loss": 0.01, "z_loss": 1e-3}, id="balanced", marks=SLOW
    ),
]


@pytest.fixture(scope="module")
def alone() -> Callable[..., list[float]]:
    """Losses on one device, computed once for each program."""
    known: dict[str, list[float]] = {}

    def losses(**changes: Any) -> list[float]:
        key = repr(sorted(changes.items()))
        if key not in known:
            known[key] = train(program(**changes), mesh_of(), STEPS)[0]
        return known[key]

    return losses


@pytest.mark.parametrize(("sizes", "changes"), CASES)
def test_a_curve_of_twenty_steps_is_that_of_one_device(
    alone: Callable[..., list[float]], sizes: dict[str, int], changes: dict[str, Any]
) -> None:
    how = {"microbatches": 1} | changes
    expected = alone(**how)
    assert train(program(**how), mesh_of(**sizes), STEPS)[0] == pytest.approx(expected, rel=1e-5)
    assert sum(expected[-5:]) < sum(expected[:5])
