"""Differences between plan and compiler, item by item, each with its bytes, cost, source line and reason.

A reason is a rule with evidence in the compiled program. Findings without a reason are those to look at.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from rooftop.arrays import Mesh
from rooftop.compiler.machine.schedule import Scheduled
from rooftop.core.amounts import Amount
from rooftop.core.ledger import COLLECTIVES, Ledger
from rooftop.core.records import Record
from rooftop.explain.compiled.rooflines import OperationRoofline
from rooftop.explain.join import TOLERANCE, JoinedCollective, JoinedRow, stands_for

#: A collective of fewer bytes a step needs no reason.
SMALL = 64 * 1024
MATMUL = "matmul"
#: The rule of a sum over slices that the compiler takes in steps.
IN_STEPS = "in_steps"

_SMALL = "less than 64 KiB a step"
_EDGE = "XLA repeats it rather than keep its result: the step is at the edge of HBM"

_NAMES = "|".join(COLLECTIVES)
#: 'matmul', a collective, or the several that stand for one.
FindingKind = Annotated[str, Meta(pattern=f"^(matmul|({_NAMES})( and ({_NAMES}))*)$")]

#: Scope, phase, kind and axes.
Key = tuple[str, str, str, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class Finding(Record):
    """One disagreement, per device and step.

    ``kind`` is a collective's or 'matmul', of which ``bytes`` or ``flops`` say how much. ``cost_s`` is how long it
    takes by our prices, hidden or not. ``rule`` names the reason ('' if none is known) and ``why`` puts it in words.
    """

    scope: str
    phase: str
    kind: FindingKind
    axes: tuple[str, ...] = ()
    bytes: Amount = 0.0
    flops: Amount = 0.0
    cost_s: Amount = 0.0
    source: str = ""
    rule: str = ""
    why: str = ""

    @property
    def key(self) -> Key:
        """Scope, phase, kind and axes."""
        return self.scope, self.phase, self.kind, frozenset(self.axes)

    @property
    def amount(self) -> float:
        """FLOPs of a matmul, bytes of a collective."""
        return self.flops if self.kind == MATMUL else self.bytes

    def part(self, amount: float) -> Finding:
        """The same of so many FLOPs or bytes only."""
        if amount == self.amount:
            return self
        part = replace(self, cost_s=self.cost_s * amount / self.amount)
        return replace(part, flops=amount) if self.kind == MATMUL else replace(part, bytes=amount)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """``unexpected``: compiled and not planned; ``missing``: planned and not compiled; ``recomputed``: done twice.

    ``spelled`` are collectives that are as planned, under another name.
    """

    unexpected: tuple[Finding, ...]
    missing: tuple[Finding, ...]
    recomputed: tuple[Finding, ...]
    spelled: tuple[Finding, ...]

    @property
    def unexplained(self) -> tuple[Finding, ...]:
        """Collectives that were not planned and for which no rule gives a reason."""
        return tuple(finding for finding in self.unexpected if finding.kind != MATMUL and not finding.rule)


def find(
    joined: Iterable[JoinedRow],
    planned: Ledger,
    collectives: Sequence[Scheduled],
    operations: Sequence[OperationRoofline],
    mesh: Mesh,
) -> Findings:
    """The findings of rows that are joined; ``collectives`` and ``operations`` are those of the compiled program."""
    rows = list(joined)
    kernels = {(operation.scope, operation.phase) for operation in operations if operation.kernel}
    no_kernels = {row.key for row in planned if row.kernel_flops} - kernels
    prices = _planned_prices(planned)
    scheduled = _by_key(collectives)
    unexpected: list[Finding] = []
    missing: list[Finding] = []
    spelled: list[Finding] = []
    repeated: set[Key] = set()
    for row in rows:
        drafts = [_collective(row, collective, scheduled, prices) for collective in row.collectives]
        drafts.append(_matmuls(row, operations, prices))
        for draft, excess, instructions in drafts:
            if _is_rematerialised(instructions):
                repeated.add(draft.key)
            if abs(excess) > TOLERANCE * max(draft.amount, abs(excess)):
                (unexpected if excess > 0 else missing).append(draft.part(abs(excess)))
        spelled += (
            _spelling(draft, item, mesh)
            for item, (draft, *_) in zip(row.collectives, drafts, strict=False)
            if item.spelled
        )
    unexpected, missing = _in_steps(*_moved(unexpected, missing), mesh)
    return Findings(
        unexpected=_ordered(_explained(finding, kernels, repeated) for finding in unexpected),
        missing=_ordered(_absent(finding, no_kernels) for finding in missing),
        recomputed=_ordered(_recomputed(rows, operations, collectives)),
        spelled=_ordered(spelled),
    )


def _collective(
    row: JoinedRow, collective: JoinedCollective, scheduled: Mapping[Key, list[Scheduled]], prices: Mapping[Key, float]
) -> tuple[Finding, float, list[str]]:
    """All of a collective on the side that has more of it, the compiled bytes beyond the planned, and instructions."""
    planned, compiled = collective.planned_bytes or 0.0, collective.compiled_bytes or 0.0
    kinds = collective.compiled_kinds or (collective.kind,)
    result = [
        item for kind in kinds for item in scheduled.get((row.scope, row.phase, kind, frozenset(collective.axes)), ())
    ]
    price = prices.get((row.scope, row.phase, collective.kind, frozenset(collective.axes)), 0.0)
    draft = Finding(
        scope=row.scope,
        phase=row.phase,
        kind=kinds[-1] if compiled > planned else collective.kind,
        axes=collective.axes,
        bytes=max(planned, compiled),
        cost_s=sum(item.collective.executions * item.price_s for item in result) if compiled >= planned else price,
        source=next((item.collective.source for item in result if item.collective.source), ""),
    )
    return draft, compiled - planned, [name for item in result for _, name in item.collective.instructions]


def _matmuls(
    row: JoinedRow, operations: Sequence[OperationRoofline], prices: Mapping[Key, float]
) -> tuple[Finding, float, list[str]]:
    """All matmuls of a row on the side that has more of them, the compiled FLOPs beyond the planned, and operations."""
    own = [
        operation
        for operation in operations
        if (operation.scope, operation.phase) == (row.scope, row.phase) and operation.flops
    ]
    own.sort(key=lambda item: -item.total_s)
    excess = row.compiled_flops - row.planned_flops
    planned_s = prices.get((row.scope, row.phase, MATMUL, frozenset()), 0.0)
    draft = Finding(
        scope=row.scope,
        phase=row.phase,
        kind=MATMUL,
        flops=max(row.planned_flops, row.compiled_flops),
        cost_s=sum(operation.total_s for operation in own) if excess > 0 else planned_s,
        source=own[0].source if own else "",
    )
    return draft, excess, [operation.op for operation in own]


def _spelling(draft: Finding, collective: JoinedCollective, mesh: Mesh) -> Finding:
    """A collective that the compiler spells differently; over a whole slice XLA:TPU has no other spelling."""
    whole = mesh.size(*collective.axes) * mesh.slice.num_slices == mesh.slice.devices
    why = f"the planned {collective.kind}" + (", over a whole slice" if whole else "") + ": twice the bytes on the wire"
    return replace(draft, kind=collective.spelled, rule="whole_slice" if whole else "spelled", why=why)


def _moved(unexpected: list[Finding], missing: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Both lists, with the rule 'named' for equal work under another scope or phase."""
    extra, left = [], list(missing)
    result: list[Finding] = []
    for finding in unexpected:
        while finding.amount > TOLERANCE:
            near = [] if _is_small(finding) else [other for other in left if _alike(finding, other)]
            if not near:
                extra.append(finding)
                break
            other = min(near, key=lambda other: (other.scope != finding.scope, abs(other.amount - finding.amount)))
            shared = min(finding.amount, other.amount)
            ours, theirs = finding.part(shared), other.part(shared)
            here, there = f"{finding.scope} {finding.phase}", f"{other.scope} {other.phase}"
            spelled = f", and makes an {finding.kind} of the {other.kind}" if finding.kind != other.kind else ""
            extra.append(replace(ours, rule="named", why=f"planned as {there}: XLA names it otherwise{spelled}"))
            result.append(replace(theirs, rule="named", why=f"compiled as {here}: XLA names it otherwise{spelled}"))
            left.remove(other)
            if other.amount - shared > TOLERANCE * shared:
                left.append(other.part(other.amount - shared))
            if finding.amount - shared <= TOLERANCE * shared:
                break
            finding = finding.part(finding.amount - shared)
    return extra, result + left


