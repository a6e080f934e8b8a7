"""The refusals of a full server: whoever makes one, Flask, a thread before Flask, or the main thread, its bytes are the same."""

from __future__ import annotations

import re
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any

import pytest
from gunicorn import util
from gunicorn.config import Config as GunicornConfig
from gunicorn.http import wsgi
from gunicorn.http.parser import RequestParser
from gunicorn.workers.gthread import TConn

from api.hooks.refusal import refuse
from api.service import Service
from app import create_app
from config import Config
from launch.worker import worker as module
from launch.worker.connections import Parser, http_date, plain_request
from launch.worker.worker import Worker
from tests.support.fakes import fake_engine

SITE = "https://chat.example.org"
SETTINGS: list[dict[str, Any]] = [
    {}, {"cors_origins": SITE}, {"cors_origins": "*", "api_key": "k"}, {"overload_status": "503"}, {"trusted_hosts": "x"},
]  # fmt: skip
HEADERS = ["", "X-Request-Id: mine\r\n", "X-Request-Id: batch_1\r\n", f"Origin: {SITE}\r\n", "Origin: https://evil.org\r\n",
           "Authorization: Bearer k\r\n", "X-Api-Key: k\r\n", "x-api-key: wrong\r\n", "Sec-Fetch-Site: cross-site\r\n",
           "Sec-Fetch-Site: same-site\r\n", "X-Queue-Timeout: never\r\n", "Host: other\r\n",
           "X-Request-Id:spaced \r\nConnection: Keep-Alive\r\n"]  # fmt: skip
VARIES = re.compile(rb"Date: [^\r]*\r\n|\b[0-9a-f]{32}\b")  # the clock, and ids that the server has drawn
BODY = b'{"prompt": "x"}'


