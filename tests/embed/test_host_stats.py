"""Limits from Parquet files: whole batches in order, and `rooftop embed stats`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rooftop.cli.embed import command
from rooftop.core.errors import RooftopError
from rooftop.embed.host.inputs import parquet_batches
from rooftop.embed.host.limits import read_limits
from rooftop.models.embedding_tables.files import tables_from_toml
from rooftop.models.embedding_tables.stacking import stack_tables

TOML = """
[tables.user]
vocabulary = 1000
width = 16
[tables.item]
vocabulary = 50
width = 16
combiner = "mean"
[features.user_id]
table = "user"
[features.clicked]
table = "item"
weighted = true
"""


def write(path: Path, samples: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lists = [rng.integers(0, 50, rng.poisson(4)).tolist() for _ in range(samples)]
    columns = {
        "user_id": rng.integers(0, 1000, samples),
        "clicked": lists,
        "clicked_weights": [[1.5] * len(ids) for ids in lists],
        "label": np.zeros(samples),
    }
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return columns


def test_whole_batches_in_the_order_of_the_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    written = [write(file, samples, seed) for seed, (file, samples) in enumerate(zip(files, (21, 30), strict=True))]
    batches = list(parquet_batches(files, tables_from_toml(TOML), 16))
    assert len(batches) == 3
    users = np.concatenate([batch["user_id"].to_numpy() for batch in batches])
    np.testing.assert_array_equal(users, np.concatenate([one["user_id"] for one in written])[:48])
    lists = [ids for batch in batches for ids in batch["clicked"][0].to_pylist()]
    assert lists == [*written[0]["clicked"], *written[1]["clicked"]][:48]
    with pytest.raises(RooftopError, match="a Parquet file"):
        next(parquet_batches([tmp_path / "none"], tables_from_toml(TOML), 16))
    other = tables_from_toml(TOML.replace("clicked", "clicks"))
    with pytest.raises(RooftopError, match="got 'clicks'; accepted: did you mean clicked"):
        next(parquet_batches(files, other, 16))


def stats(*arguments: str) -> None:
    command.main(["stats", *arguments], standalone_mode=False)


def test_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, data, limits = (str(tmp_path / name) for name in ("tables.toml", "data.parquet", "limits.json"))
    Path(tables).write_text(TOML)
    write(Path(data), 200, 0)
    stats(tables, data, "--on", "v6e:2x2", "--batch-samples", "64", "-o", limits)
    shown = capsys.readouterr().out
    assert "3 batches of 64 samples, 8 SparseCores" in shown and "max_unique_ids" in shown
    stacking = stack_tables(tables_from_toml(TOML), cores=8, cores_per_device=2, batch=64)
    limits_read = read_limits(Path(limits), stacking, batch=64)
    stats(tables, data, "--on", "v6e:2x2", "--batch-samples", "64", "--limits", limits, "--batches", "2", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["kept"] is True and answer["batches"] == 2 and answer["cores"] == 8
    for stack in answer["stacks"]:
        assert stack["limits"] == vars(limits_read[stack["name"]])
        assert all(stack["observed"][limit] <= stack["limits"][limit] for limit in stack["limits"])


def test_stats_of_passes_over_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, data, limits = (str(tmp_path / name) for name in ("tables.toml", "data.parquet", "limits.json"))
    Path(tables).write_text(TOML)
    write(Path(data), 256, 0)
    drops = []
    for passes in ("1", "4"):
        stats(
            tables, data, "--on", "v6e:2x2", "--batch-samples", "256", "--sample-passes", passes, "-o", limits, "--json"
        )
        drops.append(json.loads(capsys.readouterr().out))
    assert [one["sample_passes"] for one in drops] == [1, 4]
    for whole, part in zip(drops[0]["stacks"], drops[1]["stacks"], strict=True):
        assert part["observed"]["max_ids"] < whole["observed"]["max_ids"]
        # Every pass has its own partitions, each padded.
        assert part["limits"]["buffer"] >= part["observed"]["buffer"]
    stacking = stack_tables(tables_from_toml(TOML), cores=8, cores_per_device=2, batch=256)
    assert read_limits(Path(limits), stacking, batch=256, sample_passes=4)
    with pytest.raises(RooftopError, match="limits: sample_passes: got 4; accepted: 1, as here"):
        stats(tables, data, "--on", "v6e:2x2", "--batch-samples", "256", "--limits", limits)


def test_ids_that_are_left_out_are_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, data = tmp_path / "tables.toml", tmp_path / "data.parquet"
    tables.write_text(TOML.replace("vocabulary = 1000", "vocabulary = 500"))
    write(data, 64, 0)
    with warnings.catch_warnings():
        # pytest makes errors of them.
        warnings.simplefilter("default")
        stats(str(tables), str(data), "--on", "v6e:2x2", "--batch-samples", "64", "--out-of-range", "warn")
    out, err = capsys.readouterr()
    assert err.startswith("rooftop: features.user_id: ") and "left out" in err and err.count("\n") == 1
    assert "ids of user_id out of range" in out


def test_ids_that_are_none_are_named_with_their_batch(tmp_path: Path) -> None:
    tables, data = tmp_path / "tables.toml", tmp_path / "data.parquet"
    tables.write_text(TOML)
    columns = write(data, 200, 0)
    users = columns["user_id"].copy()
    users[130] = -7
    pq.write_table(pa.table({**columns, "user_id": users}), data)
    with pytest.raises(RooftopError, match=r"^batch 3: features.user_id: got '1 ids out of range, first -7 in row 2'"):
        stats(str(tables), str(data), "--on", "v6e:2x2", "--batch-samples", "64")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--on", "v5e:2x2", "--batch-samples", "64"), "on: got 'v5e:2x2'; accepted: a chip with SparseCores"),
        (("--on", "v6e:2x2", "--batch-samples", "63"), "batch-samples: got 63; accepted: a multiple of 8"),
        (
            ("--on", "v6e:2x2", "--batch-samples", "6400"),
            "data: got '100 samples'; accepted: at least one batch of 6400",
        ),
        (
            ("--on", "v6e:2x2", "--batch-samples", "64", "--out-of-range", "warm"),
            "out-of-range: got 'warm'; accepted: did you mean warn",
        ),
        (("--on", "v6e:2x2", "--batch-samples", "64", "--headroom", "-1"), "headroom: got -1"),
        (("--on", "v6e:2x2", "--batch-samples", "64", "--limits", "none.json"), "limits: got 'none.json'"),
    ],
)
def test_stats_that_cannot_be(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    tables, data = tmp_path / "tables.toml", tmp_path / "data.parquet"
    tables.write_text(TOML)
    write(data, 100, 0)
    with pytest.raises(RooftopError, match=says):
        stats(str(tables), str(data), *arguments)