def _in_steps(unexpected: list[Finding], missing: list[Finding], mesh: Mesh) -> tuple[list[Finding], list[Finding]]:
    """Both lists, with sums over several slices that XLA takes apart explained.

    It sums within each slice, then between slices, each device its part, and gathers the parts.
    """
    whole = [
        finding
        for finding in missing
        if not finding.rule and finding.kind == "all_reduce" and _over_slices(finding, mesh)
    ]

    def part_of(step: Finding) -> Finding | None:
        kinds = ("all_reduce", "reduce_scatter", "all_gather")
        # Twice its bytes where both the scatter and the gather within a slice are written as AllReduces, and where what
        # is left between slices has the planned name. One axis may lie in both. Small sums stay whole.
        fits = (part for part in whole if set(step.axes) <= set(part.axes) and step.bytes <= 2 * part.bytes + SMALL)
        return next(fits, None) if step.kind in kinds and not step.rule else None

    steps = [(finding, part_of(finding)) for finding in unexpected]
    taken = [step for _, step in steps if step is not None]
    why = "XLA sums within each slice, then between slices, and gathers: {} over {}"
    return (
        [
            step if of is None else replace(step, rule=IN_STEPS, why=why.format(of.kind, ",".join(of.axes)))
            for step, of in steps
        ],
        [
            replace(finding, rule=IN_STEPS, why=why.format(finding.kind, ",".join(finding.axes)))
            if finding in taken
            else finding
            for finding in missing
        ],
    )


