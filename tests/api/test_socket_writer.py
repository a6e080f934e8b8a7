"""The thread that writes to all lent sockets: it never waits, and leaves to a handler what it cannot do at once."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from dialects import Dialect, body_of, events, every_dialect

from api import streaming
from api.socket_writer import TURN_SECONDS, LentSocket, SocketWriter
from app import create_app
from config import Config
from serving.wakeup import Wakeup
from tests.support import in_background, wait_until
from tests.support.fakes import FakeModel, fake_engine
from tests.support.servers import unchunked


class Source:
    """Bytes to send, and how many of them have been read."""

    def __init__(self, *ready: bytes) -> None:
        self.ready = list(ready)
        self.seen = 0
        self.reads = 0
        self.error: Exception | None = None

    @property
    def unread(self) -> int:
        return len(self.ready) - self.seen

    def read(self) -> bytes:
        self.reads += 1
        if self.error is not None:
            raise self.error
        begin, self.seen = self.seen, len(self.ready)
        return b"".join(self.ready[begin : self.seen])


class Handler:
    """A handler that lends its socket and sleeps, and the client at the other end."""

    def __init__(self, writer: SocketWriter, *ready: bytes, paced: bool = False) -> None:
        self.writer, self.source, self.wakeup = writer, Source(*ready), Wakeup()
        self.sock, self.client = socket.socketpair()
        self.client.settimeout(20)
        self.lent = LentSocket(writer, self.sock, self.wakeup, self.source, paced)
        self.raised: list[Exception] = []
        self.thread = threading.Thread(target=self._sleep, daemon=True)
        self.thread.start()

    def _sleep(self) -> None:
        try:
            self.lent.lend(20)
            self.lent.finish()
        except Exception as error:
            self.raised.append(error)

    def step(self, data: bytes) -> None:
        self.source.ready.append(data)
        self.writer.observe("a step", [])

    def wake(self) -> None:
        self.wakeup.notify()
        self.thread.join(20)
        assert not self.thread.is_alive()

    def close(self) -> None:
        self.wakeup.notify()
        self.client.close()
        self.thread.join(20)
        self.sock.close()


def received(handler: Handler, wanted: bytes) -> bytes:
    """Wait until a handler's client has got this in whole chunks; return the chunks."""
    got = b""
    while not (got.endswith(b"\r\n") and len(unchunked(got)) >= len(wanted)):
        got += handler.client.recv(10_000)
    assert unchunked(got) == wanted
    return got


@pytest.fixture
def handlers() -> Iterator[Any]:
    started: list[Handler] = []

    def start(writer: SocketWriter, *ready: bytes, paced: bool = False) -> Handler:
        started.append(Handler(writer, *ready, paced=paced))
        return started[-1]

    yield start
    for handler in started:
        handler.close()


def test_each_slow_step_is_written_at_once_as_a_chunk(handlers: Any) -> None:
    hours = iter(range(10**6))
    handler = handlers(SocketWriter(clock=lambda: float(next(hours))))
    for word in (b"one", b"two", b"three"):
        handler.step(word)
        assert unchunked(handler.client.recv(100)) == word
    assert handler.thread.is_alive(), "the handler sleeps all the while"


def test_steps_too_fast_for_the_cost_of_writing_are_written_together(handlers: Any) -> None:
    now = [0.0]
    handler = handlers(SocketWriter(interval=0.05, share=0.0, clock=lambda: now[0]))
    for _ in range(100):
        handler.step(b"x")
    now[0] = 0.05
    got = received(handler, b"x" * 100)
    assert got.count(b"\r\n") / 2 < 10


def test_what_was_there_before_the_stream_was_lent_waits_for_no_step(handlers: Any) -> None:
    writer = SocketWriter()
    other = handlers(writer)
    handler = handlers(writer, b"early")
    assert unchunked(handler.client.recv(100)) == b"early"
    assert other.thread.is_alive()


def test_a_reader_who_is_slow_gets_all_of_it_and_holds_up_nobody(handlers: Any) -> None:
    writer = SocketWriter()
    slow, quick = handlers(writer), handlers(writer)
    much = bytes(range(256)) * 40_000
    slow.step(much)
    assert slow.client.recv(1, socket.MSG_PEEK), "its write is over"
    quick.step(b"quick")
    assert unchunked(quick.client.recv(100)) == b"quick"
    got = b""
    while len(got) < len(much) + 10:
        got += slow.client.recv(1 << 20)
    assert unchunked(got) == much
    slow.thread.join(20)
    assert not slow.raised


def test_a_client_who_has_gone_is_the_handlers_to_deal_with(handlers: Any) -> None:
    handler = handlers(SocketWriter())
    linger = struct.pack("ii", 1, 0)
    handler.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.client.close()
    handler.step(b"lost")
    handler.thread.join(20)
    assert isinstance(handler.raised[0], OSError)


