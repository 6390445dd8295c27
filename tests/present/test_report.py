"""Pages: whole files that need no network, whose text is never markup, and that a browser opens from a disk."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Collective, Row
from rooftop.core.printable import printable
from rooftop.core.timelines import COMPUTE, TRANSFER, WAIT, Lane, Lanes, TimeSpan
from rooftop.explain.measured.report import explain
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.present.document import Table, Timeline, columns
from rooftop.present.documents import document
from rooftop.present.documents.explained import of_explained
from rooftop.present.documents.parts import ledger_lines
from rooftop.present.html import page, table
from rooftop.present.markup import Html, join, tag
from rooftop.present.svg import MOST_BARS, linear_ticks, log_ticks, picture
from rooftop.present.traced import measured_document, measured_lanes, typical_step
from tests.explain.test_traces import MODULE, V5E
from tests.support.chromium import CHROMIUM, needs_browser
from tests.support.traces import Event, plane, tpu, xspace

VOID = {"meta", "br", "link", "img"}


class Outline(HTMLParser):
    """Elements of a page, their attributes, and the text of each kind; it checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]


HOST = plane(
    "/host:CPU",
    {
        "allocator": [
            Event(
                "MemoryAllocation", at, at, {"allocator_name": "TPU_0", "bytes_allocated": used, "bytes_available": 9}
            )
            for at, used in ((1, 100), (2, 700), (3, 400))
        ]
    },
)


