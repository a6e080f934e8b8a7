"""D: the queue, time, and clients that go away or stop reading."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cases_http import SLOW, SLOWLY
from harness import MB, PATIENCE, SLOTS, Setting, Watched
from table import LOOPS, Case, body

from tests.support import wait_until

IMPATIENT = Setting(environment={"EB_SEND_TIMEOUT": "1", "EB_RECEIVE_TIMEOUT": "1"})


def reset(sock: socket.socket) -> None:
    """Close with an RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def overload(server: Watched) -> None:
    sent = [body("/inference", "SLOWLY", 2, seed=i) for i in range(300)]
    socks = [server.connect() for _ in sent]
    for sock, each in zip(socks, sent):
        sock.sendall(b"POST /inference HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(each) + each)  # fmt: skip
    answers = server.collect(socks)
    accepted = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 429]
    assert len(accepted) >= server.places
    assert len(accepted) + len(refused) == 300
    assert refused
    assert {answer.json["num_tokens"] for answer in accepted} == {2}
    assert all(1 <= int(answer.headers["Retry-After"]) <= 60 for answer in refused)


def who_waits_too_long_never_runs(server: Watched) -> None:
    taken_in = server.taken_in()
    running = [server.begin("/inference", SLOWLY) for _ in range(SLOTS)]
    wait_until(lambda: server.taken_in() >= taken_in + SLOTS)
    before = server.figures()["requests-timed-out"]
    answer = server.ask("/inference", body("/inference"), X_Queue_Timeout="0.2", X_Request_Id="late")
    assert answer.status == 504
    assert answer.json["error"]["type"] == "timeout_error"
    told = server.told("late")
    assert (told["scheduled_at"], told["output_tokens"], told["iterations"]) == (None, 0, None)
    assert server.figures()["requests-timed-out"] == before + 1
    hang_up(server, running)


def hang_up(
    server: Watched, socks: list[socket.socket], act: Callable[[socket.socket], None] = socket.socket.close
) -> None:
    """Leave requests that the server has read, and wait until nobody is there any more."""
    for sock in socks:
        act(sock)
        server.ledger.leave()
    wait_until(server.is_at_rest, PATIENCE)


def who_stops_reading_is_dropped(server: Watched) -> None:
    """More is sent than the buffers of both sides hold, so that the server's next write would wait for ever.

    12 answers with the scores of 900 tokens are in memory at once, and the heaps keep their pages: the process grows by
    23 MB the first time and by nothing from the fifth time on.
    """
    many = body("/v1/completions", tokens=900, n=4, logprobs=5, stream=True, ignore_eos=True)
    readers = 1 if server.policy == "nobatch" else 3  # there, who asks next waits until all their answers are computed
    frozen = [server.begin("/v1/completions", many, receive_buffer=2048) for _ in range(readers)]
    wait_until(lambda: server.figures()["requests-running"] > 0)
    assert server.ask("/inference", body("/inference", tokens=9)).status == 200
    wait_until(server.is_at_rest)
    server.ledger.leave(len(frozen))
    for sock in frozen:
        sock.close()


def readers_leave_streams(server: Watched) -> None:
    sent = body("/inference", "SLOWLY", 300, stream=True)
    for n in (0, 1, 3):
        sock = server.begin("/inference", sent, f"left-{n}")
        with sock.makefile("rb") as lines:
            while n:
                n -= lines.readline().startswith(b"data: ")
        wait_until(lambda: server.figures()["http"]["received"] > 0 and not server.is_at_rest())
        hang_up(server, [sock], reset)
    with server.begin("/inference", body("/inference", tokens=3, stream=True)) as sock:
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    assert data.rstrip(b"\r\n0").endswith(b"data: [DONE]")
    server.ledger.note("POST", "/inference", 200)


def long_and_short_both_finish(server: Watched) -> None:
    for first, rest in ((100, 5), (5, 100)):
        lengths = [first, *[rest] * 5]
        answers = server.collect([server.begin("/inference", body("/inference", tokens=n)) for n in lengths])
        assert [answer.json["num_tokens"] for answer in answers] == lengths


def a_free_slot_is_used_at_once(server: Watched) -> None:
    """Others hold all slots until the last has come: then eight begin at once, and four as soon as one has ended."""
    ids = [f"slot-{i}" for i in range(SLOTS + 4)]
    running = [server.begin("/inference", SLOWLY) for _ in range(SLOTS)]
    wait_until(server.is_full)
    with ThreadPoolExecutor(len(ids)) as pool:
        sent = [
            pool.submit(server.ask, "/inference", body("/inference", tokens=40 + 3 * i), X_Request_Id=id)
            for i, id in enumerate(ids)
        ]
        wait_until(lambda: all(map(server.knows, ids)))
        hang_up(server, running)
        assert {each.result().status for each in sent} == {200}
    told = [server.told(id)["iterations"] for id in ids]
    late = sorted(first for first, _ in told)[SLOTS:]
    early = sorted(last for _, last in told)[: len(late)]
    assert late == [last + 1 for last in early]


CASES = [
    Case("D1", "300 at once where 32 may come in", overload, policies=LOOPS, setting=SLOW),
    Case("D2", "a wait that is too long", who_waits_too_long_never_runs, policies=LOOPS, setting=SLOW),
    Case("D3", "clients that go, at every stage",
         tests=("tests/api/test_cancel.py::test_a_client_that_goes_frees_its_place_in_queue_and_batch",)),
    Case("D4", "200 that give up",
         tests=("tests/api/test_cancel.py::test_two_hundred_that_go_in_the_middle_leave_nothing_behind",)),
    Case("D5", "a reader that stops", who_stops_reading_is_dropped, policies=LOOPS, setting=IMPATIENT, quick=False,
         growth=40 * MB),
    Case("D6", "readers that leave before, within and after", readers_leave_streams, setting=SLOW,
         tests=("tests/api/test_dialects.py::test_who_leaves_a_stream_frees_its_place",)),
    Case("D7", "one long among many short, and the reverse", long_and_short_both_finish, policies=LOOPS, setting=SLOW),
    Case("D8", "a slot that falls free while others wait", a_free_slot_is_used_at_once, setting=SLOW),
]  # fmt: skip
