"""Servers with front ends: the same answers and limits as without, and what is left when a process is killed."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from scheduling.backlog import FITTED
from tests.launch.test_full_server import in_the_loop
from tests.support import wait_until
from tests.support.servers import Answer, Server, read_answer

pytestmark = pytest.mark.process

MOCK = ("dynamic", "--model", "mock:llm-mock@2", "--max-batch-size", "4")
SLOTS, QUEUE, FRONT_ENDS = 4, 8, 2
PLACES = SLOTS + QUEUE
JSON = {"Content-Type": "application/json"}
CHANGING = r'"(id|created|timings|time|client)":("[^"]*"|[\d.]+|\{[^}]*\})'
ENDLESS: dict[str, Any] = {"prompt": "x", "num_tokens": 1000, "ignore_eos": True}


def begin(server: Server, fields: Any, path: str = "/inference", id: str = "", **headers: str) -> socket.socket:
    """Send a request and return its connection."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    named = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(body)), **JSON, **headers}
    named |= {"X-Request-Id": id} if id else {}
    sock = socket.create_connection(("127.0.0.1", server.port), 60)
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    sock.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    return sock


def figures(server: Server) -> dict[str, Any]:
    result: dict[str, Any] = server.get("/stats").json
    return result


def books_add_up(server: Server) -> bool:
    """Whether each request that came was answered, and no page is held."""
    now = figures(server)
    answered = sum(n for name, n in now["http"].items() if name != "received")
    return bool(now["http"]["received"] == answered and now["engine"]["kv"]["pages_used"] == 0)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class FrontEnds(Server):
    """A server with front ends that carry requests; `engine` and `fronts` are the pids of its processes."""

    def __init__(self, log: Path, front_ends: int, *argv: str) -> None:
        super().__init__(log, *MOCK, "--front-ends", str(front_ends), *argv)
        self.front_ends = front_ends
        self.fronts: list[int] = []

    def wait(self, seconds: float = 90.0) -> FrontEnds:
        super().wait(seconds)
        self.settle(self.workers[0])
        return self

    def settle(self, engine: int = 0) -> None:
        """Wait until all processes are there and connected. Unless `engine` is given, it is the new one."""
        wait_until(lambda: len(self.workers) == 1 + self.front_ends)
        self.engine = engine or next(pid for pid in self.workers if pid not in self.fronts)
        self.fronts = [pid for pid in self.workers if pid != self.engine]
        wait_until(self.carry)

    def carry(self) -> bool:
        """Whether each front end keeps connections: one that is passed on is a descriptor of the engine's process."""
        processes = (self.engine, *self.fronts)
        before = [*map(descriptors, processes)]
        try:
            with ExitStack() as stack:
                for _ in range(4 * self.front_ends):
                    one = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)))
                    one.request("POST", "/inference", b'{"prompt": "x", "num_tokens": 1}', JSON)
                    if one.getresponse().status != 200:
                        return False
                passed_on, *kept = (now - then for now, then in zip(map(descriptors, processes), before))
                return passed_on <= 0 and all(n > 0 for n in kept)
        except (OSError, http.client.HTTPException):
            return False


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnds]:
    with (server := FrontEnds(tmp_path_factory.mktemp("fronts") / "log", FRONT_ENDS, "--max-queue", str(QUEUE))):
        yield server
        assert "Traceback" not in server.output()


@pytest.fixture
def server(running: FrontEnds) -> Iterator[FrontEnds]:
    """Return the server of this file, which must have all its places again afterwards."""
    wait_until(lambda: books_add_up(running))
    yield running
    all_places_are_there(running)


def fill(server: Server, stack: ExitStack) -> list[socket.socket]:
    """Take every place until the stack is closed."""
    socks = [stack.enter_context(begin(server, ENDLESS)) for _ in range(PLACES)]
    wait_until(lambda: in_the_loop(server) == PLACES)
    return socks


