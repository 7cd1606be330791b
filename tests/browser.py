"""A real browser for the tests of pages: Debian's Chromium, driven by Playwright.

Without one these tests fail and say what installs it: a page that nobody opened is not tested.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

INSTALL = "there is no browser to open pages in: apt-get install chromium"


@contextmanager
def chromium() -> Iterator[Browser]:
    """The installed browser; a failure with the command that installs it where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.fail(INSTALL, pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Opened:
    """A page from a file, with what it complained about and what it asked the network for."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda said: self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.as_uri())


@contextmanager
def opened(browser: Browser, path: Path, **options: Any) -> Iterator[Opened]:
    """The page in a context of its own, without network; options are those of the context."""
    options.setdefault("viewport", {"width": 1280, "height": 900})
    context = browser.new_context(offline=True, **options)
    try:
        yield Opened(context.new_page(), path)
    finally:
        context.close()


def serious_findings(page: Page) -> list[str]:
    """What axe finds that keeps people out, one line per rule with the first places."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {[node['target'] for node in each['nodes'][:3]]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
