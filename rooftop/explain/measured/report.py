"""A trace explained: measured beside compiled beside planned, the verdict, the worst rows, and what to try."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from rooftop import __version__
from rooftop.compiler.devices import chip_of_kind
from rooftop.core.errors import RooftopError
from rooftop.explain.join import SPELLED_AS
from rooftop.explain.measured.advice import Advice, advise, origin_of
from rooftop.explain.measured.columns import Columns, columns
from rooftop.explain.measured.modules import TracedProgram, all_facts, programs_of, read_module
from rooftop.explain.measured.roofs import Roofs, achieved, doubts, roofs
from rooftop.hardware import Chip
from rooftop.plan.training.plan import TrainingPlan
from rooftop.profile.facts import COLLECTIVE, Facts
from rooftop.profile.idle import INSIDE, UNKNOWN
from rooftop.profile.measured import Measured, MeasuredCollective, measure
from rooftop.profile.planes import read_trace
from rooftop.profile.trace import Trace
from rooftop.runs.folder import MODULE_FILE

SCHEMA = 1
RUN_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A trace with what is known of it: its programs, and the plan that it is set beside (None: nobody planned it).

    ``missing`` says of programs without a module why they have none; ``chip`` is what the devices are said to be,
    ``compute_dtype`` what a run says that it computes in ('' for other traces).
    """

    name: str
    trace: Trace
    programs: Mapping[int, TracedProgram]
    missing: Mapping[str, str]
    plan: TrainingPlan | None
    chip: Chip | None
    compute_dtype: str = ""

    @cached_property
    def facts(self) -> Sequence[Facts]:
        """What each of the trace's ops is."""
        return all_facts(self.trace.ops, self.programs)

    @cached_property
    def measured(self) -> Measured:
        """The measured ledger."""
        files = frozenset[str]().union(*(each.files for each in self.programs.values()))
        return measure(self.trace, self.facts, files)

    @cached_property
    def roofs(self) -> Roofs | None:
        """The roofs of the devices; None where there are none, or none is known."""
        return roofs(self.trace, self.chip)

    @cached_property
    def rows(self) -> tuple[Columns, ...]:
        """Measured, compiled and planned by scope and phase."""
        return columns(self.measured, self.programs, None if self.plan is None else self.plan.ledger, self.roofs)

    @cached_property
    def verdict(self) -> Verdict:
        """What it comes down to."""
        return verdict(self.measured, self.programs, self.rows, self.roofs)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What to try."""
        return advise(self.measured, self.programs, self.rows, self.roofs, planned=self.plan is not None)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What to know before a figure is believed: an emulation, another mesh than planned, impossible rates."""
        found = [*self.trace.problems]
        if self.programs:
            found += [f"{name}: {why}" for name, why in self.missing.items()]
        if self.emulated:
            found.append(
                f"{self.measured.devices} devices that one CPU emulates: they share its cores, so that times are "
                "waits for "
                "each other and say nothing about an accelerator"
            )
        if self.plan is not None:
            own = {name: size for name, size in self.plan.mesh.shape.items() if size > 1}
            here = {
                name: size
                for each in self.programs.values()
                if each.given
                for name, size in each.mesh.items()
                if size > 1
            }
            if self.emulated or here != own:
                planned = f"{self.plan.problem.slice.name}, {_sizes(own)}"
                found.append(f"the plan is for {planned}; measured on {self._devices}, {_sizes(here)}")
            found += _dtypes(self.plan, self.compute_dtype, self.rows)
        return (*found, *doubts(self.measured, self.roofs))

    @property
    def emulated(self) -> bool:
        """Whether the devices are emulated by a CPU."""
        return self.trace.kind == "cpu" and self.measured.devices > 1

    @property
    def _devices(self) -> str:
        return f"{self.measured.devices} x {self.trace.kind}"

    @property
    def empty(self) -> dict[str, str]:
        """Of each table without entries why it has none."""
        found = dict(self.measured.empty)
        if not self.programs:
            names = "; ".join(f"{name}: {why}" for name, why in self.missing.items())
            found["compiled"] = names or "no op of the trace belongs to a program"
        if self.plan is None:
            found["planned"] = "no plan was given (--plan), and the run has none"
        if self.roofs is None:
            found["roofline"] = (
                "a CPU has no roofs in the catalogue"
                if self.trace.kind == "cpu"
                else "no roof of these devices is known; --on CHIP"
            )
        return found

    def to_json(self, *, top: int = 20) -> dict[str, Any]:
        """The report as plain JSON values; ``top`` ops and collectives."""
        found = self.measured
        return {
            "kind": "explained",
            "schema": SCHEMA,
            "rooftop_version": __version__,
            "trace": self.name,
            "devices": {
                "kind": self.trace.kind, "count": found.devices, "hosts": len(self.trace.hosts),
                "emulated": self.emulated,
            },
            "mesh": {name: size for each in self.programs.values() if each.module for name, size in each.mesh.items()},
            "programs": sorted({self.trace.programs.get(number, "") for number in self.programs}),
            "missing": dict(self.missing),
            "verdict": self.verdict.line,
            "roofline": self.verdict.roofline,
            "bound": self.verdict.bound,
            "achieved": [each.to_json() for each in achieved(found, self.roofs)],
            "roofs": None if self.roofs is None else self.roofs.to_json(),
            "step_s": found.step_s,
            "busy_s": found.busy_s,
            "compute_s": found.compute_s,
            "exposed_s": found.exposed_s,
            "held_s": found.held_s,
            "idle_s": found.idle.seconds,
            "attributed": found.attributed,
            "marked": found.marked,
            "steps": [
                {
                    "number": each.number, "seconds": each.seconds, "slowest_s": each.slowest_s, "busy_s": each.busy_s,
                    "exposed_s": each.exposed_s, "counted": each.counted,
                }
                for each in found.steps
            ],
            "rows": [each.to_json(found.step_s) for each in self.rows],
            "collectives": [_collective(each, self.roofs) for each in found.collectives[:top]],
            "idle": [vars(each) for each in found.idle.waits[:top]],
            "memory": [each.to_json() for each in found.memory],
            "sparse_cores": found.sparse.to_json(),
            "operations": [_operation(each, self.roofs) for each in found.ops[:top]],
            "losses": [each.to_json() for each in self.verdict.losses[:top]],
            "advice": [each.to_json() for each in self.advice],
            "notes": list(self.notes),
            "empty": self.empty,
        }  # fmt: skip


