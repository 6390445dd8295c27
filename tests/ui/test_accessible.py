"""Every page under axe-core: explorers, files that were opened, reports; light at a desk and dark on a phone.

What axe-core cannot see (whether a text says what it should) is for people; what it sees is wrong for certain. It is
skipped where there is no Chromium.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python import sync_playwright as axe

from rooftop.explain.measured.report import explain
from rooftop.present.html import page as whole_page
from rooftop.present.traced import measured_document
from rooftop.ui.explorers import EXPLORERS
from tests.support import looks
from tests.support.chromium import needs_browser
from tests.ui.test_browser import DESKTOP, PHONE, browser, serving
from tests.ui.test_reading import write_run

__all__ = ["browser"]
pytestmark = needs_browser
#: What makes an answer stale: a text that the first field of an explorer does not take.
WRONG = "() => { const field = document.querySelector('form input[type=text]'); field.value = '['; "
WRONG += "field.dispatchEvent(new Event('input', { bubbles: true })); }"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a trace, a plan of each kind, and the report of the run."""
    from rooftop.cli.main import main

    where = tmp_path_factory.mktemp("files")
    run = write_run(where / "run")
    (where / "run.html").write_text(whole_page(measured_document(explain(run))), encoding="utf-8")
    commands = {
        "train": "train llama3-8b --on v5e:4x4 --batch-seqs 16 --seq 2048 --mesh fsdp=4,tensor=4 --remat block",
        "serve": "serve llama3-8b --on v5e:2x2 --weights-dtype int8 --kv-dtype int8 --batch-seqs 8",
        "embed": "embed docs/tables.toml --on v5p:2x2x1",
        "fleet": "serve llama3-8b --on v5e,v5p --requests-per-second 10 --ttft 1s --tpot 50ms",
    }
    for name, command in commands.items():
        with pytest.raises(SystemExit):
            written = ["-o", str(where / f"{name}.json"), "--report", str(where / f"{name}.html")]
            main(["plan", *command.split(), *written, "--json"])
    return where


@pytest.fixture(scope="module")
def site(folder: Path) -> Any:
    with serving([folder / "run", *sorted(folder.glob("*.json"))]) as address:
        yield address


LOOKS = {
    "desk-light": (DESKTOP, "light"), "phone-dark": (PHONE, "dark"),
    "desk-dark": (DESKTOP, "dark"), "phone-light": (PHONE, "light"),
}  # fmt: skip


def in_turn(argument: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """Each value in every look; in the quick tests every other one light at a desk, the rest dark on a phone."""
    cases = [
        pytest.param(value, look, id=f"{name}-{value}", marks=() if at == index % 2 else pytest.mark.slow)
        for index, value in enumerate(values)
        for at, (name, look) in enumerate(LOOKS.items())
    ]
    return pytest.mark.parametrize((argument, "page"), cases, indirect=["page"])


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Any:
    size, scheme = request.param
    context = browser.new_context(viewport=size, color_scheme=scheme)
    yield context.new_page()
    context.close()


@pytest.fixture
def violations(page: Any) -> Callable[[], list[str]]:
    """Violations and faults of the page as it stands, all of its tables open."""

    def run_axe() -> list[str]:
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        page.wait_for_function(
            "[...document.querySelectorAll('details')].every(each => each.querySelector('tr') || !each.open)"
        )
        result = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response
        assert result["passes"], "it has looked"
        return looks.faults(page) + [
            f"{violation['id']}: {[node['target'] for node in violation['nodes']]}"
            for violation in result["violations"]
        ]

    return run_axe


@in_turn("name", ["", *EXPLORERS])
def test_explorers_have_no_violation(name: str, site: str, page: Any, violations: Callable[[], list[str]]) -> None:
    page.goto(f"{site}{name}")
    page.wait_for_selector("body[data-ready]")
    assert violations() == []


@in_turn("name", ["sharding", "serving"])
def test_a_mistake_leaves_a_page_that_can_be_read(
    name: str, site: str, page: Any, violations: Callable[[], list[str]]
) -> None:
    page.goto(f"{site}{name}")
    page.wait_for_selector("body[data-ready]")
    with page.expect_response(lambda response: response.status == 400):
        page.evaluate(WRONG)
    page.wait_for_selector(".wrong:visible")
    page.wait_for_selector(".answer.stale")
    assert violations() == []


@in_turn("index", range(5))
def test_files_that_are_opened_have_no_violation(
    index: int, site: str, page: Any, violations: Callable[[], list[str]]
) -> None:
    page.goto(f"{site}open?file={index}")
    page.wait_for_selector(".figures .value")
    page.wait_for_selector(".pending", state="hidden")
    assert violations() == []


@in_turn("report", ["run", "train", "serve", "embed", "fleet"])
def test_a_report_has_no_violation(report: str, folder: Path, page: Any, violations: Callable[[], list[str]]) -> None:
    page.goto((folder / f"{report}.html").as_uri())
    assert violations() == []


@pytest.mark.parametrize("page", [LOOKS["desk-light"]], indirect=True)
def test_axe_sees_what_is_wrong(site: str, page: Any, violations: Callable[[], list[str]]) -> None:
    page.goto(site)
    page.wait_for_selector("body[data-ready]")
    page.evaluate("document.querySelector('.logo').removeAttribute('aria-label')")
    page.evaluate("document.querySelector('.logo span').remove()")
    assert [violation.partition(":")[0] for violation in violations()] == ["link-name"]
