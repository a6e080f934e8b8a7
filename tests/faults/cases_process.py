"""F and I: signals, restarts and reloads, under load."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cases_engine import ARMED
from cases_http import SLOW, SLOWLY
from harness import PATIENCE, SLOTS, Setting, Watched
from table import LOOPS, Act, Case, body

from tests.support import in_background, wait_until
from tests.support.servers import Answer, read_answer

MOCK = Setting(mock=True)  # for repetitions: without torch, a process begins sooner
INT, QUIT, TERM = signal.SIGINT, signal.SIGQUIT, signal.SIGTERM
BROKEN = (OSError, http.client.HTTPException)


@contextlib.contextmanager
def load(server: Watched, threads: int = 4) -> Iterator[list[Answer | None]]:
    """Ask without end meanwhile; the list gets each answer, and None for a connection that broke."""
    answers: list[Answer | None] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                answers.append(server.ask("/inference", body("/inference", tokens=20, temperature=0)))
            except BROKEN:
                answers.append(None)
            if answers[-1] is None or answers[-1].status != 200:
                done.wait(0.05)  # as a client that comes again would

    with contextlib.ExitStack() as stack:
        for _ in range(threads):
            stack.enter_context(in_background(ask))
        stack.callback(done.set)
        yield answers


def texts(answers: list[Answer | None]) -> set[str]:
    return {a.json["completion"] for a in answers if a is not None and a.status == 200}


def terminate(server: Watched) -> None:
    """Who is here gets its answer, who comes is refused at once, and the server ends well."""
    before = server.taken_in()
    with server.begin("/inference", SLOWLY):  # so that the server is still there for the newcomer
        sent = [server.begin("/inference", body("/inference", tokens=60, seed=i)) for i in range(server.places - 8)]
        wait_until(lambda: server.taken_in() > before + len(sent))
        server.process.terminate()
        wait_until(lambda: not server.is_ready())
        newcomer = server.ask("/inference", body("/inference"))
    assert (newcomer.status, newcomer.headers["Retry-After"]) == (503, "1")
    assert {read_answer(sock).status for sock in sent} == {200}
    for sock in sent:
        sock.close()
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.output()


def all_are_told_of_the_end(server: Watched, end: Callable[[], None]) -> None:
    """Fill the server, end it, and hold every answer to be an error in its own form: a 503, or a stream's last event."""
    with contextlib.ExitStack() as stack:
        many = body("/inference", "SLOWLY", 900)
        sent = [stack.enter_context(server.begin("/inference", many)) for _ in range(SLOTS + 4)]
        stream = stack.enter_context(server.begin("/inference", body("/inference", "SLOWLY", 900, stream=True)))
        wait_until(server.is_full)
        said = len(server.output())  # before are the tracebacks of armed faults, which may be written late
        end()
        answers = [read_answer(sock) for sock in sent]
        streamed = b"".join(iter(lambda: stream.recv(65536), b""))
    assert {answer.status for answer in answers} == {503}
    assert {answer.json["error"]["type"] for answer in answers} == {"unavailable_error"}
    assert b"unavailable_error" in streamed
    assert b"[DONE]" not in streamed
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.output()[said:]


def signals(*numbers: int, to_all: bool = False, at_once: bool = False) -> Act:
    """Return the act that ends the server by these signals, to its master or, as a terminal does, to the worker too.

    Before the last one the server has begun to drain, unless all come `at_once`.
    """

    def act(server: Watched) -> None:
        pids = (server.process.pid, server.worker) if to_all else (server.process.pid,)

        def end() -> None:
            for i, number in enumerate(numbers):
                if i and not at_once:
                    wait_until(lambda: not server.is_ready() and master_has_begun(server))
                for pid in pids:
                    os.kill(pid, number)

        all_are_told_of_the_end(server, end)
        assert_port_is_free(server)

    return act


