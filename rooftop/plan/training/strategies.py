"""A training strategy: a layout, a remat policy, microbatches and a pipeline schedule; or very many of them at once.

Arrays that depend on the layout are [C, 1] and those that depend on the rest are [1, K], so that a sweep over C x K
candidates broadcasts and each formula is evaluated no more often than it varies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import Floats, Ints
from rooftop.arrays.rings import closes
from rooftop.arrays.rules import AXES, GATHER_AXES, STAGE_AXES
from rooftop.capabilities import Choice, Pipeline
from rooftop.core.ledger import Number
from rooftop.frameworks.habits import Habits
from rooftop.models import ModelConfig
from rooftop.models.activations import CHECKPOINTS, kept_widths
from rooftop.plan.layouts import Layouts, Ways
from rooftop.roofline.collectives import Price, price, ring_hop
from rooftop.scheduling.pipeline import (
    DEFAULT_SCHEDULE,
    PipelineSchedule,
    SlotMix,
    least_slot_counts,
    least_trip_count,
    slot_counts,
    trip_count,
)

#: The share of the 1F1B bubble that each pipeline schedule leaves idle. In the zero-bubble one (ZB-H1, Qi et al.
#: 2023) weight gradients fill the gaps: with forward, dX and dW of equal length a third of the bubble remains.
IDLE_SHARES: Mapping[PipelineSchedule, float] = {
    "eager_1f1b": 1.0,
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved": 1.0,
    "zero_bubble": 1.0 / 3.0,
}

#: What is counted of a pipeline's table.
Counted = TypeVar("Counted")
#: The price of a hop of a ring, among the prices of collectives.
RING_HOP = "ring_hop"


@dataclass(frozen=True)
class _Ways:
    """The ways in which axes are laid, and the prices of collectives over them, by kind: computed once, [W].

    ``RING_HOP`` is a kind too.
    """

    ways: Ways
    prices: dict[str, Price] = field(default_factory=dict)

    def price(self, kind: str) -> Price:
        if kind not in self.prices:
            self.prices[kind] = ring_hop(self.ways.spans) if kind == RING_HOP else price(kind, self.ways.spans)
        return self.prices[kind]


@dataclass(frozen=True)
class Strategies:
    """C layouts times K choices."""

    layouts: Layouts
    choices: Sequence[Choice]
    policies: Sequence[Mapping[str, str]] | None = None
    """Remat policies that all choices are combined with, in place of their own: an axis in front, [R, 1, 1]."""
    groups: _Groups | None = None
    """Groups of layouts, of which each layout stands for the one at ``of_groups``, with the group's least prices."""
    of_groups: Ints | None = None

    def __getitem__(self, index: Any) -> Strategies:
        """The strategies of the layouts at an index, with the prices that are known."""
        some = replace(
            self, layouts=self.layouts[index], of_groups=None if self.of_groups is None else self.of_groups[index]
        )
        some._ways.update({axis: _Ways(ways.ways[index], ways.prices) for axis, ways in self._ways.items()})
        return some

    def cheapest(self, starts: Ints) -> Strategies:
        """One layout of each group, with the least price that any of the group has for each collective and axes.

        Groups begin at ``starts``.
        """
        return Strategies(
            self.layouts[starts], self.choices, groups=_Groups(self, starts), of_groups=np.arange(len(starts))
        )

    def choices_with(self, priced: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """Indices of the choices that combine remat policies, microbatches and switches of those ``priced``, [K]."""
        some = [choice for choice, is_priced in zip(self.choices, priced, strict=True) if is_priced]
        remats, rest = {choice.remat for choice in some}, {choice.rest for choice in some}
        return np.flatnonzero([choice.remat in remats and choice.rest in rest for choice in self.choices])

    def factored(self) -> Strategies:
        """The same candidates with remat policies as an axis of their own, if these are combined with all the rest.

        Few formulas have to do with remat: all others are then evaluated once for all policies. ``flat`` turns figures
        of the result, which broadcast to [R, C, K / R], into [C, K].
        """
        policies, _ = self._policies
        rest = self.choices[: len(self.choices) // len(policies)]
        if list(self.choices) != [
            replace(choice, remat=other.remat) for other in self.choices[:: len(rest)] for choice in rest
        ]:
            return self
        return self.with_choices(rest, policies)

    def flat(self, values: Number) -> Floats:
        """Figures of candidates, however they broadcast, as [C, K]."""
        shape = len(self.policies or (None,)), *self.shape
        return np.moveaxis(np.broadcast_to(values, shape), 0, 1).reshape(shape[1], -1)

    def with_policy(self, policy: Mapping[str, str]) -> Strategies:
        """The same layouts and prices with another remat policy."""
        return self.with_choices(self.choices, (policy,))

    def with_choices(
        self, choices: Sequence[Choice], policies: Sequence[Mapping[str, str]] | None = None
    ) -> Strategies:
        """The same layouts, and prices that are known, with other choices."""
        other = replace(self, choices=choices, policies=policies)
        other._ways.update(self._ways)
        other._prices.update(self._prices)
        return other

    def devices(self, *names: str) -> Floats:
        """Devices along the named axes together, [C, 1]."""
        return self.layouts.along(*names)[:, None].astype(np.float64)

    def _ways_of(self, axes: tuple[str, ...]) -> _Ways:
        if axes not in self._ways:
            self._ways[axes] = _Ways(self.layouts.ways(*axes))
        return self._ways[axes]

    @cached_property
    def _ways(self) -> dict[tuple[str, ...], _Ways]:
        return {}

    @cached_property
    def _prices(self) -> dict[tuple[str, tuple[str, ...]], Price]:
        return {}

    def price(self, kind: str, axes: tuple[str, ...]) -> Price:
        """The price of a collective over axes together, arrays [C, 1]; computed once."""
        # A ReduceScatter is an AllGather run backwards: the same bytes over the same links.
        key = "all_gather" if kind == "reduce_scatter" else kind, self._used(axes)
        if key not in self._prices:
            if self.groups is None:
                ways = self._ways_of(key[1])
                self._prices[key] = ways.price(key[0]).map(lambda value: value[ways.ways.of][:, None])
            else:
                self._prices[key] = self.groups.price(*key).map(lambda value: value[self.of_groups][:, None])
        return self._prices[key]

    def closed_ring(self, axes: tuple[str, ...]) -> Floats:
        """1 where a ring over axes together goes both ways round, [C, 1]; of groups always 0, as for a lower bound."""
        if self.groups is not None:
            return np.zeros((1, 1))
        ways = self._ways_of(self._used(axes)).ways
        return closes(ways.spans)[ways.of][:, None].astype(np.float64)

    def within_slice(self, *names: str) -> Floats:
        """Devices along the named axes together within one slice, [C, 1]; of groups of layouts the fewest."""
        axes, slice_ = self._used(names), self.layouts.slice
        if slice_.num_slices == 1:
            return self.devices(*axes)
        if self.groups is not None:
            return self.groups.within_slice(axes)[self.of_groups][:, None]
        ways = self._ways_of(axes).ways
        return ways.within_slice[ways.of][:, None]

    def gathers_ahead(self, habits: Habits) -> npt.NDArray[np.bool_]:
        """True where weights are gathered asynchronously within slices, but not all collectives are, [C, 1]."""
        slice_ = self.layouts.slice
        whole: npt.NDArray[np.bool_] = self.within_slice(*GATHER_AXES) * slice_.num_slices == slice_.devices
        # Over whole slices options of the compiler make it so: see ``rooftop.compiler.options``.
        return whole & habits.gathers_as_sums | (habits.asynchronous == "gathers")

    def share_links(self, axes: tuple[str, ...], others: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """True where both have devices along one physical axis: their transfers wait for each other, [C, 1].

        False for groups of layouts, of which one may share none.
        """
        if self.groups is not None:
            return np.zeros((1, 1), bool)
        one, other = (self._ways_of(self._used(names)).ways for names in (axes, others))
        along_both = (one.spans.size > 1)[one.of] & (other.spans.size > 1)[other.of]
        shared: npt.NDArray[np.bool_] = np.any(along_both, axis=-1)[:, None]
        return shared

    def _used(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of ``axes`` along which any layout has devices, in mesh order: groups that are alike have one price."""
        return tuple(axis for axis in AXES if axis in axes and axis in self._with_devices) or axes[:1]

    @cached_property
    def _with_devices(self) -> frozenset[str]:
        return frozenset(axis for axis in AXES if np.any(self.layouts.along(axis) > 1))

    @cached_property
    def microbatches(self) -> Floats:
        """Microbatches per step, [1, K]."""
        return np.array([[float(choice.microbatches) for choice in self.choices]])

    @cached_property
    def chunks(self) -> Floats:
        """Model chunks per pipeline stage, [1, K], or [1, 1] if all choices have as many."""
        return _of_each([float(choice.chunks) for choice in self.choices])

    @cached_property
    def collective_matmuls(self) -> Floats:
        """1 where matmuls overlap their collectives over tensor, [1, K], or [1, 1] if all choices are alike."""
        return _of_each([float(choice.collective_matmuls) for choice in self.choices])

    @cached_property
    def experts_over_tensor(self) -> Floats:
        """1 where tensor deals out whole experts, [1, K], or [1, 1] if all choices are alike."""
        return _of_each([float(choice.experts_over_tensor) for choice in self.choices])

    @cached_property
    def idle_share(self) -> Floats:
        """Share of the 1F1B bubble that the schedule leaves, [1, K]."""
        return np.array([[IDLE_SHARES[choice.schedule] for choice in self.choices]])

    def _of_tables(self, count: Callable[..., Counted]) -> tuple[Ints, list[list[Counted]]]:
        """For each layout the index of its number of stages, [C], and counts of tables by that index and choice."""
        stages, index = np.unique(self.layouts.along(*STAGE_AXES), return_inverse=True)
        return index, [
            [count(choice.schedule, size, choice.microbatches, choice.chunks) for choice in self.choices]
            for size in stages.tolist()
        ]

    @cached_property
    def trips(self) -> Floats:
        """Trips of the pipeline's program, [C, K]: in each one, every stage sends a result to both neighbours.

        Of groups of layouts no more than those of any table: tables take long.
        """
        index, counts = self._of_tables(trip_count if self.groups is None else least_trip_count)
        return np.array(counts, np.float64)[index]

    @cached_property
    def slot_mixes(self) -> dict[SlotMix, Floats]:
        """Slots of the pipeline's table by the tasks that may be the longest in them, [C, K].

        Of groups of layouts those that take no longer than any table.
        """
        index, counts = self._of_tables(slot_counts if self.groups is None else least_slot_counts)
        # In one order whatever is priced together: sums of floats depend on it.
        mixes = sorted({mix for row in counts for count in row for mix in count.mixes}, key=sorted)
        return {
            mix: np.array([[float(count.mixes.get(mix, 0)) for count in row] for row in counts])[index] for mix in mixes
        }

    @cached_property
    def splits_backward(self) -> npt.NDArray[np.bool_]:
        """True if the schedule splits backward tasks, [1, K]."""
        return np.array([[choice.schedule == "zero_bubble" for choice in self.choices]])

    @cached_property
    def eager(self) -> npt.NDArray[np.bool_]:
        """True if forward tasks are done as early as eager 1F1B does them, [1, K]."""
        return np.array([[choice.schedule == "eager_1f1b" for choice in self.choices]])

    @cached_property
    def keeps_all_in_flight(self) -> npt.NDArray[np.bool_]:
        """True if the schedule holds every microbatch's activations at once (GPipe), [1, K]."""
        return np.array([[choice.schedule == "gpipe" for choice in self.choices]])

    @cached_property
    def _policies(self) -> tuple[list[Mapping[str, str]], Ints]:
        """The different remat policies, and for each choice which of them it has, [K]."""
        if self.policies is not None:
            return list(self.policies), np.zeros(0, np.int64)
        policies: list[Mapping[str, str]] = []
        index = []
        for choice in self.choices:
            if choice.policy not in policies:
                policies.append(choice.policy)
            index.append(policies.index(choice.policy))
        return policies, np.array(index)

    def recomputed(self, name: str) -> Floats:
        """1 where the policy recomputes the named checkpoint and 0 where it is kept, [1, K]."""
        return self.by_policy(lambda policy: float(policy[name] == "recompute"))

    def kept(self, action: str, config: ModelConfig, *, moe_layer: bool, names: Sequence[str] = CHECKPOINTS) -> Floats:
        """Elements per token and layer of the checkpoints ``names`` under ``action``, [1, K]."""

        def total(policy: Mapping[str, str]) -> float:
            widths = kept_widths(config, policy, moe_layer=moe_layer)
            return float(sum(widths[name] for name in names if policy[name] == action))

        return self.by_policy(total)

    def by_policy(self, figure: Callable[[Mapping[str, str]], float]) -> Floats:
        """A figure of every remat policy as one of every choice, [1, K], or where policies are an axis as [R, 1, 1]."""
        policies, index = self._policies
        figures = np.array([figure(policy) for policy in policies], np.float64)
        if self.policies is None:
            return figures[index][None]
        return figures[:, None, None] if len(figures) > 1 else figures[None]

    @property
    def shape(self) -> tuple[int, int]:
        """(C, K)."""
        return len(self.layouts), len(self.choices)


def _of_each(figures: Sequence[float]) -> Floats:
    """A figure of each choice, [1, K], or [1, 1] if all are alike."""
    return np.array([figures if len(set(figures)) > 1 else figures[:1]])


@dataclass(frozen=True)
class _Groups:
    """G groups of layouts that begin at ``starts``, and their least prices: computed once each."""

    strategies: Strategies
    starts: Ints
    prices: dict[tuple[str, tuple[str, ...]], Price] = field(default_factory=dict)
    members: dict[tuple[str, ...], tuple[Ints, Ints]] = field(default_factory=dict)
    fewest: dict[tuple[str, ...], Floats] = field(default_factory=dict)

    def price(self, kind: str, axes: tuple[str, ...]) -> Price:
        """The least price of a collective over axes in each group, [G]."""
        if (kind, axes) not in self.prices:
            ways = self.strategies._ways_of(axes)
            columns, begin = self._ways_of_groups(axes, ways.ways)
            least = ways.price(kind).map(lambda value: np.minimum.reduceat(value[columns], begin))
            self.prices[kind, axes] = replace(least, ranks=None)
        return self.prices[kind, axes]

    @cached_property
    def _group(self) -> Ints:
        """The group of each layout."""
        lengths = np.diff(self.starts, append=len(self.strategies.layouts))
        return np.repeat(np.arange(len(self.starts)), lengths)

    def within_slice(self, axes: tuple[str, ...]) -> Floats:
        """The fewest devices within a slice that any of each group lays along axes together, [G]."""
        if axes not in self.fewest:
            ways = self.strategies._ways_of(axes).ways
            columns, begin = self._ways_of_groups(axes, ways)
            self.fewest[axes] = np.minimum.reduceat(ways.within_slice[columns], begin)
        return self.fewest[axes]

    def _ways_of_groups(self, axes: tuple[str, ...], ways: Ways) -> tuple[Ints, Ints]:
        """The different ways in which each group lays axes, and where those of a group begin."""
        if axes not in self.members:
            # Of a flat array NumPy finds what is set many times faster.
            present = np.zeros(len(self.starts) * len(ways), np.bool_)
            present[self._group * len(ways) + ways.of] = True
            members = np.flatnonzero(present)
            begin = np.searchsorted(members, np.arange(len(self.starts)) * len(ways))
            self.members[axes] = members % len(ways), begin
        return self.members[axes]


def choices(
    remats: Iterable[str],
    microbatches: Sequence[int],
    *,
    pipelines: Sequence[Pipeline] = ((DEFAULT_SCHEDULE, 1),),
    **switches: Sequence[bool],
) -> tuple[Choice, ...]:
    """Every combination of remat policies, schedules with their chunks, settings of ``switches``, and microbatches."""
    settings = [dict(zip(switches, on, strict=True)) for on in product(*switches.values())]
    return tuple(
        Choice(remat=remat, microbatches=count, schedule=schedule, chunks=chunks, **on)
        for remat, (schedule, chunks), on, count in product(remats, pipelines, settings, microbatches)
    )
