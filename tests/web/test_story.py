"""The story on the live page: the menu of policies, the captions and the guided tour, on the demonstration's server."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Tab, in_a_browser
from driver import Run, drive, requests
from support import Server, wait_until

import policies
from api.schemas.demo import LoadRequest
from scheduling.scheduler import Scheduler

pytestmark = in_a_browser

FAST = ("--model", "mock:distserve-opt13b@4")  # about 200 steps per second instead of 20
LIVE = "document.querySelector('#status-text').textContent === 'live'"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("demo") / "log", "demo", *FAST) as server:
        yield server


@pytest.fixture
def page(tab: Tab) -> Any:
    page = tab.open()
    tab.until(LIVE)
    return page


def switched_to(server: Server, policy: str) -> None:
    wait_until(lambda: server.get("/policy").json["policy"] == policy)


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def test_the_demo_opens_with_captions_and_the_offer_of_a_tour(tab: Tab, page: Any) -> None:
    tab.until("document.querySelector('#caption-text').textContent.length > 10")
    assert "guided tour" in page.text_content("#tour-title")
    tab.until("EB.page.live.last.who.filter(Boolean).length === 8")
    assert tab.complaints == []


def test_the_policy_is_switched_by_keyboard_and_the_picture_names_it(tab: Tab, page: Any, server: Server) -> None:
    page.focus("#policy")
    page.keyboard.press("Enter")
    tab.until("document.activeElement.name === 'loop'")
    assert page.is_disabled("#policy-menu button.primary")  # what serves is chosen
    page.keyboard.press("ArrowUp")  # from dynamic to static
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    tab.until("!document.querySelector('#policy-menu').matches(':popover-open')")
    assert server.get("/policy").json["policy"].startswith("static+")
    assert page.evaluate("document.activeElement.id") == "policy"
    tab.until("EB.page.live.columns.some((c, i, all) => i && c.policy !== all[i - 1].policy)")
    server.send("PUT", "/policy", b'{"policy": "dynamic"}', **{"Content-Type": "application/json"})
    assert tab.complaints == []


def test_an_option_that_is_refused_says_why_beside_the_button(tab: Tab, page: Any) -> None:
    page.click("#policy")
    tab.until("document.querySelector('#policy-menu form input[value=window]')")
    page.check("#policy-menu input[value=window]")
    page.fill("#policy-menu input[name=preferred]", "4,eight")
    page.click("#policy-menu button.primary")
    tab.until("document.querySelector('.foot .problem').textContent.includes('preferred')")
    assert page.evaluate("document.activeElement.name") == "preferred"
    assert page.get_attribute("#policy-menu input[name=preferred]", "aria-invalid") == "true"
    page.fill("#policy-menu input[name=preferred]", "4,8")
    page.keyboard.press("Enter")
    tab.until("document.querySelector('#policy').textContent === 'window'")
    page.click("#policy")
    tab.until("document.querySelector('#policy-menu input[name=preferred]')?.value === '4,8'")
    tab.until("document.querySelector('#policy-menu button.primary').disabled")
    page.fill("#policy-menu input[name=preferred]", "4,16")
    assert page.is_enabled("#policy-menu button.primary")
    assert [c for c in tab.complaints if "400" not in c] == []  # the browser itself reports the refusal


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    trace = [(i * 60, 3 + i * 37 % 150, 2 + i * 11 % 29) for i in range(24)]
    unguarded = {"guard": 1e9, "guard_ratio": 1e9}
    policy_options = {"static": {}, "dynamic": {}, "chunked": {"max_batched_tokens": 32}, "dynamic+sjf": unguarded}
    return {
        name: drive(Scheduler(policies.get_policy(name, 4, options), None, 1 << 30), requests(*trace))
        for name, options in policy_options.items()
    }


@pytest.fixture(scope="module")
def reader(chromium: Any, server: Server) -> Iterator[Any]:
    """Return a page that several tests read and none changes."""
    tab = Tab(chromium, server)
    yield tab.open()
    tab.context.close()


@pytest.fixture(scope="module")
def said(reader: Any, runs: dict[str, Run]) -> dict[str, list[dict[str, Any]]]:
    """Return the captions of all steps of each run."""
    given = {
        name: [
            [{"id": s.id, "t": s.arrived_at, "prompt_tokens": len(s.prompt_ids), "max_tokens": s.max_tokens}
             for s in run.sequences],
            run.records(),
        ]
        for name, run in runs.items()
    }  # fmt: skip
    captions: dict[str, list[dict[str, Any]]] = reader.evaluate(
        """given => Object.fromEntries(Object.entries(given).map(([name, [arrivals, records]]) => {
          const model = new EB.Model();
          for (const arrival of arrivals) model.arrival(arrival);
          for (const record of records) model.add(record);
          const closed = new Set(["nobatch", "static", "elastic"]);
          return [name, model.columns.flatMap((_, i) => EB.captionsOf(model, i, closed))];
        }))""",
        given,
    )
    return captions


def of_kind(said: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    found = [caption for caption in said if caption["kind"] == kind]
    assert found, f"no caption of the kind {kind}"
    return found


def number(text: str, place: int = 0) -> str:
    """Return the id of a request that a caption names; the driver's r0 is #1."""
    words = [word.strip("#;,.'s") for word in text.split() if word.startswith("#")]
    return f"r{int(words[place]) - 1}"


