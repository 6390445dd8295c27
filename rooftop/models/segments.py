"""Which layers of a model are alike: the runs of them that repeat, and the one that pipeline stages share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rooftop.models.config import Mixer, ModelConfig


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Kind of a layer: its window (None for all positions), whether its MLP is a mixture of experts, and its mixer.

    ``rope``: positions are rotated, if they are in any layer.
    """

    window: int | None
    moe: bool
    rope: bool = True
    mixer: Mixer = "attention"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Layers ``first`` to ``first + repeats x len(kinds)`` repeat a period of ``kinds``: one scan over ``repeats``."""

    first: int
    repeats: int
    kinds: tuple[LayerKind, ...]

    def layer(self, position: int, repeat: int) -> int:
        """The index in the model of one layer."""
        return self.first + repeat * len(self.kinds) + position


@lru_cache(maxsize=64)
def segments(model: ModelConfig) -> tuple[Segment, ...]:
    """The layers as few scans: from the first layer on, the period that repeats most often, the shortest of equals."""
    rope = model.rope_layers or (True,) * model.layers
    usual: Mixer = "attention"
    mixers = model.mixers or (usual,) * model.layers
    kinds = [
        LayerKind(window=window, moe=model.has_experts(layer), rope=rope[layer], mixer=mixers[layer])
        for layer, window in enumerate(model.windows)
    ]
    runs, first = list[Segment](), 0
    while first < len(kinds):
        rest = kinds[first:]
        repeats, period = max((_repeats(rest, period), -period) for period in range(1, len(rest) // 2 + 2))
        runs.append(Segment(first=first, repeats=repeats, kinds=tuple(rest[:-period])))
        first += repeats * -period
    return tuple(runs)


def shared_segment(model: ModelConfig) -> int:
    """Which of the segments pipeline stages share: the one with the most layers, by its index."""
    sizes = [segment.repeats * len(segment.kinds) for segment in segments(model)]
    return sizes.index(max(sizes))


def stage_parts(model: ModelConfig) -> tuple[int, str]:
    """Number of equal parts of a model that pipeline stages and chunks share, and the name of such a part.

    A chunk of a stage has room for as many as any other; the last chunks may have fewer of them.
    """
    shared = segments(model)[shared_segment(model)]
    layers = shared.repeats * len(shared.kinds)
    what = "layers" if len(shared.kinds) == 1 else f"periods of {len(shared.kinds)} layers"
    return shared.repeats, what if layers == model.layers else f"{what} that stages share"


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each pipeline stage of a server: as many as any other's, or one more in the first stages.

    The last stage has the unembedding too, which takes as long as a part of a layer.
    """
    least, more = divmod(layers, stages)
    ends = [least * (stage + 1) + min(stage + 1, more) for stage in range(stages)]
    return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))


@lru_cache(maxsize=256)
def heaviest_stage(model: ModelConfig, stages: int) -> tuple[int, int]:
    """Layers of the pipeline stage of a server with the most weights, and those of them that have experts.

    It is the one with the most layers of experts, and of equals the one with the most layers.
    """
    sizes = [(sum(map(model.has_experts, own)), len(own)) for own in stage_layers(model.layers, stages)]
    mixtures, layers = max(sizes)
    return layers, mixtures


def layers_alone(model: ModelConfig) -> tuple[tuple[LayerKind, ...], tuple[LayerKind, ...]]:
    """Layers that pipeline stages do not share, by kind: those of the first stage alone, and those of the last."""
    runs, shared = segments(model), shared_segment(model)
    first, last = (
        tuple(kind for segment in part for _ in range(segment.repeats) for kind in segment.kinds)
        for part in (runs[:shared], runs[shared + 1 :])
    )
    return first, last


def _repeats(kinds: list[LayerKind], period: int) -> int:
    """Number of times that the first ``period`` kinds repeat."""
    count = 1
    while kinds[count * period : (count + 1) * period] == kinds[:period]:
        count += 1
    return count
