"""Who the others wait for: a device that computes longer, and a process that is late on its host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rooftop.explain.measured.report import explain
from rooftop.explain.measured.stragglers import process_times, straggling
from rooftop.present.documents.explained import explained
from rooftop.profile.measured import DeviceTime
from tests.support.traces import (
    GATHER,
    GATHERED,
    LOOP,
    REDUCE,
    Event,
    fusion,
    measured,
    plane,
    seconds,
    tpu,
    xspace,
)


def slow_step(at: float) -> list[Event]:
    """The step of a device whose first fusion takes 20 us longer: it waits for nobody."""
    return [
        Event(fusion(1), at, at + 50),
        Event(GATHER, at + 50, at + 51),
        Event(fusion(2), at + 51, at + 79),
        Event(GATHERED, at + 79, at + 79.5),
        Event(REDUCE, at + 79.5, at + 80),
        Event(LOOP, at + 80, at + 90),
        Event(fusion(5), at + 82, at + 86),
    ]


SLOW = xspace(tpu(ops=[*slow_step(0), *slow_step(100)]))


def test_the_device_that_the_others_wait_for_is_named() -> None:
    result = measured(xspace(tpu()), SLOW, xspace(tpu()))
    assert [device.host for device in result.by_device] == ["host1", "host0", "host2"]
    slow, other, _ = result.by_device
    # 50 + 28 in fusions and 10 in the loop; and 30 + 29 + 4 in ops (6 more in the loop).
    assert slow.compute_s == seconds(88) and slow.exposed_s == seconds(2)
    assert other.compute_s == seconds(69) and other.exposed_s == seconds(21)
    assert all(device.step_s == seconds(100) and device.idle_s == seconds(10) for device in result.by_device)
    (said,) = straggling(result.by_device, (), result.step_s)
    assert said == (
        "device 0 of host1 computes 19 us a step longer than the median device, and waits 19 us less for collectives: "
        "the others wait for it"
    )


def test_devices_that_are_alike_or_wait_for_nobody_are_not_named() -> None:
    alike = measured(xspace(tpu()), xspace(tpu()))
    assert not list(straggling(alike.by_device, (), alike.step_s))
    busy = DeviceTime(host="a", ordinal=0, step_s=1.0, compute_s=0.9, exposed_s=0.1, idle_s=0.0)
    idle = DeviceTime(host="b", ordinal=0, step_s=1.0, compute_s=0.5, exposed_s=0.1, idle_s=0.4)
    assert not list(straggling([busy, idle], (), 1.0))


RECORDS = [
    {"step": 1, "slowest_process": 1, "slowest_host_s": 0.5, "median_host_s": 0.1},
    {"step": 2, "slowest_process": 1, "slowest_host_s": 0.3, "median_host_s": 0.1},
    {"step": 3, "slowest_process": 0, "slowest_host_s": 0.1, "median_host_s": 0.1},
    {"step": 3, "eval_loss": 2.0},
]


def test_the_process_that_is_late_is_named() -> None:
    first, second = process_times(RECORDS)
    assert (first.process, first.steps, first.of_steps, second.process) == (1, 2, 3, 0)
    assert first.host_s == pytest.approx(0.4) and first.median_host_s == pytest.approx(0.1)
    assert first.waited_s == pytest.approx(0.2) and second.waited_s == 0.0
    (said,) = straggling((), (first, second), step_s=1.0)
    assert said.startswith("process 1 was the slowest on its host in 2 of 3 steps of the run (400 ms")
    assert not list(straggling((), (first, second), step_s=100.0))


@pytest.mark.parametrize("record", [{}, {"slowest_process": "1"}, {"slowest_process": -1, "slowest_host_s": None}])
def test_records_without_processes_say_nothing(record: dict[str, object]) -> None:
    assert process_times([record]) == ()


def test_a_run_shows_both(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"kind": "run", "mesh": {"data": 2}}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "a.xplane.pb").write_bytes(xspace(tpu(), plane("/host:CPU", {})))
    (tmp_path / "profile" / "b.xplane.pb").write_bytes(SLOW)
    answer = explain(tmp_path).record()
    assert answer.by_device[0].host == "b" and answer.processes[0].process == 1
    assert sum("the others wait for it" in note for note in answer.notes) == 2
    tables = {chart.title: chart for chart in explained(answer).charts}
    assert tables["By device, the one that computes longest first"].rows[0][0] == "device 0 of b"
    assert tables["By process of the run: who was the slowest on its host"].rows[0][:2] == ("process 1", "2 of 3")
