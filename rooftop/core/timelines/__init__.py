"""Timelines to look at: lanes of spans, the same for what was planned, what was compiled and what was measured.

``perfetto`` writes them for ui.perfetto.dev, ``xprof`` as a trace of JAX's profiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: What a device does in a span: it computes, it waits for a transfer, a transfer is under way, a loop goes on whose
#: trips are not drawn one by one.
COMPUTE, WAIT, TRANSFER, MORE = "compute", "wait", "transfer", "more"


@dataclass(frozen=True, kw_only=True)
class TimeSpan:
    """Something from ``start_s`` to ``end_s``, seconds from the beginning; ``sort`` is one of the four above.

    ``op`` is the HLO instruction that does it, its line or its name, and ``category`` what a profiler calls such;
    ``flops`` and ``hbm_bytes`` are what it computes and moves (None: not known). ``op_name`` is the program's name
    stack. ``flight`` numbers a transfer and the wait for it.
    """

    name: str
    sort: str
    start_s: float
    end_s: float
    scope: str = ""
    phase: str = ""
    source: str = ""
    op: str = ""
    category: str = ""
    op_name: str = ""
    flops: float | None = None
    hbm_bytes: float | None = None
    flight: int | None = None
    details: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Spans of one place in time order: a device, a pipeline stage or a link."""

    name: str
    spans: tuple[TimeSpan, ...]


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """A transfer: from where it is begun by way of its lane to where it is waited for, as (lane, seconds)."""

    number: int
    begun: tuple[int, float]
    under_way: tuple[int, float]
    waited: tuple[int, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """A timeline. ``source`` is 'planned', 'compiled' or 'measured'; it lasts ``total_s``.

    ``note`` says what to know before it is read.
    """

    title: str
    source: str
    total_s: float
    lanes: tuple[Lane, ...]
    arrows: tuple[Arrow, ...] = ()
    note: str = ""
