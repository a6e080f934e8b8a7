"""Who goes away, or takes too long: its slot, its pages and its place are free at once, whatever it was doing."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from support import FakeModel, Server, fake_engine, in_background, wait_until

from api.http.watcher import Watcher
from api.service import Service
from app import connect, create_app
from config import Config

POLICIES = ("nobatch", "static", "dynamic")
MOCK = "mock:llm-mock"
LONG = {"prompt": "x", "num_tokens": 1000, "ignore_eos": True}


def service(app: Flask) -> Service:
    result: Service = app.extensions["service"]
    return result


# ---------------------------------------------------------------- the watcher


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


Pair = tuple[socket.socket, socket.socket]


def hang_up(sock: socket.socket) -> None:
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def leave_bytes_behind(sock: socket.socket) -> None:
    sock.sendall(b"the next request")
    sock.close()


@pytest.mark.parametrize(
    ("act", "peeks"),  # peeking cannot see beyond bytes that nobody has read
    [(hang_up, False), (hang_up, True), (half_close, False), (half_close, True), (leave_bytes_behind, False)],
)
def test_a_hang_up_is_told_once(pair: Pair, act: Any, peeks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if peeks:  # as where there is no EPOLLRDHUP
        monkeypatch.delattr("select.EPOLLRDHUP")
        monkeypatch.setattr("api.http.watcher.PEEK_SECONDS", 0.01)
    ours, theirs = pair
    told: list[int] = []
    watcher = Watcher()
    number = watcher.add(ours, told.extend, 1)
    assert told == []
    act(theirs)
    wait_until(lambda: told)
    watcher.remove(number)
    assert told == [1]


def test_who_is_removed_is_not_watched_and_its_number_can_be_used_again(pair: Pair) -> None:
    ours, theirs = pair
    told: list[str] = []
    watcher = Watcher()
    for name in ("first", "second"):
        number = watcher.add(ours, told.extend, name)
        assert number == ours.fileno()
        if name == "first":
            watcher.remove(number)
            watcher.remove(number)
    theirs.close()
    wait_until(lambda: told)
    assert told == ["second"]


def test_a_callback_that_raises_does_not_end_the_watch(pair: Pair) -> None:
    def fail(gone: list[Any]) -> None:
        raise KeyError

    watcher = Watcher()
    ours, theirs = pair
    watcher.add(ours, fail, 0)
    theirs.close()
    mine, other = socket.socketpair()
    with mine, other:
        told: list[int] = []
        watcher.add(mine, told.extend, 1)
        other.close()
        wait_until(lambda: told)


def test_those_who_hang_up_at_once_are_told_of_at_once(pair: Pair) -> None:
    ours, theirs = pair
    is_busy, may_go_on = threading.Event(), threading.Event()

    def dawdle(gone: list[Any]) -> None:
        is_busy.set()
        may_go_on.wait(10)

    watcher = Watcher()
    watcher.add(ours, dawdle, 0)
    theirs.close()
    assert is_busy.wait(10)
    told: list[list[Any]] = []
    with ExitStack() as stack:
        for i in range(20):
            mine, other = socket.socketpair()
            stack.enter_context(mine)
            watcher.add(mine, told.append, i)
            other.close()
        may_go_on.set()
        wait_until(lambda: told)
    assert [sorted(each) for each in told] == [list(range(20))]


# ---------------------------------------------------------------- real clients


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        result = {}
        for policy in POLICIES:
            result[policy] = Server(folder / policy, policy, "--model", MOCK).start()
            stack.callback(result[policy].stop)
        for server in result.values():
            server.wait()
        yield result


def send(server: Server, path: str = "/inference", id: str = "", **fields: Any) -> socket.socket:
    """Send a request and return its connection."""
    body = json.dumps(LONG | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n" + (f"X-Request-Id: {id}\r\n" if id else "")
    connection = socket.create_connection(("127.0.0.1", server.port), 20)
    connection.sendall(f"{head}\r\n".encode() + body)
    return connection


def reset(connection: socket.socket) -> None:
    """Close with an RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def figures(server: Server) -> dict[str, Any]:
    result: dict[str, Any] = server.get("/stats").json
    return result


def is_empty(server: Server) -> bool:
    now = figures(server)
    used = now["engine"]["kv"]["pages_used"]
    return (now["requests-running"], now["requests-waiting"], used) == (0, 0, 0)


def cancelled(server: Server) -> dict[str, float]:
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith("eb_cancelled_total")}


