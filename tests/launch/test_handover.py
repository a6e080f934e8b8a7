"""A real server whose fast kernels fail: who waited is answered by the next process, which does without them."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.worker.handover import MOST, Handover, written
from tests.support import points, wait_until
from tests.support.faults import arming
from tests.support.servers import Answer, Server

MODEL = ("dynamic", "--model", "mock:llm-mock@2", "--max-batch-size", "4")
SLOTS, WAITING = 4, 6
ERROR = "CUDA error: an illegal memory access was encountered"


def test_requests_pass_from_one_process_to_the_next_in_any_number() -> None:
    handover, ends = Handover(), [socket.socketpair() for _ in range(MOST + 3)]
    handover.send()
    assert [*handover.receive()] == []
    headers = [("HOST", "x"), ("TRANSFER-ENCODING", "chunked"), ("CONTENT-TYPE", "application/json")]
    req = SimpleNamespace(method="POST", uri="/generate?a=b", version=(1, 1), headers=headers)
    for number, (client, _) in enumerate(ends):
        handover.keep(client, written(req, f"é {number}".encode()))
    handover.send()
    received = [*handover.receive()]
    assert len(received) == len(ends)
    head = "POST /generate?a=b HTTP/1.1\r\nHOST: x\r\nCONTENT-TYPE: application/json\r\nContent-Length: 4\r\n\r\n"
    assert received[7][1] == head.encode() + "é 7".encode()
    received[7][0].sendall(b"hello")
    assert ends[7][1].recv(9) == b"hello"
    for pair in [*ends, *((sock,) for sock, _ in received), (handover._old, handover._new)]:
        for sock in pair:
            sock.close()


def ask(server: Server, number: int, stream: bool = False, tokens: int = 30) -> Answer:
    body = {"prompt": f"hello {number}", "max_tokens": tokens, "temperature": 0, "stream": stream}
    return server.send("POST", "/v1/completions", json.dumps(body).encode(), **{"Content-Type": "application/json"})


def begin_endless(server: Server) -> socket.socket:
    """Let a request take a slot until its connection is closed."""
    sock, body = socket.create_connection(("127.0.0.1", server.port), 60), b'{"prompt": "endless", "num_tokens": 1000}'
    sock.sendall(b"POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return sock


def text_of(answer: Answer) -> str:
    lines = [line[6:] for line in answer.body.split(b"\n\n") if line.startswith(b"data: {")]
    bodies: list[Any] = [json.loads(line) for line in lines or [answer.body]]
    return "".join(body["choices"][0]["text"] for body in bodies)


@pytest.mark.process
def test_whoever_has_seen_nothing_is_answered_by_the_process_that_follows(tmp_path: Path) -> None:
    faults = arming({"bad_kernels": {"prompt_contains": f"hello {SLOTS}"}})  # the first that waits
    with Server(tmp_path / "log", *MODEL, **faults) as server, ThreadPoolExecutor(SLOTS + WAITING) as pool:
        before = server.workers
        with begin_endless(server):
            begun = [pool.submit(ask, server, i, True, 900) for i in range(SLOTS - 1)]
            wait_until(lambda: server.get("/stats").json["requests-running"] == SLOTS)
            waiting = []
            for i in range(SLOTS, SLOTS + WAITING):
                waiting.append(pool.submit(ask, server, i, i % 2 == 0))
                wait_until(lambda: server.get("/stats").json["requests-waiting"] == len(waiting))
        answers = [future.result() for future in waiting]
        assert [answer.status for answer in answers] == [200] * WAITING
        again = pool.map(lambda i: ask(server, i), range(SLOTS, SLOTS + WAITING))
        assert [*map(text_of, answers)] == [*map(text_of, again)]
        for future in begun:
            assert future.result().body.endswith(b'"type":"unavailable_error","param":null,"code":null}}\n\n')
        assert server.workers != before
        assert server.get("/stats").json["engine"]["faults"]["deaths"] == 1
        said = server.output()
        assert said.count("starts again without fast kernels (EB_KERNELS=off)") == 1


@pytest.mark.process
@pytest.mark.parametrize("model", points(1, "mock:llm-mock@4", "bard"))
def test_kernels_that_fail_at_the_start_are_left_out_once(model: str, tmp_path: Path) -> None:
    faults = arming({"bad_kernels": {"at_start": True}})
    with Server(tmp_path / "log", "dynamic", "--model", model, **faults) as server:
        assert ask(server, 1).status == 200
        said = server.output()
    assert said.count("starts again without fast kernels (EB_KERNELS=off)") == 1
    assert model != "bard" or f"warning: the engine before failed: {ERROR}" in said
    with Server(tmp_path / "off", *MODEL, EB_KERNELS="off", **faults) as server:
        assert "fast kernels" not in server.output()


@pytest.mark.process
def test_a_device_that_fails_without_kernels_too_is_an_error_for_who_waited(tmp_path: Path) -> None:
    faults = arming({"sticky": {"prompt_contains": "hello 3"}})
    with Server(tmp_path / "log", *MODEL, **faults) as server:
        answer = ask(server, 3)
        assert (answer.status, int(answer.headers["Retry-After"]) >= 1) == (503, True)

        def is_answered() -> bool:
            try:
                return ask(server, 4).status == 200
            except (OSError, HTTPException):  # the process that ended had taken the connection
                return False

        wait_until(is_answered, 120)
        assert server.get("/stats").json["engine"]["faults"]["deaths"] == 2
