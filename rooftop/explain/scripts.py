"""A script that ran on a described slice: a report of each program that it compiled, and what was not computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rooftop import __version__
from rooftop.arrays import Mesh, PlacedMesh
from rooftop.compiler.compiling import Compiled
from rooftop.compiler.memory import MemoryShortage
from rooftop.core.amounts import Amount
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import format_bytes
from rooftop.core.records import Record
from rooftop.explain.compiled.report import SCHEMA, CompiledRecord, CompiledReport, RefusedRecord, largest
from rooftop.hardware import Slice
from rooftop.plan.documents import PlannedSlice
from rooftop.target.records import Ending, NotCompiled, ScriptRun, TargetProgram


@dataclass(frozen=True, kw_only=True)
class ScriptProgramRecord(Record):
    """A program of a script, and its compilation: ``compiled``, or ``refused`` if it does not fit in HBM.

    ``source`` is the 'file:line' of its function and ``called_from`` that of its first of ``calls``. ``matmul_flops``
    are those that it writes, over all devices, and ``kernels`` its Pallas calls. ``differs`` says what differs from the
    last compilation of the same function. ``regular``: prices of collectives are those of its own order of devices.
    ``unread`` is the reason why rooftop cannot read a compiled program.
    """

    name: str
    source: str
    called_from: str
    calls: Amount
    matmul_flops: Amount | None
    kernels: Amount
    differs: tuple[str, ...]
    regular: bool
    cached: bool
    compiled: CompiledRecord | None
    refused: RefusedRecord | None
    unread: str | None


@dataclass(frozen=True, kw_only=True)
class ScriptRecord(Record):
    """A script on a slice: its programs in the order of their compilation.

    ``ending`` says whether it was stopped after enough steps, came to its end, or failed with ``error``. ``reads``
    counts reads of values that were not computed, by 'file:line'; ``not_compiled`` are programs that were left out.
    """

    kind: Literal["script"]
    schema: Literal[1]
    rooftop_version: str
    slice: PlannedSlice
    command: str
    ending: Ending
    error: str | None
    seconds: Amount
    fits: bool
    verdict: str
    costliest: int | None
    programs: tuple[ScriptProgramRecord, ...]
    reads: Mapping[str, int]
    not_compiled: tuple[NotCompiled, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """A program of a script and what the compiler says about it."""

    slice: Slice
    program: TargetProgram

    @cached_property
    def mesh(self) -> Mesh:
        """The program's own mesh on the slice."""
        return self.program.mesh(self.slice)

    @property
    def shortage(self) -> MemoryShortage | None:
        """Memory that a program lacks; None if it fits."""
        return self.program.result.out_of_memory

    @cached_property
    def report(self) -> CompiledReport | None:
        """The compiled program, read; None if it does not fit or cannot be read."""
        return None if self.shortage is not None or self.unread is not None else self._compiled

    @cached_property
    def unread(self) -> str | None:
        """The reason why a compiled program cannot be read."""
        if self.shortage is not None:
            return None
        try:
            _ = self._compiled.timed
        except RooftopError as error:
            return str(error)
        return None

    @cached_property
    def _compiled(self) -> CompiledReport:
        compiled: Compiled = self.program.result.compiled(self.mesh, cached=self.program.cached)
        return CompiledReport(plan=None, compiled=compiled)

    @property
    def expected_s(self) -> float:
        """Expected seconds of one call; 0 if they are not known."""
        return 0.0 if self.report is None else float(self.report.timeline.total_s)

    @property
    def infeasible(self) -> Infeasible | None:
        """The answer no, of a program that does not fit."""
        return None if self.shortage is None else self.shortage.error

    def record(self, *, top: int = 20) -> ScriptProgramRecord:
        """The report as it is written, with ``top`` operations and buffers."""
        program = self.program
        return ScriptProgramRecord(
            name=program.name,
            source=program.source,
            called_from=program.called_from,
            calls=program.calls,
            matmul_flops=program.matmul_flops,
            kernels=program.kernels,
            differs=program.differs,
            regular=not isinstance(self.mesh, PlacedMesh) or self.mesh.regular,
            cached=program.cached,
            compiled=None if self.report is None else self.report.record(top=top),
            refused=None if self.shortage is None else self._refused(self.shortage, top),
            unread=self.unread,
        )

    def _refused(self, shortage: MemoryShortage, top: int) -> RefusedRecord:
        over = shortage.needed_bytes - shortage.available_bytes
        return RefusedRecord(
            kind="compiled",
            schema=SCHEMA,
            rooftop_version=__version__,
            plan=None,
            slice=PlannedSlice.of(self.slice),
            mesh=self.mesh.described,
            fits=False,
            peak_bytes=shortage.needed_bytes,
            planned_peak_bytes=None,
            capacity_bytes=shortage.available_bytes,
            over_bytes=over,
            memory=None if shortage.at_peak is None else shortage.at_peak.by_class,
            planned_memory=None,
            buffers=largest(shortage.at_peak, top),
            nearest=None,
            verdict=f"program {self.program.name} does not fit: XLA needs {format_bytes(shortage.needed_bytes)} of "
            f"{format_bytes(shortage.available_bytes)} a device, {format_bytes(over)} too many",
        )


