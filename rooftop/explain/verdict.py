"""The verdict on a trace in one line: how far from the roofline it is, the largest loss, and what that waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rooftop.explain.advice import origin_of
from rooftop.explain.columns import Columns
from rooftop.explain.join import SPELLED_AS
from rooftop.explain.modules import Program
from rooftop.explain.roofs import Roofs
from rooftop.profile.facts import COLLECTIVE
from rooftop.profile.idle import INSIDE, UNKNOWN
from rooftop.profile.measured import Measured, MeasuredCollective


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Seconds of a step that the roofline does not need: ``what`` they go into, and what that waits for."""

    what: str
    waits_for: str
    source: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``roofline`` is the share of the step that the busiest resource needs at its peak (None without roofs).

    ``bound`` names that resource; ``losses`` come with the largest first.
    """

    line: str
    roofline: float | None
    bound: str
    losses: tuple[Loss, ...]


def verdict(found: Measured, programs: Mapping[int, Program], rows: tuple[Columns, ...], roof: Roofs | None) -> Verdict:
    """What a trace comes down to."""
    share, bound = roofline_share(found, roof)
    losses = tuple(sorted(_losses(found, programs, rows, roof), key=lambda each: -each.seconds))
    parts = []
    if found.trace.kind == "cpu":
        emulated = f"{found.devices} devices that a CPU emulates: waits, and no performance"
        parts.append(emulated if found.devices > 1 else "a CPU, of which no roofs are known")
    elif share is None:
        parts.append("no roofline: no roof of these devices is known (--on CHIP names one)")
    else:
        parts.append(f"{share:.0%} of the roofline ({bound})")
    if losses and found.step_s:
        first = losses[0]
        waits = f": it waits for {first.waits_for}" if first.waits_for else ""
        at = f" at {first.source.rpartition('/')[2]}" if first.source else ""
        parts.append(f"{first.seconds / found.step_s:.0%} is {first.what}{waits}{at}")
    return Verdict(line="; ".join(parts), roofline=share, bound=bound, losses=losses)


def roofline_share(found: Measured, roof: Roofs | None) -> tuple[float | None, str]:
    """The share of a step that its busiest resource needs at peak, and which that is; (None, '') without roofs."""
    if roof is None or not found.step_s:
        return None, ""
    totals: dict[str, float] = {}
    for op in found.ops:
        for resource, seconds in roof.bound_s(op.facts).items() if op.facts.role != "done" else ():
            totals[resource] = totals.get(resource, 0.0) + op.count * seconds
    if not any(totals.values()):
        return None, ""
    bound = max(totals, key=lambda name: totals[name])
    return totals[bound] / found.step_s, bound


def _losses(
    found: Measured, programs: Mapping[int, Program], rows: tuple[Columns, ...], roof: Roofs | None
) -> Iterator[Loss]:
    hidden = _planned_hidden(rows)
    groups: dict[str, list[MeasuredCollective]] = {}
    for each in found.collectives:
        if each.exposed_s:
            name = f"{each.facts.kind} over {','.join(each.facts.axes) or 'unknown axes'}"
            article = "an" if name[0] == "a" else "a"
            groups.setdefault(f"{article} {name}{_plan(each, hidden)}", []).append(each)
    for what, group in groups.items():
        # The one that is exposed longest comes first.
        many = f" ({len(group)} of them, most in {group[0].name})" if len(group) > 1 else ""
        yield Loss(
            what=f"{what}{many}",
            waits_for=_waits_for(group[0], programs),
            source=group[0].facts.source,
            seconds=sum(each.exposed_s for each in group),
        )
    for wait in found.idle.waits:
        if wait.reason == INSIDE:
            yield Loss(what="idle inside programs, between ops", waits_for="", source="", seconds=wait.seconds)
        elif wait.reason == UNKNOWN:
            what = "idle between programs, for which the trace has no reason"
            yield Loss(what=what, waits_for="", source="", seconds=wait.seconds)
        else:
            inner = f" ({wait.what})" if wait.what else ""
            yield Loss(
                what="idle between programs", waits_for=f"the host, which {wait.reason}{inner}", source=wait.where,
                seconds=wait.seconds,
            )  # fmt: skip
    for op in found.ops if roof is not None else ():
        if op.facts.category != COLLECTIVE and roof is not None:
            bound = op.count * max(roof.bound_s(op.facts).values())
            if 0 < bound < op.time_s:
                what = f"{op.name} ({op.facts.place.scope} {op.facts.place.phase}) above its roof"
                yield Loss(what=what, waits_for="", source=op.facts.source, seconds=op.time_s - bound)


def _planned_hidden(rows: tuple[Columns, ...]) -> dict[tuple[str, str, str, tuple[str, ...]], bool]:
    """Of planned collectives by scope, phase, kind (as a compiler may spell it) and axes: whether they are hidden."""
    return {
        (row.scope, row.phase, kind, each.axes): not each.planned_exposed_s
        for row in rows
        for each in row.collectives
        if each.planned_bytes
        for kind in (SPELLED_AS.get(each.kind, each.kind), each.kind)
    }


def _plan(each: MeasuredCollective, hidden: Mapping[tuple[str, str, str, tuple[str, ...]], bool]) -> str:
    """What a plan says of a collective, if there is a plan; of one that the compiler has combined, of any part."""
    if not hidden:
        return ""
    axes = tuple(sorted(each.facts.axes))
    planned = [hidden.get((place.scope, place.phase, each.facts.kind, axes)) for place in each.facts.places]
    known = [said for said in planned if said is not None]
    return " that nobody planned" if not known else " that the plan hides" if all(known) else ""


def _waits_for(each: MeasuredCollective, programs: Mapping[int, Program]) -> str:
    """What has to be there before a collective can begin, and why nothing runs beside it."""
    made = origin_of(each, programs)
    if made is None:
        return ""
    if made.argument:
        return f"nothing but the argument {made.argument}, so that it could begin earlier"
    line = made.source.rpartition("/")[2]
    return f"{made.made_by}" + (f" ({line})" if line else "")
