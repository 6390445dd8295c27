"""A training strategy: a layout, a remat policy, microbatches and a pipeline schedule; or very many of them at once.

Arrays that depend on the layout are [C, 1] and those that depend on the rest are [1, K], so that a sweep over C x K
candidates broadcasts and each formula is evaluated no more often than it varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Floats, Ints
from rooftop.arrays.rules import STAGE_AXES
from rooftop.models import ModelConfig
from rooftop.models.activations import CHECKPOINTS, kept_widths
from rooftop.plan.layouts import Layouts
from rooftop.roofline.collectives import Price, price
from rooftop.scheduling.pipeline import PipelineSchedule, slot_count

#: The share of the 1F1B bubble that each pipeline schedule leaves idle. In the zero-bubble one (ZB-H1, Qi et al.
#: 2023) weight gradients fill the gaps: with forward, dX and dW of equal length a third of the bubble remains.
IDLE_SHARES: Mapping[PipelineSchedule, float] = {
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved": 1.0,
    "zero_bubble": 1.0 / 3.0,
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The part of a strategy that is not its layout. ``chunks``: model chunks per stage of the interleaved schedule."""

    remat: str
    policy: Mapping[str, str]
    microbatches: int = 1
    schedule: PipelineSchedule = "1f1b"
    chunks: int = 1


@dataclass(frozen=True)
class Strategies:
    """C layouts times K choices."""

    layouts: Layouts
    choices: Sequence[Choice]
    prices: Mapping[tuple[str, str], Price] = field(default_factory=dict)
    """Prices that are known beforehand, by (kind, axis), arrays [C, 1]; others follow from the layouts."""

    def __getitem__(self, index: Any) -> Strategies:
        """The strategies of the layouts at an index, with the prices that are known."""
        prices = {key: price.map(lambda value: value[index]) for key, price in self.prices.items()}
        return Strategies(self.layouts[index], self.choices, prices)

    def with_policy(self, policy: Mapping[str, str]) -> Strategies:
        """The same layouts and prices with another remat policy."""
        return Strategies(self.layouts, [replace(choice, policy=policy) for choice in self.choices], self._prices)

    def devices(self, *names: str) -> Floats:
        """Devices along the named axes together, [C, 1]."""
        return self.layouts.along(*names)[:, None].astype(np.float64)

    def _distinct(self, axis: str) -> tuple[Ints, Ints]:
        if axis not in self._ways:
            self._ways[axis] = self.layouts.distinct(axis)
        return self._ways[axis]

    @cached_property
    def _ways(self) -> dict[str, tuple[Ints, Ints]]:
        return {}

    @cached_property
    def _prices(self) -> dict[tuple[str, str], Price]:
        return dict(self.prices)

    def price(self, kind: str, axis: str) -> Price:
        """The price of a collective over one axis, arrays [C, 1]; computed once."""
        # A ReduceScatter is an AllGather run backwards: the same bytes over the same links.
        key = "all_gather" if kind == "reduce_scatter" else kind, axis
        if key not in self._prices:
            first, like = self._distinct(axis)
            self._prices[key] = price(key[0], self.layouts[first].span(axis)).map(lambda value: value[like][:, None])
        return self._prices[key]

    @cached_property
    def microbatches(self) -> Floats:
        """Microbatches per step, [1, K]."""
        return np.array([[float(choice.microbatches) for choice in self.choices]])

    @cached_property
    def chunks(self) -> Floats:
        """Model chunks per pipeline stage, [1, K], or [1, 1] if all choices have as many."""
        chunks = [float(choice.chunks) for choice in self.choices]
        return np.array([chunks if len(set(chunks)) > 1 else chunks[:1]])

    @cached_property
    def idle_share(self) -> Floats:
        """Share of the 1F1B bubble that the schedule leaves, [1, K]."""
        return np.array([[IDLE_SHARES[choice.schedule] for choice in self.choices]])

    @cached_property
    def slots(self) -> Floats:
        """Slots of the pipeline's table, [C, K]: in each one, every stage sends a result to both neighbours."""
        split = np.array([[choice.schedule == "zero_bubble" for choice in self.choices]])
        slots: Floats = np.asarray(
            slot_count(
                stages=self.devices(*STAGE_AXES), microbatches=self.microbatches, chunks=self.chunks, split=split
            )
        )
        return slots

    @cached_property
    def keeps_all_in_flight(self) -> npt.NDArray[np.bool_]:
        """True if the schedule holds every microbatch's activations at once (GPipe), [1, K]."""
        return np.array([[choice.schedule == "gpipe" for choice in self.choices]])

    @cached_property
    def _policies(self) -> tuple[list[Mapping[str, str]], Ints]:
        """The different remat policies, and for each choice which of them it has, [K]."""
        policies: list[Mapping[str, str]] = []
        index = []
        for choice in self.choices:
            if choice.policy not in policies:
                policies.append(choice.policy)
            index.append(policies.index(choice.policy))
        return policies, np.array(index)

    def recomputed(self, name: str) -> Floats:
        """1 where the policy recomputes the named checkpoint and 0 where it is kept, [1, K]."""
        policies, index = self._policies
        again: Floats = np.array([float(policy[name] == "recompute") for policy in policies])[index][None]
        return again

    def kept(self, action: str, config: ModelConfig, *, moe_layer: bool, names: Sequence[str] = CHECKPOINTS) -> Floats:
        """Elements per token and layer of the checkpoints ``names`` under ``action``, [1, K]."""
        policies, index = self._policies
        totals = []
        for policy in policies:
            widths = kept_widths(config, policy, moe_layer=moe_layer)
            totals.append(sum(widths[name] for name in names if policy[name] == action))
        elements: Floats = np.array(totals, np.float64)[index][None]
        return elements

    @property
    def shape(self) -> tuple[int, int]:
        """(C, K)."""
        return len(self.layouts), len(self.choices)


def choices(
    policies: Mapping[str, Mapping[str, str]],
    microbatches: Sequence[int],
    *,
    schedule: PipelineSchedule = "1f1b",
    chunks: int = 1,
) -> tuple[Choice, ...]:
    """Every combination of remat policies and microbatches under one schedule."""
    return tuple(
        Choice(remat=name, policy=policy, microbatches=count, schedule=schedule, chunks=chunks)
        for (name, policy), count in product(policies.items(), microbatches)
    )
