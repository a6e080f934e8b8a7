"""The result of a load on the live page, the race of other policies on its requests, and what it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, in_a_browser, send_load

from dev.tools import trace_export
from tests.support import wait_until

pytestmark = in_a_browser


def saved(page: Any, button: str, folder: Path) -> Path:
    with page.expect_download() as download:
        page.click(f"#card button:text-is('{button}')")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


@pytest.mark.full
def test_after_a_load_a_card_compares_the_policies_in_figures_and_lanes(tab: Tab, tmp_path: Path) -> None:
    page = send_load(tab)
    assert page.text_content("#card h2") == "The last load: 30 requests, served by static"
    assert page.locator("#card tbody th").all_text_contents() == [
        "static as served", "static the same, simulated", "nobatch simulated", "dynamic simulated",
    ]  # fmt: skip
    said = page.locator("#card .said li").all_text_contents()
    assert [line.partition(":")[0] for line in said] == ["static", "static as simulated", "nobatch", "dynamic"]
    assert "held by finished requests" in said[0]
    assert "admission" in said[1]
    assert "mean latency × " in said[2]
    answer = page.evaluate("EB.page.card.answer")
    page.click("#card button:text-is('Show as lanes')")
    tab.until("EB.page.card.lanes.lanes.length === 4")
    page.evaluate("EB.page.card.lanes.clock = EB.page.card.lanes.length")
    tab.until("[...document.querySelectorAll('#card .done')].every((e) => e.textContent.includes('finished in'))")
    assert page.locator("#card .figures span:first-child b").all_text_contents() == ["30 of 30"] * 4
    means = page.evaluate("EB.page.card.lanes.lanes.map(({ model }) => EB.latencyAt(model, model.last.end))")
    assert means == pytest.approx([lane["latency_mean_s"] for lane in answer["lanes"]], rel=0.01)
    held = page.evaluate(
        "EB.page.card.lanes.lanes.map(({model}) => model.columns.some((c) => [...c.bits].some((b) => (b & 7) === EB.KIND.HELD)))"
    )
    assert held == [True, True, False, False]

    recording = saved(page, "Recording", tmp_path)
    trace = json.loads(saved(page, "Trace", tmp_path).read_text())
    assert saved(page, "Picture", tmp_path).read_bytes().startswith(b"\x89PNG")
    shared = saved(page, "Page to share", tmp_path)

    with recording.open() as lines:
        served = [json.loads(line) for line in lines if '"policy": "static, as served"' in line]
    expected = trace_export.trace([{k: v for k, v in step.items() if k not in ("load", "repeat")} for step in served])
    assert order(trace) == order(expected)
    page.goto(tab.url + "/race")
    page.set_input_files("#files", recording)
    tab.until("EB.race.lanes.length === 4 && EB.race.lanes[0].total === 30")
    assert "the same 30 requests" in str(page.text_content("#lead"))

    alone = tab.context.new_page()
    asked: list[str] = []
    alone.on("request", lambda request: asked.append(request.url))
    alone.on("pageerror", lambda error: asked.append(str(error)))
    alone.goto(shared.as_uri())
    wait_until(lambda: alone.evaluate("globalThis.EB?.race?.lanes.length") == 4)
    assert alone.locator("#card .said li").all_text_contents() == said
    assert alone.evaluate("EB.race.lanes.map((lane) => lane.total)") == [30] * 4
    assert asked == [shared.as_uri()]
    alone.close()


def order(trace: dict[str, Any]) -> list[str]:
    """Return the events of a trace in an order of their own; times to a microsecond."""
    events = [
        event | {name: round(event[name]) for name in ("ts", "dur") if name in event} for event in trace["traceEvents"]
    ]
    return sorted(json.dumps(event, sort_keys=True) for event in events)


@pytest.mark.full
def test_the_latest_requests_are_simulated_under_any_policy(tab: Tab) -> None:
    page = send_load(tab, 6)
    page.focus("#card select")
    tab.until("document.querySelector('#card select').options.length > 5")
    page.select_option("#card select >> nth=0", "chunked")
    page.uncheck("#card input >> nth=0")
    page.select_option("#card select >> nth=1", "latest")
    page.click("#card form button")
    tab.until("EB.page.card.answer.lanes.some((lane) => lane.policy === 'chunked')")
    assert page.text_content("#card dd") == "6"
    assert "nobatch" not in page.locator("#card tbody th").all_text_contents()
    assert str(page.text_content("#card h2")).startswith("The latest requests: ")


def test_an_error_of_the_simulation_is_shown_as_one(live: Tab) -> None:
    page = live.page
    live.expected = ["429"]
    page.evaluate("EB.page.card.box.hidden = false")
    page.route("**/what-if", lambda route: route.fulfill(
        status=429, content_type="application/json", body='{"error": {"message": "another simulation is running"}}'
    ))  # fmt: skip
    page.click("#card form button")
    live.until("!document.querySelector('#card .error').hidden")
    assert page.text_content("#card .error") == "another simulation is running"
    page.unroute("**/what-if")
    page.evaluate("EB.page.card.box.hidden = true")


def verdict(page: Any, lane: dict[str, Any], least: float = 0.05) -> str:
    base = {"latency_mean_s": 1.0, "latency_p99_s": 2.0}
    usual = {"policy": "p", "held": 0, "whole": True, "extrapolates": False, **base}
    return str(page.evaluate(f"EB.verdict({json.dumps(usual | lane)}, {json.dumps(base)}, {least})"))


def test_a_verdict_claims_no_more_than_the_figures_show(reader: Any) -> None:
    assert verdict(reader, {"latency_mean_s": 1.04, "latency_p99_s": 1.93}) == "p: not distinguishable."
    assert verdict(reader, {"latency_mean_s": 1.2}, least=0.3) == "p: not distinguishable."
    slow = verdict(reader, {"latency_mean_s": 2.5, "latency_p99_s": 1.0, "held": 0.25})
    assert slow == "p: mean latency × 2.5, p99 × 0.50, 25 % of the slot-steps held by finished requests."
    assert "guess" in verdict(reader, {"extrapolates": True})
    error = {"latency_mean_s": -0.08, "latency_p99_s": 0.01, "makespan_s": 0}
    for misfit, least in ((0.02, 0.08), (0.3, 0.3)):
        answer = json.dumps({"error": error, "cost": {"misfit": misfit}})
        assert reader.evaluate(f"EB.threshold({answer})") == least
