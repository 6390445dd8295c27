"""Criteo's format by the batch: bit for bit, fault for fault, what one line after another gives."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.embed import criteo as criteo_lines
from rooftop.embed.criteo import (
    CATEGORIES,
    COUNTS,
    CriteoBatch,
    count_batches,
    parse_line,
    read_batches,
    require_labels,
)
from rooftop.models.embedding_tables.tables import MOST_ROWS, EmbeddingTable, Feature, Tables
from tests.support.examples import examples

SIZES = {"C26": 2, "C1": 40, "C2": 1, "C3": MOST_ROWS, "C14": 100_003}
TABLES = Tables(
    tables=tuple(EmbeddingTable(name=f"t{name}", vocabulary=size, width=8) for name, size in SIZES.items()),
    features=tuple(Feature(name=name, table=f"t{name}") for name in SIZES),
)

counts = st.one_of(
    st.just(b""),
    st.integers(-3, 10**8).map(lambda count: b"%d" % count),
    st.integers(-(2**64), 2**64).map(lambda count: b"%d" % count),
    st.sampled_from([2**63 - 1, 2**63, 1 - 2**63, -(2**63)]).map(lambda count: b"%d" % count),
    st.sampled_from(b"-,+5,--5,5-,1-2,-0,00000007,99999999,100000000,-99999999,-123456789".split(b",")),
    st.sampled_from(b"1_0,1__0, 7,7 ,0x5,a,/,:,\xb5,\xd9\xa5,\r,5\r".split(b",")),
)
categories = st.one_of(
    st.just(b""),
    st.integers(0, 2**32 - 1).map(lambda value: b"%08x" % value),
    st.tuples(st.text("0123456789abcdefABCDEF", max_size=20), st.sampled_from(["", "0x", "0X", "-", "+", " "])).map(
        lambda both: (both[1] + both[0]).encode()
    ),
    st.sampled_from(b"g,G,@,`,/,:,00000000,FFFFFFFF,fffffffff,a_b,_a, a,a ,\xb5,0x,0b1,-,\r,a\r,\r\r".split(b",")),
)
anything = st.binary(max_size=30).map(lambda text: text.replace(b"\n", b""))


@st.composite
def plain_lines(draw: st.DrawFn) -> bytes:
    """As Criteo's own: all but a few of the fields alike, so that lines are small to draw."""
    count, category = (
        draw(st.sampled_from([b"", b"3", b"12345"])),
        draw(st.sampled_from([b"", b"0000000a", b"68fd1E64"])),
    )
    return b"\t".join([draw(st.sampled_from([b"0", b"1"])), *[count] * COUNTS, *[category] * CATEGORIES])


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Plain ones with other fields here and there, in the columns that are read and in those that are not."""
    fields = draw(plain_lines()).split(b"\t")
    for at in draw(st.lists(st.sampled_from([1, 2, 13, 14, 15, 16, 20, 27, 38, 39]), max_size=4)):
        fields[at] = draw(counts if at <= COUNTS else categories)
    return b"\t".join(fields)


@st.composite
def bad_lines(draw: st.DrawFn) -> bytes:
    """Lines with a field of anything at all, of another number of columns, or of nothing."""
    fields = draw(lines()).split(b"\t")
    kind = draw(st.sampled_from(["field", "label", "more", "fewer", "other"]))
    if kind == "field":
        fields[draw(st.integers(0, len(fields) - 1))] = draw(anything)
    elif kind == "label":
        fields[0] = draw(st.sampled_from([b"", b"2", b"a", b"01", b"1 ", b"-", b"10"]))
    elif kind == "more":
        fields.insert(draw(st.integers(0, len(fields))), draw(counts))
    elif kind == "fewer":
        fields.pop(draw(st.integers(0, len(fields) - 1)))
    else:
        return draw(anything)
    return b"\t".join(fields)


@st.composite
def texts(draw: st.DrawFn, line: st.SearchStrategy[bytes] = st.one_of(lines(), lines(), lines(), bad_lines())) -> bytes:  # noqa: B008
    """Files; the end of the last line may be cut off, or some of it."""
    end = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r\r\n"])
    text = b"".join(text + draw(end) for text in draw(st.lists(line, max_size=9)))
    return text[: len(text) - draw(st.integers(0, min(2, len(text))))]


def one_by_one(path: Path, batch: int, start: int) -> Iterator[CriteoBatch]:
    """The batches of a file by :func:`parse_line`."""
    lines = BytesIO(path.read_bytes()).readlines()
    for number in range(start, len(lines) // batch):
        rows = []
        for at in range(number * batch, (number + 1) * batch):
            try:
                rows.append(parse_line(lines[at], SIZES))
            except ValueError as error:
                accepted = "a label, 13 whole numbers and 26 hexadecimal ones, separated by tabs"
                raise RooftopError(f"{path} line {at + 1}", str(error), accepted) from None
        label, dense, ids = zip(*rows, strict=True)
        yield CriteoBatch(
            label=np.array(label, np.float32),
            dense=np.log1p(np.maximum(np.array(dense, np.float32), 0)),
            ids=dict(zip(SIZES, np.array(ids, np.int64).T, strict=True)),
        )


def comparable(batches: Iterator[CriteoBatch]) -> list[object]:
    """Content of batches, to the bit, and the error that ends them."""
    batches_seen: list[object] = []
    try:
        for batch in batches:
            arrays = {"label": batch.label, "dense": batch.dense, **batch.ids}
            batches_seen.append([(name, array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()])
    except RooftopError as error:
        batches_seen.append(str(error))
    return batches_seen


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("criteo") / "lines.tsv"


small = st.integers(1, 4)


@settings(max_examples=examples(400))
@given(text=texts(), batch=small, start=st.integers(0, 3), block=st.integers(1, 300), part=small)
@example(text=b"0" + b"\t" * 39, batch=1, start=0, block=7, part=1)
@example(text=b"0" + b"\t" * 38 + b"\n" + b"0" + b"\t" * 40 + b"\n", batch=2, start=0, block=300, part=2)
def test_a_batch_is_what_its_lines_are(path: Path, text: bytes, batch: int, start: int, block: int, part: int) -> None:
    path.write_bytes(text)
    with mock.patch.multiple(criteo_lines, _BLOCK=block, _LINES=part):
        assert comparable(read_batches(path, TABLES, batch, start=start)) == comparable(one_by_one(path, batch, start))


@pytest.mark.parametrize("label", [b"", b"2", b"01", b"10", b"1 ", b"0\r", b"-1", b"a"])
def test_a_label_is_one_digit(path: Path, label: bytes) -> None:
    path.write_bytes(b"1" + b"\t" * 39 + b"\n" + label + b"\t" * 39 + b"\n")
    with pytest.raises(RooftopError, match="line 2: got 'a label that is neither 0 nor 1'"):
        list(read_batches(path, TABLES, 2))


@given(field=counts)
def test_a_count_is_what_python_reads(path: Path, field: bytes) -> None:
    path.write_bytes(b"\t".join([b"1", b"5", field, *[b""] * 37]) + b"\n")
    assert comparable(read_batches(path, TABLES, 1)) == comparable(one_by_one(path, 1, 0))


@given(field=categories)
def test_a_category_is_what_python_reads(path: Path, field: bytes) -> None:
    path.write_bytes(b"\t".join([b"1", *[b""] * 15, field, *[b""] * 22, field]) + b"\n")
    assert comparable(read_batches(path, TABLES, 1)) == comparable(one_by_one(path, 1, 0))


@given(text=texts(st.one_of(lines(), anything)), batch=small, block=st.integers(1, 99))
def test_batches_and_labels_are_counted_as_lines(path: Path, text: bytes, batch: int, block: int) -> None:
    path.write_bytes(text)
    lines = BytesIO(text).readlines()
    whole = len(lines) // batch * batch
    positives = sum(line.startswith(b"1") for line in lines[:whole])
    with mock.patch.object(criteo_lines, "_BLOCK", block):
        assert count_batches(path, batch) == len(lines) // batch
        if 0 < positives < whole:
            require_labels(path, batch)
        else:
            says = f"not {positives} positives of {whole}$" if whole else f"at least one batch of {batch} lines"
            with pytest.raises(RooftopError, match=says):
                require_labels(path, batch)


def test_only_what_criteo_does_not_write_is_read_line_by_line(path: Path) -> None:
    random = np.random.default_rng(0)
    written = list[bytes]()
    for _ in range(2 * 1500 + 7):
        fields = [b"%d" % random.integers(2), *(b"%d" % count for count in random.integers(-3, 10**6, COUNTS))]
        fields += [b"%08x" % value for value in random.integers(0, 2**32, CATEGORIES)]
        written.append(b"\t".join(b"" if at and random.random() < 0.1 else field for at, field in enumerate(fields)))
    odd = [3, 1100, 1499, 2999]
    for at in odd:
        fields = written[at].split(b"\t")
        written[at] = b"\t".join([*fields[:14], b" 0x1F ", *fields[15:]])
    path.write_bytes(b"\r\n".join(written))
    with mock.patch.object(criteo_lines, "parse_line", wraps=parse_line) as slow:
        batches = comparable(read_batches(path, TABLES, 1500))
    assert [call.args[0].rstrip() for call in slow.call_args_list] == [written[at] for at in odd]
    assert len(batches) == 2 and batches == comparable(one_by_one(path, 1500, 0))


def test_nothing_is_looked_at_for_tables_of_one_row(path: Path) -> None:
    path.write_bytes(b"\t".join([b"1", *[b"7"] * COUNTS, *[b"no"] * CATEGORIES]) + b"\n0" + b"\t 7" * 13 + b"\t" * 26)
    tables = Tables(
        tables=(EmbeddingTable(name="t", vocabulary=1, width=8),), features=(Feature(name="C5", table="t"),)
    )
    (batch,) = read_batches(path, tables, 2)
    assert {name: ids.tolist() for name, ids in batch.ids.items()} == {"C5": [0, 0]}
    assert batch.label.tolist() == [1, 0] and (batch.dense == np.log1p(np.float32(7))).all()


def test_batches_come_before_the_rest_is_read(path: Path) -> None:
    path.write_bytes(b"\n".join([b"1" + b"\t" * 39] * 4 + [b"x"] * 2))
    with mock.patch.object(criteo_lines, "_BLOCK", 64):
        batches = read_batches(path, TABLES, 2)
        assert [next(batches).label.tolist(), next(batches).label.tolist()] == [[1, 1]] * 2
        with pytest.raises(RooftopError, match="line 5: got '1 columns'"):
            next(batches)
