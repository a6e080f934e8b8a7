"""Clients that are slow, silent or too many, against a real server: they lose their connection, nobody else anything.

The server waits three seconds for bytes and has 240 connections, so that what takes long by default shows soon.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import statistics
import time
from collections.abc import Iterator

import pytest

from tests.support import wait_until
from tests.support.servers import Server

pytestmark = pytest.mark.process

CONNECTIONS = 240
PATIENCE = 3  # seconds
SOON = 0.8 * PATIENCE  # for an answer that waits for none of those who are waited for
START = b"POST /inference HTTP/1.1\r\nHost: localhost\r\n"
HEAD = START + b"Content-Length: 100\r\n\r\n"
SLOW_HEADER = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Begun:"
SLOW_BODY = HEAD + b'{"prompt": "never'
GREEDY = b"GET /web/uPlot.iife.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 120  # 6 MB that nobody reads


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("front")
    argv = ["dynamic", "--model", "mock:llm-mock@10",
            "--max-queue", "100", "--max-batch-size", "8", "--max-connections", str(CONNECTIONS),
            "--receive-timeout", str(PATIENCE), "--send-timeout", str(PATIENCE)]  # fmt: skip
    with Server(folder / "log", *argv) as server:
        yield server
        assert "Traceback" not in server.output()


def connections(server: Server) -> int:
    """Return how many sockets and other descriptors the server has open."""
    return len(os.listdir(f"/proc/{server.workers[0]}/fd"))


@contextlib.contextmanager
def clients(server: Server, number: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connect so often, say the first words, and then neither speak nor read."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(number):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect(("127.0.0.1", server.port))
            client.sendall(first)
            opened.append(client)
        yield opened


def health_seconds(server: Server, number: int) -> float:
    """Return how long /health took most of the time: who is made to wait waits each time. A slow machine gets three tries."""
    medians: list[float] = []
    while len(medians) < 3 and (not medians or medians[-1] > SOON):
        times = []
        for _ in range(number):
            began = time.monotonic()
            assert server.get("/health").status == 200
            times.append(time.monotonic() - began)
        medians.append(statistics.median(times))
    return min(medians)


def test_slow_headers_slow_bodies_and_readers_that_never_read_harm_nobody_and_are_let_go(server: Server) -> None:
    before = connections(server)
    asked = {"prompt": "the house", "num_tokens": 20, "seed": 3}
    alone = server.post(**asked).json["completion"]
    with (
        clients(server, 50, SLOW_HEADER) as slow_headers,
        clients(server, 50, SLOW_BODY) as slow_bodies,
        clients(server, 12, GREEDY),  # each costs a hundred answers that nobody reads
    ):
        assert server.post(**asked).json["completion"] == alone
        assert health_seconds(server, 50) < SOON
        assert {client.recv(1000) for client in slow_headers} == {b""}
        assert {client.recv(1000)[:12] for client in slow_bodies} == {b"HTTP/1.1 408"}
        wait_until(lambda: connections(server) <= before + 3)
        assert server.post(**asked).json["completion"] == alone


def test_a_generation_may_take_longer_than_a_client_may_be_silent(server: Server) -> None:
    began = time.monotonic()
    bodies = [{"prompt": f"{i}", "num_tokens": 1000} for i in range(4)]
    answers = server.burst(bodies)
    assert time.monotonic() - began > PATIENCE, "the model is too fast for this test"
    assert [answer.json["num_tokens"] for answer in answers] == [1000] * 4


def test_a_thousand_connections_that_say_nothing_take_no_thread_and_make_room(server: Server) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip(f"this process may open {hard} files, and 1,500 are needed: raise ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    before = connections(server)
    with clients(server, 1000) as silent:
        assert health_seconds(server, 50) < SOON
        assert server.post(prompt="x", num_tokens=3).status == 200
        assert connections(server) < CONNECTIONS + 100
        assert {client.recv(1) for client in silent[:: len(silent) - 1]} == {b""}
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: connections(server) <= before + 3)


def test_a_server_without_file_descriptors_waits_for_some_and_goes_on(server: Server) -> None:
    (pid,) = server.workers
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (connections(server) + 4, limits[1]))
        with clients(server, 40):
            assert server.post(prompt="x", num_tokens=3).status == 200
            wait_until(lambda: "no file descriptor" in server.output())
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert health_seconds(server, 20) < SOON
    assert server.workers == [pid]


UNREADABLE = {
    b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Name: x\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: miracles\r\n\r\n": 417,
    b"GET /" + b"a" * 5_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n": 414,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 9_000 + b"\r\n\r\n": 431,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 65_536 + b"\r\n\r\n": 431,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(150)) + b"\r\n": 431,
    HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n": 400,
    HEAD[:-2] + b"Transfer-Encoding: odd\r\n\r\n": 501,
    START + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n": 501,
    START + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n": 501,
}


@pytest.mark.parametrize("sent", UNREADABLE, ids=lambda sent: repr(sent[-30:]))
def test_what_is_no_http_is_refused_in_json_too(server: Server, sent: bytes) -> None:
    with clients(server, 1, sent) as (client,):
        response = http.client.HTTPResponse(client)
        response.begin()
        body = response.read()
    assert response.status == UNREADABLE[sent]
    assert response.headers["Content-Type"] == "application/json"
    assert json.loads(body)["error"]["message"].endswith("Send a plain HTTP/1.1 request")
    assert len(body) < 1_000