def all_places_are_there(server: Server) -> None:
    """Fill the server to its limit: who comes then is refused before its body is read."""
    wait_until(lambda: in_the_loop(server) == 0)
    with ExitStack() as stack:
        fill(server, stack)
        with begin(server, b"", **{"Content-Length": "1000"}) as late:
            refused = read_answer(late)
    assert (refused.status, int(refused.headers["Retry-After"]) >= 1) == (429, True)
    assert f"({PLACES} requests queued or running, this one adds 1, limit {PLACES})" in refused.json["error"]["message"]
    wait_until(lambda: books_add_up(server))


def requests() -> Iterator[tuple[str, bytes]]:
    """Give requests of all kinds: those that front ends carry, and those that they pass on."""
    for i in range(12):
        prompt, sampling = f"hello {i} the king of", {"seed": i, "temperature": i % 2}
        bodies: dict[str, list[dict[str, Any]]] = {
            "/inference": [
                {"prompt": prompt, "num_tokens": 5 + i, "top_k": 20 * (i % 3), **sampling},
                {"prompt": prompt, "num_tokens": 15, "stream": True, "program": "p", "timeout_s": 50, **sampling},
                {"prompt": "x" * 20_000, "num_tokens": 9},
                {"prompt": "", "num_tokens": 9},
            ],
            "/v1/completions": [
                {"prompt": prompt, "max_tokens": 30, "stop": ["e", "a"][: 1 + i % 2], "stream": i % 3 > 0, **sampling},
                {"prompt": prompt, "max_tokens": 6, "n": 1 + i % 3, "logprobs": (None, 2)[i % 2], **sampling},
                {"prompt": [prompt, "another"], "max_tokens": 4, "echo": i % 2 > 0, **sampling},
                {"prompt": prompt, "max_tokens": 4, "temperature": -1},
            ],
            "/v1/chat/completions": [{"messages": [{"role": "user", "content": prompt}], "max_tokens": 5, **sampling}],
            "/generate": [{"inputs": prompt, "parameters": {"max_new_tokens": 9, "seed": i, "do_sample": i % 2 > 0}}],
            "/generate_stream": [{"inputs": prompt, "parameters": {"max_new_tokens": 9, "seed": i}}],
        }
        for path, each in bodies.items():
            yield from ((path, json.dumps(body).encode()) for body in each)
    yield "/inference", b"{"
    yield "/inference", json.dumps({"prompt": "y", "num_tokens": 3}).encode() + b" " * 900_000
    yield "/inference", b"z" * 2_000_000


def text_of(answer: Answer) -> str:
    """Return what must not change: of a stream, how it ends and the text, which may come in other pieces."""
    body = answer.body.decode()
    if "data:" in body:
        events = [json.loads(line[5:]) for line in body.splitlines() if line.startswith(("data: {", "data:{"))]
        pieces = [[*event.get("choices", []), event.get("token") or event][0].get("text") or "" for event in events]
        return "".join(pieces) + body[-20:]
    return f"{answer.status} {re.sub(CHANGING, '', body)}"


def on_one_connection(server: Server) -> list[Any]:
    """Return statuses and texts of the answers to requests sent at once, of which front ends pass on some."""
    body = json.dumps({"prompt": "one", "num_tokens": 7, "temperature": 0}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    plain = b"POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    chunked = b"POST /inference HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    unknown = b"GET /requests/nobody HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = unknown.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), 60) as sock:
        sock.sendall(b"".join([plain, chunked, plain, unknown, plain, chunked, plain, last]))
        data = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    return re.findall(r'HTTP/1.1 (\d+)|"completion":"(.*?)"', data)


def all_answers(log: Path, front_ends: int) -> tuple[list[str], list[Any]]:
    """Return the answers to all requests, which have one line each in the access log, and those on one connection."""
    server, asked = FrontEnds(log, front_ends, "--model", "mock:llm-mock@50"), [*requests()]

    def ask(number: int) -> str:
        path, body = asked[number]
        return text_of(server.send("POST", path, body, **JSON, **{"X-Request-Id": f"asked-{number}"}))

    with server, ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(ask, range(len(asked)))]
        in_a_row = on_one_connection(server)
        wait_until(lambda: books_add_up(server))
        assert server.stop() == 0
    assert sorted(map(int, re.findall(r'"id":"asked-(\d+)"', server.output()))) == [*range(len(asked))]
    assert "Traceback" not in server.output()
    return answers, in_a_row


