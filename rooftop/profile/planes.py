"""The planes of a profiler's files as a trace, for TPUs, GPUs and CPUs.

- A TPU has its own plane. Line "XLA Ops" has the ops in order, "Async XLA Ops" asynchronous transfers, "XLA Modules"
  the executions of programs and "Steps" the steps. Each of its SparseCores has a plane too.
- A GPU has its own plane, with a line for each stream.
- CPU devices, of which one machine emulates any number, have no planes: the threads of the host run their ops, and each
  event names its device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rooftop.core.errors import misread
from rooftop.profile.intervals import Ints
from rooftop.profile.trace import Device, Host, Op, Runs, SparseCore, Steps, Trace, Track, trace_files
from rooftop.profile.xplane import Column, Plane, StatKind, XEvents, XLine, XSpace, fields, read_space

_HOST = "/host:CPU"
_PROGRAM = re.compile(r"(.+)\((-?\d+)\)$")
_TEXT = re.compile(r"(?:ROOT )?%?([\w.\-]+) = ")
_TPU = re.compile(r"/device:TPU:(\d+)$")
_SPARSE = re.compile(r"/device:TPU:(\d+) SparseCore(?: [a-zA-Z]+)? (\d+)$")
_GPU = re.compile(r"/device:GPU:(\d+)$")
_OP_STATS = ("hlo_op", "hlo_module", "program_id", "run_id", "device_ordinal")


def read_trace(path: Path) -> Trace:
    """Read a trace file, or the newest session of a folder. Raises RooftopError for other files."""
    spaces = [read_space(file) for file in trace_files(path)]
    try:
        return trace_of(spaces)
    # An event names a kind or a figure that the file does not have.
    except (LookupError, ValueError, ArithmeticError) as error:
        raise misread("trace", error, f"a whole trace of JAX's profiler, not {path}") from None


def trace_of(spaces: Sequence[XSpace]) -> Trace:
    """One trace of the files of several hosts."""
    book = _Book()
    programs: dict[int, str] = {}
    modules: dict[int, bytes] = {}
    for space in spaces:
        for plane in space.named("/host:metadata"):
            for kind in plane.kinds.values():
                number = _number(kind)
                programs[number] = _PROGRAM.sub(r"\1", kind.name)
                if module := _module(kind.stats.get("Hlo Proto", b"")):
                    modules[number] = module
    devices: list[Device] = []
    hosts: list[Host] = []
    sparse_cores: list[SparseCore] = []
    for space in spaces:
        accelerators = [*_accelerators(space, book, programs)]
        host, emulated = _host(space, book, programs, has_devices=bool(accelerators))
        hosts.append(host)
        devices += accelerators or emulated
        sparse_cores += _sparse_cores(space, book, programs)
    return Trace(
        ops=tuple(book.ops),
        devices=tuple(devices),
        hosts=tuple(hosts),
        sparse_cores=tuple(sparse_cores),
        programs=programs,
        modules=modules,
        problems=tuple(problem for space in spaces for problem in space.problems),
        planes=tuple(plane.name for space in spaces for plane in space.planes),
    )


class _Book:
    """The ops of all devices, each once."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._places: dict[tuple[int, str], int] = {}

    def place(self, program: int, name: str, kind: StatKind | None = None) -> int:
        """The index of an op, which is added if it is new."""
        key = program, name
        if key not in self._places:
            self._places[key] = len(self.ops)
            self.ops.append(Op(program=program, name=name) if kind is None else _op(program, name, kind))
        return self._places[key]


def _op(program: int, name: str, kind: StatKind) -> Op:
    stats = kind.stats
    flops = stats.get("flops", stats.get("model_flops"))
    return Op(
        program=program,
        name=name,
        text=kind.name if _TEXT.match(kind.name) else "",
        category=str(stats.get("hlo_category", "")),
        op_name=str(stats.get("tf_op", "")).rstrip(":"),
        source=str(stats.get("source", "")),
        flops=None if flops is None else float(flops),
        hbm_bytes=_hbm_bytes(stats),
    )


