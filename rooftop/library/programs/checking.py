"""A compiled program checked against limits, with findings that have prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from rooftop.core.errors import Infeasible, RooftopError, refuse
from rooftop.core.files import read_json_object, write_json, write_text
from rooftop.core.quantities import parse_growth, parse_quantity, parse_seconds
from rooftop.library.programs.compiling import CompileResult
from rooftop.library.programs.scripts import ScriptResult
from rooftop.library.results import Result, flat

if TYPE_CHECKING:
    from rooftop.check.report import ProgramCheck
    from rooftop.check.rules import ProgramFinding
    from rooftop.present.document import Document


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckResult(Result):
    """A checked program: its findings, what is worth most first, and whether the limits hold.

    ``failure`` is that of a script which failed after it had compiled the program, or the refusal of another of its
    programs, which does not fit in HBM.
    """

    report: ProgramCheck
    failure: Exception | None = None

    def to_json(self, *, top: int = 20) -> dict[str, object]:
        """Findings, limits, the difference from an earlier ledger, and the compilation."""
        return self.report.to_json(top=top)

    @property
    def findings(self) -> tuple[ProgramFinding, ...]:
        """The findings, what is worth most first."""
        return self.report.findings

    @property
    def holds(self) -> bool:
        """True if every limit holds."""
        return self.report.holds

    @property
    def rows(self) -> list[dict[str, object]]:
        """A finding a row."""
        return [flat(finding.to_json()) for finding in self.report.findings]

    @property
    def summary(self) -> str:
        """The verdict."""
        return self.report.verdict

    @property
    def document(self) -> Document:
        """Findings, limits and the compilation."""
        from rooftop.present.documents import document

        return document(self.report.record())

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible if another program of the script does not fit in HBM, RooftopError if the script failed."""
        if self.failure is not None:
            raise self.failure

    def save(self, path: Path | str) -> None:
        """Write the ledger, for ``against`` of a later check."""
        write_json(Path(path), self.to_json())

    def write_junit(self, path: Path | str) -> None:
        """Write the limits as test cases, for the tests of a CI: a case for each limit and each finding."""
        write_text(Path(path), junit(self.report))


def check(
    program: CompileResult | ScriptResult | Path | str,
    *,
    on: str | None = None,
    mesh: Mapping[str, int] | str | None = None,
    tokens: float | str | None = None,
    against: Path | str | None = None,
    max_time: float | str | None = None,
    max_memory: float | str | None = None,
    fail_on: float | str | None = None,
    name: str | None = None,
) -> CheckResult:
    """Check a compiled program: what it wastes, at which line, and what each is worth.

    Args:
        program: What ``compile``, ``inspect`` or ``compile_script`` returned (of a script the costliest program that
            fits), or a module of HLO (see ``explain_module``), or a saved report: JSON of ``check``, ``compile`` or a
            script.
        on: The slice or chip that a module is compiled for.
        mesh: Mesh axes of a module.
        tokens: Tokens of a step on all devices, for tokens a second.
        against: An earlier ledger: what ``save`` or ``rooftop compile -o`` wrote.
        max_time: Share by which a step may take longer than before, 0.02 or '+2%'.
        max_memory: Share by which the peak may grow.
        fail_on: Seconds that one finding may be worth, or '5ms'.
        name: Name of the program in the answer.

    Limits are those of ``holds``. A script that failed, or of which another program does not fit in HBM, is in the
    result: ``raise_if_infeasible`` raises for it. Raises Infeasible if no program fits, and RooftopError for a program
    that did not compile, for limits without an earlier ledger, and for files that are none.
    """
    from rooftop.check.gates import GateLimits
    from rooftop.check.report import CheckReport, SavedCheck
    from rooftop.explain.compiled.module import reading
    from rooftop.explain.compiled.report import CompiledReport, SavedAnswer, saved_compilation

    for field, value in (("max-time", max_time), ("max-memory", max_memory)):
        if value is not None and against is None:
            raise RooftopError(field, value, "a ledger to compare with: --against FILE")
    before = None
    if against is not None:
        data = read_json_object(Path(against), field="against", accepted=_SAVED)
        before = saved_compilation(data, "against")
        if before is None:
            raise RooftopError("against", SavedAnswer.of(data).kind, _SAVED)
    common: dict[str, Any] = {
        "before": before,
        "limits": GateLimits(
            time=None if max_time is None else parse_growth(max_time, "max-time"),
            memory=None if max_memory is None else parse_growth(max_memory, "max-memory"),
            finding_s=None if fail_on is None else _seconds(fail_on),
        ),
    }
    if tokens is not None:
        common["tokens"] = parse_quantity(tokens, "tokens") if isinstance(tokens, str) else tokens
    result: CompileResult | ScriptResult | Path | str = program
    failure: Exception | None = None
    if isinstance(result, ScriptResult):
        script = result.report
        failure, name = next(script.problems, None), name or script.command
        if not script.fits:
            common["refused"] = script.verdict
        elif script.run.error is not None:
            common["error"] = str(script.run.error)
        # Without a program that fits, the costliest raises the reason.
        fitting = (compiled for compiled in script.programs if compiled.report is not None)
        shown = max(fitting, key=lambda compiled: compiled.expected_s, default=None)
        result = result.costliest if shown is None or shown.report is None else CompileResult(report=shown.report)
    report: ProgramCheck
    if not isinstance(result, CompileResult) and Path(result).suffix == ".json":
        refuse({"on": on, "mesh": mesh}, "nothing with a saved report, which says it")
        data = read_json_object(Path(result), field="report", accepted=_SAVED)
        report = SavedCheck.read(data, program=name or Path(result).name, **common)
        failure = None if report.refused is None else Infeasible("program", report.refused)
    else:
        if not isinstance(result, CompileResult):
            if on is None:
                raise RooftopError("on", None, "the chip or slice that the module is compiled for, such as v5e:4x4")
            from rooftop.library.programs.compiling import explain_module

            name, result = name or Path(result).name, explain_module(result, on=on, mesh=mesh)
        result.raise_if_infeasible()
        assert isinstance(result.report, CompiledReport)
        report = CheckReport(program=name or "program", report=result.report, **common)
        if isinstance(program, (str, Path)):
            with reading(Path(program)):
                report.to_json()
    return CheckResult(report=report, failure=failure)


_SAVED = "what rooftop check --save or rooftop compile -o wrote"


def _seconds(value: float | str) -> float:
    return parse_seconds(value, "fail-on") if isinstance(value, str) else float(value)


def junit(report: ProgramCheck) -> str:
    """The limits and findings of a check as JUnit's XML; findings fail if they are over their limit."""
    broken = {gate.name for gate in report.gates if not gate.holds}
    cases: list[tuple[str, str, str]] = [
        (gate.name, "limits", "" if gate.holds else str(gate)) for gate in report.gates
    ]
    for finding in report.findings:
        name = f"{finding.rule} at {finding.source.rpartition('/')[2] or finding.scope}"
        if name not in broken:
            cases.append((name, "findings", ""))
    suite = ElementTree.Element(
        "testsuite",
        name=f"rooftop check {report.program}",
        tests=str(len(cases)),
        failures=str(sum(bool(failure) for _, _, failure in cases)),
    )
    for name, group, failure in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=f"rooftop.{group}", name=name)
        if failure:
            ElementTree.SubElement(case, "failure", message=failure).text = report.verdict
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
