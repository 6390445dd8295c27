"""The page without a browser: explorers say what the command line says, bad input is one line, files are shown."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

import rooftop.present
import rooftop.ui
from rooftop.arrays import parse_axes
from rooftop.core.errors import RooftopError
from rooftop.core.records import schema
from rooftop.explain.compiled.report import RefusedRecord
from rooftop.explain.measured.report import ExplainedRecord
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.training.batches import batch_curves, book_meshes
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import sweep
from rooftop.plan.training.work.rows import training_ledger
from rooftop.plan.training.workload import Workload
from rooftop.present.browser import to_data
from rooftop.present.document import Level
from rooftop.present.glossary import FILE, entries, entry
from rooftop.requests.measuring import Matmul
from rooftop.requests.planning import PlanEmbedding, PlanServing, PlanTraining
from rooftop.requests.request import Request
from rooftop.requests.words import LEVELS
from rooftop.roofline.matmul import attainable
from rooftop.simulate.systolic import SystolicArray
from rooftop.ui.controls import Control, FieldControls, read_state, slider
from rooftop.ui.explorers import EXPLORERS, explorer
from rooftop.ui.opened import opened_json
from rooftop.ui.rounds import KINDS, rounds, torus_rounds
from rooftop.ui.server import LARGEST, application
from tests.conftest import Answer
from tests.support import faces
from tests.support.ui_figures import ALWAYS, PRINTED, random_state, repeated

Call = Callable[..., Answer]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(application(), base_url="http://127.0.0.1:8080") as session:
        yield session


def _figures(answer: Any) -> dict[str, Any]:
    return {figure["name"]: figure["value"] for figure in answer["figures"]}


#: States beside the default one.
STATES: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in EXPLORERS),
    ("roofline", {"B": "64", "weights": "int8", "chip": "v5p", "level": "expected"}),
    ("roofline", {"chip": "tpu7x", "B": "512"}),
    ("sharding", {"expression": "A[I_X, J] @ B[J, K_X] -> C[I_X, K]", "way": "3"}),
    ("sharding", {"expression": "A[I_X, J_Y] -> A[I, J_XY]", "level": "book"}),
    ("sharding", {"expression": "AllGather_Y(A[I_X, J_Y])", "level": "expected"}),
    ("collectives", {"kind": "all_to_all", "on": "v5e:4x4", "mesh": "X=4,Y=4", "axis": "X", "bytes": "1Mi"}),
    ("collectives", {"kind": "reduce_scatter", "on": "h100:8x4", "mesh": "X=8,Y=4", "axis": "Y"}),
    ("collectives", {"kind": "all_reduce", "level": "expected", "on": "v5p:4x4x4", "mesh": "X=4,Y=16", "axis": "Y"}),
    ("collectives", {"kind": "all_gather", "on": "v5e:4x4", "mesh": "X=4,Y=4", "axis": "X,Y"}),
    ("collectives", {"kind": "all_to_all", "on": "v5p:4x4x4", "mesh": "X=4,Y=4,Z=4", "axis": "Z,X"}),
    ("collectives", {"kind": "reduce_scatter", "on": "v5p:4x4x4", "mesh": "data=16,tensor=4", "axis": "data"}),
    ("training", {"tensor": "4", "batch_seqs": "8", "remat": "block"}),
    ("sharding", {"expression": "bf16[I_X, J] -> bf16[I, J]@(0,0)"}),
    ("training", {"on": "v5e:1x1", "model": "qwen3-0.6b", "batch_seqs": "1"}),
    ("training", {"on": "v5e:2x2", "model": "llama:7M", "batch_seqs": "8", "seq": "2048"}),
    ("serving", {"on": "v5e:1x1", "model": "mixtral:5M", "bounds": "usable", "context": "1024"}),
    ("pipeline", {"model": "llama:100M", "stages": "2"}),
    ("training", {"on": "v5e:16x16@2", "model": "llama3-8b", "batch_seqs": "512"}),
    ("training", {"framework": "maxtext"}),
    ("training", {"framework": "maxtext", "on": "v5e:16x16@2", "model": "llama3-8b", "batch_seqs": "512"}),
    ("training", {"framework": "megatron", "on": "h100:8x8", "tensor": "8"}),
    (
        "training",
        {
            "framework": "megatron",
            "on": "h100:8x8",
            "tensor": "4",
            "model": "llama3-8b",
            "framework_settings": "gradients=f32",
        },
    ),
    ("training", {"framework": "torchtitan", "on": "h100:8x8", "model": "llama3-8b", "remat": "none"}),
    # It does not run: 32 sequences are fewer than its copies.
    ("training", {"framework": "torchtitan", "on": "h100:8x8", "model": "llama3-8b", "batch_seqs": "32"}),
    ("pipeline", {"schedule": "zero_bubble", "stages": "8", "model": "llama3-8b"}),
    ("pipeline", {"schedule": "interleaved", "stages": "4", "chunks": "4", "microbatches": "12"}),
    ("serving", {"bounds": "usable", "batch_seqs": "64", "context": "2048"}),
    ("serving", {"bounds": "usable", "on": "h100:8", "mesh": "tensor=8", "weights_dtype": "bf16", "kv_dtype": "bf16"}),
    ("embedding", {"on": "v6e:2x2", "batch_samples": "4096"}),
]


@pytest.mark.parametrize(
    ("name", "state"), STATES, ids=[f"{name} {'&'.join(state.values())}" for name, state in STATES]
)
def test_the_command_that_is_shown_gives_the_same_figures(
    name: str, state: dict[str, str], rooftop: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_figures(name, state, rooftop, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", EXPLORERS)
def test_so_it_does_for_any_state_of_the_controls(
    name: str, seed: int, rooftop: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_figures(name, random_state(name, seed), rooftop, tmp_path, monkeypatch)


def _check_figures(
    name: str, state: dict[str, str], rooftop: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each figure is what the command prints, and what the charts of the page show."""
    one = explorer(name)
    values = read_state(one.form.controls, state.items())
    answer = one.answer(values)
    if name == "embedding":
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tables.toml").write_text(values["tables"], encoding="utf-8")
    ran = rooftop(*answer.command[1:], "--json")
    assert ran.status in (0, 1)
    assert bool(answer.verdict.no) == (ran.status == 1)
    shown = {figure.name: figure.value for figure in answer.figures}
    printed = {
        figure: find(ran.json, state)
        for figure, find in PRINTED[name].items()
        if not isinstance(find, str) and (figure in shown or figure in ALWAYS.get(name, ()))
    }
    assert set(shown) <= set(PRINTED[name]), "tests/support/ui_figures.py says where the command has each"
    assert {figure: value for figure, value in printed.items() if value or figure in shown} == {
        figure: value if isinstance(value, (str, type(None))) else pytest.approx(value, rel=1e-9)
        for figure, value in shown.items()
        if figure in printed
    }
    for figure, where, value in repeated(name, answer, state):
        assert value == pytest.approx(shown[figure], rel=1e-9), f"{figure} in {where}"


