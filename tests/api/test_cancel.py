"""A client that disconnects: its slot, pages and place are free at once, whatever it was doing."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import half_close

from tests.support import in_background, points, wait_until
from tests.support.servers import Server

pytestmark = pytest.mark.process
POLICIES = ("nobatch", "static", "dynamic")
MOCK = "mock:llm-mock"
SLOTS = 8
LONG = {"prompt": "x", "num_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    argv = ("dynamic", "--model", MOCK, "--max-batch-size", str(SLOTS))
    with Server(tmp_path_factory.mktemp("log") / "log", *argv) as server:
        yield server


@pytest.fixture
def policy() -> str:
    return "dynamic"


@pytest.fixture
def server(running: Server, policy: str) -> Server:
    """Return the server of this file with the policy of the test."""
    return running.switch(policy)


def send(server: Server, path: str = "/inference", id: str = "", **fields: Any) -> socket.socket:
    """Send a request and return its connection."""
    body = json.dumps(LONG | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n" + (f"X-Request-Id: {id}\r\n" if id else "")
    connection = socket.create_connection(("127.0.0.1", server.port), 60)
    connection.sendall(f"{head}\r\n".encode() + body)
    return connection


def reset(connection: socket.socket) -> None:
    """Close with an RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def figures(server: Server) -> dict[str, Any]:
    result: dict[str, Any] = server.get("/stats").json
    return result


def all_are_in(server: Server, policy: str, n: int) -> bool:
    """Whether `n` requests run or wait, and those that wait have no slot to take."""
    now = figures(server)
    is_full = now["requests-running"] >= (SLOTS if policy == "dynamic" else 1)
    return is_full and now["requests-running"] + now["requests-waiting"] == n


def is_empty(server: Server) -> bool:
    now = figures(server)
    used = now["engine"]["kv"]["pages_used"]
    return (now["requests-running"], now["requests-waiting"], used) == (0, 0, 0)


def cancelled(server: Server) -> dict[str, float]:
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith("eb_cancelled_total")}


def ways() -> Iterator[Any]:
    """Give each way to go whole and as a stream, each under another policy; all pairs of them are for --all."""
    acts = [socket.socket.close, reset, half_close]
    for (i, act), (j, policy), streams in itertools.product(enumerate(acts), enumerate(POLICIES), [False, True]):
        marks = () if j == (i + streams) % len(POLICIES) else pytest.mark.full
        yield pytest.param(act, policy, streams, marks=marks)


@pytest.mark.parametrize(("act", "policy", "streams"), [*ways()])
def test_a_client_that_goes_frees_its_place_in_queue_and_batch(
    server: Server, act: Any, policy: str, streams: bool
) -> None:
    before = cancelled(server)
    ids = [f"{act.__name__}-{policy}-{streams}-{i}" for i in range(SLOTS + 6)]
    connections = [send(server, id=id, stream=streams) for id in ids]
    wait_until(lambda: all_are_in(server, policy, len(ids)))
    # Requests do not arrive in the order of their connections, so the server says which of them wait. These go first:
    # they would take the slots of the others.
    waiting = [c for id, c in zip(ids, connections) if server.get(f"/requests/{id}").json["scheduled_at"] is None]
    for connection in waiting:
        act(connection)
    wait_until(lambda: not figures(server)["requests-waiting"])
    for connection in connections:
        if connection not in waiting:
            act(connection)
    wait_until(lambda: is_empty(server))
    records = [server.get(f"/requests/{id}").json for id in ids]
    left = [record for record in records if record["finish_reason"] == "cancelled"]
    assert len(left) == len(ids)
    wait_until(lambda: sum(cancelled(server).values()) == sum(before.values()) + len(left))  # observers come last
    gone = {where: n - before[where] for where, n in cancelled(server).items()}
    assert gone["queued"] == len(waiting) == sum(each["scheduled_at"] is None for each in left) > 0
    assert gone["decode"] + gone["prefill"] == len(left) - len(waiting) > 0
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("policy", points(1, *POLICIES[::-1]))
def test_two_hundred_that_go_in_the_middle_leave_nothing_behind(server: Server, policy: str) -> None:
    probe = {"prompt": "the house", "num_tokens": 12, "temperature": 0}
    before = server.post(**probe).json["completion"]
    gone = sum(cancelled(server).values())
    connections = [send(server, prompt=f"request {i}") for i in range(200)]
    wait_until(lambda: figures(server)["requests-running"] + figures(server)["requests-waiting"] == 200)
    for i, connection in enumerate(connections):
        (reset if i % 2 else socket.socket.close)(connection)
    wait_until(lambda: is_empty(server), 60)
    wait_until(lambda: sum(cancelled(server).values()) - gone > 100)  # and they are not computed to their end
    assert server.post(**probe).json["completion"] == before
    assert "Traceback" not in server.output()


