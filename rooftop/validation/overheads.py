"""Overheads of engines that fit published benchmarks, and how they carry over to models that they were not fitted on.

Only servers that also prefill are looked at. Errors of TPOT and TTFT count alike, and so does each model; an error of
more than the measured time counts as one of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.core.records import field_values
from rooftop.frameworks.engines import Overheads
from rooftop.plan.evidence import model_key
from rooftop.plan.serving.engines.closed_loop import ClosedLoop, LoopSteps, loop_times
from rooftop.validation.engine_runs import EngineRun
from rooftop.validation.engines import EnginePrediction

#: Terms of overheads, and the seconds that are tried of each.
TERMS: tuple[str, ...] = ("gap_s", "host_s", "request_s", "token_s")
_GAPS = 1e-7 * np.arange(0, 21, 2)
_HOST = 1e-6 * np.array([0, 20, 30, 40, 50, 60, 80])
_REQUESTS = 1e-3 * np.arange(0, 41, 4)
_TOKENS = 1e-6 * np.arange(0, 21, 2)
_GRIDS = (_GAPS, _HOST, _REQUESTS, _TOKENS)
_STEPS = ("active", "chunks", "step_s", "mixed_s", "full_s", "full_tokens", "together")
_LOAD = ("clients", "prompt", "generate", "requests", "budget", "reserved", "equal")

Floats = npt.NDArray[np.float64]
#: Places of the four terms in their grids.
Place = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class OverheadErrors:
    """Errors of runs [R] of one engine with all overheads that are tried.

    ``tpot`` [gaps, host, R], since the front end does not change it; ``ttft`` [gaps, host, requests, tokens, R].
    """

    runs: Sequence[EngineRun]
    models: npt.NDArray[np.str_]
    tpot: Floats
    ttft: Floats

    @classmethod
    def of(cls, priced: Sequence[EnginePrediction]) -> OverheadErrors:
        """The errors of those predictions whose servers also prefill."""
        chosen = [one for one in priced if one.loads.steps is not None]
        runs = [one.run for one in chosen]
        load = ClosedLoop(**_columns([one.loads.load for one in chosen], [one.at for one in chosen], _LOAD))
        steps = LoopSteps(**_columns([one.loads.steps for one in chosen], [one.at for one in chosen], _STEPS))
        kernels = np.array([one.loads.kernels for one in chosen])
        tpot_s, ttft_s = (np.array([getattr(run, name) for run in runs]) for name in ("tpot_s", "ttft_s"))
        tpot = np.empty((len(_GAPS), len(_HOST), len(runs)))
        ttft = np.empty((*map(len, _GRIDS), len(runs)))
        front_s = _REQUESTS[:, None, None] + _TOKENS[:, None] * load.prompt
        for gap, gap_s in enumerate(_GAPS):
            for host, host_s in enumerate(_HOST):
                times = loop_times(load, steps.with_overheads(kernels * gap_s, kernels * host_s, front_s))
                tpot[gap, host], ttft[gap, host] = times.tpot_s / tpot_s - 1, times.ttft_s / ttft_s - 1
        return cls(runs=runs, models=np.array([model_key(run.model) for run in runs]), tpot=tpot, ttft=ttft)

    def fit(self, terms: Collection[str], without: str | None = None) -> Overheads:
        """The overheads of some terms with the least error on the runs of all models but one."""
        figures = zip(TERMS, _GRIDS, self.place(terms, without), strict=True)
        return Overheads(**{term: round(float(grid[at]), 9) for term, grid, at in figures})

    def left_out(self, terms: Collection[str]) -> tuple[Floats, Floats]:
        """Errors of TPOT and TTFT of all runs, each with what fits the other models."""
        tpot, ttft = np.empty(len(self.runs)), np.empty(len(self.runs))
        for model in sorted(set(self.models.tolist())):
            own, errors = self.models == model, self.at(self.place(terms, model))
            tpot[own], ttft[own] = errors[0][own], errors[1][own]
        return tpot, ttft

    def at(self, place: Place) -> tuple[Floats, Floats]:
        """Errors of TPOT and TTFT of all runs with the overheads in a place of the grids."""
        return self.tpot[place[:2]], self.ttft[place]

    def place(self, terms: Collection[str], without: str | None = None) -> Place:
        """The place of what ``fit`` returns."""
        weights = np.array([0.0 if model == without else 1 / np.sum(self.models == model) for model in self.models])
        tried = tuple(slice(None) if term in terms else slice(0, 1) for term in TERMS)
        tpot, ttft = (np.minimum(np.abs(errors), 1) @ weights for errors in (self.tpot, self.ttft))
        errors = ttft[tried] + tpot[tried[:2]][:, :, None, None]
        gap, host, request, token = (int(at) for at in np.unravel_index(np.argmin(errors), errors.shape))
        return gap, host, request, token


def _columns(tables: Sequence[object], places: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Fields of loads or steps as arrays over runs, each at its place in its own."""
    return {
        name: np.array(
            [
                value[at] if np.ndim(value := getattr(table, name)) else value
                for table, at in zip(tables, places, strict=True)
            ]
        )
        for name in names
    }


def fitted_terms(engine_overheads: Overheads) -> tuple[str, ...]:
    """The terms that an engine's file has."""
    return tuple(name for name, figure in field_values(engine_overheads).items() if figure)
