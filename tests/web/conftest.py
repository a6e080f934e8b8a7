"""A server, a browser and a page in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
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


running = ExitStack()


@cache
def launched() -> Any:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: tools/setup.sh requirements-dev.txt does it"
    )
    playwright = running.enter_context(api.sync_playwright())
    args = ["--no-sandbox", "--renderer-process-limit=1"]
    return running.enter_context(playwright.chromium.launch(executable_path=BROWSER, args=args))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the browser with the last test of this folder: beside playwright's event loop, asyncio.run fails elsewhere."""
    try:
        yield
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            running.close()
            launched.cache_clear()


@pytest.fixture(scope="module")
def chromium() -> Any:
    return launched()


@pytest.fixture(scope="module")
def reader(chromium: Any, server: Server) -> Iterator[Any]:
    """Return a page whose functions tests call; none of them changes it, and it shows nothing of the server."""
    tab = Tab(chromium, server)
    page = tab.open()
    tab.until("globalThis.EB && EB.page")
    page.evaluate("EB.page.feed.stop()")
    yield page
    tab.close()
    assert tab.complaints == []


@pytest.fixture
def tab(chromium: Any, server: Server) -> Iterator[Tab]:
    tab = Tab(chromium, server, viewport={"width": 1300, "height": 900})
    yield tab
    tab.close()
