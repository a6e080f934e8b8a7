"""The lab's page without Pyodide: a stand-in for it hands each question to CPython, and computes forever where it is told to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
from browser import Tab, in_a_browser, served

from simulate.arena import lab
from tests.support import ROOT
from tests.support.servers import clean_environment

pytestmark = in_a_browser

OWN = '''"""Shortest first."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return sorted(waiting, key=lambda seq: seq.max_tokens)
'''
WRONG = OWN.replace("max_tokens", "size")
ENDLESS = OWN.replace("return", "while True: pass\n        return")
TALKATIVE = OWN + "# takes 7 s\n"
# What worker.js needs of Pyodide. It keeps XMLHttpRequest, which worker.js takes away.
STAND_IN = """
const Request = XMLHttpRequest;
export async function loadPyodide({ stderr }) {
  const until = (end, act) => { for (let next = 0; Date.now() < end; ) if (Date.now() > next) { act(); next = Date.now() + 500; } };
  const answer = (text) => {
    const { text: own = "" } = JSON.parse(text);
    if (own.includes("while True")) until(Infinity, () => {});
    if (own.includes("takes 7 s")) until(Date.now() + 7000, () => stderr("alive"));
    const asked = (method, path, body) => {
      const request = new Request();
      request.open(method, new URL(`../${path}`, import.meta.url), false);
      request.send(body);
      return request;
    };
    const job = asked("POST", "answer", text).responseText;
    for (;;) {
      const reply = asked("GET", `answer/${job}`);
      if (reply.status !== 202) return reply.responseText;
      stderr("alive");  // as Python says while it computes
    }
  };
  return { unpackArchive() {}, runPython() {}, pyimport: () => ({ answer }) };
}
"""


class Host(SimpleHTTPRequestHandler):
    """A static host, which also answers for the stand-in: later, as a busy machine may need more than five seconds."""

    pool = ThreadPoolExecutor(2)
    jobs: ClassVar[list[Future[str]]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked |= {"cases": 5, "large": 0}
        self.jobs.append(self.pool.submit(lab.answer, json.dumps(asked), self.directory))
        self._reply(200, str(len(self.jobs) - 1))

    def do_GET(self) -> None:
        _, found, job = self.path.partition("/answer/")
        if not found:
            super().do_GET()
            return
        one = self.jobs[int(job)]
        if wait([one], 0.5).done:
            self._reply(200, one.result())
        else:
            self._reply(202)

    def _reply(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("lab")
    subprocess.run(
        [sys.executable, "dev/tools/pack_lab.py", str(folder)], cwd=ROOT, check=True, env=clean_environment()
    )
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(folder / "lab.zip"), str(folder)], check=True)
    (folder / "pyodide").mkdir()
    (folder / "pyodide" / "pyodide.mjs").write_text(STAND_IN)
    Host.extensions_map[".mjs"] = "text/javascript"
    with served(partial(Host, directory=str(folder))) as server:
        yield server


@pytest.fixture
def tab(chromium: Any, host: Any) -> Iterator[Tab]:
    tab = Tab(chromium, host, viewport={"width": 1300, "height": 900})
    tab.open()
    tab.until("EB.lab.engine.state === 'ready'")
    yield tab
    tab.close()
    tab.check()


def run(tab: Tab, text: str = OWN) -> str:
    """Race with this text in the editor; return the problem that is shown."""
    tab.page.fill("#text", text)
    tab.page.click("#run")
    tab.until("EB.lab.engine.state === 'ready'")
    return str(tab.page.text_content("#problem"))


def test_a_race_of_an_older_text_is_grayed_and_goes_when_the_new_one_fails(tab: Tab) -> None:
    page = tab.page
    assert run(tab) == ""
    assert page.is_visible("#race")
    assert not page.is_visible("#older")
    page.fill("#text", WRONG)
    assert page.is_visible("#older")
    assert page.evaluate("getComputedStyle(document.querySelector('#race')).opacity") < "0.5"
    page.click("#run")
    tab.until("document.querySelector('#problem').textContent.startsWith('line 8: ')")
    assert not page.is_visible("#race")
    assert not page.is_visible("#older")
    assert run(tab) == ""
    assert page.is_visible("#race")
    assert page.evaluate("getComputedStyle(document.querySelector('#race')).opacity") == "1"


def test_a_check_after_a_race_is_made_by_a_worker_that_is_loaded_already(tab: Tab) -> None:
    page = tab.page
    assert run(tab) == ""
    tab.until("EB.lab.engine.spare?.isReady")
    page.evaluate(
        """() => {
          EB.seen = [];
          const { changed } = EB.lab.engine;
          EB.lab.engine.changed = (state) => { EB.seen.push(state); changed(state); };
        }"""
    )
    page.click("#laws")
    tab.until("document.querySelector('#verdict').textContent.includes('keeps every law')")
    assert page.evaluate("EB.lab.engine.restarts") == 1
    assert "loading" not in page.evaluate("EB.seen")


def test_a_slider_moves_boost_from_shortest_first_to_order_of_arrival_and_a_link_keeps_it(tab: Tab) -> None:
    page = tab.page
    assert run(tab) == ""
    assert not page.is_visible(".gamma")
    page.select_option(".racer >> nth=1", "dynamic+boost")
    assert run(tab) == ""
    assert page.text_content(".gamma output") == "γ estimated"

    def mean(exponent: str) -> float:
        """Return the mean latency that the table shows after the slider was moved there."""
        page.evaluate("EB.raced = EB.race.lanes")
        page.fill(".gamma input", exponent)
        tab.until("EB.race.lanes !== EB.raced && EB.lab.engine.state === 'ready'")
        cell = str(page.locator("#figures tbody tr").nth(1).locator("td").nth(2).text_content())
        return float(cell.split()[0]) / (1000 if "ms" in cell else 1)

    shortest, arrival = mean("-3"), mean("2")
    assert shortest < arrival
    assert page.text_content(".gamma output") == "γ 100 per second"
    page.click("#share")
    tab.until("location.hash.length > 2")
    page.reload()
    tab.until("EB.lab?.engine.state === 'ready'")
    page.evaluate("EB.lab.begun")
    assert page.text_content(".gamma output") == "γ 100 per second"


def test_a_hook_that_does_not_return_is_stopped_after_five_seconds_but_no_run_that_goes_on(tab: Tab) -> None:
    assert "stopped" in run(tab, ENDLESS)
    assert tab.page.evaluate("EB.lab.engine.restarts") == 1
    assert run(tab, TALKATIVE) == ""
    assert tab.page.evaluate("EB.lab.engine.restarts") == 1
