"""A headless Chromium for the tests of pages; tests skip where there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def opened_page(address: str, width: int = 1000, height: int = 760) -> Iterator:
    """A page of Playwright's at an address; errors of its scripts fail the test, as do requests elsewhere."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        mistakes, requests = [], []
        page.on("pageerror", lambda error: mistakes.append(str(error)))
        page.on("console", lambda line: mistakes.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        yield page
        browser.close()
    origin = "/".join(address.split("/")[:3])
    assert not mistakes
    assert requests and all(url.startswith((origin, "data:", "blob:")) for url in requests), requests
