"""Mesh axes by the names of frameworks."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from rooftop.arrays import AXES, Mesh, parse_axes
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice

DATA = tomllib.loads((resources.files("rooftop.arrays") / "axes.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp=4,tp=2", {"data": 4, "tensor": 2}),
        ("DP=4,TP=2,PP=8", {"data": 4, "tensor": 2, "stage": 8}),
        ("dp_replicate=2,dp_shard=16,cp=2,tp=4", {"data": 2, "fsdp": 16, "context": 2, "tensor": 4}),
        ("--tensor-model-parallel-size=8,pipeline_model_parallel_size=2", {"tensor": 8, "stage": 2}),
        ("ici_fsdp_parallelism=64,ici_expert_parallelism=4", {"fsdp": 64, "expert": 4}),
        ("ep=8,sp=2,Tensor=2", {"expert": 8, "context": 2, "tensor": 2}),
    ],
)
def test_frameworks_names_are_rooftop_s_axes(text, sizes):
    assert parse_axes(text) == sizes


def test_every_name_of_the_table_is_one_axis_or_ambiguous():
    names = [name for texts in DATA["names"].values() for name in texts.split()]
    assert set(DATA["names"]) == set(AXES)
    assert len(names) == len(set(names)) and not set(names) & (set(DATA["ambiguous"]) | set(AXES))


@pytest.mark.parametrize("name", DATA["ambiguous"])
def test_a_name_of_several_axes_is_refused_with_the_choice(name):
    with pytest.raises(
        RooftopError, match=rf"^mesh axis: got '{name}'; accepted: \w+.* \((tp|ep|dp|cp|dp_\w+)\)"
    ) as error:
        parse_axes(f"{name}=2")
    assert "\n" not in str(error.value)


def test_an_axis_under_two_names_is_given_twice():
    with pytest.raises(RooftopError, match="each axis once; data is given twice"):
        parse_axes("dp=2,data=4")


def test_axes_of_the_book_s_notation_keep_their_names():
    assert parse_axes("X=2,dp=2", None) == {"X": 2, "dp": 2}
    assert Mesh.from_layout(Slice.parse("v5e:2x2"), "dp=x,tp=y").shape == {"dp": 2, "tp": 2}


def test_a_layout_of_a_model_takes_the_names_of_frameworks():
    mesh = Mesh.from_layout(Slice.parse("v5e:2x2"), "DP_SHARD=x,tp=y", of_model=True)
    assert mesh.layout == "fsdp=x,tensor=y"
