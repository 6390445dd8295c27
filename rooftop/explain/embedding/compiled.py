"""A plan of embedding tables compiled by XLA:TPU: each stack's lookup and update, and whole steps, next to the plan.

No memory analysis includes the HBM of SparseCores' stacks: it comes from the compiler's high-water marks
(``rooftop.compiler.sparsecore``). Bytes are of one device unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta

from rooftop import __version__
from rooftop.compiler.memory import HbmBuffer, OutOfMemory
from rooftop.compiler.sparsecore import (
    TILE_MEMORY,
    Marks,
    SparseCoreOverlap,
    refuses_larger,
    require_checks,
    sparsecore_overlap,
)
from rooftop.core.amounts import Amount, Count, Positive, Share
from rooftop.core.errors import Infeasible
from rooftop.core.quantities import format_bytes
from rooftop.core.records import Record, derived
from rooftop.explain.compiled.report import Versions, largest
from rooftop.explain.embedding.programs import (
    STACK_OF_PART,
    Compilation,
    heap_bytes,
    needed_bytes,
    part_request,
    step_request,
)
from rooftop.models.embedding_tables.limits import Limits, StackLimits
from rooftop.models.embedding_tables.stacking import Stack
from rooftop.plan.documents import PlannedSlice
from rooftop.plan.embedding.limits import limits_of_stacks_text, limits_text, share_that
from rooftop.plan.embedding.plan import EmbedPlan, EmbedPlanDocument
from rooftop.plan.embedding.problem import per_device

SCHEMA: Literal[1] = 1
STEPS: tuple[str, ...] = ("sequential", "pipelined")
#: Largest difference between compiled and planned HBM of a stack, as a share of the planned.
TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class EmbedCompilationRecord(Record):
    """A ``plan`` of embedding tables given to the compiler. Programs may use ``capacity_bytes`` of a device's HBM.

    ``batch`` is in samples, in ``sample_passes`` parts. ``tile_capacity_bytes`` is the memory of a SparseCore's tile.
    """

    kind: Literal["compiled_embed"]
    schema: Literal[1]
    rooftop_version: str
    plan: EmbedPlanDocument
    slice: PlannedSlice
    sparse_cores: Positive
    batch: Positive
    sample_passes: Positive
    checks: tuple[Literal["nan", "bounds", "buffers"], ...]
    capacity_bytes: Amount
    tile_capacity_bytes: Amount
    verdict: str


@dataclass(frozen=True, kw_only=True)
class CompiledStack(Record):
    """The lookup or update of a stack of tables: bytes of HBM of one SparseCore and of memory of one tile.

    ``document_hbm_bytes`` is planned by the formula of the SparseCore document. ``ratio`` is compiled over planned
    bytes of HBM, and ``holds`` says that it is 1 within TOLERANCE.
    """

    stack: str
    tables: Annotated[tuple[str, ...], Meta(min_length=1)]
    part: Literal["lookup", "update"]
    planned_hbm_bytes: Amount
    document_hbm_bytes: Amount
    hbm_bytes: Amount
    planned_tile_bytes: Amount
    tile_bytes: Amount

    @derived
    def ratio(self) -> Amount:
        """Compiled over planned bytes of HBM."""
        return self.hbm_bytes / self.planned_hbm_bytes

    @derived
    def holds(self) -> bool:
        """True if the ratio is 1 within TOLERANCE."""
        return abs(self.ratio - 1) <= TOLERANCE


@dataclass(frozen=True, kw_only=True)
class CompiledStep(Record):
    """A whole step on one device, in bytes: ``needed_bytes`` are those of the heap and of the SparseCores' stacks.

    ``sparsecore_hbm_bytes`` and ``tile_bytes`` are of one SparseCore and one tile. ``overlap`` is the share of the
    ``tensorcore_computations`` that run ``beside_sparsecores``; ``buffers`` are the largest arrays at the peak.
    """

    options: Mapping[str, bool | int | str]
    planned_bytes: Amount
    needed_bytes: Amount
    heap_bytes: Amount
    arguments_bytes: Amount
    temporaries_bytes: Amount
    sparsecore_hbm_bytes: Amount
    tile_bytes: Amount
    sparsecore_calls: Count
    tensorcore_computations: Count
    beside_sparsecores: Count
    overlap: Share
    buffers: tuple[HbmBuffer, ...]
    compile_s: Amount


@dataclass(frozen=True, kw_only=True)
class CompiledSteps(Record):
    """The step one pass after the other, and pipelined."""

    sequential: CompiledStep
    pipelined: CompiledStep


@dataclass(frozen=True, kw_only=True)
class CompiledEmbedRecord(EmbedCompilationRecord):
    """Each stack's lookup and update, and whole steps, as XLA:TPU compiled them, next to the plan."""

    fits: Literal[True]
    stacks: tuple[CompiledStack, ...]
    steps: CompiledSteps
    versions: Versions
    agrees: bool


