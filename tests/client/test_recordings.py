"""What shows a recorded or a running server beside the page: the trace for Perfetto, and the terminal's view."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from rich.console import Console
from werkzeug.serving import make_server

from app import connect, create_app
from client import tiles, top
from client.report import waste
from client.send import events
from client.send.target import Target
from config import Config
from dev.tools import trace_export
from tests.support import wait_until
from tests.support.fakes import FakeModel, fake_engine
from tests.support.mock_server import mock_server
from tests.support.scheduling import drive, make_scheduler
from tests.support.scheduling import requests as requests_at


def static_run() -> list[dict[str, Any]]:
    return drive(make_scheduler("static", 4), requests_at((0, 5, 3), (0, 9, 8), (1, 2, 6))).records()


def test_a_trace_has_a_slice_for_each_stay_and_no_overlaps_in_a_slot() -> None:
    events = trace_export.trace(static_run())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["tid"] >= trace_export.FIRST_SLOT]
    assert {event["cat"] for event in slices} == {"prefill", "decode", "held"}
    for slot in {event["tid"] for event in slices}:
        here = sorted((e for e in slices if e["tid"] == slot), key=lambda e: e["ts"])
        for before, after in itertools.pairwise(here):
            assert before["ts"] + before["dur"] <= after["ts"]
    tokens = sum(event["args"]["tokens"] for event in slices)
    assert tokens == sum(m["tokens"] for record in static_run() for m in record["members"])
    json.dumps(events, allow_nan=False)


def test_a_recording_is_read_with_and_without_the_prefix_of_events() -> None:
    lines = [json.dumps(record) for record in static_run()]
    plain = list(trace_export.records(lines))
    assert plain == list(trace_export.records([f"data: {line}" for line in lines] + ["", "id: 7"]))
    assert trace_export.trace([])["traceEvents"]


def test_the_terminal_shows_slots_and_waste() -> None:
    watched = top.Watched()
    watched.add("state", {"run": "x", "slots": 4, "policy": "static", "model": "m", "device": "cpu", "now": 0.0})
    for record in static_run():
        watched.add("step", record)
    last = watched.steps[-1]
    figures = watched.figures(last["t"] + last["seconds"])
    assert sum(figures["waste"].values()) == pytest.approx(4 * figures["steps"])
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(top.slots_picture(watched, 90, 20))
        console.print(waste.bar(figures["waste"], 40))
    shown = console.export_text()
    assert "╱" in shown
    assert "75 % idle" in shown
    assert shown.count("\n   ") >= 3


def test_the_terminal_follows_a_change_of_policy() -> None:
    watched = top.Watched()
    watched.add("state", {"run": "x", "slots": 4, "policy": "dynamic", "now": 0.0})
    watched.add("policy", {"policy": "static", "max_batch_size": 1})
    assert watched.state["slots"] == 4  # the engine's, of which a policy may use fewer
    assert watched.state["policy"] == "static"


@pytest.fixture
def url() -> Iterator[str]:
    app = create_app(Config(policy="dynamic"))
    service = app.extensions["service"]
    connect(service, fake_engine(FakeModel()))
    app.test_client().post("/inference", json={"prompt": "hi", "num_tokens": 9})
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    service.stop()
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_terminal_reads_a_server(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = top._lines

    def one_line(watched: top.Watched, end: float, stop: threading.Event) -> None:
        wait_until(lambda: watched.figures(time.monotonic() + watched.offset)["steps"] == 9)
        over = iter([False, True])
        lines(watched, math.inf, SimpleNamespace(wait=lambda seconds: next(over)))  # type: ignore[arg-type]

    monkeypatch.setattr(top, "_lines", one_line)
    monkeypatch.setattr(tiles, "WINDOW", 600.0)  # a busy machine may come to this long after the steps
    assert top.main([url, "--seconds", "0.7"]) == 0
    assert "9 steps" in capsys.readouterr().out


def test_the_terminal_view_ends_at_once_where_no_server_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["127.0.0.1:1"]) == 3
    assert capsys.readouterr().err.startswith("error: cannot reach http://127.0.0.1:1. Is the server running?")
    with mock_server() as other:
        assert top.main([other.url]) == 3
    assert capsys.readouterr().err.startswith(f"error: {other.url}/events answered 404")
    assert top.main(["[zz]:80"]) == 2


def test_the_terminal_view_reconnects_to_a_server_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    connections: list[str | None] = []

    @contextlib.asynccontextmanager
    async def connect(target: Target, headers: dict[str, str], *_: Any, **__: Any) -> AsyncIterator[AsyncIterator[Any]]:
        connections.append(headers.get("Last-Event-ID"))
        if len(connections) == 3:
            stop.set()
        if len(connections) == 2:
            raise aiohttp.ClientConnectionError

        async def sent() -> AsyncIterator[tuple[str, bytes]]:
            yield "state", b'{"run": "x", "now": 0.0}'
            yield "step", b'{"n": 7, "policy": "static"}'

        yield sent()

    monkeypatch.setattr(events, "watch", connect)
    monkeypatch.setattr(top, "RETRY_SECONDS", 0.0)
    watched = top.Watched()
    asyncio.run(top.follow(watched, Target("http://h"), stop))
    assert connections == [None, "7", "7"]
    assert watched.state["run"] == "x"
