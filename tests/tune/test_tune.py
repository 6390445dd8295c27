"""The search of ``rooftop tune``: its order, its budget, its file, and what becomes of equal schedules and refusals."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import rooftop
from rooftop.arrays import Mesh
from rooftop.cli.main import main
from rooftop.compiler.compiling import Compiled, Progress
from rooftop.compiler.hlo.fingerprint import fingerprint
from rooftop.compiler.memory import OutOfMemory
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.records import read_record
from rooftop.hardware import Slice
from rooftop.library.programs.tuning import TuneResult
from rooftop.plan.training.plan import TrainingPlan
from rooftop.requests.inputs import training_plan_of
from rooftop.requests.programs import settings_of
from rooftop.tune import compilations
from rooftop.tune import factors as factors_module
from rooftop.tune.factors import (
    SEARCHED,
    Factor,
    changed_plan,
    few_layers,
    option_factors,
    plan_factors,
    plan_uses,
)
from rooftop.tune.records import RankedTrial, Trial
from rooftop.tune.report import TuneReport
from rooftop.tune.search import Search, Searched, SearchLimits
from rooftop.tune.subjects import option_lines
from rooftop.tune.trials import TrialFile, trial_key
from tests.support.hlo_modules import dot, module_text

SLICE = Slice.parse("v5e:2x2")
VERSIONS = {"jax": "1", "jaxlib": "1", "libtpu": "1"}
#: Dots of the baseline.
DOTS = 6


def program(dots: int, name: str = "d") -> str:
    """A module of so many matmuls, one after the other."""
    return module_text([dot(f"{name}{at}", f"{name}{at - 1}" if at else "x") for at in range(dots)])


@dataclass
class FakeSubject:
    """A program with ``saves[FACTOR]`` fewer matmuls for each factor; an exception in its place is raised.

    A compilation takes ``takes_s`` of the clock.
    """

    saves: Mapping[str, int | Exception]
    takes_s: float = 1.0
    baseline: int | Exception = DOTS
    slice: Slice = SLICE
    name: str = "fake"
    identity: Mapping[str, Any] = field(default_factory=lambda: {"fake": 1})
    asked: list[tuple[str, ...]] = field(default_factory=list)
    now: float = 0.0
    layers: int | None = None
    on_compile: Callable[[int], None] = lambda count: None

    def clock(self) -> float:
        return self.now

    def factors(self, searched: Sequence[str] = ()) -> tuple[Factor, ...]:
        return tuple(Factor(knob=name[0], name=name, options={name: True}) for name in self.saves)

    def compile(self, factors: Sequence[Factor], *, layers: int | None, cache: bool, on_progress: Progress) -> Compiled:
        names = tuple(factor.name for factor in factors)
        self.asked.append(names)
        self.on_compile(len(self.asked))
        self.now += self.takes_s if layers is None else self.takes_s / 10
        on_progress("compiling", self.takes_s)
        saved = 0
        for outcome in (self.baseline, *(self.saves[name] for name in names)):
            if isinstance(outcome, Exception):
                raise outcome
            saved += outcome if outcome is not self.baseline else 0
        dots = (self.baseline if isinstance(self.baseline, int) else DOTS) - saved
        return Compiled(
            mesh=Mesh.lay(SLICE, {"X": 4}),
            hlo_text=program(dots, name="n" + "x".join(names)),
            peak_bytes=100 * dots,
            memory={},
            lower_s=0.0,
            compile_s=self.takes_s,
            versions=VERSIONS,
        )

    def fewest_layers(self) -> int | None:
        return self.layers

    def lines(self, factors: Sequence[Factor]) -> tuple[str, ...]:
        return option_lines({factor.name: True for factor in factors}, self.slice)


def searched(subject: FakeSubject, path: Path, seconds: float = 1e6, **changes: Any) -> tuple[Searched, TrialFile]:
    file = TrialFile(path, subject.identity)
    limits = SearchLimits(seconds=seconds, **changes)
    return Search(subject, subject.factors(), file, limits, clock=subject.clock).run(), file


def reported(subject: FakeSubject, path: Path, **changes: Any) -> TuneReport:
    result, file = searched(subject, path, **changes)
    return TuneReport(subject=subject, searched=result, file=file, estimates="rooftop", versions=VERSIONS, cpu_s=0.0)


def test_factors_that_gain_are_joined_and_others_left_out(tmp_path: Path) -> None:
    subject = FakeSubject({"slow": -1, "good": 1, "best": 2, "same": 0})
    result, _ = searched(subject, tmp_path / "t.jsonl")
    assert result.best.factors == ("best", "good")
    assert subject.asked == [(), ("slow",), ("good",), ("best",), ("same",), ("best", "good")]
    assert result.baseline.expected_s is not None
    assert result.best.expected_s == pytest.approx(result.baseline.expected_s * (DOTS - 3) / DOTS)
    assert not result.out_of_time


def test_of_a_knob_one_factor_is_set(tmp_path: Path) -> None:
    """Factors of the knob 'a' exclude one another: the better one is not joined by the other."""
    subject = FakeSubject({"a1": 1, "a2": 3, "b": 2})
    result, _ = searched(subject, tmp_path / "t.jsonl")
    assert result.best.factors == ("a2", "b")
    assert ("a2", "a1") not in subject.asked


def test_equal_schedules_are_not_priced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    priced = []
    timeline = compilations.timeline
    monkeypatch.setattr(compilations, "timeline", lambda *a, **k: (priced.append(1), timeline(*a, **k))[1])
    report = reported(FakeSubject({"one": 1, "two": 1, "none": 0}), tmp_path / "t.jsonl")
    ends = {entry.trial.title: entry.trial.end for entry in report.trials}
    assert ends == {"baseline": "priced", "one": "priced", "two": "same_schedule", "none": "same_schedule"}
    assert len(priced) == 2
    assert report.schedules == 2
    # "two" does what "one" does: they are not joined.
    assert report.searched.best.factors == ("one",)
    whys = {entry.trial.title: entry.why for entry in report.trials}
    assert whys["two"] == "faster; the schedule of one"
    assert whys["none"] == "the schedule of the baseline"


def test_a_refused_option_is_reported(tmp_path: Path) -> None:
    refused = RooftopError("program", "p", "one that XLA compiles (No such compile option: 'bad')")
    large = OutOfMemory("p", needed_bytes=32e9, available_bytes=16e9)
    report = reported(FakeSubject({"bad": refused, "large": large, "good": 1}), tmp_path / "t.jsonl")
    by_name = {entry.trial.title: entry for entry in report.trials}
    assert by_name["bad"].rank is None
    assert by_name["bad"].why == "refused: No such compile option: 'bad'"
    assert by_name["large"].trial.end == "too_large"
    assert by_name["good"].rank == 1
    assert report.record().refused == 2


def test_a_refused_baseline_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RooftopError, match="nonsense"):
        searched(FakeSubject({"good": 1}, baseline=RooftopError("program", "p", "nonsense")), tmp_path / "t.jsonl")


def test_a_baseline_that_does_not_fit_takes_what_does(tmp_path: Path) -> None:
    @dataclass
    class Large(FakeSubject):
        def compile(self, factors: Sequence[Factor], **rest: Any) -> Compiled:
            compiled = super().compile(factors, **rest)
            if compiled.peak_bytes > 100 * (DOTS - 2):
                raise OutOfMemory("p", needed_bytes=compiled.peak_bytes, available_bytes=100 * (DOTS - 2))
            return compiled

    report = reported(Large({"little": 1, "much": 3}), tmp_path / "t.jsonl")
    assert report.searched.best.factors == ("much",)
    assert "the baseline does not" in report.verdict
    assert report.difference is None
    with pytest.raises(Infeasible, match="nothing that was tried does"):
        searched(Large({"little": 1}), tmp_path / "u.jsonl")


def test_the_time_of_the_search_holds(tmp_path: Path) -> None:
    """Of factors that take 1 s each, 7 s of 10 s are for the first ones; joins take what is left."""
    subject = FakeSubject({letter: {"b": 2, "c": 1}.get(letter, 0) for letter in "abcdefghijklmnopq"})
    result, file = searched(subject, tmp_path / "t.jsonl", seconds=10)
    assert subject.now <= 10
    assert ("b", "c") in subject.asked
    assert result.best.factors == ("b", "c")
    assert result.out_of_time
    # The same search goes on: nothing is compiled twice, except the baseline, which earlier trials must agree with.
    before = list(subject.asked)
    subject.asked.clear()
    subject.now = 0.0
    again, _ = searched(subject, tmp_path / "t.jsonl", seconds=1e6)
    assert subject.asked[0] == ()
    assert not set(subject.asked[1:]) & set(before)
    assert not again.out_of_time
    assert len(TrialFile(file.path, subject.identity).trials) == 1 + 17 + 1


def test_a_compilation_that_outlasts_the_search_is_given_up(tmp_path: Path) -> None:
    subject = FakeSubject({"a": 1, "b": 1})
    subject.on_compile = lambda count: setattr(subject, "now", subject.now + (100 if count == 3 else 0))
    result, file = searched(subject, tmp_path / "t.jsonl", seconds=20)
    assert [trial.factors for trial in file.trials] == [(), ("a",)]
    assert result.best.factors == ("a",)


class _Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", range(2, 7))
def test_a_killed_search_goes_on(tmp_path: Path, at: int) -> None:
    """Killed at any compilation, it ends with the trials of a search that was not, and compiles none twice."""
    saves: dict[str, int | Exception] = {"a": 1, "b": 2, "c": 0, "d": -1}
    whole, _ = searched(FakeSubject(saves), tmp_path / "whole.jsonl")

    def kill(count: int) -> None:
        if count == at:
            raise _Killed

    first = FakeSubject(saves, on_compile=kill)
    with pytest.raises(_Killed):
        searched(first, tmp_path / "t.jsonl")
    second = FakeSubject(saves)
    result, file = searched(second, tmp_path / "t.jsonl")
    assert result.best == whole.best
    assert not set(second.asked[1:]) & set(first.asked[: at - 1])
    assert {trial.factors for trial in file.trials} == {(), ("a",), ("b",), ("c",), ("d",), ("b", "a")}


def test_a_cut_line_is_compiled_again(tmp_path: Path) -> None:
    path, subject = tmp_path / "t.jsonl", FakeSubject({"a": 1, "b": 2})
    searched(subject, path)
    data = path.read_bytes()
    for cut in (1, 40, len(data) // 2):
        path.write_bytes(data[:-cut])
        _, file = searched(FakeSubject({"a": 1, "b": 2}), path)
        assert len(file.trials) == 4
        assert len(path.read_text(encoding="utf-8").splitlines()) == 5


def test_trials_of_another_program_are_dropped(tmp_path: Path) -> None:
    """Where the same request compiles to another baseline. A file of another request is refused, unless asked."""
    path = tmp_path / "t.jsonl"
    searched(FakeSubject({"a": 1}), path)
    newer = FakeSubject({"a": 1}, baseline=DOTS + 1)
    result, _ = searched(newer, path)
    assert newer.asked == [(), ("a",)]
    assert result.best.peak_bytes == 100 * DOTS
    with pytest.raises(RooftopError, match="--fresh"):
        TrialFile(path, {"fake": 2})
    assert TrialFile(path, {"fake": 2}, fresh=True).trials == ()
    same = FakeSubject({"a": 1}, baseline=DOTS + 1)
    searched(same, path)
    assert same.asked == [()]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(RooftopError, match="results: got"):
        TrialFile(path, {})
    assert path.read_text() == "my notes\n"


def test_proxies_where_the_whole_takes_too_long(tmp_path: Path) -> None:
    """A compilation of 10 s and 60 s of time: trials have one layer, and the best is compiled whole at the end."""
    subject = FakeSubject({letter: 1 if letter == "b" else 0 for letter in "abcdef"}, takes_s=10, layers=1)
    result, file = searched(subject, tmp_path / "t.jsonl", seconds=60)
    assert result.layers == 1
    assert result.whole is not None
    assert [trial.layers for trial in result.whole] == [None, None]
    assert result.whole[1].factors == ("b",)
    assert sum(trial.layers == 1 for trial in file.trials) == 7
    # With time for all of them, there are none.
    subject = FakeSubject({letter: 0 for letter in "abcdef"}, takes_s=10, layers=1)
    assert searched(subject, tmp_path / "u.jsonl", seconds=1000)[0].layers is None
    assert searched(subject, tmp_path / "v.jsonl", seconds=60, layers=0)[0].layers is None


def test_several_compilations_at_a_time_find_the_same(tmp_path: Path) -> None:
    saves: dict[str, int | Exception] = {"a": 1, "b": 3, "c": 0, "d": 2, "e": -1}
    one, _ = searched(FakeSubject(saves, baseline=9), tmp_path / "one.jsonl")
    three, _ = searched(FakeSubject(saves, baseline=9), tmp_path / "three.jsonl", jobs=3)
    assert one.best.expected_s == three.best.expected_s
    assert set(one.best.factors) == set(three.best.factors) == {"a", "b", "d"}


def test_the_answer_names_what_changed(tmp_path: Path) -> None:
    report = reported(FakeSubject({"good": 2}), tmp_path / "t.jsonl")
    data = report.to_json()
    assert read_record(RankedTrial, json.loads(json.dumps(data["trials"][0])), "trial") == report.trials[0]
    saved = data["baseline"]["expected_s"] - data["best"]["expected_s"]
    assert data["gain_s"] == pytest.approx(saved)
    assert data["gain_bytes"] == 200
    assert sum(change["change_s"] for change in data["difference"]["changes"]) == pytest.approx(-saved)
    assert data["lines"] == [
        'LIBTPU_INIT_ARGS="--good=true"',
        "jax.jit(step, compiler_options={'good': True})",
    ]
    result = TuneResult(report=report)
    assert result.compiler_options == {"good": True}
    assert "good: " in repr(result)
    assert "LIBTPU_INIT_ARGS" in result._repr_html_()
    assert [row["trial.factors"] for row in result.rows] == ["good", ""]


# ---------------------------------------------------------------- fingerprints


def test_a_fingerprint_knows_no_names_but_every_operation() -> None:
    text = program(3)
    assert fingerprint(text) == fingerprint(program(3, name="other"))
    assert fingerprint(text) != fingerprint(program(4))
    named = text.replace("backend_config", 'metadata={op_name="a}\\"{b" source_line=3}, backend_config')
    assert named != text
    assert fingerprint(named) == fingerprint(text)
    tables = text.replace("\n\n", '\n\nFileNames\n1 "a.py"\n\nStackFrames\n1 {file_location_id=1}\n\n', 1)
    assert fingerprint(tables) == fingerprint(text)


def test_a_fingerprint_has_the_order() -> None:
    one = module_text([dot("a", "x"), dot("b", "w"), "c = bf16[512,512] add(%a, %b)"])
    two = module_text([dot("b", "w"), dot("a", "x"), "c = bf16[512,512] add(%a, %b)"])
    assert fingerprint(one) != fingerprint(two)


# ---------------------------------------------------------------- factors


def plan(text: str, on: str, mesh: str, batch: int, seq: int = 2048) -> TrainingPlan:
    written = rooftop.plan_training(text, on=on, batch_seqs=batch, seq=seq, mesh=mesh).plan
    return training_plan_of(json.loads(json.dumps(written.to_json())))


def test_every_option_has_a_source() -> None:
    text = (Path(factors_module.__file__).parent / "options.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["option"]
    assert len({entry["name"] for entry in entries}) == len(entries)
    for entry in entries:
        assert set(entry) <= {"name", "knob", "set", "chips", "where", "recipes", "sources"}
        assert all(source.startswith(("MaxText ", "tpu-recipes ")) for source in entry["sources"])
        assert entry["sources"]
        assert set(entry.get("recipes", ())) <= set(entry.get("chips", entry.get("recipes", ())))
        assert set(entry.get("where", ())) <= {"gather", "tensor", "expert", "slices", "offload"}
        assert all(name.startswith("xla_") for name in entry["set"])


def test_options_are_those_that_matter_to_a_plan() -> None:
    dense = plan("llama:20M", "v5p:2x2x1", "fsdp=4", 16)
    names = {factor.name for factor in option_factors(dense.problem.slice, plan_uses(dense))}
    assert "async collective fusion of gathers" in names
    assert not names & {"async all-to-alls", "native bf16", "collective matmuls of XLA from 0 MiB on"}
    assert option_factors(Slice.parse("h100:8x1")) == ()
    assert len(option_factors(Slice.parse("v5p:2x2x1"))) > len(names)


def test_changes_of_a_plan_run_and_fit() -> None:
    tensor = plan("llama:50M", "v6e:2x4", "fsdp=2,tensor=4", 32)
    kinds = {kind: plan_factors(tensor, kind) for kind in SEARCHED if kind != "options"}
    assert plan_factors(tensor, "options") == option_factors(tensor.problem.slice, plan_uses(tensor))
    for own in kinds.values():
        times = []
        for factor in own:
            other = changed_plan(tensor, factor.change)
            assert other.obstacles == []
            assert other.fits
            times.append(other.expected_s)
            assert other.expected_s <= 1.15 * tensor.expected_s
            assert (other.mesh, other.choice, other.problem) != (tensor.mesh, tensor.choice, tensor.problem)
        assert times == sorted(times)
    assert kinds["remat"]
    assert kinds["mesh"]
    assert [factor.change for factor in kinds["switches"]] == [{"collective_matmuls": True}]
    with pytest.raises(RooftopError, match="change"):
        changed_plan(tensor, {"colour": "red"})


def test_few_layers_have_one_of_every_kind() -> None:
    dense = plan("llama:50M", "v6e:2x4", "fsdp=2,tensor=4", 32)
    assert few_layers(dense).problem.model.layers == 2
    assert few_layers(dense, 3).problem.model.layers == 3
    gemma = plan("gemma3-4b", "v5p:2x2x1", "fsdp=4", 8)
    short = few_layers(gemma).problem.model
    assert set(short.windows) == set(gemma.problem.model.windows)
    assert short.layers < 18
    stages = plan("llama:50M", "v6e:2x4", "stage=2,fsdp=4", 32)
    assert few_layers(stages).problem.model.layers == 4
    with pytest.raises(RooftopError, match="layers"):
        few_layers(dense, 1000)


def test_keys_are_those_of_what_is_set() -> None:
    one = Factor(knob="a", name="one", options={"x": 1, "y": 2})
    renamed = Factor(knob="a", name="renamed", options={"y": 2, "x": 1})
    assert trial_key((one,), None) == trial_key((renamed,), None)
    assert trial_key((one,), None) != trial_key((one,), 1)
    assert trial_key((), None) != trial_key((one,), None)


def test_settings_are_numbers_words_and_truths() -> None:
    assert settings_of({"a": "1,2.5,true,full"}) == {"a": (1, 2.5, True, "full")}
    for wrong in ({"a": "1"}, {"a": "1,1"}, {"1a": "1,2"}):
        with pytest.raises(RooftopError, match="vary"):
            settings_of(wrong)


# ---------------------------------------------------------------- the verb


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "program: got nothing"),
        (["plan.txt"], "program: got 'plan.txt'"),
        (["missing.json"], "plan: got 'missing.json'"),
        (["m:f", "--save", "x.json"], "save: got 'x.json'"),
        (["m:f"], "on: got nothing"),
        (["m:f", "--on", "v5e:2x2", "--vary", "a"], "vary: got 'a'"),
        (["m:f", "--on", "v5e:2x2", "--layers", "1"], "layers: got '1'"),
        (["m:f", "--on", "v5e:2x2", "--search", "colour"], "search: got 'colour'"),
        (["--on", "v5e:2x2", "--vary", "a=1,2", "--", "python", "-c", "1"], "vary: got 'a'"),
        (["m:f", "--on", "v5e:2x2", "--", "python", "-c", "1"], "program: got 'm:f'"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["tune", *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rooftop: {says}")
    assert error.count("\n") == 1


def trial_of(data: Mapping[str, Any], name: str) -> Trial:
    return read_record(
        Trial, next(entry["trial"] for entry in data["trials"] if entry["trial"]["factors"] == [name]), "trial"
    )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the extra 'compile' is not installed")
def test_a_function_is_tuned_with_real_compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that halves the work is found, options are tried, and the same search compiles nothing again."""
    (tmp_path / "tuned_step.py").write_text(
        "import jax\n"
        "def step(x, w, parts=2):\n"
        "    for _ in range(parts):\n"
        "        x = jax.nn.relu(x @ w)\n"
        "    return x\n"
    )
    monkeypatch.chdir(tmp_path)
    names = ("scoped VMEM 98304 KiB", "layouts for reduce-scatters")
    some = tuple(entry for entry in factors_module._option_table() if entry["name"] in names)
    monkeypatch.setattr(factors_module, "_option_table", lambda: some)
    arguments: dict[str, Any] = {
        "on": "v5e:2x2",
        "mesh": "X=4",
        "auto": True,
        "vary": {"parts": [2, 1]},
        "results": tmp_path / "results.jsonl",
        "minutes": 30,
    }
    arrays = ("bf16[4096_X, 4096]", "bf16[4096_X, 4096]")
    result = rooftop.tune("tuned_step:step", args=arrays, **arguments)
    data = result.to_json()
    baseline = read_record(Trial, json.loads(json.dumps(data["baseline"])), "trial")
    fewer = trial_of(json.loads(json.dumps(data)), "parts=1")
    assert fewer.expected_s is not None
    assert baseline.expected_s is not None
    assert fewer.expected_s < 0.75 * baseline.expected_s
    assert "parts=1" in result.report.searched.best.factors
    assert "tuned_step:step(..., parts=1)" in result.lines
    # A change of VMEM is another schedule; an option that the program has no use for is the same one.
    assert trial_of(json.loads(json.dumps(data)), "scoped VMEM 98304 KiB").schedule != baseline.schedule
    assert trial_of(json.loads(json.dumps(data)), "layouts for reduce-scatters").end == "same_schedule"
    again = rooftop.tune("tuned_step:step", args=arrays, **arguments)
    assert again.report.searched.compiled == 1
    assert [entry.trial for entry in again.report.trials] == [entry.trial for entry in result.report.trials]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the extra 'compile' is not installed")
