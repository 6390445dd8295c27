"""SparseCores in traces made by hand: activity of each core, what runs beside it, minibatches and dropped ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rooftop.core.records import schema
from rooftop.explain.measured.report import ExplainedRecord, explain
from rooftop.present.traced import measured_lanes
from tests.support.traces import Event, fusion, measured, plane, seconds, tpu, xspace

LOOKUP = '%lookup.1 = f32[1024,16] custom-call(%ids), custom_call_target="SparseDenseMatmulWithMinibatchingOp"'
UPDATE = '%update.2 = f32[4096,16] custom-call(%gradients), custom_call_target="SparseDenseMatmulGradOptimizerUpdate"'
SORT = "%sort.3 = s32[1024] sort(%ids)"
#: A step of the TensorCore: it computes from 0 to 60 us and is idle after that.
STEP = [Event(fusion(1), 0, 60)]


def sparse_core(core: int, ops: list[Event], *, device: int = 0, word: str = "") -> str:
    """The plane of a SparseCore."""
    lines = {
        "Sparse Core Steps": [Event("1", 0, 100), Event("2", 100, 200)],
        "Sparse Core Modules": [Event("jit_step(123)", 0, 100), Event("jit_step(123)", 100, 200)],
        "Sparse Core Ops": ops,
    }
    kinds = {UPDATE: {"tf_op": "jit(step)/tables/users/update/custom-call:"}}
    return plane(f"/device:TPU:{device} SparseCore {word}{core}", lines, None, kinds)


def twice(*events: Event) -> list[Event]:
    """The same in both steps."""
    return [Event(event.name, event.start + at, event.end + at, event.stats) for at in (0, 100) for event in events]


def core_of(ops: list[Event], *others: str, **how: Any) -> Any:
    """Measurements of a trace with one SparseCore."""
    return measured(xspace(tpu(ops=twice(*STEP)), sparse_core(0, ops, **how), *others)).sparse


def test_a_core_is_busy_beside_its_tensor_core_alone_or_idle() -> None:
    measured_core = core_of(twice(Event(LOOKUP, 40, 70), Event(UPDATE, 80, 90)))
    (core,) = measured_core.cores
    assert (core.device, core.core) == (0, 0)
    assert core.busy_s == seconds(40)
    assert core.beside_s == seconds(20)
    assert core.alone_s == seconds(20)
    assert core.idle_s == seconds(60)
    assert measured_core.overlap == pytest.approx(0.5)
    assert [(op.name, op.count, op.most, op.lookup) for op in core.ops] == [
        ("lookup.1", 1.0, 1, True),
        ("update.2", 1.0, 1, True),
    ]
    assert core.ops[0].time_s == seconds(30)


def test_every_core_of_every_device_is_apart_and_no_device_of_its_own() -> None:
    ops, both = twice(Event(LOOKUP, 0, 10)), (tpu(0, ops=twice(*STEP)), tpu(1, ops=twice(*STEP)))
    result = measured(
        xspace(*both, sparse_core(0, ops), sparse_core(1, ops, word="Offload ")),
        xspace(tpu(0, ops=twice(*STEP)), sparse_core(3, twice(Event(LOOKUP, 0, 20)))),
    )
    assert result.devices == 3
    assert [(core.host, core.device, core.core) for core in result.sparse.cores] == [
        ("host0", 0, 0), ("host0", 0, 1), ("host1", 0, 3),
    ]  # fmt: skip
    assert result.sparse.cores[2].busy_s == seconds(20)
    # What a SparseCore does is no time of the TensorCore.
    assert result.compute_s == seconds(60)


def test_ops_that_run_several_times_a_step_are_minibatches() -> None:
    once = core_of(twice(Event(LOOKUP, 0, 10), Event(SORT, 10, 11), Event(SORT, 12, 13), Event(SORT, 14, 15)))
    assert once.minibatches == 1, "an op that reads no table may run as often as it likes"
    ops = [Event(LOOKUP, 0, 10), Event(LOOKUP, 100, 110), Event(LOOKUP, 120, 130), Event(LOOKUP, 140, 150)]
    several = core_of(ops)
    assert several.minibatches == 3
    (op,) = several.cores[0].ops
    assert (op.count, op.most) == (2.0, 3)
    assert op.time_s == seconds(40 / 2)


def test_the_host_tells_of_passes_and_of_dropped_ids() -> None:
    marks = [Event("preprocess", at, at + 5, {"dropped_ids": ids, "minibatches": 2}) for at, ids in ((1, 3), (101, 4))]
    late = Event("preprocess", 500, 505, {"dropped_ids": 100, "minibatches": 9})
    host = plane("/host:CPU", {"python": [*marks, late]})
    core = core_of(twice(Event(LOOKUP, 0, 10)), host)
    assert (core.minibatches, core.dropped_ids) == (2, 7), "batches after the counted steps do not count"
    assert core_of(twice(Event(LOOKUP, 0, 10))).dropped_ids is None


def test_without_sparse_cores_there_is_nothing() -> None:
    sparse = measured(xspace(tpu())).sparse
    assert (sparse.cores, sparse.overlap, sparse.minibatches, sparse.dropped_ids) == ((), None, 0, None)


def test_what_to_try_and_what_is_printed(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    ops = [*twice(Event(LOOKUP, 60, 80)), Event(LOOKUP, 81, 95)]
    host = plane("/host:CPU", {"python": [Event("preprocess", 1, 2, {"dropped_ids": 5})]})
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xspace(tpu(ops=twice(*STEP)), sparse_core(0, ops), host))
    advice = {advice.rule: advice for advice in explain(file).advice}
    assert "its TensorCore computes nothing" in advice["sparse_core_alone"].evidence
    assert "27 us" in advice["sparse_core_alone"].evidence
    assert "up to 2 passes" in advice["minibatching"].evidence
    assert "5 ids were dropped" in advice["dropped_ids"].evidence
    data = rooftop("explain", str(file), "--json").json
    jsonschema.validate(data, schema(ExplainedRecord))
    assert data["sparse_cores"]["overlap"] == 0.0
    page = tmp_path / "page.html"
    printed = rooftop("explain", str(file), "--report", str(page)).out
    assert "TPU 0 SparseCore 0" in printed
    assert "At most 2 passes over the tables a step; 5 ids dropped." in printed
    assert "SparseCores, a step" in page.read_text()
    lane = next(
        candidate for candidate in measured_lanes(explain(file)).lanes if candidate.name == "TPU 0 SparseCore 0"
    )
    assert [span.name for span in lane.spans] == ["lookup.1", "lookup.1"]
