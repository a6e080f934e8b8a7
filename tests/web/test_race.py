"""Races of policies in a real browser: recorded, live, within a report, and of a comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CALMLY, SMALL, WINDOW, Tab, assert_axe_finds_nothing_serious, in_a_browser

from client.report import race
from tests.support import points, wait_until
from tests.support.scheduling import drive, make_scheduler, requests
from tests.support.servers import Server

THREE = ["nobatch", "static", "dynamic"]
LOADS = ["poisson:40", "burst"]

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def raced(chromium: Any, server: Server) -> Iterator[Tab]:
    """Return a page with the race of the recorded runs, until a test gives it others."""
    tab = Tab(chromium, server, viewport=WINDOW)
    tab.open("/race")
    yield tab
    tab.close()


def test_the_race_shows_the_recorded_runs_in_step(raced: Tab) -> None:
    page = raced.page
    raced.until("EB.race.lanes.length === 3")
    page.evaluate("EB.race.clock = 1e9")
    raced.until("[...document.querySelectorAll('.done')].every((e) => e.textContent.includes('finished in'))")
    answered = page.locator(".figures span:first-child b").all_text_contents()
    assert len(set(answered)) == 1
    fills = page.locator(".figures span:nth-child(5) b").all_text_contents()
    assert all(0 < int(fill.removesuffix(" %")) <= 100 for fill in fills), fills
    assert page.evaluate("EB.race.lanes.at(-1).box.getBoundingClientRect().bottom <= innerHeight")
    assert raced.complaints == []


@pytest.mark.parametrize("scheme", points(1, "dark", "light"))
def test_it_fits_a_small_screen_and_axe_finds_nothing_serious(raced: Tab, scheme: str) -> None:
    page = raced.page
    page.set_viewport_size(SMALL)
    page.emulate_media(color_scheme=scheme)
    assert page.locator(".lane").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") == SMALL["width"]
    assert_axe_finds_nothing_serious(page)
    assert raced.complaints == []
    page.set_viewport_size(WINDOW)


def test_a_request_has_the_same_number_and_color_in_every_lane(raced: Tab, tmp_path: Path) -> None:
    orders = {"nobatch": (3, 9, 4), "dynamic": (9, 3, 4)}  # arrival by arrival, at two servers
    for policy, lengths in orders.items():
        run = drive(make_scheduler(policy, 2), requests(*((k, 5, tokens) for k, tokens in enumerate(lengths))))
        text = "".join(json.dumps(record) + "\n" for record in run.records())
        for k, tokens in enumerate(lengths):
            text = text.replace(json.dumps(run.sequences[k].id), json.dumps(f"of {tokens}"))
        (tmp_path / f"{policy}.jsonl").write_text(text)
    page = raced.page
    page.set_input_files("#files", [tmp_path / f"{policy}.jsonl" for policy in orders])
    raced.until("EB.race.lanes.length === 2")
    one, two = page.evaluate(
        "EB.race.lanes.map((lane) => Object.fromEntries([...lane.model.requests.values()].map((r) => [r.id, [r.number, r.hue]])))"
    )
    assert one == two
    assert len(one) == 3
    assert "same 3 requests" in str(page.text_content("#lead"))


@pytest.mark.full
def test_a_race_of_live_servers_shows_each_with_its_policy(tab: Tab, server: Server, tmp_path: Path) -> None:
    flags = ("--model", "mock:llm-mock@50", "--max-batch-size", "4")
    with Server(tmp_path / "log", "dynamic", *flags) as other:
        page = tab.open(f"/race?run={tab.url}&run=http://127.0.0.1:{other.port}")
        for one in (server, other):
            one.post(prompt="hi", num_tokens=9)
        tab.until("EB.race.lanes.every((lane) => lane.model.columns.length >= 9)")
        assert page.locator(".lane .badge").all_text_contents() == ["static", "dynamic"]
        tab.until("[...document.querySelectorAll('.figures span:first-child b')].every((e) => +e.textContent >= 1)")
        assert not page.is_visible("#seek")
        tab.expected = [f"http://127.0.0.1:{other.port}/events?"]  # it alone, as the address asks for


def test_the_race_within_a_report_needs_no_server(raced: Tab, tmp_path: Path) -> None:
    runs = {
        policy: drive(make_scheduler(policy, 4), requests((0, 5, 3), (0, 9, 8), (1, 2, 6))).records()
        for policy in ("static", "dynamic")
    }
    path = tmp_path / "report.html"
    races = {"a <burst>": runs, "another": runs}
    path.write_text(f"<!doctype html><title>x</title>{race.section(races)}")
    page = raced.context.new_page()
    page.add_init_script(CALMLY)
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(path.as_uri())
    wait_until(lambda: len(page.frames) == 2)
    frame = page.frames[1]
    wait_until(lambda: frame.evaluate("globalThis.EB?.race?.lanes.length") == 2)
    assert frame.locator(".badge").all_text_contents()[1:] == ["static", "dynamic"]
    frame.evaluate("EB.race.clock = 1e9")
    wait_until(lambda: frame.locator(".done", has_text="finished in").count() == 2)
    assert frame.locator(".figures span:first-child b").all_text_contents() == ["3 of 3"] * 2
    assert frame.locator("#load option").all_text_contents() == ["a <burst>", "another"]
    assert said == [path.as_uri()]
    page.close()


@pytest.mark.full
def test_a_comparison_is_raced_load_by_load(tab: Tab, tmp_path: Path) -> None:
    lines = []
    for start, load in enumerate(LOADS):
        for policy in THREE:
            run = drive(make_scheduler(policy, 4), requests(*((start + i, 5, 3 + i) for i in range(7))))
            lines += [json.dumps({"policy": policy, "load": load, "repeat": 0} | step) for step in run.records()]
    (tmp_path / "iterations.jsonl").write_text("\n".join(lines))
    page = tab.open("/race")
    page.set_input_files("#files", tmp_path / "iterations.jsonl")
    tab.until("EB.race.lanes.length === 3")
    assert page.locator("#load option").all_text_contents() == LOADS
    firsts = set()
    for load in LOADS:
        page.select_option("#load", load)
        assert page.locator(".lane .badge").all_text_contents() == THREE
        assert "the same 7 requests" in str(page.text_content("#lead"))
        page.evaluate("EB.race.clock = 1e9")
        tab.until("document.querySelectorAll('.done:not(:empty)').length === 3")
        answered = page.locator(".figures span:first-child b").all_text_contents()
        assert answered == ["7 of 7"] * 3
        firsts.add(page.evaluate("EB.race.lanes[0].origin"))
    assert len(firsts) == 2


@pytest.mark.full
def test_runs_of_different_requests_are_not_called_the_same(tab: Tab, tmp_path: Path) -> None:
    page = tab.open("/race")
    tab.until("EB.race.lanes.length === 3")
    assert "Each lane serves the same" in str(page.text_content("#lead"))  # by id and length
    for policy, tokens in (("static", 3), ("dynamic", 4)):
        records = drive(make_scheduler(policy, 4), requests((0, 5, tokens), (0, 9, 8))).records()
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{policy}.jsonl").write_text(lines)
    page.set_input_files("#files", [tmp_path / "static.jsonl", tmp_path / "dynamic.jsonl"])
    tab.until("EB.race.lanes[0].total === 2")
    lead = str(page.text_content("#lead"))
    assert "different requests" in lead
    assert "took" not in lead
    assert page.locator("#load").is_hidden()