def _over_slices(finding: Finding, mesh: Mesh) -> bool:
    """Return True if a collective runs both within and between slices."""
    group = mesh.span(*finding.axes)
    used = {axis.resource for axis, size in zip(group.physical, group.size, strict=True) if size > 1}
    return used == {"ici", "dcn"}


def _alike(compiled: Finding, planned: Finding) -> bool:
    same = compiled.kind == planned.kind or (compiled.kind != MATMUL and stands_for(compiled.kind, planned.kind))
    return same and set(compiled.axes) == set(planned.axes)


def _explained(finding: Finding, kernels: Container[tuple[str, str]], repeated: Container[Key]) -> Finding:
    """The finding with its reason, if there is evidence for one.

    ``kernels`` are the rows with kernels, ``repeated`` the keys of work that XLA rematerialises.
    """
    if finding.rule:
        return finding
    if finding.key in repeated:
        return replace(finding, rule="rematerialised", why=_EDGE)
    row = finding.scope, finding.phase
    if finding.kind == MATMUL and finding.scope == "layers/attn/core" and row not in kernels:
        return replace(finding, rule="scores", why="XLA computes attention scores again rather than store them")
    return replace(finding, rule="small", why=_SMALL) if _is_small(finding) else finding


def _absent(finding: Finding, kernels: Container[tuple[str, str]]) -> Finding:
    """A missing finding with its reason; ``kernels`` are the rows that were planned with kernels and have none."""
    if not finding.rule and finding.kind == MATMUL and (finding.scope, finding.phase) in kernels:
        return replace(finding, rule="no_kernel", why="planned as a hand-written kernel, which the program has not")
    return replace(finding, rule="small", why=_SMALL) if _is_small(finding) and not finding.rule else finding