def measured_page(answer: Any) -> str:
    """The page of a trace."""
    return page(measured_document(answer))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The synthetic step of a v5e, with its memory."""
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xspace(tpu(stats=V5E), HOST))
    return file


def explained(trace: Path) -> Any:
    """It explained beside its module."""
    return explain(trace, modules=[MODULE], mesh={"data": 2, "tensor": 4})


def test_a_page_is_one_file_that_loads_nothing(trace: Path) -> None:
    text = measured_page(explained(trace))
    outline = Outline(text)
    assert outline.open == []
    assert text.startswith("<!doctype html>")
    for name in ("link", "img", "iframe", "object", "embed"):
        assert outline.all(name) == []
    for _, attributes in outline.elements:
        assert not {"src", "srcset", "onload", "onclick", "onerror"} & set(attributes)
        assert str(attributes.get("href", "#")).startswith("#")
    assert not re.findall(r"https?://|url\(|@import|fetch\(|XMLHttpRequest", text)
    policy = next(meta["content"] for meta in outline.all("meta") if meta.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")


def test_every_plot_says_what_it_shows_and_has_a_table(trace: Path) -> None:
    outline = Outline(measured_page(explained(trace)))
    names = {attributes.get("id") for _, attributes in outline.elements}
    plots = [attributes for attributes in outline.all("svg") if "plot" in str(attributes.get("class"))]
    assert len(plots) >= 4
    for plot in plots:
        assert plot["tabindex"] == "0"
        assert set(str(plot["aria-labelledby"]).split()) <= names
    figures = {attributes["id"] for attributes in outline.all("figure")}
    assert figures >= {"where-a-step-goes", "roofline-2", "measured-step-7", "memory-over-time"}
    assert len(outline.all("summary")) >= len(figures)
    identifiers = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    links = {str(attributes["href"])[1:] for attributes in outline.all("a")}
    assert links == {attributes["id"] for attributes in outline.all("section")}


def test_figures_of_the_page_are_those_of_the_command(trace: Path) -> None:
    answer = explained(trace)
    text = " ".join(Outline(measured_page(answer)).text["td"])
    for shown in ("layers/attn/out", "30 us", "1.07 G", "all-gather-start.1"):
        assert shown in text
    titles = Outline(measured_page(answer)).text["title"]
    out = next(title for title in titles if title.startswith("measured: layers/attn/out"))
    assert "FLOP/s: 35.8 T" in out
    assert "of its roof" in out
    (line,) = (line for line in of_explained(answer.record()) if line.scope == "layers/attn/out")
    assert line.sides["measured"].flops == pytest.approx(2 * 1024 * 512 * 1024)
    assert line.sides["measured"].intensity == pytest.approx(line.sides["compiled"].intensity)


NASTY = "</script><script>alert(1)</script>\"'&<b>"


def test_text_of_a_trace_is_never_markup(tmp_path: Path) -> None:
    ops = [Event(NASTY, at, at + 90, {}) for at in (0, 100)]
    module = [Event(f"{NASTY}(7)", at, at + 95) for at in (0, 100)]
    kinds = {NASTY: {"tf_op": f"jit(f)/{NASTY}/dot:", "flops": 10**9, "bytes_accessed": 10**6, "source": f"{NASTY}:3"}}
    lines = {"XLA Modules": module, "XLA Ops": ops}
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(
        xspace(plane("/device:TPU:0", {"Steps": [Event("1", 0, 100), Event("2", 100, 200)]} | lines, V5E, kinds))
    )
    clean = tmp_path / "clean.xplane.pb"
    clean.write_bytes(xspace(tpu(stats=V5E)))
    text = measured_page(explain(file))
    outline = Outline(text)
    assert outline.open == []
    assert len(outline.all("script")) == 1
    assert outline.all("b") == []
    assert "alert(1)" in "".join(outline.text["title"]), "it is there, as text"
    usual = {name for name, _ in Outline(measured_page(explain(clean))).elements}
    assert {name for name, _ in outline.elements} <= usual


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_comes_back_out_of_a_page_as_it_is_shown(one: str, two: str) -> None:
    text = tag("p", one, title=two)
    outline = Outline(text)
    assert outline.open == []
    assert [name for name, _ in outline.elements] == ["p"]
    # Control characters, which HTML does not have, are shown as terminals show them.
    assert "".join(outline.text.get("p", [])) == printable(one)
    assert str(outline.elements[0][1]["title"]) == printable(two)


def test_elements() -> None:
    assert join("a<b", Html("<i>"), None, 1.5) == "a&lt;b<i>1.5"
    assert (
        tag("text", "x", text_anchor="end", class_="quiet", hidden=False)
        == '<text text-anchor="end" class="quiet">x</text>'
    )
    assert tag("line", x1=1) == '<line x1="1"/>'
    assert "&lt;td" in table(Table(title="c", columns=columns("a"), rows=(("<td",),)))


@given(st.floats(0, 1e9, allow_subnormal=False), st.floats(1e-9, 1e12))
def test_linear_ticks_are_few_and_within(low: float, wide: float) -> None:
    high = low + wide
    assume(high > low * (1 + 1e-9))
    ticks = linear_ticks(low, high)
    assert len(ticks) <= 10
    assert all(low - 1e-6 * high <= tick <= high * (1 + 1e-6) for tick in ticks)


@given(st.floats(0, 1e9, exclude_min=True, allow_subnormal=False), st.floats(1e-9, 1e12))
def test_log_ticks_are_few_and_within(low: float, wide: float) -> None:
    high = (low + wide) * 1.01
    ticks = log_ticks(low, high)
    assert len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)


def test_ledgers_of_several_sides_are_joined() -> None:
    def row(scope: str, count: float, seconds: float, moved: float) -> Row:
        gather = Collective(
            kind="all_gather", axes=("fsdp",), bytes=moved, wire_bytes=moved, critical=True, exposed_s=seconds / 4
        )
        return Row(
            scope=scope, phase="forward", count=count, expected_s=seconds, flops={"bf16": 8.0}, kernel_flops=2.0,
            hbm_bytes=5.0, time_s={"mxu": seconds / 2}, collectives=(gather,),
        )  # fmt: skip

    ledgers = {"compiled": [row("a", 2, 1.0, 10)], "planned": [row("a", 1, 3.0, 20), row("b", 1, 1.0, 1)]}
    one, two = ledger_lines(ledgers)
    assert (one.sides["compiled"].time_s, one.sides["planned"].time_s) == (2.0, 3.0)
    assert (one.sides["compiled"].exposed_s, one.sides["compiled"].flops) == (0.5, 20.0)
    assert one.moves == ("all_gather over fsdp: 20 B compiled", "all_gather over fsdp: 20 B planned")
    assert set(two.sides) == {"planned"}


def test_the_timeline_of_a_trace_is_a_step_of_it(trace: Path) -> None:
    answer = explained(trace)
    drawn = measured_lanes(answer)
    assert drawn.total_s == pytest.approx(100e-6)
    (main, nested) = drawn.lanes
    assert [span.name for span in nested.spans] == ["fusion.5"], "what runs within a loop stands below it"
    sorts = {span.name: span.sort for span in main.spans}
    assert (sorts["fusion.1"], sorts["all-reduce.3"]) == (COMPUTE, WAIT)
    assert typical_step(answer.measured.steps).number == 7
    assert sum(span.seconds for span in main.spans if span.sort == COMPUTE) == pytest.approx(59e-6)


def test_beside_a_plan_all_three_timelines_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xspace(*(tpu(number, stats=V5E) for number in range(8))))
    problem = Problem(
        model=load_model("llama3.2-1b"), slice=Slice.parse("v5e:2x4"), axes={"data": 2, "tensor": 4},
        workload=Workload(batch_tokens=8 * 2048, seq_len=2048), remat="block", microbatches=1,
    )  # fmt: skip
    plan = plan_training(problem, alternatives=0).plan
    text = measured_page(explain(file, modules=[MODULE], mesh={"data": 2, "tensor": 4}, plan=plan))
    titles = [title.split(":")[0] for title in Outline(text).text["h3"]]
    assert [title for title in titles if title in ("measured", "compiled", "planned")] == [
        "measured", "compiled", "planned",
    ]  # fmt: skip
    outline = Outline(text)
    assert "link" in "".join(outline.text["text"]), "the compiled one has the links of the torus"
    assert "By scope and phase: measured beside compiled beside planned" in outline.text["caption"]


def test_transfers_beside_have_a_lane(tmp_path: Path) -> None:
    beside = {"Async XLA Ops": [Event("%copy-start.1 = f32[8]{0} copy-start(%x)", at, at + 20) for at in (10, 110)]}
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xspace(tpu(stats=V5E, extra=beside)))
    drawn = measured_lanes(explain(file))
    assert drawn.lanes[-1].name == "TPU 0 beside"
    assert [span.sort for span in drawn.lanes[-1].spans] == [TRANSFER]


def test_a_long_timeline_stays_small() -> None:
    spans = tuple(
        TimeSpan(name=f"op{at}", sort=COMPUTE if at % 50 else WAIT, start_s=at * 1e-6, end_s=(at + 0.9) * 1e-6)
        for at in range(40_000)
    )
    drawn = Lanes(title="long", source="measured", total_s=0.04, lanes=(Lane(name="TPU 0", spans=spans),))
    outline = Outline(picture(Timeline(title="long", lanes=drawn), 860, "long"))
    assert 100 < len(outline.all("rect")) <= MOST_BARS + 10
    assert "short ones" in "".join(outline.text["title"])


def test_what_no_page_is_made_of_is_refused() -> None:
    with pytest.raises(RooftopError, match="document"):
        document({"kind": "novel"})


def test_a_page_of_a_serving_plan_has_its_front(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "serve.html"
    common = (
        "plan",
        "serve",
        "llama3-70b",
        "--on",
        "v5e:4x4",
        "--weights-dtype",
        "int8",
        "--kv-dtype",
        "int8",
        "--batch-seqs",
        "32",
    )
    data = rooftop(*common, "--report", str(file), "--json").json
    outline = Outline(file.read_text())
    points = [title for title in outline.text["title"] if title.startswith("context 7,936: batch")]
    assert len(points) == len(data["pareto"])
    assert {attributes["id"] for attributes in outline.all("section")} >= {
        "pareto",
        "generate",
        "prefill",
        "memory",
        "timeline",
    }
    assert any(title.startswith("this plan: batch 32") for title in outline.text["title"])


def test_the_page_of_a_plan_needs_no_jax(tmp_path: Path) -> None:
    plan = ["plan", "train", "llama3.2-1b", "--on", "v5e:2x2", "--batch-seqs", "4", "--seq", "2048", "--mesh", "fsdp=4"]
    written = [*plan, "--remat", "block", "--report", str(tmp_path / "r.html"), "--xprof", str(tmp_path / "x")]
    code = f"""
