"""GET /events: the steps of the loop as server-sent events, each a record as in trace files.

The `id` of an event is the number of the step. A client that reconnects with Last-Event-ID continues where it was, and
`event: gap` reports what it missed. With `detail=1`, which the live page sends, there are also `state` (first, the
server's configuration and the requests' numbers), `policy` (a switch), `arrival`,
`departure` and `number` (of a request without an arrival, which is background work).
With `compact=1`, which it sends too, a step that repeats the one before has no members: 0.2 KB instead of 1.9 with 16 members.
A viewer that does not read costs the loop nothing.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from flask import Response, request
from pydantic import Field

from api import generation
from api.admin.policy import last_failure
from api.http.errors import ApiError, shown
from api.http.openapi import EVENTS, Routes
from api.pages.feed_reader import FeedReader
from api.service import LoadedEngine, Service
from api.streaming import event_stream
from config import VERSION
from observe.feed import CAPACITY, Viewer, event

RUN = uuid.uuid4().hex[:12]  # another process counts its steps from 1 again
Switch = Literal["0", "1"]


def routes_of(service: Service) -> Routes:
    """Return the route."""
    routes = Routes("events", "operations")

    @routes.get(
        "/events", "the steps of the batching loop, as an endless stream of server-sent events", answer={EVENTS: None},
        errors=(400, 503),
        query={
            "last": Annotated[int, Field(ge=0, le=CAPACITY)], "after": Annotated[int, Field(ge=0)], "detail": Switch,
            "compact": Switch,
        },
    )  # fmt: skip
    def events() -> Response:
        engine = service.engine or generation.ready_engine(service)  # a stalled engine can be watched
        after = _number(request.headers.get("Last-Event-ID"), "the header Last-Event-ID")
        if after is None:
            after = _number(request.args.get("after"), "after")
        last = min(_number(request.args.get("last"), "last") or 0, CAPACITY)
        options = {name: _number(request.args.get(name), name) == 1 for name in ("detail", "compact")}
        response = _stream(service, engine, after, last, **options)
        if origin := _same_host(request.headers.get("Origin", "")):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
        return response

    return routes


def _number(text: str | None, name: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ApiError(f"{name} is {shown(text)}, but must be a whole number. Send one, or leave it out")
    return int(text)


def _same_host(origin: str) -> str:
    """Return the origin if it is this host on any port, so that one page can watch a race of two servers."""
    with contextlib.suppress(ValueError):
        if urlsplit(origin).hostname == urlsplit(f"//{request.host}").hostname:
            return origin
    return ""


def _mark_gone(viewers: list[Viewer]) -> None:
    """Note that the clients of these viewers have disconnected."""
    for viewer in viewers:
        viewer.gone = True


def _stream(
    service: Service, engine: LoadedEngine, after: int | None, last: int, detail: bool, compact: bool
) -> Response:
    sock: socket.socket | None = request.environ.get("gunicorn.socket")

    def hang_up() -> None:
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    feed = service.feed
    viewer = feed.enter(hang_up)
    if viewer is None:
        raise ApiError(
            f"too many viewers (limit {feed.max_viewers}). Close one, then try again",
            type="unavailable_error",
            retry_after=5,
        )
    watched = service.watcher.add(sock, _mark_gone, viewer) if sock is not None else None

    def leave() -> None:
        if watched is not None:
            service.watcher.remove(watched)
        feed.leave(viewer)

    reader = FeedReader(feed, viewer, after, last, detail=detail, compact=compact)
    reader.greeting = b"retry: 1000\n\n" + (event("state", state(service, engine)) if detail else b"")
    response = event_stream(reader)
    response.call_on_close(leave)
    return response


def state(service: Service, engine: LoadedEngine) -> dict[str, Any]:
    """Return what a page needs to show the steps; `epoch` is the wall-clock time at 0 of the loop's clock."""
    manager = engine.manager
    pages = manager.pages
    return {
        "run": RUN,
        "version": VERSION,
        "epoch": time.time() - time.perf_counter(),
        "now": time.perf_counter(),
        "policy": manager.policy_name,
        "last_failure": last_failure(engine),
        "slots": manager.slots,
        "max_queue": manager.max_queue,
        "model": engine.model_name,
        "parameters": engine.facts.get("parameters"),
        "upstreams": engine.facts.get("upstreams"),
        "watched": "watched" in engine.facts,
        "instead": engine.facts.get("instead"),
        "device": engine.device,
        "dtype": engine.dtype,
        "context": engine.context,
        "chats": engine.chats,
        "sampling": dict(engine.sampling),
        "pages_total": pages.total if pages is not None else 0,
        "show_text": service.config.dashboard_show_text,
        "demo": service.config.demo,
        "waiting": list(service.feed.waiting.copy().values()),
        "numbers": service.feed.numbers.copy(),
    }
