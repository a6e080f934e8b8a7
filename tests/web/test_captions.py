"""What the captions say of runs, and what the tour asks for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from browser import in_a_browser

import policies
from api.schemas.demo import LoadRequest
from scheduling.scheduler import Scheduler
from tests.support.scheduling import Run, drive, requests

pytestmark = in_a_browser


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
        began = next(record["t"] for record in run.records() if record["n"] == caption["n"])
        others = [s.max_tokens for s in run.sequences if s.arrived_at <= began and joined_at[s.id] > caption["n"]]
        is_shortest = run.sequences[who].max_tokens < min(others)
        assert is_shortest == (f"shortest of {len(others) + 1}," in caption["text"])


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
