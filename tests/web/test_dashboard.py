"""The live page: its files by HTTP, and itself in a real browser, where there is one."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import drive, requests, scheduler
from support import ROOT, FakeModel, Server, clean_environment, fake_engine, wait_until

from api.demo import arrivals
from api.schemas.demo import LoadRequest
from app import create_app
from client.report import race, store
from config import Config

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_BROWSER = "no Chromium here: install one (Debian: apt install chromium) to test the live page"
needs_browser = pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
SHADOW = {
    "policy": "static", "served": "dynamic", "state": "ready", "requests": 1312, "latency-p50": 1.5,
    "latency-p99": 3.2, "latency-per-token": 0.04, "from_idle": False, "extrapolates": True,
    "real": {"latency-p50": 0.4, "latency-p99": 0.8, "latency-per-token": 0.02},
    "served-simulated": {"latency-p50": 0.41, "latency-p99": 0.9, "latency-per-token": 0.02},
    "error": {"latency-p50": 0.02, "latency-p99": 0.125, "latency-per-token": 0.0},
    "cost": {"from": "steps of this server"},
}  # fmt: skip
THREE = ["nobatch", "static", "dynamic"]
LOADS = ["poisson:40", "burst"]
HTML = {"Accept": "text/html,application/xhtml+xml"}


# The files


def test_a_browser_gets_the_page_and_everybody_else_json() -> None:
    client = create_app(Config(), fake_engine(FakeModel())).test_client()
    page = client.get("/", headers=HTML)
    assert page.mimetype == "text/html"
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    assert page.headers["Vary"] == "Accept"
    assert client.get("/").get_json()["status"] == "ok"
    assert client.get("/", headers={"Accept": "*/*"}).get_json()["status"] == "ok"


def test_the_page_needs_no_key_and_all_that_tells_something_does() -> None:
    client = create_app(Config(api_key="k")).test_client()
    assert client.get("/", headers=HTML).status_code == 200
    assert client.get("/web/live.js").status_code == 200
    assert client.get("/race").status_code == 200
    for path in ("/", "/events", "/load"):
        assert client.get(path).status_code == 401


def test_only_files_of_the_page_are_served() -> None:
    client = create_app(Config()).test_client()
    first = client.get("/web/model.js")
    assert first.mimetype == "text/javascript"
    again = client.get("/web/model.js", headers={"If-None-Match": first.headers["ETag"]})
    assert again.status_code == 304
    for path in ("/web/../app.py", "/web/%2e%2e/app.py", "/web//etc/passwd", "/web/none.js", "/web/demo"):
        assert client.get(path).status_code == 404, path


def test_the_page_names_no_other_host() -> None:
    ours = [p for p in (ROOT / "web").rglob("*") if p.suffix in (".html", ".js", ".css", ".svg")]
    assert len(ours) > 8
    for path in ours:
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        text = text.replace("https://github.com/leeoniya/uPlot", "")  # in its comment
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]{2,}", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_a_load_is_the_same_for_the_same_seed_and_poisson() -> None:
    params = LoadRequest(count=400, rate=50, min_tokens=5, max_tokens=9, seed=3)
    plan = arrivals(params)
    assert plan == arrivals(params)
    gaps = [b.at - a.at for a, b in itertools.pairwise(plan)]
    assert 0.8 / 50 < sum(gaps) / len(gaps) < 1.2 / 50
    assert {arrival.num_tokens for arrival in plan} == {5, 6, 7, 8, 9}
    assert {arrival.at for arrival in arrivals(LoadRequest(count=7))} == {0.0}


@pytest.mark.parametrize("fields", [{"count": 401}, {"rate": -1}, {"count": True}, {"max_tokens": 0}])
def test_a_load_is_bounded(fields: dict[str, Any]) -> None:
    client = create_app(Config(), fake_engine(FakeModel())).test_client()
    assert client.post("/load", json=fields).status_code == 400
    assert client.get("/load").get_json()["active"] is False


def test_a_load_counts_its_answers_and_rejections() -> None:
    app = create_app(Config(), fake_engine(FakeModel(), max_batch_size=2, max_queue=6))
    client = app.test_client()
    fields = {"count": 20, "min_tokens": 3, "max_tokens": 6, "seed": 7}
    first = client.post("/load", json=fields).get_json()
    assert (first["total"], first["seed"]) == (20, 7)
    wait_until(lambda: not client.get("/load").get_json()["active"])
    last = client.get("/load").get_json()
    assert last["sent"] == last["done"] + last["failed"] == 20
    assert last["done"] >= 6


def test_a_load_that_is_stopped_sends_no_more_and_lets_another_start() -> None:
    client = create_app(Config(), fake_engine(FakeModel())).test_client()
    slow = {"count": 400, "rate": 0.001}
    assert client.post("/load", json=slow).get_json()["active"] is True
    assert client.post("/load", json=slow).status_code == 429
    assert client.delete("/load").status_code == 200
    wait_until(lambda: not client.get("/load").get_json()["active"])
    assert client.get("/load").get_json()["sent"] == 0
    assert client.post("/load", json={"count": 1, "max_tokens": 8}).status_code == 200


# The page itself


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--model", "mock:llm-mock@5", "--max-batch-size", "8")
    with Server(log, "static", *flags, "--dashboard-show-text", "on") as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: tools/setup.sh requirements-dev.txt does it"
    )
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page, and what must not happen on it: errors, and requests to somebody else."""

    def __init__(self, browser: Any, server: Server, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.url = f"http://127.0.0.1:{server.port}"
        self.complaints: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url + "/", "data:", "blob:")):
            self.complaints.append(f"asked {request.url}")

    def open(self, path: str = "/") -> Any:
        self.page.goto(self.url + path)
        return self.page

    def until(self, condition: str, seconds: float = 30.0) -> None:
        """Ask again and again; playwright's own waiting would need eval, which the page forbids."""
        wait_until(lambda: self.page.evaluate(f"Boolean({condition})"), seconds)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a real comparison of three policies under two loads."""
    folder = tmp_path_factory.mktemp("results")
    command = [
        sys.executable, "-m", "client.compare", *THREE, "--model", "mock:llm-mock@100",
        "--load-format", "auto", "--numsamples", "7", "--load", *LOADS, "--seed", "1", "--warmup", "5",
        "--server=--max-batch-size 4", "--no-plots", "--out", str(folder), "--name", "x",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr.decode()
    return folder / "x"


@pytest.fixture
def tab(chromium: Any, server: Server) -> Iterator[Tab]:
    tab = Tab(chromium, server, viewport={"width": 1300, "height": 900})
    yield tab
    tab.context.close()


@pytest.mark.process
@needs_browser
class TestInABrowser:
    def test_it_is_live_and_shows_what_runs(self, tab: Tab) -> None:
        page = tab.open()
        tab.until("document.querySelector('#status-text').textContent === 'live'")
        page.fill("#load-count", "30")
        page.click("#burst")
        tab.until("EB.page.live.columns.length > 10")
        tab.until("document.querySelectorAll('#rows tr').length > 20")
        assert page.text_content("#policy") == "static"
        tab.until("document.querySelector('#load-state').textContent === '30 of 30 answered'", 30)
        shares = page.locator("#waste-legend b").all_text_contents()
        assert sum(int(share.split()[0]) for share in shares) == 100
        assert tab.complaints == []

    def test_its_badge_tells_a_change_of_policy_at_once(self, tab: Tab, server: Server) -> None:
        page = tab.open()
        tab.until("document.querySelector('#status-text').textContent === 'live'")
        json_body = {"Content-Type": "application/json"}
        for policy in ("nobatch", "static"):
            body = f'{{"policy": "{policy}"}}'.encode()
            assert server.send("PUT", "/policy", body, **json_body).status == 200
            tab.until(f"document.querySelector('#policy').textContent === '{policy}'")
        assert page.title().startswith("static")
        assert tab.complaints == []

    def test_the_box_streams_an_answer_and_text_stays_text(self, tab: Tab) -> None:
        page = tab.open()
        prompt = "<img src=x onerror=alert(1)> O Romeo"
        page.fill("#prompt", prompt)
        page.fill("#tokens", "30")
        page.click("#send")
        tab.until("!document.querySelector('#send').disabled && document.querySelector('#cancel').disabled")
        answer = page.text_content("#answer")
        assert answer.startswith(prompt)
        assert len(answer) > len(prompt)
        tab.until("document.querySelector('#rows').textContent.includes('<img src=x')")
        tab.until("document.querySelector('#detail').textContent.includes('finished: length')")
        assert page.locator("#rows img, #detail img, #answer img").count() == 0
        assert tab.complaints == []

    def test_it_pauses_steps_and_is_moved_by_keys(self, tab: Tab, server: Server) -> None:
        server.post(prompt="ROMEO:", num_tokens=12)
        page = tab.open()
        tab.until("EB.page.live.columns.length > 5")
        page.focus("#picture")
        page.keyboard.press("Space")
        before = page.evaluate("EB.page.index")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("EB.page.index") == before - 2
        assert page.text_content("#inspect").startswith("slot 0: #")
        assert page.text_content("#status-text") == "paused"
        page.keyboard.press("Enter")
        assert page.is_visible("#detail")
        page.keyboard.press("Space")
        tab.until("EB.page.cursor === -1")
        assert tab.complaints == []

    def test_it_finds_the_server_again(self, chromium: Any, tmp_path: Path) -> None:
        flags = ("--model", "bard", "--compute-threads", "1", "--max-batch-size", "4")
        with Server(tmp_path / "log", "dynamic", *flags) as server:
            tab = Tab(chromium, server)
            page = tab.open()
            tab.until("document.querySelector('#status-text').textContent === 'live'")
            server.post(prompt="ROMEO:", num_tokens=20)
            tab.until("EB.page.live.columns.length === 20")
            server.stop()
            tab.until("!document.querySelector('#banner').hidden")
            assert "econnecting" in page.text_content("#banner")
            server.start().wait()
            tab.until("document.querySelector('#banner').hidden")
            server.post(prompt="ROMEO:", num_tokens=7)
            tab.until("EB.page.live.columns.length === 7")
            tab.context.close()

    @pytest.mark.parametrize("policy", ["static", "dynamic", "chunked"])
    def test_what_is_drawn_is_what_happened(self, tab: Tab, tmp_path: Path, policy: str) -> None:
        trace = [(i * 7, 3 + i * 5 % 40, 1 + i * 11 % 23) for i in range(40)]
        run = drive(scheduler(policy, 6, budget=32), requests(*trace))
        records = run.records()
        path = tmp_path / "iterations.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        page = tab.open()
        page.set_input_files("#file", path)
        tab.until("EB.page.model !== EB.page.live")
        shown = page.evaluate("EB.page.model.count()")
        wanted = Counter(m["phase"] for record in records for m in record["members"])
        paused = wanted.pop("idle", 0)
        slots = sum(round(sum(record["slot_steps"].values())) for record in records)
        wanted["idle"] = slots - paused - sum(wanted.values())
        cells = shown["cells"]
        assert {kind: cells[kind] for kind in ("prefill", "decode", "held", "idle")} == {
            kind: wanted[kind] for kind in ("prefill", "decode", "held", "idle")
        }
        assert cells["paused"] == paused
        assert cells["joined"] == cells["left"] == len(trace)
        for kind, share in shown["steps"].items():
            total = sum(record["slot_steps"][kind] for record in records)
            assert share == pytest.approx(total), kind
        page.select_option("#axis", "time")
        page.evaluate("EB.page.show(EB.page.model, 'x')")
        assert tab.complaints == []

    @pytest.mark.parametrize(
        ("path", "opened"), [("/", "EB.page.model !== EB.page.live"), ("/race", "EB.race.lanes.length === 1")]
    )
    def test_a_run_may_be_dropped_on_the_page(self, tab: Tab, path: str, opened: str) -> None:
        run = drive(scheduler("static", 4), requests((0, 5, 3), (0, 9, 8)))
        page = tab.open(path)
        assert page.locator("#drop").is_hidden()
        page.evaluate(
            """text => {
                const dataTransfer = new DataTransfer();
                dataTransfer.items.add(new File([text], "run.jsonl"));
                for (const kind of ["dragover", "drop"])
                    document.dispatchEvent(new DragEvent(kind, {dataTransfer, cancelable: true}));
            }""",
            "".join(json.dumps(record) + "\n" for record in run.records()),
        )
        tab.until(opened)
        assert page.locator("#drop").is_hidden()
        assert tab.complaints == []

    def test_every_cell_of_a_short_run_is_painted(self, tab: Tab, tmp_path: Path) -> None:
        run = drive(scheduler("static", 4), requests((0, 5, 3), (0, 9, 8), (1, 2, 6)))
        path = tmp_path / "short.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in run.records()))
        page = tab.open()
        page.set_input_files("#file", path)
        tab.until("EB.page.model !== EB.page.live")
        page.focus("#seek")
        page.keyboard.press("End")
        tab.until("EB.page.index === EB.page.model.columns.length - 1")
        tab.until("EB.page.picture.to === EB.page.index")
        cells = page.evaluate("EB.page.model.count().cells")
        assert page.evaluate("EB.page.picture.cells") == sum(
            cells[kind] for kind in ("prefill", "decode", "held", "paused")
        )

    def test_the_race_shows_the_recorded_runs_in_step(self, tab: Tab) -> None:
        page = tab.open("/race")
        tab.until("EB.race.lanes.length === 2")
        page.evaluate("EB.race.clock = 1e9")
        tab.until("[...document.querySelectorAll('.done')].every((e) => e.textContent.includes('finished in'))")
        answered = page.locator(".figures span:first-child b").all_text_contents()
        assert len(set(answered)) == 1
        assert tab.complaints == []

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("path", ["/", "/race"])
    def test_it_fits_a_small_screen_and_axe_finds_nothing_serious(
        self, chromium: Any, server: Server, scheme: str, path: str
    ) -> None:
        axe = pytest.importorskip(
            "axe_playwright_python.sync_playwright",
            reason="axe is not installed: tools/setup.sh requirements-dev.txt does it",
        )
        server.post(prompt="ROMEO:", num_tokens=12)
        tab = Tab(chromium, server, viewport={"width": 360, "height": 740}, color_scheme=scheme)
        page = tab.open(path)
        tab.until("document.querySelectorAll('#rows tr, .lane').length > 0")
        if path == "/":
            page.click(".who")
            tab.until("!document.querySelector('#detail').hidden")
            page.evaluate(f"EB.page.feed.handlers.shadow({json.dumps(SHADOW)})")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        found = axe.Axe().run(page).response["violations"]
        serious = [
            (v["id"], [node["html"][:90] for node in v["nodes"][:4]])
            for v in found
            if v["impact"] in ("serious", "critical")
        ]
        assert serious == []
        assert tab.complaints == []
        tab.context.close()

    def test_64_slots_at_speed_stay_smooth_and_small(self, tab: Tab) -> None:
        page = tab.open()
        tab.until("globalThis.EB && EB.page")
        page.evaluate(
            """() => {
              const model = EB.page.live;
              model.clear();
              globalThis.feedOn = (count) => {
                for (let k = 0; k < count; k++) {
                  const n = (model.last?.n ?? 0) + 1;
                  const members = Array.from({ length: 64 }, (_, slot) => {
                    const age = (n + slot * 7) % 90;
                    return { id: `r${slot}-${Math.floor((n + slot * 7) / 90)}`, slot, tokens: 1,
                      phase: age ? "decode" : "prefill", computed: age + 1, total: 90 };
                  });
                  const joined = members.filter((m) => m.phase === "prefill").map((m) => m.id);
                  const left = members.filter((m) => m.computed === 90).map((m) => ({ id: m.id, reason: "length" }));
                  model.add({ n, t: n * 0.02, seconds: 0.02, policy: "x", queue: n % 50, members, joined, left,
                    slot_steps: { useful: 64, padding: 0, held: 0, idle: 0, recomputed: 0 },
                    pages: { used: 1, total: 2 } });
                }
              };
            }"""
        )
        client = page.context.new_cdp_session(page)

        def heap() -> int:
            client.send("HeapProfiler.collectGarbage")
            return int(client.send("Runtime.getHeapUsage")["usedSize"])

        before = heap()
        page.evaluate("feedOn(3000)")
        page.evaluate("EB.page.frames.length = 0")
        page.evaluate(
            """async () => {
              for (let k = 0; k < 40; k++) {
                feedOn(1);
                await new Promise((done) => setTimeout(done, 20));
              }
            }"""
        )
        frames = sorted(page.evaluate("EB.page.frames"))
        assert len(frames) > 5
        # The quickest: the others wait for their turn where other programs use the processor.
        assert frames[0] < 1000 / 30, "a frame takes too long to draw"
        for _ in range(30):  # ten minutes at 50 a second
            page.evaluate("feedOn(1000)")
        assert page.evaluate("EB.page.live.columns.length") < 3000
        assert page.evaluate("EB.page.live.last.n") > 30_000
        assert heap() - before < 20e6
        assert tab.complaints == []

    def test_it_says_what_the_shadow_says(self, tab: Tab) -> None:
        page = tab.open()
        tab.until("document.querySelector('#status-text').textContent === 'live'")
        assert not page.is_visible("#shadow")
        report = copy.deepcopy(SHADOW)
        page.evaluate(f"EB.page.feed.handlers.shadow({json.dumps(report)})")
        assert page.text_content("#shadow-says") == (
            "Estimated p99 with static: 3.20 s. Measured with dynamic: 800 ms (simulated: 900 ms)."
        )
        assert page.locator("#shadow-rows tr").nth(1).locator("td").all_text_contents() == [
            "800 ms", "900 ms", "3.20 s"
        ]  # fmt: skip
        assert "13 % off" in page.text_content("#shadow-basis")
        report["error"]["latency-p99"] = -0.6
        page.evaluate(f"EB.page.feed.handlers.shadow({json.dumps(report)})")
        assert "compare only the two simulated" in page.text_content("#shadow-says")
        waiting = {"policy": "static", "served": "dynamic", "state": "waiting", "requests": 0}
        page.evaluate(f"EB.page.feed.handlers.shadow({json.dumps(waiting)})")
        assert not page.is_visible("#shadow-table")
        assert tab.complaints == []

    def test_a_request_that_waits_at_the_moment_shown_has_waited_as_long_as_it_is_there(
        self, tab: Tab, tmp_path: Path
    ) -> None:
        run = drive(scheduler("static", 2), requests((0, 5, 9), (0, 5, 9), (1, 5, 3)))
        path = tmp_path / "wait.jsonl"
        arrivals = [
            {"id": s.id, "t": s.arrived_at, "prompt_tokens": 5, "max_tokens": s.max_tokens} for s in run.sequences
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in arrivals + run.records()))
        page = tab.open()
        page.set_input_files("#file", path)
        tab.until("EB.page.model !== EB.page.live")
        page.focus("#seek")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        tab.until("document.querySelector('#rows').textContent.includes('waiting')")
        cells = page.locator("#rows tr", has_text="waiting").locator("td").all_text_contents()
        assert cells[4] == cells[5]

    def test_a_race_of_live_servers_shows_each_with_its_policy(self, tab: Tab, server: Server, tmp_path: Path) -> None:
        flags = ("--model", "mock:llm-mock@50", "--max-batch-size", "4")
        with Server(tmp_path / "log", "dynamic", *flags) as other:
            page = tab.open(f"/race?run={tab.url}&run=http://127.0.0.1:{other.port}")
            for one in (server, other):
                one.post(prompt="hi", num_tokens=9)
            tab.until("EB.race.lanes.every((lane) => lane.model.columns.length >= 9)")
            assert page.locator(".lane .badge").all_text_contents() == ["static", "dynamic"]
            tab.until("[...document.querySelectorAll('.figures span:first-child b')].every((e) => +e.textContent >= 1)")
            assert not page.is_visible("#seek")
            named = f"asked http://127.0.0.1:{other.port}/events?"  # it alone, as the address asks for
            assert [said for said in tab.complaints if not said.startswith(named)] == []

    def test_the_race_within_a_report_needs_no_server(self, chromium: Any, tmp_path: Path) -> None:
        runs = {
            policy: drive(scheduler(policy, 4), requests((0, 5, 3), (0, 9, 8), (1, 2, 6))).records()
            for policy in ("static", "dynamic")
        }
        path = tmp_path / "report.html"
        races = {"a <burst>": runs, "another": runs}
        path.write_text(f"<!doctype html><title>x</title>{race.section(races)}")
        page = chromium.new_page()
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        page.goto(path.as_uri())
        wait_until(lambda: len(page.frames) == 2)
        frame = page.frames[1]
        wait_until(lambda: frame.evaluate("globalThis.EB?.race?.lanes.length") == 2, 15)
        assert frame.locator(".badge").all_text_contents()[1:] == ["static", "dynamic"]
        frame.evaluate("EB.race.clock = 1e9")
        wait_until(lambda: frame.locator(".done", has_text="finished in").count() == 2)
        assert frame.locator(".figures span:first-child b").all_text_contents() == ["3 of 3"] * 2
        assert frame.locator("#load option").all_text_contents() == ["a <burst>", "another"]
        assert said == [path.as_uri()]
        page.close()

    def test_a_comparison_is_raced_load_by_load(self, tab: Tab, comparison: Path) -> None:
        page = tab.open("/race")
        page.set_input_files("#files", comparison / "iterations.jsonl")
        tab.until("EB.race.lanes.length === 3")
        assert page.locator("#load option").all_text_contents() == LOADS
        firsts = set()
        for load in LOADS:
            page.select_option("#load", load)
            assert page.locator(".lane .badge").all_text_contents() == THREE
            assert "7 requests of the same lengths" in str(page.text_content("#lead"))
            page.evaluate("EB.race.clock = 1e9")
            tab.until("document.querySelectorAll('.done:not(:empty)').length === 3")
            answered = page.locator(".figures span:first-child b").all_text_contents()
            assert answered == ["7 of 7"] * 3
            firsts.add(page.evaluate("EB.race.lanes[0].origin"))
        assert len(firsts) == 2
        assert tab.complaints == []

    def test_a_report_races_every_policy_under_every_load(self, chromium: Any, comparison: Path) -> None:
        path = comparison / "race.html"
        path.write_text(f"<!doctype html><title>x</title>{race.embed(store.read(comparison))}")
        page = chromium.new_page()
        page.goto(path.as_uri())
        wait_until(lambda: len(page.frames) == 2)
        frame = page.frames[1]
        wait_until(lambda: frame.evaluate("globalThis.EB?.race?.lanes.length") == 3, 15)
        assert frame.locator("#load option").all_text_contents() == LOADS
        frame.select_option("#load", LOADS[1])
        assert frame.locator(".lane .badge").all_text_contents() == THREE
        page.close()

    def test_runs_of_different_requests_are_not_called_the_same(self, tab: Tab, tmp_path: Path) -> None:
        page = tab.open("/race")
        tab.until("EB.race.lanes.length === 2")
        assert "Each lane serves the same" in str(page.text_content("#lead"))  # by id and length
        for policy, tokens in (("static", 3), ("dynamic", 4)):
            records = drive(scheduler(policy, 4), requests((0, 5, tokens), (0, 9, 8))).records()
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (tmp_path / f"{policy}.jsonl").write_text(lines)
        page.set_input_files("#files", [tmp_path / "static.jsonl", tmp_path / "dynamic.jsonl"])
        tab.until("EB.race.lanes[0].total === 2")
        lead = str(page.text_content("#lead"))
        assert "different requests" in lead
        assert "took" not in lead
        assert page.locator("#load").is_hidden()

    def test_a_long_recording_is_cut_at_the_same_moment_for_all(self) -> None:
        slow = [{"t": 3 + 0.5 * n} for n in range(10)]
        fast = [{"t": 7 + 0.1 * n} for n in range(10)]
        kept, end = race.cut({"slow": slow, "fast": fast}, limit=6)
        assert end == pytest.approx(0.6)
        assert (len(kept["slow"]), len(kept["fast"])) == (2, 6)
        assert race.cut({"slow": slow}, limit=10) == ({"slow": slow}, None)


@pytest.mark.process
def test_the_load_of_the_button_fills_a_batch(server: Server) -> None:
    body = json.dumps({"count": 24, "min_tokens": 5, "max_tokens": 20}).encode()
    reply = server.send("POST", "/load", body, **{"Content-Type": "application/json"})
    assert reply.json["total"] == 24
    wait_until(lambda: not server.send("GET", "/load").json["active"], 60)
    assert server.send("GET", "/load").json["done"] == 24
    sizes = {row["batch_size"] for row in server.get("/stats").json["engine"]["batch_stats"]}
    assert 8 in sizes
