"""The places of a real server: one limit for HTTP and the loop, and all of them return whatever clients do."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from tests.launch.test_one_core import several
from tests.support import wait_until
from tests.support.servers import Answer, Server, read_answer

pytestmark = pytest.mark.process

PLACES = 4  # one slot of nobatch, and a queue of three
JSON = {"Content-Type": "application/json"}
LONG = {"prompt": "x", "num_tokens": 900}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    argv = ("nobatch", "--model", "mock:llm-mock", "--max-queue", str(PLACES - 1), "--receive-timeout", "1")
    with Server(tmp_path_factory.mktemp("places") / "log", *argv) as server:
        yield server


def begin(server: Server, path: str, body: bytes, length: int | None = None) -> socket.socket:
    """Send a request, with as much of its body as there is."""
    sock = socket.create_connection(("127.0.0.1", server.port), 60)
    fields = {"Host": "localhost", "Connection": "close", "Content-Length": length or len(body), **JSON}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
    sock.sendall(head.encode() + body)
    return sock


def in_the_loop(server: Server) -> int:
    stats = server.get("/stats").json
    count: int = stats["requests-running"] + stats["requests-waiting"]
    return count


@contextmanager
def full(server: Server) -> Iterator[None]:
    """Fill every place meanwhile."""
    wait_until(lambda: in_the_loop(server) == 0)
    with ExitStack() as stack:
        for _ in range(PLACES):
            stack.enter_context(begin(server, "/inference", json.dumps(LONG).encode()))
        wait_until(lambda: in_the_loop(server) == PLACES)
        yield


def refused_while_full(server: Server) -> Answer:
    """Return the answer of a full server to a request which sends nothing of its body."""
    with full(server), begin(server, "/inference", b"", length=1000) as late:
        return read_answer(late)


def test_a_full_server_refuses_before_the_body_with_the_limit_of_its_policy(server: Server) -> None:
    answer = refused_while_full(server)
    assert (answer.status, answer.headers["Content-Type"]) == (429, "application/json")
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    message = (
        "the server is full (4 requests queued or running, this one adds 1, limit 4). "
        "Try again later, or raise --max-queue"
    )
    assert answer.json["error"] == {"message": message, "type": "overloaded", "param": None, "code": None}


def test_clients_that_are_refused_again_and_again_are_answered_at_a_bounded_rate_and_counted(server: Server) -> None:
    with full(server), ExitStack() as stack:
        began = time.monotonic()
        refused = [stack.enter_context(begin(server, "/inference", b" " * 100)) for _ in range(200)]
        assert {client.recv(1000)[:12] for client in refused} == {b"HTTP/1.1 429"}
        assert time.monotonic() - began > (200 - 64) / 50  # 64 at once, then 50 a second
        assert server.get("/health").status == 200
        for bad in (b"{}", b"no JSON"):
            assert server.send("POST", "/inference", bad).status == 429

        def all_are_counted() -> bool:
            http = server.get("/stats").json["http"]
            counted = http["2xx"] + http["4xx"] + http["5xx"] + http["cancelled"]
            return bool(http["received"] == counted + PLACES)

        wait_until(all_are_counted)


def test_every_place_returns_after_answers_refusals_and_disconnects(server: Server) -> None:
    statuses = set()

    def whole(path: str, body: bytes, length: int | None = None) -> None:
        with begin(server, path, body, length) as sock:
            statuses.add(read_answer(sock).status)

    def leave(path: str, fields: dict[str, object]) -> None:
        with begin(server, path, json.dumps(fields).encode()) as sock:
            sock.recv(1)

    stream = {"prompt": "x", "max_tokens": 900, "stream": True}
    acts = [
        lambda: whole("/inference", b'{"prompt": "x", "num_tokens": 1}'),
        lambda: whole("/inference", b"{bad"),
        lambda: whole("/inference", b"{", length=1000),  # until --receive-timeout
        lambda: whole("/v1/completions", b'{"prompt": ["x", "y"], "n": 2, "max_tokens": 1}'),
        lambda: whole("/v1/completions", b'{"prompt": ["x", "y", "z"], "n": 2, "max_tokens": 1}'),  # never fits
        lambda: whole("/generate", b""),
        lambda: leave("/v1/completions", stream),
        lambda: leave("/v1/completions", stream | {"n": 2}),
        lambda: begin(server, "/inference", json.dumps(LONG).encode()).close(),
        lambda: begin(server, "/inference", b"{", length=1000).close(),
    ]
    wait_until(lambda: in_the_loop(server) == 0)
    with ThreadPoolExecutor(3) as clients:
        for future in [clients.submit(act) for act in acts * 3]:
            future.result(60)
    for act in acts[:6]:  # each finds a free server at least once
        wait_until(lambda: in_the_loop(server) == 0)
        act()
    assert {200, 400, 408, 422, 429} <= statuses
    assert refused_while_full(server).json["error"]["message"].startswith("the server is full (4 requests")
    wait_until(lambda: in_the_loop(server) == 0)
    body = {"prompt": ["x"] * PLACES, "max_tokens": 1}
    wait_until(lambda: server.send("POST", "/v1/completions", json.dumps(body).encode(), **JSON).status == 200)


@several
def test_the_threads_of_a_server_share_one_processor(server: Server) -> None:
    (worker,) = server.workers
    wait_until(lambda: len(os.sched_getaffinity(worker)) == 1)
