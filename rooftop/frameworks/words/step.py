"""A train step between a plan and a configuration: all that both of them say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rooftop.arrays.rules import BATCH_AXES, ways
from rooftop.capabilities import Choice
from rooftop.frameworks.framework import Framework
from rooftop.hardware import Slice
from rooftop.models import ModelConfig
from rooftop.models.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class ConfiguredStep:
    """A train step of a plan, which a framework is to run.

    ``axes`` are sizes of the mesh, 1 where one is missing; ``dcn`` their parts across slices or nodes.
    """

    framework: Framework
    model: ModelConfig
    slice: Slice
    axes: Mapping[str, int]
    batch_seqs: int
    seq_len: int
    choice: Choice
    numerics: Numerics = Numerics()
    dcn: Mapping[str, int] = field(default_factory=dict)

    def ways(self, *axes: str) -> int:
        """Devices along axes together."""
        return ways(self.axes, *axes)

    @property
    def copies(self) -> int:
        """Groups of devices that have sequences of their own."""
        return self.ways(*BATCH_AXES)

    @property
    def micro_batch(self) -> int:
        """Sequences of one such group in a microbatch."""
        return self.batch_seqs // (self.copies * self.choice.microbatches)

    @property
    def nodes(self) -> tuple[int, int]:
        """Hosts, and devices of each."""
        return self.slice.hosts, self.slice.devices // self.slice.hosts


@dataclass(frozen=True, kw_only=True)
class StatedStep:
    """A train step as a configuration states it, for a number of devices.

    ``fields`` are those of a request for a plan, ``model`` the model if the configuration has its sizes. ``unpriced``
    are keys that the plan's price does not know, ``unused`` what the configuration leaves as it is by default, by the
    name of a plan's field.
    """

    fields: Mapping[str, object]
    model: ModelConfig | None = None
    model_name: str | None = None
    unpriced: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