def master_has_begun(server: Watched) -> bool:
    """Whether the master has closed its listening socket: until then a second signal could be one with the first."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    handovers = 2 if server.front_ends else 1  # of two sockets each
    try:
        return sum(os.readlink(fd).startswith("socket:") for fd in folder.iterdir()) == 2 * handovers
    except FileNotFoundError:  # a file was closed between its listing and its reading: look again
        return False


def ends_by(number: int) -> Act:
    """Return the act that ends the server by a signal while somebody runs."""

    def act(server: Watched) -> None:
        before = server.taken_in()
        sock = server.begin("/inference", body("/inference", tokens=40))
        wait_until(lambda: server.taken_in() > before)
        server.process.send_signal(number)
        assert server.process.wait(60) == 0
        sock.close()
        assert "Traceback" not in server.output()
        assert_port_is_free(server)

    return act


def assert_port_is_free(server: Watched) -> None:
    def is_free() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", server.port)) != 0

    wait_until(is_free, PATIENCE)


def kills(times: int) -> Act:
    """Return the act that kills the worker so many times under load; who comes again is answered in the end."""

    def act(server: Watched) -> None:
        finished: list[int] = []
        done = threading.Event()

        def client() -> None:
            while not done.is_set():
                ask_until_answered(server)
                finished.append(1)

        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(in_background(client))
            stack.callback(done.set)
            for _ in range(times):
                old, before = server.worker, len(finished)
                wait_until(lambda: len(finished) > before + 4, 60)  # noqa: B023
                os.kill(old, signal.SIGKILL)
                wait_until(lambda: server.has_new_worker(old), 120)  # noqa: B023

    return act


def ask_until_answered(server: Watched) -> None:
    """Come again while the connection breaks or the server is not ready: no other answer is expected."""
    for _ in range(2000):
        with contextlib.suppress(*BROKEN):
            answer = server.ask("/inference", body("/inference", tokens=20, temperature=0))
            if answer.status == 200:
                assert answer.json["num_tokens"] == 20
                return
            assert answer.status in (429, 503), answer.body
        time.sleep(0.05)
    raise AssertionError("nobody answered")


def kill_the_master(server: Watched) -> None:
    worker = server.worker
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), PATIENCE)
    assert_port_is_free(server)


def reloads(times: int) -> Act:
    """Return the act that reloads so often under load: accepted requests are answered, and nothing is left behind."""

    def act(server: Watched) -> None:
        held = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        for _ in range(times):
            old = server.worker
            with load(server) as answers:
                wait_until(lambda: len(answers) > 4)
                server.process.send_signal(signal.SIGHUP)
                wait_until(lambda: server.has_new_worker(old), 120)  # noqa: B023
                seen = len(answers)
                wait_until(lambda: len(answers) > seen + 4)  # noqa: B023
            assert {a and a.status for a in answers} <= {200, 503}
            assert len(texts(answers)) == 1
        # What the last two configurations with front ends share is closed at the next reload: 3 descriptors for each.
        more = 3 + 6 * bool(server.front_ends)
        assert abs(len(os.listdir(f"/proc/{server.process.pid}/fd")) - held) <= more

    return act


CASES = [
    Case("F1", "INT under load", ends_by(signal.SIGINT), ends=True, quick=False),
    Case("F1", "QUIT under load", ends_by(signal.SIGQUIT), ends=True, quick=False,
         tests=("tests/launch/test_server.py::test_ctrl_c_ends_it_too",)),
    Case("F1", "INT to master and worker", signals(INT, to_all=True),
         setting=ARMED, ends=True, quick=False),
    Case("F2", "starts that cannot work",
         tests=("tests/launch/test_launches.py::test_what_cannot_work_is_refused_in_one_line",
                "tests/launch/test_launches.py::test_weights_that_are_missing_or_broken_are_refused",
                "tests/launch/test_launches.py::test_a_port_in_use_is_refused",
                "tests/launch/test_config.py::test_too_few_open_files_are_refused_and_a_soft_limit_is_raised")),
    Case("F3", "ten reloads", reloads(10), setting=MOCK, quick=False, killed=True),
    Case("I1", "TERM under load", terminate, policies=LOOPS, setting=SLOW, ends=True),
    Case("I1", "TERM, then TERM", signals(TERM, TERM), setting=ARMED, ends=True),
    Case("I1", "TERM, then INT", signals(TERM, INT), setting=ARMED, ends=True, quick=False),
    Case("I1", "TERM, then QUIT", signals(TERM, QUIT), setting=ARMED, ends=True, quick=False),
    Case("I1", "TERM and INT at once", signals(TERM, INT, at_once=True), setting=ARMED, ends=True,
         quick=False),
    Case("I1", "TERM, then TERM, to master and worker", signals(TERM, TERM, to_all=True),
         setting=ARMED, ends=True, quick=False),
    Case("I1", "TERM, then INT, to master and worker", signals(TERM, INT, to_all=True),
         setting=ARMED, ends=True, quick=False),
    Case("I2", "TERM with little time",
         tests=("tests/api/test_cancel.py::test_who_outlasts_the_drain_is_told",)),
    Case("I3", "the worker killed", kills(1), killed=True),
    Case("I3", "the worker killed twenty times", kills(20), setting=MOCK, quick=False, killed=True),
    Case("I4", "the master killed", kill_the_master, ends=True, quick=False),
    Case("I5", "a reload under load", reloads(1), quick=False, killed=True),
]  # fmt: skip
