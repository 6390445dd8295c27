"""The page in a browser: a slider moved by keyboard changes the figure that the command line gives; nothing leaves.

It drives Debian's Chromium through Playwright, and is skipped where there is none.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, sync_playwright

from rooftop.present import html
from rooftop.present.document import Document, ShownVerdict, Table, TableColumn, format_value
from rooftop.ui.explorers import EXPLORERS, explorer
from rooftop.ui.server import address, application, bind
from tests.conftest import Answer
from tests.support import faces, looks
from tests.support.chromium import CHROMIUM, needs_browser
from tests.support.ui_figures import FIGURES, PRINTED

pytestmark = needs_browser
Call = Callable[..., Answer]
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}


@contextmanager
def serving(files: Sequence[Path]) -> Iterator[str]:
    """The address of the page with some files, while it is served."""
    import uvicorn

    listening = bind("127.0.0.1", 0)
    # Logging is not configured: that would close the streams of handlers that others have.
    config = uvicorn.Config(application(files=files), log_config=None, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield address(listening)
    server.should_exit = True
    thread.join(10)
    listening.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page, with one plan to open."""
    from rooftop.cli.main import main

    plan = tmp_path_factory.mktemp("plans") / "plan.json"
    with pytest.raises(SystemExit):
        main(["plan", "embed", "docs/tables.toml", "--on", "v5p:2x2x1", "-o", str(plan), "--json"])
    with serving([plan]) as where:
        yield where


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Its sandbox wants privileges that containers do not have; the only page it sees is ours.
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser: Browser, site: str) -> Iterator[Page]:
    """A page that must say nothing on its console, and ask for nothing that is not here."""
    context = browser.new_context(viewport=DESKTOP)
    one = context.new_page()
    wrong: list[str] = []

    def said(message: ConsoleMessage) -> None:
        # The browser notes every refusal; which ones there are is for the tests to say.
        if message.type == "error" and "status of 400" not in message.text:
            wrong.append(f"console: {message.text}")

    one.on("console", said)
    one.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    one.on("request", lambda request: None if request.url.startswith(site) else wrong.append(f"asks {request.url}"))
    yield one
    context.close()
    assert wrong == []