def explain(
    path: Path,
    *,
    plan: TrainingPlan | None = None,
    modules: Sequence[str] = (),
    mesh: Mapping[str, int] | None = None,
    chip: Chip | None = None,
) -> Explained:
    """Explain a run of ``rooftop train --profile``, or any trace of JAX's profiler.

    ``modules`` are texts of compiled modules, for traces that have none; ``mesh`` the axes and sizes that programs run
    on, in the order in which device ids count them; ``chip`` what the devices are. A run tells its own mesh and plan.
    Raises RooftopError for what is neither a run nor a trace, and for traces in which nothing ran.
    """
    about = _run(path)
    asked, kept = mesh, list[str]()
    if about is not None:
        if not (path / "profile").is_dir():
            raise RooftopError("run", str(path), "a run with a trace: rooftop train ... --profile steps=A..B")
        mesh = mesh or about.get("mesh")
        if chip is None:
            # '8 x TPU v5e': as many devices, and what they are.
            chip = chip_of_kind(about.get("devices", {}).get("name", "").partition(" x ")[2])
        if plan is None and (path / "plan.json").exists():
            plan = TrainingPlan.from_json(json.loads((path / "plan.json").read_text(encoding="utf-8")))
        if (module := path / "profile" / MODULE_FILE).exists():
            kept.append(read_module(module))
    _refuse_others(path)
    trace = read_trace(path / "profile" if about is not None else path)
    programs, missing = programs_of(trace, mesh, modules, kept)
    if asked and programs and not any(each.given for each in programs.values()):
        devices = max(prod(each.mesh.values()) for each in programs.values())
        raise RooftopError("mesh", _sizes(asked), f"axes whose sizes multiply to the {devices} devices of the program")
    ran = "" if about is None else str(about.get("job", {}).get("program", {}).get("compute_dtype", ""))
    return Explained(
        name=str(path), trace=trace, programs=programs, missing=missing, plan=plan, chip=chip, compute_dtype=ran
    )