@pytest.mark.process
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("act", [socket.socket.close, reset, half_close])
@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_frees_its_place_in_queue_and_batch(
    servers: dict[str, Server], policy: str, act: Any, streams: bool
) -> None:
    server = servers[policy]
    before = cancelled(server)
    ids = [f"{act.__name__}-{streams}-{i}" for i in range(70)]
    connections = [send(server, id=id, stream=streams) for id in ids]
    wait_until(lambda: figures(server)["requests-running"] and figures(server)["requests-waiting"] > 3)
    waiting = connections[64 if policy == "dynamic" else 1 :]
    for connection in reversed(waiting):  # who waits goes first, or would be let in
        act(connection)
    wait_until(lambda: not figures(server)["requests-waiting"])
    for connection in connections:
        if connection not in waiting:
            act(connection)
    wait_until(lambda: is_empty(server))
    records = [server.get(f"/requests/{id}").json for id in ids]
    left = [record for record in records if record["finish_reason"] == "cancelled"]
    wait_until(lambda: sum(cancelled(server).values()) == sum(before.values()) + len(left), 5)  # observers come last
    gone = {where: n - before[where] for where, n in cancelled(server).items()}
    assert 64 <= len(left) <= 70  # one that runs alone may be done by then
    waited = sum(each["scheduled_at"] is None for each in left)
    assert gone["queued"] == waited > 0  # requests do not arrive in the order of their connections
    assert gone["decode"] + gone["prefill"] == len(left) - waited > 0
    for connection in connections:
        connection.close()


@pytest.mark.process
@pytest.mark.parametrize("policy", POLICIES)
def test_two_hundred_that_go_in_the_middle_leave_nothing_behind(servers: dict[str, Server], policy: str) -> None:
    server = servers[policy]
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


@pytest.mark.process
def test_the_log_calls_it_499_and_tells_no_prompt(servers: dict[str, Server]) -> None:
    server = servers["dynamic"]
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


@pytest.mark.process
def test_delete_ends_a_request_and_its_client_is_told(servers: dict[str, Server]) -> None:
    server = servers["dynamic"]
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


@pytest.mark.process
def test_a_server_that_drains_refuses_newcomers_and_finishes_the_rest(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "dynamic", "--model", f"{MOCK}@4") as server:
        with in_background(lambda: server.post(prompt="x", num_tokens=150)) as last:
            wait_until(lambda: figures(server)["requests-running"] == 1)
            server.process.terminate()
            wait_until(lambda: server.get("/ready").status == 503)
            assert server.get("/ready").json["status"] == "draining"
            assert server.get("/health").status == 200
            newcomer = server.post(prompt="x", num_tokens=1)
            assert (newcomer.status, newcomer.headers["Retry-After"]) == (503, "1")
            assert "shutting down" in newcomer.json["error"]["message"]
        assert last[0].status == 200
        assert server.process.wait(20) == 0
    assert "Traceback" not in server.output()


@pytest.mark.process
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
        assert server.process.wait(20) == 0


# ---------------------------------------------------------------- deadlines and places, in-process


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


def small(model: FakeModel, max_batch_size: int = 1, **options: Any) -> Flask:
    """Return an app whose engine has few slots."""
    app = create_app(Config(policy="dynamic", max_batch_size=max_batch_size, **options))
    queue = service(app).config.max_queue
    engine = fake_engine(model, max_batch_size=max_batch_size, max_queue=queue)
    connect(service(app), engine)
    return app


def stop(app: Flask) -> None:
    engine = service(app).engine
    assert engine is not None
    engine.manager.stop()


def ask(app: Flask, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"prompt": "hi", "num_tokens": 3} | fields
    return app.test_client().post("/inference", json=body, headers=headers)


@pytest.mark.parametrize("by_header", [False, True])
def test_who_waits_too_long_is_answered_504_and_never_computed(model: FakeModel, by_header: bool) -> None:
    app = small(model, queue_timeout=60.0 if by_header else 0.1)
    headers = {"X-Queue-Timeout": "0.1"} if by_header else None
    seen: set[int] = set()

    def slow(plan: Any) -> None:
        seen.update(len(seq.prompt_ids) for seq in plan.sequences)
        time.sleep(0.02)

    model.before = slow
    with in_background(lambda: ask(app, num_tokens=40)) as first:
        wait_until(lambda: model.plans)
        refusal = ask(app, headers, prompt="late")
    assert refusal.status_code == 504
    error = refusal.get_json()["error"]
    assert error["type"] == "timeout_error"
    assert "0.1 s" in error["message"]
    assert first[0].status_code == 200
    assert seen == {2}
    stats = app.test_client().get("/stats").get_json()
    counts = ("requests", "requests-timed-out", "requests-cancelled", "requests-failed")
    assert [stats[key] for key in counts] == [1, 1, 0, 0]
    stop(app)