def test_what_reading_raises_is_raised_in_the_handler(handlers: Any) -> None:
    writer = SocketWriter()
    broken, fine = handlers(writer), handlers(writer)
    broken.source.error = ValueError("broken")
    broken.step(b"")
    broken.thread.join(20)
    assert broken.raised == [broken.source.error]
    fine.step(b"fine")
    assert unchunked(fine.client.recv(100)) == b"fine"


def test_a_stream_that_is_no_longer_lent_is_not_touched(handlers: Any) -> None:
    writer = SocketWriter()
    awake, asleep = handlers(writer), handlers(writer)
    awake.wake()
    reads = awake.source.reads
    awake.step(b"mine")
    asleep.step(b"yours")
    assert unchunked(asleep.client.recv(100)) == b"yours"
    assert (awake.source.reads, awake.source.unread) == (reads, 1)


def test_writing_and_waking_at_once_lose_nothing(handlers: Any) -> None:
    """A handler that lends again and again, beside a writer that never rests, sees each byte once and in order."""
    writer = SocketWriter(interval=0.0)  # after each step
    handler = handlers(writer)
    words = [b"%d," % i for i in range(2000)]
    got = bytearray()

    def read() -> None:
        while data := handler.client.recv(1 << 16):
            got.extend(data)

    with in_background(read):
        for i, word in enumerate(words):
            handler.step(word)
            if i % 20 == 0:
                handler.wake()
                handler.thread = threading.Thread(target=handler._sleep, daemon=True)
                handler.thread.start()
        wait_until(lambda: not handler.source.unread)
        handler.wake()
        handler.sock.shutdown(socket.SHUT_WR)
    assert unchunked(bytes(got)) == b"".join(words)
    assert not handler.raised


def test_viewers_have_a_bounded_number_of_turns_and_streams_do_not_wait_for_them(handlers: Any) -> None:
    writer = SocketWriter()
    began = time.perf_counter()
    viewers = [handlers(writer, paced=True) for _ in range(16)]
    stream = handlers(writer)
    for n in range(50):
        for viewer in viewers:
            viewer.source.ready.append(b"%d," % n)
        stream.step(b"%d," % n)
        assert unchunked(stream.client.recv(100)) == b"%d," % n
        time.sleep(0.004)
    reads = sum(viewer.source.reads for viewer in viewers)
    assert reads <= 2 * (time.perf_counter() - began) / TURN_SECONDS + 2, "80 a second; 16 viewers x 50 steps are 800"
    for viewer in viewers:
        received(viewer, b"".join(b"%d," % n for n in range(50)))


def test_a_viewer_that_does_not_read_loses_its_turn_and_the_others_keep_theirs(handlers: Any) -> None:
    writer = SocketWriter()
    frozen, reading = handlers(writer, bytes(10_000_000), paced=True), handlers(writer, paced=True)
    wait_until(lambda: frozen.source.reads == 1)
    for n in range(5):
        reading.source.ready.append(b"%d" % n)
        assert unchunked(reading.client.recv(100)) == b"%d" % n
    assert frozen.source.reads == 1
    assert frozen.thread.is_alive(), "its handler waits for it"


def stream(dialect: Dialect, n: int, protocol: str) -> tuple[str, bool]:
    """Return a stream as a client sees it who is served by gunicorn, and whether its handler sent all of it alone."""
    model = FakeModel()
    app = create_app(Config(policy="dynamic", access_log=False), fake_engine(model))
    writer = app.extensions["service"].socket_writer
    server, client = socket.socketpair()
    whole, sent = b"", 0

    def hold(plan: Any) -> None:
        """Wait until the socket is lent, and until the writer has written."""
        if len(plan.sequences[0].output_ids) == 1:
            wait_until(lambda: writer._streams)
        elif len(plan.sequences[0].output_ids) == n // 2:
            wait_until(lambda: len(client.recv(1 << 16, socket.MSG_PEEK)) > sent)

    model.before = hold
    is_chunked = protocol == "HTTP/1.1"
    with server, client:
        client.settimeout(20)
        asked = body_of(dialect, limit=n, stream=True)
        environ = {"gunicorn.socket": server, "SERVER_PROTOCOL": protocol}
        reply = app.test_client().post(dialect.path, json=asked, environ_overrides=environ)
        for piece in filter(None, reply.iter_encoded()):
            chunk = b"%X\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece
            sent += len(chunk)
            server.sendall(chunk)
        server.shutdown(socket.SHUT_WR)
        while data := client.recv(1 << 16):
            whole += data
        reply.close()
    app.extensions["service"].engine.manager.stop()
    return (unchunked(whole) if is_chunked else whole).decode(), sent == len(whole)


@every_dialect
def test_a_stream_says_the_same_whoever_writes_it(dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHECK_SECONDS", "SILENCE"):  # or a handler would look for itself
        monkeypatch.setattr(streaming, name, 60.0)
    for protocol in ("HTTP/1.1", "HTTP/1.0"):
        text, by_handler = stream(dialect, 60, protocol)
        found = dialect.read(events(text))
        assert (found.text, found.tokens) == (("abcdefghijklmnopqrstuvwxyz" * 3)[:60], 60)
        assert not by_handler
