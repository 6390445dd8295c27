"""Who the others wait for: the device that computes longest in a step, and the process that works longest on its host.

The devices of a step end it together. One that is slower computes longer, and waits less for the collectives in which
the others wait for it. A process that feeds its devices late makes all of them wait; a run records it for each step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftop.core.amounts import Amount, Count
from rooftop.core.quantities import format_seconds
from rooftop.core.records import Record
from rooftop.profile.measured import DeviceTime

#: Share of a step from which a difference is called one: smaller ones come and go with clocks and interrupts.
UNEVEN = 0.02


@dataclass(frozen=True, kw_only=True)
class ProcessTime(Record):
    """A process of a run that was the slowest on its host in ``steps`` of ``of_steps`` steps.

    In those it worked ``host_s`` on its host, and the median process ``median_host_s`` (means). ``waited_s`` is what
    the others waited for it, spread over all steps.
    """

    process: Count
    steps: Count
    of_steps: Count
    host_s: Amount
    median_host_s: Amount
    waited_s: Amount


def process_times(records: Sequence[Mapping[str, Any]]) -> tuple[ProcessTime, ...]:
    """The processes that the others waited for, longest first; none in a run of one process.

    ``records`` are the lines of metrics.jsonl.
    """
    names = ("slowest_host_s", "median_host_s")
    slowest = dict[int, list[tuple[float, float]]]()
    for record in records:
        process, pair = record.get("slowest_process"), tuple(record.get(name) for name in names)
        if type(process) is int and process >= 0 and all(isinstance(value, (int, float)) for value in pair):
            slowest.setdefault(process, []).append((float(pair[0] or 0.0), float(pair[1] or 0.0)))
    count = sum(map(len, slowest.values()))
    result = [
        ProcessTime(
            process=process,
            steps=len(pairs),
            of_steps=count,
            host_s=statistics.fmean(own for own, _ in pairs),
            median_host_s=statistics.fmean(median for _, median in pairs),
            waited_s=sum(max(0.0, own - median) for own, median in pairs) / count,
        )
        for process, pairs in slowest.items()
    ]
    return tuple(sorted(result, key=lambda process: -process.waited_s))


def straggling(devices: Sequence[DeviceTime], processes: Sequence[ProcessTime], step_s: float) -> Iterator[str]:
    """Sentences on a device, and a process, that the others wait for."""
    if len(devices) > 1:
        median = statistics.median(device.compute_s for device in devices)
        slow, waits = devices[0], statistics.median(device.exposed_s for device in devices)
        longer = slow.compute_s - median
        # A device with more work of its own that no other waits for is no straggler.
        if longer > UNEVEN * step_s and slow.exposed_s < waits:
            yield (
                f"device {slow.ordinal} of {slow.host} computes {format_seconds(longer)} a step longer than the median "
                f"device, and waits {format_seconds(waits - slow.exposed_s)} less for collectives: the others wait for "
                "it"
            )
    for process in processes[:1]:
        if process.waited_s > UNEVEN * step_s:
            yield (
                f"process {process.process} was the slowest on its host in {process.steps} of {process.of_steps} steps "
                f"of the run ({format_seconds(process.host_s)}, the median process "
                f"{format_seconds(process.median_host_s)}): the others wait for it"
            )