@dataclass(frozen=True, kw_only=True)
class _Asked(Request):
    """A request with another default than that of any verb."""

    batch_seqs: int = 64
    """Sequences."""
    level: str = "expected"
    """Peak or achievable rates."""


def test_controls_are_those_of_the_fields_of_a_request() -> None:
    fields = FieldControls(_Asked)
    batch, level = fields.slider("batch_seqs", 1, 128), fields.select("level", described=True)
    assert (batch.default, batch.label, batch.unit) == ("64", "Batch, sequences", "sequences")
    assert (level.default, level.options, level.help) == ("expected", LEVELS, "Peak or achievable rates.")
    with pytest.raises(RooftopError, match="field: got 'batch'; accepted: did you mean batch_seqs"):
        fields.slider("batch", 1, 128)
    with pytest.raises(RooftopError, match="level: got 'best'"):
        fields.select("level", options=["best"])


@pytest.mark.parametrize("name", EXPLORERS)
def test_a_control_named_as_a_field_of_the_verb_is_that_field(name: str) -> None:
    """Explorers that show one name of the field's must not say something else by it."""
    form, settings_ = explorer(name).form, {setting.name: setting for setting in _REQUESTS[name].settings()}
    shown = [control for control in form.controls if control.name in settings_]
    assert len(shown) >= _LEAST.get(name, 3)
    for control in shown:
        # The roofline and the collectives write the expression: their dtypes are of its arrays, their bytes of a dim.
        if (name, control.name) != ("roofline", "dtype"):
            assert (control.label, control.unit) == (settings_[control.name].label, settings_[control.name].word.unit)
            for option in control.options:
                settings_[control.name].kind.read(option, control.name)


_REQUESTS: dict[str, type[Request]] = {
    "training": PlanTraining, "pipeline": PlanTraining, "serving": PlanServing, "embedding": PlanEmbedding,
    "sharding": Matmul, "collectives": Matmul, "roofline": Matmul, "systolic": Matmul,
}  # fmt: skip
#: A systolic array has sizes alone.
_LEAST = {"systolic": 0, "roofline": 1}


