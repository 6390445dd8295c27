"""Records of a search: its trials, and its answer. Reading them needs no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rooftop.core.amounts import Amount, Count
from rooftop.core.records import Record, derived
from rooftop.explain.difference import Difference
from rooftop.plan.documents import PlannedSlice

#: Ends of a trial: priced; its schedule is that of an earlier trial; the compiler, or the program, refused it; it needs
#: more HBM than there is.
TrialEnd = Literal["priced", "same_schedule", "refused", "too_large"]
#: Share of a step below which a difference is rounding.
SAME = 5e-4


@dataclass(frozen=True, kw_only=True)
class Trial(Record):
    """A compilation with some factors, named in ``factors``; () is the baseline.

    ``layers`` are those of a proxy (None: the whole program). ``schedule`` is the fingerprint of the scheduled module.
    ``expected_s`` is priced by rooftop, ``estimated_s`` by XLA's own cycles, both on the compiled schedule;
    ``exposed_s`` of it are waits for collectives. ``reason`` says why it was refused, or what it needs too much.
    ``needed_bytes`` are those of one that is too large, where the compiler says so. ``seconds`` are those of the
    compilation. ``key`` is equal for equal options, changes and layers.
    """

    key: str
    factors: tuple[str, ...]
    options: Mapping[str, bool | int | str]
    change: Mapping[str, Any]
    layers: int | None
    end: TrialEnd
    schedule: str = ""
    same_as: tuple[str, ...] | None = None
    expected_s: Amount | None = None
    estimated_s: Amount | None = None
    exposed_s: Amount | None = None
    peak_bytes: Amount | None = None
    reason: str = ""
    needed_bytes: Amount | None = None
    seconds: Amount

    @property
    def fits(self) -> bool:
        """True if it was compiled, and so fits."""
        return self.end in ("priced", "same_schedule")

    @property
    def title(self) -> str:
        """Its factors in words."""
        return " + ".join(self.factors) or "baseline"

    def time_s(self, estimates: str) -> float:
        """Seconds of a step by 'rooftop' or by 'xla'; infinite for a trial that has none."""
        seconds = self.estimated_s if estimates == "xla" else self.expected_s
        return float("inf") if seconds is None else float(seconds)


def saved(before: float | None, after: float | None) -> float | None:
    """The figure before less that after; None where one of them is not known, or infinite."""
    if before is None or after is None or before == float("inf") or after == float("inf"):
        return None
    return before - after


@dataclass(frozen=True, kw_only=True)
class RankedTrial(Record):
    """A trial in its ``rank``, 1 the fastest, None if it has no time; ``gain_s`` and ``gain_bytes`` are its savings.

    ``recipe``: published recipes for the chip set its only factor. ``why`` says in words what became of it.
    """

    rank: Count | None
    trial: Trial
    gain_s: float | None
    gain_bytes: float | None
    recipe: bool
    sources: tuple[str, ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class TuneRecord(Record):
    """A search: ``baseline`` and ``best``, priced by ``estimates``; of proxies if ``layers`` is a number.

    ``whole`` are the baseline and the best with all layers, None without proxies or without time for them. ``tried``
    counts trials with their refusals, ``schedules`` the distinct scheduled modules among them. ``seconds`` and
    ``cpu_s`` (of the compiling processes) are those of this run, ``compiled`` its compilations; ``compile_s`` are the
    seconds of all trials, of earlier runs too. ``lines`` set the best, to be pasted.
    """

    kind: Literal["tuned"]
    schema: Literal[1]
    rooftop_version: str
    program: str
    slice: PlannedSlice
    estimates: Literal["rooftop", "xla"]
    versions: Mapping[str, str]
    layers: Count | None
    baseline: Trial
    best: Trial
    whole: tuple[Trial, Trial] | None
    difference: Difference | None
    lines: tuple[str, ...]
    tried: Count
    schedules: Count
    refused: Count
    out_of_time: bool
    seconds: Amount
    cpu_s: Amount
    compiled: Count
    compile_s: Amount
    results: str
    trials: tuple[RankedTrial, ...]
    verdict: str

    @derived
    def gain_s(self) -> float | None:
        """Seconds of a step that the best saves, by the whole program if it was compiled."""
        first, last = self.whole or (self.baseline, self.best)
        return saved(first.time_s(self.estimates), last.time_s(self.estimates))

    @derived
    def gain_bytes(self) -> float | None:
        """Bytes of peak memory that the best saves."""
        first, last = self.whole or (self.baseline, self.best)
        return saved(first.peak_bytes, last.peak_bytes)
