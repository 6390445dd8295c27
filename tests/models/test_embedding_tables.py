"""Tables, features and config: from Python and from TOML, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.models.embedding_tables.files import load_tables, tables_from_json, tables_from_toml
from rooftop.models.embedding_tables.tables import (
    COMBINERS,
    INITIALIZERS,
    OPTIMIZERS,
    EmbeddingTable,
    Feature,
    Initializer,
    Quantization,
    SparseCoreConfig,
    TableOptimizer,
    Tables,
)

TOML = """
[config]
allow_id_dropping = true
max_ids_per_chip_per_sample = 128
max_ids_per_table = {user = 4096}

[tables.user]
vocabulary = 1_000_000
width = 32
combiner = "mean"
optimizer = {kind = "adagrad", learning_rate = 0.05, initial_accumulator = 0.2, clip = 1.0}
initializer = {kind = "uniform", low = -0.1, high = 0.1}
quantization = {low = -1.0, high = 1.0}

[tables.item]
vocabulary = 10
width = 6
optimizer = "adam"

[features.user_id]
table = "user"

[features.clicked]
table = "item"
weighted = true
ids_per_sample = 12.5

[features.history]
table = "item"
length = 20
"""


def test_toml_gives_what_python_gives() -> None:
    user = EmbeddingTable(
        name="user",
        vocabulary=1_000_000,
        width=32,
        combiner="mean",
        optimizer=TableOptimizer(
            kind="adagrad", learning_rate=0.05, parameters=(("initial_accumulator", 0.2),), clip=1.0
        ),
        initializer=Initializer(kind="uniform", parameters=(("low", -0.1), ("high", 0.1))),
        quantization=Quantization(low=-1.0, high=1.0),
    )
    item = EmbeddingTable(name="item", vocabulary=10, width=6, optimizer=TableOptimizer(kind="adam"))
    features = (
        Feature(name="user_id", table="user"),
        Feature(name="clicked", table="item", weighted=True, ids_per_sample=12.5),
        Feature(name="history", table="item", length=20),
    )
    config = SparseCoreConfig(allow_id_dropping=True, max_ids_per_chip_per_sample=128, max_ids_per_table={"user": 4096})
    assert tables_from_toml(TOML) == Tables(tables=(user, item), features=features, config=config)


def test_defaults_are_the_documents() -> None:
    config = SparseCoreConfig()
    assert vars(config) == {
        "disable_table_stacking": False,
        "max_ids_per_chip_per_sample": 64,
        "max_ids_per_table": None,
        "max_unique_ids_per_table": None,
        "allow_id_dropping": False,
        "initialize_tables_on_host": True,
        "enable_fast_table_initialization": False,
    }
    assert config.initialized_on_host
    assert not SparseCoreConfig(enable_fast_table_initialization=True).initialized_on_host
    assert not SparseCoreConfig(initialize_tables_on_host=False).initialized_on_host


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tables.toml"
    file.write_text(TOML)
    assert load_tables(file) == tables_from_toml(TOML)
    with pytest.raises(RooftopError, match=r"missing\.toml.*can be read"):
        load_tables(tmp_path / "missing.toml")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(RooftopError, match="UTF-8"):
        load_tables(file)


@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(INITIALIZERS)),
    st.sampled_from(COMBINERS),
    st.integers(1, 10**6),
    st.integers(1, 512),
    st.booleans(),
)
def test_json_there_and_back(
    optimizer: str, initializer: str, combiner: str, vocabulary: int, width: int, quantized: bool
) -> None:
    table = EmbeddingTable(
        name="t",
        vocabulary=vocabulary,
        width=width,
        combiner=combiner,
        optimizer=TableOptimizer(kind=optimizer, learning_rate=0.3, clip=2.0 if quantized else None),
        initializer=Initializer(kind=initializer),
        quantization=Quantization(low=-1.0, high=2.0, buckets=16) if quantized else None,
    )
    tables = Tables(
        tables=(table,),
        features=(Feature(name="f", table="t", weighted=quantized), Feature(name="s", table="t", length=3)),
        config=SparseCoreConfig(max_ids_per_table={"t": 7}),
    )
    assert tables_from_json(tables.to_json()) == tables


def test_slots_of_the_optimizers() -> None:
    slots = {kind: TableOptimizer(kind=kind).slots(16) for kind in OPTIMIZERS}
    assert slots == {
        "sgd": (),
        "adagrad": (16,),
        "rowwise_adagrad": (1,),
        "adam": (16, 16),
        "ftrl": (16, 16),
        "adagrad_momentum": (16, 16),
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[config]", "[confg]"), "tables file: got 'confg'; accepted: did you mean config"),
        (('table = "user"', 'table = "usr"'), "features.user_id.table: got 'usr'; accepted: did you mean user"),
        (("width = 32", "width = 0"), "tables.user.width: got 0; accepted: a whole number from 1"),
        (("width = 32", "width = 3.5"), "tables.user.width: got 3.5; accepted: a whole number"),
        (("width = 32", ""), "tables.user.width: got nothing; accepted: a value"),
        (("width = 32", "wdth = 32"), "tables.user: got 'wdth'; accepted: did you mean width"),
        (('"mean"', '"max"'), "tables.user.combiner: got 'max'; accepted: .*one of mean, sqrtn, sum"),
        (('"adam"', '"adm"'), "^tables.item.optimizer.kind: got 'adm'; accepted: did you mean adam"),
        (("initial_accumulator", "beta1"), "^tables.user.optimizer: got 'beta1'; accepted: .*initial_accumulator"),
        (("learning_rate", "learning_rat"), "optimizer: got 'learning_rat'; accepted: did you mean learning_rate"),
        (("learning_rate = 0.05", "learning_rate = -1"), "^tables.user.optimizer.learning_rate: got -1"),
        (("clip = 1.0", "clip = 0.0"), "^tables.user.optimizer.clip: got 0.0; accepted: a positive number"),
        (("clip = 1.0", "clip = true"), "optimizer.clip: got True; accepted: a positive number"),
        (("low = -0.1", "low = 0.2"), "^tables.user.initializer.low: got 0.2; accepted: at most"),
        (("low = -1.0", "low = 1.0"), "^tables.user.quantization.low: got 1.0; accepted: less than"),
        (("true", "1"), "config.allow_id_dropping: got 1; accepted: true or false"),
        (("{user = 4096}", "{usr = 4096}"), "config.max_ids_per_table: got 'usr'; accepted: did you mean user"),
        (("{user = 4096}", "{user = 0}"), "config.max_ids_per_table.user: got 0"),
        (("max_ids_per_table", "max_ids"), "config: got 'max_ids'; accepted: did you mean max_ids_per_table"),
        (("length = 20", "length = 0"), "features.history.length: got 0"),
        (("ids_per_sample = 12.5", "ids_per_sample = -1"), "features.clicked.ids_per_sample: got -1"),
        (('table = "user"', 'table = "item"'), "tables.user: got 'no feature looks it up'"),
        (("[tables.item]", "[tables.'a b']"), "table: got 'a b'; accepted: a name"),
        (("width = 32", "width = "), "tables: got 'tables'; accepted: TOML"),
    ],
)
def test_one_line_for_what_is_wrong(change: tuple[str, str], says: str) -> None:
    assert change[0] in TOML
    with pytest.raises(RooftopError, match=says) as error:
        tables_from_toml(TOML.replace(*change, 1))
    assert "\n" not in str(error.value)


def test_names_are_told_apart() -> None:
    table = EmbeddingTable(name="t", vocabulary=1, width=1)
    feature = Feature(name="f", table="t")
    with pytest.raises(RooftopError, match="names that differ"):
        Tables(tables=(table, table), features=(feature,))
    with pytest.raises(RooftopError, match="names that differ"):
        Tables(tables=(table,), features=(feature, feature))
    with pytest.raises(RooftopError, match="at least one"):
        Tables(tables=(), features=(feature,))
    tables = Tables(tables=(table,), features=(feature,))
    assert tables.table("t") is table and tables.feature("f") is feature and tables.features_of("t") == (feature,)
    with pytest.raises(RooftopError, match="did you mean t"):
        tables.table("t2")