import sys
from rooftop.cli.main import main
try:
    main({written!r})
except SystemExit as end:
    assert end.code == 0
assert not {{"jax", "jaxlib", "scipy"}} & set(sys.modules), sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert "llama3.2-1b on v5e:2x2: a training plan" in (tmp_path / "r.html").read_text()


def test_explain_writes_a_page_beside_what_it_prints(rooftop: Callable[..., Any], trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    answer = rooftop("explain", str(trace), "--report", str(file), "--json")
    assert answer.json["kind"] == "explained"
    assert "Not there" in file.read_text()
    refused = rooftop("explain", "--op", "%a = f32[8]{0} negate(%b)", "--report", str(file))
    assert (refused.status, len(refused.err.strip().splitlines())) == (2, 1)


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def browser() -> Iterator[Any]:
    """Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (1280, "dark")])
def test_a_page_opens_from_disk(browser: Any, trace: Path, tmp_path: Path, width: int, scheme: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(measured_page(explained(trace)))
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    seen, errors, asked = context.new_page(), list[str](), list[str]()
    seen.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    seen.on("pageerror", lambda error: errors.append(str(error)))
    seen.on("request", lambda request: asked.append(request.url))
    seen.goto(file.as_uri())
    assert (errors, asked) == ([], [file.as_uri()])
    assert seen.evaluate("document.documentElement.scrollWidth") == width, "nothing is wider than the page"
    light = seen.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (light == "rgb(255, 255, 255)") is (scheme == "light")

    # A mouse and a keyboard are told the same figures.
    points = seen.locator("#roofline-2 .mark")
    points.first.scroll_into_view_if_needed()
    points.first.hover()
    by_mouse = seen.locator("#tip").inner_text()
    assert "FLOP/s" in by_mouse
    seen.locator("#roofline-2 svg.plot").focus()
    seen.keyboard.press("ArrowRight")
    assert seen.locator("#tip").inner_text() == by_mouse
    assert points.first.get_attribute("aria-label") == by_mouse.replace("\n", "; ")
    seen.keyboard.press("Escape")
    assert seen.locator("#tip").is_hidden()

    # From mark to mark with the arrows, wherever they are on the page.
    seen.locator("#where-a-step-goes svg.plot").focus()
    messages = []
    for _ in range(3):
        seen.keyboard.press("ArrowRight")
        seen.wait_for_function("!document.getElementById('tip').hidden")
        messages.append(seen.locator("#tip").inner_text())
    assert messages[0].startswith("a step: computing")
    assert len(set(messages)) == 3
    seen.keyboard.press("Escape")

    # The timeline zooms: a bar that stays in sight becomes wider, and one that does not is gone.
    bar = seen.locator("#measured-step-7 .bars .mark rect").first
    before = float(bar.get_attribute("width"))
    seen.locator("#measured-step-7 button[data-zoom=in]").click()
    assert float(bar.get_attribute("width")) == pytest.approx(2 * before, rel=1e-2)
    seen.locator("#measured-step-7 svg.plot").focus()
    seen.keyboard.press(".")
    seen.keyboard.press(".")
    assert bar.is_hidden()
    seen.keyboard.press("0")
    assert float(bar.get_attribute("width")) == pytest.approx(before, rel=1e-2)
    assert errors == []
    context.close()


@needs_browser
def test_a_printed_page_opens_its_tables(browser: Any, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(measured_page(explained(trace)))
    context = browser.new_context(color_scheme="dark")
    seen = context.new_page()
    seen.goto(file.as_uri())
    assert seen.pdf()[:5] == b"%PDF-"
    assert seen.locator("details:not([open])").count() == 0
    seen.emulate_media(media="print")
    assert seen.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert seen.locator("nav").is_hidden()
    context.close()