def _dtypes(plan: TrainingPlan, ran: str, rows: Sequence[Columns]) -> list[str]:
    """What planned and compiled bytes differ by because numbers are not as wide as planned."""
    planned = plan.problem.numerics.compute
    if ran and ran != planned:
        return [f"the plan computes in {planned}, the run in {ran}: bytes, and rates, are those of another dtype"]
    both = [each for row in rows for each in row.collectives if each.planned_bytes and each.compiled_bytes]
    twice = [each for each in both if each.compiled_bytes == 2 * (each.planned_bytes or 0.0)]
    if len(twice) * 2 > len(both):
        return [
            f"{len(twice)} of {len(both)} collectives carry twice the bytes that are planned: numbers planned as "
            f"{planned} are moved as f32, as XLA does on CPUs"
        ]
    return []


def _refuse_others(path: Path) -> None:
    """Raises RooftopError for files that belong elsewhere, and says where."""
    try:
        with path.open("rb") as file:
            begins = file.read(64).lstrip()
    except OSError:
        return  # a folder; or who reads the trace says what is wrong
    if begins.startswith(b"HloModule"):
        raise RooftopError("trace", str(path), "a trace or a run; modules go to --hlo beside it, lines of them to --op")
    if begins.startswith(b"{"):
        raise RooftopError("trace", str(path), "a trace or a run; plans and reports go to --diff, or to rooftop ui")


def _run(path: Path) -> dict[str, Any] | None:
    """What a run says of itself; None for what is no folder of one."""
    try:
        found: dict[str, Any] = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _collective(each: Any, roof: Roofs | None) -> dict[str, Any]:
    rate = each.wire_bytes_per_s
    peak = None if roof is None else roof.ici_bytes_per_s
    return {
        "op": each.name,
        "program": each.program,
        "kind": each.facts.kind,
        "axes": list(each.facts.axes),
        "scope": each.facts.place.scope,
        "phase": each.facts.place.phase,
        "count": each.count,
        "bytes": each.facts.bytes,
        "wire_bytes": each.facts.wire_bytes,
        "in_flight_s": each.in_flight_s,
        "exposed_s": each.exposed_s,
        "hidden_s": each.hidden_s,
        "wire_bytes_per_s": rate,
        "of_roof": rate / peak if rate and peak else None,
        "source": each.facts.source,
    }


def _operation(each: Any, roof: Roofs | None) -> dict[str, Any]:
    # What only begins or ends a copy or a collective is over before that is: it has no rate.
    ends = each.facts.opcode.endswith(("-start", "-done"))
    bound = {} if roof is None or ends else roof.bound_s(each.facts)
    busiest = max(bound, key=lambda name: bound[name], default="")
    return {
        "op": each.name,
        "program": each.program,
        "category": each.facts.category,
        "scope": each.facts.place.scope,
        "phase": each.facts.place.phase,
        "count": each.count,
        "time_s": each.time_s,
        "flops": each.facts.flops,
        "hbm_bytes": each.facts.hbm_bytes,
        "flops_per_s": None if ends else each.per_second(each.facts.flops),
        "hbm_bytes_per_s": None if ends else each.per_second(each.facts.hbm_bytes),
        "bound": busiest if bound and bound[busiest] else "",
        "of_roof": each.count * bound[busiest] / each.time_s if bound and each.time_s else None,
        "source": each.facts.source,
    }


def _sizes(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh.items()) or "one device"


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


def verdict(
    found: Measured, programs: Mapping[int, TracedProgram], rows: tuple[Columns, ...], roof: Roofs | None
) -> Verdict:
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
    found: Measured, programs: Mapping[int, TracedProgram], rows: tuple[Columns, ...], roof: Roofs | None
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


def _waits_for(each: MeasuredCollective, programs: Mapping[int, TracedProgram]) -> str:
    """What has to be there before a collective can begin, and why nothing runs beside it."""
    made = origin_of(each, programs)
    if made is None:
        return ""
    if made.argument:
        return f"nothing but the argument {made.argument}, so that it could begin earlier"
    line = made.source.rpartition("/")[2]
    return f"{made.made_by}" + (f" ({line})" if line else "")
