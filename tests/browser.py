"""Chromium, driven by Playwright. Neither is needed for anything else: without them, tests that use it are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SIZE = {"width": 1400, "height": 900}
CHROMIUM = shutil.which("chromium")
# As root there is no sandbox; and nothing but the page may be asked for.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips the test where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page is not tested in a browser: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("the page is not tested in a browser: there is no chromium here (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def opened_page(browser: Any, file: Path, **options: Any) -> Iterator[Any]:
    """A page of which nothing but itself is asked for, and which says nothing on the console."""
    context = browser.new_context(viewport=SIZE, **options)
    opened = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(file.as_uri())
    opened.wait_for_function("window.spindleReport")
    yield opened
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    context.close()


def settle(page: Any) -> None:
    """Wait until what was asked for is painted."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def text_of(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text())
