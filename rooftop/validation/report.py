"""The report of a validation as it is written: runs next to predictions, errors by group, and the runs left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooftop.core.records import Record, field_values
from rooftop.validation.accuracy import ComparisonRecord, Group
from rooftop.validation.compiled import CompiledRuns
from rooftop.validation.engines import EnginesRecord
from rooftop.validation.memory import MemoryRecord
from rooftop.validation.runs import Unusable
from rooftop.validation.serving import ServingRecord


@dataclass(frozen=True, kw_only=True)
class UnusableTraining(Record):
    """A published run of training that says too little, or cannot be priced.

    It has bytes per chip by kind, and the lines of the table.
    """

    source: str
    model: str
    chip: str
    num_chips: int | None
    why: str
    measured_memory_bytes: Mapping[str, float]
    lines: tuple[int, ...]

    @classmethod
    def of(cls, run: Unusable) -> UnusableTraining:
        """The record of a run."""
        return cls(**field_values(run, cls))


@dataclass(frozen=True, kw_only=True)
class ValidationSummary(Record):
    """Errors of training by group, ids of runs measured below their bound, and numbers of runs."""

    groups: tuple[Group, ...]
    beats_bound: tuple[str, ...]
    runs: int
    unusable: tuple[UnusableTraining, ...]
    serving_rows: int


@dataclass(frozen=True, kw_only=True)
class ValidationRecord(Record):
    """Runs of training and of serving, and benchmarks of engines, next to their predictions, in seconds.

    Memory of training is in bytes. ``request`` asked for them.
    """

    rows: tuple[ComparisonRecord, ...]
    memory: MemoryRecord
    calibrated_by: str | None
    compiled: CompiledRuns | None
    summary: ValidationSummary
    serving: ServingRecord
    engines: EnginesRecord
    request: Mapping[str, Any]