@pytest.mark.parametrize("name", EXPLORERS)
def test_every_answer_has_units_sources_and_data(name: str, client: TestClient) -> None:
    data = client.get(f"/api/{name}").json()
    assert faces.nothing("\n".join(faces.texts(data))) == []
    assert data["verdict"].endswith(".")
    assert data["sources"]
    for figure in data["figures"]:
        assert figure["text"]
        assert figure["level"] == "exact" or figure["formula"], figure["name"]
    for chart in data["charts"]:
        assert chart["title"]
        assert any(chart.get(part) for part in ("series", "bars", "lanes", "cells", "frames", "rows")), chart["title"]
        for axis in (chart[side] for side in "xy" if side in chart):
            assert axis["label"]
    declared = client.get(f"/api/{name}/controls").json()
    assert [control["name"] for control in declared["controls"]]
    for control in declared["controls"]:
        if control["kind"] == "slider":
            assert int(control["default"]) in control["stops"] or control["name"] == "dense_flops"
            assert control["stops"] == sorted(set(control["stops"]))


@pytest.mark.parametrize(
    ("path", "field", "said"),
    [
        ("roofline?B=abc", "B", "a positive number"),
        ("roofline?B=0", "B", "a positive number"),
        ("roofline?B=1&B=2", "B", "one value"),
        ("roofline?B=2000000", "B", "1 to 65536"),
        ("roofline?chip=v5x", "chip", "did you mean v5p or v5e"),
        ("roofline?speed=1", "control", "one of B, D, F"),
        ("roofline?chip=v4&dtype=f8_e4m3&weights=f8_e4m3", "dtype", "bf16"),
        ("sharding?expression=A%5BI_X", "array", "dtype[DIM_AXES"),
        ("sharding?way=25", "way", "1 to 24"),
        ("serving?mesh=tensor=16", "mesh", "this with arithmetic usable"),
        ("pipeline?schedule=1f1b&chunks=4", "chunks", "this with schedule interleaved"),
        ("sharding?mesh=X=3,Y=4", "mesh", "16 devices"),
        ("sharding?mesh=X=2,Y=2,Z=2,W=2", "mesh", "3 axes at most"),
        ("sharding?dims=I=8190,J=8192,K=8", "dim", "a multiple of"),
        ("collectives?axis=Q", "axis", "some of X, Y"),
        ("collectives?on=v5e:9x9", "slice", ""),
        ("training?tensor=48", "tensor", "divides the 64 devices"),
        ("training?batch_seqs=0", "batch_seqs", "a positive number"),
        ("pipeline?schedule=interleaved&microbatches=6", "microbatches", "a multiple of the 4 stages"),
        (
            "pipeline?schedule=interleaved&stages=16&microbatches=64&chunks=8",
            "chunks",
            "at most 2 (16 stages share 32 layers)",
        ),
        ("serving?mesh=tensor=3&bounds=usable", "mesh", "16 devices"),
        ("embedding?tables=%5Btables", "tables", "TOML"),
        ("embedding?on=v5e:2x2", "slice", "SparseCores"),
        ("nothing", "explorer", "one of collectives"),
    ],
)
def test_bad_input_is_one_line_beside_its_field(path: str, field: str, said: str, client: TestClient) -> None:
    response = client.get(f"/api/{path}")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["field"].startswith(field)
    assert said in error["message"]
    assert "\n" not in error["message"]
    name = path.partition("?")[0]
    if name in EXPLORERS and field != "control":
        fields = [field for control in explorer(name).form.controls for field in control.to_json()["fields"]]
        assert any(error["field"].startswith(field) for field in fields), "the page has a place for it"


@pytest.mark.parametrize("name", EXPLORERS)
@settings(max_examples=12)
@given(draw=st.data())
def test_whatever_the_page_offers_is_an_answer_or_one_line(name: str, draw: st.DataObject) -> None:
    one = explorer(name)
    state = {}
    for control in one.form.controls:
        offered = control.stops or control.options or (control.default, *control.suggestions)
        state[control.name] = str(draw.draw(st.sampled_from(offered), label=control.name))
    try:
        answer = one.answer(read_state(one.form.controls, state.items()))
    except RooftopError as error:
        assert "\n" not in str(error)
        return
    assert json.dumps(to_data(answer), allow_nan=False)


