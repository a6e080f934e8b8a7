"""The feed of steps: what viewers read from the ring, and that the loop never waits for one of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import connected
from flask import Flask

from api.pages.feed_reader import PING, PING_SECONDS, FeedReader
from api.streaming import frames as frames_of
from app import create_app
from config import Config
from observe.feed import FROZEN_SECONDS, Feed, Viewer, dumps, text
from scheduling.iteration import Iteration, Member, Members, SlotSteps
from tests.support import in_background, wait_until
from tests.support.fakes import FakeModel, fake_engine
from tests.support.scheduling import drive, make_scheduler, requests
from tests.support.servers import Server


def step(n: int, slots: int = 2) -> Iteration:
    """Return the record of a step in which two of the slots work."""
    members = Members.of([Member("a", 0, "prefill", 7, 7, 12), Member("b", 1, "decode", 1, 9, 11)])
    return Iteration(
        n, n * 0.5, 0.25, "dynamic", 3, members, ["a"], [("b", "length")], SlotSteps(2, 0, 0, slots - 2, 0), 4, 64
    )


def filled(count: int, capacity: int = 64) -> Feed:
    feed = Feed(capacity)
    for n in range(1, count + 1):
        feed.observe(step(n), [])
    return feed


def read(feed: Feed, at_least: int, **options: Any) -> list[dict[str, Any]]:
    """Return the first events that a viewer gets, as parsed from the wire."""
    viewer = feed.enter(lambda: None)
    assert viewer is not None
    found: list[dict[str, Any]] = []
    with contextlib.closing(frames_of(FeedReader(feed, viewer, **options))) as frames:  # type: ignore[type-var]
        while len(found) < at_least:
            news = parse(next(frames))
            assert news, f"nothing more came after {found}"
            found += news
    feed.leave(viewer)
    return found


def parse(frames: bytes) -> list[dict[str, Any]]:
    result = []
    for frame in frames.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if line[:1] != ":")
        if "data" in fields:
            result.append(fields | {"data": json.loads(fields["data"])})
    return result


def ids(events: list[dict[str, Any]]) -> list[int]:
    return [int(event["id"]) for event in events if "id" in event]


def test_an_event_is_the_record_with_its_number_as_id() -> None:
    (event,) = read(filled(1), 1, last=1)
    assert event == {"id": "1", "data": json.loads(json.dumps(step(1).to_dict()))}


def test_a_record_is_written_as_json_would_write_the_record() -> None:
    odd = step(4)
    odd.policy = 'a "members":[] policy'
    odd.members = Members.of([odd.members[0]._replace(id='q"\\\n\u2028é%s'), odd.members[1]])
    empty = Iteration(1, 0, 0, "p", 0, Members.of([]), [], [], SlotSteps(), 0, 0)
    for record in (step(3), odd, empty):
        assert text(record) == dumps(record.to_dict())


@pytest.mark.parametrize("policy", ["nobatch", "static", "dynamic", "chunked", "elastic"])
def test_compact_steps_have_the_members_that_follow_from_those_before(policy: str) -> None:
    trace = [(i * 30, 1 + i * 37 % 50, 1 + i * 11 % 29) for i in range(30)]
    run = drive(make_scheduler(policy, 5, budget=32), requests(*trace))
    feed = Feed(4096)
    for iteration in run.iterations:
        feed.observe(iteration, [])
    events = read(feed, len(run.iterations), last=4096, compact=True)
    members: list[dict[str, Any]] = []
    left_out = 0
    for event, record in zip(events, run.records(), strict=True):
        left_out += "members" not in event["data"]
        decoded = [m if m["phase"] == "held" else m | {"phase": "decode", "tokens": 1, "computed": m["computed"] + 1}
                   for m in members]  # fmt: skip
        members = event["data"].setdefault("members", decoded)
        assert event["data"] == json.loads(json.dumps(record))
    assert left_out > len(events) / 4


def test_a_compact_connection_begins_with_a_whole_step() -> None:
    run = drive(make_scheduler("dynamic", 2), requests((0, 3, 20)))
    feed = Feed(64)
    for iteration in run.iterations:
        feed.observe(iteration, [])
    whole = ["members" in event["data"] for event in read(feed, 4, after=10, compact=True)]
    assert whole[:2] == [True, False]


@pytest.mark.parametrize(
    ("asked", "seen"),
    [({"last": 5}, [16, 17, 18, 19, 20]), ({"after": 17}, [18, 19, 20]), ({"after": 4711}, [*range(1, 21)])],
    ids=["the last it asks for", "those after the one it had", "all that is kept since an earlier run"],
)
def test_a_viewer_begins_with(asked: dict[str, int], seen: list[int]) -> None:
    events = read(filled(20), len(seen), **asked)
    assert ids(events) == seen
    assert all("event" not in event for event in events)


def test_what_the_ring_has_no_more_is_a_gap() -> None:
    events = read(filled(100, capacity=10), 11, after=17)
    assert events[0] == {"event": "gap", "data": {"from": 18, "to": 90}}
    assert ids(events) == list(range(91, 101))


def test_a_step_without_a_record_is_no_gap() -> None:
    feed = filled(3)
    feed.observe(step(6), [])
    assert ids(read(feed, 3, after=1)) == [2, 3, 6]


def test_a_slow_viewer_is_told_what_it_missed() -> None:
    feed = filled(4, capacity=16)
    viewer = Viewer(lambda: None)
    frames = frames_of(FeedReader(feed, viewer, last=2))
    assert ids(parse(next(frames))) == [3, 4]
    for n in range(5, 105):
        feed.observe(step(n), [])
    events = parse(next(frames))
    gap = events[0]["data"]
    assert (events[0]["event"], gap["from"]) == ("gap", 5)
    assert ids(events) == list(range(gap["to"] + 1, 105))


def test_arrivals_and_departures_are_told_only_in_detail() -> None:
    feed = Feed(64)
    engine = fake_engine(FakeModel())
    manager = engine.manager
    manager.listeners.append(feed.on_arrival)
    manager.observers.append(feed.observe)
    try:
        inference = manager.enqueue(engine.make_inference("abc", 4, [97, 98, 99]))
        inference.wait_for_completion(60)
        gone = engine.make_inference("abc", 4, [97])
        feed.on_arrival(gone)
        feed.observe(None, [gone])
    finally:
        manager.stop()
    events = read(feed, 7, last=5, detail=True)
    assert ids(events) == [1, 2, 3, 4]
    assert read(feed, 4, last=4) == [event for event in events if "id" in event]
    arrivals = [e["data"] for e in feed_events(feed, "arrival")]
    assert [a["id"] for a in arrivals] == [inference.id, gone.id]
    assert (arrivals[0]["prompt_tokens"], arrivals[0]["max_tokens"]) == (3, 4)
    assert "prompt" not in arrivals[0]
    assert [e["data"]["id"] for e in feed_events(feed, "departure")] == [gone.id]
    assert feed.waiting == {}


def feed_events(feed: Feed, kind: str) -> list[dict[str, Any]]:
    return [parse(entry.frame)[0] for entry in feed.entries() if entry.kind == kind]


def test_prompts_are_told_only_where_they_may_be_shown() -> None:
    engine = fake_engine(FakeModel())
    engine.manager.stop()
    feed = Feed(8, show_text=True)
    feed.on_arrival(engine.make_inference("x" * 1000, 4, [97]))
    assert feed_events(feed, "arrival")[0]["data"]["prompt"] == "x" * 300


def test_readers_and_a_writer_at_once_lose_nothing_unseen() -> None:
    feed = Feed(128)
    results: list[list[dict[str, Any]]] = []

    def watch() -> None:
        found: list[dict[str, Any]] = []
        frames = frames_of(FeedReader(feed, Viewer(lambda: None), after=0))
        while not found or found[-1].get("id") != "3000":
            found += parse(next(frames))
        results.append(found)

    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(in_background(watch))
        for n in range(1, 3001):
            feed.observe(step(n), [])
            if n % 100 == 0:
                time.sleep(0.002)
    assert len(results) == 4
    for events in results:
        known = 0
        for event in events:
            if event.get("event") == "gap":
                assert event["data"]["from"] == known + 1
                known = event["data"]["to"]
            else:
                known += 1
                assert int(event["id"]) == known


def test_seventeen_viewers_are_one_too_many_unless_one_is_frozen() -> None:
    now = [0.0]
    feed = Feed(8, clock=lambda: now[0])
    hung_up: list[int] = []
    viewers = [feed.enter(lambda i=i: hung_up.append(i)) for i in range(16)]
    assert all(viewers)
    assert feed.enter(lambda: None) is None
    frozen = viewers[5]
    assert frozen is not None
    frozen.sending_since = 0.0
    assert feed.enter(lambda: None) is None
    now[0] = FROZEN_SECONDS + 1
    assert feed.enter(lambda: None) is not None
    assert hung_up == [5]
    assert len(feed.viewers) == 16


def test_a_quiet_viewer_is_pinged() -> None:
    now = [0.0]
    feed = Feed(8, clock=lambda: now[0])
    reader = FeedReader(feed, Viewer(lambda: None))
    assert reader.read() == b""
    now[0] = PING_SECONDS + 1
    assert [reader.read(), reader.read()] == [PING, b""]


@pytest.mark.parametrize("end", [lambda feed, viewer: feed.close(), lambda feed, viewer: feed.leave(viewer)])
def test_reading_ends_with_the_viewer_and_with_the_feed(end: Any) -> None:
    feed = filled(3)
    viewer = feed.enter(lambda: None)
    assert viewer is not None
    reader = FeedReader(feed, viewer, last=3)
    assert ids(parse(reader.read())) == [1, 2, 3]
    end(feed, viewer)
    assert (reader.read(), reader.ended) == (b"", True)


@pytest.fixture
def app(model: FakeModel) -> Iterator[Flask]:
    yield from connected(create_app(Config(policy="dynamic")), fake_engine(model))


def test_the_route_streams_steps_after_the_state_of_the_server(app: Flask) -> None:
    client = app.test_client()
    for _ in range(2):
        client.post("/inference", json={"prompt": "hi", "num_tokens": 3})
    reply = client.get("/events?detail=1&last=100")
    assert reply.content_type == "text/event-stream; charset=utf-8"
    chunks = iter(reply.iter_encoded())
    head = next(chunks)
    assert head.startswith(b"retry: 1000\n\n")
    (state,) = parse(head.partition(b"\n\n")[2])
    assert state["event"] == "state"
    assert state["data"]["slots"] == 8
    assert state["data"]["policy"] == "dynamic"
    assert ids(parse(next(chunks))) == [1, 2, 3, 4, 5, 6]
    assert len(app.extensions["service"].feed.viewers) == 1
    reply.close()
    assert len(app.extensions["service"].feed.viewers) == 0


def test_the_header_goes_before_the_question(app: Flask) -> None:
    client = app.test_client()
    client.post("/inference", json={"prompt": "hi", "num_tokens": 5})
    reply = client.get("/events?after=1", headers={"Last-Event-ID": "3"})
    pieces = itertools.islice(reply.iter_encoded(), 2)
    assert ids(parse(b"".join(pieces).partition(b"\n\n")[2])) == [4, 5]
    reply.close()


@pytest.mark.parametrize("question", ["last=x", "after=-1", "detail=yes", "last=" + "9" * 30])
def test_what_is_no_number_is_refused(app: Flask, question: str) -> None:
    reply = app.test_client().get(f"/events?{question}")
    assert reply.status_code == 400
    assert "whole number" in reply.get_json()["error"]["message"]


def test_a_page_of_this_host_alone_may_read_across_ports(app: Flask) -> None:
    for origin, allowed in (("http://localhost:9", True), ("http://evil.example", False)):
        reply = app.test_client().get("/events", headers={"Origin": origin})
        assert (reply.headers.get("Access-Control-Allow-Origin") == origin) is allowed
        reply.close()


def test_the_seventeenth_gets_503(app: Flask) -> None:
    replies = [app.test_client().get("/events") for _ in range(17)]
    assert [reply.status_code for reply in replies] == [200] * 16 + [503]
    assert int(replies[-1].headers["Retry-After"]) >= 1
    for reply in replies:
        reply.close()
    assert len(app.extensions["service"].feed.viewers) == 0


@pytest.mark.process
def test_frozen_viewers_hinder_nobody_and_the_server_still_ends(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "dynamic", "--model", "mock:llm-mock@50") as server:
        sockets = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(16)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(b"GET /events?detail=1&last=4096 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: b"eb_event_viewers 16.0" in server.get("/metrics").body)
        assert server.post(prompt="ROMEO:", num_tokens=200).status == 200
        assert server.get("/events").status == 503
        for sock in sockets[:8]:
            sock.close()
        wait_until(lambda: b"eb_event_viewers 8.0" in server.get("/metrics").body)
        assert server.stop() == 0
        for sock in sockets:
            sock.close()
