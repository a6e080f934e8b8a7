"""A running experiment on the live page: who serves when, and the receipt at its end."""

from __future__ import annotations

import json
from typing import Any

from browser import SMALL, Tab, assert_axe_finds_nothing_serious, in_a_browser

from tests.support.servers import Server

pytestmark = in_a_browser
JSON = {"Content-Type": "application/json"}
LINES = [["what", "A", "B"], ["<b>E2E</b> mean", "0.2", "0.1"], ["take B (A nobatch, B dynamic)"]]


def test_windows_and_the_receipt_are_shown_as_they_come(tab: Tab, server: Server) -> None:
    def send(method: str, path: str, **fields: Any) -> dict[str, Any]:
        return dict(server.send(method, path, json.dumps(fields).encode(), **JSON).json)

    page = tab.open()
    tab.until("document.querySelector('#status-text').textContent === 'live'")
    assert not page.is_visible("#experiment")
    lease = send("PUT", "/policy", policy="nobatch", for_s=600.0)["lease"]
    for policy in ("dynamic", "dynamic", "nobatch"):
        send("PUT", "/policy", policy=policy, for_s=600.0, lease=lease)
    tab.until("document.querySelectorAll('#experiment .windows i').length === 4")
    text = page.inner_text("#experiment")
    assert "nobatch serves now" in text
    assert "4 windows seen" in text
    colors = page.evaluate("[...document.querySelectorAll('#experiment .windows i')].map((i) => i.style.background)")
    assert colors[0] == colors[3] != colors[1] == colors[2]
    send("POST", "/policy/receipt", lease=lease, lines=LINES)
    send("DELETE", "/policy/lease")
    tab.until("document.querySelector('#experiment table')")
    assert page.inner_text("#experiment .verdict") == LINES[2][0]
    assert page.locator("#experiment td").all_text_contents() == LINES[1][1:]
    assert page.locator("#experiment b").count() == 0  # what was sent stays text
    page.set_viewport_size(SMALL)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert_axe_finds_nothing_serious(page)
    send("PUT", "/policy", policy="nobatch", for_s=600.0)  # another one
    tab.until("document.querySelectorAll('#experiment .windows i').length === 1")
    assert page.locator("#experiment table").count() == 0
    send("DELETE", "/policy/lease")
    tab.until("document.querySelector('#experiment').textContent.includes('ended without a receipt')")
