"""A headless Chromium, a server and a page for each test. Run apart from the other tests: `make test-browser`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.map_server import MapServer, map_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.map_page import MapPage

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW_TO_GET_IT = "no chromium on PATH; on Debian: apt-get install chromium"


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """The browser on PATH: Playwright's own downloads are not used."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        pytest.skip(HOW_TO_GET_IT)
    with sync_api.sync_playwright() as playwright:
        # no sandbox: it does not start for root, as whom containers run; the only pages are ours
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[MapServer]:
    with map_server() as running:
        yield running


@pytest.fixture
def block_map(chromium: Browser, server: MapServer) -> Iterator[MapPage]:
    """The page's tab, 1200 by 800, light; not yet opened. Any error on its console fails the test."""
    from tests.browser.map_page import MapPage

    context = chromium.new_context(viewport={"width": 1200, "height": 800}, color_scheme="light")
    context.set_default_timeout(20_000)
    tab = MapPage(context.new_page(), server)
    yield tab
    context.close()
    assert tab.errors == []
