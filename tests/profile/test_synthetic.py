"""Traces made by hand, through JAX's own writer: overlaps, gaps and rates that are known come out exactly."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from rooftop.core.errors import RooftopError
from rooftop.hardware import chip
from rooftop.profile.idle import INSIDE, UNKNOWN
from rooftop.profile.planes import read_trace, trace_of
from rooftop.profile.trace import Trace, trace_files
from rooftop.profile.xplane import read_space, space_of
from tests.support.traces import (
    GATHER,
    GATHERED,
    KINDS,
    REDUCE,
    Event,
    fusion,
    measured,
    plane,
    seconds,
    step,
    the,
    tpu,
    xspace,
)


def test_every_moment_of_a_tpu_is_counted_once() -> None:
    result = measured(xspace(tpu()))
    assert result.marked == "marked on the device"
    assert [measured_step.number for measured_step in result.steps] == [7, 8]
    assert result.step_s == seconds(100)
    assert result.compute_s == seconds(63)
    assert result.exposed_s == seconds(21)
    assert result.held_s == seconds(6)
    assert result.idle.seconds == seconds(10)
    assert sum(row.time_s for row in result.rows) == pytest.approx(result.busy_s, rel=1e-12)


def test_an_asynchronous_collective_is_hidden_behind_what_computes_between_its_ends() -> None:
    gather = the(measured(xspace(tpu())), "all-gather-start.1")
    assert (gather.facts.kind, gather.facts.role) == ("all_gather", "start")
    assert gather.in_flight_s == seconds(40)
    assert gather.hidden_s == seconds(29)
    assert gather.exposed_s == seconds(11)


def test_a_synchronous_collective_is_exposed_from_end_to_end() -> None:
    reduce = the(measured(xspace(tpu())), "all-reduce.3")
    assert (reduce.in_flight_s, reduce.exposed_s, reduce.count) == (seconds(10), seconds(10), 1.0)


def test_a_transfer_that_the_trace_has_apart_counts_as_it_is() -> None:
    beside = {"Async XLA Ops": [Event(GATHER, 30, 50), Event(GATHER, 130, 150)]}
    ops = [event for event in (*step(0), *step(100)) if event.name != GATHERED]
    gather = the(measured(xspace(tpu(extra=beside, ops=ops))), "all-gather-start.1")
    assert (gather.in_flight_s, gather.hidden_s, gather.exposed_s) == (seconds(20), seconds(19), seconds(1))


def test_two_collectives_under_way_at_once_hide_nothing_from_each_other() -> None:
    permute = "%collective-permute-start.9 = f32[8]{0} collective-permute-start(f32[8]{0} %x), channel_id=3"
    beside = {"Async XLA Ops": [Event(permute, 65, 85)]}
    result = measured(xspace(tpu(extra=beside)))
    # Over two steps: 20 us under way, of which fusion.5 hides those from 82 to 85.
    assert the(result, "collective-permute-start.9").exposed_s == seconds(17 / 2)
    assert the(result, "all-reduce.3").exposed_s == seconds(10)
    # Together they cover 11 + 10 us a step, and what the permute has beyond them: 80 to 82 us.
    assert result.exposed_s == seconds(21 + 2 / 2)
    assert sum(row.time_s for row in result.rows) == pytest.approx(result.busy_s, rel=1e-12)


def test_rates_are_amounts_over_the_time_that_is_an_ops_own() -> None:
    ops = {op.name: op for op in measured(xspace(tpu())).ops}
    assert ops["fusion.1"].per_second(ops["fusion.1"].facts.flops) == pytest.approx(3e9 / 30e-6)
    assert ops["fusion.1"].per_second(ops["fusion.1"].facts.hbm_bytes) == pytest.approx(6e6 / 30e-6)
    assert ops["while.4"].time_s == seconds(6)
    assert ops["fusion.5"].facts.source == "model.py:12"


#: Self times in microseconds of the two steps of ``tpu``, as xprof 2.24.2 gives them in its HLO stats, 2026-11-20 (the
#: trace with categories, program and symbol ids added); 10 % is idle, fusion.1 has 100 TFLOP/s and 186.26 GiB/s.
XPROF = {
    "fusion.1": 60.0, "fusion.2": 58.0, "all-gather-start.1": 2.0, "all-gather-done.1": 20.0, "all-reduce.3": 20.0,
    "while.4": 12.0, "fusion.5": 8.0,
}  # fmt: skip


@pytest.mark.oracle
def test_xprof_has_the_same_times() -> None:
    result = measured(xspace(tpu()))
    ops = {op.name: op for op in result.ops}
    own = {name: op.time_s * len(result.steps) * 1e6 for name, op in ops.items()}
    # The two ends of the gather are one collective here.
    own["all-gather-start.1"] += own.pop("all-gather-done.1")
    expected = dict(XPROF)
    expected["all-gather-start.1"] += expected.pop("all-gather-done.1")
    assert own == pytest.approx(expected)
    assert result.idle.seconds / result.step_s == pytest.approx(0.100)
    first = ops["fusion.1"]
    assert first.per_second(first.facts.flops) == pytest.approx(100e12)
    assert first.per_second(first.facts.hbm_bytes) == pytest.approx(186.26 * 2**30, rel=1e-4)


def test_bytes_of_hbm_are_told_from_those_of_other_memories() -> None:
    # Two entries: (operation, memory 1 = HBM, bytes) and (operation, memory 3, bytes).
    breakdown = "\\n\\006\\010\\001\\020\\001\\030d\\n\\006\\010\\002\\020\\003\\030d"
    text = tpu().replace('name: "bytes_accessed"', 'name: "memory_access_breakdown"')
    number = 2  # of the stats in the order in which they are first used: flops, then this one
    assert f"metadata_id: {number} int64_value: 6000000" in text
    text = text.replace(
        f"metadata_id: {number} int64_value: 6000000", f'metadata_id: {number} bytes_value: "{breakdown}"'
    )
    text = text.replace(f"metadata_id: {number} int64_value: 2900000 }}", f'metadata_id: {number} bytes_value: "" }}')
    ops = {op.name: op for op in measured(xspace(text)).ops}
    assert ops["fusion.1"].facts.hbm_bytes == 100.0


def test_scopes_come_from_name_stacks() -> None:
    rows = {(row.scope, row.phase): row for row in measured(xspace(tpu())).rows}
    assert rows["layers/mlp/up", "forward"].time_s == seconds(29)
    assert measured(xspace(tpu())).attributed == pytest.approx(29 / 90)


def test_idle_between_programs_is_the_hosts_and_within_them_the_programs() -> None:
    ops = [event for event in (*step(0), *step(100)) if event.name != fusion(1)]
    result = measured(xspace(tpu(ops=ops)))
    assert result.idle.inside_s == seconds(30)
    assert result.idle.between_s == seconds(10)
    assert [(wait.reason, wait.seconds) for wait in result.idle.waits] == [
        (INSIDE, seconds(30)),
        (UNKNOWN, seconds(10)),
    ]


def test_the_host_says_why_devices_idle() -> None:
    host = plane(
        "/host:CPU",
        {
            "python": [
                Event("train", 0, 95, {"step_num": 7}),
                Event("PjitFunction(step)", 1, 3),
                Event("$loop.py:3 main", 85, 200),
                Event("$data.py:20 next_batch", 88, 98),
                Event("$time sleep", 90, 96),
                Event("PjitFunction(step)", 99, 101),
            ],
            "other": [Event("$other.py:1 work", 0, 200)],
        },
    )
    # The devices idle from 90 to 100 and from 190 to 200.
    waits = {(wait.reason, wait.what, wait.where): wait.seconds for wait in measured(xspace(tpu(), host)).idle.waits}
    assert waits["sleeps", "time sleep", "data.py:20 next_batch"] == seconds(6 / 2)
    assert waits["runs Python", "", "data.py:20 next_batch"] == seconds(2 / 2)
    assert waits["dispatches", "PjitFunction(step)", "loop.py:3 main"] == seconds(1 / 2)
    assert waits["runs Python", "", "loop.py:3 main"] == seconds(11 / 2)
    assert sum(waits.values()) == seconds(10)


def test_hosts_are_measured_by_their_own_clocks_and_put_together() -> None:
    slow = [Event(event.name, event.start, event.end) for event in (*step(0), *step(100)) if event.name != REDUCE]
    first, second = xspace(tpu(0)), xspace(tpu(1, timestamp_ns=999_000_000, ops=slow))
    result = measured(first, second)
    assert result.devices == 2
    assert result.exposed_s == seconds((21 + 11) / 2)
    assert result.idle.seconds == seconds((10 + 20) / 2)


def test_steps_marked_on_the_host_are_executions_on_the_device() -> None:
    marks = plane(
        "/host:CPU", {"python": [Event("train", 5 * at, 5 * at + 4, {"step_num": 40 + at}) for at in range(3)]}
    )
    lines = {
        "XLA Modules": [Event("jit_step(123)", 100 * at, 100 * at + 90) for at in range(3)],
        "XLA Ops": [event for at in range(3) for event in step(100 * at)],
    }
    result = measured(xspace(plane("/device:TPU:0", lines, None, KINDS), marks))
    assert [(measured_step.number, measured_step.counted) for measured_step in result.steps] == [
        (40, True),
        (41, True),
        (42, False),
    ]
    # What follows the last step is unknown; those before it last until the next begins.
    assert result.step_s == seconds(100)
    assert result.idle.seconds == seconds(10)


def test_a_long_program_behind_the_steps_is_none_of_them() -> None:
    marks = plane(
        "/host:CPU", {"python": [Event("train", 5 * at, 5 * at + 4, {"step_num": 40 + at}) for at in range(3)]}
    )
    evaluation = [Event("jit_evaluate(9)", 300 + 1000 * at, 1200 + 1000 * at) for at in range(4)]
    lines = {
        "XLA Modules": [*(Event("jit_step(123)", 100 * at, 100 * at + 90) for at in range(3)), *evaluation],
        "XLA Ops": [*(event for at in range(3) for event in step(100 * at)), Event(fusion(9), 300, 1200)],
    }
    result = measured(xspace(plane("/device:TPU:0", lines, None, KINDS), marks))
    assert [measured_step.number for measured_step in result.steps] == [40, 41, 42]
    assert result.step_s == seconds(100)


def test_streams_of_a_gpu_overlap() -> None:
    kernel = {"hlo_op": "loop_fusion.1", "hlo_module": "jit_f", "program_id": 5}
    nccl = {"hlo_op": "all-gather-start.2", "hlo_module": "jit_f", "program_id": 5}
    gpu = plane(
        "/device:GPU:0",
        {
            "Stream #13(Compute)": [Event("loop_fusion_1", 0, 50, kernel), Event("loop_fusion_1", 90, 100, kernel)],
            "Stream #14(NCCL)": [
                Event("ncclDevKernel_AllGather_RING_LL", 20, 80, nccl),
                Event("ncclDevKernel_AllGather_RING_LL", 95, 99, nccl),
            ],
            "Launch Stats": [Event("ignored", 0, 1000)],
        },
    )
    result = measured(xspace(gpu))
    gather = the(result, "all-gather-start.2")
    assert result.trace.kind == "gpu"
    assert (gather.facts.kind, gather.in_flight_s, gather.hidden_s) == ("all_gather", seconds(60), seconds(30))
    assert result.step_s == seconds(90), "its executions recur: the second begins at 90"


def test_memory_over_time_is_what_allocators_say() -> None:
    host = plane(
        "/host:CPU",
        {
            "allocator": [
                Event(
                    "MemoryAllocation",
                    at,
                    at,
                    {"allocator_name": "TPU_0_bfc", "bytes_allocated": used, "bytes_available": 1000 - used},
                )
                for at, used in ((1, 100), (2, 700), (3, 400))
            ]
        },
    )
    result = measured(xspace(tpu(), host))
    (memory,) = result.memory
    assert (memory.allocator, memory.peak_bytes, memory.capacity_bytes) == ("TPU_0_bfc", 700.0, 1000.0)
    assert [taken for _, taken in memory.points] == [100.0, 700.0, 400.0]
    assert "memory" not in result.empty


def test_an_empty_table_says_why() -> None:
    result = measured(xspace(tpu(ops=[Event(fusion(1), 0, 100), Event(fusion(1), 100, 200)])))
    assert result.empty["collectives"].startswith("no op of the trace is a collective")
    assert result.empty["idle"] == "the devices are never idle within the counted steps"
    assert "MemoryAllocation" in result.empty["memory"]


@pytest.mark.parametrize(
    ("planes", "why"),
    [
        ([plane("/device:TPU:0", {"XLA Ops": []})], "its device planes have none"),
        ([plane("/host:CPU", {"python": [Event("main", 0, 5)]})], "threads of a host only"),
        ([plane("Task Environment", {})], "planes of devices"),
    ],
)
def test_a_trace_in_which_nothing_ran_says_what_it_lacks(planes: list[str], why: str) -> None:
    with pytest.raises(RooftopError, match=why):
        measured(xspace(*planes))


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="JAX 0.12's reader aborts on these stats")
def test_the_reader_agrees_with_jaxs_own(tmp_path: Path) -> None:
    file = tmp_path / "h.xplane.pb"
    stats = {"a": 3, "b": 2.5, "c": "words"}
    data = xspace(tpu(), plane("/host:CPU", {"t": [Event("x", 1, 2, stats), Event("y", 3, 9, {"a": -7})]}))
    file.write_bytes(data)
    space, oracle = read_space(file), ProfileData.from_serialized_xspace(data)
    assert space.host == "h"
    for own, other in zip(space.planes, oracle.planes, strict=True):
        assert own.name == other.name
        for mine, theirs in zip(own.lines, other.lines, strict=True):
            events, expected = mine.read(tuple(stats)), list(theirs.events)
            assert [own.kinds[int(kind)].name for kind in events.kinds] == [event.name for event in expected]
            spans = np.array([(event.start_ns, event.duration_ns) for event in expected]).reshape(-1, 2)
            np.testing.assert_allclose((events.starts - events.starts[:1]) / 1e3, spans[:, 0] - spans[:1, 0], atol=1e-3)
            np.testing.assert_allclose((events.ends - events.starts) / 1e3, spans[:, 1], atol=1e-3)
            for name, column in events.stats.items():
                values = [dict(event.stats).get(name) for event in expected]
                read = [
                    (column.texts[int(value)] if column.texts else value) if present else None
                    for value, present in zip(column.values.tolist(), column.present.tolist(), strict=True)
                ]
                assert read == values


def test_files_that_are_no_traces_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "x.xplane.pb"
    for content in (b"", b"hello, this is text\n", bytes(range(256)), xspace(tpu())[:-7]):
        file.write_bytes(content)
        with pytest.raises(RooftopError) as error:
            read_trace(file)
        assert str(error.value).startswith("trace: ")
        assert "\n" not in str(error.value)
    with pytest.raises(RooftopError, match="there is no such path"):
        trace_files(tmp_path / "nowhere")


def test_the_newest_session_of_a_folder_counts_with_all_its_hosts(tmp_path: Path) -> None:
    for session, hosts in (("2026_01_01", ("a",)), ("2026_01_02", ("a", "b"))):
        for host in hosts:
            file = tmp_path / "plugins" / "profile" / session / f"{host}.xplane.pb"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(xspace(tpu()))
    trace: Trace = read_trace(tmp_path)
    assert [host.name for host in trace.hosts] == ["a", "b"]
    assert len(trace.devices) == 2


def test_a_chip_by_the_type_that_a_trace_tells() -> None:
    from rooftop.explain.measured.roofs import chip_of_trace, roofs

    trace = trace_of([space_of(xspace(tpu(stats={"device_type_string": "TPU v5 lite"})), host="h")])
    assert chip_of_trace(trace) == chip("v5e")
    roof = roofs(trace, chip_of_trace(trace))
    assert roof is not None
    assert roof.chip == "v5e"
