"""The plans that are compared with the estimators of frameworks, by rows of bench/results/oracles.csv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftop.requests.planning import PlanTraining


def request_of(row: Mapping[str, Any]) -> PlanTraining:
    """The request for the plan of a row's job."""
    return PlanTraining(
        row["model"],
        on=row["on"],
        batch_seqs=row["batch"],
        seq=row["seq"],
        framework=row["framework"],
        framework_settings=row["settings"] or None,
        mesh=row["mesh"],
        remat=row["remat"],
        microbatches=row["microbatches"],
        chunks=row["chunks"],
    )
