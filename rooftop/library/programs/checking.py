"""A compiled program checked against limits, with findings that have prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from xml.etree import ElementTree

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import read_json_object, write_json, write_text
from rooftop.core.quantities import parse_growth, parse_quantity
from rooftop.library.programs.compiling import CompileResult, explain_module, function_result
from rooftop.library.programs.scripts import ScriptResult, script_result
from rooftop.library.results import Result, flat, in_answer
from rooftop.requests.function import of_request
from rooftop.requests.inputs import seconds_of
from rooftop.requests.programs import CheckProgram

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
    request: CheckProgram | None = None

    def to_json(self, *, top: int = 20) -> dict[str, object]:
        """Findings, limits, the difference from an earlier ledger, and the compilation."""
        return self.report.to_json(top=top) | in_answer(self.request)

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


@of_request(CheckProgram)
def check(request: CheckProgram, on_progress: Callable[[str, float], None] | None = None) -> CheckResult:
    """Check a compiled program: what it wastes, at which line, and what each is worth.

    A function or a script is compiled first. Limits are those of ``holds``. A script that failed, or of which another
    program does not fit in HBM, is in the result: ``raise_if_infeasible`` raises for it. ``on_progress`` is called with
    the phase, and seconds.

    Raises Infeasible if no program fits, and RooftopError for a program that did not compile, for limits without an
    earlier ledger, and for files that are none.
    """
    return checked(request, program_to_check(request, on_progress))


def program_to_check(
    request: CheckProgram, on_progress: Callable[[str, float], None] | None = None
) -> CompileResult | ScriptResult | None:
    """Compile or read the program of a request; None for a saved report. Raises RooftopError."""
    request.refuse_unused()
    _earlier(request)
    program = request.program
    if isinstance(program, (CompileResult, ScriptResult)):
        return program
    if request.is_saved:
        return None
    if request.form == "script":
        return script_result(request, on_progress)
    if request.form == "function":
        return function_result(request, on_progress=on_progress)
    if request.form == "object":
        accepted = "module:function, a script's words, a path, or what compile, inspect or compile_script returned"
        raise RooftopError("program", type(program).__name__, accepted)
    return explain_module(str(program), on=request.required_slice(), mesh=request.mesh)  # type: ignore[arg-type]


def checked(request: CheckProgram, program: CompileResult | ScriptResult | None) -> CheckResult:
    """Check a program by the limits of a request; None is the saved report of the request. Raises as ``check`` does."""
    from rooftop.check.report import CheckReport, SavedCheck
    from rooftop.explain.compiled.module import reading
    from rooftop.explain.compiled.report import CompiledReport

    common = _earlier(request)
    name = request.name
    failure: Exception | None = None
    if program is None:
        path = Path(cast("Path | str", request.program))
        data = read_json_object(path, field="report", accepted=_SAVED)
        saved = SavedCheck.read(data, program=name, **common)
        failure = None if saved.refused is None else Infeasible("program", saved.refused)
        return CheckResult(report=saved, failure=failure, request=request)
    if isinstance(program, ScriptResult):
        script = program.report
        failure, name = next(script.problems, None), script.command
        if not script.fits:
            common["refused"] = script.verdict
        elif script.run.error is not None:
            common["error"] = str(script.run.error)
        # Without a program that fits, the costliest raises the reason.
        fitting = (compiled for compiled in script.programs if compiled.report is not None)
        shown = max(fitting, key=lambda compiled: compiled.expected_s, default=None)
        program = program.costliest if shown is None or shown.report is None else CompileResult(report=shown.report)
    program.raise_if_infeasible()
    assert isinstance(program.report, CompiledReport)
    report = CheckReport(program=name, report=program.report, **common)
    if request.form == "file":
        with reading(Path(cast("Path | str", request.program))):
            report.to_json()
    return CheckResult(report=report, failure=failure, request=request)


def _earlier(request: CheckProgram) -> dict[str, Any]:
    """The earlier ledger, the limits and the tokens, as reports take them. Raises RooftopError."""
    from rooftop.check.gates import GateLimits
    from rooftop.explain.compiled.report import SavedAnswer, saved_compilation

    before = None
    if request.against is not None:
        data = read_json_object(Path(request.against), field="against", accepted=_SAVED)
        before = saved_compilation(data, "against")
        if before is None:
            raise RooftopError("against", SavedAnswer.of(data).kind, _SAVED)
    tokens, max_time, max_memory = request.tokens, request.max_time, request.max_memory
    common: dict[str, Any] = {
        "before": before,
        "limits": GateLimits(
            time=None if max_time is None else parse_growth(max_time, "max-time"),
            memory=None if max_memory is None else parse_growth(max_memory, "max-memory"),
            finding_s=None if request.fail_on is None else seconds_of(request.fail_on, "fail-on"),
        ),
    }
    if tokens is not None:
        common["tokens"] = parse_quantity(tokens, "tokens") if isinstance(tokens, str) else tokens
    return common


_SAVED = "what rooftop check --save or rooftop compile -o wrote"


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
