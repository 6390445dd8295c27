"""Sizes of a model's dims on the devices of a mesh that does not divide them: padding, in one place.

JAX shards evenly. A dim that does not divide over its axes is stored with zeros, and programs multiply by the padded
sizes of heads, hidden columns, experts and the vocabulary. Weights split over ``embed`` axes (FSDP) are padded at rest
only: what is added for these axes is cut off after the gather, so that the residual stream keeps its D.

Zeros stay zeros: a padded column of an MLP, a padded head or expert contributes nothing and gets no gradient, and a
padded logit is left out of the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, TypeVar

from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.models.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rooftop.core.ledger import Number

    Ways = TypeVar("Ways", int, Number)


#: The largest padding of a dim that a search considers, relative to its size.
MOST_PADDING = 0.2


@dataclass(frozen=True, kw_only=True)
class PaddedDim:
    """A dim of ``size`` elements as it is stored: cut into equal parts, each filled up with zeros at its end.

    ``steps`` are numbers of parts, each with the size of a part once it is filled, in the order of filling. With
    ``copies`` instead, elements are stored several times: these are the element in each place.
    """

    size: int
    steps: tuple[tuple[int, int], ...] = ()
    copies: tuple[int, ...] = ()

    @classmethod
    def of(cls, size: int, *steps: tuple[int, int]) -> PaddedDim | None:
        """The dim after ``steps``, of which those that add nothing are left out; None if none is left."""
        useful, stored = list[tuple[int, int]](), size
        for parts, filled in steps:
            if parts * filled != stored:
                useful.append((parts, filled))
                stored = parts * filled
        return cls(size=size, steps=tuple(useful)) if useful else None

    @property
    def stored(self) -> int:
        """Elements that are stored."""
        return len(self.copies) if self.copies else prod(self.steps[-1])

    @cached_property
    def sources(self) -> npt.NDArray[np.int64]:
        """The element in each stored place, -1 where that is padding, [stored]."""
        import numpy as np

        if self.copies:
            return np.array(self.copies)
        sources = np.full(self.stored, -1)
        sources[self.positions] = np.arange(self.size)
        return sources

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """The stored position of each element, ascending, [size]."""
        import numpy as np

        positions = np.arange(self.size)
        stored = self.size
        for parts, filled in self.steps:
            part = stored // parts
            positions = positions // part * filled + positions % part
            stored = parts * filled
        return positions


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """Query heads N and key/value heads K over ``ways`` groups of devices; in a group ``sharing`` share the keys.

    Each device has as many query heads as any other. If every key/value head has its own devices, or every device its
    own key/value heads, the query heads that read one are padded together; otherwise all are padded at the end.
    """

    heads: int
    kv_heads: int
    ways: int
    sharing: int = 1

    @classmethod
    def of(cls, model: ModelConfig, ways: int, sharing: int = 1) -> HeadSplit:
        """The heads of a model over ``ways`` groups of ``sharing`` devices."""
        return cls(heads=model.heads, kv_heads=model.kv_heads, ways=ways, sharing=sharing)

    @property
    def queries(self) -> int:
        """Query heads of a group, a multiple of ``sharing``."""
        return int(query_heads(self.heads, self.kv_heads, self.ways, self.sharing))

    @property
    def keys(self) -> int:
        """Key/value heads of a group, each read by equally many of its query heads."""
        return int(key_heads(self.heads, self.kv_heads, self.ways, self.sharing))

    @property
    def copies_keys(self) -> bool:
        """True if groups have key/value heads in common: training stores them once, and chooses from them on use.

        Without groups of query heads nothing is in common, and key/value heads are padded as query heads are.
        """
        return self.kv_heads < self.heads and self.kv_heads % self.ways != 0

    def padded(self, unit: int = 1) -> PaddedDim | None:
        """The dim of query heads, of ``unit`` elements each, as it is stored; None without padding."""
        groups = 1
        if self.kv_heads < self.heads and (self._owns_keys or self.kv_heads % self.ways == 0):
            groups = self.kv_heads
        return PaddedDim.of(self.heads * unit, (groups, self.queries * self.ways // groups * unit))

    def padded_keys(self) -> PaddedDim | None:
        """The dim of key/value heads as servers store it, with copies for each group; None if it is as it was."""
        if self.copies_keys:
            return PaddedDim(size=self.kv_heads, copies=self.cached)
        return self.padded() if self.kv_heads == self.heads else None

    @property
    def cached(self) -> tuple[int, ...]:
        """The key/value head in each place of a cache, group by group; those of padding are arbitrary."""
        return _cached(self)

    def key_table(self) -> list[list[int]]:
        """The key/value heads of each group, in the order of its query heads; those of padding are arbitrary."""
        if self._owns_keys:
            return [[group * self.kv_heads // self.ways] for group in range(self.ways)]
        readers, queries = self.queries // self.keys, self.queries
        heads = [[group * queries + key * readers for key in range(self.keys)] for group in range(self.ways)]
        return [[min(head, self.heads - 1) * self.kv_heads // self.heads for head in of_group] for of_group in heads]

    @property
    def _owns_keys(self) -> bool:
        return self.kv_heads < self.heads and self.ways % self.kv_heads == 0


@lru_cache(maxsize=1 << 12)
def _cached(split: HeadSplit) -> tuple[int, ...]:
    if not split.copies_keys and split.kv_heads < split.heads:
        return tuple(range(split.kv_heads))
    return tuple(head for of_group in split.key_table() for head in of_group)


def query_heads(heads: int, kv_heads: int, ways: Number, sharing: Number = 1) -> Number:
    """Query heads of each of ``ways`` groups of devices; see ``HeadSplit``."""
    import numpy as np

    whole: Number = next_multiple(ceil_div(heads, ways), sharing)
    if kv_heads == heads:
        return whole
    keys, unit = (np.asarray(size).astype(np.int64) for size in (ceil_div(kv_heads, ways), sharing))
    together = keys * next_multiple(heads // kv_heads, unit // np.gcd(unit, keys))
    return np.where(kv_heads % np.asarray(ways) == 0, together, whole)


def key_heads(heads: int, kv_heads: int, ways: Number, sharing: Number = 1) -> Number:
    """Key/value heads of each of ``ways`` groups of devices; see ``HeadSplit``."""
    import numpy as np

    queries = np.asarray(query_heads(heads, kv_heads, ways, sharing)).astype(np.int64)
    if kv_heads == heads:
        return queries.astype(np.float64)
    apart = np.where(np.asarray(ways) % kv_heads == 0, 1, queries // np.gcd(queries, heads // kv_heads))
    return np.where(kv_heads % np.asarray(ways) == 0, ceil_div(kv_heads, ways), apart)


@dataclass(frozen=True, kw_only=True)
class ModelWidths:
    """Sizes of a model's dims on the busiest device, for one mesh or an array of them.

    ``tensor``, ``fsdp`` and ``expert`` are devices along the axes that split columns, weights at rest, and experts.
    On a server ``sharing`` devices with the same key/value heads split the columns further. ``expert_columns`` devices
    split those of an expert (None: as many as other columns).
    """

    model: ModelConfig
    tensor: Number
    fsdp: Number
    expert: Number
    sharing: Number = 1
    expert_columns: Number | None = None

    @cached_property
    def split(self) -> Number:
        """Devices that split columns."""
        return self.tensor * self.sharing

    @cached_property
    def heads(self) -> Number:
        """Query heads."""
        return query_heads(self.model.heads, self.model.kv_heads, self.tensor, self.sharing) / self.sharing

    @cached_property
    def kv_heads(self) -> Number:
        """Key/value heads."""
        return key_heads(self.model.heads, self.model.kv_heads, self.tensor, self.sharing)

    @cached_property
    def copied_keys(self) -> Number:
        """1 where devices have key/value heads in common, 0 elsewhere; see ``HeadSplit.copies_keys``."""
        import numpy as np

        grouped = self.model.kv_heads < self.model.heads
        return np.where(grouped & (self.model.kv_heads % np.asarray(self.tensor) != 0), 1.0, 0.0)

    @cached_property
    def vocab(self) -> Number:
        """Rows of the vocabulary."""
        return ceil_div(self.model.vocab, self.split)

    @cached_property
    def experts(self) -> Number:
        """Experts."""
        return ceil_div(1 if self.model.moe is None else self.model.moe.experts, self.expert)

    def columns(self, hidden: int) -> Number:
        """Columns of an MLP of ``hidden`` ones."""
        return ceil_div(hidden, self.split)

    @cached_property
    def expert_split(self) -> Number:
        """Devices that split columns of an expert."""
        return self.split if self.expert_columns is None else self.expert_columns

    @cached_property
    def columns_of_expert(self) -> Number:
        """Columns of an expert."""
        return ceil_div(0 if self.model.moe is None else self.model.moe.d_ff, self.expert_split)

    def stored(self, rows: Number) -> Number:
        """Rows of a weight that has ``rows`` of them in its matmul, as they are stored over fsdp and gathered."""
        rows_stored: Number = next_multiple(rows, self.fsdp)
        return rows_stored

    def spread(self, rows: Number) -> Number:
        """``rows`` of a weight that is stored over fsdp and columns' axes together, such as a table's D."""
        rows_stored: Number = next_multiple(rows, self.fsdp * self.split)
        return rows_stored

    @cached_property
    def padding(self) -> Number:
        """The largest padding of ``padded``, relative to the size of its dim; 0 where all of them divide."""
        import numpy as np

        ratios = (stored / size for size, stored in self.padded.values())
        worst: Number = np.maximum.reduce(np.broadcast_arrays(*ratios)) - 1.0
        return worst

    @property
    def padded(self) -> dict[str, tuple[int, Number]]:
        """Sizes of dims that matmuls have and of D, with their sizes as stored, by name.

        Other weights at rest are padded too, which gathers and memory pay for.
        """
        model, moe = self.model, self.model.moe
        hidden = {"F": model.d_ff} if model.dense_layers else {}
        sizes: dict[str, tuple[int, Number]] = {
            "heads": (model.heads, self.heads * self.split),
            "vocabulary": (model.vocab, self.vocab * self.split),
            "D": (model.d_model, self.spread(model.d_model)),
        }
        if moe is not None:
            sizes["experts"] = (moe.experts, self.experts * self.expert)
            sizes["F of experts"] = (moe.d_ff, self.columns_of_expert * self.expert_split)
            hidden |= {"F of shared experts": moe.shared_d_ff} if moe.shared_d_ff else {}
        return sizes | {name: (size, self.columns(size) * self.split) for name, size in hidden.items()}
