"""The live page of a queue: nothing on it needs an engine of the server's own, and a banner names dead upstreams."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
from browser import SMALL, Tab, in_a_browser

from tests.support import ROOT, wait_until
from tests.support.servers import free_port

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def page(chromium: Any) -> Iterator[Any]:
    """Yield the page of a queue whose upstream cannot be reached."""
    port = free_port()
    queue = ["-m", "integrations.queue", "dynamic+vtc", "--upstream", "http://127.0.0.1:9", "--slots", "2"]
    command = [sys.executable, *queue, "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            wait_until(lambda: "queueing at" in process.stderr.readline())  # type: ignore[union-attr]
            tab = Tab(chromium, Namespace(port=port), viewport=SMALL)  # type: ignore[arg-type]
            tab.open()
            tab.until("document.body.classList.contains('queue')")
            yield tab
        finally:
            process.terminate()


@pytest.mark.parametrize("part", ["#load-form", "#prompt-form", "#tour-open", "#first-burst", "a[href=docs]"])
def test_what_needs_an_engine_of_its_own_is_hidden(page: Tab, part: str) -> None:
    assert not page.page.is_visible(part)


def test_the_banner_names_the_upstream_that_cannot_be_reached(page: Tab) -> None:
    wait_until(lambda: "127.0.0.1:9 cannot be reached since" in page.page.inner_text("#banner"))


def test_policies_that_differ_in_a_queue_come_first(page: Tab) -> None:
    first = page.page.evaluate("[...EB.page.card.boxes.keys()]")
    assert first == ["dynamic", "dynamic+sjf", "dynamic+vtc"]
    page.page.click("#policy")
    page.until("document.querySelectorAll('input[name=first]').length")
    assert page.page.input_value("input[name=first]:checked") == "dynamic+vtc"
    assert "clients get equal" in page.page.inner_text("#policy-menu")
