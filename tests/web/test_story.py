"""The story on the live page: the menu of policies and the guided tour, on the demonstration's server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser import SMALL, WINDOW, Tab, assert_axe_finds_nothing_serious, in_a_browser

from tests.support import wait_until
from tests.support.servers import Server

pytestmark = in_a_browser

FAST = ("--model", "mock:distserve-opt13b@4")  # about 200 steps per second instead of 20
JSON = {"Content-Type": "application/json"}
LIVE = "document.querySelector('#status-text').textContent === 'live'"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("demo") / "log", "demo", *FAST) as server:
        yield server


@pytest.fixture(scope="module")
def seen(chromium: Any, server: Server) -> Iterator[Tab]:
    """Return a page of the demonstration for the tests that leave it as the next one needs it."""
    tab = Tab(chromium, server, viewport=WINDOW)
    tab.open()
    tab.until(LIVE)
    yield tab
    tab.close()


@pytest.fixture
def page(tab: Tab) -> Any:
    page = tab.open()
    tab.until(LIVE)
    return page


def switched_to(server: Server, policy: str) -> None:
    wait_until(lambda: server.get("/policy").json["policy"] == policy)


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def test_the_demo_opens_with_captions_and_the_offer_of_a_tour(seen: Tab) -> None:
    page = seen.page
    seen.until("document.querySelector('#caption-text').textContent.length > 10")
    assert "guided tour" in page.text_content("#tour-title")
    words = "no model, 8 slots: words are drawn at random; times are those of a 13B model"
    assert page.text_content("#facts").startswith(words)
    assert "drawn at random" in page.text_content("#answer")
    seen.until("EB.page.live.last.who.filter(Boolean).length === 8")
    assert seen.complaints == []


def test_the_policy_is_switched_by_keyboard_and_the_picture_names_it(seen: Tab, server: Server) -> None:
    page = seen.page
    page.focus("#policy")
    page.keyboard.press("Enter")
    seen.until("document.activeElement.name === 'first'")
    assert page.is_disabled("#policy-menu button.primary")  # what serves is chosen
    page.keyboard.press("ArrowDown")  # from dynamic to chunked,
    page.keyboard.press("ArrowDown")  # and on to dynamic+sjf
    page.keyboard.press("Enter")
    seen.until("!document.querySelector('#policy-menu').matches(':popover-open')")
    assert server.get("/policy").json["policy"] == "dynamic+sjf"
    seen.until("document.querySelector('#policy').textContent === 'dynamic+sjf'")
    assert page.title().startswith("dynamic+sjf")
    assert page.evaluate("document.activeElement.id") == "policy"
    seen.until("EB.page.live.columns.some((c, i, all) => i && c.policy !== all[i - 1].policy)")
    server.send("PUT", "/policy", b'{"policy": "dynamic"}', **JSON)
    assert seen.complaints == []


def test_an_option_that_is_refused_says_why_beside_the_button(seen: Tab) -> None:
    page = seen.page
    page.click("#policy")
    seen.until("document.querySelector('#policy-menu form input[value=window]')")
    page.click("#policy-menu summary")
    page.fill("#policy-menu input[type=search]", "window")
    page.check("#policy-menu input[value=window]")
    page.fill("#policy-menu input[name=preferred]", "4,eight")
    page.click("#policy-menu button.primary")
    seen.until("document.querySelector('.foot .problem').textContent.includes('preferred')")
    assert page.evaluate("document.activeElement.name") == "preferred"
    assert page.get_attribute("#policy-menu input[name=preferred]", "aria-invalid") == "true"
    page.fill("#policy-menu input[name=preferred]", "4,8")
    page.keyboard.press("Enter")
    seen.until("document.querySelector('#policy').textContent === 'window'")
    page.click("#policy")
    seen.until("document.querySelector('#policy-menu input[name=preferred]')?.value === '4,8'")
    seen.until("document.querySelector('#policy-menu button.primary').disabled")
    page.fill("#policy-menu input[name=preferred]", "4,16")
    assert page.is_enabled("#policy-menu button.primary")
    page.keyboard.press("Escape")
    assert [c for c in seen.complaints if "400" not in c] == []  # the browser itself reports the refusal
    seen.complaints.clear()


def test_one_click_shows_held_rows_and_that_dynamic_has_none_until_the_reader_takes_over_and_leaves(
    seen: Tab, server: Server
) -> None:
    page = seen.page
    server.send("PUT", "/policy", b'{"policy": "window", "options": {"delay": 0.01}}', **JSON)
    before = server.get("/load").json["params"]
    page.click("#story button.primary")
    seen.until("EB.page.story.tour.playing")
    hurry = "void Object.defineProperty(EB.page.story.tour, 'hurry', { get() { return %s; }, configurable: true })"
    page.evaluate(hurry % "this.at === 2 ? 0.001 : 100")  # it stays there until the reader has come
    seen.until("EB.page.story.tour.at === 2")
    page.click("#pause")  # of the picture: the reader takes over
    assert page.evaluate("EB.page.story.tour.playing") is False
    seen.until("EB.page.story.tour.finding.textContent")
    found = re.findall(r"(none|[0-9,]+) of [0-9,]+", page.text_content("#story .finding"))
    held, none = (int(number.replace(",", "")) if number != "none" else 0 for number in found)
    shown = page.evaluate(
        """() => {
          const { columns } = EB.page.live;
          if (columns.findIndex((column) => column.policy === "static") < 1) return null; // it has forgotten some of these
          const held = (policy) => columns.filter((column) => column.policy === policy)
            .reduce((sum, column) => sum + column.who.filter((who, slot) => who && column.kind(slot) === EB.KIND.HELD).length, 0);
          return held("static");
        }"""
    )
    assert 0 == none < held <= (held if shown is None else shown)
    assert page.locator("#story .stops [aria-current]").get_attribute("aria-label").startswith("Stop 3")
    page.evaluate(hurry % "100")
    press(page, "Play tour")
    seen.until("EB.page.story.tour.at >= 3")
    press(page, "Leave")
    seen.until("document.querySelector('#story').hidden")
    switched_to(server, "window")
    assert server.get("/policy").json["options"]["delay"] == 0.01
    wait_until(lambda: server.get("/load").json["params"] == before)
    assert seen.complaints == []


def test_a_tour_whose_load_the_server_has_ended_is_left(seen: Tab, server: Server) -> None:
    page = seen.page
    own = server.get("/load").json["params"]
    page.evaluate("EB.page.story.tour.invite()")
    page.click("#story button.primary")
    seen.until("EB.page.story.tour.at === 0 && !EB.page.story.tour.busy")
    page.evaluate("EB.page.story.tour.renew()")
    assert page.is_visible("#story")
    assert server.get("/load").json["params"]["lease"] == 60
    server.send("DELETE", "/load")
    wait_until(lambda: not server.get("/load").json["active"])
    page.evaluate("EB.page.story.tour.renew()")
    seen.until("document.querySelector('#story').hidden")
    wait_until(lambda: server.get("/load").json["params"] == own)
    assert seen.complaints == []


def test_a_stop_does_not_measure_what_ran_at_the_switch_even_if_the_page_learns_of_the_switch_late(seen: Tab) -> None:
    def step(n: int, policy: str, **phases: str) -> dict[str, Any]:
        members = [
            {"id": id, "slot": slot, "phase": phase, "tokens": 1, "computed": n, "total": 40}
            for slot, (id, phase) in enumerate(phases.items())
        ]
        return {
            "n": n, "t": n / 2, "seconds": 0.5, "policy": policy, "queue": 0, "members": members, "joined": [], "left": [],
            "slot_steps": {"useful": len(phases)},
        }  # fmt: skip

    steps = [step(1, "dynamic", a="prefill"), step(2, "dynamic", a="decode", b="prefill")]
    steps += [step(n, "nobatch", a="held", b="decode") for n in range(3, 9)]
    steps += [step(n, "nobatch", c="decode") for n in range(9, 15)]
    measured = seen.page.evaluate(
        "(steps) => { const model = new EB.Model(); steps.forEach((s) => model.add(s)); return EB.measure(model, 1, 'nobatch'); }",
        steps,
    )
    assert (measured["heldRows"], measured["rows"], measured["span"]) == (0, 6, 3)


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
    tab.close()
    assert tab.complaints == []


@pytest.mark.full
def test_a_server_that_cannot_switch_says_so_in_the_tour(tab: Tab, page: Any) -> None:
    body = {"error": {"message": "this server was created without a choice of policies"}}
    tab.expected = ["503"]
    page.route("**/policy", lambda route: route.fulfill(status=503, body=json.dumps(body)))
    page.click("#story button.primary")
    tab.until("document.querySelector('#story .problem').textContent.includes('without a choice')")


@pytest.mark.full
def test_axe_finds_nothing_serious_in_the_tour_and_in_the_menu(chromium: Any, server: Server) -> None:
    tab = Tab(chromium, server, viewport=SMALL, color_scheme="dark")
    page = tab.open()
    tab.until("document.querySelector('#story button.primary')")
    page.click("#story button.primary")
    tab.until("document.querySelectorAll('#story tr').length > 1")
    page.click("#policy")
    tab.until("document.querySelector('#policy-menu .foot')")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert_axe_finds_nothing_serious(page)
    page.keyboard.press("Escape")
    press(page, "Leave")
    tab.until("document.querySelector('#story').hidden")
    tab.close()
    assert tab.complaints == []


@pytest.mark.full
def test_each_stop_of_the_tour_shows_what_it_claims(tab: Tab, page: Any, server: Server) -> None:
    page.click("#story button.primary")
    tab.until("EB.page.story.tour.playing")
    press(page, "Pause tour")
    measured = "EB.page.story.tour.results.get(EB.page.story.tour.key)"

    def figures(policy: str, **least: int) -> dict[str, Any]:
        """Return what a stop has measured once 40 requests, and the least of each client, came and began under it."""
        switched_to(server, policy)
        tab.until(measured, 60)
        since = page.evaluate("EB.page.live.last.end")
        for client, count in {"": 40, **least}.items():
            came = f"r.arrived > {since} && r.joinedAt && EB.clientOf(r).startsWith('{client}')"
            tab.until(f"[...EB.page.live.requests.values()].filter((r) => {came}).length >= {count}", 60)
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
    fair = figures("dynamic+vtc", quiet=8)
    press(page, "First come, first served")
    served = figures("dynamic", quiet=8)
    assert fair["waits"]["quiet"] < 0.5 * fair["waits"]["loud"]
    assert served["waits"]["quiet"] > 0.5 * served["waits"]["loud"]


def test_a_link_opens_a_stop_whose_measurement_judges_the_guess(tab: Tab) -> None:
    page = tab.open("/#tour-2")
    tab.until("EB.page.story.tour.at === 1 && !EB.page.story.tour.busy")
    press(page, "Pause tour")
    press(page, "slower")
    tab.until("EB.page.story.tour.finding.textContent")
    assert not str(page.text_content("#story .finding")).startswith(("Right", "Not so"))  # nothing to compare with yet
    page.evaluate("EB.page.story.tour.results.set('plain nobatch', { tokensPerSecond: 0.1 })")
    tab.until("EB.page.story.tour.finding.textContent.startsWith('Not so: faster. ')")
    press(page, "faster")
    assert str(page.text_content("#story .finding")).startswith("Right. ")
    page.click("#story .stops button >> nth=3")
    tab.until("document.querySelector('#axis').value === 'time'")
    assert page.evaluate("location.hash") == "#tour-4"
    tab.until("!EB.page.story.tour.busy")
    press(page, "Leave")
    tab.until("document.querySelector('#story').hidden")
    assert page.input_value("#axis") == "steps"
    assert page.evaluate("location.hash") == ""
