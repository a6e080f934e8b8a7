"""A server, a browser and a page in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import BROWSER, Tab
from support import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--model", "mock:llm-mock@5", "--max-batch-size", "8")
    with Server(log, "static", *flags, "--dashboard-show-text", "on") as server:
        yield server


# Of each file, not of the session: playwright's event loop runs as long, and asyncio.run fails beside it in the tests of
# other files.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: tools/setup.sh requirements-dev.txt does it"
    )
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def reader(chromium: Any, server: Server) -> Iterator[Any]:
    """Return a page whose functions tests call; none of them changes it, and it shows nothing of the server."""
    tab = Tab(chromium, server)
    page = tab.open()
    tab.until("globalThis.EB && EB.page")
    page.evaluate("EB.page.feed.stop()")
    yield page
    tab.context.close()
    assert tab.complaints == []


@pytest.fixture
def tab(chromium: Any, server: Server) -> Iterator[Tab]:
    tab = Tab(chromium, server, viewport={"width": 1300, "height": 900})
    yield tab
    tab.context.close()
