"""Requests: what a verb takes stands once, and its options, its JSON and its documentation follow."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

import rooftop as library
from rooftop.cli.main import cli
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.hardware import Slice, chip
from rooftop.models import load_model
from rooftop.requests.measuring import BenchCollectives, BenchServing, Matmul, Validate
from rooftop.requests.planning import PlanEmbedding, PlanServing, PlanTraining
from rooftop.requests.programs import CheckProgram, Compile, Explain, Tune
from rooftop.requests.request import NotInWords, Request
from rooftop.requests.serving import Serve
from rooftop.requests.simulating import Simulate
from rooftop.requests.training import Train, TrainEmbedding

REQUESTS: list[type[Request]] = [
    PlanTraining,
    PlanServing,
    PlanEmbedding,
    Simulate,
    Train,
    TrainEmbedding,
    Serve,
    Matmul,
    BenchServing,
    BenchCollectives,
    Validate,
    Compile,
    CheckProgram,
    Tune,
    Explain,
]
EXAMPLES = [
    PlanTraining("llama3-8b", on="v5e:4x4", batch_seqs="1k", mesh={"fsdp": 16}, price=2.5, collective_matmuls=False),
    PlanTraining(load_model("llama3-8b"), on=Slice.parse("v5e:4x4"), batch_tokens="4Mi", weights_dtype="BFloat16"),
    PlanTraining(Path("model/config.json"), on=["v5p", chip("v6e")], tokens="15T", days="60", smallest=True),
    PlanTraining(replace(load_model("llama3-8b"), layers=2), on=chip("v5e").replace(hbm_bytes=8e9)),
    PlanServing(on="v5e,v6e", weights_dtype=["int8", "bfloat16"], ttft="500ms", tpot=0.03, contexts=["2k", 8192]),
    PlanEmbedding("tables.toml", on="v5p:2x2x1", dense_flops="30M"),
    Matmul("A[I_X, J]", mesh={"X": 2}, figures={"hop_s": 2e-6}, bidirectional=False, simulate=True, top="all"),
    BenchServing("http://127.0.0.1:8000", concurrency=4, ignore_eos=False),
    Validate(only="v5p", timeout="10m"),
    BenchCollectives(mesh={"X": 2}, axis=["X"], sizes=[1024, "1Mi"]),
    Compile(Path("plan.json"), calibration="v5e.json", timeout=90, cache=False, save=True),
    Compile(["python", "train.py", "--layers", "2"], on="v5e:2x2", steps=0, min_flops="1G"),
    CheckProgram(
        "mine:step", on="v5e:4x4", args=["bf16[8_X]"], mesh={"X": 16}, against="l.json", max_time="+2%", fail_on=0.5
    ),
    CheckProgram("module.hlo", on=chip("v5e"), tokens="64Ki"),
    Tune("mine:step", vary={"block": "512,1024", "remat": [True, False]}, compiler_options={"xla_x": True, "y": 3}),
    Tune("plan.json", search=["remat", "mesh"], layers="all", minutes=0.5),
    Explain("run1", plan="plan.json", hlo=[Path("a.hlo"), "b.hlo"], mesh="X=4"),
    Explain(op=["%a = f32[] parameter(0)"], on="v5p", figures={"hop_s": 2e-6}),
    Train(run="runs/first", data=("a.txt", Path("b.txt")), steps=100, model="llama:2M", mesh={"fsdp": 2}),
    TrainEmbedding(tables="tables.toml", data="day0.tsv", run="runs/first", profile=(2, 3)),
    Serve(Path("model"), batch_seqs=8, cors=("a", "b"), drain_s=60.0),
    Simulate("plan.json", requests_per_second=2, prompt="128:1024", duration="1h", prefix_cache=True),
]


@pytest.mark.parametrize("kind", REQUESTS)
def test_each_field_has_a_docstring_and_a_group(kind: type[Request]) -> None:
    for setting in kind.settings():
        assert setting.about.endswith((".", "]")), setting.name
        assert setting.word.group or setting.is_argument, setting.name


@pytest.mark.parametrize("request_", EXAMPLES)
def test_json_is_read_back(request_: Request) -> None:
    data = json.loads(json.dumps(request_.to_json()))
    again = type(request_).from_json(data)
    assert again.to_json() == data
    assert data["verb"] == request_.verb


@pytest.mark.parametrize("request_", EXAMPLES)
def test_a_request_has_the_command_line_that_asks_the_same(
    request_: Request, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parsed again, it is the request: of flags, lists, options of XLA and scripts too. Objects have no command."""
    monkeypatch.chdir(tmp_path)
    try:
        words = request_.command()
    except NotInWords:
        assert any(isinstance(value, dict) for value in request_.to_json().values())
        return
    assert words[0] == "rooftop"
    command, context = cli, click.Context(cli)
    rest = list(words[1:])
    while isinstance(command, click.Group):
        child = command.get_command(context, rest.pop(0))
        assert child is not None
        command, context = child, click.Context(child, parent=context)
    kind = type(request_)
    parsed = command.make_context(words[1], rest, parent=context.parent).params
    typed = {setting.name: parsed[setting.name] for setting in kind.settings() if setting.word.typed}
    again = kind(**typed).to_json()
    assert again == {name: value for name, value in request_.to_json().items() if name != "save"}


