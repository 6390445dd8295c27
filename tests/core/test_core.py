"""The ground floor beside scopes and ledger: errors, quantities, files."""

from __future__ import annotations

import errno
import math
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core import files
from rooftop.core.errors import Infeasible, RooftopError, misread, unknown
from rooftop.core.quantities import (
    DTYPE_ALIASES,
    DTYPE_BYTES,
    LARGEST_COUNT,
    dtype_bytes,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_dtype,
    parse_quantity,
    parse_seconds,
    parse_share,
)

# ---------------------------------------------------------------- errors


def test_a_wrong_input_names_field_value_and_what_is_accepted():
    error = RooftopError("on", "v5p:4", "CHIP:SHAPE")
    assert str(error) == "on: got 'v5p:4'; accepted: CHIP:SHAPE"
    assert (error.field, error.given, error.accepted, error.exit_status) == ("on", "v5p:4", "CHIP:SHAPE", 2)


def test_what_was_not_given_is_nothing():
    assert str(RooftopError("on", None, "a slice")) == "on: got nothing; accepted: a slice"


@pytest.mark.parametrize(
    ("error", "given_"),
    [(KeyError("kind"), "data without kind"), (ValueError("too large"), "too large"), (KeyError(), "")],
)
def test_data_that_cannot_be_read_says_where_reading_ended(error, given_):
    assert str(misread("plan", error, "a plan.json")) == f"plan: got {given_!r}; accepted: a plan.json"


def test_no_is_an_answer_with_its_own_status():
    error = Infeasible("memory", "12.1 GB more than a device has")
    assert str(error) == "memory: 12.1 GB more than a device has"
    assert (error.what, error.by, error.exit_status) == ("memory", "12.1 GB more than a device has", 1)
    assert not isinstance(error, RooftopError)


@pytest.mark.parametrize(
    ("given_", "accepted"),
    [
        ("V5PP", "did you mean v5p? one of h100, v5p"),
        ("v5", "did you mean v5p? one of h100, v5p"),
        ("quux", "one of h100, v5p"),
    ],
)
def test_an_unknown_name_gets_its_close_matches(given_, accepted):
    error = unknown("chip", given_, ["v5p", "h100"])
    assert str(error) == f"chip: got {given_!r}; accepted: {accepted}"


@given(st.text(), st.lists(st.text(alphabet="abcxyz0123", min_size=1), min_size=1))
def test_an_error_is_one_line_whatever_was_given(text, known):
    assert len(str(unknown("name", text, known)).splitlines()) == 1


# ---------------------------------------------------------------- quantities

DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
SUFFIXES = {"": 1} | DECIMAL | BINARY


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4M", 4e6),
        ("4Mi", 4 * 2**20),
        ("15T", 1.5e13),
        ("70B", 7e10),
        ("1.5k", 1500.0),
        ("2K", 2000.0),
        ("4m", 4e6),
        ("4MI", 4 * 2**20),
        ("8ki", 8192.0),
        (" 3 G ", 3e9),
        (".5Ki", 512.0),
        ("2e3", 2000.0),
        ("1E+2M", 1e8),
        (2048, 2048.0),
        (1e22, 1e22),
        (np.float64(0.25), 0.25),
    ],
)
def test_quantities_as_people_write_them(text, value):
    assert parse_quantity(text, "batch") == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "M", "e3", "4X", "4Mib", "4 M i", "4M4", "1,000", "1e", "1E", "nan", "inf"),
        *("-4M", "+4", "0", "0k", "1e-400", "1e400", "9e307M", "1e999999999"),
        *(True, None, [4], -1.0, float("nan"), float("inf")),
    ],
)
def test_what_is_no_quantity_is_refused_in_one_line(text):
    with pytest.raises(RooftopError, match=r"^batch: got .*; accepted: a positive number") as caught:
        parse_quantity(text, "batch")
    assert "\n" not in str(caught.value)


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_a_number_written_plainly_comes_back(value):
    assert parse_quantity(value, "x") == parse_quantity(repr(value), "x") == value


