"""torchtitan's reserves against its tensors placed one by one, as PyTorch's allocator places them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rooftop.models import count_params
from rooftop.validation import load_published
from rooftop.validation.memory import planned_memory
from rooftop.validation.predict import predict

TITAN = [run for run in load_published().runs if run.source.startswith("torchtitan")]


class Segment:
    """An expandable segment of one stream: the best fit of what is free, its growing end last, neighbours merged."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, str | None]] = []

    def place(self, name: str, size: float) -> None:
        end = len(self.blocks) - 1
        fits = [
            (i == end, free, i) for i, (free, owner) in enumerate(self.blocks) if owner is None and free >= size
        ]  # fmt: skip
        if fits:
            _, free, i = min(fits)
            self.blocks[i : i + 1] = [(size, name), (free - size, None)] if free > size else [(size, name)]
            return
        if self.blocks and self.blocks[-1][1] is None:
            self.blocks.pop()
        self.blocks.append((size, name))

    def end(self, name: str) -> None:
        i = next(i for i, (_, owner) in enumerate(self.blocks) if owner == name)
        first = i - 1 if i and self.blocks[i - 1][1] is None else i
        last = i + 1 if i + 1 < len(self.blocks) and self.blocks[i + 1][1] is None else i
        self.blocks[first : last + 1] = [(sum(size for size, _ in self.blocks[first : last + 1]), None)]

    @property
    def reserved(self) -> float:
        return sum(size for size, _ in self.blocks)


Event = tuple[str, float]  # a tensor and its bytes; 0: it ends


def layer_forward(i: int, token: float, d: int, f: int, kv: int, *, selective: bool) -> Iterator[Event]:
    """A compiled layer: norms and rotations are fused, keys and values repeated for all heads."""
    yield from [("normed", token * d), (f"q{i}", token * d), ("k", token * kv), (f"v{i}", token * kv)]
    yield from [(name, token * d) for name in ("turned q", "turned k", "all v")]
    yield from [("k", 0), ("normed", 0), (f"core{i}", token * d), ("turned q", 0), ("turned k", 0), ("all v", 0)]
    yield from [("out", token * d), (f"stream{i}", token * d), ("out", 0)]
    if not selective:
        yield from [(f"q{i}", 0), (f"v{i}", 0), (f"core{i}", 0)]
    yield from [("normed", token * d), (f"gate{i}", token * f), ("up", token * f), ("normed", 0)]
    yield from [("product", token * f), ("up", 0)]
    if not selective:
        yield (f"gate{i}", 0)
    yield from [("down", token * d), ("product", 0), (f"x{i + 1}", token * d), (f"stream{i}", 0), ("down", 0)]


def layer_backward(i: int, token: float, d: int, f: int, layer: float, *, selective: bool) -> Iterator[Event]:
    """The gradients of a layer, its weights' in 16 bits and then in one array of float32."""
    yield from [("normed", token * d)] + ([] if selective else [(f"gate{i}", token * f)])
    yield from [(name, token * f) for name in ("up", "product", "d product", "d gate", "d up")]
    yield from [("d mlp", 6.0 * d * f), ("d normed", token * d)]
    yield from [(name, 0) for name in ("product", "d product", "up", f"gate{i}", "d gate", "d up", "normed")]
    yield from [("d stream", token * d), ("d normed", 0), ("g", 0)]
    if not selective:
        yield from [(f"q{i}", token * d), (f"core{i}", token * d)]
    inside = ("all q", "all k", "all v", "d out", "d q", "d k", "d v")
    yield from [(name, token * d) for name in inside]
    yield from [("d attn", 2.0 * layer - 6.0 * d * f), ("g", token * d)]
    yield from [(name, 0) for name in (*inside, f"q{i}", f"core{i}", "d stream", f"x{i}")]
    if selective:
        yield (f"v{i}", 0)
    yield from [("scattered", 4.0 * layer), ("d mlp", 0), ("d attn", 0), (f"w{i}", 0), ("scattered", 0)]


def step(tokens: float, shards: int, *, selective: bool, updated: bool) -> Iterator[Event]:
    """The stream of a step of LLaMA-3.1 8B; the first one, not ``updated`` before, makes the moments."""
    d, f, kv, vocab, layers, layer, token = 4096, 14336, 1024, 128_256, 32, 218_112_000.0, 2.0 * tokens
    parameters = 2.0 * vocab * d + layers * layer
    if not updated:
        yield ("weights", 4 * parameters / shards)
    yield from [("root", 4.0 * vocab * d), ("x0", token * d)]
    for i in range(layers):
        yield (f"w{i}", 2 * layer)
        yield from layer_forward(i, token, d, f, kv, selective=selective)
        if i < layers - 1:
            yield (f"w{i}", 0)
    yield from [("x in f32", 2 * token * d), ("normed", token * d), (f"x{layers}", 0)]
    yield from [("pred", token * vocab), ("in f32", 2 * token * vocab), ("log-softmax", 2 * token * vocab)]
    yield from [("in f32", 0), ("pred", 0)]
    yield from [("d log-softmax", 2 * token * vocab), ("d in f32", 2 * token * vocab), ("d log-softmax", 0)]
    yield from [("log-softmax", 0), ("d pred", token * vocab), ("d in f32", 0), ("d table", 2.0 * vocab * d)]
    yield from [("g", token * d), ("d pred", 0), ("normed", 0), ("x in f32", 0)]
    for i in reversed(range(layers)):
        if i < layers - 1:
            yield (f"w{i}", 2 * layer)
        yield from layer_backward(i, token, d, f, layer, selective=selective)
    yield from [("d tables", 8.0 * vocab * d), ("d table", 0), ("root", 0), ("g", 0), ("d tables", 0)]
    if not updated:
        yield ("moments", 8 * parameters / shards)


@pytest.mark.parametrize(
    ("run", "tokens", "shards"), [("t1", 16_384, 8), ("t2", 32_768, 8), ("t3", 16_384, 128)], ids=["t1", "t2", "t3"]
)
def test_tensors_placed_one_by_one_reserve_what_the_sum_says(run: str, tokens: int, shards: int) -> None:
    segment = Segment()
    for updated in (False, True, True):
        for name, size in step(tokens, shards, selective=run != "t2", updated=updated):
            if size:
                segment.place(name, size)
            else:
                segment.end(name)
    published = next(one for one in TITAN if one.id.startswith(f"torchtitan-{run}/") and one.compiled)
    memory = planned_memory(published, predict(published).plan)
    # Streams of their own have what is gathered, the root and the layer after it, and the sharded gradients.
    others = memory["gradients"] + memory["copies"] / 2
    assert segment.reserved + others == pytest.approx(sum(memory.values()), rel=0.02)


def test_state_and_gradients_are_split_over_all_devices() -> None:
    (context,) = [run for run in TITAN if "1x262144" in run.id]
    memory = planned_memory(context, predict(context).plan)
    assert memory["weights"] == pytest.approx(4 * count_params(context.model).total / 8, rel=1e-3)
    assert memory["optimizer"] == 2 * memory["weights"] == 2 * memory["gradients"]


def test_published_reserves_are_within_four_percent() -> None:
    assert len(TITAN) == 10
    for run in TITAN:
        reserved = sum(planned_memory(run, predict(run).plan).values())
        assert reserved == pytest.approx(run.measured_memory_bytes["peak"], rel=0.04), run.id
