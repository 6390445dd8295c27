"""Reasons for idle devices: the host's activity meanwhile, from the events of its threads and its Python tracer."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from rooftop.core.records import Record
from rooftop.profile.intervals import Intervals, Ints
from rooftop.profile.trace import Host, Runs
from rooftop.profile.xplane import Plane, XLine

#: Reasons, and patterns for the names of events on the stack; the first match is the reason.
_REASONS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("compiles", re.compile(
        r"backend_compile|[Cc]ompile(?:r|AndLoad)?(?:$|[:( ])|trace_to_jaxpr|lower_jaxpr|lower_sharding"
    )),
    ("copies to devices", re.compile(r"TransferToDevice|TransferH2D|BufferFromHost|device_put|Linearize|CopyToDevice")),
    ("fetches results", re.compile(
        r"block_until_ready|Await|ToLiteral|__array__|TransferFromDevice|TransferD2H|copy_to_host|\b_value\b"
    )),
    ("dispatches", re.compile(r"PjitFunction|ExecuteSharded|::Execute|apply_primitive|TpuExecute|cuLaunch")),
    ("waits for another thread", re.compile(r"(?:^| )(?:get|acquire|wait|join)$")),
    ("sleeps", re.compile(r"^\$time sleep$")),
    ("runs Python", re.compile(r"^\$")),
)  # fmt: skip
RUNTIME, UNKNOWN, INSIDE = "runs other code", "unknown: no event of the host covers it", "inside a program, between ops"
#: The main thread launches programs.
_LAUNCHES = re.compile(r"PjitFunction|ExecuteSharded|TpuExecute|::Execute")
_FRAME = re.compile(r"\$(\S+\.py):(\d+) (.+)")


@dataclass(frozen=True, kw_only=True)
class Waiting(Record):
    """Idle seconds of a device and step for one reason: ``what`` the host did, and ``where``: 'file:line function'."""

    reason: str
    what: str
    where: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Idle seconds of a device and step: within executions of programs, and between them, caused by the host."""

    inside_s: float
    between_s: float
    waits: tuple[Waiting, ...]

    @property
    def seconds(self) -> float:
        """All idle seconds."""
        return self.inside_s + self.between_s


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Activity of the thread that launches programs, [N]: for each interval the index of its stack in ``stacks``.

    A stack has the names of the open events, outermost first.
    """

    starts: Ints
    ends: Ints
    places: Ints
    stacks: tuple[tuple[str, ...], ...]


def activity(host: Host) -> Activity | None:
    """The stacks of the host's main thread; None if the trace has none."""
    if host.plane is None or not host.threads:
        return None
    launches = [_launches(thread, host.plane) for thread in host.threads]
    if max(launches) == (0, 0):
        return None
    line = host.threads[launches.index(max(launches))]
    events = line.read()
    order = np.lexsort((-events.ends, events.starts))
    names = [host.plane.kinds[int(key)].name if int(key) in host.plane.kinds else "" for key in events.kinds[order]]
    # ``stack``: end of each open event, and the index of the stack up to it. ``above``: index by stack and next name.
    stack: list[tuple[int, int]] = []
    above: dict[tuple[int, str], int] = {}
    stacks: list[tuple[str, ...]] = []
    intervals: list[tuple[int, int, int]] = []
    now = 0

    def until(moment: int) -> None:
        nonlocal now
        while stack and now < moment:
            end, place = stack[-1]
            if end > now:
                intervals.append((now, min(end, moment), place))
                now = min(end, moment)
            if end <= now:
                stack.pop()

    for start, end, name in zip(events.starts[order].tolist(), events.ends[order].tolist(), names, strict=True):
        until(start)
        while stack and stack[-1][0] <= start:
            stack.pop()
        now = start
        under = stack[-1][1] if stack else -1
        place = above.setdefault((under, name), len(stacks))
        if place == len(stacks):
            stacks.append((*(stacks[under] if under >= 0 else ()), name))
        stack.append((end, place))
    until(max((end for end, _ in stack), default=0))
    columns = np.array(intervals, np.int64).reshape(-1, 3)
    return Activity(starts=columns[:, 0], ends=columns[:, 1], places=columns[:, 2], stacks=tuple(stacks))


def _launches(line: XLine, plane: Plane) -> tuple[int, int]:
    """Number of steps that a thread marks, and of its events that launch programs."""
    events = line.read(("step_num",))
    launching = [key for key, kind in plane.kinds.items() if _LAUNCHES.search(kind.name)]
    return int(events.stats["step_num"].present.sum()), int(np.isin(events.kinds, launching).sum())


def explain_idle(
    devices: Sequence[tuple[Intervals, Runs, Activity | None]], scale: float, program_files: frozenset[str]
) -> Idle:
    """Reasons for idle devices: (idle time, executions, activity of the host) of each; ``scale`` makes a mean.

    ``program_files`` are the names of the program's own files: the innermost frame in one of them identifies a stack.
    """
    sums: dict[tuple[str, str, str], float] = {}
    inside = between = 0.0
    for idle, runs, host in devices:
        apart = idle - Intervals.union(runs.starts, runs.ends)
        inside += (idle.measure - apart.measure) * scale
        between += apart.measure * scale
        known = 0.0
        if host is not None and len(host.starts):
            spent = np.bincount(host.places, apart.until(host.ends) - apart.until(host.starts))
            for place in np.flatnonzero(spent).tolist():
                key = _reason(host.stacks[place], program_files)
                sums[key] = sums.get(key, 0.0) + float(spent[place]) * scale
            known = float(spent.sum())
        if apart.measure > known:
            key = UNKNOWN, "", ""
            sums[key] = sums.get(key, 0.0) + (apart.measure - known) * scale
    if inside:
        sums[INSIDE, "", ""] = inside
    # A wait is one reason at one place, described by its longest part.
    grouped: dict[tuple[str, str], dict[str, float]] = {}
    for (reason, what, source), spent_s in sums.items():
        grouped.setdefault((reason, source), {})[what] = spent_s
    waits = (
        Waiting(reason=reason, what=max(parts, key=parts.__getitem__), where=source, seconds=sum(parts.values()))
        for (reason, source), parts in grouped.items()
    )
    return Idle(inside_s=inside, between_s=between, waits=tuple(sorted(waits, key=lambda wait: -wait.seconds)))


@cache
def _library() -> frozenset[str]:
    """Names of the files of JAX and of Python's own library: the name of a frame has no folder.

    A trace means the same where JAX is not installed, or another release of it: the names of one come with rooftop.
    """
    recorded = files("rooftop.profile").joinpath("jax_files.txt").read_text(encoding="utf-8").split()
    return frozenset(recorded) | jax_files() | {f"{name}.py" for name in sys.stdlib_module_names}


def jax_files() -> frozenset[str]:
    """Names of the source files of the installed JAX; none where it is not installed."""
    spec = find_spec("jax")
    folders = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else []
    return frozenset(file.name for folder in folders for file in Path(folder).rglob("*.py"))


def _reason(stack: Sequence[str], program_files: frozenset[str]) -> tuple[str, str, str]:
    """The reason of a stack, its innermost event, and the innermost frame of the program."""
    reason = next((name for name, pattern in _REASONS if any(map(pattern.search, stack))), RUNTIME)
    frames = [match for event in stack if (match := _FRAME.match(event))]
    program_frames = [match for match in frames if match[1] in program_files or match[1] not in _library()]
    source = f"{program_frames[-1][1]}:{program_frames[-1][2]} {program_frames[-1][3]}" if program_frames else ""
    inner = stack[-1].removeprefix("$")
    return reason, "" if inner == source else inner, source
