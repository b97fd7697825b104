"""The page in a real browser, if available: drawing, interaction, and no execution of text from models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlframework.observers.runs import Run, Sample
from rlframework_report.report import render
from rlframework_report.report.content import content

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here")

EVIL = "</script><script>window.hit=1</script><img src=x onerror='window.hit=2'><svg onload='window.hit=3'>"


def make(name: str, factor: float) -> Run:
    history = [
        {"step": float(i), "train/reward": factor * i, "train/kl": 0.5 * i, "time/generate": 1.0, "time/step": 2.0}
        for i in range(1, 11)
    ]
    rows = [Sample(step=i, prompt=f"p{i} {EVIL}", completion=f"c{i} {EVIL}", x=EVIL) for i in range(1, 6)]
    return Run(name + EVIL, Path(name), history, rows, {"lr": factor, "same": 1, EVIL: EVIL}, {EVIL: EVIL})


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    file = tmp_path / "report.html"
    file.write_text(render(content([make("one", 1.0), make("two", 2.0)], 1)), encoding="utf-8")
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    opened = context.new_page()
    opened.problems = []
    opened.on("console", lambda message: opened.problems.append(message.text))
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("request", lambda request: opened.problems.append(request.url) if request.url != file.as_uri() else None)
    opened.goto(file.as_uri())
    opened.wait_for_selector(".chart svg.plot path.smooth")
    yield opened
    assert opened.problems == []
    context.close()


def test_text_written_by_a_model_is_never_executed(page: Any) -> None:
    assert page.evaluate("window.hit") is None
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert f"c5 {EVIL}" in page.inner_text("#samples")
    assert EVIL in page.inner_text("#configuration")


def test_hovering_shows_values_and_the_legend_hides_runs(page: Any) -> None:
    chart = page.locator("article.chart", has_text="Reward").first
    assert chart.locator(".readout").inner_text().split() == ["10", "20"]
    box = chart.locator("svg.plot").bounding_box()
    page.mouse.move(box["x"] + 52, box["y"] + 60)  # the left end: step 1
    assert chart.locator(".readout").inner_text().split() == ["1", "2"]
    page.locator(".chip").first.click()
    assert chart.locator(".readout").inner_text().split() == ["20"]
    assert chart.locator("path.smooth").count() == 1


def test_the_slider_smooths(page: Any) -> None:
    chart = page.locator("article.chart", has_text="Reward").first
    before = chart.locator("path.smooth").first.get_attribute("d")
    assert chart.locator("path.raw").count() == 0
    page.locator("#smooth").fill("60")
    chart.locator("path.raw").nth(1).wait_for(state="attached")
    assert chart.locator("path.raw").count() == 2
    assert chart.locator("path.raw").first.get_attribute("d") == before
    assert chart.locator("path.smooth").first.get_attribute("d") != before


def test_samples_of_one_step_and_what_differs_between_runs(page: Any) -> None:
    page.locator("#samples .steps input").fill("0")
    assert page.locator("#samples tbody tr").count() == 2
    assert "c1 " in page.inner_text("#samples tbody")
    assert page.locator("#configuration tbody tr").count() == 1
    page.locator("#configuration input[type=checkbox]").check()
    assert page.locator("#configuration tbody tr").count() == 3


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_nothing_overflows_the_page(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_tap_shows_the_values_there(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "phone.html"
    file.write_text(render(content([make("one", 1.0)], 1)), encoding="utf-8")
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True)
    page = context.new_page()
    page.goto(file.as_uri())
    chart = page.locator("article.chart", has_text="Reward").first
    chart.scroll_into_view_if_needed()
    chart.locator("path.smooth").wait_for(state="attached")
    box = chart.locator("svg.plot").bounding_box()
    page.touchscreen.tap(box["x"] + 52, box["y"] + 60)
    chart.locator(".readout", has_text="1").wait_for()
    assert chart.locator(".readout").inner_text().split() == ["1"]
    context.close()


def test_many_runs_are_a_table(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "many.html"
    file.write_text(render(content([make(f"run {i}", i) for i in range(1, 11)], 1)), encoding="utf-8")
    page = browser.new_page(viewport={"width": 900, "height": 800})
    page.goto(file.as_uri())
    assert page.locator("#summary tbody tr").count() == 10
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate("window.hit") is None
    page.close()
