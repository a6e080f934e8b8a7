"""The thread that writes all streams: it never waits, and leaves to another thread what it cannot do at once."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from calls import connected
from dialects import Dialect, body_of, events, every_dialect
from flask import Flask
from gunicorn.config import Config as GunicornConfig
from gunicorn.workers.gthread import TConn

from api import socket_writer, streaming
from api.socket_writer import TURN_SECONDS, SocketWriter, Stream
from app import create_app
from config import Config
from launch.worker.handler_pool import HandlerPool
from launch.worker.worker import Worker
from serving.inference import InferenceError
from serving.wakeup import Wakeup
from tests.support import in_background, wait_until
from tests.support.fakes import FakeModel, fake_engine
from tests.support.servers import unchunked


class Source:
    """Bytes to send, and how many of them have been read; with `last` the stream ends when all are."""

    blocked_since: float | None = None

    def __init__(self, ready: tuple[bytes, ...], paced: bool, ends_at: float) -> None:
        self.ready, self.paced, self.ends_at = list(ready), paced, ends_at
        self.wakeup = None if paced else Wakeup()
        self.seen = 0
        self.reads = 0
        self.last = self.ended = self.is_behind = False
        self.error: Exception | None = None

    def read(self) -> bytes:
        self.reads += 1
        if self.error is not None:
            raise self.error
        begin, self.seen = self.seen, len(self.ready)
        self.ended = self.last
        return b"".join(self.ready[begin : self.seen])


class Open:
    """A stream in the writer's hands, and the client at its other end."""

    def __init__(
        self,
        writer: SocketWriter,
        *ready: bytes,
        paced: bool = False,
        head: bytes | None = b"",
        ends_at: float = math.inf,
    ) -> None:
        self.writer, self.source = writer, Source(ready, paced, ends_at)
        self.sock, self.client = socket.socketpair()
        self.client.settimeout(60)
        self.ends: list[bool] = []
        self.threads: list[threading.Thread] = []
        self.stream = Stream(self.source, self.sock, True, lambda: head, self.ends.append, self._in_thread)
        writer.take(self.stream)

    def _in_thread(self, task: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=task, daemon=True))
        self.threads[-1].start()

    def step(self, data: bytes) -> None:
        self.source.ready.append(data)
        self.writer.observe("a step", [])

    def close(self) -> None:
        self.source.last = True
        self.client.close()
        self.writer._wake(self.stream)
        wait_until(lambda: not self.stream.is_ready)
        for thread in self.threads:
            thread.join(60)
        self.sock.close()


def received(one: Open, wanted: bytes) -> bytes:
    """Wait until a client has got this in whole chunks; return the chunks."""
    got = b""
    while not (got.endswith(b"\r\n") and len(unchunked(got)) >= len(wanted)):
        got += one.client.recv(10_000)
    assert unchunked(got) == wanted
    return got