def test_the_log_calls_it_499_and_tells_no_prompt(server: Server) -> None:
    connection = send(server, id="goes-away", prompt="my secret is this")
    wait_until(lambda: figures(server)["requests-running"] == 1)
    connection.close()
    wait_until(lambda: "goes-away" in server.output())
    lines = [json.loads(line) for line in server.output().splitlines() if line.startswith("{")]
    line = next(line for line in lines if line["id"] == "goes-away")
    assert (line["status"], line["route"], line["finish_reason"]) == (499, "/inference", "cancelled")
    assert line["prompt_tokens"] > 3
    assert "secret" not in server.output()
    assert server.get("/requests/goes-away").json["finish_reason"] == "cancelled"
    assert figures(server)["http"]["cancelled"] >= 1


def test_delete_ends_a_request_and_its_client_is_told(server: Server) -> None:
    for path, status in (("/inference", b"499"), ("/generate", b"500")):
        fields = {"inputs": "x", "parameters": {"max_new_tokens": 1000}} if "g" in path else {}
        with send(server, path, id=f"d{path[1]}", **fields) as connection:
            wait_until(lambda: figures(server)["requests-running"] == 1)
            for _ in range(2):
                answer = server.send("DELETE", f"/requests/d{path[1]}")
                assert answer.json == {"id": f"d{path[1]}", "state": "cancelled"}
            assert connection.recv(12) == b"HTTP/1.1 " + status
        wait_until(lambda: is_empty(server))
    assert server.send("DELETE", "/requests/nobody").status == 404


def test_a_server_that_drains_refuses_newcomers_and_finishes_the_rest(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "dynamic", "--model", MOCK, "--max-batch-size", "1") as server:
        kept = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(2)]
        kept[0].request("GET", "/ready")
        assert kept[0].getresponse().read()
        first = send(server, id="first")  # as long as it runs, the server drains
        wait_until(lambda: figures(server)["requests-running"] == 1)
        kept[1].request("POST", "/inference", json.dumps({"prompt": "x", "num_tokens": 15}))
        with in_background(kept[1].getresponse) as last:
            wait_until(lambda: figures(server)["requests-waiting"] == 1)
            server.process.terminate()
            wait_until(lambda: server.get("/ready").status == 503)
            assert server.get("/ready").json["status"] == "draining"
            assert server.get("/health").status == 200
            newcomer = server.post(prompt="x", num_tokens=1)
            assert (newcomer.status, newcomer.headers["Retry-After"]) == (503, "1")
            assert "shutting down" in newcomer.json["error"]["message"]
            kept[0].request("POST", "/inference", json.dumps({"prompt": "x", "num_tokens": 1}))
            again = kept[0].getresponse()
            # Behind a balancer the next connection may reach a server that does not drain.
            assert (again.status, again.headers["Connection"]) == (503, "close")
            assert server.send("DELETE", "/requests/first").status == 200
        assert (last[0].status, last[0].headers["Connection"]) == (200, "close")
        assert len(json.loads(last[0].read())["completion"]) > 1
        for connection in (*kept, first):
            connection.close()
        assert server.process.wait(60) == 0
    assert "Traceback" not in server.output()


def test_who_outlasts_the_drain_is_told(tmp_path: Path) -> None:
    limit = {"GUNICORN_CMD_ARGS": "--graceful-timeout 2"}
    with Server(tmp_path / "log", "dynamic", "--model", MOCK, "--max-batch-size", "8", **limit) as server:
        connections = [send(server) for _ in range(64)]
        wait_until(lambda: figures(server)["requests-waiting"] == 56)
        server.process.terminate()
        heads = [connection.recv(12) for connection in connections]
        assert set(heads) <= {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        assert heads.count(b"HTTP/1.1 503") > 0
        for connection in connections:
            connection.close()
        assert server.process.wait(60) == 0
