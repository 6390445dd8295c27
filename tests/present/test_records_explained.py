"""Documents are built from records: a field that is renamed is found by the type checker, not by a reader of a page."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import rooftop
from rooftop.core.errors import RooftopError
from rooftop.core.records import Record
from rooftop.explain.compiled.report import RefusedRecord
from rooftop.explain.difference import difference, side_of, trace_side
from rooftop.explain.measured.report import explain
from rooftop.hardware import Slice, chip
from rooftop.library.explaining import explain_operations
from rooftop.library.programs.compiling import explain_module
from rooftop.models import load_model
from rooftop.plan.documents import PlannedSlice
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.present.documents import document
from rooftop.ui.opened import opened_json
from tests.explain.test_traces import MODULE, V5E
from tests.support.traces import tpu, xspace

ROOFTOP = Path(rooftop.__file__).parent
#: The place where the kind of JSON is looked up.
OTHERS = ("__init__",)
#: Builders of documents, and what makes the records that they take.
BUILT_FROM_RECORDS = (
    *(f"present/documents/{file.name}" for file in sorted((ROOFTOP / "present" / "documents").glob("*.py"))
      if file.stem not in OTHERS),
    *(f"check/{name}.py" for name in ("gates", "report")),
    *(f"explain/{name}.py" for name in ("difference", "operations", "scripts")),
    *(f"explain/compiled/{name}.py" for name in ("report", "training")),
    *(f"plan/training/{name}.py" for name in ("answer", "comparison", "plan")),
    *(f"plan/serving/{name}.py" for name in ("answer", "fleet")),
    *(f"plan/{name}.py" for name in ("catalogue", "documents")),
    *(f"library/{name}.py" for name in ("arrays", "catalogue", "embedding", "planning", "results", "serving")),
    "library/simulation.py", "present/document.py", "profile/microbench/records.py", "serve/client/metrics.py",
    "explain/measured/report.py", "library/explaining.py", "tune/records.py", "tune/report.py", "tune/trials.py",
    "validation/report.py",
)  # fmt: skip
#: Tables whose keys are no fields: rates by dtype.
TABLES = ("flops_per_s",)


def string_keys(tree: ast.AST) -> Iterator[ast.expr]:
    """Reads of a key that is written out: ``data["name"]``, ``data.get("name")``, ``data[f"{name}_s"]``.

    Tables in capitals and types are no data.
    """

    def is_table(value: ast.expr) -> bool:
        name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
        return name.isupper() or name in (*TABLES, "Literal")

    def is_text(key: ast.expr) -> bool:
        return isinstance(key, ast.JoinedStr) or (isinstance(key, ast.Constant) and isinstance(key.value, str))

    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=value, slice=key, ctx=ast.Load()) if is_text(key) and not is_table(value):
                yield node
            case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[key, *_]) if is_text(key):
                if not is_table(value):
                    yield node


@pytest.mark.parametrize("name", BUILT_FROM_RECORDS)
def test_no_field_is_read_by_its_name_in_a_string(name: str) -> None:
    tree = ast.parse((ROOFTOP / name).read_text(encoding="utf-8"))
    assert [f"{node.lineno}: {ast.unparse(node)}" for node in string_keys(tree)] == []


def test_a_key_in_a_string_is_noticed() -> None:
    reads = ["data['b']", "data[f'{c}_s']", "data.get('d', 0)"]
    others = ["data['e'] = 1", "TABLE['f']", "rates.flops_per_s['g']", "data[h]", "data.get(i)"]
    code = "\n".join((*reads, *others))
    assert [ast.unparse(node) for node in string_keys(ast.parse(code))] == reads


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Record]:
    """An answer of each kind that takes no compiler."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "m.hlo").write_text(MODULE)
    (folder / "host.xplane.pb").write_bytes(xspace(tpu(stats=V5E)))
    compiled = explain_module(folder / "m.hlo", on=chip("v5e"), mesh={"data": 2, "tensor": 4}).report
    traced = explain(folder / "host.xplane.pb", modules=[MODULE], mesh={"data": 2, "tensor": 4}).record()
    where = Slice.parse("v5e:2x2")
    problem = Problem(
        model=load_model("llama3.2-1b"), slice=where, axes={"fsdp": 4}, remat="block", microbatches=1,
        workload=Workload(batch_tokens=4 * 2048, seq_len=2048),
    )  # fmt: skip
    plan = plan_training(problem, alternatives=0).plan
    refused = RefusedRecord(
        kind="compiled", schema=1, rooftop_version="0", plan=plan.document, slice=PlannedSlice.of(where),
        mesh=plan.mesh.described, fits=False, peak_bytes=2e10, planned_peak_bytes=plan.memory_bytes, buffers=(),
        capacity_bytes=1.69e10, memory={"weights": 1e10}, planned_memory=plan.memory, over_bytes=3e9, nearest=None,
        verdict="3.1 GB too much",
    )  # fmt: skip
    line = "%fusion.3 = bf16[32,4096]{1,0} fusion(bf16[32,8192]{1,0} %x, bf16[8192,4096]{1,0} %y), kind=kOutput"
    return {
        "compiled": compiled.record(),
        "refused": refused,
        "explained": traced,
        "difference": difference(trace_side("one", traced), trace_side("two", traced)),
        "operations": explain_operations(line, on="v5e").record,
    }