def test_values_are_written_in_one_way() -> None:
    assert EXAMPLES[0].to_json() == {
        "verb": "plan train", "model": "llama3-8b", "on": "v5e:4x4", "batch_seqs": 1000, "mesh": "fsdp=16",
        "price": "2.5", "collective_matmuls": False,
    }  # fmt: skip
    assert EXAMPLES[1].to_json() == {
        "verb": "plan train", "model": "llama3-8b", "on": "v5e:4x4", "batch_tokens": 4 * 2**20,
        "weights_dtype": "bf16",
    }  # fmt: skip
    assert EXAMPLES[2].to_json()["on"] == "v5p,v6e"


def test_secrets_are_not_written() -> None:
    request = Serve(Path("model"), api_keys=("secret",), link_key="secret")
    assert "secret" not in json.dumps(request.to_json())
    assert "secret" not in repr(request)


def test_the_answer_to_a_request_in_json_is_the_same() -> None:
    small = replace(load_model("llama3-8b"), layers=2)
    mine = chip("v5e").replace(hbm_bytes=8e9, hbm_usable_bytes=8e9)
    asked = PlanTraining(small, on=Slice(mine, (2, 2)), batch_seqs=8)
    answer = library.plan_training(asked).to_json()
    again = PlanTraining.from_json(json.loads(json.dumps(answer)))
    assert json.dumps(library.plan_training(again).to_json()) == json.dumps(answer)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"verb": "plan serve"}, "request: got 'a request for plan serve'; accepted: one for plan train"),
        ({"on": "v5e:4x4", "model": "m", "batches": 3}, "request: got 'batches'; accepted: did you mean microbatches"),
        ({"on": "v5e:4x4"}, "model: got nothing; accepted: A preset"),
        ({"request": 3}, "request: got 3; accepted: an object"),
    ],
)
def test_a_wrong_request_is_one_line(data: dict[str, Any], line: str) -> None:
    with pytest.raises(RooftopError) as caught:
        PlanTraining.from_json(data)
    assert str(caught.value).startswith(line)


