"""``rooftop plan train --compile N``: the best plans are compiled, and the fastest compiled one is the answer."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import rooftop
from rooftop.cli.main import main
from rooftop.compiler import compiling
from rooftop.compiler.compiling import (
    CompiledProgram,
    CompileRequest,
    RequestError,
    WorkerAnswer,
    WorkerOutput,
    WorkerResult,
)
from rooftop.compiler.memory import OutOfMemory
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.records import read_record
from rooftop.hardware import Slice
from rooftop.library.planning import TrainingPlanResult
from rooftop.plan.training.answer import TrainingAnswerDocument, search_of
from rooftop.plan.training.compiled import CompiledCandidate, CompiledPlans
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.search import Sweep, SweepOptions, sweep
from rooftop.present.documents import document
from rooftop.requests.planning import PlanTraining
from rooftop.requests.problems import training_problem
from rooftop.tune.candidates import _program, best_candidates
from tests.support.hlo_modules import dot, module_text

#: A job of which the planner's first plans are of other meshes: data=4, fsdp=4, and data=2,fsdp=2.
JOB: Mapping[str, Any] = {"on": "v5e:2x2", "batch_seqs": 32, "seq": 1024, "optimizer": "sgd"}
MODEL = "llama:50M"
NAMES = ("data=4", "fsdp=4", "data=2,fsdp=2")
WORDS = [
    "plan", "train", MODEL, "--on", "v5e:2x2", "--batch-seqs", "32", "--seq", "1024", "--optimizer", "sgd",
]  # fmt: skip

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="the extra 'compile' is not installed")


class _Killed(BaseException):
    """The process ends here."""


@dataclass
class FakeCompiler:
    """A compiler whose program of a mesh has so many matmuls, or ends as an exception; ``asked`` are its events."""

    matmuls: Mapping[str, int | BaseException]
    asked: list[str] = field(default_factory=list)

    def __call__(self, request: CompileRequest, *, on_progress: Any = None, **rest: Any) -> WorkerOutput:
        mesh = ",".join(f"{name}={size}" for name, size in request.mesh.shape.items() if size > 1)
        self.asked.append(mesh)
        on_progress("compiling", 1.0)
        outcome = self.matmuls[mesh]
        result, error = None, None
        if isinstance(outcome, OutOfMemory):
            result = WorkerResult(out_of_memory=outcome.record)
        elif isinstance(outcome, RooftopError):
            error = RequestError(field=outcome.field, given=outcome.given, accepted=outcome.accepted)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            text = module_text([dot(f"d{at}", f"d{at - 1}" if at else "x") for at in range(outcome)])
            program = CompiledProgram(
                hlo_text=text, peak_bytes=1000 * outcome, memory={}, lower_s=1.0, compile_s=2.0,
                versions={"jax": "1", "jaxlib": "1", "libtpu": "1"},
            )  # fmt: skip
            result = WorkerResult(program=program)
        answer = WorkerAnswer(sources={}, result=result, error=error)
        return WorkerOutput(program=request.program, answer=answer, log="", exit_status=0, phase="reading")


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that puts a fake compiler of the matmuls of each plan in the place of XLA, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(*matmuls: int | BaseException) -> FakeCompiler:
        compiler = FakeCompiler(dict(zip(NAMES, matmuls, strict=False)))
        monkeypatch.setattr(compiling, "ask_worker", compiler)
        return compiler

    return put


def planned(count: int | None = 3, **changes: Any) -> TrainingPlanResult:
    return rooftop.plan_training(MODEL, **{**JOB, **changes}, compile=count)


def compiled(count: int = 3) -> CompiledPlans:
    answer = planned(count).compiled
    assert answer is not None
    return answer


def run(*words: str) -> int:
    """The exit status of a command line for the job."""
    with pytest.raises(SystemExit) as ended:
        main([*WORDS, *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def too_large() -> OutOfMemory:
    return OutOfMemory("step", needed_bytes=20e9, available_bytes=16e9)


def search(**changes: Any) -> Sweep:
    request = PlanTraining(changes.pop("model", MODEL), **{**JOB, **changes})
    return search_of(training_problem(request, Slice.parse(str(request.on))))


# ---------------------------------------------------------------- candidates


def test_candidates_are_the_fastest_distinct_programs() -> None:
    """In the order of a search that prices every candidate, without those that differ in nothing that is compiled."""
    for model, on, batch in (("llama:50M", "v6e:2x4", 32), ("mixtral:50M", "v5e:2x4", 32)):
        problem = training_problem(PlanTraining(model, on=on, batch_seqs=batch, seq=1024), Slice.parse(on))
        searched = search_of(problem)
        chosen = best_candidates(searched, 6)
        assert chosen[0] == searched.best
        plans = [searched.plan(candidate) for candidate in chosen]
        seconds = [plan.expected_s for plan in plans]
        assert seconds == sorted(seconds)
        assert all(plan.fits and not plan.obstacles for plan in plans)
        programs = [_program(plan) for plan in plans]
        assert len(set(programs)) == len(programs) == 6
        everything = sweep(problem, SweepOptions(exhaustive=True))
        exact = [everything.plan(candidate) for candidate in best_candidates(everything, 6)]
        assert [plan.expected_s for plan in exact] == pytest.approx(seconds)


def test_more_candidates_than_meshes_are_all_there_are() -> None:
    searched = search(mesh={"fsdp": 4}, remat="block", microbatches=1)
    assert len(best_candidates(searched, 5)) == 1


def test_a_chosen_candidate_is_the_plan_and_the_best_is_an_alternative(compile_with: Any) -> None:
    compile_with(9, 6, 7)
    plain, result = planned(None), planned()
    assert result.plan.mesh.shape["fsdp"] == 4
    assert plain.plan.mesh.shape["data"] == 4
    others = [dict(other.mesh) for other in result.answer.alternatives]
    assert others[0] == {"data": 4}
    assert {"fsdp": 4} not in others
    # The plan's figures stay those of the planner.
    assert result.record.step.expected_s == result.plan.expected_s
    assert result.plan.expected_s > plain.plan.expected_s


# ---------------------------------------------------------------- ranks and verdicts


def test_the_smallest_compiled_time_is_first(compile_with: Any) -> None:
    compiler = compile_with(9, 8, 6)
    answer = compiled()
    assert compiler.asked == list(NAMES)
    assert [candidate.rank for candidate in answer.candidates] == [3, 2, 1]
    assert [candidate.planned_rank for candidate in answer.candidates] == [1, 2, 3]
    first, last = (candidate.compiled_s for candidate in (answer.candidates[0], answer.candidates[2]))
    assert first is not None
    assert last == pytest.approx(first * 6 / 9)
    assert answer.verdict.startswith("compiling moved data=2,fsdp=2, remat matmuls from 3rd to 1st: ")
    assert " instead of " in answer.verdict


def test_the_planners_first_is_confirmed_and_equals_stay_in_order(compile_with: Any) -> None:
    compile_with(6, 7, 6)
    answer = compiled()
    assert [candidate.rank for candidate in answer.candidates] == [1, 3, 2]
    assert answer.verdict.startswith("compiling confirmed data=4, remat matmuls: ")
    assert answer.verdict.endswith("the fastest of 3 compiled plans")


def test_a_plan_that_does_not_fit_by_the_compiler_is_passed_over(compile_with: Any) -> None:
    compile_with(too_large(), 7, 8)
    result = planned()
    assert result.plan.mesh.shape["fsdp"] == 4
    assert result.compiled is not None
    left_out = result.compiled.candidates[0]
    assert (left_out.rank, left_out.fits, left_out.peak_bytes, left_out.compiled_s) == (None, False, 20e9, None)
    assert "from 2nd to 1st" in result.compiled.verdict
    assert "data=4, remat matmuls needs 20 GB of 16.9 GB a device" in result.compiled.verdict
    result.raise_if_infeasible()


def test_a_plan_that_the_compiler_refuses_is_passed_over(compile_with: Any) -> None:
    compile_with(RooftopError("program", "step", "one that XLA compiles (a crash)"), 7, 8)
    answer = compiled()
    assert answer.candidates[0].reason == "a crash"
    assert answer.verdict.endswith("data=4, remat matmuls: a crash")
    compile_with(*[RooftopError("program", "step", "one that XLA compiles (a crash)")] * 3)
    with pytest.raises(RooftopError, match=r"compile: got 3; accepted: plans that XLA compiles \(a crash\)"):
        planned(3, seq=2048)


def test_no_plan_that_fits_is_no_answer(compile_with: Any, capsys: pytest.CaptureFixture[str]) -> None:
    compile_with(*[too_large()] * 3)
    result = planned()
    assert result.compiled is not None
    assert result.compiled.best is None
    assert result.compiled.nearest is not None
    with pytest.raises(Infeasible, match=r"none of 3 compiled plans fits: .* nearest that should fit: --mesh"):
        result.raise_if_infeasible()
    assert run("--compile", "3") == 1
    assert "None of 3 compiled plans fits" in capsys.readouterr().out.splitlines()[0]


# ---------------------------------------------------------------- the cache


def test_the_same_question_compiles_nothing(compile_with: Any, capsys: pytest.CaptureFixture[str]) -> None:
    compiler = compile_with(9, 8, too_large())
    before = compiled()
    assert before.compiled == 3
    again = compiled()
    assert len(compiler.asked) == 3
    assert again.compiled == 0
    assert [candidate.compiled_s for candidate in again.candidates] == [
        candidate.compiled_s for candidate in before.candidates
    ]
    assert run("--compile", "3") == 0
    shown = capsys.readouterr()
    assert "nothing was compiled" in " ".join(shown.out.split())
    assert shown.err.count("compiled earlier") == 3
    assert len(compiler.asked) == 3


def test_more_plans_compile_only_those_that_are_new(compile_with: Any) -> None:
    compiler = compile_with(9, 8, 7)
    compiled(2)
    assert compiler.asked == list(NAMES[:2])
    assert compiled(3).compiled == 1
    assert compiler.asked == list(NAMES)


@pytest.mark.parametrize("at", range(3))
def test_a_killed_search_loses_one_compilation(compile_with: Any, at: int) -> None:
    matmuls: list[int | BaseException] = [9, 8, 7]
    killed = [*matmuls[:at], _Killed(), *matmuls[at + 1 :]]
    first = compile_with(*killed)
    with pytest.raises(_Killed):
        planned()
    assert first.asked == list(NAMES[: at + 1])
    second = compile_with(*matmuls)
    assert compiled().compiled == 3 - at
    assert second.asked == list(NAMES[at:])


# ---------------------------------------------------------------- the verb


def test_the_json_has_every_candidate(compile_with: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    compile_with(9, 6, 7)
    path = tmp_path / "plan.json"
    assert run("--compile", "3", "--json", "-o", str(path)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    data = json.loads(printed.out)
    assert data == json.loads(path.read_text())
    assert data["request"]["compile"] == 3
    assert data["mesh"]["axes"]["fsdp"] == 4
    ranking = data["compiled"]
    assert set(ranking) == {
        "versions", "candidates", "capacity_bytes", "nearest", "seconds", "compiled", "verdict",
    }  # fmt: skip
    assert set(ranking["candidates"][0]) == set(CompiledCandidate.__dataclass_fields__)
    assert [candidate["rank"] for candidate in ranking["candidates"]] == [3, 1, 2]
    # plan.json is complete, and shows its table anywhere.
    assert TrainingPlan.from_json(data).mesh.shape["fsdp"] == 4
    record = read_record(TrainingAnswerDocument, data, "plan", amounts=True)
    assert record.compiled is not None
    assert record.compiled.verdict == ranking["verdict"]
    assert "The best plans, compiled" in [chart.title for chart in document(data).charts]


def test_a_line_on_stderr_for_each_plan(compile_with: Any, capsys: pytest.CaptureFixture[str]) -> None:
    compile_with(9, 6, too_large())
    assert run("--compile", "3") == 0
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    starts = ("plan 1 of 3: data=4", "plan 2 of 3: fsdp=4", "plan 3 of 3: data=2,fsdp=2")
    assert [line.startswith(f"rooftop: {start}") for line, start in zip(lines, starts, strict=True)] == [True] * 3
    assert re.search(r" compiled, [0-9.]+ ms planned \(compiled in ", lines[0])
    assert "too many" in lines[2]
    assert "compiling moved fsdp=4, remat matmuls from 2nd to 1st" in " ".join(shown.out.split())
    assert "fits" in shown.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--compile", "0"], "compile: got '0'"),
        (["--compile", "101"], "compile: got 101; accepted: at most 100"),
        (["--compile", "many"], "compile: got 'many'"),
        (["--compile", "3", "--chips", "4"], "compile: got 3; accepted: this with one slice"),
        (["--compile", "3", "--framework", "maxtext"], "compile: got 3; accepted: this with rooftop's own program"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rooftop: {says}")
    assert error.count("\n") == 1


def test_an_install_without_the_compiler_is_one_line(
    compile_with: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of ``rooftop compile``, before anything is searched."""
    compiler = compile_with(9, 6, 7)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert run("--compile", "3") == 2
    expected = "rooftop: libtpu: got 'not installed'; accepted: a Python that has it, on Linux, for XLA:TPU"
    assert capsys.readouterr().err.startswith(expected)
    assert compiler.asked == []


