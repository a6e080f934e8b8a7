"""I6 to I11: many clients at once, slow ones, hostile ones, and a machine that has nothing left."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cases_engine import neighbours
from cases_queue import IMPATIENT, reset
from harness import LONG, MB, PATIENCE, REFUSED, SLOTS, Setting, Watched
from table import Act, Case, Raw, body

from tests.support import wait_until
from tests.support.servers import read_answer

CROWDED = Setting(("--max-queue-tokens", str(1 << 21)), queue=1500 - SLOTS)
ROOMY = Setting(queue=120, environment=IMPATIENT.environment, mock=True)  # slow bodies have places too
A_CROWD = 300 * MB  # may be added by 1,500 who are there at once


def storm(act: Callable[[Any], None]) -> Act:
    """Return the act of 1,500 clients that go all at once: who comes next is answered soon."""

    def go(server: Watched) -> None:
        before = server.figures()["http"]
        sent = [server.begin("/inference", LONG) for _ in range(server.places)]
        wait_until(lambda: server.figures()["http"]["received"] >= before["received"] + len(sent), 60)
        for sock in sent:
            act(sock)
        server.ledger.leave(len(sent))
        one = body("/inference", tokens=1)
        wait_until(lambda: server.ask("/inference", one).status == 200, PATIENCE)
        wait_until(server.is_at_rest, PATIENCE)
        assert server.figures()["http"]["cancelled"] == before["cancelled"] + len(sent)

    return go


def fifteen_hundred_wait(server: Watched) -> None:
    """All are answered, each with its own text, and cost less than 300 MB beyond the model."""
    sent = [server.begin("/inference", body("/inference", f"no {i}", 3)) for i in range(server.places)]
    answers = []
    most = 0
    for i, sock in enumerate(sent):
        answers.append(read_answer(sock))
        sock.close()
        most = max(most, server.pulse().rss) if i % 100 == 0 else most
    for answer in answers:
        server.note("/inference", answer)
    assert {answer.status for answer in answers} == {200}
    assert all(a.json["completion"].startswith(f"no {i}") for i, a in enumerate(answers))
    assert most - server.cold.rss < A_CROWD


def slow_clients(server: Watched) -> None:
    """50 that stop within the headers, 50 within the body, 50 that never hang up: nobody else notices."""
    head = b"POST /inference HTTP/1.1\r\nHost: localhost\r\n"
    with contextlib.ExitStack() as stack:
        rude = [stack.enter_context(server.connect()) for _ in range(150)]
        for i, sock in enumerate(rude):
            whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            sock.sendall((head, head + b"Content-Length: 99\r\n\r\n{", whole)[i // 50])
        expected = neighbours(server)
        seconds = []
        for _ in range(20):
            began = time.monotonic()
            assert server.get("/health").status == 200
            seconds.append(time.monotonic() - began)
        assert max(seconds) < PATIENCE / 2
        assert neighbours(server) == expected
        for sock in rude:  # by now each is told, or closed
            with contextlib.suppress(ConnectionError):
                while sock.recv(65536):
                    pass
    for _ in range(50):  # bodies that stalled are answered 408
        server.ledger.note("POST", "/inference", 408)


def little_memory(server: Watched) -> None:
    """Let the system grant no more memory: all requests are answered, and the same process serves as before afterwards."""
    pid = server.worker
    status = Path(f"/proc/{pid}/status").read_text()
    size = int(next(line for line in status.splitlines() if line.startswith("VmSize")).split()[1])
    soft, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, ((size << 10) - 64 * MB, hard))
    prompts = [body("/inference", chr(97 + i) * 900, 100) for i in range(SLOTS)]
    prompts += [body("/v1/completions", [chr(65 + i) * 900] * SLOTS, 50) for i in range(3)]
    sent = [server.begin(("/inference", "/v1/completions")[i >= SLOTS], each) for i, each in enumerate(prompts)]
    answers = server.collect(sent)
    resource.prlimit(pid, resource.RLIMIT_AS, (soft, hard))
    assert {answer.status for answer in answers} == {503}
    assert {answer.json["error"]["code"] for answer in answers} == {"out_of_memory"}
    assert (server.worker, server.figures()["engine"]["faults"]["deaths"]) == (pid, 0)
    assert server.canary() == server.golden
    wait_until(server.is_at_rest, PATIENCE)


def hostile_bodies(server: Watched) -> None:
    """What 32 clients sent that was refused, 1,000 times up to a megabyte, is not kept in the heap of each thread."""
    keys = "{" + ",".join(f'"k{i}":1' for i in range(20_000)) + ',"k19999":1}'
    ones, some = (f"[{'1,' * n}1]" for n in (MB // 2 - 99, 12_000))
    text = json.dumps("Now is the winter of our discontent. " * 25_000)
    sent = [
        (path, body(path, **{field: Raw(value)}))
        for path in REFUSED
        for field, value in (("k", keys), ("stop", some), ("stop", ones), ("temperature", "-1"))
    ]
    sent += [("/v1/completions", body("/v1/completions", logit_bias=Raw(value))) for value in (keys, ones)]
    for path, field, value in (
        ("/tokenize", "prompt", text), ("/tokenize", "inputs", text), ("/detokenize", "tokens", ones),
        ("/v1/chat/completions", "messages", ones), ("/v1/chat/completions", "messages", f"[{'{},' * 8_000}1]"),
    ):  # fmt: skip
        sent.append((path, f'{{"{field}": {value}}}'.encode()))
    with ThreadPoolExecutor(32) as pool:
        statuses = {answer.status for answer in pool.map(lambda each: server.ask(*each), sent * 50)}
    assert statuses <= {200, 400, 422, 429}


CASES = [
    Case("I6", "1,500 that close", storm(socket.socket.close), setting=CROWDED, quick=False,
         growth=A_CROWD),
    Case("I6", "1,500 that reset", storm(reset), setting=CROWDED, quick=False,
         growth=A_CROWD),
    Case("I6", "1,500 that wait", fifteen_hundred_wait, setting=CROWDED, quick=False,
         growth=A_CROWD),
    Case("I7", "50 slow headers, 50 slow bodies, 50 that stay", slow_clients, setting=ROOMY, quick=False,
         tests=("tests/launch/test_front_door.py::test_slow_headers_slow_bodies_and_readers_that_never_read_harm_nobody_and_are_let_go",)),
    Case("I8", "no file descriptors",
         tests=("tests/launch/test_front_door.py::test_a_server_without_file_descriptors_waits_for_some_and_goes_on",)),
    Case("I9", "no memory", little_memory, quick=False, ends=True),
    Case("I9", "hostile bodies", hostile_bodies, quick=False, growth=70 * MB),
    Case("I10", "engine faults under load", tests=("tests/faults/cases_engine.py::beside_neighbours",)),
    Case("I11", "frozen viewers",
         tests=("tests/api/test_events.py::test_frozen_viewers_hinder_nobody_and_the_server_still_ends",
                "tests/api/test_events.py::test_the_seventeenth_gets_503")),
]  # fmt: skip