ROOT = Path(__file__).parents[1]
HLO = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[]) -> f32[] {
  ROOT %x = f32[] parameter(0)
}
"""
#: What a field of JSON may be by mistake.
SPOILED = (True, -1, 0, 1e300, [], ["x"], {}, {"a": 1}, "x", "", math.nan, 3.5)


@pytest.fixture(scope="module")
def smallest(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[type[Request], dict[str, Any], Callable[[Any], Any]]]:
    """A small request a verb, as JSON, its class and its function."""
    path = tmp_path_factory.mktemp("module") / "step.hlo"
    path.write_text(HLO)
    module = str(path)
    serving: dict[str, Any] = {"model": "llama3-8b", "on": "v5e:2x2", "prompt": 256, "generate": 32, "batch_seqs": 4}
    plan = library.plan_serving(PlanServing.from_json(serving)).to_json()
    product = {"expression": "A[I_X, J] * B[J, K] -> C[I_X, K]", "mesh": "X=4", "dims": "I=64,J=64,K=64"}
    return {
        "plan train": (
            PlanTraining, {"model": "llama3-8b", "on": "v5e:2x2", "batch_seqs": 4, "seq": 1024}, library.plan_training
        ),
        "plan serve": (PlanServing, serving, library.plan_serving),
        "simulate": (Simulate, {"plan": plan, "requests_per_second": 1, "duration": 5}, library.simulate),
        "matmul": (Matmul, {**product, "on": "v5e:2x2"}, library.matmul),
        # A module, which needs no compiler; of the verbs that need one, what they refuse.
        "check": (CheckProgram, {"program": module, "on": "v5e:1x1"}, library.check),
        "explain": (Explain, {"path": module, "on": "v5e:1x1"}, library.explain),
        "compile": (Compile, {"program": "nowhere.json"}, library.compile),
        "tune": (Tune, {"program": "nowhere.json"}, library.tune),
        "bench collectives": (BenchCollectives, {"axis": "Z", "mesh": "X=2"}, library.bench_collectives),
        "plan embed": (
            PlanEmbedding, {"tables": str(ROOT / "docs" / "tables.toml"), "on": "v5p:2x2x1", "batch_samples": 1024},
            library.plan_embedding,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("verb", ["plan train", "plan serve", "simulate", "matmul", "plan embed", "check", "explain"])
def test_a_spoiled_field_is_one_line(
    smallest: dict[str, tuple[type[Request], dict[str, Any], Callable[[Any], Any]]], verb: str
) -> None:
    kind, fields, ask = smallest[verb]
    answer = ask(kind.from_json(fields)).to_json()
    assert kind.from_json(answer).to_json() == kind.from_json(fields).to_json()
    refuse_spoiled(kind, fields, ask)


@pytest.mark.parametrize("verb", ["compile", "tune", "bench collectives"])
def test_a_spoiled_field_of_what_is_refused_is_one_line(
    smallest: dict[str, tuple[type[Request], dict[str, Any], Callable[[Any], Any]]], verb: str
) -> None:
    refuse_spoiled(*smallest[verb])


def refuse_spoiled(kind: type[Request], fields: dict[str, Any], ask: Callable[[Any], Any]) -> None:
    """Ask with each field spoiled: an answer, or one line."""
    refused = 0
    for setting in kind.settings():
        # These two start a compiler and programs.
        for value in SPOILED if (kind, setting.name) not in ((Matmul, "compile"), (Matmul, "measure")) else ():
            try:
                ask(kind.from_json({**fields, setting.name: value})).to_json()
            except (RooftopError, Infeasible) as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 5 * len(kind.settings())


def test_objects_of_a_process_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "step.hlo"
    path.write_text(HLO)
    module = library.explain_module(path, on="v5e:1x1")
    asked = CheckProgram(module, tokens=4)
    answer = library.check(asked)
    assert answer.request is asked
    assert "request" not in answer.to_json()
    line = "program: got 'CompileResult'; accepted: a plan, 'module:function', a path or a script's words; an object of"
    with pytest.raises(RooftopError) as caught:
        asked.write(tmp_path / "request.json")
    assert str(caught.value).startswith(line)
    assert Compile("mine:step", args=[{"w": 1}]).in_answer() == Compile(print).in_answer() == {}
    with pytest.raises(RooftopError, match="args: got 'dict'; accepted: arrays as texts"):
        Compile("mine:step", args=[{"w": 1}]).to_json()  # type: ignore[list-item]
    plan = library.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=16)
    assert Compile(plan).to_json()["program"] == plan.plan.to_json()


def test_the_words_of_a_script_are_its_program(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    saved = tmp_path / "request.json"
    command = ("compile", "--on", "v5e:2x2", "--steps", "0", "--save-request", str(saved), "--", "python", "nowhere.py")
    refused = rooftop(*command)
    assert refused.err.startswith("rooftop: script: got 'nowhere.py'; accepted: a Python file that exists")
    request = {"verb": "compile", "program": ["python", "nowhere.py"], "on": "v5e:2x2", "steps": 0}
    assert json.loads(saved.read_text()) == request
    again = rooftop("compile", "--request", str(saved))
    assert (again.status, again.err) == (refused.status, refused.err)
    other = rooftop("check", "--request", str(saved))
    assert other.err.startswith("rooftop: request: got 'a request for compile'; accepted: one for check")


def test_inspect_takes_the_fields_of_a_function(tmp_path: Path) -> None:
    """A function of this process has arguments and keywords of its own: the fields stand in the signature."""
    own = {"function", "arguments", "keywords", "on_progress"}
    taken = {
        name: parameter.default
        for name, parameter in inspect.signature(library.inspect).parameters.items()
        if name not in own
    }
    not_of_functions = {"program", "args", "steps", "min_flops", "calibration", "check"}
    fields = {setting.name: setting.default for setting in Compile.settings() if setting.name not in not_of_functions}
    assert taken == fields


def test_a_function_takes_a_request_or_its_fields() -> None:
    asked = PlanTraining("llama3-8b", on="v5e:4x4", batch_seqs=16)
    seen: list[tuple[int, int, str]] = []
    answers = [
        library.plan_training(asked, on_progress=lambda *progress: seen.append(progress)),
        library.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=16),
        library.plan_training(**{"model": "llama3-8b", "on": "v5e:4x4", "batch_seqs": 16}),
    ]
    assert len({json.dumps(answer.to_json()) for answer in answers}) == 1
    assert seen
    with pytest.raises(RooftopError, match="one of the two"):
        library.plan_training(asked, batch_seqs=8)  # type: ignore[call-overload]
    assert "Args:\n    model: A preset" in (library.plan_training.__doc__ or "")


def test_a_file_gives_the_request_and_options_change_it(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    request, plan = tmp_path / "request.json", tmp_path / "plan.json"
    command = ("plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "16", "--remat", "block")
    asked = rooftop(*command, "--save-request", str(request), "-o", str(plan), "--json").json
    assert json.loads(request.read_text()) == asked["request"]
    assert asked["request"]["remat"] == "block"
    for file in (request, plan):
        assert rooftop("plan", "train", "--request", str(file), "--json").json == asked
    changed = rooftop("plan", "train", "--request", str(plan), "--batch-seqs", "32", "--json").json
    assert changed["request"] == asked["request"] | {"batch_seqs": 32}
    other = rooftop("plan", "train", "llama3.2-1b", "--request", str(plan), "--json").json
    assert other["model"]["name"] == "llama3.2-1b"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("plan", "train"), "model: got nothing"),
        (("plan", "train", "--request", "none.json"), "request: got 'none.json'"),
        (("plan", "serve", "--request", "train.json"), "request: got 'a request for plan train'; accepted: one for"),
    ],
)
def test_a_wrong_file_is_one_line(
    rooftop: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    PlanTraining("llama3-8b", on="v5e:4x4").write("train.json")
    answer = rooftop(*arguments)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"rooftop: {line}")
    assert answer.err.count("\n") == 1