@pytest.mark.full
def test_who_joins_because_another_left_takes_that_slot_in_the_next_step(said: Any, runs: Any) -> None:
    records = {record["n"]: record for record in runs["dynamic"].records()}
    for caption in of_kind(said["dynamic"], "joined"):
        who, now, before = number(caption["text"]), records[caption["n"]], records.get(caption["n"] - 1)
        slot = next(m["slot"] for m in now["members"] if m["id"] == who)
        assert who in now["joined"]
        assert f"joined slot {slot}" in caption["text"]
        if "because" in caption["text"]:
            cause = number(caption["text"], 1)
            assert cause in [gone["id"] for gone in before["left"]]
            assert next(m["slot"] for m in before["members"] if m["id"] == cause) == slot
            assert len(before["members"]) == 4


def test_who_waits_is_told_its_place_in_the_line(said: Any, runs: Any) -> None:
    run = runs["dynamic"]
    records = {record["n"]: record for record in run.records()}
    joined_at = {id: record["n"] for record in run.records() for id in record["joined"]}
    for caption in of_kind(said["dynamic"], "waits"):
        who, now = number(caption["text"]), records[caption["n"]]
        line = [s.id for s in run.sequences if s.arrived_at <= now["t"] and joined_at[s.id] > now["n"]]
        assert f"({line.index(who) + 1}" in caption["text"]
        assert ("batch full" in caption["text"]) == (len(now["members"]) == 4)


def test_a_held_row_is_said_to_be_held_until_the_one_that_ends_last(said: Any, runs: Any) -> None:
    run = runs["static"]
    end = {gone["id"]: record["n"] for record in run.records() for gone in record["left"]}
    finished = {}  # the last step in which it computed
    for record in run.records():
        finished |= {m["id"]: record["n"] for m in record["members"] if m["phase"] in ("prefill", "decode")}
    for caption in of_kind(said["static"], "held"):
        done, last = number(caption["text"]), number(caption["text"], -1)
        assert finished[done] == caption["n"] - 1
        assert end[done] == end[last] == finished[last]
    for caption in of_kind(said["static"], "ended"):
        assert caption["n"] in end.values()
    assert not any(caption["kind"] == "held" for caption in said["dynamic"])


def test_a_prompt_that_is_read_in_chunks_says_how_far_it_is(said: Any, runs: Any) -> None:
    records = {record["n"]: record for record in runs["chunked"].records()}
    for caption in of_kind(said["chunked"], "chunk"):
        member = next(m for m in records[caption["n"]]["members"] if m["id"] == number(caption["text"]))
        assert member["phase"] == "prefill"
        if "so far" in caption["text"]:
            assert f" {member['computed']} of " in caption["text"]