@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is not None, reason="the extra 'gpu-compile' is installed")
def test_plans_for_gpus_need_their_compiler() -> None:
    with pytest.raises(RooftopError, match=r"rooftop\[gpu-compile\]"):
        planned(3, on="h100:8")


def test_a_request_carries_the_number(compile_with: Any) -> None:
    request = PlanTraining(MODEL, **JOB, compile=3)
    assert request.command()[-2:] == ("--compile", "3")
    assert PlanTraining.from_json(request.to_json()) == request
    compile_with(9, 6, 7)
    assert rooftop.plan_training(request).request == request


def test_the_page_compiles_nothing() -> None:
    """Compilations take minutes: no form has the field, and a page that is opened shows a saved table."""
    from rooftop.ui.explorers import pipeline, training

    assert "compile" not in {control.name for form in (pipeline.FORM, training.FORM) for control in form.controls}


def test_a_plan_that_does_not_fit_is_not_compiled(compile_with: Any) -> None:
    compiler = compile_with(9, 6, 7)
    result = rooftop.plan_training("llama3-70b", on="v5e:2x2", batch_seqs=4, compile=3)
    assert result.compiled is None
    assert compiler.asked == []
    with pytest.raises(Infeasible):
        result.raise_if_infeasible()


# ---------------------------------------------------------------- XLA


@pytest.mark.slow
def test_real_programs_are_ranked_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The chosen plan compiles from the cache, to the time and memory of its row."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = planned(2)
    assert result.compiled is not None
    assert result.compiled.compiled == 2
    times = [candidate.compiled_s for candidate in result.compiled.candidates]
    best = result.compiled.best
    assert best is not None
    assert best.compiled_s is not None
    assert all(seconds is not None and seconds >= best.compiled_s * (1 - 5e-4) for seconds in times)
    for candidate, seconds in itertools.zip_longest(result.compiled.candidates, times):
        assert seconds == pytest.approx(candidate.plan.expected_s, rel=0.2)
    alone = rooftop.compile(result)
    assert alone.cached
    data = json.loads(json.dumps(alone.to_json()))
    assert data["step"]["expected_s"] == pytest.approx(best.compiled_s)
    assert data["peak_bytes"] == best.peak_bytes
    assert compiled(2).compiled == 0
