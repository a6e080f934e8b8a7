"""The figures of `top` are those of the live page: its model counts the same runs in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from typing import Any

import pytest
from rich.console import Console

from client import top
from client.tiles import Tiles
from tests.support import ROOT

NODE = shutil.which("node")
PAGE = """
const model = new (require(process.argv[1]).Model)();
for (const [kind, value] of JSON.parse(require("fs").readFileSync(0, "utf8"))) {
  if (kind === "step") model.add(value);
  else if (kind !== "show") model[kind](value);
  else console.log(JSON.stringify(model.tiles(model.columns.length - 1, 10, value)));
}
"""
SAME = {
    "tokens/s": "tokensPerSecond", "step": "stepSeconds", "fill": "fill", "accepted": "acceptance", "steps": "steps",
    "TTFT p50": "ttft50", "TTFT p99": "ttft99", "ITL p50": "itl50", "ITL p99": "itl99",
}  # fmt: skip
Event = tuple[str, Any]


def recorded(policy: str) -> list[Event]:
    """Return a recorded run as events, ten times as slow as it was, so that steps leave the last ten seconds."""
    events: list[Event] = []
    for line in (ROOT / "web" / "demo" / f"{policy}.jsonl").read_text().splitlines()[1:]:
        record = json.loads(line)
        record["t"] *= 10
        if "members" in record:
            record["seconds"] *= 10
        events.append(("step" if "members" in record else "arrival", record))
        if "members" in record and record["n"] % 7 == 0:
            end = record["t"] + record["seconds"]
            events += [("show", end), ("show", end + 0.5)]
    return [*events, ("show", events[-1][1]["t"] + 99)]


def step(n: int, members: list[tuple[str, str, int, int]], **more: Any) -> Event:
    known = [
        {"id": id, "slot": slot, "phase": phase, "tokens": tokens, "computed": tokens, "total": 40}
        for slot, (id, phase, tokens, _) in enumerate(members)
    ]
    drafts = [
        {"id": id, "drafted": tokens - 1, "accepted": accepted}
        for id, phase, tokens, accepted in members
        if phase == "decode" and tokens > 1
    ]
    spent = {"useful": len(members), "padding": 0, "held": 0, "idle": 2 - len(members), "recomputed": 0, "rejected": 0}
    pages = {"used": 1, "total": 9}
    return "step", {
        "n": n, "t": float(n), "seconds": 0.75, "policy": "x", "queue": 0, "members": known, "joined": [], "left": [],
        "slot_steps": spent, "pages": pages, "drafts": drafts, **more,
    }  # fmt: skip


def handmade() -> list[Event]:
    """Return a run with draft tokens, a preemption, an answer of one token and a request that gives up."""
    events = [
        ("arrival", {"id": "a", "t": 0.25, "prompt_tokens": 4, "max_tokens": 9}),
        ("arrival", {"id": "b", "t": 0.5, "prompt_tokens": 4, "max_tokens": 1}),
        step(1, [("a", "prefill", 4, 0)]),
        step(2, [("a", "prefill", 4, 0), ("b", "prefill", 4, 0)], left=[{"id": "b", "reason": "length"}]),
        step(3, [("a", "decode", 1, 0)]),
        step(4, [("a", "decode", 4, 2)]),
        ("arrival", {"id": "c", "t": 4.5, "prompt_tokens": 4, "max_tokens": 9}),
        step(5, [("c", "prefill", 4, 0)], displaced=["a"]),
        step(6, [("a", "prefill", 9, 0), ("c", "decode", 3, 0)]),
        step(7, [("a", "decode", 1, 0), ("c", "held", 1, 0)]),
        ("departure", {"id": "c", "t": 7.9, "reason": "cancelled"}),
        step(16, [("a", "decode", 2, 1)], left=[{"id": "a", "reason": "length"}]),
    ]
    ends = [[event, ("show", event[1]["t"] + 0.75)] for event in events]
    return [one for pair in ends for one in pair]


def of_the_terminal(events: list[Event]) -> list[dict[str, Any]]:
    watched = top.Watched()
    shown = []
    for kind, value in events:
        if kind == "show":
            shown.append(watched.figures(value))
        else:
            watched.add(kind, value)
    return shown


@pytest.mark.skipif(
    NODE is None, reason="no Node here: install it (Debian: apt install nodejs) to run the page's model"
)
@pytest.mark.parametrize(
    "events", [recorded("static"), recorded("dynamic"), handmade()], ids=["static", "dynamic", "made"]
)
def test_the_terminal_shows_what_the_live_page_shows(events: list[Event]) -> None:
    command = [str(NODE), "-e", PAGE, str(ROOT / "web" / "model.js")]
    done = subprocess.run(command, input=json.dumps(events), capture_output=True, text=True, check=True, timeout=300)
    pages = [json.loads(line) for line in done.stdout.splitlines()]
    shown = of_the_terminal(events)
    assert len(pages) == len(shown) > 5
    for ours, page in zip(shown, pages):
        if page is None:
            assert ours["steps"] == 0
            continue
        assert ours["running"] == page["running"]
        for name, there in SAME.items():
            if page["steps"] == 0 and name in ("step", "fill"):
                assert (ours[name], page[there]) == (None, 0)  # which the page shows as idle and as a dash
            else:
                assert ours[name] == pytest.approx(page[there]), name


def test_first_tokens_and_gaps_are_counted_when_they_are_known() -> None:
    tiles = Tiles()
    for kind, value in handmade()[:-2]:
        if kind != "show":
            getattr(tiles, "add" if kind == "step" else kind)(value)
    counted = [(one.record["n"], one.output, one.firsts, one.gaps) for one in tiles.steps]
    assert counted == [
        (1, 0, [], []),
        (2, 1, [2.25], []),  # b leaves with the step of its prompt
        (3, 2, [2.5], [1.0]),  # a's first token came with step 2
        (4, 3, [], [pytest.approx(1 / 3)] * 3),  # of three drafts two were right
        (5, 0, [], []),
        (6, 2, [1.25], [1.0]),  # c's first and next: both of its drafts were wrong
        (7, 2, [], [2.0, 1.0]),  # a's next token after its preemption, with step 6, is not its first
    ]
    later = tiles.figures(16.0)  # of steps 6 and 7
    assert (later["tokens/s"], later["steps"]) == (pytest.approx(0.4), 2)
    assert (later["TTFT p50"], later["ITL p50"], later["ITL p99"]) == (1.25, 1.0, pytest.approx(1.98))


def test_requests_that_left_are_forgotten() -> None:
    tiles = Tiles()
    for kind, value in handmade():
        if kind != "show":
            getattr(tiles, "add" if kind == "step" else kind)(value)
    tiles.add(step(40, [("z", "prefill", 4, 0)])[1])
    assert set(tiles.requests) == {"z"}
    assert len(tiles.steps) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminals_tiles_fit(width: int) -> None:
    watched = top.Watched()
    now = time.monotonic()
    watched.add("state", {"run": "x", "slots": 256, "policy": "dynamic", "model": "bard", "device": "cpu", "now": now})
    for kind, value in handmade():
        if kind != "show":
            watched.add(kind, {**value, "t": value["t"] + now - 14})
    watched.offset = now + 3 - time.monotonic()
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(top.screen(watched, "http://127.0.0.1:8500", width, 24))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    for name in ("waiting", "tokens/s", "step time", "KV pages", "accepted", "wasted rows", *top.TIMES):
        assert any(name in line for line in lines), name
    assert not any("…" in line for line in lines)
