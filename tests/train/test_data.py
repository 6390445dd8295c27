"""Documents packed without loss, and batches that are a function of the step."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.arrays.rules import Rules
from rooftop.checkpoints.tokenizer import train_bpe
from rooftop.core.errors import RooftopError
from rooftop.programs.attention.context import sequence_order
from rooftop.programs.parameters import Batch
from rooftop.programs.sharding import Specs
from rooftop.runs.folder import RunFolder
from rooftop.train.data import loading, packing
from rooftop.train.data.corpus import find_corpus
from rooftop.train.data.dataset import DataSource, open_dataset
from rooftop.train.data.loading import Loader, Permutation, hold_out, place, prefetch
from rooftop.train.data.packing import fill, pack
from rooftop.train.data.tokens import TokenStore, tokenise

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def counting(lengths: list[int], *, cut: int = 0) -> TokenStore:
    """Documents whose tokens are 0, 1, 2, ...: each tells its place. ``cut`` of them are in a part of their own."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    parts = np.split(np.arange(offsets[-1], dtype=np.uint32), [offsets[cut]])
    return TokenStore(parts=tuple(part for part in parts if len(part)), offsets=offsets, digest="")


def same(one: Batch[Any], other: Batch[Any]) -> None:
    for field in dataclasses.fields(Batch):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


# Packing


@given(LENGTHS, st.integers(1, 24), st.data())
def test_every_token_is_an_input_once_and_a_target_once(lengths: list[int], seq_len: int, data: st.DataObject) -> None:
    store = counting(lengths, cut=data.draw(st.integers(0, len(lengths))))
    packed = pack(store, seq_len)
    batch = fill(store, packed, np.arange(packed.rows))
    assert {batch.tokens.shape, batch.targets.shape} == {(packed.rows, seq_len)}
    inputs = batch.segments > 0
    assert sorted(batch.tokens[inputs].tolist()) == list(range(store.tokens))
    predicted = batch.targets >= 0
    firsts = set(store.offsets[:-1].tolist())
    assert sorted(batch.targets[predicted].tolist()) == [token for token in range(store.tokens) if token not in firsts]
    # The target of a token is the one that follows it; those without one are last in their documents.
    np.testing.assert_array_equal(batch.targets[predicted], batch.tokens[predicted] + 1)
    assert (packed.tokens, packed.targets) == (store.tokens, store.tokens - store.documents)
    assert packed.padding == pytest.approx(1 - inputs.mean())


@given(LENGTHS, st.integers(1, 24))
def test_pieces_lie_whole_and_in_order(lengths: list[int], seq_len: int) -> None:
    store = counting(lengths)
    packed = pack(store, seq_len)
    batch = fill(store, packed, np.arange(packed.rows))
    document = np.searchsorted(store.offsets, np.arange(store.tokens), side="right") - 1
    homes: dict[int, set[tuple[int, int]]] = {}
    for row in range(packed.rows):
        segments = batch.segments[row]
        used = int((segments > 0).sum())
        assert (segments[used:] == 0).all() and (np.diff(segments[:used]) >= 0).all()
        assert not batch.tokens[row, used:].any() and not batch.positions[row, used:].any()
        assert set(segments[:used].tolist()) == set(range(1, int(segments.max()) + 1))
        for segment in range(1, int(segments.max()) + 1):
            here = np.flatnonzero(segments == segment)
            ids = batch.tokens[row, here]
            np.testing.assert_array_equal(ids, ids[0] + np.arange(len(ids)))
            np.testing.assert_array_equal(batch.positions[row, here], np.arange(len(here)))
            (home,) = set(document[ids].tolist())
            homes.setdefault(home, set()).add((row, segment))
    for number, length in enumerate(lengths):
        assert len(homes[number]) == -(-length // seq_len), "split only where it must be"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 20))
def test_packing_is_best_fit_longest_first(lengths: list[int], seq_len: int) -> None:
    pieces = [min(length - start, seq_len) for length in lengths for start in range(0, length, seq_len)]
    rooms: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fitting = [room for room in rooms if room >= piece]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else seq_len) - piece)
    packed = pack(counting(lengths), seq_len)
    used = np.add.reduceat(packed.lengths, packed.bounds[:-1])
    assert sorted((seq_len - used).tolist()) == sorted(rooms)


