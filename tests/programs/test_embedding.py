"""Lookups and updates of embedding tables against dense float64 arithmetic, over meshes of 1, 4 and 8 devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooftop.core.errors import RooftopError
from rooftop.embed.host.inputs import PAD, Ragged
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables, unpack
from rooftop.models.embedding_tables.tables import (
    COMBINERS,
    OPTIMIZERS,
    EmbeddingTable,
    Feature,
    Quantization,
    SparseCoreConfig,
    TableOptimizer,
    Tables,
)
from rooftop.plan.embedding.exchange import EXCHANGES
from rooftop.programs.embedding.buffers import LookupInputs
from rooftop.programs.embedding.lookup import EmbeddingProgram, lookup, update
from rooftop.programs.embedding.optimizers import RowState, update_state
from rooftop.programs.embedding.state import EmbeddingState, device_inputs, initialise
from tests.support.embedding_reference import DenseTable, look_up, table_gradient, updated

BATCH = 32
#: Beside the defaults, values that let every parameter of the optimizers count.
PARAMETERS = {
    # With the default a gradient that all but cancels moves a row by the learning rate, up or down by its rounding.
    "adam": (("epsilon", 1e-3),),
    "ftrl": (("l1", 0.01), ("l2", 0.1), ("beta", 0.5), ("learning_rate_power", -0.6)),
    "adagrad_momentum": (("beta2", 0.9), ("power", 1.5)),
}


def model(kind: str, combiner: str, *, stacked: bool = True, clip: float | None = None) -> Tables:
    """Two tables of different true widths that stack, one with two features; a third, wider; a sequence."""
    optimizer = TableOptimizer(kind=kind, learning_rate=0.1, parameters=PARAMETERS.get(kind, ()), clip=clip)
    sizes = {"items": (90, 6), "users": (50, 5), "words": (300, 12)}
    return Tables(
        tables=tuple(
            EmbeddingTable(name=name, vocabulary=vocabulary, width=width, optimizer=optimizer, combiner=combiner)
            for name, (vocabulary, width) in sizes.items()
        ),
        features=(
            Feature(name="bought", table="items", weighted=True),
            Feature(name="user", table="users"),
            Feature(name="seen", table="items"),
            Feature(name="text", table="words", length=3),
        ),
        config=SparseCoreConfig(disable_table_stacking=not stacked),
    )


def every_pair(*, stacked: bool = True) -> Tables:
    """Two tables of different true widths for every optimizer with every combiner: 18 stacks, or 36."""
    tables, features = [], []
    for kind in OPTIMIZERS:
        optimizer = TableOptimizer(kind=kind, learning_rate=0.1, parameters=PARAMETERS.get(kind, ()))
        for combiner in COMBINERS:
            for width, vocabulary in ((6, 70), (5, 40)):
                name = f"{kind}-{combiner}-{width}"
                tables.append(
                    EmbeddingTable(
                        name=name, vocabulary=vocabulary, width=width, optimizer=optimizer, combiner=combiner
                    )
                )
                features.append(Feature(name=f"of-{name}", table=name, weighted=width == 6))
    config = SparseCoreConfig(disable_table_stacking=not stacked, max_ids_per_chip_per_sample=1000)
    return Tables(tables=tuple(tables), features=tuple(features), config=config)


def batch_of(tables: Tables, seed: int, batch: int = BATCH, most: int = 6) -> dict[str, Ragged]:
    """Ids of every feature, with duplicates in samples and samples without ids."""
    random = np.random.default_rng(seed)
    features = {}
    for feature in tables.features:
        vocabulary = tables.table(feature.table).vocabulary
        rows = batch * feature.rows_per_sample
        lengths = random.integers(0, 2 if feature.length else most, rows)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        # Small ids are frequent: duplicates within samples, and between them.
        values = np.minimum(random.geometric(0.06, splits[-1]) - 1, vocabulary - 1)
        weights = random.uniform(0.5, 2, splits[-1]).astype(np.float32) if feature.weighted else None
        features[feature.name] = Ragged(values=values, row_splits=splits, weights=weights)
    return features


def as_input(feature: Feature, ids: Ragged) -> Any:
    """Positions of a sequence are padded dense rows to preprocessing."""
    if feature.length is None:
        return ids
    padded = np.full(ids.rows, PAD)
    padded[np.diff(ids.row_splits) > 0] = ids.values
    return padded.reshape(-1, feature.length)


def inputs_of(tables: Tables, ids: Mapping[str, Ragged]) -> dict[str, Any]:
    return {feature.name: as_input(feature, ids[feature.name]) for feature in tables.features}


def gradients_of(tables: Tables, seed: int, batch: int = BATCH) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed + 1000)
    shapes = {
        feature.name: (batch, *(() if feature.length is None else (feature.length,)), tables.table(feature.table).width)
        for feature in tables.features
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def limits_for(stacking: Stacking, batches: list[Mapping[str, Any]], passes: int = 1) -> dict[str, StackLimits]:
    """Limits that the batches just keep within, in so many passes over samples."""
    observer = Preprocessor(stacking, batch=BATCH, minibatching=passes > 1, sample_passes=passes)
    seen = observer.observe(batches[0])
    for batch in batches[1:]:
        seen = seen.merged(observer.observe(batch))
    limits = {}
    for name, one in seen.stacks.items():
        most = int(one.max_ids.max())
        limits[name] = StackLimits(
            max_ids=most,
            max_unique_ids=int(one.max_unique_ids.max()),
            buffer=passes * full_buffer(most, stacking.cores),
        )
    return limits


def in_passes(limits: Mapping[str, StackLimits]) -> dict[str, StackLimits]:
    """Limits that about half of a batch keeps within."""
    return {
        name: StackLimits(
            max_ids=max(4, one.max_ids // 2),
            max_unique_ids=max(2, one.max_unique_ids // 2),
            # Every pass pads its own partitions.
            buffer=8 * one.buffer,
        )
        for name, one in limits.items()
    }


def mesh_of(devices: int) -> jax.sharding.Mesh:
    shape, names = {1: ((1,), ("data",)), 4: ((4,), ("data",)), 8: ((2, 4), ("data", "fsdp"))}[devices]
    return jax.make_mesh(shape, names, devices=jax.devices()[:devices])


def host(state: EmbeddingState[jax.Array], stacking: Stacking) -> dict[str, np.ndarray]:
    return unpack(stacking, {name: np.asarray(table) for name, table in state.tables.items()})


@dataclasses.dataclass
class Case:
    """A model on a mesh, and a dense copy of it."""

    tables: Tables
    devices: int
    per_device: int = 2
    exchange: str | None = None
    minibatching: bool = False
    sample_passes: int = 1
    steps: int = 3

    def run(self) -> None:
        stacking = stack_tables(
            self.tables, cores=self.devices * self.per_device, cores_per_device=self.per_device, batch=BATCH
        )
        batches = [batch_of(self.tables, seed) for seed in range(self.steps)]
        inputs_of_batches = [inputs_of(self.tables, batch) for batch in batches]
        limits = limits_for(stacking, inputs_of_batches, self.sample_passes)
        if self.sample_passes > 1:
            whole = limits_for(stacking, inputs_of_batches)
            assert all(limits[name].max_ids < whole[name].max_ids for name in limits)
        elif self.minibatching:
            limits = in_passes(limits)
        how = {"minibatching": self.minibatching, "sample_passes": self.sample_passes}
        preprocessor = Preprocessor(stacking, batch=BATCH, limits=limits, **how)  # type: ignore[arg-type]
        program = EmbeddingProgram(
            stacking=stacking,
            batch=BATCH,
            limits=limits,
            exchange=self.exchange,
            **how,  # type: ignore[arg-type]
        )
        mesh = mesh_of(self.devices)
        state = initialise(stacking, mesh, seed=0)
        begun = host(state, stacking)
        dense = {name: DenseTable(self.tables.table(name), rows) for name, rows in begun.items()}
        passes = 0
        with jax.set_mesh(mesh):
            for seed, features in enumerate(batches):
                preprocessed = preprocessor.preprocess(inputs_of(self.tables, features))
                passes = max(passes, preprocessed.minibatches)
                inputs = device_inputs(preprocessed.buffers, preprocessed.minibatches, mesh)
                activations = jax.jit(lookup, static_argnums=0)(program, state.tables, inputs)
                gradients = gradients_of(self.tables, seed)
                share = 1 / (1 + seed)
                placed = jax.device_put(gradients, jax.NamedSharding(mesh, jax.P(mesh.axis_names)))
                state = jax.jit(update, static_argnums=0)(program, state, inputs, placed, share)
                for feature in self.tables.features:
                    table = dense[feature.table]
                    expected = look_up(table.rows, features[feature.name], table.table.combiner)
                    actual = np.asarray(activations[feature.name]).reshape(expected.shape)
                    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
                for name, table in dense.items():
                    looked = [
                        (features[one.name], gradients[one.name].reshape(-1, table.table.width))
                        for one in self.tables.features_of(name)
                    ]
                    table.update(*table_gradient(table.table, looked), share)
        for name, rows in host(state, stacking).items():
            np.testing.assert_allclose(rows, dense[name].rows, rtol=1e-5, atol=1e-5)
            assert not np.allclose(rows, begun[name], rtol=1e-3, atol=1e-3)
        assert (passes > 1) == self.minibatching


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "adam" else pytest.mark.slow) for kind in OPTIMIZERS]
)
def test_every_optimizer_and_combiner_equals_dense_float64(kind: str) -> None:
    tables = model(kind, "sum", clip=0.8)
    mixed = zip(tables.tables, COMBINERS, strict=True)
    changed = tuple(dataclasses.replace(table, combiner=combiner) for table, combiner in mixed)
    Case(dataclasses.replace(tables, tables=changed), devices=4).run()


#: Every pair of devices, stacking, passes and exchange is among the quick ones.
QUICK = [
    (1, True, True, EXCHANGES[1]),
    (4, False, True, EXCHANGES[0]),
    (8, False, False, EXCHANGES[1]),
]
CASES = [
    (devices, stacked, minibatching, EXCHANGES[(index + stacked + minibatching) % 2])
    for index, devices in enumerate((1, 4, 8))
    for stacked in (False, True)
    for minibatching in (False, True)
]


@pytest.mark.parametrize(
    ("devices", "stacked", "minibatching", "exchange"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in QUICK)],
)
def test_every_mesh_stacking_exchange_and_minibatching(
    devices: int, stacked: bool, minibatching: bool, exchange: str
) -> None:
    # Row-wise: stacked tables of one padded width differ in how many floats a mean is over.
    tables = model("rowwise_adagrad", "mean", stacked=stacked)
    Case(tables, devices=devices, minibatching=minibatching, exchange=exchange, steps=2).run()


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "stacked", "minibatching", "exchange"), CASES)
def test_every_optimizer_with_every_combiner_on_every_mesh(
    devices: int, stacked: bool, minibatching: bool, exchange: str
) -> None:
    tables = every_pair(stacked=stacked)
    Case(tables, devices=devices, minibatching=minibatching, exchange=exchange, steps=2).run()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_simulated_quantisation_looks_up_the_nearest_level(exchange: str) -> None:
    quantization = Quantization(buckets=9, low=-0.1, high=0.1)
    tables = Tables(
        tables=(EmbeddingTable(name="t", vocabulary=64, width=8, combiner="mean", quantization=quantization),),
        features=(Feature(name="f", table="t"),),
    )
    stacking = stack_tables(tables, cores=8, cores_per_device=2, batch=BATCH)
    ids = batch_of(tables, 0)
    limits = limits_for(stacking, [ids])
    program = EmbeddingProgram(stacking=stacking, batch=BATCH, limits=limits, exchange=exchange)
    mesh = mesh_of(4)
    state = initialise(stacking, mesh, seed=0)
    rows = host(state, stacking)["t"].astype(np.float64)
    levels = np.linspace(-0.1, 0.1, 9)
    nearest = levels[np.abs(rows[..., None] - levels).argmin(axis=-1)]
    assert (np.abs(rows) > 0.1).any()
    preprocessed = Preprocessor(stacking, batch=BATCH, limits=limits).preprocess(ids)
    with jax.set_mesh(mesh):
        inputs = device_inputs(preprocessed.buffers, preprocessed.minibatches, mesh)
        actual = jax.jit(lookup, static_argnums=0)(program, state.tables, inputs)["f"]
    np.testing.assert_allclose(np.asarray(actual), look_up(nearest, ids["f"], "mean"), rtol=1e-5, atol=1e-6)


def test_tables_begin_alike_however_they_are_stacked_and_split() -> None:
    tables = model("adam", "sum")
    tables_seen = []
    for devices, stacked in ((1, True), (4, True), (8, False)):
        stacking = stack_tables(
            model("adam", "sum", stacked=stacked), cores=devices * 2, cores_per_device=2, batch=BATCH
        )
        tables_seen.append(host(initialise(stacking, mesh_of(devices), seed=3), stacking))
    for name in tables_seen[0]:
        assert all(np.array_equal(tables_seen[0][name], other[name]) for other in tables_seen[1:])
    assert not np.array_equal(tables_seen[0]["items"][:50, :5], tables_seen[0]["users"])
    assert {table.name for table in tables.tables} == set(tables_seen[0])


def test_a_program_refuses_what_cannot_be() -> None:
    stacking = stack_tables(model("sgd", "sum"), cores=8, cores_per_device=2, batch=BATCH)
    limits = limits_for(stacking, [inputs_of(stacking.tables, batch_of(stacking.tables, 0))])
    with pytest.raises(RooftopError, match="exchange"):
        EmbeddingProgram(stacking=stacking, batch=BATCH, limits=limits, exchange="both")
    with pytest.raises(RooftopError, match="multiple of 8"):
        EmbeddingProgram(stacking=stacking, batch=12, limits=limits)
    with pytest.raises(RooftopError, match="limits"):
        EmbeddingProgram(stacking=stacking, batch=BATCH, limits={})
    program = EmbeddingProgram(stacking=stacking, batch=BATCH, limits=limits)
    mesh = mesh_of(8)
    with jax.set_mesh(mesh), pytest.raises(RooftopError, match="4 devices"):
        lookup(program, {}, LookupInputs(stacks={}, passes=jnp.int32(1)))


def test_a_learning_rate_of_nothing_moves_nothing_and_padding_stays_as_it_was() -> None:
    tables = model("ftrl", "sum")
    stacking = stack_tables(tables, cores=2, cores_per_device=2, batch=BATCH)
    ids = inputs_of(tables, batch_of(tables, 0))
    limits = limits_for(stacking, [ids])
    program = EmbeddingProgram(stacking=stacking, batch=BATCH, limits=limits)
    preprocessed = Preprocessor(stacking, batch=BATCH, limits=limits).preprocess(ids)
    mesh = mesh_of(1)
    with jax.set_mesh(mesh):
        inputs = device_inputs(preprocessed.buffers, preprocessed.minibatches, mesh)
        before = initialise(stacking, mesh, seed=0)
        gradient = jax.device_put(gradients_of(tables, 0), jax.NamedSharding(mesh, jax.P(mesh.axis_names)))
        step = jax.jit(lambda share: update(program, before, inputs, gradient, share))
        still, moved = (step(share) for share in (0.0, 1.0))
    for stack in stacking.stacks:
        old, same, new = (np.asarray(state.tables[stack.name]) for state in (before, still, moved))
        assert np.array_equal(old, same) and not np.array_equal(old, new)
        narrow = max(place.table.width for place in stack.places)
        assert not new[:, :, narrow:].any()
    assert int(still.step) == 1


@pytest.mark.parametrize(("kind", "devices", "exchange"), [("adagrad", 4, "rows"), ("adam", 1, "activations")])
def test_passes_over_samples_update_each_row_once(kind: str, devices: int, exchange: str) -> None:
    Case(model(kind, "sqrtn"), devices=devices, minibatching=True, sample_passes=4, exchange=exchange, steps=2).run()


def test_passes_over_samples_need_their_layout() -> None:
    stacking = stack_tables(model("adagrad", "sum"), cores=2, cores_per_device=2, batch=BATCH)
    limits = {stack.name: StackLimits(max_ids=8, max_unique_ids=8, buffer=64) for stack in stacking.stacks}
    with pytest.raises(RooftopError, match="minibatching"):
        EmbeddingProgram(stacking=stacking, batch=BATCH, limits=limits, sample_passes=2)
    with pytest.raises(RooftopError, match="sample_passes: got 2; accepted: a whole number from 1 to 1"):
        Preprocessor(stacking, batch=BATCH, limits=limits, sample_passes=2)


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999, 0.99999])
def test_adam_corrects_its_bias_to_the_last_digits(step: int, beta2: float) -> None:
    optimizer = TableOptimizer(kind="adam", parameters=(("beta2", beta2),))
    random = np.random.default_rng(0)
    row, gradient, first, second = (random.uniform(0.5, 2, (1, 8)).astype(np.float32) for _ in range(4))
    slots = tuple(jnp.asarray(slot) for slot in (first, second))
    arguments = (jnp.asarray(row), slots, jnp.asarray(gradient), jnp.float32(1), jnp.int32(step), jnp.full((1, 1), 8.0))
    new, _ = update_state(optimizer, RowState(*arguments))
    exact = [np.float64(one[0]) for one in (row, first, second, gradient)]
    exact_row, _ = updated(optimizer, exact[0], exact[1:3], exact[3], 1.0, step)
    np.testing.assert_allclose(np.asarray(new)[0], exact_row, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_that_is_no_number_is_not_hidden(kind: str) -> None:
    optimizer = TableOptimizer(kind=kind)
    row, gradient = jnp.ones((1, 8)), jnp.full((1, 8), jnp.nan)
    slots = tuple(jnp.full((1, width), 0.5) for width in optimizer.slots(8))
    new, _ = update_state(
        optimizer, RowState(row, slots, gradient, jnp.float32(0.1), jnp.float32(1), jnp.full((1, 1), 8.0))
    )
    assert jnp.isnan(new).all()
