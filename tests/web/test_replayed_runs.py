"""Recorded runs on the live page: what is drawn is what happened."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, in_a_browser
from driver import drive, requests, scheduler

pytestmark = in_a_browser


def replayed(tab: Tab, tmp_path: Path, records: list[dict[str, Any]]) -> Any:
    """Open the page and let it replay these records."""
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = tab.open()
    page.set_input_files("#file", path)
    return page


@pytest.mark.parametrize("policy", ["static", pytest.param("dynamic", marks=pytest.mark.full), "chunked"])
def test_what_is_drawn_is_what_happened(tab: Tab, tmp_path: Path, policy: str) -> None:
    trace = [(i * 7, 3 + i * 5 % 40, 1 + i * 11 % 23) for i in range(40)]
    run = drive(scheduler(policy, 6, budget=32), requests(*trace))
    records = run.records()
    page = replayed(tab, tmp_path, records)
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
    ("path", "opened"),
    [
        ("/", "EB.page.model !== EB.page.live"),
        pytest.param("/race", "EB.race.lanes.length === 1", marks=pytest.mark.full),
    ],
)
def test_a_run_may_be_dropped_on_the_page(tab: Tab, path: str, opened: str) -> None:
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


def test_every_cell_of_a_short_run_is_painted(tab: Tab, tmp_path: Path) -> None:
    run = drive(scheduler("static", 4), requests((0, 5, 3), (0, 9, 8), (1, 2, 6)))
    page = replayed(tab, tmp_path, run.records())
    tab.until("EB.page.model !== EB.page.live")
    page.focus("#seek")
    page.keyboard.press("End")
    tab.until("EB.page.index === EB.page.model.columns.length - 1")
    tab.until("EB.page.picture.to === EB.page.index")
    cells = page.evaluate("EB.page.model.count().cells")
    assert page.evaluate("EB.page.picture.cells") == sum(
        cells[kind] for kind in ("prefill", "decode", "held", "paused")
    )


@pytest.mark.full
def test_the_picture_has_as_many_rows_as_are_in_use(tab: Tab, tmp_path: Path) -> None:
    run = drive(scheduler("dynamic", 16), requests((0, 2, 700), *[(0, 2, 3)] * 15))
    page = replayed(tab, tmp_path, run.records())
    tab.until("EB.page.picture.rows === 16")
    page.focus("#seek")
    page.keyboard.press("End")
    tab.until("EB.page.picture.rows === 8")


def test_a_request_that_waits_at_the_moment_shown_has_waited_as_long_as_it_is_there(tab: Tab, tmp_path: Path) -> None:
    run = drive(scheduler("static", 2), requests((0, 5, 9), (0, 5, 9), (1, 5, 3)))
    arrivals = [{"id": s.id, "t": s.arrived_at, "prompt_tokens": 5, "max_tokens": s.max_tokens} for s in run.sequences]
    page = replayed(tab, tmp_path, arrivals + run.records())
    tab.until("EB.page.model !== EB.page.live")
    page.focus("#seek")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    tab.until("document.querySelector('#rows').textContent.includes('waiting')")
    cells = page.locator("#rows tr", has_text="waiting").locator("td").all_text_contents()
    assert cells[4] == cells[5]
