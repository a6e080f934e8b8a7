"""Recorded runs on the live page: what is drawn is what happened."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, in_a_browser

from tests.support.scheduling import drive, make_scheduler, requests

pytestmark = in_a_browser


@pytest.mark.parametrize("policy", ["static", pytest.param("dynamic", marks=pytest.mark.full), "chunked"])
def test_what_is_drawn_is_what_happened(live: Tab, tmp_path: Path, policy: str) -> None:
    trace = [(i * 7, 3 + i * 5 % 40, 1 + i * 11 % 23) for i in range(40)]
    run = drive(make_scheduler(policy, 6, budget=32), requests(*trace))
    records = run.records()
    page = live.replay(records, tmp_path)
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
    page.select_option("#axis", "steps")


def drop(tab: Tab, opened: str) -> None:
    """Drop a run on the page that is open."""
    run = drive(make_scheduler("static", 4), requests((0, 5, 3), (0, 9, 8)))
    page = tab.page
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


def test_a_run_may_be_dropped_on_the_page(live: Tab) -> None:
    drop(live, "EB.page.model !== EB.page.live")


@pytest.mark.full
def test_a_run_may_be_dropped_on_the_race(tab: Tab) -> None:
    tab.open("/race")
    drop(tab, "EB.race.lanes.length === 1")


def test_every_cell_of_a_short_run_is_painted(live: Tab, tmp_path: Path) -> None:
    run = drive(make_scheduler("static", 4), requests((0, 5, 3), (0, 9, 8), (1, 2, 6)))
    page = live.replay(run.records(), tmp_path)
    page.focus("#seek")
    page.keyboard.press("End")
    live.until("EB.page.index === EB.page.model.columns.length - 1")
    cells = page.evaluate("EB.page.model.count().cells")
    painted = sum(cells[kind] for kind in ("prefill", "decode", "held", "paused"))
    live.until(f"EB.page.picture.to === EB.page.index && EB.page.picture.cells === {painted}")


@pytest.mark.full
def test_the_picture_has_as_many_rows_as_are_in_use(live: Tab, tmp_path: Path) -> None:
    run = drive(make_scheduler("dynamic", 16), requests((0, 2, 700), *[(0, 2, 3)] * 15))
    page = live.replay(run.records(), tmp_path)
    live.until("EB.page.picture.rows === 16")
    page.focus("#seek")
    page.keyboard.press("End")
    live.until("EB.page.picture.rows === 8")


def test_a_request_that_waits_at_the_moment_shown_has_waited_as_long_as_it_is_there(live: Tab, tmp_path: Path) -> None:
    run = drive(make_scheduler("static", 2), requests((0, 5, 9), (0, 5, 9), (1, 5, 3)))
    arrivals = [{"id": s.id, "t": s.arrived_at, "prompt_tokens": 5, "max_tokens": s.max_tokens} for s in run.sequences]
    page = live.replay(arrivals + run.records(), tmp_path)
    page.focus("#seek")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    live.until("document.querySelector('#rows').textContent.includes('waiting')")
    cells = page.locator("#rows tr", has_text="waiting").locator("td").all_text_contents()
    assert cells[4] == cells[5]


def test_a_preempted_request_waits_again_and_its_next_token_is_not_its_first(reader: Any) -> None:
    states, gaps, first = reader.evaluate(
        """() => {
          const model = new EB.Model();
          model.arrival({ id: "a", t: 0, prompt_tokens: 4, max_tokens: 9 });
          const steps = { useful: 1, padding: 0, held: 0, idle: 0, recomputed: 0 };
          const step = (n, phase, tokens, computed, more) => model.add({ n, t: n, seconds: 1, policy: "x", queue: 0,
            members: phase ? [{ id: "a", slot: 0, phase, tokens, computed, total: 13 }] : [], joined: [], left: [],
            slot_steps: steps, pages: { used: 1, total: 2 }, ...more });
          step(1, "prefill", 4, 4, { joined: ["a"] });
          step(2, "decode", 1, 5);
          step(3, null, 0, 0, { displaced: ["a"] });
          const states = model.requestsAt(model.columns.length - 1, { live: true }).waiting.map((one) => one.state);
          step(4, "prefill", 6, 6, { joined: ["a"] });
          step(5, "decode", 1, 7);
          const request = [...model.requests.values()].find((one) => one.id === "a");
          return [states, model.columns.map((column) => column.gaps), request.first];
        }"""
    )
    assert states == ["preempted"]
    assert gaps == [[], [1], [], [], [2, 1]]
    assert first == 2


def test_a_step_says_how_long_it_waited_for_token_masks_and_how_many_experts_it_read(reader: Any) -> None:
    without, waited, mixed = reader.evaluate(
        """() => {
          const model = new EB.Model();
          const step = (n, masks) => model.add({ n, t: n, seconds: 0.05, policy: "x", queue: 0,
            members: [{ id: "a", slot: 0, phase: "decode", tokens: 1, computed: n, total: 13 }], joined: [], left: [],
            slot_steps: { useful: 1 }, pages: { used: 1, total: 2 }, ...masks });
          step(1, {});
          step(2, { mask_seconds: 0.012 });
          step(3, { experts: { read: 13, of: 24 } });
          return [0, 1, 2].map((index) => EB.describe(model, { index, slot: 0 }));
        }"""
    )
    assert "masks" not in without
    assert waited.endswith("token masks: 12 ms of this step")
    assert mixed.endswith("13 of 24 experts read")