def test_who_overtakes_is_said_to(said: Any, runs: Any) -> None:
    run = runs["dynamic+sjf"]
    joined_at = {id: record["n"] for record in run.records() for id in record["joined"]}
    for caption in of_kind(said["dynamic+sjf"], "ahead"):
        who = int(number(caption["text"])[1:])
        passed = sum(joined_at[f"r{i}"] > caption["n"] for i in range(who))
        assert f"ahead of {passed} " in caption["text"]


def test_captions_stay_long_enough_to_read_and_do_not_flood_a_screen_reader(reader: Any, runs: Any) -> None:
    shown, spoken = reader.evaluate(
        """records => {
          const model = new EB.Model(), narrator = new EB.Narrator();
          const shown = [], spoken = [];
          records.forEach((record, i) => {
            model.add(record);
            const now = i / 20, caption = narrator.at(model, i, now);
            if (caption && caption.text !== shown.at(-1)?.[1]) shown.push([now, caption.text]);
            if (narrator.announce(now)) spoken.push(now);
          });
          return [shown, spoken];
        }""",
        runs["static"].records(),
    )
    assert len(shown) >= 3
    assert all(b[0] - a[0] >= 2.5 for a, b in itertools.pairwise(shown))
    assert all(b - a >= 10 for a, b in itertools.pairwise(spoken))


def test_the_tour_asks_only_for_what_a_server_has(reader: Any) -> None:
    stops = reader.evaluate(
        """() => EB.STOPS.map(({policy, options, load, versus}) =>
          ({load: load(64), choices: [[policy, options?.(64) ?? {}], [versus?.policy ?? policy, {}]]}))"""
    )
    assert len(stops) == 6
    for stop in stops:
        for name, options in stop["choices"]:
            policies.get_policy(name, 64, options, own=False)
        LoadRequest(**stop["load"])


@pytest.mark.full
def test_the_tour_is_left_as_it_was_entered(tab: Tab, page: Any, server: Server) -> None:
    server.send(
        "PUT", "/policy", b'{"policy": "window", "options": {"delay": 0.01}}', **{"Content-Type": "application/json"}
    )
    before = server.get("/load").json["params"]
    page.click("#story button.primary")
    switched_to(server, "nobatch")
    page.click("#story button.primary")
    switched_to(server, "static")
    press(page, "Leave")
    switched_to(server, "window")
    assert server.get("/policy").json["options"]["delay"] == 0.01
    assert server.get("/load").json["params"] == before
    tab.until("document.querySelector('#story').hidden")
    assert tab.complaints == []


def test_one_click_shows_held_rows_and_that_dynamic_has_none_until_the_reader_takes_over(tab: Tab, page: Any) -> None:
    page.click("#story button.primary")
    tab.until("EB.page.story.tour.playing")
    page.evaluate("EB.page.story.tour.hurry = 100")
    tab.until("EB.page.story.tour.at === 2")
    page.click("#pause")  # of the picture: the reader takes over
    assert page.evaluate("EB.page.story.tour.playing") is False
    tab.until("EB.page.story.tour.finding.textContent")
    found = re.findall(r"(none|[0-9,]+) of [0-9,]+", page.text_content("#story .finding"))
    held, none = (int(number.replace(",", "")) if number != "none" else 0 for number in found)
    shown = page.evaluate(
        """() => {
          const { columns } = EB.page.live;
          const held = (policy) => columns.filter((column) => column.policy === policy)
            .reduce((sum, column) => sum + column.who.filter((who, slot) => who && column.kind(slot) === EB.KIND.HELD).length, 0);
          return held("static");
        }"""
    )
    assert 0 == none < held <= shown
    assert page.locator("#story .stops [aria-current]").get_attribute("aria-label").startswith("Stop 3")
    press(page, "Play tour")
    tab.until("EB.page.story.tour.at === 3")
    press(page, "Leave")
    tab.until("document.querySelector('#story').hidden")
    assert tab.complaints == []