def test_answers_are_the_same_with_any_number_of_front_ends(tmp_path: Path) -> None:
    expected = all_answers(tmp_path / "0", 0)
    for front_ends in (1, 3):
        assert all_answers(tmp_path / str(front_ends), front_ends) == expected


def test_a_carried_request_is_known_and_cancelled_by_its_id_and_its_program_is_charged(server: FrontEnds) -> None:
    with begin(server, ENDLESS | {"program": "tale"}, id="mine") as sock:
        wait_until(lambda: server.get("/requests/mine").json.get("state") == "running")
        assert server.send("DELETE", "/requests/mine").json["state"] in ("cancelled", "running")
        assert read_answer(sock).status == 499
    told = server.get("/requests/mine").json
    assert (told["finish_reason"], told["program"]["name"], told["program"]["calls"]) == ("cancelled", "tale", 1)
    assert told["program"]["output_tokens"] > 0
    for _ in range(6):  # through both front ends
        with begin(server, {"prompt": "x", "num_tokens": 2, "session": "tour"}, id="last") as sock:
            assert read_answer(sock).status == 200
    assert server.get("/requests/last").json["program"]["calls"] == 6


def test_an_id_that_several_clients_have_sent_is_made_unique_in_their_answers(server: FrontEnds) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(begin(server, ENDLESS | {"num_tokens": 60}, id="same")) for _ in range(PLACES)]
        assert len({read_answer(sock).json["id"] for sock in socks}) == PLACES


def test_a_client_that_leaves_frees_its_place_and_is_logged_as_gone(server: FrontEnds) -> None:
    before = figures(server)["http"]
    with ExitStack() as stack:
        for i in range(PLACES):
            stack.enter_context(begin(server, ENDLESS | {"stream": i % 2 > 0}, id=f"left-{i}"))
        wait_until(lambda: in_the_loop(server) == PLACES)
    wait_until(lambda: books_add_up(server))
    assert figures(server)["http"]["cancelled"] == before["cancelled"] + PLACES
    wait_until(lambda: len(re.findall(r'"id":"left-.*"status":499', server.output())) == PLACES)


def test_own_limits_end_a_carried_request(server: FrontEnds) -> None:
    early = server.post("/inference", **ENDLESS, timeout_s=0.2).json
    assert (early["stop_reason"], early["finish_reason"]) == ("timeout", "length")
    body = json.dumps(ENDLESS).encode()
    late = server.send("POST", "/inference", body, **{"X-Request-Timeout": "0.2"})
    assert (late.status, late.json["error"]["type"]) == (504, "timeout_error")


def test_a_policy_that_estimates_is_asked_in_the_process_that_computes(server: FrontEnds) -> None:
    server.switch("dynamic+admission-control")

    def is_told() -> bool:
        with begin(server, {"prompt": "x", "max_tokens": FITTED, "stream": True}, "/v1/completions") as sock:
            return "X-Expected-Wait" in read_answer(sock).headers

    try:
        wait_until(is_told)
    finally:
        server.switch("dynamic")
    wait_until(server.carry)


def streamed(sock: socket.socket) -> str:
    """Return the text of a stream and how it ends."""
    with sock:
        return text_of(read_answer(sock))


