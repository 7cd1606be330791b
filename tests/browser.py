"""A real browser for the tests of pages: Debian's Chromium, driven by Playwright.

Without one these tests fail and say what installs it: a page that nobody opened is not tested.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Dialog, Page, expect, sync_playwright

# On a busy machine a page may take minutes: what it waits for fails by a page that is wrong.
PATIENCE_MS = 300_000
expect.set_options(timeout=PATIENCE_MS)
INSTALL = "there is no browser to open pages in: apt-get install chromium"


@contextmanager
def chromium() -> Iterator[Browser]:
    """The installed browser; a failure with the command that installs it where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.fail(INSTALL, pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=PATIENCE_MS
        )
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
        self._listeners: dict[str, Callable[[Any], None]] = {
            "console": lambda line: self.complaints.append(line.text),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": lambda request: self.requests.append(request.url),
            "dialog": self._dismiss,
        }
        for event, listener in self._listeners.items():
            page.on(event, listener)  # type: ignore[call-overload]
        page.goto(path.as_uri())

    def _dismiss(self, dialog: Dialog) -> None:
        self.complaints.append(dialog.message)
        dialog.dismiss()

    def clear(self) -> None:
        """Leave the page blank for the next file: without state, listeners and a pointer on it."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        if self.page.url.startswith("file:"):
            self.page.evaluate("localStorage.clear(), sessionStorage.clear()")
        self.page.emulate_media(media="null")
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")


# By browser and options: a page costs half a second of processor time, a file opened in it a fifth.
_pages: dict[tuple[Browser, str], Page] = {}


@contextmanager
def opened(browser: Browser, path: Path, **options: Any) -> Iterator[Opened]:
    """Open a file without network, in a page that files with the same options share in turn."""
    options.setdefault("viewport", {"width": 1280, "height": 900})
    key = (browser, repr(sorted(options.items())))
    page = _pages.pop(key, None) or browser.new_context(offline=True, **options).new_page()
    page.set_default_timeout(PATIENCE_MS)
    try:
        opened_file = Opened(page, path)
        yield opened_file
        opened_file.clear()
    except BaseException:
        page.context.close()
        raise
    _pages[key] = page


def serious_findings(page: Page) -> list[str]:
    """What axe finds that keeps people out, one line per rule with the first places."""
    from axe_playwright_python.sync_playwright import Axe

    # Of rules that hold it would name every node, which takes three quarters of the time.
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{violation['id']}: {violation['help']}: {[node['target'] for node in violation['nodes'][:3]]}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ]