@dataclass(frozen=True, kw_only=True)
class ScriptReport:
    """A script that ran on ``slice``."""

    slice: Slice
    command: str
    run: ScriptRun

    @cached_property
    def programs(self) -> tuple[ProgramReport, ...]:
        """The programs, in the order of their compilation."""
        return tuple(ProgramReport(slice=self.slice, program=program) for program in self.run.record.programs)

    @property
    def costliest(self) -> int | None:
        """Index of the program to look at: the first that does not fit, else the one that takes the longest."""
        for at, program in enumerate(self.programs):
            if program.shortage is not None:
                return at
        return max(range(len(self.programs)), key=lambda at: self.programs[at].expected_s, default=None)

    @property
    def fits(self) -> bool:
        """True if every program fits in HBM."""
        return all(program.shortage is None for program in self.programs)

    @property
    def verdict(self) -> str:
        """One line, about the costliest program."""
        at = self.costliest
        if at is None:
            return "no program was compiled: none has large matmuls, a kernel, or arguments that are split or large"
        shown = self.programs[at]
        if (shortage := shown.shortage) is not None:
            return shown._refused(shortage, 0).verdict
        subject = f"program {shown.program.name}"
        if len(self.programs) > 1:
            subject += f", the costliest of {len(self.programs)}"
        if shown.report is None:
            return f"{subject}: not read ({shown.unread})"
        return f"{subject}: {shown.report.verdict}"

    @property
    def problems(self) -> Iterator[Exception]:
        """Reasons to end with another status than 0: a script that failed, programs that do not fit."""
        if self.run.error is not None and self.fits:
            yield self.run.error.refusal(self.command)
        for program in self.programs:
            if program.infeasible is not None:
                yield program.infeasible

    def record(self, *, top: int = 20) -> ScriptRecord:
        """The report as it is written, with ``top`` operations and buffers of every program."""
        run = self.run
        return ScriptRecord(
            kind="script",
            schema=SCHEMA,
            rooftop_version=__version__,
            slice=PlannedSlice.of(self.slice),
            command=self.command,
            ending=run.ending,
            error=None if run.error is None else str(run.error),
            seconds=run.seconds,
            fits=self.fits,
            verdict=self.verdict,
            costliest=self.costliest,
            programs=tuple(program.record(top=top) for program in self.programs),
            reads=run.record.reads,
            not_compiled=run.record.not_compiled,
            notes=run.record.notes,
        )

    def to_json(self, *, top: int = 20) -> dict[str, Any]:
        """The report as plain JSON values; ``top`` operations and buffers of every program."""
        return self.record(top=top).to_json()