def test_a_front_end_that_stands_still_hinders_nobody_and_goes_on(server: FrontEnds) -> None:
    fields = {"prompt": "x", "num_tokens": 60, "temperature": 0, "stream": True}
    expected = streamed(begin(server, fields))
    with ExitStack() as stack:
        socks = [stack.enter_context(begin(server, fields)) for _ in range(SLOTS)]
        assert all(sock.recv(1, socket.MSG_PEEK) for sock in socks)
        os.kill(server.fronts[0], signal.SIGSTOP)
        try:
            wait_until(lambda: in_the_loop(server) == 0)
            assert server.post(prompt="x", num_tokens=3).status == 200
        finally:
            os.kill(server.fronts[0], signal.SIGCONT)
        assert [streamed(sock) for sock in socks] == [expected] * len(socks)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_front_end_that_is_killed_takes_nobody_with_it_and_is_replaced(server: FrontEnds) -> None:
    with ExitStack() as stack:
        socks = fill(server, stack)
        held = [descriptors(pid) for pid in server.fronts]
        victim = server.fronts[held.index(max(held))]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: in_the_loop(server) < PLACES)
        wait_until(lambda: is_gone(victim))
        broken = len(select.select(socks, [], [], 0)[0])
        wait_until(lambda: in_the_loop(server) == PLACES - broken)
        assert broken > 0
        for _ in range(broken):  # their places are free
            stack.enter_context(begin(server, ENDLESS))
        wait_until(lambda: in_the_loop(server) == PLACES)
    server.settle(server.engine)
    assert victim not in server.fronts


def test_what_has_not_begun_is_answered_by_the_next_process_when_the_one_that_computes_is_killed(
    server: FrontEnds,
) -> None:
    fields: dict[str, Any] = {"prompt": "x", "num_tokens": 40, "temperature": 0}
    expected = server.post("/inference", **fields).json["completion"]
    with ExitStack() as stack:
        streams = [stack.enter_context(begin(server, ENDLESS | {"stream": True})) for _ in range(SLOTS)]
        assert all(sock.recv(1, socket.MSG_PEEK) for sock in streams)
        whole = [stack.enter_context(begin(server, fields)) for _ in range(QUEUE)]
        wait_until(lambda: in_the_loop(server) == PLACES)
        os.kill(server.engine, signal.SIGKILL)
        assert [read_answer(sock).json["completion"] for sock in whole] == [expected] * QUEUE
        assert all(b'"type":"unavailable_error"' in read_answer(sock).body for sock in streams)
    server.settle()


def act_beside_load(server: FrontEnds, act: Callable[[], None], tokens: int) -> list[Answer]:
    """Have as many requests as there are places; return their answers, which come while `act` is done or after it."""

    def accepted() -> int:
        """Return how many have been answered or are in the loop: who was only received may still be refused."""
        return int(figures(server)["requests"]) + in_the_loop(server)

    before = accepted()
    with ExitStack() as stack:
        fields = ENDLESS | {"num_tokens": tokens}
        socks = [stack.enter_context(begin(server, fields)) for _ in range(PLACES)]
        wait_until(lambda: accepted() >= before + PLACES)
        act()
        return [*map(read_answer, socks)]


def test_a_reload_finishes_what_was_accepted(server: FrontEnds) -> None:
    old = server.workers

    def reload() -> None:
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: all(map(is_gone, old)))

    assert {answer.status for answer in act_beside_load(server, reload, 100)} == {200}
    wait_until(lambda: len(server.workers) == 1 + FRONT_ENDS)
    server.settle(server.workers[0])


@pytest.mark.parametrize(("number", "tokens", "status"), [(signal.SIGTERM, 100, 200), (signal.SIGINT, 1000, 503)])
def test_all_processes_end_with_their_answers(number: int, tokens: int, status: int, tmp_path: Path) -> None:
    with (server := FrontEnds(tmp_path / "log", FRONT_ENDS, "--max-queue", str(QUEUE))):
        answers = act_beside_load(server, lambda: server.process.send_signal(number), tokens)
        assert {answer.status for answer in answers} == {status}
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.output()
