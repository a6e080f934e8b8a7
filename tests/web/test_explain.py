"""What the live page explains: a request, and the words it uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, in_a_browser, send_load

from scheduling.pages import PagePool
from tests.support.scheduling import Run, drive, make_scheduler, requests

pytestmark = in_a_browser


def recorded(run: Run) -> list[dict[str, Any]]:
    """Return the recording of a run."""
    arrivals = [
        {"id": s.id, "t": s.arrived_at, "prompt_tokens": len(s.prompt_ids), "max_tokens": s.max_tokens}
        for s in run.sequences
    ]
    return arrivals + run.records()


@pytest.mark.parametrize("policy", ["static", pytest.param("dynamic", marks=pytest.mark.full)])
def test_the_steps_in_which_a_request_waited_are_those_that_the_scheduler_counted(reader: Any, policy: str) -> None:
    # Steps end at whole numbers, so only the first request arrives between two steps.
    trace = [(i * 7.25, 3 + i * 5 % 17, 1 + i * 11 % 23) for i in range(24) if i % 4 or not i]
    run = drive(make_scheduler(policy, 3, PagePool(20, 4)), requests(*trace))
    shown = reader.evaluate(
        """lines => {
          const model = EB.modelOf(EB.parseRuns(lines.join("\\n"))[0]);
          return Object.fromEntries([...model.requests.values()].map((request) => [request.id,
            EB.historyOf(model, request).waits.map(({ reason, steps, seconds }) => [reason, steps, seconds])]));
        }""",
        [json.dumps(line) for line in recorded(run)],
    )
    for seq in run.sequences:
        steps: dict[str, int] = {}
        for reason, number, _ in shown[seq.id]:
            name = "policy_order" if reason == "in_progress" else reason  # as the scheduler counts it
            steps[name] = steps.get(name, 0) + number
        assert steps == {reason: number for reason, (number, _) in seq.waited.items() if number}, seq.id
        assert sum(time for *_, time in shown[seq.id]) == pytest.approx(seq.scheduled_at - seq.arrived_at)


def test_a_click_on_a_request_shows_its_times_its_waiting_and_its_neighbors(live: Tab, tmp_path: Path) -> None:
    run = drive(make_scheduler("static", 2), requests((0, 5, 9), (0, 5, 3), (1, 5, 2)))
    page = live.replay(recorded(run), tmp_path)
    page.focus("#seek")
    page.keyboard.press("End")
    live.until("document.querySelectorAll('#rows tr').length === 3")
    page.locator("#rows tr", has_text="#2").click()
    detail = page.locator("#detail")
    assert "6 held" in detail.text_content()
    assert detail.locator(".neighbors b").all_text_contents() == ["#1"]
    page.click("#detail .neighbors button")
    assert detail.locator("h2").text_content().startswith("Request #1 ")
    assert "It did not wait" in detail.text_content()
    page.click("#detail .close")
    page.locator("#rows tr", has_text="#3").click()
    cells = [row.locator("td").all_text_contents() for row in detail.locator("tbody tr").all()]
    assert [(row[0], row[2], row[3]) for row in cells] == [
        ("1", "2", "2 of 2 slots taken"), ("2–9", "0", "2 of 2 slots taken, 1 held")
    ]  # fmt: skip
    page.keyboard.press("Escape")
    assert detail.is_hidden()


@pytest.mark.full
def test_the_detail_of_a_request_names_those_that_delayed_it(tab: Tab) -> None:
    page = send_load(tab, 20, least=10)
    last = page.evaluate("Math.max(...[...EB.page.model.requests.values()].map(({ number }) => number))")
    page.evaluate(f"EB.page.explain.choose({last})")
    page.click("#detail .blame button")
    tab.until("document.querySelectorAll('#detail .blame p').length === 3")
    waited, ran, basis = page.locator("#detail .blame p").all_text_contents()
    assert waited.startswith("It waited")
    assert "because of #" in waited
    assert ran.startswith("It ran")
    assert "%" in basis


@pytest.mark.full
def test_the_detail_of_a_request_tells_its_program_and_what_that_has_received(tab: Tab) -> None:
    page = send_load(tab, 4, least=2)
    program = {"name": "<trip>", "depth": 2, "after": [], "calls": 3, "prompt_tokens": 30, "output_tokens": 10}
    page.route("**/requests/*", lambda route: route.fulfill(json=route.fetch().json() | {"program": program}))
    page.evaluate(
        "EB.page.explain.choose(Math.min(...[...EB.page.model.requests.values()].map(({ number }) => number)))"
    )
    told = "depth 2 in program <trip>, whose 3 ended calls received 40 tokens"
    tab.until(f"document.querySelector('#detail').textContent.includes('{told}')")


PROGRAM = {
    "name": "<trip>", "calls": 2, "trusted": True, "measured_ms": 2000, "simulated_ms": 2000, "alone_ms": 1500,
    "others": [{"program": "p", "ms": 400, "call": "a", "call_ms": 300}, {"id": "other-request", "ms": 1, "call": "a", "call_ms": 1}],
}  # fmt: skip


def blamed(wait: tuple[float, float], trusted: bool, ran: float = 100, **cost: float) -> dict[str, Any]:
    """Return an answer on a request that waited so many milliseconds, measured and simulated, and ran 100, as simulated."""
    none = {"alone": 0, "residual": 0, "residual_share": None}
    return {
        "trusted": trusted, "left_out": 0, "clients": [], "cost": cost,
        "latency_ms": {"measured": wait[0] + ran, "simulated": wait[1] + 100},
        "wait_ms": {"measured": wait[0], "trusted": trusted, "simulated": wait[1], **none, "alone": 10},
        "run_ms": {"measured": ran, "trusted": ran == 100, "simulated": 100, **none},
        "others": [{"id": "a", "client": "x", "wait_ms": wait[1] - 10, "run_ms": 0}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            blamed((949, 930), True, scaled_by=1.22),
            [
                "It waited 949 ms (simulated 930 ms): 10 ms even alone, 920 ms because of #7 (x).",
                "It ran 100 ms.",
                "Simulated once without each of the requests that were in the server with it. Its simulated latency is "
                "1.8 % below the measured one. All steps were simulated 22.0 % longer, as they really took.",
            ],
        ),
        (
            blamed((949, 949), True, ran=151) | {"program": PROGRAM},
            [
                "It waited 949 ms: 10 ms even alone, 939 ms because of #7 (x).",
                "Simulated, it runs 100 ms, but it really ran 151 ms, so who slowed it cannot be told.",
                "With it, program <trip> took 2.00 s for 2 calls: 1.50 s even alone, 400 ms because of program p (#7 by 300 ms).",
                "Simulated once without each of the requests that were in the server with it. Its simulated latency is "
                "4.6 % below the measured one.",
            ],
        ),
        (
            blamed((949, 50), False),
            ["Simulated, it waits 50 ms, but it really waited 949 ms, so who delayed it cannot be told."],
        ),
    ],
)
def test_who_delayed_a_request_is_told_only_if_the_simulation_waits_as_long_as_it_did(
    live: Tab, answer: dict[str, Any], told: list[str]
) -> None:
    live.page.evaluate(
        """answer => {
          const ask = globalThis.fetch;
          globalThis.fetch = async () => ({ ok: true, json: async () => answer });
          const box = globalThis.blameBox = EB.blameAt("", new Map([["a", 7]]), () => ({}));
          box.querySelector("button").onclick().finally(() => { globalThis.fetch = ask; });
        }""",
        answer,
    )
    live.until("globalThis.blameBox.querySelector('p')")
    assert live.page.evaluate("[...blameBox.querySelectorAll('p')].map(p => p.textContent)") == told


@pytest.mark.full
def test_the_help_closes_with_escape_and_the_focus_returns(tab: Tab) -> None:
    page = tab.open()
    page.focus("#help-open")
    page.keyboard.press("Enter")
    assert page.locator("#help-terms dt").count() == page.locator("#help-terms dd").count() > 0
    assert page.is_visible("#help svg")
    page.keyboard.press("Escape")
    assert page.is_hidden("#help")
    assert page.evaluate("document.activeElement.id") == "help-open"
