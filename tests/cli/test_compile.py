"""``rooftop compile`` as people type it: a plan beside its program, any JAX function, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jsonschema
import pytest

from rooftop.cli.main import main
from rooftop.core.ledger import Row
from rooftop.core.records import schema
from rooftop.explain.compiled.report import CompiledRecord, RefusedRecord
from rooftop.explain.compiled.training import Refusal, compile_plan
from rooftop.explain.measured.report import explain
from rooftop.hardware import Slice
from rooftop.models import MoE, load_model
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from tests.support import faces

Run = Callable[..., Any]
TOY = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1024,
    "max_position_embeddings": 1024,
}  # fmt: skip
FUNCTION = (
    "step:product", "--args", "bf16[8192_X, D]", "bf16[D_X, F_Y]", "--dims", "D=4096,F=16Ki", "--mesh", "X=4,Y=4",
    "--on", "v5e:4x4",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the commands run: a model, a module of the user's, and a cache of compiled programs of their own."""
    folder = tmp_path_factory.mktemp("compile")
    (folder / "config.json").write_text(json.dumps(TOY))
    (folder / "step.py").write_text(
        "import jax.numpy as jnp\n\n\ndef product(x, w):\n    return jnp.einsum('bd,df->bf', x, w)\n\n\nnumber = 3\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def make_plan(name: str, *options: str) -> None:
    """Write a plan of the toy on v5e:2x2, both axes of two devices, unless options say otherwise."""
    job = ["plan", "train", "config.json", "--on", "v5e:2x2", "--batch-seqs", "2", "--seq", "512", "--remat", "block"]
    with pytest.raises(SystemExit):
        main([*job, *(options or ("--mesh", "fsdp=2,tensor=2")), "-o", name, "--json"])


def test_a_plan_and_its_program_side_by_side(rooftop: Run, folder: Path) -> None:
    make_plan("plan.json")
    answer = rooftop("compile", "plan.json", "--json", "-o", "report.json")
    assert (answer.status, answer.err) == (0, "")
    data = answer.json
    jsonschema.validate(data, schema(CompiledRecord))
    jsonschema.validate(data["ledger"], schema(tuple[Row, ...]))
    assert json.loads((folder / "report.json").read_text()) == data
    checks = {check["name"]: check for check in data["checks"]}
    for name in ("collectives over fsdp", "collectives over tensor", "unexplained collectives"):
        assert checks[name]["holds"], checks[name]
    if jax.__version_info__ < (0, 11):
        # Newer XLA names some AllGathers of weights after the loop that sliced the weight.
        assert data["unexpected"] == []
        assert {(row["scope"], row["phase"]): row["verdict"] for row in data["joined"] if not row["agrees"]} == {}
    scopes = {row["scope"] for row in data["joined"]}
    assert scopes >= {"layers/attn/core", "layers/mlp/up", "unembed", "embed", "gradients"}
    moved = sum(
        collective["count"] * collective["bytes"]
        for collective in data["collectives"]
        if collective["axes"] == ["fsdp"]
    )
    assert moved == checks["collectives over fsdp"]["compiled"]
    assert all(collective["source"] for collective in data["collectives"] if collective["bytes"] > 2**16)
    # Once compiled it is known, tables included.
    tables = rooftop("compile", "plan.json")
    lines = [line for line in tables.out.splitlines() if line.strip()]
    assert " on v5e:2x2: fsdp 2 x tensor 2; remat block" in lines[0]
    assert "once compiled" in lines[1]
    for part in ("Per step on one device", "layers/mlp/up", "all_gather fsdp", "HBM of a device", "operations that"):
        assert part in tables.out


@pytest.mark.slow
def test_stages_that_share_no_dense_layer_do_what_is_planned() -> None:
    """A dense layer, then two of experts, on two stages: its weights on both, its sums per microbatch, done again."""
    small = replace(
        load_model("mixtral-8x7b"), layers=3, d_model=512, d_ff=1024, heads=4, kv_heads=4, d_head=128, vocab=2048,
        moe=MoE(experts=8, active=2, d_ff=512, dense_layers=1),
    )  # fmt: skip
    problem = Problem(
        model=small, slice=Slice.parse("v5e:2x2"), workload=Workload(batch_tokens=16 * 512, seq_len=512),
        axes={"stage": 2, "expert": 2}, remat="block", microbatches=4,
    )  # fmt: skip
    answer = compile_plan(plan_training(problem, alternatives=0).plan, timeout_s=1200)
    assert not isinstance(answer, Refusal)
    checks = {check["name"]: check for check in answer.to_json()["checks"]}
    assert checks["matmul FLOPs"]["ratio"] == pytest.approx(1.0, abs=1e-3)
    # So small an unembedding has its gradient summed in float32.
    assert 0.9 < checks["collectives over expert"]["ratio"] <= 1.0
    # Besides what is planned both neighbours' permutes stand in every slot.
    assert 0.5 < checks["collectives over stage"]["ratio"] <= 1.0


def test_a_function_is_compiled_by_name(rooftop: Run) -> None:
    answer = rooftop("compile", *FUNCTION, "--json")
    assert (answer.status, answer.err) == (0, "")
    jsonschema.validate(answer.json, schema(CompiledRecord))
    assert answer.json["flops"] == 2 * 2048 * 4096 * 4096
    assert {(collective["kind"], *collective["axes"]) for collective in answer.json["collectives"]} == {
        ("all_gather", "X")
    }
    assert (answer.json["planned_flops"], answer.json["joined"], answer.json["checks"]) == (None, [], [])
    tables = rooftop("compile", *FUNCTION).out
    for part in ("v5e:4x4: X 4 x Y 4", "all_gather", "step.py:5", "mxu", "peak memory"):
        assert part in tables


def test_page_and_report_show_what_the_terminal_shows(
    rooftop: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    make_plan("plan.json")
    answer = rooftop("compile", "plan.json", "--no-cache", "--top", "20", "-o", "whole.json", "--report", "whole.html")
    assert answer.status == 0
    assert sum(1 for _ in faces.cells(answer.out)) > 100
    assert faces.missing(answer.out, faces.of_page((folder / "whole.html").read_text())) == []
    assert faces.missing(answer.out, faces.of_browser(folder / "whole.json")) == []


@pytest.mark.slow
def test_automatic_axes(rooftop: Run) -> None:
    """The same program, the sharding of its result left to the partitioner."""
    data = rooftop("compile", *FUNCTION, "--auto", "--json").json
    assert data["flops"] == 2 * 2048 * 4096 * 4096


def test_the_timeline_and_the_executable_are_written(rooftop: Run, folder: Path) -> None:
    files = ("--perfetto", "trace.json", "--save", "program.bin", "--xprof", "profile", "--report", "report.html")
    answer = rooftop("compile", *FUNCTION, *files)
    assert (answer.status, answer.err) == (0, "")
    drawn = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in drawn} >= {"M", "X"}
    stamp = json.loads((folder / "program.bin").read_bytes().partition(b"\n")[0])
    assert stamp["versions"].keys() == {"jax", "jaxlib", "libtpu"}
    assert "program.bin" in answer.out
    # The profile is read as one that was measured, its module with it.
    measured = explain(folder / "profile", mesh={"X": 4, "Y": 4})
    assert [note.split(":")[0] for note in measured.notes] == ["a compiled timeline, no measurement"]
    ((name, program),) = measured.programs.items()
    assert (name, program.module.name) == (1, measured.trace.programs[1])
    data = rooftop("compile", *FUNCTION, "--json").json
    assert measured.measured.step_s == pytest.approx(data["step"]["expected_s"], abs=1e-11)
    exposed = data["step"]["exposed_ici_s"]
    assert measured.measured.exposed_s == pytest.approx(exposed, rel=1e-2, abs=1e-9)
    assert {collective.facts.kind for collective in measured.measured.collectives} == {
        collective["kind"] for collective in data["collectives"]
    }
    assert "compiled: the schedule of XLA" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_what_does_not_fit_is_status_one(rooftop: Run) -> None:
    """By how many bytes, what fills it, and what would fit, on one line and in the report."""
    make_plan("large.json", "--mesh", "fsdp=4", "--batch-seqs", "65536", "--microbatches", "1")
    answer = rooftop("compile", "large.json", "--json")
    assert answer.status == 1
    jsonschema.validate(answer.json, schema(RefusedRecord))
    assert answer.json["fits"] is False
    assert answer.json["over_bytes"] > 0
    assert answer.json["buffers"]
    (line,) = answer.err.strip().splitlines()
    assert "does not fit: XLA needs" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.json",), "nowhere.json"),
        (("config.json",), "without a kind"),
        (("broken.json",), "not JSON"),
        (("list.json",), "no JSON object"),
        (("plan",), "module:function"),
        (("step:nothing", "--on", "v5e:2x2"), "nothing"),
        (("step:number", "--on", "v5e:2x2"), "a function"),
        (("nomodule:fn", "--on", "v5e:2x2"), "nomodule"),
        (("step:product",), "a slice"),
        (("step:product", "--on", "v5e:4x5"), "v5e"),
        (("step:product", "--on", "v5e:1x1", "--args", "bf16[2]"), "function: got 'step:product'"),
        (("step:product", "--on", "v5e:4x4", "--mesh", "X=4"), "16 devices"),
        (("step:product", "--on", "v5e:4x4", "--mesh", "X=4,Y=4", "--layout", "X=x+y"), "layout"),
        (("step:product", "--on", "v5e:4x4", "--args", "bf16[8_x", "--dims", "D=4"), "bf16[B_X"),
        (("step:product", "--on", "v5e:4x4", "--args", "bf16[8_x]", "--dims", "D4"), "NAME=SIZE"),
        (("other.json", "--on", "v5e:4x4"), "nothing with a plan"),
        (("other.json", "--args", "bf16[8]"), "nothing with a plan"),
        (("other.json", "--timeout", "soon"), "timeout"),
        (("other.json", "--top", "0"), "top"),
    ],
)
def test_bad_arguments_are_one_line(rooftop: Run, folder: Path, arguments: tuple[str, ...], message: str) -> None:
    (folder / "broken.json").write_text("{")
    (folder / "list.json").write_text("[]")
    _refused(rooftop("compile", *arguments), message)