@pytest.mark.parametrize("name", ["compiled", "refused", "explained", "difference", "operations"])
def test_a_record_and_its_file_give_one_document(answers: Mapping[str, Record], name: str) -> None:
    written = json.dumps(answers[name].to_json())
    assert document(json.loads(written)) == document(answers[name])


#: Fields that answers of earlier versions do not have.
ADDED = {
    "compiled": ("plan", "options", "left_out", "called", "layers"),
    "refused": ("plan",),
    "explained": ("by_device", "processes"),
    "difference": ("memory",),
}


@pytest.mark.parametrize("name", ADDED)
def test_answers_of_earlier_versions_open(answers: Mapping[str, Record], name: str) -> None:
    data = {field: value for field, value in answers[name].to_json().items() if field not in ADDED[name]}
    assert opened_json("x.json", json.loads(json.dumps(data))).answer.title == document(answers[name]).title


@pytest.mark.parametrize("count", [-5, 10**400])
def test_an_impossible_figure_of_a_saved_ledger_is_refused(answers: Mapping[str, Record], count: int) -> None:
    data: Any = json.loads(json.dumps(answers["compiled"].to_json()))
    data["options"] = {"xla_level": -1}
    assert side_of("one", data).figures.step_s > 0
    data["ledger"][0]["count"] = count
    with pytest.raises(RooftopError, match=r"diff one ledger\[0\].count: got .*; accepted: a number from 0 to 1e\+36"):
        side_of("one", data)


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "compiled": (("step", "expected_s"), "step.expected_s: got 'soon'; accepted: a number"),
    "refused": (("plan", "remat", "name"), "plan.remat.name: got 7; accepted: a string"),
    "explained": (("rows", "0", "measured", "time_s"), "rows[0].measured.time_s: got 'soon'; accepted: a number"),
    "operations": (("operations", "0", "results"), "operations[0].results: got 'soon'; accepted: a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_saved_answer_with_a_wrong_field_is_refused_by_its_name(answers: Mapping[str, Record], name: str) -> None:
    (*path, last), said = WRONG[name]
    data = json.loads(json.dumps(answers[name].to_json()))
    at: Any = data
    for step in path:
        at = at[int(step)] if step.isdigit() else at[step]
    at[last] = 7 if name == "refused" else "soon"
    with pytest.raises(RooftopError) as refused:
        opened_json("x.json", data)
    assert said in str(refused.value) and "\n" not in str(refused.value)