def test_pieces_of_one_length_keep_their_order() -> None:
    assert pack(counting([4, 3] * 100), 4).starts.tolist() == [*range(0, 700, 7), *range(4, 700, 7)]


def test_packing_chooses_documents_and_refuses_none() -> None:
    store = counting([3, 5, 0, 2])
    packed = pack(store, 4, chosen=np.array([1, 2]))
    assert sorted(packed.starts.tolist()) == [3, 7] and packed.tokens == 5
    with pytest.raises(RooftopError, match="at least one that has a token"):
        pack(store, 4, chosen=np.array([2]))
    with pytest.raises(RooftopError, match="seq_len: got 0"):
        pack(store, 0)


@given(st.integers(2, 500), st.floats(0.001, 0.999), st.integers(0, 9))
def test_held_out_documents_and_the_others_are_all(documents: int, share: float, seed: int) -> None:
    training, held_out = hold_out(documents, share, seed)
    assert sorted([*training.tolist(), *held_out.tolist()]) == list(range(documents))
    assert len(training) and len(held_out) and abs(len(held_out) - share * documents) <= 1
    np.testing.assert_array_equal(hold_out(documents, share, seed)[1], held_out)


def test_holding_out_refuses_what_cannot_be_split() -> None:
    with pytest.raises(RooftopError, match="documents: got 1; accepted: at least 2"):
        hold_out(1, 0.1, 0)
    for share in (0.0, 1.0):
        with pytest.raises(RooftopError, match="more than 0 and less than 1"):
            hold_out(9, share, 0)


# Batches


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 2**40))
def test_a_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size=size, seed=seed, epoch=epoch)
    places = np.arange(size)
    assert sorted(order(places).tolist()) == places.tolist()
    np.testing.assert_array_equal(order(places[::3]), order(places)[::3])


def test_permutations_are_even_and_stay_as_they_are() -> None:
    """A run that is resumed by a later version must find the same batches, so that some values are pinned."""
    assert Permutation(size=10, seed=0)(np.arange(10)).tolist() == [4, 6, 8, 9, 0, 2, 5, 7, 3, 1]
    trials, size = 4000, 5
    orders = np.array([Permutation(size=size, seed=7, epoch=epoch)(np.arange(size)) for epoch in range(trials)])
    counts = np.array([[(orders[:, place_] == value).sum() for value in range(size)] for place_ in range(size)])
    # Chi-squared with 16 degrees of freedom: 39.3 is passed by chance once in a thousand.
    assert ((counts - trials / size) ** 2 / (trials / size)).sum() < 39.3


