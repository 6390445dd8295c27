"""Published runs of TPUs next to their plans and to what the compiler makes of these: three step times side by side.

The program is rooftop's, not the publisher's, with the published mesh, batch, dtype and remat policy; what is not
published is searched. Its compiled time is XLA's own schedule at the named fractions of the chip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rooftop.core.errors import RooftopError
from rooftop.core.records import Record
from rooftop.validation.accuracy import Errors
from rooftop.validation.runs import PublishedRun

Level = Literal["planned", "compiled"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, kw_only=True)
class CompiledRow(Record):
    """A run: seconds of a step that are published, planned and compiled, and planned and compiled bytes at the peak.

    ``why`` says why there is no compiled time, None if there is one; ``error`` is of published times, by level.
    ``versions`` are those of jax, jaxlib and the compiler, and ``compile_s`` is how long it took.
    """

    id: str
    chip: str
    experts: bool
    measured_s: float
    planned_s: float
    compiled_s: float | None
    planned_bytes: float
    compiled_bytes: float | None
    compile_s: float | None
    versions: Mapping[str, str]
    error: Mapping[Level, float | None]
    why: str | None

    @classmethod
    def of(
        cls,
        run: PublishedRun,
        planned_s: float,
        planned_bytes: float,
        *,
        compiled_s: float | None = None,
        compiled_bytes: float | None = None,
        compile_s: float | None = None,
        versions: Mapping[str, str] | None = None,
        why: str | None = None,
    ) -> CompiledRow:
        """The row of a run."""
        errors: dict[Level, float | None] = {
            "planned": planned_s / run.step_s - 1,
            "compiled": compiled_s and compiled_s / run.step_s - 1,
        }
        return cls(
            id=run.id,
            chip=run.slice.chip.name,
            experts=run.model.moe is not None,
            measured_s=run.step_s,
            planned_s=planned_s,
            compiled_s=compiled_s,
            planned_bytes=planned_bytes,
            compiled_bytes=compiled_bytes,
            compile_s=compile_s,
            versions=versions or {},
            error=errors,
            why=why,
        )


@dataclass(frozen=True, kw_only=True)
class CompiledGroup(Record):
    """Errors of planned and compiled times of the compiled runs of a chip and kind of model."""

    name: str
    runs: int
    errors: Mapping[Level, Errors | None]


@dataclass(frozen=True, kw_only=True)
class CompiledRuns(Record):
    """All runs that were to be compiled, and errors by chip and kind of model."""

    rows: tuple[CompiledRow, ...]
    groups: tuple[CompiledGroup, ...]

    @classmethod
    def of(cls, rows: Sequence[CompiledRow]) -> CompiledRuns:
        """The rows with their errors."""
        named: dict[str, list[CompiledRow]] = {}
        for row in rows:
            if row.compiled_s is not None:
                named.setdefault(row.chip + (", experts" if row.experts else ""), []).append(row)
        groups = tuple(
            CompiledGroup(
                name=name,
                runs=len(members),
                errors={level: Errors.of([row.error[level] or 0.0 for row in members]) for level in LEVELS},
            )
            for name, members in named.items()
        )
        return cls(rows=tuple(rows), groups=groups)


def chosen(runs: Sequence[PublishedRun], only: str | None) -> list[PublishedRun]:
    """The runs on TPUs whose name has ``only`` in it, small slices first. Raises RooftopError if there is none."""
    some = [run for run in runs if run.slice.chip.kind == "tpu" and (only is None or only in run.id)]
    if not some:
        names = [run.id for run in runs if run.slice.chip.kind == "tpu"]
        accepted = f"a part of the name of a run on TPUs, such as {names[0]}" if names else "a table with runs on TPUs"
        raise RooftopError("only", only, accepted)
    return sorted(some, key=lambda run: run.slice.devices)