def test_a_file_is_shown_as_on_the_terminal(
    browser: Browser, rooftop: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet with its runners-up, and a plan that does not fit."""
    monkeypatch.setenv("COLUMNS", "2000")
    fleet = ("--on", "v5e", "--requests-per-second", "10", "--ttft", "1s", "--tpot", "50ms")
    answers = {
        "fleet.json": ("plan", "serve", "llama3-8b", *fleet),
        "none.json": ("plan", "train", "llama3-70b", "--on", "v5e:4x4", "--batch-seqs", "16"),
    }
    said = {file: rooftop(*words, "-o", str(tmp_path / file)).out for file, words in answers.items()}
    with serving([tmp_path / file for file in answers]) as where:
        page = browser.new_page(viewport=DESKTOP)
        for index, terminal in enumerate(said.values()):
            page.goto(f"{where}open?file={index}")
            page.wait_for_selector(".answer .notes, .answer .chart")
            assert faces.missing(terminal, page.inner_text("main")) == []
        page.close()


def test_a_table_that_is_cut_says_so(browser: Browser, tmp_path: Path) -> None:
    """A wide table of a page scrolls inside its place, under a shadow, and its texts stay wide enough to read."""
    columns = (*(TableColumn(f"figure {at}") for at in range(30)), TableColumn("says", "text", wrap=True))
    rows = ((*("123.4 ms" for _ in range(30)), "all_gather over fsdp; " * 8),)
    file = tmp_path / "page.html"
    file.write_text(html.page(Document(verdict=ShownVerdict(), charts=(Table(title="t", columns=columns, rows=rows),))))
    page = browser.new_page(viewport=DESKTOP)
    page.goto(f"file://{file}")
    place = page.locator(".scroll")
    assert place.evaluate("it => it.scrollWidth > it.clientWidth")
    assert place.evaluate("it => getComputedStyle(it).backgroundImage").count("gradient") == 4
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("td.long").evaluate("it => it.getBoundingClientRect()")["width"] > 300
    page.close()


def _open(page: Page, where: str) -> None:
    page.goto(where)
    page.wait_for_selector("body[data-ready]")


def _text(page: Page, figure: str) -> str:
    return page.inner_text(f"[data-figure={figure}] .value")


def _settled(page: Page, query: str) -> None:
    """Wait until the answer to a state is shown, and the state is in the address."""
    page.wait_for_function("text => document.body.dataset.asked === text", arg=query)
    page.wait_for_function("text => location.search === text", arg=query)


def _by_command_line(
    page: Page, name: str, state: dict[str, str], rooftop: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The figure of the command that the page shows, as the page would write it."""
    command = shlex.split(page.inner_text(".same code"))
    if name == "embedding":
        monkeypatch.chdir(folder)
        (folder / "tables.toml").write_text(page.input_value("#c-tables"), encoding="utf-8")
    find = PRINTED[name][FIGURES[name].figure]
    assert not isinstance(find, str)
    return format_value(find(rooftop(*command[1:], "--json").json, state), page_unit(name, state))


def page_unit(name: str, state: dict[str, str]) -> str:
    """The unit that the explorer declares for the figure."""
    from rooftop.ui.controls import read_state

    one = explorer(name)
    figures = one.answer(read_state(one.form.controls, state.items())).figures
    return next(figure.unit for figure in figures if figure.name == FIGURES[name].figure)


@pytest.mark.parametrize("name", EXPLORERS)
def test_a_slider_moved_by_keyboard_changes_what_the_command_line_says_too(
    name: str, site: str, page: Page, rooftop: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = FIGURES[name]
    _open(page, f"{site}{name}")
    assert looks.faults(page) == []
    before = _text(page, shown.figure)
    at_first = page.get_attribute(f"#c-{shown.slider}", "aria-valuetext")
    page.focus(f"#c-{shown.slider}")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    control = next(control for control in explorer(name).form.controls if control.name == shown.slider)
    state = {shown.slider: str(control.stops[control.stops.index(int(control.default)) + 2])}
    _settled(page, f"?{urlencode(state)}")
    after = _text(page, shown.figure)
    assert page.get_attribute(f"#c-{shown.slider}", "aria-valuetext") != at_first
    assert after == _by_command_line(page, name, state, rooftop, tmp_path, monkeypatch)
    assert after != before

    # The address alone brings the state back, as does the way back from another page.
    where = page.url
    _open(page, f"{site}open")
    page.go_back()
    page.wait_for_selector("body[data-ready]")
    assert page.url == where
    assert _text(page, shown.figure) == after


@pytest.mark.parametrize("name", ["", *EXPLORERS, "open?file=0"])
def test_it_works_at_phone_width_in_both_themes(name: str, site: str, page: Page) -> None:
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="dark")
    _open(page, f"{site}{name}")
    if name.startswith("open"):
        page.wait_for_selector(".figures .value")
    assert looks.faults(page) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    # Nothing that can be touched is too small to touch, and every control has a name.
    for control in page.query_selector_all("input:visible, select:visible, textarea:visible, button:visible"):
        box = control.bounding_box()
        assert box is not None
        assert box["height"] >= 18, control.evaluate("element => element.outerHTML")
        assert control.evaluate(
            "element => Boolean(element.labels?.length || element.getAttribute('aria-label') || element.innerText)"
        ), control.evaluate("element => element.outerHTML")


def test_a_mistake_is_said_beside_its_field(site: str, page: Page) -> None:
    _open(page, f"{site}roofline")
    with page.expect_response(lambda response: response.status == 400):
        page.fill("input[aria-label='B, tokens, typed']", "many")
    page.wait_for_selector("#wrong-B:visible")
    assert "a positive number" in page.inner_text("#wrong-B")
    assert page.get_attribute("#c-B", "aria-invalid") == "true"
    page.fill("input[aria-label='B, tokens, typed']", "4Ki")
    page.wait_for_selector("#wrong-B", state="hidden")
    _settled(page, "?B=4Ki")
    assert page.get_attribute("#c-B", "aria-valuetext") == "4Ki"


def test_points_and_animations_are_read_by_keyboard(site: str, page: Page) -> None:
    _open(page, f"{site}systolic")
    chart = page.locator("figure:has-text('Utilisation over rows') svg.plot")
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert "% at" in page.inner_text(".tip:visible")
    player = page.locator("input[aria-label='Step of the animation']")
    player.focus()
    first = page.inner_text(".says")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".says") != first
    page.locator("summary:has-text('Data')").first.click()
    # A table is filled when its toggle event comes, which is after the click has returned.
    page.locator("details[open] tbody tr").nth(5).wait_for()