@pytest.fixture
def opened() -> Iterator[Any]:
    started: list[Open] = []

    def start(writer: SocketWriter, *ready: bytes, **options: Any) -> Open:
        started.append(Open(writer, *ready, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_each_slow_step_is_written_at_once_as_a_chunk(opened: Any) -> None:
    one = opened(SocketWriter(interval=0.0))
    for word in (b"one", b"two", b"three"):
        one.step(word)
        assert unchunked(one.client.recv(100)) == word
    assert not one.threads


def test_steps_too_fast_for_the_cost_of_writing_are_written_together(opened: Any) -> None:
    now = [0.0]
    one = opened(SocketWriter(interval=0.05, share=0.0, clock=lambda: now[0]))
    for _ in range(100):
        one.step(b"x")
    now[0] = 0.05
    got = received(one, b"x" * 100)
    assert got.count(b"\r\n") / 2 < 10


def test_what_was_there_before_the_stream_was_taken_waits_for_no_step(opened: Any) -> None:
    writer = SocketWriter()
    opened(writer)
    one = opened(writer, b"early", head=b"HEAD ")
    assert one.client.recv(100) == b"HEAD 5\r\nearly\r\n", "the head goes with the first bytes"


def test_a_wakeup_waits_for_no_step_and_for_no_interval(opened: Any) -> None:
    one = opened(SocketWriter(interval=60.0, share=0.0))
    for _ in range(3):
        one.step(b"x")
    one.source.last = True
    one.source.wakeup.notify()
    wait_until(lambda: one.ends == [True])
    assert one.client.recv(100).endswith(b"\r\n0\r\n\r\n")
    assert one.source.wakeup.resume is None, "no cycle is left to the collector"


def test_a_stream_is_read_at_its_own_end_and_now_and_then_without_a_step(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    one = opened(SocketWriter(clock=lambda: now[0]), ends_at=0.02)
    wait_until(lambda: one.source.reads)
    one.source.last = True
    reads, now[0] = one.source.reads, 0.02
    wait_until(lambda: one.ends == [True])
    assert one.source.reads == reads + 1
    monkeypatch.setattr(socket_writer, "CHECK_SECONDS", 0.01)
    other = opened(SocketWriter())
    wait_until(lambda: other.source.reads > 3)


def test_a_stream_that_has_not_begun_is_not_read_after_each_step(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_writer, "CHECK_SECONDS", 60.0)
    writer = SocketWriter(interval=0.0)
    waiting, running = opened(writer), opened(writer)
    for _ in range(10):
        running.step(b"x")
        received(running, b"x")
    assert waiting.source.reads <= 2, "when it was taken, and in the first pass"
    waiting.step(b"first")
    waiting.source.wakeup.notify()
    received(waiting, b"first")


def test_a_stream_that_another_process_answers_is_left_alone(opened: Any) -> None:
    writer = SocketWriter()
    kept, other = opened(writer, b"lost", head=None), opened(writer, b"other")
    assert unchunked(other.client.recv(100)) == b"other"
    kept.client.setblocking(False)
    with pytest.raises(BlockingIOError):
        kept.client.recv(1)
    assert not kept.ends


def test_a_reader_who_is_slow_gets_all_of_it_and_holds_up_nobody(opened: Any) -> None:
    writer = SocketWriter()
    slow, quick = opened(writer), opened(writer)
    much = bytes(range(256)) * 40_000
    slow.step(much)
    wait_until(lambda: slow.source.blocked_since is not None)
    reads = slow.source.reads
    for _ in range(3):
        slow.source.wakeup.notify()
        slow.step(b"more")
        quick.step(b"quick")
        received(quick, b"quick")
    assert slow.source.reads == reads, "nothing is read for a client that does not read"
    received(slow, much + b"more" * 3)
    assert slow.source.blocked_since is None
    slow.step(b"again")
    received(slow, b"again")
    slow.source.last = True
    slow.source.wakeup.notify()
    assert slow.client.recv(100) == b"0\r\n\r\n"
    assert len(slow.threads) == 1


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_client_who_has_gone_ends_its_stream_alone(opened: Any, is_slow: bool) -> None:
    writer = SocketWriter()
    one, fine = opened(writer), opened(writer)
    if is_slow:
        one.step(bytes(10_000_000))
        wait_until(lambda: one.threads)
    one.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.client.close()
    one.step(b"lost")
    wait_until(lambda: one.ends == [False])
    fine.step(b"fine")
    received(fine, b"fine")


def test_a_source_that_fails_ends_its_stream_alone(opened: Any) -> None:
    writer = SocketWriter()
    broken, fine = opened(writer), opened(writer)
    broken.source.error = ValueError("broken")
    broken.step(b"")
    wait_until(lambda: broken.ends == [False])
    reads = broken.source.reads
    fine.step(b"fine")
    received(fine, b"fine")
    assert broken.source.reads == reads, "it is not touched again"


def test_steps_and_wakeups_at_once_lose_nothing(opened: Any) -> None:
    """A stream that is woken again and again, beside steps that never rest, sends each byte once and in order."""
    writer = SocketWriter(interval=0.0)  # after each step
    one = opened(writer)
    words = [b"%d," % i for i in range(2000)]
    got = bytearray()

    def read() -> None:
        while data := one.client.recv(1 << 16):
            got.extend(data)

    def wake() -> None:
        while len(one.source.ready) < len(words):
            one.source.wakeup.notify()

    with in_background(read):
        with in_background(wake):
            for word in words:
                one.step(word)
        wait_until(lambda: one.source.seen == len(words))
        one.source.last = True
        one.source.wakeup.notify()
        wait_until(lambda: one.ends)
        one.sock.shutdown(socket.SHUT_WR)
    assert unchunked(bytes(got)) == b"".join(words)


def test_viewers_have_a_bounded_number_of_turns_and_streams_do_not_wait_for_them(opened: Any) -> None:
    writer = SocketWriter()
    began = time.perf_counter()
    viewers = [opened(writer, paced=True) for _ in range(16)]
    stream = opened(writer)
    for n in range(50):
        for viewer in viewers:
            viewer.source.ready.append(b"%d," % n)
        stream.step(b"%d," % n)
        received(stream, b"%d," % n)
        time.sleep(0.004)
    reads = sum(viewer.source.reads for viewer in viewers)
    most = 2 * (time.perf_counter() - began) / TURN_SECONDS + 2 + len(viewers)
    assert reads <= most, "80 a second and one at the beginning; 16 viewers x 50 steps are 800"
    for viewer in viewers:
        received(viewer, b"".join(b"%d," % n for n in range(50)))


def test_a_viewer_that_does_not_read_loses_its_turn_and_the_others_keep_theirs(opened: Any) -> None:
    writer = SocketWriter()
    frozen, reading = opened(writer, bytes(10_000_000), paced=True), opened(writer, paced=True)
    wait_until(lambda: frozen.source.reads == 1)
    for n in range(5):
        reading.source.ready.append(b"%d" % n)
        assert unchunked(reading.client.recv(100)) == b"%d" % n
    assert frozen.source.reads == 1
    assert frozen.source.blocked_since is not None


# ---------------------------------------------------------------- under the worker


class Served:
    """An app under the project's worker, without its main thread and with two handlers."""

    def __init__(self, app: Flask) -> None:
        self.finished: list[bool] = []
        self.sockets: list[socket.socket] = []
        self.service = app.extensions["service"]
        self.worker = Worker.__new__(Worker)
        self.worker.__dict__.update(
            alive=True, wsgi=app, cfg=GunicornConfig(), keepalived_conns=deque(), max_keepalived=9, log=logging,
            finish=self._finish, tpool=HandlerPool(2), _is_plain=True,
            method_queue=SimpleNamespace(defer=lambda call, *args: call(*args)),
        )  # fmt: skip

    def _finish(self, conn: TConn, keeps: bool) -> None:
        self.finished.append(keeps)
        if not keeps:
            with contextlib.suppress(OSError):  # the client has gone
                conn.sock.shutdown(socket.SHUT_WR)

    def ask(self, path: str, protocol: str = "HTTP/1.1", method: str = "POST", **fields: Any) -> socket.socket:
        """Return the client's end of a connection with this request."""
        body = self.worker.wsgi.json.dumps(fields)
        client, server = socket.socketpair()
        client.settimeout(60)
        self.sockets += client, server
        lines = (f"{method} {path} {protocol}", "Host: localhost", "Content-Type: application/json")
        client.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode())
        conn = TConn(self.worker.cfg, server, ("127.0.0.1", 1), ("127.0.0.1", 2))
        self.worker.tpool.submit(self.worker._serve, conn)
        return client


@pytest.fixture
def served(model: FakeModel) -> Iterator[Served]:
    app = create_app(Config(policy="dynamic", access_log=False))
    engine = fake_engine(model, max_batch_size=256, max_queue=256)
    served = Served(next(generator := connected(app, engine)))
    yield served
    next(generator, None)
    wait_until(lambda: len(served.finished) == len(served.sockets) / 2)
    for sock in served.sockets:
        sock.close()


def read(client: socket.socket, *until: bytes) -> bytes:
    """Read an answer that has begun until it has all of these; without any to its end."""
    got, chunk = b"", b"-"
    while chunk and not (all(part in got for part in until) if until else (b"\r\n" + got).endswith(b"\r\n0\r\n\r\n")):
        chunk = client.recv(1 << 16)
        got += chunk
    return got


def split(answer: bytes) -> tuple[str, str]:
    """Return head and body of a whole answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode(), (unchunked(body) if b"chunked" in head else body).decode()


@every_dialect
@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/1.0"])
def test_a_stream_says_the_same_whoever_writes_it(served: Served, dialect: Dialect, protocol: str) -> None:
    asked = body_of(dialect, limit=60, stream=True)
    by_handler = served.worker.wsgi.test_client().post(dialect.path, json=asked)
    client = served.ask(dialect.path, protocol, **asked)
    head, body = split(read(client))
    for text in (by_handler.get_data(as_text=True), body):
        found = dialect.read(events(text))
        assert (found.text, found.tokens) == (("abcdefghijklmnopqrstuvwxyz" * 3)[:60], 60)
    assert head.startswith(f"{protocol} 200 OK\r\n")
    wait_until(lambda: served.finished == [protocol == "HTTP/1.1"])


def test_open_streams_hold_no_thread_and_all_begin(
    served: Served, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 streams that start at once in front of two handlers all have a token before the last of them has a second."""
    monkeypatch.setattr(streaming, "SILENCE", 60.0)
    go = threading.Event()
    model.before = lambda plan: go.wait(60) and None if all(seq.output_ids for seq in plan.sequences) else None
    model.gate.clear()
    clients = [served.ask("/inference", prompt="hi", num_tokens=5, stream=True) for _ in range(256)]
    wait_until(lambda: served.service.registry.open == 256)
    model.gate.set()
    for client in clients:
        read(client, b'data: {"text":"a')
    assert served.service.socket_writer.open == 256
    go.set()
    assert all(read(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for client in clients)
    wait_until(lambda: served.finished == [True] * 256)


def test_a_stream_whose_client_leaves_is_canceled(served: Served, model: FakeModel) -> None:
    go = threading.Event()
    model.before = lambda plan: go.wait(60) and None if plan.sequences[0].output_ids else None
    client = served.ask("/inference", prompt="hi", num_tokens=1000, stream=True)
    read(client, b'"text":"a"')
    client.close()
    wait_until(lambda: served.service.registry.find(next(iter(served.service.registry._open)))["finish_reason"])
    go.set()
    wait_until(lambda: served.finished == [False])
    wait_until(lambda: not (served.service.engine.manager.running or served.service.registry.open))
    assert served.service.socket_writer.open == 0


def test_a_stream_that_fails_in_the_middle_ends_with_the_error_and_without_done(
    served: Served, model: FakeModel
) -> None:
    go = threading.Event()
    model.before = lambda plan: go.wait(60) and None if plan.sequences[0].output_ids else None
    client = served.ask("/v1/completions", prompt="hi", max_tokens=9, stream=True)
    read(client, b'"text":"a"')
    for context in served.service.registry._open.values():
        context.end(InferenceError("cancelled", "the request was cancelled"))
    rest = unchunked(read(client)).decode()
    go.set()
    assert '"type":"cancelled"' in rest
    assert "[DONE]" not in rest
    wait_until(lambda: served.finished == [True])


def test_a_silent_stream_is_pinged_under_the_worker(
    served: Served, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SILENCE", 0.01)
    monkeypatch.setattr(socket_writer, "CHECK_SECONDS", 0.01)
    model.gate.clear()
    client = served.ask("/inference", prompt="hi", num_tokens=3, stream=True)
    read(client, streaming.PING + b"\r\n8\r\n" + streaming.PING)
    model.gate.set()
    assert b"[DONE]" in read(client)


def test_head_of_a_stream_has_no_body_and_no_writer(served: Served) -> None:
    client = served.ask("/events", method="HEAD")
    assert read(client, b"\r\n\r\n").endswith(b"\r\n\r\n")
    wait_until(lambda: served.finished == [True])
    assert not served.service.feed.viewers


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/1.0"])
def test_a_viewer_is_a_stream_that_ends_with_the_feed(served: Served, protocol: str) -> None:
    client = served.ask("/events?detail=1", protocol, method="GET")
    assert "event: state" in read(client, b'"epoch"').decode()
    served.service.feed.close()
    read(client)
    wait_until(lambda: served.finished == [protocol == "HTTP/1.1"])
    assert not served.service.feed.viewers


@pytest.mark.parametrize("own", [True, False])
def test_a_late_stream_ends_under_the_worker(
    served: Served, model: FakeModel, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own limit ends it with the tokens it has, the server's with an error; no step is needed for either."""
    monkeypatch.setattr(streaming, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(socket_writer, "CHECK_SECONDS", 60.0 if own else 0.01)
    ended = threading.Event()
    model.before = lambda plan: ended.wait(60) and None if plan.sequences[0].output_ids else None
    served.service.config = replace(served.service.config, request_timeout=60.0 if own else 0.2)
    fields = {"timeout_s": 0.2} if own else {}
    rest = read(served.ask("/v1/completions", prompt="hi", max_tokens=9, stream=True, **fields))
    ended.set()
    assert (b'"stop_reason":"timeout"' in rest, b"[DONE]" in rest) == (own, own)
    assert (b"timeout_error" in rest) is not own