@given(st.data(), st.sampled_from(sorted(name for name in SUFFIXES if SUFFIXES[name] <= LARGEST_COUNT)))
def test_a_whole_number_of_a_unit_is_exact(data, suffix):
    number = data.draw(st.integers(min_value=1, max_value=LARGEST_COUNT // SUFFIXES[suffix]))
    assert parse_count(f"{number}{suffix}", "x") == number * SUFFIXES[suffix]


@pytest.mark.parametrize("text", ["1e30", "2P", "1Pi", 10**15 + 1])
def test_an_absurd_count_is_refused(text):
    with pytest.raises(RooftopError, match=r"^tokens: got .*; accepted: at most 1e\+15$"):
        parse_count(text, "tokens")
    assert parse_count("1P", "tokens") == LARGEST_COUNT


def test_a_quantity_may_have_a_largest_value():
    assert parse_quantity("1M", "price", largest=1e6) == 1e6
    with pytest.raises(RooftopError, match=r"^price: got '1e300'; accepted: at most 1e\+06$"):
        parse_quantity("1e300", "price", largest=1e6)


@given(st.integers(min_value=1, max_value=10**3), st.sampled_from(sorted(DECIMAL)))
def test_a_count_with_decimals_is_whole_where_the_decimals_make_it_so(thousandths, suffix):
    text = f"{Decimal(thousandths) / 1000}{suffix}"
    assert parse_count(text, "tokens") == thousandths * DECIMAL[suffix] // 1000


@pytest.mark.parametrize("text", ["1.5", "0.5", "1e-3", "1.0005k", "0.1Ki", 2.5])
def test_a_count_is_whole(text):
    with pytest.raises(RooftopError, match=r"^seqs: got .*; accepted: a whole number$"):
        parse_count(text, "seqs")


@pytest.mark.parametrize("text", ["-1", "0", "many"])
def test_a_count_is_a_quantity_first(text):
    with pytest.raises(RooftopError, match=r"^seqs: got .*; accepted: a positive number"):
        parse_count(text, "seqs")


def test_counts_are_integers():
    assert parse_count("4Mi", "batch") == 4194304
    assert isinstance(parse_count("4Mi", "batch"), int)


@pytest.mark.parametrize(
    ("dtype", "bytes_"),
    [("bf16", 2), ("f32", 4), ("f16", 2), ("int8", 1), ("int4", 0.5), ("f8_e4m3", 1), ("f8_e5m2", 1)],
)
def test_bytes_of_each_dtype(dtype, bytes_):
    assert dtype_bytes(dtype) == bytes_ == DTYPE_BYTES[dtype]


def test_an_unknown_dtype_is_suggested():
    with pytest.raises(
        RooftopError, match=r"^kv_dtype: got 'bf61'; accepted: did you mean bf16 or f16\? one of bf16, f16"
    ):
        dtype_bytes("bf61", "kv_dtype")
    with pytest.raises(
        RooftopError, match=r"^kv_dtype: got 'BF61'; accepted: did you mean bf16 or f16\? one of bf16, f16"
    ):
        parse_dtype("BF61", "kv_dtype")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *((name, name) for name in DTYPE_BYTES),
        *((name.upper(), name) for name in DTYPE_BYTES),
        *DTYPE_ALIASES.items(),
        (" BFloat16 ", "bf16"),
        ("FP8", "f8_e4m3"),
    ],
)
def test_every_spelling_of_a_dtype_has_one_name(text, dtype):
    assert parse_dtype(text) == dtype
    assert dtype in DTYPE_BYTES


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30us", 30e-6), ("500ms", 0.5), ("1.5s", 1.5), (" 2 s ", 2.0), ("10m", 600.0), ("2h", 7200.0), ("1e3ms", 1.0)],
)
def test_a_time_has_its_unit(text, seconds):
    assert parse_seconds(text, "ttft") == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["500", "", "ms", "-1s", "0s", "1d", "1 minute", "1e999s", "nan s", 0.5])
def test_a_time_without_its_unit_is_refused(text):
    with pytest.raises(RooftopError) as caught:
        parse_seconds(text, "ttft")
    assert str(caught.value) == f"ttft: got {text!r}; accepted: a time with its unit: 500ms, 1.5s, 10m"


@pytest.mark.parametrize(
    ("text", "amount"),
    [("400G", 400e9), ("400GB", 400e9), ("32Mi", 32 * 2**20), ("32MiB", 32 * 2**20), ("512B", 512), ("512", 512)],
)
def test_bytes_take_suffixes(text, amount):
    assert parse_bytes(text, "host-dram") == amount


@pytest.mark.parametrize("text", ["", "B", "0", "-1", "0.5B", "1e30", "4X"])
def test_an_amount_that_is_no_bytes_is_refused(text):
    with pytest.raises(RooftopError, match=r"^host-dram: got .*; accepted: a number of bytes: 512B, 400G, 32Mi$"):
        parse_bytes(text, "host-dram")


@pytest.mark.parametrize("text", ["-0.1", "1.1", "nan", "half", "50%"])
def test_a_share_is_between_0_and_1(text):
    assert (parse_share("0", "hit-rate"), parse_share(0.25, "hit-rate"), parse_share("1", "hit-rate")) == (0, 0.25, 1)
    with pytest.raises(RooftopError, match=r"^hit-rate: got .*; accepted: a share between 0 and 1"):
        parse_share(text, "hit-rate")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (999, "999"),
        (999.4, "999"),
        (999.5, "1 k"),
        (1000, "1 k"),
        (4194304, "4.19 M"),
        (15e12, "15 T"),
        (999_499, "999 k"),
        (999_500, "1 M"),
        (-70.6e9, "-70.6 G"),
        (6.3e24, "6.3 Y"),
        (1e28, "1e+04 Y"),
        (math.inf, "inf Y"),
    ],
)
def test_format_count(value, text):
    assert format_count(value) == text