def test_what_does_not_fit_is_an_answer_that_says_so(client: TestClient) -> None:
    data = client.get("/api/training?batch_seqs=16384").json()
    assert data["verdict"].startswith("Does not fit")
    assert data["no"]
    data = client.get("/api/serving?batch_seqs=4096").json()
    assert "at most 138" in data["verdict"]
    assert client.get("/api/embedding?on=v6e:2x2&batch_samples=262144").json()["no"]


def test_only_the_name_that_it_was_bound_to_gets_an_answer() -> None:
    def status(host: str, name: str) -> int:
        with TestClient(application(host=host), base_url=f"http://{name}:80") as session:
            return session.get("/api").status_code

    for name in ("127.0.0.1", "localhost", "[::1]", "LOCALHOST"):
        assert status("127.0.0.1", name) == 200
    for name in ("rebound.example", "127.0.0.1.rebound.example", "10.0.0.7"):
        assert status("127.0.0.1", name) == 421
    assert status("0.0.0.0", "10.0.0.7") == 200
    assert status("0.0.0.0", "rebound.example") == 421
    assert status("box.example", "box.example") == 200


def test_the_page_keeps_to_itself(client: TestClient) -> None:
    for path in ("/", "/roofline", "/static/page.js", "/api/roofline", "/nothing"):
        response = client.get(path)
        assert response.headers["content-security-policy"].startswith("default-src 'self';"), path
        assert response.headers["x-content-type-options"] == "nosniff"
    assert client.get("/nothing").status_code == 404
    page = client.get("/").text
    folders = [Path(room.__file__).with_name("static") for room in (rooftop.ui, rooftop.present)]
    parts = sorted(part for folder in folders for part in folder.iterdir())
    assert len(parts) > 8
    for part in parts:
        page += part.read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'`<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_no_path_leads_out_of_the_page(client: TestClient) -> None:
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2f..%2ferrors.py", "/api/files/0"):
        assert client.get(path).status_code in (400, 404), path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plans."""
    from rooftop.cli.main import main

    folder = tmp_path_factory.mktemp("plans")
    commands = {
        "train": "plan train llama3.2-1b --on v5e:2x2 --mesh fsdp=2,tensor=2 --batch-seqs 8 --seq 2048",
        "serve": "plan serve llama3-8b --on v5e:2x2 --weights-dtype int8 --kv-dtype int8 --batch-seqs 8",
        "embed": "plan embed docs/tables.toml --on v5p:2x2x1",
    }
    for name, command in commands.items():
        with pytest.raises(SystemExit):
            main([*command.split(), "-o", str(folder / f"{name}.json"), "--json"])
    return folder


def test_files_named_on_the_command_line_are_shown(written: Path) -> None:
    files = sorted(written.glob("*.json"))
    with TestClient(application(files=files), base_url="http://localhost") as client:
        assert client.get("/api").json()["files"] == ["embed.json", "serve.json", "train.json"]
        for index, path in enumerate(files):
            data, plan = client.get(f"/api/files/{index}").json(), json.loads(path.read_text(encoding="utf-8"))
            assert data["name"] == path.name
            titles = [chart["title"] for chart in data["charts"]]
            assert "The ledger" in titles
            assert "Where the step goes" in titles
            shown = next(chart for chart in data["charts"] if chart["title"] == "Where the step goes")
            ledger = plan["generate"]["ledger"] if plan["kind"] == "serve" else plan["ledger"]
            longest = sum(part[1] for part in shown["bars"][0]["parts"])
            scopes = {row["scope"] for row in ledger}
            assert longest == pytest.approx(
                max(sum(row["count"] * row["expected_s"] for row in ledger if row["scope"] == one) for one in scopes)
            )
        assert client.get("/api/files/3").status_code == 400
    with pytest.raises(RooftopError, match="a file or folder that is there"):
        application(files=[written / "absent.json"])


def test_a_dropped_file_says_what_a_named_one_does(written: Path, client: TestClient) -> None:
    body = (written / "train.json").read_bytes()
    data = client.post("/api/open?name=mine.json", content=body).json()
    assert data["what"] == "a plan of a training run"
    assert _figures(data)["expected_s"] == json.loads(body)["step"]["expected_s"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "its kind one of"),
        (b'{"kind": ["train"]}', "its kind one of"),
        (b'{"kind": "train"}', "as rooftop writes it"),
        (
            b'{"kind": "compiled", "fits": true, "ledger": 3, "slice": {"name": "v5e:2x2"}}',
            "compilation schema: got nothing; accepted: a value: this field is required",
        ),
        (b'{"kind": "explained", "rows": 7}', "as rooftop writes it"),
    ],
)
def test_what_rooftop_did_not_write_is_refused_in_one_line(body: bytes, said: str, client: TestClient) -> None:
    response = client.post("/api/open?name=x.json", content=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert said in message
    assert "\n" not in message


def test_a_dropped_file_may_not_be_endless(client: TestClient) -> None:
    response = client.post("/api/open?name=x.json", content=b" " * (LARGEST + 1))
    assert response.status_code == 400
    assert "32 MiB" in response.json()["error"]["message"]


def test_a_compilation_that_does_not_fit_is_shown() -> None:
    data = {
        "kind": "compiled", "schema": 1, "rooftop_version": "0", "plan": None,
        "slice": {"name": "v5e:2x2", "chips": 4, "devices": 4, "calibrated": None, "price_usd_per_hour": None,
                  "price_source": None},
        "mesh": {"axes": {}, "layout": {}}, "fits": False, "peak_bytes": 2e10, "planned_peak_bytes": 1.9e10,
        "capacity_bytes": 1.69e10, "memory": {"weights": 1e10, "activations": 1e10},
        "planned_memory": {"weights": 1e10}, "buffers": [], "over_bytes": 3e9, "nearest": None,
        "verdict": "3.1 GB too much",
    }  # fmt: skip
    Draft202012Validator(schema(RefusedRecord)).validate(data)
    shown = opened_json("x.json", data).answer
    assert shown.verdict.no == "3.1 GB too much"
    assert [chart.title for chart in shown.charts] == ["Memory of a device", "HBM of a device at the peak"]


def test_an_explained_run_is_shown_beside_its_plan() -> None:
    row = {
        "scope": "layers/mlp/up", "phase": "forward",
        "measured": {"time_s": 0.5, "share": 0.5, "exposed_s": 0.2, "flops_per_s": None, "hbm_bytes_per_s": None,
                     "slowest": "fusion.3", "source": "mlp.py:3"},
        "compiled": {"flops": 2e9, "hbm_bytes": 1e6, "bound_s": {"mxu": 0.1}},
        "planned": {"time_s": 0.25, "exposed_s": 0.0, "flops": 2e9, "hbm_bytes": 1e6},
        "collectives": [],
    }  # fmt: skip
    data = {
        "kind": "explained", "schema": 1, "rooftop_version": "0", "trace": "run", "mesh": {"data": 2}, "programs": [],
        "devices": {"kind": "tpu", "count": 2, "hosts": 1, "emulated": False}, "missing": {}, "verdict": "half",
        "roofline": 0.5, "bound": "mxu", "roofs": None, "achieved": [], "step_s": 1.0, "busy_s": 0.7, "compute_s": 0.5,
        "exposed_s": 0.2, "held_s": 0.0, "idle_s": 0.3, "attributed": 0.96, "marked": "", "rows": [row],
        "steps": [{"number": 1, "seconds": 1.0, "slowest_s": 1.0, "busy_s": 0.7, "exposed_s": 0.2, "counted": True}],
        "collectives": [], "idle": [], "operations": [], "losses": [], "empty": {}, "by_device": [], "processes": [],
        "notes": ["the plan is for v5e:2x2"],
        "advice": [
            {"rule": rule, "what": what, "evidence": evidence, "source": source, "seconds": 0.1}
            for rule, what, evidence, source in (
                ("exposed_collective", "run it beside", "an all_gather waits", "/src/mlp.py:3"),
                ("host_bound", "dispatch earlier", "the host is late", ""),
                ("exposed_collective", "run it beside", "an all_reduce waits", "/src/mlp.py:9"),
            )
        ],
        "memory": [{"host": "a", "allocator": "b", "peak_bytes": 9, "capacity_bytes": 10, "points": [[0, 3], [1, 9]]}],
        "sparse_cores": {"cores": [], "overlap": None, "minibatches": 0, "dropped_ids": 0},
    }  # fmt: skip
    Draft202012Validator(schema(ExplainedRecord)).validate(data)
    shown = to_data(opened_json("x.json", data).answer)
    assert _figures(shown)["attributed"] == 0.96
    table = next(chart for chart in shown["charts"] if chart["kind"] == "table")
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert (row["measured"], row["exposed"], row["planned"]) == ("500 ms", "200 ms", "250 ms")
    assert any(chart["title"] == "Memory over time" for chart in shown["charts"])
    (advice,) = (chart for chart in shown["charts"] if chart["title"] == "What to try")
    exposed = "exposed_collective: an all_gather waits [mlp.py:3]. exposed_collective: an all_reduce waits [mlp.py:9]."
    assert advice["rows"] == [
        ("-", f"Run it beside. {exposed}"),
        ("-", "Dispatch earlier. host_bound: the host is late."),
    ]
    assert "Note: the plan is for v5e:2x2." in shown["details"]


def test_sliders_stop_at_round_numbers() -> None:
    assert slider("n", "n", "1", 1, 100).stops == (1, 2, 4, 8, 16, 32, 64, 100)
    assert slider("n", "n", "1", 4, 16, halves=True).stops == (4, 6, 8, 12, 16)
    assert slider("n", "n", "1", 2, 5, linear=True).stops == (2, 3, 4, 5)
    assert Control(name="n", label="n", kind="text", default="").stops == ()


@given(kind=st.sampled_from(KINDS), devices=st.integers(2, 17), ring=st.booleans())
def test_rounds_end_with_what_the_collective_promises(kind: str, devices: int, ring: bool) -> None:
    result = rounds(kind, devices, ring=ring)
    first, last = result.held[0], result.held[-1]
    diagonal = np.eye(devices)
    farthest = devices // 2 if ring else devices - 1
    assert len(result.sent) == len(result.held) - 1 == farthest * (2 if kind == "all_reduce" else 1)
    ends = {
        "all_gather": (diagonal, np.ones_like(diagonal)),
        "reduce_scatter": (np.full_like(diagonal, 1 / devices), diagonal),
        "all_reduce": (np.full_like(diagonal, 1 / devices), np.ones_like(diagonal)),
        "all_to_all": (diagonal, np.full_like(diagonal, 1 / devices)),
    }[kind]
    np.testing.assert_allclose(first, ends[0])
    np.testing.assert_allclose(last, ends[1])
    for at, pairs in enumerate(result.sent):
        # What changes on a device came over a link in that round (or left over one).
        changed = set(np.flatnonzero((result.held[at] != result.held[at + 1]).any(axis=1)).tolist())
        assert changed <= {end for pair in pairs for end in pair}
        assert all((start - end) % devices in (1, devices - 1) for start, end in pairs)
    if kind in ("reduce_scatter", "all_to_all"):
        # Every operand, and every piece, is in one place at a time.
        np.testing.assert_allclose(result.held.sum(axis=(1, 2)), devices)


@given(kind=st.sampled_from(KINDS), sizes=st.tuples(st.integers(2, 4), st.integers(2, 4)), ring=st.booleans())
def test_rounds_over_two_axes_end_alike(kind: str, sizes: tuple[int, int], ring: bool) -> None:
    result = torus_rounds(kind, sizes, (ring, True))
    one = rounds(kind, sizes[0] * sizes[1], ring=True)
    np.testing.assert_allclose(result.held[0], one.held[0])
    np.testing.assert_allclose(result.held[-1], one.held[-1])
    assert len(result.sent) == len(result.held) - 1
    for start, end in (pair for pairs in result.sent for pair in pairs):
        # Neighbours in one of the two axes.
        apart = [a != b for a, b in zip(divmod(start, sizes[1]), divmod(end, sizes[1]), strict=True)]
        assert sum(apart) == 1


def test_rounds_refuse_what_cannot_be() -> None:
    with pytest.raises(RooftopError, match="2 or more"):
        rounds("all_gather", 1, ring=True)
    with pytest.raises(RooftopError, match="collective"):
        rounds("permute", 4, ring=True)


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), m=st.integers(1, 12))
def test_the_wave_crosses_the_array_once_and_ends_with_its_cycles(rows: int, columns: int, m: int) -> None:
    array = SystolicArray(rows=rows, columns=columns)
    total = int(array.cycles(m, rows, columns).total)
    waves = np.array([array.wave(m, cycle) for cycle in range(total + 3)])
    for row in range(rows):
        for column in range(columns):
            seen = waves[:, row, column]
            np.testing.assert_array_equal(seen[seen >= 0], np.arange(m))
    assert int(np.flatnonzero((waves >= 0).any(axis=(1, 2)))[-1]) == total - 1


def test_curves_over_batches_are_the_steps_that_plans_have() -> None:
    model, where = load_model("llama3-8b"), Slice.parse("v5p:4x4x4")

    def problem(batch: int, mesh: str | None = None) -> Problem:
        axes = None if mesh is None else parse_axes(mesh)
        workload = Workload(batch_tokens=batch, seq_len=4096)
        return Problem(model=model, slice=where, workload=workload, axes=axes, remat="none", microbatches=1)

    batches = [2**18, 2**20]
    meshes = book_meshes(problem(batches[1]))
    assert meshes[:3] == [{"data": 64}, {"fsdp": 64}, {"fsdp": 32, "tensor": 2}]
    curves = batch_curves(problem(batches[1]), batches, meshes)
    assert [curve.axes for curve in curves] == meshes
    for curve in curves[1:3]:
        text = ",".join(f"{name}={size}" for name, size in curve.axes.items())
        exact = sweep(problem(batches[1], text))
        assert curve.expected_s[1] == pytest.approx(float(exact.expected_s.min()), rel=1e-12)
        assert curve.memory_bytes[1] == pytest.approx(float(exact.memory_bytes.min()), rel=1e-12)
        step = exact.plan(exact.best).step
        assert curve.compute_s[1] == pytest.approx(float(np.ravel(training_ledger(step).total("mxu"))[0]), rel=1e-12)
    # Chapter 5: FSDP's communication hardly grows with the batch, tensor parallelism's does with it.
    fsdp, tensor = curves[1], curves[-1]
    assert fsdp.network_s[1] < 1.5 * fsdp.network_s[0]
    assert tensor.network_s[1] == pytest.approx(4 * tensor.network_s[0], rel=0.1)


def test_the_roofline_is_the_lower_of_its_roofs() -> None:
    np.testing.assert_allclose(attainable(np.array([1.0, 240.0, 1e4]), 1.97e14, 8.2e11), [8.2e11, 1.968e14, 1.97e14])


def test_the_page_needs_no_jax() -> None:
    program = (
        "import sys; from rooftop.ui.server import application; application(); "
        "print([name for name in ('jax', 'numba', 'scipy', 'rich', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_explorers_are_listed(rooftop: Call) -> None:
    assert all(f"/{name}" in rooftop("ui", "--list").out for name in EXPLORERS)
    listed = rooftop("ui", "--list", "--json").json
    assert [entry["name"] for entry in listed["explorers"]] == list(EXPLORERS)
    answer = rooftop("ui", "--json")
    assert (answer.status, answer.err.count("\n")) == (2, 1)


def test_a_port_that_is_taken_is_one_line(rooftop: Call) -> None:
    from rooftop.ui.server import address, bind

    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert address(taken) == f"http://127.0.0.1:{port}/"
        answer = rooftop("ui", "--no-open", "--port", str(port))
    assert answer.status == 2
    assert answer.err.startswith("rooftop: host and port: got")
    assert answer.err.count("\n") == 1


def test_a_file_that_is_not_there_is_one_line(rooftop: Call) -> None:
    answer = rooftop("ui", "nowhere.json", "--no-open", "--port", "0")
    assert (answer.status, answer.err.count("\n")) == (2, 1)
    assert "nowhere.json" in answer.err


def _asked(name: str, **state: str) -> Any:
    one = explorer(name)
    return to_data(one.answer(read_state(one.form.controls, state.items())))


def test_the_last_stop_of_a_slider_is_the_last_way() -> None:
    state = {"expression": "AllGather_Y(A[I_X, J_Y])"}
    assert _asked("sharding", **state, way="24")["figures"] == _asked("sharding", **state)["figures"]


def test_a_group_that_is_not_drawn_is_noted() -> None:
    for state, drawn in (({"axis": "X"}, True), ({"axis": "X,Y"}, False)):
        answer = _asked("collectives", on="v5e:8x8", mesh="X=8,Y=8", **state)
        assert any(chart["kind"] == "frames" for chart in answer["charts"]) == drawn
        assert any("64 over X, Y" in note for note in answer["notes"]) != drawn


def test_a_verdict_of_training_says_what_is_waited_for() -> None:
    answer = _asked("training")
    figures = _figures(answer)
    share = figures["exposed_s"] / figures["expected_s"]
    assert share > 0.05
    assert f"It waits {share:.0%} of it for collectives, over fsdp most." in answer["verdict"]
    assert not any("the search chose" in note for note in answer["notes"]), "the page searches no mesh"


@pytest.mark.parametrize(
    ("name", "state", "figures"),
    [
        ("training", {"model": "llama3-70b", "on": "v5e:1x1"}, {"memory_bytes", "nearest"}),
        ("serving", {"on": "v5e:1x1", "bounds": "usable"}, {"memory_bytes", "kv_bytes", "max_batch", "nearest"}),
        ("serving", {"on": "v5e:1x1"}, {"memory_bytes", "kv_bytes", "max_batch", "nearest"}),
    ],
)
def test_what_does_not_fit_has_no_times_and_names_a_slice_that_does(
    name: str, state: dict[str, str], figures: set[str]
) -> None:
    answer = _asked(name, **state)
    assert answer["no"]
    assert set(_figures(answer)) == figures
    slice_ = Slice.parse(str(_figures(answer)["nearest"]).split()[0])
    assert slice_.chip.name == "v5e" and slice_.chips > 1


@pytest.mark.parametrize(
    ("framework", "on", "file"),
    [("maxtext", "v5p:4x4x4", "plan.yml"), ("megatron", "h100:8x8", "train.sh"),
     ("torchtitan", "h100:8x8", "plan.toml")],
)  # fmt: skip
def test_training_shows_the_configuration_that_its_command_ends_with(
    framework: str, on: str, file: str, client: TestClient, rooftop: Call
) -> None:
    asked = {"framework": framework, "on": on, "model": "llama3-8b", "tensor": "2"}
    data = client.get("/api/training", params=asked).json()
    printed = rooftop(*shlex.split(data["command"])[1:], "--json").json
    listings = {chart["title"]: chart["text"] for chart in data["charts"] if chart["kind"] == "listing"}
    assert listings[f"Configuration: {file}"] == printed["configuration"]["files"][file].rstrip()
    assert any(f"for {printed['framework']['title']}" in text for text in data["details"])
    # A plan that does not run has none, nor has rooftop's own.
    for change in ({"batch_seqs": "32"}, {"framework": "rooftop"}):
        other = client.get("/api/training", params={**asked, "tensor": "1", **change}).json()
        assert not [chart for chart in other["charts"] if chart["kind"] == "listing"]
    wrong = client.get("/api/training", params={**asked, "framework_settings": "speed=1"})
    assert wrong.status_code == 400 and "speed" in wrong.json()["error"]["message"]


def test_the_first_answer_of_training_is_a_plan_that_runs() -> None:
    answer = _asked("training")
    assert not answer["no"] and not answer["details"]


def test_figures_of_the_books_arithmetic_are_bounds() -> None:
    levels = {figure["name"]: figure["level"] for figure in _asked("serving")["figures"]}
    timed = ("step_s", "tokens_per_s", "tokens_per_s_per_chip", "ttft_s", "usd_per_million_tokens")
    assert {levels[name] for name in timed} == {"bound"}
    usable = {figure["name"]: figure["level"] for figure in _asked("serving", bounds="usable")["figures"]}
    assert {usable[name] for name in timed} <= {"expected", "estimate"}


def test_the_unit_that_binds_embeddings_is_the_longest_bar() -> None:
    answer = _asked("embedding")
    chart = next(chart for chart in answer["charts"] if chart["title"] == "What each unit does in a step")
    lengths = {bar["name"]: sum(value for _, value in bar["parts"]) for bar in chart["bars"]}
    longest = max(lengths, key=lambda name: lengths[name])
    assert f"bound by {'the tables' if longest == 'tables' else longest}" in answer["verdict"]


def test_an_address_that_is_none_has_the_menu(client: TestClient) -> None:
    response = client.get("/nosuch")
    assert (response.status_code, response.headers["content-type"].partition(";")[0]) == (404, "text/html")
    assert response.text == client.get("/").text


def test_every_level_of_a_figure_is_in_the_glossary(client: TestClient) -> None:
    anchors = {entry["anchor"] for entry in client.get("/api/glossary").json()["entries"]}
    assert set(get_args(Level)) - {"exact"} <= anchors


def test_the_glossary_is_the_page_of_the_documentation() -> None:
    assert FILE.read_text() == (ROOT / "docs" / "glossary.md").read_text()
    assert entry("tpot").words == "ITL, TPOT, TTFT"
    assert "](" not in "".join(item.meaning for item in entries())


def test_the_glossary_is_on_the_command_line(rooftop: Call) -> None:
    answer = rooftop("help", "glossary", "Exposed")
    assert (answer.status, answer.out.split(), answer.err) == (0, ["exposed", *entry("exposed").meaning.split()], "")
    assert all(item.names[0] in rooftop("help", "glossary").out for item in entries())
    wrong = rooftop("help", "glossary", "exposd")
    assert (wrong.status, wrong.out) == (2, "")
    assert wrong.err.startswith("rooftop: word: got 'exposd'; accepted: did you mean exposed")
