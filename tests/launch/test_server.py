"""Real processes: the server as ./server.sh starts it, its signals, its batches, the client beside it.

Most tests share one server that computes a model; each is stopped by its own pid.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import requests

from tests.support import in_background, wait_until
from tests.support.checkpoints import write_checkpoint
from tests.support.servers import Server, read_answer

pytestmark = pytest.mark.process

POLICIES = ("nobatch", "static", "dynamic")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    argv = ["dynamic", "--model", str(checkpoint), "--compute-threads", "1"]
    with Server(tmp_path_factory.mktemp("logs") / "log", *argv) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    yield shared
    shared.switch("dynamic")


def test_the_server_is_ready_and_says_what_it_is(server: Server, checkpoint: Path) -> None:
    answer = server.post(prompt="the house", num_tokens=12)
    assert answer.json["completion"].startswith("the house")
    assert answer.json["num_tokens"] == 12
    wait_until(lambda: "curl" in server.output())
    text = server.output()
    assert re.search(r"ready in [\d.]+ s", text)
    for words in ("dynamic, 64 slots", f"{checkpoint.name}, ", "1 threads", f"127.0.0.1:{server.port}, ready"):
        assert words in text, words
    assert "Traceback" not in text
    assert "warning" not in text  # 127.0.0.1 is not public


def test_sixty_four_at_once_are_one_batch(server: Server) -> None:
    asked = [{"prompt": f"request {i}", "num_tokens": 500, "seed": i} for i in range(64)]
    answers = server.burst(asked)
    assert {answer.status for answer in answers} == {200}
    assert {answer.json["num_tokens"] for answer in answers} == {500}
    assert max(answer.json["timings"]["batch_max"] for answer in answers) == 64
    sizes = {row["batch_size"]: row["count"] for row in server.get("/stats").json["engine"]["batch_stats"]}
    assert max(sizes) == 64
    assert sizes[64] >= 50


def test_each_policy_batches_as_its_name_says(server: Server) -> None:
    asked = [{"prompt": "the", "num_tokens": 8 * (1 + i % 4), "seed": i} for i in range(12)]
    largest, held = {}, {}
    for policy in POLICIES:
        before = server.switch(policy).get("/stats").json
        assert before["policy"] == policy
        largest[policy] = max(answer.json["timings"]["batch_max"] for answer in server.burst(asked))
        after = server.get("/stats").json
        held[policy] = after["engine"]["slot_steps"]["held"] - before["engine"]["slot_steps"]["held"]
    assert largest["nobatch"] == 1 < largest["static"]
    assert held["static"] > 0 == held["dynamic"]


def test_a_client_that_does_not_hang_up_keeps_nobody_waiting(server: Server) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    lingering = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(8)]
    try:
        for connection in lingering:
            connection.sendall(request)
        for connection in lingering:
            assert read_answer(connection).status == 200  # and the connection stays open on this side
        began = time.monotonic()
        assert server.get("/health").status == 200
        assert time.monotonic() - began < 8  # not two seconds for each of them
    finally:
        for connection in lingering:
            connection.close()


def test_a_key_is_asked_for_and_sigterm_lets_the_last_request_finish(tmp_path: Path) -> None:
    argv = ["dynamic", "--model", "mock:llm-mock@20"]
    with Server(tmp_path / "log", *argv, key="hunter2", EB_API_KEY="hunter2", EB_MAX_BATCH_SIZE="3",
                EB_MODLE="x") as server:  # fmt: skip
        assert requests.get(f"http://127.0.0.1:{server.port}/stats", timeout=60).status_code == 401
        assert server.get("/stats").json["engine"]["max_batch_size"] == 3
        with in_background(lambda: server.post(prompt="x", num_tokens=500)) as last:
            wait_until(lambda: last or server.get("/stats").json["requests-running"] == 1)
            assert server.stop() == 0
        assert last[0].status == 200
        assert last[0].json["num_tokens"] == 500
    text = server.output()
    assert re.search(r"API key +required", text)
    assert "hunter2" not in text
    assert "EB_MODLE is not a setting and is ignored. Did you mean 'EB_MODEL'?" in text
    assert "Traceback" not in text
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), 60)


def test_ctrl_c_ends_it_too(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "static", "--model", "mock:llm-mock").start()

    def listens() -> bool:
        with suppress(OSError):
            return server.get("/health").status in (200, 503)  # loading or ready: both may be stopped
        return False

    try:
        wait_until(listens, 90)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
    finally:
        server.stop()
    assert "Traceback" not in server.output()
