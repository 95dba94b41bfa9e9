"""The report in Chromium, at the width of a laptop and of a phone, by mouse and by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.runs import finished_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
]


@dataclass
class Seen:
    """A page, and what it said and asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


def opened(
    browser: Browser, width: int, height: int, scheme: str = "light", media: str = "screen"
) -> Seen:
    page = browser.new_page(viewport={"width": width, "height": height})
    page.emulate_media(
        color_scheme="dark" if scheme == "dark" else "light",
        media="print" if media == "print" else "screen",
    )
    seen = Seen(page)
    page.on(
        "console",
        lambda message: (
            seen.errors.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto((finished_run() / "report.html").as_uri())
    return seen


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_fetches_nothing_logs_no_error_and_fits_the_screen(
    browser: Browser, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    seen = opened(browser, width, height, scheme)
    page = seen.page
    assert seen.errors == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, (
        "the page can be moved sideways"
    )
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark != "rgb(255, 255, 255)") == (scheme == "dark")
    page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    page.close()


def test_a_group_is_chosen_by_mouse_and_by_keyboard(browser: Browser) -> None:
    page = opened(browser, 1280, 800).page
    chapter = page.locator("section", has=page.locator("select.groups")).first
    choice = chapter.locator("select.groups")
    views = chapter.locator(".view")
    shown = [views.nth(k).is_visible() for k in range(views.count())]
    assert shown == [True] + [False] * 8
    choice.select_option(label=">50, F")
    assert views.nth(8).is_visible() and not views.nth(0).is_visible()
    choice.focus()
    page.keyboard.press("ArrowUp")
    assert views.nth(7).is_visible() and not views.nth(8).is_visible()
    for who in ("real people", "baseline", "supervised", "strong"):
        assert views.nth(7).locator("figure.map", has_text=who).is_visible()
    page.close()


def test_charts_have_descriptions_and_the_menu_is_not_printed(browser: Browser) -> None:
    page = opened(browser, 1280, 800).page
    unnamed = (
        "Array.from(document.querySelectorAll('svg[role=img]'))"
        ".filter(each => !each.getAttribute('aria-label')).length"
    )
    assert page.evaluate(unnamed) == 0
    assert page.evaluate("document.querySelectorAll('select:not([id])').length") == 0
    ids = page.evaluate("Array.from(document.querySelectorAll('[id]')).map(each => each.id)")
    assert len(ids) == len(set(ids))
    assert all(
        each in ids
        for each in page.evaluate(
            "Array.from(document.querySelectorAll('label')).map(each => each.htmlFor)"
        )
    )
    page.close()
    printed = opened(browser, 1000, 800, media="print").page
    assert not printed.locator("nav").is_visible() and printed.locator("h1").is_visible()
    printed.close()