def _hbm_bytes(stats: Mapping[str, Any]) -> float | None:
    """HBM bytes of one execution: from the breakdown by memory if there is one, else of all memories."""
    if breakdown := stats.get("memory_access_breakdown"):
        total = 0
        for entry in fields(breakdown, 0, len(breakdown)):
            read = {field.number: field.value for field in fields(breakdown, entry.value, entry.end)}
            total += read.get(3, 0) if read.get(2, 0) == 1 else 0
        return float(total)
    accessed = stats.get("bytes_accessed", stats.get("raw_bytes_accessed"))
    return None if accessed is None else float(accessed)


def _accelerators(space: XSpace, book: _Book, programs: dict[int, str]) -> Iterator[Device]:
    for plane in space.planes:
        if match := _TPU.match(plane.name):
            yield _tpu(space, plane, int(match[1]), book, programs)
        elif match := _GPU.match(plane.name):
            yield _gpu(space, plane, int(match[1]), book, programs)


def _tpu(space: XSpace, plane: Plane, ordinal: int, book: _Book, programs: dict[int, str]) -> Device:
    runs = _module_line(plane, programs)
    return Device(
        host=space.host,
        kind="tpu",
        ordinal=ordinal,
        track=_track(plane, "XLA Ops", runs, book),
        beside=_track(plane, "Async XLA Ops", runs, book),
        runs=runs,
        steps=_step_line(plane),
        stats=plane.stats,
    )


def _sparse_cores(space: XSpace, book: _Book, programs: dict[int, str]) -> Iterator[SparseCore]:
    for plane in space.planes:
        if match := _SPARSE.match(plane.name):
            runs = _module_line(plane, programs, "Sparse Core Modules")
            track = _track(plane, "Sparse Core Ops", runs, book)
            yield SparseCore(host=space.host, ordinal=int(match[1]), core=int(match[2]), track=track)


def _track(plane: Plane, name: str, runs: Runs, book: _Book) -> Track:
    """The ops of a line. Ops that do not name their program belong to the execution around them."""
    line = plane.line(name)
    if line is None:
        return Track.of([])
    events = line.read()
    run = np.searchsorted(runs.starts, events.starts, side="right") - 1
    around = np.where(run >= 0, runs.programs[np.maximum(run, 0)] if len(runs.programs) else -1, -1)
    ops = np.zeros(len(events), np.int64)
    for key in np.unique(events.kinds):
        kind = plane.kinds.get(int(key), StatKind(name="", display_name="", stats={}))
        match = _TEXT.match(kind.name)
        op = match[1] if match else kind.display_name or kind.name
        chosen = np.flatnonzero(events.kinds == key) if len(plane.kinds) < 64 else None
        if "program_id" in kind.stats:
            _assign(ops, events.kinds, key, chosen, book.place(int(kind.stats["program_id"]), op, kind))
            continue
        chosen = np.flatnonzero(events.kinds == key) if chosen is None else chosen
        for program in np.unique(around[chosen]):
            ops[chosen[around[chosen] == program]] = book.place(int(program), op, kind)
    return Track.of([(ops, events.starts, events.ends)])


def _assign(ops: Ints, kinds: Ints, key: int, chosen: Ints | None, place: int) -> None:
    ops[kinds == key if chosen is None else chosen] = place


def _module_line(plane: Plane, programs: dict[int, str], name: str = "XLA Modules") -> Runs:
    line = plane.line(name)
    events = line.read() if line is not None else None
    if events is None or not len(events):
        return Runs(programs=np.zeros(0, np.int64), starts=np.zeros(0, np.int64), ends=np.zeros(0, np.int64))
    numbers = {int(key): _number(plane.kinds[int(key)]) for key in np.unique(events.kinds) if int(key) in plane.kinds}
    for key, number in numbers.items():
        programs.setdefault(number, _PROGRAM.sub(r"\1", plane.kinds[key].name))
    order = np.argsort(events.starts, kind="stable")
    return Runs(
        programs=np.array([numbers.get(int(key), -1) for key in events.kinds], np.int64)[order],
        starts=events.starts[order],
        ends=events.ends[order],
    )