def test_a_file_is_opened_and_a_wrong_one_refused(site: str, page: Page, tmp_path: Path) -> None:
    _open(page, f"{site}open?file=0")
    page.wait_for_selector("text=a plan of embedding tables")
    page.locator("td", has_text="tables/user+item/lookup").first.wait_for()
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}", encoding="utf-8")
    with page.expect_response(lambda response: response.status == 400):
        page.set_input_files("input[type=file]", wrong)
    page.wait_for_selector("[role=alert]:visible")
    assert "its kind one of" in page.inner_text("[role=alert]:visible")


def test_another_name_gets_nothing(site: str, browser: Browser) -> None:
    port = urlsplit(site).port
    context = browser.new_context(extra_http_headers={"Host": f"rebound.example:{port}"})
    page = context.new_page()
    status: Any = None
    try:
        response = page.goto(site)
        status = response.status if response else None
    except Error:
        status = "refused by the browser"
    context.close()
    assert status in (421, "refused by the browser")


def test_a_link_with_a_name_of_no_control_still_answers(page: Page, site: str) -> None:
    _open(page, f"{site}roofline?B=64&speed=3")
    assert "This link sets speed, which this page does not have" in page.inner_text("main > .wrong")
    assert page.is_visible(".answer .verdict")
    assert page.input_value("input[aria-label='B, tokens, typed']") == "64"


def test_a_control_that_does_nothing_is_off(page: Page, site: str) -> None:
    _open(page, f"{site}serving")
    assert page.is_disabled("#c-mesh")
    page.select_option("#c-bounds", "usable")
    assert page.is_enabled("#c-mesh")


def test_a_level_leads_to_its_word(page: Page, site: str) -> None:
    _open(page, f"{site}training")
    page.click("[data-figure=expected_s] .level a")
    page.wait_for_selector("body[data-ready]")
    assert page.url.endswith("/glossary#expected")
    assert page.inner_text("#expected + dd").startswith("a planned time with evidence")


def test_an_error_of_a_file_has_the_colour_of_errors(page: Page, site: str) -> None:
    _open(page, f"{site}open")
    page.set_input_files("input[type=file]", {"name": "x.json", "mimeType": "application/json", "buffer": b"[1"})
    page.wait_for_selector("main .wrong:not([hidden])")
    colour, ink = (
        page.eval_on_selector(selector, "element => getComputedStyle(element).color")
        for selector in ("main .wrong", "body")
    )
    assert colour != ink


def test_a_configuration_stands_as_it_is_written_and_is_copied(page: Page, site: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    _open(page, f"{site}training?framework=megatron&on=h100:8x8&tensor=8&batch_seqs=64")
    text = page.locator(".listing pre").text_content()
    assert text is not None and text.startswith("#!/bin/bash\n") and "\n  --num-layers 80 \\\n" in text
    page.click(".listing button")
    page.wait_for_selector(".listing button:text('Copied')")
    assert page.evaluate("() => navigator.clipboard.readText()") == text
    page.select_option("#c-framework", "rooftop")
    page.wait_for_selector(".listing", state="detached")