def test_format_count_with_its_unit():
    assert format_count(459e12, "FLOP/s") == "459 TFLOP/s"
    assert format_count(12, "FLOP/s") == "12 FLOP/s"


@pytest.mark.parametrize(("value", "text"), [(2.4e9, "2.4 GB"), (0, "0 B"), (512, "512 B"), (1e18, "1 EB")])
def test_format_bytes_is_decimal(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (2.5e-9, "2.5 ns"),
        (3.2e-6, "3.2 us"),
        (0.0124, "12.4 ms"),
        (1.9, "1.9 s"),
        (44 * 86400, "44 days"),
        (7199, "7199 s"),
        (7200, "2 h"),
        (36000, "10 h"),
        (172799, "48 h"),
        (172800, "2 days"),
    ],
)
def test_format_seconds(value, text):
    assert format_seconds(value) == text


@given(st.floats(min_value=1e-3, max_value=1e26))
def test_a_formatted_count_is_within_its_three_digits(value):
    number, _, prefix = format_count(value).partition(" ")
    scale = 1000.0 ** ["", "k", "M", "G", "T", "P", "E", "Z", "Y"].index(prefix)
    assert float(number) * scale == pytest.approx(value, rel=5.001e-3)
    assert float(number) < 1000


@given(st.floats(min_value=1e-9, max_value=86400 * 9000))
def test_a_formatted_duration_is_within_its_digits_and_never_scientific(value):
    number, unit = format_seconds(value).split(" ")
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "h": 3600.0, "days": 86400.0}[unit]
    assert float(number) * scale == pytest.approx(value, rel=5.001e-3)
    assert "e" not in number


# ---------------------------------------------------------------- files


def test_a_file_is_written_whole_and_replaces_what_was_there(tmp_path):
    plan = tmp_path / "plan.json"
    files.write_text(plan, "first, and longer")
    files.write_text(plan, "µ")
    assert plan.read_text(encoding="utf-8") == "µ"
    assert list(tmp_path.iterdir()) == [plan]


def test_a_written_file_is_as_readable_as_its_owner_wants(tmp_path):
    previous = os.umask(0o027)
    try:
        files.write_text(tmp_path / "plan.json", "{}")
    finally:
        os.umask(previous)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o640


def test_what_was_there_survives_a_failure(tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    plan.write_text("before")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RooftopError, match=r"accepted: a path that can be written \(No space left on device\)"):
        files.write_text(plan, "after")
    assert plan.read_text() == "before"
    assert list(tmp_path.iterdir()) == [plan]


def test_a_place_that_cannot_be_written_is_named_in_one_line(tmp_path):
    with pytest.raises(RooftopError, match=r"^output file: got '.*plan.json'; accepted: a path that can be written"):
        files.write_text(tmp_path / "nowhere" / "plan.json", "{}")


def test_a_link_keeps_pointing_where_it_points(tmp_path):
    (tmp_path / "newest.json").symlink_to("plan.json")
    files.write_text(tmp_path / "newest.json", "{}")
    assert (tmp_path / "newest.json").is_symlink()
    assert (tmp_path / "plan.json").read_text() == "{}"


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write_text(pipe, "{}")
        assert os.read(reader, 10) == b"{}"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_cache_lies_where_the_user_has_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert files.cache_folder("jax") == tmp_path / "caches" / "rooftop" / "jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "one"))
    assert files.cache_folder("jax") == tmp_path / "one" / ".cache" / "rooftop" / "jax"
    assert files.cache_folder("jax").is_dir()


@pytest.mark.parametrize("home", ["/dev/null", "/proc/nowhere"])
def test_without_a_place_for_a_cache_nothing_is_kept(home, tmp_path):
    """A folder of the process, which those that it starts share, goes with it: one line says so."""
    code = """
import subprocess, sys
from rooftop.core.files import cache_folder
(cache_folder("jax") / "entry").touch()
other = "from rooftop.core.files import cache_folder; print(*cache_folder('jax').iterdir())"
subprocess.run([sys.executable, "-c", other], check=True)
"""
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    environment |= {"HOME": home, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    entry = Path(done.stdout.strip())
    assert entry.name == "entry" and entry.is_relative_to(tmp_path) and not entry.exists()
    assert re.fullmatch(rf"rooftop: nothing is cached: {home}/.cache/rooftop cannot be written .*\n", done.stderr)
