"""Documents: an answer says the same on a terminal, on a page and in a browser, and loses nothing at small widths."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.present.browser import Widths, places, to_data
from rooftop.present.document import Bar, Bars, Document, ShownVerdict, Table, TableColumn, columns
from rooftop.present.documents import document
from rooftop.present.html import fragment, page
from rooftop.present.svg import COLOURS, PALETTE, colours
from rooftop.present.terminal import printed


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    """A training plan in JSON."""
    problem = Problem(
        model=load_model("llama3-8b"), slice=Slice.parse("v5e:4x4"),
        workload=Workload(batch_tokens=16 * 2048, seq_len=2048, tokens=1e12),
    )  # fmt: skip
    return plan_training(problem, alternatives=2).to_json()


def test_every_face_says_what_the_terminal_says(plan: dict[str, Any]) -> None:
    whole = document(plan)
    data = json.dumps(to_data(whole), ensure_ascii=False)
    pages = [html.unescape(re.sub(r"<[^>]*>", " ", face)) for face in (page(whole), fragment(whole))]
    texts = [" ".join(face.split()) for face in (printed(whole, 110).plain, data, *pages)]
    exposed = f"fsdp {plan['step']['exposed_s']['fsdp'] * 1e3:.4g} ms"
    layout = whole.verdict.details[0]
    for said in (exposed, layout, f"{plan['days']:.1f} days", "What would change it", plan["what_if"][0]["change"]):
        for text in texts:
            assert said in text, said
    for reason in plan["reasons"]:
        assert all(" ".join(reason["text"].split()[:4]) in text for text in texts)


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_no_line_is_too_wide_and_none_ends_with_blanks(plan: dict[str, Any], width: int) -> None:
    for line in printed(document(plan), width).plain.splitlines():
        assert len(line) <= width
        assert line == line.rstrip()


def test_a_plan_keeps_every_column_at_eighty(plan: dict[str, Any]) -> None:
    text = printed(document(plan), 80).plain
    heading = next(line for line in text.splitlines() if line.split()[:1] == ["scope"])
    assert heading.split()[-3:] == ["at", "peak", "bound"]
    assert "no room for" not in text


def test_lines_of_cells_stay_next_to_each_other() -> None:
    headings = (TableColumn("collective", "text", wrap=True), TableColumn("bytes"), TableColumn("more", "text"))
    row = ("reduce_scatter over fsdp\nall_gather over tensor", "101 MB\n537 MB", "x" * 14)
    text = printed(
        Document(verdict=ShownVerdict(), charts=(Table(title="t", columns=headings, rows=(row,)),)), 40
    ).plain
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if "reduce_scatter" in line)
    assert len(lines) - start == 4, "both texts wrap"
    assert ["MB" in line for line in lines[start:]] == [True, False, True, False]
    assert "537 MB" in next(line for line in lines if "all_gather" in line)


TABLE = Table(
    title="t",
    columns=(TableColumn("name", "text", wrap=True), *columns("first figure", "second", "third", text=0)),
    rows=(("a name of several words", "1234567", "12345678", "123456789"), (), ("b", "1", "2", "3")),
)


@given(st.integers(20, 120))
def test_a_column_is_left_out_in_words(width: int) -> None:
    text = printed(Document(verdict=ShownVerdict(), charts=(TABLE,)), width).plain
    words = text.replace("\n", " ")
    for name in ("first", "second", "third"):
        assert name in words, "in the heading, or below the table"
    assert all(len(line) <= width for line in text.splitlines())


def test_rows_beyond_the_top_are_counted() -> None:
    table = Table(title="t", columns=columns("a"), rows=tuple((str(at),) for at in range(9)), top=4)
    assert "... and 5 more (--top)" in printed(Document(verdict=ShownVerdict(), charts=(table,)), 80).plain


def test_an_answer_that_is_no_says_so_first(plan: dict[str, Any]) -> None:
    memory = plan["memory"] | {"fits": False, "total": 2 * plan["memory"]["capacity"]}
    first = printed(document(plan | {"memory": memory}), 110).plain.splitlines()[0]
    assert first.startswith("Does not fit: ")
    assert "too much" in first


def test_a_colour_has_one_meaning() -> None:
    phases = ("forward", "recompute", "backward", "update")
    one, other = colours(phases), colours(reversed(phases))
    assert one == other
    assert len(set(one.values())) == len(phases)
    resources = colours(("mxu", "hbm", "ici", "dcn", "vpu", "host", "pcie"))
    assert len(set(resources.values())) == len(resources)
    assert set(COLOURS.values()) <= set(range(PALETTE))
    assert colours(("forward", "no meaning"))["no meaning"] != COLOURS["forward"]


def test_a_half_alone_has_the_whole_row() -> None:
    bars = Bars(title="b", unit="s", bars=(Bar("a", (("x", 1.0),)),))
    table = Table(title="t", columns=columns("a"), rows=(("1",),))
    assert places((bars, bars, bars, table)) == ["half", "half", "wide", "wide"]
    assert places((bars, table, bars)) == ["wide", "wide", "wide"]


@pytest.mark.parametrize(
    ("text", "wide"), [("900,400,300", 900), ("", 860), ("1,2", 860), ("a,b,c", 860), ("9,9,9", 240)]
)
def test_widths_of_a_browser_are_kept_within_limits(text: str, wide: int) -> None:
    assert Widths.parse(text).wide == wide


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RooftopError, match="document"):
        document({"kind": "novel"})