class Door:
    """A worker that takes connections but does not run, in front of a server without a free place."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.app = create_app(Config(policy="dynamic", **settings), fake_engine(max_queue=0, max_batch_size=1))
        self.service: Service = self.app.extensions["service"]
        self.service.serves = True
        self.logged: list[Any] = []
        self.service.access_log.write = self.logged.append  # type: ignore[method-assign]
        assert self.service.engine is not None
        self.manager = self.service.engine.manager
        self.manager.inbox.places.taken = self.manager.inbox.places.limit
        self.worker = Worker.__new__(Worker)
        self.worker.__dict__.update(
            alive=True, wsgi=self.app, cfg=GunicornConfig(), keepalived_conns=deque(), max_keepalived=9, _is_plain=True,
            poller=selectors.DefaultSelector(), finish=lambda conn, result: None,
        )  # fmt: skip

    def ask(self, message: bytes, serve: Callable[[TConn], Any]) -> tuple[Any, ...]:
        """Return what a client gets, what is logged and what is counted; without what differs each time."""
        meters = self.service.meters
        before = (meters.received, *(sum(c.values()) for c in (meters.totals, meters.http, meters.rejected)))
        client, server = socket.socketpair()
        with client, server:
            client.sendall(message)
            serve(TConn(self.worker.cfg, server, ("127.0.0.1", 1), ("127.0.0.1", 2)))
            answer = VARIES.sub(b"", client.recv(65536))
            self.worker.keepalived_conns.clear()
            if server in self.worker.poller.get_map():
                self.worker.poller.unregister(server)
        record = {k: v for k, v in self.logged.pop().items() if k not in ("time", "seconds")}
        record["id"] = VARIES.sub(b"", record["id"].encode())
        after = (meters.received, *(sum(c.values()) for c in (meters.totals, meters.http, meters.rejected)))
        return answer, record, [b - a for a, b in zip(before, after)]


@pytest.fixture(params=SETTINGS, ids=str)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    door = Door(request.param)
    yield door
    door.manager.stop()


def post(path: str, headers: str = "", body: bytes = BODY) -> bytes:
    host = "" if "Host:" in headers else "Host: localhost\r\n"
    return f"POST {path} HTTP/1.1\r\n{host}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_refusal_is_the_same_from_flask_and_from_both_before_it(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [route.removeprefix("POST ") for route in door.service.generating]
    messages = [post(path) for path in paths] + [post(path, h) for path in ("/", "/v1/messages") for h in HEADERS]
    early = 0
    for message in messages:
        with monkeypatch.context() as patch:
            patch.setattr(module, "refuse", lambda *given: None)
            by_flask = door.ask(message, door.worker._serve)
        assert door.ask(message, door.worker._serve) == by_flask

        def refused(conn: TConn) -> None:
            nonlocal early
            if door.worker._refuse(conn):
                early += 1
            else:
                door.worker._serve(conn)

        assert door.ask(message, refused) == by_flask
    config = (
        door.service.config
    )  # four have the key; of each two, four are from pages of others, and one names another host
    left = 2 * (4 - (config.cors_origins == SITE) + bool(config.trusted_hosts))
    assert early == (4 if config.api_key else len(messages) - left)


def test_the_date_is_the_one_that_gunicorn_writes() -> None:
    for moment in (0, 1.9, 1.95, 1e9, 1.7e9 + 0.5, 0):
        assert http_date(moment) == util.http_date(moment)
    assert abs(parsedate_to_datetime(http_date()).timestamp() - time.time()) < 60


def environ(path: str = "/inference", **more: str) -> dict[str, Any]:
    return {"REQUEST_METHOD": "POST", "PATH_INFO": path, "SCRIPT_NAME": "", "QUERY_STRING": "", **more}


def test_only_a_request_that_would_take_a_place_of_a_full_server_is_refused_early() -> None:
    door, ignore = Door({}), lambda *response: None
    places = door.manager.inbox.places
    try:
        assert refuse(door.app, environ(), ignore)
        assert refuse(door.app, environ("/health"), ignore) is None
        assert refuse(door.app, environ(**{module.PLACE: "lent"}), ignore) is None
        places.taken -= 1
        assert refuse(door.app, environ(), ignore) is None
        places.taken += 1
        door.service.draining = True
        assert refuse(door.app, environ(), ignore) is None
    finally:
        door.manager.stop()


@pytest.mark.parametrize(
    "message",
    [
        post("/inference")[:-1],
        post("/inference") + b"P",
        post("/inference").replace(b"Content-Length", b"Content_Length"),
        post("/inference?x=1"),
        post("/inference", "Content-Length: 15\r\n"),
        post("/inference", "Connection: close\r\n"),
        post("/inference", "Expect: 100-continue\r\n"),
        post("/inference", "Transfer-Encoding: chunked\r\n"),
        post("/inference", "X-Forwarded-Proto: https\r\n"),
        post("/inference", "Folded: a\r\n b\r\n"),
        post("/inference", "X: \xe9\r\n"),
        post("/inference", "".join(f"X-{i}: 1\r\n" for i in range(100))),
        post("/inference").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post("/inference", body=b"x" * 9000),
        b"",
    ],
    ids=lambda message: repr(message[-40:]),
)
def test_what_two_parsers_could_read_differently_is_left_to_gunicorn_whole(message: bytes) -> None:
    assert plain_request(message) is None
    assert b"".join(message_of(Parser, message)[1:]) == b"".join(message_of(RequestParser, message)[1:])


def message_of(parser: type[RequestParser], message: bytes) -> tuple[Any, ...]:
    """Return the WSGI environment of a message that arrives whole, its body, and what is left unread behind it."""
    client, server = socket.socketpair()
    with client, server:
        client.sendall(message)
        client.shutdown(socket.SHUT_WR)
        parses = parser(GunicornConfig(), server, ("127.0.0.1", 1))
        try:
            request = next(parses)
        except Exception as error:
            return None, repr(error).encode()
        sent = SimpleNamespace(send=lambda data: None)
        environ = wsgi.create(request, sent, ("127.0.0.1", 1), ("127.0.0.1", 2), parses.cfg)[1]
        body = environ.pop("wsgi.input").read()
        for name in ("wsgi.errors", "wsgi.early_hints", "gunicorn.socket"):
            del environ[name]
        assert request.should_close() is (b"HTTP/1.0" in message or b"Connection: close" in message)
        parses.finish_body()
        return environ, body, parses.unreader.take_buffered() + server.recv(65536)


def test_a_plain_request_is_read_as_gunicorn_reads_it() -> None:
    headers = [
        "",
        "X-Request-Id:  spaced \r\n",
        "connection: Keep-Alive\r\n",
        "Accept: */*\r\nx-a-b: ~!:,\r\nEmpty:\r\n",
    ]
    for path in ("/", "/inference", "//inference", "/v1/chat/completions"):
        for more in headers:
            for body in (BODY, b"", b"\r\n\r\n\x00\xff"):
                message = post(path, more, body)
                assert plain_request(message) is not None
                assert message_of(Parser, message) == message_of(RequestParser, message)