@given(LENGTHS, st.integers(1, 12), st.integers(1, 9), st.integers(0, 5))
def test_every_epoch_has_every_token_once(lengths: list[int], seq_len: int, batch: int, seed: int) -> None:
    store = counting([*lengths, seq_len])
    packed = pack(store, seq_len)
    loader = Loader(store=store, packing=packed, batch=batch, seed=seed)
    steps = [loader.rows(step, slice(None)) for step in range(-(-3 * packed.rows // batch))]
    ids = np.concatenate([np.where(step.segments > 0, step.tokens, -1) for step in steps])
    for epoch in range(3):
        rows = ids[epoch * packed.rows : (epoch + 1) * packed.rows]
        assert sorted(rows[rows >= 0].tolist()) == list(range(store.tokens))
    assert (loader.steps_per_epoch - 1) * batch < packed.rows <= loader.steps_per_epoch * batch


def test_epochs_and_seeds_differ_in_order() -> None:
    store = counting([4] * 30)
    orders = {
        tuple(Loader(store=store, packing=pack(store, 4), batch=30, seed=seed).rows(step, slice(None)).tokens[:, 0])
        for seed in range(3)
        for step in range(3)
    }
    assert len(orders) == 9


@given(LENGTHS, st.integers(1, 12), st.sampled_from([4, 8]), st.integers(0, 50), st.sampled_from([None, 3]))
def test_any_number_of_processes_makes_the_same_batch(
    lengths: list[int], seq_len: int, batch: int, step: int, seed: int | None
) -> None:
    store = counting([*lengths, seq_len])
    whole = Loader(store=store, packing=pack(store, seq_len), batch=batch, seed=seed).rows(step, slice(None))
    for processes in (1, 2, 4):
        share = batch // processes
        parts = [
            # Each process opens, packs and loads for itself.
            Loader(store=store, packing=pack(store, seq_len), batch=batch, seed=seed).rows(step, rows)
            for rows in (range(first, first + share) for first in range(0, batch, share))
        ]
        same(jax.tree.map(lambda *parts: np.concatenate(parts), *parts), whole)


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    texts = [f"document {number} of many " * (number % 7 + 1) for number in range(20)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)

    def loader() -> Loader:
        store = tokenise(find_corpus([str(tmp_path / "*.txt")]), train_bpe(texts, 300), tmp_path / "s", vocab=300)
        training, _ = hold_out(store.documents, 0.2, seed=1)
        return Loader(store=store, packing=pack(store, 16, chosen=training), batch=4, seed=1)

    uninterrupted, first = [], loader()
    for fetched in prefetch(lambda step: first.rows(step, slice(None)), range(40)):
        uninterrupted.append(fetched.batch)
    assert first.steps_per_epoch < 40
    for step in (0, 1, first.steps_per_epoch, 39):
        same(loader().rows(step, slice(None)), uninterrupted[step])


@given(LENGTHS, st.integers(1, 12), st.integers(1, 9))
def test_evaluation_goes_once_through_all_in_order(lengths: list[int], seq_len: int, batch: int) -> None:
    store = counting(lengths)
    packed = pack(store, seq_len)
    loader = Loader(store=store, packing=packed, batch=batch, seed=None)
    steps = [loader.rows(step, slice(None)) for step in range(loader.steps_per_epoch + 1)]
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *steps)
    same(jax.tree.map(lambda part: part[: packed.rows], whole), fill(store, packed, np.arange(packed.rows)))
    assert not whole.segments[packed.rows :].any() and (whole.targets[packed.rows :] == -1).all()


def test_a_loader_refuses_what_gives_no_batches() -> None:
    store = counting([3, 3])
    packed = pack(store, 4)
    good = Loader(store=store, packing=packed, batch=2, seed=0)
    for change, message in (
        ({"batch": 0}, "batch: got 0"),
        ({"seed": -1}, "seed: got -1"),
        ({"packing": pack(store, 7)}, "data: got '6 tokens to train on'; accepted: more: a sequence of 7 at least"),
    ):
        with pytest.raises(RooftopError, match=message):
            dataclasses.replace(good, **change)
    assert Loader(store=store, packing=pack(store, 7), batch=2, seed=None).steps_per_epoch == 1
    with pytest.raises(RooftopError, match="step: got -1"):
        good.rows(-1, [0])
    for rows in ([2], [-1]):
        with pytest.raises(RooftopError, match="0 to 1, the rows of a batch"):
            good.rows(0, rows)


# On devices


def on_devices(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[jax.sharding.Mesh, Specs]:
    return jax.make_mesh(shape, axes), Specs(Rules().only(dict(zip(axes, shape, strict=True))))


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("shape", "axes", "made_once"),
    [((2, 2, 2), ("fsdp", "tensor", "context"), 2), ((4, 2), ("data", "fsdp"), 8), ((8,), ("tensor",), 1)],
)
def test_a_batch_is_placed_as_the_program_expects_it(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], axes: tuple[str, ...], made_once: int, order: str
) -> None:
    store = counting([5, 30, 7, 7, 90, 2])
    loader = Loader(store=store, packing=pack(store, 8), batch=16, seed=0)
    expected = loader.rows(3, slice(None))
    filled = []
    monkeypatch.setattr(
        loading, "fill", lambda *arguments: filled.append(len(arguments[2])) or packing.fill(*arguments)
    )
    mesh, specs = on_devices(shape, axes)
    batch = place(loader, 3, mesh, specs, order)
    assert filled == [16 // made_once] * made_once
    columns = sequence_order(8, 2 if "context" in axes else 1, order)
    same(batch, jax.tree.map(lambda part: part[:, columns], expected))
    for array in jax.tree.leaves(batch):
        assert array.sharding.spec == specs.activation("batch", "seq")


def test_padding_follows_the_batch_of_the_loader() -> None:
    store = counting([5, 30, 7, 7, 90, 2])
    loader = Loader(store=store, packing=pack(store, 9), batch=5, seed=0)
    expected = loader.rows(3, slice(None))
    mesh, specs = on_devices((4, 2), ("fsdp", "context"))
    batch = place(loader, 3, mesh, specs, "zigzag", padded=(8, 12))
    tokens, targets, segments = (
        np.asarray(array)[:, np.argsort(sequence_order(12, 2, "zigzag"))]
        for array in (batch.tokens, batch.targets, batch.segments)
    )
    assert np.array_equal(tokens[:5, :9], expected.tokens)
    assert np.array_equal(targets[:5, :9], expected.targets)
    for array, padding in ((tokens, 0), (targets, -1), (segments, 0)):
        assert (array[5:] == padding).all() and (array[:, 9:] == padding).all()


def test_a_batch_that_does_not_divide_is_refused() -> None:
    store = counting([9] * 9)
    mesh, specs = on_devices((4, 2), ("fsdp", "context"))
    for batch, seq_len, message in ((6, 8, "batch: got 6; accepted: a multiple of 4"), (4, 9, "seq_len: got 9")):
        loader = Loader(store=store, packing=pack(store, seq_len), batch=batch, seed=0)
        with pytest.raises(RooftopError, match=message):
            place(loader, 0, mesh, specs, "zigzag")


# Prefetching


def fetching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetching_keeps_the_order_and_its_bound(depth: int) -> None:
    asked: list[int] = []

    def steps() -> Iterator[int]:
        for step in range(10, 30):
            asked.append(step)
            yield step

    batches = []
    for fetched in prefetch(lambda step: step * step, steps(), depth=depth):
        batches.append((fetched.step, fetched.batch))
        assert len(asked) == min(len(batches) + depth, 20)
    assert batches == [(step, step * step) for step in range(10, 30)]
    assert not fetching()


def test_an_exception_of_the_thread_is_raised_at_its_step() -> None:
    seen = []

    def make(step: int) -> int:
        if step == 3:
            raise RooftopError("data", step, "something else")
        return step

    with pytest.raises(RooftopError, match="data: got 3"):
        for fetched in prefetch(make, range(9), depth=5):
            seen.append(fetched.step)
    assert seen == [0, 1, 2] and not fetching()


def test_an_exception_in_the_loop_ends_the_thread() -> None:
    with pytest.raises(KeyboardInterrupt):
        for _ in prefetch(lambda step: step, iter(int, 1)):
            raise KeyboardInterrupt
    assert not fetching()
    endless = prefetch(lambda step: step, iter(int, 1))
    assert next(endless).step == 0 and fetching()
    endless.close()
    assert not fetching()


def test_what_was_not_begun_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled, all_cancelled, filled, cancel = [], threading.Event(), [], Future.cancel

    def counted(future: Future[int]) -> bool:
        cancelled.append(cancel(future))
        if len(cancelled) == 4:
            all_cancelled.set()
        return cancelled[-1]

    def make(step: int) -> int:
        if step:
            all_cancelled.wait(timeout=5)  # never so long where the rest is cancelled
        filled.append(step)
        return step

    monkeypatch.setattr(Future, "cancel", counted)
    batches = prefetch(make, range(9), depth=4)
    next(batches)
    batches.close()
    assert filled in ([0], [0, 1]) and not fetching()


def test_the_time_waited_is_that_between_asking_and_having(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], threading.Event()

    def clock() -> float:
        before = now[0]
        asked.set()
        return before

    def make(step: int) -> int:
        asked.wait()
        now[0] += 5.0
        return step

    monkeypatch.setattr(loading, "perf_counter", clock)
    (fetched,) = prefetch(make, [0])
    assert fetched.waited_s == 5.0
    with pytest.raises(RooftopError, match="prefetch depth: got 0"):
        prefetch(make, [0], depth=0)


@pytest.mark.parametrize(("documents", "share"), [(1, 0.0), (2, 0.01)])
def test_nothing_is_held_out_of_a_single_document(
    documents: int, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir()
    for number in range(documents):
        (tmp_path / f"{number}.txt").write_text(f"text {number} to train on, and more of it\n" * 20)
    data = open_dataset(
        DataSource(data=(f"{tmp_path}/*.txt",), field="text", tokenizer=None, vocab=300),
        RunFolder(path=tmp_path / "run"), vocab=300, batch=2, seq_len=8, seed=0, held_share=None,
    )  # fmt: skip
    assert (data.held_share, data.held is None) == (share, documents == 1)