def test_a_plan_of_another_kind_is_refused(rooftop: Run, folder: Path) -> None:
    make_plan("other.json")
    data = json.loads((folder / "other.json").read_text())
    (folder / "other.json").write_text(json.dumps(data | {"kind": "serve"}))
    _refused(rooftop("compile", "other.json"), "of kind 'serve'")
    (folder / "other.json").write_text(json.dumps(data | {"slice": data["slice"] | {"name": "v5e:3x3"}}))
    _refused(rooftop("compile", "other.json"), "v5e")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"slice": "v5e:2x2"}, "plan slice: got 'v5e:2x2'; accepted: an object"),
        ({"microbatches": "1"}, "plan microbatches: got '1'; accepted: a whole number"),
        ({"ledger": {}}, "plan ledger: got {}; accepted: a list"),
        ({"slice": {"name": 4, "chips": 4, "devices": 4}}, "plan slice.name: got 4; accepted: a string"),
        ({"assumptions": {"hidden": [], "bounds": "usable"}}, "plan assumptions.hidden: got []; accepted: an object"),
    ],
)
def test_a_plan_with_a_field_of_another_type_is_one_line(
    rooftop: Run, folder: Path, changed: dict[str, object], line: str
) -> None:
    make_plan("other.json")
    data = json.loads((folder / "other.json").read_text())
    (folder / "other.json").write_text(json.dumps(data | changed))
    _refused(rooftop("compile", "other.json"), line)


def test_a_plan_nested_too_deeply_is_one_line(rooftop: Run, folder: Path) -> None:
    (folder / "deep.json").write_text("[" * 100_000)
    _refused(rooftop("compile", "deep.json"), "nested too deeply")
    _refused(rooftop("explain", "--diff", "deep.json", "deep.json"), "nested too deeply")


def test_a_time_out_is_one_line(rooftop: Run) -> None:
    _refused(rooftop("compile", *FUNCTION, "--no-cache", "--timeout", "10ms"), "timeout")


@pytest.mark.parametrize("option", ["-o", "--save", "--perfetto", "--report"])
def test_a_file_that_cannot_be_written(rooftop: Run, option: str) -> None:
    _refused(rooftop("compile", *FUNCTION, option, "nowhere/file"), "output file")


def _refused(answer: Any, message: str) -> None:
    assert answer.status == 2
    assert answer.out == ""
    (line,) = answer.err.strip().splitlines()
    assert line.startswith("rooftop: ")
    assert message in line