@dataclass(frozen=True, kw_only=True)
class RefusedEmbedRecord(EmbedCompilationRecord):
    """A plan that does not compile: ``part`` of ``stack`` (None: of all stacks), and the largest limits that do.

    ``largest`` are the limits of that stack. ``refused_limits`` are the smallest that were refused, of
    ``limits_tried``; ``larger_refused`` says that all larger ones are refused too. None where no limits were found.
    """

    fits: Literal[False]
    part: str
    stack: str | None
    why: str
    largest: StackLimits | None
    largest_limits: Mapping[str, StackLimits] | None
    refused_limits: Mapping[str, StackLimits] | None
    refused_why: str | None
    larger_refused: bool | None
    limits_tried: Positive | None
    obstacles: Sequence[str]


def record_kind(data: Mapping[str, Any]) -> type[CompiledEmbedRecord | RefusedEmbedRecord]:
    """The class of the record in some data."""
    return CompiledEmbedRecord if data.get("fits") else RefusedEmbedRecord


@dataclass(frozen=True, kw_only=True)
class EmbedReport:
    """The compiled programs of a plan: ``parts`` by stack and part, ``steps`` by name."""

    plan: EmbedPlan
    checks: tuple[str, ...]
    parts: Mapping[str, Mapping[str, Marks]]
    steps: Mapping[str, Marks]

    @cached_property
    def overlap(self) -> dict[str, SparseCoreOverlap]:
        """TensorCore work next to SparseCore work, by step."""
        return {name: sparsecore_overlap(one.compiled.module) for name, one in self.steps.items()}

    def needed_bytes(self, step: str) -> int:
        """Bytes of HBM of a device: XLA's heap at the peak, and the stacks of its SparseCores."""
        return needed_bytes(self.steps[step], self.plan)

    @property
    def capacity_bytes(self) -> float:
        """HBM of a device that programs may use."""
        return self.plan.problem.slice.chip.hbm_usable_bytes

    @cached_property
    def stacks(self) -> tuple[CompiledStack, ...]:
        """Each stack's lookup and update."""
        cores, stacks = per_device(self.plan.problem.slice), []
        for stack in self.plan.problem.stacking.stacks:
            planned = self.plan.stack_memory(stack)
            for part, name in STACK_OF_PART.items():
                marks = self.parts[stack.name][part]
                stacks.append(
                    CompiledStack(
                        stack=stack.name,
                        tables=tuple(place.table.name for place in stack.places),
                        part=part,
                        planned_hbm_bytes=planned[name] / cores,
                        document_hbm_bytes=planned[f"{name}_document"] / cores,
                        hbm_bytes=marks.hbm_bytes,
                        planned_tile_bytes=planned["tile"],
                        tile_bytes=marks.tile_bytes,
                    )
                )
        return tuple(stacks)

    @property
    def agrees(self) -> bool:
        """True if every stack in HBM is as planned, within TOLERANCE, and the plan has no obstacle."""
        return not self.plan.obstacles and all(stack.holds for stack in self.stacks)

    @property
    def verdict(self) -> str:
        """One line."""
        off = [f"{stack.stack} {stack.part} {stack.ratio - 1:+.1%}" for stack in self.stacks if not stack.holds]
        whole = ", ".join(
            f"{name} {self.needed_bytes(name) / self.plan.memory['total'][name] - 1:+.0%}" for name in STEPS
        )
        said = f"stacks as planned within {TOLERANCE:.0%}" if not off else f"stacks not as planned: {'; '.join(off)}"
        said += f"; memory of whole steps over the plan's: {whole}"
        if self.plan.obstacles:
            said = f"compiles, though the plan refuses it ({self.plan.obstacles[0]})"
        needed = max(self.needed_bytes(step) for step in STEPS)
        beside = self.overlap["pipelined"].share
        return (
            f"{said}; at most {format_bytes(needed)} of {format_bytes(self.capacity_bytes)} a device; pipelined, "
            f"{beside:.0%} of the TensorCores' computations beside SparseCore work"
        )

    def record(self, *, top: int = 10) -> CompiledEmbedRecord:
        """The report as it is written; of each step's heap the ``top`` largest arrays."""
        return CompiledEmbedRecord(
            **_head(self.plan, self.checks),
            fits=True,
            stacks=self.stacks,
            steps=CompiledSteps(sequential=self._step("sequential", top), pipelined=self._step("pipelined", top)),
            versions=self.steps["pipelined"].compiled.versions,
            agrees=self.agrees,
            verdict=self.verdict,
        )

    def to_json(self, *, top: int = 10) -> dict[str, Any]:
        """The report as plain JSON values; of each step's heap the ``top`` largest arrays."""
        return self.record(top=top).to_json()

    def _step(self, name: str, top: int) -> CompiledStep:
        marks, overlap = self.steps[name], self.overlap[name]
        return CompiledStep(
            options=marks.compiled.options,
            planned_bytes=self.plan.memory["total"][name],
            needed_bytes=self.needed_bytes(name),
            heap_bytes=heap_bytes(marks),
            arguments_bytes=marks.compiled.memory["argument"],
            temporaries_bytes=marks.compiled.memory["temp"],
            sparsecore_hbm_bytes=marks.hbm_bytes,
            tile_bytes=marks.tile_bytes,
            sparsecore_calls=overlap.calls,
            tensorcore_computations=overlap.computations,
            beside_sparsecores=overlap.overlapped,
            overlap=overlap.share,
            buffers=largest(marks.compiled.at_peak, top),
            compile_s=marks.compiled.compile_s,
        )


