"""Published memory of training runs next to the plan's, by chip and kind, with a null model.

A kind is the word of the metric before ``memory_per_chip``, unless the readings of a source say otherwise. Frameworks
count different things under it: ``KINDS`` says which classes of a plan's memory stand next to it. The null model is the
median of what runs of other models publish of the kind on the chip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rooftop.arrays.rules import STAGE_AXES
from rooftop.core.quantities import dtype_bytes
from rooftop.core.records import Record
from rooftop.plan.evidence import model_key
from rooftop.plan.pricing import scalar
from rooftop.plan.training.memory import stored_weights
from rooftop.plan.training.plan import TrainingPlan
from rooftop.validation.accuracy import Errors
from rooftop.validation.readings import source_facts
from rooftop.validation.runs import PublishedRun

_STATE = ("weights", "optimizer")
_ALL = (*_STATE, "copies", "gradients", "activations", "workspace")
#: Classes of memory that a published kind counts; ``copies`` are weights in the compute dtype, which a step makes.
KINDS: Mapping[str, tuple[str, ...]] = {
    "peak": _ALL,
    "peak_alloc": _ALL,
    "peak_reserved": _ALL,
    "xla_total": _ALL,
    "xla_argument": _STATE,
    "xla_temp": ("copies", "gradients", "activations", "workspace"),
    "state_runtime": _STATE,
    "param+optimizer": (*_STATE, "gradients"),
    "activation": ("activations",),
}
#: Kinds of which XLA:TPU's statistics (``temp_size_in_bytes``) have more than the heap that the program takes.
STATISTICS: tuple[str, ...] = ("xla_temp", "xla_total")
#: 5th and 95th percentile of that figure over the heap, in train steps compiled by libtpu 0.0.42.1
#: (bench/evidence/temporaries.py).
STATISTICS_OVER_HEAP = (1.05, 1.50)


@dataclass(frozen=True, kw_only=True)
class MemoryComparison(Record):
    """Published bytes of a device of one kind next to planned ones; None: no run of another model publishes the kind.

    ``error`` is planned / measured - 1, ``null_error`` that of the null model.
    """

    id: str
    chip: str
    kind: str
    classes: tuple[str, ...]
    measured_bytes: float
    planned_bytes: float
    null_bytes: float | None
    error: float
    null_error: float | None


@dataclass(frozen=True, kw_only=True)
class MemoryGroup(Record):
    """Errors of memory of one kind on a chip; ``null`` is None where no other model publishes the kind.

    ``statistics``: the published figures are XLA:TPU's statistics, which have more than the memory that programs take.
    """

    chip: str
    kind: str
    statistics: bool
    errors: Errors
    null: Errors | None


@dataclass(frozen=True, kw_only=True)
class MemoryRecord(Record):
    """All comparisons of memory, their errors by chip and kind, and kinds that stand next to nothing of a plan.

    ``statistics_over_heap``: ends of nine in ten ratios of XLA:TPU's statistics to the temporaries of a program.
    """

    rows: tuple[MemoryComparison, ...]
    groups: tuple[MemoryGroup, ...]
    not_compared: tuple[str, ...]
    statistics_over_heap: tuple[float, float] = STATISTICS_OVER_HEAP


def compare_memory(predicted: Sequence[tuple[PublishedRun, TrainingPlan]]) -> MemoryRecord:
    """Published memory of runs next to that of their plans. A published chip may be several devices of a plan."""
    rows, unknown = [], dict[str, None]()
    for run, plan in predicted:
        for published, measured in run.measured_memory_bytes.items():
            kind = source_facts(run.source).get("memory", {}).get(published, published)
            if kind not in KINDS:
                unknown[f"{kind} ({run.id})"] = None
                continue
            chip = run.slice.chip
            memory = planned_memory(run, plan)
            planned = chip.devices * sum(memory[name] for name in KINDS[kind])
            null = _null(run, published, [other for other, _ in predicted])
            rows.append(
                MemoryComparison(
                    id=run.id,
                    chip=chip.name,
                    kind=kind,
                    classes=KINDS[kind],
                    measured_bytes=measured,
                    planned_bytes=planned,
                    null_bytes=null,
                    error=planned / measured - 1,
                    null_error=None if null is None else null / measured - 1,
                )
            )
    named: dict[tuple[str, str], list[MemoryComparison]] = {}
    for row in rows:
        named.setdefault((row.chip, row.kind), []).append(row)
    tpus = {run.slice.chip.name for run, _ in predicted if run.slice.chip.kind == "tpu"}
    groups = [
        _group(chip, kind, members, statistics=chip in tpus and kind in STATISTICS)
        for (chip, kind), members in named.items()
    ]
    return MemoryRecord(rows=tuple(rows), groups=tuple(groups), not_compared=tuple(unknown))


def planned_memory(run: PublishedRun, plan: TrainingPlan) -> dict[str, float]:
    """Bytes of a device by class; ``copies`` of weights apart, which a step makes.

    ``state`` of readings.toml is 'float32' where gradients have the dtype of stored weights, by which the program
    differentiates. ``unused_parameters`` of a model are stored and updated all the same.
    """
    memory, weights, numerics = dict(plan.memory), scalar(stored_weights(plan.step)), plan.problem.numerics
    memory |= {"weights": weights, "copies": memory["weights"] - weights}
    facts = source_facts(run.source)
    unused = facts.get("unused_parameters", 0) / plan.mesh.size("fsdp", "tensor", "expert", *STAGE_AXES)
    memory["weights"] += unused * dtype_bytes(numerics.weights)
    memory["optimizer"] += unused * numerics.optimizer_bytes
    if facts.get("state") == "float32":
        memory["gradients"] *= dtype_bytes(numerics.weights) / numerics.gradient_bytes
    return memory


def _null(run: PublishedRun, kind: str, runs: Sequence[PublishedRun]) -> float | None:
    own = model_key(run.model)
    others = [
        other.measured_memory_bytes[kind]
        for other in runs
        if kind in other.measured_memory_bytes
        and other.slice.chip.name == run.slice.chip.name
        and model_key(other.model) != own
    ]
    return median(others) if others else None


def _group(chip: str, kind: str, members: Sequence[MemoryComparison], *, statistics: bool) -> MemoryGroup:
    errors = Errors.of([one.error for one in members])
    assert errors is not None
    null = Errors.of([one.null_error for one in members if one.null_error is not None])
    return MemoryGroup(chip=chip, kind=kind, statistics=statistics, errors=errors, null=null)