def test_a_script_is_tuned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting in its words is varied, and options reach the compiler though the script does not know of them."""
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "import jax, jax.numpy as jnp\n"
        "n = int(sys.argv[1])\n"
        "w = jnp.ones((n, 4096), jnp.bfloat16)\n"
        "x = jnp.ones((4096, n), jnp.bfloat16)\n"
        "jax.jit(lambda x, w: x @ w)(x, w)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["python", "train.py", "{rows}"]
    results = tmp_path / "results.jsonl"
    result = rooftop.tune(words, on="v5e:2x2", vary={"rows": "8192,4096"}, search="remat", results=results, minutes=30)
    assert result.report.searched.best.factors == ("rows=4096",)
    assert result.lines == ("python train.py 4096",)
    factor = Factor(knob="vmem", name="vmem", options={"xla_tpu_scoped_vmem_limit_kib": 98304})
    compiled = result.report.subject.compile((factor,), layers=None, cache=False, on_progress=lambda *_: None)
    assert compiled.options["xla_tpu_scoped_vmem_limit_kib"] == 98304
    unknown = Factor(knob="no", name="no", options={"xla_tpu_no_such_option": True})
    with pytest.raises(RooftopError, match="No such compile option"):
        result.report.subject.compile((unknown,), layers=None, cache=False, on_progress=lambda *_: None)