@dataclass(frozen=True, kw_only=True)
class EmbedRefusal:
    """A plan that does not fit: ``part`` of ``stack`` (None: a whole step), and why.

    ``largest`` are the largest limits that compile, of the stack or of all stacks, in proportion to the plan's; None if
    the search has none.
    """

    plan: EmbedPlan
    checks: tuple[str, ...]
    part: str
    stack: str | None
    why: str
    largest: LargestLimits | None

    @property
    def infeasible(self) -> Infeasible:
        """The answer as an exception."""
        where = f"stack {self.stack}" if self.stack is not None else "all stacks"
        by = self.why
        if self.largest is not None:
            by += f"; at most {self._text(self.largest.limits)}, which compiles"
            by += f" ({self._text(self.largest.refused)} does not"
            by += ")" if self.largest.monotonic else ", though the compiler may take more)"
        elif self.plan.obstacles:
            by += f"; by the plan: {self.plan.obstacles[0]}"
        if self.largest is not None and (fitting := self.plan.in_passes_that_fit) is not None:
            by += f"; by the plan --sample-passes {fitting.problem.sample_passes} fits"
        return Infeasible(f"the {self.part} of {where} on {self.plan.problem.slice.name} does not fit", by)

    @property
    def verdict(self) -> str:
        """One line."""
        return str(self.infeasible)

    def _text(self, limits: Limits) -> str:
        return limits_of_stacks_text(limits) if self.stack is None else limits_text(limits[self.stack])

    def record(self, *, top: int = 10) -> RefusedEmbedRecord:
        """The answer as it is written. ``top`` changes nothing: a refusal lists no arrays."""
        largest = self.largest
        return RefusedEmbedRecord(
            **_head(self.plan, self.checks),
            fits=False,
            part=self.part,
            stack=self.stack,
            why=self.why,
            largest=None if largest is None or self.stack is None else largest.limits[self.stack],
            largest_limits=None if largest is None else largest.limits,
            refused_limits=None if largest is None else largest.refused,
            refused_why=None if largest is None else _why(largest.why),
            larger_refused=None if largest is None else largest.monotonic,
            limits_tried=None if largest is None else largest.tried,
            obstacles=self.plan.obstacles,
            verdict=self.verdict,
        )

    def to_json(self, *, top: int = 10) -> dict[str, Any]:
        """The answer as plain JSON values. ``top`` changes nothing: a refusal lists no arrays."""
        return self.record(top=top).to_json()