def _number(kind: StatKind) -> int:
    """The number that identifies a program in its executions and its ops."""
    if "program_id" in kind.stats:
        return int(kind.stats["program_id"])
    match = _PROGRAM.match(kind.name)
    return _signed(int(match[2])) if match else -1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 == 1 else number


def _step_line(plane: Plane) -> Steps | None:
    line = plane.line("Steps")
    events = line.read() if line is not None else None
    if events is None or not len(events):
        return None
    names = [re.search(r"\d+", plane.kinds[int(key)].name) for key in events.kinds]
    return _steps([int(name[0]) if name else at for at, name in enumerate(names)], events.starts, events.ends)


def _steps(numbers: Iterable[int], starts: Ints, ends: Ints) -> Steps:
    order = np.argsort(starts, kind="stable")
    return Steps(numbers=np.array(list(numbers), np.int64)[order], starts=starts[order], ends=ends[order])


def _gpu(space: XSpace, plane: Plane, ordinal: int, book: _Book, programs: dict[int, str]) -> Device:
    parts: list[tuple[Ints, Ints, Ints]] = []
    for line in plane.lines:
        if line.name.startswith("Stream"):
            events = line.read(_OP_STATS)
            parts.append((_named_ops(events, plane, book, programs), events.starts, events.ends))
    if not parts:
        runs = _module_line(plane, programs)
        track = _track(plane, "XLA Ops", runs, book)
    else:
        track = Track.of(parts)
        runs = _module_line(plane, programs)
        runs = runs if len(runs.starts) else _recurring(track, book)
    return Device(
        host=space.host, kind="gpu", ordinal=ordinal, track=track, beside=Track.of([]), runs=runs,
        steps=_step_line(plane), stats=plane.stats,
    )  # fmt: skip


def _named_ops(events: XEvents, plane: Plane, book: _Book, programs: dict[int, str]) -> Ints:
    """The ops of events that name them, and the names of those that do not (copies, kernels of libraries)."""
    op, program = events.stats["hlo_op"], _program_of(events, programs)
    key = np.where(op.present, op.values * (len(plane.kinds) + 1), -1 - events.kinds)
    _, first, inverse = np.unique(np.stack([key, program]), axis=1, return_index=True, return_inverse=True)
    places = []
    for at in first.tolist():
        kind = plane.kinds.get(int(events.kinds[at]))
        name = op.texts[int(op.values[at])] if op.present[at] else (kind.name if kind else "")
        places.append(book.place(int(program[at]), name, kind))
    return np.array(places, np.int64)[inverse.reshape(-1)] if places else np.zeros(0, np.int64)


def _program_of(events: XEvents, programs: dict[int, str]) -> Ints:
    """The program of every event: its number, or that of the module that it names; -1 without either."""
    number, module = events.stats["program_id"], events.stats["hlo_module"]
    numbers = np.where(number.present, number.values, -1).astype(np.int64)
    known = {name: key for key, name in programs.items()}
    for code, name in enumerate(module.texts):
        chosen = module.present & (module.values == code)
        if not (numbers[chosen] >= 0).all():
            missing = chosen & ~number.present
            numbers[missing] = known.setdefault(name, -2 - len(known))
            programs.setdefault(known[name], name)
        elif chosen.any():
            programs.setdefault(int(numbers[chosen][0]), name)
    return numbers


