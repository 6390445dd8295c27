"""Text and arrays of token ids: read, tokenised once, refused where they are wrong."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.checkpoints.tokenizer import END_OF_TEXT, Tokenizer, train_bpe
from rooftop.core.errors import RooftopError
from rooftop.train.data import tokens
from rooftop.train.data.corpus import documents, find_corpus
from rooftop.train.data.tokens import TokenStore, token_arrays, tokenise, unigram_entropy

TEXTS = ["one mesh, one mesh, two axes", "a slice of chips", "naïve ☃ \x00 \r\n\t end", "one mesh of two axes " * 9]
BPE = train_bpe(TEXTS, 300)


# Tokenizers


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    ids = BPE.encode(text)
    assert ids.dtype == np.int32 and (ids < BPE.vocab).all()
    assert BPE.decode(ids) == text


def test_the_same_texts_give_the_same_tokenizer_of_the_size_asked_for() -> None:
    assert train_bpe(iter(TEXTS), 300) == BPE
    assert train_bpe(TEXTS, 270).vocab == 270
    assert len(BPE.encode("one mesh")) < len("one mesh")
    assert BPE.bos == BPE.eos == 0


def test_a_special_token_that_a_text_spells_out_is_text() -> None:
    ids = BPE.encode(END_OF_TEXT)
    assert BPE.eos not in ids and BPE.decode(ids) == END_OF_TEXT
    assert BPE.decode([0, *ids, 0]) == END_OF_TEXT


def test_many_texts_are_encoded_as_one_by_one() -> None:
    for ids, text in zip(BPE.encode_many(TEXTS), TEXTS, strict=True):
        np.testing.assert_array_equal(ids, BPE.encode(text))


def test_a_tokenizer_is_saved_as_it_was_read(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    assert Tokenizer.load(tmp_path) == Tokenizer.load(tmp_path / "tokenizer.json") == BPE
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == BPE.definition
    assert Tokenizer.load(tmp_path).digest == BPE.digest


@pytest.mark.parametrize(
    ("settings", "bos", "eos"),
    [
        (None, 0, 0),
        ({"bos_token": None}, None, 0),
        ({"bos_token": {"content": "a"}, "eos_token": "b"}, "a", "b"),
    ],
)
def test_settings_beside_a_tokenizer_say_what_begins_and_ends_a_document(
    tmp_path: Path, settings: Any, bos: Any, eos: Any
) -> None:
    (tmp_path / "tokenizer.json").write_text(BPE.definition, encoding="utf-8")
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(tmp_path)
    ids = {"a": int(BPE.encode("a")[0]), "b": int(BPE.encode("b")[0])}
    assert (tokenizer.bos, tokenizer.eos) == (ids.get(bos, bos), ids.get(eos, eos))


def test_padding_and_truncation_of_a_definition_are_left_off() -> None:
    definition = json.loads(BPE.definition)
    definition["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None}
    definition["padding"] = {**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": END_OF_TEXT}
    cut = Tokenizer(definition=json.dumps(definition))
    np.testing.assert_array_equal(cut.encode(TEXTS[3]), BPE.encode(TEXTS[3]))


@pytest.mark.parametrize(
    ("content", "settings", "accepted"),
    [
        (None, None, "a tokenizer.json, or a folder that has one"),
        ("{}", None, "a tokenizer.json"),
        (BPE.definition, "[1]", "a JSON object"),
        (BPE.definition, "{", "a folder that has one"),
        (BPE.definition, '{"eos_token": "</none>"}', "a token of the tokenizer"),
        (BPE.definition, '{"eos_token": 7}', "a token of the tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: Any, settings: Any, accepted: str) -> None:
    for name, text in (("tokenizer.json", content), ("tokenizer_config.json", settings)):
        if text is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(RooftopError, match=accepted) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tokenizer_refuses_small_vocabularies_no_text_and_unknown_ids() -> None:
    with pytest.raises(RooftopError, match="vocab: got 256; accepted: at least 257"):
        train_bpe(TEXTS, 256)
    with pytest.raises(RooftopError, match="text to train a tokenizer on"):
        train_bpe(["", ""], 300)
    for outside in (-1, BPE.vocab):
        with pytest.raises(RooftopError, match=f"token id: got {outside}; accepted: 0 to {BPE.vocab - 1}"):
            BPE.decode([5, outside])


# The corpus


def texts_of(*data: Path | str, **how: Any) -> list[str]:
    return [document.text for document in documents(find_corpus([str(text) for text in data]), **how)]


def test_files_folders_and_globs_of_text(tmp_path: Path) -> None:
    below = tmp_path / "below" / "further"
    below.mkdir(parents=True)
    (tmp_path / "b.txt").write_bytes(b"zwei\r\n")
    (tmp_path / "a.py").write_text("eins")
    (below / "c.md").write_text("drei")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "binary").write_bytes(b"\x00\x01")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_text("")
    corpus = find_corpus([str(tmp_path)])
    assert [document.text for document in documents(corpus)] == ["eins", "zwei\r\n", "drei"]
    assert [path.name for path in corpus.left_out] == ["binary", "latin"]
    assert texts_of(tmp_path / "**" / "*.md", tmp_path / "a.py") == ["drei", "eins"]
    assert texts_of(tmp_path / "a.py", tmp_path / "a.py", f"{tmp_path}/?.py") == ["eins"]
    ends = [document.bytes_read for document in documents(corpus)]
    assert ends == sorted(ends) and ends[-1] == corpus.bytes


def test_rows_of_jsonl_and_parquet(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [{"text": "ein\nMesh", "n": 1}, {"text": ""}, {"text": "☃"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    many = [f"row {number}" for number in range(3000)]
    parquet.write_table(arrow.table({"text": many, "n": range(3000)}), tmp_path / "b.parquet", row_group_size=700)
    assert texts_of(tmp_path) == ["ein\nMesh", "☃", *many]
    (tmp_path / "c.jsonl").write_text('{"body": "here"}')
    assert texts_of(tmp_path / "c.jsonl", field="body") == ["here"]
    with pytest.raises(RooftopError, match=r"field of .*b.parquet: got 'txt'; accepted: did you mean text"):
        texts_of(tmp_path / "b.parquet", field="txt")
    with pytest.raises(RooftopError, match=r"field n of .*b.parquet row 1: got 0; accepted: text"):
        texts_of(tmp_path / "b.parquet", field="n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "none.txt'; accepted: a file, a folder or a glob"),
        ("*.nothing", None, "files in it"),
        ("empty.txt", b"", "nothing to train on"),
        ("latin.txt", b"caf\xe9", "UTF-8 text .* at byte 3"),
        ("binary.txt", b"a\x00", "UTF-8 text .NUL at byte 1"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "a.jsonl:2'; accepted: one JSON object a line"),
        ("a.jsonl", b"[1]", "a.jsonl:1'; accepted: a JSON object with the field 'text'"),
        ("a.jsonl", b'{"body": "x"}', "field of .*a.jsonl:1: got 'text'; accepted: one of body"),
        ("a.jsonl", b'{"text": null}', "a.jsonl:1: got nothing; accepted: text"),
        ("a.jsonl", rb'{"text": "\ud800"}', "half of a surrogate pair"),
        ("a.parquet", b"PAR1", "a Parquet file"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(RooftopError, match=message) as error:
        texts_of(tmp_path / name)
    assert "\n" not in str(error.value)


def test_without_pyarrow_parquet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(RooftopError, match=r"pip install 'rooftop\[parquet\]'"):
        texts_of(tmp_path)


def test_text_together_with_ids_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(RooftopError, match="not both"):
        find_corpus([str(tmp_path)])


# Token stores


def corpus_of(folder: Path, texts: list[str]) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return find_corpus([str(folder)])


def test_a_store_has_each_document_between_its_special_tokens(tmp_path: Path) -> None:
    store = tokenise(corpus_of(tmp_path / "data", TEXTS), BPE, tmp_path / "stores", vocab=300)
    assert store.documents == len(TEXTS) and store.parts[0].dtype == np.uint16
    for number, text in enumerate(TEXTS):
        ids = store.read(*store.offsets[number : number + 2].tolist())
        np.testing.assert_array_equal(ids, [0, *BPE.encode(text), 0])


def test_a_store_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int, str]] = []
    first = tokenise(
        corpus_of(tmp_path / "data", TEXTS), BPE, tmp_path / "s", vocab=300, progress=lambda *all_: said.append(all_)
    )
    assert said[-1][0] == said[-1][1] == (tmp_path / "data" / "corpus.jsonl").stat().st_size
    other = tokenise(corpus_of(tmp_path / "data", TEXTS[1:]), BPE, tmp_path / "s", vocab=300)
    smaller = tokenise(corpus_of(tmp_path / "data", TEXTS), train_bpe(TEXTS, 270), tmp_path / "s", vocab=300)
    assert len({first.digest, other.digest, smaller.digest}) == 3
    monkeypatch.setattr(Tokenizer, "encode_many", None)
    again = tokenise(corpus_of(tmp_path / "moved", TEXTS), BPE, tmp_path / "s", vocab=300)
    assert again.digest == first.digest
    np.testing.assert_array_equal(again.parts[0], first.parts[0])
    np.testing.assert_array_equal(again.offsets, first.offsets)


def test_a_store_in_parts_is_made_again(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "data", TEXTS)
    first = tokenise(corpus, BPE, tmp_path / "s", vocab=300)
    whole, place_ = np.array(first.parts[0]), tmp_path / "s" / first.digest
    (tmp_path / "s" / f"{first.digest}.partial").mkdir()
    for name in ("tokens.bin", "documents.npy", "store.json"):
        (place_ / name).write_bytes((place_ / name).read_bytes()[:-4])
        np.testing.assert_array_equal(tokenise(corpus, BPE, tmp_path / "s", vocab=300).parts[0], whole)
    assert {file.suffix for file in (tmp_path / "s").iterdir()} == {"", ".lock"}


def test_a_store_that_fails_leaves_nothing(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "data", TEXTS)
    (tmp_path / "data" / "corpus.jsonl").write_text('{"text": "good"}\n{"text": 1}')
    with pytest.raises(RooftopError, match="jsonl:2: got 1; accepted: text"):
        tokenise(corpus, BPE, tmp_path / "s", vocab=300)
    assert [file.suffix for file in (tmp_path / "s").iterdir()] == [".lock"]


def test_those_who_ask_at_once_wait_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, writes, write = corpus_of(tmp_path / "data", TEXTS), [], tokens._write

    def counted(*arguments: Any) -> None:
        writes.append(threading.get_ident())
        write(*arguments)

    monkeypatch.setattr(tokens, "_write", counted)
    together = threading.Barrier(4)

    def ask(_: int) -> str:
        together.wait()
        return tokenise(corpus, BPE, tmp_path / "s", vocab=300).digest

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(ask, range(4)))) == 1
    assert len(writes) == 1


def test_what_gives_no_store_is_refused(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "data", TEXTS)
    with pytest.raises(
        RooftopError, match=f"vocabulary of the tokenizer: got {BPE.vocab}; accepted: at most {BPE.vocab - 1}"
    ):
        tokenise(corpus, BPE, tmp_path / "s", vocab=BPE.vocab - 1)
    with pytest.raises(RooftopError, match="a folder that can be written"):
        tokenise(corpus, BPE, tmp_path / "data" / "corpus.jsonl", vocab=300)
    with pytest.raises(RooftopError, match="a corpus with text in it"):
        tokenise(corpus_of(tmp_path / "none", ["", ""]), BPE, tmp_path / "s", vocab=300)
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(RooftopError, match="where text is needed"):
        tokenise(find_corpus([str(tmp_path / "a.npy")]), BPE, tmp_path / "s", vocab=300)


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "data", TEXTS)
    (tmp_path / "data" / "corpus.jsonl").unlink()
    with pytest.raises(RooftopError, match=r"corpus.jsonl'; accepted: a file that stays as it was found"):
        tokenise(corpus, BPE, tmp_path / "s", vocab=300)


def arrays_in(folder: Path, vocab: int = 1000) -> TokenStore:
    return token_arrays(find_corpus([str(folder)]), vocab=vocab)


def test_arrays_are_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CHUNK", 4)  # several chunks, a document's end at the end of one
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    np.array([7, 8, 9, 2, 7, 2, 7], np.uint32).tofile(tmp_path / "b.bin")
    (tmp_path / "b.json").write_text('{"dtype": "uint32", "eos": 2}')
    np.save(tmp_path / "c.npy", np.arange(5, dtype=np.uint16))
    np.array([1, 2], np.uint16).tofile(tmp_path / "d.bin")
    (tmp_path / "d.json").write_text('{"dtype": "uint16", "eos": 2}')
    np.save(tmp_path / "e.npy", np.zeros(0, np.int32))
    store = arrays_in(tmp_path)
    documents = [store.read(*bounds).tolist() for bounds in zip(store.offsets[:-1], store.offsets[1:], strict=True)]
    assert documents == [[0, 1, 2], [3, 4, 5], [7, 8, 9, 2], [7, 2], [7], [0, 1, 2, 3, 4], [1, 2]]
    before = store.digest
    (tmp_path / "d.json").write_text('{"dtype": "uint16", "eos": 1}')
    assert arrays_in(tmp_path).digest != before


@pytest.mark.parametrize(
    ("name", "array", "about", "message"),
    [
        ("a.npy", np.array([1, 999, 1000]), None, "token 2 of .*a.npy: got 1000; accepted: 0 to 999"),
        ("a.npy", np.array([-1]), None, "token 0 of .*a.npy: got -1"),
        ("a.npy", np.array([1.0]), None, "float64.1.*whole numbers"),
        ("a.npy", np.zeros((1, 1, 1), int), None, "whole numbers"),
        ("a.npy", None, None, "a .npy array"),
        ("a.bin", np.array([1], np.uint16), None, "dtype of .*: got nothing; accepted: one of uint16, uint32"),
        ("a.bin", np.array([1], np.uint16), '{"dtype": "int8"}', "got 'int8'"),
        ("a.bin", np.array([1], np.uint16), "[]", "a JSON object such as"),
        ("a.bin", np.array([1], np.uint16), '{"dtype": "uint16", "eos": "x"}', "eos of .*: got 'x'; accepted: a token"),
        ("a.bin", np.array([1], np.uint16), '{"dtype": "uint32"}', "2 bytes'; accepted: a multiple of the 4 bytes"),
        ("a.npy", np.zeros(0, int), None, "at least one token id"),
    ],
)
def test_what_is_no_array_of_ids_is_refused(tmp_path: Path, name: str, array: Any, about: Any, message: str) -> None:
    if array is None:
        (tmp_path / name).write_bytes(b"no array")
    elif name.endswith(".npy"):
        np.save(tmp_path / name, array)
    else:
        array.tofile(tmp_path / name)
    if about is not None:
        (tmp_path / "a.json").write_text(about)
    with pytest.raises(RooftopError, match=message) as error:
        arrays_in(tmp_path)
    assert "\n" not in str(error.value)


def test_unigram_entropy_is_that_of_the_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CHUNK", 2)
    parts = (np.array([3, 3, 0, 3], np.uint16), np.array([3, 9, 0, 0], np.uint16))
    store = TokenStore(parts=parts, offsets=np.array([0, 4, 8]), digest="")
    expected = -sum(share * math.log(share) for share in (4 / 8, 3 / 8, 1 / 8))
    assert unigram_entropy(store) == pytest.approx(expected, rel=1e-12)
    for ids, expected in ((np.arange(10), math.log(10)), (np.ones(5, np.uint16), 0)):
        even = TokenStore(parts=(ids,), offsets=np.array([0, len(ids)]), digest="")
        assert unigram_entropy(even) == pytest.approx(expected, rel=1e-12)