def compile_embed_plan(plan: EmbedPlan, how: Compilation) -> EmbedReport | EmbedRefusal:
    """Compile lookup and update of every stack, then both steps; a refusal if one of them does not fit.

    Raises RooftopError for checks that the compiler does not know and for programs that it rejects otherwise.
    """
    require_checks(
        how.checks,
        plan.problem.slice,
        timeout_s=how.timeout_s,
        cache=how.cache,
        on_progress=how.on_progress,
    )
    parts: dict[str, dict[str, Marks]] = {}
    for stack in plan.problem.stacking.stacks:
        parts[stack.name] = {}
        for part in STACK_OF_PART:
            try:
                parts[stack.name][part] = how.about(f"{part} of {stack.name}").run(
                    part_request(plan, part, stack, how.checks)
                )
            except Infeasible as no:
                result = largest_of_stack(plan, part, stack, no, how)
                return EmbedRefusal(
                    plan=plan, checks=how.checks, part=part, stack=stack.name, why=_why(no), largest=result
                )
    steps: dict[str, Marks] = {}
    for step in STEPS:
        try:
            steps[step] = how.about(f"{step} step").run(step_request(plan, step, how.checks))
        except Infeasible as no:
            return _no_room(plan, step, _why(no), no, over_bytes(no), how)
    report = EmbedReport(plan=plan, checks=how.checks, parts=parts, steps=steps)
    needed, capacity = report.needed_bytes("sequential"), report.capacity_bytes
    if needed > capacity:
        heap = heap_bytes(steps["sequential"])
        why = (
            f"{format_bytes(heap)} in XLA's heap and {format_bytes(needed - heap)} in the SparseCores' stacks, of "
            f"{format_bytes(capacity)} of HBM"
        )
        return _no_room(plan, "sequential", why, beyond_hbm(needed, plan), needed - capacity, how)
    return report


def _head(plan: EmbedPlan, checks: tuple[str, ...]) -> dict[str, Any]:
    """The fields of an EmbedCompilationRecord, without the verdict."""
    problem = plan.problem
    return {
        "kind": "compiled_embed",
        "schema": SCHEMA,
        "rooftop_version": __version__,
        "plan": plan.document,
        "slice": PlannedSlice.of(problem.slice),
        "sparse_cores": problem.cores,
        "batch": problem.batch,
        "sample_passes": problem.sample_passes,
        "checks": checks,
        "capacity_bytes": problem.slice.chip.hbm_usable_bytes,
        "tile_capacity_bytes": plan.memory["tile_capacity"],
    }


def _why(no: Infeasible) -> str:
    """The compiler's message in one line."""
    if isinstance(no, OutOfMemory):
        return f"XLA needs {format_bytes(no.needed_bytes)} of {format_bytes(no.available_bytes)} of HBM"
    return f"no room in {no.what} ({no.by})" if no.what == TILE_MEMORY else str(no)


def _no_room(plan: EmbedPlan, step: str, why: str, no: Infeasible, over: float, how: Compilation) -> EmbedRefusal:
    """The refusal of a step that needs ``over`` bytes of HBM too many (infinity: unknown)."""
    result = largest_of_step(plan, step, no, over, how)
    return EmbedRefusal(plan=plan, checks=how.checks, part=f"{step} step", stack=None, why=why, largest=result)


#: Limits that one search tries at most.
MOST_TRIALS = 12
#: A search ends when the share that fits and the one that does not differ by less than this part of the latter.
NEAR = 1e-3
#: Guesses in a row that may fail to halve the interval before it is bisected.
_SLOW = 2