def _recurring(track: Track, book: _Book) -> Runs:
    """Executions by recurring ops: each begins with the first of the ops that its program runs least often."""
    executions: list[tuple[int, int, int]] = []
    program = np.array([op.program for op in book.ops], np.int64)[track.ops]
    for number in np.unique(program):
        members = np.flatnonzero(program == number)
        _, first, counts = np.unique(track.ops[members], return_index=True, return_counts=True)
        rare = first[counts == counts.min()].min()
        begins = members[track.ops[members] == track.ops[members[rare]]]
        edges = [*track.starts[begins].tolist(), np.iinfo(np.int64).max]
        edges[0] = int(track.starts[members[0]])
        for low, high in pairwise(edges):
            inside = members[(track.starts[members] >= low) & (track.starts[members] < high)]
            executions.append((int(low), int(track.ends[inside].max()), int(number)))
    executions.sort()
    columns = np.array(executions, np.int64).reshape(-1, 3)
    return Runs(programs=columns[:, 2], starts=columns[:, 0], ends=columns[:, 1])


def _host(space: XSpace, book: _Book, programs: dict[int, str], *, has_devices: bool) -> tuple[Host, list[Device]]:
    """The threads of a host and, without accelerators, the devices that it emulates."""
    plane = next(space.named(_HOST), None)
    if plane is None:
        return Host(name=space.host, plane=None, threads=(), steps=None), []
    operating = any("hlo_op" in line.stats for line in plane.lines[:1]) and not has_devices
    threads: list[XLine] = []
    marked: list[tuple[int, int, int]] = []
    parts: dict[int, list[tuple[Ints, Ints, Ints, Ints, Ints]]] = {}
    for line in plane.lines:
        events = line.read((*_OP_STATS, "step_num") if operating else ("step_num",))
        step = events.stats["step_num"]
        marked += zip(
            events.starts[step.present].tolist(), events.ends[step.present].tolist(),
            step.values[step.present].tolist(), strict=True,
        )  # fmt: skip
        is_op = events.stats["hlo_op"].present if operating else np.zeros(len(events), bool)
        if not is_op.any():
            threads.append(line)
            continue
        ops_line = _only(events, is_op)
        ops, ordinals = _named_ops(ops_line, plane, book, programs), ops_line.stats["device_ordinal"].values
        program, run = _program_of(ops_line, programs), ops_line.stats["run_id"].values
        for ordinal in np.unique(ordinals):
            chosen = ordinals == ordinal
            parts.setdefault(int(ordinal), []).append(
                (ops[chosen], ops_line.starts[chosen], ops_line.ends[chosen], program[chosen], run[chosen])
            )
    marked.sort()
    columns = np.array(marked, np.int64).reshape(-1, 3)
    steps = Steps(numbers=columns[:, 2], starts=columns[:, 0], ends=columns[:, 1]) if marked else None
    host = Host(name=space.host, plane=plane, threads=tuple(threads), steps=steps)
    return host, [_emulated(space, ordinal, parts[ordinal]) for ordinal in sorted(parts)]


def _emulated(space: XSpace, ordinal: int, parts: list[tuple[Ints, Ints, Ints, Ints, Ints]]) -> Device:
    ops, starts, ends, program, run = (np.concatenate(column) for column in zip(*parts, strict=True))
    _, first, inverse = np.unique(np.stack([program, run]), axis=1, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    begins, stops = np.full(len(first), np.iinfo(np.int64).max), np.zeros(len(first), np.int64)
    np.minimum.at(begins, inverse, starts)
    np.maximum.at(stops, inverse, ends)
    order = np.argsort(begins)
    return Device(
        host=space.host,
        kind="cpu",
        ordinal=ordinal,
        track=Track.of([(ops, starts, ends)]),
        beside=Track.of([]),
        runs=Runs(programs=program[first][order], starts=begins[order], ends=stops[order]),
        steps=None,
        stats={},
    )


def _only(events: XEvents, chosen: Any) -> XEvents:
    """Some of the events."""
    return XEvents(
        kinds=events.kinds[chosen],
        starts=events.starts[chosen],
        ends=events.ends[chosen],
        stats={
            name: Column(values=column.values[chosen], present=column.present[chosen], texts=column.texts)
            for name, column in events.stats.items()
        },
    )


def _module(proto: bytes) -> bytes:
    """The HloModuleProto in an HloProto (b'' without one)."""
    return next((proto[field.value : field.end] for field in fields(proto, 0, len(proto)) if field.number == 1), b"")
