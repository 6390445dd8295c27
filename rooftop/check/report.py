"""The answer of ``rooftop check``: findings, and the figures of a program without a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from rooftop import __version__
from rooftop.check.arguments import arguments
from rooftop.check.gates import Gate, GateLimits, gates
from rooftop.check.rules import SMALLEST_SHARE, WHAT, ProgramFinding, find_all
from rooftop.core.amounts import Amount
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.core.records import Record, read_record
from rooftop.explain.compiled.report import CompiledRecord, CompiledReport, SavedAnswer
from rooftop.explain.difference import Difference, compiled_side, difference
from rooftop.explain.scripts import ScriptRecord
from rooftop.roofline.rates import Rates

SCHEMA: Literal[1] = 1


@dataclass(frozen=True, kw_only=True)
class ProgramSums(Record):
    """Bytes on one device: of arguments by class (by the words of their names), and at the peak by class."""

    arguments: Mapping[str, Amount]
    at_peak: Mapping[str, Amount] | None


@dataclass(frozen=True, kw_only=True)
class CheckRecord(Record):
    """A checked program. Seconds are of one step on one device; ``compiled`` is the report that was checked.

    ``mfu`` is the program's own FLOPs over those of the bf16 peak in the expected time; recomputed work counts.
    ``tokens_per_s`` is over all devices (None: no ``tokens`` of a step were given). ``gates`` are limits and whether
    they hold; ``difference`` is from an earlier ledger (None without one). ``error`` is that of a script which failed
    after it had compiled the program; ``refused`` says which other program of the script does not fit in HBM.
    """

    kind: Literal["check"]
    schema: Literal[1]
    rooftop_version: str
    program: str
    verdict: str
    findings: tuple[ProgramFinding, ...]
    expected_s: Amount
    peak_bytes: Amount
    mfu: Amount
    tokens: Amount | None
    tokens_per_s: Amount | None
    sums: ProgramSums
    gates: tuple[Gate, ...]
    difference: Difference | None
    compiled: CompiledRecord
    error: str | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProgramCheck:
    """A compiled ``program`` with its findings and limits; ``tokens`` are those of a step on all devices.

    ``before`` is an earlier compilation, and ``limits`` are those of time and memory. ``error`` is the reason why the
    script of the program failed later, and ``refused`` another of its programs that does not fit.
    """

    program: str
    error: str | None = None
    refused: str | None = None
    tokens: float | None = None
    before: CompiledRecord | None = None
    limits: GateLimits = GateLimits()

    @property
    def findings(self) -> tuple[ProgramFinding, ...]:
        """The findings, what is worth most first."""
        raise NotImplementedError

    @property
    def sums(self) -> ProgramSums:
        """Bytes by class."""
        raise NotImplementedError

    @property
    def rates(self) -> Rates:
        """The rates of the chip."""
        raise NotImplementedError

    @property
    def compilation(self) -> str:
        """The verdict on the compilation."""
        raise NotImplementedError

    def compiled_record(self, top: int) -> CompiledRecord:
        """The report of the compilation, with ``top`` operations and buffers."""
        raise NotImplementedError

    @cached_property
    def _figures(self) -> CompiledRecord:
        return self.compiled_record(1)

    @property
    def expected_s(self) -> float:
        """Expected seconds of a step."""
        return float(self._figures.step.expected_s)

    @property
    def peak_bytes(self) -> float:
        """Bytes of a device at the peak."""
        return float(self._figures.peak_bytes)

    @property
    def mfu(self) -> float:
        """FLOPs of the program over those of the bf16 peak in the expected time."""
        flops = float(self._figures.flops) + float(self._figures.kernel_flops)
        return flops / (self.rates.flops_per_s["bf16"] * self.expected_s) if self.expected_s else 0.0

    @cached_property
    def gates(self) -> tuple[Gate, ...]:
        """The limits that were set, and whether each holds."""
        return gates(self.limits, self.before, self.expected_s, self.peak_bytes, self.findings)

    @cached_property
    def difference(self) -> Difference | None:
        """Rows that differ from the earlier ledger, the largest change first."""
        if self.before is None:
            return None
        return difference(compiled_side("before", self.before), compiled_side(self.program, self._figures))

    @property
    def holds(self) -> bool:
        """True if every limit holds."""
        return all(gate.holds for gate in self.gates)

    @property
    def verdict(self) -> str:
        """One line."""
        broken = [str(gate) for gate in self.gates if not gate.holds]
        if broken:
            changed = f"; {self.difference.verdict}" if self.difference is not None else ""
            return f"over the limit: {'; '.join(broken)}{changed}"
        count = len(self.findings)
        if not count:
            return f"nothing found; {self.compilation}"
        seconds = sum(finding.seconds for finding in self.findings if finding.rule != "exposed_collective")
        nbytes = sum(finding.bytes for finding in self.findings if not finding.seconds)
        worth = [text for value, text in ((seconds, format_seconds(seconds)), (nbytes, format_bytes(nbytes))) if value]
        price = f", worth up to {' and '.join(worth)}" if worth else ""
        return f"{count} finding{'s' if count > 1 else ''}{price}; {self.compilation}"

    def record(self, *, top: int = 20) -> CheckRecord:
        """The answer as it is written; ``top`` operations and buffers of the compilation."""
        return CheckRecord(
            kind="check",
            schema=SCHEMA,
            rooftop_version=__version__,
            program=self.program,
            verdict=self.verdict,
            findings=self.findings,
            expected_s=self.expected_s,
            peak_bytes=self.peak_bytes,
            mfu=self.mfu,
            tokens=self.tokens,
            tokens_per_s=self.tokens / self.expected_s if self.tokens and self.expected_s else None,
            sums=self.sums,
            gates=self.gates,
            difference=self.difference,
            compiled=self.compiled_record(top),
            error=self.error,
            refused=self.refused,
        )

    def to_json(self, *, top: int = 20) -> dict[str, Any]:
        """The answer as plain JSON values."""
        return self.record(top=top).to_json()


@dataclass(frozen=True, kw_only=True)
class CheckReport(ProgramCheck):
    """A program that was compiled, with its module: ``report``."""

    report: CompiledReport

    @cached_property
    def findings(self) -> tuple[ProgramFinding, ...]:
        """The findings, what is worth most first."""
        return find_all(self.report)

    @property
    def expected_s(self) -> float:
        """Expected seconds of a step."""
        return float(self.report.timeline.total_s)

    @property
    def sums(self) -> ProgramSums:
        """Bytes by class."""
        by_class: dict[str, float] = {}
        for argument in arguments(self.report.compiled.module):
            name = argument.argument_class
            by_class[name] = by_class.get(name, 0.0) + argument.tensor.nbytes
        at_peak = self.report.compiled.at_peak
        return ProgramSums(arguments=by_class, at_peak=None if at_peak is None else at_peak.by_class)

    @property
    def rates(self) -> Rates:
        """The rates of the chip."""
        return self.report.rates

    @property
    def compilation(self) -> str:
        """The verdict on the compilation."""
        return self.report.verdict

    def compiled_record(self, top: int) -> CompiledRecord:
        """The report of the compilation, with ``top`` operations and buffers."""
        return self.report.record(top=top)


@dataclass(frozen=True, kw_only=True)
class SavedCheck(ProgramCheck):
    """A program of a saved report: what a check has written, or what ``rooftop compile -o`` has.

    ``checked`` has the findings of the check; a report of ``compile`` alone has no module, and its findings are the
    collectives that the device waits for.
    """

    compiled: CompiledRecord
    checked: CheckRecord | None = None

    @classmethod
    def read(cls, data: Mapping[str, Any], **fields: Any) -> SavedCheck:
        """The saved report in JSON: of a check, of a compilation, or of a script's costliest program that fits.

        Raises RooftopError for other JSON, and where no program fits.
        """
        checked, compiled, answer = None, None, SavedAnswer.of(data)
        if answer.kind == "check":
            checked = read_record(CheckRecord, data, "report")
            compiled = checked.compiled
            fields.setdefault("tokens", checked.tokens)
            fields |= {"error": checked.error, "refused": checked.refused}
        elif answer.kind == "script":
            script = read_record(ScriptRecord, data, "report")
            fitting = (program.compiled for program in script.programs if program.compiled is not None)
            compiled = max(fitting, key=lambda program: float(program.step.expected_s), default=None)
            fields |= {"error": script.error} if script.fits else {"refused": script.verdict}
        elif answer.kind == "compiled" and answer.fits:
            compiled = read_record(CompiledRecord, data, "report")
        if compiled is None:
            raise RooftopError(
                "report", answer.kind, "what rooftop check --save or rooftop compile -o wrote, of a program that fits"
            )
        return cls(compiled=compiled, checked=checked, **fields)

    @property
    def findings(self) -> tuple[ProgramFinding, ...]:
        """The findings, what is worth most first."""
        return self._waits if self.checked is None else self.checked.findings

    @cached_property
    def _waits(self) -> tuple[ProgramFinding, ...]:
        waits = [
            ProgramFinding(
                rule="exposed_collective",
                what=WHAT["exposed_collective"],
                evidence=f"{moved.kind} of {format_bytes(moved.bytes)} over {','.join(moved.axes)}"
                + (f" x {moved.count:g}" if moved.count > 1 else ""),
                scope=moved.scope,
                phase=moved.phase,
                source=moved.source,
                frames=moved.frames,
                seconds=moved.count * moved.exposed_s,
                bytes=0.0,
            )
            for moved in self.compiled.collectives
        ]
        long = [wait for wait in waits if wait.seconds >= SMALLEST_SHARE * self.expected_s and wait.seconds]
        return tuple(sorted(long, key=lambda wait: -wait.seconds))

    @property
    def sums(self) -> ProgramSums:
        """Bytes by class."""
        return ProgramSums(arguments={}, at_peak=self.compiled.memory) if self.checked is None else self.checked.sums

    @cached_property
    def rates(self) -> Rates:
        """The rates of the chip."""
        return Rates.of(self.compiled.slice.hardware.chip)

    @property
    def compilation(self) -> str:
        """The verdict on the compilation."""
        return self.compiled.verdict

    def compiled_record(self, top: int) -> CompiledRecord:
        """The report as it was saved, with ``top`` operations and buffers at most."""
        saved = self.compiled
        return replace(saved, operations=saved.operations[:top], buffers=saved.buffers[:top])