def test_a_request_may_ask_for_less_time_and_not_for_more(model: FakeModel) -> None:
    model.before = lambda plan: time.sleep(0.01)
    app = small(model, request_timeout=0.3)
    for seconds, limit in (("0.05", "0.05 s"), ("1e9", "0.3 s")):
        reply = ask(app, {"X-Request-Timeout": seconds}, num_tokens=900)
        assert reply.status_code == 504
        assert limit in reply.get_json()["error"]["message"]
    for bad in ("0", "-1", "nan", "inf", "soon", ""):
        reply = ask(app, {"X-Request-Timeout": bad})
        assert reply.status_code == 400
        assert reply.get_json()["error"]["param"] == "X-Request-Timeout"
    assert service(app).places.taken == 0
    stop(app)


@pytest.mark.parametrize("status", ["429", "503"])
def test_a_full_server_refuses_before_it_reads_and_says_when_to_come(model: FakeModel, status: str) -> None:
    go = threading.Event()
    app = small(model, max_queue=1, overload_status=status)
    assert ask(app, num_tokens=9).status_code == 200
    model.before = lambda plan: go.wait(10) and None  # type: ignore[func-returns-value]
    with in_background(lambda: ask(app)) as first, in_background(lambda: ask(app)) as second:
        wait_until(lambda: service(app).places.taken == 2)
        encoded = service(app).engine.tokenizer.encoded  # type: ignore[union-attr]
        for path, body in (("/inference", b"{bad"), ("/generate", b""), ("/v1/completions", b"")):
            reply = app.test_client().post(path, data=body)
            assert reply.status_code == int(status)
            assert 1 <= int(reply.headers["Retry-After"]) <= 60
        assert service(app).engine.tokenizer.encoded == encoded  # type: ignore[union-attr]
        assert app.test_client().get("/stats").status_code == 200
        go.set()
    assert [r.status_code for r in first + second] == [200, 200]
    assert service(app).places.taken == 0
    stop(app)


@pytest.mark.parametrize(
    "body", [b"", b"{bad", b'{"prompt": 5}', b'{"prompt": "x", "num_tokens": 9999}', b"x" * (1 << 20 | 1)]
)
def test_who_is_refused_gives_its_place_back(model: FakeModel, body: bytes) -> None:
    app = small(model)
    for path in ("/inference", "/v1/completions", "/generate", "/generate_stream", "/"):
        app.test_client().post(path, data=body, content_type="application/json").close()
    assert (service(app).places.taken, service(app).requests.open) == (0, 0)
    stop(app)


def test_a_handler_that_fails_leaves_nothing_running(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    app = small(model)
    engine = service(app).engine
    assert engine is not None
    take_in = engine.manager.enqueue_all

    def fail(inferences: Any) -> None:
        take_in(inferences)
        raise KeyError("lost")

    monkeypatch.setattr(engine.manager, "enqueue_all", fail)
    model.before = lambda plan: time.sleep(0.005)
    assert ask(app, num_tokens=900).status_code == 500
    wait_until(lambda: service(app).requests.open == 0)
    assert (service(app).places.taken, engine.manager.running) == (0, 0)
    stop(app)


def test_a_stream_that_is_never_read_gives_everything_back(model: FakeModel) -> None:
    app = small(model)
    model.before = lambda plan: time.sleep(0.005)
    reply = ask(app, num_tokens=900, stream=True)
    assert service(app).places.taken == 1
    reply.close()
    engine = service(app).engine
    assert engine is not None
    wait_until(lambda: service(app).requests.open == 0)
    assert (service(app).places.taken, engine.manager.running) == (0, 0)
    stop(app)


def test_the_time_to_come_again_is_that_of_the_queue(model: FakeModel) -> None:
    app = small(model, max_queue=50)
    manager = service(app).engine.manager  # type: ignore[union-attr]
    assert manager.retry_after() == 1
    for _ in range(100):
        manager.inbox.rate.add(tokens=50, seconds=1.0)
    for queued, seconds in ((0, 1), (50, 1), (51, 2), (1000, 20), (10**9, 60)):
        manager.inbox.queued_tokens = queued
        assert manager.retry_after() == seconds
    manager.inbox.queued_tokens = 0
    stop(app)