@pytest.mark.full
def test_the_tour_waits_for_a_reader_who_wants_less_motion(chromium: Any, server: Server) -> None:
    tab = Tab(chromium, server, reduced_motion="reduce")
    page = tab.open()
    tab.until("document.querySelector('#story button.primary')")
    page.click("#story button.primary")
    tab.until("EB.page.story.tour.at === 0 && !EB.page.story.tour.busy")
    assert page.get_by_role("button", name="Play tour", exact=True).is_visible()
    press(page, "Leave")
    tab.until("document.querySelector('#story').hidden")
    tab.context.close()
    assert tab.complaints == []


@pytest.mark.full
def test_a_server_that_cannot_switch_says_so_in_the_tour(tab: Tab, page: Any) -> None:
    body = {"error": {"message": "this server was created without a choice of policies"}}
    page.route("**/policy", lambda route: route.fulfill(status=503, body=json.dumps(body)))
    page.click("#story button.primary")
    tab.until("document.querySelector('#story .problem').textContent.includes('without a choice')")


@pytest.mark.full
def test_axe_finds_nothing_serious_in_the_tour_and_in_the_menu(chromium: Any, server: Server) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright",
        reason="axe is not installed: tools/setup.sh requirements-dev.txt does it",
    )
    tab = Tab(chromium, server, viewport={"width": 360, "height": 740}, color_scheme="dark")
    page = tab.open()
    tab.until("document.querySelector('#story button.primary')")
    page.click("#story button.primary")
    tab.until("document.querySelectorAll('#story tr').length > 1")
    page.click("#policy")
    tab.until("document.querySelector('#policy-menu .foot')")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    found = axe.Axe().run(page).response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
    page.keyboard.press("Escape")
    press(page, "Leave")
    tab.until("document.querySelector('#story').hidden")
    tab.context.close()
    assert tab.complaints == []


@pytest.mark.full
def test_each_stop_of_the_tour_shows_what_it_claims(tab: Tab, page: Any, server: Server) -> None:
    page.click("#story button.primary")
    tab.until("EB.page.story.tour.playing")
    press(page, "Pause tour")
    measured = "EB.page.story.tour.results.get(EB.page.story.tour.key)"

    def figures(policy: str) -> dict[str, Any]:
        switched_to(server, policy)
        tab.until(f"{measured} && EB.page.live.columns.length > 200", 60)
        tab.until(f"{measured}.span > 3", 60)
        found: dict[str, Any] = page.evaluate(measured)
        return found

    def go_on() -> None:
        page.click("#story .buttons .primary")

    nobatch = figures("nobatch")
    go_on()
    static = figures("static")
    go_on()
    dynamic = figures("dynamic")
    assert nobatch["held"] == dynamic["held"] == 0 < 0.1 < static["held"]
    assert nobatch["fill"] < 0.2
    assert dynamic["tokensPerSecond"] > static["tokensPerSecond"] > nobatch["tokensPerSecond"]
    go_on()
    chunked = figures("chunked")
    press(page, "Without chunks")
    whole = figures("dynamic")
    assert chunked["chunks"] >= 4 > whole["chunks"]
    assert chunked["promptStep"] < whole["promptStep"]
    go_on()
    shared = figures("chunked")
    assert 0.4 < shared["hits"] / shared["joined"] < 1
    assert shared["cached"] > 200 * shared["hits"]
    assert shared["firstHit"] < shared["firstMiss"]
    go_on()
    fair = figures("dynamic+vtc")
    press(page, "First come, first served")
    served = figures("dynamic")
    assert fair["waits"]["quiet"] < 0.5 * fair["waits"]["loud"]
    assert served["waits"]["quiet"] > 0.5 * served["waits"]["loud"]
    assert tab.complaints == []
