"""A page in a real browser, where there is one."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import wait_until
from tests.support.servers import Server

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_BROWSER = "no Chromium here: install one (Debian: apt install chromium) to test the live page"
needs_browser = pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
in_a_browser = [pytest.mark.process, needs_browser]


WINDOW = {"width": 1300, "height": 900}
SMALL = {"width": 360, "height": 740}
# Five frames a second are enough for all tests but that of smoothness.
CALMLY = """(() => {
  const draw = requestAnimationFrame;
  globalThis.requestAnimationFrame = (act) => setTimeout(() => draw(act), 200);
})()"""


class Tab:
    """A page, and what must not happen on it: errors, and requests to somebody else."""

    def __init__(
        self, browser: Any, server: Server, *, is_calm: bool = True, viewport: Any = None, **media: str
    ) -> None:
        # Pages of one context share a process, which takes longer to begin than they do.
        self.context = browser.contexts[0] if browser.contexts else browser.new_context()
        self.page = self.context.new_page()
        self.page.set_default_timeout(300_000)
        self.page.emulate_media(**media)
        if viewport is not None:
            self.page.set_viewport_size(viewport)
        if is_calm:
            self.page.add_init_script(CALMLY)
        self.url = f"http://127.0.0.1:{server.port}"
        self.complaints: list[str] = []
        self.expected: list[str] = []  # parts of complaints that a test brings about
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} ({message.location['url']})")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url + "/", "data:", "blob:")):
            self.complaints.append(f"asked {request.url}")

    def check(self) -> None:
        """Fail if there was a complaint that no test expected."""
        assert [said for said in self.complaints if not any(part in said for part in self.expected)] == []

    def close(self) -> None:
        """Close the page, and forget what it has stored."""
        origin = {"origin": self.url, "storageTypes": "all"}
        self.context.new_cdp_session(self.page).send("Storage.clearDataForOrigin", origin)
        self.page.close()

    def open(self, path: str = "/") -> Any:
        self.page.goto(self.url + path)
        return self.page

    def replay(self, records: list[dict[str, Any]], folder: Path) -> Any:
        """Let the live page replay these records."""
        path = folder / "run.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        self.page.set_input_files("#file", path)
        self.until("EB.page.model !== EB.page.live")
        return self.page

    def until(self, condition: str, seconds: float = 300.0) -> None:
        """Ask again and again; playwright's own waiting would need eval, which the page forbids."""
        wait_until(lambda: self.page.evaluate(f"Boolean({condition})"), seconds)


@contextmanager
def served(handler: Any) -> Iterator[Any]:
    """Serve HTTP on a free port with such a handler; yield what has the `port`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield SimpleNamespace(port=server.server_port)
        server.shutdown()
        thread.join()


def send_load(tab: Tab, count: int = 30, least: int = 4) -> Any:
    """Send a burst from the page, and wait for its card."""
    page = tab.open()
    for field, value in (("load-count", count), ("load-min", least), ("load-max", 40)):
        page.fill(f"#{field}", str(value))
    page.click("#burst")
    tab.until("EB.page.card.answer")
    return page


def assert_axe_finds_nothing_serious(page: Any) -> None:
    """Fail with the rules that a page breaks and the elements that do; skip where axe is not installed."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed: dev/tools/setup.sh dev does it"
    )
    serious = [
        (found["id"], [node["html"][:90] for node in found["nodes"][:4]])
        for found in axe.Axe().run(page).response["violations"]
        if found["impact"] in ("serious", "critical")
    ]
    assert serious == []
