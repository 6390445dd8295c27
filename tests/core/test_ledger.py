"""Rows and ledgers: their JSON, what they refuse, and their sums over steps and over sweeps."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.core.ledger import COLLECTIVES, RESOURCES, Collective, Ledger, Row
from rooftop.core.quantities import DTYPE_BYTES
from rooftop.core.records import read_record
from rooftop.core.scopes import PHASES, SCOPES, UNSCOPED

LEAVES = tuple(scope.replace("*", "user_id") for scope in SCOPES)

numbers = st.floats(min_value=0, max_value=1e30)
times = st.dictionaries(st.sampled_from(RESOURCES), numbers)
collectives = st.builds(
    Collective,
    kind=st.sampled_from(COLLECTIVES),
    axes=st.lists(st.sampled_from(["data", "fsdp", "tensor"]), unique=True, min_size=1).map(tuple),
    bytes=numbers,
    wire_bytes=numbers,
    critical=st.booleans(),
    time_s=st.dictionaries(st.sampled_from(["ici", "dcn"]), numbers),
    expected_s=numbers,
    exposed_s=numbers,
)
rows = st.builds(
    Row,
    scope=st.sampled_from([*LEAVES, UNSCOPED]),
    phase=st.sampled_from(PHASES),
    count=st.integers(min_value=1, max_value=10**6),
    flops=st.dictionaries(st.sampled_from(sorted(DTYPE_BYTES)), numbers),
    kernel_flops=numbers,
    vector_flops=numbers,
    hbm_bytes=numbers,
    collectives=st.lists(collectives, max_size=3).map(tuple),
    time_s=times,
    expected_s=numbers,
    serial_s=numbers,
    formula=st.text(),
)
ledgers = st.lists(rows, max_size=5).map(tuple).map(Ledger)

ROW = Row(
    scope="layers/mlp/up",
    phase="forward",
    count=80,
    flops={"bf16": 6.0, "int8": 2.0},
    kernel_flops=1.0,
    collectives=(
        Collective(kind="all_gather", axes=("fsdp",), bytes=8.0, wire_bytes=7.0, critical=False, time_s={"ici": 0.5}),
    ),
    time_s={"mxu": 2.0, "ici": 0.5},
    expected_s=2.5,
    serial_s=3.0,
    formula="2 B D F",
)


@given(rows)
def test_a_row_comes_back_from_json_text(row):
    assert read_record(Row, json.loads(json.dumps(row.to_json(), allow_nan=False)), "row") == row


@given(ledgers)
def test_a_ledger_comes_back_from_json_text(ledger):
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json(), allow_nan=False))) == ledger


def test_the_json_of_a_row():
    assert ROW.to_json() == {
        "scope": "layers/mlp/up",
        "phase": "forward",
        "count": 80,
        "flops": {"bf16": 6, "int8": 2},
        "kernel_flops": 1,
        "vector_flops": 0,
        "hbm_bytes": 0,
        "collectives": [
            {
                "kind": "all_gather",
                "axes": ["fsdp"],
                "bytes": 8,
                "wire_bytes": 7,
                "critical": False,
                "time_s": {"ici": 0.5},
                "expected_s": 0,
                "exposed_s": 0,
            }
        ],
        "time_s": {"mxu": 2, "ici": 0.5},
        "expected_s": 2.5,
        "serial_s": 3,
        "formula": "2 B D F",
        "bound": "mxu",
    }


def test_numpy_scalars_become_plain_json():
    row = replace(ROW, count=np.int64(80), flops={"bf16": np.float64(6.5)}, expected_s=np.float32(0.25))
    data = row.to_json()
    assert json.loads(json.dumps(data)) == data
    assert (data["count"], data["flops"], data["expected_s"]) == (80, {"bf16": 6.5}, 0.25)


def test_a_sweep_is_no_json():
    with pytest.raises(TypeError):
        replace(ROW, expected_s=np.array([1.0, 2.0])).to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scope": "layers//mlp"}, "row.scope: got 'layers//mlp'"),
        ({"scope": "layers/mlp/"}, "row.scope: got 'layers/mlp/'"),
        ({"scope": ""}, "row.scope: got ''; accepted: a scope, such as layers/mlp/up"),
        ({"phase": "training"}, "row.phase: got 'training'"),
        ({"time_s": {"icy": 1.0}}, "row.time_s: got 'icy'; accepted: mxu, vpu, hbm, ici, dcn, pcie, host"),
        ({"flops": {"bfloat16": 1.0}}, "row.flops: got 'bfloat16'; accepted: bf16, f32"),
    ],
)
def test_a_row_holds_only_agreed_names(changes, message):
    with pytest.raises(RooftopError) as caught:
        replace(ROW, **changes)
    assert str(caught.value).startswith(message)


def test_a_collective_holds_only_agreed_names():
    with pytest.raises(RooftopError, match=r"^collective.kind: got 'gather'; accepted: all_gather, reduce_scatter"):
        replace(ROW.collectives[0], kind="gather")


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"scope": "embed"},
        {"scope": "embed", "phase": "forward", "colour": "red"},
        {"scope": "embed", "phase": "forward", "time_s": 5},
        {"scope": 5, "phase": "forward"},
        {"scope": "embed", "phase": "forward", "collectives": [{"kind": "all_gather"}]},
        {"scope": "embed", "phase": "forward", "collectives": ["all_gather"]},
        {"scope": "embed", "phase": "forward", "collectives": 5},
        5,
        "row",
        ["row"],
        None,
    ],
)
def test_json_that_is_no_row_is_refused_in_one_line(data):
    with pytest.raises(RooftopError, match=r"^ledger row.*: got .*; accepted: ") as caught:
        read_record(Row, data, "ledger row")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [5, None])
def test_json_that_is_no_ledger_is_refused(data):
    with pytest.raises(RooftopError, match=r"^ledger: got .*; accepted: a list"):
        Ledger.from_json(data)


def test_bound_is_the_busiest_resource():
    assert ROW.bound == "mxu"
    assert replace(ROW, time_s={"hbm": 1.0, "dcn": 3.0, "mxu": 2.0}).bound == "dcn"
    assert replace(ROW, time_s={}).bound == ""


def test_sums_apply_counts():
    other = Row(
        scope="loss",
        phase="forward",
        count=2,
        flops={"bf16": 10.0},
        time_s={"mxu": 1.0, "hbm": 4.0},
        expected_s=4.0,
        serial_s=5.0,
    )
    ledger = Ledger((ROW, other))
    assert ledger.total("mxu") == 80 * 2.0 + 2 * 1.0
    assert ledger.total("hbm") == 8.0
    assert ledger.total("dcn") == 0.0
    assert ledger.expected_s == 80 * 2.5 + 2 * 4.0
    assert ledger.serial_s == 80 * 3.0 + 2 * 5.0
    assert ledger.flops() == 80 * (6 + 2 + 1) + 2 * 10
    assert ledger.flops(kernels=False) == 80 * (6 + 2) + 2 * 10


def test_an_empty_ledger_sums_to_nothing():
    ledger = Ledger(())
    assert (len(ledger), ledger.total("mxu"), ledger.expected_s, ledger.serial_s, ledger.flops()) == (0, 0, 0, 0, 0)


@given(st.lists(rows, min_size=1, max_size=4), st.integers(min_value=2, max_value=5))
def test_the_sums_of_a_sweep_are_those_of_its_candidates(some, candidates):
    """Numbers may be arrays, one entry per candidate: each entry is what the scalar ledger says."""
    scale = np.arange(1.0, candidates + 1)

    def scaled(row: Row, factor: float | np.ndarray) -> Row:
        return replace(
            row,
            flops={name: amount * factor for name, amount in row.flops.items()},
            kernel_flops=row.kernel_flops * factor,
            time_s={name: amount * factor for name, amount in row.time_s.items()},
            expected_s=row.expected_s * factor,
            serial_s=row.serial_s * factor,
        )

    sweep = Ledger(tuple(scaled(row, scale) for row in some))
    for index, factor in enumerate(scale):
        one = Ledger(tuple(scaled(row, factor) for row in some))
        assert sweep.expected_s[index] == one.expected_s
        assert sweep.serial_s[index] == one.serial_s
        assert np.broadcast_to(sweep.flops(), scale.shape)[index] == one.flops()
        for resource in RESOURCES:
            assert np.broadcast_to(sweep.total(resource), scale.shape)[index] == one.total(resource)


@given(ledgers)
def test_rows_by_key_are_all_the_rows_in_order(ledger):
    groups = ledger.by_key()
    assert list(groups) == list(dict.fromkeys(row.key for row in ledger))
    for key, members in groups.items():
        assert members == [row for row in ledger if row.key == key]
        assert all((row.scope, row.phase) == key for row in members)
    assert sum(len(members) for members in groups.values()) == len(ledger)
