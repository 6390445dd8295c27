"""The library: its names, its arguments, its results, and that it says what the command line says."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rooftop as library
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.hardware import Slice
from rooftop.library.results import Result, flat
from rooftop.models import load_model

FUNCTIONS = [name for name in library.__all__ if not name.startswith("__")]


def test_dir_lists_every_function() -> None:
    assert set(FUNCTIONS) < set(dir(library))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_there_and_documented(name: str) -> None:
    function = getattr(library, name)
    assert callable(function)
    assert function.__name__ == name
    assert function.__doc__
    public = [value for value in function.__annotations__.values() if "Any" in str(value)]
    assert public == []


def test_the_stub_names_the_same_functions() -> None:
    stub = Path(library.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert sorted(re.findall(r"import (\w+) as \1", stub)) == sorted(FUNCTIONS)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'plan_traning'"):
        library.plan_traning  # noqa: B018


def test_importing_a_package_of_the_same_name_does_not_hide_a_function() -> None:
    for room in ("check", "explain", "simulate", "target", "tune"):
        importlib.import_module(f"rooftop.{room}")
        assert callable(getattr(library, room))
    for module in ("check.report", "explain.join", "tune.report"):
        importlib.import_module(f"rooftop.{module}")
        assert callable(getattr(library, module.partition(".")[0]))


def test_import_is_light() -> None:
    code = "import sys, rooftop; dir(rooftop); print([name for name in sys.modules if name.startswith('rooftop.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


CALLS: dict[str, tuple[Callable[[], Result], tuple[str, ...]]] = {
    "chip": (lambda: library.chip("v5p"), ("chips", "v5p")),
    "slice": (lambda: library.chip("v5e:16x16@4"), ("chips", "v5e:16x16@4")),
    "chips": (library.chips, ("chips",)),
    "model": (lambda: library.model("llama3-8b", seq="8Ki"), ("model", "llama3-8b", "--seq", "8Ki")),
    "models": (library.models, ("model",)),
    "matmul": (
        lambda: library.matmul(
            "bf16[B_X, D_Y] @ bf16[D_Y, F] -> bf16[B_X, F]",
            dims={"B": 8192, "D": 8192, "F": 32768},
            mesh={"X": 4, "Y": 4},
            on="v5e:4x4",
        ),
        (
            "matmul", "bf16[B_X, D_Y] @ bf16[D_Y, F] -> bf16[B_X, F]", "--dims", "B=8192,D=8192,F=32Ki",
            "--mesh", "X=4,Y=4", "--on", "v5e:4x4",
        ),
    ),
    "array": (
        lambda: library.matmul("int8[I_XY, J]", dims="I=128,J=2048", mesh="X=2,Y=8,Z=2"),
        ("matmul", "int8[I_XY, J]", "--dims", "I=128,J=2048", "--mesh", "X=2,Y=8,Z=2"),
    ),
    "plan_training": (
        lambda: library.plan_training(load_model("llama3-8b"), on=Slice.parse("v5e:4x4"), batch_seqs=16),
        ("plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "16"),
    ),
    "plan_training of results": (
        lambda: library.plan_training(
            library.model("llama3.2-1b"), on=library.chip("v5e:2x2"), batch_tokens="64Ki", seq="2Ki",
            mesh={"fsdp": 4}, weights_dtype="BFloat16", assume="weight_gather=0.5", price="2",
        ),
        (
            "plan", "train", "llama3.2-1b", "--on", "v5e:2x2", "--batch-tokens", "64Ki", "--seq", "2048",
            "--mesh", "fsdp=4", "--weights-dtype", "bf16", "--assume", "weight_gather=0.5", "--price", "2",
        ),
    ),
    "explain_operations": (
        lambda: library.explain_operations("%x = f32[3,5]{1,0:T(2,2)} parameter(0)", on="v5p"),
        ("explain", "--op", "%x = f32[3,5]{1,0:T(2,2)} parameter(0)", "--on", "v5p"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_result_is_what_the_verb_says(rooftop: Callable[..., Any], name: str) -> None:
    call, arguments = CALLS[name]
    result = call()
    answer, printed = json.loads(json.dumps(result.to_json())), rooftop(*arguments, "--json").json
    # The command line plans other frameworks too.
    assert answer | {"frameworks": printed.get("frameworks")} == printed | {"frameworks": printed.get("frameworks")}
    assert result.rows
    for row in result.rows:
        assert all(value is None or isinstance(value, (str, int, float, tuple)) for value in row.values())
    assert repr(result) == result.summary
    assert 1 <= len(result.summary.splitlines()) <= 3
    page = result._repr_html_()
    assert page.startswith('<div class="rooftop">')
    assert "<table" in page
    result.raise_if_infeasible()


def test_a_plan_that_does_not_fit_is_returned_and_says_so() -> None:
    plan = library.plan_training("llama3-70b", on="v5e:2x2", batch_seqs=4)
    assert "does not fit" in repr(plan)
    with pytest.raises(Infeasible, match="does not fit"):
        plan.raise_if_infeasible()


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: library.chip("v5q"), "chip: got 'v5q'; accepted: did you mean"),
        (lambda: library.model("llama3-8c"), "model: got 'llama3-8c'; accepted: did you mean"),
        (lambda: library.matmul("bf16[I_X, J]", mesh="X=2", dims="I=2,J=2", on="v5e:1x1"), "mesh"),
        (lambda: library.matmul("bf16[I] -> bf16[I]", mesh="X=2"), "on: got nothing; accepted: a slice"),
        (lambda: library.plan_training("llama3-8b", on="v5e:4x4"), "batch: got nothing; accepted: one of"),
        (
            lambda: library.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=16, matmul_dtype="int9"),
            "matmul-dtype: got 'int9'; accepted: did you mean int8",
        ),
        (lambda: library.compile({"kind": "serve"}), "plan: got 'a mapping'; accepted: a plan.json written by"),
        (lambda: library.compile("nowhere.json", timeout="5"), "plan: got 'nowhere.json'"),
        (lambda: library.explain("nowhere"), "trace: got 'nowhere'"),
        (lambda: library.explain_operations("%x", figures={"hop_s": 1}), "op: got '%x'"),
        (lambda: library.diff("a.json", "b.json"), "diff: got 'a.json'"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], object], line: str) -> None:
    with pytest.raises(RooftopError) as caught:
        call()
    assert str(caught.value).startswith(line)


def test_two_plans_differ_by_their_rows() -> None:
    small, large = (library.plan_training("llama3.2-1b", on="v5e:2x2", batch_seqs=seqs) for seqs in (8, 16))
    difference = library.diff(small, large)
    assert "a step, then" in repr(difference)
    assert {"scope", "phase", "change_s", "before.time_s"} <= set(difference.rows[0])


def test_nested_values_get_dotted_names() -> None:
    data = {"name": "x", "time_s": {"mxu": 1.0}, "shape": [4, 2], "steps": [{"op": "a"}], "none": None}
    assert flat(data) == {"name": "x", "time_s.mxu": 1.0, "shape": "4,2", "none": None}