def _is_small(finding: Finding) -> bool:
    return finding.kind != MATMUL and finding.bytes < SMALL


def _recomputed(
    rows: Sequence[JoinedRow], operations: Sequence[OperationRoofline], collectives: Sequence[Scheduled]
) -> list[Finding]:
    """Work that the compiled step repeats: by its remat policy, or because XLA chose to."""
    every = [
        Finding(
            scope=operation.scope, phase=operation.phase, kind=MATMUL,
            flops=operation.count * operation.flops, cost_s=operation.total_s,
            source=operation.source, rule=_again(operation.phase, [operation.op]),
        )
        for operation in operations
        if operation.flops
    ]  # fmt: skip
    for item in collectives:
        collective = item.collective
        rule = _again(collective.phase, [name for _, name in collective.instructions])
        every.append(
            Finding(
                scope=collective.scope,
                phase=collective.phase,
                kind=collective.kind,
                axes=collective.axes,
                bytes=collective.executions * collective.bytes,
                cost_s=collective.executions * item.price_s,
                source=collective.source,
                rule=rule,
            )
        )
    result: dict[tuple[Key, str], Finding] = {}
    for one in every:
        key = one.key, one.rule
        if one.rule and key in result:
            before = result[key]
            one = replace(
                before,
                bytes=before.bytes + one.bytes,
                flops=before.flops + one.flops,
                cost_s=before.cost_s + one.cost_s,
            )
        if one.rule:
            result[key] = one
    planned = {(row.scope, row.phase): row for row in rows}
    return [_repetition(item, planned.get((item.scope, item.phase))) for item in result.values()]


def _again(phase: str, names: Iterable[str]) -> str:
    """The rule for repeated work: 'rematerialised' by XLA, 'policy' of the program, '' for other work."""
    if _is_rematerialised(names):
        return "rematerialised"
    return "policy" if phase == "recompute" else ""


def _is_rematerialised(names: Iterable[str]) -> bool:
    """True if XLA repeats one of these instructions, which it marks in the name."""
    return any(".remat" in name for name in names)


def _repetition(finding: Finding, row: JoinedRow | None) -> Finding:
    """Repeated work with its reason; work that the program's policy repeats and the plan does not has none."""
    if finding.rule == "rematerialised":
        return replace(finding, why=_EDGE)
    if finding.kind == MATMUL:
        planned = row is not None and row.planned_flops > 0
    else:
        planned = row is not None and any(
            collective.planned_bytes and set(collective.axes) == set(finding.axes) for collective in row.collectives
        )
    rule, why = ("policy", "planned: the remat policy asks for it") if planned else ("", "not planned")
    return replace(finding, rule=rule, why=why)


def _planned_prices(ledger: Ledger) -> dict[Key, float]:
    prices: dict[Key, float] = {}
    for row in ledger:
        matmul_s = float(row.expected_s) - sum(float(collective.exposed_s) for collective in row.collectives)
        entries = [(MATMUL, frozenset[str](), matmul_s)]
        entries += [
            (collective.kind, frozenset(collective.axes), float(collective.expected_s))
            for collective in row.collectives
        ]
        for kind, axes, seconds in entries:
            key = row.scope, row.phase, kind, axes
            prices[key] = prices.get(key, 0.0) + float(row.count) * seconds
    return prices


def _by_key(collectives: Sequence[Scheduled]) -> dict[Key, list[Scheduled]]:
    by_key: dict[Key, list[Scheduled]] = {}
    for item in collectives:
        collective = item.collective
        by_key.setdefault((collective.scope, collective.phase, collective.kind, frozenset(collective.axes)), []).append(
            item
        )
    return by_key


def _ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings: those without a reason first, then by cost."""
    return tuple(sorted(findings, key=lambda finding: (bool(finding.rule), -finding.cost_s)))
