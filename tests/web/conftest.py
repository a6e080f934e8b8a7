"""A server, a browser and pages in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from browser import BROWSER, WINDOW, Tab

from tests.support.servers import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--model", "mock:llm-mock@3", "--max-batch-size", "8")
    with Server(log, "static", *flags, "--dashboard-show-text", "on") as server:
        yield server


running = ExitStack()


@cache
def launched() -> Any:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: dev/tools/setup.sh dev does it"
    )
    playwright = running.enter_context(api.sync_playwright())
    args = ["--no-sandbox", "--renderer-process-limit=1"]
    return running.enter_context(playwright.chromium.launch(executable_path=BROWSER, args=args))


@cache
def shown(server: Server) -> Tab:
    """Return the live page that the tests of a server share: to load it takes longer than most of them."""
    tab = Tab(launched(), server, viewport=WINDOW)
    tab.open()
    return tab


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the browser with the last test of this folder: beside playwright's event loop, asyncio.run fails elsewhere."""
    try:
        yield
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            running.close()
            launched.cache_clear()
            shown.cache_clear()


@pytest.fixture(scope="module")
def chromium() -> Any:
    return launched()


@pytest.fixture
def live(server: Server) -> Iterator[Tab]:
    """Return the page that tests share, live again; who changes more of it than the run shown uses `tab`."""
    tab = shown(server)
    tab.until("globalThis.EB && EB.page")
    tab.page.evaluate("EB.page.show(EB.page.live, '')")
    tab.until("document.querySelector('#status-text').textContent === 'live'")
    tab.complaints.clear()
    tab.expected.clear()
    yield tab
    tab.check()


@pytest.fixture(scope="module")
def reader(server: Server) -> Any:
    """Return a page whose functions tests call; none of them changes it."""
    tab = shown(server)
    tab.until("globalThis.EB && EB.page")
    return tab.page


@pytest.fixture
def tab(chromium: Any, server: Server) -> Iterator[Tab]:
    """Return a page of the test's own, which it opens."""
    tab = Tab(chromium, server, viewport=WINDOW)
    yield tab
    tab.close()
    tab.check()
