"""The lab in a real browser: the same records as CPython, and a stranger's code that gets nowhere."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, assert_axe_finds_nothing_serious, in_a_browser, served

from simulate.arena import lab
from tests.support import ROOT, wait_until
from tests.support.servers import Server, clean_environment

BUILT = ROOT / "build" / "lab"
OWN = '''"""Shortest first."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return sorted(waiting, key=lambda seq: seq.max_tokens)
'''
ASKED = {"workload": "bursty", "count": 150, "rate": 6.0, "slots": 4, "seed": 1, "text": OWN}
ENDLESS = OWN.replace("return sorted", "while True: pass\n        return sorted")
DEAF = ENDLESS.replace(
    "while True: pass", "while True:\n            try: sum(iter(int, 1))\n            except BaseException: pass"
)
# A policy that gets past the law of imports, looks for any way from Python to JavaScript, and reports what it got.
PRISONER = """
from scheduling import policy
import collections

modules = collections._sys.modules
found = [name for name in ("js", "pyodide_js", "_pyodide_core") if modules.get(name) is not None]
for proxy in [thing for thing in modules['gc'].get_objects() if "Js" in type(thing).__name__ and not isinstance(thing, type)]:
    try:
        found.append(str(proxy.constructor.constructor("return typeof fetch")()))
    except Exception as error:
        if "EvalError" not in str(error) and not isinstance(error, AttributeError):
            found.append(repr(error))
raise Exception(f"found {found}")
"""

pytestmark = [*in_a_browser, pytest.mark.full]


@pytest.fixture(scope="module")
def built() -> Path:
    """Return the folder with a lab of the present sources."""
    if not (BUILT / "pyodide" / "version").is_file():
        pytest.skip("the lab is not built: dev/tools/build_lab.sh does it, with npm")
    subprocess.run([sys.executable, "dev/tools/pack_lab.py", str(BUILT)], cwd=ROOT, check=True, env=clean_environment())
    return BUILT


class Host(SimpleHTTPRequestHandler):
    """A static host that sends no headers of its own."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def host(built: Path) -> Iterator[Any]:
    with served(partial(Host, directory=str(built))) as server:
        yield server


@pytest.fixture
def tab(chromium: Any, host: Any) -> Iterator[Tab]:
    tab = Tab(chromium, host, viewport={"width": 1300, "height": 900})
    yield opened(tab)
    tab.close()


def opened(tab: Tab, path: str = "/") -> Tab:
    tab.open(path)
    tab.until("EB.lab.engine.state === 'ready'")
    return tab


def ask(tab: Tab, **asked: Any) -> str:
    return str(tab.page.evaluate("(question) => EB.lab.engine.ask(question)", asked))


def run(tab: Tab, text: str = OWN) -> str:
    """Race with this text in the editor; return the problem that is shown."""
    tab.page.fill("#text", text)
    tab.page.click("#run")
    tab.until("EB.lab.engine.state === 'ready'")
    return str(tab.page.text_content("#problem"))


def test_the_page_gives_the_records_of_cpython_byte_for_byte(tab: Tab, tmp_path: Path) -> None:
    zipfile.ZipFile(BUILT / "lab.zip").extractall(tmp_path)
    own = "my_policy.py"
    for name in ("nobatch", "static", "dynamic", "chunked", "tgi", "dynamic+srpt", "dynamic+vtc", "dynamic+edf", own):
        asked = {**ASKED, "kind": "records", "policies": [name]}
        here, there = ask(tab, **asked), lab.answer(json.dumps(asked), str(tmp_path))
        assert len(json.loads(there)) > 500, there[:300]
        assert here == there, name
    laws = {**ASKED, "kind": "laws", "cases": 40, "large": 0}
    assert ask(tab, **laws) == lab.answer(json.dumps(laws), str(tmp_path))
    assert tab.complaints == []


def test_a_race_shows_lanes_figures_and_a_sentence_for_each_step(tab: Tab) -> None:
    page = tab.page
    page.fill("#rate", "8")
    assert run(tab) == ""
    assert page.locator(".lane .badge").all_text_contents() == ["my-policy", "dynamic", "static"]
    assert page.locator("#figures tbody tr").count() == 3
    assert "same 40 requests" in str(page.text_content("#lead"))
    moment = page.evaluate(
        """() => {
          const { model, origin } = EB.race.lanes[0];
          const chosen = model.columns.find((_, k) => EB.captionsOf(model, k).some(({ text }) => / because #.* shortest of /.test(text)));
          return chosen.t - origin + 1e-9;
        }"""
    )
    page.evaluate("(moment) => (EB.race.clock = moment)", moment)
    tab.until("document.querySelector('.sentences').textContent.includes('and it was the shortest of')")
    tab.until("document.querySelector('#said').textContent.startsWith('my-policy: #')")
    page.click("#forward")
    step = page.evaluate("EB.race.clock")
    assert step > moment
    page.click("#decision")
    decided = page.evaluate("EB.race.clock")
    assert decided > step
    page.keyboard.press("ArrowRight")  # the button has the focus
    assert page.evaluate("EB.race.clock") > decided
    assert tab.complaints == []


def test_what_is_wrong_is_shown_at_its_line_and_the_page_stays_alive(tab: Tab) -> None:
    for text, line in (("class Policy(\n", 1), ("import time\n", 1), (OWN.replace("max_tokens", "size"), 8)):
        assert f"line {line}: " in run(tab, text)
        assert tab.page.text_content("#lines .wrong") == f"{line}\n"
    assert "MemoryError" in run(tab, "x = [0] * 10**9\n")
    assert run(tab) == ""
    tab.page.click("#laws")
    tab.until("EB.lab.engine.state === 'busy'")
    tab.until("EB.lab.engine.state === 'ready'", 240)
    assert "keeps every law" in str(tab.page.text_content("#verdict"))
    tab.page.select_option("#lesson", "sjf")
    tab.page.click("#laws")
    tab.until("document.querySelector('#verdict').textContent.includes('of 100 points')", 240)
    assert tab.page.evaluate("EB.lab.engine.restarts") == 2  # the laws were checked where no other code had run
    assert tab.complaints == []


def stops(tab: Tab, text: str) -> tuple[str, int]:
    """Stop a policy that does not end; return the problem that is shown, and the number of new workers."""
    before = tab.page.evaluate("EB.lab.engine.restarts")
    tab.page.fill("#text", text)
    tab.page.click("#run")
    tab.until("EB.lab.engine.state === 'busy'")
    tab.page.wait_for_timeout(300)
    tab.page.click("#stop")
    tab.until("document.querySelector('#problem').textContent")
    tab.until("EB.lab.engine.state === 'ready'")
    return str(tab.page.text_content("#problem")), tab.page.evaluate("EB.lab.engine.restarts") - before


def test_an_endless_loop_is_stopped_by_a_new_worker_on_any_host(tab: Tab) -> None:
    assert not tab.page.evaluate("crossOriginIsolated")
    problem, restarts = stops(tab, ENDLESS)
    assert "stopped" in problem
    assert restarts == 1
    assert run(tab) == ""


def test_the_server_isolates_the_page_so_that_a_loop_is_interrupted_at_its_line(
    chromium: Any, built: Path, tmp_path: Path
) -> None:
    with Server(tmp_path / "log", "--lab", "--max-batch-size", "8") as server:
        assert server.get("/stats").status == 200
        tab = opened(Tab(chromium, server), "/lab/")
        assert tab.page.evaluate("crossOriginIsolated")
        assert run(tab, ENDLESS).startswith("line 8: stopped")  # after five seconds, as on the command line
        problem, restarts = stops(tab, ENDLESS)
        assert problem.startswith("line 8: stopped")
        assert restarts == 0
        assert stops(tab, DEAF)[1] == 1  # a loop that catches everything ends with its worker
        assert run(tab) == ""
        assert tab.complaints == []
        tab.close()


def test_a_link_carries_policy_and_race_and_runs_nothing_by_itself(tab: Tab, chromium: Any, host: Any) -> None:
    page = tab.page
    page.fill("#text", PRISONER)
    page.fill("#count", "25")
    page.select_option("#workload", "orca")
    page.click("#share")
    tab.until("location.hash.length > 20")
    other = opened(Tab(chromium, host), "/" + page.evaluate("location.hash"))
    assert other.page.input_value("#text") == PRISONER
    assert other.page.input_value("#count") == "25"
    assert other.page.input_value("#workload") == "orca"
    assert other.page.is_visible("#banner")
    assert other.page.evaluate("EB.lab.engine.asked") == 0
    assert other.complaints == []
    other.page.click("#run")
    other.until("document.querySelector('#problem').textContent")
    assert "found []" in str(other.page.text_content("#problem"))
    other.close()
    page.fill("#text", OWN)
    page.evaluate(
        "async (race) => (location.hash = await EB.link.pack(race))",
        {"racers": ["nobatch"], "workload": "bell", "count": 26},
    )
    tab.until("document.querySelector('#count').value === '26'")
    assert page.input_value(".racer >> nth=0") == "nobatch"
    assert page.input_value("#workload") == "bell"
    assert page.input_value("#text") == OWN
    assert not page.is_visible("#banner")
    broken = opened(Tab(chromium, host), "/#never-a-policy")
    wait_until(lambda: "damaged" in str(broken.page.text_content("#banner")))
    broken.close()


def test_the_worker_has_no_network_and_evaluates_no_text(tab: Tab) -> None:
    """The walls below Python: of a worker made as the page makes its own."""
    found = tab.page.evaluate(
        """async () => {
          const source = `
            postMessage(await (async () => {
              let evaluated = "";
              try { new Function("return 1")(); evaluated = "yes"; } catch (error) { evaluated = error.name; }
              let other = "";
              try { await fetch("https://example.org/"); other = "yes"; } catch (error) { other = error.name; }
              return [evaluated, other];
            })())`;
          const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })), { type: "module" });
          return new Promise((resolve) => (worker.onmessage = ({ data }) => resolve(data)));
        }"""
    )
    assert found == ["EvalError", "TypeError"]


def test_a_policy_is_kept_downloaded_and_copied_from_those_that_are_shipped(tab: Tab, tmp_path: Path) -> None:
    page = tab.page
    page.select_option("#file", "policies/static.py")
    assert page.input_value("#text") == (ROOT / "policies" / "static.py").read_text("utf-8")
    assert page.evaluate("EB.lab.editor.area.readOnly")
    page.click("#copy")
    assert run(tab, page.input_value("#text")) == ""
    mine, _, static = page.locator("#figures tbody tr").all_text_contents()
    assert mine.removeprefix("my-policy") == static.removeprefix("static")
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "my_policy.py")
    assert (tmp_path / "my_policy.py").read_text("utf-8") == (ROOT / "policies" / "static.py").read_text("utf-8")
    page.reload()
    tab.until("EB.lab.engine.state === 'ready'")
    assert page.input_value("#text") == (ROOT / "policies" / "static.py").read_text("utf-8")
    page.fill("#text", "def f():")
    page.press("#text", "End")
    page.press("#text", "Enter")
    page.keyboard.type("pass")
    assert page.input_value("#text") == "def f():\n    pass"
    assert page.text_content("#lines") == "1\n2\n"


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (820, "light"), (1440, "dark")])
def test_axe_finds_nothing_serious_and_nothing_is_wider_than_the_window(
    chromium: Any, host: Any, width: int, scheme: str
) -> None:
    tab = opened(Tab(chromium, host, viewport={"width": width, "height": 800}, color_scheme=scheme))
    assert "line 1" in run(tab, "import time\n")
    assert run(tab) == ""
    assert tab.page.evaluate("document.documentElement.scrollWidth") == width
    assert_axe_finds_nothing_serious(tab.page)
    assert tab.complaints == []
    tab.close()