@dataclass(frozen=True, kw_only=True)
class LargestLimits:
    """Limits that compile, and the nearest larger ones that were ``refused``, and ``why``; ``tried`` counts trials."""

    limits: Limits
    refused: Limits
    why: Infeasible
    tried: int

    @property
    def monotonic(self) -> bool:
        """True if all larger limits are refused too; otherwise the compiler may accept some."""
        return refuses_larger(self.why)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The largest share that fits, the smallest that does not, and the number of trials."""

    fits: float
    refused: float
    tried: int


def largest_share(
    over: Callable[[float], float],
    guess: Callable[[float, float], float | None],
    *,
    begin: float = math.inf,
    same: Callable[[float, float], bool] = lambda one, other: one == other,
    most: int = MOST_TRIALS,
) -> Bounds | None:
    """The largest share below 1 that fits, within ``NEAR``; None if no trial of ``most`` fits. A share of 1 does not.

    ``over`` tries a share and returns its excess: 0 or less if it fits, infinity if the excess is unknown. ``guess``
    returns the share that may just fit, from a share and its excess (1 and ``begin`` at first): None without an idea,
    0 for the smallest limits. ``same`` is true for shares with equal limits: the search ends when no other limits are
    between the share that fits and the one that does not.
    """
    low, high, tried, result = 0.0, 1.0, 0, False
    last, excess, reach, slow = 1.0, begin, NEAR, 0
    while tried < most and high - low > NEAR * high and not same(low, high):
        target, margin = guess(last, excess), NEAR / 2 * high
        share = (low + high) / 2
        if target is not None and target <= 0 and not result:
            share = 0.0
        elif slow == _SLOW:
            slow = 0
        elif target is not None and low + margin < target < high - margin:
            share, slow = target, slow + 1
        elif target is not None:
            beside = low + reach * (low or high) if target <= low + margin else high - reach * high
            reach *= 2
            share = beside if low < beside < high else share
        if result and same(share, low):
            low = share
            continue
        if same(share, high):
            high = share
            continue
        tried, width = tried + 1, high - low
        last, excess = share, over(share)
        if excess <= 0:
            low, result = share, True
        elif share == 0:
            return None
        else:
            high = share
        slow = 0 if high - low <= width / 2 else slow
    return Bounds(fits=low, refused=high, tried=tried) if result else None


def largest_of_step(plan: EmbedPlan, step: str, no: Infeasible, over: float, how: Compilation) -> LargestLimits | None:
    """The largest limits of all stacks with which a ``step`` fits. With the plan's limits it raises ``no``.

    It then needs ``over`` bytes of HBM too many: infinity if that is unknown, as for a tile's memory.
    """
    capacity = plan.problem.slice.chip.hbm_usable_bytes
    count, why = 0, no

    def limits_of(share: float) -> Limits:
        return plan.scaled(share).problem.limits

    def tried(share: float) -> float:
        nonlocal count, why
        count += 1
        about = how.about(f"{step} step with {share:.2%} of the limits, {count} of at most {MOST_TRIALS}")
        try:
            needed = needed_bytes(about.run(step_request(plan, step, how.checks, limits_of(share))), plan)
        except Infeasible as no:
            why = no
            return over_bytes(no)
        if needed > capacity:
            why = beyond_hbm(needed, plan)
        return needed - capacity

    def guess(share: float, excess: float) -> float | None:
        if math.isinf(excess):
            return None
        return plan.share_in_hbm(plan.scaled(share).memory["total"][step] - excess, step)

    bounds = largest_share(tried, guess, begin=over, same=lambda one, other: limits_of(one) == limits_of(other))
    if bounds is None:
        return None
    return LargestLimits(limits=limits_of(bounds.fits), refused=limits_of(bounds.refused), why=why, tried=bounds.tried)


def largest_of_stack(
    plan: EmbedPlan, part: Literal["lookup", "update"], stack: Stack, no: Infeasible, how: Compilation
) -> LargestLimits | None:
    """The largest limits of one stack with which lookup and update compile. With the plan's, ``part`` raises ``no``.

    If a tile is too small, the search begins with the largest limits by the plan's arithmetic.
    """
    in_tile, count, why = plan.share_in_tile(stack), 0, no
    # The share and the excess of the last trial that did not fit: one that fits has no excess.
    too_much: tuple[float, float] | None = None
    # One part alone may take limits with which the other does not compile.
    parts = sorted(STACK_OF_PART, key=lambda item: item != part)

    def limits_of(share: float) -> StackLimits:
        return plan.scaled(share, (stack,)).problem.limits[stack.name]

    def tried(share: float) -> float:
        nonlocal count, why
        count += 1
        for part in parts:
            what = f"{part} of {stack.name} with {share:.2%} of its limits, {count} of at most {MOST_TRIALS}"
            try:
                how.about(what).run(part_request(plan, part, stack, how.checks, limits_of(share)))
            except Infeasible as no:
                why = no
                return over_bytes(no)
        return -math.inf

    def taken(share: float) -> float:
        memory = plan.scaled(share, (stack,)).stack_memory(stack)
        return memory[STACK_OF_PART[part]] + memory["inputs"]

    def guess(share: float, excess: float) -> float | None:
        nonlocal too_much
        too_much = (share, excess) if 0 < excess < math.inf else too_much
        if too_much is None:
            return in_tile if in_tile < 1 else None
        room = taken(too_much[0]) - too_much[1]
        return min(in_tile, share_that(lambda share: taken(share) <= room))

    bounds = largest_share(
        tried, guess, begin=over_bytes(no), same=lambda one, other: limits_of(one) == limits_of(other)
    )
    if bounds is None:
        return None
    limits, refused = ({stack.name: limits_of(share)} for share in (bounds.fits, bounds.refused))
    return LargestLimits(limits=limits, refused=refused, why=why, tried=bounds.tried)


def beyond_hbm(needed: float, plan: EmbedPlan) -> OutOfMemory:
    """The error of a step that needs ``needed`` bytes of HBM, heap and stacks of SparseCores together."""
    return OutOfMemory("a step", needed_bytes=needed, available_bytes=plan.problem.slice.chip.hbm_usable_bytes)


def over_bytes(no: Infeasible) -> float:
    """Bytes of HBM that a program needs too many, at least 0.01 GiB; infinity if another memory is too small."""
    return max(no.needed_bytes - no.available_bytes, 2**30 / 100) if isinstance(no, OutOfMemory) else math.inf
